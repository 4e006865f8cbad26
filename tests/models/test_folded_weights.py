"""Weights in `fp8_block` of NVFP4, MXFP4 and MXFP8: what folding makes of them, against float64 and ml_dtypes, and
layers that have them from files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, fold_into_fp8
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error, rounding_error
from tests.support import tiny_models as tiny
from tests.support.checkpoint_writers import modelopt_nvfp4, quantize_experts, write_gpt_oss_mxfp4
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import bits, dequant_weights

Array = np.ndarray
SOURCES = ["nvfp4", "mxfp4", "mxfp8"]
CONFIG = MoELayerConfig(hidden_size=288, intermediate_size=160, num_experts=3, top_k=2, max_tokens_per_rank=64)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}


def numbers(w: ExpertWeights) -> Array:
    """float64 `[E, N, K]` without the expert scales."""
    return dequant_weights(replace(w, expert_scales=None))


def folded_block(x: Array) -> tuple[Array, float]:
    """Bits of e4m3 and the power of two of one block: the smallest with which no number exceeds 448."""
    largest = np.abs(x).max()
    power = next(2.0**k for k in range(-126, 128) if largest <= 448 * 2.0**k) if largest else 1.0
    return (x / power).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), power


def folded(x: Array, factors: Array, halves: int) -> tuple[Array, Array]:
    """Bits `[N, K]` and fp32 scales of numbers `[N, K]` whose rows have `factors` `[N]`, block by block."""
    quants, scales = np.zeros(x.shape, np.uint8), []
    for half in np.split(np.arange(len(x)), halves):
        for first in range(0, len(half), 128):
            rows = half[first : first + 128]
            factor, of_blocks = factors[rows].max(), []
            values = x[rows] * (factors[rows] / factor).astype(np.float32)[:, None].astype(np.float64)
            values = values.astype(np.float32).astype(np.float64)
            for column in range(0, x.shape[1], 128):
                block = slice(column, column + 128)
                quants[rows, block], power = folded_block(values[:, block])
                of_blocks.append(np.float32(power) * np.float32(factor))
            scales.append(of_blocks)
    return quants, np.array(scales, np.float32)


def check_folded(found: ExpertWeights, source: ExpertWeights, order: GateUpOrder | None) -> None:
    halves = 2 if found.blocks_apart else 1
    x, factors = numbers(source), source.row_factors().cpu().numpy()
    assert (found.format.name, found.gate_up, found.expert_scales) == ("fp8_block", order, None)
    assert found.scales is not None
    for expert in range(found.num_experts):
        quants, scales = folded(x[expert], factors[expert], halves)
        assert np.array_equal(bits(found.quants[expert]), quants)
        assert np.array_equal(bits(found.scales[expert]), scales.view(np.uint32))


@pytest.mark.parametrize("order", [None, *GateUpOrder])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("n", "k"), [(144, 96), (272, 288), (512, 128)])
def test_scales_are_folded(
    n: int, k: int, name: str, order: GateUpOrder | None, rng: torch.Generator, device: torch.device
) -> None:
    """Bit for bit: short blocks, gate and up with scales and blocks apart, interleaved rows with scales apart, far
    exponents, a block of zeros."""
    w = torch.randn(2, n, k, generator=rng) * 2.0 ** torch.randint(-9, 9, (2, n, 1), generator=rng)
    w[0, :, -32:], w[1, :128] = 0.0, 0.0
    if order is not None:
        w[:, order.up_rows(n)] *= 5
    source = ExpertWeights.quantize(w, name, gate_up=order or False, engine="torch").to(device)
    check_folded(fold_into_fp8(source, gate_up=order), source, order)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_nothing_is_lost_where_exponents_are_close(name: str, rng: torch.Generator, device: torch.device) -> None:
    """MXFP4: 15 exponents of scales in a block, the most; with 16 some numbers change. MXFP8: the same scale."""
    quants = torch.randint(0, 256, (1, 128, 64 if name == "mxfp4" else 128), generator=rng).to(torch.uint8)
    if name == "mxfp8":
        quants[quants & 0x7F == 0x7F] = 0
    quants[0, 0] = 0x77 if name == "mxfp4" else 0x7E
    fmt = ExpertWeights.quantize(torch.ones(1, 128, 128), name, engine="torch")
    assert fmt.scales is not None
    for lowest, changes in ((100, False), (99, True)) if name == "mxfp4" else ((114, False),):
        exponents = torch.randint(lowest, 115, tuple(fmt.scales.shape), generator=rng).to(torch.uint8)
        # Row 0 begins with the highest exponent, row 1, 16 bytes behind, with the lowest.
        exponents.view(-1)[0], exponents.view(-1)[16] = 114, lowest
        quants[0, 1, :16] = 0x21 if name == "mxfp4" else quants[0, 1, :16]
        w = replace(fmt, quants=quants.view(fmt.quants.dtype), scales=exponents).to(device)
        assert torch.equal(fold_into_fp8(w).dequantize(), w.dequantize()) != changes


@pytest.mark.parametrize(("name", "most"), [("nvfp4", 0.0225), ("mxfp4", 0.0), ("mxfp8", 1e-5)])
def test_folding_loses_no_more_than_quantizing_again(name: str, most: float, rng: torch.Generator) -> None:
    """The error of normal weights in the Frobenius norm. `nvfp4` loses about the same either way: the scales of folding
    are powers of two, the others are not, and which of the two fits the weights better is chance (0.93 to 1.10)."""
    source = ExpertWeights.quantize(torch.randn(1, 256, 512, generator=rng), name, engine="torch")
    exact = source.dequantize(engine="torch")
    ours, again = fold_into_fp8(source), ExpertWeights.quantize(exact, "fp8_block", engine="torch")
    errors = [relative_error(x.dequantize(engine="torch"), exact)[0] for x in (ours, again)]
    assert errors[0] <= most and 0.018 < errors[1] < rounding_error("fp8_block")
    assert errors[0] < (1.25 if name == "nvfp4" else 0.1) * errors[1]


def test_special_numbers(device: torch.device) -> None:
    """A NaN among the scales makes one of its block; a second-level scale of 0 makes zeros."""
    source = ExpertWeights.quantize(torch.ones(1, 256, 256), "nvfp4", engine="torch")
    assert source.scales is not None and source.expert_scales is not None
    scales = source.scales.clone()
    scales.view(torch.uint8).view(-1)[0] = 0x7F
    found, want = (fold_into_fp8(w.to(device)).dequantize().cpu() for w in (replace(source, scales=scales), source))
    assert found[0, :128, :128].isnan().all() and want.isfinite().all() and want.all()
    for others in ((0, slice(128, None)), (0, slice(None), slice(128, None))):
        assert torch.equal(found[others], want[others])
    zero = fold_into_fp8(replace(source, expert_scales=source.expert_scales * 0)).dequantize()
    assert not zero.any()
    for name in ("bf16", "fp8_block"):
        with pytest.raises(ValueError, match=rf"^w\.format: expected nvfp4, mxfp4 or mxfp8, got {name}"):
            fold_into_fp8(ExpertWeights.quantize(torch.ones(1, 8, 128), name, engine="torch"))


def held_experts(folder: Path, **fields: Any) -> Experts:
    with MoELayer.from_checkpoint(folder, max_tokens_per_rank=64, **fields) as layer:
        assert (layer.config.token_format, layer.config.weight_format) == ("fp8_block", "fp8_block")
        assert layer.experts is not None
        return layer.experts


def weights_of(experts: Experts) -> tuple[ExpertWeights, ExpertWeights]:
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, ExpertWeights) and isinstance(down, ExpertWeights)
    return gate_up, down


@pytest.mark.parametrize(
    "fields", [{"weight_format": "fp8_block"}, {"weight_format": "fp8_block", "token_format": "auto"}]
)
def test_a_layer_of_nvfp4_files(fields: dict[str, Any], tmp_path: Path, rng: torch.Generator, seed: int) -> None:
    """Its experts are folded from the files, also by way of a converted checkpoint; within the bound of float64."""
    source, target = tmp_path / "source", tmp_path / "target"
    write_qwen3_moe_checkpoint(source, CONFIG, seed=seed)
    quantize_experts(source, modelopt_nvfp4, quantization_config=MODELOPT)
    convert_checkpoint(source, target, "fp8_block")
    direct, converted = held_experts(source, **fields), held_experts(target)
    with Checkpoint(source) as checkpoint:
        stored = list(checkpoint.experts(0, range(3)))
    for number, one in enumerate(stored):
        for w, given in zip(weights_of(direct), (one.gate_up, one.down), strict=True):
            assert isinstance(given, ExpertWeights) and given.format.name == "nvfp4"
            check_folded(w.expert(number), given, w.gate_up)
    for ours, theirs in zip(weights_of(direct), weights_of(converted), strict=True):
        assert_same_bits(ours.quants, theirs.quants, "quants")
        assert_same_bits(ours.scales, theirs.scales, "scales")
    x = torch.randn(64, 288, generator=rng).bfloat16()
    gate_up, down = (torch.stack([dense(one[i]) for one in stored]).double() for i in (0, 1))  # type: ignore[arg-type]
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(source, context=context, max_tokens_per_rank=64, **fields)
        assert layer.router is not None
        error, _ = relative_error(layer(x), moe_reference(x, *layer.router(x), gate_up, down))
    assert error <= error_bound("fp8_block")


def test_a_layer_of_mxfp4_files_has_their_weights_exactly(tmp_path: Path, seed: int) -> None:
    """gpt-oss, whose rows of gate and up alternate in the layer."""
    model = tiny.tiny_model("gpt_oss", seed, hidden_size=96, intermediate_size=160, num_hidden_layers=2)
    model.bfloat16().save_pretrained(tmp_path)
    write_gpt_oss_mxfp4(tmp_path)
    for layer in range(2):
        found = weights_of(held_experts(tmp_path, weight_format="fp8_block", layer=layer))
        with Checkpoint(tmp_path) as checkpoint:
            stored = list(checkpoint.experts(layer, range(found[0].num_experts)))
        for number, one in enumerate(stored):
            for w, given in zip(found, (one.gate_up, one.down), strict=True):
                assert isinstance(given, ExpertWeights) and given.format.name == "mxfp4"
                check_folded(w.expert(number), given, w.gate_up)
                assert torch.equal(w.expert(number).dequantize().cpu(), given.dequantize().cpu())
