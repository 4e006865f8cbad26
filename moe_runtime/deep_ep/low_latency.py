"""Low latency over a `TokenDispatcher`: rows in `[E_local, W * max_tokens, H]`, weights first given at combine.

A token travels once to a rank, whatever the number of its experts there, and is copied to the rows of its experts where
it arrives. Combine sends the routing and the weights once more, in a record without a token (`RoutingDispatcher`),
weights and sums the rows of a token at the rank of its experts, and sends one partial sum home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, MXFP8, NVFP4, TokenFormat


@dataclass(frozen=True)
class Payload:
    """What travels for a token, and how its scales come out.

    Attributes:
        format: the exchange's own format; `bf16` for tokens that are quantized before it.
        scales: how scales come out.
        quant_dtype: of the rows that come out.
        round_scale: e4m3 with fp32 scales that are powers of two, quantized before the exchange.
    """

    format: TokenFormat
    scales: PaddedScales
    quant_dtype: torch.dtype
    round_scale: bool = False

    @property
    def row_format(self) -> TokenFormat:
        """Of the rows that come out."""
        return FP8_BLOCK if self.round_scale else self.format


PLAIN = Payload(BF16, PaddedScales.NONE, torch.bfloat16)
FP8 = Payload(FP8_BLOCK, PaddedScales.COLUMNS, torch.float8_e4m3fn)
FP8_ROUNDED = Payload(BF16, PaddedScales.COLUMNS, torch.float8_e4m3fn, round_scale=True)
FP8_UE8M0 = Payload(BF16, PaddedScales.PACKED_COLUMNS, torch.float8_e4m3fn, round_scale=True)
MX = Payload(MXFP8, PaddedScales.ROWS, torch.float8_e4m3fn)
NV = Payload(NVFP4, PaddedScales.SWIZZLED, torch.uint8)


class LowLatencyHandle(tuple[object, ...]):
    """What a dispatch leaves for its combines, as often as they are called.

    As a tuple it is DeepEP's: `src_info` int32 `[E_local, W * max]`, the token of each row at its rank; `layout_range`
    int64 `[E_local, W]`, `first row << 32 | rows` of each source; `max`; `H`; `E`.

    Attributes:
        positions: int32 `[W * max, K]`, row of each (landing slot, k) in `[E_local * W * max]`, -1 for none.
        native: of the dispatch itself.
        exchange: where it belongs.
    """

    positions: torch.Tensor
    native: DispatchHandle
    exchange: LowLatencyExchange

    @property
    def num_tokens(self) -> int:
        """Of this rank."""
        return self.native.num_tokens

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What kernels of combines read."""
        return self.positions, self.native.epoch

    @property
    def is_received(self) -> bool:
        """Whether the rows have been received: not before the hook of the dispatch, if it gave one."""
        return self.native._ended


