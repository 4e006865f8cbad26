"""What an experts module of transformers computes, in the terms of `MoELayerConfig`, read from the module itself.

Sizes, biases and the layout of weights follow from the shapes of the parameters, the activation from what the module's
`_apply_gate` answers. No model type is looked up, and a model's router stays its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffers
from moe_runtime.config import ActivationConfig, PostExpertNormConfig
from moe_runtime.experts import activation_of
from moe_runtime.layer import MoELayer
from moe_runtime.reference import activation_reference

DOWN = "down_proj"
WEIGHTS = ("gate_up_proj", DOWN)
UNGATED_WEIGHTS = ("up_proj", DOWN)
NORM_WEIGHT = "post_expert_norm.weight"
DBRX_WEIGHTS = ("w1", "v1", "w2")
POSSIBLE = (
    "function(gate) * (up + up_offset), with gate, or its silu, and up clamped, or both softcapped, or neither, or "
    "function(up), of the functions x * sigmoid(alpha * x), GELU, its approximation by tanh, and squared ReLU"
)

_DIGITS = 5
"""Significant digits of a measured number: what activations that compute in fp32 allow."""
_TOLERANCE = 1e-4
"""Relative, between what a module answers and the formula with measured numbers; GELU and SiLU differ by 0.1."""
_FAR = 2.0**20
"""Above every limit of a clamp."""
_NEAR = 0.5
"""Below every limit of a clamp."""

GateFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DescribedExperts:
    """An experts module that a layer can compute.

    Attributes:
        module: the module; its weights are read by `tensors`.
        name: of the module, for messages.
        hidden_size, intermediate_size, num_experts: from the shapes of the weights.
        expert_bias: whether both projections have biases.
        activation: formula, and the order of gate and up.
        transposed: weights are stored as `[E, H, 2I]` (without a gate `[E, H, I]`) and `[E, I, H]`.
        norm_eps: eps of the norm that follows each expert (`PostExpertNormConfig`); None where there is none.
        identity_experts: how many ids from `num_experts` on return the token itself (LongCat-Flash).
    """

    module: Any
    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    expert_bias: bool
    activation: ActivationConfig
    transposed: bool = False
    norm_eps: float | None = None
    identity_experts: int = 0

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that hold the weights."""
        if _is_dbrx(self.module):
            return DBRX_WEIGHTS
        return WEIGHTS if self.activation.gated else UNGATED_WEIGHTS

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `MoELayerConfig` that the module decides."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "expert_bias": self.expert_bias,
            "activation": self.activation,
            "post_expert_norm": None if self.norm_eps is None else PostExpertNormConfig(eps=self.norm_eps),
        }

    def of_ranks(self, ranks: int) -> DescribedExperts:
        """The experts of all `ranks`, where the module holds the experts of one."""
        return replace(self, num_experts=self.num_experts * ranks)

    def check_weights(self) -> None:
        """Raise `ValueError` unless the weights are plain tensors in bf16 with values."""
        for key in self.weights:
            weight = getattr(self.module.mlp if _is_dbrx(self.module) else self.module, key)
            if type(weight) not in (torch.Tensor, nn.Parameter):
                raise ValueError(
                    f"{self.name}.{key}: expected a whole tensor that is not quantized, got {type(weight).__name__}"
                )
            if weight.is_meta or weight.dtype != torch.bfloat16:
                got = "on the meta device" if weight.is_meta else f"{weight.dtype}"
                raise ValueError(f"{self.name}.{key}: expected torch.bfloat16 with values, got {got}")

    def load_into(self, layer: MoELayer, ids: Sequence[int], buffers: QuantBuffers = FRESH) -> None:
        """Load the experts `ids` of the module, and the norm that follows them, into `layer`."""
        layer.load_experts(self.tensors(ids), buffers)
        if layer.post_expert_norm is not None:
            layer.post_expert_norm.load(self.module.post_expert_norm.weight.detach())

    def tensors(self, ids: Sequence[int]) -> Iterator[ExpertTensors]:
        """The experts `ids` of the module, as views of its parameters where the layout is that of a layer."""
        if _is_dbrx(self.module):
            yield from _dbrx_tensors(self, ids)
            return
        biases = [getattr(self.module, bias_of(key)) if self.expert_bias else None for key in self.weights]
        gate_up, down = (getattr(self.module, key) for key in self.weights)
        if self.transposed:
            gate_up, down = gate_up.mT, down.mT
        for expert in ids:
            yield ExpertTensors(gate_up[expert], down[expert], *(b if b is None else b[expert] for b in biases))


