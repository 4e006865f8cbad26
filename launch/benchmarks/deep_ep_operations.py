"""The operations of `bench` that call `moe_runtime.deep_ep.Buffer`: each is checked, then timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.deep_ep import Buffer, ElasticBuffer, topk_idx_t
from moe_runtime.deep_ep.sizes import normal_bytes
from moe_runtime.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK
from moe_runtime.launch.benchmarks import bounds, checks
from moe_runtime.launch.benchmarks.layer_bench import Bench, Work
from moe_runtime.launch.benchmarks.layer_report import LOW_LATENCY, NORMAL
from moe_runtime.launch.benchmarks.timing import TOTAL, Lap, Step
from moe_runtime.reference import relative_error

NUM_SMS = (24, 64, None)
"""Most SMs that normal mode takes: as many as DeepEP's own test sets, half of a GPU, and all."""

FEW_TOKENS = 256
"""Of a rank, up to which low latency is timed where normal mode is named, too."""

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _group(bench: Bench, operation: str) -> dist.ProcessGroup:
    group = bench.context.group
    if group is None or not isinstance(group.group, dist.ProcessGroup):
        raise ValueError(f"{operation}: expected ranks that torchrun has started")
    return group.group


def low_latency(bench: Bench) -> None:
    """Dispatch and combine by the low-latency calls of `moe_runtime.deep_ep`: FP8 rows, or bf16 where the layer's are.

    Compared with the layer's own in the same run, if that is named too. The check sums what came, weighted.
    """
    context, config = bench.context, bench.layer.config
    count, hidden, experts = config.max_tokens_per_rank, config.hidden_size, config.num_experts
    num_bytes = Buffer.get_low_latency_rdma_size_hint(count, hidden, context.world_size, experts)
    buffer = Buffer(_group(bench, "low_latency"), 0, num_bytes, low_latency_mode=True, explicitly_destroy=True)
    use_fp8 = config.token_format != "bf16"
    turns = [(x_TH, idx_TK.to(topk_idx_t), weights_TK) for x_TH, idx_TK, weights_TK in bench.turns]
    x_TH, idx_TK, weights_TK = turns[0]
    got, _, handle, _, _ = buffer.low_latency_dispatch(x_TH, idx_TK, count, experts, use_fp8=use_fp8)
    # Of one expert at a time: with many tokens all of them in fp32 leave no room.
    rows = torch.empty(
        experts // context.world_size, context.world_size * count, hidden, dtype=x_TH.dtype, device=x_TH.device
    )
    for expert, of_expert in enumerate(rows):
        came = got[expert] if isinstance(got, torch.Tensor) else per_token_cast_back(got[0][expert], got[1][expert])
        torch.nan_to_num(came, out=of_expert)
    del got
    y_TH, _, _ = buffer.low_latency_combine(rows, idx_TK, weights_TK, handle)
    exact_TH = x_TH.double() * weights_TK.double().masked_fill(idx_TK < 0, 0.0).sum(dim=1, keepdim=True)
    error, _ = relative_error(y_TH, exact_TH)
    # A number of e4m3 is within 2^-4 of what it stands for, one of bf16 within 2^-9; two sums are rounded to bf16.
    bound = (2**-4 if use_fp8 else 2**-9) + 2**-8
    check = bench.agree(checks.Check("low latency: relative Frobenius error", error, bound))
    fmt = "fp8" if use_fp8 else "bf16"

    def step(number: int, lap: Lap) -> None:
        x_TH, idx_TK, weights_TK = turns[number % len(turns)]
        _, _, handle, _, _ = buffer.low_latency_dispatch(x_TH, idx_TK, count, experts, use_fp8=use_fp8)
        lap("dispatch")
        buffer.low_latency_combine(rows, idx_TK, weights_TK, handle)
        lap("combine")

    graph_safe = context.graph_safe
    parts = bench.time(step, [check], capturable=graph_safe, laps=True)
    by = f"{LOW_LATENCY}, {fmt}"
    for name in ("dispatch", "combine"):
        bench.add(name, parts, name, Work(), check, by)
    bench.add("dispatch+combine", bench.time(step, [check], capturable=graph_safe), TOTAL, Work(), check, by)
    buffer.destroy()


