"""The order in which `dequant_gemm` reads weights: a unit holds the quants and scales of 64 rows and 64 columns.

Units are ordered by chunks of two or three units of K, and within a chunk by rows. The units of the rows of any tile
are therefore contiguous.

Thread `32 * warp + 4 * row + t` of a warpgroup holds MMA rows `16 * warp + row` (half 0) and `+ 8` (half 1), and in
them the columns `16 * t + 4 * step + pair * 2 + i` of the unit. The operand of `wgmma` at step `step`, A register
`half + 2 * pair`, is then a contiguous word, and a thread needs one NVFP4 scale per row. Tokens have the same columns
in the same order.

A unit of `nvfp4` is 2048 bytes of quants, 16 per thread, then 256 of scales, 2 per thread. One of `mxfp4` has the same
quants, then 128 bytes of scales, 2 for each pair of threads. Two words hold the 16 values
of an even step and the next, bit by bit in the positions of `SLOTS`. Shifts or rotations and masks then put each of the
eight registers where bf16 has its sign and its lowest exponent bits. A unit of `mxfp8` is 4096 bytes of quants, steps 0
and 1 of all threads first, then 2 and 3, then 128 of scales. One word has both registers of a half and step, in the
positions of `BYTE_SLOTS`.

A unit holds 64 rows of a plain weight, `16 * warp + 2 * row + half`, or 32 rows of gate and 32 of up, `8 * warp + row`,
with gate in half 0 and up in half 1. SwiGLU then stays within a thread.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

from moe_runtime.kernels.formats.number_formats import MXFP4, MXFP8, NVFP4, TokenFormat, ceil_div
from moe_runtime.kernels.gemm.weights import GateUpOrder

SLOTS = (
    (
        ((13, 6, 5, 4), (29, 22, 21, 20)),
        ((9, 2, 1, 0), (25, 18, 17, 16)),
        ((19, 12, 11, 10), (3, 28, 27, 26)),
        ((15, 8, 7, 38), (31, 24, 23, 54)),
    ),
    (
        ((43, 36, 35, 34), (59, 52, 51, 50)),
        ((39, 32, 63, 62), (55, 48, 47, 46)),
        ((49, 42, 41, 40), (33, 58, 57, 56)),
        ((53, 14, 45, 44), (37, 30, 61, 60)),
    ),
)
"""Positions of the bits `s e e m` of values `i` = 0 and 1 of registers 0, 1, 2, 3 in two words, for an even step and
the next. The first word has the lower 32 bits.

A shift or a rotation brings the bits of a register to positions 15, 8, 7, 6 and 31, 24, 23, 22, where a bf16 has them.
In each step, three registers come from one word. The fourth comes from a combination of both words, which needs one
instruction, and no shift in the even step. This placement needs the fewest instructions of its kind: 16 for two words
without the multiplications by scales (9 for one word if each word has only bits of its own step).
"""

BYTE_SLOTS = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))
"""Positions of the bits `s eeee mmm` of `mxfp8` values in the halves of a word: of pair 0, and of pair 1.

A bf16 with the bits in the positions of pair 0 is `2^-120` times the value, also for denormals. Pair 1 gets there by a
left shift of sign, lowest exponent bit and mantissa, and a right shift of the other exponent bits.
"""

LARGEST_FAST_SCALE = {MXFP8: 134, MXFP4: 128}
"""Largest byte of a scale for which `2^120` (`mxfp4`: `2^126`) times the scale is a bf16 value, so that one
multiplication dequantizes. Rows with larger scales, or with NaN among their values or scales, have special values and
need more steps."""

UNIT = 64
DEQUANT_FORMATS = (NVFP4, MXFP8, MXFP4)


def _scale_code(e4m3: int) -> int:
    exponent, mantissa = e4m3 >> 3, e4m3 & 7
    if exponent == 0 and mantissa:
        exponent = mantissa.bit_length() - 3
        mantissa = mantissa << 1 - exponent & 7
    return (exponent + 14) << 3 | mantissa if e4m3 else 0


SCALE_CODES = tuple(_scale_code(e4m3) for e4m3 in range(127))
"""The stored code of each e4m3 scale: its exponent is rebiased so that no scale but 0 is denormal.

