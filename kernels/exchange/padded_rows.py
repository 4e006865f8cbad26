"""A block of rows for each expert: where DeepEP's low latency wants the tokens that arrive."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.support.arguments import check_integer, check_is_tensor, check_kind


class PaddedScales(IntEnum):
    """How the scales of padded rows lie; kernels branch on it. `E` experts, `S` rows of each, `V` scales of a row."""

    NONE = 0
    COLUMNS = 1
    """fp32 `[E, S, V]`, strides `(V S, 1, S)`."""
    PACKED_COLUMNS = 2
    """int32 `[E, S, V / 4]`, the exponents of four fp32 powers of two each (UE8M0), strides `(V / 4 S, 1, S)`; `V` is a
    multiple of 4."""
    ROWS = 3
    """uint8 `[E, S, V]`, contiguous: bytes as they are in the record."""
    SWIZZLED = 4
    """uint8 `[E, ceil(S / 128), ceil(V / 4), 32, 4, 4]`, contiguous: the 128x4 swizzle of each expert."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale in the record."""
        return 4 if self in (PaddedScales.COLUMNS, PaddedScales.PACKED_COLUMNS) else 1

    def allocate(self, experts: int, slots: int, num_scales: int, device: torch.device) -> torch.Tensor | None:
        """Uninitialised memory for `num_scales` scales of each row."""
        if self == PaddedScales.COLUMNS:
            return torch.empty(experts, num_scales, slots, dtype=torch.float32, device=device).transpose(1, 2)
        if self == PaddedScales.PACKED_COLUMNS:
            words = ceil_div(num_scales, 4)
            return torch.empty(experts, words, slots, dtype=torch.int32, device=device).transpose(1, 2)
        if self == PaddedScales.ROWS:
            return torch.empty(experts, slots, num_scales, dtype=torch.uint8, device=device)
        if self == PaddedScales.SWIZZLED:
            shape = (experts, ceil_div(slots, 128), ceil_div(num_scales, 4), 32, 4, 4)
            return torch.empty(shape, dtype=torch.uint8, device=device)
        return None


@dataclass(frozen=True)
class PaddedRows:
    """`[E, S, H]`, each expert's rows filled from the front.

    `E` local experts, `S = W * max_tokens` rows of each.

    Attributes:
        rows: uint8 `[E, S, bytes of a row]`, a multiple of 8 bytes.
        scales: as `kind` says; None for rows without scales.
        kind: how scales lie.
        num_scales: `V`, of a row; 0 without scales.
        counts: int32 `[E]`, rows of each expert.
        source_tokens: int32 `[E, S]`, token of each row at its rank.
        layout_range: int64 `[E, W]`, `first row << 32 | rows` of each source rank.
        positions: int32 `[S, K]`, row `e * S + i` of each (landing slot, k), -1 for none.

    Rows that no token has keep what the memory held.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    source_tokens: torch.Tensor
    layout_range: torch.Tensor
    positions: torch.Tensor
    kind: PaddedScales = PaddedScales.NONE
    num_scales: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "counts", "source_tokens", "layout_range", "positions"):
            tensor = check_is_tensor(name, getattr(self, name))
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
        check_kind("kind", self.kind, PaddedScales)
        check_integer("num_scales", self.num_scales, 0)
        if (self.scales is None) != (self.kind == PaddedScales.NONE):
            raise ValueError(f"scales: expected a tensor unless kind is NONE, got {type(self.scales).__name__}")

    @classmethod
    def allocate(
        cls,
        experts: int,
        slots: int,
        row_bytes: int,
        world_size: int,
        top_k: int,
        *,
        device: torch.device,
        kind: PaddedScales = PaddedScales.NONE,
        num_scales: int = 0,
    ) -> PaddedRows:
        """Uninitialised memory."""
        with torch.inference_mode(False):
            scales = kind.allocate(experts, slots, num_scales, device)
            return cls(
                torch.empty(experts, slots, row_bytes, dtype=torch.uint8, device=device),
                scales,
                torch.empty(experts, dtype=torch.int32, device=device),
                torch.empty(experts, slots, dtype=torch.int32, device=device),
                torch.empty(experts, world_size, dtype=torch.int64, device=device),
                torch.empty(slots, top_k, dtype=torch.int32, device=device),
                kind,
                num_scales,
            )
