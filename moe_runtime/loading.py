"""Weights into a layer: the experts of a rank, dense as they come one by one and quantized as they stay."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_runtime.config import MoELayerConfig
from moe_runtime.formats import TokenFormat, align, weight_format
from moe_runtime.weights import ExpertWeights, GateUpOrder

MIN_HUGE_BYTES = 8 << 20
"""Memory of at least this size is asked for in large pages."""

_TENSORS = ("quants", "scales", "expert_scales", "bias")


class DenseExpert(NamedTuple):
    """One expert: `gate_up [2I, H]`, `down [H, I]`, bf16 or fp32, and its biases `[2I]` and `[H]`.

    A weight may also be quantized, `ExpertWeights` of one expert without a bias. The rows of gate and up, in weight and
    bias, lie as the layer's `activation.order` says.
    """

    gate_up: torch.Tensor | ExpertWeights
    down: torch.Tensor | ExpertWeights
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def quantize_experts(
    experts: Iterable[DenseExpert | tuple[torch.Tensor, torch.Tensor]],
    config: MoELayerConfig,
    count: int,
    device: torch.device,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Gate-and-up and down of `count` experts in the weight format of `config`; one more is held at a time.

    Weights that are quantized already stay as they are where they have that format, bit for bit, and are dequantized
    and quantized again where they have another. A pair is an expert without biases.

    Raises `ValueError` naming the tensor and the number of the expert, in the order they come: a wrong shape or order
    of gate and up, a bias that `config.expert_bias` does not expect, or misses; another number of experts.
    """
    fmt, order = weight_format(config.weight_format), GateUpOrder(config.activation.order)
    whole: tuple[ExpertWeights, ExpertWeights] | None = None
    seen = 0
    for expert in _checked(experts, config, count):
        parts = (
            _quantize(expert.gate_up, expert.gate_up_bias, fmt, order, device),
            _quantize(expert.down, expert.down_bias, fmt, None, device),
        )
        if whole is None:
            whole = (_room_for(parts[0], count), _room_for(parts[1], count))
        for room, part in zip(whole, parts, strict=True):
            for name in _TENSORS:
                value = getattr(part, name)
                if value is not None:
                    _copy(_raw(value)[0], _raw(getattr(room, name))[seen])
        seen += 1
    if seen != count:
        raise ValueError(f"experts: expected {count} for this rank, got {seen}")
    if whole is None:
        # A rank without experts still takes part in every step: weights of zero experts have the right shapes.
        zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in _shapes(config).items()}
        gate_up = _quantize(zeros["gate_up"], zeros.get("gate_up_bias"), fmt, order, device)
        down = _quantize(zeros["down"], zeros.get("down_bias"), fmt, None, device)
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
    w: torch.Tensor | ExpertWeights,
    bias: torch.Tensor | None,
    fmt: TokenFormat,
    order: GateUpOrder | None,
    device: torch.device,
) -> ExpertWeights:
    """The weights of one expert, with one second-level scale for `down` and two for gate and up."""
    bias_EN = None if bias is None else bias.to(device).float()[None].contiguous()
    if isinstance(w, ExpertWeights):
        w = w.to(device)
        if w.format is fmt:
            scales = w.expert_scales
            if scales is not None and order is not None:
                scales = scales.view(1, -1).expand(1, 2).contiguous()
            return replace(w, expert_scales=scales, bias=bias_EN, gate_up=order)
        w_ENK = w.dequantize()
    else:
        w_ENK = w.to(device)[None]
    return ExpertWeights.quantize(w_ENK, fmt, gate_up=order or False, bias=bias_EN)


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
            got = "none" if tensor is None else f"shape {_shape(tensor)}"
            if expected != got:
                raise ValueError(f"{name} of expert {number}: expected {expected}, got {got}")
            if isinstance(tensor, ExpertWeights):
                _check_quantized(f"{name} of expert {number}", tensor, config)
        yield expert


def _shape(tensor: torch.Tensor | ExpertWeights) -> list[int]:
    """`[N, K]` of the weights of one expert, as of a tensor."""
    if not isinstance(tensor, ExpertWeights):
        return list(tensor.shape)
    sizes = [tensor.num_rows, tensor.num_columns]
    return sizes if tensor.num_experts == 1 else [tensor.num_experts, *sizes]


def _check_quantized(name: str, w: ExpertWeights, config: MoELayerConfig) -> None:
    if w.bias is not None:
        raise ValueError(f"{name}: expected weights without a bias, which is given beside them")
    order = GateUpOrder(config.activation.order) if name.startswith("gate_up") else None
    if w.gate_up not in (order, None):
        expected = "plain weights" if order is None else f"gate and up in order {order.value}"
        raise ValueError(f"{name}: expected {expected}, got order {w.gate_up.value}")
    second = w.expert_scales is not None
    if w.format.name == config.weight_format and second != w.format.has_row_scale:
        raise ValueError(f"{name}: expected {'' if w.format.has_row_scale else 'no '}expert_scales in {w.format.name}")


def _room_for(one: ExpertWeights, count: int) -> ExpertWeights:
    """Uninitialised weights of `count` experts like the single one of `one`."""
    rooms: dict[str, Any] = {
        name: _on_huge_pages(tensor.new_empty((count, *tensor.shape[1:])))
        for name in _TENSORS
        if (tensor := getattr(one, name)) is not None
    }
    return replace(one, **rooms)


def _on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; on a CPU the system is asked for large pages.

    Page by page of 4 KiB, the first touch of this memory would take longer than reading the weights from a disk.
    """
    page = mmap.PAGESIZE
    first, end = align(tensor.data_ptr(), page), (tensor.data_ptr() + tensor.nbytes) // page * page
    if tensor.device.type == "cpu" and end - first >= MIN_HUGE_BYTES:
        # A kernel without them says so; nothing is lost.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)
    return tensor


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill `target`; on CPUs on this thread alone, for others would have to wait for it to end."""
    if source.device.type == target.device.type == "cpu" and source.dtype != torch.bfloat16:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte floats as uint8, for which every operation exists."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
