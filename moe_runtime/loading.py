"""Weights into a layer: the experts of a rank, dense as they come one by one and quantized as they stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from moe_runtime.config import MoELayerConfig
from moe_runtime.formats import TokenFormat, token_format
from moe_runtime.weights import ExpertWeights, GateUpOrder

_TENSORS = ("quants", "scales", "expert_scales", "bias")


class DenseExpert(NamedTuple):
    """One expert, not quantized, bf16 or fp32: `gate_up [2I, H]`, `down [H, I]` and its biases `[2I]` and `[H]`.

    The rows of gate and up, in weight and bias, lie as the layer's `activation.order` says.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def quantize_experts(
    experts: Iterable[DenseExpert | tuple[torch.Tensor, torch.Tensor]],
    config: MoELayerConfig,
    count: int,
    device: torch.device,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Gate-and-up and down of `count` experts in the weight format of `config`; one is held unquantized at a time.

    A pair is an expert without biases. Raises `ValueError` naming the tensor and the number of the expert, in the
    order they come: a wrong shape, a bias that `config.expert_bias` does not expect, or misses; another number of
    experts.
    """
    fmt, order = token_format(config.weight_format), GateUpOrder(config.activation.order)
    whole: tuple[ExpertWeights, ExpertWeights] | None = None
    seen = 0
    for expert in _checked(experts, config, count):
        parts = (
            _quantize(expert.gate_up, expert.gate_up_bias, fmt, order, device),
            _quantize(expert.down, expert.down_bias, fmt, False, device),
        )
        if whole is None:
            whole = (_room_for(parts[0], count), _room_for(parts[1], count))
        for room, part in zip(whole, parts, strict=True):
            for name in _TENSORS:
                value = getattr(part, name)
                if value is not None:
                    _raw(getattr(room, name))[seen] = _raw(value)[0]
        seen += 1
    if seen != count:
        raise ValueError(f"experts: expected {count} for this rank, got {seen}")
    if whole is None:
        # A rank without experts still takes part in every step: weights of zero experts have the right shapes.
        zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in _shapes(config).items()}
        gate_up = _quantize(zeros["gate_up"], zeros.get("gate_up_bias"), fmt, order, device)
        down = _quantize(zeros["down"], zeros.get("down_bias"), fmt, False, device)
        whole = (_room_for(gate_up, 0), _room_for(down, 0))
    return whole


def copy_checked(pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    """Copy each source into its target; where there is no target there must be no source.

    Args:
        pairs: `(target, source)` by the name that errors give.

    Raises `ValueError` naming the first pair whose shapes differ, before anything is copied.
    """
    for name, (target, source) in pairs.items():
        expected, got = ("none" if t is None else f"shape {list(t.shape)}" for t in (target, source))
        if expected != got:
            raise ValueError(f"{name}: expected {expected}, got {got}")
    with torch.no_grad():
        for target, source in pairs.values():
            if target is not None and source is not None:
                target.copy_(source)


def _quantize(
    w: torch.Tensor, bias: torch.Tensor | None, fmt: TokenFormat, order: GateUpOrder | bool, device: torch.device
) -> ExpertWeights:
    """The weights of one expert."""
    bias_EN = None if bias is None else bias.to(device)[None]
    return ExpertWeights.quantize(w.to(device)[None], fmt, gate_up=order, bias=bias_EN)


def _shapes(config: MoELayerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of one expert's tensors, those of the biases only where there are any."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    if config.expert_bias:
        shapes |= {"gate_up_bias": (2 * inner,), "down_bias": (hidden,)}
    return shapes


def _checked(
    experts: Iterable[DenseExpert | tuple[torch.Tensor, torch.Tensor]], config: MoELayerConfig, count: int
) -> Iterator[DenseExpert]:
    shapes = _shapes(config)
    for number, given in enumerate(experts):
        if number >= count:
            raise ValueError(f"experts: expected {count} for this rank, got more")
        expert = DenseExpert(*given)
        for name, tensor in expert._asdict().items():
            expected = f"shape {list(shapes[name])}" if name in shapes else "none"
            got = "none" if tensor is None else f"shape {list(tensor.shape)}"
            if expected != got:
                raise ValueError(f"{name} of expert {number}: expected {expected}, got {got}")
        yield expert


def _room_for(one: ExpertWeights, count: int) -> ExpertWeights:
    """Uninitialised weights of `count` experts like the single one of `one`."""
    rooms: dict[str, Any] = {
        name: tensor.new_empty((count, *tensor.shape[1:]))
        for name in _TENSORS
        if (tensor := getattr(one, name)) is not None
    }
    return replace(one, **rooms)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as uint8, for which every operation exists."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