A code shifted left by 4 is the bf16 value `2^-106 * scale`. Added to `0x3A00` as 16-bit integers, it is the bf16 value
`2^10 * scale`, and `2^-11` for 0. An e2m1 value in the lowest exponent bits of a bf16 is `2^-126` times its value; its
product with `2^-11` is less than half of the smallest bf16 and rounds to 0.
"""


def unit_bytes(fmt: TokenFormat) -> int:
    """Bytes of 64 x 64 values with their scales."""
    return UNIT * (fmt.quant_bytes(UNIT) + fmt.scale_bytes(UNIT))


def unit_rows(num_rows: int) -> int:
    """Units of N in a weight of `num_rows` rows."""
    return ceil_div(num_rows, UNIT)


def chunk_units(units: int) -> int:
    """Units of K in a chunk: the smaller of 2 and 3 that divides `units`; 0 if neither does."""
    return 2 if units % 2 == 0 else 3 if units % 3 == 0 else 0


def stage_units(units: int, most: int = 4) -> int:
    """Units of K in a stage of the kernel: a chunk, or two chunks of 2 if `most` and `units` allow it."""
    return 4 if most >= 4 and units % 4 == 0 else chunk_units(units)


def unit_columns(num_columns: int) -> int:
    """Units of K in a weight of `num_columns` columns: whole chunks, with at most one unit of zeros."""
    units = ceil_div(num_columns, UNIT)
    return units if chunk_units(units) else units + 1


def units_shape(num_rows: int, num_columns: int, fmt: TokenFormat) -> tuple[int, int, int, int]:
    """Shape of one expert: chunks of K, units of N, units of a chunk, bytes of a unit."""
    columns = unit_columns(num_columns)
    chunk = chunk_units(columns)
    return columns // chunk, unit_rows(num_rows), chunk, unit_bytes(fmt)


def source_rows(num_rows: int, order: GateUpOrder | None) -> torch.Tensor:
    """int64 `[units, 4 warps, 8 rows, 2 halves]`: the weight row at each place; -1 for padding.

    `order` None means a plain weight; otherwise gate and up share units.
    """
    places = [torch.arange(n, device="cpu") for n in (unit_rows(num_rows), 4, 8, 2)]
    unit, warp, row, half = torch.meshgrid(*places, indexing="ij")
    if order is None:
        found = unit * UNIT + warp * 16 + row * 2 + half
        return torch.where(found < num_rows, found, -1)
    column = unit * (UNIT // 2) + warp * 8 + row
    halves = [torch.arange(num_rows, device="cpu")[part(num_rows)] for part in (order.gate_rows, order.up_rows)]
    found = torch.stack(halves)[half, column.clamp(max=num_rows // 2 - 1)]
    return torch.where(column < num_rows // 2, found, -1)


def pack_units(quants_NK: torch.Tensor, scales_NV: torch.Tensor, fmt: TokenFormat, rows: torch.Tensor) -> torch.Tensor:
    """One expert as units.

    Args:
        quants_NK: uint8 `[N, bytes]` of quants.
        scales_NV: uint8 `[N, V]`, linear; `nvfp4`: neither negative nor NaN.
        fmt: `nvfp4`, `mxfp8` or `mxfp4`.
        rows: the result of `source_rows`.

    Returns:
        uint8 of shape `units_shape`; padding is zeros.
    """
    columns = unit_columns(quants_NK.shape[1] * 8 // fmt.element_bits)
    index = rows.to(quants_NK.device)
    # One row of zeros at the end for the padding, which has index -1.
    quants = _padded(quants_NK, columns * fmt.quant_bytes(UNIT))[index].unflatten(-1, (columns, -1))
    scales = _padded(scales_NV, columns * fmt.scale_columns(UNIT))[index].unflatten(-1, (columns, -1))
    # [units, columns, ...] from [units, warp, row, half, columns, ...].
    quants, scales = (part.permute(0, 4, 1, 2, 3, 5) for part in (quants, scales))
    if fmt.element_bits == 4:
        # t, step, pair bytes; each byte i = 0 in the low nibble.
        codes = torch.stack((quants & 15, quants >> 4), -1).unflatten(-2, (4, 4, 2))
        words = _place(codes.permute(0, 1, 2, 3, 5, 6, 4, 7, 8).int().unflatten(5, (2, 2)))
        packed = words.contiguous().view(torch.uint8)
    else:
        # [t, early or late steps, step, pair, i] to [late][warp, row, t][step, half, i, pair].
        parts = quants.unflatten(-1, (4, 2, 2, 2, 2))
        packed = _place_bytes(parts.permute(0, 1, 6, 2, 3, 5, 7, 4, 9, 8).int()).contiguous().view(torch.uint8)
    if fmt is NVFP4:
        scales = _scale_codes(scales.device)[scales.int()]
    packed_scales = scales.transpose(-1, -2)
    units = torch.cat((packed.flatten(2), packed_scales.flatten(2)), dim=2)
    return units.unflatten(1, (-1, chunk_units(columns))).transpose(0, 1).contiguous()


def unpack_units(
    units: torch.Tensor, fmt: TokenFormat, rows: torch.Tensor, num_rows: int, num_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_units`: `(quants, scales)` of one expert."""
    units = units.transpose(0, 1).flatten(1, 2)
    count, columns, _ = units.shape
    split = UNIT * fmt.quant_bytes(UNIT)
    packed, packed_scales = units[..., :split].contiguous(), units[..., split:]
    if fmt.element_bits == 4:
        codes = _codes(packed.view(torch.int64).view(count, columns, 4, 8, 4, 2)).flatten(5, 6)
        codes = codes.permute(0, 1, 2, 3, 6, 4, 5, 7, 8)
        quants = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8).flatten(-3)
    else:
        parts = _bytes(packed.view(torch.int16)).view(count, columns, 2, 4, 8, 4, 2, 2, 2, 2)
        quants = parts.permute(0, 1, 3, 4, 7, 5, 2, 6, 9, 8).flatten(-5)
    scales = packed_scales.unflatten(-1, (4, 8, -1, 2)).transpose(-1, -2)
    if fmt is NVFP4:
        back = torch.zeros(256, dtype=torch.uint8, device="cpu")
        back[list(SCALE_CODES)] = torch.arange(127, dtype=torch.uint8, device="cpu")
        scales = back.to(scales.device)[scales.int()]
    found = []
    for part, width in ((quants, fmt.quant_bytes(num_columns)), (scales, fmt.scale_columns(num_columns))):
        by_row = part.permute(0, 2, 3, 4, 1, 5).flatten(4)
        whole = torch.zeros(num_rows + 1, by_row.shape[-1], dtype=torch.uint8, device=units.device)
        whole[rows.to(units.device)] = by_row
        found.append(whole[:num_rows, :width].contiguous())
    return found[0], found[1]