def describe_experts(module: nn.Module, name: str = "experts") -> DescribedExperts:
    """What `module` computes. Values of its weights are not read, so it may be on the meta device.

    `module` follows transformers' interface of experts (`@use_experts_implementation`): `gate_up_proj` and `down_proj`
    of all experts in one tensor each, and `_apply_gate`, or `up_proj`, `down_proj` and `act_fn` without a gate
    (`has_gate`). The experts of DBRX and LongCat-Flash are read too.

    Raises `ValueError` naming `name`, what it has that a layer cannot compute, and what is possible.
    """
    if _is_dbrx(module):
        return _describe_dbrx(module, name)
    gated = bool(getattr(module, "has_gate", True))
    keys = WEIGHTS if gated else UNGATED_WEIGHTS
    first, down = (_weight(module, name, key) for key in keys)
    identity = _identity_experts(module)
    num_experts, transposed = down.shape[0], _is_transposed(module, first, down, 1 + gated)
    if transposed is None or first.shape[0] != num_experts + identity:
        rows = "2I" if gated else "I"
        raise ValueError(
            f"{name}: {' and '.join(keys)}: expected [E, {rows}, H] and [E, H, I] or, transposed, [E, H, {rows}] and "
            f"[E, I, H], got {list(first.shape)} and {list(down.shape)}"
        )
    hidden, inner = (down.shape[2], down.shape[1]) if transposed else (down.shape[1], down.shape[2])
    has_bias = _has_bias(module, name, num_experts, {keys[0]: inner * (1 + gated), DOWN: hidden})
    possible = (*keys, *map(bias_of, keys))
    norm_eps = None
    if getattr(module, "has_post_expert_norm", False):
        norm_eps = _measure_norm(module, name, hidden)
    known = (*(possible if has_bias else keys), *(() if norm_eps is None else (NORM_WEIGHT,)))
    if others := [key for key, _ in module.named_parameters() if key not in known]:
        raise ValueError(f"{name}: {others[0]}: expected no parameters but {', '.join(possible)}, got another")
    measure = _measure_activation if gated else _measure_function
    activation = measure(module, name, first.device)
    return DescribedExperts(
        module, name, hidden, inner, num_experts, has_bias, activation, transposed, norm_eps, identity
    )


