"""Few tokens of a rank alone on a GPU: the bits of the kernels that wait, also in a graph replayed with others."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.errors import RoutingError
from moe_runtime.config import MoELayerConfig, SharedExpertConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.exchange import OneRankExchange
from moe_runtime.integrations.engine_layers import EngineExperts, TokenShare, _Group
from moe_runtime.kernels.exchange import cuda
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.exchange.plan import ONE_RANK_TOKENS
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS
from moe_runtime.layer import MoELayer
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, rank_input
from tests.support.virtual_exchange import HOPPER, Ranks, poisoned_memory

__all__ = ["poisoned_memory"]

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 2880, "num_experts": 128, "top_k": 4}
REPLAYS, INPUTS = 1000, 16


def inputs_of(seed: int, count: int, device: torch.device) -> list[RankInput]:
    routings = ("random", "random", "one", "none")
    return [rank_input(seed + i, 0, count, *SIZES.values(), routings[i % 4]).to(device) for i in range(INPUTS)]


def output_of(ranks: Ranks, seed: int, device: torch.device) -> torch.Tensor:
    geometry = ranks.dispatchers[0].geometry
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(geometry.row_capacity, geometry.output_hidden, generator=generator).bfloat16().to(device)


def step(ranks: Ranks, data: RankInput, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What comes of a step, and all that is left of its dispatch but what nobody has to write."""
    own = ranks.dispatchers[0]
    arrived = own.dispatch(*data)
    there = torch.arange(arrived.capacity, device=data.x.device) < arrived.group_offsets[-1]
    rows = arrived.rows.view(torch.uint8)
    if arrived.row_index is not None:
        rows = rows[torch.where(there, arrived.row_index, 0).long()]
    y = own.combine(output, arrived.handle, shared=data.x)
    return y, arrived.handle.positions, arrived.group_offsets, rows * there[:, None]


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block", "mxfp8", "bf16"])
@pytest.mark.parametrize("count", [0, 1, ONE_RANK_TOKENS, ONE_RANK_TOKENS + 1])
def test_replays_with_other_tokens(
    count: int, fmt: str, mode: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = COMBINE_FORMATS[(count + len(fmt)) % len(COMBINE_FORMATS)]
    settings = {**SIZES, "max_tokens_per_rank": max(count, 1), "token_format": fmt, "combine_format": wire}
    ranks = Ranks(1, device, HOPPER, mode=mode, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "of_one_rank", lambda geometry: None)
        waiting = Ranks(1, device, HOPPER, mode=mode, **settings)
    inputs, output = inputs_of(seed, count, device), output_of(ranks, seed, device)
    wanted = [[tensor.clone() for tensor in step(waiting, data, output)] for data in inputs]
    static = RankInput(*(tensor.clone() for tensor in inputs[0]))
    step(ranks, static, output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(ranks, static, output)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for replay in range(REPLAYS if count else INPUTS):
        data = inputs[replay % INPUTS]
        static.x.copy_(data.x), static.topk_idx.copy_(data.topk_idx), static.topk_weights.copy_(data.topk_weights)
        graph.replay()
        for tensor, expected in zip(found, wanted[replay % INPUTS], strict=True):
            wrong += (tensor.view(torch.uint8) != expected.view(torch.uint8)).sum()
    assert int(wrong) == 0
    ranks.contexts[0].check()
    assert int(ranks.contexts[0].epoch) == (REPLAYS if count else INPUTS) + 1


def test_a_bad_id_in_a_replay_is_recorded_and_gives_nan(device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, HOPPER, **SIZES, max_tokens_per_rank=8)
    data, output = inputs_of(seed, 8, device)[0], output_of(ranks, seed, device)
    step(ranks, data, output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, positions, *_ = step(ranks, data, output)
    graph.replay()
    assert not bool(y.isnan().any())
    data.topk_idx[5, 1] = SIZES["num_experts"]
    graph.replay()
    assert bool(y.isnan().all()) and bool((positions == -1).all())
    with pytest.raises(RoutingError, match=f"expert id {SIZES['num_experts']} of token 5"):
        ranks.contexts[0].check()


def layer_config(shared_expert: SharedExpertConfig | None = None) -> MoELayerConfig:
    return MoELayerConfig(
        hidden_size=1024,
        intermediate_size=512,
        num_experts=32,
        top_k=4,
        max_tokens_per_rank=ONE_RANK_TOKENS + 40,
        token_format="nvfp4",
        shared_expert=shared_expert,
    )


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_ids_of_an_engine(ids: torch.dtype, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks that hold the same tokens: the bits of ids that a launch before has numbered."""
    config = layer_config()
    counts = (1, 0, 16, 17, ONE_RANK_TOKENS, ONE_RANK_TOKENS + 1, ONE_RANK_TOKENS + 40)
    steps = [rank_input(seed + i, 0, count, 1024, 64, 4, "random").to(device) for i, count in enumerate(counts)]
    for data in steps:
        data.topk_weights[::3, 1] = torch.nan
    found = []
    for takes_ids in (True, False):
        with monkeypatch.context() as patch, ExpertParallelContext(device=device, transport="private") as context:
            patch.setattr(OneRankExchange, "takes_router_ids", takes_ids)
            layer = MoELayer(config, context, router=False, router_ids=RouterIds(32, 64))
            layer.load_random(7)
            experts = EngineExperts(layer, _Group(context), TokenShare(2, 1, whole=True))
            assert (layer.dispatcher.geometry.router_ids is not None) == takes_ids
            found.append([experts(data.x, data.topk_idx.to(ids), data.topk_weights) for data in steps])
            context.check()
    for y, expected in zip(*found, strict=True):
        assert_same_bits(y, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_bits_of_a_layer(shared: bool, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With counters, a shared expert, and steps of all sizes around the bound."""
    config = layer_config(shared_expert=SharedExpertConfig(intermediate_size=256) if shared else None)
    found = []
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(count, 1024, generator=generator).bfloat16().to(device) for count in (1, 0, 128, 129, 3, 160)]
    for one_rank in (True, False):
        with monkeypatch.context() as patch, ExpertParallelContext(device=device, transport="private") as context:
            if not one_rank:
                patch.setattr(cuda, "of_one_rank", lambda geometry: None)
            layer = MoELayer(config, context)
            layer.load_random(7)
            counters = layer.count_steps()
            ys = [layer(x) for x in tokens]
            context.check()
            found.append((ys, counters.read()))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert_same_bits(a, b)
    assert str(found[0][1]) == str(found[1][1])
