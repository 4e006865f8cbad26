"""What is read from an experts module: sizes, layout, the measured activation, and each way to be refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from moe_runtime.config import ActivationConfig, PostExpertNormConfig
from moe_runtime.experts import activation_of
from moe_runtime.integrations.expert_modules import describe_experts, routes_of
from moe_runtime.reference import activation_reference, moe_reference

pytestmark = pytest.mark.cpu_only

E, H, INNER = 3, 16, 8


class Experts(nn.Module):
    """Experts with transformers' interface; the function of gate and up is an argument."""

    def __init__(self, act_fn: Any = F.silu, *, transposed: bool = False, biases: bool = False) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (E, 2 * INNER, H), "down_proj": (E, H, INNER)}
        for name, (experts, rows, columns) in shapes.items():
            shape = (experts, columns, rows) if transposed else (experts, rows, columns)
            setattr(self, name, nn.Parameter(torch.randn(shape).bfloat16()))
            if biases:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(experts, rows).bfloat16()))
        self.act_fn = act_fn

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up  # type: ignore[no-any-return]


class Ungated(nn.Module):
    """Experts without a gate, with transformers' interface."""

    has_gate = False

    def __init__(self, act_fn: Any, *, inner: int = INNER, transposed: bool = False, biases: bool = False) -> None:
        super().__init__()
        for name, rows, columns in (("up_proj", inner, H), ("down_proj", H, inner)):
            shape = (E, columns, rows) if transposed else (E, rows, columns)
            setattr(self, name, nn.Parameter(torch.randn(shape).bfloat16()))
            if biases:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, rows).bfloat16()))
        self.act_fn, self.is_transposed = act_fn, transposed


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


