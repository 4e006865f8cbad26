"""The exchange on Hopper, in CUDA C++: siblings of Triton's `dispatch_send`, `arrive`, `combine_send`, `combine_wait`.

Same arguments, same memory and same bits as `dispatch.py`, `arrive.py` and `combine.py`, so that ranks may differ in
which they run.

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
  / 3371 / 6529: its products run at the power limit, and what waits less, it seems, leaves them less of it.
- NVFP4 and MXFP8 by index at any size, since their rows are gathered when they are decoded anyway, and more than 1024
  slots in chunks: 264 to 194 at 4096, 72 to 52 at 512.

**What is left.** At few tokens latency: at 8 on 8 ranks `dispatch_send` takes 8.5 us (copies that land, a fence, a
counter, flags, each 1 to 2) and arrival 5. At 128, 16 us of the links and 15 of arrival. Combine is at the links: 847
us at 4096 where their floor is 769; with partial results in FP8 it takes 325 instead of 531 on 4 ranks
(launch/results/h200x4_wires.json). The copy of expert outputs into partial results could be the epilogue of the down
projection.

On 16 SMs, 8 ranks and 4096 tokens of NVFP4 take 597 + 1525 us, on 24 546 + 1175, on 48 409 + 1051. The kernels are
bound by instructions there: one rank, 4096 tokens of 8 rows each: `dispatch_send` 219 us, `combine_send` 520 (254 ns
for a row, of which the 1092 instructions of its 14 warps take 156 at four a cycle), `combine_wait` 119. Reading the
next row into registers while adding the one before gave nothing (1525 to 1499 on 16 SMs, 1175 to 1216 on 24).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.comm.signals import ABORT_WORDS, PROGRESS_PARTS, SENT_PARTS, SignalLayout
from moe_runtime.errors import ErrorCode, Phase
from moe_runtime.formats import COMBINE_FORMATS, FORMATS, align, ceil_div
from moe_runtime.geometry import ExchangeGeometry, sample_geometry
from moe_runtime.kernels.nvrtc import int64, launch, most_sms
from moe_runtime.kernels.runtime import CudaCase

if TYPE_CHECKING:
    from moe_runtime.context import ExpertParallelContext

WARP = 32
MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
STAGES = 2
MAX_READERS = 14
"""Warps that read rows of a ring: with more, each does little beside waiting for its rows."""
MAX_PLACES = 24
SHARED_BYTES_OF_TWO = 113 * 1024
"""Shared memory of a block of which an SM takes two."""
TOKENS_IN_PARTS = 1024
"""`max_tokens` from which on tokens are combined part by part."""
RING_BARRIERS_BYTES = 2048
"""Shared memory for what goes with a ring: barriers and notes."""
BLOCKS_PER_SM = 8
"""Blocks of a sending kernel: more than fit, so that one SM's do not wait for another's."""
MAX_SENDING_THREADS = 896
"""Of a block of several teams: with more, ptxas has too few registers for a thread."""
THREADS_BESIDE = MAX_SENDING_THREADS // 2
"""Of the sending blocks of an SM that has room for a block of `arrive_place`, too."""
MAX_TEAMS = 15
"""Named barriers of a block, less the one of all its threads."""
ARRIVE_WARPS = 16
SMALL_CHUNK_BYTES = 32 * 1024
"""Shared memory up to which all slots are one chunk. On 4 H200s, NVFP4, dispatch of 2048 slots takes 50 us in chunks
and 71 as one, and of 1024 as long either way (single runs of which no file is kept)."""
CHUNK = 256
"""Slots of a chunk otherwise, at most."""
COMBINED = 1
ROUTED = COMBINED + 1 + PROGRESS_PARTS
SENT = ROUTED + 1
COUNTED = SENT + SENT_PARTS
NUM_COUNTERS = COUNTED + 3
"""Of `context.counters` that the kernels use, and where each finds its own; `dispatch_send` has the first, too."""

Defines = dict[str, int | str]
"""Macros of a source; made once for a layer and changed by no one."""


def fits(geometry: ExchangeGeometry) -> bool:
    """Whether these kernels take a layer of this geometry: one warp spans the ranks and a token's experts."""
    return (
        geometry.world_size <= WARP
        and geometry.top_k <= WARP
        and geometry.hidden % 16 == 0
        and _team(geometry.hidden) <= MAX_THREADS
        and STAGES * geometry.record.record_bytes <= MAX_SHARED_BYTES
        and _places(geometry.hidden * 4, STAGES * geometry.partial_bytes) > 0
        and _places_bytes(geometry, CHUNK) <= MAX_SHARED_BYTES
    )


