"""Experts into a layer: biases in every format against float64, and each way to hand in the wrong tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.config import ActivationConfig, MoELayerConfig
from moe_runtime.context import ExpertParallelContext
from moe_runtime.formats import FORMATS
from moe_runtime.layer import MoELayer, random_expert
from moe_runtime.loading import DenseExpert, quantize_experts
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.virtual import VirtualRanks
from moe_runtime.weights import GPT_OSS

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
        quantize_experts([DenseExpert(good.gate_up, good.gate_up)], plain, 1, cpu)


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
