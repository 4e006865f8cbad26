"""Few tokens of a rank alone, emulated: one launch each way gives the bits and errors of the kernels that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import CapacityError, MoERuntimeError, RoutingError
from moe_runtime.comm.signals import WITHOUT_SIGN
from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.kernels.exchange import cuda, one_rank_cuda, plan
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.exchange.landing import landing_records
from moe_runtime.kernels.exchange.local_ids import local_ids
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from moe_runtime.kernels.exchange.plan import required_plan
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS, FORMATS
from moe_runtime.launch.research.aot_exchange import one_rank_geometry
from tests.emulator import MOST_SCHEDULES, Emulator, needs_emulator
from tests.support.comparison import assert_same_bits
from tests.support.emulated_steps import assert_is_found
from tests.support.exchange_data import RankInput, expected_groups, rank_input
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import HOPPER, Ranks, emulator, expert_rows, poisoned_memory

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
MOST, REAL_BOUND = 64, plan.ONE_RANK_TOKENS
SETTINGS: dict[str, Any] = {
    "hidden_size": 384,
    "num_experts": 10,
    "top_k": 3,
    "max_tokens_per_rank": MOST + 6,
    "token_format": "nvfp4",
}
WAITING = {"combine_send", "combine_recv"}
ONE_LAUNCH_EACH = {"one_rank_dispatch", "one_rank_combine"}


@contextmanager
def waiting_kernels() -> Iterator[None]:
    """Dispatchers that are made inside do steps as ranks that have peers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "of_one_rank", lambda geometry: None)
        yield


