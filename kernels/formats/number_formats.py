"""Number formats as frozen data: the only module that knows element width, block size, scale type and sizes.

Shape letters used across the project: `T` tokens of one rank, `H` hidden size, `I` intermediate size, `E` experts
of one rank, `G` groups, `R` rows of a grouped GEMM, `N`/`K` GEMM dimensions, `V = ceil(K / block)` scale columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from moe_runtime.support.arguments import check_flag, check_integer, check_kind, describe


class FormatCode(IntEnum):
    """The code of a format; kernels branch on it as a `tl.constexpr`."""

    BF16 = 0
    FP8_BLOCK = 1
    MXFP8 = 2
    NVFP4 = 3
    MXFP4 = 4


class ScaleLayout(IntEnum):
    """Position of the scale of row `r`, block `v`; kernels branch on it. `ld` is the leading dimension."""

    SWIZZLED = 0
    """The 128x4 swizzle, one byte each."""
    K_MAJOR = 1
    """`r * V + v`."""
    MN_MAJOR = 2
    """`v * ld + r`."""
    PACKED = 3
    """Byte `v % 4` of the 32-bit word `v // 4 * ld + r`."""


NVFP4_FULL_SCALE = 2688.0
"""Largest `e2m1 * e4m3` magnitude, 6 * 448."""

MAX_ENCODE_SCALE = 2.0**100
"""Upper bound of an NVFP4 encode scale."""

MAX_COLUMNS = 2**24
"""Most values in a row, so that kernels can count the bytes of some rows in int32."""

FP8_UNIT = 16
"""Values of which an `fp8_block` row is a multiple: the 16 bytes that TMA and the wire align rows to. The last block of
a row may be short."""


def ceil_div(a: int, b: int) -> int:
    """`ceil(a / b)` of non-negative integers."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """`a` rounded up to a multiple of `b`."""
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class TokenFormat:
    """How a row of `K` values is stored: quants, block scales along K, and an optional fp32 scale of the row.

    Attributes:
        name: the name in YAML and in every API.
        code: the code that kernels branch on.
        element_bits: bits of one element.
        block: elements of K that share a block scale; 1 if there are no block scales.
        quant_dtype: torch dtype of the quants in the GEMM (`uint8` holds two e2m1 codes).
        scale_dtype: torch dtype of a block scale (`uint8` holds a UE8M0 byte); None if there is none.
        swizzled: whether block scales reach the GEMM in the 128x4 swizzle and the `dense_128` convention; otherwise
            they are K-major, one row of scales per row of quants.
        has_row_scale: each row carries an fp32 decode scale, applied to the fp32 accumulator.
    """

    name: str
    code: FormatCode
    element_bits: int
    block: int
    quant_dtype: torch.dtype
    scale_dtype: torch.dtype | None
    swizzled: bool
    has_row_scale: bool

    def __post_init__(self) -> None:
        check_kind("name", self.name, str)
        check_kind("code", self.code, FormatCode)
        check_integer("element_bits", self.element_bits, high=64)
        check_integer("block", self.block, high=MAX_COLUMNS)
        check_kind("quant_dtype", self.quant_dtype, torch.dtype)
        if self.scale_dtype is not None:
            check_kind("scale_dtype", self.scale_dtype, torch.dtype)
        check_flag("swizzled", self.swizzled)
        check_flag("has_row_scale", self.has_row_scale)

    def __hash__(self) -> int:
        """Hash only the name, for speed: every launch looks up plans and macros by keys that contain formats."""
        return hash(self.name)

    @property
    def scale_layout(self) -> ScaleLayout:
        """Layout of block scales inside a layer."""
        return ScaleLayout.SWIZZLED if self.swizzled else ScaleLayout.K_MAJOR

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger element, `2^-mantissa_bits`; 0.5 for e2m1, which has no torch dtype."""
        return torch.finfo(self.quant_dtype).eps if self.quant_dtype.is_floating_point else 0.5

    def quant_columns(self, k: int) -> int:
        """Elements of `quant_dtype` that hold a row of `k` values."""
        return k * self.element_bits // (8 * self.quant_dtype.itemsize)

    def quant_bytes(self, k: int) -> int:
        """Bytes of the quants of a row of `k` values."""
        return k * self.element_bits // 8

    def scale_columns(self, k: int) -> int:
        """`V`, the number of block scales of a row of `k` values."""
        return ceil_div(k, self.block) if self.scale_dtype is not None else 0

    def scale_bytes(self, k: int) -> int:
        """Bytes of the linear block scales of a row of `k` values."""
        return self.scale_columns(k) * self.scale_dtype.itemsize if self.scale_dtype is not None else 0

    @property
    def unit(self) -> int:
        """Values of which a row is a multiple: whole blocks, but for `fp8_block`, whose last block may be short."""
        return FP8_UNIT if self.scale_dtype == torch.float32 else max(self.block, 8)

    def check_columns(self, k: int, argument: str) -> None:
        """Raise `ValueError` naming `argument` unless rows of `k` values can be stored."""
        unit = self.unit
        if type(k) is not int or not 0 < k <= MAX_COLUMNS or k % unit:
            most = f", at most {MAX_COLUMNS}" if type(k) is int and k > MAX_COLUMNS else ""
            raise ValueError(
                f"{argument}: format {self.name} needs a positive multiple of {unit}{most}, got {describe(k)}"
            )


