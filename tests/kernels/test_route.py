"""The router's kernels against the router in float64, and against exact logits where every tie must go one way."""

from __future__ import annotations

import math

import pytest
import torch

from moe_runtime.config import RouterConfig
from moe_runtime.kernels import route
from moe_runtime.router import Router
from tests.support.comparison import assert_same_bits
from tests.unit.test_router import margins

CONFIGS = [
    (RouterConfig(), 24, 200, 6),
    (RouterConfig(renormalize=False, scaling_factor=1.5), 130, 72, 4),
    (RouterConfig(kind="topk_softmax", bias=True), 32, 96, 4),
    (RouterConfig(kind="sigmoid", scaling_factor=2.5, num_groups=8, top_groups=4, correction_bias=True), 64, 1100, 8),
    (RouterConfig(kind="sigmoid", correction_bias=True), 48, 16, 1),
    (RouterConfig(kind="sigmoid", renormalize=False, num_groups=4, top_groups=4), 20, 64, 20),
    (RouterConfig(kind="sigmoid", correction_bias=True), 300, 72, 8),
]
"""Experts and hidden sizes that are no multiples of a tile, fewer columns than parts, and so many experts that several
warps choose."""


def make(
    case: tuple[RouterConfig, int, int, int], rng: torch.Generator, device: torch.device, *, whole: bool = False
) -> tuple[Router, Router]:
    """The same weights for the kernels and for torch; whole numbers, with which every sum is exact, if `whole`."""
    config, experts, hidden, top_k = case

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=rng).float() if whole else torch.randn(*shape, generator=rng)

    drawn = draw(experts, hidden) * (1 if whole else hidden**-0.5)
    biases = {"bias": draw(experts) if config.bias else None}
    biases["correction_bias"] = draw(experts) if config.correction_bias else None
    routers = [Router(hidden, experts, top_k, config, device, engine=engine) for engine in ("triton", "torch")]
    for router in routers:
        router.load(drawn, **biases)
    return routers[0], routers[1]


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: f"{case[0].kind}-{case[1]}")
@pytest.mark.parametrize("bf16_weights", [False, True])
def test_the_same_experts_and_weights(
    case: tuple[RouterConfig, int, int, int], bf16_weights: bool, rng: torch.Generator, device: torch.device
) -> None:
    """Wherever no two deciding scores are closer than fp32 sums may blur; poison shows that all is written."""
    config, experts, hidden, top_k = case
    ours, exact = make(case, rng, device)
    if bf16_weights:
        for router in (ours, exact):
            router.weight.data.copy_(router.weight.to(torch.bfloat16))
    x_TH = torch.randn(67, 2 * hidden, generator=rng).to(device, torch.bfloat16)[:, hidden:]
    assert route.supports(x_TH, experts, config)
    idx_TK, weights_TK = ours(x_TH)
    want_idx, want_weights = exact(x_TH)
    assert (idx_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)
    logits_TE = exact.logits(x_TH)
    bias = exact.e_score_correction_bias
    every = torch.stack([margins(logits_TE, config, bias, k) for k in range(1, top_k + 1)]).amin(dim=0)
    clear = every > 2**-17
    assert clear.sum() > 55
    assert torch.equal(idx_TK[clear], want_idx[clear])
    torch.testing.assert_close(weights_TK[clear], want_weights[clear], rtol=2**-17, atol=0)


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: f"{case[0].kind}-{case[1]}")
def test_ties_go_to_the_lowest_id(
    case: tuple[RouterConfig, int, int, int], rng: torch.Generator, device: torch.device
) -> None:
    """Exact sums of whole numbers: many experts tie, zeros of both signs too.

    Multiples of 64, whose exponentials are far apart; of 128 for sigmoids, which are then 0, 1/2 and 1 in any
    arithmetic: torch's of -64 has other last bits in one place of a row than in another.
    """
    ours, exact = make(case, rng, device, whole=True)
    unit = 128 if case[0].kind == "sigmoid" else 64
    x_TH = unit * torch.randint(-1, 2, (9, case[2]), generator=rng).to(device, torch.bfloat16)
    x_TH[3] = 0
    x_TH[4] = -0.0
    idx_TK, weights_TK = ours(x_TH)
    want_idx, want_weights = exact(x_TH)
    assert torch.equal(idx_TK, want_idx)
    torch.testing.assert_close(weights_TK, want_weights, rtol=2**-17, atol=0)


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: f"{case[0].kind}-{case[1]}")
def test_a_token_has_the_same_bits_in_any_company(
    case: tuple[RouterConfig, int, int, int], rng: torch.Generator, device: torch.device
) -> None:
    ours, _ = make(case, rng, device)
    x_TH = torch.randn(66, case[2], generator=rng).to(device, torch.bfloat16)
    idx_TK, weights_TK = ours(x_TH)
    for rows in (slice(0, 1), slice(60, 66)):
        idx, weights = ours(x_TH[rows])
        assert_same_bits(idx, idx_TK[rows])
        assert_same_bits(weights, weights_TK[rows])
    assert all(part.shape == (0, case[3]) for part in ours(x_TH[:0]))


