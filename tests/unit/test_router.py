"""Routing against transformers' own routers and against a float64 search in which ties go to the lowest id."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime import router as router_module
from moe_runtime.checkpoints.families import layer_config
from moe_runtime.config import RouterConfig
from moe_runtime.router import Router, sigmoid_topk, softmax_topk, topk_softmax


def by_id(idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted by expert id, for routers that promise no order."""
    order = idx_TK.long().argsort(dim=-1)
    return idx_TK.long().gather(1, order), weights_TK.float().gather(1, order)


def lowest_first(scores: list[float], k: int) -> list[int]:
    """Ids of the `k` largest; Python's sort is stable."""
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_is_transformers_qwen3_moe(device: torch.device, renormalize: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_experts=24, num_experts_per_tok=6, norm_topk_prob=renormalize
    )
    theirs = Qwen3MoeTopKRouter(config).to(device)
    torch.manual_seed(1)
    theirs.weight.data.normal_()
    ours = Router(64, 24, 6, RouterConfig(renormalize=renormalize)).to(device)
    ours.load_state_dict(theirs.state_dict())
    x_TH = torch.randn(97, 64, device=device)
    with torch.no_grad():
        # Their logits in float64, as ours are: otherwise the test would measure the order of their fp32 sums.
        _, weights_TK, idx_TK = theirs.double()(x_TH.double())
    weights_TK = weights_TK.float()
    got_idx, got_weights = ours(x_TH)
    assert got_idx.dtype == torch.int32 and got_weights.dtype == torch.float32
    torch.testing.assert_close(got_idx.long(), idx_TK, rtol=0, atol=0)
    # Both are a few fp32 roundings of the same exact numbers.
    torch.testing.assert_close(got_weights, weights_TK, rtol=2**-20, atol=0)


