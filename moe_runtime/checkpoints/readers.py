"""Reads the weights of linears and experts from the files of a checkpoint, as they are stored.

A bf16 or fp32 weight comes back as a tensor, one of fp16 in fp32. A quantized one comes back as `ExpertWeights` of one
expert, with the same quants and scales, block scales in the order that the GEMM reads; or as fp32 if no format has them
(`WeightLayout.dequantized`), where the product of quant and scale is rounded to fp32. Nothing else is rounded. Every
tensor is checked for dtype and shape, and scales for NaN; errors name file and tensor.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from moe_runtime.checkpoints.files import DTYPES, TensorFiles
from moe_runtime.checkpoints.layouts import (
    FLOAT_DTYPES,
    FP8_TENSOR,
    FP8_TENSOR_INV,
    PLAIN,
    ScaleName,
    WeightLayout,
)
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffers, allocate_quants
from moe_runtime.kernels.formats.number_formats import (
    FP8_BLOCK,
    MAX_ENCODE_SCALE,
    WEIGHT_BLOCK_N,
    TokenFormat,
    ceil_div,
)
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from moe_runtime.support.progress import one_ahead


@dataclass(frozen=True)
class ExpertNames:
    """Names of the experts of a layer in a checkpoint.

    Attributes:
        block: their common prefix, such as `model.layers.3.mlp.experts`.
        gate, up, down: names of the projections of one expert, if experts are not stacked; `gate` is None without one.
        order: order of the rows of gate and up in the model, and in stacked tensors.
        biases: whether each projection has a bias.
        others: tensors with names like those of experts that belong to something else.
    """

    block: str
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    order: GateUpOrder = GateUpOrder.GATE_UP
    biases: bool = False
    others: tuple[str, ...] = ()

    @property
    def gate_up(self) -> GateUpOrder | None:
        """The order of gate and up; None without a gate."""
        return None if self.gate is None else self.order

    def linears(self, expert: int) -> tuple[str, ...]:
        """Prefixes of gate, if there is one, up and down of an expert that is not stacked."""
        parts = (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)
        return tuple(f"{self.block}.{expert}.{part}" for part in parts)

    @property
    def stacks(self) -> tuple[str, str]:
        """Prefixes of gate-and-up, or of up, and of down if experts are stacked."""
        return f"{self.block}.{'up_proj' if self.gate is None else 'gate_up_proj'}", f"{self.block}.down_proj"


@dataclass(frozen=True)
class ExpertReader:
    """The routed experts of one layer.

    Attributes:
        files: the checkpoint's tensors.
        names: names of the layer's experts.
        layout: layout of their weights.
        hidden, inner: `H` and `I`.
        num_experts: `E`.
    """

    files: TensorFiles
    names: ExpertNames
    layout: WeightLayout
    hidden: int
    inner: int
    num_experts: int

    def experts(self, expert_ids: Sequence[int], buffers: QuantBuffers = FRESH) -> Iterator[ExpertTensors]:
        """Experts one by one, in the order of `expert_ids`.

        `buffers` allocate the quants of gate-and-up and of down. With any but `FRESH`, a thread reads the next expert
        while one is in use.
        """
        if buffers is FRESH:
            return (self.expert(expert) for expert in expert_ids)
        return self._read_ahead(expert_ids, buffers)

    def _read_ahead(self, expert_ids: Sequence[int], buffers: QuantBuffers) -> Iterator[ExpertTensors]:
        # Closed before an error propagates: its traceback would keep the thread alive, which would reopen closed files.
        with closing(one_ahead(self._begin(expert, buffers) for expert in expert_ids)) as begun:
            for finish in begun:
                yield finish()

    def expert(self, expert: int, buffers: QuantBuffers = FRESH) -> ExpertTensors:
        """One expert, as it is stored."""
        return self._begin(expert, buffers)()

    def _begin(self, expert: int, buffers: QuantBuffers) -> Callable[[], ExpertTensors]:
        """Read an expert from disk. Calling the result does the rest of the work."""
        if self.layout.stacked:
            one = self._stacked(expert, buffers)
            return lambda: one
        *gate_up, down = self.names.linears(expert)
        order, inner, hidden = self.names.gate_up, self.inner, self.hidden
        first = begin_linears(self.files, self.layout, tuple(gate_up), inner, hidden, buffers[0], order)
        second = begin_linears(self.files, self.layout, (down,), hidden, inner, buffers[1])
        biases: tuple[torch.Tensor, ...] = ()
        if self.names.biases:
            parts = [self._bias(prefix, inner) for prefix in gate_up]
            biases = stack_rows(torch.stack(parts), order), self._bias(down, hidden)
        return lambda: ExpertTensors(first(), second(), *biases)

    def _bias(self, prefix: str, rows: int) -> torch.Tensor:
        return self.files.read(f"{prefix}.bias", (rows,), FLOAT_DTYPES).float()

    def holds(self, fmt: TokenFormat) -> bool:
        """Whether quants are stored in the form that weights in `fmt` have in memory."""
        if self.layout.dequantized:
            return False
        if self.layout != PLAIN:
            parts = (self.inner, self.hidden, self.names.gate_up), (self.hidden, self.inner, None)
            whole = self.layout.stacked and not self.layout.fused
            kept = whole or all(keeps_scales(fmt, *each) for each in parts)
            return self.layout.format is fmt and self.layout.scale is not None and kept
        first = f"{self.names.linears(0)[0]}.{self.layout.weight}"
        return fmt is self.layout.format and self.files.entry(first).dtype == "BF16"

    def check_names(self) -> None:
        """Raise `ValueError` naming the first tensor of the block that does not belong to an expert."""
        expected = {name for expert in range(self.num_experts) for name in self.tensors(expert) + self.biases(expert)}
        expected.update(self.names.others)
        for name in self.files.names():
            if name.startswith(f"{self.names.block}.") and name not in expected:
                raise ValueError(
                    f"{self.files.index}: tensor {name} is not expected: {self.num_experts} experts in layout "
                    f"{self.layout.name}"
                )

    def smallest_input_gsf(self) -> float | None:
        """The smallest stored encode scale for the inputs of all down projections; None if none is stored.

        A larger one could saturate the inputs of some expert, and a smaller one would gain nothing. All ranks get the
        same, whichever experts they hold.

        Experts that calibration never reached do not count. Their scale is missing, or 0 where weights are all 0. In
        layouts that store encode scales, it is infinite or exactly 1, which is what compressed-tensors writes for
        all-zero inputs; a 1 counts only if all others are 1.

        Raises `ValueError` if calibration reached none of those that have one.
        """
        scale = self.layout.input_scale
        if scale is None:
            return None
        downs = ((expert, self.names.linears(expert)[-1]) for expert in range(self.num_experts))
        found = [
            _second_level(self.files, down, scale, may_be_zeros=functools.partial(self._may_be_zeros, expert))
            for expert, down in downs
            if f"{down}.{scale.suffix}" in self.files
        ]
        if not found:
            return None
        stored = torch.stack(found)
        reached = stored[stored.isfinite() & (stored != 0)]
        if len(reached) == 0:
            raise ValueError(
                f"{self.files.index}: expected one of the {scale.suffix} of the down projections in {self.names.block} "
                f"to be {'finite' if scale.divides else 'positive'}, got none; give intermediate_gsf"
            )
        if not scale.divides:
            return float(_reciprocal(reached).min().clamp(max=MAX_ENCODE_SCALE))
        reached = reached[reached != 1] if (reached != 1).any() else reached
        return float(reached.min().clamp(max=MAX_ENCODE_SCALE))

    def _may_be_zeros(self, expert: int) -> bool:
        """Whether all inputs of an expert's down projection may be 0: so it is if the weights of some linear are."""
        scale = self.layout.weight_scale
        if scale is not None and scale.divides:
            return True
        return scale is not None and any(
            _second_level(self.files, prefix, scale) == 0 for prefix in self.names.linears(expert)
        )

    def tensors(self, expert: int) -> list[str]:
        """Names of the tensors that an expert's weights may have, gate first; of all experts if stacked."""
        if self.layout.stacked:
            return [name for prefix in self.names.stacks for name in self.layout.stack(prefix)]
        suffixes = [self.layout.weight, self.layout.scale, *_suffixes(self.layout)]
        return [f"{prefix}.{part}" for prefix in self.names.linears(expert) for part in suffixes if part is not None]

    def biases(self, expert: int) -> list[str]:
        """Names of the biases of an expert (gate, up, down), or of all stacked ones (gate-and-up, down)."""
        if not self.names.biases:
            return []
        if self.layout.stacked:
            return [f"{prefix}_bias" for prefix in self.names.stacks]
        return [f"{prefix}.bias" for prefix in self.names.linears(expert)]

    def _stacked(self, expert: int, buffers: QuantBuffers) -> ExpertTensors:
        weights: list[torch.Tensor | ExpertWeights] = []
        biases = []
        rows = self.inner if self.names.gate is None else 2 * self.inner
        sizes = ((rows, self.hidden), (self.hidden, self.inner))
        orders = (self.names.gate_up, None)
        for prefix, (rows, columns), order, empty in zip(self.names.stacks, sizes, orders, buffers, strict=True):
            if self.names.biases:
                bias = self.files.read(f"{prefix}_bias", (self.num_experts, rows), FLOAT_DTYPES, item=expert)
                biases.append(bias.float())
            if self.layout.scale is None:
                # A transposed one is the right-hand side of `x @ w`.
                shape = (columns, rows) if self.layout.transposed else (rows, columns)
                stored = _no_half(
                    self.files.read(prefix, (self.num_experts, *shape), self.layout.quant_dtypes, item=expert)
                )
                weights.append(stored.T.contiguous() if self.layout.transposed else stored)
            elif self.layout.fused:
                weights.append(self._fused_fp8(prefix, rows, columns, order, expert, empty))
            else:
                weights.append(self._stacked_weight(prefix, rows, columns, order, expert, empty))
        return ExpertTensors(weights[0], weights[1], *biases)

    def _stacked_weight(
        self,
        prefix: str,
        rows: int,
        columns: int,
        order: GateUpOrder | None,
        expert: int,
        empty: Callable[..., torch.Tensor],
    ) -> ExpertWeights:
        fmt, (name, scale) = self.layout.format, self.layout.stack(prefix)
        fmt.check_columns(columns, f"{self.files.index}: columns of {prefix}")
        shape = (self.num_experts, rows, columns // fmt.block)
        blocks = (*shape, fmt.quant_bytes(fmt.block))
        self.files.check(name, blocks, self.layout.quant_dtypes)
        quants = allocate_quants(empty, *blocks[1:], dtype=fmt.quant_dtype)
        self.files.read_into(name, quants, item=expert)
        scales = self.files.read(scale, shape, self.layout.scale_dtypes, item=expert)
        check_no_nan(self.files, scale, scales)
        return ExpertWeights(fmt, quants.view(1, rows, -1), swizzle_scales(scales[None]), gate_up=order)

    def _fused_fp8(
        self,
        prefix: str,
        rows: int,
        columns: int,
        order: GateUpOrder | None,
        expert: int,
        empty: Callable[..., torch.Tensor],
    ) -> torch.Tensor | ExpertWeights:
        """FP8 with scales of blocks or of the whole tensor, of which gate and up have one each."""
        layout, (name, scale) = self.layout, self.layout.stack(prefix)
        self.files.check(name, (self.num_experts, rows, columns), layout.quant_dtypes)
        high, wide = layout.grid or (WEIGHT_BLOCK_N, layout.format.block)
        high, wide = high or rows, wide or columns
        if order is not None and rows <= high:
            # transformers keeps two rows of scales for gate and up, however few rows these have.
            high = rows // 2
        if order is not None and rows // 2 % high:
            raise ValueError(
                f"{self.files.path_of(name)}: tensor {name}: expected gate and up of a multiple of {high} rows, got "
                f"{rows // 2}: whether they share a scale is not known"
            )
        shape = ceil_div(rows, high), ceil_div(columns, wide)
        quants = allocate_quants(empty, rows, columns, dtype=torch.float8_e4m3fn)
        self.files.read_into(name, quants, item=expert)
        stored = self.files.read(scale, (self.num_experts, *shape), layout.scale_dtypes, item=expert)
        check_no_nan(self.files, scale, stored)
        # Gate and up apart.
        num_parts = 1 if order is None else 2
        parts, scales = quants.view(num_parts, -1, columns), stored.float().view(num_parts, -1, shape[1])
        _clear(self.files, (scale,) * num_parts, parts, scales, high, wide)
        if layout.dequantized or not keeps_scales(layout.format, parts.shape[1], columns, order):
            return _dequantized(parts, scales, high, wide).flatten(0, 1)
        blocks = _in_blocks(scales, high, wide, parts.shape[1], columns).flatten(0, 1)
        return ExpertWeights(layout.format, quants[None], blocks[None], gate_up=order)


def read_linear(
    files: TensorFiles, layout: WeightLayout, prefix: str, rows: int, columns: int
) -> torch.Tensor | ExpertWeights:
    """One linear `[rows, columns]`: bf16 or fp32, or weights of one expert; see `begin_linears`."""
    return begin_linears(files, layout, (prefix,), rows, columns)()


def begin_linears(
    files: TensorFiles,
    layout: WeightLayout,
    prefixes: tuple[str, ...],
    rows: int,
    columns: int,
    empty: Callable[..., torch.Tensor] = FRESH[0],
    order: GateUpOrder | None = None,
) -> Callable[[], torch.Tensor | ExpertWeights]:
    """Read one linear `[rows, columns]`, or gate and up, each with its own second-level scale.

    `empty` allocates the quants. Calling the result gives `[len(prefixes) * rows, columns]`, gate and up in `order`:
    bf16 or fp32, or weights of one expert. Weights in 128x128 blocks that `ExpertWeights` does not hold
    (`keeps_scales`) come back dequantized to fp32, and so do those of layouts that no format has.
    """
    fmt = layout.format
    if fmt.scale_dtype is not torch.float32:
        fmt.check_columns(columns, f"{files.index}: columns of {prefixes[0]}")
    shape, dtypes = (rows, layout.quant_columns(columns)), layout.quant_dtypes
    first = files.check(f"{prefixes[0]}.{layout.weight}", shape, dtypes)
    if order is GateUpOrder.INTERLEAVED:
        quants = allocate_quants(empty, rows, len(prefixes), shape[1], dtype=DTYPES[first.dtype]).transpose(0, 1)
    else:
        quants = allocate_quants(empty, len(prefixes), *shape, dtype=DTYPES[first.dtype])
    for prefix, part in zip(prefixes, quants, strict=True):
        name = f"{prefix}.{layout.weight}"
        files.check(name, shape, (first.dtype,))
        if part.is_contiguous():
            files.read_into(name, part)
        else:
            part.copy_(files.read(name, shape, (first.dtype,)))
    if layout.scale is None:
        return lambda: _no_half(stack_rows(quants, order))
    if layout.int4:
        _check_int4(files, layout, prefixes, rows, columns)
    scales = _read_scales(files, layout, prefixes, rows, columns)
    second = None
    if layout.weight_scale is not None:
        second = torch.stack([_second_level(files, prefix, layout.weight_scale) for prefix in prefixes])
        second = _reciprocal(second) if layout.weight_scale.divides else second
        for prefix in (prefix for prefix, scale in zip(prefixes, second.tolist(), strict=True) if scale == 0):
            name = f"{prefix}.{layout.weight_scale.suffix}"
            warnings.warn(f"{files.path_of(name)}: tensor {name}: its linear is read as zeros", stacklevel=2)
    names = [f"{prefix}.{layout.scale}" for prefix in prefixes]
    return functools.partial(_assemble, files, layout, names, quants, scales, second, order)


def stack_rows(parts: torch.Tensor, order: GateUpOrder | None) -> torch.Tensor:
    """`[P, N, ...]`, one linear or gate and up, as `[P * N, ...]` with their rows in `order`."""
    return (parts.transpose(0, 1) if order is GateUpOrder.INTERLEAVED else parts).flatten(0, 1)


def keeps_scales(fmt: TokenFormat, rows: int, columns: int, order: GateUpOrder | None) -> bool:
    """Whether the scales of linears `[rows, columns]`, stored apart, are those of `ExpertWeights` of all their rows.

    128x128 blocks are not if rows of gate and up alternate, so that a block would hold some of both, nor if K is no
    multiple of `fmt.unit`, or N none of 8.
    """
    kept = rows % 8 == 0 and columns % fmt.unit == 0 and order is not GateUpOrder.INTERLEAVED
    return kept or fmt.scale_dtype is not torch.float32


def _assemble(
    files: TensorFiles,
    layout: WeightLayout,
    names: list[str],
    quants: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor | None,
    order: GateUpOrder | None,
) -> torch.Tensor | ExpertWeights:
    """Assemble a weight from the quants, block scales (called `names`) and second-level scales of linears."""
    if second is not None:
        # Writers divide by the second-level scale: block scales of weights that are all 0 are NaN.
        scales.view(torch.uint8)[second == 0] = 0
    for name, part in zip(names, scales, strict=True):
        check_no_nan(files, name, part)
    fmt = layout.format
    if layout.is_fp8:
        high, wide = layout.grid or (WEIGHT_BLOCK_N, fmt.block)
        scales = scales.float()
        _clear(files, names, quants, scales, high or quants.shape[1], wide or quants.shape[2])
    if layout.grid is not None:
        scales = scales.float()
        values = _unpacked_int4(quants) if layout.int4 else quants
        rows, columns = values.shape[1:]
        high, wide = (size or whole for size, whole in zip(layout.grid, (rows, columns), strict=True))
        if layout.dequantized:
            return stack_rows(_dequantized(values, scales, high, wide), order)
        scales = _in_blocks(scales, high, wide, rows, columns)
    assert fmt.scale_dtype is not None
    scales = scales.view(fmt.scale_dtype) if fmt.scale_dtype.itemsize == 1 else scales.to(fmt.scale_dtype)
    if scales.dtype == torch.float32:
        _, rows, columns = quants.shape
        if not keeps_scales(fmt, rows, columns, order):
            return stack_rows(_dequantized(quants, scales, WEIGHT_BLOCK_N, fmt.block), order)
        return ExpertWeights(fmt, quants.view(1, -1, columns), scales.view(1, -1, scales.shape[2]), gate_up=order)
    if second is not None and order is not None:
        second = second[None]
    blocks = swizzle_scales(stack_rows(scales, order)[None])
    return ExpertWeights(fmt, stack_rows(quants, order)[None], blocks, second, gate_up=order)


def _clear(
    files: TensorFiles, names: Sequence[str], quants: torch.Tensor, scales: torch.Tensor, high: int, wide: int
) -> None:
    """Make FP8 quants 0 whose scale (fp32, called `names`) is 0: writers divided by it, which gave NaN."""
    dead = scales == 0
    if not dead.any():
        return
    for name, part in zip(names, dead, strict=True):
        if part.all():
            warnings.warn(f"{files.path_of(name)}: tensor {name}: its linear is read as zeros", stacklevel=2)
    quants.view(torch.uint8).masked_fill_(_spread(dead, high, wide, *quants.shape[1:]), 0)


def _spread(scales: torch.Tensor, high: int, wide: int, rows: int, columns: int) -> torch.Tensor:
    """`[P, rows, columns]` of scales `[P, ceil(rows/high), ceil(columns/wide)]` of blocks."""
    spread = scales.repeat_interleave(min(high, rows), 1)[:, :rows]
    return spread.repeat_interleave(min(wide, columns), 2)[:, :, :columns]


def _dequantized(quants: torch.Tensor, scales: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    """fp32 of quants `[P, N, K]` times the scales `[P, ceil(N/high), ceil(K/wide)]` of their blocks."""
    values, (rows, columns) = quants.float(), quants.shape[1:]
    high, wide = min(high, rows), min(wide, columns)
    if rows % high or columns % wide:
        return values * _spread(scales, high, wide, rows, columns)
    # Without a copy of the scales for each value.
    blocks = values.contiguous().view(len(quants), rows // high, high, columns // wide, wide)
    return blocks.mul_(scales[:, :, None, :, None]).view(quants.shape)


def _in_blocks(scales: torch.Tensor, high: int, wide: int, rows: int, columns: int) -> torch.Tensor:
    """fp32 scales of blocks of `high x wide` of linears `[P, rows, columns]`, as those of the 128x128 blocks in it."""
    down = torch.arange(0, rows, WEIGHT_BLOCK_N, device=scales.device) // high
    across = torch.arange(0, columns, FP8_BLOCK.block, device=scales.device) // wide
    return scales[:, down][:, :, across].contiguous()


def _unpacked_int4(quants: torch.Tensor) -> torch.Tensor:
    """int8 of eight in each int32."""
    raw = quants.contiguous().view(torch.uint8)
    return torch.stack([raw & 15, raw >> 4], -1).flatten(-2).view(torch.int8) - 8


def _check_int4(files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int) -> None:
    """Raise `ValueError` unless groups are whole, and shapes that are stored beside the quants are these."""
    group = layout.grid[1] if layout.grid is not None else None
    if group is not None and columns % group:
        raise ValueError(f"{files.index}: columns of {prefixes[0]}: expected a multiple of {group}, got {columns}")
    for name in (f"{prefix}.weight_shape" for prefix in prefixes):
        if name in files and (got := files.read(name, (2,), ("I64", "I32")).tolist()) != [rows, columns]:
            raise ValueError(f"{files.path_of(name)}: tensor {name}: expected {[rows, columns]}, got {got}")


def _no_half(x: torch.Tensor) -> torch.Tensor:
    """`x`, in fp32 if it is fp16."""
    return x.float() if x.dtype == torch.float16 else x


def layout_of(files: TensorFiles, layout: WeightLayout, prefixes: Iterable[str]) -> WeightLayout:
    """`layout`, or `PLAIN` if these linears are stored without scales."""
    names = list(prefixes)
    for one in (layout, FP8_TENSOR_INV) if layout is FP8_TENSOR else (layout,):
        if one.scale is not None and any(f"{prefix}.{one.scale}" in files for prefix in names):
            return one
    return PLAIN if all(f"{prefix}.{PLAIN.weight}" in files for prefix in names) else layout


def dense(weight: torch.Tensor | ExpertWeights) -> torch.Tensor:
    """What a reader gives, as a tensor `[N, K]`, bf16 or fp32."""
    return weight.dequantize()[0] if isinstance(weight, ExpertWeights) else weight


def _suffixes(layout: WeightLayout) -> list[str]:
    scales = [scale.suffix for scale in (layout.weight_scale, layout.input_scale) if scale is not None]
    return [*scales, *layout.unused]


def _read_scales(
    files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int
) -> torch.Tensor:
    """Linear block scales of the linears, stacked, as they are stored."""
    fmt = layout.format
    if layout.grid is None:
        shape = (rows if fmt.swizzled else ceil_div(rows, WEIGHT_BLOCK_N), fmt.scale_columns(columns))
    else:
        high, wide = layout.grid
        shape = ceil_div(rows, high or rows), ceil_div(columns, wide or columns)
    names = [f"{prefix}.{layout.scale}" for prefix in prefixes]
    given = files.entry(names[0]).shape
    # ModelOpt leaves out the dimension of a single column or both of a single scale, or adds those of each block.
    if fmt.swizzled or given not in ((shape[0], 1, shape[1], 1), *_squeezed(shape)):
        given = shape
    first = files.check(names[0], given, layout.scale_dtypes)
    scales = torch.empty(len(names), *shape, dtype=DTYPES[first.dtype], device="cpu")
    for name, part in zip(names, scales, strict=True):
        files.check(name, given, (first.dtype,))
        files.read_into(name, part)
    return scales


def _squeezed(shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """The shapes of the same scales without dimensions of 1 at the end."""
    return [shape[:1], ()] if shape == (1, 1) else [shape[:1]] if shape[1] == 1 else []


def check_no_nan(files: TensorFiles, name: str, scales: torch.Tensor) -> None:
    """Raise `ValueError` naming file and tensor if a scale is NaN, or infinite in fp32 and bf16."""
    if scales.element_size() > 1:
        bad = (~scales.isfinite()).numpy()
    else:
        # numpy: torch would wake its threads for each of these small tensors.
        raw, signed = scales.view(torch.uint8).numpy(), scales.dtype == torch.float8_e4m3fn
        # NaN is the largest byte, in e4m3 also the largest without a sign. A maximum needs no memory.
        if raw.max(initial=0) < 0xFF and not (signed and raw.view(np.int8).max(initial=0) == 0x7F):
            return
        bad = raw & 0x7F == 0x7F if signed else raw == 0xFF
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"{files.path_of(name)}: tensor {name}: expected finite scales, got one that is not at {place}"
        )


def _second_level(
    files: TensorFiles, prefix: str, scale: ScaleName, *, may_be_zeros: Callable[[], bool] = lambda: True
) -> torch.Tensor:
    """A second-level scale as it is stored, fp32 `[]`.

    That of values that are all 0, which is 0, or infinite if it divides, is refused unless `may_be_zeros`.
    """
    name = f"{prefix}.{scale.suffix}"
    shape = files.entry(name).shape
    value = files.read(name, shape if shape == (1,) else (), ("F32",)).view(())
    if not (0 < value.item() < math.inf or (value.item() == (math.inf if scale.divides else 0) and may_be_zeros())):
        raise ValueError(f"{files.path_of(name)}: tensor {name}: expected a positive number, got {float(value)}")
    return value


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """`1 / x` by one IEEE division, which `number / tensor` need not be."""
    return torch.ones_like(x) / x
