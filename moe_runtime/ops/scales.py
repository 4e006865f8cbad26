"""Block scales into the layouts that the operations take, and back; one pair of functions for each layout.

Scales come linear, `[R, V]` for rows in groups or `[E, N, V]` for weights, and go back to that, bit for bit.
Offsets are read on the host. Padding is 0; nothing ever reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral

import torch

from moe_runtime.kernels.formats import scale_blocks
from moe_runtime.kernels.formats.number_formats import align, ceil_div
from moe_runtime.kernels.formats.reference_quantize import copy_as, raw_bits
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from moe_runtime.ops.arguments import check_device
from moe_runtime.support.arguments import check_choice, check_integer, describe

Offsets = Sequence[int] | torch.Tensor
MAX_BLOCKS = (2**31 - 1) // 128
"""Kernels count the rows of a container in int32."""


def pack_dense_128(
    scales_RV: torch.Tensor, group_offsets: Offsets, group_scale_offsets: Offsets | None = None, num_blocks: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(a_scales [blocks, ceil(V/4), 32, 4, 4], group_scale_offsets int32 [G])` of one-byte scales `[R, V]`.

    Offsets that are not given are those of `dense_128`. There are `num_blocks` blocks, or as many as any split of R
    rows into G groups needs if that is more.

    >>> blocks, offsets = pack_dense_128(torch.ones(400, 8, dtype=torch.uint8), [0, 100, 300, 400])
    >>> list(blocks.shape), offsets.tolist(), [int(block.any()) for block in blocks]
    ([6, 2, 32, 4, 4], [0, 1, 1], [1, 1, 1, 1, 0, 0])
    """
    _check_bytes(scales_RV, "[R, V]", "scales_RV")
    rows = _offsets(group_offsets, scales_RV.shape[0], "group_offsets")
    if group_scale_offsets is None:
        group_scale_offsets = scale_blocks.dense_128_offsets(rows)
    shifts = _host(group_scale_offsets, "group_scale_offsets")
    blocks = max(
        check_integer("num_blocks", num_blocks, 0, MAX_BLOCKS),
        scale_blocks.dense_128_blocks_needed(scales_RV.shape[0], len(rows) - 1),
    )
    scale_blocks.check_dense_128(rows, shifts, blocks)
    starts = [128 * scale_blocks.dense_128_block(row, shift, 0) for row, shift in zip(rows, shifts, strict=False)]
    packed = _pack_swizzled(scales_RV, rows, starts, 128 * blocks)
    return packed, torch.tensor(shifts[: len(rows) - 1], dtype=torch.int32, device=scales_RV.device)


def unpack_dense_128(
    blocks: torch.Tensor, group_offsets: Offsets, group_scale_offsets: Offsets, num_columns: int
) -> torch.Tensor:
    """Linear scales `[R, num_columns]`, R the last of `group_offsets`; the inverse of `pack_dense_128`."""
    check_integer("num_columns", num_columns)
    axes = f"[blocks, {ceil_div(num_columns, 4)}, 32, 4, 4]"
    _check_bytes(blocks, axes, "blocks")
    if blocks.shape[1:] != (ceil_div(num_columns, 4), 32, 4, 4):
        raise ValueError(f"blocks: expected {axes}, got shape {tuple(blocks.shape)}")
    rows, shifts = _host(group_offsets, "group_offsets"), _host(group_scale_offsets, "group_scale_offsets")
    scale_blocks.check_row_offsets(rows, 128 * blocks.shape[0], "group_offsets")
    scale_blocks.check_dense_128(rows, shifts, blocks.shape[0])
    starts = [128 * scale_blocks.dense_128_block(row, shift, 0) for row, shift in zip(rows, shifts, strict=False)]
    return _unpack_swizzled(blocks, rows, starts, num_columns)


def pack_closed_form_128(scales_RV: torch.Tensor, m_indptr: Offsets) -> torch.Tensor:
    """uint8 `[(R + 127 * G) // 128 * 128, V]`: each group swizzled from its `closed_form_128` start; V whole fours."""
    _check_bytes(scales_RV, "[R, V]", "scales_RV")
    _check_fours(scales_RV.shape[1], "scales_RV")
    rows = _offsets(m_indptr, scales_RV.shape[0], "m_indptr")
    starts = [scale_blocks.closed_form_128_start(row, group) for group, row in enumerate(rows)]
    packed = _pack_swizzled(scales_RV, rows, starts, starts[-1])
    return raw_bits(packed).view(starts[-1], scales_RV.shape[1])


