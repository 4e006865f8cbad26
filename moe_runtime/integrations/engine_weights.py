"""The routed experts of one layer as inference engines hold them once they are loaded.

vLLM and SGLang keep the experts of a rank in `w13_weight` `[E, 2I, H]` and `w2_weight` `[E, H, I]`, quantized ones with
their scales beside them. So they are until an engine reorders them for the kernels that it has chosen: they are read
before. A layer is any module with these parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.checkpoints.loading import ExpertTensors, QuantBuffer, QuantBuffers
from moe_runtime.config import ActivationConfig
from moe_runtime.kernels.formats.number_formats import (
    BF16,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    WEIGHT_BLOCK_N,
    TokenFormat,
    ceil_div,
)
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder

PARTS = ("w13", "w2")
QUANTS = ("weight", "weight_packed")
SCALES = ("weight_scale_inv", "weight_scale")
BIASES = ("bias", "weight_bias")
SECOND_LEVEL = (("weight_scale_2", False), ("weight_global_scale", True))
"""Names of the second-level scales of NVFP4, and whether weights are divided by them."""
ZERO_POINTS = ("weight_zero_point", "zero_point", "qzeros")
_BYTES = (torch.uint8, torch.int8)
_UE8M0 = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class EngineWeights:
    """The experts of a rank in the parameters of an engine's layer.

    Attributes:
        layer: the layer.
        name: of the layer, for messages.
        hidden_size, intermediate_size: `H` and `I`.
        order: of the rows of gate and up.
        format: number format of the weights. FP8 with one scale for each projection counts as `fp8_block`.
    """

    layer: Any
    name: str
    hidden_size: int
    intermediate_size: int
    order: GateUpOrder
    format: TokenFormat

    @property
    def num_experts(self) -> int:
        """`E`, experts of this rank."""
        return int(self._quants("w13").shape[0])

    @property
    def device(self) -> torch.device:
        return self._quants("w13").device

    @property
    def has_bias(self) -> bool:
        """Whether both projections have a bias."""
        return self._find("w13", BIASES) is not None

    def tensors(self) -> Iterator[ExpertTensors]:
        """The experts in the order in which the layer holds them, as views of its parameters where that is possible.

        Raises `ValueError` naming the layer and the parameter whose shape or dtype is not the one expected.
        """
        biases = [self._bias(part) if self.has_bias else None for part in PARTS]
        scales, second = zip(*(self._scales(part) for part in PARTS), strict=True)
        quants = [self._quants(part) for part in PARTS]
        for expert in range(self.num_experts):
            one = slice(expert, expert + 1)
            weights: list[torch.Tensor | ExpertWeights] = []
            for index, order in enumerate((self.order, None)):
                if self.format is BF16:
                    weights.append(quants[index][expert])
                    continue
                blocks = scales[index][one]
                if self.format.swizzled:
                    blocks = swizzle_scales(blocks)
                factors = None if second[index] is None else second[index][one]
                weights.append(ExpertWeights(self.format, quants[index][one], blocks, factors, gate_up=order))
            gate_up, down = weights
            yield ExpertTensors(gate_up, down, *(None if bias is None else bias[expert] for bias in biases))

    def buffers(self) -> QuantBuffers:
        """Buffers that are the parameters, so that quants which a layer reads as they are stay where they lie."""
        return QuantBuffer.over(self._quants("w13")), QuantBuffer.over(self._quants("w2"))

    def release(self) -> None:
        """Take the memory of weights and scales from the layer, a module: its parameters are empty afterwards."""
        for name, parameter in self.layer.named_parameters(recurse=False):
            if name.startswith(tuple(f"{part}_" for part in PARTS)):
                parameter.data = parameter.data.new_empty(0)

    def _shape(self, part: str) -> tuple[int, int]:
        """`[N, K]` of the weights of one expert."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return (2 * inner, hidden) if part == "w13" else (hidden, inner)

    def _find(self, part: str, ends: tuple[str, ...]) -> torch.Tensor | None:
        return next(iter(_present(self.layer, part, ends).values()), None)

    def _quants(self, part: str) -> torch.Tensor:
        name, quants = next(iter(_present(self.layer, part, QUANTS).items()))
        rows, columns = self._shape(part)
        expected = [quants.shape[0] if part == "w13" else self.num_experts, rows, self.format.quant_columns(columns)]
        self._expect(name, list(quants.shape), expected)
        return (quants.view(torch.uint8) if quants.dtype == torch.int8 else quants).contiguous()

    def _bias(self, part: str) -> torch.Tensor:
        found = _present(self.layer, part, BIASES)
        if not found:
            raise ValueError(f"{self.name}: {part}_bias: expected one as w13 has, got none")
        name, bias = next(iter(found.items()))
        self._expect(name, list(bias.shape), [self.num_experts, self._shape(part)[0]])
        return bias

    def _scales(self, part: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Block scales of all experts, not swizzled, and second-level scales: `[E, 2]` of w13, `[E]` of w2."""
        if self.format is BF16:
            return None, None
        name, scales = next(iter(_present(self.layer, part, SCALES).items()))
        rows, columns = self._shape(part)
        if self.format is FP8_BLOCK:
            return self._blocks(name, scales, part), None
        self._expect(name, list(scales.shape), [self.num_experts, rows, self.format.scale_columns(columns)])
        assert self.format.scale_dtype is not None
        return scales.view(self.format.scale_dtype).contiguous(), self._second_level(part)

    def _second_level(self, part: str) -> torch.Tensor | None:
        if self.format is not NVFP4:
            return None
        ends = dict(SECOND_LEVEL)
        name, second = next(iter(_present(self.layer, part, tuple(ends)).items()))
        self._expect(name, list(second.shape), [self.num_experts, 2] if part == "w13" else [self.num_experts])
        return (1.0 / second.float() if ends[name.removeprefix(f"{part}_")] else second.float()).contiguous()

    def _blocks(self, name: str, scales: torch.Tensor, part: str) -> torch.Tensor:
        """fp32 scales of blocks of 128x128; gate and up each begin with a block."""
        rows, columns = self._shape(part)
        halves = 2 if part == "w13" else 1
        high, wide = ceil_div(rows // halves, WEIGHT_BLOCK_N), ceil_div(columns, FP8_BLOCK.block)
        if scales.ndim == 3:
            self._expect(name, list(scales.shape), [self.num_experts, halves * high, wide])
            return scales.float().contiguous()
        # One for each projection, or one for gate and up together.
        if scales.numel() not in (self.num_experts, self.num_experts * halves):
            self._expect(name, list(scales.shape), [self.num_experts, halves])
        each = scales.float().reshape(self.num_experts, -1)
        if each.shape[1] == 2 and self.order is not GateUpOrder.GATE_UP and not torch.equal(each[:, 0], each[:, 1]):
            raise ValueError(f"{self.name}: {name}: expected one scale for gate and up in order {self.order.value}")
        each = each.expand(self.num_experts, halves).repeat_interleave(high, 1)
        return each[:, :, None].expand(-1, -1, wide).contiguous()

    def _expect(self, name: str, got: list[int], expected: list[int]) -> None:
        if got != expected:
            raise ValueError(f"{self.name}: {name}: expected shape {expected}, got {got}")


def read_weights(
    layer: Any, name: str, *, hidden_size: int, intermediate_size: int, activation: ActivationConfig
) -> EngineWeights:
    """The experts that `layer` holds. Shapes are those of whole experts, without padding.

    Raises `ValueError` naming the layer for weights in a form that is none of these: bf16; FP8 with fp32 scales of
    128x128 blocks or of each projection; MXFP8; NVFP4; MXFP4.
    """
    found = _present(layer, "w13", QUANTS)
    if not found or not _present(layer, "w2", QUANTS):
        raise ValueError(f"{name}: expected w13_weight and w2_weight with values, got a layer without")
    quants = next(iter(found.values()))
    scales = _present(layer, "w13", SCALES)
    fmt = _format_of(quants, next(iter(scales.values()), None), bool(_present(layer, "w13", _SECOND_NAMES)))
    if fmt is None:
        got = ", ".join(f"{key} {value.dtype} {list(value.shape)}" for key, value in (found | scales).items())
        raise ValueError(
            f"{name}: expected weights in bf16, FP8 (scales of 128x128 blocks or of each projection), MXFP8, NVFP4 or "
            f"MXFP4, as they are loaded, got {got}"
        )
    for part in PARTS:
        second = () if fmt is NVFP4 else _SECOND_NAMES
        for unread in _present(layer, part, (*second, *ZERO_POINTS)):
            raise ValueError(f"{name}: {unread}: expected none with {fmt.name} weights")
    if _present(layer, "w2", BIASES) and not _present(layer, "w13", BIASES):
        raise ValueError(f"{name}: w13_bias: expected one as w2 has, got none")
    order = GateUpOrder(activation.order)
    return EngineWeights(layer, name, hidden_size, intermediate_size, order, fmt)


_SECOND_NAMES = tuple(name for name, _ in SECOND_LEVEL)


def _format_of(quants: torch.Tensor, scales: torch.Tensor | None, second: bool) -> TokenFormat | None:
    """The number format by the dtypes of quants and scales; None for any other pair."""
    if scales is None:
        return BF16 if quants.dtype == torch.bfloat16 else None
    if quants.dtype == torch.float8_e4m3fn:
        if scales.dtype in _UE8M0:
            return MXFP8
        return FP8_BLOCK if scales.dtype == torch.float32 else None
    if quants.dtype in _BYTES:
        if scales.dtype in _UE8M0:
            return MXFP4
        return NVFP4 if scales.dtype == torch.float8_e4m3fn and second else None
    return None


def _present(layer: Any, part: str, ends: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The tensors of `part` among these, with values, by name."""
    named = {f"{part}_{end}": getattr(layer, f"{part}_{end}", None) for end in ends}
    return {
        name: value.detach() for name, value in named.items() if isinstance(value, torch.Tensor) and not value.is_meta
    }
