"""What dispatch hands to combine: the handle of a step, the rows that arrived, and where experts write results."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import RecvBuffers
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder
from moe_runtime.support.arguments import check_integer, check_is_tensor, check_kind

STAGES = ("dispatch_recv", "combine_send", "combine_recv")
"""What follows `dispatch_send` with its handle, in this order."""
RECEIVED, COMBINE_SENT, ENDED = 1, 2, 3
"""How many of them were called."""


@dataclass(eq=False, slots=True)
class DispatchHandle:
    """A step of a dispatcher: what `combine` needs to know of a dispatch, and how far the two have come.

    Good for one combine, until two later dispatches of its context have begun. A dispatcher with `reusable_handles`
    takes it again later: `renew` sends its routing once more.

    Attributes:
        geometry: of the layer that dispatched.
        epoch: int32 `[1]` on the device: the number of the dispatch in its context.
        positions: int32 `[S, K]`: row position of each (landing slot, k), -1 for none. On one host `S` is
            `W * max_tokens`.
        num_parts: int32 `[T]`: partial results that come home for each of this rank's tokens, one from each rank that
            has its experts, or from each such host where there are several.
        num_tokens: `T`.
        timeout_ns: how long its kernels wait for a peer: longer in the first step of a layer, which may compile them.
        scales_in_record: whether block scales stay in the records that arrive (`GroupedRows.scales_in_record`).
        num_rows: rows that `combine` takes, where `positions` are of an earlier dispatch (`for_rows`).
        received: epoch of that dispatch, if its rows were received as padded ones.
        topk_idx, topk_weights: `[T, K]`, copies of the routing; None without `reusable_handles`.
    """

    geometry: ExchangeGeometry
    epoch: torch.Tensor
    positions: torch.Tensor
    num_parts: torch.Tensor
    num_tokens: int
    timeout_ns: int
    scales_in_record: bool
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    num_rows: int | None = None
    received: torch.Tensor | None = None
    # For the dispatcher and its exchange.
    _buffers: RecvBuffers | None = field(default=None, repr=False)
    """For `dispatch_recv`, until it has run; then they live as long as the rows that it gave."""
    _output: torch.Tensor | None = field(default=None, repr=False)
    """bf16 `[T, H]`, what `combine_recv` writes, between `combine_send` and itself."""
    _stages_done: int = field(default=0, repr=False)
    """How many of `STAGES` were called."""
    _received_in: int | None = field(default=None, repr=False)
    """`ExpertParallelContext.dispatches` then, where `dispatch_send` has done the work of `dispatch_recv`."""
    _summed: bool = field(default=False, repr=False)
    """Whether `combine_send` has done the work of `combine_recv`."""
    _kept: Any = field(default=None, repr=False)
    """What its exchange keeps from one method to the next."""

    def for_rows(
        self, positions: torch.Tensor, num_rows: int, brought_by: DispatchHandle | None = None
    ) -> DispatchHandle:
        """This dispatch of routing alone as the handle of rows that an earlier one brought; `combine_send` comes next.

        No stage may follow with this handle itself.

        Args:
            positions: int32 `[W * max_tokens, K]`, row of each (landing slot, k), -1 for none. An entry that this
                dispatch does not route has no part in the sum.
            num_rows: of the output that is combined.
            brought_by: handle of the dispatch that brought the rows. If they were received as padded rows, and if it
                is the last dispatch before this one, this combine tells peers that its tokens have been read.

        Raises `ValueError` for positions of other sizes, and for wrong kinds.
        """
        check_is_tensor("positions", positions)
        mine = self.positions
        if (positions.shape, positions.dtype, positions.device) != (mine.shape, mine.dtype, mine.device):
            got = f"{positions.dtype} {list(positions.shape)} on {positions.device}"
            raise ValueError(f"positions: expected int32 {list(mine.shape)} on {mine.device}, got {got}")
        check_integer("num_rows", num_rows, 0, 2**31 - 1)
        renewed = copy(self)
        renewed.positions, renewed.num_rows = positions, num_rows
        renewed.received = brought_by.epoch if brought_by is not None and brought_by._ended else None
        self._stages_done, self._buffers = ENDED, None
        return renewed

    def _check_next(self, stage: str) -> None:
        """Raise `ValueError` unless `stage` of `STAGES` is the next one."""
        index, done = STAGES.index(stage), self._stages_done
        if index < done:
            raise ValueError(f"handle: {stage} was already called with it")
        if index > done:
            raise ValueError(f"handle: expected {STAGES[index - 1]} to be called with it before {stage}")

    @property
    def _combined(self) -> bool:
        """Whether a combine has begun with it."""
        return self._stages_done >= COMBINE_SENT

    @property
    def _ended(self) -> bool:
        """Whether no other stage may follow."""
        return self._stages_done == ENDED


@dataclass(frozen=True, kw_only=True)
class DispatchedTokens(GroupedRows):
    """The rows that arrived at this rank, grouped by local expert, ascending, empty groups included; see `GroupedRows`.

    In swizzled `scales`, columns behind the last scale of a row are 0; rows and blocks that no group has hold what the
    memory held before. Nothing reads either.

    Attributes:
        handle: to be given to `combine`.
    """

    handle: DispatchHandle


class CombineSink:
    """Where a down projection writes the rows that `combine` will take, by row position.

    Attributes:
        rows: bf16 `[row_capacity, H]`; rows past `group_offsets[G]` are not read.
        order: what `combine` of a rank alone may read before the last kernel that writes `rows` has ended: the routing,
            with `ONLY_ROWS_PENDING`. `IN_ORDER` unless it is set.
    """

    def __init__(self, handle: DispatchHandle) -> None:
        check_kind("handle", handle, DispatchHandle)
        geometry = handle.geometry
        self.handle = handle
        self.order: LaunchOrder = IN_ORDER
        self.rows = torch.empty(
            (geometry.row_capacity, geometry.output_hidden), dtype=torch.bfloat16, device=handle.positions.device
        )
