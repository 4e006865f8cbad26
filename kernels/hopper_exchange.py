"""The exchange on Hopper, in CUDA C++: siblings of Triton's `dispatch_send`, `arrive`, `combine_send`, `combine_wait`.

Same arguments, same memory and same bits as `dispatch.py`, `arrive.py` and `combine.py`, so that ranks may differ in
which they run. `hopper_shapes.py` says which layers they take, and what they are compiled with and launched over.

The way of the data. `dispatch_send` quantizes a token, puts its record together in shared memory and copies it, whole,
to each rank that holds one of its experts. `arrive_count`, `arrive_place` and `arrive_scales` wait for tokens, group
their rows by expert, and copy rows and scales unless the GEMM finds them where they landed. `combine_send` sums the
rows of a token that this rank has and copies the partial result home; `combine_wait` sums over ranks in a fixed order.
A kernel may begin while the one before it drains, unless it is to leave SMs free.

The number is that of bytes over the links: `record_bytes` for each (token, rank that holds one of its experts), and
`partial_bytes` for each of those on the way home. 4 H200s give 263 GB/s out of a rank with 1 MB for each peer and 350
with 40 MB; below 0.25 MB latency is all there is (launch/results/links_h200x4.json).

Measured, dispatch + combine of NVFP4 tokens and bf16 partial results, us at 8 / 128 / 4096 tokens a rank:

    2 H200s, half of 256 experts    9.4 + 9.2 / 13.5 + 15.9 / 79.6 + 226     (launch/results/h200x2.json)
    8 H200s, older kernels          17.3 + 11.2 / 31.7 + 37.9 / 367 + 847    (launch/results/h200x8.json)

What each version brought, what was tried, what is left, and why sizes are as they are: `kernels/exchange_notes.md`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.comm.signals import COMBINED
from moe_runtime.kernels import hopper_shapes
from moe_runtime.kernels.nvrtc import int64, launch, most_sms

if TYPE_CHECKING:
    from moe_runtime.context import ExpertParallelContext
    from moe_runtime.geometry import ExchangeGeometry


LEAVES_SCALES = True
"""Whether `arrive` takes None as scales, which are then read where they were sent."""


def room_to_count(geometry: ExchangeGeometry, device: torch.device) -> torch.Tensor | None:
    """Uninitialised int32 `[chunks, E]` in which `arrive` counts rows; None where it has one chunk."""
    chunks, experts = hopper_shapes.num_chunks(geometry), max(geometry.num_local_experts, 1)
    return torch.empty((chunks, experts), dtype=torch.int32, device=device) if chunks > 1 else None


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows where each starts at a multiple of 16 bytes: themselves, or a copy."""
    fits_already = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return rows if fits_already else rows.clone(memory_format=torch.contiguous_format)


def _counter(context: ExpertParallelContext, number: int) -> ctypes.c_int64:
    """Where one of the context's counters lies; making a tensor of it in every step takes ten times as long."""
    return int64(context.counters.data_ptr() + number * context.counters.element_size())


def _flags_say_all(context: ExpertParallelContext) -> bool:
    """Whether all that a flag stands for can be seen with it, so that its waiter may begin beside the kernel before.

    What the collective transport carries is stored by torch's kernels, flags and counts in no order.
    """
    return context.heap.directly_mapped


def dispatch_send(
    context: ExpertParallelContext,
    geometry: ExchangeGeometry,
    starts: torch.Tensor,
    x_TH: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    gsf: torch.Tensor | None,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    timeout_ns: int,
) -> None:
    """As `dispatch.dispatch_send`."""
    num_tokens, x_TH = x_TH.shape[0], _aligned(x_TH)
    defines = hopper_shapes.dispatch_defines(
        geometry,
        ids_64=topk_idx_TK.dtype == torch.int64,
        static_gsf=gsf is not None,
        await_ready=context.heap.directly_mapped,
    )
    teams, sms = int(defines["TEAMS"]), most_sms(context.device)
    launch(
        "dispatch_send.cu",
        "dispatch_send",
        defines,
        grid=(hopper_shapes.sending_blocks(geometry, num_tokens, teams, sms), 1, 1),
        block=int(defines["TEAM"]) * teams,
        shared_bytes=teams * hopper_shapes.STAGES * geometry.record.record_bytes,
        arguments=[
            x_TH,
            int64(x_TH.stride(0)),
            topk_idx_TK,
            topk_weights_TK,
            gsf,
            num_tokens,
            geometry.count_tag,
            starts,
            context.landing_pointers,
            context.stamps_pointers,
            context.signal_pointers,
            context.epoch,
            handle_epoch,
            num_parts_T,
            context.error,
            context.latch,
            context.counters,
            geometry.rank,
            geometry.num_experts,
            geometry.max_tokens,
            int64(geometry.landing_half(context.half_bytes["landing"])),
            int64(context.half_bytes["stamps"]),
            int64(timeout_ns),
        ],
        device=context.device,
        early=hopper_shapes.may_overlap(geometry),
    )


