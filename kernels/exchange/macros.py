"""Macros that the CUDA exchange is compiled with, from a geometry and its plan, and what is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_runtime.comm.errors import ErrorCode, Phase
from moe_runtime.comm.signals import (
    ABORT_WORDS,
    COUNT_BITS,
    PARTIAL_FLAG_TOKENS,
    PROGRESS_PARTS,
    TURN_BIT,
    SignalLayout,
)
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, one_rank_geometry, sample_geometry
from moe_runtime.kernels.exchange.plan import ONE_RANK_SUM_THREADS, required_plan
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS, FORMATS
from moe_runtime.kernels.nvrtc import Defines
from moe_runtime.kernels.runtime import SM_SHARED_BYTES_OF, CudaCase

MOST_LOOKED_AT = 16
"""Experts of a token up to which `combine_send` has registers for its routing in both halves."""

KERNELS = (
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
def dispatch_macros(geometry: ExchangeGeometry, *, ids_64: bool, static_gsf: bool, await_ready: bool) -> Defines:
    """Macros of `dispatch_send.cu`; `await_ready` where this kernel stores to its peers itself."""
    plan, signals = required_plan(geometry), SignalLayout(geometry.world_size)
    return Defines(
        {
            **shared_macros(geometry),
            **token_macros(geometry),
            "HIDDEN": geometry.hidden,
            "IDS": "long long" if ids_64 else "int",
            "TEAM": plan.team_threads,
            "TEAMS": plan.teams,
            "STATIC_GSF": int(static_gsf),
            "AWAIT_READY": int(await_ready),
            "PER_TOKEN_FLAGS": int(await_ready and plan.per_token_flags),
            "REPEATS": int(geometry.accepts_repeats),
            "READY": signals.ready,
            "COMBINE_FLAG": signals.combine_flag,
            "ROUTING": int(ErrorCode.ROUTING),
            "DISPATCH_SEND": int(Phase.DISPATCH_SEND),
        }
    )


@cache
def recv_macros(geometry: ExchangeGeometry, *, scales: bool = True, padded: bool = False) -> Defines:
    """Macros of `dispatch_recv.cu`; without `scales` those stay in the records, `padded` is for `padded.PaddedRows`."""
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
            "PER_TOKEN_FLAGS": int(plan.per_token_flags),
            "REPEATS": int(geometry.accepts_repeats),
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
) -> Defines:
    """Macros of `combine.cu`.

    `await_tokens` where `combine_send` follows a dispatch that nothing has received, `of_some` where `combine_recv`
    sums some of the tokens.
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
            "PARTIAL_BYTES": geometry.partial_bytes,
            "PARTIAL_SCALES_AT": geometry.partial_scales_offset,
            "READERS": plan.output_readers,
            "PLACES": plan.output_ring(output_bf16).places,
            "WAITING": plan.partial_readers,
            "PARTIALS": plan.partial_ring(has_shared).places,
            "OUTPUT_BF16": int(output_bf16),
            "HAS_SHARED": int(has_shared),
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


BULK_STORE = r"cp\.async\.bulk\.global\.shared::cta\.bulk_group"
BULK_LOAD = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes"
"""Instructions that a compiled kernel must have, as patterns."""


