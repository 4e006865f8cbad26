"""The operations against float64 products of what their arguments hold, element by element, on both engines."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.kernels.formats import reference_quantize
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.gemm import op_gemm, op_reference
from moe_runtime.kernels.gemm.plan import choose_op_tile, has_native_mma
from moe_runtime.ops import inputs, operations, scales
from tests.support import op_cases
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import bits
from tests.support.gemm_plans import choose
from tests.support.guarded import at_the_end_of_memory
from tests.support.op_cases import (
    E4M3,
    E5M2,
    SEED_GROUPS,
    OpCase,
    check,
    fp8,
    moe_fp8,
    mxfp8,
    nvfp4_closed,
    nvfp4_dense,
)

ENGINES = ("torch", "triton")
Make = Callable[..., OpCase]

VARIANTS: dict[str, tuple[Make, dict[str, Any]]] = {
    "dense": (nvfp4_dense, {}),
    "closed": (nvfp4_closed, {}),
    "mxfp8_128": (mxfp8, {"block": 128}),
    "mxfp8_32": (mxfp8, {"block": 32}),
    "mxfp8_gated": (mxfp8, {"block": 32, "is_gated": True}),
    "moe_fp8": (moe_fp8, {}),
    "moe_fp8_gated": (moe_fp8, {"is_gated": True}),
    "fp8_mn": (fp8, {"major": "MN"}),
    "fp8_k": (fp8, {"major": "K", "dtype": E5M2}),
    "fp8_mn_e5m2": (fp8, {"major": "MN", "dtype": E5M2, "spare": 4}),
}


def test_docstrings() -> None:
    for module in (operations, inputs, scales, op_reference):
        failed, tried = doctest.testmod(module)
        assert tried and not failed, module.__name__


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_groups(name: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    make, options = VARIANTS[name]
    check(make([4, 0, 132, 8], 136, 256, rng, device, **options), engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if "gated" not in name])
def test_small_integers_are_exact(name: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    make, options = VARIANTS[name]
    case = make([0, 12, 68], 40, 256, rng, device, integers=True, **options)
    exact = case.exact()
    assert exact.written.all()
    assert (exact.value == exact.value.float()).all()
    assert_same_bits(case.run(engine=engine), exact.value.float().to(torch.bfloat16))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ids", [[0, 3, 2, 4], [-1, 0, 2], [-1, -1, -1], [1, 1, 0]])
def test_expert_ids(ids: list[int], engine: str, rng: torch.Generator, device: torch.device) -> None:
    """N no multiple of 128 or 8, K none of 64; int32 offsets; scales by expert; sparse scale blocks."""
    sizes = [5, 129, 3, 1][: len(ids)]
    case = nvfp4_dense(
        sizes, 67, 80, rng, device, ids=ids, num_experts=6, gaps=1, offsets_dtype=torch.int32
    )  # fmt: skip
    check(case, engine, torch.float32)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_active_groups_are_read(engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Entries behind `num_active_experts` hold nonsense, which is neither used nor refused; int or on the device."""
    case = nvfp4_dense([3, 2, 7], 32, 64, rng, device)
    arguments = case.arguments
    case.experts = [0, 1, -1]
    two = torch.tensor([2], dtype=torch.int32, device=device)
    check(case, engine, num_active_experts=two)  # behind them is a group that could be read
    for name in ("group_offsets", "group_scale_offsets", "expert_ids"):
        values = arguments[name].view(torch.int32).clone()
        values[-1] = 1 << 30
        arguments[name] = values.view(arguments[name].dtype)
    check(case, engine, num_active_experts=2)
    check(case, engine, num_active_experts=two)
    case.experts = [-1, -1, -1]
    check(case, engine, num_active_experts=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unchecked_expert_out_of_range_is_none(engine: str, rng: torch.Generator, device: torch.device) -> None:
    case = nvfp4_dense([3, 2, 7], 32, 64, rng, device, ids=[2, 1 << 30, -7], num_experts=2)
    check(case, engine, validate=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_tiles_out_dtypes_and_alpha(engine: str, rng: torch.Generator, device: torch.device) -> None:
    case = nvfp4_closed([4, 12], 128, 128, rng, device)
    full = case.run(engine=engine)
    for tile_n in (32, 64, 128):
        for more in ({"tile_k": 256}, {"swap_ab": False}):
            assert_same_bits(case.run(engine=engine, tile_n=tile_n, **more), full, "sums do not depend on the tile")
    check(case, engine, torch.float16)
    made = case.operation(**case.arguments, engine=engine, out_dtype=torch.float16)
    assert made.dtype == torch.float16 and made.shape == (16, 128)
    case.arguments["alpha"], case.factors = None, [1.0, 1.0]
    check(case, engine)


GATED_AND_PADDED = ["mxfp8_gated", "moe_fp8", "moe_fp8_gated"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GATED_AND_PADDED)
@pytest.mark.parametrize("k", [16, 144, 400])
def test_partial_blocks_of_the_operations_for_moe(
    k: int, name: str, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Groups of any size, empty ones too; half of N no multiple of the blocks, which up and gate then share."""
    make, options = VARIANTS[name]
    check(make([1, 0, 5, 3, 0, 130, 0], 2 * 136, k, rng, device, **options), engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GATED_AND_PADDED)
def test_outputs_with_wide_rows_of_the_operations_for_moe(
    name: str, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    make, options = VARIANTS[name]
    case = make([5, 0, 3], 32, 128, rng, device, **options)
    want = case.run(engine=engine)
    wide = torch.full((8, 50), 7.0, dtype=torch.bfloat16, device=device)
    assert_same_bits(case.run(wide[:, 1 : 1 + want.shape[1]], engine=engine), want)
    wide[:, 1 : 1 + want.shape[1]] = 7.0
    assert (wide == 7.0).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_padded_scales_of_rows_give_the_bits_of_unpadded_ones(
    engine: str, rng: torch.Generator, device: torch.device
) -> None:
    sizes, n, k = [4, 0, 132, 8], 136, 256
    seed = rng.get_state()
    want = fp8(sizes, n, k, rng, device).run(engine=engine)
    rng.set_state(seed)
    assert_same_bits(moe_fp8(sizes, n, k, rng, device).run(engine=engine), want)


@pytest.mark.parametrize("k", [256, 272])
@pytest.mark.parametrize("is_gated", [False, True])
def test_hopper_gets_the_scale_of_each_row(
    is_gated: bool, k: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Hopper's kernel multiplies: K-major scales in the order of the rows, and the output as it is."""
    case = moe_fp8([1, 0, 5, 130, 0], 256, k, rng, torch.device("cpu"), is_gated=is_gated)
    problems, calls = [], []
    monkeypatch.setattr(operations, "op_gemm", lambda problem, *_, **__: problems.append(problem))
    out = case.run()
    monkeypatch.setattr(op_gemm.tma_gemm, "multiply", lambda *arguments, **how: calls.append((*arguments[:2], how)))
    op_gemm._tma_gemm(problems[0], problems[0].b, out, None)  # type: ignore[arg-type]
    ((rows, w, how),) = calls
    assert (how["activation"] is not None) == is_gated
    factors = rows.scales.double().repeat_interleave(128, 1)[:, :k]
    assert_same_bits(op_cases.VALUES[E4M3][rows.rows.view(torch.uint8).int()] * factors, case.rows)
    assert_same_bits(w.dequantize().double(), case.weights.float().double())
    assert how["out"] is out
    assert how["result"].rows is out if is_gated else how["result"] is None


@pytest.mark.parametrize("name", ["mxfp8_gated", "moe_fp8_gated"])
def test_up_comes_before_gate(name: str, device: torch.device) -> None:
    """One row of ones by up = 2 and gate = -1: `2 * silu(-1)`."""
    make, options = VARIANTS[name]
    case = make([1], 16, 128, torch.Generator(device).manual_seed(1), device, **options)
    a, b = torch.zeros(1, 128, device=device), torch.zeros(1, 16, 128, device=device)
    a[:, 0] = 1.0
    b[:, :8, 0], b[:, 8:, 0] = 2.0, -1.0
    scales = {key: torch.ones_like(case.arguments[key]) for key in ("a_scale", "b_scale")}
    if name == "mxfp8_gated":
        scales = {key: value * 0x7F7F7F7F for key, value in scales.items()}
    want = (2 * torch.nn.functional.silu(torch.tensor(-1.0))).to(torch.bfloat16)
    for engine in ENGINES:
        found = case.run(a=a.to(E4M3), b=b.to(E4M3), engine=engine, **scales)
        assert (found == want.to(device)).all()


CLOSED_SIZES = [
    *([m] * groups for m in (4, 128, 256, 512) for groups in (1, 2, 4, 8)),
    [128, 0, 0],
    [4, 132, 0, 0],
    [0, 0, 128, 0, 4, 0],
    [0, 0],
]


def closed_end(sizes: list[int]) -> int:
    """The scale row behind the last block of the last group that has rows, written out."""
    end = row = 0
    for group, size in enumerate(sizes):
        if size:
            end = ((row + 127 * group) // 128 + -(-size // 128)) * 128
        row += size
    return end


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", CLOSED_SIZES, ids=str)
def test_scales_of_nvfp4_may_end_with_the_last_group(
    sizes: list[int], engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """With the bits of the padded container, and on a CPU without a read behind the last scale."""
    case = nvfp4_closed(sizes, 32, 128, rng, device)
    whole = case.arguments["a_scale"]
    cut, want = whole[: closed_end(sizes)], case.run(engine=engine)
    with at_the_end_of_memory(cut.cpu()) as guarded:
        for validate in (True, False):
            found = case.run(engine=engine, validate=validate, a_scale=guarded.to(device))
            assert_same_bits(found, want)
    if sum(sizes):
        with pytest.raises(ValueError, match=rf"^a_scale: expected at least {len(cut)} rows .*, got {len(cut) - 1}"):
            case.run(engine=engine, validate=True, a_scale=cut[:-1])
    unpack = operations.unpack_closed_form_128
    assert_same_bits(unpack(cut, case.offsets), unpack(whole, case.offsets))


@pytest.mark.parametrize("engine", ENGINES)
def test_unchecked_scales_that_are_too_short_are_not_read(
    engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Groups whose blocks are not all there are skipped; the others have their results."""
    case = nvfp4_closed([4, 132, 0, 8, 4], 32, 128, rng, device)
    for rows, there in ((0, []), (100, []), (128, [0]), (383, [0]), (384, [0, 1]), (640, [0, 1, 3])):
        with at_the_end_of_memory(case.arguments["a_scale"][:rows].cpu()) as guarded:
            case.experts = [group if group in there else -1 for group in range(5)]
            check(case, engine, validate=False, a_scale=guarded.to(device))


@pytest.mark.parametrize("engine", ENGINES)
def test_alpha_without_elements_is_one(engine: str, rng: torch.Generator, device: torch.device) -> None:
    case = nvfp4_closed([4, 8], 32, 128, rng, device)
    case.factors = [1.0, 1.0]
    for shape in ((0,), (0, 1)):
        check(case, engine, alpha=torch.empty(shape, device=device))
    with pytest.raises(ValueError, match=r"^alpha: expected torch.float32, got torch.float64"):
        case.run(alpha=torch.empty(0, dtype=torch.float64, device=device))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("major", ["MN", "K"])
def test_fp8_blocks_of_rows(major: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Granularity (128, 128, 128): groups start at multiples of 128, the last one ends anywhere."""
    check(fp8([128, 0, 256, 60], 136, 256, rng, device, gm=128, major=major), engine, torch.float16, mma_sm=2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("k", [16, 144, 560])
def test_mxfp8_partial_blocks(k: int, block: int, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """N no multiple of 4 (and 1), K with a partial last block and a partial last word."""
    check(mxfp8([1, 0, 5, 3], 1 if k == 16 else 37, k, rng, device, block=block), engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_to_do(name: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    make, options = VARIANTS[name]
    for sizes in ([0, 0], []):
        more = {"num_experts": 2} if make is nvfp4_dense else {}
        case = make(sizes, 32, 128, rng, device, **options, **more)
        assert case.run(engine=engine).shape == (0, 16 if case.is_gated else 32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_behind_the_last_group(name: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    make, options = VARIANTS[name]
    case = make([4, 8], 32, 128, rng, device, **options)
    key = "group_offsets" if case.is_in_place else "m_indptr"
    dtype = case.arguments[key].dtype
    case.offsets = [0, 4, 8]
    case.arguments[key] = torch.tensor(case.offsets, dtype=torch.int32, device=device).view(dtype)
    check(case, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_of_nan_stays_alone(engine: str, rng: torch.Generator, device: torch.device) -> None:
    case = fp8([4, 8], 32, 128, rng, device, dtype=E5M2)
    clean = case.run(engine=engine)
    raw = case.arguments["a"].view(torch.uint8).clone()
    raw[5, 7] = 0x7E
    case.arguments["a"] = raw.view(E5M2)
    spoiled = case.run(engine=engine)
    assert spoiled[5].isnan().all()
    others = [row for row in range(12) if row != 5]
    assert_same_bits(spoiled[others], clean[others])


@pytest.mark.parametrize("sizes", [*SEED_GROUPS, [3, 1, 5, 2], [0, 256, 0, 512]], ids=str)
def test_shapes_of_the_seeds_scaled_down(sizes: list[int], rng: torch.Generator, device: torch.device) -> None:
    """N and K of (6,4096,7168), (8,1856,2688), (4,2048,1024) divided by 16, so that the reference takes them."""
    ids = [0, 3, 2, 4] if len(sizes) == 4 else [-1, 0, 2]
    experts, n, k = {11: (8, 116, 176), 768: (4, 128, 64)}.get(sum(sizes), (6, 256, 448))
    ids = [min(e, experts - 1) for e in ids]
    check(nvfp4_dense(sizes, n, k, rng, device, ids=ids, num_experts=experts), "auto")


@pytest.mark.parametrize("rows", [0, 1, 8, 12, 15, 16, 32, 64, 376])
def test_mxfp8_rows_of_the_seed(rows: int, rng: torch.Generator, device: torch.device) -> None:
    for n, k, block in ((256, 448, 128), (64, 544, 32), (188, 192, 128)):
        check(mxfp8([rows, 3, rows], n, k, rng, device, block=block), "auto")


@pytest.mark.parametrize("rows", [4, 128, 512])
def test_nvfp4_rows_of_the_seed(rows: int, rng: torch.Generator, device: torch.device) -> None:
    for n in (128, 256, 512):
        for k in (128, 256, 512):
            check(nvfp4_closed([rows, rows], n, k, rng, device), "auto", torch.float16)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_fp8_groups_of_the_seed(groups: int, rng: torch.Generator, device: torch.device) -> None:
    for rows, n, k in ((4, 128, 512), (64, 512, 128), (128, 256, 256)):
        for major in ("K", "MN"):
            check(fp8([rows] * groups, n, k, rng, device, gm=128 if rows == 128 else 1, major=major), "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 128])
def test_native_form_of_mxfp8(
    block: int, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form for block-scaled MMA, whatever the GPU: the compiler takes it apart where there is no instruction."""
    choose(monkeypatch, has_native_mma=lambda *_: True)
    check(mxfp8([1, 0, 130, 70], 136, 592, rng, device, block=block), "triton")


def test_block_scaled_mma_is_for_blackwell_only() -> None:
    for major, native in ((9, False), (10, True), (12, True)):
        for name in FORMATS:
            assert has_native_mma(FORMATS[name], (major, 0)) is (native and name in ("nvfp4", "mxfp8"))
    assert not has_native_mma(FORMATS["nvfp4"], None)
    tile = choose_op_tile(4096, FORMATS["nvfp4"], 64, native=True)
    assert (tile.block_m, tile.block_n) == (128, 64)


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("name", VARIANTS)
def test_any_shape(name: str, data: st.DataObject) -> None:
    """Random ragged groups on the reference (on a GPU: the kernel, and larger ones)."""
    make, options = VARIANTS[name]
    device, largest = torch.device("cpu"), 256
    if torch.cuda.is_available():
        device, largest = torch.device("cuda"), 1024
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31 - 1)))
    units = {"dense": (1, 1, 16), "mxfp8": (1, 2 if "is_gated" in options else 1, 16), "moe": (1, 8, 16)}
    unit_m, unit_n, unit_k = units.get(name.split("_")[0], (4, 8, 128))
    sizes = [unit_m * size for size in data.draw(st.lists(st.integers(0, largest // unit_m), max_size=5))]
    n, k = (unit * data.draw(st.integers(1, largest // unit)) for unit in (unit_n, unit_k))
    more = {"num_experts": max(1, len(sizes))} if make is nvfp4_dense else {}
    check(make(sizes, n, k, rng, device, **options, **more), "auto")


@pytest.mark.parametrize("name", VARIANTS)
def test_packers_keep_every_number(name: str, rng: torch.Generator) -> None:
    """What was packed decodes, by ml_dtypes, to what the quantizers' own inverses give."""
    make, options = VARIANTS[name]
    seen: list[torch.Tensor] = []

    def remember(quantize: Callable[..., Any], dequantize: Callable[..., torch.Tensor], *fixed: Any) -> Any:
        def both(*arguments: Any, **more: Any) -> Any:
            q, s = quantize(*arguments, **more)
            seen.append(dequantize(q, s, *(arguments[1:2] if fixed else ())).double())
            return q, s

        return both

    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(op_cases.ops, "quantize_nvfp4", remember(operations.quantize_nvfp4, operations.dequantize_nvfp4))
        p.setattr(op_cases.ops, "quantize_mxfp8", remember(operations.quantize_mxfp8, operations.dequantize_mxfp8, 1))
        p.setattr(op_cases.ops, "quantize_fp8", remember(operations.quantize_fp8, operations.dequantize_fp8, 1))
        case = make([4, 0, 132, 8], 136, 256, rng, torch.device("cpu"), **options)
    rows, weights = seen
    torch.testing.assert_close(case.rows, rows, rtol=2.0**-23, atol=0)
    torch.testing.assert_close(case.weights, weights, rtol=2.0**-23, atol=0)


def test_unpackers_are_inverses(rng: torch.Generator) -> None:
    offsets = [0, 4, 4, 137, 300]
    rows, weights = (torch.randint(0, 256, s, generator=rng).to(torch.uint8) for s in ((300, 8), (3, 137, 8)))
    blocks, shifts = operations.pack_dense_128(rows, offsets)
    assert_same_bits(operations.unpack_dense_128(blocks, offsets, shifts, 8), rows)
    assert_same_bits(operations.unpack_closed_form_128(operations.pack_closed_form_128(rows, offsets), offsets), rows)
    assert_same_bits(
        operations.unpack_swizzled_weights(operations.pack_swizzled_weights(weights), 137, torch.uint8), weights
    )
    for columns in (8, 5, 1):
        some = rows[:, :columns].contiguous()
        assert_same_bits(
            operations.unpack_ue8m0_rows(operations.pack_ue8m0_rows(some, offsets), offsets, columns), some
        )
        some = weights[:, :, :columns].contiguous()
        assert_same_bits(operations.unpack_ue8m0_weights(operations.pack_ue8m0_weights(some), columns), some)
    for major in ("K", "MN"):
        scales = torch.randn(3, 5, 2, generator=rng)
        assert_same_bits(operations.pack_scale_major(operations.pack_scale_major(scales, major), major), scales)
    with pytest.raises(ValueError, match="m_indptr"):
        operations.pack_closed_form_128(rows, [0, 299])


def test_packers_of_weights_take_any_strides(rng: torch.Generator) -> None:
    weights = torch.randint(0, 256, (3, 137, 8), generator=rng).to(torch.uint8)
    packed = operations.pack_swizzled_weights(weights)
    assert_same_bits(operations.pack_swizzled_weights(weights.transpose(1, 2).contiguous().transpose(1, 2)), packed)
    packed = packed.transpose(1, 2).contiguous().transpose(1, 2)
    assert not packed.is_contiguous()
    assert_same_bits(operations.unpack_swizzled_weights(packed, 137, torch.uint8), weights)


@pytest.mark.parametrize(
    "offsets", [[0, 2.0, 8], torch.tensor([0, 2.5, 8]), torch.tensor([[0, 8]]), 8, None, "08"], ids=str
)
def test_offsets_of_the_packers_are_integers(offsets: Any) -> None:
    scales, packed = torch.zeros(8, 4, dtype=torch.uint8), torch.zeros(16, 4, dtype=torch.int32)
    blocks = torch.zeros(4, 1, 32, 4, 4, dtype=torch.uint8)
    for call, name in (
        (lambda: operations.pack_dense_128(scales, offsets), "group_offsets"),
        (lambda: operations.unpack_dense_128(blocks, offsets, [0, 0], 4), "group_offsets"),
        (lambda: operations.unpack_dense_128(blocks, [0, 2, 8], offsets, 4), "group_scale_offsets"),
        (lambda: operations.pack_closed_form_128(scales, offsets), "m_indptr"),
        (lambda: operations.unpack_closed_form_128(blocks.view(512, 4), offsets), "m_indptr"),
        (lambda: operations.pack_ue8m0_rows(scales, offsets), "m_indptr"),
        (lambda: operations.unpack_ue8m0_rows(packed, offsets, 16), "m_indptr"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected one dimension of integers, got "):
            call()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_packers_take_scales_inside_a_wider_buffer(count: int, rng: torch.Generator) -> None:
    wide = torch.randint(0, 256, (count, 7), generator=rng).to(torch.uint8)
    for columns in (4, 3):
        some, words = wide[:, 1 : 1 + columns], np.zeros((count, 4), np.uint8)
        words[:, :columns] = some
        packed = operations.pack_ue8m0_rows(some, [0, count])
        assert_same_bits(packed[:count].contiguous(), words.view(np.int32))
        assert_same_bits(operations.pack_ue8m0_weights(some[None]).contiguous(), words.view(np.int32)[None])


def test_quantizers_round_to_the_nearest(rng: torch.Generator) -> None:
    x = torch.randn(130, 272, generator=rng)
    q, s = operations.quantize_mxfp8(x[:, :256].contiguous())
    same = operations.quantize_rows(x[:, :256].contiguous(), "mxfp8")
    assert_same_bits(q, same.quants_RK)
    assert_same_bits(s, same.scales_RV)
    for block in (32, 128):
        q, s = operations.quantize_mxfp8(x, block)
        scale = s.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(block, 1)[:, :272]
        assert (bits(q) == (x.numpy() / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
        error = (operations.dequantize_mxfp8(q, s, block) - x).abs()
        assert (error <= x.abs() / 16 + torch.from_numpy(scale) * 2.0**-10).all()
    for gm in (1, 128):
        for dtype, kind in ((E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)):
            q, s = operations.quantize_fp8(x, gm, dtype)
            factor = s.numpy().repeat(gm, 0)[:130].repeat(128, 1)[:, :272]
            assert (bits(q) == (x.numpy() / factor).astype(kind).view(np.uint8)).all()
            assert_same_bits(operations.dequantize_fp8(q, s, gm), q.float() * torch.from_numpy(factor))
    w = torch.randn(2, 24, 64, generator=rng)
    gsf = torch.cat([operations.nvfp4_encode_scale(part) for part in w])
    q, s = operations.quantize_nvfp4(w, gsf)
    back = operations.dequantize_nvfp4(q, s, (1 / gsf)[:, None, None])
    assert ((back - w).abs() <= w.abs().amax() / 6).all() and (back - w).norm() < 0.12 * w.norm()
    # Of no experts.
    q, s = operations.quantize_nvfp4(w[:0], gsf[:0])
    assert (q.shape, q.dtype, s.shape, s.dtype) == ((0, 24, 32), torch.uint8, (0, 24, 4), E4M3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [1, 128])
def test_a_block_of_fp8_that_is_not_finite_is_nan(
    rows: int, value: float, rng: torch.Generator, device: torch.device
) -> None:
    x = torch.randn(130, 256, generator=rng).to(device)
    want, want_scales = operations.quantize_fp8(x, rows)
    x[5, 130] = value
    quants, scales = operations.quantize_fp8(x, rows)
    spoiled = torch.zeros_like(scales, dtype=torch.bool)
    spoiled[5 // rows, 1] = True
    assert torch.equal(scales.isnan(), spoiled)
    assert_same_bits(scales[~spoiled], want_scales[~spoiled])
    at = spoiled.repeat_interleave(rows, 0)[:130].repeat_interleave(128, 1)
    assert not quants.float()[at].any()
    assert_same_bits(quants.view(torch.uint8)[~at], want.view(torch.uint8)[~at])


def test_encode_scales_of_tiny_and_infinite_tensors(device: torch.device) -> None:
    """Clamped to 2^100; a tensor without a finite largest number other than 0 has 1."""
    for value, want in (
        (2.0**-120, 2.0**100),
        (0.0, 1.0),
        (torch.inf, 1.0),
        (torch.nan, 1.0),
        (2688.0, 1.0),
        (1.0, 2688.0),
    ):
        x = torch.full((2, 32), value, device=device)
        assert float(operations.nvfp4_encode_scale(x)) == want, value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 128])
def test_quantize_mxfp8_by_chunks(
    block: int, dtype: torch.dtype, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each engine the same; a few rows at a time, since the encoder needs many temporaries."""
    x = (torch.randn(2, 11, 272, generator=rng) * torch.exp2(torch.randint(-20, 20, (2, 11, 1), generator=rng))).to(
        dtype
    )
    x[1, 3, 40], x[0, 2, 271] = torch.nan, -torch.inf
    blocks = torch.nn.functional.pad(x.double(), (0, -272 % block)).unflatten(-1, (-1, block))
    amax, bad = blocks.abs().amax(-1), ~blocks.isfinite().all(-1)
    # 1e-4 in fp32, as the kernels have it; a power of two is its own scale.
    mantissa, exponent = torch.frexp(amax.masked_fill(bad, 0).clamp(min=float(np.float32(1e-4))) / 448)
    exponent -= (mantissa == 0.5).int()
    scaled = (blocks.masked_fill(bad[..., None], 0) / torch.exp2(exponent.double())[..., None]).flatten(-2)[..., :272]
    quants = scaled.numpy().astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    bytes_ = (exponent + 127).masked_fill(bad, 255).to(torch.uint8)
    tile, sizes = reference_quantize.quantize_tile, []

    def remember(x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(x.numel())
        return tile(x, *more)

    monkeypatch.setattr(reference_quantize, "CHUNK_ELEMENTS", 5 * 384)
    monkeypatch.setattr(reference_quantize, "quantize_tile", remember)
    for engine in ENGINES:
        q, s = operations.quantize_mxfp8(x.to(device), block, engine=engine)
        assert_same_bits(q.view(torch.uint8), quants, f"{engine} quants")
        assert_same_bits(s, bytes_, f"{engine} scales")
    assert 0 < max(sizes) <= 5 * 384


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"^x: expected a tensor, got list"):
        operations.nvfp4_encode_scale([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^scales_RV: expected a tensor, got NoneType"):
        operations.swizzle_scales(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^blocks: expected a tensor, got NoneType"):
        operations.unswizzle_scales(None, 1, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^scales_RV: expected a tensor, got NoneType"):
        operations.pack_dense_128(None, [0, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "quantize",
    [
        operations.nvfp4_encode_scale,
        operations.quantize_nvfp4,
        operations.quantize_mxfp8,
        operations.quantize_fp8,
    ],
)
def test_what_requires_a_gradient_is_refused(
    quantize: Callable[..., Any], dtype: torch.dtype, rng: torch.Generator, device: torch.device
) -> None:
    """But for parameters under `no_grad`, which are quantized like other tensors."""
    x = torch.randn(2, 8, 128, generator=rng).to(device, dtype)
    weight = torch.nn.Parameter(x)
    with pytest.raises(ValueError, match=r"^x: requires grad, expected no gradient .* got requires_grad=True"):
        quantize(weight)
    with torch.no_grad():
        found, wanted = quantize(weight), quantize(x)
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, wanted)), strict=True):
        assert_same_bits(a.detach(), b)


def test_decode_scales_of_nvfp4(rng: torch.Generator, device: torch.device) -> None:
    """Of each expert too, where there are as many as columns."""
    q = torch.randint(0, 256, (32, 8, 16), generator=rng).to(torch.uint8).to(device)
    scales = torch.ones(32, 8, 2, device=device).to(E4M3)
    codes = torch.stack([q & 15, q >> 4], -1).flatten(-2)
    plain = op_cases.VALUES["e2m1"].to(device)[codes.int()]
    each = torch.exp2(torch.arange(32, device=device).float() - 16)
    by_row = torch.exp2(torch.arange(8, device=device).float())
    for scale, factor in (
        (None, 1.0),
        (0.25, 0.25),
        (4, 4.0),
        (torch.tensor(0.25, device=device), 0.25),
        (torch.tensor([0.25], device=device), 0.25),
        (each, each[:, None, None]),
        (each[:, None, None], each[:, None, None]),
        (by_row[None, :, None], by_row[None, :, None]),
    ):
        assert_same_bits(operations.dequantize_nvfp4(q, scales, scale), (plain * factor).float())
    found = operations.dequantize_nvfp4(q[0], scales[0], by_row[:, None])
    assert_same_bits(found, (plain[0] * by_row[:, None]).float())
    for scale in (by_row, each[:8], each.double(), each.to("meta"), each[:, None], torch.ones(2, 1, 1, 1), "1", [1.0]):
        with pytest.raises(ValueError, match=r"^decode_scale: expected"):
            operations.dequantize_nvfp4(q, scales, scale)
    with pytest.raises(ValueError, match=r"^decode_scale: expected"):
        operations.dequantize_nvfp4(q[0], scales[0], each)


BYTES = torch.zeros(1, 128, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: operations.quantize_nvfp4(torch.zeros(3, 20)), "x"),
        (lambda: operations.quantize_nvfp4(torch.zeros(3, 32), torch.ones(3)), "gsf"),
        (lambda: operations.quantize_nvfp4(torch.zeros(3, 32), None), "gsf"),  # type: ignore[arg-type]
        (lambda: operations.quantize_mxfp8(torch.zeros(3, 32), 64), "granularity_k"),
        (lambda: operations.quantize_mxfp8(torch.zeros(3, 32), 32, engine="nvcc"), "engine"),
        (lambda: operations.quantize_mxfp8(torch.zeros(3, 32), 128, engine="nvcc"), "engine"),
        (lambda: operations.quantize_fp8(torch.zeros(3, 128), 2), "granularity_mn"),
        (lambda: operations.quantize_fp8(torch.zeros(3, 128), 1, torch.float16), "dtype"),
        (lambda: operations.dequantize_fp8(torch.zeros(3, 128).to(E4M3), torch.zeros(3, 2)), "scales"),
        (lambda: operations.dequantize_fp8(torch.zeros(3, 130).to(E4M3), torch.zeros(3, 1)), "q"),
        (lambda: operations.dequantize_fp8(torch.zeros(128).to(E4M3), torch.zeros(1)), "q"),
        (lambda: operations.pack_scale_major(torch.zeros(3, 2), "N"), "major"),
        (lambda: operations.pack_scale_major(torch.zeros(3), "MN"), "scales"),
        (lambda: operations.pack_dense_128(torch.ones(8, 4), [0, 8]), "scales_RV"),
        (lambda: operations.pack_dense_128(BYTES, [0, 8]), "scales_RV"),
        (lambda: operations.unpack_dense_128(torch.zeros(1, 1, 32, 4, 4), [0, 8], [0], 4), "blocks"),
        (lambda: operations.unpack_dense_128(BYTES, [0, 8], [0], 4), "blocks"),
        (lambda: operations.unpack_dense_128(torch.zeros(1, 1, 32, 4, 4).to(E4M3), [1, 8], [0], 4), "group_offsets"),
        (
            lambda: operations.unpack_dense_128(torch.zeros(1, 1, 32, 4, 4).to(E4M3), [0, 8, 4], [0, 0], 4),
            "group_offsets",
        ),
        (lambda: operations.unpack_dense_128(BYTES.view(1, 1, 8, 16, 4), [0, 8], [0], 4), "blocks"),
        (lambda: operations.pack_closed_form_128(torch.ones(8, 4), [0, 8]), "scales_RV"),
        (lambda: operations.pack_closed_form_128(BYTES, [0, 8]), "scales_RV"),
        (lambda: operations.unpack_closed_form_128(BYTES, [0, 8]), "packed"),
        (lambda: operations.unpack_closed_form_128(BYTES[0, :100], [0, 8]), "packed"),
        (lambda: operations.unpack_closed_form_128(BYTES[0], [0, 64, 128]), "packed"),
        (lambda: operations.unpack_closed_form_128(BYTES[0], []), "m_indptr"),
        (lambda: operations.unpack_closed_form_128(BYTES[0].float(), [0, 8]), "packed"),
        (lambda: operations.pack_ue8m0_rows(BYTES, [0, 8]), "scales_RV"),
        (lambda: operations.pack_ue8m0_rows(torch.zeros(8, 4), [0, 8]), "scales_RV"),
        (lambda: operations.unpack_ue8m0_rows(BYTES[0], [0, 8], 4), "packed"),
        (lambda: operations.unpack_ue8m0_rows(torch.zeros(8, 2, dtype=torch.int32), [0, 8], 4), "packed"),
        (lambda: operations.unpack_ue8m0_rows(torch.zeros(8, 1, dtype=torch.int32), [0, 1, 2, 8], 4), "packed"),
        (lambda: operations.pack_ue8m0_weights(torch.zeros(1, 3, 2)), "scales_ENV"),
        (lambda: operations.pack_ue8m0_weights(BYTES[0]), "scales_ENV"),
        (lambda: operations.unpack_ue8m0_weights(torch.zeros(8, 1, dtype=torch.int32), 4), "packed"),
        (lambda: operations.pack_swizzled_weights(BYTES[:, :, :2]), "scales_ENV"),
        (lambda: operations.pack_swizzled_weights(BYTES[0]), "scales_ENV"),
        (lambda: operations.pack_swizzled_weights(torch.zeros(1, 8, 4)), "scales_ENV"),
        (lambda: operations.unpack_swizzled_weights(BYTES[0], 8), "packed"),
        (lambda: operations.unpack_swizzled_weights(BYTES, 8, torch.float32), "dtype"),
        (lambda: operations.unpack_closed_form_128(BYTES[0], [0, 8], torch.int16), "dtype"),
        (lambda: operations.unpack_swizzled_weights(BYTES[:, :100], 8), "packed"),
        (lambda: operations.unpack_swizzled_weights(BYTES, 137), "packed"),
    ],
)
def test_bad_inputs_of_the_packers_are_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        call()
