"""Ahead-of-time cases of the exchange, and the layers that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from moe_runtime.comm.hosts import Hosts
from moe_runtime.kernels import clock, recorded_routes
from moe_runtime.kernels.exchange import hierarchical_cuda, layout, local_ids, padded, payload, row_sums, rows
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, RouterIds, worst_case_rows
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.kernels.exchange.macros import (
    combine_macros,
    dispatch_macros,
    one_rank_combine_macros,
    one_rank_dispatch_macros,
    own_rows_macros,
    recv_macros,
)
from moe_runtime.kernels.exchange.padded_rows import PaddedScales
from moe_runtime.kernels.exchange.payload import PayloadLayout
from moe_runtime.kernels.exchange.plan import required_plan
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import (
    BF16,
    COMBINE_FORMATS,
    FORMATS,
    FP8_BLOCK,
    MXFP8,
    NVFP4,
    TokenFormat,
)
from moe_runtime.kernels.nvrtc import Defines
from moe_runtime.kernels.runtime import SM_SHARED_BYTES
from moe_runtime.launch.research.aot_cases import ALL_ARCHS, SM_SHARED_BYTES_OF, AotCase, CudaCase, row_case

BULK_STORE = r"cp\.async\.bulk\.global\.shared::cta\.bulk_group"
BULK_LOAD = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes"
"""Instructions that a compiled kernel must have, as patterns."""
SAME_MEMORY = (90, 100), (120,)
"""Architectures whose SMs have equally much shared memory: one plan, and one set of macros, does for them."""


def sample_geometry(
    token_format: str,
    *,
    combine_format: str = "bf16",
    max_tokens: int = 128,
    contiguous: bool = False,
    num_sms: int | None = None,
    accepts_repeats: bool = False,
    sm_shared_bytes: int = SM_SHARED_BYTES,
) -> ExchangeGeometry:
    """Rank 3 of 8 in a layer of DeepSeek-V3's size: what kernels are compiled ahead of time for."""
    record = RecordLayout(FORMATS[token_format], 7168, 8)
    rows = worst_case_rows(256, 8, 8, max_tokens)
    sizes = 3, 8, record, FORMATS[combine_format], 256, max_tokens, contiguous, rows, num_sms
    return ExchangeGeometry(*sizes, accepts_repeats=accepts_repeats, sm_shared_bytes=sm_shared_bytes)


def one_rank_geometry(
    token_format: str,
    *,
    combine_format: str = "bf16",
    max_tokens: int = 32,
    contiguous: bool = False,
    router_ids: RouterIds | None = None,
    sm_shared_bytes: int = SM_SHARED_BYTES,
) -> ExchangeGeometry:
    """A rank alone in a layer of Qwen3-30B-A3B's size: what kernels of one rank are compiled ahead of time for."""
    record = RecordLayout(FORMATS[token_format], 2048, 8)
    rows = worst_case_rows(128, 1, 8, max_tokens)
    sizes = 0, 1, record, FORMATS[combine_format], 128, max_tokens, contiguous, rows
    return ExchangeGeometry(*sizes, router_ids=router_ids, sm_shared_bytes=sm_shared_bytes)


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

    def own_rows(self) -> Iterator[CudaCase]:
        """Of many tokens."""
        geometry = self.sample(contiguous=True, max_tokens=4096).placing_own_rows()
        yield self.case("own_rows", "place_own_rows", own_rows_macros(geometry, ids_64=True))
        defines = dispatch_macros(geometry, ids_64=True, static_gsf=False, await_ready=True, own_rows=True)
        shared_bytes = required_plan(geometry).send_shared_bytes
        yield self.case("dispatch_send", "dispatch_send", defines, shared_bytes, instruction=BULK_STORE)
        yield from self.recv(geometry, own_rows=True)

    def recv(
        self, geometry: ExchangeGeometry, scales: bool = True, waits: bool = False, own_rows: bool = False
    ) -> Iterator[CudaCase]:
        defines = recv_macros(geometry, scales=scales, waits=waits, own_rows=own_rows)
        places_bytes = required_plan(geometry).place_shared_bytes
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
        """Rows gathered or copied, scales copied or left in the records; ids of a router with more experts, few and
        many; both kinds of outputs, a shared expert or none."""
        fmt = FORMATS[self.fmt]
        ways = [(False, False)] if fmt.swizzled else []  # contiguous rows, copied scales
        for contiguous, scales in (*ways, (False, True), (True, True)):
            geometry = one_rank_geometry(self.fmt, contiguous=contiguous, **self.sm)
            yield self._one_rank_dispatch(geometry, ids_64=True, static_gsf=False, scales=scales)
        router = RouterIds(128, 256)
        geometry = one_rank_geometry(self.fmt, router_ids=router, **self.sm)
        yield self._one_rank_dispatch(geometry, ids_64=False, static_gsf=False, scales=True)
        yield self.send(one_rank_geometry(self.fmt, router_ids=router, max_tokens=4096, **self.sm))
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
            if self.fmt == "bf16":
                yield from self.recv(geometry, waits=True)
            yield self.send(geometry)
        if fmt is FP8_BLOCK:
            yield from self.own_rows()
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
            for geometry in (few, full) if self.fmt == "bf16" else ():
                yield self.combine("combine_recv", geometry, output_bf16=True, has_shared=False, waits=True)


