"""The grouped GEMM against float64 products of its dequantized operands, element by element, on both engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats.number_formats import FORMATS, MXFP4, WEIGHT_FORMATS, TokenFormat
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm.grouped_gemm import gemm_bytes, gemm_flops, grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.operands import find_tile
from moe_runtime.kernels.gemm.plan import choose_tile
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, SwiGLU
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import (
    ENGINES,
    PAIRS,
    UNIT,
    as_bf16_rows,
    check_inside,
    decode_rows,
    dequant_weights,
    exact_gemm,
    make_rows,
    multiplied_rows,
    random_weights,
    with_wild_scales,
)
from tests.support.gemm_checks import check_untouched, integer_operands, poisoned, unit_scales

RAGGED_K = {"bf16": 200, "fp8_block": 320, "mxfp8": 160, "nvfp4": 336, "mxfp4": 416}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_ragged_groups(weight: str, token: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Empty groups, one row, skipped experts, inactive groups, gathered strided rows, spare capacity, partial tiles."""
    k = RAGGED_K[weight]
    w = random_weights(weight, 3, 136, k, rng, device)
    sizes, ids = [3, 0, 70, 5, 1, 2, 130, 4], [2, 0, 0, -1, 1, 3, 2, 1]
    a = make_rows(token, sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=True, spare=9, sparse_scales=True)
    a = replace(a, num_active_experts=torch.tensor([7], dtype=torch.int32, device=device))
    out = poisoned(a.capacity + 2, 136, torch.bfloat16, device)
    before = out.clone()
    assert grouped_gemm(a, w, out=out, engine=engine) is out
    exact = exact_gemm(a, w, device)
    assert exact.written.sum() == 204
    check_inside(out, exact, UNIT[torch.bfloat16])
    check_untouched(out, before, exact.written)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("k", "n"), [(192, 72), (288, 200), (320, 264), (352, 136), (16, 8), (272, 96)])
def test_short_fp8_blocks(k: int, n: int, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Huge rows and weights just before the tail of K, and the tail alone: its scales are its own, on both sides."""
    tail = k // 128 * 128
    for before, after in ((2.0**30, 2.0**-5), (0.0, 1.0)):
        x, m = torch.randn(70, k, generator=rng), torch.randn(2, n, k, generator=rng)
        for values in (x, m):
            values[..., :tail] *= before
            values[..., tail:] *= after
        w = ExpertWeights.quantize(m, "fp8_block", engine="torch").to(device)
        a = make_rows("fp8_block", [5, 0, 65], k, rng, device, num_experts=2, gather=True, spare=2, x=x)
        out = poisoned(a.capacity, n, torch.float32, device)
        untouched = out.clone()
        exact = exact_gemm(a, w, device)
        check_inside(grouped_gemm(a, w, out=out, engine=engine), exact, UNIT[torch.float32])
        check_untouched(out, untouched, exact.written)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", GateUpOrder)
@pytest.mark.parametrize("inner", [64, 96, 320, 352])
def test_gate_and_up_in_fp8_blocks_of_their_own(
    inner: int, order: GateUpOrder, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Without the activation. Up is much larger: a block that held rows of both would show in the gates."""
    m = torch.randn(2, 2 * inner, 160, generator=rng)
    m[:, order.up_rows(2 * inner)] *= 1e6
    w = ExpertWeights.quantize(m, "fp8_block", gate_up=order, engine="torch").to(device)
    a = make_rows("fp8_block", [5, 65], 160, rng, device, num_experts=2)
    out = grouped_gemm(a, w, out_dtype=torch.float32, engine=engine)
    check_inside(out, exact_gemm(a, w, device), UNIT[torch.float32])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [[90], [0, 65, 0], [1, 1, 1], [0, 0]])