def units_with_special_values(
    quants_NK: torch.Tensor, scales_NV: torch.Tensor, fmt: TokenFormat, rows: torch.Tensor
) -> torch.Tensor:
    """uint8 `[units of N]` of one `mxfp8` or `mxfp4` expert: 1 where rows have special values.

    Arguments as in `pack_units`.
    """
    special = (scales_NV > LARGEST_FAST_SCALE[fmt]).any(1)
    if fmt is MXFP8:
        special |= ((quants_NK & 127) == 127).any(1)
    of_row = torch.nn.functional.pad(special, (0, 1))  # none in the padding
    return of_row[rows.to(special.device)].flatten(1).any(1).to(torch.uint8)


def _padded(bytes_NB: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(bytes_NB, (0, width - bytes_NB.shape[1], 0, 1))


@cache
def _scale_codes(device: torch.device) -> torch.Tensor:
    return torch.tensor(SCALE_CODES, dtype=torch.uint8, device=device)


@cache
def _placed_codes(device: torch.device) -> torch.Tensor:
    """int64 `[2, 2, 2, 2, 16]`: the bits of each e2m1 code in a word, by odd step, half, pair and i."""
    table = torch.zeros(2, 2, 2, 2, 16, dtype=torch.int64, device="cpu")
    code = torch.arange(16, device="cpu")
    for odd, slots in enumerate(SLOTS):
        for register, slot in enumerate(slots):
            for i in range(2):
                for bit, position in zip((3, 2, 1, 0), slot[i], strict=True):
                    table[odd, register % 2, register // 2, i] |= (code >> bit & 1) << position
    return table.to(device)


def _place(codes: torch.Tensor) -> torch.Tensor:
    """int64 pairs of words of e2m1 codes, int32 `[..., odd step, half, pair, i]`, by `SLOTS`."""
    table, words = _placed_codes(codes.device), torch.zeros(codes.shape[:-4], dtype=torch.int64, device=codes.device)
    for odd, half, pair, i in product(range(2), repeat=4):
        words |= table[odd, half, pair, i][codes[..., odd, half, pair, i]]
    return words


def _codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_place`: int32 `[..., odd step, half, pair, i]`."""
    steps = []
    for slots in SLOTS:
        registers = []
        for slot in slots:
            halves = []
            for positions in slot:
                code = torch.zeros_like(words, dtype=torch.int32)
                for bit, position in zip((3, 2, 1, 0), positions, strict=True):
                    code |= (words >> position & 1).int() << bit
                halves.append(code)
            registers.append(torch.stack(halves, -1))
        steps.append(torch.stack(registers, -2).unflatten(-2, (2, 2)).transpose(-3, -2))
    return torch.stack(steps, -4)


@cache
def _placed_bytes(device: torch.device) -> torch.Tensor:
    """int32 `[2, 256]`: the bits of each e4m3 code in a word, by pair."""
    table, code = torch.zeros(2, 256, dtype=torch.int32, device="cpu"), torch.arange(256, device="cpu")
    for pair, slot in enumerate(BYTE_SLOTS):
        for bit, position in enumerate(reversed(slot)):
            table[pair] |= ((code >> bit & 1) << position).int()
    return table.to(device)


def _place_bytes(codes: torch.Tensor) -> torch.Tensor:
    """int16 words of two e4m3 codes, int32 `[..., pair]`, by `BYTE_SLOTS`."""
    table = _placed_bytes(codes.device)
    return (table[0][codes[..., 0]] | table[1][codes[..., 1]]).to(torch.int16)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_place_bytes`, uint8."""
    pairs = []
    for slot in BYTE_SLOTS:
        code = torch.zeros_like(words)
        for bit, position in enumerate(reversed(slot)):
            code |= (words >> position & 1) << bit
        pairs.append(code.to(torch.uint8))
    return torch.stack(pairs, -1)
