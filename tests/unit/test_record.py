"""The byte layout of the wire record."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.kernels.exchange import record
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import FORMATS, NVFP4, TokenFormat


def test_worked_example() -> None:
    results = doctest.testmod(record)
    assert results.attempted >= 3 and results.failed == 0


@given(
    fmt=st.sampled_from(list(FORMATS.values())),
    blocks=st.integers(1, 70),
    top_k=st.integers(1, 40),
    alignment=st.sampled_from([4, 8, 16, 32, 64, 128]),
)
def test_record_fields_are_aligned_and_apart(fmt: TokenFormat, blocks: int, top_k: int, alignment: int) -> None:
    hidden = blocks * max(fmt.block, 8)
    layout = RecordLayout(fmt, hidden, top_k, alignment)
    fields = [
        (layout.quants_offset, fmt.quant_bytes(hidden)),
        (layout.scales_offset, fmt.scale_bytes(hidden)),
        (layout.row_scale_offset, 4 if fmt.has_row_scale else 0),
        (layout.source_offset, 4),
        (layout.ids_offset, 2 * top_k),
        (layout.weights_offset, 4 * top_k),
    ]
    end = 0
    for offset, size in fields:
        assert offset % alignment == 0
        assert 0 <= offset - end < alignment  # no more room than alignment asks for
        end = offset + size
    assert layout.record_bytes % 128 == 0
    assert 0 <= layout.record_bytes - end < 128


def test_record_of_a_real_model() -> None:
    layout = RecordLayout("nvfp4", hidden=7168, top_k=8)
    assert layout.format is NVFP4
    assert (layout.scales_offset, layout.row_scale_offset, layout.source_offset) == (3584, 4032, 4048)
    assert (layout.ids_offset, layout.weights_offset, layout.record_bytes) == (4064, 4080, 4224)
    assert layout == RecordLayout(NVFP4, 7168, 8)
    assert hash(layout) == hash(RecordLayout(NVFP4, 7168, 8))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: RecordLayout(NVFP4, 24, 2), "hidden"),
        (lambda: RecordLayout(NVFP4, 64, 0), "top_k"),
        (lambda: RecordLayout(NVFP4, 64, 2, 256), "alignment"),
        (lambda: RecordLayout(NVFP4, "64", 2), "^hidden: expected an integer, got '64'"),  # type: ignore[arg-type]
        (lambda: RecordLayout(NVFP4, 64, 2.0), "^top_k: expected an int"),  # type: ignore[arg-type]
        (lambda: RecordLayout(NVFP4, 64, 2, None), "^alignment: expected an int"),  # type: ignore[arg-type]
    ],
)
def test_bad_construction(call: Callable[[], RecordLayout], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()
