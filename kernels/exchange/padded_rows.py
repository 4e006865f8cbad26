"""A block of rows for each expert: where DeepEP's low latency wants the tokens that arrive."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.kernels.formats.number_formats import ceil_div


@dataclass(frozen=True)
class PaddedRows:
    """`[E, S, H]`, each expert's rows filled from the front.

    `E` local experts, `S = W * max_tokens` rows of each, `V = ceil(H / 128)`.

    Attributes:
        rows: uint8 `[E, S, bytes of a row]`.
        scales: fp32 `[E, S, V]`, or int32 `[E, S, ceil(V / 4)]` with four UE8M0 bytes each, strides `(.., 1, S)`; None
            for rows without scales.
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

    @classmethod
    def allocate(
        cls,
        experts: int,
        slots: int,
        row_bytes: int,
        num_scales: int,
        world_size: int,
        top_k: int,
        *,
        packed_scales: bool,
        device: torch.device,
    ) -> PaddedRows:
        """Uninitialised memory; without scales where `num_scales` is 0."""
        with torch.inference_mode(False):
            scales = None
            if num_scales:
                columns = ceil_div(num_scales, 4) if packed_scales else num_scales
                dtype = torch.int32 if packed_scales else torch.float32
                scales = torch.empty(experts, columns, slots, dtype=dtype, device=device).transpose(1, 2)
            return cls(
                torch.empty(experts, slots, row_bytes, dtype=torch.uint8, device=device),
                scales,
                torch.empty(experts, dtype=torch.int32, device=device),
                torch.empty(experts, slots, dtype=torch.int32, device=device),
                torch.empty(experts, world_size, dtype=torch.int64, device=device),
                torch.empty(slots, top_k, dtype=torch.int32, device=device),
            )
