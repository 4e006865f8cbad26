"""How converted experts are written: layouts that other programs read too, their tensors, and their description.

Stacked experts, as in gpt-oss, stay stacked in MXFP4, in that model's own layout. In other formats they become separate
linears of gate, up and down, each with its bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moe_runtime.checkpoints.calibration import Calibration
from moe_runtime.checkpoints.files import DTYPES
from moe_runtime.checkpoints.layouts import (
    COMPRESSED_MXFP4,
    COMPRESSED_MXFP8,
    COMPRESSED_NVFP4,
    FP8_BLOCKS,
    GPT_OSS_MXFP4,
    WeightLayout,
)
from moe_runtime.checkpoints.readers import ExpertReader, dense
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, WEIGHT_BLOCK_N, ceil_div
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.formats.reference_quantize import token_gsf
from moe_runtime.kernels.gemm.weights import ExpertWeights, fold_into_fp8

TARGET_LAYOUTS: dict[str, WeightLayout] = {
    "nvfp4": COMPRESSED_NVFP4,
    "mxfp4": COMPRESSED_MXFP4,
    "mxfp8": COMPRESSED_MXFP8,
    "fp8_block": FP8_BLOCKS,
}
"""The layout of each format; stacked experts in `mxfp4` have `GPT_OSS_MXFP4` instead."""

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype, as safetensors names it, and shape of tensors by name."""


class Part(NamedTuple):
    """A tensor to write, or item `item` of its first dimension."""

    name: str
    tensor: torch.Tensor
    item: int | None = None


def replaced_tensors(reader: ExpertReader, expert: int, layout: WeightLayout) -> list[str]:
    """Names of the tensors of an expert (of all, if stacked) that the converted expert replaces."""
    moved = reader.layout.stacked and not layout.stacked
    return reader.tensors(expert) + (reader.biases(expert) if moved else [])