class Formula(Experts):
    """Experts whose activation is that of a config."""

    def __init__(self, activation: ActivationConfig, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.formula, self.dtype = activation_of(activation), dtype

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation_reference(gate_up.to(self.dtype), self.formula).to(self.dtype)


def rounded(low: float, high: float) -> Any:
    """Numbers as configs have them, of four digits."""
    return st.floats(low, high).map(lambda number: float(f"{number:.4g}"))


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(["gate_up", "up_gate", "interleaved"]),
    function=st.sampled_from(["silu", "silu", "gelu", "gelu_tanh", "relu2"]),
    alpha=rounded(0.5, 3.0),
    limit=st.none() | rounded(1.0, 200.0),
    up_offset=st.sampled_from([0.0, 1.0, -0.5]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_the_activation_is_measured(
    order: Any, function: Any, alpha: float, limit: Any, up_offset: float, dtype: torch.dtype
) -> None:
    alpha = alpha if function == "silu" else 1.0
    activation = ActivationConfig(function=function, order=order, alpha=alpha, limit=limit, up_offset=up_offset)
    found = describe_experts(Formula(activation, dtype)).activation
    assert (found.order, found.function, found.gated) == (order, function, True)
    for key in ("alpha", "limit", "up_offset"):
        wanted, got = getattr(activation, key), getattr(found, key)
        assert (wanted is None) == (got is None)
        assert wanted is None or math.isclose(wanted, got, rel_tol=2e-5, abs_tol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("limit", [0.75, 4.0, 7.0, 10.0])
@pytest.mark.parametrize("limit_on", ["gate", "function"])
def test_what_a_limit_is_on_is_measured(limit_on: Any, limit: float, dtype: torch.dtype) -> None:
    """At 10, where silu is 10 - 5e-4, the two forms differ by less than a measurement may."""

    class Limited(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.to(dtype).chunk(2, dim=-1)
            gate = F.silu(gate).clamp(max=limit) if limit_on == "function" else F.silu(gate.clamp(max=limit))
            return gate * up.clamp(-limit, limit)

    found = describe_experts(Limited()).activation
    assert found == ActivationConfig(limit=limit, limit_on=limit_on)


def test_a_limit_on_gelu_is_refused() -> None:
    class Limited(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.gelu(gate).clamp(max=1.0) * up.clamp(-1.0, 1.0)

    with pytest.raises(ValueError, match=r"act_fn: expected function.gate. .*gate, or its silu, and up clamped"):
        describe_experts(Limited())


@pytest.mark.parametrize("limit", [None, 58.0, 7.0])
def test_squared_relu_is_not_taken_for_silu_with_a_slope_of_zero(limit: float | None) -> None:
    """At 0.5 both are 0.25, but for the rounding of the measurement."""
    for up_offset in (0.0, 1.0, 0.1):
        activation = ActivationConfig(function="relu2", limit=limit, up_offset=up_offset)
        assert describe_experts(Formula(activation)).activation == activation


def test_quick_gelu_is_swiglu_with_another_slope() -> None:
    assert describe_experts(Experts(lambda gate: gate * torch.sigmoid(1.702 * gate))).activation == ActivationConfig(
        alpha=1.702
    )


@settings(max_examples=20, deadline=None)
@given(
    alpha=rounded(0.5, 3.0),
    gate_softcap=rounded(2.0, 100.0),
    up_softcap=rounded(2.0, 100.0),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_softcaps_are_measured(alpha: float, gate_softcap: float, up_softcap: float, dtype: torch.dtype) -> None:
    wanted = {"alpha": alpha, "gate_softcap": gate_softcap, "up_softcap": up_softcap}
    found = describe_experts(Formula(ActivationConfig(**wanted), dtype)).activation
    for key, value in wanted.items():
        assert math.isclose(getattr(found, key), value, rel_tol=1e-4), (key, value, found)


@pytest.mark.parametrize(
    ("act_fn", "fields"),
    [
        (squared_relu, {"function": "relu2"}),
        (F.gelu, {"function": "gelu"}),
        (gelu_tanh, {"function": "gelu_tanh"}),
        (F.silu, {}),
        (lambda x: x * torch.sigmoid(1.702 * x), {"alpha": 1.702}),
    ],
)
def test_functions_without_a_gate(act_fn: Any, fields: dict[str, Any]) -> None:
    for module in (Ungated(act_fn), Ungated(act_fn).to("meta")):
        assert describe_experts(module).activation == ActivationConfig(gated=False, **fields)


@pytest.mark.parametrize("inner", [INNER, H])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_tensors_without_a_gate(inner: int, transposed: bool, biases: bool) -> None:
    """Also with `I = H`, where only the module says whether they are transposed."""
    module = Ungated(squared_relu, inner=inner, transposed=transposed, biases=biases)
    described = describe_experts(module, "layer")
    described.check_weights()
    assert (described.hidden_size, described.intermediate_size, described.expert_bias) == (H, inner, biases)
    (tensors,) = described.tensors([1])
    up, down = module.up_proj[1], module.down_proj[1]
    assert torch.equal(tensors.gate_up, up.mT if transposed else up)  # type: ignore[arg-type]
    assert torch.equal(tensors.down, down.mT if transposed else down)  # type: ignore[arg-type]
    if biases:
        assert torch.equal(tensors.gate_up_bias, module.up_proj_bias[1])  # type: ignore[arg-type]
    x, ids = torch.randn(5, H, dtype=torch.float64), torch.tensor([[1], [1], [-1], [1], [1]])
    gate_up, down, *given = (None if t is None else t[None] for t in tensors)
    named = dict(zip(("gate_up_bias", "down_bias"), given, strict=True))
    y = moe_reference(
        x, ids.clamp(max=0), torch.ones(5, 1), gate_up, down, activation_of(described.activation), **named
    )
    w, v = (t[1].double() for t in (module.up_proj, module.down_proj))
    inside = x @ (w if transposed else w.T) + (module.up_proj_bias[1].double() if biases else 0.0)
    want = squared_relu(inside) @ (v if transposed else v.T) + (module.down_proj_bias[1].double() if biases else 0.0)
    torch.testing.assert_close(y, torch.where(ids < 0, 0.0, want))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_sizes_and_tensors_follow_from_the_shapes(transposed: bool, biases: bool, rng: torch.Generator) -> None:
    module = Experts(transposed=transposed, biases=biases)
    described = describe_experts(module, "layer")
    assert described.fields == {
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_experts": E,
        "expert_bias": biases,
        "activation": ActivationConfig(),
        "post_expert_norm": None,
    }
    described.check_weights()
    first, second = described.tensors([2, 0])
    for expert, tensors in ((2, first), (0, second)):
        gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
        assert torch.equal(tensors.gate_up, gate_up.mT if transposed else gate_up)  # type: ignore[arg-type]
        assert torch.equal(tensors.down, down.mT if transposed else down)  # type: ignore[arg-type]
        assert (tensors.gate_up_bias is not None) == biases == (tensors.down_bias is not None)
        if tensors.gate_up_bias is not None and tensors.down_bias is not None:
            assert torch.equal(tensors.gate_up_bias, module.gate_up_proj_bias[expert])
            assert torch.equal(tensors.down_bias, module.down_proj_bias[expert])


def test_values_of_weights_are_not_needed() -> None:
    with torch.device("meta"):
        assert describe_experts(Experts(), "layer").activation == ActivationConfig()
    described = describe_experts(Experts().to("meta"), "layer")
    assert described.hidden_size == H
    with pytest.raises(ValueError, match=r"^layer\.gate_up_proj: expected torch\.bfloat16 .*, got on the meta device"):
        described.check_weights()
    with pytest.raises(ValueError, match=r"^layer\.gate_up_proj: expected torch\.bfloat16 with .*got torch\.float32"):
        describe_experts(Experts().float(), "layer").check_weights()


def test_weights_of_a_tensor_class_of_others_are_refused() -> None:
    class Packed(torch.Tensor):
        pass

    module = Experts()
    del module.down_proj
    module.down_proj = torch.empty(E, H, INNER, dtype=torch.bfloat16).as_subclass(Packed)
    with pytest.raises(ValueError, match=r"^layer\.down_proj: expected a whole tensor .*, got Packed"):
        describe_experts(module, "layer").check_weights()


class InputScaledNorm(nn.Module):
    """The norm of Muse Spark, with `1 + weight` before it; or after it, or with another root."""

    def __init__(self, *, after: bool = False, power: float = -0.5, columns: int = H) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns).bfloat16())
        self.eps, self.after, self.power = 1e-4, after, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight
        y = x if self.after else x * scale
        y = y * (y.square().mean(-1, keepdim=True) + self.eps) ** self.power
        return y * scale if self.after else y


def with_norm(norm: nn.Module | None = None, said: bool = True) -> nn.Module:
    module = Experts()
    module.post_expert_norm = InputScaledNorm() if norm is None else norm
    module.has_post_expert_norm = said
    return module


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_norm_after_each_expert_is_measured(device: str) -> None:
    described = describe_experts(with_norm().to(device))
    assert described.fields["post_expert_norm"] == PostExpertNormConfig(eps=1e-4)
    assert describe_experts(Experts()).fields["post_expert_norm"] is None


def changed(**changes: Any) -> nn.Module:
    module = Experts()
    for key, value in changes.items():
        if value is None:
            delattr(module, key)
        else:
            setattr(module, key, value)
    return module


def softcapped(gate: torch.Tensor) -> torch.Tensor:
    return 20.0 * torch.tanh(F.silu(gate) / 20.0)


def clamped_after(gate: torch.Tensor) -> torch.Tensor:
    return F.silu(gate).clamp(max=7.0)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Experts(F.elu), r"act_fn: expected function\(gate\) \* \(up \+ up_offset\), .*, got elu of Experts"),
        (Ungated(F.relu), r"act_fn: expected .* or function\(up\), .*, got relu of Ungated"),
        (Ungated(nn.Identity()), r"act_fn: expected .*, got Identity of Ungated"),
        (Experts(F.relu), "act_fn: expected .*, got relu of Experts"),
        (Experts(nn.Sigmoid()), "act_fn: expected .*, got Sigmoid of Experts"),
        (Experts(softcapped), "act_fn: expected .*, got softcapped of Experts"),
        (Experts(clamped_after), "act_fn: expected .*, got clamped_after of Experts"),
        (changed(has_gate=False), "expected up_proj of all experts in one tensor, .*, got Experts"),
        (
            with_norm(nn.RMSNorm(H, eps=1e-4)),
            r"post_expert_norm: expected y \* rsqrt\(.*, got RMSNorm, which is another",
        ),
        (
            with_norm(InputScaledNorm(after=True)),
            "post_expert_norm: expected .*, got InputScaledNorm, which is another",
        ),
        (
            with_norm(InputScaledNorm(power=-0.4)),
            "post_expert_norm: expected .*, got InputScaledNorm, which is another",
        ),
        (
            with_norm(InputScaledNorm(columns=H + 1)),
            r"post_expert_norm: expected an RMSNorm .* \[16\], got Input",
        ),
        (with_norm(nn.Identity()), "post_expert_norm: expected an RMSNorm with eps and a weight .*, got Identity"),
        (with_norm(said=False), r"post_expert_norm\.weight: expected no parameters but gate_up_proj, .*, got another"),
        (changed(down_proj=None), "expected down_proj of all experts in one tensor, .*, got Experts"),
        (nn.ModuleList(), "expected gate_up_proj of all experts in one tensor, .*, got ModuleList"),
        (
            changed(down_proj=nn.Parameter(torch.empty(E, H, INNER + 1))),
            r"gate_up_proj and down_proj: expected \[E, 2I, H\] .*, got \[3, 16, 16\] and \[3, 16, 9\]",
        ),
        (
            changed(down_proj=nn.Parameter(torch.empty(E + 1, H, INNER))),
            r"gate_up_proj and down_proj: .*, got \[3, 16, 16\] and \[4, 16, 8\]",
        ),
        (changed(has_bias=True), r"gate_up_proj_bias: expected shape \[3, 16\], got None"),
        (
            changed(gate_up_proj_bias=nn.Parameter(torch.empty(E, 2 * INNER))),
            r"down_proj_bias: expected shape \[3, 16\], got None",
        ),
    ],
    ids=lambda value: "" if isinstance(value, nn.Module) else None,
)
def test_what_a_layer_cannot_compute_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=f"^mlp: {message}"):
        describe_experts(module, "mlp")


