"""`reserved_bytes` against sums written out by hand, and against what contexts really reserve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.build import random_expert
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.memory import REGIONS, expert_bytes, reserved_bytes
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange.geometry import worst_case_rows
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.layer import MoELayer
from moe_runtime.placement.placement import plan_placement
from moe_runtime.virtual import virtual_contexts


def make_config(**changes: object) -> MoELayerConfig:
    values: dict[str, object] = {
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_experts": 8,
        "top_k": 4,
        "max_tokens_per_rank": 10,
    }
    return MoELayerConfig.model_validate(values | changes)


def test_bf16_by_hand() -> None:
    # record: 512 quants, source 16, ids 16, weights 16 -> 560, to a multiple of 128: 640. Partial: 512.
    # token_flags: 4 * 10 * 4 = 160 bytes a half, to a multiple of 256. Signals: 4 ranks * 213 words * 4 = 3408 -> 3584.
    assert reserved_bytes(make_config(), 4) == {
        "landing": 2 * 26368,  # 41 * 640 = 26240, to a multiple of 256
        "token_flags": 2 * 256,
        "combine": 2 * 10 * 4 * 512,
        "signals": 3584,
    }


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_landing_follows_the_format(name: str) -> None:
    layout_bytes = {"bf16": 640, "fp8_block": 384, "mxfp8": 384, "nvfp4": 256}[name]
    expected = (8 * 10 + 1) * layout_bytes
    assert reserved_bytes(make_config(token_format=name), 8)["landing"] == 2 * (-(-expected // 256) * 256)


def test_partial_sums_are_bounded_by_top_k_and_by_ranks() -> None:
    combine = [reserved_bytes(make_config(), world_size)["combine"] for world_size in (1, 2, 4, 8, 16)]
    assert [size // (2 * 10 * 512) for size in combine] == [1, 2, 4, 4, 4]


def test_no_more_rows_than_this_can_arrive() -> None:
    """A token takes as many rows of a rank as that has experts, or as the token chooses."""
    assert worst_case_rows(8, 2, 8, 100) == 2 * 100 * 4
    assert worst_case_rows(8, 2, 3, 100) == 2 * 100 * 3
    assert worst_case_rows(7, 2, 8, 100) == 2 * 100 * 4


def test_memory_does_not_depend_on_the_number_of_experts_or_on_the_capacity() -> None:
    base = reserved_bytes(make_config(), 4)
    assert reserved_bytes(make_config(num_experts=64), 4) == base
    assert reserved_bytes(make_config(expert_row_capacity=7), 4) == base
    assert tuple(base) == REGIONS


@pytest.mark.parametrize("combine_format", ["bf16", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_context_reserves_exactly_this(name: str, combine_format: str, world_size: int, device: torch.device) -> None:
    config = make_config(token_format=name, combine_format=combine_format)
    (heap, *_) = PrivateHeap.group(world_size, device)
    context = ExpertParallelContext(heap=heap)
    TokenDispatcher(
        context,
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        max_tokens_per_rank=config.max_tokens_per_rank,
        token_format=name,
        combine_format=combine_format,
    )
    assert context.reserved_bytes == sum(reserved_bytes(config, world_size).values())


@pytest.mark.parametrize(("name", "combine_format"), [("nvfp4", "bf16"), ("fp8_block", "fp8_block")])
@pytest.mark.parametrize(("num_hosts", "per_host"), [(2, 1), (2, 2), (3, 2), (2, 13)])
def test_contexts_on_several_hosts_reserve_exactly_this(
    num_hosts: int, per_host: int, name: str, combine_format: str
) -> None:
    config, world = make_config(token_format=name, combine_format=combine_format), num_hosts * per_host
    context = virtual_contexts(world, num_hosts=num_hosts)[0]
    TokenDispatcher.from_config(context, config)
    assert context.reserved_bytes == sum(reserved_bytes(config, world, num_hosts=num_hosts).values())
    placed = virtual_contexts(world, num_hosts=num_hosts)[0]
    MoELayer(config, placed, placement=plan_placement([1] * config.num_experts, world, 4))
    assert placed.reserved_bytes == sum(reserved_bytes(config, world, placed=True, num_hosts=num_hosts).values())


def test_hosts_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_hosts: expected a divisor of 4 ranks, got 3"):
        reserved_bytes(make_config(), 4, num_hosts=3)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_experts_take_what_is_told(name: str, world_size: int) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 160}
    config = make_config(weight_format=name, token_format="bf16" if "4" in name else name, **sizes)
    most = -(-config.num_experts // world_size)
    weights = [
        ExpertWeights.quantize(torch.randn(most, 2 * config.intermediate_size, 384), name, gate_up=True),
        ExpertWeights.quantize(torch.randn(most, 384, config.intermediate_size), name),
    ]
    tensors = [t for w in weights for t in (w.quants, w.scales) if t is not None]
    assert expert_bytes(config, world_size) == sum(t.numel() * t.element_size() for t in tensors)
    with pytest.raises(ValueError, match=r"world_size: expected a positive integer to [0-9]+, got 0"):
        expert_bytes(config, 0)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("activation", [{}, {"order": "interleaved"}, {"function": "relu2", "gated": False}])
def test_the_experts_of_a_layer_take_what_is_told(name: str, activation: dict[str, Any]) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 320, "activation": activation}
    config = make_config(weight_format=name, token_format="bf16" if "4" in name else name, **sizes)
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer(config, context)
        layer.load_experts(random_expert(config, 0, expert, context.device) for expert in layer.local_experts)
        assert layer.experts is not None
        weights = (layer.experts.gate_up, layer.experts.down)
        tensors = [t for w in weights for t in (w.quants, w.scales) if t is not None]
        assert expert_bytes(config, 1) == sum(t.nbytes for t in tensors)


def test_an_expert_without_a_gate_is_staged_as_large_as_it_is() -> None:
    # 2 matrices of 256 x 128 in bf16 instead of 3; behind 5 words of 4 ranks, aligned to 256.
    ungated = make_config(activation={"function": "relu2", "gated": False})
    assert reserved_bytes(make_config(), 4, placed=True)["staging"] == 256 + 3 * 256 * 128 * 2
    assert reserved_bytes(ungated, 4, placed=True)["staging"] == 256 + 2 * 256 * 128 * 2


@pytest.mark.parametrize("world_size", [0, -1, "2"])
def test_a_world_without_ranks_is_refused(world_size: Any) -> None:
    with pytest.raises(ValueError, match=rf"world_size: expected a positive integer to [0-9]+, got {world_size!r}"):
        reserved_bytes(make_config(), world_size)
