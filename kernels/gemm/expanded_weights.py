"""FP4 weights that Hopper's FP8 tensor cores multiply: stored in 4 bits, expanded to e4m3 by `tma_gemm.cu`.

**Value.** The weights are those of `fp8_block`: e4m3 with an fp32 scale for each block of 128 x 128, in which gate and
up each start with a block. With block scales `s` (of 16 or 32 along K), `f` is the least integer from -126 on with
`max(abs(e2m1 * s)) * 2^-f <= 448` in such a block, without its NaNs, or 0 if all are 0. The fp32 scale is
`expert scale * 2^f`, rounded once. A weight is `e2m1 * s * 2^-f`, rounded once to e4m3, to nearest with ties to even.
Nothing saturates. So the weights are those of `fold_into_fp8` with gate above up, but for blocks with NaN, or with
`e2m1 * s` beyond fp32. The `fp8_block` GEMM with the weights of `ExpandedWeights.expand` gives the same bits.

**Error.** e4m3 has 4 significant bits from 2^-6 on; below it has multiples of 2^-9.

- `mxfp4`: a weight is exact if `s` is at least 2^-14 times the largest of its block of 128 x 128. With smaller ones it
  is rounded to a multiple of 2^-9, at last to 0. `ExpandedWeights.exact` tells which experts have no rounded weight.
- `nvfp4`: `e2m1 * s` has up to 6 significant bits. 1.5, 3 and 6 times mantissas of 9, 11, 13, 14 and 15 eighths are
  rounded, by at most 2^-4 of their value. A weight below 2^-6 is rounded to a multiple of 2^-9, so it is off by at most
  `2^-10 * 2^f`; the largest of its block is more than `224 * 2^f`.

**Layout.** A unit has 64 rows of gate, of up or of a plain weight, and 128 columns of K: 256 words of 16 bytes, then
scale codes. Word `32 * group + 8 * span + row` has the 32 weights of row `8 * group + row` from column `32 * span` on.
In each of its four 32-bit words, weight `i` has its magnitude at bits `4i .. 4i + 2` and its sign at bit `8i + 7`, or
`8i - 29` for the last four: a mask makes selectors of bytes, another one puts signs where e4m3 has them. Thread `t` of
128 reads words `t` and `t + 128` and finds their scale codes together. Units of a row block follow each other along K.

A scale code is `s * 2^-f` as fp16 without its sign and its last 7 bits: 5 bits of exponent, 3 of mantissa. That of
`mxfp4` has one of mantissa, which is 0: codes of 8 exponents lie in different banks of shared memory then. 0 is 0, and
so are all `s` below `2^-14 * 2^f`, with which every magnitude rounds to 0. If all bits are set, it is NaN. So the
kernel has one table for all experts, of 256 entries, or of 64. The code is 0, too, where all weights of `s` are 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from moe_runtime.kernels.formats.number_formats import (
    FP8_BLOCK,
    MXFP4,
    NVFP4,
    WEIGHT_BLOCK_N,
    TokenFormat,
    ceil_div,
    weight_format_named,
)
from moe_runtime.kernels.formats.swizzle import unswizzle_scales
from moe_runtime.kernels.gemm.dequant_layout import SCALE_CODES
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import (
    Activation,
    ExpertWeights,
    GateUpOrder,
    TensorsByExpert,
    has_blocks_apart,
    scales_shape,
)
from moe_runtime.support.arguments import check_is_tensor, check_kind

EXPANDED_FORMATS = (NVFP4, MXFP4)
UNIT_ROWS, UNIT_COLUMNS = 64, 128
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1 codes without their sign."""

_NAN_CODE = 255
_BIAS = 21
"""Of the exponents by which block scales are compared: those of `SCALE_CODES`. e8m0 exponents get it, too."""

_ZERO, _NAN = -(2**20), 2**20
"""For such a number where a block scale is 0 or NaN."""


