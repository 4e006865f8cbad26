"""What dispatch hands to combine: the handle of a step, the rows that arrived, and where experts write results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from moe_runtime.comm.arguments import check_integer, check_is_tensor, check_kind
from moe_runtime.comm.host_link import Exchange
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeBackend, RecvBuffers
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.support.deprecation import warn_renamed

STAGES = ("dispatch_recv", "combine_send", "combine_recv")
"""What follows `dispatch_send` with its handle, in this order."""


@dataclass
class _Progress:
    """How far a step has come, and the memory that its next stage writes.

    Attributes:
        stages_done: how many of `STAGES` were called.
        between_hosts: of a context whose ranks are on several hosts.
        recv_buffers: for `dispatch_recv`, until it has run.
        output: bf16 `[T, H]` for `combine_recv`, between `combine_send` and itself.
        received_in: where `dispatch_send` has done the work of `dispatch_recv`, too: `ExpertParallelContext.dispatches`
            then.
        summed: whether `combine_send` has done the work of `combine_recv`, too.
    """

    recv_buffers: RecvBuffers | None
    output: torch.Tensor | None = None
    stages_done: int = 0
    between_hosts: HostStep | None = None
    received_in: int | None = None
    summed: bool = False


@dataclass
class HostStep:
    """What a step between hosts keeps from one part to the next.

    Attributes:
        num_parts: int32 `[H (T + 1)]`, ranks of this host that each token of the rail goes to.
        slots: int32 `[H, T]`, slot of each token in the chunk of each host, -1 for none; None where that is the token.
        timeout_ns: limit of its waits.
        exchanges: under way, in their order; what has been awaited is gone.
        forwarded, relayed: which parts have run.
    """

    num_parts: torch.Tensor
    slots: torch.Tensor | None
    timeout_ns: int
    exchanges: list[Exchange] = field(default_factory=list)
    forwarded: bool = False
    relayed: bool = False


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to know of a dispatch. Good for one combine, until the second next dispatch of its context.

    A dispatcher with `reusable_handles` takes it again later: `renew` sends its routing once more.

    Attributes:
        geometry: of the layer that dispatched.
        epoch: int32 `[1]` on the device: the number of the dispatch in its context.
        positions: int32 `[S, K]`: row position of each (landing slot, k), -1 for none. On one host `S` is
            `W * max_tokens`.
        num_parts: int32 `[T]`: partial results that come home for each of this rank's tokens, one from each rank; one
            from each host where there are several.
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
    _progress: _Progress = field(repr=False, compare=False)
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    num_rows: int | None = None
    received: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        geometry: ExchangeGeometry,
        local: ExchangeGeometry,
        backend: ExchangeBackend,
        device: torch.device,
        *,
        num_tokens: int,
        timeout_ns: int,
        scales_in_record: bool,
        routing: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> DispatchHandle:
        """The handle of a new step, with memory for all that `dispatch_send` and `dispatch_recv` write.

        `local` is the geometry of the ranks of this host, `geometry` on one host. `routing` is copied, so that the
        handle can be renewed.

        Later stages may write it outside of the inference mode of now, so it is made outside of that mode.
        """
        with torch.inference_mode(False):
            buffers = allocate_recv_buffers(local, backend, device, scales_in_record=scales_in_record)
            return cls(
                geometry,
                torch.empty(1, dtype=torch.int32, device=device),
                buffers.positions,
                torch.empty(num_tokens, dtype=torch.int32, device=device),
                num_tokens,
                timeout_ns,
                scales_in_record,
                _Progress(buffers),
                *(() if routing is None else (given.clone() for given in routing)),
            )

    @property
    def between_hosts(self) -> HostStep:
        """Of a context whose ranks are on several hosts."""
        step = self._progress.between_hosts
        assert step is not None
        return step

    def _start_between_hosts(self, step: HostStep) -> None:
        self._progress.between_hosts = step

    @property
    def leave_scales(self) -> bool:
        """Deprecated: `scales_in_record`."""
        warn_renamed("leave_scales", "scales_in_record")
        return self.scales_in_record

    def for_rows(
        self, positions: torch.Tensor, num_rows: int, brought_by: DispatchHandle | None = None
    ) -> DispatchHandle:
        """This dispatch of routing alone as the handle of rows that an earlier one brought; `combine_send` comes next.

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
        received = brought_by.epoch if brought_by is not None and brought_by.ended else None
        return replace(self, positions=positions, num_rows=num_rows, received=received)

    @property
    def combined(self) -> bool:
        """Whether a combine has begun with it."""
        return self._progress.stages_done > STAGES.index("combine_send")

    def enter(self, stage: str) -> None:
        """Note that `stage` of `STAGES` begins. Raises `ValueError` unless it is the next one."""
        index, done = STAGES.index(stage), self._progress.stages_done
        if index < done:
            raise ValueError(f"handle: {stage} was already called with it")
        if index > done:
            raise ValueError(f"handle: expected {STAGES[index - 1]} to be called with it before {stage}")
        self._progress.stages_done += 1

    @property
    def ended(self) -> bool:
        """Whether no other stage may follow."""
        return self._progress.stages_done == len(STAGES)

    def end(self) -> None:
        """Note that no other stage may follow."""
        self._progress.stages_done = len(STAGES)

    @property
    def recv_buffers(self) -> RecvBuffers:
        """The buffers for `dispatch_recv`, which nobody has taken yet."""
        buffers = self._progress.recv_buffers
        assert buffers is not None
        return buffers

    def take_recv_buffers(self) -> RecvBuffers:
        """The buffers for `dispatch_recv`; from now on they live as long as whoever took them keeps them."""
        buffers, self._progress.recv_buffers = self.recv_buffers, None
        return buffers

    @property
    def received_at_once(self) -> bool:
        """Whether `dispatch_send` has done the work of `dispatch_recv`, too: of a rank alone, with few tokens."""
        return self._progress.received_in is not None

    def _is_received(self, dispatches: int) -> bool:
        """Whether its rows are grouped and lie where they did; `dispatches` is that of the context now."""
        received_in = self._progress.received_in
        return received_in is not None and dispatches - received_in < 2

    @property
    def summed(self) -> bool:
        """Whether nothing is left to do for `combine_recv` but to return the sum."""
        return self._progress.summed

    def allocate_output(self, out: torch.Tensor | None) -> None:
        """Memory for the sum of `combine_recv`, bf16 `[T, H]`: `out`, or made before sending (`RecvBuffers`)."""
        if out is not None:
            self._progress.output = out
            return
        shape = (self.num_tokens, self.geometry.output_hidden)
        with torch.inference_mode(False):
            self._progress.output = torch.empty(shape, dtype=torch.bfloat16, device=self.epoch.device)

    @property
    def output(self) -> torch.Tensor:
        """What `allocate_output` made, which nobody has taken yet."""
        output = self._progress.output
        assert output is not None
        return output

    def take_output(self) -> torch.Tensor:
        """What `allocate_output` made, once."""
        output, self._progress.output = self.output, None
        return output


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
        settled: whether the dispatch had ended before the last kernel that writes `rows` began, also where that kernel
            begins before the one before it has ended. `combine` of a rank alone then reads the routing meanwhile. False
            unless it is set.
    """

    def __init__(self, handle: DispatchHandle) -> None:
        check_kind("handle", handle, DispatchHandle)
        geometry = handle.geometry
        self.handle = handle
        self.settled = False
        self.rows = torch.empty(
            (geometry.row_capacity, geometry.output_hidden), dtype=torch.bfloat16, device=handle.positions.device
        )


def allocate_recv_buffers(
    geometry: ExchangeGeometry, backend: ExchangeBackend, device: torch.device, *, scales_in_record: bool
) -> RecvBuffers:
    """Uninitialised buffers for a step of `geometry`."""
    fmt, capacity, experts = geometry.token_format, geometry.row_capacity, geometry.num_local_experts
    rows = scales = row_scale = None
    if geometry.contiguous:
        rows = torch.empty((capacity, fmt.quant_bytes(geometry.hidden)), dtype=torch.uint8, device=device)
    if fmt.has_row_scale:
        row_scale = torch.empty(capacity, dtype=torch.float32, device=device)
    if fmt.swizzled and not scales_in_record:
        columns4 = ceil_div(fmt.scale_columns(geometry.hidden), 4)
        scales = torch.empty((geometry.scale_blocks, columns4, 32, 4, 4), dtype=torch.uint8, device=device)
    elif fmt.scale_dtype is not None and not scales_in_record:
        scales = torch.empty((capacity, fmt.scale_columns(geometry.hidden)), dtype=fmt.scale_dtype, device=device)
    return RecvBuffers(
        positions=torch.empty((geometry.num_slots, geometry.top_k), dtype=torch.int32, device=device),
        group_offsets=torch.empty(experts + 1, dtype=torch.int32, device=device),
        group_scale_offsets=torch.empty(experts, dtype=torch.int32, device=device),
        row_index=torch.empty(capacity, dtype=torch.int32, device=device),
        rows=rows,
        scales=scales,
        row_scale=row_scale,
        counts=backend.allocate_counts(geometry, device),
    )