# Several tiles of the largest have several parts on a GPU alone: interpreted, they take half a minute.
@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(5, 64), (5, 1100), (5, 3000), (66, 1100), (130, 64), pytest.param(130, 1100, marks=pytest.mark.gpu)],
)
def test_tiles_and_parts_change_no_bit(
    tokens: int, hidden: int, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of a part of K each, of a split each, and with large tiles.

    One to three parts, and one tile of rows and several; three parts with several tiles add nothing to two.
    """
    ours, _ = make((RouterConfig(kind="sigmoid"), 70, hidden, 4), rng, device)
    x_TH = torch.randn(tokens, hidden, generator=rng).to(device, torch.bfloat16)
    shared_memory_of_hopper = device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in (9, 10)
    found = []
    for few_tiles, many_tiles in ((6, 100), (0, 100), (0, 1)):
        monkeypatch.setattr(route, "FEW_TILES", few_tiles)
        monkeypatch.setattr(route, "MANY_TILES", many_tiles)
        chunk = 64 * math.ceil(hidden / 64 / route.SPLITS)
        tiling = route.choose_tiling(tokens, 70, chunk, 9)
        assert tiling.parts == (math.ceil(chunk / route.PART) if few_tiles else 1)
        assert tiling.tokens == (128 if many_tiles == 1 else 16 if few_tiles and tokens == 5 else 64)
        if tiling.tokens < 128 or shared_memory_of_hopper:
            found.append(ours(x_TH))
    assert len(found) > 1
    for idx_TK, weights_TK in found[1:]:
        assert_same_bits(idx_TK, found[0][0])
        assert_same_bits(weights_TK, found[0][1])


def test_few_tokens_fill_the_gpu_and_many_take_large_tiles() -> None:
    chunk = 7168 // route.SPLITS
    tiling = route.choose_tiling
    assert tiling(1, 256, chunk, 9) == tiling(16, 256, chunk, 9) == (16, 64, 7)
    assert tiling(17, 256, chunk, 9) == tiling(128, 256, chunk, 9) == (64, 64, 7)
    assert tiling(1, 256, chunk, 10) == (64, 64, 7)  # other instructions
    assert tiling(129, 256, chunk, 9) == (64, 64, 1)
    assert tiling(1024, 256, chunk, 9) == (128, 128, 1)
    assert tiling(4096, 128, 256, 9) == (128, 128, 1)
    assert tiling(1 << 16, 64, chunk, 9) == (64, 64, 1)  # half of a large tile would be empty
    assert tiling(1 << 16, 256, chunk, 12) == (64, 64, 1)  # less shared memory


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_ids_stay_in_range_and_apart_whatever_the_tokens(
    poison: float, rng: torch.Generator, device: torch.device
) -> None:
    for case in CONFIGS:
        ours, _ = make(case, rng, device)
        x_TH = torch.randn(5, case[2], generator=rng).to(device, torch.bfloat16)
        clean = ours(x_TH)
        x_TH[2, 7] = poison
        idx_TK, weights_TK = ours(x_TH)
        assert ((idx_TK >= 0) & (idx_TK < case[1])).all()
        assert all(len(set(row)) == case[3] for row in idx_TK.tolist())
        others = [0, 1, 3, 4]
        assert_same_bits(idx_TK[others], clean[0][others])
        assert_same_bits(weights_TK[others], clean[1][others])


def test_an_infinite_bias_masks_an_expert_and_groups_mask_more(device: torch.device) -> None:
    config = RouterConfig(kind="sigmoid", correction_bias=True, num_groups=2, top_groups=1)
    router = Router(16, 4, 2, config, device, engine="triton")
    router.load(torch.zeros(4, 16), correction_bias=torch.tensor([-3.0, -3.0, 9.0, -math.inf]))
    assert router(torch.ones(1, 16, device=device, dtype=torch.bfloat16))[0].tolist() == [[0, 1]]
    config = RouterConfig(kind="sigmoid", correction_bias=True)
    router = Router(16, 4, 2, config, device, engine="triton")
    router.load(torch.zeros(4, 16), correction_bias=torch.tensor([0.0, -math.inf, 0.0, 1.0]))
    assert router(torch.ones(1, 16, device=device, dtype=torch.bfloat16))[0].tolist() == [[3, 0]]


def test_what_the_kernels_do_not_take_goes_the_other_way(rng: torch.Generator, device: torch.device) -> None:
    groups_of_three = RouterConfig(kind="sigmoid", num_groups=4, top_groups=2)
    x_TH = torch.randn(4, 32, generator=rng).to(device)
    for config, experts, x in (
        (groups_of_three, 12, x_TH.to(torch.bfloat16)),
        (RouterConfig(), 8, x_TH),
        (RouterConfig(), 8, torch.randn(32, 4, generator=rng).to(device, torch.bfloat16).T),
    ):
        assert not route.supports(x, experts, config)
        ours, exact = make((config, experts, 32, 2), rng, device)
        assert_same_bits(ours(x)[1], exact(x)[1])