def arrive(
    context: ExpertParallelContext,
    geometry: ExchangeGeometry,
    handle_epoch: torch.Tensor,
    timeout_ns: int,
    *,
    positions_SK: torch.Tensor,
    group_offsets: torch.Tensor,
    group_scale_offsets: torch.Tensor,
    row_index_R: torch.Tensor,
    rows_RQ: torch.Tensor | None,
    scales: torch.Tensor | None,
    row_scale_R: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    """As `arrive.arrive`, with what `room_to_count` gave before this rank has sent."""
    with_scales = scales is not None or geometry.token_format.scale_dtype is None
    defines = hopper_shapes.arrive_defines(geometry, scales=with_scales)
    chunks = hopper_shapes.num_chunks(geometry)
    sms = most_sms(context.device, geometry.num_sms)
    landing_half = geometry.landing_half(context.half_bytes["landing"])
    early = _flags_say_all(context) and hopper_shapes.may_overlap(geometry)
    # What both kernels begin and end with.
    memory = [
        context.landing_pointers,
        context.stamps_pointers,
        context.signal_pointers,
        context.epoch,
        handle_epoch,
        context.error,
        context.latch,
        geometry.rank,
        geometry.max_tokens,
        geometry.count_tag,
        geometry.num_slots,
    ]
    limits: list[Any] = [int64(landing_half), int64(context.half_bytes["stamps"]), int64(timeout_ns)]
    local = [geometry.first_expert, geometry.num_local_experts]
    if chunks > 1:
        launch(
            "arrive.cu",
            "arrive_count",
            defines,
            grid=(geometry.programs(chunks), 1, 1),
            block=hopper_shapes.ARRIVE_WARPS * hopper_shapes.WARP,
            arguments=[counts, *memory, *local, *limits],
            device=context.device,
            early=early,
        )
    shares, split = hopper_shapes.arrive_shares(geometry, sms, bool(defines["SCALE_COLUMNS"]))
    written = [group_offsets, group_scale_offsets, row_index_R, positions_SK, rows_RQ, scales, row_scale_R]
    first_row = landing_half // geometry.record.record_bytes
    launch(
        "arrive.cu",
        "arrive_place",
        defines,
        grid=(geometry.programs(chunks * split), 1, 1),
        block=hopper_shapes.ARRIVE_WARPS * hopper_shapes.WARP,
        shared_bytes=int(defines["PLACES_BYTES"]),
        arguments=[counts, *written, *memory, chunks, split, shares, *local, geometry.row_capacity, first_row, *limits],
        device=context.device,
        early=early,
    )
    if defines["TILED"]:
        launch(
            "arrive.cu",
            "arrive_scales",
            defines,
            grid=(geometry.programs(2 * sms), 1, 1),
            block=hopper_shapes.ARRIVE_WARPS * hopper_shapes.WARP,
            arguments=[
                group_offsets,
                row_index_R,
                scales,
                context.landing_pointers,
                geometry.rank,
                geometry.num_local_experts,
            ],
            device=context.device,
            early=hopper_shapes.may_overlap(geometry),
        )


def combine_send(
    context: ExpertParallelContext,
    geometry: ExchangeGeometry,
    starts: torch.Tensor,
    output_RH: torch.Tensor,
    positions_SK: torch.Tensor,
    handle_epoch: torch.Tensor,
) -> None:
    """As `combine.combine_send`."""
    output_RH = _aligned(output_RH)
    defines = hopper_shapes.combine_defines(geometry, output_bf16=output_RH.dtype == torch.bfloat16, has_shared=False)
    places, row_bytes = int(defines["PLACES"]), geometry.hidden * output_RH.element_size()
    launch(
        "combine.cu",
        "combine_send",
        defines,
        grid=(min(geometry.programs(geometry.num_slots), most_sms(context.device)), 1, 1),
        block=(int(defines["READERS"]) + 2) * hopper_shapes.WARP,
        shared_bytes=places * hopper_shapes.pitch(row_bytes) + hopper_shapes.STAGES * geometry.partial_bytes,
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
            *hopper_shapes.parts_of_tokens(geometry),
            int64(geometry.landing_half(context.half_bytes["landing"])),
            int64(context.half_bytes["combine"]),
        ],
        device=context.device,
        early=hopper_shapes.may_overlap(geometry),
    )


def combine_wait(
    context: ExpertParallelContext,
    geometry: ExchangeGeometry,
    handle_epoch: torch.Tensor,
    num_parts_T: torch.Tensor,
    shared_TH: torch.Tensor | None,
    y_TH: torch.Tensor,
    timeout_ns: int,
) -> None:
    """As `combine.combine_wait`."""
    num_tokens = y_TH.shape[0]
    shared_TH = None if shared_TH is None else _aligned(shared_TH)
    defines = hopper_shapes.combine_defines(geometry, output_bf16=True, has_shared=shared_TH is not None)
    row_bytes = hopper_shapes.waited_bytes(geometry, shared_TH is not None)
    launch(
        "combine.cu",
        "combine_wait",
        defines,
        # A rank without tokens waits too, so that it learns of a peer's failure in the same step.
        grid=(min(geometry.programs(num_tokens), most_sms(context.device)), 1, 1),
        block=(int(defines["WAITING"]) + 1) * hopper_shapes.WARP,
        shared_bytes=int(defines["PARTIALS"]) * hopper_shapes.pitch(row_bytes),
        arguments=[
            y_TH,
            shared_TH,
            int64(shared_TH.stride(0) if shared_TH is not None else 0),
            num_parts_T,
            num_tokens,
            context.combine_pointers,
            context.signal_pointers,
            context.epoch,
            handle_epoch,
            context.error,
            context.latch,
            geometry.rank,
            *hopper_shapes.parts_of_tokens(geometry),
            int64(context.half_bytes["combine"]),
            int64(timeout_ns),
        ],
        device=context.device,
        early=_flags_say_all(context) and hopper_shapes.may_overlap(geometry),
    )
