"""The exchange in CUDA C++, for Hopper: an `ExchangeBackend` with the memory and the bits of the others.

Ranks may therefore differ in which backend they run. `plan.py` says which layers the kernels take and chooses
their sizes.

`dispatch_send` quantizes a token, builds its record in shared memory and copies it, whole, to each rank that holds one
of its experts. `recv_count`, `recv_permute` and `recv_scales` wait for tokens, group their rows by expert, and copy
rows and scales unless the GEMM reads them where they landed. `combine_send` sums the rows of a token on this rank and
copies the partial result home. `combine_recv` sums over ranks in a fixed order. A kernel may begin while the one before
it drains, unless SMs are to be left free (`num_sms`). A rank without peers waits for nobody: `one_rank_combine` does
its combine, and `one_rank_dispatch` its dispatch of few tokens.

Bytes over the links decide the time from 1 MB a peer on: `record_bytes` for each (token, rank that holds one of its
experts), and `partial_bytes` for each of those on the way home. 4 H200s give 263 GB/s out of a rank with 1 MB for each
peer and 350 GB/s with 40 MB. Below 0.25 MB latency is all there is (launch/results/links_h200x4.json).

Measured, dispatch + combine of NVFP4 tokens and bf16 partial results, us at 8 / 128 / 4096 tokens a rank:

    2 H200s, half of 256 experts    7.9 + 8.0 / 11.5 + 13.7 / 68.8 + 204      (launch/results/h200x2.json)
    4 H200s, 256 experts            8.4 + 8.3 / 16.1 + 23.9 / 157 + 490       (launch/results/h200x4.json)
    8 H200s, older kernels          17.3 + 11.2 / 31.7 + 37.9 / 367 + 847    (launch/results/h200x8.json)

What was tried and what it gave, and why sizes are as they are: `kernels/exchange/notes.md`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from moe_runtime.comm.signals import COMBINED
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory, OneRankKernels, RecvBuffers
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.macros import (
    combine_macros,
    dispatch_macros,
    one_rank_combine_macros,
    one_rank_dispatch_macros,
    recv_macros,
)
from moe_runtime.kernels.exchange.padded import place_padded_rows
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.exchange.plan import ONE_RANK_SUM_THREADS, WARP, required_plan
from moe_runtime.kernels.formats.number_formats import FormatCode
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder
from moe_runtime.kernels.nvrtc import Defines, int64, launch, most_sms


def can_keep_scales_in_record(geometry: ExchangeGeometry) -> bool:
    """For formats with a scale byte per block, where rows stay in their records too."""
    return geometry.token_format.swizzled and not geometry.contiguous


def allocate_counts(geometry: ExchangeGeometry, device: torch.device) -> torch.Tensor | None:
    """Int32 `[chunks, E]`, the rows of each chunk and expert; None where there is one chunk."""
    chunks, experts = required_plan(geometry).num_chunks, max(geometry.num_local_experts, 1)
    return torch.empty((chunks, experts), dtype=torch.int32, device=device) if chunks > 1 else None


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows where each starts at a multiple of 16 bytes: themselves, or a copy."""
    fits_already = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return rows if fits_already else rows.clone(memory_format=torch.contiguous_format)


def _counter(context: ExchangeMemory, number: int) -> ctypes.c_int64:
    """Where one of the context's counters lies; making a tensor of it in every step takes ten times as long."""
    return int64(context.counters.data_ptr() + number * context.counters.element_size())


def _flags_come_last(context: ExchangeMemory) -> bool:
    """Whether a flag is seen after all that it stands for, so that its waiter may begin before the sender has ended.

    The collective transport stores by torch's kernels, flags and counts in no order.
    """
    return context.heap.directly_mapped


def _flags_are_unordered(geometry: ExchangeGeometry) -> bool:
    """Whether a dispatch may be one of `ONE_RANK`, whose flags say nothing before it has ended."""
    return required_plan(geometry).one_rank


def dispatch_send(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    starts: torch.Tensor,
    x_TH: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    gsf: torch.Tensor | None,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    timeout_ns: int,
) -> None:
    """See `interface.ExchangeBackend`."""
    send_records(
        geometry,
        count_tag,
        (x_TH, topk_idx_TK, topk_weights_TK, gsf),
        [starts, context.landing_pointers, context.token_flags_pointers, context.signal_pointers],
        [context.epoch, handle_epoch, num_parts_T, context.error, context.latch, context.counters],
        halves=(geometry.landing_half(context.half_bytes["landing"]), context.half_bytes["token_flags"]),
        await_ready=context.heap.directly_mapped,
        timeout_ns=timeout_ns,
    )


