"""The exchange on Hopper, in CUDA C++: siblings of Triton's `dispatch_send`, `arrive`, `combine_send`, `combine_wait`.

Same arguments, same memory and same bits as `dispatch.py`, `arrive.py` and `combine.py`, so that ranks may differ in
which they run. `hopper_shapes.py` says which layers they take, and what they are compiled with and launched over.

**The number.** Bytes over the links: `record_bytes` for each (token, rank that holds one of its experts), and
`partial_bytes` for each of those on the way home. `launch.link_bench` on 4 H200s (launch/results/links_h200x4.json):
stores of 16 bytes and copies of shared memory by the copy engine reach the same, 263 GB/s out of a rank with 1 MB for
each peer and 350 with 40 MB, with 528 blocks of 256 threads; 32 blocks give 190 to 240. Loads from peers are slower by
13% or more. Below 0.25 MB latency is all there is. Hence copies by the engine: they leave the threads free.

**Versions**, dispatch and combine together on 4 H200s, NVFP4 tokens, bf16 partial results, 8 / 128 / 4096 tokens a rank
(single runs of which no file is kept, as those below but for what names one):

- Triton: 69.5 / 87.9 / 1433 us. Peers are signalled one after the other, a fence at system scope each; arrival is four
  launches.
- Whole records by the copy engine, signals side by side, one launch to arrive, each launched while the one before
  drains (`griddepcontrol`): 32 / 62 / 1064 us, at 4096 with rows found through their index.
- Loads that do not depend on each other all under way at once; waiting kernels begin before the sending one has ended;
  scales of many rows stored in the order of their swizzle (113 to 65 us after sending at 4096): 29 / 70 / 959 us. At
  128 tokens it lost: two rows under way in `combine_send` cost a quarter of the blocks of an SM, and failures were
  looked for at each turn of a wait.
- One row at a time, flags looked at more often than failures: 26 / 57 / 1055 us (at 4096 packed; by index not measured
  again). After this run failures are looked for after the flags, not before: a peer that fails raises its flags too.

On 2 H200s, dispatch + combine apart, 8 / 128 / 4096 tokens, and 4096 on 16 SMs (`num_sms`, of which
launch/results/h200x2_few_sms.json has the last):

- The last version above: 19.2 + 12.5 / 25.0 + 18.1 / 177 + 327; 694 + 1201 us.
- Rows of the combine through a ring of shared memory, all that fits under way whatever the number of threads
  (`row_ring.cuh`): combine 10.4 / 16.8 / 290; 982. Half as many warps with twice the numbers, and bf16 by the
  converter: 9.6 / - / 286. `arrive_scales` with loads of 16 bytes (a quarter as many cache lines are asked for):
  dispatch 157 at 4096; 603.
- Tokens of all ranks in turn: before, all ranks sent to rank 0 at first, then to rank 1, so that each link was busy for
  a part of the time only. And the last three quarters of the tokens on their way while the first are summed
  (`parts_of_tokens`), for which both kernels share an SM: combine 9.6 / 16.0 / 238; 813.
- NVFP4 codes as saturating sums in fp32, 17 instructions a number instead of 30 (19 to 4 of them on the integer pipe,
  which is half as wide), one division a block of FP8, and the rows of few slots shared by warps of all SMs, since an SM
  stores each word of a swizzled row into a sector of its own: dispatch 12.8 / 16.9 / 143; 447.

On 8 H200s that version is 17.3 + 11.2 / 31.7 + 37.9 / 367 + 847 us, FP8 15.1 + 11.1 / 34.9 + 37.9 / 615 + 850
(launch/results/h200x8.json). Of FP8's 615, `dispatch_send` was 433 (the links' floor is 397), then came 22 of
`arrive_count` and 136 of `arrive_place` (torch's profiler, one run). Since then, dispatch on 4 H200s, FP8 packed, 1024
/ 4096 / 8192 tokens, and NVFP4 (launch/results/h200x4.json has the last):

- Expert ids before the tokens (`ids_first`), so that rows are counted at once and placed part by part beside
  `dispatch_send`, on the half of each SM that it leaves: of the rows, only those of the last part are copied after it.
  118 / 389 / 739 us without, 111 / 327 / 615 with them on the same machine. The layer took 1016 / 3338 / 6531 and 1036
  / 3371 / 6529, 20 steps after each other: at the power limit, where the time of a step is its energy (`step.py`).
- NVFP4 and MXFP8 by index at any size, since their rows are gathered when they are decoded anyway, and more than 1024
  slots in chunks: 264 to 194 at 4096, 72 to 52 at 512.

**What is left.** At few tokens latency, of 8 on 2 ranks: 1.4 us until the first token and all that is to be known of it
are there, 1 to quantize it, 0.3 and 1.1 until its record has landed and a fence says so, 1 until its stamp is seen, 2.4
of arrival, 0.6 to the next kernel; the combine loads where rows are in 2.5, sums and sends in 1, and then has fence,
counter, flags (1.1, 0.6, 0.6) and 2.7 until the sums are stored. Combine is at the links: 847 us at 4096 on 8 ranks,
where their floor is 769; with partial results in FP8 it takes 325 instead of 531 on 4 ranks
(launch/results/h200x4_wires.json). The copy of expert outputs into partial results could be the epilogue of the down
projection.

On 2 H200s, dispatch of 128, 512, 1024 and 4096 tokens of NVFP4:

- Block scales left in the records, since a GEMM that gathers rows finds them there (`leave_scales`): before, each word
  of them was stored into a sector of its own, or by `arrive_scales`. 18.3, 39.8, 51.0, 101.9 to 16.6, 28.6, 38.0, 81.8
  us, in two runs after each other; the layer 948, 1633, 4722 to 937, 1617, 4685 from 512 on.

- Few tokens are told of one by one: before, 8 tokens took 1.1 us for a fence, 0.7 for the counter that tells which
  block is the last, 1.1 for the flags behind the number of tokens, 1.3 until they were seen, and 1 each for what a warp
  then did for every expert and for a load of each row's scale. Now all ranks get a stamp for each token once it has
  landed, the number of tokens is stored at the start with a bit that tells of which epoch it is, and 32 blocks at most
  look at stamps instead of 132, which also leaves room for `combine_send` to begin. Dispatch of 1, 8, 32, 128 and 256
  tokens, in turn with the version before: 11.8, 12.3, 12.2, 16.0 and 20.5 to 9.0, 9.2, 9.4, 13.6 and 16.7 us, combine
  9.0, 10.5, 11.0, 16.1, 24.9 to 8.5, 9.3, 9.8, 15.9, 24.2; FP8 of 8 and 128 tokens 12.3 and 17.1 to 9.1 and 14.4.
- Arrival in chunks reads the counts of all chunks at once instead of for one expert after the other, and has registers
  for two blocks of an SM (nvcc had taken 32 or 39 of them by what else stood in the kernel, and with 32 the same code
  took 1 to 3 us more): 512, 1024 and 4096 tokens 27.8, 39.8, 82.6 to 26.2, 37.7, 79.1, FP8 43.0, 79.9, 175.7 to 40.7,
  74.3, 171.1.
- A rank in another layer or size of step is told of it, by a number of the exchange beside that of tokens: before
  registers were held, that made nvcc take 32 of them, and cost 3 to 5 us from 512 tokens on; now it costs nothing.

All of that takes 9.4 + 9.2 / 13.5 + 15.9 / 79.6 + 226 us at 8 / 128 / 4096 there (launch/results/h200x2.json); a layer
of 1, 8 and 128 tokens takes 100, 316 and 482 us, where the run before, on another machine, had 102, 316 and 478. In
turn on one machine, two runs of each, the layer took 108, 320 and 485 us with the version before the last three, and
103, 313 and 481 with this one; in FP8 489 and 713 of 8 and 128 tokens, and 488 and 708.

Since then failures are told on, the number of tokens has a sign where stamps say that tokens have landed, and is looked
at once the flag of two epochs before has been seen: one load more before the first look. That has not been measured in
turn. On a third machine, where NCCL took up to 8% longer, dispatch of 8, 32, 128, 512 and 1024 tokens took 10.5, 10.8,
14.8, 27.5 and 40.8 us (before, on another, 9.4, 8.8, 13.5, 25.8 and 37.3), with the combine 18.5, 19.7, 30.3, 65.4 and
107 (18.3, 18.2, 28.5, 63.8 and 104), in one run of which no file is kept.

Tried beside the last three: no acquire and release at the counter of blocks, whose fence at system scope comes before
it (no change); weights and the numbers of parts loaded before they are wanted in the combine (no change: they share
lines with what is loaded first); one chunk for 512 and 1024 tokens (26 to 29, 38 to 47).

On 16 SMs, 8 ranks and 4096 tokens of NVFP4 take 597 + 1525 us, on 24 546 + 1175, on 48 409 + 1051. The kernels are
bound by instructions there: one rank, 4096 tokens of 8 rows each: `dispatch_send` 219 us, `combine_send` 520 (254 ns
for a row, of which the 1092 instructions of its 14 warps take 156 at four a cycle), `combine_wait` 119. Reading the
next row into registers while adding the one before gave nothing (1525 to 1499 on 16 SMs, 1175 to 1216 on 24).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.comm.signals import COMBINED, COUNTED
from moe_runtime.kernels import hopper_shapes
from moe_runtime.kernels.nvrtc import int64, launch, most_sms

if TYPE_CHECKING:
    from moe_runtime.context import ExpertParallelContext
    from moe_runtime.geometry import ExchangeGeometry


LEAVES_SCALES = True
"""Whether `arrive` takes None as scales, which are then read where they were sent."""


def room_to_count(geometry: ExchangeGeometry, device: torch.device) -> torch.Tensor | None:
    """Uninitialised int32 `[chunks, E]` in which `arrive` counts rows; None where it has one chunk."""
    chunks, experts = hopper_shapes.num_chunks(geometry)[0], max(geometry.num_local_experts, 1)
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
    in_parts = hopper_shapes.ids_first(geometry)
    chunks, at_once = hopper_shapes.num_chunks(geometry)
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
    if in_parts:
        limits.append(_counter(context, COUNTED))
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
    # In parts, an SM is left to the block of `arrive_count` that waits for the end of `dispatch_send`.
    others = max(1, sms - 1)
    shares, split = hopper_shapes.arrive_shares(geometry, others if in_parts else sms, bool(defines["SCALE_COLUMNS"]))
    blocks = min(at_once * split, others) if in_parts else geometry.programs(at_once * split)
    written = [group_offsets, group_scale_offsets, row_index_R, positions_SK, rows_RQ, scales, row_scale_R]
    first_row = landing_half // geometry.record.record_bytes
    launch(
        "arrive.cu",
        "arrive_place",
        defines,
        grid=(blocks, 1, 1),
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
