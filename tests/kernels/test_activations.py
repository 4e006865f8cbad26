"""Activations: the formulas against torch, and what the epilogues make of values that are huge, infinite or NaN."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.gate_limit import gate_where_silu_is
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SILU,
    SQUARED_RELU,
    STEP_3P5,
    Activation,
    ExpertWeights,
    GateUpOrder,
)
from moe_runtime.reference import activation_reference
from tests.support.gemm_cases import ENGINES, make_rows

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 7.5, -7.5, 88.0, -88.0, 1e4, -1e4, 2.0**100, -(2.0**100)]
SPECIAL += [float("inf"), float("-inf"), float("nan")]
ACTIVATIONS = {"silu": SILU, "gelu": GEGLU, "gelu_tanh": GEGLU_TANH, "relu2": SQUARED_RELU, "gpt_oss": GPT_OSS}
ACTIVATIONS |= {"gelu_alone": Activation(function="gelu", gated=False)}
ACTIVATIONS |= {"softcaps": Activation(gate_softcap=4.0, up_softcap=25.0), "step_3p5": STEP_3P5}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_torch(name: str, gated: bool, rng: torch.Generator) -> None:
    activation = Activation(function=name, gated=gated)
    x = torch.randn(64, 128, generator=rng, dtype=torch.float64) * 8
    gate, up = x.chunk(2, dim=1)
    want = FUNCTIONS[name](gate) * up if gated else FUNCTIONS[name](x)
    torch.testing.assert_close(activate(x, activation), want, rtol=1e-13, atol=1e-13)
    # In fp32, relative to the largest of the numbers that are added, of which 1 + erf may be the small rest.
    single = activate(x.float(), activation)
    assert single.dtype == torch.float32
    size = (gate * up).abs() if gated else x.abs() * (x.abs() if name == "relu2" else 1)
    scale = size * (gate.abs() if gated and name == "relu2" else 1) + 1e-6
    assert ((single.double() - want.float().double()).abs() / scale).max() < 2e-6


@pytest.mark.parametrize("order", GateUpOrder)
def test_clamp_and_offset_go_with_every_function(order: GateUpOrder, rng: torch.Generator) -> None:
    x = torch.randn(16, 64, generator=rng, dtype=torch.float64) * 8
    gate, up = x[:, order.gate_rows(64)].clamp(max=2.0), x[:, order.up_rows(64)].clamp(-2.0, 2.0)
    for name, function in FUNCTIONS.items():
        found = activate(x, Activation(order, limit=2.0, up_offset=0.5, function=name))
        torch.testing.assert_close(found, function(gate) * (up + 0.5), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("order", GateUpOrder)
@pytest.mark.parametrize("limit", [0.01, 1.0, 7.0])
def test_a_limit_on_the_function(order: GateUpOrder, limit: float, rng: torch.Generator) -> None:
    activation = Activation(order, limit=limit, up_offset=0.5, limit_on="function")
    x = torch.randn(64, 64, generator=rng, dtype=torch.float64) * 3 * limit
    gate, up = x[:, order.gate_rows(64)], x[:, order.up_rows(64)]
    silu = gate / (1 + torch.exp(-gate))
    want = torch.where(silu > limit, limit, silu) * (up.clamp(-limit, limit) + 0.5)
    torch.testing.assert_close(activation_reference(x, activation), want, rtol=1e-14, atol=1e-16)
    # Elsewhere the clamp is that of gate, at a number in fp32.
    torch.testing.assert_close(activate(x, activation), want, rtol=1.28 * 2**-24, atol=1e-16)
    other = functional.silu(gate.clamp(max=limit))
    assert (silu.clamp(max=limit) - other).max() > 5e-4 * limit


@pytest.mark.parametrize("exponent", range(-126, 128))
def test_the_gate_at_which_silu_reaches_a_limit(exponent: int, seed: int) -> None:
    """The nearest fp32 number, and its silu within the bound that is documented."""
    factors = 1 + torch.rand(8, generator=torch.Generator().manual_seed(seed + exponent), dtype=torch.float64)
    for limit in (factors * 2.0**exponent).float().tolist():
        gate = np.float32(gate_where_silu_is(limit))
        assert abs(_silu(gate) - limit) <= 1.2786 * 2**-24 * limit
        below, above = (np.float64(np.nextafter(gate, np.float32(to))) for to in (0.0, np.inf))
        # The solution lies between the middles to both neighbours, but for the rounding of this test's silu.
        assert _silu((gate + below) / 2) <= limit * (1 + 2**-50) and _silu((gate + above) / 2) >= limit * (1 - 2**-50)


def _silu(x: np.floating) -> float:
    return float(np.float64(x) / (1 + np.exp(-np.float64(x))))


def test_softcaps_are_those_of_inkling2(rng: torch.Generator) -> None:
    modeling = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    theirs = modeling.Inkling2SoftcappedSwiGLU(SimpleNamespace(mlp_gate_softcap=4.0, mlp_up_softcap=25.0))
    x = torch.randn(64, 128, generator=rng) * 8
    torch.testing.assert_close(activate(x, ACTIVATIONS["softcaps"]), theirs(*x.chunk(2, dim=1)), rtol=1e-5, atol=1e-6)


def check_special_values(
    name: str, run: Callable[[GroupedRows, ExpertWeights, Activation], GroupedRows], device: torch.device
) -> None:
    """Raise unless huge, infinite and NaN results of the first product become what torch makes of them in fp32.

    Each row of the weight has one number, 1, so that gate and up are the first number of a token, exactly.
    """
    for activation in ACTIVATIONS.values():
        m = torch.zeros(1, 16 * activation.num_parts, 64)
        m[:, :, 0] = 1.0
        w = ExpertWeights.quantize(m, name, gate_up=activation.gate_up or False, engine="torch").to(device)
        x = torch.zeros(len(SPECIAL), 64)
        x[:, 0] = torch.tensor(SPECIAL)
        a = make_rows("bf16", [len(SPECIAL)], 64, torch.Generator(), device, num_experts=1, x=x)
        values = x[:, :1].bfloat16().float()
        want = activate(values.expand(-1, activation.num_parts), activation).expand(-1, 16)
        got = run(a, w, activation).rows[: len(SPECIAL)].view(torch.bfloat16).float().cpu()
        torch.testing.assert_close(got, want.bfloat16().float(), rtol=2**-7, atol=1e-30, equal_nan=True)
        assert got[-1].isnan().all()


def check_limit_on_function(
    name: str, run: Callable[[GroupedRows, ExpertWeights, Activation], GroupedRows], device: torch.device
) -> None:
    """Raise unless `min(silu(gate), limit) * clamp(up, -limit, limit)` is that of float64, in each order.

    Gates and ups are biases of columns, beside products of 0: all pairs of huge, infinite, NaN and of those at limits.
    """
    for order in GateUpOrder:
        for limit in (0.75, 7.0):
            activation = Activation(order, limit=limit, limit_on="function")
            assert activation.gate_limit is not None
            around = [activation.gate_limit * (1 + i / 256) for i in range(-4, 5)]
            gates = torch.tensor([*SPECIAL, *around, limit, -limit], dtype=torch.float32)
            ups = torch.tensor([0.0, -0.0, limit / 3, limit, -limit, 1.1 * limit, -9 * limit, *SPECIAL[-5:]])
            gate, up = (t.flatten() for t in torch.meshgrid(gates, ups, indexing="ij"))
            inner = (len(gate) + 15) // 16 * 16
            bias = torch.zeros(1, 2 * inner)
            bias[0, order.gate_rows(2 * inner)][: len(gate)] = gate
            bias[0, order.up_rows(2 * inner)][: len(gate)] = up
            m = torch.zeros(1, 2 * inner, 64)
            w = ExpertWeights.quantize(m, name, gate_up=order, bias=bias, engine="torch").to(device)
            token = name if name == "fp8_block" else "bf16"
            a = make_rows(token, [3], 64, torch.Generator(), device, num_experts=1, x=torch.zeros(3, 64))
            silu = gate.double() / (1 + torch.exp(-gate.double()))
            silu[silu > limit] = limit
            want = silu * torch.where(up.isnan(), up, up.clamp(-limit, limit)).double()
            assert want.isnan().sum() == (gate.isnan() | up.isnan() | gate.isneginf()).sum()
            got = run(a, w, activation).rows[:3].view(torch.bfloat16).double().cpu()[:, : len(gate)]
            torch.testing.assert_close(got, want.expand(3, -1), rtol=2**-8, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bf16", "fp8_block", "mxfp4"])
def test_limit_on_function(name: str, engine: str, device: torch.device) -> None:
    def run(a: GroupedRows, w: ExpertWeights, activation: Activation) -> GroupedRows:
        return grouped_gemm_swiglu(a, w, activation, out_format="bf16", engine=engine)

    check_limit_on_function(name, run, device)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_special_values(name: str, engine: str, device: torch.device) -> None:
    def run(a: GroupedRows, w: ExpertWeights, activation: Activation) -> GroupedRows:
        return grouped_gemm_swiglu(a, w, activation, out_format="bf16", engine=engine)

    check_special_values(name, run, device)
