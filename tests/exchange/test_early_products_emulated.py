"""Experts that find their groups by the ids of a dispatch that has not ended, emulated: the bits of those that wait."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from cuda.bindings import driver

from moe_runtime import layer as of_layer
from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import CombineSink
from moe_runtime.experts import Experts
from moe_runtime.integrations.engine_layers import EngineExperts, TokenShare, _Group
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.exchange import cuda
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.exchange.local_ids import local_ids
from moe_runtime.kernels.formats.number_formats import (
    format_named,
    intermediate_format_for,
    token_formats_for,
    weight_format_named,
)
from moe_runtime.kernels.gemm import dequant_gemm, tma_gemm
from moe_runtime.kernels.gemm import grouped_gemm as gemm
from moe_runtime.kernels.gemm.dequant_layout import DEQUANT_FORMATS
from moe_runtime.kernels.gemm.grouped_rows import MAX_ROUTED_IDS, GroupedRows
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import GateUpOrder
from moe_runtime.kernels.launch_order import IN_ORDER, ONLY_ROWS_PENDING, LaunchOrder
from moe_runtime.layer import MoELayer
from tests.emulator import MOST_SCHEDULES, Emulator, EmulatorError, needs_emulator
from tests.emulator.tensor_maps import encode_tiled
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, rank_input
from tests.support.gemm_cases import random_weights
from tests.support.virtual_exchange import HOPPER, Ranks, emulator, poisoned_memory

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MOST = 256, 192, 70, 2, 3
SCHEDULES = 2
MORE = 70
"""Tokens with more ids than products count."""
PAIRS = [
    ("nvfp4", "nvfp4"),
    ("nvfp4", "fp8_block"),
    ("mxfp8", "mxfp8"),
    *(("mxfp4", fmt) for fmt in token_formats_for("mxfp4")),
    ("fp8_block", "fp8_block"),
    ("bf16", "bf16"),
]
STARTS_NEXT = "ptx::griddepcontrol_launch_dependents();"
SLOW = 300
"""Loads by which a dispatch is delayed once the first product may begin."""
DEQUANTIZED = {fmt.name for fmt in DEQUANT_FORMATS}
"""Formats of weights that `dequant_few` multiplies; `tma_gemm` those of others."""


def slow_dispatch(text: str) -> str:
    """Dispatches that go on long after the first product has begun."""
    if "one_rank_dispatch(" not in text:
        return text
    assert text.count(STARTS_NEXT) == 1
    return text.replace(STARTS_NEXT, f"{STARTS_NEXT} for (int i = 0; i < {SLOW}; ++i) load_relaxed(latch);")


@pytest.fixture
def gpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """A Hopper GPU: one SM for products, so that all their blocks begin at once."""
    emulator.stand_in(monkeypatch)
    monkeypatch.setattr(nvrtc, "most_sms", lambda device: 1)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(gemm, "resolve_engine", lambda engine, device: "cuda")
    emulator.edit = slow_dispatch
    tma_gemm._tensor_map.cache_clear()
    yield emulator
    tma_gemm._tensor_map.cache_clear()


def experts_of(weights: str, tokens: str, rng: torch.Generator) -> Experts:
    gate_up = random_weights(weights, EXPERTS, 2 * INTERMEDIATE, HIDDEN, rng, CPU, gate_up=GateUpOrder.GATE_UP)
    down = random_weights(weights, EXPERTS, HIDDEN, INTERMEDIATE, rng, CPU)
    between = intermediate_format_for(format_named(tokens), weight_format_named(weights))
    if weights in DEQUANTIZED:
        return Experts(*map(PrepackedWeights.prepack, (gate_up, down)), intermediate_format=between)
    return Experts(gate_up, down, intermediate_format=between)


def run(
    experts: Experts,
    tokens: str,
    steps: Sequence[RankInput],
    early: bool,
    emulator: Emulator,
    most: int = MOST,
    router: RouterIds | None = None,
) -> list[torch.Tensor]:
    """The layer's results; with `early` all kernels begin as early as they ask for, and products count few ids.

    If ids are those of a `router`, they are numbered before where nothing is early.
    """
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": most}
    ranks = Ranks(1, CPU, HOPPER, **sizes, token_format=tokens, combine_format="bf16", mode="gathered")
    own, first = ranks.dispatchers[0], 0 if router is None else router.first
    if router is not None and early:
        own._take_ids_of(router)

    def step(data: RankInput) -> torch.Tensor:
        if router is not None and not early:
            ids = local_ids(data.topk_idx, data.topk_weights, router.num_experts, first, EXPERTS, "torch")
            data = data._replace(topk_idx=ids)
        keep = own.can_keep_scales_in_record and isinstance(experts.gate_up, PrepackedWeights)
        rows = own.dispatch(*data, scales_in_record=keep)
        assert rows.handle._received_in is not None
        sink = CombineSink(rows.handle)
        sink.order = ONLY_ROWS_PENDING if early else IN_ORDER
        counts = early and data.topk_idx.numel() <= MAX_ROUTED_IDS
        weights = None if router is None else data.topk_weights
        order = LaunchOrder(routed_ids=data.topk_idx, route_weights=weights, first_id=first)
        given = replace(rows, order=order) if counts else rows
        if early:
            experts._run(given, sink.rows)
        else:
            experts(given, out=sink.rows)
        return own.combine(sink, rows.handle)

    if early:
        with emulator.together():
            results = [step(data) for data in steps]
    else:
        results = [step(data) for data in steps]
    ranks.contexts[0].check()
    return results


def inputs(seed: int, ids: torch.dtype) -> list[RankInput]:
    """Steps of other tokens each, some of which go nowhere, or all to the same experts."""
    steps = [
        rank_input(seed + i, 0, count, HIDDEN, EXPERTS, TOP_K, kind)
        for i, (count, kind) in enumerate([(1, "random"), (MOST, "random"), (2, "one"), (1, "none"), (2, "random")])
    ]
    return [data._replace(topk_idx=data.topk_idx.to(ids)) for data in steps]


def check(weights: str, tokens: str, ids: torch.dtype, seed: int, emulator: Emulator, schedules: int) -> None:
    experts = experts_of(weights, tokens, torch.Generator().manual_seed(seed))
    steps = inputs(seed, ids)
    wanted = run(experts, tokens, steps, False, emulator)
    assert any(bool(y.any()) for y in wanted)
    for _ in range(schedules):
        for number, (y, expected) in enumerate(zip(run(experts, tokens, steps, True, emulator), wanted, strict=True)):
            assert_same_bits(y, expected, f"step {number}")
    products = {name for _, name in emulator.launched} - {"one_rank_dispatch", "one_rank_combine"}
    assert products == {"dequant_few" if weights in DEQUANTIZED else "tma_gemm"}


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("weights", "tokens"), PAIRS)
def test_the_bits_of_products_that_wait(weights: str, tokens: str, ids: torch.dtype, gpu: Emulator, seed: int) -> None:
    check(weights, tokens, ids, seed, gpu, SCHEDULES)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block"])
def test_groups_by_the_ids_of_a_router(fmt: str, ids: torch.dtype, gpu: Emulator, seed: int) -> None:
    experts, steps = experts_of(fmt, fmt, torch.Generator().manual_seed(seed)), inputs(seed, ids)
    router = RouterIds(EXPERTS // 2, 2 * EXPERTS)
    for data in steps:
        data.topk_idx[data.topk_idx >= 0] += router.first // 2
        data.topk_weights[-1, 0] = torch.nan
    wanted = run(experts, fmt, steps, False, gpu, router=router)
    assert any(bool(y.any()) for y in wanted)
    for _ in range(SCHEDULES):
        found = run(experts, fmt, steps, True, gpu, router=router)
        for number, (y, expected) in enumerate(zip(found, wanted, strict=True)):
            assert_same_bits(y, expected, f"step {number}")


@pytest.mark.parametrize(("weights", "tokens"), PAIRS)
def test_the_bits_of_combines_that_wait(weights: str, tokens: str, gpu: Emulator, seed: int) -> None:
    """Of the other products that may come before a combine whose routing is settled."""
    experts = experts_of(weights, tokens, torch.Generator().manual_seed(seed))
    steps = [rank_input(seed + i, 0, MORE - 9 * i, HIDDEN, EXPERTS, TOP_K, "random") for i in range(2)]
    wanted = run(experts, tokens, steps, False, gpu, MORE)
    for y, expected in zip(run(experts, tokens, steps, True, gpu, MORE), wanted, strict=True):
        assert expected.any()
        assert_same_bits(y, expected, "y")
    products = {name for _, name in gpu.launched} - {"one_rank_dispatch", "one_rank_combine"}
    assert products == ({"dequant_tokens", "dequant_gemm"} if weights in DEQUANTIZED else {"tma_gemm"})


def layer_config() -> MoELayerConfig:
    """Of steps with as many ids as products count, and a token more."""
    return MoELayerConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=MAX_ROUTED_IDS // TOP_K + 1,
        weight_format="bf16",
        token_format="bf16",
    )


def test_which_steps_of_a_layer_do_so(gpu: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of few tokens, where one launch dispatches them; with the bits of those that wait."""
    most, config = MAX_ROUTED_IDS // TOP_K, layer_config()
    given: list[bool] = []
    run = Experts._run

    def watched(self: Experts, rows: GroupedRows, out: torch.Tensor) -> None:
        given.append(rows.order.routed_ids is not None)
        run(self, rows, out)

    monkeypatch.setattr(Experts, "_run", watched)
    with ExpertParallelContext(engine="auto", heap=PrivateHeap.group(1, CPU)[0]) as context:
        layer = MoELayer(config, context)
        layer.load_random(seed)
        for dispatcher in layer.dispatchers.values():
            dispatcher._use(cuda)
        steps = [
            rank_input(seed + i, 0, count, HIDDEN, EXPERTS, TOP_K, "random")
            for i, count in enumerate((3, most, most + 1))
        ]
        found = [layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights) for data in steps]
        assert given == [True, True, False]
        strided = torch.stack([steps[0].topk_idx, steps[0].topk_idx], -1)[..., 0]
        found.append(layer(steps[0].x, topk_idx=strided, topk_weights=steps[0].topk_weights))
        monkeypatch.setattr(of_layer, "MAX_ROUTED_IDS", 0)
        wanted = [layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights) for data in steps]
        assert given[3:] == [False] * 4
    for y, expected in zip(found, [*wanted, wanted[0]], strict=True):
        assert_same_bits(y, expected, "y")


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_layer_takes_the_ids_of_an_engine(ids: torch.dtype, gpu: Emulator, seed: int) -> None:
    """The second of three ranks: what its layer makes and counts of ids that are numbered before, and replays."""
    most, config = MAX_ROUTED_IDS // TOP_K, layer_config()
    steps = [
        rank_input(seed + i, 0, count, HIDDEN, 3 * EXPERTS, TOP_K, "random")
        for i, count in enumerate((most, most + 1, 3))
    ]
    for data in steps:
        # Of this rank but for one.
        data.topk_idx[:2] = torch.tensor([[-1, EXPERTS + 3], [EXPERTS, EXPERTS + 5]])
        data.topk_weights[1, 1] = torch.nan
    found = []
    for takes_ids in (False, True):
        with ExpertParallelContext(engine="auto", heap=PrivateHeap.group(1, CPU)[0]) as context:
            router = RouterIds(EXPERTS, 3 * EXPERTS)
            layer = MoELayer(config, context, router=False, router_ids=router)
            layer.load_random(seed)
            for dispatcher in layer.dispatchers.values():
                dispatcher._use(cuda)
                if takes_ids:
                    dispatcher._take_ids_of(router)
                    # The plans of the products are for this rank's share of the routes.
                    assert dispatcher.geometry.expected_rows == round(dispatcher.geometry.num_slots * TOP_K / 3)
                assert (dispatcher.geometry.router_ids == router) == takes_ids
            experts = EngineExperts(layer, _Group(context), TokenShare(3, 1, whole=True))
            counters = layer.count_steps()
            routes = layer.record_routes(torch.zeros(len(steps), most + 1, TOP_K, dtype=torch.int32))
            ys = [experts(data.x, data.topk_idx.to(ids), data.topk_weights) for data in steps]
            context.check()
            counts, recorded = counters.read(), routes.read()
            for data, step, y in zip(steps, recorded, ys, strict=True):
                assert torch.equal(step.topk_idx, data.topk_idx.int())
                weights = data.topk_weights  # The ring has ids alone.
                assert_same_bits(layer(data.x, topk_idx=step.topk_idx, topk_weights=weights), y, "replayed")
            found.append((ys, counts))
    for y, expected in zip(found[1][0], found[0][0], strict=True):
        assert expected.any() and not expected.isnan().any()
        assert_same_bits(y, expected, "y")
    assert found[1][1] == found[0][1] and found[1][1].rows > 0