def normal(bench: Bench) -> None:
    """Dispatch and combine by the calls of normal mode, of bf16 tokens and of FP8 ones with scales.

    Each buffer's dispatch is timed with expert ids and weights, where the host waits for the counts, where it does not
    (`num_worst_tokens`, `do_cpu_sync=False`), and with the handle of an earlier one ("cached"), which takes the tokens
    alone; that of `Buffer` also together with `get_dispatch_layout`. Combine is of bf16 rows. Bytes are those of tokens
    and scales that leave a rank or come to it, whichever are more. Checks compare every bit.
    """
    context, config = bench.context, bench.layer.config
    hidden, graph_safe, group = config.hidden_size, context.graph_safe, _group(bench, "normal")
    most = config.max_tokens_per_rank
    buffer = Buffer(group, normal_bytes(hidden, context.world_size, most), explicitly_destroy=True)
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=most, hidden=hidden, explicitly_destroy=True)
    sent = [checks.sent_tokens(idx, bench.layer.dispatcher.geometry) for idx in bench.ids_of_turns]
    tokens_moved = statistics.mean(map(bounds.busiest_bytes, sent))
    for num_sms in NUM_SMS:
        limit = "all SMs" if num_sms is None else f"{num_sms} SMs"
        for fmt in (BF16, FP8_BLOCK):
            work = Work(tokens_moved * (fmt.quant_bytes(hidden) + fmt.scale_bytes(hidden)))
            form = f"{'bf16' if fmt is BF16 else 'fp8'}, {limit}"
            with _limited(num_sms):
                calls = NormalCalls(bench, buffer, elastic, fp8=fmt is FP8_BLOCK, num_sms=num_sms or 0)
                check = bench.agree(calls.check())
                for (by, kind), (call, waits) in calls.dispatches.items():
                    timed = bench.time(calls.step(call), [check], capturable=graph_safe and not waits)
                    bench.add("dispatch", timed, TOTAL, work, check, f"{by}, {form}{kind}")
                for by, call in calls.combines.items() if fmt is BF16 else ():
                    combined = bench.time(calls.step(call), [check], capturable=graph_safe)
                    bench.add("combine", combined, TOTAL, work, check, f"{by}, {form}")
    elastic.destroy()
    buffer.destroy()