def _team(hidden: int) -> int:
    """Threads that take a token together, each of them 32 numbers."""
    return align(ceil_div(hidden, 32), WARP)


def _readers(units: int) -> int:
    """Warps that read a row of so many units together, each thread as many as the others."""
    return ceil_div(ceil_div(units, ceil_div(units, MAX_READERS * WARP)), WARP)


def _pitch(row_bytes: int) -> int:
    """Bytes of a place of a ring."""
    return align(row_bytes, 128)


def _places(row_bytes: int, other_bytes: int, half: bool = False) -> int:
    """Rows of a ring in the shared memory of an SM, or half of it if two fit there, beside something else."""
    places = (SHARED_BYTES_OF_TWO - RING_BARRIERS_BYTES - other_bytes) // _pitch(row_bytes)
    if not half or places < 2:
        places = (MAX_SHARED_BYTES - RING_BARRIERS_BYTES - other_bytes) // _pitch(row_bytes)
    return min(MAX_PLACES, places)


def parts_of_tokens(geometry: ExchangeGeometry) -> tuple[int, int]:
    """Of how many parts of the tokens peers are told before the rest has landed, and tokens of a part."""
    parts = PROGRESS_PARTS if _may_overlap(geometry) and geometry.max_tokens >= TOKENS_IN_PARTS else 0
    return parts, ceil_div(geometry.max_tokens, parts + 1)


def ids_first(geometry: ExchangeGeometry) -> bool:
    """Whether packed rows are placed part by part as tokens arrive, for which all their expert ids are sent first."""
    return geometry.packed and parts_of_tokens(geometry)[0] > 0 and _team(geometry.hidden) <= THREADS_BESIDE


def _sent_tokens(geometry: ExchangeGeometry) -> int:
    """Tokens of a part of those that a rank sends, with `ids_first`; `part_tokens` of `signalling.cuh`."""
    return ceil_div(geometry.max_tokens, SENT_PARTS + 1)


def _waited_bytes(geometry: ExchangeGeometry, has_shared: bool) -> int:
    """Of a row of the ring of `combine_wait`."""
    return max(geometry.partial_bytes, 2 * geometry.hidden if has_shared else 0)