@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (8, 4), (4, 4)])
def test_sigmoid_is_transformers_deepseek_v3(device: torch.device, num_groups: int, top_groups: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        hidden_size=64,
        n_routed_experts=32,
        num_experts_per_tok=6,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(config).to(device)
    torch.manual_seed(2)
    theirs.weight.data.normal_(std=0.2)
    theirs.e_score_correction_bias.normal_(std=0.3)
    ours = Router(
        64,
        32,
        6,
        RouterConfig(
            kind="sigmoid", num_groups=num_groups, top_groups=top_groups, scaling_factor=2.5, correction_bias=True
        ),
    ).to(device)
    ours.load_state_dict(theirs.state_dict())
    x_TH = torch.randn(97, 64, device=device)
    with torch.no_grad():
        _, weights_TK, idx_TK = theirs(x_TH)
    got_idx, got_weights = by_id(*ours(x_TH))
    want_idx, want_weights = by_id(idx_TK, weights_TK)
    torch.testing.assert_close(got_idx, want_idx, rtol=0, atol=0)
    torch.testing.assert_close(got_weights, want_weights, rtol=2**-20, atol=0)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("normalized", [False, True])
def test_every_family_routes_as_its_module_does(
    family: str, normalized: bool, device: torch.device, seed: int, rng: torch.Generator
) -> None:
    """Their modules in fp32 against ours: the same ids wherever no two scores are closer than fp32 sums may blur.

    Told apart are the scores that decide, in float64: the last that is chosen and the first that is not, of experts
    and of groups.
    """
    pytest.importorskip("transformers")
    from tests.support.tiny_models import gate_of, moe_blocks, tiny_model

    changes = {"norm_topk_prob": normalized} if family in ("qwen2_moe", "qwen3_moe", "deepseek_v3") else {}
    model = tiny_model(family, seed, num_hidden_layers=2, **changes)
    theirs = gate_of(moe_blocks(model)[0]).to(device)
    config = layer_config(model.config.to_dict(), max_tokens_per_rank=8)
    assert not changes or config.router.renormalize == normalized
    ours = Router(config.hidden_size, config.num_experts, config.top_k, config.router, device)
    bias = getattr(theirs, "bias", None)
    ours.load(theirs.weight, bias=bias, correction_bias=getattr(theirs, "e_score_correction_bias", None))
    x_TH = torch.randn(500, config.hidden_size, generator=rng).to(device)
    with torch.no_grad():
        _, weights_TK, idx_TK = theirs(x_TH)
        logits_TE = torch.nn.functional.linear(
            x_TH.double(), theirs.weight.double(), None if bias is None else bias.double()
        )
    got_idx, got_weights = ours(x_TH)
    clear = margins(logits_TE, config.router, ours.e_score_correction_bias, config.top_k) > 2**-16
    assert clear.sum() > 450
    got_idx, got_weights = by_id(got_idx, got_weights)
    want_idx, want_weights = by_id(idx_TK, weights_TK)
    torch.testing.assert_close(got_idx[clear], want_idx[clear], rtol=0, atol=0)
    # An error of 2^-20 in a logit of a few units becomes a relative one of that size in a weight.
    torch.testing.assert_close(got_weights[clear], want_weights[clear], rtol=2**-16, atol=0)


def margins(logits_TE: torch.Tensor, config: RouterConfig, bias_E: torch.Tensor | None, k: int) -> torch.Tensor:
    """How far apart the scores are that decide, of each token."""

    def gap(scores: torch.Tensor, k: int) -> torch.Tensor:
        if k == scores.shape[-1]:
            return torch.full_like(scores[..., 0], math.inf)
        best = scores.sort(dim=-1, descending=True).values
        return best[..., k - 1] - best[..., k]

    if config.kind != "sigmoid":
        return gap(logits_TE, k)
    scores_TE = logits_TE.sigmoid() + (0 if bias_E is None else bias_E.double())
    grouped = scores_TE.unflatten(-1, (config.num_groups, -1))
    of_groups = grouped.topk(2, dim=-1).values.sum(dim=-1)
    allowed = torch.zeros_like(of_groups).scatter_(1, of_groups.topk(config.top_groups).indices, 1).bool()
    masked = grouped.masked_fill(~allowed[:, :, None], -math.inf).flatten(1)
    return torch.minimum(gap(of_groups, config.top_groups), gap(masked, k))


def test_softmax_after_the_choice_against_a_search(rng: torch.Generator) -> None:
    logits_TE = torch.randint(-3, 4, (200, 9), generator=rng).float()
    for k in (1, 4, 9):
        idx_TK, weights_TK = topk_softmax(logits_TE, k, scaling_factor=2.0)
        assert (idx_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)
        for row, ids, weights in zip(logits_TE.tolist(), idx_TK.tolist(), weights_TK.tolist(), strict=True):
            want = lowest_first(row, k)
            assert ids == want
            total = sum(math.exp(row[e]) for e in want)
            np.testing.assert_allclose(weights, [2 * math.exp(row[e]) / total for e in want], rtol=2**-20)


def test_softmax_after_the_choice_does_not_see_the_others() -> None:
    logits_TE = torch.tensor([[-200.0, -201.0, -math.inf]])
    _, weights_TK = topk_softmax(logits_TE, 2)
    torch.testing.assert_close(weights_TK, torch.tensor([[1.0, math.exp(-1)]]) / (1 + math.exp(-1)))


def test_scores_that_are_all_zero_have_no_weight() -> None:
    """Nothing is divided by zero, as in DeepSeek-V3."""
    _, weights_TK = sigmoid_topk(torch.full((1, 8), -200.0), 2)
    assert weights_TK.tolist() == [[0.0, 0.0]]


def test_no_bias_makes_an_expert_of_another_group_be_chosen() -> None:
    """Not where the experts that are left in the best group have a bias of -inf."""
    logits_TE = torch.tensor([[-9.0, -9.0, -9.0, -9.0, 0.0, 0.0, 9.0, 9.0]])
    bias_E = torch.tensor([0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf, 0.0, 0.0])
    idx_TK, weights_TK = sigmoid_topk(logits_TE, 3, correction_bias_E=bias_E, num_groups=2, top_groups=1)
    assert idx_TK.tolist() == [[6, 7, 4]]
    torch.testing.assert_close(weights_TK, logits_TE.sigmoid()[:, [6, 7, 4]] / logits_TE.sigmoid()[0, [6, 7, 4]].sum())


def test_the_bias_of_the_gate_counts_in_choice_and_weights(device: torch.device) -> None:
    router = Router(16, 4, 2, RouterConfig(kind="topk_softmax", bias=True), device)
    router.load(torch.zeros(4, 16), bias=torch.tensor([0.0, 1.0, -1.0, 3.0]))
    idx_TK, weights_TK = router(torch.ones(1, 16, device=device))
    assert idx_TK.tolist() == [[3, 1]]
    torch.testing.assert_close(weights_TK.cpu(), torch.tensor([[3.0, 1.0]]).softmax(-1))


def test_loading_takes_what_the_config_has_and_nothing_else() -> None:
    weight_EH, bias_E = torch.randn(4, 16).bfloat16(), torch.randn(4)
    router = Router(16, 4, 2, RouterConfig(kind="sigmoid", correction_bias=True))
    router.load(weight_EH, correction_bias=bias_E)
    assert torch.equal(router.weight, weight_EH.float()) and torch.equal(router.e_score_correction_bias, bias_E)
    with pytest.raises(ValueError, match=r"correction_bias: expected shape \[4\], got none"):
        router.load(weight_EH)
    with pytest.raises(ValueError, match=r"bias: expected none, got shape \[4\]"):
        router.load(weight_EH, bias=bias_E, correction_bias=bias_E)
    with pytest.raises(ValueError, match=r"weight: expected shape \[4, 16\], got shape \[16, 4\]"):
        router.load(torch.zeros(16, 4), correction_bias=torch.zeros(4))
    assert torch.equal(router.weight, weight_EH.float()) and torch.equal(router.e_score_correction_bias, bias_E)


# Few distinct values, all exact in fp32 together with their differences: ties are the rule.
COARSE = st.sampled_from([-4.0, -1.0, -0.5, 0.0, 0.5, 1.0, 4.0])


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    experts = draw(st.integers(1, 12))
    row = st.lists(COARSE, min_size=experts, max_size=experts)
    return draw(st.lists(row, min_size=1, max_size=4)), draw(st.integers(1, experts))


@given(rows(), st.booleans(), st.sampled_from([1.0, 2.5]))
def test_softmax_against_a_search(case: tuple[list[list[float]], int], renormalize: bool, factor: float) -> None:
    logits, k = case
    idx_TK, weights_TK = softmax_topk(torch.tensor(logits), k, renormalize=renormalize, scaling_factor=factor)
    for row, ids, weights in zip(logits, idx_TK.tolist(), weights_TK.tolist(), strict=True):
        want = lowest_first(row, k)
        assert ids == want
        total = sum(math.exp(row[e]) for e in (want if renormalize else range(len(row))))
        np.testing.assert_allclose(weights, [factor * math.exp(row[e]) / total for e in want], rtol=2**-20)


@st.composite
def grouped_rows(draw: st.DrawFn) -> tuple[list[list[float]], list[float], int, int, int]:
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, groups))
    k = draw(st.integers(1, top_groups * size))
    row = st.lists(COARSE, min_size=groups * size, max_size=groups * size)
    # Biases are multiples of 8: no rounding of score + bias can reorder what differs, and equal scores tie exactly.
    bias = draw(st.lists(st.sampled_from([-8.0, 0.0, 8.0]), min_size=groups * size, max_size=groups * size))
    return draw(st.lists(row, min_size=1, max_size=3)), bias, k, groups, top_groups


