"""Grouped GEMM on Hopper for weights that tensor cores read as they are stored: `fp8_block` and `bf16`.

The host side of `tma_gemm.cu`: tensor maps and launches. `plan.py` chooses when it runs and in which shape. The
contract is that of `grouped_gemm.py`, whose Triton kernel runs everything else. `fp8_block` sums each 128 of K from
zero in the tensor cores and adds `partial * (row scale * weight scale)` in fp32. Where that product of scales is not a
normal number, it adds `(partial * row scale) * weight scale`. `bf16` sums in the tensor cores. Every row sums K in
ascending order, in any shape, tile and neighbourhood, so all shapes give the same bits. So they do where the tensor
cores take the weights for their operand of 64 rows, as tiles of few rows do. `ExpandedWeights` are `fp8_block` weights
that the kernel makes of FP4 ones, in shared memory or, for many rows, in memory (`Strips`), with the same bits.

Least times on one H200. Prefill, FP8, 8 groups x 4096 rows, (N, K) = (4096, 7168): 1.92e12 flops take 1.34 ms at the
1437 TFLOP/s of torch's dense 8192^3, 0.74 GB take 0.17 ms. Decode, FP8, 32 groups x 32 rows, both GEMMs of the
reference model: 1.41 GB of weights take 328 us at 4.3 TB/s.

Measured after pauses, and without them (launch/results/gemm_h200.json of commit 2dbcdbe; `launch/benchmarks/timing.py`
explains pauses). TFLOP/s, in parentheses torch's row-wise _scaled_grouped_mm or _grouped_mm:

    FP8  8 x 4096, (4096, 7168) / (7168, 2048)       1427 / 1342 (1403 / 1280); (4096, 7168) without pauses 1217 (1203)
    FP8  4 x 8192, the same                           1432 / 1335 (1377 / 1276); 1220 (1166)
    BF16 8 x 4096, the same                           810 / 792 (792 / 774); without pauses 693 / 670 (675 / 658)
    FP8  8 x 16, 32, 48 rows                          60.0, 60.6, 61.5 us / 33.8, 34.4, 35.1 us
    FP8  32 x 32 rows, gate_up and down               345 us

It is bound by power. Gains of each version and dropped ideas: `kernels/gemm/notes.md`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.bound_kernel import Argument, BoundKernel, OneLaunch
from moe_runtime.kernels.formats.number_formats import FormatCode, TokenFormat, ceil_div
from moe_runtime.kernels.gemm.activation import softcap_macros
from moe_runtime.kernels.gemm.arguments import OUT_DTYPES
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import GemmPlan
from moe_runtime.kernels.gemm.shapes import HALF, MAX_STAGES, TILE_ROWS, TmaShape
from moe_runtime.kernels.gemm.weights import SILU, Activation, ExpertWeights, GateUpOrder

SOURCE = "tma_gemm.cu"
MAPS_KEPT = 1024
"""Size of the cache of tensor maps, by address and shape."""


def aligned(rows: torch.Tensor, quants: torch.Tensor, out: torch.Tensor | None = None) -> bool:
    """Whether rows, weights and `out` start their rows at 16-byte boundaries, as the kernel needs."""
    return _aligned(rows) and quants.data_ptr() % 16 == 0 and (out is None or _aligned(out))


def _aligned(t: torch.Tensor) -> bool:
    stride = t.stride(0) * t.element_size()
    return t.data_ptr() % 16 == 0 and stride % 16 == 0 and 0 < stride < 2**40


def scales_aligned(a: torch.Tensor | None, w: torch.Tensor | None) -> bool:
    """Whether the scales of rows and weights have the 16-byte alignment that TMA needs."""
    return a is not None and w is not None and a.data_ptr() % 16 == w.data_ptr() % 16 == 0


def multiply(
    a: GroupedRows,
    w: ExpertWeights | ExpandedWeights,
    plan: GemmPlan,
    *,
    out: torch.Tensor,
    activation: Activation | None = None,
    result: GroupedRows | None = None,
) -> None:
    """`grouped_gemm` of checked operands into `out`, or `grouped_gemm_swiglu` into `result`, whose rows are `out`."""
    gemm = TmaGemm(a, w, plan, out=out, activation=activation, result=result, kernel=OneLaunch)
    gemm.launch(a, out, result)


class Extras(ctypes.Structure):
    """`Extras` of `tma_gemm.cu`."""

    _fields_ = (
        ("row_scale", ctypes.c_void_p),
        ("expert_scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales_per_expert", ctypes.c_int32),
    )


@cache
def macros(
    fmt: TokenFormat,
    shape: TmaShape,
    num_groups: int,
    *,
    gather: bool,
    activation: Activation | None,
    order: GateUpOrder | None,
    out_code: int,
    extras: bool,
    copied_scales: bool = False,
    short_blocks: bool = False,
    expanded: TokenFormat | None = None,
) -> nvrtc.Defines:
    """Macros of `tma_gemm.cu`; `out_code` is 0 bf16, 1 fp16, 2 fp32, 3 e4m3 with block scales.

    `expanded` is the format from which weights are expanded.
    """
    gated = activation is not None and activation.gated
    return nvrtc.Defines(
        {
            "FP8": int(fmt.code == FormatCode.FP8_BLOCK),
            "STAGES": shape.stages(num_groups, expanded),
            "PACKED": shape.packed_stages(num_groups, expanded),
            "AHEAD": int(expanded is not None and shape.expands_ahead),
            "EXPAND": 0 if expanded is None else expanded.block,
            "ROWS": shape.tile_rows,
            "CLUSTER": shape.blocks_of_cluster(quantized=gated and out_code == 3),
            "A_BOX": shape.box_rows,
            "GATHER": int(gather),
            "ACTIVATED": int(activation is not None),
            "GATED": int(gated),
            "FUNCTION": 0 if activation is None else activation.function.code,
            "ORDER": 0 if order is None else order.code,
            "OUT": out_code,
            "EXTRAS": int(extras),
            "TMA_SCALES": int(copied_scales),
            "SHORT_BLOCKS": int(short_blocks),
            **softcap_macros(activation),
        }
    )


@dataclass(frozen=True)
class Strips:
    """Memory in which a launch for many rows expands weights to e4m3, ahead of the tiles that multiply them.

    Attributes:
        number: strips that may be expanded: the 256 weight rows of each column tile of each group.
        slots: strips for which there is room. They are used again and again.
        k_blocks: blocks of 128 columns of K.
    """

    number: int
    slots: int
    k_blocks: int

    @classmethod
    def of(cls, groups: int, column_tiles: int, k_blocks: int, *, row_tiles: int, blocks: int) -> Strips:
        """For so many groups, each of which is expected to have `row_tiles`: room for the strips of the tiles that run
        at a time and for as many more, but at least for those of two groups."""
        number = max(groups, 1) * column_tiles  # a map has a row at least
        return cls(number, min(number, 2 * max(column_tiles, ceil_div(blocks, row_tiles))), k_blocks)

    def empty(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The ring, e4m3 as uint8 `[slots * k_blocks * 256, 128]`, and two counters of each strip, which are 0."""
        ring = torch.empty(self.slots * self.k_blocks * 2 * HALF, 128, dtype=torch.uint8, device=device)
        return ring, torch.zeros(2 * self.number, dtype=torch.int32, device=device)

    @staticmethod
    def map(ring: torch.Tensor) -> Any:
        """Of a ring: boxes of half a strip's block of K."""
        return _tensor_map(ring.data_ptr(), 1, (128, ring.shape[0]), (128,), (128, HALF))