def _unused_bits(fmt: TokenFormat) -> int:
    """Bits of mantissa that scale codes of a format do without."""
    return 2 if fmt is MXFP4 else 0


def unit_bytes(fmt: TokenFormat) -> int:
    """Bytes of a unit: 64 x 128 weights and their scale codes."""
    return UNIT_ROWS * (fmt.quant_bytes(UNIT_COLUMNS) + fmt.scale_columns(UNIT_COLUMNS))


def units_shape(fmt: TokenFormat, num_rows: int, num_columns: int, parts: int) -> tuple[int, int, int, int]:
    """Shape of the units of one expert: parts (gate and up, or one), blocks of 64 rows, blocks of K, bytes."""
    blocks = 2 * ceil_div(num_rows // parts, WEIGHT_BLOCK_N)
    return parts, blocks, ceil_div(num_columns, UNIT_COLUMNS), unit_bytes(fmt)


@dataclass(frozen=True)
class ExpandedWeights(TensorsByExpert):
    """FP4 `ExpertWeights` in the layout from which `tma_gemm.cu` expands them to e4m3.

    To all but the kernel that loads them they are `fp8_block` weights, with gate above up.

    Attributes:
        stored_format: `nvfp4` or `mxfp4` (a name is looked up).
        units: uint8 `[E, parts, blocks of 64 rows, blocks of K, bytes]`; rows of a part are padded to blocks of 128.
        scales: fp32 as of `fp8_block` weights, with the expert's scale; `[E, ceil(N/128), ceil(K/128)]`, or
            `[E, 2 * ceil(I/128), ceil(K/128)]` with gate above up.
        exact: bool `[E]`: whether expansion rounds no weight of the expert.
        num_rows: `N`.
        num_columns: `K`.
        bias: fp32 `[E, N]`, with gate above up; None means 0.
        gate_up: the order of gate and up in the weights from which these were made; None for plain weights. With
            one they serve gated activations of that order alone.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, device or stride; the message names it.
    """

    stored_format: TokenFormat
    units: torch.Tensor
    scales: torch.Tensor
    exact: torch.Tensor
    num_rows: int
    num_columns: int
    bias: torch.Tensor | None = None
    gate_up: GateUpOrder | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored_format", _checked_format(self.stored_format, "stored_format"))
        if self.gate_up is not None:
            object.__setattr__(self, "gate_up", GateUpOrder.of(self.gate_up))
        sizes = self.num_rows, self.num_columns
        experts = int(check_is_tensor("units", self.units).shape[0]) if self.units.ndim == 5 else 0
        scales = scales_shape(FP8_BLOCK, experts, *sizes, self.order)
        assert scales is not None
        units = experts, *units_shape(self.stored_format, *sizes, self.num_parts)
        self._check_tensor("units", self.units, torch.uint8, units)
        self._check_tensor("scales", check_is_tensor("scales", self.scales), torch.float32, scales)
        self._check_tensor("exact", check_is_tensor("exact", self.exact), torch.bool, (experts,))
        self._check_tensor("bias", self.bias, torch.float32, (experts, self.num_rows))

    @classmethod
    def prepack(cls, w: ExpertWeights, *, engine: str = "auto") -> ExpandedWeights:
        """Reorder `w`, one expert after the other. Waits for the device.

        Raises `ValueError` for another format than `nvfp4` and `mxfp4`, and for `nvfp4` block scales that are negative
        or NaN.
        """
        check_kind("w", w, ExpertWeights)
        fmt = _checked_format(w.format, "w.format")
        assert w.scales is not None
        index = _rows_of_parts(w.num_rows, w.gate_up).to(w.device)
        parts = len(index)
        shape = units_shape(fmt, w.num_rows, w.num_columns, parts)
        units = torch.empty(w.num_experts, *shape, dtype=torch.uint8, device=w.device)
        folds = torch.empty(w.num_experts, parts, shape[1] // 2, shape[2], dtype=torch.int32, device=w.device)
        exact = torch.empty(w.num_experts, dtype=torch.bool, device=w.device)
        for expert in range(w.num_experts):
            linear = unswizzle_scales(
                w.scales[expert : expert + 1], w.num_rows, fmt.scale_columns(w.num_columns), engine=engine
            )[0].view(torch.uint8)
            sizes = _scale_sizes(linear, fmt)
            columns = shape[2] * UNIT_COLUMNS
            sizes = _padded(sizes[index], shape[1] * UNIT_ROWS, columns // fmt.block, _ZERO)
            quants = _padded(w.quants[expert].view(torch.uint8)[index], shape[1] * UNIT_ROWS, columns // 2, 0)
            nibbles = torch.stack((quants & 15, quants >> 4), -1).flatten(-2)
            # Magnitude codes are in the order of their values.
            largest = (nibbles & 7).unflatten(-1, (-1, fmt.block)).amax(-1)
            sizes = torch.where((largest == 0) & (sizes != _NAN), _ZERO, sizes)
            folds[expert] = _folds(sizes, largest, fmt)
            codes, rounded = _scale_codes(sizes, folds[expert], fmt)
            units[expert] = _pack(nibbles, codes >> _unused_bits(fmt), fmt)
            of_weights = rounded.repeat_interleave(fmt.block, -1) >> (nibbles & 7).int() & 1
            exact[expert] = ~of_weights.any()
        factors = torch.ones(w.num_experts, parts, dtype=torch.float32, device=w.device)
        if w.expert_scales is not None:
            factors *= w.expert_scales if w.expert_scales.ndim == 2 else w.expert_scales[:, None]
        scales = (factors.double()[:, :, None, None] * torch.exp2(folds.double())).float().flatten(1, 2)
        bias = None if w.bias is None else w.bias[:, index.flatten()].contiguous()
        return cls(fmt, units, scales, exact, w.num_rows, w.num_columns, bias, w.gate_up)

    def expand(self) -> ExpertWeights:
        """The same weights in `fp8_block`, gate above up, for `expanded_activation`."""
        rows = self.num_rows // self.num_parts
        quants = torch.empty(
            self.num_experts, self.num_rows, self.num_columns, dtype=torch.float8_e4m3fn, device=self.device
        )
        table = products_of_codes().to(self.device)
        for expert, units in enumerate(self.units):
            nibbles, codes = _unpack(units, self.stored_format)
            codes = codes << _unused_bits(self.stored_format)
            found = table[codes.long().repeat_interleave(self.stored_format.block, -1), (nibbles & 7).long()]
            found |= (nibbles & 8) << 4
            quants[expert].view(torch.uint8).copy_(found[:, :rows, : self.num_columns].flatten(0, 1))
        return ExpertWeights(FP8_BLOCK, quants, self.scales, bias=self.bias, gate_up=self.order)

    @property
    def format(self) -> TokenFormat:
        """`fp8_block`, as which they are multiplied."""
        return FP8_BLOCK

    @property
    def order(self) -> GateUpOrder | None:
        """`GATE_UP` if there are gate and up: how the kernel finds them, and their scales and biases."""
        return None if self.gate_up is None else GateUpOrder.GATE_UP

    @property
    def num_parts(self) -> int:
        """2 for gate and up, else 1."""
        return 1 if self.gate_up is None else 2

    @property
    def num_experts(self) -> int:
        """`E`."""
        return int(self.units.shape[0])

    @property
    def blocks_apart(self) -> bool:
        """`has_blocks_apart` of the weights that are multiplied."""
        return has_blocks_apart(FP8_BLOCK, self.num_rows, self.order)

    @property
    def expert_scales(self) -> None:
        """None: they are in `scales`."""
        return None

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that the kernel reads."""
        return super().num_bytes - self.exact.nbytes


StoredWeights = ExpertWeights | PrepackedWeights | ExpandedWeights
"""What a grouped GEMM takes as weights."""


def expanded_activation(activation: Activation) -> Activation:
    """The formula for weights that `ExpandedWeights.expand` gives: `activation` with gate above up."""
    return replace(activation, order=GateUpOrder.GATE_UP) if activation.gated else activation


def _checked_format(fmt: str | TokenFormat, argument: str) -> TokenFormat:
    found = weight_format_named(fmt, argument)
    if found not in EXPANDED_FORMATS:
        raise ValueError(f"{argument}: expected nvfp4 or mxfp4, got {found.name}")
    return found


@cache
def products_of_codes() -> torch.Tensor:
    """uint8 `[256, 8]`: e4m3 products of a scale code and each magnitude, as the kernel's table has them."""
    values = _values_of_codes()[:, None] * torch.tensor(MAGNITUDES, dtype=torch.float32, device="cpu")
    return values.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)


def _values_of_codes() -> torch.Tensor:
    """fp32 `[256]`: the value of each scale code; 0 for those that no scale has, below 8."""
    code = torch.arange(256, dtype=torch.int32, device="cpu")
    values = (1 + (code & 7) / 8) * torch.exp2((code >> 3) - 15.0)
    values[:8], values[248:] = 0.0, float("nan")
    return values


@cache
def _rounded_products() -> torch.Tensor:
    """int32 `[256]`: bit `i` is set if the product of the code and magnitude `i` is no e4m3 value."""
    values = _values_of_codes()[:, None] * torch.tensor(MAGNITUDES, dtype=torch.float32, device="cpu")
    rounded = (products_of_codes().view(torch.float8_e4m3fn).float() != values) & ~values.isnan()
    return (rounded.int() << torch.arange(8, dtype=torch.int32, device="cpu")).sum(1, dtype=torch.int32)


def _rows_of_parts(num_rows: int, order: GateUpOrder | None) -> torch.Tensor:
    """int64 `[parts, rows of a part]`: the weight row of each; gate comes before up."""
    rows = torch.arange(num_rows, device="cpu")
    parts = [rows] if order is None else [rows[order.gate_rows(num_rows)], rows[order.up_rows(num_rows)]]
    return torch.stack(parts)


def _padded(values: torch.Tensor, rows: int, columns: int, value: int) -> torch.Tensor:
    size = values.shape[1:]
    return torch.nn.functional.pad(values, (0, columns - size[1], 0, rows - size[0]), value=value)


def _scale_sizes(scales: torch.Tensor, fmt: TokenFormat) -> torch.Tensor:
    """int32 `8 * (exponent + 21) + mantissa` of bytes of block scales, whose values it orders."""
    if fmt is NVFP4:
        if scales.numel() and int(scales.max()) >= len(SCALE_CODES):
            raise ValueError("w.scales: expected e4m3 values that are not negative, got a NaN or a negative one")
        sizes = torch.tensor(SCALE_CODES, dtype=torch.int32, device="cpu").to(scales.device)[scales.long()]
        return torch.where(scales == 0, _ZERO, sizes)
    sizes = 8 * (scales.int() - 127 + _BIAS)
    return torch.where(scales == 255, _NAN, sizes)


def _blocks(sizes: torch.Tensor, fmt: TokenFormat) -> torch.Tensor:
    """`[parts, rows, scales]` as `[parts, blocks of 128 rows, 128, blocks of K, scales of a row in one]`."""
    return sizes.unflatten(2, (-1, UNIT_COLUMNS // fmt.block)).unflatten(1, (-1, WEIGHT_BLOCK_N))


def _folds(sizes: torch.Tensor, largest: torch.Tensor, fmt: TokenFormat) -> torch.Tensor:
    """int32 `[parts, blocks of 128 rows, blocks of K]`: `f`, from the largest number of each block.

    `largest` has the largest magnitude code of each scale.
    """
    is_number = (sizes != _ZERO) & (sizes != _NAN)
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64, device="cpu").to(sizes.device)[largest.long()]
    scales = (1 + (sizes & 7).double() / 8) * torch.exp2(((sizes >> 3) - _BIAS).double())
    mantissa, exponent = torch.frexp(_blocks(torch.where(is_number, magnitudes * scales, 0.0), fmt).amax((2, 4)))
    # 448 is 0.875 * 2^9.
    folds = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)
    return torch.where(mantissa == 0, 0, folds).int()


def _scale_codes(sizes: torch.Tensor, folds: torch.Tensor, fmt: TokenFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale codes, uint8 `[parts, rows, scales]`, and for each the magnitudes that it rounds, bit by bit, int32."""
    by_block = _blocks(sizes, fmt)
    codes = (by_block - 8 * (folds[:, :, None, :, None] + _BIAS - 15)).flatten(3).flatten(1, 2)
    is_lost = (codes < 8) & (sizes != _ZERO) & (sizes != _NAN)
    codes = torch.where(codes < 8, 0, codes)
    codes = torch.where(sizes == _NAN, _NAN_CODE, codes)
    rounded = torch.where(is_lost, 0xFE, _rounded_products().to(codes.device)[codes.long()])
    return codes.to(torch.uint8), rounded


def _shifts(device: torch.device) -> torch.Tensor:
    """int32 `[2, 8]`: the lowest bit of a weight's magnitude in a word, and that of its sign."""
    magnitudes, signs = [4 * i for i in range(8)], [8 * i + 7 if i < 4 else 8 * i - 29 for i in range(8)]
    return torch.tensor([magnitudes, signs], dtype=torch.int32, device="cpu").to(device)


def _pack(nibbles: torch.Tensor, codes: torch.Tensor, fmt: TokenFormat) -> torch.Tensor:
    """uint8 `units_shape` of e2m1 codes `[parts, rows, K]` and scale codes `[parts, rows, scales]`."""
    places = _shifts(nibbles.device)
    # [parts, blocks, groups, row, blocks of K, span, word, weight]
    by_word = nibbles.int().unflatten(2, (-1, 4, 4, 8)).unflatten(1, (-1, 8, 8))
    words = ((by_word & 7) << places[0]) | (by_word >> 3 << places[1])
    words = words.sum(-1, dtype=torch.int32).permute(0, 1, 4, 2, 5, 3, 6)
    quants = words.contiguous().view(torch.uint8).flatten(3)
    # [parts, blocks, word of a thread, warp, row, blocks of K, span, code]
    by_thread = codes.unflatten(2, (-1, 4, 32 // fmt.block)).unflatten(1, (-1, 2, 4, 8))
    return torch.cat((quants, by_thread.permute(0, 1, 5, 3, 6, 4, 2, 7).flatten(3)), -1).contiguous()


def _unpack(units: torch.Tensor, fmt: TokenFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `_pack`: uint8 e2m1 codes `[parts, rows, K]` and scale codes `[parts, rows, scales]`."""
    places, split = _shifts(units.device), UNIT_ROWS * fmt.quant_bytes(UNIT_COLUMNS)
    # [parts, blocks, blocks of K, groups, span, row, word, weight]
    words = units[..., :split].contiguous().view(torch.int32).unflatten(3, (8, 4, 8, 4, 1))
    nibbles = (words >> places[0] & 7) | (words >> places[1] & 1) << 3
    nibbles = nibbles.to(torch.uint8).permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4).flatten(1, 3)
    # [parts, blocks, blocks of K, warp, span, row, word of a thread, code]
    codes = units[..., split:].unflatten(3, (4, 4, 8, 2, 32 // fmt.block))
    return nibbles, codes.permute(0, 1, 6, 3, 5, 2, 4, 7).flatten(5).flatten(1, 4).flatten(2)