def _of_hosts(fmt: str, archs: tuple[int, ...]) -> Iterator[CudaCase]:
    """Host 1 of 4 with 8 ranks each, few tokens and many; sums in FP8 where tokens are."""
    combine_format = fmt if fmt in ("fp8_block", "mxfp8") else "bf16"
    sm_bytes = SM_SHARED_BYTES_OF[archs[0]]
    for max_tokens in (128, 1024):
        of_host = sample_geometry(fmt, combine_format=combine_format, max_tokens=max_tokens, sm_shared_bytes=sm_bytes)
        geometry = HostGeometry(Hosts(4, 8, 1, 3), replace(of_host, world_size=32))
        for kernel in hierarchical_cuda.KERNELS:
            if kernel == "host_quantize" and combine_format == "bf16":
                continue
            defines, copies, shared_bytes = hierarchical_cuda.host_macros(geometry), {}, 0
            if kernel == "forward_send":
                copies, shared_bytes = dict.fromkeys(archs, BULK_STORE), hierarchical_cuda._shared_bytes(geometry)
            yield CudaCase(kernel, fmt, hierarchical_cuda.FILE, kernel, defines, archs, copies, shared_bytes)


def _padded(fmt: TokenFormat, kind: PaddedScales, slots: int = 1024) -> AotCase:
    record = RecordLayout(fmt, 7168, 8)
    num_scales = fmt.scale_columns(7168)
    constexprs = padded._constexprs(record, record.scales_offset, fmt.quant_bytes(7168), 8, 8, num_scales, kind)
    scales = {"scales_ptr": "*u8" if kind.scale_bytes == 1 else "*i32"}
    types = {"records_ptr": "*u8", "rows_ptr": "*u8", "layout_range_ptr": "*i64", **scales}
    values = {**constexprs, "AT_ONCE": padded.rows_at_once(slots), "HAS_STATISTICS": True}
    return row_case("dispatch_place", fmt.name, padded._dispatch_place_kernel, values, types)


_PAYLOADS = (PayloadLayout(2 * 7168), PayloadLayout(2 * 7168, 0, 8), PayloadLayout(7168, 56, 8))
_PAYLOAD_TYPES = {
    **dict.fromkeys(("packed_ptr", "tokens_ptr", "rows_ptr"), "*u8"),
    **dict.fromkeys(("ids_ptr", "place_ptr"), "*i64"),
    **dict.fromkeys(("scales_ptr", "weights_ptr"), "*fp32"),
}