def send_records(
    geometry: ExchangeGeometry,
    count_tag: int,
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    tables: list[torch.Tensor],
    words: list[torch.Tensor],
    *,
    halves: tuple[int, int],
    await_ready: bool,
    timeout_ns: int,
) -> None:
    """Launch `dispatch_send.cu`.

    Args:
        tokens: `x_TH`, `topk_idx_TK`, `topk_weights_TK` and `gsf` of `ExchangeBackend.dispatch_send`.
        tables: `starts`, and where each rank's landing, token flags and signals lie.
        words: epoch, `handle_epoch`, `num_parts_T`, error record, latch and counters.
        halves: bytes from the first half of landing and of token flags to the second.
        await_ready: whether this kernel stores to its peers itself.
        timeout_ns: how long to wait for a peer.
    """
    x_TH, topk_idx_TK, topk_weights_TK, gsf = tokens
    plan, num_tokens, x_TH, device = required_plan(geometry), x_TH.shape[0], aligned(x_TH), x_TH.device
    macros = dispatch_macros(
        geometry,
        ids_64=topk_idx_TK.dtype == torch.int64,
        static_gsf=gsf is not None,
        await_ready=await_ready,
    )
    launch(
        "dispatch_send.cu",
        geometry.kernel_prefix + "dispatch_send",
        macros,
        grid=(plan.send_blocks(num_tokens, most_sms(device)), 1, 1),
        block=plan.team_threads * plan.teams,
        shared_bytes=plan.send_shared_bytes,
        arguments=[
            x_TH,
            int64(x_TH.stride(0)),
            topk_idx_TK,
            topk_weights_TK,
            gsf,
            num_tokens,
            count_tag,
            *tables,
            *words,
            geometry.rank,
            geometry.num_experts,
            geometry.max_tokens,
            int64(halves[0]),
            int64(halves[1]),
            int64(timeout_ns),
        ],
        device=device,
        early=plan.overlaps,
    )


def dispatch_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
) -> None:
    """See `interface.ExchangeBackend`."""
    _group(context, geometry, count_tag, handle_epoch, timeout_ns, buffers, early=_flags_come_last(context))


def _group(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    *,
    early: bool,
) -> None:
    """`dispatch_recv`; `early` as for `_receive`."""
    copies_scales = buffers.scales is not None and geometry.token_format.scale_dtype is not None
    macros = recv_macros(geometry, scales=copies_scales)
    _receive(context, geometry, count_tag, handle_epoch, timeout_ns, buffers, macros, early=early)


def of_one_rank(geometry: ExchangeGeometry) -> OneRankKernels | None:
    """`ONE_RANK` for a rank without peers."""
    return ONE_RANK if required_plan(geometry).one_rank else None


def can_await_tokens(context: ExchangeMemory) -> bool:
    """Where flags come after what they stand for."""
    return _flags_come_last(context)


def dispatch_recv_padded(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    out: PaddedRows,
    scales_at: int,
    statistics: torch.Tensor | None,
) -> None:
    """See `interface.ExchangeBackend`.

    One kernel does it for few tokens whose scales are those of the format. Otherwise rows are copied after they have
    been grouped.
    """
    plan, fmt = required_plan(geometry), geometry.token_format
    wanted = PaddedScales.COLUMNS if fmt.code == FormatCode.FP8_BLOCK else PaddedScales.NONE
    own_rows = out.rows.shape[2] == fmt.quant_bytes(geometry.hidden) and out.kind == wanted and not fmt.swizzled
    early = _flags_come_last(context) and not _flags_are_unordered(geometry)
    if plan.num_chunks > 1 or not own_rows:
        _group(context, geometry, count_tag, handle_epoch, timeout_ns, buffers, early=early)
        found = buffers.row_index, buffers.positions, buffers.group_offsets, handle_epoch
        place_padded_rows(LandedTokens.of(context, geometry, *found), scales_at, out, statistics)
        return
    written = [out.counts, out.source_tokens, out.layout_range, statistics]
    macros = recv_macros(geometry, padded=True)
    step = context, geometry, count_tag, handle_epoch, timeout_ns, buffers
    _receive(*step, macros, early=early, out=out, padded=written)


