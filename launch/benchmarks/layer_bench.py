"""What the operations of `bench` over one layer share: inputs, baselines, timing, and records.

Steps use tokens and routing in turn (`Bench.turns`); bytes and operations are means over the turns, of the rank that
has most in each. The operations are in `layer_operations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.config import RunConfig
from moe_runtime.context.memory import reserved_bytes
from moe_runtime.experts import Experts
from moe_runtime.launch.benchmarks import bounds, checks, network
from moe_runtime.launch.benchmarks.layer_report import OURS
from moe_runtime.launch.benchmarks.timing import Step, Timing, copies_to_rotate, measure, times_record
from moe_runtime.launch.benchmarks.torch_layer import TorchLayer
from moe_runtime.launch.benchmarks.trace import TraceFile
from moe_runtime.launch.common import cases, environment
from moe_runtime.layer import MoELayer

TURNS = 5
"""Different inputs that steps use in turn, at least."""


@dataclass(frozen=True)
class Settings:
    """What the command line says of every operation.

    Attributes:
        operations: names of what is timed.
        iterations: timed ones.
        check_tokens: tokens of each rank that the check of the layer compares; None for `cases.default_check_tokens`.
        link_gb_per_s: what floors count with; None for none.
        network_gb_per_s: what floors between hosts count with; None for what the link alone takes.
        trace: where steps of the layer are recorded instead of being timed; None where they are timed.
        with_torch: whether torch's layer is timed beside ours.
        sustained: whether long steps are timed without pauses too.
    """

    operations: Sequence[str]
    iterations: int
    check_tokens: int | None = None
    link_gb_per_s: float | None = None
    network_gb_per_s: float | None = None
    trace: TraceFile | None = None
    with_torch: bool = True
    sustained: bool = True


@dataclass(frozen=True)
class Work:
    """What a step does on the rank that does most; None where it is not counted.

    Attributes:
        moved_bytes: to other ranks, or to and from memory. On several hosts to other ranks of its host.
        flops: operations.
        network_bytes: to other hosts, of a baseline that does not send as we do.
    """

    moved_bytes: float | None = None
    flops: float | None = None
    network_bytes: float | None = None


@dataclass(frozen=True)
class Measured:
    """What a step took.

    Attributes:
        timings: by part; none where a check failed or nothing is timed.
        step_bytes: what torch allocated; None on CPUs, and where nothing is timed.
    """

    timings: dict[str, Timing]
    step_bytes: int | None = None


class Baselines:
    """References and the layer of torch, made once for all layers of a run."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._references: dict[tuple[object, ...], torch.Tensor] = {}
        self._torch_layer: TorchLayer | None = None

    def reference(
        self,
        layer: MoELayer,
        key: tuple[object, ...],
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """`cases.layer_reference`, kept under `key`, which identifies these tokens in the run."""
        if key not in self._references:
            with cases.expert_source(self._run, layer.context.device) as experts:
                self._references[key] = cases.layer_reference(layer, experts, x_TH, topk_idx_TK, topk_weights_TK)
        return self._references[key]

    def torch_layer(self, layer: MoELayer) -> TorchLayer:
        """The layer of torch with this rank's experts as they were before quantization."""
        if self._torch_layer is None:
            assert layer.experts is not None
            config, device = layer.config, layer.context.device
            with cases.expert_source(self._run, device) as experts:
                self._torch_layer = TorchLayer(
                    experts,
                    layer.local_experts,
                    config.hidden_size,
                    config.intermediate_size,
                    layer.experts.activation,
                    device,
                )
        return self._torch_layer


class Bench:
    """One layer at one number of tokens per rank and one routing: its seeded inputs, and the results so far.

    Attributes:
        results: one JSON record per operation and implementation.
    """

    def __init__(
        self,
        layer: MoELayer,
        run: RunConfig,
        routing: str,
        settings: Settings,
        baselines: Baselines,
    ) -> None:
        self.layer = layer
        self.run = run
        self.routing = routing
        self.settings = settings
        self.baselines = baselines
        self.context = layer.context
        self.results: list[dict[str, Any]] = []

    @property
    def checked_tokens(self) -> int:
        """How many tokens of each rank, the first ones, the check of the layer compares."""
        config, limit = self.layer.config, self.settings.check_tokens
        return min(config.max_tokens_per_rank, cases.default_check_tokens(config) if limit is None else limit)

    def _step_inputs(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = self.layer.config.max_tokens_per_rank
        return cases.step_inputs(self.layer, self.routing, self.run.seed, rank, step, count)

    @cached_property
    def inputs(self) -> checks.Inputs:
        """Of all ranks in the first turn: every rank checks what comes to it."""
        ranks = range(self.context.world_size)
        return checks.Inputs(*zip(*(self._step_inputs(rank, 0) for rank in ranks), strict=True))

    @cached_property
    def turns(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """This rank's tokens, ids and weights: `TURNS` at least, and more where the L2 cache would keep the tokens."""
        rank = self.context.rank
        x_TH = self.inputs.x[rank]
        count = max(TURNS, copies_to_rotate(x_TH.device, x_TH.nbytes))
        first = (x_TH, self.inputs.idx[rank], self.inputs.weights[rank])
        return [first, *(self._step_inputs(rank, step) for step in range(1, count))]

    @cached_property
    def ids_of_turns(self) -> list[list[torch.Tensor]]:
        """The ids of all ranks in each turn, on the CPU: `[turn][rank]`, int32 or int64 `[T, K]`. Collective."""
        own = torch.stack([idx_TK for _, idx_TK, _ in self.turns])
        ranks = [own]
        if self.context.group is not None and self.context.world_size > 1:
            ranks = [torch.empty_like(own) for _ in range(self.context.world_size)]
            dist.all_gather(ranks, own, group=self.context.group.group)
        return [list(turn) for turn in zip(*(part.cpu() for part in ranks), strict=True)]

    @cached_property
    def network(self) -> network.Network | None:
        """What goes from host to host; None where the ranks are not on several, and in a trace. Collective."""
        return (
            None
            if self.settings.trace is not None
            else network.of_layer(self.layer, self.settings.network_gb_per_s, self.settings.iterations)
        )

    @property
    def experts(self) -> Experts:
        assert self.layer.experts is not None
        return self.layer.experts

    def turn(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, ids and weights of step `number`."""
        return self.turns[number % len(self.turns)]

    def time(self, step: Step, needed: list[checks.Check], *, capturable: bool, laps: bool = False) -> Measured:
        """Time a step as `timing.measure` does, unless one of the checks failed. Collective."""
        if not all(check.passed for check in needed):
            return Measured({})
        device = self.context.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        settings = self.settings
        timings = measure(
            self.context,
            step,
            iterations=settings.iterations,
            capturable=capturable,
            laps=laps,
            sustained=settings.sustained,
        )
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        return Measured(timings, peak)

    def agree(self, check: checks.Check) -> checks.Check:
        """The check of the rank where it is worst, on every rank."""
        errors = torch.tensor(environment.gather(self.context, check.what, check.error, float), dtype=torch.float64)
        return replace(check, error=float(errors.max()))

    def add(
        self,
        operation: str,
        measured: Measured,
        lap: str,
        work: Work,
        check: checks.Check | None,
        by: str = OURS,
        *,
        weight_bytes: int = 0,
        weight_copies: int = 1,
        phases: dict[str, Any] | None = None,
    ) -> None:
        """Add the record of a result: part `lap` of what was measured, on `operation`, by an implementation."""
        config, timing = self.layer.config, measured.timings.get(lap)
        median_us = timing.median_us if timing else None
        checked = self.checked_tokens if operation == "layer" else config.max_tokens_per_rank
        link = self.settings.link_gb_per_s if operation.startswith(("dispatch", "combine")) else None
        between: dict[str, Any] = network.NO_NETWORK
        if self.network is not None and by == OURS:
            between = self.network.record(operation)
        elif self.network is not None and by.startswith("torch"):
            between = self.network.baseline_record(work.network_bytes)
        # What crosses the network and what crosses the links of a host may overlap.
        floors = [] if link is None else [bounds.floor_us(work.moved_bytes or 0, link)]
        if operation.startswith(("dispatch", "combine")) and between["network_floor_us"] is not None:
            floors.append(between["network_floor_us"])

        def per_second(amount: float | None, unit: float) -> float | None:
            return None if amount is None or not median_us else amount / unit / (median_us * 1e-6)

        self.results.append(
            {
                "operation": operation,
                "implementation": by,
                "tokens_per_rank": config.max_tokens_per_rank,
                "token_format": config.token_format,
                "weight_format": config.weight_format,
                "combine_format": config.combine_format,
                "mode": config.mode_on(self.context.world_size),
                "routing": self.routing,
                "inputs_in_turn": len(self.turns),
                "weight_copies": weight_copies,
                **times_record(timing),
                "moved_bytes": work.moved_bytes,
                "work_flop": work.flops,
                "rate_gb_per_s": per_second(work.moved_bytes, 1e9),
                "rate_tflop_per_s": per_second(work.flops, 1e12),
                "floor_us": max(floors, default=None),
                **between,
                "check": None if check is None else asdict(check) | {"checked_tokens": checked, "passed": check.passed},
                "memory": self._memory(measured.step_bytes, weight_bytes, ours=by.startswith(OURS)),
                "phases": phases,
            }
        )

    def _memory(self, step_bytes: int | None, weight_bytes: int, *, ours: bool) -> dict[str, int] | None:
        """Of the rank that needs most: for a step, for weights, in the symmetric heap, and all together."""
        if step_bytes is None:
            return None
        hosts = 1 if self.context.hosts is None else self.context.hosts.num_hosts
        reserved = reserved_bytes(self.layer.config, self.context.world_size, num_hosts=hosts)
        heap_bytes = sum(reserved.values()) if ours else 0
        mine = {"step_bytes": step_bytes, "weight_bytes": weight_bytes, "heap_bytes": heap_bytes}
        mine["peak_bytes"] = sum(mine.values())
        ranks = environment.gather(self.context, "memory", mine, dict[str, int])
        return max(ranks, key=lambda other: other["peak_bytes"])
