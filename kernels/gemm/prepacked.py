"""Expert weights in the order in which an architecture's kernels read them: made at load, invertible bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.formats.number_formats import MAX_COLUMNS, NVFP4, TokenFormat, weight_format_named
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from moe_runtime.kernels.gemm.dequant_layout import (
    DEQUANT_FORMATS,
    pack_units,
    source_rows,
    unit_rows,
    units_shape,
    units_with_special_values,
    unpack_units,
)
from moe_runtime.kernels.gemm.pack_units import packed_units
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, TensorsByExpert
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.support.arguments import check_integer, check_is_tensor, check_kind

E4M3_MAX_CODE = 0x7E
RESULT_FORMATS = ("bf16", "mxfp8", "nvfp4")
"""Formats of an activated result of the GEMM of prepacked weights."""

MAX_PREPACKED_EXPERTS = 512
"""Most groups of a GEMM of prepacked weights."""


@dataclass(frozen=True)
class PrepackedWeights(TensorsByExpert):
    """`ExpertWeights` in the layout of `kernels/gemm/dequant_layout.py`, which Hopper's GEMM dequantizes in registers.

    One copy serves every number of rows. `E` experts, `N x K` the weight of one. If the engine is not `cuda` (no Hopper
    GPU, no NVRTC, another engine asked for), every call restores the original weights. That is slow and must not be
    captured in a graph.

    Attributes:
        format: `nvfp4`, `mxfp8` or `mxfp4`.
        units: uint8 `[E, chunks of K, units of N, units of a chunk, unit bytes]`, quants and scales.
        num_rows: `N`.
        num_columns: `K`.
        expert_scales: fp32 `[E]`, or `[E, 2]` with gate (0) and up (1) apart; None means 1.
        bias: fp32 `[E, N]`; None means 0.
        gate_up: the original order of gate and up, for `grouped_gemm_swiglu` only; None for plain weights.
        has_special_values: uint8 `[E, units of N]` of `mxfp8` and `mxfp4`: 1 where rows hold a NaN or a scale above
            `2^7` (`mxfp4`: `2^1`), whose dequantization needs more steps. None for `nvfp4`.
    """

    format: TokenFormat
    units: torch.Tensor
    num_rows: int
    num_columns: int
    expert_scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    gate_up: GateUpOrder | None = None
    has_special_values: torch.Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", weight_format_named(self.format))
        if self.format not in DEQUANT_FORMATS:
            names = ", ".join(fmt.name for fmt in DEQUANT_FORMATS)
            raise ValueError(f"format: expected one of {names}, got {self.format.name}")
        check_integer("num_rows", self.num_rows)
        check_integer("num_columns", self.num_columns, high=MAX_COLUMNS)
        if self.gate_up is not None:
            object.__setattr__(self, "gate_up", GateUpOrder.of(self.gate_up))
        if check_is_tensor("units", self.units).ndim != 5:
            raise ValueError(f"units: expected five dimensions, got shape {list(self.units.shape)}")
        experts = int(self.units.shape[0])
        sizes = (experts, *units_shape(self.num_rows, self.num_columns, self.format))
        self._check_tensor("units", self.units, torch.uint8, sizes)
        parts = () if self.gate_up is None else ((experts, 2),)
        self._check_tensor("expert_scales", self.expert_scales, torch.float32, (experts,), *parts)
        self._check_tensor("bias", self.bias, torch.float32, (experts, self.num_rows))
        if (self.has_special_values is None) != (self.format is NVFP4):
            expected = "None" if self.format is NVFP4 else "a tensor"
            raise ValueError(f"has_special_values: expected {expected} for {self.format.name}")
        marks = experts, unit_rows(self.num_rows)
        self._check_tensor("has_special_values", self.has_special_values, torch.uint8, marks)

    @classmethod
    def prepack(cls, w: ExpertWeights, *, engine: str = "auto", argument: str = "w.scales") -> PrepackedWeights:
        """Reorder `w`; weights with `gate_up` are prepacked for a gated activation.

        Waits for the device where it may raise. Raises `ValueError` for other formats than these three, and one that
        names `argument` for `nvfp4` block scales that are negative or NaN.
        """
        check_kind("w", w, ExpertWeights)
        if w.format not in DEQUANT_FORMATS:
            names = ", ".join(fmt.name for fmt in DEQUANT_FORMATS)
            raise ValueError(f"w.format: expected one of {names}, got {w.format.name}")
        assert w.scales is not None
        refused = f"{argument}: expected e4m3 values that are not negative, got a NaN or a negative one"
        if resolve_engine(engine, w.device) == "cuda" and w.quants.data_ptr() % 8 == 0:
            all_units, marks, bad = packed_units(w)
            if w.format is NVFP4 and int(bad):
                raise ValueError(refused)
            return cls(w.format, all_units, w.num_rows, w.num_columns, w.expert_scales, w.bias, w.gate_up, marks)
        rows = source_rows(w.num_rows, w.gate_up).to(w.device)
        columns = w.format.scale_columns(w.num_columns)
        shape = (w.num_experts, *units_shape(w.num_rows, w.num_columns, w.format))
        all_units = torch.empty(shape, dtype=torch.uint8, device=w.device)
        marks = None
        if w.format is not NVFP4:
            marks = torch.empty(w.num_experts, unit_rows(w.num_rows), dtype=torch.uint8, device=w.device)
        for expert, (units, quants, scales) in enumerate(zip(all_units, w.quants, w.scales, strict=True)):
            linear = unswizzle_scales(scales[None], w.num_rows, columns, engine=engine)[0].view(torch.uint8)
            if w.format is NVFP4 and int(linear.max()) > E4M3_MAX_CODE:
                raise ValueError(refused)
            units.copy_(pack_units(quants.view(torch.uint8), linear, w.format, rows))
            if marks is not None:
                marks[expert] = units_with_special_values(quants.view(torch.uint8), linear, w.format, rows)
        return cls(w.format, all_units, w.num_rows, w.num_columns, w.expert_scales, w.bias, w.gate_up, marks)

    @staticmethod
    def wanted(w: ExpertWeights, engine: str = "auto") -> bool:
        """Whether the GEMM is faster with `w` prepacked: engine `cuda`, format and number of experts allow it."""
        check_kind("w", w, ExpertWeights)
        can = w.format in DEQUANT_FORMATS and w.num_experts <= MAX_PREPACKED_EXPERTS
        return resolve_engine(engine, w.device) == "cuda" and can

    def restore(self, *, engine: str = "auto") -> ExpertWeights:
        """The weights from which `prepack` made these."""
        rows = source_rows(self.num_rows, self.gate_up).to(self.device)
        sizes = self.num_rows, self.num_columns
        quants, scales = (
            torch.empty(self.num_experts, self.num_rows, width, dtype=torch.uint8, device=self.device)
            for width in (self.format.quant_bytes(self.num_columns), self.format.scale_columns(self.num_columns))
        )
        for expert, units in enumerate(self.units):
            quants[expert], scales[expert] = unpack_units(units, self.format, rows, *sizes)
        return ExpertWeights(
            self.format,
            quants.view(self.format.quant_dtype),
            swizzle_scales(
                scales if self.format.scale_dtype is None else scales.view(self.format.scale_dtype), engine=engine
            ),
            self.expert_scales,
            self.bias,
            self.gate_up,
        )

    @property
    def num_experts(self) -> int:
        """`E`."""
        return int(self.units.shape[0])

    @property
    def device(self) -> torch.device:
        return self.units.device
