"""Whole layers with each activation: within their bound of float64, and the same bits however their ranks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.build import random_expert
from moe_runtime.config import ActivationConfig, MoELayerConfig, SharedExpertConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import activation_of
from moe_runtime.kernels.gemm.expert_norm import ExpertNorm
from moe_runtime.layer import MoELayer
from moe_runtime.placement import Placement
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.shared_expert import SharedExpert
from moe_runtime.virtual import VirtualRanks, replace_experts
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import ENGINES

EXPERTS = 6
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"function": "gelu"},
    "gelu_tanh": {"function": "gelu_tanh", "order": "up_gate"},
    "relu2": {"function": "relu2", "gated": False},
    "softcaps": {"gate_softcap": 4.0, "up_softcap": 25.0},
    "gelu_alone": {"function": "gelu", "gated": False},
    "limited_silu": {"limit": 1.0, "limit_on": "function"},
    "limited_silu_interleaved": {"limit": 1.0, "limit_on": "function", "order": "interleaved"},
}
FORMATS = [("bf16", "bf16"), ("fp8_block", "fp8_block"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4")]
FORMATS += [("fp8_block", "nvfp4"), ("fp8_block", "mxfp4")]
each = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def config(activation: dict[str, Any], **fields: Any) -> MoELayerConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_experts": EXPERTS, "top_k": 2}
    return MoELayerConfig(**sizes, max_tokens_per_rank=32, activation=ActivationConfig(**activation), **fields)


def exact(
    c: MoELayerConfig, seed: int, x: torch.Tensor, route: tuple[torch.Tensor, ...], norm: ExpertNorm | None = None
) -> torch.Tensor:
    # Each kind of device draws numbers of its own.
    experts = [random_expert(c, seed, e, x.device) for e in range(EXPERTS)]
    gate_up, down = (torch.stack([pair[i] for pair in experts]).cpu() for i in (0, 1))
    biases: dict[str, Any] = {}
    if c.expert_bias:
        biases = {
            name: torch.stack([getattr(e, name) for e in experts]).cpu() for name in ("gate_up_bias", "down_bias")
        }
    idx, weights = (part.cpu() for part in route)
    return moe_reference(x.cpu(), idx, weights, gate_up, down, activation_of(c.activation), **biases, norm=norm)


@each
@pytest.mark.parametrize(("token", "weight"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_layers_are_within_their_bound(
    token: str, weight: str, activation: dict[str, Any], device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """On three ranks, one without tokens, with biases where tokens are bf16 or `fp8_block`."""
    c = config(activation, token_format=token, weight_format=weight, expert_bias=token in ("bf16", "fp8_block"))
    formula = activation_of(c.activation)
    xs = [torch.randn(count, 128, generator=rng).bfloat16().to(device) for count in (32, 0, 21)]
    with VirtualRanks(c, 3, lambda layer: layer.load_random(seed), device=device) as ranks:
        routes = [ranks.layers[0].router(x) for x in xs]
        ys = ranks(xs, routes)
    want = exact(c, seed, torch.cat(xs), tuple(torch.cat(parts) for parts in zip(*routes, strict=True)))
    assert relative_error(torch.cat(ys).cpu(), want)[0] <= error_bound(token, weight, activation=formula)


@each
def test_engines_agree_and_give_the_same_bits_again(
    activation: dict[str, Any], device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """The same bits within an engine, also for two tokens alone, and each engine is within the bound."""
    c = config(activation, token_format="mxfp8")
    x = torch.randn(20, 128, generator=rng).bfloat16().to(device)
    for engine in ENGINES:
        with ExpertParallelContext(device=device, engine=engine) as context:
            layer = MoELayer(c, context)
            layer.load_random(seed)
            assert layer.router is not None
            y, route = layer(x), layer.router(x)
            assert_same_bits(layer(x[3:5]), y[3:5], f"{engine}, two tokens alone")
        bound = error_bound("mxfp8", activation=activation_of(c.activation))
        assert relative_error(y.cpu(), exact(c, seed, x, route))[0] <= bound


def run_rank(rank: int, world: int, c: MoELayerConfig, seed: int) -> torch.Tensor:
    with ExpertParallelContext(timeout_s=30) as context:
        layer = MoELayer(c, context)
        layer.load_random(seed)
        return layer(rows_of(rank, seed))


def rows_of(rank: int, seed: int) -> torch.Tensor:
    return torch.randn(9 + rank, 128, generator=torch.Generator().manual_seed(seed + rank)).bfloat16()


@pytest.mark.cpu_only
@pytest.mark.parametrize("activation", [ACTIVATIONS["gelu_tanh"], ACTIVATIONS["relu2"]], ids=["gelu_tanh", "relu2"])
def test_processes_give_the_bits_of_virtual_ranks(activation: dict[str, Any], get_pool: Any, seed: int) -> None:
    more = {"shared_expert": SharedExpertConfig(intermediate_size=64), "post_expert_norm": {"eps": 1e-5}}
    c = config(activation, token_format="fp8_block", **more)
    found = get_pool(2).run(run_rank, c, seed)
    with VirtualRanks(c, 2, lambda layer: layer.load_random(seed)) as ranks:
        for one, other in zip(found, ranks([rows_of(rank, seed) for rank in range(2)]), strict=True):
            assert_same_bits(one, other)


@each
@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_have_the_activation(
    gated: bool, activation: dict[str, Any], device: torch.device, rng: torch.Generator
) -> None:
    if "gate_softcap" in activation:
        pytest.skip("a shared expert has no softcaps")
    functional, formula = torch.nn.functional, ActivationConfig(**activation)
    shared = SharedExpert(128, SharedExpertConfig(intermediate_size=40, gated=gated), device, formula)
    gate, up = ((torch.randn(40, 128, generator=rng) * 0.1).bfloat16().to(device) for _ in range(2))
    down, token_gate = (
        (torch.randn(n, k, generator=rng) * 0.1).bfloat16().to(device) for n, k in ((128, 40), (1, 128))
    )
    shared.load(gate if formula.gated else None, up, down, token_gate if gated else None)
    function = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: functional.relu(x) ** 2,
        "silu": functional.silu,
    }[formula.function]
    x = torch.randn(11, 128, generator=rng).bfloat16().to(device)
    inner = function(x @ gate.T) * (x @ up.T) if formula.gated else function(x @ up.T)
    want = inner @ down.T
    assert_same_bits(shared(x), torch.sigmoid(x @ token_gate.T) * want if gated else want)
    if not formula.gated:
        with pytest.raises(ValueError, match=r"gate_proj: expected none, got shape \[40, 128\]"):
            shared.load(gate, up, down, token_gate if gated else None)


@pytest.mark.parametrize("limit", [0.125, 7.0])
def test_a_shared_expert_has_a_limit_of_its_own(limit: float, device: torch.device, rng: torch.Generator) -> None:
    """Beside experts that have another one or none, also of huge values and NaN."""
    size = SharedExpertConfig(intermediate_size=40, limit=limit)
    weights = [torch.randn(n, k, generator=rng) * 0.5 for n, k in ((40, 128), (40, 128), (128, 40))]
    gate, up, down = (weight.bfloat16() for weight in weights)
    x = torch.randn(11, 128, generator=rng)
    x[-2] *= 1e20
    x[-1, 0] = float("nan")
    x = x.bfloat16()
    found = []
    for of_experts in ({}, {"limit": 3.0, "alpha": 1.702}, {"limit": 3.0, "limit_on": "function"}):
        shared = SharedExpert(128, size, device, ActivationConfig(**of_experts))
        shared.load(gate, up, down)
        found.append(shared(x.to(device)).cpu())
    g, u = x.double() @ gate.double().T, (x.double() @ up.double().T).clamp(-limit, limit)
    silu = g * torch.sigmoid(g)
    want = ((torch.where(silu > limit, limit, silu) * u) @ down.double().T)[:-1]
    assert found[0][-1].isnan().all() and relative_error(found[0][:-1], want)[0] <= 0.02
    for other in found[1:]:
        assert_same_bits(other, found[0])
    g = g.clamp(max=limit)
    other = ((g * torch.sigmoid(g) * u) @ down.double().T)[:-1]
    assert limit == 7.0 or relative_error(other, want)[0] > 0.1


@pytest.mark.parametrize("activation", [{"function": "gelu"}, {"gated": False}, {"function": "relu2", "gated": False}])
def test_a_limit_that_a_shared_expert_cannot_have(activation: dict[str, Any]) -> None:
    size = SharedExpertConfig(intermediate_size=40, limit=7.0)
    with pytest.raises(ValueError, match=r"^limit: only silu of a gate has one, expected none with .*, got 7\.0"):
        SharedExpert(128, size, activation=ActivationConfig(**activation))


def test_layers_with_limits_of_experts_and_of_the_shared_one(
    device: torch.device, rng: torch.Generator, seed: int
) -> None:
    activation = {"limit": 1.0, "limit_on": "function"}
    c = config(activation, shared_expert=SharedExpertConfig(intermediate_size=64, limit=0.25))
    x = torch.randn(20, 128, generator=rng).bfloat16().to(device)
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(c, context)
        layer.load_random(seed)
        assert layer.router is not None and layer.shared_expert is not None
        shared = {name: weight.double().cpu() for name, weight in layer.shared_expert.named_parameters()}
        y, route = layer(x).cpu(), layer.router(x)
    routed = exact(c.replace(shared_expert=None), seed, x, route)
    gate, up = (x.double().cpu() @ shared[f"{name}_proj"].T for name in ("gate", "up"))
    inner = torch.nn.functional.silu(gate).clamp(max=0.25) * up.clamp(-0.25, 0.25)
    assert relative_error(y, routed + inner @ shared["down_proj"].T)[0] <= error_bound("bf16")
    assert relative_error(y, routed + (torch.nn.functional.silu(gate) * up) @ shared["down_proj"].T)[0] > 0.1


@pytest.mark.parametrize(("token", "weight"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_layers_with_a_norm_after_each_expert(
    token: str, weight: str, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """Within their bound, of which a layer without the norm is far outside; experts may move."""
    c = config({}, token_format=token, weight_format=weight, post_expert_norm={"eps": 1e-5})
    xs = [torch.randn(count, 128, generator=rng).bfloat16().to(device) for count in (32, 0, 21)]
    placements = [Placement(EXPERTS, 3, tuple(order)) for order in (range(EXPERTS), reversed(range(EXPERTS)))]
    with VirtualRanks(c, 3, lambda layer: layer.load_random(seed), device=device, placement=placements[0]) as ranks:
        routes = [ranks.layers[0].router(x) for x in xs]
        y = torch.cat(ranks(xs, routes)).cpu()
        norm = ranks.layers[0].post_expert_norm
        assert norm is not None and norm.scale.std() > 0.01
        norm = norm.norm.to("cpu")
        replace_experts(ranks.layers, placements[1])
        moved = torch.cat(ranks(xs, routes)).cpu()
    route = tuple(torch.cat(parts) for parts in zip(*routes, strict=True))
    bound = error_bound(token, weight, post_expert_norm=True)
    want = exact(c, seed, torch.cat(xs), route, norm)
    for found in (y, moved):
        assert relative_error(found, want)[0] <= bound
    assert relative_error(y, exact(c, seed, torch.cat(xs), route))[0] > bound


@pytest.mark.parametrize("assign", [False, True])
def test_a_norm_of_a_state_dict_counts(assign: bool, device: torch.device, rng: torch.Generator) -> None:
    """Also one that is assigned, though the experts were loaded before."""
    x = torch.randn(9, 128, generator=rng).bfloat16().to(device)
    layers = [MoELayer(config({}, post_expert_norm={"eps": 1e-5}), ExpertParallelContext(device=device)) for _ in "ab"]
    for layer in layers:
        layer.load_random(1)
        assert layer.post_expert_norm is not None
        layer.post_expert_norm.load(torch.randn(128, generator=rng).to(device))
    other, layer = layers
    before, wanted = layer(x), other(x)
    assert not torch.equal(before, wanted)
    layer.load_state_dict({name: value.double() for name, value in other.state_dict().items()}, assign=assign)
    assert_same_bits(layer(x), wanted)


def test_weights_with_a_gate_do_not_fit_without_one(device: torch.device) -> None:
    c = config(ACTIVATIONS["relu2"])
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(c, context)
        other = random_expert(config({}), 0, 0)
        with pytest.raises(
            ValueError, match=r"gate_up of expert 0: expected shape \[192, 128\], got shape \[384, 128\]"
        ):
            layer.load_experts([other] * EXPERTS)