def _rows() -> Iterator[AotCase]:
    """Kernels that copy rows before and after an exchange."""
    yield _padded(BF16, PaddedScales.NONE)
    yield _padded(BF16, PaddedScales.NONE, slots=2**21)
    yield _padded(FP8_BLOCK, PaddedScales.COLUMNS)
    yield _padded(FP8_BLOCK, PaddedScales.PACKED_COLUMNS)
    yield _padded(MXFP8, PaddedScales.ROWS)
    yield _padded(NVFP4, PaddedScales.SWIZZLED)
    for packed in _PAYLOADS:
        fmt, constexprs = "fp8_block" if packed.num_scales else "bf16", payload._constexprs(packed)
        pack = constexprs | {"WORDS": packed.words}
        yield row_case("dispatch_pack", fmt, payload._dispatch_pack_kernel, pack, _PAYLOAD_TYPES)
        unpack = constexprs | {"HAS_PLACE": False, "HAS_TOKENS": True}
        yield row_case("dispatch_unpack", fmt, payload._dispatch_unpack_kernel, unpack, _PAYLOAD_TYPES)
        expand = constexprs | {"K": 8, "HAS_WEIGHTS": True}
        types = _PAYLOAD_TYPES | {"row_weights_ptr": "*fp32"}
        yield row_case("dispatch_expand", fmt, payload._dispatch_expand_kernel, expand, types)


def _direct(archs: tuple[int, ...]) -> Iterator[CudaCase]:
    """Counts and rows of normal mode: rank 3 of 8, tokens in bf16 and FP8, with ids and bare, copied and left."""
    for from_ids in (False, True):
        defines = rows.count_macros(8, from_ids=from_ids)
        yield CudaCase("dispatch_counts", "any", "row_counts.cu", "dispatch_counts", defines, archs, shared_bytes=0)
    ranks: dict[str, Any] = {"rank": 3, "world_size": 8, "sm_shared_bytes": SM_SHARED_BYTES_OF[archs[0]]}
    for packed in _PAYLOADS:
        fmt = "fp8_block" if packed.num_scales else "bf16"
        for own_too in (False, True):
            geometry = rows.RowGeometry(**ranks, max_tokens=4096, layout=packed, own_too=own_too)
            macros, shared_bytes = rows.row_macros(geometry), geometry.shared_bytes
            for kernel, instruction in (("dispatch_send_rows", BULK_LOAD), ("dispatch_recv_rows", BULK_STORE)):
                stay = own_too and kernel == "dispatch_recv_rows"
                wanted = {} if stay else dict.fromkeys(archs, instruction)
                yield CudaCase(kernel, fmt, "rows.cu", kernel, macros, archs, wanted, shared_bytes)
    for top_k, biases, num_sms in ((0, 0, None), (8, 2, None), (0, 1, 24)):
        sums = row_sums.SumGeometry(**ranks, hidden=7168, top_k=top_k, biases=biases, num_sms=num_sms)
        for kernel, shared_bytes in (("combine_send_rows", sums.shared_bytes), ("combine_recv_rows", 0)):
            wanted = dict.fromkeys(archs, BULK_STORE) if shared_bytes else {}
            macros = row_sums.sum_macros(sums)
            yield CudaCase(kernel, "bf16", "row_sums.cu", kernel, macros, archs, wanted, shared_bytes)


def _others() -> Iterator[CudaCase]:
    yield CudaCase("write_clock", "any", "clock.cu", "write_clock", clock.DEFINES, instruction={90: "globaltimer"})
    counts = 4 * (8 + 256)
    macros = layout._macros(8)
    yield CudaCase("dispatch_layout", "any", "token_layout.cu", "dispatch_layout", macros, ALL_ARCHS, {}, counts)
    for ids_64 in (False, True):
        yield CudaCase("local_ids", "any", "local_ids.cu", "local_ids", local_ids._macros(ids_64), ALL_ARCHS)
    for ids, ring in product((torch.int32, torch.int64), (torch.int16, torch.int32)):
        macros = recorded_routes._macros(ids, ring)
        yield CudaCase("record_routes", "any", "record_routes.cu", "record_routes", macros, ALL_ARCHS)


AOT_CASES: tuple[AotCase | CudaCase, ...] = (
    *(case for archs in SAME_MEMORY for fmt in FORMATS for case in _Cases(fmt, archs)),
    *(case for archs in SAME_MEMORY for fmt in FORMATS for case in _of_hosts(fmt, archs)),
    *(case for archs in SAME_MEMORY for case in _direct(archs)),
    *_rows(),
    *_others(),
)