def converted_shapes(reader: ExpertReader, expert: int, layout: WeightLayout, *, calibrated: bool) -> Shapes:
    """The tensors that an expert becomes, or becomes a part of."""
    fmt, shapes, sizes = layout.format, Shapes(), (reader.hidden, reader.inner)
    if layout.stacked:
        for prefix, rows, columns in zip(reader.names.stacks, (2 * reader.inner, reader.hidden), sizes, strict=True):
            blocks = (reader.num_experts, rows, columns // fmt.block)
            shapes[f"{prefix}_{layout.weight}"] = (layout.quant_dtypes[0], (*blocks, fmt.quant_bytes(fmt.block)))
            shapes[f"{prefix}_{layout.scale}"] = (layout.scale_dtypes[0], blocks)
        return shapes
    inner, hidden = (reader.inner, reader.hidden), (reader.hidden, reader.inner)
    for prefix, (rows, columns), bias in zip(
        reader.names.linears(expert), (inner, inner, hidden), _stacked_biases(reader), strict=True
    ):
        shapes[f"{prefix}.{layout.weight}"] = (layout.quant_dtypes[0], (rows, fmt.quant_columns(columns)))
        scale_rows = rows if fmt.swizzled else ceil_div(rows, WEIGHT_BLOCK_N)
        shapes[f"{prefix}.{layout.scale}"] = (layout.scale_dtypes[0], (scale_rows, fmt.scale_columns(columns)))
        if layout.weight_scale is not None:
            shapes[f"{prefix}.{layout.weight_scale.suffix}"] = ("F32", (1,))
        if layout.input_scale is not None and calibrated:
            shapes[f"{prefix}.{layout.input_scale.suffix}"] = ("F32", (1,))
        if bias is not None:
            shapes[f"{prefix}.bias"] = (reader.files.entry(bias).dtype, (rows,))
    return shapes


def converted_parts(
    reader: ExpertReader, expert: int, layout: WeightLayout, calibration: Calibration | None, device: torch.device
) -> Iterator[Part]:
    """Read an expert, quantize it on `device` and yield the tensors of `converted_shapes`, or its items of them.

    Raises `ValueError` naming file and tensor if a weight is NaN or infinite, for which no scale exists.
    """
    stored = reader.expert(expert)
    gate_up, down = (dense(weight).to(device) for weight in (stored.gate_up, stored.down))
    _check_finite(reader, expert, gate_up, down)
    if layout.stacked:
        for prefix, w in zip(reader.names.stacks, (gate_up, down), strict=True):
            tensors = quantized_linear(w, w, layout)
            blocks = tensors[layout.weight].unflatten(1, (-1, layout.format.quant_bytes(layout.format.block)))
            yield Part(f"{prefix}_{layout.weight}", blocks, expert)
            yield Part(f"{prefix}_{layout.scale}", tensors[str(layout.scale)], expert)
        return
    rows = reader.names.order.gate_rows(len(gate_up)), reader.names.order.up_rows(len(gate_up)), slice(None)
    weights, biases = (gate_up, gate_up, down), (stored.gate_up_bias, stored.gate_up_bias, stored.down_bias)
    read = stored.gate_up, stored.gate_up, stored.down
    for prefix, part, shared, held, bias, name in zip(
        reader.names.linears(expert), rows, weights, read, biases, _stacked_biases(reader), strict=True
    ):
        if layout.format is FP8_BLOCK and isinstance(held, ExpertWeights) and held.format.swizzled:
            tensors = _fp8_tensors(fold_into_fp8(held.to(device), rows=part), layout)
        else:
            tensors = quantized_linear(shared[part], shared, layout)
        for suffix, tensor in tensors.items():
            yield Part(f"{prefix}.{suffix}", tensor)
        if calibration is not None and layout.input_scale is not None:
            gsf = calibration.intermediate_gsf if shared is down else calibration.token_gsf
            yield Part(f"{prefix}.{layout.input_scale.suffix}", torch.tensor([gsf], dtype=torch.float32, device="cpu"))
        if bias is not None and name is not None:
            # fp32 of the stored value, so the cast back rounds nothing.
            yield Part(f"{prefix}.bias", bias[part].to(DTYPES[reader.files.entry(name).dtype]))


def quantized_linear(w_NK: torch.Tensor, shared: torch.Tensor, layout: WeightLayout) -> dict[str, torch.Tensor]:
    """The tensors of one linear in a layout of `TARGET_LAYOUTS`, by the last part of their names.

    A second-level scale is that of `shared`, of which `w_NK` is a part.
    """
    fmt = layout.format
    assert layout.scale is not None
    if fmt.scale_dtype is torch.float32:
        return _fp8_tensors(ExpertWeights.quantize(w_NK[None], fmt), layout)
    gsf = token_gsf(shared.float().abs().amax().reshape(1)) if fmt.has_row_scale else None
    rows = quantize_rows(w_NK.contiguous(), fmt, gsf=gsf)
    assert rows.scales_RV is not None
    tensors = {layout.weight: rows.quants_RK, layout.scale: rows.scales_RV}
    return tensors if gsf is None or layout.weight_scale is None else tensors | {layout.weight_scale.suffix: gsf}


def _fp8_tensors(one: ExpertWeights, layout: WeightLayout) -> dict[str, torch.Tensor]:
    """The tensors of one linear in `fp8_block`, as `quantized_linear`."""
    assert layout.scale is not None and one.scales is not None
    return {layout.weight: one.quants[0], layout.scale: one.scales[0]}


def quantization_config(layout: WeightLayout, targets: Mapping[str, bool], others: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` for linears that match one of `targets`.

    `targets` also says whether their inputs were calibrated. The linears `others` are not quantized.
    """
    if layout is GPT_OSS_MXFP4:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(others)}
    if layout is FP8_BLOCKS:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(others),
        }
    fmt = layout.format
    weights: dict[str, Any] = {
        "num_bits": fmt.element_bits,
        "type": "float",
        "symmetric": True,
        "group_size": fmt.block,
        "strategy": "tensor_group" if fmt.has_row_scale else "group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if fmt.has_row_scale else "torch.uint8",
    }
    groups = {}
    for number, (target, calibrated) in enumerate(targets.items()):
        activations = None
        if layout is COMPRESSED_MXFP8:
            activations = weights | {"dynamic": True}
        elif calibrated:
            activations = weights | {"dynamic": "local"}
        group = {"targets": [target], "weights": weights, "input_activations": activations, "format": layout.name}
        groups[f"group_{number}"] = group
    return {
        "quant_method": "compressed-tensors",
        "format": layout.name,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(others),
    }


def _check_finite(reader: ExpertReader, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    layout, order = reader.layout, reader.names.order
    if layout.stacked:
        weights: tuple[torch.Tensor, ...] = (gate_up, down)
        names = [layout.stack(prefix)[0] for prefix in reader.names.stacks]
    else:
        weights = (gate_up[order.gate_rows(len(gate_up))], gate_up[order.up_rows(len(gate_up))], down)
        names = [f"{prefix}.{layout.weight}" for prefix in reader.names.linears(expert)]
    for name, weight in zip(names, weights, strict=True):
        if not weight.isfinite().all():
            raise reader.files.wrong(name, f"expected finite weights of expert {expert}, got one that is not")


def _stacked_biases(reader: ExpertReader) -> tuple[str | None, str | None, str | None]:
    """Names of the stacked biases that those of gate, up and down come from; None if there are none to split."""
    if not reader.layout.stacked or not reader.names.biases:
        return None, None, None
    gate_up, down = reader.biases(0)
    return gate_up, gate_up, down