BF16 = TokenFormat("bf16", FormatCode.BF16, 16, 1, torch.bfloat16, None, swizzled=False, has_row_scale=False)
FP8_BLOCK = TokenFormat(
    "fp8_block", FormatCode.FP8_BLOCK, 8, 128, torch.float8_e4m3fn, torch.float32, swizzled=False, has_row_scale=False
)
MXFP8 = TokenFormat(
    "mxfp8", FormatCode.MXFP8, 8, 32, torch.float8_e4m3fn, torch.uint8, swizzled=True, has_row_scale=False
)
NVFP4 = TokenFormat(
    "nvfp4", FormatCode.NVFP4, 4, 16, torch.uint8, torch.float8_e4m3fn, swizzled=True, has_row_scale=True
)
MXFP4 = TokenFormat("mxfp4", FormatCode.MXFP4, 4, 32, torch.uint8, torch.uint8, swizzled=True, has_row_scale=False)

FORMATS: dict[str, TokenFormat] = {f.name: f for f in (BF16, FP8_BLOCK, MXFP8, NVFP4)}
"""Formats of tokens. Weights may have these too."""

WEIGHT_FORMATS: dict[str, TokenFormat] = FORMATS | {MXFP4.name: MXFP4}
"""Formats of weights. `mxfp4`, e2m1 with one UE8M0 scale per 32 of K, is for weights only."""

OTHER_TOKEN_FORMATS = {
    NVFP4.name: (BF16.name, FP8_BLOCK.name),
    MXFP4.name: (BF16.name, MXFP8.name, FP8_BLOCK.name),
}
"""By weight format: other token formats that the GEMM multiplies with it. The usual one comes first."""

COMBINE_FORMATS = tuple(name for name, fmt in FORMATS.items() if not fmt.has_row_scale)
"""Formats in which combine may send partial sums: those that need no second pass over the row."""

WEIGHT_BLOCK_N = 128
"""Rows of N that share a block scale in an `fp8_block` weight (128x128 blocks); 1 row in the other formats."""


def format_named(
    name: str | TokenFormat, argument: str = "format", among: dict[str, TokenFormat] = FORMATS
) -> TokenFormat:
    """The format called `name`; a `TokenFormat` of them stands for itself. Raises `ValueError` naming `argument`."""
    if isinstance(name, TokenFormat):
        known = WEIGHT_FORMATS.get(name.name)
        if known is None or (name is not known and name != known):
            raise ValueError(f"{argument}: expected a format of this package, got another called {name.name!r}")
        return known
    if not isinstance(name, str) or name not in among:
        raise ValueError(f"{argument}: expected one of {sorted(among)}, got {name!r}")
    return among[name]


def weight_format_named(name: str | TokenFormat, argument: str = "format") -> TokenFormat:
    """`format_named` among the formats of weights."""
    return format_named(name, argument, WEIGHT_FORMATS)


def token_formats_for(weights: str) -> tuple[str, ...]:
    """Names of the token formats that can be multiplied with weights in format `weights`, the usual one first.

    >>> token_formats_for("nvfp4"), token_formats_for("mxfp4"), token_formats_for("mxfp8")
    (('nvfp4', 'bf16', 'fp8_block'), ('bf16', 'mxfp8', 'fp8_block'), ('mxfp8',))
    """
    own = (weights,) if weights in FORMATS else ()
    return own + OTHER_TOKEN_FORMATS.get(weights, ())


def rounds_tokens(tokens: TokenFormat, weights: TokenFormat) -> bool:
    """Whether the GEMM rounds dequantized rows in format `tokens` to bf16 before it multiplies them with `weights`.

    `fp8_block` rows with e2m1 weights: a value is `bf16(fp32(e4m3 * scale))`, both steps rounded to nearest even. The
    result has the bits of `bf16` rows of these values. All other rows are dequantized without an error, or multiplied
    as they are stored.
    """
    return tokens == FP8_BLOCK and weights.element_bits == 4


def intermediate_format_for(tokens: TokenFormat, weights: TokenFormat) -> TokenFormat:
    """The format between both GEMMs of a layer: that of its tokens, but `bf16` where `rounds_tokens`.

    Weights that multiply in bf16 gain nothing by `fp8_block` there: the result is stored for them in bf16 anyway. A
    block of 128 columns is more than a tile of few rows has.
    """
    return BF16 if rounds_tokens(tokens, weights) else tokens


@dataclass(frozen=True)
class QuantizedRows:
    """Rows in a format, scales linear (before any swizzle).

    Attributes:
        format: the descriptor.
        quants_RK: `[R, quant_columns(K)]` of `format.quant_dtype`.
        scales_RV: `[R, V]` of `format.scale_dtype`, linear; None for formats without block scales.
        row_scale_R: `[R]` fp32 decode scales; None for formats without one.
    """

    format: TokenFormat
    quants_RK: torch.Tensor
    scales_RV: torch.Tensor | None = None
    row_scale_R: torch.Tensor | None = None
