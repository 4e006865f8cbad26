"""The exchange in CUDA C++, for Hopper and Blackwell: an `ExchangeBackend` with the memory and the bits of torch's.

Ranks may therefore differ in which backend they run. `plan.py` says which layers the kernels take and chooses
their sizes.

`dispatch_send` quantizes a token, builds its record in shared memory and copies it, whole, to each rank that holds one
of its experts. `recv_count`, `recv_permute` and `recv_scales` wait for tokens, group their rows by expert, and copy
rows and scales unless the GEMM reads them where they landed. `combine_send` sums the rows of a token on this rank and
copies the partial result home. `combine_recv` sums over ranks in a fixed order. A kernel may begin while the one before
it drains, unless SMs are to be left free (`num_sms`). A rank without peers has kernels of its own (`one_rank_cuda`).

Bytes over the links decide the time from 1 MB a peer on: `record_bytes` for each (token, rank that holds one of its
experts), and `partial_bytes` for each of those on the way home. 4 H200s give 263 GB/s out of a rank with 1 MB for each
peer and 350 GB/s with 40 MB. Below 0.25 MB latency is all there is (launch/results/links_h200x4.json).

Measured, dispatch + combine of NVFP4 tokens and bf16 partial results, us at 8 / 128 / 4096 tokens a rank:

    2 H200s, half of 256 experts    7.9 + 8.0 / 11.5 + 13.7 / 68.8 + 204      (launch/results/h200x2.json)
    4 H200s, 256 experts            8.5 + 8.3 / 16.4 + 24.2 / 157 + 491       (launch/results/h200x4.json)
    8 H200s, older kernels          17.3 + 11.2 / 31.7 + 37.9 / 367 + 847    (launch/results/h200x8.json)

What was tried and what it gave, and why sizes are as they are: `kernels/exchange/notes.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from moe_runtime.comm.signals import COMBINED, PLACED, PLACING
from moe_runtime.kernels.bound_kernel import Address, Argument, BoundKernel, SizedKernel
from moe_runtime.kernels.exchange import one_rank_cuda
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import (
    ExchangeMemory,
    RecvBuffers,
    SentTokens,
    aligned,
    id_arguments,
    kept_by_memory,
    memory_arguments,
)
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.macros import combine_macros, dispatch_macros, own_rows_macros, recv_macros
from moe_runtime.kernels.exchange.one_rank_cuda import OneRankKernels
from moe_runtime.kernels.exchange.padded import place_padded_rows
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.exchange.plan import WARP, required_plan
from moe_runtime.kernels.formats.number_formats import FormatCode
from moe_runtime.kernels.nvrtc import most_sms


def can_keep_scales_in_record(geometry: ExchangeGeometry) -> bool:
    """For formats with a scale byte per block, where rows stay in their records too."""
    return geometry.token_format.swizzled and not geometry.contiguous


def scratch_words(geometry: ExchangeGeometry) -> int:
    """For the rows of each chunk and expert, `[chunks, E]`, and for the places of own rows (own_rows.cuh)."""
    plan = required_plan(geometry)
    return _count_words(geometry) + (plan.own_words if plan.own_rows else 0)


def _count_words(geometry: ExchangeGeometry) -> int:
    chunks = required_plan(geometry).num_chunks
    return chunks * max(geometry.num_local_experts, 1) if chunks > 1 else 0


def _counter(context: ExchangeMemory, number: int) -> Address:
    """Where one of the context's counters lies; making a tensor of it in every step takes ten times as long."""
    return Address(context.counters.data_ptr() + number * context.counters.element_size())


def _flags_come_last(context: ExchangeMemory) -> bool:
    """Whether a flag is seen after all that it stands for, so that its waiter may begin before the sender has ended.

    The collective transport stores by torch's kernels, flags and counts in no order.
    """
    return context.heap.directly_mapped


def _flags_are_unordered(geometry: ExchangeGeometry) -> bool:
    """Whether a dispatch may be one of `one_rank_cuda`, whose flags say nothing before it has ended."""
    return required_plan(geometry).one_rank


