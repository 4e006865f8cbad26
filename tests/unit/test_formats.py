"""Descriptors of the formats: the sizes of the format table, and refusals."""

from __future__ import annotations

import dataclasses
import doctest

import pytest

from moe_runtime.kernels.formats import number_formats
from moe_runtime.kernels.formats.number_formats import (
    BF16,
    FORMATS,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    WEIGHT_FORMATS,
    FormatCode,
    align,
    ceil_div,
    format_named,
    weight_format_named,
)


@pytest.mark.parametrize(
    ("fmt", "quant_bytes", "scale_bytes", "quant_columns", "scale_columns"),
    [
        (BF16, 14336, 0, 7168, 0),
        (FP8_BLOCK, 7168, 224, 7168, 56),
        (MXFP8, 7168, 224, 7168, 224),
        (NVFP4, 3584, 448, 3584, 448),
        (MXFP4, 3584, 224, 3584, 224),
    ],
)
def test_bytes_of_a_row_of_7168(fmt, quant_bytes, scale_bytes, quant_columns, scale_columns) -> None:
    assert fmt.quant_bytes(7168) == quant_bytes
    assert fmt.scale_bytes(7168) == scale_bytes
    assert fmt.quant_columns(7168) == quant_columns
    assert fmt.scale_columns(7168) == scale_columns


def test_names_and_codes_are_unique() -> None:
    assert {f.code for f in WEIGHT_FORMATS.values()} == set(FormatCode)
    assert [weight_format_named(name).name for name in WEIGHT_FORMATS] == [*FORMATS, "mxfp4"]
    assert [format_named(name).name for name in FORMATS] == list(FORMATS)
    assert format_named(NVFP4) is NVFP4


def test_partial_blocks_round_up() -> None:
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(a, 16) for a in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert FP8_BLOCK.scale_columns(130) == 2
    assert (FP8_BLOCK.scale_columns(2880), FP8_BLOCK.scale_bytes(2880)) == (23, 92)


def test_fp8_rows_of_16_bytes_are_stored_and_other_formats_need_whole_blocks() -> None:
    assert {name: fmt.unit for name, fmt in WEIGHT_FORMATS.items()} == {
        "bf16": 8, "fp8_block": 16, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32,
    }  # fmt: skip
    for k in (16, 192, 288, 320, 960, 1408, 1856, 2880):
        FP8_BLOCK.check_columns(k, "hidden_size")


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVFP4.block = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fmt", "k"), [(BF16, 4), (BF16, 0), (FP8_BLOCK, 72), (FP8_BLOCK, 8), (MXFP8, 48), (NVFP4, 24), (NVFP4, -16)]
)
def test_columns_that_do_not_block(fmt, k: int) -> None:
    with pytest.raises(ValueError, match=f"hidden_size.*{fmt.name}.*{k}"):
        fmt.check_columns(k, "hidden_size")


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*nvfp4.*got 'fp4'"):
        format_named("fp4")
    with pytest.raises(ValueError, match=r"expected one of .*nvfp4.*got 'mxfp4'"):
        format_named("mxfp4")
    with pytest.raises(ValueError, match=r"expected one of .*mxfp4.*got 'fp4'"):
        weight_format_named("fp4")


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(number_formats)
    assert outcome.attempted > 0 and outcome.failed == 0