def test_group_shapes(sizes: list[int], engine: str, rng: torch.Generator, device: torch.device) -> None:
    w = random_weights("nvfp4", 2, 40, 64, rng, device)
    a = make_rows("nvfp4", sizes, 64, rng, device, num_experts=2)
    out = poisoned(a.capacity, 40, torch.float16, device)
    grouped_gemm(a, w, out=out, engine=engine)
    exact = exact_gemm(a, w, device)
    assert exact.written.all()
    check_inside(out, exact, UNIT[torch.float16])


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_to_do(engine: str, rng: torch.Generator, device: torch.device) -> None:
    """No capacity, no groups, no experts, no active groups: all legal, nothing is written."""
    w = random_weights("mxfp8", 2, 32, 64, rng, device)
    empty = make_rows("mxfp8", [0, 0], 64, rng, device, num_experts=2)
    assert grouped_gemm(empty, w, engine=engine).shape == (0, 32)
    no_groups = replace(make_rows("mxfp8", [], 64, rng, device, num_experts=2, spare=3))
    some = make_rows("mxfp8", [2, 1], 64, rng, device, num_experts=2)
    nobody = replace(w, quants=w.quants[:0], scales=None if w.scales is None else w.scales[:0])
    for a, weights in ((no_groups, w), (some, nobody), (replace(some, num_active_experts=0), w)):
        out = poisoned(3, 32, torch.bfloat16, device)
        before = out.clone()
        grouped_gemm(a, weights, out=out, engine=engine)
        assert_same_bits(out, before, "nothing to do")
    hidden = grouped_gemm_swiglu(empty, w, SwiGLU(), out_format="bf16", engine=engine)
    assert hidden.rows.shape == (0, 16)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_past_the_capacity_are_left_alone(engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Offsets that go on behind the capacity: what fits is the same, nothing behind it is written."""
    w = random_weights("mxfp8", 2, 64, 64, rng, device)
    a = make_rows("mxfp8", [3, 90, 5], 64, rng, device, num_experts=2)
    want = grouped_gemm(a, w, engine=engine)
    for capacity in (40, 3, 0):
        out = poisoned(98, 64, torch.bfloat16, device)
        before = out.clone()
        grouped_gemm(replace(a, capacity=capacity), w, out=out, engine=engine)
        assert_same_bits(out[:capacity], want[:capacity], "rows that fit")
        assert_same_bits(out[capacity:], before[capacity:], "rows past the capacity")
        hidden = grouped_gemm_swiglu(replace(a, capacity=capacity), w, SwiGLU(), out_format="bf16", engine=engine)
        assert hidden.rows.shape == (capacity, 32)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_active_experts_than_groups_are_all_groups(
    engine: str, rng: torch.Generator, device: torch.device
) -> None:
    w = random_weights("bf16", 2, 32, 64, rng, device)
    a = make_rows("bf16", [3, 5], 64, rng, device, num_experts=2, spare=2)
    # What lies behind the two groups looks like two more, of one row each.
    ids = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=device)[:2]
    offsets = torch.tensor([0, 3, 8, 9, 10], dtype=torch.int32, device=device)
    want = grouped_gemm(a, w, engine=engine)
    for active in (99, torch.tensor([99], dtype=torch.int32, device=device)):
        out = poisoned(10, 32, torch.bfloat16, device)
        before = out.clone()
        more = replace(a, expert_ids=ids, group_offsets=offsets, num_active_experts=active)
        grouped_gemm(more, w, out=out, engine=engine)
        assert_same_bits(out[:8], want[:8], f"{active} active")
        assert_same_bits(out[8:], before[8:], "rows of no group")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("order", [None, *GateUpOrder])
def test_epilogue(
    order: GateUpOrder | None, dtype: torch.dtype, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Row scale, expert scale (of gate and up apart), bias, and each output type."""
    k, n = 48, 160
    w = torch.randn(2, n, k, generator=rng)
    if order is not None:
        w[:, order.up_rows(n)] *= 37.0
    w = ExpertWeights.quantize(
        w, "nvfp4", gate_up=order or False, bias=torch.randn(2, n, generator=rng), engine="torch"
    ).to(device)
    assert w.expert_scales is not None and w.expert_scales.ndim == (1 if order is None else 2)
    a = make_rows("nvfp4", [5, 66], k, rng, device, num_experts=2, x=torch.randn(71, k, generator=rng) * 5)
    out = grouped_gemm(a, w, out_dtype=dtype, engine=engine)
    assert out.dtype == dtype
    check_inside(out, exact_gemm(a, w, device), UNIT[dtype])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_small_integers_are_exact(name: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    a, w, exact = integer_operands(name, rng, device)
    if name == "nvfp4":
        # The quantizers make 448 and 1/448 of the two levels of scales, which is not exact; the codes are.
        a = replace(a, row_scale=torch.full((a.capacity,), 0.5, device=device), scales=unit_scales(a.scales))
        w = replace(w, expert_scales=torch.full((2,), 4.0, device=device), scales=unit_scales(w.scales))
        exact = exact * 2.0
    out = grouped_gemm(a, w, out_dtype=torch.float32, engine=engine)
    assert_same_bits(out, torch.from_numpy(exact).float(), name)


@pytest.mark.parametrize("engine", ENGINES)
def test_mxfp4_weights_of_every_code_and_scale_are_exact(engine: str, device: torch.device) -> None:
    """Times one: all scale bytes up to 252, whose largest number is still one of fp32, each with all codes; NaN."""
    codes = torch.arange(16, dtype=torch.uint8)
    quants = (codes[0::2] | codes[1::2] << 4).repeat(2).expand(1, 256, 16).contiguous()
    scales = swizzle_scales(torch.arange(256, dtype=torch.uint8).view(1, 256, 1))
    w = ExpertWeights(MXFP4, quants.to(device), scales.to(device))
    a = make_rows("bf16", [32], 32, torch.Generator(), device, num_experts=1, x=torch.eye(32))
    out = grouped_gemm(a, w, out_dtype=torch.float32, engine=engine).cpu()
    exact = torch.from_numpy(dequant_weights(w)[0].T)
    assert out[:, 255].isnan().all() and exact[:, 255].isnan().all()
    assert torch.equal(out[:, :253].double(), exact[:, :253])


@pytest.mark.parametrize("engine", ENGINES)
def test_mxfp8_rows_of_every_code_and_scale_are_exact_with_mxfp4_weights(engine: str, device: torch.device) -> None:
    """Times one, each code beside each scale that bf16 carries, in a column of its own; and NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = torch.arange(256)[[*range(3, 247), 255]].to(torch.uint8)
    rows = codes.view(8, 32).repeat(len(scales), 1)
    count = len(rows)
    linear = scales.repeat_interleave(8)[None, :, None]
    a = replace(
        make_rows("mxfp8", [count], 32, torch.Generator(), device, num_experts=1, x=torch.ones(count, 32)),
        rows=rows.view(torch.float8_e4m3fn).to(device),
        scales=swizzle_scales(linear)[0].to(device),
    )
    w = ExpertWeights.quantize(torch.eye(32)[None], "mxfp4", engine="torch").to(device)
    assert np.array_equal(dequant_weights(w)[0], np.eye(32))
    out = grouped_gemm(a, w, out_dtype=torch.float32, engine=engine).cpu()
    exact = torch.from_numpy(decode_rows(a))
    assert out[-8:].isnan().all() and exact[-8:].isnan().all()
    assert torch.equal(out[:-8].double(), exact[:-8])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("weight", "one"), [("nvfp4", 0x38), ("mxfp4", 127)])
def test_fp8_rows_of_every_code_are_rounded_once_to_bf16(
    weight: str, one: int, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Times one, each code beside scales of 200 exponents; and NaN."""
    k, fmt = 32, WEIGHT_FORMATS[weight]
    column = torch.arange(k)
    quants = torch.zeros(1, k, k // 2, dtype=torch.uint8)
    quants[0, column, column // 2] = (2 << 4 * (column % 2)).to(torch.uint8)
    scales = swizzle_scales(torch.full((1, k, fmt.scale_columns(k)), one, dtype=torch.uint8))
    w = ExpertWeights(fmt, quants.to(device), scales.view(fmt.scale_dtype or torch.uint8).to(device))
    assert np.array_equal(dequant_weights(w)[0], np.eye(k))
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    sizes = torch.arange(-100, 100).repeat_interleave(8)
    factors = torch.cat((torch.ldexp(torch.rand(len(sizes), generator=rng) + 1, sizes), torch.full((8,), torch.nan)))
    count = len(factors)
    a = replace(
        make_rows("fp8_block", [count], k, torch.Generator(), device, num_experts=1, x=torch.ones(count, k)),
        rows=codes.view(8, k).repeat(count // 8, 1).view(torch.float8_e4m3fn).to(device),
        scales=factors[:, None].to(device),
    )
    out = grouped_gemm(a, w, out_dtype=torch.float32, engine=engine).cpu()
    assert out[-8:].isnan().all()
    assert torch.equal(out[:-8].double(), torch.from_numpy(multiplied_rows(a, fmt))[:-8])
    off = torch.from_numpy(decode_rows(a))[:-8] / out[:-8].double() - 1
    assert 2.0**-9 < off.nan_to_num(0.0).abs().max() <= 2.0**-8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weight", ["nvfp4", "mxfp4"])
def test_fp8_rows_have_the_bits_of_their_values_in_bf16(
    weight: str, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Both products, with scales of any size, both signs, and NaN."""
    k, inner, fmt = 416, 72, WEIGHT_FORMATS[weight]
    w = random_weights(weight, 2, 2 * inner, k, rng, device, gate_up=True)
    a = make_rows("fp8_block", [3, 0, 70, 9], k, rng, device, num_experts=2)
    for rows in (a, with_wild_scales(a, rng)):
        found = []
        for given in (rows, as_bf16_rows(rows, fmt)):
            out = poisoned(a.capacity, 2 * inner, torch.float32, device)
            hidden = grouped_gemm_swiglu(given, w, SwiGLU(), out_format="bf16", engine=engine)
            found.append((grouped_gemm(given, w, out=out, engine=engine), hidden.rows))
        for ours, want in zip(*found, strict=True):
            nan = want.isnan()
            assert nan.all(1)[:2].all() == (rows is not a) and not nan.all()
            assert torch.equal(ours.isnan(), nan)
            assert_same_bits(ours[~nan], want[~nan], "results")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("far", [0, 75])
def test_fp8_block_powers_of_two_are_exact(far: int, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """One block scale per 128 of K, different from block to block, on both sides; far ones have a product of 2^-150."""
    k, n = 384, 160
    x = torch.randint(-3, 4, (66, k), generator=rng).float()
    m = torch.randint(-3, 4, (1, n, k), generator=rng).float()
    a = make_rows("fp8_block", [66], k, rng, device, num_experts=1, x=x * 0 + 1)
    w = ExpertWeights.quantize(m, "fp8_block", engine="torch").to(device)
    if far:
        x, m = x * 64, m * 64
    row_scales = 2.0 ** (torch.randint(-3, 4, (66, 3), generator=rng) - far).float()
    scales = 2.0 ** (torch.randint(-3, 4, (1, 2, 3), generator=rng) - far).float()
    a = replace(a, rows=x.to(torch.float8_e4m3fn).to(device), scales=row_scales.to(device))
    w = replace(w, quants=m.to(torch.float8_e4m3fn).to(device), scales=scales.to(device))
    factors = scales[0].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    exact = (x * row_scales.repeat_interleave(128, 1)).double() @ (m[0] * factors).double().T
    assert exact.any()
    assert_same_bits(grouped_gemm(a, w, out_dtype=torch.float32, engine=engine), exact.float(), "fp8_block")


@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_rows_do_not_depend_on_neighbours(weight: str, token: str, rng: torch.Generator, device: torch.device) -> None:
    """A row alone, and the same row among others, on GPUs at another place of a tile: the same bits.

    The interpreter multiplies by BLAS, which may sum rows at different places of a tile in different orders.
    """
    k, n = 256, 136
    row = 68 if device.type == "cuda" else 5
    w = random_weights(weight, 2, n, k, rng, device)
    x = torch.randn(70, k, generator=rng)
    many = make_rows(token, [5, 65], k, rng, device, num_experts=2, x=x)
    one = make_rows(token, [0, 1], k, rng, device, num_experts=2, x=x[row : row + 1])
    together = grouped_gemm(many, w, out_dtype=torch.float32, engine="triton")
    assert_same_bits(grouped_gemm(one, w, out_dtype=torch.float32, engine="triton")[0], together[row], token)


def test_reference_does_not_depend_on_the_size_of_groups(rng: torch.Generator) -> None:
    """Sums that cancel show their order, even in float64: BLAS has others for products of few rows."""
    m, k, n = 70, 384, 40
    cpu = torch.device("cpu")
    x, w = torch.randn(m, k, generator=rng), torch.randn(1, n, k, generator=rng)
    third, order = k // 3, torch.randperm(k, generator=rng)
    x[:, :third] *= 2.0 ** torch.randint(-10, 35, (m, third), generator=rng)
    x[:, third : 2 * third], w[:, :, third : 2 * third] = -x[:, :third].flip(1), w[:, :, :third].flip(2)
    x, w = x[:, order], ExpertWeights.quantize(w[:, :, order], "bf16")
    whole = make_rows("bf16", [m], k, rng, cpu, num_experts=1, x=x)
    want = grouped_gemm(whole, w, out_dtype=torch.float32, engine="torch")
    for sizes in ([1] * m, [3, 31, 32, 4], [33, 37]):
        a = make_rows("bf16", sizes, k, rng, cpu, num_experts=1, x=x)
        assert_same_bits(grouped_gemm(a, w, out_dtype=torch.float32, engine="torch"), want, f"groups of {sizes}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_nan_stays_in_its_row(weight: str, token: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    k = 128
    w = random_weights(weight, 1, 256, k, rng, device)
    x = torch.randn(6, k, generator=rng)
    clean = make_rows(token, [6], k, rng, device, num_experts=1, x=x)
    x = x.clone()
    x[2, 77] = float("nan")
    dirty = make_rows(token, [6], k, rng, device, num_experts=1, x=x)
    want = grouped_gemm(clean, w, engine=engine)
    got = grouped_gemm(dirty, w, engine=engine)
    assert got[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert_same_bits(got[others], want[others], "other rows")
    hidden = grouped_gemm_swiglu(dirty, w, SwiGLU(limit=1.0), out_format=token, engine=engine)
    poisoned = np.isnan(decode_rows(hidden))
    assert poisoned[2].all() and not poisoned[others].any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("weight", "name"), [("fp8_block", "fp8_block"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp8")]
)
def test_a_scale_of_nan_is_nan_whatever_its_codes(
    weight: str, name: str, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Not Inf: all operands are positive, so that nothing else makes a NaN of one."""
    k, n, nan = 128, 136, {"fp8_block": float("nan"), "mxfp8": 255, "nvfp4": 0x7F}[name]
    x, m = torch.rand(6, k, generator=rng) + 1, torch.rand(1, n, k, generator=rng) + 1
    w = ExpertWeights.quantize(m.to(device), weight)
    a = make_rows(name, [6], k, rng, device, num_experts=1, x=x)
    assert a.scales is not None and w.scales is not None
    a_bad, w_bad = a.scales.clone(), w.scales.clone()
    # Row 3 of each: at 3 * 16 in the swizzle, at 3 where each row has one scale, at 0 where 128 share it.
    raw_bits(a_bad).view(-1)[3 if name == "fp8_block" else 48] = nan
    raw_bits(w_bad).view(-1)[0 if name == "fp8_block" else 48] = nan
    got = grouped_gemm(replace(a, scales=a_bad), w, engine=engine)
    assert got[3].isnan().all() and got[[0, 1, 2, 4, 5]].isfinite().all()
    got = grouped_gemm(a, replace(w, scales=w_bad), engine=engine)
    bad_columns = slice(0, 128) if name == "fp8_block" else slice(3, 4)
    assert got[:, bad_columns].isnan().all() and got.isnan().sum() == got[:, bad_columns].numel()


@triton.jit
def _find_tile_kernel(offsets_ptr, experts_ptr, out_ptr, groups, experts, BLOCK_G: tl.constexpr):
    tile = tl.program_id(0)
    expert, group, start, rows, block = find_tile(offsets_ptr, experts_ptr, groups, experts, tile, 64, BLOCK_G)
    for_tile = out_ptr + tile * 5
    tl.store(for_tile, expert)
    tl.store(for_tile + 1, group)
    tl.store(for_tile + 2, start)
    tl.store(for_tile + 3, rows)
    tl.store(for_tile + 4, block)


def test_find_tile_example(device: torch.device) -> None:
    """The worked example of its docstring."""
    offsets = torch.tensor([0, 100, 100, 130], dtype=torch.int32, device=device)
    experts = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    out = torch.full((4, 5), -7, dtype=torch.int32, device=device)
    _find_tile_kernel[(4,)](offsets, experts, out, 3, 3, BLOCK_G=16)
    assert out[:3].tolist() == [[2, 0, 0, 100, 0], [2, 0, 0, 100, 1], [1, 2, 100, 30, 0]]
    assert out[3, 0] == -1


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_past_2_31_elements(engine: str, rng: torch.Generator, device: torch.device) -> None:
    """A gathered row beyond 2^31 elements of `rows` (the memory between is never touched)."""
    k, far = 128, 2**24 + 1
    w = random_weights("fp8_block", 1, 32, k, rng, device)
    near = make_rows("fp8_block", [2], k, rng, device, num_experts=1)
    rows = torch.empty(far + 1, k, dtype=torch.uint8, device=device)
    rows[0], rows[far] = near.rows.view(torch.uint8)[1], near.rows.view(torch.uint8)[0]
    index = torch.tensor([far, 0], dtype=torch.int32, device=device)
    a = replace(near, rows=rows.view(torch.float8_e4m3fn), row_index=index)
    assert_same_bits(grouped_gemm(a, w, engine=engine), grouped_gemm(near, w, engine=engine), "far row")


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_past_2_31_elements(engine: str, rng: torch.Generator, device: torch.device) -> None:
    """The last of 2^19 + 1 experts of 2^12 bytes each (the memory between is never touched)."""
    k, n, far = 128, 32, 2**19
    near = random_weights("fp8_block", 1, n, k, rng, device)
    assert near.scales is not None
    quants = torch.empty(far + 1, n, k, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(far + 1, 1, 1, device=device)
    quants[far], scales[far] = near.quants[0], near.scales[0]
    a = make_rows("fp8_block", [2], k, rng, device, num_experts=1)
    last = replace(a, expert_ids=torch.tensor([far], dtype=torch.int32, device=device))
    got = grouped_gemm(last, replace(near, quants=quants, scales=scales), engine=engine)
    assert_same_bits(got, grouped_gemm(a, near, engine=engine), "far expert")


@pytest.mark.parametrize("engine", ENGINES)
def test_scales_past_2_31_elements(engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Scale block 2^22 of the rows and of the weights, at byte 2^31."""
    k, n, far = 32, 8, 2**22
    near = random_weights("mxfp8", 1, n, k, rng, device)
    a = make_rows("mxfp8", [2], k, rng, device, num_experts=1)
    assert near.scales is not None and a.scales is not None
    quants = torch.empty(far + 1, n, k, dtype=torch.float8_e4m3fn, device=device)
    w_scales = torch.empty(far + 1, 1, 1, 32, 4, 4, dtype=torch.uint8, device=device)
    quants[far], w_scales[far] = near.quants[0], near.scales[0]
    a_scales = torch.empty(far + 1, 1, 32, 4, 4, dtype=torch.uint8, device=device)
    a_scales[far] = a.scales[0]
    at_far = torch.tensor([far], dtype=torch.int32, device=device)
    last = replace(a, expert_ids=at_far, scales=a_scales, group_scale_offsets=at_far)
    got = grouped_gemm(last, replace(near, quants=quants, scales=w_scales), engine=engine)
    assert_same_bits(got, grouped_gemm(a, near, engine=engine), "far scales")


@pytest.mark.gpu
def test_output_past_2_31_elements(rng: torch.Generator, device: torch.device) -> None:
    w = random_weights("bf16", 1, 32, 64, rng, device)
    a = make_rows("bf16", [3], 64, rng, device, num_experts=1)
    out = torch.empty(2**31 + 2**30 + 64, dtype=torch.bfloat16, device=device).as_strided((3, 32), (2**30 + 2**29, 1))
    grouped_gemm(a, w, out=out)
    assert_same_bits(out.contiguous(), grouped_gemm(a, w), "far output")


def test_tile_does_not_depend_on_rows() -> None:
    for fmt in FORMATS.values():
        for n in (8, 40, 128, 4096):
            plain, gated = choose_tile(n, fmt), choose_tile(n, fmt, out_block=fmt.block)
            assert plain.block_n >= min(n, 128) and gated.block_n % fmt.block == 0
            assert gated.block_k % fmt.block == 0 and plain.block_k % fmt.block == 0


def test_flops_and_bytes() -> None:
    nvfp4, bf16, fp8 = (FORMATS[name] for name in ("nvfp4", "bf16", "fp8_block"))
    assert gemm_flops(3, 5, 7) == 210

    def count(a: TokenFormat, w: TokenFormat) -> int:
        return gemm_bytes(10, 4096, 7168, a_format=a, w_format=w, active_experts=2, out_bytes_per_row=8192)

    assert count(nvfp4, nvfp4) == 10 * (3584 + 448 + 4 + 8192) + 2 * 4096 * (3584 + 448)
    assert count(bf16, bf16) == 10 * (14336 + 8192) + 2 * 4096 * 14336
    assert count(fp8, fp8) == 10 * (7168 + 224 + 8192) + 2 * (4096 * 7168 + 32 * 224)
