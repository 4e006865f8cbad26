"""`Buffer`: dispatch and combine with DeepEP's names, arguments and layouts, on the ranks of one host or on CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist

from moe_runtime.deep_ep.arguments import (
    BF16,
    FP32,
    IDS,
    Bias,
    check_bias,
    check_bit,
    check_experts,
    check_flags,
    check_hidden,
    check_layout,
    check_matrix,
    check_routing,
    check_statistics,
    check_tokens,
    check_top_k,
    payload_of,
)
from moe_runtime.deep_ep.events import EventHandle, EventOverlap
from moe_runtime.deep_ep.group_buffer import GroupBuffer, absent, not_there, runs_beside
from moe_runtime.deep_ep.low_latency import LowLatencyExchange, LowLatencyHandle
from moe_runtime.deep_ep.normal import NormalExchange
from moe_runtime.deep_ep.normal_handle import Form, NormalHandle, Tokens, as_sent
from moe_runtime.deep_ep.sizes import FP8_BLOCK_SIZE, Config, low_latency_bytes
from moe_runtime.dispatcher.arguments import check_out
from moe_runtime.kernels.exchange.layout import dispatch_layout
from moe_runtime.kernels.exchange.plan import exchange_engine
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.support.arguments import check_integer, check_is_tensor, check_kind

NO_MASK = "ranks cannot be masked"


class Buffer(GroupBuffer):
    """Memory of a group of ranks for exchanging tokens. Constructing it is collective.

    Memory is reserved at the first dispatch of each mode and size, from `num_nvl_bytes` for normal mode and from
    `num_rdma_bytes` for low latency (`moe_runtime.deep_ep.sizes`). Ranks must make all calls in the same order.

    Args:
        group: ranks of one host (gloo or NCCL), or CPU ranks.
        num_nvl_bytes: most bytes of normal mode on this rank, equal on all ranks. It decides how many tokens travel in
            one step; more travel in several steps.
        num_rdma_bytes: most bytes of low latency on this rank, for each set of sizes.
        low_latency_mode: kept, without effect: both modes can be used.
        num_qps_per_rank: kept, without effect: there are no queue pairs.
        allow_nvlink_for_low_latency_mode: must be True: there is nothing else.
        allow_mnnvl: kept, without effect.
        explicitly_destroy: whether `destroy` will be called. It frees memory on all ranks together. On GPUs nothing
            else does before the process ends.
        enable_shrink: must be False: ranks cannot be masked.
        comm: must be None.

    Raises:
        ValueError: an argument of a wrong kind.
        NotImplementedError: what is not there (`comm`, `enable_shrink`, a network beside NVLink).
    """

    num_sms: ClassVar[int] = 20
    _most_sms: ClassVar[int | None] = None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ) -> None:
        if comm is not None:
            not_there("comm", "pass group, a process group of torch.distributed")
        if enable_shrink:
            not_there("enable_shrink", NO_MASK)
        if not allow_nvlink_for_low_latency_mode:
            not_there("allow_nvlink_for_low_latency_mode", "ranks exchange tokens over NVLink alone")
        check_integer("num_nvl_bytes", num_nvl_bytes, 0)
        check_integer("num_rdma_bytes", num_rdma_bytes, 0)
        super().__init__(group, check_bit("explicitly_destroy", explicitly_destroy))
        self.rank, self.group_size = self.group.rank(), self.group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self._low_latency: dict[tuple[int, int, int, int], LowLatencyExchange] = {}

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 is there on every device."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Say how many SMs a call of normal mode may take from now on, on all ranks alike; at first it takes all."""
        check_integer("new_num_sms", new_num_sms, 2)
        if new_num_sms % 2:
            raise ValueError(f"new_num_sms: expected an even number, got {new_num_sms}")
        Buffer.num_sms = Buffer._most_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The point that the current stream has come to."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """`num_rdma_bytes` that suffice for these sizes with up to 32 experts of a token."""
        check_integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank)
        check_integer("hidden", hidden)
        check_integer("num_ranks", num_ranks)
        check_integer("num_experts", num_experts)
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A `Config`, whose chunk sizes are without effect."""
        check_integer("num_ranks", num_ranks)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A `Config`, whose chunk sizes are without effect."""
        check_integer("num_ranks", num_ranks)
        return Config(Buffer.num_sms)

    get_local_buffer_tensor = absent("get_local_buffer_tensor", "the memory has no part that is free for callers")

    # Normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """What `dispatch` needs to know of int64 `topk_idx` `[T, K]`, -1 for no expert.

        Returns:
            int32 `[W]`, tokens for each rank; None; int32 `[E]`, tokens for each expert; bool `[T, W]`, whether a token
            goes to a rank; the event.
        """
        check_matrix("topk_idx", topk_idx, self.device, IDS)
        check_experts(num_experts, self.group_size)
        flags = {"async_finish": async_finish, "allocate_on_comm_stream": allocate_on_comm_stream}
        beside = runs_beside(previous_event, flags)
        with self._comm.running(beside, previous_event):
            context = self._contexts[0]
            engine, _ = exchange_engine(context.engine, context.device)
            per_rank, per_expert, in_rank = dispatch_layout(topk_idx, num_experts, self.group_size, engine=engine)
        event = self._comm.finish(beside, async_finish, (topk_idx, per_rank, per_expert, in_rank))
        return per_rank, None, per_expert, in_rank, event

    def dispatch(
        self,
        x: Tokens,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]:
        """Send each token once to each rank that wants it. Collective; waits for the host unless it knows the counts.

        Args:
            x: bf16 `[T, H]`, or e4m3 `[T, H]` and scales `[T, V]`, fp32 or int32 words, `V` at most `H / 128`; `H` is a
                multiple of 16.
            handle: of an earlier dispatch, in place of what follows: the tokens take its way. Does not wait for the
                host.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of `get_dispatch_layout`.
            num_tokens_per_rdma_rank: None, or ignored: there is one host.
            topk_idx: int64 `[T, K]`, with `topk_weights`; `K` is at most 32.
            topk_weights: fp32 `[T, K]`.
            expert_alignment: what the counts of experts are rounded up to.
            num_worst_tokens: rows to make room for; then nothing waits for the host, and the call can be captured.
            config: without effect.
            previous_event: what the call waits for.
            async_finish: whether the current stream goes on; the caller waits for the event.
            allocate_on_comm_stream: whether the call runs on the communication stream although nothing else says so.

        Returns:
            rows by source rank and then by token, in the form of `x`; int64 `[R, K]` local expert ids, -1 elsewhere;
            fp32 `[R, K]` weights, 0 where the id is -1; tokens of each local expert (empty with `num_worst_tokens`);
            the handle; the event. With `handle` all but the first and the last are None.

        Raises:
            ValueError: an argument of wrong shape, dtype or value.
            MoERuntimeError: a rank that failed or did not come.
        """
        hidden = check_tokens(x, self.device)
        check_integer("expert_alignment", expert_alignment)
        check_integer("num_worst_tokens", num_worst_tokens, 0)
        flags = {"async_finish": async_finish, "allocate_on_comm_stream": allocate_on_comm_stream}
        beside = runs_beside(previous_event, flags)
        quants, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            self._check_handle(handle)
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("handle: expected None beside topk_idx and topk_weights")
            if quants.shape[0] != handle.num_tokens:
                raise ValueError(f"x: expected {handle.num_tokens} tokens as in handle, got {quants.shape[0]}")
            with self._comm.running(beside, previous_event):
                got = self._exchange(hidden).dispatch_again(x, handle)
            read = handle.tensors if beside else ()
            event = self._comm.finish(beside, async_finish, (quants, scales, got.x, got.scales, *read))
            return as_sent(got.tokens, x), None, None, None, None, event
        counts = check_layout(
            quants.shape[0], self.group_size, self.device, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        )
        check_routing(topk_idx, topk_weights, quants.shape[0], self.device)
        with self._comm.running(beside, previous_event):
            form = Form(counts[2].numel(), num_worst_tokens)
            got = self._exchange(hidden).dispatch(x, counts, topk_idx, topk_weights, form)
        experts = [] if got.handle.tokens_of_experts is None else got.handle.tokens_of_experts
        if expert_alignment > 1:
            experts = [align(count, expert_alignment) for count in experts]
        used: tuple[torch.Tensor | None, ...] = ()
        if beside:
            came = got.x, got.scales, got.topk_idx, got.topk_weights, *got.handle.tensors
            used = quants, scales, topk_idx, topk_weights, *counts, *came
        event = self._comm.finish(beside, async_finish, used)
        return as_sent(got.tokens, x), got.topk_idx, got.topk_weights, experts, got.handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum the rows of each token, unweighted, in fp32, ranks ascending. Collective; does not wait for the host.

        Args:
            x: bf16 `[R, H]`, a row for each row of the dispatch.
            handle: of a dispatch; it may be combined several times.
            topk_weights: fp32 `[R, K]`, summed likewise.
            bias: bf16 `[T, H]`, added first, or two of them, which take two passes more over the partial sums where
                no kernels store to peers.
            config, previous_event, async_finish, allocate_on_comm_stream: as in `dispatch`.

        Returns:
            bf16 `[T, H]`; fp32 `[T, K]`, or None; the event.

        Raises: as `dispatch`.
        """
        self._check_handle(handle)
        check_matrix("x", x, self.device, BF16, handle.num_rows)
        if topk_weights is not None:
            check_matrix("topk_weights", topk_weights, self.device, FP32, handle.num_rows)
            check_top_k(topk_weights.shape[1], "topk_weights")
        biases = check_bias(bias, self.device, handle.num_tokens, x.shape[1])
        flags = {"async_finish": async_finish, "allocate_on_comm_stream": allocate_on_comm_stream}
        beside = runs_beside(previous_event, flags)
        with self._comm.running(beside, previous_event):
            exchange = self._exchange(check_hidden(x.shape[1]))
            y, weights = exchange.combine(x.contiguous(), handle, biases, topk_weights)
        read = handle.tensors if beside else ()
        return y, weights, self._comm.finish(beside, async_finish, (x, topk_weights, *biases, y, weights, *read))

    internode_dispatch = absent("internode_dispatch", "the ranks are on one host; call dispatch")
    internode_combine = absent("internode_combine", "the ranks are on one host; call combine")

    def _check_handle(self, handle: NormalHandle) -> None:
        """`handle` may be of another buffer with the same ranks."""
        check_kind("handle", handle, NormalHandle)
        if handle.num_ranks != self.group_size:
            raise ValueError(f"handle: expected one of {self.group_size} ranks, got one of {handle.num_ranks}")
        if handle[3] is not None and handle[3].device != self.device:
            raise ValueError(f"handle: expected one on {self.device}, got one on {handle[3].device}")

    def _exchange(self, hidden: int) -> NormalExchange:
        return self._exchange_of(hidden, "num_nvl_bytes", self.num_nvl_bytes, Buffer._most_sms)

    # Low latency

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing has to be cleaned: flags hold the number of their step, and modes do not share memory."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
        use_mxfp8: bool = False,
    ) -> tuple[Tokens, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], object] | None]:
        """Send tokens to the rows of their experts. Collective; does not wait for the host, can be captured.

        Between this call and its hook one other dispatch or combine may be called, as between a combine and its hook:
        memory has two halves. The combine may come at any time.

        Args:
            x: bf16 `[T, H]`, `T` at most the limit, `H` a multiple of 128 (512 with `use_ue8m0`).
            topk_idx: int64 `[T, K]`, -1 for no expert.
            num_max_dispatch_tokens_per_rank: the limit, equal on all ranks.
            num_experts: `E`, a multiple of the number of ranks.
            cumulative_local_expert_recv_stats: int32 `[E_local]`, to which the counts are added.
            dispatch_wait_recv_cost_stats: must be None: waits are not measured.
            use_fp8: whether rows are e4m3 with a scale for each 128 elements, or bf16.
            round_scale: whether scales are rounded up to powers of two.
            use_ue8m0: whether scales come as UE8M0 bytes, four in an int32; only with `round_scale`.
            async_finish: whether the current stream goes on; the caller waits for the event.
            return_recv_hook: whether the call only sends, and the hook receives.
            use_nvfp4: instead of `use_fp8`, as SGLang asks for: rows are uint8 `[W * max, H / 2, E_local]`, scales e4m3
                `[32, 4, ceil(W * max / 128), 4, ceil(H / 64), E_local]`, views of memory with the experts outermost.
            x_global_scale: fp32 with one element, the encode scale of NVFP4 tokens (448 * 6 / the largest magnitude).
            use_mxfp8: instead of `use_fp8`: rows are e4m3, scales UE8M0 bytes `[E_local, W * max, H / 32]`, contiguous.

        Returns:
            rows `[E_local, W * max, H]`, or these and their scales `[E_local, W * max, H / 128]` (`/ 512`), strides
            `(.., 1, W * max)`; int32 `[E_local]` counts; the handle; the event; the hook, or None. Rows of an expert
            are ordered by source rank and then by token; rows past its count are not written.

        Raises: as `dispatch`.
        """
        if dispatch_wait_recv_cost_stats is not None:
            not_there("dispatch_wait_recv_cost_stats", "waits are not measured")
        check_flags(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0, use_nvfp4=use_nvfp4)
        check_flags(async_finish=async_finish, return_recv_hook=return_recv_hook, use_mxfp8=use_mxfp8)
        if use_ue8m0 and not round_scale:
            raise ValueError("use_ue8m0: expected False without round_scale")
        if async_finish and return_recv_hook:
            raise ValueError("async_finish: expected False with return_recv_hook")
        check_matrix("x", x, self.device, BF16)
        multiple = 512 if use_fp8 and use_ue8m0 else FP8_BLOCK_SIZE
        if x.shape[1] == 0 or x.shape[1] % multiple:
            raise ValueError(f"x: expected a hidden size that is a multiple of {multiple}, got {x.shape[1]}")
        if x.shape[0] and x.stride(1) != 1:
            raise ValueError(f"x: expected contiguous rows, got strides {list(x.stride())}")
        check_matrix("topk_idx", topk_idx, self.device, IDS, x.shape[0])
        if topk_idx.shape[1] == 0:
            raise ValueError("topk_idx: expected at least one expert of a token, got 0")
        statistics = cumulative_local_expert_recv_stats
        exchange = self._low_latency_exchange(
            num_max_dispatch_tokens_per_rank, x.shape[1], num_experts, topk_idx.shape[1]
        )
        check_statistics(statistics, exchange.num_local_experts, self.device)
        payload, gsf = payload_of(use_fp8, round_scale, use_ue8m0, use_nvfp4, x_global_scale, use_mxfp8, self.device)
        with self._comm.running(async_finish, None):
            step = exchange.dispatch_send(x.detach() if x.requires_grad else x, topk_idx, payload, gsf)
            if not return_recv_hook:
                step.finish(statistics)
        rows, tokens, handle = step.rows, step.tokens, step.handle
        made = rows.rows, rows.scales, rows.counts, rows.source_tokens, rows.layout_range, *handle.tensors
        event = self._comm.finish(async_finish, async_finish, (x, topk_idx, *made, statistics, gsf))
        hook = self._comm.on_this_stream(functools.partial(step.finish, statistics)) if return_recv_hook else None
        return tokens, rows.counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], object] | None]:
        """Weight and sum the rows of each token. Collective; does not wait for the host, can be captured.

        `sum over ranks ascending of bf16(sum over that rank's experts of w_k * row)`, sums in fp32.

        Args:
            x: bf16 `[E_local, W * max, H]`.
            topk_idx: int64 `[T, K]` of the dispatch; an entry that is -1 now has no part in the sum.
            topk_weights: fp32 `[T, K]`.
            handle: of the dispatch, whose hook has been called; it may be combined several times.
            use_logfmt: must be False.
            zero_copy: whether the rows are in the tensor of `get_next_low_latency_combine_buffer`, not in `x`.
            async_finish: whether the current stream goes on; the caller waits for the event.
            return_recv_hook: whether the call only sends, and the hook receives.
            out: bf16 `[T, H]`, at a multiple of 16 bytes, written and returned; None for a new tensor.
            combine_wait_recv_cost_stats: must be None: waits are not measured.

        Returns:
            bf16 `[T, H]`; the event; the hook, or None.

        Raises: as `dispatch`.
        """
        check_flags(zero_copy=zero_copy, async_finish=async_finish, return_recv_hook=return_recv_hook)
        if use_logfmt:
            not_there("use_logfmt", "partial sums travel in bf16")
        if combine_wait_recv_cost_stats is not None:
            not_there("combine_wait_recv_cost_stats", "waits are not measured")
        if async_finish and return_recv_hook:
            raise ValueError("async_finish: expected False with return_recv_hook")
        check_kind("handle", handle, LowLatencyHandle)
        if not handle.is_received:
            raise ValueError("handle: expected the hook of its dispatch to be called first, which receives the rows")
        exchange = handle.exchange
        check_matrix("topk_idx", topk_idx, self.device, IDS, handle.num_tokens, exchange.top_k)
        check_matrix("topk_weights", topk_weights, self.device, FP32, handle.num_tokens, exchange.top_k)
        shape = (exchange.num_local_experts, exchange.num_slots, exchange.hidden)
        rows = exchange.scratch() if zero_copy else check_is_tensor("x", x)
        if rows.shape != shape or rows.dtype != torch.bfloat16 or rows.device != self.device:
            found = f"{rows.dtype} {list(rows.shape)} on {rows.device}"
            raise ValueError(f"x: expected bf16 {list(shape)} on {self.device}, got {found}")
        if out is None:
            out = torch.empty(handle.num_tokens, exchange.hidden, dtype=torch.bfloat16, device=self.device)
        else:
            check_out(handle.native.geometry, self.device, out, handle.num_tokens)
        if rows.requires_grad or topk_weights.requires_grad:
            rows, topk_weights = rows.detach(), topk_weights.detach()
        with self._comm.running(async_finish, None):
            renewed = exchange.combine_send(rows.contiguous(), topk_idx, topk_weights, handle, out)
            if not return_recv_hook:
                exchange.combine_recv(renewed)
        if zero_copy and async_finish:
            exchange.leave_scratch()
        event = self._comm.finish(async_finish, async_finish, (x, topk_idx, topk_weights, *handle.tensors, out))
        receive = functools.partial(exchange.combine_recv, renewed)
        return out, event, self._comm.on_this_stream(receive) if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """bf16 `[E_local, W * max, H]` for rows that the next `low_latency_combine` takes with `zero_copy`.

        It is another one after such a combine with `async_finish`, which may read the rows later.
        """
        check_kind("handle", handle, LowLatencyHandle)
        return handle.exchange.scratch()

    low_latency_update_mask_buffer = absent("low_latency_update_mask_buffer", NO_MASK)
    low_latency_query_mask_buffer = absent("low_latency_query_mask_buffer", NO_MASK)
    low_latency_clean_mask_buffer = absent("low_latency_clean_mask_buffer", NO_MASK)

    def _low_latency_exchange(self, tokens: int, hidden: int, num_experts: int, top_k: int) -> LowLatencyExchange:
        check_integer("num_max_dispatch_tokens_per_rank", tokens)
        check_experts(num_experts, self.group_size)
        key = tokens, hidden, num_experts, top_k
        if key not in self._low_latency:
            least = low_latency_bytes(tokens, hidden, self.group_size, num_experts, top_k)
            if self.num_rdma_bytes < least:
                raise ValueError(
                    f"num_rdma_bytes: expected at least {least} for these sizes (get_low_latency_rdma_size_hint), got "
                    f"{self.num_rdma_bytes}"
                )
            self._low_latency[key] = LowLatencyExchange(self._context(), *key)
        return self._low_latency[key]