def unpack_closed_form_128(packed: torch.Tensor, m_indptr: Offsets, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Linear scales `[R, V]` of a one-byte `dtype`; the inverse of `pack_closed_form_128`.

    `packed` may end with the last block of the last group that has rows.
    """
    _check_bytes(packed, "[rows, V]", "packed")
    _check_one_byte(dtype)
    _check_fours(packed.shape[1], "packed")
    rows = _host(m_indptr, "m_indptr")
    scale_blocks.check_row_offsets(rows, packed.shape[0], "m_indptr")
    starts = [scale_blocks.closed_form_128_start(row, group) for group, row in enumerate(rows)]
    _check_rows(packed.shape[0], scale_blocks.closed_form_128_rows_used(rows))
    blocks = raw_bits(packed).contiguous().view(packed.shape[0] // 128, packed.shape[1] // 4, 32, 4, 4)
    return _unpack_swizzled(blocks, rows, starts, packed.shape[1]).view(dtype)


def pack_swizzled_weights(scales_ENV: torch.Tensor) -> torch.Tensor:
    """uint8 `[E, align(N, 128), V]`: the swizzle of each expert in a container; V whole fours.

    The 6-D form of the same bytes is `swizzle_scales(scales_ENV)`.
    """
    _check_bytes(scales_ENV, "[E, N, V]", "scales_ENV")
    e, n, v = scales_ENV.shape
    _check_fours(v, "scales_ENV")
    return raw_bits(swizzle_scales(scales_ENV.contiguous())).view(e, align(n, 128), v)


def unpack_swizzled_weights(
    packed: torch.Tensor, num_rows: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """Linear scales `[E, num_rows, V]` of a one-byte `dtype`; the inverse of `pack_swizzled_weights`."""
    check_integer("num_rows", num_rows, 0)
    _check_bytes(packed, "[E, rows, V]", "packed")
    _check_one_byte(dtype)
    e, padded, v = packed.shape
    _check_fours(v, "packed")
    _check_rows(padded, num_rows)
    blocks = packed.contiguous().view(e, padded // 128, v // 4, 32, 4, 4)
    return unswizzle_scales(blocks, num_rows, v).view(dtype)


def pack_ue8m0_rows(scales_RV: torch.Tensor, m_indptr: Offsets) -> torch.Tensor:
    """int32 `[m_padded, ceil(V/4)]`, strides `(1, m_padded)`, of UE8M0 bytes `[R, V]`, groups by `closed_form_4`.

    >>> packed = pack_ue8m0_rows(torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.uint8), [0, 1])
    >>> [hex(word) for word in packed[0].tolist()], packed.stride()
    (['0x4030201', '0x5'], (1, 4))
    """
    _check_axes(scales_RV, "[R, V]", "scales_RV")
    rows = _offsets(m_indptr, scales_RV.shape[0], "m_indptr")
    words = _words(scales_RV, "scales_RV")
    m_padded = scale_blocks.closed_form_4_rows_needed(rows[-1], len(rows) - 1)
    packed = torch.zeros(words.shape[1], m_padded, dtype=torch.int32, device=words.device).t()
    for group, (start, end) in enumerate(itertools.pairwise(rows)):
        first = scale_blocks.closed_form_4_start(start, group)
        packed[first : first + end - start] = words[start:end]
    return packed


def unpack_ue8m0_rows(packed: torch.Tensor, m_indptr: Offsets, num_columns: int) -> torch.Tensor:
    """UE8M0 bytes `[R, num_columns]`; the inverse of `pack_ue8m0_rows`."""
    _check_words(packed, "[rows, words]", num_columns)
    rows, parts = _host(m_indptr, "m_indptr"), [packed[:0]]
    scale_blocks.check_row_offsets(rows, packed.shape[0], "m_indptr")
    least = scale_blocks.closed_form_4_rows_needed(rows[-1], len(rows) - 1)
    if packed.shape[0] < least:
        raise ValueError(f"packed: expected at least {least} rows, got {packed.shape[0]}")
    for group, (start, end) in enumerate(itertools.pairwise(rows)):
        first = scale_blocks.closed_form_4_start(start, group)
        parts.append(packed[first : first + end - start])
    return copy_as(torch.cat(parts), torch.uint8)[:, :num_columns].contiguous()


def pack_ue8m0_weights(scales_ENV: torch.Tensor) -> torch.Tensor:
    """int32 `[E, N, ceil(V/4)]`, strides `(ceil(V/4) * align(N, 4), 1, align(N, 4))`, of UE8M0 bytes `[E, N, V]`."""
    _check_axes(scales_ENV, "[E, N, V]", "scales_ENV")
    e, n, v = scales_ENV.shape
    packed = torch.zeros(e, ceil_div(v, 4), align(n, 4), dtype=torch.int32, device=scales_ENV.device)
    packed[:, :, :n] = _words(scales_ENV, "scales_ENV").transpose(1, 2)
    return packed[:, :, :n].transpose(1, 2)


def unpack_ue8m0_weights(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """UE8M0 bytes `[E, N, num_columns]`; the inverse of `pack_ue8m0_weights`."""
    _check_words(packed, "[E, N, words]", num_columns)
    return copy_as(packed, torch.uint8)[..., :num_columns].contiguous()


def pack_scale_major(scales: torch.Tensor, major: str) -> torch.Tensor:
    """fp32 scales `[..., M, V]` in `scale_major_mode`: "K" as they are, "MN" `[..., V, M]`, contiguous.

    It is its own inverse.
    """
    check_choice("major", major, ("K", "MN"))
    check_device("scales", scales)
    if scales.ndim < 2 or scales.dtype != torch.float32:
        raise ValueError(f"scales: expected fp32 [..., M, V], got {scales.dtype} of shape {tuple(scales.shape)}")
    return (scales.transpose(-1, -2) if major == "MN" else scales).contiguous()


def _pack_swizzled(scales_RV: torch.Tensor, rows: list[int], starts: Sequence[int], num_rows: int) -> torch.Tensor:
    """The swizzle `[num_rows / 128, ceil(V/4), 32, 4, 4]` with group `g` from scale row `starts[g]` on."""
    container = torch.zeros(num_rows, scales_RV.shape[1], dtype=torch.uint8, device=scales_RV.device)
    for first, start, end in zip(starts, rows, rows[1:], strict=False):
        container[first : first + end - start] = raw_bits(scales_RV)[start:end]
    return swizzle_scales(container).view(scales_RV.dtype)


def _unpack_swizzled(blocks: torch.Tensor, rows: list[int], starts: Sequence[int], num_columns: int) -> torch.Tensor:
    container = raw_bits(unswizzle_scales(blocks.contiguous(), 128 * blocks.shape[0], num_columns))
    parts = [container[first : first + end - s] for first, s, end in zip(starts, rows, rows[1:], strict=False)]
    return torch.cat([container[:0], *parts]).view(blocks.dtype)


def _words(scales: torch.Tensor, argument: str) -> torch.Tensor:
    """int32 `[..., ceil(V/4)]` of bytes `[..., V]`, zeros behind the last."""
    if scales.dtype != torch.uint8 or scales.shape[-1] == 0:
        found = f"{scales.dtype} of shape {tuple(scales.shape)}"
        raise ValueError(f"{argument}: expected UE8M0 bytes (uint8) of one column or more, got {found}")
    return copy_as(torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4)), torch.int32)


def _host(offsets: Offsets, argument: str) -> list[int]:
    if isinstance(offsets, torch.Tensor):
        check_device(argument, offsets)
    try:
        values = list(offsets.tolist() if isinstance(offsets, torch.Tensor) else offsets)
    except TypeError:
        values = [None]
    if isinstance(offsets, bytes | bytearray):  # Their elements are integers.
        values = [None]
    if not all(isinstance(value, Integral) and not isinstance(value, bool) for value in values):
        found = f"{offsets.dtype} {list(offsets.shape)}" if isinstance(offsets, torch.Tensor) else repr(offsets)
        raise ValueError(f"{argument}: expected one dimension of integers, got {found}")
    for value in map(int, values):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{argument}: expected integers that fit in int32, got {describe(value)}")
    return [int(value) for value in values]


def _offsets(offsets: Offsets, num_rows: int, argument: str) -> list[int]:
    values = _host(offsets, argument)
    scale_blocks.check_row_offsets(values, num_rows, argument)
    if values[-1] != num_rows:
        raise ValueError(f"{argument}: expected {num_rows} (the rows of the scales) at the end, got {values[-1]}")
    return values


def _check_axes(scales: torch.Tensor, axes: str, argument: str) -> None:
    check_device(argument, scales)
    if scales.ndim != len(axes.split(",")):
        raise ValueError(f"{argument}: expected {axes}, got shape {tuple(scales.shape)}")


def _check_bytes(scales: torch.Tensor, axes: str, argument: str) -> None:
    _check_axes(scales, axes, argument)
    if scales.element_size() != 1 or scales.dtype == torch.bool:
        raise ValueError(f"{argument}: expected one-byte elements (uint8 or float8_e4m3fn), got {scales.dtype}")


def _check_one_byte(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != 1 or dtype == torch.bool:
        raise ValueError(f"dtype: expected one of a byte, got {dtype}")


def _check_rows(num_rows: int, least: int) -> None:
    if num_rows % 128 or num_rows < least:
        raise ValueError(f"packed: expected a multiple of 128 rows, at least {least}, got {num_rows}")


def _check_words(packed: torch.Tensor, axes: str, num_columns: int) -> None:
    check_integer("num_columns", num_columns)
    _check_axes(packed, axes, "packed")
    if packed.dtype != torch.int32:
        raise ValueError(f"packed: expected torch.int32, got {packed.dtype}")
    if packed.shape[-1] != ceil_div(num_columns, 4):
        raise ValueError(
            f"packed: expected {ceil_div(num_columns, 4)} words for {num_columns} columns, got {packed.shape[-1]}"
        )


def _check_fours(num_columns: int, argument: str) -> None:
    if num_columns % 4:
        raise ValueError(f"{argument}: expected a multiple of 4 columns, got {num_columns}")