def _receive(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    macros: Defines,
    *,
    early: bool,
    out: PaddedRows | None = None,
    padded: Sequence[Any] = (),
) -> None:
    """`dispatch_recv` into `buffers`, or, with `out`, into its rows, scales and positions and into `padded`.

    `early` is whether the kernels may begin before the one that sends has ended.
    """
    rows, scales, positions = buffers.rows, buffers.scales, buffers.positions
    if out is not None:
        rows, scales, positions = out.rows, out.scales, out.positions
    plan, copies_scales = required_plan(geometry), scales is not None and geometry.token_format.scale_dtype is not None
    sms, block = most_sms(context.device), plan.recv_warps * WARP
    landing_half = geometry.landing_half(context.half_bytes["landing"])
    early = early and plan.overlaps
    # What both kernels begin and end with.
    memory = [
        context.landing_pointers,
        context.token_flags_pointers,
        context.signal_pointers,
        context.epoch,
        handle_epoch,
        context.error,
        context.latch,
        geometry.rank,
        geometry.max_tokens,
        count_tag,
        geometry.num_slots,
    ]
    limits = [int64(landing_half), int64(context.half_bytes["token_flags"]), int64(timeout_ns)]
    local = [geometry.first_expert, geometry.num_local_experts]
    if plan.num_chunks > 1:
        launch(
            "dispatch_recv.cu",
            geometry.kernel_prefix + "recv_count",
            macros,
            grid=(plan.count_blocks(), 1, 1),
            block=block,
            arguments=[buffers.counts, *memory, *local, *limits],
            device=context.device,
            early=early,
        )
    shares, split = plan.place_split(sms, copies_scales, rows is not None)
    written = [buffers.group_offsets, buffers.group_scale_offsets, buffers.row_index, positions]
    copies = [rows, scales, buffers.row_scale]
    sizes = [
        plan.num_chunks,
        split,
        shares,
        *local,
        geometry.row_capacity,
        landing_half // geometry.record.record_bytes,
    ]
    launch(
        "dispatch_recv.cu",
        geometry.kernel_prefix + "recv_permute",
        macros,
        grid=(plan.place_blocks(split, padded=out is not None), 1, 1),
        block=block,
        shared_bytes=plan.place_shared_bytes,
        arguments=[buffers.counts, *written, *copies, *memory, *sizes, *limits, *padded],
        device=context.device,
        early=early,
    )
    if plan.tiled_scales and scales is not None:
        launch(
            "dispatch_recv.cu",
            geometry.kernel_prefix + "recv_scales",
            macros,
            grid=(plan.scales_blocks(sms), 1, 1),
            block=block,
            arguments=[
                buffers.group_offsets,
                buffers.row_index,
                scales,
                context.landing_pointers,
                geometry.rank,
                geometry.num_local_experts,
            ],
            device=context.device,
            early=plan.overlaps,
        )


def combine_send(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    starts: torch.Tensor,
    output_RH: torch.Tensor,
    positions_SK: torch.Tensor,
    handle_epoch: torch.Tensor,
    await_ns: int | None = None,
    received: torch.Tensor | None = None,
) -> None:
    """See `interface.ExchangeBackend`."""
    plan, output_RH = required_plan(geometry), aligned(output_RH)
    is_bf16 = output_RH.dtype == torch.bfloat16
    arrival = []
    if await_ns is not None:
        flags = int64(context.half_bytes["token_flags"])
        arrival = [context.token_flags_pointers, count_tag, flags, int64(await_ns), received]
    launch(
        "combine.cu",
        geometry.kernel_prefix + "combine_send",
        combine_macros(geometry, output_bf16=is_bf16, has_shared=False, await_tokens=await_ns is not None),
        grid=(plan.combine_send_blocks(most_sms(context.device)), 1, 1),
        block=(plan.output_readers + 2 + (await_ns is not None)) * WARP,
        shared_bytes=plan.combine_shared_bytes[is_bf16],
        arguments=[
            output_RH,
            int64(output_RH.stride(0) * output_RH.element_size()),
            positions_SK,
            starts,
            context.landing_pointers,
            context.combine_pointers,
            context.signal_pointers,
            context.epoch,
            handle_epoch,
            context.error,
            context.latch,
            _counter(context, COMBINED),
            geometry.rank,
            geometry.max_tokens,
            geometry.num_slots,
            plan.num_parts,
            plan.part_tokens,
            int64(geometry.landing_half(context.half_bytes["landing"])),
            int64(context.half_bytes["combine"]),
            *arrival,
        ],
        device=context.device,
        early=plan.overlaps and (await_ns is None or not _flags_are_unordered(geometry)),
    )