class LowLatencyExchange:
    """Dispatch and combine of low latency for one set of sizes. All calls are collective, none waits for the host.

    Args:
        context: its own; nothing else is registered there.
        max_tokens: most tokens of a rank.
        hidden: `H`, a multiple of 128.
        num_experts: `E`, a multiple of the number of ranks.
        top_k: experts of a token.
    """

    def __init__(
        self, context: ExpertParallelContext, max_tokens: int, hidden: int, num_experts: int, top_k: int
    ) -> None:
        self.context, self.max_tokens, self.hidden = context, max_tokens, hidden
        self.num_experts, self.top_k = num_experts, top_k
        self._sizes: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "max_tokens_per_rank": max_tokens,
            "output_size": hidden,
            "accepts_repeats": True,
        }
        self._dispatchers: dict[tuple[str, int], TokenDispatcher] = {}
        # The widest first: the memory for it suffices for all others.
        self._dispatcher("bf16", hidden)
        self._combiner = RoutingDispatcher(context, **self._sizes)
        context.allocate()
        self._no_weights = torch.zeros(max_tokens, top_k, dtype=torch.float32, device=context.device)
        self._scratch: list[torch.Tensor] = []
        self._scratch_at = 0

    @property
    def num_slots(self) -> int:
        """`W * max_tokens`, rows of each local expert."""
        return self.context.world_size * self.max_tokens

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.context.world_size

    def _dispatcher(self, fmt: str, words: int) -> TokenDispatcher:
        key = fmt, words
        if key not in self._dispatchers:
            self._dispatchers[key] = TokenDispatcher(
                self.context,
                hidden_size=words,
                token_format=fmt,
                mode="gathered",
                kernel_prefix="dispatch_",
                agreed=self.context.allocated,
                **self._sizes,
            )
        return self._dispatchers[key]

    def dispatch_send(
        self, x: torch.Tensor, topk_idx: torch.Tensor, payload: Payload, gsf: torch.Tensor | None = None
    ) -> _Dispatch:
        """Quantize and send bf16 `x` `[T, H]`; `finish` of what comes back receives.

        `gsf` fp32 `[1]` is the encode scale of NVFP4 tokens.
        """
        packed = _rounded_fp8(x) if payload.round_scale else x
        dispatcher = self._dispatcher(payload.format.name, packed.shape[1])
        scales_at = self.hidden if payload.round_scale else dispatcher.geometry.record.scales_offset
        handle = dispatcher.dispatch_send(packed, topk_idx, self._no_weights[: x.shape[0]], gsf=gsf)
        return _Dispatch(self, dispatcher, handle, payload, scales_at)

    def combine_send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        out: torch.Tensor,
    ) -> DispatchHandle:
        """Send what `combine_recv` sums into `out` bf16 `[T, H]`; `x` bf16 `[E_local, W * max, H]`."""
        rows = x.view(-1, self.hidden)
        renewed = self._combiner.send_routing(topk_idx, topk_weights, handle.positions, rows.shape[0], handle.native)
        self._combiner.combine_send(rows, renewed, out=out)
        return renewed

    def combine_recv(self, renewed: DispatchHandle) -> torch.Tensor:
        """bf16 `[T, H]`."""
        return self._combiner.combine_recv(renewed)

    def scratch(self) -> torch.Tensor:
        """bf16 `[E_local, W * max, H]`, made when it is first asked for: where callers put rows for `zero_copy`."""
        if len(self._scratch) == self._scratch_at:
            shape = (self.num_local_experts, self.num_slots, self.hidden)
            with torch.inference_mode(False):  # it stays, and callers write it in any mode
                self._scratch.append(torch.empty(shape, dtype=torch.bfloat16, device=self.context.device))
        return self._scratch[self._scratch_at]

    def leave_scratch(self) -> None:
        """Take the other of two from now on, as DeepEP does: a combine may still read this one."""
        self._scratch_at = 1 - self._scratch_at


class _Dispatch:
    """A dispatch between its halves, with the memory that its second half fills."""

    def __init__(
        self,
        exchange: LowLatencyExchange,
        dispatcher: TokenDispatcher,
        native: DispatchHandle,
        payload: Payload,
        scales_at: int,
    ) -> None:
        self._exchange, self._dispatcher, self._native = exchange, dispatcher, native
        self._payload, self._scales_at = payload, scales_at
        hidden, fmt = exchange.hidden, payload.row_format
        self.rows = PaddedRows.allocate(
            exchange.num_local_experts,
            exchange.num_slots,
            fmt.quant_bytes(hidden),
            exchange.context.world_size,
            exchange.top_k,
            device=exchange.context.device,
            kind=payload.scales,
            num_scales=fmt.scale_columns(hidden),
        )

    @property
    def tokens(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rows, or rows and scales, in the layouts that `Buffer.low_latency_dispatch` documents."""
        rows, scales = self.rows.rows.view(self._payload.quant_dtype), self.rows.scales
        if scales is None:
            return rows
        if self._payload.scales == PaddedScales.SWIZZLED:
            # As FlashInfer's grouped GEMM over masked rows has them.
            return rows.permute(1, 2, 0), scales.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)
        return rows, scales

    @property
    def handle(self) -> LowLatencyHandle:
        """For combine, once `finish` has run."""
        exchange, rows = self._exchange, self.rows
        sizes = exchange.max_tokens, exchange.hidden, exchange.num_experts
        handle = LowLatencyHandle((rows.source_tokens, rows.layout_range, *sizes))
        handle.positions, handle.native, handle.exchange = rows.positions, self._native, exchange
        return handle

    def finish(self, statistics: torch.Tensor | None) -> None:
        """Receive into `rows`; adds the tokens of each local expert to int32 `statistics` `[E_local]`."""
        self._dispatcher.dispatch_recv_padded(self._native, self.rows, scales_at=self._scales_at, statistics=statistics)


def _rounded_fp8(x: torch.Tensor) -> torch.Tensor:
    """bf16 words `[T, H / 2 + 2 V]`: e4m3 quants and fp32 scales that are powers of two, `amax / 448` rounded up."""
    blocks = x.float().unflatten(1, (-1, FP8_BLOCK.block))
    ideal = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448
    # The next power of two: the exponent, one more where the mantissa is not 0.
    scales = ((ideal.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    quants = (blocks / scales[:, :, None]).to(torch.float8_e4m3fn).view(x.shape)
    words = [quants.view(torch.bfloat16), scales.view(torch.bfloat16)]
    rest = -(words[0].shape[1] + words[1].shape[1]) % 16
    return torch.nn.functional.pad(torch.cat(words, dim=1), (0, rest))
