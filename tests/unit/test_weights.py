"""Offline quantization of weights against numpy and ml_dtypes, and the checks of `ExpertWeights`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS as FORMATS
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import Activation, ActivationFunction, ExpertWeights, GateUpOrder, SwiGLU
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import bits, dequant_weights

ORDERS = {
    GateUpOrder.GATE_UP: ([0, 1, 2], [3, 4, 5]),
    GateUpOrder.UP_GATE: ([3, 4, 5], [0, 1, 2]),
    GateUpOrder.INTERLEAVED: ([0, 2, 4], [1, 3, 5]),
}
LIMITED: dict[str, Any] = {"limit": 7.0, "limit_on": "function"}


@pytest.mark.parametrize("order", GateUpOrder)
def test_gate_and_up_rows(order: GateUpOrder) -> None:
    rows = list(range(6))
    assert (rows[order.gate_rows(6)], rows[order.up_rows(6)]) == ORDERS[order]


def test_activation_takes_the_name_of_an_order() -> None:
    assert SwiGLU("interleaved").order is GateUpOrder.INTERLEAVED  # type: ignore[arg-type]
    assert Activation(function="relu2").function is ActivationFunction.RELU2  # type: ignore[arg-type]
    assert [order.code for order in GateUpOrder] == [1, 2, 3]


@pytest.mark.parametrize("engine", ["triton", "torch"])
@pytest.mark.parametrize("gate_up", [False, True, *GateUpOrder])
@pytest.mark.parametrize("name", FORMATS)
def test_quantize_reads_back(
    name: str, gate_up: GateUpOrder | bool, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Sizes, both directions against ml_dtypes, and a rounding error inside the format's."""
    n, k = 144, 256
    w = torch.randn(2, n, k, generator=rng)
    w[1] *= 100
    weights = ExpertWeights.quantize(w.to(device), name, gate_up=gate_up, engine=engine)
    assert (weights.num_experts, weights.num_rows, weights.num_columns) == (2, n, k)
    back = weights.dequantize(engine=engine)
    factors = weights.row_factors().cpu().double().numpy()[:, :, None]
    dequantized = dequant_weights(weights).astype(np.float32) * factors.astype(np.float32)
    assert_same_bits(back, dequantized, name)
    bound = _rounding_bound(name, np.abs(w.numpy()))
    assert (np.abs(back.cpu().numpy() - w.numpy()) <= bound).all()


def _rounding_bound(name: str, magnitude: np.ndarray) -> np.ndarray:
    """How far a quantized weight may be from the original `[E, N, K]`.

    Half a step of the element relative to it; for e4m3 half a denormal step, 2^-10 of a scale that is at most
    `2 * amax / 448`; for e2m1 one, half the step below 6, of a scale that is `amax / 6` rounded by 2^-4 (a code that
    saturates because the scale rounded down loses less); and 2^-22 for products of fp32 scales.
    """
    if name == "bf16":
        return 2.0**-8 * magnitude
    if name == "mxfp4":
        # Half the step below 6 of a scale that is at most twice `amax / 6`.
        return magnitude.reshape(*magnitude.shape[:2], -1, 32).max(-1).repeat(32, 2) / 3
    if name == "nvfp4":
        amax = magnitude.reshape(*magnitude.shape[:2], -1, 16).max(-1).repeat(16, 2)
        return (1 + 2.0**-4) * amax / 6 + 2.0**-22 * magnitude
    return (2.0**-4 + 2.0**-22) * magnitude + 2.0**-9 * magnitude.max((1, 2), keepdims=True) / 448


@pytest.mark.parametrize("order", GateUpOrder)
def test_nvfp4_scales_of_gate_and_up(order: GateUpOrder, rng: torch.Generator, device: torch.device) -> None:
    """`1 / (2688 / amax)` of each half of each expert, two roundings; tiny halves are clamped to 2^-100."""
    w = torch.randn(3, 32, 64, generator=rng)
    w[:, order.up_rows(32)] *= 37.0
    w[2, order.gate_rows(32)] = 0.0
    w[2, order.up_rows(32)] = 1e-38
    weights = ExpertWeights.quantize(w.to(device), "nvfp4", gate_up=order)
    assert weights.expert_scales is not None and weights.expert_scales.shape == (3, 2)
    for e in range(2):
        for half, part in enumerate((order.gate_rows(32), order.up_rows(32))):
            amax = np.float32(w[e, part].abs().max())
            expected = np.float32(1) / (np.float32(2688) / amax)
            assert float(weights.expert_scales[e, half]) == expected
    assert weights.expert_scales[2].tolist() == [1.0, 2.0**-100]
    plain = ExpertWeights.quantize(w.to(device), "nvfp4")
    assert plain.expert_scales is not None and plain.expert_scales.shape == (3,)


