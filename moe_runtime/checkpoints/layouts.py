"""How checkpoints store the weight of a linear, as data.

Every layout is one that public programs write, for weights of 2 to 16 bits. A weight reads back as
`quants * block scale * second-level scale`. Some layouts store the second-level scale, others its inverse. The low
nibble is always the even column. Where no format of ours has these quants and scales, the layout's format is `bf16`,
and weights are dequantized as they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, MXFP4, MXFP8, NVFP4, TokenFormat, ceil_div

QUANTIZED_DTYPES = ("F8_E4M3", "U8")
"""Dtypes of quants of 8 and of 4 bits, as safetensors names them."""
WEIGHT_NAMES = ("weight", "weight_packed", "qweight")
"""Last parts of the names of the quants of linears."""
FLOAT_DTYPES = ("BF16", "F32", "F16")
"""Dtypes of what is not quantized."""
_SCALE_DTYPES = ("F32", "BF16", "F16")
"""Dtypes of scales that may have any value. The first is written."""
SCALE_NAMES = (".weight_scale", ".weight_scale_inv", ".scales")
"""Ends of names of scales. In every layout but that of stacked experts, some tensor of a quantized linear has one."""
STACKED_SCALE = "scale_inv"
"""Behind the name of a stack, that of its FP8 scales."""
STACKED_UNUSED = ("activation_scale",)
"""Likewise those of its inputs, which are not used."""
SHORT_SCALE_NAME = ".scale"
"""End of those of DeepSeek-V4. Factors of other kinds are called so too, where no `.weight` is beside them."""


def hold_scales(names: Iterable[str]) -> bool:
    """Whether some of these tensors are scales of a quantized linear."""
    there = set(names)
    return any(
        name.endswith(SCALE_NAMES)
        or (name.endswith(SHORT_SCALE_NAME) and f"{name.removesuffix(SHORT_SCALE_NAME)}.weight" in there)
        for name in there
    )


@dataclass(frozen=True)
class ScaleName:
    """A second-level scale: the last part of its tensor's name, and whether to divide by it (an encode scale)."""

    suffix: str
    divides: bool


