"""Loads the experts of a rank: they come one by one, dense or quantized, and are stored in the weight format."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_runtime.config import MoELayerConfig
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, TokenFormat, align, weight_format_named
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, fold_into_fp8, has_blocks_apart
from moe_runtime.support.arguments import check_is_tensor, describe

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
HUGE_PAGE = 2 << 20
PAGES_THREAD = "moe_runtime pages"
_TENSORS = ("quants", "scales", "expert_scales", "bias")


class ExpertTensors(NamedTuple):
    """One expert: `gate_up [2I, H]`, `down [H, I]`, bf16 or fp32, and its biases `[2I]` and `[H]`.

    Without a gate, `gate_up [I, H]` is up alone, with a bias `[I]`. A weight may also be quantized: `ExpertWeights` of
    one expert without a bias. The rows of gate and up, in weight and bias, have the order `activation.order` of the
    layer.
    """

    gate_up: torch.Tensor | ExpertWeights
    down: torch.Tensor | ExpertWeights
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class QuantBuffer:
    """Allocates the quants of `count` experts in one CPU tensor, one expert per call. Called as `torch.empty`.

    A reader that fills it saves a copy. Quants of another shape or dtype than the first, as in a checkpoint with some
    experts in fp32, get memory of their own.
    """

    def __init__(self, count: int) -> None:
        self.tensor: torch.Tensor | None = None
        self._count = count
        self._given = 0

    @classmethod
    def over(cls, quants: torch.Tensor) -> QuantBuffer:
        """One that is `quants` `[E, N, K]`: what a reader leaves there needs no copy."""
        buffer = cls(quants.shape[0])
        buffer.tensor = quants.detach()
        return buffer

    def __call__(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = populated(_fresh(self._count, *shape, dtype=dtype))
        self._given += 1
        if (tuple(self.tensor.shape[1:]), self.tensor.dtype) != (shape, dtype):
            return _fresh(*shape, dtype=dtype)
        return self.tensor[self._given - 1]


def populated(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose pages a thread faults in, huge ones if possible, unless it is small.

    Otherwise whoever fills it waits for one page fault after another.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < HUGE_PAGE:
        return tensor
    first, end = align(tensor.data_ptr(), mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) & -mmap.PAGESIZE
    threading.Thread(target=_make_pages, args=(first, end, tensor), name=PAGES_THREAD, daemon=True).start()
    return tensor


def _make_pages(first: int, end: int, kept: torch.Tensor) -> None:
    """Fault in the pages from address `first` to `end`, which the tensor `kept` owns."""
    libc = ctypes.CDLL(None)

    def advise(start: int, size: int, advice: int) -> int:
        return int(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice))

    advise(first, end - first, MADV_HUGEPAGE)
    for start in range(first, end, HUGE_PAGE):  # in small steps: other threads cannot map memory during one
        # Linux before 5.14 does not know it; pages are then faulted in on first touch.
        if advise(start, min(HUGE_PAGE, end - start), MADV_POPULATE_WRITE):
            return


QuantBuffers = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]
"""What allocates the quants of gate-and-up and of down: two `QuantBuffer`s, or `FRESH`."""


def _fresh(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cpu")


FRESH: QuantBuffers = (_fresh, _fresh)


def check_buffers(buffers: object) -> None:
    """Raise `ValueError` unless `buffers` are two `QuantBuffer`s, or `FRESH`."""
    given = buffers if isinstance(buffers, tuple) else ()
    if buffers is not FRESH and [type(buffer) for buffer in given] != [QuantBuffer, QuantBuffer]:
        raise ValueError(f"buffers: expected two of QuantBuffer, got {describe(buffers)}")


def quantize_experts(
    experts: Iterable[ExpertTensors | tuple[torch.Tensor, torch.Tensor]],
    config: MoELayerConfig,
    count: int,
    device: torch.device,
    buffers: QuantBuffers = FRESH,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Gate-and-up and down of `count` experts in the weight format of `config`. Holds one more expert at a time.

    Weights that already have that format stay bit for bit. Block scales of `nvfp4`, `mxfp4` and `mxfp8` are folded for
    `fp8_block` (`fold_into_fp8`). Those in another format, or with blocks of 128x128 that hold rows of gate and
    of up, are dequantized and quantized again. A pair is an expert without biases. Quants that a
    reader put into a `QuantBuffer` of `buffers` stay there.

    Raises `ValueError` naming the tensor and the expert's position: a wrong shape or order of gate and up, a bias that
    `config.expert_bias` excludes or requires; also for another number of experts.
    """
    fmt, order = weight_format_named(config.weight_format), _order(config)
    whole: tuple[ExpertWeights, ExpertWeights] | None = None
    seen = 0
    for expert in _checked(experts, config, count):
        parts = (
            _quantize(expert.gate_up, expert.gate_up_bias, fmt, order, device),
            _quantize(expert.down, expert.down_bias, fmt, None, device),
        )
        if whole is None:
            whole = (_empty_like(parts[0], count, buffers[0]), _empty_like(parts[1], count, buffers[1]))
        for target, part in zip(whole, parts, strict=True):
            for name in _TENSORS:
                if (value := getattr(part, name)) is not None:
                    _put(getattr(target, name)[seen : seen + 1], value)
        seen += 1
    if seen != count:
        raise ValueError(f"experts: expected {count} for this rank, got {seen}")
    if whole is None:
        # A rank without experts still takes part in every step, with weights of zero experts in the right shapes.
        zeros = {name: _fresh(*shape, dtype=torch.bfloat16).zero_() for name, shape in _shapes(config).items()}
        gate_up = _quantize(zeros["gate_up"], zeros.get("gate_up_bias"), fmt, order, device)
        down = _quantize(zeros["down"], zeros.get("down_bias"), fmt, None, device)
        whole = (_empty_like(gate_up, 0), _empty_like(down, 0))
    return whole


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
        # Without an order, blocks of 128 rows run on from gate to up.
        if w.format is fmt and (w.gate_up is order or not has_blocks_apart(fmt, w.num_rows, order)):
            scales = w.expert_scales
            if scales is not None and order is not None:
                scales = scales.view(1, -1).expand(1, 2).contiguous()
            return replace(w, expert_scales=scales, bias=bias_EN, gate_up=order)
        if fmt is FP8_BLOCK and w.format.swizzled:
            return replace(fold_into_fp8(w, gate_up=order), bias=bias_EN)
        w_ENK = w.dequantize()
    else:
        w_ENK = w.to(device)[None]
    return ExpertWeights.quantize(w_ENK, fmt, gate_up=order or False, bias=bias_EN)