class TmaGemm:
    """A GEMM of some size with weights that stay where they are: what does not change from launch to launch.

    Args:
        a: rows of the size.
        w: weights, which are kept; `ExpandedWeights` go with rows in `fp8_block`.
        plan: for these.
        out: a result of the dtype and strides that all have.
        activation: None for a plain GEMM.
        result: of an activated GEMM, like those of all launches.
        kernel: `OneLaunch` for a GEMM that is launched once.
    """

    def __init__(
        self,
        a: GroupedRows,
        w: ExpertWeights | ExpandedWeights,
        plan: GemmPlan,
        *,
        out: torch.Tensor,
        activation: Activation | None = None,
        result: GroupedRows | None = None,
        kernel: type[BoundKernel | OneLaunch] = BoundKernel,
    ) -> None:
        assert plan.tma is not None
        self._copies_scales = plan.tma.copies_scales
        shape, gather = plan.tma.shape, a.row_index is not None
        columns = w.num_rows if activation is None else w.num_rows // activation.num_parts
        quantized = result is not None and result.scales is not None
        out_code = 3 if quantized else OUT_DTYPES.index(out.dtype)
        scales_per_expert = 0 if w.expert_scales is None else w.expert_scales.ndim
        expanded = w.stored_format if isinstance(w, ExpandedWeights) else None
        order = activation.gate_up if activation is not None else (w.gate_up if scales_per_expert == 2 else None)
        if isinstance(w, ExpandedWeights):
            order = w.order
        # The weights are kept: the kernel has only their addresses.
        self._w, self._of_weights = w, (_pointer(w.expert_scales), _pointer(w.bias), scales_per_expert)
        self._extras = Extras(None, *self._of_weights)
        defines = macros(
            a.format,
            shape,
            a.num_groups,
            gather=gather,
            activation=activation,
            order=order,
            out_code=out_code,
            extras=not (a.row_scale is None and w.expert_scales is None and w.bias is None),
            copied_scales=plan.tma.copies_scales,
            short_blocks=w.blocks_apart or (quantized and columns % HALF != 0),
            expanded=expanded,
        )
        # A tile of a gated result has as many rows of gate as of up.
        gate_up = None if activation is None else activation.gate_up
        k_blocks = ceil_div(a.num_columns * a.rows.element_size(), 128)
        weights: dict[str, Argument]
        self._strips: Strips | None = None
        if isinstance(w, ExpandedWeights):
            weights, any_map = {"w_units": w.units}, _units_map(w)
            if shape.expands_ahead:
                column_tiles = ceil_div(columns, shape.tile_columns(gated=activation is not None and activation.gated))
                self._strips = Strips.of(
                    a.max_active_groups,
                    column_tiles,
                    k_blocks,
                    row_tiles=max(1, a.likely_rows // max(a.max_active_groups, 1) // TILE_ROWS),
                    blocks=plan.blocks,
                )
                weights["ring_slots"] = self._strips.slots
        else:
            any_map = _weight_map(w, gate_up, HALF if gate_up is None else shape.halves * HALF // 2)
            weights = {"w_map": any_map}
        # Gathered rows are copied one by one.
        self._map_at = _maps_of_rows(a.rows, a.num_columns, 1 if gather else shape.box_rows)
        formula = activation or SILU
        self._kernel = kernel(
            SOURCE,
            "tma_gemm",
            defines,
            grid=(plan.blocks, 1, 1),
            block=shape.threads(expanded),
            bound={
                **weights,
                **({} if self._copies_scales else {"scales_map": any_map}),
                "w_scales": w.scales,
                "out_stride": out.stride(0),
                "num_groups": a.max_active_groups,
                "num_experts": w.num_experts,
                "capacity": a.capacity,
                "columns": columns,
                "k_blocks": k_blocks,
                "band_width": shape.band,
                "alpha": float(formula.alpha),
                "gate_limit": _limit(formula.gate_limit),
                "up_limit": _limit(formula.limit),
                # Adding -0 changes no value.
                "up_offset": float(formula.up_offset or -0.0),
            },
            device=w.device,
            shared_bytes=shape.shared_bytes(a.num_groups, expanded),
            early=plan.tma.starts_early,
        )

    def launch(self, a: GroupedRows, out: torch.Tensor, result: GroupedRows | None = None) -> None:
        """Multiply `a` into `out`, and, of an activated GEMM, into the scales of `result`.

        All are as those that this was made of.
        """
        copied: dict[str, Argument] = {}
        if self._copies_scales:
            assert a.scales is not None
            copied["scales_map"] = _scales_map(a.scales)
        if self._strips is not None:
            ring, counters = self._strips.empty(out.device)
            copied |= {"w_map": self._strips.map(ring), "ring": ring, "ring_counters": counters}
        self._kernel.launch(
            {
                "a_map": self._map_at(a.rows.data_ptr()),
                "row_index": a.row_index,
                "a_scales": a.scales,
                "extras": self._extras if a.row_scale is None else Extras(a.row_scale.data_ptr(), *self._of_weights),
                "out": out,
                "out_scales": None if result is None else result.scales,
                "offsets": a.group_offsets,
                "expert_ids": a.expert_ids,
                "num_active": a.active_on_device,
                "settled": int(a.order.only_rows_pending),
                **a.order.read_early,
                **copied,
            }
        )


def _limit(limit: float | None) -> float:
    return math.inf if limit is None else float(limit)


def _pointer(t: torch.Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _maps_of_rows(rows: torch.Tensor, k: int, box_rows: int) -> Callable[[int], Any]:
    """By their address, maps of `[rows, K]` like `rows`: boxes of 128 bytes of K times `box_rows`; zeros outside."""
    size = rows.element_size()
    dims, strides = (k, max(rows.shape[0], 1)), (rows.stride(0) * size,)
    box = 128 // size, box_rows
    return lru_cache(MAPS_KEPT)(lambda address: _tensor_map(address, size, dims, strides, box))


def _scales_map(scales: torch.Tensor) -> Any:
    """Map of `[rows, ceil(K / 128)]` fp32: boxes of 4 columns times 128 rows; zeros outside."""
    rows, v = scales.shape
    return _tensor_map(scales.data_ptr(), 4, (v, rows), (4 * v,), (MAX_STAGES, TILE_ROWS))


def _weight_map(w: ExpertWeights, order: GateUpOrder | None, box_rows: int) -> Any:
    """Map of `[E, halves, rows, K]`, or `[E, rows, halves, K]` where gate and up alternate: boxes of `box_rows`."""
    size = w.quants.element_size()
    experts, n, k = w.quants.shape
    row, expert, box_k = k * size, n * k * size, 128 // size
    if order is None:
        dims, strides, box = (k, n, 1, experts), (row, expert, expert), (box_k, box_rows, 1, 1)
    elif order is GateUpOrder.INTERLEAVED:
        dims, strides, box = (k, 2, n // 2, experts), (row, 2 * row, expert), (box_k, 1, box_rows, 1)
    else:
        dims, strides, box = (k, n // 2, 2, experts), (row, n // 2 * row, expert), (box_k, box_rows, 1, 1)
    return _tensor_map(w.quants.data_ptr(), size, dims, strides, box)


def _units_map(w: ExpandedWeights) -> Any:
    """A map that no kernel reads, for one that takes no other."""
    return _tensor_map(w.units.data_ptr(), 1, (128, w.units.numel() // 128), (128,), (128, 1))


@lru_cache(MAPS_KEPT)
def _tensor_map(
    address: int, element_size: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """A tensor map, in the 128-byte swizzle unless fp32. Cached: encoding one takes longer than a launch."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind, swizzle = {
        1: (kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, swizzles.CU_TENSOR_MAP_SWIZZLE_128B),
        2: (kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, swizzles.CU_TENSOR_MAP_SWIZZLE_128B),
        4: (kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, swizzles.CU_TENSOR_MAP_SWIZZLE_NONE),
    }[element_size]
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        kind,
        len(dims),
        address,
        [driver.cuuint64_t(size) for size in dims],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(dims),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise nvrtc.NvrtcError(f"cuTensorMapEncodeTiled {dims} {strides} {box}: {status.name}")
    return tensor_map
