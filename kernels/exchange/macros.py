"""Macros that the CUDA exchange is compiled with, from a geometry and its plan."""

from __future__ import annotations

from functools import cache

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import (
    ABORT_WORDS,
    COUNT_BITS,
    PARTIAL_FLAG_TOKENS,
    PROGRESS_PARTS,
    TURN_BIT,
    SignalLayout,
)
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.plan import ONE_RANK_SUM_THREADS, required_plan
from moe_runtime.kernels.nvrtc import Defines

MOST_LOOKED_AT = 16
"""Experts of a token up to which `combine_send` has registers for its routing in both halves."""

KERNELS = (
    "place_own_rows",
    "dispatch_send",
    "recv_count",
    "recv_permute",
    "recv_scales",
    "combine_send",
    "combine_recv",
    "one_rank_dispatch",
    "one_rank_combine",
)


def shared_macros(geometry: ExchangeGeometry) -> dict[str, int | str]:
    """Of signalling.cuh, and the record's layout."""
    return {
        "WORLD": geometry.world_size,
        "ABORT": SignalLayout(geometry.world_size).abort,
        "ABORT_WORDS": ABORT_WORDS,
        "TIMEOUT": int(ErrorCode.TIMEOUT),
        "K": geometry.top_k,
        **geometry.record.constants,
        **({name: geometry.kernel_prefix + name for name in KERNELS} if geometry.kernel_prefix else {}),
    }


def token_macros(geometry: ExchangeGeometry) -> dict[str, int | str]:
    """Of kernels that send tokens or wait for them."""
    signals = SignalLayout(geometry.world_size)
    return {
        "FMT": int(geometry.token_format.code),
        "DISPATCH_FLAG": signals.dispatch_flag,
        "TOKEN_COUNT": signals.token_count,
        "COUNT_BITS": COUNT_BITS,
        "TURN_BIT": TURN_BIT,
    }


@cache
def own_rows_macros(geometry: ExchangeGeometry, *, ids_64: bool) -> Defines:
    """Macros of `own_rows.cu`."""
    signals = SignalLayout(geometry.world_size)
    return Defines(
        {
            **shared_macros(geometry),
            "IDS": "long long" if ids_64 else "int",
            "OWN_TOKENS": required_plan(geometry).own_tokens,
            "EXPERTS": max(geometry.num_local_experts, 1),
            "ALL_EXPERTS": geometry.num_experts,
            "READY": signals.ready,
            "COMBINE_FLAG": signals.combine_flag,
            "COUNTED": signals.counted,
        }
    )


@cache
def dispatch_macros(
    geometry: ExchangeGeometry, *, ids_64: bool, static_gsf: bool, await_ready: bool, own_rows: bool = False
) -> Defines:
    """Macros of `dispatch_send.cu`.

    `await_ready` where this kernel stores to its peers itself, `own_rows` where it runs beside `place_own_rows`.
    """
    plan, signals = required_plan(geometry), SignalLayout(geometry.world_size)
    fmt = geometry.token_format
    of_own_rows: dict[str, int | str] = {
        "OWN_TOKENS": plan.own_tokens,
        "QUANT_BYTES": fmt.quant_bytes(geometry.hidden),
        "SCALE_COLUMNS": fmt.scale_columns(geometry.hidden),
    }
    return Defines(
        {
            **shared_macros(geometry),
            **token_macros(geometry),
            "HIDDEN": geometry.hidden,
            "IDS": "long long" if ids_64 else "int",
            "ROUTER_IDS": int(geometry.router_ids is not None),
            "TEAM": plan.team_threads,
            "TEAMS": plan.teams,
            "STATIC_GSF": int(static_gsf),
            "AWAIT_READY": int(await_ready),
            "PER_TOKEN_FLAGS": int(await_ready and plan.per_token_flags),
            "REPEATS": int(geometry.accepts_repeats),
            "OWN_ROWS": int(own_rows),
            **(of_own_rows if own_rows else {}),
            "READY": signals.ready,
            "COMBINE_FLAG": signals.combine_flag,
            "ROUTING": int(ErrorCode.ROUTING),
            "DISPATCH_SEND": int(Phase.DISPATCH_SEND),
        }
    )


@cache
def recv_macros(
    geometry: ExchangeGeometry,
    *,
    scales: bool = True,
    padded: bool = False,
    waits: bool = False,
    own_rows: bool = False,
) -> Defines:
    """Macros of `dispatch_recv.cu`.

    Without `scales` those stay in the records, `padded` is for `padded.PaddedRows`, with `waits` they are counted, and
    with `own_rows` this rank's own may be there already.
    """
    plan, fmt = required_plan(geometry), geometry.token_format
    return Defines(
        {
            **shared_macros(geometry),
            **token_macros(geometry),
            "EXPERTS": max(geometry.num_local_experts, 1),
            "CHUNK": plan.chunk_slots,
            "WARPS": plan.recv_warps,
            "LOOPED": int(geometry.num_sms is not None),
            "PLACES_BYTES": plan.place_shared_bytes,
            "CONTIGUOUS": int(geometry.contiguous or padded),
            "PADDED": int(padded),
            "OWN_ROWS": int(own_rows),
            "PER_TOKEN_FLAGS": int(plan.per_token_flags),
            "REPEATS": int(geometry.accepts_repeats),
            "WAITS": int(waits),
            "READY": SignalLayout(geometry.world_size).ready,
            "QUANT_BYTES": fmt.quant_bytes(geometry.hidden),
            "SCALE_COLUMNS": fmt.scale_columns(geometry.hidden) if scales else 0,
            "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
            "MISMATCH": int(ErrorCode.MISMATCH),
            "CAPACITY": int(ErrorCode.CAPACITY),
            "EXPERT_CAPACITY": int(ErrorCode.EXPERT_CAPACITY),
            "DISPATCH_RECV": int(Phase.DISPATCH_RECV),
        }
    )