def dispatch_send(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    starts: torch.Tensor,
    tokens: SentTokens,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers | None = None,
) -> None:
    """See `interface.ExchangeBackend`."""
    x_TH, topk_idx_TK, topk_weights_TK, gsf = tokens
    sender = _senders(context, geometry, topk_idx_TK.dtype == torch.int64, gsf is not None, buffers is not None)
    changing: dict[str, Argument] = {"starts": starts, "handle_epoch": handle_epoch, "num_parts": num_parts_T}
    if sender.own_rows is not None:
        assert buffers is not None and buffers.scratch is not None
        # A copy behind `place_own_rows` would not be awaited.
        tokens = aligned(x_TH), topk_idx_TK, topk_weights_TK, gsf
        scratch, num_tokens = Address(buffers.scratch.data_ptr() + sender.places_at), topk_idx_TK.shape[0]
        arguments = {"topk_idx": topk_idx_TK, "num_tokens": num_tokens, "starts": starts, "scratch": scratch}
        sender.own_rows.launch(arguments, num_tokens)
        changing |= {"scratch": scratch, "rows": buffers.rows, "scales": buffers.scales}
    send_records(sender.dispatch_send, count_tag, tokens, changing, timeout_ns)


def _places_own_rows(context: ExchangeMemory, geometry: ExchangeGeometry) -> bool:
    return required_plan(geometry).own_rows and context.heap.directly_mapped


def _places_at(geometry: ExchangeGeometry) -> int:
    """Bytes from the start of the scratch memory to that of own_rows.cuh."""
    return 4 * _count_words(geometry)


class _Senders(NamedTuple):
    """What sends; `own_rows` is None where `place_own_rows` is not launched before.

    `places_at` are the bytes from the start of the scratch memory to that of own_rows.cuh.
    """

    own_rows: SizedKernel | None
    dispatch_send: SizedKernel
    places_at: int


@kept_by_memory
def _senders(
    context: ExchangeMemory, geometry: ExchangeGeometry, ids_64: bool, static_gsf: bool, has_buffers: bool
) -> _Senders:
    plan, own_rows = required_plan(geometry), None
    memory = memory_arguments(context, geometry)
    if has_buffers and _places_own_rows(context, geometry):
        kernel = BoundKernel(
            "own_rows.cu",
            geometry.kernel_prefix + "place_own_rows",
            own_rows_macros(geometry, ids_64=ids_64),
            block=plan.own_tokens,
            bound={
                "rank": geometry.rank,
                "first_expert": geometry.first_expert,
                "num_local": geometry.num_local_experts,
                "max_tokens": geometry.max_tokens,
                "counter": _counter(context, PLACED),
                "placing": _counter(context, PLACING),
                **memory,
            },
            device=context.device,
            early=plan.overlaps,
        )
        own_rows = SizedKernel(kernel, plan.own_blocks)
        memory |= {
            "placing": _counter(context, PLACING),
            "first_expert": geometry.first_expert,
            "num_local": geometry.num_local_experts,
            "capacity": geometry.row_capacity,
        }
    memory |= {
        "token_flags": context.token_flags_pointers,
        "counter": context.counters,
        "token_flags_half": context.half_bytes["token_flags"],
    }
    sender = bind_sender(
        geometry,
        context.device,
        memory,
        ids_64=ids_64,
        static_gsf=static_gsf,
        await_ready=context.heap.directly_mapped,
        own_rows=own_rows is not None,
    )
    return _Senders(own_rows, sender, _places_at(geometry))


