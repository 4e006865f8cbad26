"""`EPHandle`: what a dispatch of `ElasticBuffer` leaves, and where rows go that are grouped by expert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from moe_runtime.context.threads import is_capturing
from moe_runtime.deep_ep.events import EventHandle
from moe_runtime.deep_ep.normal_handle import NormalHandle, Step, valid_ids
from moe_runtime.kernels.formats.number_formats import align


@dataclass(eq=False)
class EPHandle:
    """What a dispatch leaves for cached dispatches and for combines, as often as they are called.

    `R` rows came, one for each token that has experts here; `N` are the rows that are grouped by expert. Where the host
    did not wait for the counts, both are the most that may come. Tensors that are not attributes here are made when
    they are first read: for a CUDA graph to renew them, read them in its capture.

    Attributes:
        do_expand: whether rows are grouped by expert.
        num_experts: `E`.
        expert_alignment: what the rows of each expert are rounded up to.
        num_max_tokens_per_rank: most tokens of a rank.
        num_sms: most SMs that a combine takes, if it is not told; 0 is all.
        topk_idx: int64 `[T, K]` of the dispatch.
        num_recv_tokens, num_expanded_tokens: `R` and `N`.
        num_recv_tokens_per_expert_list: rows of each local expert, rounded up; empty where the host did not wait.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    _rank: int
    _rows: NormalHandle
    """Of rows that are not expanded."""
    _ids: torch.Tensor
    """int64 `[R, K]`, local experts of each row, -1 for others."""
    _slots: torch.Tensor | None = field(default=None, init=False)
    """int32 `[R, K]`, expanded rows of each row, -1 for none; None where rows are not expanded."""
    _steps: list[Step] = field(init=False)
    """Of the rows that a combine takes."""
    _event: EventHandle | None = field(default=None, init=False)
    """Of a dispatch that runs beside the current stream: what is made later waits for it."""

    token_metadata_at_forward: ClassVar[None] = None
    """Speaks of DeepEP's channels between hosts, like the next."""
    channel_linked_list: ClassVar[None] = None

    def __post_init__(self) -> None:
        self._steps = self._rows.steps
        if self.do_expand:
            counts = self.num_unaligned_recv_tokens_per_expert
            self._slots = expanded_slots(self._ids, counts, self.expert_alignment)
            self._steps = [self._expanded_step(self._slots)]

    def _expanded_step(self, slots: torch.Tensor) -> Step:
        (step,) = self._rows.steps
        entries = valid_ids(self.topk_idx, self.num_experts)
        # A landing slot has one row at most, that of this rank: in its own column, or where the token names it.
        if self._rows.route is not None:
            row = step.positions[:, self._rank, None]
        else:
            row = step.positions.amax(dim=1, keepdim=True)
        positions = torch.full((row.shape[0], slots.shape[1]), -1, dtype=torch.int32, device=slots.device)
        if slots.shape[0]:
            positions = torch.where(row >= 0, slots[row[:, 0].clamp(min=0).to(torch.int64)], positions)
        ones = torch.ones(entries.shape, dtype=torch.float32, device=entries.device)
        return replace(step, entries=entries, weights=ones, positions=positions, num_experts=self.num_experts)

    def _weights_by_row(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """fp32 `[R, K]` of the weights `[N]` of expanded rows, 0 where a row has no such entry."""
        assert self._slots is not None
        return torch.where(self._slots >= 0, topk_weights[self._slots.clamp(min=0).to(torch.int64)], 0.0)

    def _await_dispatch(self) -> None:
        """Let the current stream wait for the dispatch, where that is on another; not across the edge of a capture."""
        event = self._event
        if event is not None and event.captured == is_capturing(self.topk_idx.device):
            event.current_stream_wait()

    @property
    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What kernels of later calls read."""
        steps = [tensor for step in self._steps for tensor in (step.entries, step.weights, step.positions)]
        counts = self.__dict__.get("num_unaligned_recv_tokens_per_expert")
        return self.topk_idx, self._rows.home_ids, self._ids, self._slots, counts, *self._rows.tensors, *steps

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 `[E_local]`: rows of each local expert."""
        self._await_dispatch()
        if self._rows.route is not None:
            return self._rows.route.experts
        return count_entries(self._ids, self.num_experts // self._rows.num_ranks)

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """int32 `[W]`: entry `i` counts the rows, not expanded, that came from ranks 0 to `i`."""
        self._await_dispatch()
        prefix = self._rows[0]
        if prefix is not None:
            return prefix[:, self._rank].contiguous()
        (step,) = self._rows.steps
        num_ranks = self._rows.num_ranks
        came = step.positions.view(num_ranks, step.room, num_ranks) >= 0
        return came.sum(dim=(1, 2)).cumsum(0, dtype=torch.int32)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 `[E_local]`: where the rows of each local expert end; the next begin at a multiple of the alignment.

        Not expanded, the ends are rounded up too.
        """
        self._await_dispatch()
        counts = self.num_unaligned_recv_tokens_per_expert
        rounded = _aligned(counts, self.expert_alignment)
        ends = rounded.cumsum(0, dtype=torch.int32)
        return ends - rounded + counts if self.do_expand else ends

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """int32 `[R, 2 + K]`: `rank * max + token` and `rank * K + last entry with an expert here` of each source.

        Then the expanded rows, -1 for none. A row that did not come has -1 alone.
        """
        self._await_dispatch()
        (num_rows, top_k), device = self._ids.shape, self._ids.device
        source_tokens = self._rows[3]
        assert source_tokens is not None
        ends = self.psum_num_recv_tokens_per_scaleup_rank
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        ranks = torch.searchsorted(ends, rows, right=True, out_int32=True)
        entries = torch.arange(top_k, dtype=torch.int32, device=device)
        last = torch.where(self._ids >= 0, entries, -1).amax(dim=1)
        sources = torch.stack([ranks * self.num_max_tokens_per_rank + source_tokens, ranks * top_k + last], dim=1)
        slots = torch.full_like(self._ids, -1, dtype=torch.int32) if self._slots is None else self._slots
        return torch.cat([torch.where(rows[:, None] < ends[-1], sources, -1), slots], dim=1)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 `[T, K]`: where a token lands on the rank of each of its experts, -1 for none."""
        self._await_dispatch()
        room, num_tokens = self._rows.room, self._rows.num_tokens
        slots = self._rank * room + torch.arange(num_tokens, dtype=torch.int32, device=self.topk_idx.device)
        return torch.where(valid_ids(self.topk_idx, self.num_experts) >= 0, slots[:, None], -1)


def count_entries(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 `[num_experts]`, how often `ids` `[R, K]` names each expert; -1 is none."""
    keys = torch.where(ids >= 0, ids, num_experts).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, keys, torch.ones_like(keys, dtype=torch.int32))[:num_experts]


def expanded_slots(ids: torch.Tensor, counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """int32 `[R, K]`: rows of the entries of `ids` `[R, K]`, grouped by expert, then by row and entry; -1 for none.

    The rows of each expert, `counts` int32 `[E_local]`, begin at a multiple of `alignment`.
    """
    flat = ids.flatten()
    keys = torch.where(flat >= 0, flat, counts.numel())
    order = keys.argsort(stable=True)
    rounded = _aligned(counts, alignment)
    # From the number of an entry in this order to its row; entries without an expert come last.
    shifts = torch.nn.functional.pad((rounded - counts).cumsum(0) - (rounded - counts), (0, 1))
    slots = torch.arange(flat.numel(), device=ids.device) + shifts[keys[order]]
    placed = torch.empty_like(slots).scatter_(0, order, slots)
    return torch.where(flat >= 0, placed, -1).to(torch.int32).view(ids.shape)


def most_rows(num_tokens: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """`N` at most: each of `num_tokens` tokens of all ranks on as many local experts as there may be."""
    entries = num_tokens * min(top_k, num_local_experts)
    return align(entries + (alignment - 1) * num_local_experts, alignment)


def check_room(handle: EPHandle) -> None:
    """There are as many expanded rows as came. Waits for the host on a CPU alone."""
    counts = handle.num_unaligned_recv_tokens_per_expert
    fits = _aligned(counts, handle.expert_alignment).sum() <= handle.num_expanded_tokens
    if counts.device.type != "cpu":
        torch._assert_async(fits)
    elif not fits:
        raise ValueError(
            "topk_idx: expected each expert of a token once, without do_cpu_sync there is no room for more"
        )


def _aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    return (counts + (alignment - 1)) // alignment * alignment
