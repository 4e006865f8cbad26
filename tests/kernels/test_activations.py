"""Activations: the formulas against torch, and what the epilogues make of values that are huge, infinite or NaN."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SILU,
    SQUARED_RELU,
    Activation,
    ExpertWeights,
    GateUpOrder,
)
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
ACTIVATIONS |= {"softcaps": Activation(gate_softcap=4.0, up_softcap=25.0)}


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
    weight, token = ("bf16", "bf16") if name == "bf16" else (name, "bf16")
    for activation in ACTIVATIONS.values():
        m = torch.zeros(1, 16 * activation.num_parts, 64)
        m[:, :, 0] = 1.0
        w = ExpertWeights.quantize(m, weight, gate_up=activation.gate_up or False, engine="torch").to(device)
        x = torch.zeros(len(SPECIAL), 64)
        x[:, 0] = torch.tensor(SPECIAL)
        a = make_rows(token, [len(SPECIAL)], 64, torch.Generator(), device, num_experts=1, x=x)
        values = x[:, :1].bfloat16().float()
        want = activate(values.expand(-1, activation.num_parts), activation).expand(-1, 16)
        got = run(a, w, activation).rows[: len(SPECIAL)].view(torch.bfloat16).float().cpu()
        torch.testing.assert_close(got, want.bfloat16().float(), rtol=2**-7, atol=1e-30, equal_nan=True)
        assert got[-1].isnan().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_special_values(name: str, engine: str, device: torch.device) -> None:
    def run(a: GroupedRows, w: ExpertWeights, activation: Activation) -> GroupedRows:
        return grouped_gemm_swiglu(a, w, activation, out_format="bf16", engine=engine)

    check_special_values(name, run, device)
