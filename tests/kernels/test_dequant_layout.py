"""Weights in the order that `dequant_gemm.cu` reads: every element where the documentation puts it, and back again."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats.number_formats import MXFP4, MXFP8, NVFP4, WEIGHT_FORMATS, TokenFormat
from moe_runtime.kernels.gemm import dequant_layout
from moe_runtime.kernels.gemm.dequant_layout import (
    BYTE_SLOTS,
    LARGEST_FAST_SCALE,
    SCALE_CODES,
    SLOTS,
    chunk_units,
    pack_units,
    source_rows,
    stage_units,
    unit_bytes,
    unit_columns,
    unit_rows,
    units_shape,
    units_with_special_values,
    unpack_units,
)
from moe_runtime.kernels.gemm.weights import GateUpOrder
from tests.support.comparison import assert_same_bits

pytestmark = pytest.mark.cpu_only

ORDERS = [None, *GateUpOrder]
QUANT_BYTES = {"nvfp4": 2048, "mxfp8": 4096, "mxfp4": 2048}


def random_expert(fmt: TokenFormat, n: int, k: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes of quants and of scales; `nvfp4` scales are not negative and no NaN."""
    quants = torch.randint(0, 256, (n, fmt.quant_bytes(k)), generator=rng).to(torch.uint8)
    scales = torch.randint(0, 127 if fmt is NVFP4 else 256, (n, fmt.scale_columns(k)), generator=rng).to(torch.uint8)
    return quants, scales


def rotated(word: int, by: int) -> int:
    """A word of 32 bits, turned to the right."""
    return (word >> by | word << 32 - by) & 0xFFFFFFFF


def registers(even: int, odd: int) -> list[list[int]]:
    """What the kernel makes of the words of two steps: four registers of each, to be multiplied by scales."""
    both = even & 0xC180C180 | odd & ~0xC180C180
    found = [
        [even << 2, even << 6, rotated(even, 4), both],
        [odd << 4, rotated(odd, 24), rotated(odd, 2), rotated(both, 6)],
    ]
    return [[word & 0x81C081C0 for word in step] for step in found]


def places() -> dict[tuple[int, int, int, int], int]:
    """By odd step, register, `i` and bit of a code: the one bit of two words that comes where a bf16 number has it."""
    found = {}
    for position in range(64):
        word = 1 << position
        for odd, step in enumerate(registers(word & 0xFFFFFFFF, word >> 32)):
            for register, bits in enumerate(step):
                for i, bit in product(range(2), range(4)):
                    if bits >> (15 if bit == 3 else 6 + bit) + 16 * i & 1:
                        assert (odd, register, i, bit) not in found
                        found[odd, register, i, bit] = position
    return found


PLACES = places()


def byte_registers(word: int) -> list[int]:
    """What the kernel makes of one word of `mxfp8`: two registers."""
    return [word & 0x87F087F0, (word << 4) & 0x80F080F0 | (word >> 4) & 0x07000700]


def byte_places() -> dict[tuple[int, int, int], int]:
    """By register, `i` and bit of a code: the one bit of a word that comes where a bf16 number has it."""
    found = {}
    for position in range(32):
        for pair, bits in enumerate(byte_registers(1 << position)):
            for i, bit in product(range(2), range(8)):
                if bits >> (15 if bit == 7 else 4 + bit) + 16 * i & 1:
                    assert (pair, i, bit) not in found
                    found[pair, i, bit] = position
    return found


BYTE_PLACES = byte_places()


def weight_row(unit: int, warp: int, row: int, half: int, n: int, order: GateUpOrder | None) -> int:
    """The row of a weight of `n` rows that a thread's half holds; `n` or more for padding."""
    if order is None:
        return unit * 64 + 16 * warp + 2 * row + half
    column, inner = unit * 32 + 8 * warp + row, n // 2
    if column >= inner:
        return n
    gate_and_up = {
        GateUpOrder.GATE_UP: (column, inner + column),
        GateUpOrder.UP_GATE: (inner + column, column),
        GateUpOrder.INTERLEAVED: (2 * column, 2 * column + 1),
    }
    return gate_and_up[order][half]


