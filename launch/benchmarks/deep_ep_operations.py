"""The operations of `bench` that call `moe_runtime.deep_ep.Buffer`: each is checked, then timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
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
    rows = got if isinstance(got, torch.Tensor) else per_token_cast_back(got[0].flatten(0, 1), got[1].flatten(0, 1))
    rows = rows.view(-1, context.world_size * count, hidden).nan_to_num(0.0)
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
                for by, step, waits in calls.dispatches(form):
                    timed = bench.time(step, [check], capturable=graph_safe and not waits)
                    bench.add("dispatch", timed, TOTAL, work, check, by)
                for by, step in calls.combines(form) if fmt is BF16 else ():
                    combined = bench.time(step, [check], capturable=graph_safe)
                    bench.add("combine", combined, TOTAL, work, check, by)
    elastic.destroy()
    buffer.destroy()


class NormalCalls:
    """The calls that `normal` times: steps of `Bench.time`. Its methods are collective."""

    def __init__(self, bench: Bench, buffer: Buffer, elastic: ElasticBuffer, *, fp8: bool, num_sms: int) -> None:
        self._bench, self._buffer, self._elastic, self._fp8 = bench, buffer, elastic, fp8
        self._num_sms, self._experts = num_sms, bench.layer.config.num_experts
        self._worst = bench.context.world_size * bench.layer.config.max_tokens_per_rank
        self._tokens = [self._form(x_TH) for x_TH, _, _ in bench.turns]
        self._routings: list[dict[str, Any]] = [
            {"topk_idx": idx_TK.to(topk_idx_t), "topk_weights": weights_TK} for _, idx_TK, weights_TK in bench.turns
        ]
        self._layouts = [self._layout(turn) for turn in range(len(self._tokens))]
        # Rows that came: what experts that change nothing would give back.
        self._rows, self._handles, self._elastic_handles = [], [], []
        for turn in range(len(self._tokens)):
            rows, _, _, _, handle, _ = self.dispatch(turn)
            self._rows.append(rows)
            self._handles.append(handle)
            self._elastic_handles.append(self.dispatch_elastic(turn)[3])

    def _form(self, x_TH: torch.Tensor) -> Tokens:
        return per_token_cast_to_fp8(x_TH) if self._fp8 else x_TH

    def _layout(self, turn: int) -> dict[str, Any]:
        topk_idx = self._routings[turn]["topk_idx"]
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(topk_idx, self._experts)
        return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}

    def dispatches(self, form: str) -> Iterator[tuple[str, Step, bool]]:
        """Name and step of each kind of dispatch, and whether the host waits for the counts."""
        by, elastic = f"{NORMAL}, {form}", f"{NORMAL}, ElasticBuffer, {form}"
        yield by, self.dispatch, True
        yield f"{by}, with layout", self.dispatch_with_layout, True
        yield f"{by}, num_worst_tokens", self.dispatch_worst, False
        yield f"{by}, cached", self.dispatch_cached, False
        yield elastic, self.dispatch_elastic, True
        yield f"{elastic}, num_worst_tokens", self.dispatch_elastic_worst, False
        yield f"{elastic}, cached", self.dispatch_elastic_cached, False

    def combines(self, form: str) -> Iterator[tuple[str, Step]]:
        """Name and step of each kind of combine."""
        yield f"{NORMAL}, {form}", self.combine
        yield f"{NORMAL}, ElasticBuffer, {form}", self.combine_elastic

    def dispatch(self, number: int, lap: Lap | None = None, **how: Any) -> Any:
        """What `Buffer.dispatch` gives with ids and weights."""
        turn = number % len(self._tokens)
        return self._buffer.dispatch(self._tokens[turn], **self._layouts[turn], **self._routings[turn], **how)

    def dispatch_with_layout(self, number: int, lap: Lap | None = None) -> Any:
        """The same, and the layout before it."""
        turn = number % len(self._tokens)
        return self._buffer.dispatch(self._tokens[turn], **self._layout(turn), **self._routings[turn])

    def dispatch_worst(self, number: int, lap: Lap | None = None) -> Any:
        """The same with room for all rows that may come."""
        return self.dispatch(number, num_worst_tokens=self._worst)

    def dispatch_cached(self, number: int, lap: Lap | None = None) -> Any:
        """What it gives with a handle."""
        turn = number % len(self._tokens)
        return self._buffer.dispatch(self._tokens[turn], handle=self._handles[turn])

    def dispatch_elastic(self, number: int, lap: Lap | None = None, *, waits: bool = True) -> Any:
        """What `ElasticBuffer.dispatch` gives with ids and weights."""
        turn = number % len(self._tokens)
        how: dict[str, Any] = {
            "num_experts": self._experts,
            "num_sms": self._num_sms,
            "do_handle_copy": False,
            "do_cpu_sync": waits,
        }
        return self._elastic.dispatch(self._tokens[turn], **self._routings[turn], **how)

    def dispatch_elastic_worst(self, number: int, lap: Lap | None = None) -> Any:
        """The same with room for all rows that may come."""
        return self.dispatch_elastic(number, waits=False)

    def dispatch_elastic_cached(self, number: int, lap: Lap | None = None) -> Any:
        """What it gives with a handle."""
        turn = number % len(self._tokens)
        handle = self._elastic_handles[turn]
        return self._elastic.dispatch(self._tokens[turn], handle=handle, num_sms=self._num_sms)

    def combine(self, number: int, lap: Lap | None = None) -> Any:
        """What `Buffer.combine` gives of the rows that came."""
        turn = number % len(self._handles)
        return self._buffer.combine(self._rows[turn], self._handles[turn])

    def combine_elastic(self, number: int, lap: Lap | None = None) -> Any:
        """What `ElasticBuffer.combine` gives of them."""
        turn = number % len(self._handles)
        return self._elastic.combine(self._rows[turn], self._elastic_handles[turn], num_sms=self._num_sms)

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
        found = []
        for whole in (self.dispatch, self.dispatch_worst, self.dispatch_elastic, self.dispatch_elastic_worst):
            found.append(whole(0)[:3])
        found += [(cached(0)[0], None, None) for cached in (self.dispatch_cached, self.dispatch_elastic_cached)]
        pairs: list[tuple[Any, Any]] = []
        for rows, got_ids, got_weights in found:
            each = zip(rows, wanted, strict=True) if self._fp8 else [(rows, wanted)]
            pairs += [(got[:count], want) for got, want in each]
            if got_ids is not None:
                pairs += [(got_ids[:count], wanted_ids), (got_weights[:count], wanted_weights)]
        if not self._fp8:
            idx_TK = inputs.idx[rank].to(torch.int64)
            owners = torch.where(idx_TK >= 0, idx_TK // local, -1)
            copies = torch.stack([(owners == r).any(dim=1) for r in range(world)]).sum(dim=0)
            # A token comes home from each of its ranks: so many times it is exact in fp32.
            summed = (inputs.x[rank].float() * copies[:, None]).to(torch.bfloat16)
            pairs += [(combine(0)[0], summed) for combine in (self.combine, self.combine_elastic)]
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