@given(grouped_rows(), st.booleans())
def test_sigmoid_against_a_search(
    case: tuple[list[list[float]], list[float], int, int, int], renormalize: bool
) -> None:
    logits, bias, k, groups, top_groups = case
    idx_TK, weights_TK = sigmoid_topk(
        torch.tensor(logits),
        k,
        correction_bias_E=torch.tensor(bias),
        num_groups=groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scaling_factor=2.5,
    )
    # The fp32 sigmoid and sums are part of the definition where they decide ties; the search is what is tested.
    scores = torch.tensor(logits).sigmoid()
    choice = (scores + torch.tensor(bias)).numpy()
    size = len(bias) // groups
    for t, (ids, weights) in enumerate(zip(idx_TK.tolist(), weights_TK.tolist(), strict=True)):
        of_group = []
        for g in range(groups):
            best, second = sorted(choice[t, g * size : (g + 1) * size], reverse=True)[:2]
            of_group.append(float(np.float32(best) + np.float32(second)))
        allowed = set(lowest_first(of_group, top_groups))
        masked = [float(c) if e // size in allowed else -math.inf for e, c in enumerate(choice[t])]
        want = lowest_first(masked, k)
        assert ids == want
        exact = [1 / (1 + math.exp(-logits[t][e])) for e in want]
        total = sum(exact) if renormalize else 1.0
        np.testing.assert_allclose(weights, [2.5 * w / total for w in exact], rtol=2**-20)


@pytest.mark.parametrize("value", [0.0, 1e30, -1e30])
def test_equal_logits_give_the_first_experts(device: torch.device, value: float) -> None:
    logits_TE = torch.full((3, 300), value, device=device)
    want = torch.arange(8, dtype=torch.int32, device=device).expand(3, 8)
    idx_TK, weights_TK = softmax_topk(logits_TE, 8)
    assert torch.equal(idx_TK, want)
    torch.testing.assert_close(weights_TK, torch.full_like(weights_TK, 1 / 8), rtol=2**-20, atol=0)
    assert torch.equal(sigmoid_topk(logits_TE, 8, num_groups=10, top_groups=3)[0], want)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["one", "group", "all"])
