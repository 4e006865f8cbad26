"""The two products of an expert together: the same bits as one after the other, and close to float64 in bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.experts import Experts
from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SQUARED_RELU,
    Activation,
    ExpertWeights,
    GateUpOrder,
    SwiGLU,
)
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import (
    PAIRS,
    check_inside,
    decode_rows,
    dequant_weights,
    exact_gemm,
    make_rows,
    random_weights,
)
from tests.support.gemm_checks import check_quantized

HIDDEN, INNER, EXPERTS = 128, 256, 3
SIZES = [4, 0, 67]
ACTIVATIONS = {
    "silu": SwiGLU(),
    "up_gate": SwiGLU(GateUpOrder.UP_GATE),
    "oss": GPT_OSS,
    "gelu": GEGLU,
    "gelu_tanh": GEGLU_TANH,
    "relu2": SQUARED_RELU,
}


def _experts(
    weight: str,
    token: str,
    rng: torch.Generator,
    device: torch.device,
    engine: str,
    activation: Activation | None = None,
) -> Experts:
    activation = activation or SwiGLU()
    gate_up = torch.randn(EXPERTS, activation.num_parts * INNER, HIDDEN, generator=rng) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=rng) * INNER**-0.5
    return Experts(
        ExpertWeights.quantize(gate_up, weight, gate_up=activation.gate_up or False, engine="torch").to(device),
        ExpertWeights.quantize(down, weight, engine="torch").to(device),
        activation,
        intermediate_format=token,
        intermediate_gsf=7.0 if token == "nvfp4" else None,
        engine=engine,
    )


@pytest.mark.parametrize("engine", ["triton", "torch"])
@pytest.mark.parametrize("activation", [SwiGLU(), SQUARED_RELU], ids=["silu", "relu2"])
@pytest.mark.parametrize(("weight", "token"), PAIRS)
def test_experts_are_the_two_products(
    weight: str, token: str, activation: Activation, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Bit for bit the two calls; and inside the bound of the second product of the intermediate rows as they are."""
    experts = _experts(weight, token, rng, device, engine, activation)
    rows = make_rows(token, SIZES, HIDDEN, rng, device, num_experts=EXPERTS, gather=True, spare=3)
    hidden = grouped_gemm_swiglu(
        rows,
        experts.gate_up,
        experts.activation,
        out_format=token,
        out_gsf=7.0 if token == "nvfp4" else None,
        engine=engine,
    )
    want = grouped_gemm(hidden, experts.down, engine=engine)
    got = torch.full((rows.capacity, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
    assert experts(rows, out=got) is got
    assert_same_bits(got[:71], want[:71], "experts")
    assert got[71:].isnan().all()
    assert experts(rows).dtype == torch.bfloat16
    check_inside(got, exact_gemm(hidden, experts.down, device), 2.0**-8)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_bf16_experts_against_float64(activation: Activation, rng: torch.Generator, device: torch.device) -> None:
    """Two roundings to bf16, 2^-8 of the intermediate and of the result; fp32 sums add far less than 2^-12."""
    experts = _experts("bf16", "bf16", rng, device, "auto", activation)
    rows = make_rows("bf16", SIZES, HIDDEN, rng, device, num_experts=EXPERTS)
    x, gate_up, down = decode_rows(rows), dequant_weights(experts.gate_up), dequant_weights(experts.down)
    got = experts(rows).cpu().double().numpy()
    for e, span in ((0, slice(0, 4)), (2, slice(4, 71))):
        c = torch.from_numpy(x[span] @ gate_up[e].T)
        h = activate(c, activation).numpy()
        y = h @ down[e].T
        bound = 2.0**-8 * np.abs(y) + (2.0**-8 + 2.0**-12) * (np.abs(h) @ np.abs(down[e]).T)
        assert (np.abs(got[span] - y) <= bound).all()


def test_no_experts_and_no_rows(rng: torch.Generator, device: torch.device) -> None:
    experts = _experts("nvfp4", "nvfp4", rng, device, "auto")
    rows = make_rows("nvfp4", [0, 0, 0], HIDDEN, rng, device, num_experts=EXPERTS)
    assert experts(rows).shape == (0, HIDDEN)
    empty = Experts(
        ExpertWeights.quantize(torch.zeros(0, 2 * INNER, HIDDEN, device=device), "bf16", gate_up=True),
        ExpertWeights.quantize(torch.zeros(0, HIDDEN, INNER, device=device), "bf16"),
    )
    assert empty.num_experts == 0
    nothing = make_rows("bf16", [], HIDDEN, rng, device, num_experts=1, spare=2)
    out = torch.full((2, HIDDEN), 3.0, dtype=torch.bfloat16, device=device)
    assert (empty(nothing, out=out) == 3.0).all()


def test_to(rng: torch.Generator, device: torch.device) -> None:
    experts = _experts("nvfp4", "nvfp4", rng, torch.device("cpu"), "torch")
    rows = make_rows("nvfp4", SIZES, HIDDEN, rng, torch.device("cpu"), num_experts=EXPERTS)
    state = rng.get_state()
    assert isinstance(experts.intermediate_gsf, torch.Tensor) and experts.intermediate_gsf.tolist() == [7.0]
    moved = experts.to(device)
    assert moved.gate_up.device.type == moved.down.device.type == device.type
    rng.set_state(state)
    if device.type == "cpu":
        assert_same_bits(moved(rows), experts(rows), "moved")


def test_weights_that_do_not_belong_together(rng: torch.Generator) -> None:
    cpu = torch.device("cpu")
    good = _experts("nvfp4", "nvfp4", rng, cpu, "torch")
    small = ExpertWeights.quantize(torch.zeros(EXPERTS, HIDDEN, 64), "nvfp4")
    for change, name in (
        ({"down": small}, r"down: expected K = I = 256, got 64"),
        ({"down": ExpertWeights.quantize(torch.zeros(2, HIDDEN, INNER), "nvfp4")}, r"down: expected 3 experts"),
        ({"down": ExpertWeights.quantize(torch.zeros(3, 64, INNER), "nvfp4")}, r"down: expected N = H = 128, got 64"),
        ({"activation": GPT_OSS}, r"activation\.order: expected gate_up as in gate_up, got interleaved"),
        ({"intermediate_format": "mxfp8", "intermediate_gsf": None}, r"intermediate_format: expected nvfp4 or bf16"),
        ({"engine": "nvcc"}, r"engine: expected auto, cuda, triton or torch"),
        ({"intermediate_format": "bf16"}, r"intermediate_gsf: expected None for bf16"),
        ({"intermediate_gsf": float("nan")}, r"intermediate_gsf: expected a positive finite number"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            replace(good, **change)


@pytest.mark.parametrize("order", [None, GateUpOrder.GATE_UP])
@pytest.mark.parametrize("middle", ["nvfp4", "bf16"])
def test_prepacked_experts(
    middle: str,
    order: GateUpOrder | None,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prepacked where a GPU asks for it; gate and up that do not say so are prepacked in the activation's order."""
    gate_up = random_weights("nvfp4", 2, 64, 64, rng, device, gate_up=order or False)
    raw = Experts(gate_up, random_weights("nvfp4", 2, 64, 32, rng, device), intermediate_format=middle)
    monkeypatch.setattr(PrepackedWeights, "wanted", staticmethod(lambda w, engine="auto": True))
    experts = raw.prepacked()
    assert isinstance(experts.gate_up, PrepackedWeights) and isinstance(experts.down, PrepackedWeights)
    assert experts.gate_up.gate_up is GateUpOrder.GATE_UP and experts.down.gate_up is None
    rows = make_rows("nvfp4", [3, 0, 9], 64, rng, device, num_experts=2)
    got = experts(rows)
    if device.type == "cpu":
        assert_same_bits(got, raw(rows))
    # On a GPU the order of sums is another, so that a code of the intermediate may be: each product by its own bound.
    gsf = experts.intermediate_gsf
    hidden = grouped_gemm_swiglu(rows, experts.gate_up, SwiGLU(), out_format=middle, out_gsf=gsf)
    check_quantized(hidden, exact_gemm(rows, gate_up, device), SwiGLU(), 1.0 if gsf is None else float(gsf))
    assert_same_bits(got, grouped_gemm(hidden, experts.down))
    check_inside(got, exact_gemm(hidden, raw.down, device), 2.0**-8)


def test_prepacked_weights_in_the_wrong_place(rng: torch.Generator, device: torch.device) -> None:
    gate_up = PrepackedWeights.prepack(random_weights("nvfp4", 2, 64, 64, rng, device, gate_up=True))
    down = PrepackedWeights.prepack(random_weights("nvfp4", 2, 64, 32, rng, device))
    Experts(gate_up, down)
    with pytest.raises(ValueError, match=r"^gate_up\.gate_up: expected prepacked weights of gate and up"):
        Experts(replace(gate_up, gate_up=None, expert_scales=None), down)
    with pytest.raises(ValueError, match=r"^down: expected plain prepacked"):
        Experts(gate_up, replace(down, gate_up=GateUpOrder.GATE_UP))
    with pytest.raises(ValueError, match=r"^gate_up\.gate_up: expected None without a gate, got gate_up"):
        Experts(gate_up, down, SQUARED_RELU)
    up = PrepackedWeights.prepack(random_weights("nvfp4", 2, 32, 64, rng, device))
    Experts(up, down, SQUARED_RELU)
    with pytest.raises(ValueError, match=r"^down: expected K = I = 64, got 32"):
        Experts(PrepackedWeights.prepack(random_weights("nvfp4", 2, 64, 64, rng, device)), down, SQUARED_RELU)