def expected_unit(
    quants: torch.Tensor, scales: torch.Tensor, fmt: TokenFormat, order: GateUpOrder | None, unit: int, of_k: int
) -> torch.Tensor:
    """One unit, number by number, as the documentation of the layout says."""
    out = np.zeros(unit_bytes(fmt), np.uint8)
    numbers, factors = quants.numpy(), scales.numpy()
    n, k = numbers.shape[0], numbers.shape[1] * 8 // fmt.element_bits
    for warp, row, t, half in product(range(4), range(8), range(4), range(2)):
        thread, source = 32 * warp + 4 * row + t, weight_row(unit, warp, row, half, n, order)
        if source >= n:
            continue
        for step, pair, i in product(range(4), range(2), range(2)):
            column = of_k * 64 + 16 * t + 4 * step + 2 * pair + i
            if column >= k:
                continue
            if fmt is MXFP8:
                at = step // 2 * 2048 + thread * 16 + step % 2 * 8 + half * 4
                for bit in range(8):
                    position = BYTE_PLACES[pair, i, bit]
                    out[at + position // 8] |= (numbers[source, column] >> bit & 1) << position % 8
                continue
            code = numbers[source, column // 2] >> 4 * (column % 2) & 15
            for bit in range(4):
                position = PLACES[step % 2, half + 2 * pair, i, bit]
                out[thread * 16 + step // 2 * 8 + position // 8] |= (code >> bit & 1) << position % 8
        block = (of_k * 64 + 16 * t) // fmt.block
        if block < factors.shape[1]:
            if fmt is NVFP4:
                out[2048 + 2 * thread + half] = SCALE_CODES[factors[source, block]]
            else:
                out[QUANT_BYTES[fmt.name] + thread // 2 * 2 + half] = factors[source, block]
    return torch.from_numpy(out)


@pytest.mark.parametrize(
    ("name", "k", "chunks"),
    [("nvfp4", 240, 2), ("nvfp4", 144, 1), ("mxfp8", 224, 2), ("mxfp4", 224, 2), ("mxfp4", 160, 1)],
)
@pytest.mark.parametrize("order", ORDERS)
def test_every_number_lies_where_documented(
    order: GateUpOrder | None, name: str, k: int, chunks: int, rng: torch.Generator
) -> None:
    """Two units of N; two chunks of two units of K, or one of three; the last units are partly padding."""
    fmt, n = WEIGHT_FORMATS[name], 112
    quants, scales = random_expert(fmt, n, k, rng)
    units = pack_units(quants, scales, fmt, source_rows(n, order))
    of_chunk = 4 - chunks
    assert units.shape == (chunks, 2, of_chunk, QUANT_BYTES[name] + (256 if fmt is NVFP4 else 128))
    for unit, of_k in product(range(2), range(chunks * of_chunk)):
        want = expected_unit(quants, scales, fmt, order, unit, of_k)
        assert_same_bits(units[of_k // of_chunk, unit, of_k % of_chunk], want, f"unit {unit} of N, {of_k} of K")


def test_rows_of_units_example() -> None:
    """Row 1 of warp 2 in unit 1 of a weight of 128 rows."""
    place = (1, 2, 1)
    assert source_rows(128, None)[place].tolist() == [98, 99]
    assert source_rows(128, GateUpOrder.GATE_UP)[place].tolist() == [49, 113]
    assert source_rows(128, GateUpOrder.UP_GATE)[place].tolist() == [113, 49]
    assert source_rows(128, GateUpOrder.INTERLEAVED)[place].tolist() == [98, 99]


@pytest.mark.parametrize("n", [16, 48, 64, 80, 128, 208])
@pytest.mark.parametrize("order", ORDERS)
def test_units_hold_each_row_once(order: GateUpOrder | None, n: int) -> None:
    rows = source_rows(n, order)
    assert rows.shape == (unit_rows(n), 4, 8, 2)
    assert sorted(rows[rows >= 0].tolist()) == list(range(n))
    assert (rows[rows < 0] == -1).all()


@pytest.mark.parametrize(
    ("name", "n", "k"),
    [
        ("nvfp4", 8, 16),
        ("nvfp4", 16, 48),
        ("nvfp4", 72, 64),
        ("nvfp4", 136, 2880),
        ("mxfp8", 8, 32),
        ("mxfp8", 24, 64),
        ("mxfp8", 72, 96),
        ("mxfp8", 136, 2880),
        ("mxfp4", 8, 32),
        ("mxfp4", 72, 96),
        ("mxfp4", 136, 2880),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_unpacked_is_what_was_packed(
    order: GateUpOrder | None, name: str, n: int, k: int, rng: torch.Generator
) -> None:
    fmt = WEIGHT_FORMATS[name]
    n *= 1 if order is None else 2
    quants, scales = random_expert(fmt, n, k, rng)
    rows = source_rows(n, order)
    units = pack_units(quants, scales, fmt, rows)
    assert units.shape == units_shape(n, k, fmt) and units.dtype == torch.uint8
    found_quants, found_scales = unpack_units(units, fmt, rows, n, k)
    assert_same_bits(found_quants, quants, "quants")
    assert_same_bits(found_scales, scales, "scales")


@pytest.mark.parametrize("name", QUANT_BYTES)
def test_padding_is_zeros(name: str) -> None:
    """As many bits are set as the numbers and their scales have; nothing stands for the rest."""
    fmt, n, k = WEIGHT_FORMATS[name], 24, 96
    quants = torch.full((n, fmt.quant_bytes(k)), 255, dtype=torch.uint8)
    scales = torch.full((n, fmt.scale_columns(k)), 126, dtype=torch.uint8)
    units = pack_units(quants, scales, fmt, source_rows(n, None))
    code = SCALE_CODES[126] if fmt is NVFP4 else 126
    ones = int(np.unpackbits(units.numpy()).sum())
    assert ones == quants.numel() * 8 + scales.numel() * code.bit_count()


def test_slots_are_where_the_kernel_looks() -> None:
    """Each bit of two words is of one number, where shifts, a selection and a mask find it."""
    assert sorted(np.ravel(SLOTS).tolist()) == list(range(64))
    numbers = product(range(2), range(4), range(2))
    assert PLACES == {(*at, bit): SLOTS[at[0]][at[1]][at[2]][3 - bit] for at in numbers for bit in range(4)}
    assert sorted(np.ravel(BYTE_SLOTS).tolist()) == list(range(16)) and len(set(BYTE_PLACES.values())) == 32
    codes = product(range(2), range(2), range(8))
    assert BYTE_PLACES == {(pair, i, bit): BYTE_SLOTS[pair][7 - bit] + 16 * i for pair, i, bit in codes}


def test_sizes() -> None:
    """A unit is as large as what it holds; K is padded by less than two units, to whole chunks, as stages are."""
    assert [unit_bytes(fmt) for fmt in (NVFP4, MXFP8, MXFP4)] == [2048 + 256, 4096 + 128, 2048 + 128]
    assert [stage_units(units) for units in (1, 2, 3, 4, 5, 6, 9, 12, 25, 45, 112)] == [0, 2, 3, 4, 0, 2, 3, 4, 0, 3, 4]
    assert {k: unit_columns(k) for k in (16, 64, 128, 192, 272, 320, 384, 2880, 4096)} == {
        16: 2, 64: 2, 128: 2, 192: 3, 272: 6, 320: 6, 384: 6, 2880: 45, 4096: 64,
    }  # fmt: skip
    for units in range(1, 300):
        columns = unit_columns(64 * units)
        assert 0 <= columns - units <= 1 and units_shape(128, 64 * units, NVFP4)[::2] == (
            columns // chunk_units(columns),
            chunk_units(columns),
        )
        for most in (2, 4):
            stage = stage_units(columns, most)
            assert 0 < stage <= max(most, 3) and columns % stage == 0 and stage % chunk_units(columns) == 0


def bf16_of(bits: np.ndarray) -> np.ndarray:
    """float64 of bf16 bits."""
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def test_scale_codes_are_e4m3_numbers_as_bf16() -> None:
    """All 127, in order, each to be a bf16 number by a shift, or a shift and a sum, and never a denormal one."""
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    codes = np.array(SCALE_CODES)
    assert len(codes) == 127 and (np.diff(codes) > 0).all() and codes[0] == 0 and codes[-1] < 256
    shifted = bf16_of(codes << 4)
    np.testing.assert_array_equal(shifted * 2.0**106, scales)
    assert (shifted[1:] >= 2.0**-126).all()
    added = bf16_of((codes << 4) + 0x3A00)
    np.testing.assert_array_equal(added[1:], scales[1:] * 2.0**10)


def test_no_weight_is_left_of_a_scale_of_zero() -> None:
    """Nor is any lost of the smallest scale: e2m1 bits in a bf16, times what the kernel makes of both codes."""
    numbers = bf16_of(np.arange(8) << 6)
    np.testing.assert_array_equal(
        numbers * 2.0**126, np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    )
    for scale, code in ((0.0, SCALE_CODES[0]), (2.0**-9, SCALE_CODES[1])):
        exact = numbers * bf16_of(np.array([(code << 4) + 0x3A00]))
        rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_array_equal(rounded, numbers * scale * 2.0**10)


def test_e4m3_bits_are_bf16_numbers() -> None:
    """Denormal ones too; 480 times as much for NaN, which is what `has_special_values` is for."""
    codes = np.arange(256)
    placed = (codes & 128) << 8 | (codes & 127) << 4
    want = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    want[[127, 255]] = 480, -480
    found = bf16_of(placed) * 2.0**120
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(want))


@pytest.mark.parametrize(("fmt", "power", "added"), [(MXFP8, 120, 0x3C00), (MXFP4, 126, 0x3F00)])
def test_every_usual_scale_has_a_factor(fmt: TokenFormat, power: int, added: int) -> None:
    """`2^power` times it is a bf16 number; of the largest one the largest power of two."""
    codes = np.arange(LARGEST_FAST_SCALE[fmt] + 1)
    factors = bf16_of(codes * 128 + added)
    np.testing.assert_array_equal(factors, 2.0 ** (codes - 127.0 + power))
    assert factors[-1] == 2.0**127


def test_e2m1_times_a_power_of_two_is_a_bf16_number() -> None:
    """Of all scales that need no more steps: the product of what the kernel makes of code and scale is not rounded."""
    numbers, codes = bf16_of(np.arange(8) << 6), np.arange(LARGEST_FAST_SCALE[MXFP4] + 1)
    exact = numbers[:, None] * bf16_of(codes * 128 + 0x3F00)
    values = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(exact, values[:, None] * 2.0 ** (codes - 127.0))
    np.testing.assert_array_equal(exact, exact.astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize("fmt", [MXFP8, MXFP4], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_units_with_special_values(order: GateUpOrder | None, fmt: TokenFormat, rng: torch.Generator) -> None:
    """One row after the other made has_special_values: its unit is marked, and no other; the marks of all rows meet."""
    n, k, largest = 144, 96, LARGEST_FAST_SCALE[fmt]
    quants = torch.randint(0, 127, (n, fmt.quant_bytes(k)), generator=rng).to(torch.uint8) | 128
    scales = torch.randint(0, largest + 1, (n, 3), generator=rng).to(torch.uint8)
    scales[0] = largest
    rows = source_rows(n, order)
    assert units_with_special_values(quants, scales, fmt, rows).tolist() == [0] * unit_rows(n)
    for row in range(n):
        (unit,) = {at[0] for at in (rows == row).nonzero().tolist()}
        want = [int(other == unit) for other in range(unit_rows(n))]
        column = int(torch.randint(0, k, (), generator=rng))
        # A byte of two e2m1 codes is never a NaN.
        of_quants = [(quants, column, 127), (quants, column, 255)] if fmt is MXFP8 else []
        for tensor, at, byte in (*of_quants, (scales, column // 32, largest + 1), (scales, column // 32, 255)):
            changed = tensor.clone()
            changed[row, at] = byte
            both = (changed, scales) if tensor is quants else (quants, changed)
            assert units_with_special_values(*both, fmt, rows).tolist() == want
    if fmt is MXFP4:
        assert not units_with_special_values(torch.full_like(quants, 255), scales, fmt, rows).any()
    scales[:, 1] = 200
    assert units_with_special_values(quants, scales, fmt, rows).tolist() == [1] * unit_rows(n)


def test_decoded_formats_are_those_tested_here() -> None:
    assert [fmt.name for fmt in dequant_layout.DEQUANT_FORMATS] == list(QUANT_BYTES)
