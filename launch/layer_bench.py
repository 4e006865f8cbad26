"""The operations of `launch.bench` over one layer: each is checked, then timed, beside what torch takes for it.

Steps take tokens and routing in turn (`Bench.turns`); bytes and operations are means over the turns, of the rank that
has most in each.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.config import RunConfig
from moe_runtime.experts import Experts
from moe_runtime.grouped import GroupedRows
from moe_runtime.kernels.grouped_gemm import gemm_bytes, gemm_flops, grouped_gemm, grouped_gemm_swiglu
from moe_runtime.launch import bounds, cases, checks, environment, torch_layer
from moe_runtime.launch.step_memory import StepMemory
from moe_runtime.launch.timing import TOTAL, Lap, Step, Timing, copies_to_rotate, measure
from moe_runtime.launch.trace import TraceFile, record
from moe_runtime.launch.yardsticks import Yardsticks
from moe_runtime.layer import MoELayer
from moe_runtime.memory import reserved_bytes
from moe_runtime.prepared import PreparedWeights
from moe_runtime.reference import relative_error
from moe_runtime.weights import ExpertWeights

OURS = "moe_runtime"

TURNS = 5
"""Different inputs that steps take in turn, at least."""


@dataclass(frozen=True)
class Settings:
    """What the command line says of every operation.

    Attributes:
        operations: names of what is timed.
        iterations: timed ones.
        check_tokens: tokens of each rank that the layer's check takes; None for `cases.default_check_tokens`.
        link_gb_per_s: what floors count with; None for none.
        trace: where steps of the layer are recorded; None for nowhere.
    """

    operations: Sequence[str]
    iterations: int
    check_tokens: int | None = None
    link_gb_per_s: float | None = None
    trace: TraceFile | None = None


@dataclass(frozen=True)
class Work:
    """What a step does on the rank that does most; None where it is not counted."""

    moved_bytes: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Measured:
    """Timings by part, none where a check failed, and the bytes that torch allocated for a step (None on CPUs)."""

    timings: dict[str, Timing]
    step_bytes: int | None = None


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
        yardsticks: Yardsticks,
    ) -> None:
        self.layer = layer
        self.run = run
        self.routing = routing
        self.settings = settings
        self.yardsticks = yardsticks
        self.context = layer.context
        self.results: list[dict[str, Any]] = []

    def work(self) -> list[dict[str, Any]]:
        """Do what the settings ask for; the results. Collective."""
        wanted = self.settings.operations
        if {"dispatch", "combine"} & set(wanted):
            self.exchange()
        if "gemm" in wanted:
            self.gemm()
        if "layer" in wanted:
            self.whole_layer()
        return self.results

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
        """This rank's tokens, ids and weights, as many as keep tokens out of the cache, and `TURNS` at least."""
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

    @property
    def experts(self) -> Experts:
        assert self.layer.experts is not None
        return self.layer.experts

    def exchange(self) -> None:
        """Dispatch and combine, each alone and both together, beside an all-to-all of the same bytes.

        Every dispatch is combined: the next but one waits for that.
        """
        dispatcher, geometry = self.layer.dispatcher, self.layer.dispatcher.geometry
        wanted = [name for name in ("dispatch", "combine") if name in self.settings.operations]
        arrived = dispatcher.dispatch(*self.turns[0])
        rows_RH = checks.combine_input(arrived, self.inputs)
        found = {"dispatch": checks.check_dispatch(arrived, self.inputs)}
        y_TH = dispatcher.combine(rows_RH, arrived.handle)
        found["combine"] = checks.check_combine(y_TH, self.inputs, geometry)
        passed = {name: self._agree(found[name]) for name in wanted}
        # Other turns have rows where the first has none.
        rows_RH.nan_to_num_(0.0)
        sent = [checks.sent_tokens(idx, geometry).fill_diagonal_(0) for idx in self.ids_of_turns]
        traffic = {
            "dispatch": [tokens * geometry.record.record_bytes for tokens in sent],
            "combine": [tokens.T * geometry.partial_bytes for tokens in sent],
        }
        work = {name: Work(statistics.mean(map(bounds.busiest_bytes, traffic[name]))) for name in traffic}

        def step(number: int, lap: Lap) -> None:
            handle = dispatcher.dispatch(*self._turn(number)).handle
            lap("dispatch")
            dispatcher.combine(rows_RH, handle)
            lap("combine")

        graph_safe = self.context.heap.graph_safe
        measured = self._measure(step, list(passed.values()), capturable=graph_safe, laps=True)
        for name in wanted:
            self._add(name, measured, name, work[name], passed[name])
            self._add_all_to_all(name, traffic[name], work[name])
        if len(wanted) == 2:
            both = self._measure(step, list(passed.values()), capturable=graph_safe)
            total = Work(moved_bytes=sum(part.moved_bytes or 0 for part in work.values()))
            self._add("dispatch+combine", both, TOTAL, total, None)

    def gemm(self) -> None:
        """Both grouped GEMMs on the rows that arrive in the first turn, beside torch's in bf16 where there is one."""
        experts, config = self.experts, self.layer.config
        inner, hidden, engine = config.intermediate_size, config.hidden_size, self.context.gemm_engine
        arrived = self.layer.dispatcher.dispatch(*self.turns[0])
        fmt = experts.intermediate_format
        assert fmt is not None and not isinstance(fmt, str)
        gate_up, down = (_rotated(w, self.context.device) for w in (experts.gate_up, experts.down))

        def project(number: int) -> GroupedRows:
            w, gsf = gate_up[number % len(gate_up)], experts.intermediate_gsf
            return grouped_gemm_swiglu(arrived, w, experts.activation, out_format=fmt, out_gsf=gsf, engine=engine)

        middle = project(0)
        out_RH = torch.full((arrived.capacity, hidden), torch.nan, dtype=torch.bfloat16, device=self.context.device)
        grouped_gemm(middle, down[0], out=out_RH, engine=engine)
        passed = (
            self._agree(checks.check_gate_up(middle, arrived, experts.gate_up, experts.activation)),
            self._agree(checks.check_down(out_RH, middle, experts.down)),
        )
        counts = arrived.group_offsets.diff().tolist()
        steps: tuple[Step, ...] = (
            lambda number, lap: _discard(project(number)),
            lambda number, lap: _discard(grouped_gemm(middle, down[number % len(down)], out=out_RH, engine=engine)),
        )
        sizes = ((2 * inner, hidden, arrived, checks.format_bytes(fmt, inner)), (hidden, inner, middle, 2 * hidden))
        weights = (experts.gate_up, experts.down)
        for index, (n, k, rows, row_bytes) in enumerate(sizes):
            name = ("gemm gate+up", "gemm down")[index]
            moved = gemm_bytes(
                sum(counts),
                n,
                k,
                a_format=rows.format,
                w_format=weights[index].format,
                active_experts=sum(count > 0 for count in counts),
                out_bytes_per_row=row_bytes,
            )
            work = self._most(Work(moved_bytes=moved, flops=gemm_flops(sum(counts), n, k)))
            measured = self._measure(steps[index], [passed[index]], capturable=True)
            self._add(name, measured, TOTAL, work, passed[index], weight_bytes=weights[index].num_bytes)
            if self.context.device.type == "cuda":
                self._add_grouped_mm(name, arrived.group_offsets, n, k, work)
        self.layer.dispatcher.combine(out_RH, arrived.handle)

    def whole_layer(self) -> None:
        """The layer, its router too where that chooses the experts, beside one of torch whose routing is known."""
        layer, config = self.layer, self.layer.config
        limit = self.settings.check_tokens
        part = slice(0, cases.default_check_tokens(config) if limit is None else limit)
        by_itself = self.routing == "router"

        def forward(number: int) -> torch.Tensor:
            x_TH, idx_TK, weights_TK = self._turn(number)
            return layer(x_TH) if by_itself else layer(x_TH, topk_idx=idx_TK, topk_weights=weights_TK)

        y_TH = forward(0)[part]
        key = (self.routing, config.max_tokens_per_rank, part.stop)
        reference_TH = self.yardsticks.reference(layer, key, *(tensor[part] for tensor in self.turns[0]))
        error, _ = relative_error(y_TH, reference_TH)
        check = self._agree(checks.Check("layer: relative Frobenius error", error, cases.layer_bound(config)))
        starts = layer.dispatcher.geometry.starts
        rows = statistics.mean(max(_rows_of_ranks(idx, starts)) for idx in self.ids_of_turns)
        work = Work(flops=gemm_flops(1, 3 * config.intermediate_size, config.hidden_size) * rows)
        measured = self._measure(
            lambda number, lap: _discard(forward(number)), [check], capturable=self.context.heap.graph_safe
        )
        weight_bytes = self.experts.gate_up.num_bytes + self.experts.down.num_bytes
        phases = None
        if self.settings.trace is not None and check.passed:
            title = f"{config.token_format} > {config.combine_format}, {config.max_tokens_per_rank} tokens"
            phases = record(self.context, forward, self.settings.trace, f"layer {title}, {self.routing}")
        self._add("layer", measured, TOTAL, work, check, weight_bytes=weight_bytes, phases=phases)
        self._add_torch_layer(part, reference_TH, work)

    def _add_torch_layer(self, part: slice, reference_TH: torch.Tensor, work: Work) -> None:
        beside, context = self.yardsticks.torch_layer(self.layer), self.context
        starts = self.layer.dispatcher.geometry.starts
        routes = [torch_layer.Route.of(idx, context.rank, starts, context.device) for idx in self.ids_of_turns]

        def forward(number: int) -> torch.Tensor:
            x_TH, _, weights_TK = self._turn(number)
            return beside(context, x_TH, weights_TK, routes[number % len(routes)])

        error, _ = relative_error(forward(0)[part], reference_TH)
        bound = torch_layer.error_bound()
        check = self._agree(checks.Check("torch's layer: relative Frobenius error", error, bound))
        measured = self._measure(lambda number, lap: _discard(forward(number)), [check], capturable=True)
        self._add("layer", measured, TOTAL, work, check, torch_layer.NAME, weight_bytes=beside.weight_bytes)

    def _turn(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.turns[number % len(self.turns)]

    def _measure(self, step: Step, needed: list[checks.Check], *, capturable: bool, laps: bool = False) -> Measured:
        if not all(check.passed for check in needed):
            return Measured({})
        with StepMemory(self.context.device) as memory:
            iterations = self.settings.iterations
            timings = measure(self.context, step, iterations=iterations, capturable=capturable, laps=laps)
        return Measured(timings, memory.num_bytes)

    def _agree(self, check: checks.Check) -> checks.Check:
        """The check of the rank where it is worst, on every rank."""
        errors = torch.tensor(environment.gather(self.context, check.what, check.error), dtype=torch.float64)
        return replace(check, error=float(errors.max()))

    def _most(self, work: Work) -> Work:
        """That of the rank that has most."""
        ranks = environment.gather(self.context, "work", work)
        return max(ranks, key=lambda other: other.flops or 0)

    def _add_all_to_all(self, name: str, traffic_bytes: list[torch.Tensor], work: Work) -> None:
        """Time torch's all-to-all of the same bytes between the same ranks, without what it would still need."""
        if self.context.group is None or self.context.world_size == 1:
            return
        group, rank = self.context.group.group, self.context.rank
        sizes = [(matrix[rank].tolist(), matrix[:, rank].tolist()) for matrix in traffic_bytes]
        source, target = (
            torch.zeros(max(sum(pair[way]) for pair in sizes), dtype=torch.uint8, device=self.context.device)
            for way in (0, 1)
        )

        def step(number: int, lap: Lap) -> None:
            sent, came = sizes[number % len(sizes)]
            dist.all_to_all_single(target[: sum(came)], source[: sum(sent)], came, sent, group=group)

        measured = self._measure(step, [], capturable=True)
        self._add(name, measured, TOTAL, work, None, "torch all_to_all_single")

    def _add_grouped_mm(self, name: str, group_offsets: torch.Tensor, n: int, k: int, work: Work) -> None:
        """Time torch's grouped GEMM of the same rows and weights in bf16, neither activation nor quantization."""
        function: Callable[..., torch.Tensor] = torch._grouped_mm
        total, experts, device = int(group_offsets[-1]), self.experts.gate_up.num_experts, self.context.device
        a_RK = torch.randn(total, k, dtype=torch.bfloat16, device=device)
        copies = copies_to_rotate(device, 2 * experts * n * k)
        w_ENK = [torch.randn(experts, n, k, dtype=torch.bfloat16, device=device) for _ in range(copies)]
        ends = group_offsets[1:].contiguous()

        def step(number: int, lap: Lap) -> None:
            if total:
                function(a_RK, w_ENK[number % copies].transpose(1, 2), offs=ends)

        measured = self._measure(step, [], capturable=True)
        self._add(name, measured, TOTAL, replace(work, moved_bytes=None), None, "torch grouped_mm bf16")

    def _add(
        self,
        operation: str,
        measured: Measured,
        lap: str,
        work: Work,
        check: checks.Check | None,
        by: str = OURS,
        *,
        weight_bytes: int = 0,
        phases: dict[str, Any] | None = None,
    ) -> None:
        config, timing = self.layer.config, measured.timings.get(lap)
        median_us = timing.median_us if timing else None
        link = self.settings.link_gb_per_s if operation.startswith(("dispatch", "combine")) else None

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
                "mode": config.resolved_mode,
                "routing": self.routing,
                "inputs_in_turn": len(self.turns),
                "median_us": median_us,
                "smallest_us": min(timing.iterations_us) if timing else None,
                "largest_us": max(timing.iterations_us) if timing else None,
                "iterations": len(timing.iterations_us) if timing else 0,
                "steps_per_iteration": timing.steps_per_iteration if timing else 0,
                "method": timing.method if timing else None,
                "moved_bytes": work.moved_bytes,
                "work_flop": work.flops,
                "rate_gb_per_s": per_second(work.moved_bytes, 1e9),
                "rate_tflop_per_s": per_second(work.flops, 1e12),
                "floor_us": None if link is None else bounds.floor_us(work.moved_bytes or 0, link),
                "check": None if check is None else asdict(check) | {"passed": check.passed},
                "memory": self._memory(measured.step_bytes, weight_bytes, ours=by == OURS),
                "phases": phases,
            }
        )

    def _memory(self, step_bytes: int | None, weight_bytes: int, *, ours: bool) -> dict[str, int] | None:
        """Of the rank that needs most: for a step, for weights, in the symmetric heap, and all together."""
        if step_bytes is None:
            return None
        heap_bytes = sum(reserved_bytes(self.layer.config, self.context.world_size).values()) if ours else 0
        mine = {"step_bytes": step_bytes, "weight_bytes": weight_bytes, "heap_bytes": heap_bytes}
        mine["peak_bytes"] = sum(mine.values())
        ranks: list[dict[str, int]] = environment.gather(self.context, "memory", mine)
        return max(ranks, key=lambda other: other["peak_bytes"])


def _rows_of_ranks(idx: Sequence[torch.Tensor], starts: Sequence[int]) -> list[int]:
    """(token, expert) rows that come to each rank."""
    ids = torch.cat(list(idx))
    return [int(((ids >= first) & (ids < end)).sum()) for first, end in pairwise(starts)]


def _discard(result: object) -> None:
    """A step gives nothing back."""


def _rotated(w: ExpertWeights | PreparedWeights, device: torch.device) -> list[ExpertWeights | PreparedWeights]:
    """`w`, and copies of it where it would stay in the cache."""
    return [w, *(w.clone() for _ in range(copies_to_rotate(device, w.num_bytes) - 1))]