def test_ids_stay_in_range_and_apart_whatever_the_logits(device: torch.device, poison: float, where: str) -> None:
    torch.manual_seed(3)
    logits_TE = torch.randn(5, 16, device=device)
    logits_TE[2, {"one": slice(7, 8), "group": slice(4, 8), "all": slice(None)}[where]] = poison
    clean = torch.tensor([0, 1, 3, 4], device=device)
    for bias in (None, torch.full((16,), -math.inf, device=device)):
        for idx_TK, weights_TK in (
            softmax_topk(logits_TE, 6),
            sigmoid_topk(logits_TE, 6, correction_bias_E=bias, num_groups=4, top_groups=2),
        ):
            assert ((idx_TK >= 0) & (idx_TK < 16)).all()
            assert all(len(set(row)) == 6 for row in idx_TK.tolist())
            assert weights_TK[clean].isfinite().all()


def test_masked_groups_are_never_chosen_even_below_an_infinite_bias(device: torch.device) -> None:
    bias_E = torch.tensor([-math.inf, -math.inf, 0.0, -1.0, -1.0, -1.0], device=device)
    bias_E[3] = -math.inf
    bias_E[4:] = 1.0
    idx_TK, _ = sigmoid_topk(
        torch.zeros(1, 6, device=device), 2, correction_bias_E=bias_E, num_groups=3, top_groups=1, renormalize=False
    )
    assert idx_TK.tolist() == [[4, 5]]
    idx_TK, _ = sigmoid_topk(
        torch.zeros(1, 4, device=device),
        2,
        correction_bias_E=torch.tensor([-3.0, -3.0, 9.0, -math.inf], device=device),
        num_groups=2,
        top_groups=1,
    )
    assert idx_TK.tolist() == [[0, 1]]


def test_router_computes_in_fp32_from_bf16_tokens(device: torch.device) -> None:
    torch.manual_seed(4)
    router = Router(512, 16, 4, RouterConfig()).to(device)
    x_TH = torch.randn(33, 512, device=device).bfloat16()
    exact = x_TH.double() @ router.weight.double().T
    # fp32 sums of 512 products: 2^-20 of the sum of their magnitudes.
    allowed = 2**-20 * (x_TH.double().abs() @ router.weight.double().abs().T)
    assert ((router.logits(x_TH).double() - exact).abs() <= allowed).all()
    assert router.logits(x_TH).dtype == torch.float32