class NormalCalls:
    """The calls that `normal` times, on one turn of tokens and routing each. Making it is collective, as the calls are.

    Attributes:
        dispatches: each kind of dispatch by name, and whether the host waits for the counts.
        combines: each kind of combine, of the rows that came: experts that change nothing would give these back.
    """

    def __init__(self, bench: Bench, buffer: Buffer, elastic: ElasticBuffer, *, fp8: bool, num_sms: int) -> None:
        self._bench, self._fp8 = bench, fp8
        experts, turns = bench.layer.config.num_experts, range(len(bench.turns))
        worst = bench.context.world_size * bench.layer.config.max_tokens_per_rank
        tokens = [self._form(x_TH) for x_TH, _, _ in bench.turns]
        routings: list[dict[str, Any]] = [
            {"topk_idx": idx_TK.to(topk_idx_t), "topk_weights": weights_TK} for _, idx_TK, weights_TK in bench.turns
        ]

        def layout(turn: int) -> dict[str, Any]:
            topk_idx = routings[turn]["topk_idx"]
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
            return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}

        layouts = [layout(turn) for turn in turns]

        def dispatch(turn: int, **how: Any) -> Any:
            return buffer.dispatch(tokens[turn], **layouts[turn], **routings[turn], **how)

        def dispatch_elastic(turn: int, *, waits: bool = True) -> Any:
            how: dict[str, Any] = {"num_sms": num_sms, "do_handle_copy": False, "do_cpu_sync": waits}
            return elastic.dispatch(tokens[turn], **routings[turn], num_experts=experts, **how)

        came = [dispatch(turn) for turn in turns]
        rows, handles = [got[0] for got in came], [got[4] for got in came]
        elastic_handles = [dispatch_elastic(turn)[3] for turn in turns]
        of_elastic = f"{NORMAL}, ElasticBuffer"
        self.dispatches: dict[tuple[str, str], tuple[Callable[[int], Any], bool]] = {
            (NORMAL, ""): (dispatch, True),
            (NORMAL, ", with layout"): (
                lambda turn: buffer.dispatch(tokens[turn], **layout(turn), **routings[turn]),
                True,
            ),
            (NORMAL, ", num_worst_tokens"): (lambda turn: dispatch(turn, num_worst_tokens=worst), False),
            (NORMAL, ", cached"): (lambda turn: buffer.dispatch(tokens[turn], handle=handles[turn]), False),
            (of_elastic, ""): (dispatch_elastic, True),
            (of_elastic, ", num_worst_tokens"): (lambda turn: dispatch_elastic(turn, waits=False), False),
            (of_elastic, ", cached"): (
                lambda turn: elastic.dispatch(tokens[turn], handle=elastic_handles[turn], num_sms=num_sms),
                False,
            ),
        }
        self.combines: dict[str, Callable[[int], Any]] = {
            NORMAL: lambda turn: buffer.combine(rows[turn], handles[turn]),
            of_elastic: lambda turn: elastic.combine(rows[turn], elastic_handles[turn], num_sms=num_sms),
        }

    def _form(self, x_TH: torch.Tensor) -> Tokens:
        return per_token_cast_to_fp8(x_TH) if self._fp8 else x_TH

    def step(self, call: Callable[[int], Any]) -> Step:
        """Steps of `Bench.time` that make `call` of each turn."""
        turns = len(self._bench.turns)
        return lambda number, lap: call(number % turns)

    def check(self) -> checks.Check:
        """Bytes of the first turn that are wrong: of rows, scales, ids, weights and, of bf16, sums."""
        bench, inputs = self._bench, self._bench.inputs
        config, world, rank = bench.layer.config, bench.context.world_size, bench.context.rank
        local = config.num_experts // world
        tokens, ids, weights = [], [], []
        for x_TH, idx_TK, weights_TK in zip(inputs.x, inputs.idx, inputs.weights, strict=True):
            here = (idx_TK >= 0) & (idx_TK // local == rank)
            came = here.any(dim=1)
            tokens.append(x_TH[came])
            ids.append(torch.where(here, idx_TK - local * rank, -1)[came].to(torch.int64))
            weights.append(torch.where(here, weights_TK, 0.0)[came])
        wanted, wanted_ids, wanted_weights = self._form(torch.cat(tokens)), torch.cat(ids), torch.cat(weights)
        count = len(wanted_ids)
        pairs: list[tuple[Any, Any]] = []
        for dispatch, _ in self.dispatches.values():
            rows, got_ids, got_weights = dispatch(0)[:3]
            each = list(zip(rows, wanted, strict=True)) if self._fp8 else [(rows, wanted)]
            each += [(got_ids, wanted_ids), (got_weights, wanted_weights)]
            pairs += [(got[:count], want) for got, want in each if got is not None]
        if not self._fp8:
            idx_TK = inputs.idx[rank].to(torch.int64)
            owners = torch.where(idx_TK >= 0, idx_TK // local, -1)
            copies = torch.stack([(owners == r).any(dim=1) for r in range(world)]).sum(dim=0)
            # A token comes home from each of its ranks: so many times it is exact in fp32.
            summed = (inputs.x[rank].float() * copies[:, None]).to(torch.bfloat16)
            pairs += [(combine(0)[0], summed) for combine in self.combines.values()]
        return checks.Check("normal mode: bytes that are wrong", sum(_wrong_bytes(a, b) for a, b in pairs), 0.0)


def _wrong_bytes(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return math.inf
    return float((found.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).sum())


@contextmanager
def _limited(num_sms: int | None) -> Iterator[None]:
    """`Buffer.set_num_sms` for a while; None is all SMs."""
    before = Buffer.num_sms, Buffer._most_sms
    try:
        if num_sms is None:
            Buffer._most_sms = None
        else:
            Buffer.set_num_sms(num_sms)
        yield
    finally:
        Buffer.num_sms, Buffer._most_sms = before
