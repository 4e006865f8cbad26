"""Reads the weights of linears and experts from the files of a checkpoint, as they are stored.

A weight comes back bf16 (or fp32) where it is, else as `ExpertWeights` of one expert: the same quants and scales, block
scales in the order that the GEMM reads. Nothing is rounded. Every tensor is checked for dtype, shape and, where it
holds scales, for NaN; the error names file and tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from moe_runtime.checkpoint_layouts import PLAIN, ScaleName, WeightLayout
from moe_runtime.formats import WEIGHT_BLOCK_N, TokenFormat, ceil_div
from moe_runtime.kernels.swizzle import swizzle_scales
from moe_runtime.loading import FRESH, ExpertTensors, Rooms
from moe_runtime.progress import one_ahead
from moe_runtime.tensor_files import DTYPES, TensorFiles
from moe_runtime.weights import MAX_ENCODE_SCALE, ExpertWeights, GateUpOrder


@dataclass(frozen=True)
class ExpertNames:
    """Where a model keeps the experts of a layer.

    Attributes:
        block: prefix of all of them, such as `model.layers.3.mlp.experts`.
        gate, up, down: names of the projections of one expert.
        stacked: all experts in `gate_up_proj` and `down_proj`, with biases, rows of gate and up one by one.
    """

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: bool = False

    def linears(self, expert: int) -> tuple[str, str, str]:
        """Prefixes of gate, up and down of an expert that is not stacked."""
        prefix = f"{self.block}.{expert}"
        return f"{prefix}.{self.gate}", f"{prefix}.{self.up}", f"{prefix}.{self.down}"


@dataclass(frozen=True)
class ExpertReader:
    """The routed experts of one layer.

    Attributes:
        files: the checkpoint's.
        names: of the layer's experts.
        layout: of their weights.
        hidden, inner: `H` and `I`.
        num_experts: `E`.
    """

    files: TensorFiles
    names: ExpertNames
    layout: WeightLayout
    hidden: int
    inner: int
    num_experts: int

    def experts(self, expert_ids: Sequence[int], rooms: Rooms = FRESH) -> Iterator[ExpertTensors]:
        """Experts one by one, in the order of `expert_ids`.

        `rooms` make memory for the quants of gate-and-up and of down; with others than `FRESH` a thread reads the next
        expert while one is in use.
        """
        if rooms is FRESH:
            return (self.expert(expert) for expert in expert_ids)
        return self._read_ahead(expert_ids, rooms)

    def _read_ahead(self, expert_ids: Sequence[int], rooms: Rooms) -> Iterator[ExpertTensors]:
        # Closed before an error goes on, whose traceback keeps it alive: the thread would open closed files again.
        with closing(one_ahead(self._begin(expert, rooms) for expert in expert_ids)) as begun:
            for finish in begun:
                yield finish()

    def expert(self, expert: int, rooms: Rooms = FRESH) -> ExpertTensors:
        """One expert, as it is stored."""
        return self._begin(expert, rooms)()

    def _begin(self, expert: int, rooms: Rooms) -> Callable[[], ExpertTensors]:
        """Read an expert; what is left to do without the disk is left to the result."""
        if self.names.stacked:
            one = self._stacked(expert, rooms)
            return lambda: one
        gate, up, down = self.names.linears(expert)
        first = begin_linears(self.files, self.layout, (gate, up), self.inner, self.hidden, rooms[0])
        second = begin_linears(self.files, self.layout, (down,), self.hidden, self.inner, rooms[1])
        return lambda: ExpertTensors(first(), second())

    def holds(self, fmt: TokenFormat) -> bool:
        """Whether the quants are stored as weights in `fmt` have them in memory."""
        if self.layout != PLAIN:
            return self.layout.format is fmt and self.layout.scale is not None
        first = f"{self.names.linears(0)[0]}.{self.layout.weight}"
        return fmt is self.layout.format and self.files.entry(first).dtype == "BF16"

    def check_names(self) -> None:
        """Raise `ValueError` naming the tensor if the layer has one that does not belong to its experts."""
        if self.names.stacked:
            expected = {f"{self.names.block}.{name}" for name in self._stacked_names()}
        else:
            expected = {name for expert in range(self.num_experts) for name in self.tensors(expert)}
        for name in self.files.names():
            if name.startswith(f"{self.names.block}.") and name not in expected:
                raise ValueError(
                    f"{self.files.index}: tensor {name} is not expected: {self.num_experts} experts in layout "
                    f"{self.layout.name}"
                )

    def smallest_input_gsf(self) -> float | None:
        """The encode scale for the inputs of all down projections: the least of those stored; None where none is.

        With a larger one, numbers of an expert that has the least could saturate; with a smaller one nothing gains. It
        is the same on every rank, whichever experts it has.
        """
        scale = self.layout.input_scale
        if scale is None or self.names.stacked:
            return None
        prefixes = [self.names.linears(expert)[2] for expert in range(self.num_experts)]
        if not any(f"{prefix}.{scale.suffix}" in self.files for prefix in prefixes):
            return None
        stored = torch.stack([_second_level(self.files, prefix, scale) for prefix in prefixes])
        return float((stored if scale.divides else _reciprocal(stored)).min().clamp(max=MAX_ENCODE_SCALE))

    def tensors(self, expert: int) -> list[str]:
        """Names of the tensors that an expert, not stacked, may have, the weight of its gate first."""
        parts = [self.layout.weight, self.layout.scale, *_suffixes(self.layout)]
        return [f"{prefix}.{part}" for prefix in self.names.linears(expert) for part in parts if part is not None]

    def _stacked_names(self) -> list[str]:
        parts = ["gate_up_proj_bias", "down_proj_bias"]
        suffixes = [""] if self.layout.scale is None else [f"_{self.layout.weight}", f"_{self.layout.scale}"]
        return parts + [f"{name}_proj{suffix}" for name in ("gate_up", "down") for suffix in suffixes]

    def _stacked(self, expert: int, rooms: Rooms) -> ExpertTensors:
        weights: list[torch.Tensor | ExpertWeights] = []
        biases = []
        sizes = ((2 * self.inner, self.hidden), (self.hidden, self.inner))
        orders = (GateUpOrder.INTERLEAVED, None)
        for name, (rows, columns), order, empty in zip(
            ("gate_up_proj", "down_proj"), sizes, orders, rooms, strict=True
        ):
            prefix = f"{self.names.block}.{name}"
            bias = self.files.read(f"{prefix}_bias", (self.num_experts, rows), ("BF16", "F32"), item=expert)
            biases.append(bias.float())
            if self.layout.scale is None:
                # Stored as the right-hand side of `x @ w`.
                shape = (self.num_experts, columns, rows)
                stored = self.files.read(prefix, shape, self.layout.quant_dtypes, item=expert)
                weights.append(stored.T.contiguous())
            else:
                weights.append(self._stacked_weight(prefix, rows, columns, order, expert, empty))
        return ExpertTensors(weights[0], weights[1], biases[0], biases[1])

    def _stacked_weight(
        self,
        prefix: str,
        rows: int,
        columns: int,
        order: GateUpOrder | None,
        expert: int,
        empty: Callable[..., torch.Tensor],
    ) -> ExpertWeights:
        fmt, name, scale = self.layout.format, f"{prefix}_{self.layout.weight}", f"{prefix}_{self.layout.scale}"
        fmt.check_columns(columns, f"{self.files.index}: columns of {prefix}")
        shape = (self.num_experts, rows, columns // fmt.block)
        blocks = (*shape, fmt.quant_bytes(fmt.block))
        self.files.check(name, blocks, self.layout.quant_dtypes)
        quants = empty(*blocks[1:], dtype=fmt.quant_dtype)
        self.files.read_into(name, quants, item=expert)
        scales = self.files.read(scale, shape, self.layout.scale_dtypes, item=expert)
        check_no_nan(self.files, scale, scales)
        return ExpertWeights(fmt, quants.view(1, rows, -1), swizzle_scales(scales[None]), gate_up=order)


def read_linears(
    files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int
) -> torch.Tensor | ExpertWeights:
    """One linear `[rows, columns]`, or gate and up, stacked in this order, each with its own second-level scale.

    Returns `[len(prefixes) * rows, columns]`, bf16 or fp32, or weights of one expert; fp32 too where 128x128 blocks are
    not whole, which those weights cannot have along K, nor between gate and up.
    """
    return begin_linears(files, layout, prefixes, rows, columns)()


def begin_linears(
    files: TensorFiles,
    layout: WeightLayout,
    prefixes: tuple[str, ...],
    rows: int,
    columns: int,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> Callable[[], torch.Tensor | ExpertWeights]:
    """Read what `read_linears` wants, which the result then gives; `empty` makes room for the quants."""
    fmt = layout.format
    if fmt.scale_dtype is not torch.float32:
        fmt.check_columns(columns, f"{files.index}: columns of {prefixes[0]}")
    shape, dtypes = (rows, fmt.quant_columns(columns)), layout.quant_dtypes
    first = files.check(f"{prefixes[0]}.{layout.weight}", shape, dtypes)
    quants = empty(len(prefixes), *shape, dtype=DTYPES[first.dtype])
    for prefix, part in zip(prefixes, quants, strict=True):
        files.check(f"{prefix}.{layout.weight}", shape, (first.dtype,))
        files.read_into(f"{prefix}.{layout.weight}", part)
    if layout.scale is None:
        return lambda: quants.flatten(0, 1)
    scales = _read_scales(files, layout, prefixes, rows, columns)
    second = None
    if layout.weight_scale is not None:
        second = torch.stack([_second_level(files, prefix, layout.weight_scale) for prefix in prefixes])
        second = _reciprocal(second) if layout.weight_scale.divides else second
    names = [f"{prefix}.{layout.scale}" for prefix in prefixes]
    return functools.partial(_assemble, files, layout, names, quants, scales, second)


def _assemble(
    files: TensorFiles,
    layout: WeightLayout,
    names: list[str],
    quants: torch.Tensor,
    scales: torch.Tensor,
    second: torch.Tensor | None,
) -> torch.Tensor | ExpertWeights:
    """One weight of the quants, block scales (of these `names`, as stored) and second-level scales of its linears."""
    for name, part in zip(names, scales, strict=True):
        check_no_nan(files, name, part)
    fmt, order = layout.format, GateUpOrder.GATE_UP if len(names) == 2 else None
    assert fmt.scale_dtype is not None
    scales = scales.view(fmt.scale_dtype) if fmt.scale_dtype.itemsize == 1 else scales.to(fmt.scale_dtype)
    if scales.dtype == torch.float32:
        rows, columns = quants.shape[1:]
        if columns % fmt.block or (order is not None and rows % WEIGHT_BLOCK_N):
            factors = scales.repeat_interleave(WEIGHT_BLOCK_N, 1).repeat_interleave(fmt.block, 2)
            return (quants.float() * factors[:, :rows, :columns]).flatten(0, 1)
        return ExpertWeights(fmt, quants.view(1, -1, columns), scales.view(1, -1, scales.shape[2]), gate_up=order)
    if second is not None and order is not None:
        second = second[None]
    blocks = swizzle_scales(scales.view(1, -1, scales.shape[2]))
    return ExpertWeights(fmt, quants.view(1, -1, quants.shape[2]), blocks, second, gate_up=order)


def layout_of(files: TensorFiles, layout: WeightLayout, prefixes: Iterable[str]) -> WeightLayout:
    """`layout`, or that of plain weights where the quantization left these linears out: none of them has scales."""
    names = list(prefixes)
    if layout.scale is None or any(f"{prefix}.{layout.scale}" in files for prefix in names):
        return layout
    return PLAIN if all(f"{prefix}.{PLAIN.weight}" in files for prefix in names) else layout


def dense(weight: torch.Tensor | ExpertWeights) -> torch.Tensor:
    """`[N, K]`, bf16 or fp32, of what `read_linears` gives."""
    return weight.dequantize()[0] if isinstance(weight, ExpertWeights) else weight


def _suffixes(layout: WeightLayout) -> list[str]:
    return [scale.suffix for scale in (layout.weight_scale, layout.input_scale) if scale is not None]


def _read_scales(
    files: TensorFiles, layout: WeightLayout, prefixes: tuple[str, ...], rows: int, columns: int
) -> torch.Tensor:
    """Linear block scales of the linears, one after the other, as they are stored."""
    fmt = layout.format
    shape = (rows if fmt.swizzled else ceil_div(rows, WEIGHT_BLOCK_N), fmt.scale_columns(columns))
    names = [f"{prefix}.{layout.scale}" for prefix in prefixes]
    first = files.check(names[0], shape, layout.scale_dtypes)
    scales = torch.empty(len(names), *shape, dtype=DTYPES[first.dtype])
    for name, part in zip(names, scales, strict=True):
        files.check(name, shape, (first.dtype,))
        files.read_into(name, part)
    return scales


def check_no_nan(files: TensorFiles, name: str, scales: torch.Tensor) -> None:
    """Raise `ValueError` naming file and tensor where a scale is NaN (fp32 and bf16: or infinite)."""
    if scales.element_size() > 1:
        bad = (~scales.isfinite()).numpy()
    else:
        # numpy: torch would wake its threads for each of these small tensors.
        raw, signed = scales.view(torch.uint8).numpy(), scales.dtype == torch.float8_e4m3fn
        # NaN is the largest byte there is, in e4m3 also the largest without a sign. Maxima need no memory.
        if raw.max(initial=0) < 0xFF and not (signed and raw.view(np.int8).max(initial=0) == 0x7F):
            return
        bad = raw & 0x7F == 0x7F if signed else raw == 0xFF
    if bad.any():
        place = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"{files.path_of(name)}: tensor {name}: expected finite scales, got one that is not at {place}"
        )


def _second_level(files: TensorFiles, prefix: str, scale: ScaleName) -> torch.Tensor:
    """A second-level scale as it is stored, fp32 `[]`."""
    name = f"{prefix}.{scale.suffix}"
    shape = files.entry(name).shape
    value = files.read(name, shape if shape == (1,) else (), ("F32",)).view(())
    if not 0 < value.item() < math.inf:
        raise ValueError(f"{files.path_of(name)}: tensor {name}: expected a positive number, got {float(value)}")
    return value


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """`1 / x`, one IEEE division: `number / tensor` may be another."""
    return torch.ones_like(x) / x
