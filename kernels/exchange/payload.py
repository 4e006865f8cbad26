"""What travels with a token of DeepEP's normal mode, packed into bf16 words before dispatch and unpacked behind it.

A row is unpacked once, or, expanded, once for each expert of the token.

`[token | scales fp32 | expert ids int32 | weights fp32]`: the exchange copies the bits. Each kernel is one pass over
the rows. They are bound by memory: unpacking 4096 tokens of 7168 bf16 elements on 2 ranks moves 2 x 117 MB,
80 us at 3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.exchange.landing import LandedRows, LandedTokens
from moe_runtime.kernels.exchange.row_kernels import padded
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.kernels.formats.reference_quantize import copy_as

WORD = 2
"""Bytes of a bf16 element, by which payload is counted."""
PROGRAMS_PER_SM = 8
"""Of 4 warps each, where SMs are limited."""


@dataclass(frozen=True)
class PayloadLayout:
    """Byte offsets in the payload of a token.

    Attributes:
        token_bytes: of the token, a multiple of 16.
        num_scales: fp32 scales.
        top_k: expert ids and weights.
    """

    token_bytes: int
    num_scales: int = 0
    top_k: int = 0

    @property
    def ids_at(self) -> int:
        return self.token_bytes + 4 * self.num_scales

    @property
    def weights_at(self) -> int:
        return self.ids_at + 4 * self.top_k

    @property
    def words(self) -> int:
        """bf16 words of the payload, a multiple of 16."""
        return align((self.weights_at + 4 * self.top_k) // WORD, 16)

    @property
    def bare(self) -> bool:
        """Whether a token is its own payload."""
        return self.words * WORD == self.token_bytes


@dataclass(slots=True)
class UnpackedRows:
    """Where `unpack_rows` writes.

    Attributes:
        tokens: e4m3 `[R, token_bytes]`, or bf16 without scales; None for ids, weights and source tokens alone.
        scales: fp32 `[R, V]`, any strides, or None.
        ids: int64 `[R, K]`, local expert ids, -1 for those of other ranks and for rows that did not come; or None.
        weights: fp32 `[R, K]`, 0 where the id is -1; or None.
        source_tokens: int32 `[R]`, token of the row at its rank, less the first token of its step.
    """

    tokens: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    source_tokens: torch.Tensor

    @classmethod
    def allocate(
        cls,
        layout: PayloadLayout,
        num_rows: int,
        device: torch.device,
        with_tokens: bool = True,
        scales_by_column: bool = False,
        source_tokens: torch.Tensor | None = None,
    ) -> UnpackedRows:
        """Uninitialised memory for `num_rows` rows; `scales_by_column` as of `allocate_scales`.

        `source_tokens` is given where it is known.
        """
        ids = weights = scales = tokens = None
        if with_tokens:
            if layout.num_scales:
                tokens = torch.empty(num_rows, layout.token_bytes, dtype=torch.float8_e4m3fn, device=device)
                scales = allocate_scales(layout, num_rows, device, scales_by_column)
            else:
                tokens = torch.empty(num_rows, layout.token_bytes // WORD, dtype=torch.bfloat16, device=device)
        if layout.top_k:
            ids = torch.empty(num_rows, layout.top_k, dtype=torch.int64, device=device)
            weights = torch.empty(num_rows, layout.top_k, dtype=torch.float32, device=device)
        if source_tokens is None:
            source_tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
        return cls(tokens, scales, ids, weights, source_tokens)

    def keep_first(self, num_rows: int) -> None:
        """Forget all rows but the first, which are contiguous; the memory stays theirs."""
        # Which takes a third of the time of a view.
        for tensor in (self.tokens, self.scales, self.ids, self.weights):
            if tensor is not None:
                tensor.resize_(num_rows, tensor.shape[1])
        self.source_tokens.resize_(num_rows)


@dataclass(frozen=True)
class ExpandedRows:
    """Where `expand_rows` writes.

    Attributes:
        tokens: uint8 `[N, token_bytes]`.
        scales: fp32 `[N, V]`, any strides, or None.
        weights: fp32 `[N]`, or None.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None


def allocate_scales(layout: PayloadLayout, num_rows: int, device: torch.device, by_column: bool) -> torch.Tensor | None:
    """Uninitialised fp32 `[num_rows, V]`, contiguous; `by_column` with strides `(1, num_rows)`, rounded up for TMA."""
    if not layout.num_scales:
        return None
    if by_column:
        return torch.empty(layout.num_scales, align(num_rows, 4), dtype=torch.float32, device=device).t()[:num_rows]
    return torch.empty(num_rows, layout.num_scales, dtype=torch.float32, device=device)