def bind_sender(
    geometry: ExchangeGeometry,
    device: torch.device,
    memory: Mapping[str, Argument],
    *,
    ids_64: bool,
    static_gsf: bool,
    await_ready: bool,
    own_rows: bool = False,
) -> SizedKernel:
    """`dispatch_send.cu` for `send_records`.

    Args:
        memory: by the names of the kernel's parameters: where each rank's `landing`, `token_flags` and `signals` lie;
            `epoch_ptr`, `error`, `latch` and `counter`; bytes from the first half of landing and of token flags to the
            second, `landing_half` and `token_flags_half`; with OWN_ROWS, arguments of it that stay the same.
        await_ready: whether this kernel stores to its peers itself.
        own_rows: whether `place_own_rows` is launched before.
    """
    plan, sms = required_plan(geometry), most_sms(device)
    sizes = {"rank": geometry.rank, "num_experts": geometry.num_experts, "max_tokens": geometry.max_tokens}
    kernel = BoundKernel(
        "dispatch_send.cu",
        geometry.kernel_prefix + "dispatch_send",
        dispatch_macros(geometry, ids_64=ids_64, static_gsf=static_gsf, await_ready=await_ready, own_rows=own_rows),
        block=plan.team_threads * plan.teams,
        bound={**sizes, **id_arguments(geometry), **memory},
        device=device,
        shared_bytes=plan.send_shared_bytes,
        early=plan.overlaps,
    )
    return SizedKernel(kernel, lambda num_tokens: plan.send_blocks(num_tokens, sms))


def send_records(
    kernel: SizedKernel,
    count_tag: int,
    tokens: SentTokens,
    changing: Mapping[str, Argument],
    timeout_ns: int,
) -> None:
    """Launch `dispatch_send.cu`.

    Args:
        kernel: of `bind_sender`.
        tokens: of this rank.
        changing: `starts`, `handle_epoch` and `num_parts`; behind `place_own_rows`, the arguments of OWN_ROWS that are
            not bound.
        timeout_ns: how long to wait for a peer.
    """
    x_TH, topk_idx_TK, topk_weights_TK, gsf = tokens
    x_TH, num_tokens = aligned(x_TH), x_TH.shape[0]
    arguments = {
        "x_TH": x_TH,
        "x_stride": x_TH.stride(0),
        "topk_idx": topk_idx_TK,
        "topk_weights": topk_weights_TK,
        "static_gsf": gsf,
        "num_tokens": num_tokens,
        "count_tag": count_tag,
        "timeout_ns": timeout_ns,
        **changing,
    }
    kernel.launch(arguments, num_tokens)


def dispatch_recv(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    waits: torch.Tensor | None = None,
) -> None:
    """See `interface.ExchangeBackend`."""
    step = context, geometry, count_tag, handle_epoch, timeout_ns, buffers
    _receive(*step, early=_flags_come_last(context), waits=waits)


def of_one_rank(geometry: ExchangeGeometry) -> OneRankKernels | None:
    """Those of `one_rank_cuda` for a rank without peers."""
    return one_rank_cuda.ONE_RANK if required_plan(geometry).one_rank else None


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
        _receive(context, geometry, count_tag, handle_epoch, timeout_ns, buffers, early=early)
        found = buffers.row_index, buffers.positions, buffers.group_offsets, handle_epoch
        place_padded_rows(LandedTokens.of(context, geometry, *found), scales_at, out, statistics)
        return
    written = {
        "counts": out.counts,
        "source_tokens": out.source_tokens,
        "layout_range": out.layout_range,
        "statistics": statistics,
    }
    step = context, geometry, count_tag, handle_epoch, timeout_ns, buffers
    _receive(*step, early=early, out=out, padded=written)


def _receive(
    context: ExchangeMemory,
    geometry: ExchangeGeometry,
    count_tag: int,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    buffers: RecvBuffers,
    *,
    early: bool,
    out: PaddedRows | None = None,
    padded: Mapping[str, Argument] | None = None,
    waits: torch.Tensor | None = None,
) -> None:
    """`dispatch_recv` into `buffers`, or, with `out`, into its rows, scales and positions and into `padded`.

    `early` is whether the kernels may begin before the one that sends has ended.
    """
    rows, scales, positions = buffers.rows, buffers.scales, buffers.positions
    if out is not None:
        rows, scales, positions = out.rows, out.scales, out.positions
    kernels = _receivers(context, geometry, scales is not None, out is not None, early, waits is not None)
    # Of both kernels.
    shared: dict[str, Argument] = {
        "chunk_counts": buffers.scratch,
        "handle_epoch": handle_epoch,
        "count_tag": count_tag,
        "timeout_ns": timeout_ns,
    }
    # Where waits are counted, both have one more block, which counts in the first of them and has an SM for it.
    if waits is not None:
        shared["waits"] = waits
    if kernels.recv_count is not None:
        kernels.recv_count.launch(shared)
        if waits is not None:
            shared["waits"] = None
    arguments = {
        **shared,
        "group_offsets": buffers.group_offsets,
        "group_scale_offsets": buffers.group_scale_offsets,
        "row_index": buffers.row_index,
        "positions": positions,
        "rows": rows,
        "scales": scales,
        "row_scale": buffers.row_scale,
    }
    if kernels.placed_at is not None:
        assert buffers.scratch is not None
        arguments["placed"] = Address(buffers.scratch.data_ptr() + kernels.placed_at)
    if padded is not None:
        arguments |= padded
    kernels.recv_permute.launch(arguments)
    if kernels.recv_scales is not None:
        kernels.recv_scales.launch(
            {"group_offsets": buffers.group_offsets, "row_index": buffers.row_index, "scales": scales}
        )


