"""Experts into a layer: biases in every format against float64, and each way to hand in the wrong tensors."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import SafetensorsFile
from moe_runtime.checkpoints.loading import HUGE_PAGE, PAGES_THREAD, ExpertTensors, QuantBuffer, quantize_experts
from moe_runtime.config import ActivationConfig, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS, token_formats_for
from moe_runtime.kernels.gemm.weights import GPT_OSS, ExpertWeights, GateUpOrder, fold_into_fp8
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.virtual import VirtualRanks
from tests.support.checkpoint_writers import MODELOPT, modelopt_nvfp4
from tests.support.checkpoint_writers import quantize_experts as quantize_folder
from tests.support.comparison import assert_same_bits

GPT_OSS_CONFIG = ActivationConfig(order="interleaved", alpha=1.702, limit=7.0, up_offset=1.0)
SETTINGS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 5,
    "top_k": 2,
    "max_tokens_per_rank": 64,
    "expert_bias": True,
    "activation": GPT_OSS_CONFIG,
}


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("world", [1, 7])
def test_experts_with_biases_are_within_their_bound(
    fmt: str, world: int, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """With seven ranks, two of them have no expert. Without either bias the error would be outside."""
    config = MoELayerConfig(**SETTINGS, token_format=fmt)
    experts = [
        random_expert(config, seed, e)._replace(
            gate_up_bias=torch.randn(256, generator=rng), down_bias=torch.randn(256, generator=rng)
        )
        for e in range(5)
    ]

    def load(layer: MoELayer) -> None:
        layer.load_random(seed)
        layer.load_experts(experts[e] for e in layer.local_experts)

    xs = [torch.randn(t, 256, generator=rng).bfloat16() for t in (64, 0, 1, 17, 3, 0, 5)[:world]]
    with VirtualRanks(config, world, load, device=device) as ranks:
        routes = [ranks.layers[0].router(x.to(device)) for x in xs]
        found = ranks([x.to(device) for x in xs], routes)
    y = torch.cat(found).cpu()
    idx, weights = (torch.cat([route[i].cpu() for route in routes]) for i in (0, 1))
    gate_up, down, gate_up_bias, down_bias = (torch.stack([e[i] for e in experts]) for i in range(4))
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    exact = moe_reference(torch.cat(xs), idx, weights, gate_up, down, GPT_OSS, **biases)
    assert relative_error(y, exact)[0] <= error_bound(fmt)
    for name in biases:
        without = moe_reference(torch.cat(xs), idx, weights, gate_up, down, GPT_OSS, **(biases | {name: None}))
        assert relative_error(without, exact)[0] > error_bound(fmt)


def test_what_does_not_fit_is_named() -> None:
    config = MoELayerConfig(**SETTINGS)
    plain: MoELayerConfig = config.replace(expert_bias=False)
    good = random_expert(config, 0, 0)
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"gate_up_bias of expert 1: expected shape \[256\], got none"):
        quantize_experts([good, good[:2]], config, 2, cpu)
    with pytest.raises(ValueError, match=r"down_bias of expert 0: expected shape \[256\], got shape \[128\]"):
        quantize_experts([good._replace(down_bias=torch.zeros(128))], config, 1, cpu)
    with pytest.raises(ValueError, match=r"gate_up_bias of expert 0: expected none, got shape \[256\]"):
        quantize_experts([good], plain, 1, cpu)
    with pytest.raises(ValueError, match=r"down of expert 0: expected shape \[256, 128\], got shape \[256, 256\]"):
        quantize_experts([ExpertTensors(good.gate_up, good.gate_up)], plain, 1, cpu)
    with pytest.raises(
        ValueError, match=r"gate_up of expert 1: expected torch\.bfloat16 or torch\.float32, got torch\.f"
    ):
        quantize_experts([good[:2], (good.gate_up.half(), good.down)], plain, 2, cpu)
    with pytest.raises(
        ValueError, match=r"down of expert 0: expected torch\.bfloat16 or torch\.float32, got torch\.int8"
    ):
        quantize_experts([(good.gate_up, good.down.to(torch.int8))], plain, 1, cpu)
    with pytest.raises(ValueError, match="gate_up of expert 0: expected a tensor, got ndarray"):
        quantize_experts([(good.gate_up.float().numpy(), good.down)], plain, 1, cpu)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="down_bias of expert 0: expected a tensor, got list"):
        quantize_experts([good._replace(down_bias=[0.0] * 256)], config, 1, cpu)
    for given, got in (((good.gate_up,), "1 of them"), ((*good, None), "5 of them"), (good.gate_up, "Tensor")):
        with pytest.raises(ValueError, match=f"experts: expected ExpertTensors or a pair .* for expert 0, got {got}"):
            quantize_experts([given], plain, 1, cpu)  # type: ignore[list-item]


def test_biases_are_kept_in_fp32(rng: torch.Generator, device: torch.device) -> None:
    config = MoELayerConfig(**SETTINGS, token_format="nvfp4")
    one = random_expert(config, 0, 0)
    one = one._replace(gate_up_bias=torch.randn(256, generator=rng), down_bias=torch.randn(256, generator=rng))
    layer = MoELayer(config, ExpertParallelContext(device=device))
    layer.load_experts([one] * 5)
    assert layer.experts is not None
    for weights, bias in ((layer.experts.gate_up, one.gate_up_bias), (layer.experts.down, one.down_bias)):
        assert weights.bias is not None
        assert torch.equal(weights.bias.cpu(), bias.expand(5, 256))


QUANTIZED: dict[str, Any] = {**SETTINGS, "expert_bias": False, "weight_format": "nvfp4"}


def quantized_experts(fmt: str, rng: torch.Generator, order: GateUpOrder | None) -> list[ExpertTensors]:
    """Five experts that are quantized already; with an `order`, gate and up have a second-level scale each."""
    experts = []
    for number in range(5):
        gate_up, down = torch.randn(1, 256, 256, generator=rng), torch.randn(1, 256, 128, generator=rng)
        gate_up[:, ::2] *= number + 2
        parts = ExpertWeights.quantize(gate_up, fmt, gate_up=order or False), ExpertWeights.quantize(down, fmt)
        experts.append(ExpertTensors(*parts))
    return experts


@pytest.mark.parametrize("fmt", sorted(WEIGHT_FORMATS))
@pytest.mark.parametrize("order", [None, GateUpOrder.INTERLEAVED])
def test_quantized_experts_stay_as_they_are(
    fmt: str, order: GateUpOrder | None, rng: torch.Generator, device: torch.device
) -> None:
    """Bit for bit, gate and up with a scale each or one for both."""
    config = MoELayerConfig(**(QUANTIZED | {"token_format": token_formats_for(fmt)[0], "weight_format": fmt}))
    experts = quantized_experts(fmt, rng, order)
    for given, made in zip(zip(*experts, strict=True), quantize_experts(experts, config, 5, device), strict=False):
        for number, one in enumerate(given):
            stored = made.expert(number)
            assert_same_bits(stored.quants, one.quants)
            assert (stored.scales is None) == (one.scales is None)
            if one.scales is not None:
                assert_same_bits(stored.scales, one.scales)
            assert_same_bits(stored.dequantize(engine="torch"), one.dequantize(engine="torch"))
    gate_up, down = quantize_experts(experts, config, 5, device)
    assert (gate_up.gate_up, down.gate_up) == (GateUpOrder.INTERLEAVED, None)
    if fmt == "nvfp4":
        assert gate_up.expert_scales is not None and gate_up.expert_scales.shape == (5, 2)
        assert down.expert_scales is not None and down.expert_scales.shape == (5,)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_block", "mxfp4"])
def test_quantized_experts_are_converted(fmt: str, rng: torch.Generator, device: torch.device) -> None:
    config = MoELayerConfig(**(QUANTIZED | {"token_format": token_formats_for(fmt)[0], "weight_format": fmt}))
    experts = quantized_experts("nvfp4", rng, GateUpOrder.INTERLEAVED)
    gate_up, down = quantize_experts(experts, config, 5, device)
    for number, one in enumerate(experts):
        for made, given in ((gate_up, one.gate_up), (down, one.down)):
            assert isinstance(given, ExpertWeights)
            folds = fmt == "fp8_block"
            want = fold_into_fp8(given) if folds else ExpertWeights.quantize(given.dequantize(), fmt)
            assert_same_bits(made.expert(number).quants, want.quants)


@pytest.mark.parametrize("inner", [192, 128])
def test_fp8_blocks_that_hold_gate_and_up_are_quantized_again(
    inner: int, rng: torch.Generator, device: torch.device
) -> None:
    """Weights that do not say that they are gate and up have blocks that run on; where those end with gate, they
    stay as they are."""
    sizes = {"hidden_size": 288, "intermediate_size": inner, "expert_bias": False, "activation": {}}
    config = MoELayerConfig(**(SETTINGS | sizes | {"token_format": "fp8_block"}))
    weights = [
        tuple(ExpertWeights.quantize(torch.randn(1, *s, generator=rng), "fp8_block") for s in shapes)
        for shapes in [((2 * inner, 288), (288, inner))] * 5
    ]
    gate_up, down = quantize_experts([ExpertTensors(*pair) for pair in weights], config, 5, device)
    for number, (given, given_down) in enumerate(weights):
        want = given
        if inner % 128:
            want = ExpertWeights.quantize(given.dequantize(), "fp8_block", gate_up=GateUpOrder.GATE_UP)
            assert want.scales is not None and want.scales.shape == (1, 4, 3)
        for made, one in ((gate_up, want), (down, given_down)):
            assert made.scales is not None and one.scales is not None
            assert_same_bits(made.quants[number], one.quants[0])
            assert_same_bits(made.scales[number], one.scales[0])


def test_quantized_experts_that_do_not_fit_are_named(rng: torch.Generator) -> None:
    config, cpu = MoELayerConfig(**QUANTIZED), torch.device("cpu")
    good = quantized_experts("nvfp4", rng, GateUpOrder.INTERLEAVED)[0]
    assert isinstance(good.gate_up, ExpertWeights) and isinstance(good.down, ExpertWeights)
    other = quantized_experts("nvfp4", rng, GateUpOrder.GATE_UP)[0]
    two = ExpertWeights.quantize(torch.randn(2, 256, 128, generator=rng), "nvfp4")
    no_scale = replace(good.down, expert_scales=None)
    with_bias = replace(good.down, bias=torch.zeros(1, 256))
    for expert, message in (
        (good._replace(gate_up=other.gate_up), "gate_up of expert 0: expected gate and up in order interleaved, got"),
        (good._replace(down=good.gate_up), r"down of expert 0: expected shape \[256, 128\], got shape \[256, 256\]"),
        (good._replace(down=two), r"down of expert 0: expected shape \[256, 128\], got shape \[2, 256, 128\]"),
        (good._replace(down=no_scale), "down of expert 0: expected expert_scales in nvfp4"),
        (good._replace(down=with_bias), "down of expert 0: expected weights without a bias"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_experts([expert], config, 1, cpu)


def test_memory_that_a_thread_makes_keeps_what_is_written_meanwhile() -> None:
    buffer = QuantBuffer(3)
    parts = [buffer(1025, 2048, dtype=torch.uint8).fill_(number + 1) for number in range(3)]
    for thread in threading.enumerate():
        if thread.name == PAGES_THREAD:
            thread.join(30.0)
            assert not thread.is_alive()
    assert buffer.tensor is not None and buffer.tensor.nbytes > HUGE_PAGE
    for number, part in enumerate(parts):
        assert (part == number + 1).all() and part.data_ptr() == buffer.tensor[number].data_ptr()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "where", ["moe_runtime.checkpoints.readers.check_no_nan", "moe_runtime.checkpoints.loading._quantize"]
)
def test_nobody_reads_once_a_load_has_failed(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next expert is being read when one turns out to be wrong: files closed meanwhile would be opened again."""
    sizes = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
    write_qwen3_moe_checkpoint(tmp_path, sizes, seed=0)
    quantize_folder(tmp_path, modelopt_nvfp4, quantization_config=MODELOPT)
    ahead: list[str] = []
    read, leave = SafetensorsFile.read, Checkpoint.__exit__

    def slow(file: SafetensorsFile, name: str, out: torch.Tensor, first_byte: int = 0) -> None:
        if threading.current_thread().name.startswith("one_ahead"):
            ahead.append(name)
            time.sleep(0.05)
        read(file, name, out, first_byte)

    readers = []

    def left(checkpoint: Checkpoint, *exc: object) -> None:
        readers.append([thread for thread in threading.enumerate() if thread.name.startswith("one_ahead")])
        leave(checkpoint, *exc)

    def wrong(*arguments: object) -> None:
        raise ValueError("wrong")

    monkeypatch.setattr(SafetensorsFile, "read", slow)
    monkeypatch.setattr(Checkpoint, "__exit__", left)
    monkeypatch.setattr(where, wrong)
    with ExpertParallelContext() as context, pytest.raises(ValueError, match="wrong"):
        MoELayer.from_checkpoint(tmp_path, layer=0, context=context, max_tokens_per_rank=8)
    assert any(".experts.1." in name for name in ahead) and readers == [[]]
