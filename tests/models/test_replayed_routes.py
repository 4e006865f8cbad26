"""Forward passes that take given routes: bits of recorded passes, changed routes, gradients of routers, wrong use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_runtime.comm.errors import PeerAbortedError
from moe_runtime.config import ParallelConfig
from moe_runtime.integrations import replay_routes
from moe_runtime.integrations.transformers_registry import NAME, close_experts, experts_settings
from moe_runtime.reference import error_bound
from tests.support.comparison import assert_same_bits

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.models.test_transformers import WAIT_S, error, prompts, spread
from tests.models.test_transformers_registry import without_accelerate
from tests.support import families_table, parallel_models, tiny_models

pytestmark = pytest.mark.cpu_only

TOP_K = 3
MOST = 96


def save(folder: Path, family: str, seed: int) -> Path:
    tiny_models.tiny_model(family, seed).bfloat16().save_pretrained(folder)
    return folder


def random_ids(layers: int, tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Distinct experts of each token."""
    scores = torch.rand(layers, tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(dim=-1)[..., :TOP_K]


def weights_of(family: str, model: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weights of given experts, as the papers of these families have them."""
    if family == "gpt_oss":
        return logits.gather(1, ids).softmax(dim=-1)
    scores = logits.softmax(dim=-1) if family == "qwen3_moe" else logits.sigmoid()
    chosen = scores.gather(1, ids)
    scale = model.config.routed_scaling_factor if family == "glm4_moe" else 1.0
    return chosen / chosen.sum(dim=-1, keepdim=True) * scale


def recorded_pass(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    """Logits of a pass and of its replays: with weights, without, and of another pass afterwards."""
    model, parallel = spread(path, max_tokens_per_rank=8)
    tokens = ids[rank].numel()
    shape = len(parallel.layers), 20, 8, TOP_K
    ring, weights = torch.zeros(shape, dtype=torch.int16), torch.zeros(shape)
    with parallel, torch.no_grad(), parallel.join():
        recorded = parallel.record_routes(ring, weights)

        def taken() -> tuple[torch.Tensor, torch.Tensor]:
            """Of a pass, which `join` splits."""
            steps = [routes.read() for routes in recorded.values()]
            chosen = torch.stack([torch.cat([step.topk_idx for step in layer]) for layer in steps])
            return chosen, torch.stack([torch.cat([step.topk_weights for step in layer]) for layer in steps])

        answers, routes = [model(ids[rank]).logits], [taken()]
        chosen, weight = routes[0]
        assert chosen.shape == (len(parallel.layers), tokens, TOP_K)
        for dtype, given in ((torch.int16, weight), (torch.int32, None), (torch.int64, None)):
            with parallel.replay_routes(chosen.to(dtype), given):
                answers.append(model(ids[rank]).logits)
            routes.append(taken())
        answers.append(model(ids[rank]).logits)
        routes.append(taken())
    return answers, routes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"])
def test_a_replayed_pass_has_the_bits_of_the_recorded_one(
    family: str, world: int, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """With the recorded weights and with those that the routers give again; also where `join` splits the pass."""
    results = get_pool(world).run(recorded_pass, save(tmp_path, family, seed), prompts(seed, world), timeout=120.0)
    for answers, routes in results:
        assert len(answers) == 5
        for answer, (chosen, weights) in zip(answers[1:], routes[1:], strict=True):
            assert_same_bits(answer, answers[0])
            assert torch.equal(chosen, routes[0][0])
            assert_same_bits(weights, routes[0][1])


def changed_pass(rank: int, world: int, path: Path, ids: list[Any], given: list[Any]) -> Any:
    """Logits of a pass that is given routes, of one whose routers are made to answer them, and of one with neither;
    and those of a pass without weights, with each router's logits and weights."""
    model, parallel = spread(path, max_tokens_per_rank=MOST)
    chosen, weights = given[rank]
    routes = list(zip(weights, chosen, strict=True))
    logits: list[torch.Tensor] = []
    gates = [tiny_models.gate_of(block) for block in tiny_models.moe_blocks(model)]
    ring = torch.zeros(len(gates), 1, MOST, TOP_K)
    with parallel, torch.no_grad():
        with parallel.replay_routes(chosen, weights):
            replayed = model(ids[rank]).logits
        answers = replayed, parallel_models.logits_with(model, ids[rank], routes), model(ids[rank]).logits
        parallel.record_routes(torch.zeros(ring.shape, dtype=torch.int16), ring)
        keep = parallel_models.hooked(gates, lambda _: lambda module, args, output: logits.append(output[0]))
        with keep, parallel.replay_routes(chosen):
            model(ids[rank])
    return answers, logits, ring[:, 0, : chosen.shape[1]]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_other_routes_give_what_a_reference_says(
    family: str, world: int, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """Within the bound against float64; without weights those of the family's formula, for the given experts."""
    folder, ids = save(tmp_path, family, seed), prompts(seed, world, [(10, 9), (3, 5)])
    model = parallel_models.load(folder)
    layers = len(tiny_models.moe_blocks(model))
    chosen = [random_ids(layers, x.numel(), 12, seed + rank) for rank, x in enumerate(ids)]
    generator = torch.Generator().manual_seed(seed)
    # bf16 numbers, so that a router of the original can answer them.
    weights = [torch.rand(one.shape, generator=generator).bfloat16().float() for one in chosen]
    given = list(zip(chosen, weights, strict=True))
    results = get_pool(world).run(changed_pass, folder, ids, given, timeout=120.0)
    routes = [list(zip(w, i, strict=True)) for i, w in given]
    exact_model = parallel_models.load(folder, torch.float64)
    exact, theirs, disturbed = (
        [parallel_models.logits_with(one, x, r, noise) for x, r in zip(ids, routes, strict=True)]
        for one, noise in ((exact_model, 0.0), (model, 0.0), (exact_model, error_bound("bf16", "bf16")))
    )
    found = [answers[0] for answers, _, _ in results]
    assert error(found, exact) <= error(theirs, exact) + error(disturbed, exact)
    for rank, ((replayed, forced, own), logits, recorded) in enumerate(results):
        assert_same_bits(replayed, forced)
        assert not torch.equal(replayed, own)
        for router_logits, ids_TK, weights_TK in zip(logits, chosen[rank], recorded, strict=True):
            expected = weights_of(family, model, router_logits.double(), ids_TK)
            # Some routers round to bf16, gpt-oss before and after softmax's sum.
            torch.testing.assert_close(weights_TK.double(), expected, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_gradients_reach_routers_through_the_given_experts(family: str, checkpointing: bool, seed: int) -> None:
    """In float64: those of the same model whose routers answer the family's formula of the given ids."""
    (ids,) = prompts(seed, 1)
    model, reference = (tiny_models.tiny_model(family, seed).double() for _ in range(2))
    blocks = tiny_models.moe_blocks(reference)
    chosen = random_ids(len(blocks), ids.numel(), 12, seed)
    given = chosen.clone()
    given[0, 4] = -1  # a token without experts
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        model.train()
    target = torch.randn(*ids.shape, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with replay_routes(model, given) as replayed:
        found = model(ids).logits
        (found * target).sum().backward()
    assert replayed.layers == len(blocks)

    def force(i: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            present = (given[i] >= 0).double()
            return output[0], weights_of(family, model, output[0], chosen[i]) * present, chosen[i]

        return hook

    with parallel_models.hooked([tiny_models.gate_of(block) for block in blocks], force):
        expected = reference(ids).logits
    (expected * target).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = pairs[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            # Routers compute in fp32 in places.
            assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm(), name
    for block in tiny_models.moe_blocks(model):
        assert tiny_models.gate_of(block).weight.grad.norm() > 0


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "gemma4", "longcat_flash", "phimoe"])
def test_other_routers(family: str, seed: int) -> None:
    """Experts of a plain model get the given ids, in another order, with the weights that go with them; routers that
    do not choose by top-k give no weights of other experts."""
    model, (ids,) = families_table.tiny_model(family, seed), prompts(seed, 1)
    calls: list[Any] = []

    def keep(_: int) -> Any:
        return lambda module, args, output: calls.append(tuple(one.reshape(-1, one.shape[-1]) for one in args[1:]))

    def taken() -> tuple[torch.Tensor, torch.Tensor]:
        calls.clear()
        with parallel_models.hooked(list(families_table.experts_of(model).values()), keep), torch.no_grad():
            model(**families_table.inputs_of(model, ids))
        return torch.stack([chosen for chosen, _ in calls]), torch.stack([w.float() for _, w in calls])

    def check(weights: Any) -> None:
        with replay_routes(model, turned, weights):
            found, found_weights = taken()
        assert torch.equal(found.long(), turned.long())
        assert_same_bits(found_weights, own_weights.flip(-1))

    chosen, own_weights = taken()
    turned = chosen.flip(-1)
    check(own_weights.flip(-1))
    if family in ("phimoe", "deepseek_v4"):
        # Experts that a token of the vocabulary has, or the maximum of what is left.
        with pytest.raises(ValueError, match=r"weights: expected them, the router of model\.layers\.0\.mlp does not"):
            check(None)
        turned = turned.flip(-1)
        own_weights = own_weights.flip(-1)
    if family != "phimoe":
        check(None)
    if family == "longcat_flash":
        with pytest.raises(ValueError, match=r"ids: expected no -1 in model\.layers\.0\.mlp, which stands"):
            replay_routes(model, torch.full_like(turned, -1))


def test_experts_that_run_here_by_name(seed: int) -> None:
    """`set_experts_implementation`: the bits of the pass, with weights and without."""
    model, (ids,) = tiny_models.tiny_model("qwen3_moe", seed).bfloat16(), prompts(seed, 1)
    model.set_experts_implementation(NAME)
    with torch.no_grad(), experts_settings(max_tokens_per_rank=32):
        logits, routes = parallel_models.record_routes(model, ids)
        chosen, weights = torch.stack([i for _, i in routes]), torch.stack([w for w, _ in routes])
        for given in (weights, None):
            with replay_routes(model, chosen.short(), given):
                assert_same_bits(model(ids).logits, logits)
        # No expert, as the weight 0 has it.
        chosen[1, 3], weights[1, 3, :2] = torch.tensor([2, 1, 0]), 0.0
        expected = parallel_models.logits_with(model, ids, list(zip(weights, chosen, strict=True)))
        chosen[1, 3, :2], weights[1, 3, :2] = -1, 0.5
        with replay_routes(model, chosen, weights):
            absent = model(ids).logits
        assert not torch.equal(absent, logits)
        assert_same_bits(absent, expected)
    close_experts(model)


@pytest.mark.parametrize("first", ["compiled", "replayed"])
def test_a_compiled_model_replays(first: str, tmp_path: Path, seed: int) -> None:
    """Whether it was compiled before or in the pass that replays; a pass afterwards takes its own routes."""
    (ids,) = prompts(seed, 1)
    tiny_models.tiny_model("qwen3_moe", seed, num_hidden_layers=1).bfloat16().save_pretrained(tmp_path)
    model, parallel = spread(tmp_path)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    chosen = random_ids(1, ids.numel(), 12, seed)
    with parallel, torch.no_grad():
        own = model(ids).logits
        with parallel.replay_routes(chosen):
            expected = model(ids).logits
        assert not torch.equal(expected, own)
        if first == "compiled":
            assert_same_bits(compiled(ids).logits, own)
        with parallel.replay_routes(chosen):
            assert_same_bits(compiled(ids).logits, expected)
        assert_same_bits(compiled(ids).logits, own)


@pytest.fixture
def converted(tmp_path: Path, seed: int) -> Any:
    """A model on one rank, the ids of a prompt, and a pass with its routes."""
    folder, (ids,) = save(tmp_path, "qwen3_moe", seed), prompts(seed, 1)
    model, parallel = spread(folder)
    with parallel, torch.no_grad():
        ring, weights = torch.zeros(3, 1, 32, TOP_K, dtype=torch.int16), torch.zeros(3, 1, 32, TOP_K)
        parallel.record_routes(ring, weights)
        logits = model(ids).logits
        for layer in parallel.layers:
            layer.routes = None
        yield model, parallel, ids, logits, ring[:, 0, : ids.numel()].clone(), weights[:, 0, : ids.numel()].clone()


def test_wrong_routes_are_named(converted: Any) -> None:
    _, parallel, _, _, chosen, weights = converted
    cases: list[tuple[str, Any, Any]] = [
        (r"ids: expected \[3, T, 3\], got \[2, 18, 3\]", chosen[:2], None),
        (r"ids: expected \[3, T, 3\], got \[3, 18, 2\]", chosen[..., :2], None),
        (r"ids: expected \[3, T, 3\], got \[18, 3\]", chosen[0], None),
        ("ids: expected torch.int16, .*, got torch.float32", weights, None),
        ("ids: expected torch.int16, .*, got torch.uint8", chosen.byte(), None),
        ("ids: expected a tensor, got list", [[0]], None),
        ("ids: expected a tensor on cpu, got one on meta", chosen.to("meta"), None),
        ("ids: expected ids from -1 to 11, got 12", chosen + 12 - chosen.max(), None),
        (r"ids: expected an expert once in a token, got \d+ twice in ids\[0, 0\]", chosen[..., [0, 1, 1]], None),
        ("ids: expected ids from -1 to 11, got -2", chosen - chosen.min() - 2, None),
        (
            r"weights: expected torch.float32 \[3, 18, 3\], as ids, got torch.float32 \[3, 17, 3\]",
            chosen,
            weights[:, 1:],
        ),
        ("weights: expected torch.float32 .*, got torch.float64", chosen, weights.double()),
        ("weights: expected a tensor on cpu, got one on meta", chosen, weights.to("meta")),
        (
            "weights: expected them, a token in decoder layer 1 has -1 beside an expert",
            chosen.clone().index_put_((torch.tensor(1), torch.tensor(2), torch.tensor(0)), torch.tensor(-1).short()),
            None,
        ),
    ]
    for message, ids, given in cases:
        with pytest.raises(ValueError, match=message):
            parallel.replay_routes(ids, given)


def test_a_pass_with_other_layers_or_tokens_is_refused(converted: Any) -> None:
    """And leaves the model as it was."""
    model, parallel, ids, logits, chosen, weights = converted
    blocks = tiny_models.moe_blocks(model)

    def check(message: str, run: Any, routes: torch.Tensor = chosen) -> None:
        with pytest.raises(ValueError, match=message), parallel.replay_routes(routes):
            run()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert torch.overrides._get_current_function_mode() is None
        assert_same_bits(model(ids).logits, logits)

    check(
        r"ids: expected a call of 17 tokens and top_k 3, .*, got \[18, 3\] in decoder",
        lambda: model(ids),
        chosen[:, 1:],
    )
    check(r"ids: expected a call of 18 tokens and top_k 3, .*, got \[16, 3\]", lambda: model(ids[:, 1:]))
    check("ids: expected a forward pass of 3 MoE layers inside replay_routes, got 0", lambda: None)
    check("ids: expected a forward pass of 3 MoE layers inside replay_routes, got 1", lambda: blocks[0](hidden(ids)))
    check("got a call of decoder layer 0 after 3 of them", lambda: [model(ids), model(ids)])
    check("got a call of decoder layer 1 after 0 of them", lambda: blocks[1](hidden(ids)))
    with pytest.raises(RuntimeError, match="out of ideas"), parallel.replay_routes(chosen, weights):
        raise RuntimeError("out of ideas")
    replayed = parallel.replay_routes(chosen, weights)
    with replayed:
        with pytest.raises(ValueError, match="replay_routes: the model is in another"), parallel.replay_routes(chosen):
            pass
        assert_same_bits(model(ids).logits, logits)
    with pytest.raises(ValueError, match="or this one was entered before"), replayed:
        pass
    with pytest.raises(ValueError, match="are expert-parallel; call replay_routes of their ExpertParallel"):
        replay_routes(model, chosen)
    with pytest.raises(ValueError, match="model: expected MoE blocks"):
        replay_routes(dense(model), chosen)


def hidden(ids: torch.Tensor) -> torch.Tensor:
    """Tokens for a block."""
    return torch.ones(*ids.shape, 64, dtype=torch.bfloat16)


def dense(model: Any) -> nn.Module:
    """A model with a config, and no experts."""
    plain = nn.Linear(2, 2)
    plain.config = model.config
    return plain


def wrong_pass_of_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    """What each rank is told where rank 0 has routes of one token too few."""
    model, parallel = spread(path)
    chosen = random_ids(3, ids[rank].numel() - (rank == 0), 12, rank)
    try:
        with parallel, torch.no_grad(), parallel.replay_routes(chosen):
            model(ids[rank])
    except Exception as problem:
        return type(problem), str(problem)
    return None


def test_a_rank_with_wrong_routes_is_named_on_the_others(get_pool: Any, tmp_path: Path, seed: int) -> None:
    folder = save(tmp_path, "qwen3_moe", seed)
    outcomes = get_pool(2).outcomes(wrong_pass_of_rank, folder, prompts(seed, 2))
    (kind, message), (other, told) = (outcome.result for outcome in outcomes)
    assert kind is ValueError and message.startswith("ids: expected a call of 17 tokens")
    assert other is PeerAbortedError and message in told


def distributed_pass(rank: int, world: int, path: Path, ids: list[Any], sizes: dict[str, int]) -> Any:
    """Logits of a model that transformers spread over ranks, of replays with weights and without, and of other ids."""
    limits = ParallelConfig(timeout_s=WAIT_S, startup_timeout_s=WAIT_S)
    with experts_settings(max_tokens_per_rank=MOST, parallel=limits), without_accelerate():
        config = DistributedConfig(**sizes, ep_implementation=NAME)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, distributed_config=config)
    with torch.no_grad():
        logits, routes = parallel_models.record_routes(model, ids[rank])
        chosen, weights = torch.stack([i for _, i in routes]), torch.stack([w for w, _ in routes])
        answers = [logits]
        for given in ((chosen, weights), (chosen, None), ((chosen + 5) % 12, weights)):
            with replay_routes(model, *given):
                answers.append(model(ids[rank]).logits)
    close_experts(model)
    return answers


@pytest.mark.parametrize("sizes", [{"ep_size": 2, "fsdp_size": 2}, {"ep_size": 2, "tp_size": 2}])
def test_a_model_that_transformers_spread_replays(
    sizes: dict[str, int], get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """Ranks with tokens of their own, and ranks that share them."""
    folder, ids = save(tmp_path, "qwen3_moe", seed), prompts(seed, 2)
    ids = ids[:1] * 2 if "tp_size" in sizes else ids
    for logits, with_weights, without, other in get_pool(2).run(distributed_pass, folder, ids, sizes, timeout=120.0):
        assert_same_bits(with_weights, logits)
        assert_same_bits(without, logits)
        assert not torch.equal(other, logits)