@pytest.mark.parametrize("cast", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_a_model_that_is_cast_leaves_the_router_as_it_is(cast, rng: torch.Generator) -> None:
    config = RouterConfig(kind="sigmoid", correction_bias=True, bias=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Router(64, 8, 2, config))
    weight, biases = torch.randn(8, 64, generator=rng), torch.randn(2, 8, generator=rng)
    model[1].load(weight, bias=biases[0], correction_bias=biases[1])
    cast(model)
    assert model[0].weight.dtype != torch.float32
    assert torch.equal(model[1].weight, weight) and torch.equal(model[1].bias, biases[0])
    assert torch.equal(model[1].e_score_correction_bias, biases[1])
    assert all(t.dtype == torch.float32 for t in (*model[1].parameters(), *model[1].buffers()))
    moved = model.to("meta", torch.bfloat16)[1]
    assert all(t.is_meta and t.dtype == torch.float32 for t in (*moved.parameters(), *moved.buffers()))


def test_no_tokens(device: torch.device) -> None:
    for config in (RouterConfig(), RouterConfig(kind="sigmoid", num_groups=4, top_groups=2)):
        idx_TK, weights_TK = Router(64, 16, 4, config).to(device)(torch.empty(0, 64, device=device))
        assert idx_TK.shape == weights_TK.shape == (0, 4)
        assert (idx_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_size: expected a positive integer, got 0"):
        Router(0, 8, 2, RouterConfig())
    with pytest.raises(ValueError, match="config: expected a RouterConfig, got dict"):
        Router(256, 8, 2, {"kind": "softmax"})  # type: ignore[arg-type]
    router = Router(64, 16, 4, RouterConfig())
    with pytest.raises(ValueError, match=r"x: expected \[T, 64\], got \[3, 65\]"):
        router(torch.zeros(3, 65))
    with pytest.raises(ValueError, match=r"x: expected a float dtype, got torch\.int32"):
        router(torch.zeros(3, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match="x: requires grad"):
        router(torch.zeros(3, 64, requires_grad=True))
    with pytest.raises(ValueError, match=r"top_k: expected 1\.\.4, got 5"):
        softmax_topk(torch.zeros(2, 4), 5)
    with pytest.raises(ValueError, match="num_groups"):
        sigmoid_topk(torch.zeros(2, 4), 2, num_groups=4)
    with pytest.raises(ValueError, match="top_groups"):
        sigmoid_topk(torch.zeros(2, 4), 3, num_groups=2, top_groups=1)
    # The first one would be broadcast.
    for bias_E in (torch.zeros(1), torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match=r"correction_bias: expected a float tensor \[4\] on cpu, got"):
            sigmoid_topk(torch.zeros(2, 4), 2, correction_bias_E=bias_E)
    with pytest.raises(ValueError, match="logits"):
        softmax_topk(torch.zeros(4), 2)


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(router_module)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_token_is_routed_the_same_whatever_its_neighbours(
    kind: str, device: torch.device, rng: torch.Generator
) -> None:
    router = Router(512, 32, 4, RouterConfig(kind=kind), device)
    router.weight.data.copy_(torch.randn(32, 512, generator=rng) * 512**-0.5)
    x = torch.randn(300, 512, generator=rng).to(torch.bfloat16).to(device)
    idx, weights = router(x)
    for rows in (slice(0, 1), slice(17, 20), slice(5, 133)):
        idx_part, weights_part = router(x[rows])
        assert torch.equal(idx_part, idx[rows])
        assert torch.equal(weights_part.view(torch.int32), weights[rows].view(torch.int32))


@pytest.mark.parametrize("kind", [softmax_topk, topk_softmax, sigmoid_topk])
def test_equal_tokens_get_equal_weights(kind: Callable[..., tuple[torch.Tensor, torch.Tensor]], seed: int) -> None:
    torch.manual_seed(seed)
    for experts in (8, 13, 72):
        for _ in range(40):
            logits_TE = (2 * torch.randn(experts)).repeat(5, 1)
            for logits in (logits_TE, logits_TE.t().contiguous().t()):
                idx_TK, weights_TK = kind(logits, 3)
                assert bool((idx_TK == idx_TK[0]).all()) and bool((weights_TK == weights_TK[0]).all())