@pytest.fixture(autouse=True)
def lower_bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fewer tokens to emulate."""
    monkeypatch.setattr(plan, "ONE_RANK_TOKENS", MOST)
    forget_plans()
    yield
    forget_plans()


class Both:
    """The same layer twice, on a rank alone: with kernels that wait, and with those of one rank.

    If ids are those of a `router`, the kernels that wait get them from `local_ids`.
    """

    def __init__(self, emulator: Emulator, router: RouterIds | None = None, **settings: Any) -> None:
        self.emulator, self.router = emulator, router
        with waiting_kernels():
            self.waiting = Ranks(1, CPU, HOPPER, **{**SETTINGS, **settings})
        self.alone = Ranks(1, CPU, HOPPER, **{**SETTINGS, **settings})
        if router is not None:
            self.alone.dispatchers[0]._take_ids_of(router)

    def numbered(self, data: RankInput) -> torch.Tensor:
        """The ids that the kernels that wait get."""
        if self.router is None:
            return data.topk_idx
        own = self.waiting.dispatchers[0].geometry.num_experts
        sizes = self.router.num_experts, self.router.first, own
        return local_ids(data.topk_idx, data.topk_weights, *sizes, "cuda")

    def dispatch(self, data: RankInput) -> tuple[DispatchedTokens, DispatchedTokens]:
        wanted = self.waiting.dispatchers[0].dispatch(data.x, self.numbered(data), data.topk_weights)
        self.emulator.launched.clear()
        return wanted, self.alone.dispatchers[0].dispatch(*data)

    def combine(
        self, arrived: tuple[DispatchedTokens, DispatchedTokens], output: torch.Tensor, shared: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = self.waiting.dispatchers[0].combine(output, arrived[0].handle, shared=shared)
        self.emulator.launched -= {launched for launched in self.emulator.launched if launched[1] in WAITING}
        return wanted, self.alone.dispatchers[0].combine(output, arrived[1].handle, shared=shared)

    def fail(self, data: RankInput, error: type[MoERuntimeError]) -> str:
        """A step that is refused alike, with nothing to read and NaN for each token; returns what is said."""
        said, left = [], []
        for ranks, ids in ((self.waiting, self.numbered(data)), (self.alone, data.topk_idx)):
            own, context = ranks.dispatchers[0], ranks.contexts[0]
            # Both halves are called before the first has run, as on a GPU.
            with self.emulator.together():
                handle = own.dispatch_send(data.x, ids, data.topk_weights)
                buffers = handle._buffers
                own.dispatch_recv(handle)
            with pytest.raises(error) as caught:
                context.check()
            said.append(str(caught.value))
            left.append((buffers, handle, context.error))
        (buffers, handle, record), (found, found_handle, found_record) = left
        for name in ("positions", "group_offsets", "group_scale_offsets", "row_index"):
            assert_same_bits(getattr(found, name), getattr(buffers, name), name)
        assert_same_bits(found_handle.num_parts, handle.num_parts, "num_parts")
        assert_same_bits(found_handle.epoch, handle.epoch, "epoch")
        assert_same_bits(found_record, record, "error")
        y = torch.zeros_like(data.x)
        output = torch.ones(self.alone.dispatchers[0].geometry.row_capacity, y.shape[1], dtype=torch.bfloat16)
        own, context = self.alone.dispatchers[0], self.alone.contexts[0]
        one_rank_cuda.ONE_RANK.combine(context, own.geometry, output, found.positions, found_handle.epoch, data.x, y)
        assert bool(y.isnan().all())
        assert said[0] == said[1]
        return said[0]

    def step(self, data: RankInput, seed: int, dtype: torch.dtype = torch.bfloat16, shared: bool = False) -> None:
        """One step: the same bits of all that is handed out, also where both have failed."""
        arrived = self.dispatch(data)
        assert_same_arrival(*arrived)
        geometry = self.alone.dispatchers[0].geometry
        output = expert_rows(arrived[0], geometry.output_hidden, seed, dtype)
        wanted, y = self.combine(arrived, output, data.x if shared else None)
        assert_same_bits(y, wanted, "y")
        assert_same_records(self, data.x.shape[0], arrived[0])
        # Kernels of other steps look at these.
        for field in ("dispatch_flag", "token_count", "combine_flag"):
            word = getattr(self.alone.contexts[0].signals_layout, field)
            words = [ranks.contexts[0].signals[word : word + 2] & WITHOUT_SIGN for ranks in (self.alone, self.waiting)]
            assert_same_bits(*words, field)


def assert_same_arrival(wanted: DispatchedTokens, found: DispatchedTokens) -> None:
    for name in ("group_offsets", "group_scale_offsets", "scales", "row_scale", "row_index"):
        if getattr(wanted, name) is not None:
            assert_same_bits(getattr(found, name), getattr(wanted, name), name)
    for name in ("positions", "num_parts", "epoch"):
        assert_same_bits(getattr(found.handle, name), getattr(wanted.handle, name), name)
    rows = slice(0, int(wanted.group_offsets[-1]))
    both = [a.rows[rows] if a.row_index is None else a.rows[a.row_index[rows]] for a in (found, wanted)]
    assert_same_bits(*both, "rows")


def assert_same_records(both: Both, num_tokens: int, arrived: DispatchedTokens) -> None:
    """All fields of the records of tokens that go to an expert; there is none after a failure."""
    geometry = both.alone.dispatchers[0].geometry
    record, fmt = geometry.record, geometry.token_format
    tokens = (arrived.handle.positions[:num_tokens] >= 0).any(dim=1).nonzero().flatten()
    first = int(arrived.handle.epoch) % 2 * (landing_rows_of_half(both))
    fields = {
        "quants": (0, fmt.quant_bytes(geometry.hidden)),
        "scales": (record.scales_offset, fmt.scale_bytes(geometry.hidden)),
        "row scale": (record.row_scale_offset, 4 if fmt.has_row_scale else 0),
        "source": (record.source_offset, 4),
        "ids": (record.ids_offset, 2 * geometry.top_k),
        "weights": (record.weights_offset, 4 * geometry.top_k),
    }
    for name, (at, size) in fields.items():
        found, wanted = (
            landing_records(ranks.contexts[0], geometry)[first + tokens, at : at + size]
            for ranks in (both.alone, both.waiting)
        )
        assert_same_bits(found, wanted, f"{name} of records")


def landing_rows_of_half(both: Both) -> int:
    geometry = both.alone.dispatchers[0].geometry
    half = both.alone.contexts[0].half_bytes["landing"]
    return geometry.landing_half(half) // geometry.record.record_bytes


def tokens(seed: int, count: int, routing: str = "random", **settings: Any) -> RankInput:
    sizes = {**SETTINGS, **settings}
    return rank_input(seed, 0, count, sizes["hidden_size"], sizes["num_experts"], sizes["top_k"], routing)


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize("wire", COMBINE_FORMATS)
@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "mxfp4"])
def test_bits_of_the_kernels_that_wait(fmt: str, wire: str, mode: str, emulator: Emulator, seed: int) -> None:
    both = Both(emulator, token_format=fmt, combine_format=wire, mode=mode)
    for step, (count, routing) in enumerate(
        [(1, "random"), (33, "random"), (0, "random"), (MOST, "one"), (5, "none"), (MOST, "random")]
    ):
        dtype = torch.float32 if step % 3 == 1 else torch.bfloat16
        data = tokens(seed + step, count, routing)
        data.x[:1, 5] = torch.nan
        data.x[1:2] = 0
        both.step(data, seed, dtype, shared=step % 2 == 1)
        assert {name for _, name in emulator.launched} == ONE_LAUNCH_EACH
    for ranks in (both.waiting, both.alone):
        ranks.contexts[0].check_peers()


def test_the_bound_divides_steps_of_one_exchange(emulator: Emulator, seed: int) -> None:
    both = Both(emulator)
    for step, count in enumerate([MOST, MOST + 1, 1, MOST + 1, MOST + 6, 0, 2, MOST]):
        both.step(tokens(seed + step, count), seed + step)
        dispatch = {"one_rank_dispatch"} if count <= MOST else {"dispatch_send", "recv_permute"}
        assert {name for _, name in emulator.launched} == {*dispatch, "one_rank_combine"}
    both.alone.contexts[0].check_peers()


def test_the_bound_as_it_is(emulator: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert may get as many rows as a block of swizzled scales has."""
    monkeypatch.setattr(plan, "ONE_RANK_TOKENS", REAL_BOUND)
    forget_plans()
    settings: dict[str, Any] = {"hidden_size": 128, "max_tokens_per_rank": REAL_BOUND + 12}
    both = Both(emulator, **settings, mode="contiguous")
    for step, count in enumerate([REAL_BOUND, REAL_BOUND + 1, 1, REAL_BOUND + 12]):
        both.step(tokens(seed + step, count, "one" if step == 0 else "random", **settings), seed)
        assert (("one_rank_dispatch.cu", "one_rank_dispatch") in emulator.launched) == (count <= REAL_BOUND)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 600, "top_k": 8, "hidden_size": 128},
        {"num_experts": 33, "top_k": 32, "hidden_size": 16},
        {"num_experts": 1, "top_k": 1},
        {"token_format": "fp8_block", "combine_format": "fp8_block", "hidden_size": 528, "mode": "contiguous"},
        {"token_format": "bf16", "hidden_size": 4240, "combine_format": "fp8_block"},
        {"token_format": "mxfp8", "hidden_size": 96, "num_sms": 2, "mode": "contiguous"},
        {"token_format": "nvfp4", "hidden_size": 8208, "num_sms": 1},
        {"input_scale": 0.01, "max_tokens_per_rank": 3000},
        {"output_size": 640, "combine_format": "mxfp8"},
    ],
    ids=str,
)
def test_sizes_at_the_edges(settings: dict[str, Any], emulator: Emulator, seed: int) -> None:
    both = Both(emulator, **settings)
    for step, count in enumerate([3, MOST // 4]):
        data = tokens(seed + step, count, **settings)
        data.topk_idx[0] = -1
        both.step(RankInput(data.x, data.topk_idx.int(), data.topk_weights), seed)
        assert {name for _, name in emulator.launched} == ONE_LAUNCH_EACH


BAD_IDS: dict[str, Callable[[torch.Tensor], None]] = {
    "above": lambda idx: idx[2].copy_(torch.tensor([0, SETTINGS["num_experts"], 1])),
    "below": lambda idx: idx[1].copy_(torch.tensor([-2, 3, 4])),
    "far": lambda idx: idx[0].copy_(torch.tensor([1, 2, 2**40 + 5])),
    "repeated": lambda idx: idx[3].copy_(torch.tensor([7, 2, 7])),
    "several of a token": lambda idx: idx[3].copy_(torch.tensor([7, 7, 99])),
}


@pytest.mark.parametrize("what", BAD_IDS)
def test_bad_ids_are_told_as_by_the_kernels_that_wait(what: str, emulator: Emulator, seed: int) -> None:
    both = Both(emulator)
    both.step(tokens(seed, 4), seed)
    data = tokens(seed + 1, 5)
    BAD_IDS[what](data.topk_idx)
    text = both.fail(data, RoutingError)
    assert what != "far" or f"expert id {2**31 - 1} of token 0 of rank 0" in text


ROUTERS = [RouterIds(0, 10), RouterIds(0, 30), RouterIds(7, 30), RouterIds(20, 30)]
IDS = {"int32": torch.int32, "int64": torch.int64}


def routed(seed: int, count: int, router: RouterIds, ids: torch.dtype, routing: str = "random") -> RankInput:
    """Tokens with ids of a router, some of them -1 or with a weight that is NaN."""
    data = tokens(seed, count, routing, num_experts=router.num_experts)
    generator = torch.Generator().manual_seed(seed)
    data.topk_idx[torch.rand(data.topk_idx.shape, generator=generator) < 0.1] = -1
    data.topk_weights[torch.rand(data.topk_idx.shape, generator=generator) < 0.2] = torch.nan
    return RankInput(data.x, data.topk_idx.to(ids), data.topk_weights)


@pytest.mark.parametrize("settings", [{}, {"token_format": "fp8_block", "mode": "contiguous"}], ids=["nvfp4", "fp8"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_ids_of_a_router(router: RouterIds, ids: str, settings: Any, emulator: Emulator, seed: int) -> None:
    """Few tokens and many: what comes of ids that a launch of its own has numbered."""
    both = Both(emulator, router, **settings)
    for step, (count, routing) in enumerate(
        [(1, "random"), (33, "random"), (0, "random"), (MOST, "random"), (5, "none"), (MOST + 6, "random")]
    ):
        both.step(routed(seed + step, count, router, IDS[ids], routing), seed, shared=step % 2 == 1)
        dispatch = {"one_rank_dispatch"} if count <= MOST else {"dispatch_send", "recv_permute"}
        assert {name for _, name in emulator.launched} == {*dispatch, "one_rank_combine"}
    both.alone.contexts[0].check_peers()


WRONG_IDS = {
    "above": [29, 30, 28],
    "below": [3, -2, 9],
    "far": [3, 2**40 + 11, 2],
    "repeated here": [11, 29, 11],
}


@pytest.mark.parametrize("count", [5, MOST + 6])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("what", WRONG_IDS)
def test_wrong_ids_of_a_router(what: str, ids: str, count: int, emulator: Emulator, seed: int) -> None:
    both = Both(emulator, RouterIds(7, 30))
    data = routed(seed, count, RouterIds(7, 30), IDS[ids])
    # An id counts for nothing where the weight is NaN, and those of other ranks may repeat.
    data.topk_idx[:2] = torch.tensor([[30, -5, 2**31 - 1], [29, 29, 2]])
    data.topk_weights[:2] = torch.tensor([[torch.nan] * 3, [1.0, 2.0, 3.0]])
    both.step(data, seed)
    data.topk_idx[3] = torch.tensor(WRONG_IDS[what]).clamp(max=torch.iinfo(IDS[ids]).max)
    data.topk_weights[3] = torch.tensor([0.5, 0.25, 0.125])
    assert f"expert id {4 if 'repeated' in what else 10} of token 3 of" in both.fail(data, RoutingError)


def test_weights_that_are_nan_without_a_router(emulator: Emulator, seed: int) -> None:
    """They are weights, of routes as others."""
    both, data = Both(emulator), tokens(seed, 9)
    data.topk_weights[::2] = torch.nan
    both.step(data, seed)
    arrived = both.alone.dispatchers[0].dispatch(*data)
    assert int(arrived.group_offsets[-1]) == int((data.topk_idx >= 0).sum())


def test_the_first_of_several_tokens_with_bad_ids_is_named(emulator: Emulator, seed: int) -> None:
    data = tokens(seed, MOST)
    data.topk_idx[[40, 9, 63], 1] = 77
    own = Ranks(1, CPU, HOPPER, **SETTINGS).dispatchers[0]
    with pytest.raises(RoutingError, match=r"expert id 77 of token 9 of"):
        own.dispatch(*data)


def test_too_many_rows_are_told_as_by_the_kernels_that_wait(emulator: Emulator, seed: int) -> None:
    both = Both(emulator, expert_row_capacity=20)
    both.step(tokens(seed, 6, "one"), seed)
    assert "21 rows" in both.fail(tokens(seed, 7, "one"), CapacityError)


def test_halves_that_are_called_one_by_one(emulator: Emulator, seed: int) -> None:
    """The sum waits for `combine_recv`: only there it is known what is added, and `expert_output` may change before."""
    ranks = Ranks(1, CPU, HOPPER, **SETTINGS)
    reference = Ranks(1, CPU, "torch", **SETTINGS)
    data = tokens(seed, 9)
    arrived, wanted = ranks.dispatch([data]), reference.dispatch([data])
    assert {name for _, name in emulator.launched} == {"one_rank_dispatch"}
    output = expert_rows(arrived[0], SETTINGS["hidden_size"], seed, torch.bfloat16)
    wanted_y = reference.combine(wanted, [output.clone()], [data.x])
    own, handle = ranks.dispatchers[0], arrived[0].handle
    own.combine_send(output, handle)
    output.fill_(torch.nan)
    assert_same_bits(own.combine_recv(handle, shared=data.x), wanted_y[0])


def test_routing_that_is_sent_again(emulator: Emulator, seed: int) -> None:
    """Kernels that look at flags follow a dispatch that waits for none."""
    found = []
    for engine in ("torch", HOPPER):
        ranks = Ranks(1, CPU, engine, **SETTINGS, reusable_handles=True)
        own = ranks.dispatchers[0]
        if engine == HOPPER:
            assert own._routing_only is not None
            own._routing_only._use(cuda)
        data = tokens(seed, 9)
        arrived = own.dispatch(*data)
        output = expert_rows(arrived, SETTINGS["hidden_size"], seed, torch.bfloat16)
        first = own.combine(output, arrived.handle)
        again = own.combine(output, arrived.handle, topk_weights=data.topk_weights.flip(0).contiguous())
        found.append((first, again))
        ranks.contexts[0].check_peers()
    for wanted, y in zip(*found, strict=True):
        assert_same_bits(y, wanted)


def run_padded(emulator: Emulator, seed: int) -> None:
    """Kernels that look at flags follow dispatches whose flags come before what they stand for."""
    settings = {**SETTINGS, "token_format": "bf16", "mode": "gathered"}
    own = Ranks(1, CPU, HOPPER, **settings).dispatchers[0]
    inputs = [tokens(seed + step, count) for step, count in enumerate([5, MOST, 1, 7, MOST + 1, 2])]
    experts, hidden, slots = SETTINGS["num_experts"], SETTINGS["hidden_size"], SETTINGS["max_tokens_per_rank"]
    found = []
    with emulator.together():
        for some in (inputs[:1], inputs[1:2], inputs[2:4], inputs[4:]):
            handles = [own.dispatch_send(*data) for data in some]
            for handle in handles:
                out = PaddedRows.allocate(experts, slots, 2 * hidden, 1, SETTINGS["top_k"], device=CPU)
                own.dispatch_recv_padded(handle, out)
                found.append(out)
    for step, (data, out) in enumerate(zip(inputs, found, strict=True)):
        for e, came in enumerate(expected_groups([data], range(experts))):
            assert int(out.counts[e]) == len(came)
            rows = data.x[[token for _, token, _ in came]].view(torch.uint8)
            assert_same_bits(out.rows[e, : len(came)], rows, f"rows of expert {e} in step {step}")
    own.context.check_peers()


def slow_records(text: str) -> str:
    """Records that are stored long after their token flags."""
    return text.replace(
        "if (!good) continue;", "for (int i = 0; i < 30; ++i) load_relaxed(latch); if (!good) continue;"
    )


def test_padded_rows(emulator: Emulator, seed: int) -> None:
    emulator.edit = slow_records
    for turn in range(4):
        run_padded(emulator, seed + turn)


def test_padded_rows_that_come_too_early_are_found(
    emulator: Emulator, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_flags_are_unordered", lambda geometry: False)
    emulator.edit = slow_records
    with pytest.raises(AssertionError):
        for turn in range(MOST_SCHEDULES):
            run_padded(emulator, seed + turn)


def run_together(emulator: Emulator, seed: int) -> None:
    """Steps whose kernels begin before those before have ended, and blocks of a kernel one after the other."""
    settings = {**SETTINGS, "num_experts": 70}
    ranks, reference = Ranks(1, CPU, HOPPER, **settings), Ranks(1, CPU, "torch", **settings)
    inputs = [tokens(seed + step, count, num_experts=70) for step, count in enumerate([3, MOST, 1, 7, MOST + 1, 2])]
    capacity, hidden = ranks.dispatchers[0].geometry.row_capacity, SETTINGS["hidden_size"]
    output = torch.randn(capacity, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    found = []
    with emulator.together():
        for data in inputs:
            arrived = ranks.dispatchers[0].dispatch(*data)
            found.append((arrived, ranks.dispatchers[0].combine(output, arrived.handle)))
    for step, (data, (arrived, y)) in enumerate(zip(inputs, found, strict=True)):
        wanted = reference.dispatch([data])
        assert_same_bits(arrived.handle.epoch, wanted[0].handle.epoch, f"epoch of step {step}")
        assert_same_bits(arrived.handle.positions, wanted[0].handle.positions, f"positions of step {step}")
        assert_same_bits(y, reference.combine(wanted, [output])[0], f"y of step {step}")
    ranks.contexts[0].check_peers()


def test_kernels_that_begin_early(emulator: Emulator, seed: int) -> None:
    for turn in range(4):
        run_together(emulator, seed + turn)


WAITS = r"ptx::griddepcontrol_wait\(\);"
WRONG = {
    "nothing before is awaited": (WAITS, ""),
    "an epoch is stored before all have read it": (r"arrived == static_cast<int>\(gridDim\.x\) - 1", "true"),
    "places are found before all tokens are seen": (r"bad = __syncthreads_or\(bad\) != 0;", ""),
    "rows of experts before are not all counted": (r"if \(w < warp\) of_warps \+= sums\[w\];", ""),
    "weights of the other half": (r"epoch & 1 \? weights\[1\] : weights\[0\]", "epoch & 1 ? weights[0] : weights[1]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_kernels_that_are_wrong_are_found(what: str, emulator: Emulator, seed: int) -> None:
    assert_is_found(WRONG[what], emulator, lambda turn: run_together(emulator, seed + turn), only_in="one_rank")


@pytest.mark.parametrize(
    ("world", "max_tokens", "expected"), [(1, 1, 32), (1, 33, 64), (1, 4096, MOST), (2, 1, 0), (32, 64, 0)]
)
def test_the_plan_of_a_rank_alone(world: int, max_tokens: int, expected: int) -> None:
    geometry = replace(one_rank_geometry("nvfp4", max_tokens=max_tokens), world_size=world)
    sizes = required_plan(geometry)
    assert sizes.one_rank_tokens == expected and sizes.one_rank == (world == 1)
    assert sizes.dispatches_at_once(expected) == (world == 1)
    assert not sizes.dispatches_at_once(expected + 1)
