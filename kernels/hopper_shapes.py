"""What Hopper's exchange is compiled with and launched over: sizes that follow from a layer's geometry alone.

Threads, shared memory and parts of its kernels (`dispatch_send.cu`, `arrive.cu`, `combine.cu`), and their macros. Why
they are as they are, with measurements, is in `kernels/exchange_notes.md`; `hopper_exchange.py` launches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from moe_runtime.comm.signals import (
    ABORT_WORDS,
    COUNT_BITS,
    PROGRESS_PARTS,
    TURN_BIT,
    SignalLayout,
)
from moe_runtime.errors import ErrorCode, Phase
from moe_runtime.formats import COMBINE_FORMATS, FORMATS, align, ceil_div
from moe_runtime.geometry import ExchangeGeometry, sample_geometry
from moe_runtime.kernels.nvrtc import Defines
from moe_runtime.kernels.runtime import CudaCase

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
MAX_TEAMS = 15
"""Named barriers of a block, less the one of all its threads."""
ARRIVE_WARPS = 16
SMALL_CHUNK_BYTES, FEW_ROWS = 32 * 1024, 3072
"""Shared memory, and rows of a rank on average, up to which all slots are one chunk: what was measured to be faster."""
CHUNK = 256
"""Slots of a chunk otherwise, at most."""
POLLING_BLOCKS = 32
"""Of `arrive_place`, at most, where each looks at the stamps of all slots and has little else to do."""


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


def pitch(row_bytes: int) -> int:
    """Bytes of a place of a ring."""
    return align(row_bytes, 128)


def _places(row_bytes: int, other_bytes: int, half: bool = False) -> int:
    """Rows of a ring in the shared memory of an SM, or half of it if two fit there, beside something else."""
    places = (SHARED_BYTES_OF_TWO - RING_BARRIERS_BYTES - other_bytes) // pitch(row_bytes)
    if not half or places < 2:
        places = (MAX_SHARED_BYTES - RING_BARRIERS_BYTES - other_bytes) // pitch(row_bytes)
    return min(MAX_PLACES, places)


def may_overlap(geometry: ExchangeGeometry) -> bool:
    """Whether a kernel may begin while the one before it drains, on SMs beside those that are still taken."""
    return geometry.num_sms is None


def parts_of_tokens(geometry: ExchangeGeometry) -> tuple[int, int]:
    """Of how many parts of the tokens peers are told before the rest has landed, and tokens of a part."""
    parts = PROGRESS_PARTS if may_overlap(geometry) and geometry.max_tokens >= TOKENS_IN_PARTS else 0
    return parts, ceil_div(geometry.max_tokens, parts + 1)


def waited_bytes(geometry: ExchangeGeometry, has_shared: bool) -> int:
    """Of a row of the ring of `combine_wait`."""
    return max(geometry.partial_bytes, 2 * geometry.hidden if has_shared else 0)


def _teams(geometry: ExchangeGeometry) -> int:
    """Teams of a block of `dispatch_send`: one, or as many as an SM takes where it is given one block."""
    if geometry.num_sms is None:
        return 1
    by_memory = MAX_SHARED_BYTES // (STAGES * geometry.record.record_bytes)
    return max(1, min(MAX_SENDING_THREADS // _team(geometry.hidden), by_memory, MAX_TEAMS))


def sending_blocks(geometry: ExchangeGeometry, items: int, teams: int, sms: int) -> int:
    """Blocks of `dispatch_send`, of so many teams each, on a GPU of so many SMs."""
    blocks = geometry.programs(ceil_div(items, teams))
    if geometry.num_sms is not None:
        return blocks
    return min(blocks, BLOCKS_PER_SM * sms)


def _places_bytes(geometry: ExchangeGeometry, chunk: int) -> int:
    """Shared memory of `arrive_place` on the rank with most experts, with room to align its parts."""
    experts = ceil_div(geometry.num_experts, geometry.world_size)
    return experts * (chunk // 32 * 6 + 16) + chunk * (geometry.top_k * 2 + 4) + 32


def chunk_slots(geometry: ExchangeGeometry) -> int:
    """Slots that are counted together: all where they are few."""
    everything = align(geometry.num_slots, 32)
    small = _places_bytes(geometry, everything) <= SMALL_CHUNK_BYTES
    return everything if small and geometry.max_tokens * geometry.top_k <= FEW_ROWS else min(CHUNK, everything)


def num_chunks(geometry: ExchangeGeometry) -> int:
    """Chunks of all slots."""
    return ceil_div(geometry.num_slots, chunk_slots(geometry))


def stamped(geometry: ExchangeGeometry) -> bool:
    """Whether each token is waited for by itself, for which kernels that map their peers tell of each by itself."""
    return num_chunks(geometry) == 1


def tiled_scales(geometry: ExchangeGeometry) -> bool:
    """Whether swizzled scales are filled in by a kernel of their own, in the order of the swizzle: for many rows."""
    return geometry.token_format.swizzled and chunk_slots(geometry) < geometry.num_slots


def arrive_shares(geometry: ExchangeGeometry, sms: int, scales: bool) -> tuple[int, int]:
    """Warps that share a slot's rows, and blocks that share a chunk: one round of blocks, on as many SMs as there are.

    Few slots are spread over more SMs, each with fewer rows, and more slots than warps are a slot to a warp. Where rows
    are not copied, nor words of their scales into sectors of their own, few blocks do, and look at the same memory.

    Args:
        scales: whether those of a format that has them are copied.
    """
    chunk, chunks = chunk_slots(geometry), num_chunks(geometry)
    if stamped(geometry) and not geometry.packed and not (scales and geometry.token_format.swizzled):
        sms = min(sms, POLLING_BLOCKS)
        if not scales:
            return 1, min(sms, ceil_div(geometry.num_slots, ARRIVE_WARPS))
    shares = max(1, min(geometry.top_k, sms * ARRIVE_WARPS // (chunks * chunk)))
    return shares, max(1, min(sms // chunks, chunk * shares))


def _signal_defines(geometry: ExchangeGeometry) -> dict[str, int | str]:
    signals = SignalLayout(geometry.world_size)
    return {
        "WORLD": geometry.world_size,
        "ABORT": signals.abort,
        "ABORT_WORDS": ABORT_WORDS,
        "TIMEOUT": int(ErrorCode.TIMEOUT),
    }


def _record_defines(geometry: ExchangeGeometry) -> dict[str, int | str]:
    return {"K": geometry.top_k, **geometry.record.constants}


@cache
def dispatch_defines(geometry: ExchangeGeometry, *, ids_64: bool, static_gsf: bool, await_ready: bool) -> Defines:
    """Macros of `dispatch_send.cu`."""
    signals = SignalLayout(geometry.world_size)
    return Defines(
        {
            **_signal_defines(geometry),
            **_record_defines(geometry),
            "FMT": int(geometry.token_format.code),
            "HIDDEN": geometry.hidden,
            "IDS": "long long" if ids_64 else "int",
            "TEAM": _team(geometry.hidden),
            "TEAMS": _teams(geometry),
            "STATIC_GSF": int(static_gsf),
            "AWAIT_READY": int(await_ready),
            "STAMPED": int(await_ready and stamped(geometry)),
            "READY": signals.ready,
            "DISPATCH_FLAG": signals.dispatch_flag,
            "TOKEN_COUNT": signals.token_count,
            "COUNT_BITS": COUNT_BITS,
            "TURN_BIT": TURN_BIT,
            "COMBINE_FLAG": signals.combine_flag,
            "ROUTING": int(ErrorCode.ROUTING),
            "DISPATCH_SEND": int(Phase.DISPATCH_SEND),
        }
    )


@cache
def arrive_defines(geometry: ExchangeGeometry, *, scales: bool = True) -> Defines:
    """Macros of `arrive.cu`; without `scales` those stay in the records."""
    signals = SignalLayout(geometry.world_size)
    return Defines(
        {
            **_signal_defines(geometry),
            **_record_defines(geometry),
            "FMT": int(geometry.token_format.code),
            "EXPERTS": max(geometry.num_local_experts, 1),
            "CHUNK": chunk_slots(geometry),
            "WARPS": ARRIVE_WARPS,
            "LOOPED": int(geometry.num_sms is not None),
            "PLACES_BYTES": _places_bytes(geometry, chunk_slots(geometry)),
            "TILED": int(scales and tiled_scales(geometry)),
            "PACKED": int(geometry.packed),
            "STAMPED": int(stamped(geometry)),
            "QUANT_BYTES": geometry.token_format.quant_bytes(geometry.hidden),
            "SCALE_COLUMNS": geometry.token_format.scale_columns(geometry.hidden) if scales else 0,
            "DISPATCH_FLAG": signals.dispatch_flag,
            "TOKEN_COUNT": signals.token_count,
            "COUNT_BITS": COUNT_BITS,
            "TURN_BIT": TURN_BIT,
            "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
            "MISMATCH": int(ErrorCode.MISMATCH),
            "CAPACITY": int(ErrorCode.CAPACITY),
            "DISPATCH_WAIT": int(Phase.DISPATCH_WAIT),
        }
    )


@cache
def combine_defines(geometry: ExchangeGeometry, *, output_bf16: bool, has_shared: bool) -> Defines:
    """Macros of `combine.cu`."""
    signals = SignalLayout(geometry.world_size)
    half = may_overlap(geometry)
    return Defines(
        {
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
            "PARTIALS": _places(waited_bytes(geometry, has_shared), 0, half),
            "OUTPUT_BF16": int(output_bf16),
            "HAS_SHARED": int(has_shared),
            "COMBINE_FLAG": signals.combine_flag,
            "PROGRESS": signals.progress,
            "PROGRESS_PARTS": PROGRESS_PARTS,
            "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
            "COMBINE_SEND": int(Phase.COMBINE_SEND),
            "COMBINE_WAIT": int(Phase.COMBINE_WAIT),
        }
    )


def _aot_cases(fmt: str) -> Iterator[CudaCase]:
    """Both modes of a format, and its partial results."""
    for packed in (False, True):
        geometry = sample_geometry(fmt, packed=packed)
        for kernel in ("arrive_count", "arrive_place", "arrive_scales"):
            yield CudaCase(kernel, fmt, "arrive.cu", kernel, arrive_defines(geometry))
    if FORMATS[fmt].swizzled:
        defines = arrive_defines(sample_geometry(fmt), scales=False)
        yield CudaCase("arrive_place", fmt, "arrive.cu", "arrive_place", defines)
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
    geometry = sample_geometry(fmt, max_tokens=4096, packed=True)  # in chunks
    for kernel in ("arrive_count", "arrive_place", "arrive_scales"):
        yield CudaCase(kernel, fmt, "arrive.cu", kernel, arrive_defines(geometry))
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
