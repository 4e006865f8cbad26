"""Wrong calls of the whole public interface; `tests.support.wrong_calls` says what may follow one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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
from moe_runtime.checkpoints.kept_files import VARIABLE
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.integrations import ExpertParallel
from moe_runtime.kernels.formats.number_formats import NVFP4, FormatCode, format_named
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.placement import Placement
from moe_runtime.router import sigmoid_topk, softmax_topk
from moe_runtime.virtual import VirtualRanks
from tests.support import wrong_calls
from tests.support.call_references import REFERENCES
from tests.support.call_verdicts import compare_with_plain, differs, finished, fits, judge_accepted, judge_error
from tests.support.public_calls import Call, Target, targets, unmade
from tests.support.right_calls import ARGUMENTS
from tests.support.right_objects import HIDDEN, INNER, World, leave_group

FIXED_SEED = 20260
SECONDS = 6
"""`python -m tests.support.wrong_calls` is for more."""


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    leave_group()


def test_every_public_call_has_right_arguments() -> None:
    assert len(targets()) > 150
    assert unmade() == []
    assert set(ARGUMENTS) <= set(targets())


@pytest.mark.parametrize("name", sorted(targets()))
def test_right_calls_are_right(name: str, seed: int) -> None:
    """Accepted, twice the same result, and that of the reference where there is one: what wrong calls start from."""
    target = targets()[name]
    (call, arguments), (again, others) = (Call(target, World(random.Random(seed))).parts() for _ in range(2))
    result = finished(call(**arguments))
    compare_with_plain(name, [], (result, arguments), again, others, name)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_references_tell_wrong_results(name: str, seed: int) -> None:
    call, arguments = Call(targets()[name], World(random.Random(seed))).parts()
    result = call(**arguments)
    assert REFERENCES[name](result, **arguments) is None
    assert REFERENCES[name](_changed(result), **arguments)


def _changed(result: Any) -> Any:
    """The result with one number that is wrong."""
    if isinstance(result, torch.Tensor):
        changed = result.clone()
        whole = changed.dtype.itemsize == 1 or not changed.is_floating_point()
        flat = changed.view(torch.uint8) if whole and changed.dtype.itemsize == 1 else changed
        flat.view(-1)[0] += 1
        return changed
    if isinstance(result, tuple):
        return (*result[:-1], _changed(result[-1]))
    if isinstance(result, dict):
        return {key: value + 256 for key, value in result.items()}
    if isinstance(result, Placement):
        return SimpleNamespace(num_ranks=result.num_ranks, slot_experts=(0,) * len(result.slot_experts))
    return result + 1


@pytest.mark.parametrize("fixed", [True, False])
def test_wrong_calls(fixed: bool, seed: int) -> None:
    """As many as fit into some seconds, from a seed that never changes and from a new one."""
    seed = FIXED_SEED if fixed else seed
    outcome = wrong_calls.run(seed, 0, 2000, seconds=SECONDS)
    assert outcome.counts.total() > 50
    faults = [f"{fault}\n    --seed {seed} --only {index}" for index, fault in outcome.faults]
    assert not faults, "repeat with python -m tests.support.wrong_calls:\n" + "\n".join(faults)


def test_wrong_calls_leave_no_weights_in_host_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls with `keep_in_host_memory` are accepted: what they keep lies in a folder that goes with the run."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(wrong_calls.subprocess, "Popen", lambda command, **how: started.append(how["env"]))
    wrong_calls._Batch(0, 0, 1, tmp_path)
    assert Path(started[0][VARIABLE]).is_relative_to(tmp_path)


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


def _closed_heap() -> PrivateHeap:
    heap = PrivateHeap()
    heap.close()
    return heap


def _info(w: World, **changes: Any) -> dict[str, Any]:
    return ARGUMENTS["NVFP4TokenFormat.write_info"](w, w.token_format()) | changes


def _with_grad(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


def _group_gemm(w: World, name: str, **changes: Any) -> Any:
    return getattr(ops, name)(**(ARGUMENTS[name](w, None) | changes))


def _prepack(w: World, granularity: Any) -> Any:
    return ops.prepack_mxfp8(**(ARGUMENTS["prepack_mxfp8"](w, None) | {"scale_granularity_mnk": granularity}))


OFFSETS = torch.tensor([0, 4, 8], dtype=torch.int32)

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
    ("buf", lambda w: w.token_format().write_info(**_info(w, buf=w.codes(1, 200).expand(3, 200)))),
    ("buf", lambda w: w.token_format().write_info(**_info(w, buf=w.codes(600).as_strided((3, 200), (100, 1))))),
    ("buf", lambda w: w.token_format().write_info(**_info(w, buf=w.codes(3, 200).to("meta")))),
    ("buf", lambda w: w.token_format().copy_token_to_send_buf(w.codes(1, 200).expand(3, 200), w.numbers(3, HIDDEN))),
    ("src", lambda w: w.token_format().copy_token_to_send_buf(w.codes(3, 200), _with_grad(w.numbers(3, HIDDEN)), 2.0)),
    ("token_index", lambda w: w.token_format().copy_msg_to_output_tensor(w.codes(200), 10**30)),
    ("token_index", lambda w: w.token_format().copy_msg_to_output_tensor(w.codes(200), -(10**30))),
    (
        "token_index",
        lambda w: w.token_format().copy_msg_to_output_tensor(w.codes(200), torch.tensor(0, device="meta")),
    ),
    ("row_offsets", lambda w: w.token_format().pad_expert_offsets(OFFSETS.to("meta"))),
    (
        "output_tokens",
        lambda w: ops.NVFP4TokenFormat(HIDDEN, 2, output_tokens=w.codes(1, HIDDEN // 2).expand(8, HIDDEN // 2)),
    ),
    ("num_blocks", lambda w: ops.pack_dense_128(w.codes(8, 8), [0, 8], num_blocks=-5)),
    ("num_blocks", lambda w: ops.pack_dense_128(w.codes(8, 8), [0, 8], num_blocks=2**24)),
    ("num_blocks", lambda w: ops.pack_dense_128(w.codes(8, 8), [0, 8], num_blocks=10**30)),
    ("group_offsets", lambda w: ops.pack_dense_128(w.codes(8, 8), [0, np.array(8)])),
    ("group_scale_offsets", lambda w: ops.pack_dense_128(w.codes(8, 8), [0, 0, 8], [2**31, 0])),
    ("group_scale_offsets", lambda w: ops.pack_dense_128(w.codes(8, 8), [0, 8, 8], [0, 10**30])),
    ("m_indptr", lambda w: ops.pack_closed_form_128(w.codes(8, 8), [0, torch.tensor(8)])),
    ("m_indptr", lambda w: ops.pack_ue8m0_rows(w.codes(1, 8), [False, 1])),
    ("m_indptr", lambda w: ops.pack_ue8m0_rows(w.codes(8, 8), 8)),
    ("num_columns", lambda w: ops.unpack_dense_128(w.codes(4, 2, 32, 4, 4), [0, 8], [0], None)),
    ("num_columns", lambda w: ops.unpack_ue8m0_rows(w.ints(9, 8, 2), [0, 8], None)),
    ("num_columns", lambda w: ops.unpack_ue8m0_weights(w.ints(9, 2, 8, 2), None)),
    ("dtype", lambda w: ops.unpack_closed_form_128(w.codes(128, 8), [0, 8], dtype="3")),
    ("dtype", lambda w: ops.unpack_swizzled_weights(w.codes(1, 128, 8), 8, dtype="3")),
    ("packed", lambda w: ops.unpack_swizzled_weights(w.codes(1, 120, 8), 8)),
    ("scales", lambda w: ops.pack_scale_major(5, "K")),
    ("decode_scale", lambda w: ops.dequantize_nvfp4(w.codes(2, 8), w.codes(2, 1), True)),
    ("decode_scale", lambda w: ops.dequantize_nvfp4(w.codes(2, 8), w.codes(2, 1), float("nan"))),
    ("q", lambda w: ops.dequantize_nvfp4(w.codes(2, 9), w.codes(2, 1))),
    ("granularity_k", lambda w: ops.quantize_mxfp8(w.numbers(2, 128), torch.tensor(32))),
    ("granularity_mn", lambda w: ops.quantize_fp8(w.numbers(2, 128), torch.tensor(1))),
    ("out_dtype", lambda w: _group_gemm(w, "moe_gemm_fp8_nt_groupwise", out_dtype=np.zeros(3))),
    ("out_dtype", lambda w: _group_gemm(w, "group_gemm_nvfp4_nt_groupwise", out_dtype=np.zeros((2, 2)))),
    ("scale_granularity_mnk", lambda w: _prepack(w, (torch.ones(3), 1, 128))),
    ("scale_granularity_mnk", lambda w: _prepack(w, (1, 1, torch.ones(0)))),
    ("scale_granularity_mnk", lambda w: _prepack(w, (torch.tensor(1), 1, 128))),
    ("scales_RV", lambda w: ops.swizzle_scales(w.codes(4, 4).bool())),
    ("buffers", lambda w: list(w.checkpoint().experts(0, [0], (torch.empty, len)))),
    ("config", lambda w: moe_runtime.reserved_bytes(None, 2)),
    ("experts", lambda w: w.layer().load_experts(np.array("x"))),
    ("gate_up of expert 0", lambda w: w.layer().load_experts([(NESTED, NESTED)])),
    ("gate_up of expert 0", lambda w: w.layer().load_experts([(SPARSE, SPARSE)])),
    ("gate_up of expert 0", lambda w: w.layer().load_experts([(w.numbers(2 * INNER, HIDDEN).to("meta"),) * 2])),
    ("load", lambda w: w.placement().rank_loads([1.0, np.True_, 1.0, 1.0])),
    ("world_size", lambda w: PrivateHeap.group(True)),
    ("device", lambda w: PrivateHeap("meta")),
    ("ones", lambda w: PrivateHeap().reserve("a", 8, ones=9)),
    ("heap", lambda w: _closed_heap().allocate()),
    ("load", lambda w: VirtualRanks(w.config(), 2, None)),
    ("xs", lambda w: w.virtual_ranks()(5)),
    ("routing", lambda w: w.virtual_ranks()([w.tokens()["x"]] * 2, [(1,), (2,)])),
    ("world_size", lambda w: moe_runtime.reserved_bytes(w.config(), 10**30)),
    ("placed", lambda w: moe_runtime.reserved_bytes(w.config(), 2, placed=1)),
]
"""Faults that the fuzzer has found, each by its minimal call."""


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[f"{name}-{at}" for at, (name, _) in enumerate(REFUSED)])
def test_the_argument_is_named(name: str, call: Callable[[World], Any], seed: int) -> None:
    with pytest.raises(ValueError, match=rf"(^|: ){name}\b.*:"):
        call(World(random.Random(seed)))


GROUP_GEMMS = sorted(name for name in ops.__all__ if name.startswith(("group", "moe_gemm")))


@pytest.mark.parametrize("name", GROUP_GEMMS)
def test_an_output_made_in_inference_mode_is_written(name: str, seed: int) -> None:
    key = "c" if name == "grouped_matmul_dynamic_scaled_nvfp4" else "out"
    expected, out = (ARGUMENTS[name](World(random.Random(seed)), None) for _ in range(2))
    with torch.inference_mode():
        out[key] = torch.empty_like(expected[key])
    for arguments in (expected, out):
        getattr(ops, name)(**arguments)
    assert differs(out[key], expected[key]) is None and not expected[key].is_inference()


def test_messages_made_in_inference_mode_are_written(seed: int) -> None:
    """And the outputs that messages are copied to."""
    found = []
    for mode in (False, True):
        w = World(random.Random(seed))
        with torch.inference_mode(mode):
            buf, made = torch.zeros(3, 200, dtype=torch.uint8), w.token_format_arguments()
        token = ops.NVFP4TokenFormat(**made)
        offsets = token.pad_expert_offsets(OFFSETS)
        token.copy_token_to_send_buf(buf, w.numbers(3, HIDDEN), 2.0)
        token.write_info(**_info(w, buf=buf))
        token.copy_msg_to_output_tensor(buf, torch.tensor([0, 5, 3]))
        assert buf.is_inference() == mode and token.read_info(buf)[0].tolist() == [7, 8, 9]
        assert buf.any() and made["output_tokens"].any() and made["output_scales"].view(torch.uint8).any()
        outputs = ("output_tokens", "output_scales", "output_scales_offset")
        found.append([offsets, buf, *(made[name] for name in outputs)])
    assert differs(found[1], found[0]) is None


def test_padded_rows_made_in_inference_mode_are_written(seed: int) -> None:
    found = []
    for mode in (False, True):
        w = World(random.Random(seed))
        dispatcher = w.reusing_dispatcher()
        with torch.inference_mode(mode):
            arguments = ARGUMENTS["TokenDispatcher.dispatch_recv_padded"](w, dispatcher)
            names = ("rows", "counts", "source_tokens", "layout_range", "positions")
            made = {name: getattr(arguments["out"], name).clone() for name in names}
            arguments["out"] = dataclasses.replace(arguments["out"], **made)
        dispatcher.dispatch_recv_padded(**arguments)
        out = arguments["out"]
        assert out.counts.is_inference() == mode
        found.append([out.rows, out.counts, out.source_tokens, out.positions, arguments["statistics"]])
    assert found[0][1].any() and differs(found[1], found[0]) is None


def test_packed_scales_may_have_any_strides(seed: int) -> None:
    w = World(random.Random(seed))
    packed = w.codes(384, 16)[:, ::2]
    blocks = w.codes(3, 2, 32, 4, 8)[..., ::2]
    for unpack, given, *more in (
        (ops.unpack_closed_form_128, packed, [0, 4, 12]),
        (ops.unpack_swizzled_weights, packed[None], 300, torch.uint8),
        (ops.unpack_dense_128, blocks, [0, 4, 12], [0, 1], 8),
    ):
        assert torch.equal(unpack(given, *more), unpack(given.contiguous(), *more))


def test_scales_without_columns_are_unpacked() -> None:
    packed = ops.pack_closed_form_128(torch.zeros(12, 0, dtype=torch.uint8), [0, 4, 12])
    assert ops.unpack_closed_form_128(packed, [0, 4, 12]).shape == (12, 0)


def test_offsets_are_the_fault_of_the_caller_only_if_unchecked(seed: int) -> None:
    name = "moe_gemm_mxfp8_nt_groupwise"
    offsets = {"m_indptr": torch.tensor([-135, -138, -135, -136], dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"^m_indptr: "):
        _group_gemm(World(random.Random(seed)), name, **offsets)
    with pytest.raises(IndexError) as caught:
        _group_gemm(World(random.Random(seed)), name, validate=False, **offsets)
    target, key = targets()[name], ["m_indptr"]
    assert judge_error(target, offsets | {"validate": False}, key, caught.value) is None
    assert judge_error(target, offsets | {"validate": None}, key, caught.value)
    assert judge_error(target, offsets | {"validate": False}, ["a"], caught.value)


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
    signed = targets()["dequantize_nvfp4"]
    assert judge_accepted(signed, "decode_scale", -2.0) is None and judge_accepted(target, "factor", -2.0)
    assert judge_accepted(signed, "decode_scale", float("nan")) and judge_accepted(signed, "decode_scale", -1e300)
    assert not fits(torch.Tensor, torch.ones(2, 2).to_sparse())
    assert differs(torch.zeros(2), -torch.zeros(2)) and differs((1, 2), [1, 2]) and differs({"a": 1.0}, {"a": 2.0})
    assert differs(torch.zeros(2), torch.zeros(2)) is None and differs(float("nan"), float("nan")) is None
