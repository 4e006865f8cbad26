"""`TokenDispatcher`: tokens out to the ranks of their experts and back, with nothing dropped and no host in the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from moe_runtime.arguments import check_is_tensor, check_no_grad
from moe_runtime.comm.signals import COUNT_BITS
from moe_runtime.compiling import not_compiled
from moe_runtime.config import ModeName, MoELayerConfig, check_positive, resolve_mode
from moe_runtime.context import ExpertParallelContext, by_one_thread
from moe_runtime.formats import MAX_ENCODE_SCALE, TokenFormat, ceil_div, token_format
from moe_runtime.geometry import ExchangeGeometry, worst_case_rows
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels.reference_exchange import part_index
from moe_runtime.kernels.runtime import runs_cuda
from moe_runtime.peers import collective_step
from moe_runtime.token_format import RecordLayout

STAGES = ("dispatch_wait", "combine_send", "combine_wait")
"""What is done with a handle, in this order."""
ARRIVALS = ("group_offsets", "group_scale_offsets", "row_index_R", "rows_RQ", "scales", "row_scale_R", "counts")
"""What arrival writes, as `arrive` calls it; None where a format, mode or engine has no such thing."""


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to know of a dispatch. Good for one combine, until the second next dispatch of its context.

    Attributes:
        geometry: of the layer that dispatched.
        epoch: int32 `[1]` on the device: the number of the dispatch in its context.
        positions: int32 `[W * max_tokens, K]`: packed position of each (landing slot, k), -1 for none.
        num_parts: int32 `[T]`: partial results that come home for each of this rank's tokens.
        num_tokens: `T`.
        timeout_ns: how long its kernels wait for a peer: longer in the first step of a layer, which may compile them.
        leave_scales: whether block scales are read where they were sent (`GroupedRows.scales_by_row`).
    """

    geometry: ExchangeGeometry
    epoch: torch.Tensor
    positions: torch.Tensor
    num_parts: torch.Tensor
    num_tokens: int
    timeout_ns: int
    leave_scales: bool = False
    _stages: set[str] = field(default_factory=set, repr=False, compare=False)
    _results: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def enter(self, stage: str) -> None:
        """Note that a stage of the exchange is done with this handle; each may be done once, after the one before."""
        if stage in self._stages:
            raise ValueError(f"handle: {stage} was already called with it")
        before = STAGES[STAGES.index(stage) - 1] if stage != STAGES[0] else None
        if before is not None and before not in self._stages:
            raise ValueError(f"handle: expected {before} to be called with it before {stage}")
        self._stages.add(stage)


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
    """Where a down projection writes the rows that `combine` will take, by packed position.

    Attributes:
        rows: bf16 `[row_capacity, H]`; rows past `group_offsets[G]` are not read.
    """

    def __init__(self, handle: DispatchHandle) -> None:
        geometry = handle.geometry
        self.handle = handle
        self.rows = torch.empty(
            (geometry.row_capacity, geometry.hidden), dtype=torch.bfloat16, device=handle.positions.device
        )


