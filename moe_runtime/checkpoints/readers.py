"""Reads the weights of linears and experts from the files of a checkpoint, as they are stored.

A bf16 or fp32 weight comes back as a tensor, one of fp16 in fp32. A quantized one comes back as `ExpertWeights` of one
expert, with the same quants and scales, block scales in the order that the GEMM reads; or as fp32 if no format has them
(`WeightLayout.dequantized`), where the product of quant and scale is rounded to fp32. Nothing else is rounded. Every
tensor is checked for dtype and shape, and scales for NaN; errors name file and tensor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from moe_runtime.checkpoints.dequantize import (
    centred,
    dequantized,
    in_blocks,
    keeps_scales,
    no_half,
    spread,
    stack_rows,
    times_columns,
    unpacked,
)
from moe_runtime.checkpoints.files import DTYPES, TensorFiles
from moe_runtime.checkpoints.layouts import AWQ_ORDER, FLOAT_DTYPES, PLAIN, Packing, WeightLayout, packed_words
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffers
from moe_runtime.checkpoints.second_level import read_second_level, read_weight_scale, smallest_input_gsf
from moe_runtime.checkpoints.unread_tensors import refuse_bias
from moe_runtime.kernels.formats.number_formats import WEIGHT_BLOCK_N, TokenFormat, ceil_div
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder
from moe_runtime.support.progress import one_ahead


@dataclass(frozen=True)
class ExpertNames:
    """Names of the experts of a layer in a checkpoint.

    Attributes:
        block: their common prefix, such as `model.layers.3.mlp.experts`.
        gate, up, down: names of the projections of one expert, if experts are not stacked; `gate` is None without one.
        stacks: prefixes of gate-and-up, or of up, and of down if experts are stacked.
        order: order of the rows of gate and up in the model, and in stacked tensors.
        biases: whether each projection has a bias.
        others: tensors that are named like experts' tensors and belong to something else.
        no_biases: what says that there are no biases, in messages about one that is not 0.
    """

    block: str
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacks: tuple[str, str] = ("", "")
    order: GateUpOrder = GateUpOrder.GATE_UP
    biases: bool = False
    others: tuple[str, ...] = ()
    no_biases: str = "experts are read without biases"

    @property
    def gate_up(self) -> GateUpOrder | None:
        """The order of gate and up; None without a gate."""
        return None if self.gate is None else self.order

    def stacked_biases(self) -> tuple[str, ...]:
        """Names that biases of stacked experts may have: two of gate-and-up, or of up, and two of down."""
        ends = ((prefix, prefix.removesuffix(".weight")) for prefix in self.stacks)
        return tuple(name for prefix, module in ends for name in (f"{prefix}_bias", f"{module}.bias"))

    def linears(self, expert: int) -> tuple[str, ...]:
        """Prefixes of gate, if there is one, up and down of an expert that is not stacked."""
        parts = (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)
        return tuple(f"{self.block}.{expert}.{part}" for part in parts)


class StackedScales(NamedTuple):
    """Block scales `[P, ceil(N/high), ceil(K/wide)]` of linears, from the tensor `name` of all experts."""

    name: str
    scales: torch.Tensor


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

    def expert(self, expert: int) -> ExpertTensors:
        """One expert, as it is stored."""
        return self._begin(expert, FRESH)()

    def with_biases(self, biases: bool) -> ExpertReader:
        """The same reader for a model that says itself whether its experts have biases."""
        names = replace(self.names, biases=biases, no_biases="the model's experts have no biases")
        return replace(self, names=names)

    def _begin(self, expert: int, buffers: QuantBuffers) -> Callable[[], ExpertTensors]:
        """Read an expert from disk. Calling the result does the rest of the work."""
        if self.layout.stacked:
            one = self._stacked(expert, buffers)
            return lambda: one
        *gate_up, down = self.names.linears(expert)
        order, inner, hidden = self.names.gate_up, self.inner, self.hidden
        scales: StackedScales | None = None
        down_scales: StackedScales | None = None
        if self.layout.stacked_scales:
            self._check_whole_blocks()
            scales = self._scales_of_stack(self.names.stacks[0], inner, hidden, len(gate_up), expert)
            down_scales = self._scales_of_stack(self.names.stacks[1], hidden, inner, 1, expert)
        first = begin_linears(self.files, self.layout, tuple(gate_up), inner, hidden, buffers[0], order, scales)
        second = begin_linears(self.files, self.layout, (down,), hidden, inner, buffers[1], scales=down_scales)
        biases: tuple[torch.Tensor, ...] = ()
        if self.names.biases:
            parts = [self._bias(prefix, inner) for prefix in gate_up]
            biases = stack_rows(torch.stack(parts), order), self._bias(down, hidden)
        self._refuse_biases(expert)
        return lambda: ExpertTensors(first(), second(), *biases)

    def _bias(self, prefix: str, rows: int) -> torch.Tensor:
        return self.files.read(f"{prefix}.bias", (rows,), FLOAT_DTYPES).float()

    def holds(self, fmt: TokenFormat) -> bool:
        """Whether quants are stored in the form that weights in `fmt` have in memory."""
        if self.layout.dequantized:
            return False
        if self.layout != PLAIN:
            parts = (self.inner, self.hidden, self.names.gate_up), (self.hidden, self.inner, None)
            if self.layout.format is not fmt or self.layout.scale is None:
                return False
            if self.layout.fused and self._blocks_run_on:
                return False
            whole = self.layout.stacked and not self.layout.fused
            return whole or all(keeps_scales(fmt, *each) for each in parts)
        first = f"{self.names.linears(0)[0]}.{self.layout.weight}"
        return fmt is self.layout.format and self.files.entry(first).dtype == "BF16"

    def check_names(self) -> None:
        """Raise `ValueError` naming the first tensor of the block that does not belong to an expert, or that the index
        leaves out.

        Biases that the model does not have may be there. Their values are looked at where an expert is read.
        """
        expected = {name for expert in range(self.num_experts) for name in self.tensors(expert) + self.biases(expert)}
        expected.update(name for expert in range(self.num_experts) for name in self._unused_biases(expert))
        expected.update(self.names.others)
        for name in self.files.names():
            if name.startswith(f"{self.names.block}.") and name not in expected:
                raise ValueError(
                    f"{self.files.index}: tensor {name} is not expected: {self.num_experts} experts in layout "
                    f"{self.layout.name}"
                )
        for name in self.files.unlisted(f"{self.names.block}."):
            raise ValueError(
                f"{self.files.index}: weight_map: tensor {name} is missing, and is in a file beside others"
            )

    def smallest_input_gsf(self) -> float | None:
        """The smallest stored encode scale for the inputs of all down projections; None if none is stored.

        A larger one could saturate the inputs of some expert, and a smaller one would gain nothing. All ranks get the
        same, whichever experts they hold.

        Experts that calibration never reached do not count. Their scale is missing, or 0 where weights are all 0. In
        layouts that store encode scales, it is infinite or exactly 1, which is what compressed-tensors writes for
        all-zero inputs; a 1 counts only if all others are 1.

        Raises `ValueError` if calibration reached none of those that have one, and naming file and tensor for a scale
        that no kernel takes. Warns (`UserWarning`) where the scales of two experts are more than 2^14 apart.
        """
        scale = self.layout.input_scale
        if scale is None:
            return None
        downs = [self.names.linears(expert)[-1] for expert in range(self.num_experts)]
        return smallest_input_gsf(self.files, self.names.block, downs, scale, self._may_be_zeros)

    def _may_be_zeros(self, expert: int) -> bool:
        """Whether all inputs of an expert's down projection may be 0: so it is if the weights of some linear are."""
        scale = self.layout.weight_scale
        if scale is not None and scale.divides:
            return True
        return scale is not None and any(
            read_second_level(self.files, prefix, scale) == 0 for prefix in self.names.linears(expert)
        )

    def tensors(self, expert: int) -> list[str]:
        """Names of the tensors that an expert's weights may have, gate first; of all experts if stacked."""
        stacks = self.names.stacks
        unused = [f"{prefix}_{part}" for part in self.layout.unused for prefix in stacks]
        if self.layout.stacked:
            return [name for prefix in stacks for name in self.layout.stack(prefix)] + unused
        if self.layout.stacked_scales:
            weights = [f"{prefix}.{self.layout.weight}" for prefix in self.names.linears(expert)]
            return weights + [f"{prefix}_{self.layout.scale}" for prefix in stacks] + unused
        return [name for prefix in self.names.linears(expert) for name in tensors_of(self.layout, prefix)]

    def biases(self, expert: int) -> list[str]:
        """Names of the biases of an expert (gate, up, down), or of all stacked ones (gate-and-up, down)."""
        if not self.names.biases:
            return []
        if self.layout.stacked:
            return [f"{prefix}_bias" for prefix in self.names.stacks]
        return [f"{prefix}.bias" for prefix in self.names.linears(expert)]

    def _unused_biases(self, expert: int) -> dict[str, tuple[int, ...]]:
        """Biases that writers store for each linear, or for all experts in one, by name, with their shapes.

        None where the model has biases.
        """
        if self.names.biases:
            return {}
        *gate_up, down = self.names.linears(expert)
        found: dict[str, tuple[int, ...]] = {f"{prefix}.bias": (self.inner,) for prefix in gate_up}
        found[f"{down}.bias"] = (self.hidden,)
        first, second = (self.num_experts, len(gate_up) * self.inner), (self.num_experts, self.hidden)
        return found | dict(zip(self.names.stacked_biases(), (first, first, second, second), strict=True))

    def _refuse_biases(self, expert: int) -> None:
        """Raise `ValueError` naming file and tensor if an expert has a bias that the model does not have, and not 0.

        Whoever reads an expert looks at its own biases alone: no rank opens files that it does not need, or reads more
        than a fraction of the weights. What is found depends on the file, not on the rank. All experts are read by
        some rank, whose error ends the step of all, as a NaN among the scales does.
        """
        for name, shape in self._unused_biases(expert).items():
            if name in self.files:
                item = expert if len(shape) == 2 else None
                refuse_bias(self.files, name, shape, self.names.no_biases, item)

    def _stacked(self, expert: int, buffers: QuantBuffers) -> ExpertTensors:
        weights: list[torch.Tensor | ExpertWeights] = []
        biases = []
        rows = self.inner if self.names.gate is None else 2 * self.inner
        sizes = ((rows, self.hidden), (self.hidden, self.inner))
        orders = (self.names.gate_up, None)
        self._refuse_biases(expert)
        for prefix, (rows, columns), order, empty in zip(self.names.stacks, sizes, orders, buffers, strict=True):
            if self.names.biases:
                bias = self.files.read(f"{prefix}_bias", (self.num_experts, rows), FLOAT_DTYPES, item=expert)
                biases.append(bias.float())
            if self.layout.scale is None:
                # A transposed one is the right-hand side of `x @ w`.
                shape = (columns, rows) if self.layout.transposed else (rows, columns)
                stored = no_half(
                    self.files.read(prefix, (self.num_experts, *shape), self.layout.quant_dtypes, item=expert)
                )
                weights.append(stored.T.contiguous() if self.layout.transposed else stored)
            else:
                read = self._fused_fp8 if self.layout.fused else self._stacked_blocks
                weights.append(read(prefix, rows, columns, order, expert, empty))
        return ExpertTensors(weights[0], weights[1], *biases)

    def _read_quants(
        self, prefix: str, shape: tuple[int, ...], expert: int, empty: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Quants of this shape of one expert. In files of a `transposed` layout they are transposed."""
        layout, name = self.layout, self.layout.stack(prefix)[0]
        stored = shape[::-1] if layout.transposed else shape
        self.files.check(name, (self.num_experts, *stored), layout.quant_dtypes)
        found = (FRESH[0] if layout.transposed else empty)(*stored, dtype=layout.quant_format.quant_dtype)
        self.files.read_into(name, found, item=expert)
        if not layout.transposed:
            return found
        turned = empty(*shape, dtype=found.dtype)
        turned.view(torch.uint8).copy_(found.view(torch.uint8).T)
        return turned

    def _read_scales(self, prefix: str, shape: tuple[int, int], expert: int) -> torch.Tensor:
        """Scales, as `_read_quants`."""
        layout, name = self.layout, self.layout.stack(prefix)[1]
        stored = shape[::-1] if layout.transposed else shape
        scales = self.files.read(name, (self.num_experts, *stored), layout.scale_dtypes, item=expert)
        check_no_nan(self.files, name, scales)
        return scales.T.contiguous() if layout.transposed else scales

    def _scales_of_stack(self, prefix: str, rows: int, columns: int, num_parts: int, expert: int) -> StackedScales:
        """FP8 scales of `num_parts` linears `[rows, columns]` of one expert, which may share a single one."""
        high, wide = self._block
        shape = ceil_div(rows, high or rows), ceil_div(columns, wide or columns)
        shared = high is None and self._num_scale_rows(prefix) == 1
        stored = self._read_scales(prefix, (shape[0] if shared else num_parts * shape[0], shape[1]), expert)
        return StackedScales(self.layout.stack(prefix)[1], stored.view(-1, *shape).expand(num_parts, -1, -1))

    def _num_scale_rows(self, prefix: str) -> int | None:
        """Scales along the rows of stacked experts; None if their tensor has too few dimensions."""
        shape = self.files.entry(self.layout.stack(prefix)[1]).shape
        return shape[2 if self.layout.transposed else 1] if len(shape) == 3 else None

    @property
    def _block(self) -> tuple[int | None, int | None]:
        """Rows and columns of FP8 blocks, None for all."""
        return self.layout.grid or (WEIGHT_BLOCK_N, self.layout.quant_format.block)

    @property
    def _blocks_run_on(self) -> bool:
        """Whether FP8 blocks of stacked experts run on from gate to up, by how many scales there are.

        Raises `ValueError` where that does not say it.
        """
        (high, _), name = self._block, self.names.stacks[0]
        if high is None or self.inner % high == 0:
            return False
        apart, together = 2 * ceil_div(self.inner, high), ceil_div(2 * self.inner, high)
        if apart == together:
            raise self.files.wrong(
                name,
                f"expected gate and up of a multiple of {high} rows, or of at most {high // 2} more than one, got "
                f"{self.inner}: whether they share scales is not known",
            )
        return self._num_scale_rows(name) == together

    def _check_whole_blocks(self) -> None:
        """Raise `ValueError` if a block of stacked scales could be one of gate and of up."""
        high = self._block[0]
        if high is not None and self.inner % high:
            name = self.layout.stack(self.names.stacks[0])[1]
            raise self.files.wrong(name, f"expected experts of a multiple of {high} rows, got {self.inner}")

    def _stacked_blocks(
        self,
        prefix: str,
        rows: int,
        columns: int,
        order: GateUpOrder | None,
        expert: int,
        empty: Callable[..., torch.Tensor],
    ) -> ExpertWeights:
        """Blocks and scales of gpt-oss."""
        fmt = self.layout.format
        fmt.check_columns(columns, f"{self.files.index}: columns of {prefix}")
        shape = rows, columns // fmt.block
        quants = self._read_quants(prefix, (*shape, fmt.quant_bytes(fmt.block)), expert, empty)
        scales = self._read_scales(prefix, shape, expert)
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
        """FP8 with scales of blocks or of the whole tensor, of gate and up apart unless blocks run on."""
        layout = self.layout
        if order is not None and self._blocks_run_on:
            order = None
        num_parts = 1 if order is None else 2
        parts = self._read_quants(prefix, (rows, columns), expert, empty).view(num_parts, -1, columns)
        rows //= num_parts
        name, stored = self._scales_of_stack(prefix, rows, columns, num_parts, expert)
        high, wide = self._block
        high, wide = high or rows, wide or columns
        scales = stored.float()
        _clear(self.files, (name,) * num_parts, parts, scales, high, wide)
        if layout.dequantized or not keeps_scales(layout.format, rows, columns, order):
            return dequantized(parts, scales, high, wide).flatten(0, 1)
        blocks = in_blocks(scales, high, wide, rows, columns).flatten(0, 1)
        return ExpertWeights(layout.format, parts.view(1, -1, columns), blocks[None], gate_up=order)


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
    scales: StackedScales | None = None,
) -> Callable[[], torch.Tensor | ExpertWeights]:
    """Read one linear `[rows, columns]`, or gate and up, each with its own second-level scale.

    `empty` allocates the quants. `scales` are the block scales where linears have none of their own. Calling the result
    gives `[len(prefixes) * rows, columns]`, gate and up in `order`: bf16 or fp32, or weights of one expert. Weights in
    128x128 blocks that `ExpertWeights` does not hold (`keeps_scales`) come back dequantized to fp32, and so do weights
    in layouts that no format has.
    """
    if layout.packing in (Packing.GPTQ, Packing.AWQ):
        linears = [_read_transposed_integers(files, layout, prefix, rows, columns) for prefix in prefixes]
        return lambda: stack_rows(torch.stack(linears), order)
    fmt = layout.quant_format
    if fmt.scale_dtype is not torch.float32:
        fmt.check_columns(columns, f"{files.index}: columns of {prefixes[0]}")
    shape, dtypes = layout.quant_shape(rows, columns), layout.quant_dtypes
    first = files.check(f"{prefixes[0]}.{layout.weight}", shape, dtypes)
    # Bytes of two codes may be stored as signed ones.
    dtype = torch.uint8 if layout.stored_as else DTYPES[first.dtype]
    if order is GateUpOrder.INTERLEAVED:
        quants = empty(rows, len(prefixes), shape[1], dtype=dtype).transpose(0, 1)
    else:
        quants = empty(len(prefixes), *shape, dtype=dtype)
    for prefix, part in zip(prefixes, quants, strict=True):
        name = f"{prefix}.{layout.weight}"
        files.check(name, shape, (first.dtype,))
        if part.is_contiguous():
            files.read_into(name, part)
        else:
            part.copy_(files.read(name, shape, (first.dtype,)).view(dtype))
    if layout.scale is None:
        return lambda: no_half(stack_rows(quants, order))
    zeros = None
    if layout.int_bits is not None:
        _check_integers(files, layout, prefixes, rows, columns)
        zeros = _read_zero_points(files, layout, prefixes, rows, columns)
        if layout.packing is not None:
            quants = centred(unpacked(quants, layout.int_bits, columns), layout.int_bits)
    names = [f"{prefix}.{layout.scale}" for prefix in prefixes]
    if scales is None:
        found = _read_scales(files, layout, prefixes, rows, columns)
    else:
        names, found = [scales.name] * len(prefixes), scales.scales
    second = None
    if layout.weight_scale is not None:
        second = torch.stack([read_weight_scale(files, prefix, layout.weight_scale) for prefix in prefixes])
        for prefix in (prefix for prefix, scale in zip(prefixes, second.tolist(), strict=True) if scale == 0):
            _warn_of_zeros(files, f"{prefix}.{layout.weight_scale.suffix}")
    made = functools.partial(_assemble, files, layout, names, quants, found, second, order, zeros)
    if layout.column_scale is None:
        return made
    factors = _read_column_scales(files, layout.column_scale, prefixes, columns)
    return lambda: times_columns(dense(made()), factors, order)


def _assemble(
    files: TensorFiles,
    layout: WeightLayout,
    names: list[str],
    quants: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor | None,
    order: GateUpOrder | None,
    zeros: torch.Tensor | None,
) -> torch.Tensor | ExpertWeights:
    """Assemble a weight from quants, block scales (called `names`), second-level scales and zero points of linears."""
    if second is not None:
        # Writers divide by the second-level scale: block scales of weights that are all 0 are NaN.
        scales.view(torch.uint8)[second == 0] = 0
    for name, part in zip(names, scales, strict=True):
        check_no_nan(files, name, part)
    if not layout.is_fp8 and "U8" not in layout.scale_dtypes:  # a byte of UE8M0 is a power of two
        known = [False] * len(names) if second is None else (second == 0).tolist()
        for name, part, is_known in zip(names, scales, known, strict=True):
            if not is_known and not part.view(torch.uint8).numpy().any():
                _warn_of_zeros(files, name)
    fmt = layout.quant_format
    rows, columns = quants.shape[1:]
    high, wide = layout.grid or (WEIGHT_BLOCK_N, fmt.block)
    high, wide = high or rows, wide or columns
    if layout.is_fp8 or layout.grid is not None:
        scales = scales.float()
    if layout.is_fp8:
        _clear(files, names, quants, scales, high, wide)
    if layout.grid is not None:
        if layout.dequantized:
            return stack_rows(dequantized(quants, scales, high, wide, zeros), order)
        scales = in_blocks(scales, high, wide, rows, columns)
    assert fmt.scale_dtype is not None
    scales = scales.view(fmt.scale_dtype) if fmt.scale_dtype.itemsize == 1 else scales.to(fmt.scale_dtype)
    if scales.dtype == torch.float32:
        if not keeps_scales(fmt, rows, columns, order):
            return stack_rows(dequantized(quants, scales, WEIGHT_BLOCK_N, fmt.block), order)
        return ExpertWeights(fmt, quants.view(1, -1, columns), scales.view(1, -1, scales.shape[2]), gate_up=order)
    if second is not None and order is not None:
        second = second[None]
    blocks = swizzle_scales(stack_rows(scales, order)[None])
    return ExpertWeights(fmt, stack_rows(quants, order)[None], blocks, second, gate_up=order)


def _warn_of_zeros(files: TensorFiles, name: str) -> None:
    warnings.warn(f"{files.path_of(name)}: tensor {name}: its linear is read as zeros", stacklevel=3)


def _clear(
    files: TensorFiles, names: Sequence[str], quants: torch.Tensor, scales: torch.Tensor, high: int, wide: int
) -> None:
    """Make FP8 quants 0 whose scale (fp32, called `names`) is 0: writers divided by it, which gave NaN."""
    dead = scales == 0
    if not dead.any():
        return
    for name, part in zip(names, dead, strict=True):
        if part.all():
            _warn_of_zeros(files, name)
    quants.view(torch.uint8).masked_fill_(spread(dead, high, wide, *quants.shape[1:]), 0)


def _read_zero_points(
    files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int
) -> torch.Tensor | None:
    """fp32 `[P, N, V]`; None if the layout has none."""
    if layout.zero_points is None or layout.int_bits is None or layout.grid is None:
        return None
    shape = packed_words(rows, layout.int_bits), ceil_div(columns, layout.grid[1] or columns)
    words = torch.stack([files.read(f"{prefix}.{layout.zero_points}", shape, ("I32",)) for prefix in prefixes])
    return centred(unpacked(words.mT, layout.int_bits, rows), layout.int_bits).mT.float()


def _read_transposed_integers(
    files: TensorFiles, layout: WeightLayout, prefix: str, rows: int, columns: int
) -> torch.Tensor:
    """fp32 `[N, K]` of a linear as GPTQ or AWQ packs it."""
    assert layout.int_bits is not None and layout.grid is not None
    bits, group = layout.int_bits, layout.grid[1] or columns
    groups = ceil_div(columns, group)
    if layout.packing is Packing.AWQ and rows % len(AWQ_ORDER):
        raise ValueError(f"{files.index}: rows of {prefix}: expected a multiple of {len(AWQ_ORDER)}, got {rows}")
    words = files.read(f"{prefix}.{layout.weight}", layout.quant_shape(rows, columns), layout.quant_dtypes)
    zeros_name = f"{prefix}.{layout.zero_points}"
    zeros_GW = files.read(zeros_name, (groups, packed_words(rows, bits)), ("I32",))
    scales_GN = files.read(f"{prefix}.{layout.scale}", (groups, rows), layout.scale_dtypes)
    check_no_nan(files, f"{prefix}.{layout.scale}", scales_GN)
    if layout.packing is Packing.AWQ:
        q_KN, zeros_GN = (_in_awq_order(unpacked(part, bits, rows)) for part in (words, zeros_GW))
    else:
        q_KN = unpacked(words.mT, bits, columns).mT
        zeros_GN = _gptq_zero_points(files, layout, zeros_name, zeros_GW, rows)
    group_K = torch.arange(columns) // group
    name = f"{prefix}.g_idx"
    if layout.own_order and groups > 1 and name not in files:
        raise ValueError(
            f"{files.index}: tensor {name} is missing, but desc_act says that columns have their own order"
        )
    if layout.packing is Packing.GPTQ and name in files:
        group_K = files.read(name, (columns,), ("I32", "I64")).long()
        if not bool(((group_K >= 0) & (group_K < groups)).all()):
            raise files.wrong(name, f"expected groups of 0 .. {groups - 1}, got another")
    zeros_GN, scales_GN = zeros_GN.float(), scales_GN.float()
    return (q_KN.float().sub_(zeros_GN[group_K]).mul_(scales_GN[group_K])).mT.contiguous()


def _gptq_zero_points(
    files: TensorFiles, layout: WeightLayout, name: str, words_GW: torch.Tensor, rows: int
) -> torch.Tensor:
    """`[G, N]` of the stored zero points (called `name`).

    Files that call themselves symmetric store the middle of the range, or one less, whichever format they name: both
    mean the middle. So do those that say nothing, as `sym` is true by default. Other zero points are what the format
    says.
    """
    assert layout.int_bits is not None
    bits, largest = layout.int_bits, (1 << layout.int_bits) - 1
    stored_GN, middle = unpacked(words_GW, bits, rows), 1 << layout.int_bits - 1
    low, high = int(stored_GN.min()), int(stored_GN.max())
    if layout.symmetric is not False:
        if low == high and middle - low in (0, 1):
            return torch.full_like(stored_GN, middle)
        if layout.symmetric:
            got = f"{low} to {high}" if low != high else f"{low}"
            raise files.wrong(name, f"expected all {middle} or all {middle - 1}, as sym = true says, got {got}")
    if layout.zero_offset == 0:
        return stored_GN
    if not layout.whole_words:
        if high == largest:
            raise files.wrong(
                name,
                f"expected zero points of 0 to {largest - 1}, which are stored less 1, got {largest}: what it means "
                "depends on the program that wrote it",
            )
        return stored_GN + 1
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    whole = words_GW.contiguous().numpy().view(np.uint32) + ones
    return unpacked(torch.from_numpy(whole.view(np.int32)), bits, rows)


def _in_awq_order(values: torch.Tensor) -> torch.Tensor:
    """`[..., N]` of nibbles in the order of `AWQ_ORDER`, as rows in theirs."""
    places = torch.tensor(AWQ_ORDER).argsort()
    return values.unflatten(-1, (-1, len(AWQ_ORDER)))[..., places].flatten(-2)


def _read_column_scales(files: TensorFiles, suffix: str, prefixes: tuple[str, ...], columns: int) -> torch.Tensor:
    """fp32 `[P, K]`; 1 for linears without one. Raises `ValueError` unless all are positive."""
    factors = torch.ones(len(prefixes), columns, dtype=torch.float32, device="cpu")
    for prefix, factor in zip(prefixes, factors, strict=True):
        if (name := f"{prefix}.{suffix}") not in files:
            continue
        shape = files.entry(name).shape
        factor.copy_(files.read(name, shape if shape == (1, columns) else (columns,), FLOAT_DTYPES).view(columns))
        if not bool(((factor > 0) & factor.isfinite()).all()):
            raise files.wrong(name, "expected positive numbers, got another")
    return factors


def _check_integers(
    files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int
) -> None:
    """Raise `ValueError` unless groups are whole, and shapes that are stored beside the quants are these."""
    group = layout.grid[1] if layout.grid is not None else None
    if group is not None and columns % group:
        raise ValueError(f"{files.index}: columns of {prefixes[0]}: expected a multiple of {group}, got {columns}")
    for name in (f"{prefix}.weight_shape" for prefix in prefixes):
        if name in files and (got := files.read(name, (2,), ("I64", "I32")).tolist()) != [rows, columns]:
            raise files.wrong(name, f"expected {[rows, columns]}, got {got}")


def layout_of(files: TensorFiles, layout: WeightLayout, prefixes: Iterable[str]) -> WeightLayout:
    """`layout` with the name that its scales have, or `PLAIN` if these linears are stored without scales."""
    names = list(prefixes)
    for scale in (layout.scale, *layout.other_scales):
        if scale is not None and any(f"{prefix}.{scale}" in files for prefix in names):
            return layout if scale == layout.scale else replace(layout, scale=scale)
    return PLAIN if all(f"{prefix}.{PLAIN.weight}" in files for prefix in names) else layout


def dense(weight: torch.Tensor | ExpertWeights) -> torch.Tensor:
    """What a reader gives, as a tensor `[N, K]`, bf16 or fp32."""
    return weight.dequantize()[0] if isinstance(weight, ExpertWeights) else weight


def tensors_of(layout: WeightLayout, prefix: str) -> list[str]:
    """Names of the tensors that a linear may have, but for its bias."""
    scales = [scale.suffix for scale in (layout.weight_scale, layout.input_scale) if scale is not None]
    others = [name for name in (layout.zero_points, layout.column_scale) if name is not None]
    parts = [layout.weight, layout.scale, *scales, *others, *layout.unused]
    return [f"{prefix}.{part}" for part in parts if part is not None]


def _read_scales(
    files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int
) -> torch.Tensor:
    """Linear block scales of the linears, stacked, as they are stored."""
    fmt = layout.quant_format
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
        raise files.wrong(name, f"expected finite scales, got one that is not at {place}")
