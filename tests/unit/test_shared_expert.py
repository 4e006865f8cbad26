"""Shared experts: the bits of transformers' own modules, alone and as a part of a layer; loading and wrong use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.config import MoELayerConfig, SharedExpertConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.shared_expert import SharedExpert
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits

SETTINGS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_experts": 6,
    "top_k": 2,
    "max_tokens_per_rank": 16,
}


def weights(rng: torch.Generator, gated: bool) -> list[torch.Tensor]:
    shapes = [(40, 64), (40, 64), (64, 40)] + ([(1, 64)] if gated else [])
    return [(torch.randn(shape, generator=rng) * shape[1] ** -0.5).bfloat16() for shape in shapes]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_the_bits_are_those_of_transformers(family: str, device: torch.device, seed: int, rng: torch.Generator) -> None:
    pytest.importorskip("transformers")
    from tests.support.tiny_models import moe_blocks, shared_of, tiny_model

    block = moe_blocks(tiny_model(family, seed, num_hidden_layers=2).bfloat16().to(device))[0]
    theirs, gate = shared_of(block), getattr(block, "shared_expert_gate", None)
    size = theirs.gate_proj.out_features
    ours = SharedExpert(64, SharedExpertConfig(intermediate_size=size, gated=gate is not None), device)
    parts = [theirs.gate_proj.weight, theirs.up_proj.weight, theirs.down_proj.weight]
    ours.load(*parts, *([] if gate is None else [gate.weight]))
    for tokens in (0, 1, 33):
        x_TH = torch.randn(tokens, 64, generator=rng).bfloat16().to(device)
        with torch.no_grad():
            expected = theirs(x_TH) if gate is None else torch.sigmoid(gate(x_TH)) * theirs(x_TH)
            assert_same_bits(ours(x_TH), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_a_layer_adds_its_shared_expert_first(
    gated: bool, world: int, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """The same bits as a layer without one that is given its output."""
    shared = {"intermediate_size": 40, "gated": gated}
    parts = weights(rng, gated)

    def load(layer: MoELayer) -> None:
        layer.load_random(seed)
        if layer.shared_expert is not None:
            layer.shared_expert.load(*parts)

    xs = [torch.randn(t, 64, generator=rng).bfloat16().to(device) for t in (9, 0, 16)[:world]]
    alone = SharedExpert(64, SharedExpertConfig(**shared), device)
    alone.load(*parts)
    with VirtualRanks(MoELayerConfig(**SETTINGS, shared_expert=shared), world, load, device=device) as ranks:
        found = ranks(xs)
    with VirtualRanks(MoELayerConfig(**SETTINGS), world, load, device=device) as ranks:
        expected = ranks._run([(x, None, None, alone(x), None) for x in xs])
    for y, other in zip(found, expected, strict=True):
        assert_same_bits(y, other)


def test_random_weights_depend_on_the_seed_and_its_time_is_seen(device: torch.device, rng: torch.Generator) -> None:
    config = MoELayerConfig(**SETTINGS, shared_expert={"intermediate_size": 40, "gated": True})
    x = torch.randn(5, 64, generator=rng).bfloat16().to(device)
    layers = [MoELayer(config, ExpertParallelContext(device=device)) for _ in range(3)]
    for layer, seed in zip(layers, (4, 4, 5), strict=True):
        layer.load_random(seed)
    layers[0].times = PhaseTimes(device)
    a, b, c = (layer(x) for layer in layers)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert "shared_expert" in layers[0].times.milliseconds()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_model_that_is_cast_leaves_the_layer_as_it_is(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    x = torch.randn(5, 64, generator=rng).to(device, torch.bfloat16)
    config = MoELayerConfig(**SETTINGS, shared_expert=SharedExpertConfig(intermediate_size=64, gated=True))
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config, context)
        layer.load_random(0)
        y = layer(x)
        assert_same_bits(torch.nn.ModuleList([layer]).to(dtype)[0](x), y)


def test_wrong_use_is_named(device: torch.device, rng: torch.Generator) -> None:
    plain = SharedExpert(64, SharedExpertConfig(intermediate_size=40), device)
    gate, up, down = weights(rng, False)
    with pytest.raises(ValueError, match=r"down_proj: expected shape \[64, 40\], got shape \[40, 64\]"):
        plain.load(gate, up, down.T)
    with pytest.raises(ValueError, match=r"token_gate: expected none, got shape \[1, 64\]"):
        plain.load(gate, up, down, torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"token_gate: expected shape \[1, 64\], got none"):
        SharedExpert(64, SharedExpertConfig(intermediate_size=40, gated=True), device).load(gate, up, down)
    config = MoELayerConfig(**SETTINGS, shared_expert={"intermediate_size": 40})
    layer = MoELayer(config, ExpertParallelContext(device=device))
    layer.load_random(0)
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="shared: expected None, the layer has a shared expert of its own"):
        layer(x, shared=x)