def pack_tokens(
    layout: PayloadLayout,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    *,
    engine: str,
    num_sms: int | None = None,
) -> torch.Tensor:
    """bf16 `[T, words]` of contiguous `tokens` `[T, ...]`; `tokens` itself where that is all.

    Args:
        layout: what there is.
        tokens: of any dtype, `token_bytes` each.
        scales: fp32 `[T, V]`, any strides.
        ids: int64 `[T, K]`, any strides.
        weights: fp32 `[T, K]`, any strides.
        engine: `torch`, or another for Triton's kernel.
        num_sms: most SMs; None is all.
    """
    num_tokens = tokens.shape[0]
    if layout.bare:
        return tokens.view(torch.bfloat16)
    packed = torch.empty(num_tokens, layout.words, dtype=torch.bfloat16, device=tokens.device)
    if engine == "torch":
        parts = [tokens, scales]
        if ids is not None:
            parts += [ids.to(torch.int32), weights]
        at = 0
        for part in (copy_as(part, torch.bfloat16) for part in parts if part is not None):
            packed[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        packed[:, at:] = 0
        return packed
    if num_tokens:
        _dispatch_pack_kernel[(_programs(num_tokens, num_sms),)](
            packed,
            tokens,
            packed if scales is None else scales,
            packed if ids is None else ids,
            packed if weights is None else weights,
            num_tokens,
            0 if scales is None else scales.stride(0),
            0 if scales is None else scales.stride(1),
            0 if ids is None else ids.stride(0),
            0 if weights is None else weights.stride(0),
            0 if ids is None else ids.stride(1),
            0 if weights is None else weights.stride(1),
            WORDS=layout.words,
            **_constexprs(layout),
            num_warps=4,
        )
    return packed


def unpack_rows(
    layout: PayloadLayout,
    landed: LandedTokens,
    out: UnpackedRows,
    place: torch.Tensor | None,
    *,
    first_expert: int,
    num_experts: int,
    engine: str,
    num_sms: int | None = None,
) -> None:
    """Unpack the rows that came.

    Args:
        layout: of the payload.
        landed: the rows.
        out: written: all rows without `place`, where those that did not come get ids of -1 and weights of 0.
        place: int64 `[R]`, row of `out` of each row that came; None where it is its own.
        first_expert, num_experts: ids of this rank's experts begin with `first_expert`, and are `num_experts`.
        engine, num_sms: as of `pack_tokens`.
    """
    num_rows = out.source_tokens.shape[0] if place is None else place.shape[0]
    unused = out.source_tokens
    if engine == "torch":
        _unpack_reference(layout, landed, out, place, first_expert, num_experts)
    elif num_rows:
        _dispatch_unpack_kernel[(_programs(num_rows, num_sms),)](
            landed.records,
            landed.records.stride(0) // 8,
            landed.row_index,
            landed.group_offsets,
            landed.epoch,
            unused if place is None else place,
            unused if out.tokens is None else out.tokens.view(torch.uint8),
            unused if out.scales is None else out.scales,
            unused if out.ids is None else out.ids,
            unused if out.weights is None else out.weights,
            out.source_tokens,
            *((0, 0) if out.scales is None else out.scales.stride()),
            num_rows,
            landed.row_index.shape[0],
            landed.first_row,
            landed.geometry.max_tokens,
            first_expert,
            num_experts,
            HAS_PLACE=place is not None,
            HAS_TOKENS=out.tokens is not None,
            **_constexprs(layout),
            num_warps=4,
        )


def _unpack_reference(
    layout: PayloadLayout,
    landed: LandedTokens,
    out: UnpackedRows,
    place: torch.Tensor | None,
    first_expert: int,
    num_experts: int,
) -> None:
    """`unpack_rows` in torch; waits for the host."""
    count = min(int(landed.group_offsets[1]), out.source_tokens.shape[0])
    index = landed.row_index[:count].to(torch.int64)
    to = torch.arange(count, device=index.device) if place is None else place
    rows = landed.records[index]
    if out.tokens is not None:
        out.tokens.view(torch.uint8)[to] = rows[:, : layout.token_bytes]
    first = int(landed.epoch[0] & 1) * landed.first_row
    out.source_tokens[to] = ((index - first) % landed.geometry.max_tokens).to(torch.int32)
    if out.scales is not None:
        out.scales[to] = rows[:, layout.token_bytes : layout.ids_at].contiguous().view(torch.float32)
    if out.ids is not None and out.weights is not None:
        ids = rows[:, layout.ids_at : layout.weights_at].contiguous().view(torch.int32).to(torch.int64)
        end = layout.weights_at + 4 * layout.top_k
        weights = rows[:, layout.weights_at : end].contiguous().view(torch.float32)
        local = ids - first_expert
        here = (ids >= 0) & (local >= 0) & (local < num_experts)
        if place is None:
            out.ids.fill_(-1)
            out.weights.zero_()
        out.ids[to] = torch.where(here, local, -1)
        out.weights[to] = torch.where(here, weights, 0.0)


def expand_rows(
    layout: PayloadLayout,
    landed: LandedRows,
    slots: torch.Tensor,
    weights: torch.Tensor | None,
    out: ExpandedRows,
    *,
    engine: str,
    num_sms: int | None = None,
) -> None:
    """Copy each row that came to the rows of its experts.

    Args:
        layout: of the payload.
        landed: the rows.
        slots: int32 `[R, K]`, rows of `out`, each there once, -1 for none.
        weights: fp32 `[R, K]`, copied to `out.weights`; None without these.
        out: written in the rows that `slots` names; others keep what the memory held.
        engine, num_sms: as of `pack_tokens`.
    """
    num_rows, top_k = slots.shape
    if engine == "torch":
        _expand_reference(layout, landed, slots, weights, out)
    elif num_rows:
        _dispatch_expand_kernel[(_programs(num_rows, num_sms),)](
            landed.records,
            landed.records.stride(0) // 8,
            landed.row_index,
            landed.group_offsets,
            slots,
            slots if weights is None else weights,
            out.tokens,
            out.tokens if out.scales is None else out.scales,
            out.tokens if out.weights is None else out.weights,
            *((0, 0) if out.scales is None else out.scales.stride()),
            num_rows,
            HAS_WEIGHTS=weights is not None,
            **_constexprs(layout) | {"K": top_k},
            num_warps=4,
        )


def _expand_reference(
    layout: PayloadLayout,
    landed: LandedRows,
    slots: torch.Tensor,
    weights: torch.Tensor | None,
    out: ExpandedRows,
) -> None:
    """`expand_rows` in torch; waits for the host."""
    row, k = (slots >= 0).nonzero(as_tuple=True)
    to = slots[row, k].to(torch.int64)
    records = landed.records[landed.row_index[row].to(torch.int64)]
    out.tokens[to] = records[:, : layout.token_bytes]
    if out.scales is not None:
        out.scales[to] = records[:, layout.token_bytes : layout.ids_at].contiguous().view(torch.float32)
    if out.weights is not None and weights is not None:
        out.weights[to] = weights[row, k]


def _programs(rows: int, num_sms: int | None) -> int:
    return rows if num_sms is None else min(rows, PROGRAMS_PER_SM * num_sms)


@cache
def _constexprs(layout: PayloadLayout) -> dict[str, int]:
    return {
        "TOKEN_BYTES": layout.token_bytes,
        "NUM_SCALES": layout.num_scales,
        "K": layout.top_k,
        "WIDTH": min(1024, padded(layout.token_bytes // 8)),
        "SCALES_PAD": padded(max(layout.num_scales, 1)),
        "K_PAD": padded(max(layout.top_k, 1)),
    }


@triton.jit(do_not_specialize=["num_tokens"])
def _dispatch_pack_kernel(
    packed_ptr,
    tokens_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    scale_row,
    scale_column,
    id_row,
    weight_row,
    id_column,
    weight_column,
    TOKEN_BYTES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        to = packed_ptr.to(tl.pointer_type(tl.uint8)) + row * (WORDS * 2)
        source = tokens_ptr.to(tl.pointer_type(tl.int64)) + row * (TOKEN_BYTES // 8)
        column = tl.arange(0, WIDTH)
        for start in range(0, TOKEN_BYTES // 8, WIDTH):
            inside = start + column < TOKEN_BYTES // 8
            value = tl.load(source + start + column, mask=inside, other=0)
            tl.store(to.to(tl.pointer_type(tl.int64)) + start + column, value, mask=inside)
        if NUM_SCALES > 0:
            v = tl.arange(0, SCALES_PAD)
            at = scales_ptr.to(tl.pointer_type(tl.int32)) + row * scale_row + v.to(tl.int64) * scale_column
            value = tl.load(at, mask=v < NUM_SCALES, other=0)
            tl.store((to + TOKEN_BYTES).to(tl.pointer_type(tl.int32)) + v, value, mask=v < NUM_SCALES)
        if K > 0:
            k = tl.arange(0, K_PAD)
            column = k.to(tl.int64)
            at = ids_ptr.to(tl.pointer_type(tl.int64)) + row * id_row + column * id_column
            ids = tl.load(at, mask=k < K, other=-1)
            behind = (to + TOKEN_BYTES + 4 * NUM_SCALES).to(tl.pointer_type(tl.int32))
            tl.store(behind + k, ids.to(tl.int32), mask=k < K)
            at = weights_ptr.to(tl.pointer_type(tl.int32)) + row * weight_row + column * weight_column
            tl.store(behind + K + k, tl.load(at, mask=k < K, other=0), mask=k < K)


@triton.jit
def _copy_token(
    source,
    to,
    tokens_ptr,
    scales_ptr,
    scale_row,
    scale_column,
    TOKEN_BYTES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES_PAD: tl.constexpr,
):
    """Token and scales of the record at `source` to row `to`, an int64."""
    column = tl.arange(0, WIDTH)
    target = tokens_ptr.to(tl.pointer_type(tl.int64)) + to * (TOKEN_BYTES // 8)
    for start in range(0, TOKEN_BYTES // 8, WIDTH):
        inside = start + column < TOKEN_BYTES // 8
        value = tl.load(source + start + column, mask=inside, other=0)
        tl.store(target + start + column, value, mask=inside)
    if NUM_SCALES > 0:
        v = tl.arange(0, SCALES_PAD)
        value = tl.load(source.to(tl.pointer_type(tl.int32)) + TOKEN_BYTES // 4 + v, mask=v < NUM_SCALES, other=0)
        at = scales_ptr.to(tl.pointer_type(tl.int32)) + to * scale_row + v.to(tl.int64) * scale_column
        tl.store(at, value, mask=v < NUM_SCALES)


@triton.jit(do_not_specialize=["num_rows", "capacity", "first_row", "max_tokens", "first_expert", "num_experts"])
def _dispatch_unpack_kernel(
    rows_ptr,
    row_stride,
    row_index_ptr,
    offsets_ptr,
    epoch_ptr,
    place_ptr,
    tokens_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    source_tokens_ptr,
    scale_row,
    scale_column,
    num_rows,
    capacity,
    first_row,
    max_tokens,
    first_expert,
    num_experts,
    HAS_PLACE: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    came = tl.load(offsets_ptr + 1)
    first = (tl.load(epoch_ptr) & 1) * first_row
    for position in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        there = position < came
        index = tl.load(row_index_ptr + position, mask=there & (position < capacity), other=0)
        to = tl.cast(position, tl.int64)
        if HAS_PLACE:
            to = tl.load(place_ptr + position)
        source = rows_ptr.to(tl.pointer_type(tl.int64)) + index.to(tl.int64) * row_stride
        if there:
            if HAS_TOKENS:
                _copy_token(
                    source,
                    to,
                    tokens_ptr,
                    scales_ptr,
                    scale_row,
                    scale_column,
                    TOKEN_BYTES,
                    NUM_SCALES,
                    WIDTH,
                    SCALES_PAD,
                )
            tl.store(source_tokens_ptr + to, (index - first) % max_tokens)
        if K > 0:
            k = tl.arange(0, K_PAD)
            of_row = source.to(tl.pointer_type(tl.int32)) + TOKEN_BYTES // 4 + NUM_SCALES
            ids = tl.load(of_row + k, mask=(k < K) & there, other=-1)
            local = ids - first_expert
            here = (ids >= 0) & (local >= 0) & (local < num_experts) & there
            at = ids_ptr.to(tl.pointer_type(tl.int64)) + to * K + k
            tl.store(at, tl.where(here, local, -1).to(tl.int64), mask=k < K)
            bits = tl.load(of_row + K + k, mask=(k < K) & here, other=0)
            tl.store(weights_ptr.to(tl.pointer_type(tl.int32)) + to * K + k, bits, mask=k < K)


@triton.jit(do_not_specialize=["num_rows"])
def _dispatch_expand_kernel(
    rows_ptr,
    row_stride,
    row_index_ptr,
    offsets_ptr,
    slots_ptr,
    row_weights_ptr,
    tokens_ptr,
    scales_ptr,
    weights_ptr,
    scale_row,
    scale_column,
    num_rows,
    HAS_WEIGHTS: tl.constexpr,
    TOKEN_BYTES: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    came = tl.load(offsets_ptr + 1)
    for position in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        if position < came:
            index = tl.load(row_index_ptr + position)
            source = rows_ptr.to(tl.pointer_type(tl.int64)) + index.to(tl.int64) * row_stride
            for k in range(K):
                entry = tl.cast(position, tl.int64) * K + k
                slot = tl.load(slots_ptr + entry)
                if slot >= 0:
                    to = slot.to(tl.int64)
                    _copy_token(
                        source,
                        to,
                        tokens_ptr,
                        scales_ptr,
                        scale_row,
                        scale_column,
                        TOKEN_BYTES,
                        NUM_SCALES,
                        WIDTH,
                        SCALES_PAD,
                    )
                    if HAS_WEIGHTS:
                        tl.store(weights_ptr + to, tl.load(row_weights_ptr + entry))