def test_experts_that_are_called_in_another_way_are_refused() -> None:
    class Llama4TextExperts(nn.Module):
        gate_up_proj = torch.empty(E, H, 2 * INNER)
        down_proj = torch.empty(E, INNER, H)

    with pytest.raises(ValueError, match=r"^mlp: expected experts with transformers' interface .*, got Llama4TextExp"):
        describe_experts(Llama4TextExperts(), "mlp")


def test_experts_of_longcat_that_return_their_token(rng: torch.Generator) -> None:
    modeling = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    config = SimpleNamespace(
        expert_ffn_hidden_size=INNER, hidden_size=H, n_routed_experts=E, zero_expert_num=2, hidden_act="silu"
    )
    module = modeling.LongcatFlashExperts(config).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    described = describe_experts(module)
    assert (described.num_experts, described.identity_experts) == (E, 2)
    x = torch.randn(4, H, generator=rng, dtype=torch.float64)
    idx = torch.tensor([[0, 3], [4, 3], [1, 2], [2, 4]])
    weights = torch.rand(4, 2, generator=rng, dtype=torch.float64)
    ids, own = routes_of(E, 2, x, idx, weights)
    assert ids.tolist() == [[0, -1], [-1, -1], [1, 2], [2, -1]] and own is not None
    gate_up, down = (torch.stack(parts) for parts in zip(*(t[:2] for t in described.tensors(range(E))), strict=True))
    torch.testing.assert_close(moe_reference(x, ids, weights, gate_up, down) + own, module(x, idx, weights))


def test_ids_that_are_wrong_stay_wrong() -> None:
    x, idx = torch.zeros(1, H), torch.tensor([[E, E + 1, -2]])
    assert routes_of(E, 0, x, idx, torch.ones(1, 3))[0].tolist() == [[-1, E + 1, -2]]
    assert routes_of(E, 2, x, idx + 1, torch.ones(1, 3))[0].tolist() == [[-1, E + 2, -1]]
