"""Wrong calls of the whole public interface; `tests.support.wrong_calls` says what may follow one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import moe_runtime
from moe_runtime import (
    CombineSink,
    Experts,
    ExpertWeights,
    GroupedRows,
    LayerCounters,
    LayerCounts,
    MoELayer,
    PrepackedWeights,
    QuantizedRows,
    RecordLayout,
    Router,
    RouterConfig,
    SwiGLU,
    TokenDispatcher,
    TokenFormat,
    imbalance,
    ops,
)
from moe_runtime.integrations import ExpertParallel
from moe_runtime.kernels.formats.number_formats import NVFP4, FormatCode, format_named
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.router import sigmoid_topk, softmax_topk
from tests.support import wrong_calls
from tests.support.right_calls import ARGUMENTS, HIDDEN, World
from tests.support.wrong_calls import Call, Target, differs, fits, judge_accepted, judge_error

FIXED_SEED = 20260
SECONDS = 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_public_call_has_right_arguments() -> None:
    assert len(wrong_calls.targets()) > 150
    assert wrong_calls.unmade() == []
    assert set(ARGUMENTS) | set(wrong_calls.KNOWN) <= set(wrong_calls.targets())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(wrong_calls.targets()))
def test_right_calls_are_right(name: str, seed: int) -> None:
    """Accepted, twice the same result, and that of the reference where there is one: what wrong calls start from."""
    target = wrong_calls.targets()[name]
    (call, arguments), (again, others) = (Call(target, World(random.Random(seed))).parts() for _ in range(2))
    result = wrong_calls.finished(call(**arguments))
    wrong_calls.compare_with_plain(name, [], (result, arguments), again, others, name)


@pytest.mark.parametrize("fixed", [True, False])
def test_wrong_calls(fixed: bool, seed: int) -> None:
    """As many as fit into some seconds, from a seed that never changes and from a new one."""
    seed = FIXED_SEED if fixed else seed
    outcome = wrong_calls.run(seed, 0, 2000, seconds=SECONDS)
    assert outcome.counts.total() > 50
    new = [
        f"{fault}\n    --seed {seed} --only {index}"
        for index, fault in outcome.faults
        if not wrong_calls.is_known(fault)
    ]
    assert not new, "repeat with python -m tests.support.wrong_calls:\n" + "\n".join(new)


SPARSE = torch.ones(3, HIDDEN).to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(4), torch.ones(3)])


def _closed(w: World) -> Any:
    context = w.context()
    context.close()
    return context


def _close(layer: MoELayer) -> MoELayer:
    layer.context.close()
    return layer


def _of(made: Any, **changes: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)} | changes


def _counted(w: World, **changes: Any) -> Any:
    ids, four = torch.zeros(3, 2, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    right = {"topk_idx": ids, "slots": ids, "num_parts": torch.ones(3, dtype=torch.int32), "group_offsets": four}
    return w.counters().add(**(right | changes))


REFUSED: list[tuple[str, Callable[[World], Any]]] = [
    ("seed", lambda w: w.layer(loaded=False).load_random("3")),
    ("seed", lambda w: w.layer(loaded=False).load_random(2**64)),
    ("seed", lambda w: w.layer(loaded=False).load_random(np.int64(3))),
    ("router", lambda w: MoELayer(w.config(), w.context(), router="no")),
    ("context", lambda w: MoELayer(w.config(), _closed(w))),
    ("context", lambda w: TokenDispatcher(**(w.dispatcher_arguments() | {"context": _closed(w)}))),
    ("context", lambda w: _close(w.layer()).load_random(3)),
    ("context", lambda w: _close(w.layer()).load_experts([])),
    ("experts", lambda w: w.layer().load_experts(None)),
    ("buffers", lambda w: w.layer().load_experts([], (torch.empty,))),
    ("shared_elsewhere", lambda w: w.layer().load_checkpoint("x", 0, shared_elsewhere="no")),
    ("step", lambda w: w.layer().compute(None)),
    ("agreed", lambda w: TokenDispatcher(**(w.dispatcher_arguments() | {"agreed": "yes"}))),
    ("mode", lambda w: TokenDispatcher(**(w.dispatcher_arguments() | {"mode": ["auto"]}))),
    ("hidden_size", lambda w: TokenDispatcher(**(w.dispatcher_arguments() | {"hidden_size": 10**30 // 64 * 64}))),
    ("num_sms", lambda w: TokenDispatcher(**(w.dispatcher_arguments() | {"num_sms": 2**31}))),
    (
        "input_scale",
        lambda w: TokenDispatcher(**(w.dispatcher_arguments() | {"token_format": "nvfp4", "input_scale": 10**50})),
    ),
    ("config", lambda w: TokenDispatcher.from_config(w.context(), None)),
    ("max_tokens", lambda w: TokenDispatcher.from_config(w.context(), w.config(), max_tokens=-1)),
    ("num_slots", lambda w: TokenDispatcher.of_all_sizes(w.context(), w.config(), num_slots=0)),
    ("scales_in_record", lambda w: w.dispatcher().dispatch(**w.tokens(), scales_in_record=None)),
    ("handle", lambda w: CombineSink(5)),
    ("top_k", lambda w: RecordLayout(NVFP4, 64, 10**30)),
    ("hidden", lambda w: RecordLayout(NVFP4, 2**62, 2)),
    ("alignment", lambda w: ops.NVFP4TokenFormat(64, 2, 2**62)),
    ("x", lambda w: Router(HIDDEN, 4, 2, RouterConfig())(None)),
    ("x", lambda w: Router(HIDDEN, 4, 2, RouterConfig())(SPARSE)),
    ("engine", lambda w: Router(HIDDEN, 4, 2, RouterConfig(), engine=b"torch")),
    ("device", lambda w: Router(HIDDEN, 4, 2, RouterConfig(), "cuda:99")),
    ("num_experts", lambda w: Router(HIDDEN, 10**30, 2, RouterConfig())),
    ("weight", lambda w: Router(HIDDEN, 4, 2, RouterConfig()).load([1.0])),
    ("weight", lambda w: Router(HIDDEN, 4, 2, RouterConfig()).load(torch.ones(4, HIDDEN, dtype=torch.complex64))),
    ("logits", lambda w: softmax_topk([[1.0]], 1)),
    ("top_k", lambda w: softmax_topk(torch.ones(2, 4), 2.0)),
    ("scaling_factor", lambda w: softmax_topk(torch.ones(2, 4), 2, scaling_factor=float("nan"))),
    ("renormalize", lambda w: softmax_topk(torch.ones(2, 4), 2, renormalize="no")),
    ("correction_bias", lambda w: sigmoid_topk(torch.ones(2, 4), 2, correction_bias_E=torch.ones(3))),
    ("q", lambda w: dequantize_rows(None)),
    ("quants_RK", lambda w: dequantize_rows(QuantizedRows(NVFP4, None))),
    ("scales_RV", lambda w: dequantize_rows(QuantizedRows(format_named("bf16"), w.numbers(2, 8).bfloat16(), 5))),
    ("gsf", lambda w: quantize_rows(w.numbers(2, 16), "nvfp4", gsf=True)),
    ("gsf", lambda w: quantize_rows(w.numbers(2, 16), "nvfp4", gsf=NESTED)),
    ("format", lambda w: format_named(TokenFormat("bf16", FormatCode.BF16, 8, 1, torch.bfloat16, None, False, False))),
    ("block", lambda w: TokenFormat("x", FormatCode.BF16, 8, 0, torch.bfloat16, None, False, False)),
    ("num_rows", lambda w: ops.unswizzle_scales(w.codes(1, 1, 32, 4, 4), 4.0, 4)),
    ("scales_RV", lambda w: ops.swizzle_scales(torch.ones(4, 4, dtype=torch.bool))),
    ("engine", lambda w: ops.swizzle_scales(w.codes(4, 4), engine=np.zeros((2, 2)))),
    ("expert", lambda w: w.expert_weights().expert(True)),
    ("expert", lambda w: w.prepacked().expert("0")),
    ("device", lambda w: w.expert_weights().to("cuda:99")),
    ("device", lambda w: w.prepacked().to(torch.float16)),
    ("device", lambda w: Experts(**w.experts_arguments()).to(None)),
    ("bias", lambda w: ExpertWeights.quantize(w.numbers(1, 16, 16), "bf16", bias=torch.ones(1, 16).bool())),
    ("engine", lambda w: w.expert_weights(fmt="bf16").dequantize(engine="cpu")),
    ("alpha", lambda w: SwiGLU(alpha=True)),
    ("limit", lambda w: SwiGLU(limit=True)),
    ("w", lambda w: PrepackedWeights.prepack(None)),
    ("w", lambda w: PrepackedWeights.wanted(5)),
    ("units", lambda w: PrepackedWeights(**_of(w.prepacked(), units=None))),
    ("expert_scales", lambda w: PrepackedWeights(**_of(w.prepacked(), expert_scales=1.0))),
    ("num_rows", lambda w: PrepackedWeights(**_of(w.prepacked(), num_rows=64.0))),
    ("activation", lambda w: Experts(**(w.experts_arguments() | {"activation": None}))),
    ("gate_up", lambda w: Experts(**(w.experts_arguments() | {"gate_up": None}))),
    ("down", lambda w: Experts(**(w.experts_arguments() | {"down": torch.ones(2)}))),
    ("num_sms", lambda w: Experts(**(w.experts_arguments() | {"num_sms": True}))),
    ("a", lambda w: Experts(**w.experts_arguments("bf16"))(None)),
    ("a.scales", lambda w: Experts(**w.experts_arguments("bf16"))(GroupedRows(**_of(w.rows("bf16"), scales=5)))),
    ("a.capacity", lambda w: Experts(**w.experts_arguments("bf16"))(GroupedRows(**_of(w.rows("bf16"), capacity="12")))),
    ("out", lambda w: Experts(**w.experts_arguments("bf16"))(w.rows("bf16"), out=NESTED)),
    ("ranks", lambda w: imbalance(5)),
    ("ranks", lambda w: imbalance([None])),
    ("earlier", lambda w: w.counts() - LayerCounts(1, 2, (3,), 4, 5, 6)),
    ("earlier", lambda w: w.counts() - 5),
    ("geometry", lambda w: LayerCounters(None, 4, torch.device("cpu"), "torch")),
    ("num_experts", lambda w: LayerCounters(w.dispatcher().geometry, -1, torch.device("cpu"), "torch")),
    ("topk_idx", lambda w: _counted(w, topk_idx=None)),
    ("slots", lambda w: _counted(w, slots=torch.zeros(3, 2))),
    ("num_parts", lambda w: _counted(w, num_parts=torch.zeros(3, 1, dtype=torch.int32))),
    ("group_offsets", lambda w: _counted(w, group_offsets=torch.zeros(4, dtype=torch.int32))),
    ("context", lambda w: ExpertParallel(5)),
    ("placement", lambda w: w.parallel().replace_experts(None)),
    ("mesh", lambda w: moe_runtime.apply_expert_parallel(w.model(), 5, max_tokens_per_rank=8)),
    ("model", lambda w: moe_runtime.apply_expert_parallel(None, max_tokens_per_rank=8)),
    (
        "token_format",
        lambda w: moe_runtime.apply_expert_parallel(w.model(), max_tokens_per_rank=8, token_format=""),
    ),
]
"""Faults that the fuzzer has found, each by its minimal call."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[f"{name}-{at}" for at, (name, _) in enumerate(REFUSED)])
def test_the_argument_is_named(name: str, call: Callable[[World], Any], seed: int) -> None:
    with pytest.raises(ValueError, match=rf"(^|: ){name}\b.*:"):
        call(World(random.Random(seed)))


def _scaled(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return x * factor


def test_what_counts_as_a_fault() -> None:
    target = Target("scaled", _scaled)
    arguments = {"x": None, "factor": 2.0}
    assert judge_error(target, arguments, ["x"], ValueError("x: expected a tensor, got None")) is None
    for error in (
        ValueError("expected a tensor"),
        ValueError("y: expected a tensor"),
        TypeError("x: no"),
        KeyError("x"),
    ):
        assert judge_error(target, arguments, ["x"], error)
    assert judge_accepted(target, "factor", 2) is None and judge_accepted(target, "x", torch.ones(2)) is None
    for key, value in (("factor", True), ("factor", "2"), ("factor", float("nan")), ("x", None), ("x", [1.0])):
        assert judge_accepted(target, key, value), (key, value)
    assert not fits(torch.Tensor, torch.ones(2, 2).to_sparse())
    assert differs(torch.zeros(2), -torch.zeros(2)) and differs((1, 2), [1, 2]) and differs({"a": 1.0}, {"a": 2.0})
    assert differs(torch.zeros(2), torch.zeros(2)) is None and differs(float("nan"), float("nan")) is None