@cache
def combine_macros(
    geometry: ExchangeGeometry,
    *,
    output_bf16: bool,
    has_shared: bool,
    await_tokens: bool = False,
    of_some: bool = False,
    waits: bool = False,
) -> Defines:
    """Macros of `combine.cu`.

    `await_tokens` where `combine_send` follows a dispatch that nothing has received, `of_some` where `combine_recv`
    sums some of the tokens, `waits` where they are counted.
    """
    plan, signals = required_plan(geometry), SignalLayout(geometry.world_size)
    return Defines(
        {
            **shared_macros(geometry),
            **(token_macros(geometry) | {"MISMATCH": int(ErrorCode.MISMATCH)} if await_tokens else {}),
            "AWAIT_TOKENS": int(await_tokens),
            "BOTH_HALVES": int(plan.per_token_flags and geometry.top_k <= MOST_LOOKED_AT),
            "HIDDEN": geometry.output_hidden,
            "WIRE": int(geometry.combine_format.code),
            "PARTS": geometry.parts,
            "SUMS_BY_ENTRY": int(geometry.sums_by_entry),
            "PARTIAL_BYTES": geometry.partial_bytes,
            "PARTIAL_SCALES_AT": geometry.partial_scales_offset,
            "READERS": plan.output_readers,
            "PLACES": plan.output_ring(output_bf16).places,
            "WAITING": plan.partial_readers,
            "PARTIALS": plan.partial_ring(has_shared).places,
            "OUTPUT_BF16": int(output_bf16),
            "HAS_SHARED": int(has_shared),
            "WAITS": int(waits),
            "COMBINE_FLAG": signals.combine_flag,
            "PARTIAL_FLAGS": int(plan.partial_flags and not of_some),
            "PARTIAL_FLAG": signals.partial_flag,
            "PARTIAL_FLAG_TOKENS": PARTIAL_FLAG_TOKENS,
            "PROGRESS": signals.progress,
            "PROGRESS_PARTS": PROGRESS_PARTS,
            "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
            "COMBINE_SEND": int(Phase.COMBINE_SEND),
            "COMBINE_RECV": int(Phase.COMBINE_RECV),
        }
    )


@cache
def one_rank_dispatch_macros(geometry: ExchangeGeometry, *, ids_64: bool, static_gsf: bool, scales: bool) -> Defines:
    """Macros of `one_rank_dispatch.cu`; without `scales` those stay in the records."""
    plan, fmt = required_plan(geometry), geometry.token_format
    return Defines(
        {
            **shared_macros(geometry),
            **token_macros(geometry),
            "HIDDEN": geometry.hidden,
            "IDS": "long long" if ids_64 else "int",
            "ROUTER_IDS": int(geometry.router_ids is not None),
            "EXPERTS": geometry.num_experts,
            "MOST": plan.one_rank_tokens,
            "THREADS": plan.one_rank_threads,
            "STATIC_GSF": int(static_gsf),
            "CONTIGUOUS": int(geometry.contiguous),
            "QUANT_BYTES": fmt.quant_bytes(geometry.hidden),
            "SCALE_COLUMNS": fmt.scale_columns(geometry.hidden) if scales else 0,
            "ROUTING": int(ErrorCode.ROUTING),
            "CAPACITY": int(ErrorCode.CAPACITY),
            "DISPATCH_SEND": int(Phase.DISPATCH_SEND),
            "DISPATCH_RECV": int(Phase.DISPATCH_RECV),
        }
    )


@cache
def one_rank_combine_macros(geometry: ExchangeGeometry, *, output_bf16: bool, has_shared: bool) -> Defines:
    """Macros of `one_rank_combine.cu`."""
    return Defines(
        {
            **shared_macros(geometry),
            "HIDDEN": geometry.output_hidden,
            "WIRE": int(geometry.combine_format.code),
            "THREADS": ONE_RANK_SUM_THREADS,
            "OUTPUT_BF16": int(output_bf16),
            "HAS_SHARED": int(has_shared),
            "COMBINE_FLAG": SignalLayout(geometry.world_size).combine_flag,
            "STALE_HANDLE": int(ErrorCode.STALE_HANDLE),
            "COMBINE_SEND": int(Phase.COMBINE_SEND),
        }
    )
