"""The wire record: where each field of a token lies when the dispatcher sends it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_runtime.kernels.formats.number_formats import TokenFormat, align, format_named
from moe_runtime.support.arguments import check_integer, describe

DEFAULT_ALIGNMENT = 16
RECORD_ALIGNMENT = 128
NO_EXPERT = 65535
"""The uint16 that stands for the expert id -1."""


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of the fields of one token's record, each a multiple of `alignment`.

    Record: `[quants | scales, linear | row scale f32 | source i32 | top-k ids u16 | top-k weights f32]`, padded to a
    multiple of 128 bytes. In formats without a row scale its field is empty (`row_scale_offset == source_offset`), as
    is the field of the scales in bf16. An id of 65535 means none.

    >>> layout = RecordLayout("nvfp4", hidden=64, top_k=2)
    >>> layout.scales_offset, layout.row_scale_offset, layout.source_offset, layout.ids_offset, layout.weights_offset
    (32, 48, 64, 80, 96)
    >>> layout.record_bytes
    128

    Attributes:
        format: number format of the token (a name is looked up).
        hidden: width of a token, a multiple of `format.unit`.
        top_k: experts of a token.
        alignment: bytes, a power of two from 4 to 128.
    """

    format: TokenFormat
    hidden: int
    top_k: int
    alignment: int = DEFAULT_ALIGNMENT

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_named(self.format))
        for name in ("hidden", "top_k", "alignment"):
            check_integer(name, getattr(self, name), None)
        self.format.check_columns(self.hidden, "hidden")
        check_top_k(self.top_k)
        check_alignment(self.alignment, RECORD_ALIGNMENT)

    @cached_property
    def quants_offset(self) -> int:
        return 0

    @cached_property
    def scales_offset(self) -> int:
        return align(self.format.quant_bytes(self.hidden), self.alignment)

    @cached_property
    def row_scale_offset(self) -> int:
        return self.scales_offset + align(self.format.scale_bytes(self.hidden), self.alignment)

    @cached_property
    def source_offset(self) -> int:
        return self.row_scale_offset + (align(4, self.alignment) if self.format.has_row_scale else 0)

    @cached_property
    def ids_offset(self) -> int:
        return self.source_offset + align(4, self.alignment)

    @cached_property
    def weights_offset(self) -> int:
        return self.ids_offset + align(2 * self.top_k, self.alignment)

    @cached_property
    def record_bytes(self) -> int:
        return align(self.weights_offset + 4 * self.top_k, RECORD_ALIGNMENT)

    @cached_property
    def constants(self) -> dict[str, int]:
        """Size of a record and offsets of its fields, by their names in kernels."""
        return {
            "RECORD_BYTES": self.record_bytes,
            "SCALES_AT": self.scales_offset,
            "ROW_SCALE_AT": self.row_scale_offset,
            "SOURCE_AT": self.source_offset,
            "IDS_AT": self.ids_offset,
            "WEIGHTS_AT": self.weights_offset,
        }


def check_top_k(top_k: int) -> None:
    if not 1 <= top_k <= NO_EXPERT:
        raise ValueError(f"top_k: expected at least 1, at most {NO_EXPERT}, got {describe(top_k)}")


def check_alignment(alignment: int, largest: int = 2**30) -> None:
    if not 4 <= alignment <= largest or alignment & (alignment - 1):
        raise ValueError(f"alignment: expected a power of two from 4 to {largest}, got {describe(alignment)}")
