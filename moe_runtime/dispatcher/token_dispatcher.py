"""`TokenDispatcher`: tokens out to the ranks of their experts and back; none is dropped, nothing waits for the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_runtime.config import MAX_EXPERTS, ModeName, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import collective_step
from moe_runtime.context.threads import by_one_thread
from moe_runtime.dispatcher.arguments import (
    check_expert_output,
    check_gsf,
    check_out,
    check_padded,
    check_router_ids,
    check_shared,
    check_tokens,
    exchange_geometry,
)
from moe_runtime.dispatcher.choice import choose_exchange
from moe_runtime.dispatcher.handle import (
    COMBINE_SENT,
    ENDED,
    RECEIVED,
    CombineSink,
    DispatchedTokens,
    DispatchHandle,
)
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.exchange.interface import ExchangeBackend
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from moe_runtime.kernels.formats.number_formats import MAX_ENCODE_SCALE, TokenFormat
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder
from moe_runtime.support.arguments import check_flag, check_integer, check_is_tensor, check_kind
from moe_runtime.support.compiling import not_compiled

ROUTING_ONLY_HIDDEN = 16
"""Numbers of a token that carries its routing alone."""


class TokenDispatcher:
    """Dispatch and combine of one layer. While one thread is in a call, calls of other threads are refused.

    `torch.compile` leaves `dispatch` and `combine` as they are; their halves are not for compiled code.

    Args:
        context: the group's memory and signals; shared by all layers.
        hidden_size: `H`, a multiple of the block of both formats.
        num_experts: experts of all ranks; rank `r` owns `E // W + (r < E % W)` of them, contiguous.
        top_k: expert ids per token.
        max_tokens_per_rank: most tokens a rank brings to a step.
        token_format: on the wire and into the GEMM.
        combine_format: of partial results on their way home: `bf16`, `fp8_block` or `mxfp8`.
        mode: `gathered`, `contiguous` or `auto` (`moe_runtime.config.resolve_mode`).
        expert_row_capacity: (token, expert) rows that may arrive at a rank in a step; None is the worst case, which
            cannot overflow. An overflow is found on the device and raises `CapacityError` on every rank.
        host_capacity: several hosts: most tokens of a rank that go to one host in a step, its own too; None is all. An
            overflow raises `CapacityError` on every rank.
        num_sms: most SMs of a GPU that dispatch and combine take at a time, so that other kernels may run on the rest;
            None is all. Changes no bit; has no meaning for the torch engine.
        input_scale: static NVFP4 decode scale of the tokens (`gsf = 1 / input_scale`); None is one scale per token.
        kernel_prefix: put before the names of CUDA C++ kernels, by which profiles tell dispatchers apart.
        output_size: elements of an expert's output row; None is `H`.
        reusable_handles: whether handles may be dispatched with again, combined several times, and combined with
            weights that come later. Each handle then keeps a copy of its routing.
        accepts_repeats: whether a token may name an expert several times, for a row each, and whether every negative id
            is none. No expert may get more than `W * max_tokens_per_rank` rows then. For ranks of one host.
        sums_by_entry: whether combine adds the ranks of a token in the order of their last experts in it, as DeepEP's
            `ElasticBuffer` does; else ascending. For ranks of one host.
        agreed: whether the arguments are known to be equal on all ranks; else they are compared at start-up.

    Attributes:
        geometry: sizes and offsets; another dispatcher may have equal ones.
        exchange_id: number of this exchange in its context, equal on all ranks.

    Raises:
        ValueError: an argument that is out of range; it is named.
    """

    def __init__(
        self,
        context: ExpertParallelContext,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        token_format: str | TokenFormat = "bf16",
        combine_format: str | TokenFormat = "bf16",
        mode: ModeName = "auto",
        expert_row_capacity: int | None = None,
        host_capacity: int | None = None,
        num_sms: int | None = None,
        input_scale: float | None = None,
        output_size: int | None = None,
        reusable_handles: bool = False,
        kernel_prefix: str = "",
        accepts_repeats: bool = False,
        sums_by_entry: bool = False,
        agreed: bool = False,
    ) -> None:
        check_kind("context", context, ExpertParallelContext)
        check_flag("agreed", agreed)
        check_flag("reusable_handles", reusable_handles)
        context._raise_failure()
        self.context = context
        self.geometry = geometry = exchange_geometry(
            context,
            hidden_size=hidden_size,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            token_format=token_format,
            combine_format=combine_format,
            mode=mode,
            expert_row_capacity=expert_row_capacity,
            num_sms=num_sms,
            input_scale=input_scale,
            output_size=output_size,
            kernel_prefix=kernel_prefix,
            accepts_repeats=accepts_repeats,
            sums_by_entry=sums_by_entry,
        )
        for name, given in (("accepts_repeats", accepts_repeats), ("sums_by_entry", sums_by_entry)):
            if given and context.hosts is not None:
                raise ValueError(f"{name}: expected False where ranks are on several hosts, got True")
        if host_capacity is not None:
            check_integer("host_capacity", host_capacity, high=2**31 - 1)
        self.exchange_id = context.next_exchange_id()
        self._host_capacity = host_capacity
        self._exchange = choose_exchange(context, geometry, self.exchange_id, host_capacity)
        self._guard = collective_step(context)
        self._on_cpu = context.device.type == "cpu"
        self._capturable = context.graph_safe
        self._generation = context.generation
        self._stepped = False
        device = context.device
        self._expert_ids = torch.arange(geometry.num_local_experts, dtype=torch.int32, device=device)
        self._gsf: torch.Tensor | None = None
        if input_scale is not None:
            one = torch.ones(1, dtype=torch.float32, device=device)
            self._gsf = (one / torch.full_like(one, float(input_scale))).clamp(max=MAX_ENCODE_SCALE)
        arguments = {
            "hidden_size": hidden_size,
            "num_experts": num_experts,
            "top_k": top_k,
            "max_tokens_per_rank": max_tokens_per_rank,
            "token_format": geometry.token_format.name,
            "combine_format": geometry.combine_format.name,
            "mode": "contiguous" if geometry.contiguous else "gathered",
            "expert_row_capacity": geometry.row_capacity,
            "host_capacity": host_capacity,
            "input_scale": input_scale,
            "output_size": geometry.output_hidden,
            "reusable_handles": reusable_handles,
            "accepts_repeats": accepts_repeats,
            "sums_by_entry": sums_by_entry,
        }
        about = f"exchange {self.exchange_id}"
        context.register(agree=None if agreed else arguments, about=about, **self._exchange.geometry.half_bytes())
        self._routing_only: RoutingDispatcher | None = None
        if reusable_handles:
            self._routing_only = RoutingDispatcher(
                context,
                num_experts=num_experts,
                top_k=top_k,
                max_tokens_per_rank=max_tokens_per_rank,
                combine_format=combine_format,
                expert_row_capacity=expert_row_capacity,
                host_capacity=host_capacity,
                num_sms=num_sms,
                output_size=geometry.output_hidden,
                accepts_repeats=accepts_repeats,
                sums_by_entry=sums_by_entry,
            )

    @classmethod
    def from_config(
        cls,
        context: ExpertParallelContext,
        config: MoELayerConfig,
        *,
        max_tokens: int | None = None,
        num_slots: int | None = None,
        mode: ModeName = "auto",
        agreed: bool = False,
        router_ids: RouterIds | None = None,
    ) -> TokenDispatcher:
        """The exchange of the layer that `config` describes, for steps of `max_tokens` if given.

        With a placement there are `num_slots` instead of its experts. If the kernels take the ids that
        `router_ids` describes, `geometry.router_ids` is set, and tokens have these.
        """
        check_kind("context", context, ExpertParallelContext)
        check_kind("config", config, MoELayerConfig)
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, high=config.max_tokens_per_rank)
        _check_slots(num_slots)
        chosen = None
        if router_ids is not None:
            check_router_ids(router_ids, config.num_experts, context.world_size)
            if num_slots is not None:
                raise ValueError("router_ids: expected None with num_slots")
            chosen = router_ids.num_experts
        dispatcher = cls(
            context,
            hidden_size=config.hidden_size,
            num_experts=config.num_experts if num_slots is None else num_slots,
            top_k=config.top_k,
            max_tokens_per_rank=config.max_tokens_per_rank if max_tokens is None else max_tokens,
            token_format=config.token_format,
            combine_format=config.combine_format,
            mode=config.mode_on(context.world_size, max_tokens, chosen) if mode == "auto" else mode,
            expert_row_capacity=config.expert_row_capacity,
            host_capacity=config.host_capacity,
            num_sms=config.num_sms,
            agreed=agreed,
        )
        if router_ids is not None:
            dispatcher._take_ids_of(router_ids)
        return dispatcher

    @classmethod
    def of_all_sizes(
        cls,
        context: ExpertParallelContext,
        config: MoELayerConfig,
        *,
        num_slots: int | None = None,
        mode: ModeName = "auto",
        router_ids: RouterIds | None = None,
    ) -> dict[int, TokenDispatcher]:
        """The exchanges of the layer that `config` describes, for each of its `all_token_buckets`, ascending.

        A step may take any that is large enough for its tokens, and all ranks must take the same. The layer compares
        `config` and `num_slots` between ranks. `router_ids` as in `from_config`.
        """
        check_kind("config", config, MoELayerConfig)
        _check_slots(num_slots)
        # The largest first: memory that suffices for it suffices for all.
        same: Any = {"num_slots": num_slots, "mode": mode, "agreed": True, "router_ids": router_ids}
        of_size = {
            size: cls.from_config(context, config, max_tokens=size, **same)
            for size in reversed(config.all_token_buckets)
        }
        return dict(sorted(of_size.items()))

    @property
    def can_keep_scales_in_record(self) -> bool:
        """Whether block scales may stay in their records: for `nvfp4` and `mxfp8`, rows gathered, on Hopper."""
        return self._exchange.can_keep_scales_in_record

    @not_compiled
    @by_one_thread
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: DispatchHandle | None = None,
        scales_in_record: bool = False,
    ) -> DispatchedTokens:
        """Quantize this rank's tokens, send them to the ranks of their experts, and group what arrives here.

        Collective: every rank calls it, with its own `T` (0 too).

        Args:
            x: bf16 `[T, H]`, last dimension contiguous, `T <= max_tokens_per_rank`. The bits of `bf16` tokens
                travel unchanged.
            topk_idx: int32 or int64 `[T, K]`; -1 is unrouted. An expert is there once in a token, unless the dispatcher
                `accepts_repeats`.
            topk_weights: fp32 `[T, K]`.
            handle: of an earlier dispatch with `reusable_handles`, in place of `topk_idx` and `topk_weights`: the
                tokens take its way again, and their rows come to the same positions.
            scales_in_record: leave block scales in the records that arrive instead of copying them into the layout of
                the consumer. For `grouped_gemm` with prepacked weights, which reads them there. Only where
                `can_keep_scales_in_record`; ranks may differ in it.

        Raises:
            ValueError: an argument of wrong shape, dtype, device or stride; the peers get `PeerAbortedError`.
            MoERuntimeError: what an earlier step, or on CPUs this step, recorded (see `ExpertParallelContext.check`).
        """
        check_flag("scales_in_record", scales_in_record)
        timeout_ns = self._begin_dispatch()
        with self._guard:
            if handle is not None:
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError("handle: expected None beside topk_idx and topk_weights, which it stands for")
                topk_idx, topk_weights = self._routing_of(handle)
            tokens = x, check_is_tensor("topk_idx", topk_idx), check_is_tensor("topk_weights", topk_weights)
            return self._dispatch_recv(self._dispatch_send(*tokens, timeout_ns, scales_in_record))

    @not_compiled
    @by_one_thread
    def combine(
        self,
        expert_output: torch.Tensor | CombineSink,
        handle: DispatchHandle,
        *,
        shared: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Weight and sum the experts' rows of each token and bring them home: bf16 `[T, H]`. Collective.

        All engines give the same bits, except that sign and payload of a NaN depend on the machine.

        Args:
            expert_output: bf16 or fp32 `[row_capacity, H]` by row position, last dimension contiguous, or a
                `CombineSink` of the same handle; each row is rounded to bf16 first.
            handle: of the dispatch that the rows came from.
            shared: bf16 `[T, H]` output of a shared expert, added first.
            topk_weights: fp32 `[T, K]`, in place of the dispatch's. Only with `reusable_handles`, as is a handle
                that was combined before: the routing is then sent once more (`renew`).

        Raises: as `dispatch`.
        """
        if topk_weights is not None or (self._routing_only is not None and _is_combined(handle)):
            with self._guard:
                self._check_handle(handle)
                rows, _ = self._expert_output(expert_output, handle)
            renewed = self.renew(handle, topk_weights)
            assert self._routing_only is not None
            return self._routing_only.combine(rows, renewed, shared=shared)
        combiner = self._combiner_of(handle)
        if combiner is not self:
            return combiner.combine(expert_output, handle, shared=shared)
        with self._guard:
            self._check_handle(handle)
            rows, order = self._expert_output(expert_output, handle)
            check_shared(self.geometry, self.context.device, shared, handle.num_tokens)
            self._check_combines(handle)
            self._combine_send(rows, handle, shared, order)
            return self._combine_recv(handle, shared)

    @by_one_thread
    def renew(self, handle: DispatchHandle, topk_weights: torch.Tensor | None = None) -> DispatchHandle:
        """A handle for one more combine of the rows of `handle`: sends its routing alone, in a step of its own.

        Collective. `combine`, or `combine_send` and `combine_recv`, take what it returns. `handle` may be of any
        earlier dispatch. `combine` calls it by itself for a handle that was combined before, and with `topk_weights`;
        not for a handle older than the last two dispatches that was never combined.

        Args:
            handle: of this dispatcher, made with `reusable_handles`.
            topk_weights: fp32 `[T, K]`; None for the dispatch's weights.

        Raises: as `dispatch`.
        """
        with self._guard:
            topk_idx, own_weights = self._routing_of(handle)
            if handle._stages_done < RECEIVED:
                raise ValueError("handle: expected dispatch_recv of it first")
        routing_only = self._routing_only
        assert routing_only is not None
        weights = own_weights if topk_weights is None else topk_weights
        return routing_only.send_routing(topk_idx, weights, handle.positions, self.geometry.row_capacity)

    @by_one_thread
    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        scales_in_record: bool = False,
        gsf: torch.Tensor | None = None,
    ) -> DispatchHandle:
        """First half of `dispatch`: everything that does not wait for the peers' tokens.

        Memory has two halves, used in turn. Before it writes into a half, it waits until each peer has combined the
        dispatch before the last one, or, where that is not combined, until each peer calls this. So ranks must agree on
        whether they call this or the combine of the last dispatch first: otherwise each waits for the other until its
        timeout.

        `gsf`, fp32 `[1]` on the device, is the encode scale of `nvfp4` tokens in place of `1 / input_scale`.

        Raises as `dispatch`, and `ValueError` in a capture where the transport cannot be captured.
        """
        check_flag("scales_in_record", scales_in_record)
        timeout_ns = self._begin_dispatch()
        with self._guard:
            return self._dispatch_send(x, topk_idx, topk_weights, timeout_ns, scales_in_record, gsf)

    def _begin_dispatch(self) -> int:
        """What comes before anything of a dispatch can fail, and how long its kernels wait for a peer."""
        context = self.context
        if not self._capturable:
            context._check_no_capture()
        timeout_ns = context.timeout_ns if self._stepped else context.startup_timeout_ns
        self._exchange.expect_dispatch(timeout_ns)
        return timeout_ns

    def _dispatch_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        timeout_ns: int,
        scales_in_record: bool = False,
        gsf: torch.Tensor | None = None,
    ) -> DispatchHandle:
        """`dispatch_send` after `_begin_dispatch`, for a caller that aborts peers on an error."""
        context, geometry, exchange = self.context, self.geometry, self._exchange
        if self._generation != context.generation:
            raise self._of_another_generation()
        device = context.device
        check_tokens(geometry, device, x, topk_idx, topk_weights)
        if scales_in_record and not exchange.can_keep_scales_in_record:
            raise ValueError("scales_in_record: expected False, this dispatcher copies scales as they arrive")
        if gsf is not None:
            check_gsf(geometry, device, gsf)
        num_tokens = x.shape[0]
        # Later stages may write it outside of an inference mode in which this one runs.
        with torch._C._InferenceMode(False):  # which takes no call of a Python function
            buffers = exchange.recv_memory.allocate(scales_in_record=scales_in_record)
            handle = DispatchHandle(
                geometry,
                torch.empty(1, dtype=torch.int32, device=device),
                buffers.positions,
                torch.empty(num_tokens, dtype=torch.int32, device=device),
                num_tokens,
                timeout_ns,
                scales_in_record,
                _buffers=buffers,
            )
            if self._routing_only is not None:
                handle.topk_idx, handle.topk_weights = topk_idx.clone(), topk_weights.clone()
        tokens = x, topk_idx.contiguous(), topk_weights.contiguous(), self._gsf if gsf is None else gsf
        exchange.dispatch_send(handle, tokens)
        return handle

    @by_one_thread
    def dispatch_recv(self, handle: DispatchHandle) -> DispatchedTokens:
        """Second half of `dispatch`: wait for the peers' tokens and group them."""
        with self._guard:
            self._check_handle(handle)
            handle._check_next("dispatch_recv")
            return self._dispatch_recv(handle)

    def _dispatch_recv(self, handle: DispatchHandle, order: LaunchOrder = IN_ORDER) -> DispatchedTokens:
        """`dispatch_recv` with a handle of this dispatcher, for a caller that aborts peers on an error."""
        handle._stages_done = RECEIVED
        exchange = self._exchange
        exchange.dispatch_recv(handle)
        self._stepped = True
        if self._on_cpu:
            self.context._raise_failure()
        buffers, handle._buffers = handle._buffers, None
        assert buffers is not None
        geometry = exchange.geometry
        fmt, rows, scales = geometry.token_format, buffers.rows, buffers.scales
        landed_rows, landed_scales = self.context.landing_views.get(self.exchange_id) or exchange.landed()
        if handle.scales_in_record:
            scales = landed_scales
        elif scales is not None and fmt.swizzled:
            assert fmt.scale_dtype is not None
            scales = scales.view(fmt.scale_dtype)
        return DispatchedTokens._of(
            format=fmt,
            rows=landed_rows if rows is None else rows.view(fmt.quant_dtype),
            scales=scales,
            row_scale=buffers.row_scale,
            row_index=None if geometry.contiguous else buffers.row_index,
            group_offsets=buffers.group_offsets,
            group_scale_offsets=buffers.group_scale_offsets if fmt.swizzled else None,
            expert_ids=self._expert_ids,
            capacity=geometry.row_capacity,
            num_columns=geometry.hidden,
            num_active_experts=geometry.num_local_experts,
            scales_in_record=handle.scales_in_record,
            expected_rows=self.geometry.expected_rows,
            order=order,
            handle=handle,
        )

    @by_one_thread
    def dispatch_recv_padded(
        self,
        handle: DispatchHandle,
        out: PaddedRows,
        *,
        scales_at: int | None = None,
        statistics: torch.Tensor | None = None,
    ) -> None:
        """`dispatch_recv` into a block of rows for each expert; of dispatchers with gathered rows.

        Args:
            handle: of `dispatch_send`. No combine may follow with it: rows go home by a dispatch of routing alone
                (`DispatchHandle.for_rows`).
            out: written, as long as no failure is recorded.
            scales_at: bytes from the start of a record to the scales of `out`; None for where the format has them.
            statistics: int32 `[E]`, to which the rows of each expert are added.

        Raises: as `dispatch`.
        """
        with self._guard:
            self._check_handle(handle)
            self._exchange.check_padded()
            if self.geometry.contiguous:
                raise ValueError("out: expected a dispatcher with mode='gathered' for padded rows")
            at = check_padded(self.geometry, self.context.device, out, scales_at, statistics)
            handle._check_next("dispatch_recv")
            handle._stages_done = ENDED
            self._exchange.dispatch_recv_padded(handle, out, at, statistics)
            handle._buffers = None
            self._stepped = True
            self.context._raise_on_cpu()

    @by_one_thread
    def combine_send(
        self, expert_output: torch.Tensor | CombineSink, handle: DispatchHandle, *, out: torch.Tensor | None = None
    ) -> None:
        """First half of `combine`: reduce here and send the partial results home.

        `out` is what `combine_recv` will write and return: bf16 `[T, H]`, contiguous, at a multiple of 16 bytes; None
        for a new tensor.
        """
        combiner = self._combiner_of(handle)
        if combiner is not self:
            return combiner.combine_send(expert_output, handle, out=out)
        with self._guard:
            self._check_handle(handle)
            rows, _ = self._expert_output(expert_output, handle)
            if out is not None:
                check_out(self.geometry, self.context.device, out, handle.num_tokens)
            self._check_combines(handle)
            self._enter_combine(handle, out)
            self._exchange.combine_send(handle, rows)
            handle._buffers = None

    def _expert_output(
        self, expert_output: torch.Tensor | CombineSink, handle: DispatchHandle
    ) -> tuple[torch.Tensor, LaunchOrder]:
        """The rows of `expert_output`, checked, and `CombineSink.order`."""
        if isinstance(expert_output, CombineSink):
            if expert_output.handle is not handle:
                raise ValueError("expert_output: expected a CombineSink of the same handle, got one of another")
            rows, order = expert_output.rows, expert_output.order
            check_kind("expert_output.order", order, LaunchOrder)
        else:
            rows, order = expert_output, IN_ORDER
        check_expert_output(self.geometry, self.context.device, rows, handle.num_rows)
        return rows, order

    def _check_combines(self, handle: DispatchHandle) -> None:
        """Raise `ValueError` unless `combine_send` is next, which receives the routing of rows that came before."""
        handle._check_next("combine_send" if handle.num_rows is None else "dispatch_recv")

    def _enter_combine(self, handle: DispatchHandle, out: torch.Tensor | None = None) -> None:
        """Note that `combine_send` begins, and make memory for the sum before this rank sends (`RecvBuffers`)."""
        if handle.num_rows is not None:
            self._stepped = True
        handle._stages_done = COMBINE_SENT
        if out is None:
            shape = handle.num_tokens, self.geometry.output_hidden
            with torch._C._InferenceMode(False):  # which takes no call of a Python function
                out = torch.empty(shape, dtype=torch.bfloat16, device=self.context.device)
        handle._output = out

    def _combine_send(
        self, rows: torch.Tensor, handle: DispatchHandle, shared: torch.Tensor | None, order: LaunchOrder
    ) -> None:
        """`combine_send` of checked rows where `_combine_recv` comes next and adds `shared`.

        For a caller that aborts peers on an error.
        """
        self._enter_combine(handle)
        self._exchange.combine_at_once(handle, rows, shared, order)
        handle._buffers = None

    @by_one_thread
    def combine_recv(self, handle: DispatchHandle, *, shared: torch.Tensor | None = None) -> torch.Tensor:
        """Second half of `combine`: wait for the partial results and sum them; bf16 `[T, H]`.

        After a failure the result is NaN. Where partial results are awaited token by token, tokens that were complete
        before the failure keep their sums.
        """
        combiner = self._combiner_of(handle)
        if combiner is not self:
            return combiner.combine_recv(handle, shared=shared)
        with self._guard:
            self._check_handle(handle)
            check_shared(self.geometry, self.context.device, shared, handle.num_tokens)
            handle._check_next("combine_recv")
            return self._combine_recv(handle, shared)

    def _combine_recv(self, handle: DispatchHandle, shared: torch.Tensor | None) -> torch.Tensor:
        """`combine_recv` with a handle of this dispatcher, for a caller that aborts peers on an error."""
        handle._stages_done = ENDED
        self._exchange.combine_recv(handle, shared)
        y, handle._output = handle._output, None
        if self._on_cpu:
            self.context._raise_failure()
        assert y is not None
        return y

    def _routing_of(self, handle: DispatchHandle) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing that `handle` keeps."""
        self._check_handle(handle)
        if handle.topk_idx is None or handle.topk_weights is None:
            raise ValueError("handle: expected one of a dispatcher with reusable_handles=True")
        return handle.topk_idx, handle.topk_weights

    def _combiner_of(self, handle: object) -> TokenDispatcher:
        """Whose combine takes `handle`: with one of `renew`, that of the dispatcher of routing alone."""
        routing = self._routing_only
        if routing is not None and isinstance(handle, DispatchHandle) and handle.geometry is routing.geometry:
            return routing
        return self

    def _took_steps_as(self, other: TokenDispatcher) -> None:
        """Wait for peers as long as `other`, which this one replaces after the death of a rank.

        On a GPU the first step may compile kernels for the ranks that are left, as a layer's first step does.
        """
        self._stepped = other._stepped and self.context.device.type == "cpu"

    def _use(self, backend: ExchangeBackend) -> None:
        """Take the kernels of `backend` from the next step on, in place of those that were chosen."""
        self._exchange = choose_exchange(self.context, self.geometry, self.exchange_id, self._host_capacity, backend)

    def _take_ids_of(self, router: RouterIds) -> None:
        """Take the ids of `router` from the next step on, if the kernels do: `geometry.router_ids` tells."""
        if self._exchange.takes_router_ids and self._routing_only is None and not self.geometry.accepts_repeats:
            self.geometry = replace(self.geometry, router_ids=router)
            self._use(self._exchange.backend)

    def _of_another_generation(self) -> ValueError:
        return ValueError(
            f"context: its ranks have changed since this dispatcher was made (generation {self._generation}, now "
            f"{self.context.generation}); make a new one, and capture graphs anew"
        )

    def _check_handle(self, handle: DispatchHandle) -> None:
        if self._generation != self.context.generation:
            raise self._of_another_generation()
        if not isinstance(handle, DispatchHandle):
            raise ValueError(f"handle: expected a DispatchHandle, got {type(handle).__name__}")
        if handle.geometry is not self.geometry:
            raise ValueError("handle: it belongs to another dispatcher")


class RoutingDispatcher(TokenDispatcher):
    """The exchange of routing alone, for combines of rows that an earlier dispatch brought.

    Args: those of `TokenDispatcher`: `max_tokens_per_rank` and `sizes`, where `output_size` is the width of rows.
    """

    def __init__(self, context: ExpertParallelContext, *, max_tokens_per_rank: int, **sizes: Any) -> None:
        super().__init__(
            context,
            hidden_size=ROUTING_ONLY_HIDDEN,
            max_tokens_per_rank=max_tokens_per_rank,
            mode="gathered",
            kernel_prefix="combine_",
            agreed=True,
            **sizes,
        )
        self._no_tokens = torch.zeros(
            max_tokens_per_rank, ROUTING_ONLY_HIDDEN, dtype=torch.bfloat16, device=context.device
        )

    def send_routing(
        self,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        positions: torch.Tensor,
        num_rows: int,
        brought_by: DispatchHandle | None = None,
    ) -> DispatchHandle:
        """The handle for one combine of `num_rows` rows that lie at `positions`; see `DispatchHandle.for_rows`."""
        routing = self.dispatch_send(self._no_tokens[: topk_idx.shape[0]], topk_idx, topk_weights)
        return routing.for_rows(positions, num_rows, brought_by)


def _is_combined(handle: object) -> bool:
    return isinstance(handle, DispatchHandle) and handle._combined


def _check_slots(num_slots: int | None) -> None:
    if num_slots is not None:
        check_integer("num_slots", num_slots, high=MAX_EXPERTS)