def _teams(geometry: ExchangeGeometry) -> int:
    """Teams of a block of `dispatch_send`: one, or as many as an SM takes where it is given one block."""
    if geometry.num_sms is None:
        return 1
    by_memory = MAX_SHARED_BYTES // (STAGES * geometry.record.record_bytes)
    return max(1, min(MAX_SENDING_THREADS // _team(geometry.hidden), by_memory, MAX_TEAMS))


def _sending_blocks(context: ExpertParallelContext, geometry: ExchangeGeometry, items: int, teams: int) -> int:
    blocks = geometry.programs(ceil_div(items, teams))
    if geometry.num_sms is not None:
        return blocks
    # Kernels that run beside this one begin when all of its blocks have.
    per_sm = THREADS_BESIDE // _team(geometry.hidden) if ids_first(geometry) else BLOCKS_PER_SM
    return min(blocks, per_sm * most_sms(context.device))


def _places_bytes(geometry: ExchangeGeometry, chunk: int) -> int:
    """Shared memory of `arrive_place`, with room to align its parts."""
    experts = max(geometry.num_local_experts, 1)
    return experts * (chunk // 32 * 6 + 16) + chunk * geometry.top_k * 2 + 32


def chunk_slots(geometry: ExchangeGeometry) -> int:
    """Slots that are counted together: all where their bitmaps are small, of a part of a source's with `ids_first`."""
    if ids_first(geometry):
        tokens = _sent_tokens(geometry)
        return align(ceil_div(tokens, ceil_div(tokens, CHUNK)), 32)
    everything = align(geometry.num_slots, 32)
    return everything if _places_bytes(geometry, everything) <= SMALL_CHUNK_BYTES else CHUNK


def _chunks(geometry: ExchangeGeometry) -> tuple[int, int]:
    """Chunks of all slots, and of those that are placed at a time."""
    if ids_first(geometry):
        of_part = ceil_div(_sent_tokens(geometry), chunk_slots(geometry))
        return (SENT_PARTS + 1) * geometry.world_size * of_part, geometry.world_size * of_part
    chunks = ceil_div(geometry.num_slots, chunk_slots(geometry))
    return chunks, chunks


def room_to_count(geometry: ExchangeGeometry, device: torch.device) -> torch.Tensor | None:
    """Uninitialised int32 `[chunks, E]` in which `arrive` counts rows; None where it has one chunk."""
    chunks, experts = _chunks(geometry)[0], max(geometry.num_local_experts, 1)
    return torch.empty((chunks, experts), dtype=torch.int32, device=device) if chunks > 1 else None


def tiled_scales(geometry: ExchangeGeometry) -> bool:
    """Whether swizzled scales are filled in by a kernel of their own, in the order of the swizzle: for many rows."""
    return geometry.token_format.swizzled and chunk_slots(geometry) < geometry.num_slots


def arrive_shares(geometry: ExchangeGeometry, sms: int) -> tuple[int, int]:
    """Warps that share a slot's rows, and blocks that share a chunk: one round of blocks, on as many SMs as there are.

    With `ids_first` it is a round for each part of the tokens.

    Few slots are spread over more SMs, each with fewer rows, and more slots than warps are a slot to a warp.
    """
    chunk, (_, chunks) = chunk_slots(geometry), _chunks(geometry)
    shares = max(1, min(geometry.top_k, sms * ARRIVE_WARPS // (chunks * chunk)))
    return shares, max(1, min(sms // chunks, chunk * shares))


def _signal_defines(geometry: ExchangeGeometry) -> Defines:
    signals = SignalLayout(geometry.world_size)
    return {
        "WORLD": geometry.world_size,
        "ABORT": signals.abort,
        "ABORT_WORDS": ABORT_WORDS,
        "TIMEOUT": int(ErrorCode.TIMEOUT),
    }


def _record_defines(geometry: ExchangeGeometry) -> Defines:
    record = geometry.record
    return {
        "K": geometry.top_k,
        "RECORD_BYTES": record.record_bytes,
        "SCALES_AT": record.scales_offset,
        "ROW_SCALE_AT": record.row_scale_offset,
        "SOURCE_AT": record.source_offset,
        "IDS_AT": record.ids_offset,
        "WEIGHTS_AT": record.weights_offset,
    }


@cache
def dispatch_defines(geometry: ExchangeGeometry, *, ids_64: bool, static_gsf: bool, await_ready: bool) -> Defines:
    """Macros of `dispatch_send.cu`."""
    signals = SignalLayout(geometry.world_size)
    return {
        **_signal_defines(geometry),
        **_record_defines(geometry),
        "FMT": int(geometry.token_format.code),
        "HIDDEN": geometry.hidden,
        "IDS": "long long" if ids_64 else "int",
        "TEAM": _team(geometry.hidden),
        "TEAMS": _teams(geometry),
        "STATIC_GSF": int(static_gsf),
        "AWAIT_READY": int(await_ready),
        "IDS_FIRST": int(ids_first(geometry)),
        "ROUTED_COUNTER": ROUTED,
        "SENT_COUNTERS": SENT,
        "ROUTED": signals.routed,
        "SENT": signals.sent,
        "SENT_PARTS": SENT_PARTS,
        "READY": signals.ready,
        "DISPATCH_FLAG": signals.dispatch_flag,
        "TOKEN_COUNT": signals.token_count,
        "COMBINE_FLAG": signals.combine_flag,
        "ROUTING": int(ErrorCode.ROUTING),
        "DISPATCH_SEND": int(Phase.DISPATCH_SEND),
    }


@cache
def arrive_defines(geometry: ExchangeGeometry) -> Defines:
    """Macros of `arrive.cu`."""
    signals = SignalLayout(geometry.world_size)
    return {
        **_signal_defines(geometry),
        **_record_defines(geometry),
        "FMT": int(geometry.token_format.code),
        "EXPERTS": max(geometry.num_local_experts, 1),
        "CHUNK": chunk_slots(geometry),
        "WARPS": ARRIVE_WARPS,
        "LOOPED": int(geometry.num_sms is not None or ids_first(geometry)),
        "PLACES_BYTES": _places_bytes(geometry, chunk_slots(geometry)),
        "TILED": int(tiled_scales(geometry)),
        "PACKED": int(geometry.packed),
        "IDS_FIRST": int(ids_first(geometry)),
        "ROUTED": signals.routed,
        "SENT": signals.sent,
        "SENT_PARTS": SENT_PARTS,
        "QUANT_BYTES": geometry.token_format.quant_bytes(geometry.hidden),
        "SCALE_COLUMNS": geometry.token_format.scale_columns(geometry.hidden),
        "DISPATCH_FLAG": signals.dispatch_flag,
        "TOKEN_COUNT": signals.token_count,
        "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
        "CAPACITY": int(ErrorCode.CAPACITY),
        "DISPATCH_WAIT": int(Phase.DISPATCH_WAIT),
    }


@cache
def combine_defines(geometry: ExchangeGeometry, *, output_bf16: bool, has_shared: bool) -> Defines:
    """Macros of `combine.cu`."""
    signals = SignalLayout(geometry.world_size)
    half = _may_overlap(geometry)
    return {
        **_signal_defines(geometry),
        **_record_defines(geometry),
        "HIDDEN": geometry.hidden,
        "WIRE": int(geometry.combine_format.code),
        "PARTS": geometry.parts,
        "PARTIAL_BYTES": geometry.partial_bytes,
        "PARTIAL_SCALES_AT": geometry.partial_scales_offset,
        "READERS": _readers(geometry.hidden // (8 if geometry.combine_format.name == "bf16" else 16)),
        "PLACES": _places(geometry.hidden * (2 if output_bf16 else 4), STAGES * geometry.partial_bytes, half),
        "WAITING": _readers(geometry.hidden // 8),
        "PARTIALS": _places(_waited_bytes(geometry, has_shared), 0, half),
        "OUTPUT_BF16": int(output_bf16),
        "HAS_SHARED": int(has_shared),
        "COMBINE_FLAG": signals.combine_flag,
        "PROGRESS": signals.progress,
        "PROGRESS_PARTS": PROGRESS_PARTS,
        "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
        "COMBINE_SEND": int(Phase.COMBINE_SEND),
        "COMBINE_WAIT": int(Phase.COMBINE_WAIT),
    }


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows where each starts at a multiple of 16 bytes: themselves, or a copy."""
    fits_already = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return rows if fits_already else rows.clone(memory_format=torch.contiguous_format)


def _flags_say_all(context: ExpertParallelContext) -> bool:
    """Whether all that a flag stands for can be seen with it, so that its waiter may begin beside the kernel before.

    What the collective transport carries is stored by torch's kernels, flags and counts in no order.
    """
    return context.heap.directly_mapped


def _may_overlap(geometry: ExchangeGeometry) -> bool:
    """Whether a kernel may begin while the one before it drains, on SMs beside those that are still taken."""
    return geometry.num_sms is None


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
    defines = dispatch_defines(
        geometry,
        ids_64=topk_idx_TK.dtype == torch.int64,
        static_gsf=gsf is not None,
        await_ready=context.heap.directly_mapped,
    )
    teams = int(defines["TEAMS"])
    launch(
        "dispatch_send.cu",
        "dispatch_send",
        defines,
        grid=(_sending_blocks(context, geometry, num_tokens, teams), 1, 1),
        block=int(defines["TEAM"]) * teams,
        shared_bytes=teams * STAGES * geometry.record.record_bytes,
        arguments=[
            x_TH,
            int64(x_TH.stride(0)),
            topk_idx_TK,
            topk_weights_TK,
            gsf,
            num_tokens,
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
        early=_may_overlap(geometry),
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
    defines, in_parts = arrive_defines(geometry), ids_first(geometry)
    chunks, at_once = _chunks(geometry)
    sms = most_sms(context.device, geometry.num_sms)
    landing_half = geometry.landing_half(context.half_bytes["landing"])
    early = _flags_say_all(context) and _may_overlap(geometry)
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
        geometry.num_slots,
    ]
    limits: list[Any] = [int64(landing_half), int64(context.half_bytes["stamps"]), int64(timeout_ns)]
    local = [geometry.first_expert, geometry.num_local_experts]
    if in_parts:
        limits.append(context.counters[COUNTED:])
    if chunks > 1:
        launch(
            "arrive.cu",
            "arrive_count",
            defines,
            grid=(geometry.programs(chunks), 1, 1),
            block=ARRIVE_WARPS * WARP,
            arguments=[counts, *memory, *local, *limits],
            device=context.device,
            early=early,
        )
    # In parts, an SM is left to the block of `arrive_count` that waits for the end of `dispatch_send`.
    others = max(1, sms - 1)
    shares, split = arrive_shares(geometry, others if in_parts else sms)
    blocks = min(at_once * split, others) if in_parts else geometry.programs(at_once * split)
    written = [group_offsets, group_scale_offsets, row_index_R, positions_SK, rows_RQ, scales, row_scale_R]
    first_row = landing_half // geometry.record.record_bytes
    launch(
        "arrive.cu",
        "arrive_place",
        defines,
        grid=(blocks, 1, 1),
        block=ARRIVE_WARPS * WARP,
        shared_bytes=int(defines["PLACES_BYTES"]),
        arguments=[counts, *written, *memory, chunks, split, shares, *local, geometry.row_capacity, first_row, *limits],
        device=context.device,
        early=early,
    )
    if tiled_scales(geometry):
        launch(
            "arrive.cu",
            "arrive_scales",
            defines,
            grid=(geometry.programs(2 * sms), 1, 1),
            block=ARRIVE_WARPS * WARP,
            arguments=[
                group_offsets,
                row_index_R,
                scales,
                context.landing_pointers,
                geometry.rank,
                geometry.num_local_experts,
            ],
            device=context.device,
            early=_may_overlap(geometry),
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
    defines = combine_defines(geometry, output_bf16=output_RH.dtype == torch.bfloat16, has_shared=False)
    row_bytes = geometry.hidden * output_RH.element_size()
    launch(
        "combine.cu",
        "combine_send",
        defines,
        grid=(min(geometry.programs(geometry.num_slots), most_sms(context.device)), 1, 1),
        block=(int(defines["READERS"]) + 2) * WARP,
        shared_bytes=int(defines["PLACES"]) * _pitch(row_bytes) + STAGES * geometry.partial_bytes,
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
            context.counters[COMBINED:],
            geometry.rank,
            geometry.max_tokens,
            geometry.num_slots,
            *parts_of_tokens(geometry),
            int64(geometry.landing_half(context.half_bytes["landing"])),
            int64(context.half_bytes["combine"]),
        ],
        device=context.device,
        early=_may_overlap(geometry),
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
    defines = combine_defines(geometry, output_bf16=True, has_shared=shared_TH is not None)
    launch(
        "combine.cu",
        "combine_wait",
        defines,
        # A rank without tokens waits too, so that it learns of a peer's failure in the same step.
        grid=(min(geometry.programs(num_tokens), most_sms(context.device)), 1, 1),
        block=(int(defines["WAITING"]) + 1) * WARP,
        shared_bytes=int(defines["PARTIALS"]) * _pitch(_waited_bytes(geometry, shared_TH is not None)),
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
            *parts_of_tokens(geometry),
            int64(context.half_bytes["combine"]),
            int64(timeout_ns),
        ],
        device=context.device,
        early=_flags_say_all(context) and _may_overlap(geometry),
    )


def _aot_cases(fmt: str) -> Iterator[CudaCase]:
    """Both modes of a format, and its partial results."""
    for packed in (False, True):
        geometry = sample_geometry(fmt, packed=packed)
        for kernel in ("arrive_count", "arrive_place", "arrive_scales"):
            yield CudaCase(kernel, fmt, "arrive.cu", kernel, arrive_defines(geometry))
    for static in (False, True) if FORMATS[fmt].has_row_scale else (False,):
        defines = dispatch_defines(sample_geometry(fmt), ids_64=True, static_gsf=static, await_ready=True)
        yield CudaCase("dispatch_send", fmt, "dispatch_send.cu", "dispatch_send", defines, instruction=BULK_STORE)
    if fmt in COMBINE_FORMATS:
        geometry = sample_geometry("nvfp4", combine_format=fmt)
        for output_bf16 in (True, False):
            defines = combine_defines(geometry, output_bf16=output_bf16, has_shared=True)
            yield CudaCase("combine_send", fmt, "combine.cu", "combine_send", defines, instruction=BULK_STORE)
        yield CudaCase("combine_wait", fmt, "combine.cu", "combine_wait", defines)
    yield from _limited_cases(fmt)
    geometry = sample_geometry(fmt, max_tokens=4096, packed=True)
    assert ids_first(geometry)
    yield CudaCase("arrive_place", fmt, "arrive.cu", "arrive_place", arrive_defines(geometry))
    defines = dispatch_defines(geometry, ids_64=True, static_gsf=False, await_ready=True)
    yield CudaCase("dispatch_send", fmt, "dispatch_send.cu", "dispatch_send", defines, instruction=BULK_STORE)


def _limited_cases(fmt: str) -> Iterator[CudaCase]:
    """On few SMs."""
    geometry = sample_geometry(fmt, packed=True, num_sms=16)
    yield CudaCase("arrive_place", fmt, "arrive.cu", "arrive_place", arrive_defines(geometry))
    defines = dispatch_defines(geometry, ids_64=True, static_gsf=False, await_ready=True)
    yield CudaCase("dispatch_send", fmt, "dispatch_send.cu", "dispatch_send", defines, instruction=BULK_STORE)
    if fmt in COMBINE_FORMATS:
        geometry = sample_geometry("nvfp4", combine_format=fmt, num_sms=16)
        defines = combine_defines(geometry, output_bf16=True, has_shared=False)
        yield CudaCase("combine_send", fmt, "combine.cu", "combine_send", defines, instruction=BULK_STORE)


BULK_STORE = {90: r"cp\.async\.bulk\.global\.shared::cta\.bulk_group"}
AOT_CASES: tuple[CudaCase, ...] = tuple(case for fmt in FORMATS for case in _aot_cases(fmt))