def _order(config: MoELayerConfig) -> GateUpOrder | None:
    """The order of gate and up; None without a gate."""
    return GateUpOrder(config.activation.order) if config.activation.gated else None


def _shapes(config: MoELayerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of one expert's tensors, biases among them only if there are any."""
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = config.activation.num_parts * inner
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (rows, hidden), "down": (hidden, inner)}
    if config.expert_bias:
        shapes |= {"gate_up_bias": (rows,), "down_bias": (hidden,)}
    return shapes


def _checked(
    experts: Iterable[ExpertTensors | tuple[torch.Tensor, torch.Tensor]], config: MoELayerConfig, count: int
) -> Iterator[ExpertTensors]:
    shapes = _shapes(config)
    for number, given in enumerate(experts):
        if number >= count:
            raise ValueError(f"experts: expected {count} for this rank, got more")
        if not isinstance(given, tuple | list) or not 2 <= len(given) <= len(ExpertTensors._fields):
            got = f"{len(given)} of them" if isinstance(given, tuple | list) else type(given).__name__
            raise ValueError(f"experts: expected ExpertTensors or a pair of tensors for expert {number}, got {got}")
        expert = ExpertTensors(*given)
        for name, tensor in expert._asdict().items():
            at, is_weight = f"{name} of expert {number}", name in ("gate_up", "down")
            if tensor is not None and not (is_weight and isinstance(tensor, ExpertWeights)):
                check_is_tensor(at, tensor)
            expected = f"shape {list(shapes[name])}" if name in shapes else "none"
            got = "none" if tensor is None else f"shape {_shape(tensor)}"
            if expected != got:
                raise ValueError(f"{at}: expected {expected}, got {got}")
            if tensor is not None and tensor.device.type == "meta":
                raise ValueError(f"{at}: expected a tensor with data, got one on the meta device")
            if isinstance(tensor, ExpertWeights):
                _check_quantized(at, tensor, config)
            elif is_weight and tensor is not None and tensor.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"{at}: expected torch.bfloat16 or torch.float32, got {tensor.dtype}")
            elif tensor is not None and not tensor.is_floating_point():
                raise ValueError(f"{at}: expected floats, got {tensor.dtype}")
        yield expert


def _shape(tensor: torch.Tensor | ExpertWeights) -> list[int]:
    """`[N, K]` of the weights of one expert, as of a tensor."""
    if not isinstance(tensor, ExpertWeights):
        return list(tensor.shape)
    sizes = [tensor.num_rows, tensor.num_columns]
    return sizes if tensor.num_experts == 1 else [tensor.num_experts, *sizes]


def _check_quantized(name: str, w: ExpertWeights, config: MoELayerConfig) -> None:
    if w.bias is not None:
        raise ValueError(f"{name}: expected weights without a bias, which is given apart from them")
    order = _order(config) if name.startswith("gate_up") else None
    if w.gate_up not in (order, None):
        expected = "plain weights" if order is None else f"gate and up in order {order.value}"
        raise ValueError(f"{name}: expected {expected}, got order {w.gate_up.value}")
    second = w.expert_scales is not None
    if w.format.name == config.weight_format and second != w.format.has_row_scale:
        raise ValueError(f"{name}: expected {'' if w.format.has_row_scale else 'no '}expert_scales in {w.format.name}")


def _empty_like(one: ExpertWeights, count: int, buffer: Callable[..., torch.Tensor] = torch.empty) -> ExpertWeights:
    """Uninitialised weights of `count` experts like the one of `one`; quants in `buffer` if those of `one` are."""
    tensors: dict[str, Any] = {}
    whole = buffer.tensor if isinstance(buffer, QuantBuffer) else None
    if whole is not None and whole.data_ptr() == one.quants.data_ptr():
        tensors["quants"] = whole.view(count, *one.quants.shape[1:])
    for name in _TENSORS:
        tensor = getattr(one, name)
        if name not in tensors and tensor is not None:
            tensors[name] = populated(tensor.new_empty((count, *tensor.shape[1:])))
    return replace(one, **tensors)


def _put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into `target`, both contiguous, unless it lies there already."""
    if target.data_ptr() == value.data_ptr():
        return
    target, value = target.view(torch.uint8), value.view(torch.uint8)
    if target.device.type == "cpu":
        # For each of these small tensors torch would wake its threads and wait for them.
        np.copyto(target.numpy(), value.numpy())
    else:
        target.copy_(value)
