"""Greedy tokens of twelve families over two ranks, beside transformers' own experts in float32.

The oracle is the model with its eager experts in float32, of the same bf16 weights. What bf16 may do to a logit is
measured: the largest difference between the oracle and the same eager model in bf16, over all logits that both made of
equal tokens with equal routes. Ours, which rounds in other places, may be off by `SLACK` times as much. So a token must
be the oracle's wherever the oracle's two best logits are further apart than twice that. A row is followed until its
tokens differ where they may, or until a router in bf16 chooses other experts, from where on any logit may be another.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moe_runtime.config import ParallelConfig
from moe_runtime.integrations.transformers import apply_expert_parallel
from tests.support import families_table
from tests.support.parallel_models import generate

pytestmark = pytest.mark.cpu_only

FAMILIES = [
    *("deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "minimax_m2"),
    *("mixtral", "olmoe", "qwen3_moe", "qwen3_next"),
]
ROWS, PROMPT, NEW = 6, 7, 8
SLACK = 2.0
LEAST_COMPARED, LEAST_DECIDED = 8, 12
"""Tokens of a rank that are compared, and that the bound has to decide; prompts that leave fewer are drawn again."""
WAIT_S = 60.0


@dataclass(frozen=True)
class Run:
    """What greedy search made of a batch.

    Attributes:
        tokens: `[ROWS, NEW]`.
        logits: `[ROWS, NEW, V]`, fp32.
        routes: the sorted experts of each token in each layer, by step `[ROWS, tokens of the step, layers * K]`.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    routes: list[torch.Tensor]


@contextmanager
def recorded_routes(model: Any) -> Iterator[list[torch.Tensor]]:
    """Inside, each call of experts adds the sorted ids of each token, `[ROWS, T, K]`."""
    found: list[torch.Tensor] = []

    def keep(module: Any, args: Any, named: Any) -> None:
        _, topk_idx, _ = (*args, *named.values())
        found.append(topk_idx.reshape(ROWS, -1, topk_idx.shape[-1]).sort(dim=-1).values)

    hooks = [
        module.register_forward_pre_hook(keep, with_kwargs=True) for module in families_table.experts_of(model).values()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor) -> Run:
    """`NEW` tokens for each row."""
    layers = len(families_table.experts_of(model))
    with recorded_routes(model) as calls:
        tokens, logits = generate(model, ids, NEW, None)
    assert len(calls) == NEW * layers
    routes = [torch.cat(calls[step * layers : (step + 1) * layers], dim=-1) for step in range(NEW)]
    return Run(tokens, torch.stack(logits, dim=1).float(), routes)


def greedy_of_rank(rank: int, world: int, family: str, seed: int) -> tuple[Run, Run, Run]:
    """The oracle, eager in bf16, and ours, of prompts of this rank."""
    torch.set_num_threads(1)  # models this small only wait for threads
    model = families_table.tiny_model(family, seed)
    model.set_experts_implementation("eager")
    ids = torch.randint(
        3, families_table.VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(seed + rank)
    )
    oracle, eager = greedy(copy.deepcopy(model).float(), ids), greedy(model, ids)
    limits = ParallelConfig(timeout_s=WAIT_S, startup_timeout_s=WAIT_S)
    with apply_expert_parallel(model, max_tokens_per_rank=ROWS * PROMPT, parallel=limits):
        return oracle, eager, greedy(model, ids)


def comparable(run: Run, oracle: Run, row: int) -> Iterator[int]:
    """The steps whose logits come from equal tokens with equal routes."""
    for step in range(NEW):
        if not torch.equal(run.routes[step][row], oracle.routes[step][row]):
            return
        yield step
        if run.tokens[row, step] != oracle.tokens[row, step]:
            return


def largest_error(run: Run, oracle: Run, steps: list[tuple[int, int]]) -> float:
    """Over all logits of these rows and steps."""
    return max(float((run.logits[at] - oracle.logits[at]).abs().max()) for at in steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_original_wherever_it_is_sure(family: str, get_pool: Any, seed: int) -> None:
    for number in itertools.count(seed):
        results = get_pool(2).run(greedy_of_rank, family, number, timeout=120.0)
        decided = [check(*result) for result in results]
        print(f"{family}: {decided} of {ROWS * NEW} tokens of each rank decided")
        if min(decided) >= LEAST_DECIDED:
            break
        assert number < seed + 11, "hardly any token was decided"


def check(oracle: Run, eager: Run, ours: Run) -> int:
    """How many tokens the bound decided, all of which must be the oracle's; 0 where too few can be compared."""
    of_eager, of_ours = (
        {(row, step) for row in range(ROWS) for step in comparable(run, oracle, row)} for run in (eager, ours)
    )
    steps = sorted(of_eager & of_ours)
    if len(steps) < LEAST_COMPARED:
        return 0
    bound = SLACK * largest_error(eager, oracle, steps)
    error = largest_error(ours, oracle, steps)
    print(f"bound {bound:.2e}, ours {error:.2e}")
    assert 0 < error <= bound
    decided = 0
    for row in range(ROWS):
        for step in comparable(ours, oracle, row):
            best = oracle.logits[row, step].topk(2).values
            if best[0] - best[1] > 2 * bound:
                assert ours.tokens[row, step] == oracle.tokens[row, step]
                decided += 1
    return decided
