"""What every peer gets: inputs and weights by seed, exact outputs, a clock; and what a peer gives: ways to do a step.

Shape letters: `T` tokens of a rank, `H` hidden size, `I` intermediate size, `K` experts of a token, `E` experts of this
rank, `R` rows, one for each (token, expert) pair of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import ActivationConfig, RunConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import activation_of
from moe_runtime.launch.benchmarks.timing import Timing, copies_to_rotate, measure_steps
from moe_runtime.launch.common import cases, draws, environment
from moe_runtime.reference import relative_error

TURNS = 5
"""Different inputs that steps use in turn, at least. Weights are not copied: each turn chooses other experts, and those
of a layer are many times as large as the L2 cache."""
ROUTING = "uniform"
SLACK = 1.5
"""A peer's error may be so many times our bound for the same formats: what it rounds on the way is its own affair."""


class Turn(NamedTuple):
    """One step's inputs of a rank: bf16 `[T, H]`, int32 `[T, K]`, fp32 `[T, K]`."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor


class Rows(NamedTuple):
    """The rows of this rank's experts in one step: bf16 `[R, H]` by expert, and how many each expert has."""

    x: torch.Tensor
    sizes: list[int]


@dataclass(frozen=True)
class Way:
    """One way to do a step.

    Attributes:
        operation: `layer`, `low latency`, `normal dispatch`, `normal combine` or `experts`.
        variant: what else tells it from others of the same peer.
        step: does step number `n`, whose inputs are those of turn `n` modulo their count; waits for nothing.
        error: relative L2 error of this rank's result of turn 0 against float64.
        bound: of that error; a result beyond it is wrong and is not timed.
        capturable: whether a CUDA graph may capture the step.
        note: what a reader of the time must know.
    """

    operation: str
    variant: str
    step: Callable[[int], object]
    error: float
    bound: float
    capturable: bool = True
    note: str = ""


Point = Callable[[int], Iterable[Way]]
"""The ways of a peer to do a step of `T` tokens a rank; one is timed before the next is asked for."""