class _Receivers(NamedTuple):
    """The kernels of `dispatch_recv.cu` that are launched.

    `placed_at` are the bytes from the start of the scratch memory to `OwnPlaces.placed`, None where own rows are not
    placed before.
    """

    recv_count: BoundKernel | None
    recv_permute: BoundKernel
    recv_scales: BoundKernel | None
    placed_at: int | None


@kept_by_memory
def _receivers(
    context: ExchangeMemory, geometry: ExchangeGeometry, has_scales: bool, padded: bool, early: bool, waits: bool
) -> _Receivers:
    """`padded` and `waits` as of `recv_macros`, `early` as of `_receive`; `has_scales` says that there is memory for
    scales."""
    plan, sms, own_rows = required_plan(geometry), most_sms(context.device), _places_own_rows(context, geometry)
    copies_scales = has_scales and geometry.token_format.scale_dtype is not None
    memory = memory_arguments(context, geometry)
    experts = {"rank": geometry.rank, "num_local": geometry.num_local_experts, "landing": memory["landing"]}
    waiting = {
        **experts,
        **memory,
        "max_tokens": geometry.max_tokens,
        "num_slots": geometry.num_slots,
        "first_expert": geometry.first_expert,
        "token_flags": context.token_flags_pointers,
        "token_flags_half": context.half_bytes["token_flags"],
    }
    shares, split = plan.place_split(max(1, sms - waits), copies_scales, padded or geometry.contiguous)
    placing = {
        "chunks": plan.num_chunks,
        "capacity": geometry.row_capacity,
        "split": split,
        "shares": shares,
        "first_row": memory["landing_half"] // geometry.record.record_bytes,
    }

    def made(name: str, blocks: int, bound: Mapping[str, Argument], early: bool, shared_bytes: int = 0) -> BoundKernel:
        # Scales of padded rows are copied as they are, if they have memory for them.
        macros = recv_macros(geometry, scales=padded or copies_scales, padded=padded, waits=waits, own_rows=own_rows)
        return BoundKernel(
            "dispatch_recv.cu",
            geometry.kernel_prefix + name,
            macros,
            block=plan.recv_warps * WARP,
            grid=(blocks, 1, 1),
            bound=bound,
            device=context.device,
            shared_bytes=shared_bytes,
            early=early and plan.overlaps,
        )

    place_blocks = plan.place_blocks(split, padded=padded) + waits
    return _Receivers(
        made("recv_count", plan.count_blocks() + waits, waiting, early) if plan.num_chunks > 1 else None,
        made("recv_permute", place_blocks, waiting | placing, early, plan.place_shared_bytes),
        made("recv_scales", plan.scales_blocks(sms), experts, True) if plan.tiled_scales and has_scales else None,
        _places_at(geometry) + 4 * geometry.max_tokens * geometry.top_k if own_rows else None,
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
    rows, output_RH = output_RH, aligned(output_RH)
    is_bf16, is_copy = output_RH.dtype == torch.bfloat16, await_ns is not None and output_RH is not rows
    arguments: dict[str, Argument] = {
        "output": output_RH,
        "row_bytes": output_RH.stride(0) * output_RH.element_size(),
        "positions": positions_SK,
        "starts": starts,
        "handle_epoch": handle_epoch,
    }
    if await_ns is not None:
        arguments |= {"count_tag": count_tag, "timeout_ns": await_ns, "received": received}
    _combine_sender(context, geometry, is_bf16, await_ns is not None, is_copy).launch(arguments)


@kept_by_memory
def _combine_sender(
    context: ExchangeMemory, geometry: ExchangeGeometry, output_bf16: bool, await_tokens: bool, is_copy: bool
) -> BoundKernel:
    """`is_copy`: the rows are written by the kernel before this one, not before the routing was sent."""
    plan = required_plan(geometry)
    bound: dict[str, Argument] = {
        "rank": geometry.rank,
        "max_tokens": geometry.max_tokens,
        "num_slots": geometry.num_slots,
        "early_parts": plan.num_parts,
        "part_tokens": plan.part_tokens,
        "combine": context.combine_pointers,
        "combine_half": context.half_bytes["combine"],
        "counter": _counter(context, COMBINED),
        **memory_arguments(context, geometry),
    }
    if await_tokens:
        bound |= {
            "token_flags": context.token_flags_pointers,
            "token_flags_half": context.half_bytes["token_flags"],
        }
    return BoundKernel(
        "combine.cu",
        geometry.kernel_prefix + "combine_send",
        combine_macros(geometry, output_bf16=output_bf16, has_shared=False, await_tokens=await_tokens),
        block=(plan.output_readers + 2 + await_tokens) * WARP,
        grid=(plan.combine_send_blocks(most_sms(context.device)), 1, 1),
        bound=bound,
        device=context.device,
        shared_bytes=plan.combine_shared_bytes[output_bf16],
        early=plan.overlaps and not (await_tokens and (is_copy or _flags_are_unordered(geometry))),
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
    *,
    waits: torch.Tensor | None = None,
) -> None:
    """See `interface.ExchangeBackend`.

    `combine_pointers`, int64 `[W]`, are for some of the tokens: where the partial results of the first of them lie. The
    kernel then waits for all partial results before the first.
    """
    num_tokens, of_some, counts = y_TH.shape[0], combine_pointers is not None, waits is not None
    shared_TH = None if shared_TH is None else aligned(shared_TH)
    arguments: dict[str, Argument] = {
        "y_TH": y_TH,
        "shared_TH": shared_TH,
        "shared_stride": 0 if shared_TH is None else shared_TH.stride(0),
        "num_parts": num_parts_T,
        "num_tokens": num_tokens,
        "handle_epoch": handle_epoch,
        "timeout_ns": timeout_ns,
    }
    if of_some:
        arguments["combine"] = combine_pointers
    if counts:
        arguments["waits"] = waits
    _combine_receiver(context, geometry, shared_TH is not None, of_some, counts).launch(arguments, num_tokens)


@kept_by_memory
def _combine_receiver(
    context: ExchangeMemory, geometry: ExchangeGeometry, has_shared: bool, of_some: bool, waits: bool
) -> SizedKernel:
    plan = required_plan(geometry)
    # One more block counts waits, and has an SM for it.
    sms = max(1, most_sms(context.device) - waits)
    bound: dict[str, Argument] = {
        "rank": geometry.rank,
        "early_parts": 0 if of_some else plan.num_parts,
        "part_tokens": plan.part_tokens,
        "signals": context.signal_pointers,
        "epoch_ptr": context.epoch,
        "error": context.error,
        "latch": context.latch,
        "combine_half": context.half_bytes["combine"],
    }
    if not of_some:
        bound["combine"] = context.combine_pointers
    kernel = BoundKernel(
        "combine.cu",
        geometry.kernel_prefix + "combine_recv",
        combine_macros(geometry, output_bf16=True, has_shared=has_shared, of_some=of_some, waits=waits),
        block=(plan.partial_readers + 1) * WARP,
        bound=bound,
        device=context.device,
        shared_bytes=plan.partial_ring(has_shared).shared_bytes,
        early=not of_some and _flags_come_last(context) and plan.overlaps,
    )
    return SizedKernel(kernel, lambda num_tokens: plan.combine_recv_blocks(num_tokens, sms) + waits)
