"""DeepEP's `Buffer`, theirs or ours: both are driven by the same calls (written for DeepEP dd758ca).

Low latency is dispatch and combine without hooks. Normal mode has dispatch with ids and weights (the host awaits the
counts), the same with `num_worst_tokens`, dispatch with the handle of an earlier one ("cached"), and combine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from moe_runtime.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8
from moe_runtime.kernels.formats.number_formats import align
from moe_runtime.launch.research.peers.case import Case, Point, Turn, Way
from moe_runtime.reference import relative_error

NUM_SMS = (24, 64, 128)
"""Most SMs that calls of normal mode take: what DeepEP's own test sets, what many of an H200 are needed for, and nearly
all of it."""
QUEUE_DEPTH = "2048"
"""Of NVSHMEM, for which DeepEP wants room for two entries a token of low latency and two more."""

BOUNDS = {"FP8": 2**-4 + 2**-8, "BF16": 2**-9 + 2**-8}
"""A number of e4m3 is within 2^-4 of what it stands for, one of bf16 within 2^-9; two sums are rounded to bf16."""


def low_latency(case: Case) -> Point:
    """Theirs."""
    os.environ.setdefault("NVSHMEM_QP_DEPTH", QUEUE_DEPTH)
    return low_latency_of(case, import_module("deep_ep"))


def normal(case: Case) -> Point:
    """Theirs."""
    return normal_of(case, import_module("deep_ep"))


def low_latency_of(case: Case, module: Any) -> Point:
    """Dispatch and combine together, of the package `module`."""
    hidden, experts = case.run.layer.hidden_size, case.run.layer.num_experts
    # DeepEP wants slots of all ranks in fours.
    multiple = 4 // math.gcd(4, case.world)
    most = align(max(case.tokens), multiple)
    num_bytes = module.Buffer.get_low_latency_rdma_size_hint(most, hidden, case.world, experts)
    pairs = experts // case.world
    buffer = module.Buffer(
        case.group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=pairs, explicitly_destroy=True
    )

    def point(tokens: int) -> Iterator[Way]:
        room = align(tokens, multiple)
        buffer.clean_low_latency_buffer(room, hidden, experts)
        turns = [Turn(x, idx.to(_ids(module)), weights) for x, idx, weights in case.turns(tokens)]
        for fmt, bound in BOUNDS.items():
            use_fp8 = fmt == "FP8"

            def dispatch(turn: Turn, use_fp8: bool = use_fp8) -> tuple[Any, Any]:
                got, _, handle, *_ = buffer.low_latency_dispatch(turn.x, turn.idx, room, experts, use_fp8=use_fp8)
                return got, handle

            got, handle = dispatch(turns[0])
            rows = _cast_back(got[0].flatten(0, 1), got[1].flatten(0, 1)) if use_fp8 else got
            # Rows where nothing came hold anything.
            rows = rows.reshape(-1, case.world * room, hidden).nan_to_num(0.0)

            def step(number: int, dispatch: Any = dispatch, rows: torch.Tensor = rows) -> torch.Tensor:
                turn = turns[number % len(turns)]
                _, handle = dispatch(turn)
                y_TH: torch.Tensor = buffer.low_latency_combine(rows, turn.idx, turn.weights, handle)[0]
                return y_TH

            y_TH = buffer.low_latency_combine(rows, turns[0].idx, turns[0].weights, handle)[0]
            exact_TH = turns[0].x.double() * turns[0].weights.double().sum(dim=1, keepdim=True)
            yield Way("low latency", fmt, step, relative_error(y_TH, exact_TH)[0], bound, note="dispatch + combine")

    return point


def normal_of(case: Case, module: Any) -> Point:
    """Dispatch and combine apart, of the package `module`."""
    hidden, experts, world = case.run.layer.hidden_size, case.run.layer.num_experts, case.world
    module.Buffer.set_num_sms(max(NUM_SMS))  # buffers grow with it
    configs = module.Buffer.get_dispatch_config(world), module.Buffer.get_combine_config(world)
    num_bytes = max(config.get_nvl_buffer_size_hint(2 * hidden, world) for config in configs)
    buffer = module.Buffer(case.group, num_bytes, explicitly_destroy=True)

    def point(tokens: int) -> Iterator[Way]:
        turns = case.turns(tokens)
        routings = []
        for turn in turns:
            idx = turn.idx.to(_ids(module))
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
            routings.append(
                {
                    **{"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank},
                    **{"num_tokens_per_expert": per_expert, "topk_idx": idx, "topk_weights": turn.weights},
                }
            )
        copies_T1 = routings[0]["is_token_in_rank"].sum(dim=1, keepdim=True)
        exact_TH = turns[0].x.double() * copies_T1
        for num_sms in NUM_SMS:
            module.Buffer.set_num_sms(num_sms)
            for fmt, bound in BOUNDS.items():
                inputs: list[Any] = [per_token_cast_to_fp8(t.x) if fmt == "FP8" else t.x for t in turns]
                calls = _NormalCalls(buffer, inputs, routings, world * tokens)
                name = f"{fmt}, {num_sms} SMs"
                ways: list[tuple[str, Callable[[int], Any], bool]] = [
                    ("counts awaited", calls.dispatch, False),
                    ("num_worst_tokens", calls.dispatch_worst, True),
                    ("cached handle", calls.dispatch_cached, True),
                ]
                for what, step, capturable in ways:
                    error = relative_error(calls.brought_home(step(0)), exact_TH)[0]
                    yield Way("normal dispatch", f"{name}, {what}", step, error, bound, capturable)
                if fmt == "BF16":
                    error = relative_error(calls.combine(0)[0], exact_TH)[0]
                    yield Way("normal combine", name, calls.combine, error, bound)

    return point


class _NormalCalls:
    """Steps of normal mode; making it dispatches every turn once."""

    def __init__(self, buffer: Any, inputs: list[Any], routings: list[dict[str, Any]], worst: int) -> None:
        self._buffer, self._inputs, self._routings, self._worst = buffer, inputs, routings, worst
        got = [self.dispatch(number) for number in range(len(inputs))]
        self._rows, self.handles = [one[0] for one in got], [one[4] for one in got]

    def brought_home(self, got: Any) -> torch.Tensor:
        """What a combine makes of the rows that a dispatch of the first turn `got`."""
        rows, handle = got[0], self.handles[0] if got[4] is None else got[4]
        y_TH: torch.Tensor = self._buffer.combine(_cast_back(*rows) if isinstance(rows, tuple) else rows, handle)[0]
        return y_TH

    def dispatch(self, number: int) -> Any:
        turn = number % len(self._inputs)
        return self._buffer.dispatch(self._inputs[turn], **self._routings[turn])

    def dispatch_worst(self, number: int) -> Any:
        turn = number % len(self._inputs)
        return self._buffer.dispatch(self._inputs[turn], **self._routings[turn], num_worst_tokens=self._worst)

    def dispatch_cached(self, number: int) -> Any:
        turn = number % len(self._inputs)
        return self._buffer.dispatch(self._inputs[turn], handle=self.handles[turn])

    def combine(self, number: int) -> Any:
        turn = number % len(self._inputs)
        return self._buffer.combine(self._rows[turn], self.handles[turn])


def _cast_back(quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return per_token_cast_back(quants, scales.contiguous())


def _ids(module: Any) -> torch.dtype:
    """Of expert ids: older ones have no name for it."""
    dtype: torch.dtype = getattr(module, "topk_idx_t", torch.int64)
    return dtype