class Packing(Enum):
    """How the integers of a linear `[N, K]` lie in int32s, and their zero points and scales in groups of columns."""

    ROWS = "rows"
    """Along the rows, with `2^(int_bits - 1)` added to integers and zero points; zero points along columns of
    `[N, V]`."""
    GPTQ = "gptq"
    """Along columns: quants of `[K, N]` along `K`, zero points of `[V, N]` along `N`, scales `[V, N]`."""
    AWQ = "awq"
    """All of `[K, N]` and `[V, N]` along `N`, eight at a time in the order of `AWQ_ORDER`."""


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight rows each nibble holds, lowest first."""


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of one linear `[N, K]`.

    Attributes:
        name: its name in messages.
        format: number format that weights are held in; `bf16` for quants with scales that no format has.
        weight: last part of the name of the quants.
        scale: last part of the name of the block scales, `[N, V]` linear, in `fp8_block` `[ceil(N/128), ceil(K/128)]`;
            None if there are none.
        other_scales: what that part may be instead.
        grid: rows and columns that share a block scale, None for all of them, if not those of the format.
        quants: number format of the quants, if not `format`.
        stored_as: possible dtypes of the quants, as safetensors names them, if not those of their format.
        int_bits: width of quants that are integers; None if they are none.
        packing: how integers lie in int32s, low bits first; None if they have bytes of their own.
        zero_points: last part of the name of what is subtracted from integers.
        zero_offset: what is added to zero points.
        symmetric: whether all zero points are `2^(int_bits - 1)`, with or without the offset; None if it is not said.
        whole_words: the offset was subtracted from whole int32s, so that what falls below 0 borrows from the next.
        own_order: columns are in groups that another tensor names.
        column_scale: last part of the name of a factor of each column `[K]`, which a linear may lack.
        scale_dtypes: possible dtypes of the block scales, as safetensors names them.
        weight_scale: second-level scale of the weight, one fp32 value.
        input_scale: second-level scale of the linear's input, if calibrated.
        unused: last parts of the names of other tensors that a linear may have.
        stacked: the experts of a layer share two tensors, one of gate and up and one of down, as in gpt-oss.
        stacked_scales: so do their scales alone, as transformers saves FP8 that it has quantized itself.
        transposed: each of these holds experts as `[K, N]`, and scales of blocks likewise.
        fused: stacked as transformers 5 has experts in memory, except gpt-oss; `save_original_format=False` saves it.
    """

    name: str
    format: TokenFormat
    weight: str = "weight"
    scale: str | None = None
    other_scales: tuple[str, ...] = ()
    scale_dtypes: tuple[str, ...] = ()
    grid: tuple[int | None, int | None] | None = None
    quants: TokenFormat | None = None
    stored_as: tuple[str, ...] = ()
    int_bits: int | None = None
    packing: Packing | None = None
    zero_points: str | None = None
    zero_offset: int = 0
    symmetric: bool | None = False
    whole_words: bool = False
    own_order: bool = False
    column_scale: str | None = None
    weight_scale: ScaleName | None = None
    input_scale: ScaleName | None = None
    unused: tuple[str, ...] = ()
    stacked: bool = False
    stacked_scales: bool = False
    transposed: bool = False
    fused: bool = False

    @property
    def dequantized(self) -> bool:
        """Whether no format has these quants and scales, so that weights are dequantized as they are read."""
        return self.quants is not None or self.int_bits is not None

    @property
    def quant_format(self) -> TokenFormat:
        """Number format of the quants, if they are no integers."""
        return self.quants or self.format

    @property
    def is_fp8(self) -> bool:
        """Whether quants are FP8 and scales have any value."""
        return self.quant_format is FP8_BLOCK

    @property
    def quant_dtypes(self) -> tuple[str, ...]:
        """Possible dtypes of the quants, as safetensors names them."""
        if self.int_bits is not None:
            return ("I8" if self.packing is None else "I32",)
        if self.stored_as:
            return self.stored_as
        bits = self.quant_format.element_bits
        return {16: FLOAT_DTYPES, 8: QUANTIZED_DTYPES[:1], 4: QUANTIZED_DTYPES[1:]}[bits]

    def quant_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the quants of a linear."""
        if self.packing is None or self.int_bits is None:
            return rows, self.quant_format.quant_columns(columns)
        if self.packing is Packing.ROWS:
            return rows, packed_words(columns, self.int_bits)
        if self.packing is Packing.GPTQ:
            return packed_words(columns, self.int_bits), rows
        return columns, packed_words(rows, self.int_bits)

    def stack(self, prefix: str) -> tuple[str, ...]:
        """Names of the quants and, if there are any, of the scales of stacked experts."""
        weight = prefix if self.fused or self.scale is None else f"{prefix}_{self.weight}"
        return (weight,) if self.scale is None else (weight, f"{prefix}_{self.scale}")


def packed_words(count: int, bits: int) -> int:
    """How many int32s hold `count` packed integers."""
    return ceil_div(count * bits, 32)


PLAIN = WeightLayout("plain", BF16)
PLAIN_STACKED = WeightLayout("plain, stacked", BF16, stacked=True, transposed=True)
PLAIN_FUSED = WeightLayout("plain, fused", BF16, stacked=True, fused=True)
PLAIN_FUSED_TRANSPOSED = WeightLayout("plain, fused, transposed", BF16, stacked=True, transposed=True, fused=True)
"""As Qwen3-VL-MoE is published."""
MODELOPT_NVFP4 = WeightLayout(
    "modelopt nvfp4",
    NVFP4,
    scale="weight_scale",
    scale_dtypes=("F8_E4M3",),
    weight_scale=ScaleName("weight_scale_2", divides=False),
    input_scale=ScaleName("input_scale", divides=False),
)
MODELOPT_NVFP4_AWQ = replace(
    MODELOPT_NVFP4,
    name="modelopt nvfp4 awq",
    format=BF16,
    quants=NVFP4,
    column_scale="pre_quant_scale",
    input_scale=None,
    unused=("input_scale",),
)
"""Columns were divided by what the inputs are multiplied by. `input_scale` is that of such inputs."""
COMPRESSED_NVFP4 = WeightLayout(
    "nvfp4-pack-quantized",
    NVFP4,
    weight="weight_packed",
    scale="weight_scale",
    scale_dtypes=("F8_E4M3",),
    weight_scale=ScaleName("weight_global_scale", divides=True),
    input_scale=ScaleName("input_global_scale", divides=True),
)
COMPRESSED_MXFP4 = WeightLayout(
    "mxfp4-pack-quantized", MXFP4, weight="weight_packed", scale="weight_scale", scale_dtypes=("U8", "F8_E8M0")
)
COMPRESSED_MXFP8 = WeightLayout("mxfp8-quantized", MXFP8, scale="weight_scale", scale_dtypes=("U8", "F8_E8M0"))
COMPRESSED_FP8_BLOCKS = WeightLayout("float-quantized", FP8_BLOCK, scale="weight_scale", scale_dtypes=_SCALE_DTYPES)
MODELOPT_FP8_BLOCKS = replace(COMPRESSED_FP8_BLOCKS, name="modelopt fp8 blocks", other_scales=("weight_scale_inv",))
"""TensorRT-LLM reads DeepSeek's files under the name of ModelOpt's."""
FP8_BLOCKS = WeightLayout(
    "fp8",
    FP8_BLOCK,
    scale="weight_scale_inv",
    other_scales=("scale",),
    scale_dtypes=(*_SCALE_DTYPES, "F8_E8M0"),
)
DEEPSEEK_FP4 = WeightLayout(
    "fp8 with experts in fp4",
    MXFP4,
    stored_as=("I8", "U8"),
    scale="scale",
    other_scales=("weight_scale_inv",),
    scale_dtypes=("F8_E8M0", "U8"),
)
"""Of DeepSeek-V4: two codes in a byte."""
FP8_TENSOR = WeightLayout(
    "fp8 per tensor",
    FP8_BLOCK,
    scale="weight_scale",
    other_scales=("weight_scale_inv", "scale"),
    scale_dtypes=_SCALE_DTYPES,
    grid=(None, None),
    unused=("input_scale", "activation_scale"),
)
"""`fp8_block` holds it exactly, with one scale in all blocks."""
FP8_CHANNEL = replace(
    FP8_TENSOR, name="fp8 per channel", format=BF16, quants=FP8_BLOCK, other_scales=(), grid=(1, None)
)
GPT_OSS_MXFP4 = WeightLayout("mxfp4", MXFP4, weight="blocks", scale="scales", scale_dtypes=("U8",), stacked=True)

COMPRESSED = {
    layout.name: layout for layout in (COMPRESSED_NVFP4, COMPRESSED_MXFP4, COMPRESSED_MXFP8, COMPRESSED_FP8_BLOCKS)
} | {"naive-quantized": COMPRESSED_FP8_BLOCKS}
"""Layouts of compressed-tensors by the name of their format, those of `float-quantized` in blocks of 128x128."""

PACKED_INTS, PLAIN_INTS = "pack-quantized", "int-quantized"
"""Formats of compressed-tensors whose layout follows from the width, the strategy and the size of its groups."""
INT_BITS = {PACKED_INTS: (4, 8, 2), PLAIN_INTS: (8,)}
"""Widths that are read. Older releases of compressed-tensors pack others in another way than newer ones."""


def integers(fmt: str, bits: int, columns: int | None, *, zero_points: bool) -> WeightLayout:
    """A format of `INT_BITS` with one scale for this many columns of a row, None for all."""
    packing = Packing.ROWS if fmt == PACKED_INTS else None
    return WeightLayout(
        f"{fmt} of {bits} bits",
        BF16,
        weight="weight_packed" if packing else "weight",
        scale="weight_scale",
        scale_dtypes=_SCALE_DTYPES,
        grid=(1, columns),
        int_bits=bits,
        packing=packing,
        zero_points="weight_zero_point" if zero_points else None,
        unused=("weight_shape",) if packing else ("input_scale", "input_zero_point", "azp_adj"),
    )


def transposed_integers(packing: Packing, bits: int, columns: int | None) -> WeightLayout:
    """GPTQ's or AWQ's integers with one scale and zero point for this many columns of a row, None for all."""
    return WeightLayout(
        f"{packing.value} of {bits} bits",
        BF16,
        weight="qweight",
        scale="scales",
        scale_dtypes=_SCALE_DTYPES,
        grid=(1, columns),
        int_bits=bits,
        packing=packing,
        zero_points="qzeros",
        unused=("g_idx",),
    )


def fp8_grid(layout: WeightLayout, rows: int, columns: int) -> WeightLayout:
    """`layout`, of FP8 in blocks of 128x128, with blocks of another size."""
    name = f"{layout.name} {rows}x{columns}"
    if (rows, columns) == (128, 128):
        return layout
    return replace(layout, name=name, format=BF16, quants=FP8_BLOCK, grid=(rows, columns))


MODELOPT = {
    "NVFP4": (MODELOPT_NVFP4, "nvfp4"),
    "W4A16_NVFP4": (MODELOPT_NVFP4, "bf16"),
    "NVFP4_AWQ": (MODELOPT_NVFP4_AWQ, "bf16"),
    "FP8": (FP8_TENSOR, "fp8_block"),
    "FP8_PER_CHANNEL_PER_TOKEN": (FP8_CHANNEL, "bf16"),
    "FP8_PB_WO": (MODELOPT_FP8_BLOCKS, "bf16"),
    "FP8_PB": (MODELOPT_FP8_BLOCKS, "fp8_block"),
    "FP8_BLOCK_SCALES": (MODELOPT_FP8_BLOCKS, "fp8_block"),
    "MXFP8": (COMPRESSED_MXFP8, "mxfp8"),
}
"""Algorithms of ModelOpt: their layouts and the tokens that they are meant for. It writes some in small letters."""