WRONG = {
    "rows of the dispatch are not awaited": (
        "nvfp4",
        {
            r"if \(.*ids\.given\(\).*\) await_kernels_before\(\);": "",
            # What is no index yet would lead astray.
            r"source = rows\.index\[source\];": "source = rows.index[source] & 1;",
        },
    ),
    "the next product begins before the dispatch has ended": (
        "fp8_block",
        {r"if \(.* && !ids\.given\(\)\) start_next\(\);": "start_next();"},
    ),
    "numbers of rows are read early": (
        "fp8_block",
        {r"bool index_waits = begins && ids\.given\(\);": "bool index_waits = false;"},
    ),
    "an id is counted among those before it": (
        "nvfp4",
        {r"id < static_cast<u32>\(first \+ i\)": "id <= static_cast<u32>(first + i)"},
    ),
    "a combine does not wait for the rows": (
        "nvfp4",
        {r"ptx::griddepcontrol_wait\(\);(?=\s*ptx::griddepcontrol_launch_dependents\(\);\s*if \(!settled\))": ""},
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str, gpu: Emulator, seed: int) -> None:
    weights, edits = WRONG[what]
    edited = set()

    def edit(text: str) -> str:
        for right, wrong in edits.items():
            text, times = re.subn(right, wrong, text)
            edited.update([right] * times)
        return slow_dispatch(text)

    gpu.edit = edit
    with pytest.raises((AssertionError, MoERuntimeError)):
        for turn in range(MOST_SCHEDULES):
            check(weights, weights, torch.int32, seed + turn, gpu, 1)
    assert edited == set(edits)


def test_the_routing_of_a_combine_is_read_early_only_where_it_is_settled(gpu: Emulator, seed: int) -> None:
    """Right behind its dispatch it is not: taken for settled, it is what an earlier step left there."""

    def edit(text: str) -> str:
        # What is no position yet would lead astray.
        right, wrong = r"position = (__ldcg\(positions .*?\));", rf"position = min(\1, {MOST * TOP_K - 1});"
        return slow_dispatch(re.sub(right, wrong, text))

    gpu.edit = edit
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": MOST}
    formats = {"token_format": "bf16", "combine_format": "bf16"}
    own = Ranks(1, CPU, HOPPER, **sizes, **formats, mode="gathered").dispatchers[0]  # type: ignore[arg-type]

    output = torch.randn(MOST * TOP_K, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)

    def combined(data: RankInput, settled: bool) -> torch.Tensor:
        rows = own.dispatch(*data)
        sink = CombineSink(rows.handle)
        sink.rows.copy_(output)
        sink.order = ONLY_ROWS_PENDING if settled else IN_ORDER
        return own.combine(sink, rows.handle)

    found = {False: 0, True: 0}
    for turn in range(MOST_SCHEDULES):
        data = rank_input(seed + turn, 0, MOST, HIDDEN, EXPERTS, TOP_K, "random")
        wanted = combined(data, False)
        for settled in found:
            try:
                with gpu.together():
                    y = combined(data, settled)
                found[settled] += not torch.equal(y, wanted)
            except EmulatorError:  # lanes that saw different steps
                found[settled] += 1
        if found[True]:
            break
    assert found[True] > 0 and found[False] == 0