@pytest.mark.parametrize("order", [None, *GateUpOrder])
@pytest.mark.parametrize(("n", "k"), [(208, 384), (384, 192), (640, 288), (704, 320), (16, 16), (512, 2880)])
def test_fp8_blocks(n: int, k: int, order: GateUpOrder | None, rng: torch.Generator, device: torch.device) -> None:
    """128x128 blocks one by one with numpy, short ones at the end of N and K; gate and up, one above the other, each
    start with a block."""
    w = torch.randn(2, n, k, generator=rng) * torch.logspace(-8, 3, k)
    w[1, :128, :128] *= 1e-4  # under the floor of the maximum
    tail = (k - 1) // 128 * 128
    w[0, :, tail - 1], w[0, :, tail:] = 1e8, w[0, :, tail:] * 1e-3
    weights = ExpertWeights.quantize(w.to(device), "fp8_block", gate_up=order or False)
    starts = [0] if order in (None, GateUpOrder.INTERLEAVED) else [0, n // 2]
    rows = [
        slice(first, min(first + 128, start + n // len(starts)))
        for start in starts
        for first in range(start, start + n // len(starts), 128)
    ]
    assert weights.scales is not None and weights.scales.shape == (2, len(rows), -(-k // 128))
    assert weights.scale_rows().tolist() == [i for i, block in enumerate(rows) for _ in range(block.start, block.stop)]
    quants, scales, back = bits(weights.quants), weights.scales.cpu().numpy(), weights.dequantize().cpu().numpy()
    for e, (i, of_n), j in itertools.product(range(2), enumerate(rows), range(-(-k // 128))):
        at = e, of_n, slice(j * 128, (j + 1) * 128)
        scale = np.maximum(np.abs(w[at].numpy()).max(), np.float32(1e-4)) / np.float32(448)
        assert scales[e, i, j] == scale
        want = np.clip(w[at].numpy() / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(quants[at], want.view(np.uint8))
        np.testing.assert_array_equal(back[at], want.astype(np.float32) * scale)


def test_scales_of_another_order_are_refused(rng: torch.Generator) -> None:
    """Of 2 * 320 rows there are 5 blocks, or 6 of gate and of up."""
    plain = ExpertWeights.quantize(torch.randn(1, 640, 128, generator=rng), "fp8_block")
    with pytest.raises(ValueError, match=r"^scales: expected shape \[1, 6, 1\], got \[1, 5, 1\]"):
        replace(plain, gate_up=GateUpOrder.GATE_UP)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "mxfp4", "nvfp4"])
def test_a_bad_number_poisons_its_block_only(name: str, bad: float, rng: torch.Generator, device: torch.device) -> None:
    w = torch.randn(1, 256, 256, generator=rng)
    w[0, 3, 5] = bad
    back = ExpertWeights.quantize(w.to(device), name).dequantize()[0].cpu()
    expected = torch.zeros(256, 256, dtype=torch.bool)
    expected[: 128 if name == "fp8_block" else 4, : FORMATS[name].block] = True
    expected[: 0 if name == "fp8_block" else 3] = False
    assert torch.equal(back.isnan(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_no_experts(name: str, device: torch.device) -> None:
    weights = ExpertWeights.quantize(torch.zeros(0, 32, 128, device=device), name, gate_up=True)
    assert (weights.num_experts, weights.num_rows, weights.num_columns) == (0, 32, 128)
    assert weights.dequantize().shape == (0, 32, 128)


def test_to_and_bytes(rng: torch.Generator, device: torch.device) -> None:
    w = torch.randn(2, 32, 64, generator=rng)
    weights = ExpertWeights.quantize(w, "nvfp4", gate_up=True, bias=torch.ones(2, 32, dtype=torch.bfloat16))
    assert weights.num_bytes == 2 * 32 * 32 + 2 * 1 * 1 * 512 + 2 * 2 * 4 + 2 * 32 * 4
    moved = weights.to(device)
    assert moved.device.type == device.type and moved.gate_up is GateUpOrder.GATE_UP
    assert_same_bits(moved.dequantize(engine="torch"), weights.dequantize(engine="torch"), "moved")


NVFP4_2 = {
    "quants": torch.zeros(2, 32, 32, dtype=torch.uint8),
    "scales": torch.zeros(2, 1, 1, 32, 4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("format", {"format": "nvfp5"}),
        ("format", {"format": None}),
        ("order of gate and up", {"gate_up": "up"}),
        ("quants", {"quants": [1.0]}),
        ("scales", {"scales": [1.0]}),
        ("expert_scales", {"expert_scales": 1.0}),
        ("bias", {"bias": 1.0}),
        ("quants", {"quants": torch.zeros(32, 32, dtype=torch.uint8)}),
        ("quants", {"quants": torch.zeros(2, 32, 32, dtype=torch.int8)}),
        ("quants", {"quants": torch.zeros(2, 32, 64, dtype=torch.uint8)[:, :, ::2]}),
        ("N of quants", {"quants": torch.zeros(2, 12, 32, dtype=torch.uint8)}),
        ("scales", {"scales": None}),
        ("scales", {"scales": torch.zeros(2, 1, 1, 32, 4, 4, dtype=torch.uint8)}),
        ("scales", {"scales": torch.zeros(2, 32, 4).to(torch.float8_e4m3fn)}),
        ("expert_scales", {"expert_scales": torch.ones(2, 2)}),
        ("expert_scales", {"expert_scales": torch.ones(2, dtype=torch.float64)}),
        ("bias", {"bias": torch.ones(2, 31)}),
        ("bias", {"bias": torch.ones(2, 32, dtype=torch.bfloat16)}),
        ("bias", {"bias": torch.ones(2, 32, device="meta")}),
    ],
)
def test_bad_tensors_are_named(name: str, change: dict[str, Any]) -> None:
    good = ExpertWeights(FORMATS["nvfp4"], **NVFP4_2)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got"):
        replace(good, **change)


def test_names_stand_for_formats_and_orders() -> None:
    weights = ExpertWeights("nvfp4", **NVFP4_2, gate_up="up_gate")  # type: ignore[arg-type]
    assert weights.format is FORMATS["nvfp4"] and weights.gate_up is GateUpOrder.UP_GATE


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"^w: expected a tensor, got list"):
        ExpertWeights.quantize([1.0], "bf16")  # type: ignore[arg-type]
    for limit in ("7", 0.0, float("nan")):
        with pytest.raises(ValueError, match=rf"^limit: expected a positive number or None, got {limit!r}"):
            SwiGLU(limit=limit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^w: expected \[E, N, K\], got shape \[4, 4\]"):
        ExpertWeights.quantize(torch.zeros(4, 4), "bf16")
    with pytest.raises(ValueError, match=r"^w: expected bfloat16 or float32, got torch.float16"):
        ExpertWeights.quantize(torch.zeros(1, 8, 16, dtype=torch.float16), "bf16")
    with pytest.raises(ValueError, match=r"^K of w: format mxfp8 needs a positive multiple of 32, got 48"):
        ExpertWeights.quantize(torch.zeros(1, 8, 48), "mxfp8")
    with pytest.raises(ValueError, match=r"^format: expected one of"):
        ExpertWeights.quantize(torch.zeros(1, 8, 48), "int4")
    for name in FORMATS:
        with pytest.raises(ValueError, match=r"^N of w: expected a positive multiple of 8, got 0"):
            ExpertWeights.quantize(torch.zeros(1, 0, 128), name)
        with pytest.raises(ValueError, match=r"^N of w: expected a positive multiple of 16, got 24"):
            ExpertWeights.quantize(torch.zeros(1, 24, 128), name, gate_up=True)
    with pytest.raises(ValueError, match=r"^order of gate and up: expected one of .*, got 'up'"):
        SwiGLU("up")  # type: ignore[arg-type]
    for fields, message in (
        ({"function": "swish"}, r"function: expected one of \['silu', .*, got 'swish'"),
        ({"function": torch.zeros(2)}, "function: expected one of .*, got "),
        ({"gated": 1}, "gated: expected True or False, got 1"),
        ({"function": "gelu", "alpha": 2.0}, r"alpha: only silu has one, expected 1 with gelu, got 2\.0"),
        ({"gate_softcap": -1.0}, "gate_softcap: expected a positive number or None, got -1.0"),
        ({"function": "relu2", "up_softcap": 4.0}, "up_softcap: only silu has one, expected None with relu2"),
        ({"gated": False, "up_softcap": 4.0}, "up_softcap: expected None without a gate, got 4.0"),
        ({"gated": False, "limit": 7.0}, "limit: expected None without a gate, got 7.0"),
        ({"gated": False, "up_offset": 1.0}, "up_offset: expected 0.0 without a gate, got 1.0"),
        ({"gated": False, "order": GateUpOrder.UP_GATE}, "order: expected .* without a gate, got "),
        ({"limit": 7.0, "limit_on": "up"}, "limit_on: expected gate or function, got 'up'"),
        ({"limit": 7.0, "limit_on": True}, "limit_on: expected gate or function, got True"),
        ({"limit_on": "function"}, "limit_on: expected gate without a limit, got function"),
        ({"gated": False, "limit_on": "function"}, "limit_on: expected gate without a limit, got function"),
        ({**LIMITED, "function": "gelu"}, "function: expected silu with a limit on the function, got gelu"),
        ({**LIMITED, "alpha": 1.5}, r"alpha: expected 1.0 with a limit on the function, got 1\.5"),
        ({**LIMITED, "up_softcap": 4.0}, r"up_softcap: expected None with a limit on the function, got 4\.0"),
        ({**LIMITED, "gate_softcap": 4.0}, r"gate_softcap: expected None with a limit on the function, got 4\.0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Activation(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("expert", [-1, 2])
def test_an_expert_that_is_not_there_is_named(expert: int) -> None:
    w = ExpertWeights.quantize(torch.randn(2, 64, 256), "nvfp4")
    for weights in (w, PrepackedWeights.prepack(w)):
        assert weights.expert(1).num_experts == 1
        with pytest.raises(ValueError, match=rf"^expert: expected 0 \.\. 1, got {expert}$"):
            weights.expert(expert)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x"])
@pytest.mark.parametrize("name", ["alpha", "up_offset"])
def test_numbers_of_the_activation_are_finite(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a finite number"):
        SwiGLU(**{name: value})