@dataclass(frozen=True)
class _Cases:
    """Ahead-of-time cases of tokens in format `fmt` for GPUs whose SMs have equally much shared memory."""

    fmt: str
    archs: tuple[int, ...]

    @property
    def sm(self) -> dict[str, Any]:
        return {"sm_shared_bytes": SM_SHARED_BYTES_OF[self.archs[0]]}

    def sample(self, **sizes: Any) -> ExchangeGeometry:
        return sample_geometry(self.fmt, **sizes, **self.sm)

    def case(
        self,
        file: str,
        kernel: str,
        defines: Defines,
        shared_bytes: int = 0,
        instruction: str | None = None,
    ) -> CudaCase:
        wanted = {} if instruction is None else dict.fromkeys(self.archs, instruction)
        return CudaCase(kernel, self.fmt, f"{file}.cu", kernel, defines, self.archs, wanted, shared_bytes)

    def send(self, geometry: ExchangeGeometry, static_gsf: bool = False) -> CudaCase:
        defines = dispatch_macros(geometry, ids_64=True, static_gsf=static_gsf, await_ready=True)
        shared_bytes = required_plan(geometry).send_shared_bytes
        return self.case("dispatch_send", "dispatch_send", defines, shared_bytes, instruction=BULK_STORE)

    def recv(self, geometry: ExchangeGeometry, scales: bool = True) -> Iterator[CudaCase]:
        defines, places_bytes = recv_macros(geometry, scales=scales), required_plan(geometry).place_shared_bytes
        for kernel in ("recv_count", "recv_permute", "recv_scales"):
            yield self.case("dispatch_recv", kernel, defines, places_bytes if kernel == "recv_permute" else 0)

    def combine(self, kernel: str, geometry: ExchangeGeometry, **how: bool) -> CudaCase:
        plan = required_plan(geometry)
        if kernel == "combine_send":
            shared_bytes, instruction = plan.combine_shared_bytes[how["output_bf16"]], BULK_STORE
        else:
            shared_bytes, instruction = plan.partial_ring(how["has_shared"]).shared_bytes, BULK_LOAD
        return self.case("combine", kernel, combine_macros(geometry, **how), shared_bytes, instruction=instruction)

    def one_rank(self) -> Iterator[CudaCase]:
        """Rows gathered or copied, scales copied or left in the records; both kinds of outputs, a shared expert or
        none."""
        fmt = FORMATS[self.fmt]
        ways = [(False, False)] if fmt.swizzled else []  # contiguous rows, copied scales
        for contiguous, scales in (*ways, (False, True), (True, True)):
            geometry = one_rank_geometry(self.fmt, contiguous=contiguous, **self.sm)
            yield self._one_rank_dispatch(geometry, ids_64=True, static_gsf=False, scales=scales)
        if fmt.has_row_scale:
            geometry = one_rank_geometry(self.fmt, **self.sm)
            yield self._one_rank_dispatch(geometry, ids_64=False, static_gsf=True, scales=True)
        if self.fmt in COMBINE_FORMATS:
            geometry = one_rank_geometry("nvfp4", combine_format=self.fmt, **self.sm)
            for output_bf16, has_shared in ((True, False), (True, True), (False, False)):
                defines = one_rank_combine_macros(geometry, output_bf16=output_bf16, has_shared=has_shared)
                yield self.case("one_rank_combine", "one_rank_combine", defines)

    def _one_rank_dispatch(self, geometry: ExchangeGeometry, **how: bool) -> CudaCase:
        defines, shared_bytes = one_rank_dispatch_macros(geometry, **how), required_plan(geometry).one_rank_shared_bytes
        return self.case("one_rank_dispatch", "one_rank_dispatch", defines, shared_bytes)

    def __iter__(self) -> Iterator[CudaCase]:
        """Few tokens and many, contiguous or not, few SMs, and a rank alone."""
        fmt = FORMATS[self.fmt]
        yield from self.one_rank()
        yield from self.recv(self.sample())
        for sizes in ({}, {"max_tokens": 4096}, {"num_sms": 16}):
            geometry = self.sample(contiguous=True, **sizes)
            yield from self.recv(geometry)
            yield self.send(geometry)
        if not fmt.swizzled:
            geometry = self.sample(accepts_repeats=True)
            places_bytes = required_plan(geometry).place_shared_bytes
            yield self.case("dispatch_recv", "recv_permute", recv_macros(geometry, padded=True), places_bytes)
        for max_tokens in (128, 4096):
            repeats = self.sample(max_tokens=max_tokens, accepts_repeats=True)
            yield self.send(repeats)
            yield from self.recv(repeats)
        if fmt.swizzled:
            yield from self.recv(self.sample(), scales=False)
        if fmt.has_row_scale:
            yield self.send(self.sample(), static_gsf=True)
        if self.fmt in COMBINE_FORMATS:
            wire: dict[str, Any] = {"combine_format": self.fmt, **self.sm}
            full, few = sample_geometry("nvfp4", **wire), sample_geometry("nvfp4", max_tokens=8, **wire)
            for output_bf16 in (True, False):
                yield self.combine("combine_send", full, output_bf16=output_bf16, has_shared=True)
            arriving = sample_geometry("bf16", **wire)
            yield self.combine("combine_send", arriving, output_bf16=True, has_shared=False, await_tokens=True)
            yield self.combine("combine_recv", full, output_bf16=True, has_shared=True)
            limited = sample_geometry("nvfp4", num_sms=16, **wire)
            yield self.combine("combine_send", limited, output_bf16=True, has_shared=False)
            for kernel in ("combine_send", "combine_recv"):
                yield self.combine(kernel, few, output_bf16=True, has_shared=False)


SAME_MEMORY = (90, 100), (120,)
"""Architectures whose SMs have equally much shared memory: one plan, and one set of macros, does for them."""
AOT_CASES: tuple[CudaCase, ...] = tuple(case for archs in SAME_MEMORY for fmt in FORMATS for case in _Cases(fmt, archs))
