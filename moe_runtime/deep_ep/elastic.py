"""`ElasticBuffer`: dispatch and combine of DeepEP V2's interface, over the exchange of normal mode."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_runtime.comm.group_members import MAX_SECONDS
from moe_runtime.context.peers import collective_step
from moe_runtime.deep_ep.arguments import (
    BF16,
    FP32,
    IDS,
    Bias,
    Bit,
    check_bias,
    check_bit,
    check_experts,
    check_hidden,
    check_matrix,
    check_statistics,
    check_tokens,
    check_top_k,
    check_vector,
)
from moe_runtime.deep_ep.ep_handle import EPHandle, check_room, most_rows
from moe_runtime.deep_ep.events import EventHandle, EventOverlap, overlap_of
from moe_runtime.deep_ep.group_buffer import GroupBuffer, absent, runs_beside
from moe_runtime.deep_ep.normal import NormalExchange
from moe_runtime.deep_ep.normal_handle import Form, Received, Tokens, as_sent
from moe_runtime.deep_ep.sizes import normal_bytes, normal_tokens
from moe_runtime.deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.support.arguments import (
    check_apart,
    check_integer,
    check_kind,
    check_no_grad,
    check_number,
    check_seconds,
)

BUFFER_ALIGNMENT = 2 << 20
"""What DeepEP rounds sizes of buffers up to."""
MOST = 2**31 - 1
"""Of numbers that kernels get as int32."""
STARTUP_S = 120.0
"""How long the first call of each kind waits for a peer at least: it may compile."""
OVERLAPPED_SMS = 24
"""SMs with which an exchange beside other kernels takes about a third longer than with all (docs/deep_ep.md)."""

ENGRAM = "there is no Engram"
PIPELINE = "there is no exchange of pipeline stages; use torch.distributed"
GATHER = "there is no all-gather and reduce-scatter; use torch.distributed"

Event = EventOverlap | EventHandle | None
Sizes = tuple[int | None, int | None, int | None]
"""`num_experts`, `num_max_tokens_per_rank` and `expert_alignment`."""


class ElasticBuffer(GroupBuffer):
    """Memory of a group of ranks for exchanging tokens. Constructing it is collective.

    Memory is reserved at the first dispatch of each hidden size. Ranks must make all calls in the same order.

    Args:
        group: ranks of one host (gloo or NCCL), or CPU ranks.
        num_bytes: most bytes on this rank for each hidden size, equal on all ranks; None for what the next three need.
        num_cpu_bytes: must be 0: there is no Engram.
        num_max_tokens_per_rank: most tokens of a rank in a dispatch, unless the dispatch says it.
        hidden: `H` of bf16 tokens.
        num_topk: kept, without effect: a token may have up to 32 experts.
        use_fp8_dispatch: kept, without effect: there is room for either.
        deterministic: kept, without effect: equal inputs give equal bits in any case.
        allow_hybrid_mode: kept, without effect: there is one way.
        allow_multiple_reduction: whether a combine may round the sum of a token's expanded rows on each rank, before it
            travels. Else each row travels by itself, in `K` exchanges.
        prefer_overlap_with_compute: what `get_theoretical_num_sms` follows.
        sl_idx, num_allocated_qps: kept, without effect: there are no queue pairs.
        num_cpu_timeout_secs: kept, without effect: the host waits for its kernels.
        num_gpu_timeout_secs: how long a call waits for a peer; the first of each kind, which may compile, for 120 s at
            least.
        explicitly_destroy: whether `destroy` will be called. It frees memory on all ranks together. On GPUs nothing
            else does before the process ends.

    Raises `ValueError` for an argument of a wrong kind.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: Bit = False,
        deterministic: Bit = False,
        allow_hybrid_mode: Bit = True,
        allow_multiple_reduction: Bit = True,
        prefer_overlap_with_compute: Bit = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: Bit = False,
    ) -> None:
        check_integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, MOST)
        check_integer("hidden", hidden, 0, MOST)
        check_integer("num_topk", num_topk, 0, MOST)
        check_integer("num_cpu_bytes", num_cpu_bytes, 0, 0)
        check_bit("use_fp8_dispatch", use_fp8_dispatch)
        check_bit("allow_hybrid_mode", allow_hybrid_mode)
        check_integer("sl_idx", sl_idx, 0, MOST)
        check_integer("num_allocated_qps", num_allocated_qps, 0, MOST)
        check_seconds("num_cpu_timeout_secs", num_cpu_timeout_secs)
        seconds = check_seconds("num_gpu_timeout_secs", num_gpu_timeout_secs, MAX_SECONDS)
        self.deterministic = check_bit("deterministic", deterministic)
        self.allow_hybrid_mode = bool(allow_hybrid_mode)
        self.allow_multiple_reduction = check_bit("allow_multiple_reduction", allow_multiple_reduction)
        self.prefer_overlap_with_compute = check_bit("prefer_overlap_with_compute", prefer_overlap_with_compute)
        if num_bytes is None:
            if not (num_max_tokens_per_rank and hidden):
                raise ValueError("num_bytes: expected it, or num_max_tokens_per_rank and hidden")
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden)
        self.num_bytes = check_integer("num_bytes", num_bytes, 0, 2**60)
        timeouts = {"timeout_s": seconds, "startup_timeout_s": max(STARTUP_S, seconds)}
        super().__init__(group, bool(check_bit("explicitly_destroy", explicitly_destroy)), **timeouts)
        self.num_max_tokens_per_rank, self.num_allocated_qps = num_max_tokens_per_rank, num_allocated_qps or 1
        self.rank_idx, self.num_ranks = self.group.rank(), self.group.size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._meeting: NormalExchange | None = None

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: Bit = False,
        allow_hybrid_mode: Bit = True,
        allow_multiple_reduction: Bit = True,
    ) -> int:
        """`num_bytes` that suffice for these sizes, a multiple of 2 MiB; what follows `hidden` is without effect."""
        check_integer("num_topk", num_topk, 0, MOST)
        check_bit("use_fp8_dispatch", use_fp8_dispatch)
        check_bit("allow_hybrid_mode", allow_hybrid_mode)
        check_bit("allow_multiple_reduction", allow_multiple_reduction)
        check_kind("group", group, dist.ProcessGroup)
        check_integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1, MOST)
        check_integer("hidden", hidden, 16, MOST)
        if hidden % 16:
            raise ValueError(f"hidden: expected a multiple of 16, got {hidden}")
        return align(normal_bytes(hidden, group.size(), num_max_tokens_per_rank), BUFFER_ALIGNMENT)

    @staticmethod
    def capture() -> EventHandle:
        """The point that the current stream has come to."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """`(1, W)`: all ranks are one domain."""
        return get_physical_domain_size(self.group)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """`(1, W)`: all ranks are one domain."""
        return get_logical_domain_size(self.group)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """24 SMs with `prefer_overlap_with_compute`, else all of the GPU; the arguments are without effect."""
        check_integer("num_experts", num_experts, 1, MOST)
        check_integer("num_topk", num_topk, 1, MOST)
        check_integer("num_scaleout_topk", num_scaleout_topk, 0, MOST)
        speeds = {
            "rdma_gbs": rdma_gbs,
            "nvlink_gbs": nvlink_gbs,
            "sm_read_gbs": sm_read_gbs,
            "sm_write_gbs": sm_write_gbs,
        }
        for name, speed in speeds.items():
            if check_number(name, speed) < 0:
                raise ValueError(f"{name}: expected a number from 0, got {speed}")
        if self.device.type != "cuda":
            return OVERLAPPED_SMS
        there: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        return min(OVERLAPPED_SMS, there) if self.prefer_overlap_with_compute else there

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """1, which no call looks at: there are no queue pairs."""
        check_integer("num_sms", num_sms, 0, MOST)
        return 1

    def barrier(self, use_comm_stream: Bit = True, with_cpu_sync: Bit = False, sequential: Bit = True) -> None:
        """Let the current stream wait until every rank has come to this call. Collective.

        Args:
            use_comm_stream: whether the communication stream waits, and the current one for it.
            with_cpu_sync: whether the host waits for the GPU before and after.
            sequential: without effect: there is one domain.
        """
        beside, on_host = check_bit("use_comm_stream", use_comm_stream), check_bit("with_cpu_sync", with_cpu_sync)
        check_bit("sequential", sequential)
        if self._meeting is None:
            self._meeting = NormalExchange(self._new_context(), 16, 1)
        if on_host and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self._comm.running(beside, None):
            self._meeting.meet()
        self._comm.finish(beside, False, ())
        if on_host and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def dispatch(
        self,
        x: Tokens,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: Bit = False,
        allocate_on_comm_stream: Bit = False,
        handle: EPHandle | None = None,
        do_handle_copy: Bit = True,
        do_cpu_sync: Bit | None = None,
        do_expand: Bit = False,
        do_zero_padding: Bit = False,
        use_tma_aligned_col_major_sf: Bit = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to each rank of its experts. Collective.

        Args:
            x: bf16 `[T, H]`, `H` a multiple of 16, or e4m3 `[T, H]`, `H` a multiple of 128, and scales `[T, V]`: fp32
                or int32 words, `V` at most `H / 128`.
            topk_idx: int64 `[T, K]`; a negative id, or one from `num_experts` on, is none. `K` is at most 32.
            topk_weights: fp32 `[T, K]`, or None.
            cumulative_local_expert_recv_stats: int32 `[E_local]`, to which the rows of each local expert are added; not
                with `handle`.
            num_experts: `E`, a multiple of the number of ranks.
            num_max_tokens_per_rank: most tokens of a rank, equal on all ranks; None for that of the buffer.
            expert_alignment: what the rows of each expert are rounded up to; None is 1.
            num_sms: most SMs; 0 is all.
            num_qps: without effect: there are no queue pairs.
            previous_event, previous_event_before_epilogue: what the call waits for, both before it begins.
            async_with_compute_stream: whether the current stream goes on; the caller waits for the event.
            allocate_on_comm_stream: whether the call runs on the communication stream although nothing else says so.
            handle: of an earlier dispatch, in place of `topk_idx`: the tokens take its way. `num_experts`,
                `num_max_tokens_per_rank` and `expert_alignment` are None, or those of the handle.
            do_handle_copy: whether the handle keeps a copy of `topk_idx`, or `topk_idx` itself, which must not change.
            do_cpu_sync: whether the host waits for the counts, and there are as many rows as come. Else there are as
                many as may come, and the call can be captured. None is True without `handle`, which excludes True.
            do_expand: whether a token has a row for each of its experts here, grouped by expert. A handle must be of a
                dispatch that did so too.
            do_zero_padding: with `do_expand`, whether rows that no token has are zeroed; else they hold anything.
            use_tma_aligned_col_major_sf: whether scales come with strides `(1, rows rounded up to 4)`.

        Returns:
            rows in the form of `x`, ordered by source rank and token, or, expanded, first by expert;
            int64 `[R, K]` local expert ids, -1 elsewhere and for rows that did not come; None expanded;
            fp32 `[R, K]` weights, 0 where the id is -1, or fp32 `[N]` expanded; None without `topk_weights`;
            the handle, that of the argument if given; the event.

        Raises:
            ValueError: an argument of wrong shape, dtype or value; peers get a `PeerAbortedError` where `x` has too
                many tokens.
            MoERuntimeError: a rank that failed or did not come.
        """
        hidden = check_tokens(x, self.device)
        _check_no_grads(x, topk_weights)
        check_integer("num_sms", num_sms, 0, MOST)
        check_integer("num_qps", num_qps, 0, MOST)
        expand, zero_padding = check_bit("do_expand", do_expand), check_bit("do_zero_padding", do_zero_padding)
        by_column = check_bit("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
        if zero_padding and not expand:
            raise ValueError("do_zero_padding: expected False without do_expand")
        copy = check_bit("do_handle_copy", do_handle_copy)
        sync = handle is None if do_cpu_sync is None else check_bit("do_cpu_sync", do_cpu_sync)
        sizes = num_experts, num_max_tokens_per_rank, expert_alignment
        statistics = cumulative_local_expert_recv_stats
        waits_for, beside = _streams(
            previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
        )
        if handle is None:
            ids, of_form, alignment = self._check_routing(x, topk_idx, topk_weights, statistics, sizes, sync)
        else:
            self._check_again(x, topk_idx, topk_weights, statistics, sizes, sync, expand, handle)
            ids, of_form, alignment = handle.topk_idx, (handle.num_experts, 0, None), handle.expert_alignment
        # Callers may change the ids that they get.
        form = Form(*of_form, expand, by_column, keeps_ids=handle is None and not expand, sums_by_entry=True)
        exchange = self._exchange(hidden, num_sms)
        is_first = handle is None
        with self._comm.running(beside, *waits_for):
            if handle is None:
                got, handle = self._first(exchange, x, ids, topk_weights, form, alignment, num_sms, copy)
                if statistics is not None:
                    counts = handle.num_unaligned_recv_tokens_per_expert
                    with torch.inference_mode():  # in which a tensor of such a mode may be written, and any other
                        statistics += counts
            else:
                travelling = None if topk_weights is None else ids
                got = exchange.dispatch_again(x, handle._rows, travelling, topk_weights, form)
            rows, came_ids, weights = _in_form(exchange, got, handle, form, zero_padding)
            rows = as_sent(rows, x)
            if topk_weights is None:
                weights = None
        used: tuple[torch.Tensor | None, ...] = ()
        if beside:
            sent, came = (part if isinstance(part, tuple) else (part,) for part in (x, rows))
            used = *sent, topk_idx, topk_weights, statistics, *came, came_ids, weights, *handle._tensors
        event = self._comm.finish(beside, bool(async_with_compute_stream), used)
        if is_first:
            handle._event = event.event
        return rows, came_ids, weights, handle, event

    def _check_routing(
        self,
        x: Tokens,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        sizes: Sizes,
        sync: bool,
    ) -> tuple[torch.Tensor, tuple[int, int, int | None], int]:
        """What a dispatch without a handle is told: ids, the first of `Form`, and the alignment of an expert's rows."""
        ids = check_matrix("topk_idx", topk_idx, self.device, IDS, _tokens_of(x).shape[0])
        check_top_k(ids.shape[1])
        if topk_weights is not None:
            check_matrix("topk_weights", topk_weights, self.device, FP32, *ids.shape)
        num_experts, max_tokens, alignment = sizes
        num_experts = check_experts(num_experts, self.num_ranks)
        check_statistics(statistics, num_experts // self.num_ranks, self.device)
        if statistics is not None:
            others = {"topk_idx": ids, "topk_weights": topk_weights}
            check_apart("cumulative_local_expert_recv_stats", statistics[None], others)
        max_tokens = self.num_max_tokens_per_rank if max_tokens is None else max_tokens
        check_integer("num_max_tokens_per_rank", max_tokens)
        room = normal_tokens(self.num_bytes, _tokens_of(x).shape[1], self.num_ranks)
        if max_tokens > room:
            raise ValueError(
                f"num_max_tokens_per_rank: expected at most {room}, for which num_bytes has room, got {max_tokens}"
            )
        if sync and self._comm.stream is not None and torch.cuda.is_current_stream_capturing():
            raise ValueError("do_cpu_sync: expected False in a capture, where the host cannot wait for the counts")
        alignment = 1 if alignment is None else check_integer("expert_alignment", alignment, 1, MOST)
        return ids, (num_experts, 0 if sync else self.num_ranks * max_tokens, max_tokens), alignment

    def _check_again(
        self,
        x: Tokens,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        sizes: Sizes,
        sync: bool,
        expand: bool,
        handle: EPHandle,
    ) -> None:
        """What a dispatch with a handle is told."""
        self._check_handle(handle, _tokens_of(x).shape[1])
        for name, given in (("topk_idx", topk_idx), ("cumulative_local_expert_recv_stats", statistics)):
            if given is not None:
                raise ValueError(f"{name}: expected None beside handle")
        for name, size in zip(("num_experts", "num_max_tokens_per_rank", "expert_alignment"), sizes, strict=True):
            if size is not None and check_integer(name, size) != getattr(handle, name):
                raise ValueError(f"{name}: expected None, or {getattr(handle, name)} as in handle, got {size}")
        if sync:
            raise ValueError("do_cpu_sync: expected False or None beside handle, whose counts are known")
        if expand and not handle.do_expand:
            raise ValueError("do_expand: expected False with a handle of a dispatch without it")
        num_tokens = handle._rows.num_tokens
        if _tokens_of(x).shape[0] != num_tokens:
            raise ValueError(f"x: expected {num_tokens} tokens as in handle, got {_tokens_of(x).shape[0]}")
        if topk_weights is not None:
            check_matrix("topk_weights", topk_weights, self.device, FP32, *handle.topk_idx.shape)

    def _first(
        self,
        exchange: NormalExchange,
        x: Tokens,
        ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        form: Form,
        alignment: int,
        num_sms: int,
        copy: bool,
    ) -> tuple[Received, EPHandle]:
        """A dispatch without a handle."""
        num_experts, max_tokens, sync = form.num_experts, form.max_tokens, not form.num_worst_tokens
        assert max_tokens is not None
        num_tokens, top_k = ids.shape
        if num_tokens > max_tokens:
            with collective_step(exchange.context):
                raise ValueError(f"x: expected at most num_max_tokens_per_rank = {max_tokens} tokens, got {num_tokens}")
        got = exchange.dispatch(x, None, ids, topk_weights, form)
        kept_ids = got.topk_idx if form.to_expand else got.kept_ids
        assert kept_ids is not None
        most, local = form.num_worst_tokens, num_experts // self.num_ranks
        rounded = got.handle.tokens_of_experts or []
        if alignment > 1:
            rounded = [align(count, alignment) for count in rounded]
        kept_idx = ids.clone(memory_format=torch.contiguous_format) if copy else ids
        if got.handle.route is not None and not form.to_expand:
            got.handle.home_ids = kept_idx.contiguous()
        handle = EPHandle(
            do_expand=form.to_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=max_tokens,
            num_sms=num_sms,
            topk_idx=kept_idx,
            num_recv_tokens=got.handle.num_rows,
            num_expanded_tokens=sum(rounded) if sync else most_rows(most, top_k, local, alignment),
            num_recv_tokens_per_expert_list=rounded,
            _rank=self.rank_idx,
            _rows=got.handle,
            _ids=kept_ids,
        )
        if form.to_expand and not sync and top_k > local:
            check_room(handle)
        return got, handle

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: Bit = False,
        allocate_on_comm_stream: Bit = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum the rows of each token, unweighted, in fp32. Collective; does not wait for the host.

        Ranks are added in the order of their last entries in the token, as DeepEP adds them. Expanded rows of a token
        are summed on each rank first, by entry, and rounded to bf16. Without `allow_multiple_reduction` all are summed
        by entry in the end.

        Args:
            x: bf16 `[R, H]`, or `[N, H]` expanded: a row for each row of the dispatch.
            handle: of a dispatch; it may be combined several times.
            topk_weights: fp32 `[R, K]`, or `[N]` expanded: of each entry of a token, that of its expert's rank comes
                home.
            bias: bf16 `[T, H]`, added first, or two of them, which take two passes more over the partial sums of
                expanded rows, and where no kernels store to peers.
            num_sms: most SMs; 0 for as many as of the dispatch.
            num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream,
                allocate_on_comm_stream: as in `dispatch`.

        Returns:
            bf16 `[T, H]`; fp32 `[T, K]`, 0 where the id is none, or None; the event.

        Raises: as `dispatch`.
        """
        check_kind("handle", handle, EPHandle)
        check_integer("num_sms", num_sms, 0, MOST)
        check_integer("num_qps", num_qps, 0, MOST)
        num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        check_matrix("x", x, self.device, BF16, num_rows)
        if topk_weights is not None and handle.do_expand:
            check_vector("topk_weights", topk_weights, self.device, torch.float32, num_rows)
        elif topk_weights is not None:
            check_matrix("topk_weights", topk_weights, self.device, FP32, num_rows, handle.topk_idx.shape[1])
        biases = check_bias(bias, self.device, handle._rows.num_tokens, x.shape[1])
        _check_no_grads(x, topk_weights, biases)
        waits_for, beside = _streams(
            previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
        )
        self._check_handle(handle, check_hidden(x.shape[1]))
        exchange = self._exchange(x.shape[1], num_sms or handle.num_sms)
        with self._comm.running(beside, *waits_for):
            contiguous = x.contiguous()
            if not handle.do_expand:
                y, weights = exchange.combine(contiguous, handle._rows, biases, topk_weights, handle._ids)
            else:
                sums = exchange.combine_steps if self.allow_multiple_reduction else exchange.combine_once
                y = sums(contiguous, handle._steps, biases)
                weights = None
                if topk_weights is not None:
                    weights = exchange.combine_weights(handle._weights_by_row(topk_weights), handle._rows)
        used = (x, topk_weights, *biases, y, weights, *handle._tensors) if beside else ()
        return y, weights, self._comm.finish(beside, bool(async_with_compute_stream), used)

    def _exchange(self, hidden: int, num_sms: int) -> NormalExchange:
        return self._exchange_of(hidden, "num_bytes", self.num_bytes, num_sms or None)

    def _check_handle(self, handle: EPHandle, hidden: int) -> None:
        """`handle` may be of another buffer with the same ranks, if there is room for as many tokens of `hidden`."""
        check_kind("handle", handle, EPHandle)
        rows = handle._rows
        fits = handle._rank == self.rank_idx and rows.num_ranks == self.num_ranks
        room = normal_tokens(self.num_bytes, hidden, self.num_ranks)
        if not fits or rows.room > room or handle.topk_idx.device != self.device:
            raise ValueError("handle: expected one of this buffer, or of one with the same ranks and no more room")

    # Other jobs

    get_engram_storage_size_hint = staticmethod(absent("get_engram_storage_size_hint", ENGRAM))
    engram_write = absent("engram_write", ENGRAM)
    engram_fetch = absent("engram_fetch", ENGRAM)
    get_pp_buffer_size_hint = staticmethod(absent("get_pp_buffer_size_hint", PIPELINE))
    pp_set_config = absent("pp_set_config", PIPELINE)
    pp_send = absent("pp_send", PIPELINE)
    pp_recv = absent("pp_recv", PIPELINE)
    get_agrs_num_max_session_bytes = staticmethod(absent("get_agrs_num_max_session_bytes", GATHER))
    get_agrs_buffer_size_hint = staticmethod(absent("get_agrs_buffer_size_hint", GATHER))
    create_agrs_session = absent("create_agrs_session", GATHER)
    destroy_agrs_session = absent("destroy_agrs_session", GATHER)
    agrs_new_session = absent("agrs_new_session", GATHER)
    agrs_set_config = absent("agrs_set_config", GATHER)
    agrs_get_inplace_tensor = absent("agrs_get_inplace_tensor", GATHER)
    all_gather = absent("all_gather", GATHER)


def _tokens_of(x: Tokens) -> torch.Tensor:
    return x[0] if isinstance(x, tuple) else x


def _in_form(
    exchange: NormalExchange, got: Received, handle: EPHandle, form: Form, zero_padding: bool
) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None]:
    """Rows, ids and weights of a dispatch."""
    if not form.to_expand:
        return got.tokens, handle._ids.clone() if got.topk_idx is None else got.topk_idx, got.topk_weights
    assert handle._slots is not None
    how = {"zero_padding": zero_padding, "scales_by_column": form.scales_by_column}
    rows, scales, weights = exchange.expand(got, handle._slots, handle.num_expanded_tokens, **how)
    return rows if scales is None else (rows, scales), None, weights


def _check_no_grads(x: Tokens, topk_weights: torch.Tensor | None, bias: tuple[torch.Tensor, ...] = ()) -> None:
    for name, given in (("x", x), ("topk_weights", topk_weights), ("bias", bias)):
        for tensor in given if isinstance(given, tuple) else (given,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                check_no_grad(name, tensor)


def _streams(
    previous_event: Event, before_epilogue: Event, is_async: Bit, on_comm_stream: Bit
) -> tuple[tuple[EventOverlap | None, EventOverlap | None], bool]:
    """What a call waits for, and whether it runs on the communication stream."""
    asked = {"async_with_compute_stream": is_async, "allocate_on_comm_stream": on_comm_stream}
    first = overlap_of("previous_event", previous_event)
    second = overlap_of("previous_event_before_epilogue", before_epilogue)
    return (first, second), runs_beside(first, asked) or second is not None