def combine_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    shared_TH: torch.Tensor | None,
    y_TH: torch.Tensor,
    timeout_ns: int,
    combine_pointers: torch.Tensor | None = None,
) -> None:
    """See `interface.ExchangeBackend`.

    `combine_pointers`, int64 `[W]`, are for some of the tokens: where the partial results of the first of them lie. The
    kernel then waits for all partial results before the first.
    """
    plan, num_tokens, has_shared = required_plan(geometry), y_TH.shape[0], shared_TH is not None
    of_some = combine_pointers is not None
    shared_TH = None if shared_TH is None else aligned(shared_TH)
    launch(
        "combine.cu",
        geometry.kernel_prefix + "combine_recv",
        combine_macros(geometry, output_bf16=True, has_shared=has_shared, of_some=of_some),
        grid=(plan.combine_recv_blocks(num_tokens, most_sms(context.device)), 1, 1),
        block=(plan.partial_readers + 1) * WARP,
        shared_bytes=plan.partial_ring(has_shared).shared_bytes,
        arguments=[
            y_TH,
            shared_TH,
            int64(shared_TH.stride(0) if shared_TH is not None else 0),
            num_parts_T,
            num_tokens,
            combine_pointers if of_some else context.combine_pointers,
            context.signal_pointers,
            context.epoch,
            handle_epoch,
            context.error,
            context.latch,
            geometry.rank,
            0 if of_some else plan.num_parts,
            plan.part_tokens,
            int64(context.half_bytes["combine"]),
            int64(timeout_ns),
        ],
        device=context.device,
        early=not of_some and _flags_come_last(context) and plan.overlaps,
    )


class _OneRank:
    """The kernels of a rank alone: an `interface.OneRankKernels`."""

    def dispatches(self, geometry: ExchangeGeometry, num_tokens: int) -> bool:
        """See `interface.OneRankKernels`."""
        return required_plan(geometry).dispatches_at_once(num_tokens)

    def dispatch(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        gsf: torch.Tensor | None,
        handle_epoch: torch.Tensor,
        num_parts_T: torch.Tensor,
        buffers: RecvBuffers,
    ) -> None:
        """See `interface.OneRankKernels`."""
        plan, num_tokens, x_TH = required_plan(geometry), x_TH.shape[0], aligned(x_TH)
        landing_half = geometry.landing_half(context.half_bytes["landing"])
        copies_scales = buffers.scales is not None and geometry.token_format.scale_dtype is not None
        launch(
            "one_rank_dispatch.cu",
            geometry.kernel_prefix + "one_rank_dispatch",
            one_rank_dispatch_macros(
                geometry,
                ids_64=topk_idx_TK.dtype == torch.int64,
                static_gsf=gsf is not None,
                scales=copies_scales,
            ),
            grid=(plan.one_rank_dispatch_blocks(num_tokens, most_sms(context.device)), 1, 1),
            block=plan.one_rank_threads,
            shared_bytes=plan.one_rank_shared_bytes,
            arguments=[
                x_TH,
                int64(x_TH.stride(0)),
                topk_idx_TK,
                topk_weights_TK,
                gsf,
                num_tokens,
                count_tag,
                buffers.group_offsets,
                buffers.group_scale_offsets,
                buffers.row_index,
                buffers.positions,
                buffers.rows,
                buffers.scales,
                buffers.row_scale,
                context.landing_pointers,
                context.token_flags_pointers,
                context.signal_pointers,
                context.epoch,
                handle_epoch,
                num_parts_T,
                context.error,
                context.latch,
                context.counters,
                geometry.num_slots,
                geometry.row_capacity,
                landing_half // geometry.record.record_bytes,
                int64(landing_half),
                int64(context.half_bytes["token_flags"]),
            ],
            device=context.device,
            early=plan.overlaps,
            all_shared=True,  # as the GEMM that starts beside it, so that they share an SM
        )

    def combine(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        output_RH: torch.Tensor,
        positions_SK: torch.Tensor,
        handle_epoch: torch.Tensor,
        shared_TH: torch.Tensor | None,
        y_TH: torch.Tensor,
        *,
        order: LaunchOrder = IN_ORDER,
    ) -> None:
        """See `interface.OneRankKernels`."""
        plan, num_tokens, output_RH = required_plan(geometry), y_TH.shape[0], aligned(output_RH)
        shared_TH = None if shared_TH is None else aligned(shared_TH)
        is_bf16 = output_RH.dtype == torch.bfloat16
        launch(
            "one_rank_combine.cu",
            geometry.kernel_prefix + "one_rank_combine",
            one_rank_combine_macros(geometry, output_bf16=is_bf16, has_shared=shared_TH is not None),
            grid=(plan.one_rank_combine_blocks(num_tokens, most_sms(context.device)), 1, 1),
            block=ONE_RANK_SUM_THREADS,
            arguments=[
                y_TH,
                shared_TH,
                int64(shared_TH.stride(0) if shared_TH is not None else 0),
                output_RH,
                int64(output_RH.stride(0) * output_RH.element_size()),
                positions_SK,
                num_tokens,
                context.landing_pointers,
                context.signal_pointers,
                context.epoch,
                handle_epoch,
                context.error,
                context.latch,
                int64(geometry.landing_half(context.half_bytes["landing"])),
                int(order.only_rows_pending),
            ],
            device=context.device,
            early=plan.overlaps,
            all_shared=True,  # as the GEMM beside which it starts
        )


ONE_RANK = _OneRank()