def routes_of(
    num_experts: int, identity_experts: int, x_TH: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids for a layer, and what to add to its result for experts that return the token itself.

    Without such experts the id `num_experts` is transformers' word for no expert. Other ids stay as they are.
    """
    outside = (topk_idx >= num_experts) & (topk_idx < num_experts + max(identity_experts, 1))
    own_TH = None
    if identity_experts:
        own_TH = x_TH * (topk_weights * outside).sum(dim=-1, keepdim=True).to(x_TH.dtype)
    return topk_idx.masked_fill(outside, -1), own_TH


def _weight(module: nn.Module, name: str, key: str) -> torch.Tensor:
    weight = getattr(module, key, None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 3:
        raise ValueError(
            f"{name}: expected {key} of all experts in one tensor, as transformers 5 has it, got {_class_of(module)}"
        )
    return weight


def bias_of(weight: str) -> str:
    """Name of the bias of the weight of this name."""
    return f"{weight}_bias"


def _is_transposed(module: nn.Module, first: torch.Tensor, down: torch.Tensor, parts: int) -> bool | None:
    """Whether the shapes are those of transposed weights, the first of `parts` times `I` rows; None if of neither.

    Shapes of one part are both ways round possible; the module says it then (`is_transposed`).
    """
    found = [
        transposed
        for transposed, w_ENK, v_ENK in ((False, first, down), (True, first.mT, down.mT))
        if (w_ENK.shape[1], w_ENK.shape[2]) == (parts * v_ENK.shape[2], v_ENK.shape[1])
    ]
    if len(found) > 1:
        return bool(getattr(module, "is_transposed", False))
    return found[0] if found else None


def _has_bias(module: nn.Module, name: str, num_experts: int, rows: dict[str, int]) -> bool:
    """Whether the weights, by name with their rows, have biases."""
    biases = [getattr(module, bias_of(key), None) for key in rows]
    if biases == [None, None] and not getattr(module, "has_bias", False):
        return False
    for (key, columns), bias in zip(rows.items(), biases, strict=True):
        shape = None if bias is None else list(bias.shape)
        if shape != [num_experts, columns]:
            raise ValueError(f"{name}: {bias_of(key)}: expected shape {[num_experts, columns]}, got {shape}")
    return True


def _measure_activation(module: nn.Module, name: str, device: torch.device) -> ActivationConfig:
    """The activation whose answers are those of `module`, for gates and ups of every size and sign."""
    function = _gate_function(module, name)
    values = _values(device)
    place = values.device
    gates, ups = (t.flatten() for t in torch.meshgrid(values, values, indexing="ij"))
    with torch.no_grad():
        for order, together in _ORDERS.items():
            try:
                fitted = _fit(lambda gate, up, pack=together: function(pack(gate, up)), order, place)  # type: ignore[misc]
                answers = function(together(gates, ups)).double()
            except (RuntimeError, TypeError, ValueError):
                continue
            found = {}
            for each in fitted:
                expected = activation_reference(together(gates, ups), activation_of(each))
                if answers.shape == expected.shape and _close(answers, expected):
                    found[each] = float((answers - expected).abs().max())
            if found:
                return min(found, key=found.__getitem__)
    raise _other_activation(module, name)


def _measure_function(module: Any, name: str, device: torch.device) -> ActivationConfig:
    """The function without a gate whose answers are those of `act_fn` of `module`."""
    values = _values(device)
    with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError):
        answers = module.act_fn(values).double()
        near = torch.full((1,), _NEAR, dtype=torch.float64, device=values.device)
        for each in _functions(float(module.act_fn(near))):
            fitted = ActivationConfig(gated=False, **each)
            expected = activation_reference(values, activation_of(fitted))
            if answers.shape == expected.shape and _close(answers, expected):
                return fitted
    raise _other_activation(module, name)


def _measure_norm(module: Any, name: str, hidden: int) -> float:
    """eps of `post_expert_norm`, whose answers must be those of `PostExpertNormConfig`, for rows large and tiny."""
    norm, label = module.post_expert_norm, f"{name}: post_expert_norm"
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    shapes = {key: list(parameter.shape) for key, parameter in norm.named_parameters()}
    if not isinstance(eps, float) or shapes != {"weight": [hidden]}:
        raise ValueError(f"{label}: expected an RMSNorm with eps and a weight [{hidden}], got {type(norm).__name__}")
    ours = copy.deepcopy(norm).to_empty(device="cpu").double()
    weight = torch.linspace(-0.5, 0.5, hidden, dtype=torch.float64, device="cpu")
    x = torch.cos(torch.arange(3 * hidden, dtype=torch.float64, device="cpu")).view(3, hidden)
    x = x * torch.tensor([[1.0], [30.0], [eps**0.5]], dtype=torch.float64, device="cpu")
    with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError):
        ours.weight.copy_(weight)
        y = x * (1.0 + weight)
        if _close(ours(x).double(), y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps)):
            return eps
    raise ValueError(
        f"{label}: expected y * rsqrt(mean(y^2) + eps) with y = x * (1 + weight), got {type(norm).__name__}, which is "
        "another norm"
    )


def _other_activation(module: Any, name: str) -> ValueError:
    act = getattr(module, "act_fn", None)
    label = getattr(act, "__name__", type(act).__name__) if act is not None else "its own _apply_gate"
    return ValueError(
        f"{name}: act_fn: expected {POSSIBLE}, got {label} of {_class_of(module)}, which is none of these"
    )


def _values(device: torch.device) -> torch.Tensor:
    """0 and numbers of both signs, among them some beyond each limit."""
    place = torch.device("cpu") if device.type == "meta" else device
    values = torch.tensor([0.0, 0.1, 0.4, 1.0, 2.5, 6.0, 8.0, 30.0, 300.0], dtype=torch.float64, device=place)
    return torch.cat([values, -values[1:]])


_ORDERS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gate_up": lambda gate, up: torch.cat([gate, up])[None],
    "interleaved": lambda gate, up: torch.stack([gate, up], dim=1).flatten()[None],
    "up_gate": lambda gate, up: torch.cat([up, gate])[None],
}


def _fit(
    answer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], order: Any, device: torch.device
) -> list[ActivationConfig]:
    """The only formulas of this order, one for each function, that can give a few of the answers."""
    gates = torch.full((4,), _NEAR, dtype=torch.float64, device=device)
    ups = torch.tensor([0.25, -0.25, _FAR, -_FAR], dtype=torch.float64, device=device)
    high, low, far, _ = answer(gates, ups).double().flatten().tolist()
    slope = (high - low) / 0.5
    if not 0.0 < slope < _NEAR:
        return []
    offset = (high + low) / 2 / slope
    limit = far / slope - offset
    shared = {"order": order, "limit": None if limit > _FAR / 2 else _rounded(limit), "up_offset": _rounded(offset)}
    found = [ActivationConfig(**shared, **each) for each in _functions(slope)]
    if shared["limit"] is not None:
        # Where limits are large, both forms are close to the answers, and the closer one counts.
        found += [each.replace(limit_on="function") for each in found if (each.function, each.alpha) == ("silu", 1.0)]
    softcapped = _softcapped(answer, device)
    return found if softcapped is None else [*found, ActivationConfig(order=order, **softcapped)]


def _softcapped(
    answer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: torch.device
) -> dict[str, Any] | None:
    """The softcaps of gate and up, and alpha, that can give a few of the answers; None if neither has one."""
    gates = torch.tensor([_FAR, _FAR, _NEAR], dtype=torch.float64, device=device)
    ups = torch.tensor([_FAR, _NEAR, _FAR], dtype=torch.float64, device=device)
    both, of_far_gate, of_far_up = answer(gates, ups).double().flatten().tolist()
    if not 0.0 < both < _FAR / 2 or not 0.0 < of_far_gate < both * (1.0 - _TOLERANCE):
        return None
    up_cap = _NEAR / math.atanh(of_far_gate / both)
    gate_cap = both / up_cap
    sigmoid = of_far_up / (up_cap * gate_cap * math.tanh(_NEAR / gate_cap))
    if not 0.5 + _TOLERANCE < sigmoid < 1.0:
        return None
    alpha = math.log(sigmoid / (1.0 - sigmoid)) / _NEAR
    return {"alpha": _rounded(alpha), "gate_softcap": _rounded(gate_cap), "up_softcap": _rounded(up_cap)}


def _functions(answer: float) -> Iterator[dict[str, Any]]:
    """The functions that may be `answer` at `_NEAR`, as fields of `ActivationConfig`."""
    sigmoid = answer / _NEAR
    if 0.5 + _TOLERANCE < sigmoid < 1.0:
        yield {"alpha": _rounded(math.log(sigmoid / (1.0 - sigmoid)) / _NEAR)}
    yield from ({"function": name} for name in ("gelu", "gelu_tanh", "relu2"))


def _rounded(number: float) -> float:
    """With the digits that were measured; 0 for what is only the rounding of the measurement."""
    return 0.0 if abs(number) < _TOLERANCE else float(f"{number:.{_DIGITS}g}")


def _close(answers: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((answers - expected).abs() <= _TOLERANCE * (1e-2 + expected.abs())).all())


def _gate_function(module: Any, name: str) -> GateFunction:
    if hasattr(module, "_apply_gate"):
        return module._apply_gate
    if _identity_experts(module):
        return lambda gate_up: module.act_fn(gate_up.chunk(2, dim=-1)[0]) * gate_up.chunk(2, dim=-1)[1]
    raise ValueError(
        f"{name}: expected experts with transformers' interface (use_experts_implementation), which are called with "
        f"hidden_states, top_k_index and top_k_weights, got {_class_of(module)}"
    )


def _identity_experts(module: Any) -> int:
    """How many experts of LongCat-Flash return their token. Its class is named: no other has such a forward."""
    return int(module.zero_expert_num) if _class_of(module) == "LongcatFlashExperts" else 0


def _is_dbrx(module: Any) -> bool:
    return _class_of(module) == "DbrxExperts"


def _describe_dbrx(module: Any, name: str) -> DescribedExperts:
    """The experts of DBRX: `w1` (gate), `v1` (up) and `w2`, each `[E * I, H]`."""
    inner, hidden = module.ffn_hidden_size, module.hidden_size
    rows = module.mlp.w1.shape[0]

    class Gate(nn.Module):
        act_fn = module.mlp.activation_fn

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return module.mlp.activation_fn(gate) * up

    activation = _measure_activation(Gate(), name, module.mlp.w1.device)
    return DescribedExperts(module, name, hidden, inner, rows // inner, False, activation)


def _dbrx_tensors(described: DescribedExperts, ids: Sequence[int]) -> Iterator[ExpertTensors]:
    w1, v1, w2 = (
        getattr(described.module.mlp, key).view(-1, described.intermediate_size, described.hidden_size)
        for key in DBRX_WEIGHTS
    )
    for expert in ids:
        yield ExpertTensors(torch.cat([w1[expert], v1[expert]]), w2[expert].mT)


def _class_of(module: Any) -> str:
    """Name of the class of transformers; a quantizer or a test may have derived from it."""
    bases = [base for base in type(module).__mro__ if base.__module__.startswith("transformers.models.")]
    return (bases[0] if bases else type(module)).__name__