@dataclass(eq=False)
class Case:
    """A layer of a config, on one rank.

    Attributes:
        run: its config.
        context: of this rank.
        tokens: every `T` that will be asked for.
        steps: timed iterations.
        check_tokens: tokens (or rows) of each rank that are compared with float64.
        formats: names of our formats to time (`ours.FORMATS`).
    """

    run: RunConfig
    context: ExpertParallelContext
    tokens: list[int]
    steps: int
    check_tokens: int
    formats: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.run.layer.num_experts % self.world:
            raise ValueError(
                f"num_experts: expected a multiple of {self.world} ranks, got {self.run.layer.num_experts}"
            )
        self.activation = activation_of(self.run.layer.activation)

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world(self) -> int:
        return self.context.world_size

    @property
    def group(self) -> dist.ProcessGroup:
        """Raises `ValueError` where torchrun has started no ranks."""
        group = self.context.group
        if group is None or not isinstance(group.group, dist.ProcessGroup):
            raise ValueError("expected ranks that torchrun has started")
        return group.group

    @property
    def starts(self) -> list[int]:
        """The first expert of each rank, and the end of the last."""
        experts = self.run.layer.num_experts
        return [rank * experts // self.world for rank in range(self.world + 1)]

    @property
    def local(self) -> range:
        """Ids of this rank's experts."""
        return range(self.starts[self.rank], self.starts[self.rank + 1])

    def check_plain(self) -> None:
        """Raise `ValueError` unless experts are plain SwiGLU, gate above up, without biases: all that peers compute.

        A limit that inputs of variance 1 do not reach changes nothing.
        """
        plain = self.run.layer.activation.replace(limit=None) == ActivationConfig()
        if not plain or self.run.layer.expert_bias:
            raise ValueError("layer: expected plain SwiGLU without biases")

    def expert(self, number: int) -> ExpertTensors:
        """An expert of the layer in bf16: gate and up `[2I, H]`, down `[H, I]`."""
        return random_expert(self.run.layer, self.run.seed, number, self.device)

    def weight(self, number: int, place: int) -> torch.Tensor:
        """Gate and up (`place` 0), or down (1), of an expert, in bf16."""
        weight = self.expert(number)[place]
        assert weight is not None
        return dense(weight)

    def local_weights(self, place: int) -> torch.Tensor:
        """Of all of this rank's experts: `[E, 2I, H]` or `[E, H, I]`."""
        return torch.stack([self.weight(number, place) for number in self.local])

    def turn(self, tokens: int, number: int, rank: int | None = None) -> Turn:
        """Inputs of this rank, or of another."""
        layer, rank = self.run.layer, self.rank if rank is None else rank
        x_TH = draws.tokens(self.run.seed, rank, number, tokens, layer.hidden_size, self.device)
        sizes = tokens, layer.num_experts, layer.top_k
        return Turn(x_TH, *draws.routing(ROUTING, self.run.seed, rank, number, *sizes, self.device))

    @lru_cache(maxsize=1)  # noqa: B019 a process has one case
    def turns(self, tokens: int) -> list[Turn]:
        """This rank's: `TURNS` at least, and more where the L2 cache would keep the tokens."""
        first = self.turn(tokens, 0)
        count = max(TURNS, copies_to_rotate(self.device, first.x.nbytes))
        return [first, *(self.turn(tokens, number) for number in range(1, count))]

    def rows(self, tokens: int) -> Rows:
        """Of turn 0, from all ranks."""
        parts: dict[int, list[torch.Tensor]] = {number: [] for number in self.local}
        for rank in range(self.world):
            x_TH, idx_TK, _ = self.turn(tokens, 0, rank)
            for number in self.local:
                parts[number].append(x_TH[(idx_TK == number).any(dim=1)])
        rows = [torch.cat(of_ranks) for of_ranks in parts.values()]
        return Rows(torch.cat(rows), [part.shape[0] for part in rows])

    def meet(self) -> None:
        """Wait until every rank has done what it queued. Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        environment.barrier(self.context, "meet")

    # Errors

    def layer_error(self, tokens: int, y_TH: torch.Tensor) -> float:
        """Of the layer's output of turn 0, over its first tokens."""
        part = slice(0, min(tokens, self.check_tokens))
        return relative_error(y_TH[part], self._layer_reference(tokens, part.stop))[0]

    @lru_cache(maxsize=1)  # noqa: B019 as above
    def _layer_reference(self, tokens: int, count: int) -> torch.Tensor:
        x_TH, idx_TK, weights_TK = (tensor[:count] for tensor in self.turns(tokens)[0])
        return cases.routed_reference(self.expert, x_TH, idx_TK, weights_TK, self.activation)

    def experts_error(self, rows: Rows, out_RH: torch.Tensor) -> float:
        """Of the experts' outputs, over a few rows from the first to the last."""
        total = rows.x.shape[0]
        sample = torch.linspace(0, total - 1, min(total, self.check_tokens)).long().tolist()
        ends = torch.tensor(rows.sizes).cumsum(0)
        idx_R1 = torch.searchsorted(ends, torch.tensor(sample), right=True)[:, None].to(self.device) + self.local.start
        ones_R1 = torch.ones(idx_R1.shape, device=self.device)
        wanted_RH = cases.routed_reference(self.expert, rows.x[sample], idx_R1, ones_R1, self.activation)
        return relative_error(out_RH[sample], wanted_RH)[0]

    def bound(self, token_format: str, weight_format: str | None = None) -> float:
        """Of the error of a peer in these formats."""
        config = cases.with_token_format(self.run.layer, token_format, weight_format)
        return SLACK * cases.layer_bound(config)

    def worst(self, error: float) -> float:
        """Of all ranks; a NaN is infinite. Collective."""
        mine = error if error == error else float("inf")
        return max(environment.gather(self.context, "error", mine, float))

    # Times

    def time(self, way: Way) -> tuple[Timing, str]:
        """In a graph where that works on all ranks, else eagerly; and why it was not captured. Collective."""
        why = ""
        for capturable in [True, False] if way.capturable else [False]:
            problem, found = "", None
            try:
                found = measure_steps(
                    self.context, way.step, iterations=self.steps, capturable=capturable, sustained=False
                )
            except Exception as error:
                if not capturable:
                    raise
                problem = environment.one_line(error)[:200]
            problems = environment.gather(self.context, "captured", problem, str)
            if found is not None and not any(problems):
                return found, why
            why = "not captured: " + next(filter(None, problems))
        raise AssertionError


def in_turn(turns: list[Turn], call: Callable[[Turn], object]) -> Callable[[int], object]:
    """A step that calls with the turn of its number."""
    return lambda number: call(turns[number % len(turns)])
