"""Operations on prepacked weights: the same results as on raw ones, within the bound on a GPU, bit for bit on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime import ops
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from tests.support.comparison import assert_same_bits
from tests.support.op_cases import OpCase, check, mxfp8, nvfp4_closed, nvfp4_dense

Make = Callable[..., OpCase]

VARIANTS: dict[str, tuple[Make, dict[str, Any]]] = {
    "dense": (nvfp4_dense, {}),
    "closed": (nvfp4_closed, {}),
    "mxfp8_128": (mxfp8, {"block": 128}),
    "mxfp8_32": (mxfp8, {"block": 32}),
}


def nvfp4_prepacked(e: int, n: int, k: int, rng: torch.Generator, device: torch.device) -> PrepackedWeights:
    w = ExpertWeights.quantize(torch.randn(e, n, k, generator=rng).to(device), "nvfp4")
    return replace(PrepackedWeights.prepack(w), expert_scales=None)


@pytest.mark.parametrize("name", VARIANTS)
def test_prepacked_weights(name: str, rng: torch.Generator, device: torch.device) -> None:
    """Ragged groups, an empty one, N no multiple of a unit of 64, more rows than one tile of the kernel takes."""
    make, options = VARIANTS[name]
    sizes, n, k = ([4, 0, 300, 8], 136, 256) if device.type == "cuda" else ([4, 0, 12, 8], 72, 128)
    raw = make(sizes, n, k, rng, device, **options)
    got = check(raw.prepacked(), "auto")
    if device.type == "cpu":
        assert_same_bits(got, raw.run(engine="torch"))


@pytest.mark.parametrize("engine", ["torch", "triton", "auto"])
@pytest.mark.parametrize(("block", "prepacked_block"), [(128, 32), (32, 128), (128, 128)])
def test_rows_and_prepacked_weights_of_different_blocks(
    block: int, prepacked_block: int, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Each scale of the weights is another one; K is no multiple of 128, and the last words are not full."""
    for n, k in ((40, 672), (8, 32)):
        rows, weights = (mxfp8([4, 0, 13, 3], n, k, rng, device, block=size) for size in (block, prepacked_block))
        more = torch.randint(0, 8, (4, n, -(-k // prepacked_block)), generator=rng).to(torch.uint8).to(device)
        b, scale = weights.arguments["b"], weights.arguments["b_scale"]
        scale = ops.pack_ue8m0_weights(ops.unpack_ue8m0_weights(scale, more.shape[2]) + more)
        w = ops.prepack_mxfp8(b, scale, (1, 1, prepacked_block))
        exact = weights.weights * torch.exp2(more.double()).repeat_interleave(prepacked_block, 2)[..., :k]
        check(replace(rows, arguments=rows.arguments | {"b": w, "b_scale": None}, weights=exact), engine)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", [(4096, 7168), (256, 2176), (3008, 2976)])
def test_large_shapes(shape: tuple[int, int], name: str, rng: torch.Generator, device: torch.device) -> None:
    make, options = VARIANTS[name]
    n, k = shape
    if make is nvfp4_closed:
        k = k // 128 * 128
    check(make([16, 0, 64, 376], n, k, rng, device, **options).prepacked(), "auto")


@pytest.mark.parametrize("name", VARIANTS)
def test_small_integers_are_exact(name: str, rng: torch.Generator, device: torch.device) -> None:
    make, options = VARIANTS[name]
    case = make([0, 12, 68], 40, 256, rng, device, integers=True, **options)
    assert_same_bits(case.prepacked().run(engine="auto"), case.exact().value.float().to(torch.bfloat16))


@pytest.mark.parametrize("ids", [[0, 3, 2, 4], [-1, 0, 2], [-1, -1, -1]])
def test_expert_ids(ids: list[int], rng: torch.Generator, device: torch.device) -> None:
    """K no multiple of 64; rows of groups without an expert keep what they hold."""
    sizes = [5, 33, 3, 1][: len(ids)]
    case = nvfp4_dense(sizes, 72, 80, rng, device, ids=ids, num_experts=6, gaps=1, offsets_dtype=torch.int32)
    check(case.prepacked(), "auto", torch.float32)


def test_wrong_arguments(rng: torch.Generator, device: torch.device) -> None:
    raw = nvfp4_dense([3, 2], 32, 64, rng, device)
    case = raw.prepacked()

    def refused(match: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            replace(case, arguments=case.arguments | more).run(engine="auto")

    w: PrepackedWeights = case.arguments["b"]
    refused("^b_scales: expected None", b_scales=raw.arguments["b_scales"])
    refused("^b: expected plain", b=replace(w, gate_up=GateUpOrder.GATE_UP))
    refused("^b: expected K", b=nvfp4_prepacked(2, 32, 128, rng, device))
    refused("^b: expected prepacked weights without", b=replace(w, expert_scales=torch.ones(2, device=device)))
    refused("^b: expected prepacked weights without", b=replace(w, bias=torch.ones(2, 32, device=device)))
    other = ExpertWeights.quantize(torch.randn(2, 32, 64, generator=rng).to(device), "mxfp8")
    refused("^b: expected plain", b=PrepackedWeights.prepack(other))
    with pytest.raises(ValueError, match=r"^is_gated: expected False with prepacked weights, got True"):
        gated = mxfp8([3, 2], 32, 64, rng, device, is_gated=True)
        gated.prepacked().run()
    with pytest.raises(ValueError, match=r"^b_scales: expected"):
        ops.prepack_nvfp4(raw.arguments["b"], torch.full_like(raw.arguments["b_scales"], torch.nan))
    with pytest.raises(ValueError, match=r"^b: expected N"):
        ops.prepack_nvfp4(raw.arguments["b"][:, :20].contiguous(), raw.arguments["b_scales"])
    with pytest.raises(ValueError, match=r"^b_scales"):
        ops.prepack_nvfp4(raw.arguments["b"], raw.arguments["b_scales"][:1])
    with pytest.raises(ValueError, match=r"^expert_scales: expected"):
        replace(w, expert_scales=torch.ones(3, device=device))
    with pytest.raises(ValueError, match=r"^units: expected"):
        replace(w, num_columns=256)


def test_operands_that_the_fast_kernel_does_not_take(rng: torch.Generator, device: torch.device) -> None:
    """Rows of the output off its alignment: the weights are restored for the other kernel."""
    case = nvfp4_dense([3, 2], 32, 64, rng, device).prepacked()
    wide = torch.full((5, 33), 0x7FAB, dtype=torch.int16, device=device).view(torch.bfloat16)
    case.run(wide[:, :32], engine="auto")
    assert_same_bits(wide[:, :32].contiguous(), case.run(engine="triton" if device.type == "cuda" else "auto"))