class TokenDispatcher:
    """Dispatch and combine of one layer. While one thread is in a call of it, those of others are refused.

    `torch.compile` leaves `dispatch` and `combine` as they are; their halves are not for what it compiles.

    Args:
        context: the group's memory and signals; shared by all layers.
        hidden_size: `H`, a multiple of the block of both formats.
        num_experts: experts of all ranks; rank `r` owns `E // W + (r < E % W)` of them, contiguous.
        top_k: expert ids per token.
        max_tokens_per_rank: most tokens a rank brings to a step.
        token_format: on the wire and into the GEMM.
        combine_format: of partial results on their way home: `bf16`, `fp8_block` or `mxfp8`.
        mode: `indexed`, `packed` or `auto` (`moe_runtime.config.resolve_mode`).
        expert_row_capacity: (token, expert) rows that may arrive at a rank in a step; None is the worst case, which
            cannot overflow. An overflow is found on the device and raises `CapacityError` on every rank.
        num_sms: most SMs of a GPU that dispatch and combine take at a time, for the others to do something else
            meanwhile; None is all. Changes no bit; without a meaning for the torch engine.
        input_scale: static NVFP4 decode scale of the tokens (`gsf = 1 / input_scale`); None is one scale per token.
        agreed: whether the arguments are known to be equal on all ranks; else they are compared at start-up.

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
        num_sms: int | None = None,
        input_scale: float | None = None,
        agreed: bool = False,
    ) -> None:
        if not isinstance(context, ExpertParallelContext):
            raise ValueError(f"context: expected an ExpertParallelContext, got {type(context).__name__}")
        fmt, wire = _format(token_format, "token_format"), _format(combine_format, "combine_format")
        check_positive("hidden_size", hidden_size)
        check_positive("num_experts", num_experts)
        check_positive("max_tokens_per_rank", max_tokens_per_rank)
        check_positive("top_k", top_k)
        if num_experts > 65535:
            raise ValueError(f"num_experts: expected at most 65535 (ids travel as u16), got {num_experts}")
        if top_k > num_experts:
            raise ValueError(f"top_k: expected at most num_experts = {num_experts}, got {top_k}")
        if mode not in ("auto", "indexed", "packed"):
            raise ValueError(f"mode: expected auto, indexed or packed, got {mode!r}")
        fmt.check_columns(hidden_size, "hidden_size")
        wire.check_columns(hidden_size, "hidden_size")
        if wire.has_row_scale:
            raise ValueError(f"combine_format: expected bf16, fp8_block or mxfp8, got {wire.name}")
        most = min((2**31 - 1) // (context.world_size * top_k), 2**COUNT_BITS - 1)
        if max_tokens_per_rank > most:
            raise ValueError(
                f"max_tokens_per_rank: expected at most {most}, with {context.world_size} ranks and top_k = {top_k} "
                f"(rows are counted in int32, tokens in {COUNT_BITS} bits), got {max_tokens_per_rank}"
            )
        worst = worst_case_rows(num_experts, context.world_size, top_k, max_tokens_per_rank)
        if expert_row_capacity is not None:
            check_positive("expert_row_capacity", expert_row_capacity)
        if num_sms is not None:
            check_positive("num_sms", num_sms)
        if input_scale is not None:
            number = isinstance(input_scale, (int, float)) and not isinstance(input_scale, bool)
            if not (number and fmt.has_row_scale and 0 < input_scale < float("inf")):
                raise ValueError(f"input_scale: expected a positive number, with nvfp4 tokens, got {input_scale!r}")
        self.context = context
        self.geometry = ExchangeGeometry(
            rank=context.rank,
            world_size=context.world_size,
            record=RecordLayout(fmt, hidden_size, top_k),
            combine_format=wire,
            num_experts=num_experts,
            max_tokens=max_tokens_per_rank,
            packed=resolve_mode(mode, max_tokens_per_rank, fmt.name) == "packed",
            row_capacity=min(worst, expert_row_capacity or worst),
            num_sms=num_sms,
            number=context.number_exchange(),
        )
        self._exchange = _exchange(context, self.geometry)
        self._stepped = False
        device = context.device
        self._starts = torch.tensor(self.geometry.starts, dtype=torch.int32, device=device)
        self._expert_ids = torch.arange(self.geometry.num_local_experts, dtype=torch.int32, device=device)
        self._gsf: torch.Tensor | None = None
        if input_scale is not None:
            one = torch.ones(1, dtype=torch.float32, device=device)
            self._gsf = (one / torch.full_like(one, input_scale)).clamp(max=MAX_ENCODE_SCALE)
        arguments = {
            "hidden_size": hidden_size,
            "num_experts": num_experts,
            "top_k": top_k,
            "max_tokens_per_rank": max_tokens_per_rank,
            "token_format": fmt.name,
            "combine_format": wire.name,
            "mode": "packed" if self.geometry.packed else "indexed",
            "expert_row_capacity": self.geometry.row_capacity,
            "input_scale": input_scale,
        }
        context.register(
            agree=None if agreed else arguments, about=f"exchange {self.geometry.number}", **self.geometry.half_bytes()
        )

    @classmethod
    def from_config(
        cls,
        context: ExpertParallelContext,
        config: MoELayerConfig,
        *,
        max_tokens: int | None = None,
        num_slots: int | None = None,
        agreed: bool = False,
    ) -> TokenDispatcher:
        """The exchange of the layer that `config` describes, for steps of `max_tokens` if given.

        With a placement there are `num_slots` instead of its experts.
        """
        return cls(
            context,
            hidden_size=config.hidden_size,
            num_experts=config.num_experts if num_slots is None else num_slots,
            top_k=config.top_k,
            max_tokens_per_rank=config.max_tokens_per_rank if max_tokens is None else max_tokens,
            token_format=config.token_format,
            combine_format=config.combine_format,
            mode=config.mode,
            expert_row_capacity=config.expert_row_capacity,
            num_sms=config.num_sms,
            agreed=agreed,
        )

    @classmethod
    def of_all_sizes(
        cls, context: ExpertParallelContext, config: MoELayerConfig, *, num_slots: int | None = None
    ) -> dict[int, TokenDispatcher]:
        """The exchanges of the layer that `config` describes, for each of its `all_step_sizes`, ascending.

        A step may take any that has room for its tokens, and all ranks have to take the same. That `config` and
        `num_slots` are equal on all ranks is for the layer to compare.
        """
        # The largest first: a context that has room for it has room for all.
        of_size = {
            size: cls.from_config(context, config, max_tokens=size, num_slots=num_slots, agreed=True)
            for size in reversed(config.all_step_sizes)
        }
        return dict(sorted(of_size.items()))

    @not_compiled
    @by_one_thread
    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, leave_scales: bool = False
    ) -> DispatchedTokens:
        """Quantize this rank's tokens, send them to the ranks of their experts, and group what arrives here.

        Collective: every rank calls it, with its own `T` (0 too).

        Args:
            x: bf16 `[T, H]`, last dimension contiguous, `T <= max_tokens_per_rank`.
            topk_idx: int32 or int64 `[T, K]`; -1 is unrouted.
            topk_weights: fp32 `[T, K]`.
            leave_scales: do not copy block scales into the layout of the consumer, where `can_leave_scales`: for
                `grouped_gemm` with prepared weights, which reads them beside the rows. Ranks may differ in it.

        Raises:
            ValueError: an argument of wrong shape, dtype, device or stride; the peers get `PeerAbortedError`.
            MoERuntimeError: what an earlier step, or on CPUs this step, recorded (see `ExpertParallelContext.check`).
        """
        return self.dispatch_wait(self.dispatch_send(x, topk_idx, topk_weights, leave_scales=leave_scales))

    @not_compiled
    @by_one_thread
    def combine(
        self, expert_output: torch.Tensor | CombineSink, handle: DispatchHandle, *, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Weight and sum the experts' rows of each token and bring them home: bf16 `[T, H]`. Collective.

        The same bits on every engine; only of a NaN are sign and payload the machine's.

        Args:
            expert_output: bf16 or fp32 `[row_capacity, H]` by packed position, last dimension contiguous, or a
                `CombineSink` of the same handle; each row is rounded to bf16 first.
            handle: of the dispatch that the rows came from.
            shared: bf16 `[T, H]` output of a shared expert, added first.

        Raises: as `dispatch`.
        """
        self.combine_send(expert_output, handle)
        return self.combine_wait(handle, shared=shared)

    @property
    def can_leave_scales(self) -> bool:
        """Whether block scales can be left where they were sent: those of `nvfp4` and `mxfp8`, by index, on Hopper."""
        geometry = self.geometry
        return geometry.token_format.swizzled and not geometry.packed and self._exchange.LEAVES_SCALES

    @by_one_thread
    def dispatch_send(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, leave_scales: bool = False
    ) -> DispatchHandle:
        """First half of `dispatch`: everything that does not wait for the peers' tokens.

        It waits for each peer to be done with the half of memory that it writes: for its combine of the second last
        dispatch, or, where that is not combined, for its call of this. Ranks may then not differ in what they call
        first of this and the combine of the last dispatch; each would wait for the other until its timeout.
        """
        with collective_step(self.context):
            self._check_tokens(x, topk_idx, topk_weights)
            if leave_scales and not self.can_leave_scales:
                raise ValueError("leave_scales: expected False, this dispatcher copies scales as they arrive")
            num_tokens, device = x.shape[0], self.context.device
            # Written later, maybe outside of the inference mode of now.
            with torch.inference_mode(False):
                handle = DispatchHandle(
                    self.geometry,
                    torch.empty(1, dtype=torch.int32, device=device),
                    torch.empty((self.geometry.num_slots, self.geometry.top_k), dtype=torch.int32, device=device),
                    torch.empty(num_tokens, dtype=torch.int32, device=device),
                    num_tokens,
                    self.context.timeout_ns if self._stepped else self.context.startup_timeout_ns,
                    leave_scales,
                )
                # A kernel that waits for peers may begin while the kernel before it runs, which may use memory that was
                # freed since: what it writes is allocated before this rank sends.
                handle._results.update(self._room_for_arrivals(leave_scales))
            self._exchange.dispatch_send(
                self.context,
                self.geometry,
                self._starts,
                x,
                topk_idx.contiguous(),
                topk_weights.contiguous(),
                self._gsf,
                handle.epoch,
                handle.num_parts,
                handle.timeout_ns,
            )
            if self.context.carrier is not None:
                self.context.carrier.carry_dispatch(
                    self.context,
                    epoch=int(handle.epoch),
                    num_tokens=num_tokens,
                    max_tokens=self.geometry.max_tokens,
                    record_bytes=self.geometry.record.record_bytes,
                    timeout_ns=handle.timeout_ns,
                    landing_half=self._landing_half,
                )
        return handle

    @by_one_thread
    def dispatch_wait(self, handle: DispatchHandle) -> DispatchedTokens:
        """Second half of `dispatch`: wait for the peers' tokens and group them."""
        with collective_step(self.context):
            self._check_handle(handle)
            handle.enter("dispatch_wait")
            geometry, fmt = self.geometry, self.geometry.token_format
            room: dict[str, Any] = {name: handle._results.pop(name, None) for name in ARRIVALS}
            rows, scales = room["rows_RQ"], room["scales"]
            self._exchange.arrive(
                self.context, geometry, handle.epoch, handle.timeout_ns, positions_SK=handle.positions, **room
            )
            self._stepped = True
            self._end()
        if scales is not None and fmt.scale_dtype is not None:
            scales = scales.view(fmt.scale_dtype)
        return DispatchedTokens(
            format=fmt,
            rows=rows.view(fmt.quant_dtype) if rows is not None else self._landing_rows(),
            scales=self._landing_scales() if handle.leave_scales else scales,
            row_scale=room["row_scale_R"],
            row_index=None if geometry.packed else room["row_index_R"],
            group_offsets=room["group_offsets"],
            group_scale_offsets=room["group_scale_offsets"] if fmt.swizzled else None,
            expert_ids=self._expert_ids,
            capacity=geometry.row_capacity,
            num_columns=geometry.hidden,
            num_active_experts=geometry.num_local_experts,
            scales_by_row=handle.leave_scales,
            expected_rows=geometry.expected_rows,
            handle=handle,
        )

    @by_one_thread
    def combine_send(self, expert_output: torch.Tensor | CombineSink, handle: DispatchHandle) -> None:
        """First half of `combine`: reduce here and send the partial results home."""
        output = expert_output.rows if isinstance(expert_output, CombineSink) else expert_output
        with collective_step(self.context):
            self._check_handle(handle)
            if isinstance(expert_output, CombineSink) and expert_output.handle is not handle:
                raise ValueError("expert_output: expected a CombineSink of the same handle, got that of another")
            self._check_output(output)
            handle.enter("combine_send")
            # What `combine_wait` writes, which may begin while the kernel before it runs: made before this rank sends.
            shape = (handle.num_tokens, self.geometry.hidden)
            with torch.inference_mode(False):
                handle._results["y"] = torch.empty(shape, dtype=torch.bfloat16, device=self.context.device)
            self._exchange.combine_send(
                self.context, self.geometry, self._starts, output, handle.positions, handle.epoch
            )
            if self.context.carrier is not None:
                geometry = self.geometry
                self.context.carrier.carry_combine(
                    self.context,
                    epoch=int(handle.epoch),
                    max_tokens=geometry.max_tokens,
                    parts=geometry.parts,
                    row_bytes=geometry.partial_bytes,
                    part_index=part_index(self.context, geometry, self._starts, handle.positions, int(handle.epoch)),
                    timeout_ns=handle.timeout_ns,
                )

    @by_one_thread
    def combine_wait(self, handle: DispatchHandle, *, shared: torch.Tensor | None = None) -> torch.Tensor:
        """Second half of `combine`: wait for the partial results and sum them; bf16 `[T, H]`.

        After a failure it is NaN, but for tokens that had come home before where they come part by part.
        """
        with collective_step(self.context):
            self._check_handle(handle)
            self.check_shared(shared, handle.num_tokens)
            handle.enter("combine_wait")
            y = handle._results.pop("y")
            self._exchange.combine_wait(
                self.context, self.geometry, handle.epoch, handle.num_parts, shared, y, handle.timeout_ns
            )
            self._end()
        return y

    def _room_for_arrivals(self, leave_scales: bool) -> dict[str, torch.Tensor]:
        """Uninitialised memory for what `arrive` writes, by the names of its arguments."""
        geometry, device = self.geometry, self.context.device
        fmt, capacity, experts = geometry.token_format, geometry.row_capacity, geometry.num_local_experts
        room = {
            "row_index_R": torch.empty(capacity, dtype=torch.int32, device=device),
            "group_offsets": torch.empty(experts + 1, dtype=torch.int32, device=device),
            "group_scale_offsets": torch.empty(experts, dtype=torch.int32, device=device),
        }
        if geometry.packed:
            shape = (capacity, fmt.quant_bytes(geometry.hidden))
            room["rows_RQ"] = torch.empty(shape, dtype=torch.uint8, device=device)
        if fmt.has_row_scale:
            room["row_scale_R"] = torch.empty(capacity, dtype=torch.float32, device=device)
        if fmt.swizzled and not leave_scales:
            columns4 = ceil_div(fmt.scale_columns(geometry.hidden), 4)
            blocks = (geometry.scale_blocks, columns4, 32, 4, 4)
            room["scales"] = torch.empty(blocks, dtype=torch.uint8, device=device)
        elif fmt.scale_dtype is not None and not leave_scales:
            linear = (capacity, fmt.scale_columns(geometry.hidden))
            room["scales"] = torch.empty(linear, dtype=fmt.scale_dtype, device=device)
        counts = self._exchange.room_to_count(geometry, device)
        if counts is not None:
            room["counts"] = counts
        return room

    @property
    def _landing_half(self) -> int:
        return self.geometry.landing_half(self.context.half_bytes["landing"])

    def _end(self) -> None:
        """On CPUs a step has ended when the call returns: raise at once what it recorded."""
        if self.context.device.type == "cpu":
            self.context.check()

    def _landing_rows(self) -> torch.Tensor:
        """The landing slots of both halves as rows of quants, one record apart."""
        fmt = self.geometry.token_format
        return self._landing_records()[:, : fmt.quant_bytes(self.geometry.hidden)].view(fmt.quant_dtype)

    def _landing_scales(self) -> torch.Tensor:
        """Their block scales, one record apart."""
        record = self.geometry.record
        assert record.format.scale_dtype is not None
        first = record.scales_offset
        scales = self._landing_records()[:, first : first + record.format.scale_bytes(self.geometry.hidden)]
        return scales.view(record.format.scale_dtype)

    def _landing_records(self) -> torch.Tensor:
        stride = self.geometry.record.record_bytes
        num_rows = self._landing_half // stride + self.geometry.num_slots
        return self.context.heap.tensor("landing")[: num_rows * stride].view(num_rows, stride)

    def _check_handle(self, handle: DispatchHandle) -> None:
        if not isinstance(handle, DispatchHandle):
            raise ValueError(f"handle: expected a DispatchHandle, got {type(handle).__name__}")
        if handle.geometry is not self.geometry:
            raise ValueError("handle: it belongs to another dispatcher")

    def _check_tokens(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        geometry = self.geometry
        self._check_place("x", x)
        if x.ndim != 2:
            raise ValueError(f"x: expected [T, {geometry.hidden}], got shape {list(x.shape)}")
        self._check_matrix("x", x, (x.shape[0], geometry.hidden))
        if x.shape[0] > geometry.max_tokens:
            raise ValueError(
                f"x: expected at most max_tokens_per_rank = {geometry.max_tokens} tokens, got {x.shape[0]}"
            )
        expected = (x.shape[0], geometry.top_k)
        kinds = {"topk_idx": (torch.int32, torch.int64), "topk_weights": (torch.float32,)}
        for (name, dtypes), tensor in zip(kinds.items(), (topk_idx, topk_weights), strict=True):
            self._check_place(name, tensor)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name}: expected shape {list(expected)}, got {list(tensor.shape)}")
            if tensor.dtype not in dtypes:
                raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")

    def check_shared(self, shared: torch.Tensor | None, num_tokens: int) -> None:
        """Raise `ValueError` unless `shared` is None or what `combine` takes for `num_tokens` tokens."""
        if shared is not None:
            self._check_matrix("shared", shared, (num_tokens, self.geometry.hidden))

    def _check_output(self, output: torch.Tensor) -> None:
        shape = (self.geometry.row_capacity, self.geometry.hidden)
        dtypes = (torch.bfloat16, torch.float32)
        self._check_matrix("expert_output", output, shape, dtypes)

    def _check_matrix(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, int],
        dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    ) -> None:
        self._check_place(name, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.shape[0] > 0 and tensor.stride(1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())}")

    def _check_place(self, name: str, tensor: torch.Tensor) -> None:
        check_is_tensor(name, tensor)
        if tensor.device != self.context.device:
            raise ValueError(f"{name}: expected device {self.context.device}, got {tensor.device}")
        check_no_grad(name, tensor)


def _exchange(context: ExpertParallelContext, geometry: ExchangeGeometry) -> Any:
    """What has the functions of this layer: `dispatch_send`, `arrive`, `combine_send`, `combine_wait`.

    And `room_to_count`, for what `arrive` is given as `counts`, and `LEAVES_SCALES`, whether it may be given no scales.
    """
    if context.engine == "torch":
        from moe_runtime.kernels import reference_exchange

        return reference_exchange
    from moe_runtime.kernels import arrive, combine, dispatch, hopper_exchange
    from moe_runtime.kernels.exchange_plan import plan_exchange

    if runs_cuda(context.gemm_engine, context.device) and plan_exchange(geometry) is not None:
        return hopper_exchange
    return SimpleNamespace(
        LEAVES_SCALES=False,
        dispatch_send=dispatch.dispatch_send,
        room_to_count=arrive.room_to_count,
        arrive=arrive.arrive,
        combine_send=combine.combine_send,
        combine_wait=combine.combine_wait,
    )


_format = token_format
