"""Dispatch and combine, kernels and references, over virtual ranks: against plain loops and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.dispatcher.handle import DispatchedTokens
from moe_runtime.kernels.exchange import cuda, plan
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.formats.number_formats import FORMATS, MAX_ENCODE_SCALE, QuantizedRows
from moe_runtime.kernels.formats.reference_quantize import dequantize_rows, quantize_rows
from moe_runtime.launch.benchmarks.checks import ungrouped
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, expected_groups, rank_input
from tests.support.token_parts import forget_plans
from tests.support.virtual_exchange import (
    ENGINES,
    HOPPER,
    SETTINGS,
    Ranks,
    check_arrival,
    check_step,
    emulator,
    expert_rows,
    needs_hopper,
    poisoned_memory,
)

__all__ = ["emulator", "poisoned_memory"]


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("engine", ENGINES)
def test_arrival_and_combine_are_what_plain_loops_give(
    engine: str, fmt: str, mode: str, device: torch.device, seed: int
) -> None:
    ranks = Ranks(3, device, engine, token_format=fmt, mode=mode, **SETTINGS)
    for step, (tokens, routing) in enumerate([((5, 0, 2), "random"), ((1, 5, 0), "one"), ((4, 3, 5), "random")]):
        inputs = [rank_input(seed + step, r, t, 256, 7, 3, routing) for r, t in enumerate(tokens)]
        check_step(ranks, inputs, seed, torch.bfloat16 if step else torch.float32)


@pytest.mark.parametrize("hidden", [192, 288, 320, 352])
@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_and_partial_results_whose_last_fp8_block_is_short(
    engine: str, hidden: int, device: torch.device, seed: int
) -> None:
    """Huge values just before the tail, of tokens and of expert outputs, leave the scale of the tail alone."""
    settings = {**SETTINGS, "hidden_size": hidden, "combine_format": "fp8_block"}
    tail = hidden // 128 * 128
    for mode in ("gathered", "contiguous"):
        ranks = Ranks(3, device, engine, token_format="fp8_block", mode=mode, **settings)
        for step, (tokens, routing) in enumerate([((5, 0, 2), "random"), ((1, 5, 0), "one")]):
            inputs = [rank_input(seed + step, r, t, hidden, 7, 3, routing) for r, t in enumerate(tokens)]
            sizes = torch.ones(hidden)
            sizes[tail - 1], sizes[tail:] = (1e20, 1e-2) if step == 0 else (1e-2, 1e20)
            for data in inputs:
                data.x.mul_(sizes)
            check_step(ranks, inputs, seed, torch.float32 if step else torch.bfloat16, sizes)


@given(data=st.data())
def test_any_sizes_give_what_plain_loops_give(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5), "ranks")
    num_experts = data.draw(st.integers(1, 12), "experts")
    top_k = data.draw(st.integers(1, min(num_experts, 6)), "top_k")
    most = data.draw(st.integers(1, 40), "max_tokens_per_rank")
    fmt = data.draw(st.sampled_from(sorted(FORMATS)), "format")
    hidden = FORMATS[fmt].unit * data.draw(st.integers(1, 24), "units")
    mode = data.draw(st.sampled_from(["gathered", "contiguous"]), "mode")
    settings = {"hidden_size": hidden, "num_experts": num_experts, "top_k": top_k, "max_tokens_per_rank": most}
    ranks = Ranks(world, torch.device("cpu"), "torch", token_format=fmt, mode=mode, **settings)
    for _ in range(2):
        seed = data.draw(st.integers(0, 2**20), "seed")
        routing = data.draw(st.sampled_from(["random", "one", "none"]), "routing")
        counts = [data.draw(st.integers(0, most), f"tokens of rank {r}") for r in range(world)]
        inputs = [rank_input(seed, r, t, hidden, num_experts, top_k, routing) for r, t in enumerate(counts)]
        check_step(ranks, inputs, seed, torch.bfloat16)


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_and_ids_may_lie_apart(engine: str, device: torch.device, seed: int) -> None:
    """Columns of a wider matrix, and ids and weights by expert instead of by token."""
    data = rank_input(seed, 0, 5, 256, 7, 3).to(device)
    apart = RankInput(
        torch.cat([data.x, torch.full_like(data.x, torch.nan)], 1)[:, :256],
        data.topk_idx.T.contiguous().T,
        data.topk_weights.T.contiguous().T,
    )
    assert not any(t.is_contiguous() for t in apart)
    answers = []
    for brought in (data, apart):
        ranks = Ranks(1, device, engine, **SETTINGS, token_format="nvfp4")
        arrived = ranks.dispatch([brought])
        check_arrival(arrived[0], [data.to("cpu")], range(7))
        answers += ranks.combine(arrived, [expert_rows(arrived[0], 256, seed, torch.bfloat16)])
    assert_same_bits(*answers)


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize(
    ("world", "fmt", "wire", "mode"),
    [
        (1, "bf16", "bf16", "contiguous"),
        (2, "nvfp4", "mxfp8", "contiguous"),
        (4, "mxfp8", "fp8_block", "gathered"),
        (5, "fp8_block", "bf16", "contiguous"),
        (8, "nvfp4", "bf16", "gathered"),  # more ranks than experts: some have none
    ],
)
def test_kernels_and_references_give_the_same_bits(
    world: int, fmt: str, wire: str, mode: str, engine: str, device: torch.device, seed: int
) -> None:
    settings = {**SETTINGS, "token_format": fmt, "combine_format": wire, "mode": mode}
    both = [Ranks(world, device, name, **settings) for name in ("torch", engine)]
    # The third uses a half of memory again. Emulated, a step of many ranks takes long: there it is left out.
    for step in range(3 if world < 5 else 2):
        inputs = [rank_input(seed + step, r, (0, 5, 1, 3)[(r + step) % 4], 256, 7, 3) for r in range(world)]
        for data in inputs[:1]:
            if data.x.shape[0] > 2:
                data.x[1, 7] = float("nan")
                data.x[2] = 0
        results = []
        for ranks in both:
            arrived = ranks.dispatch([data.to(device) for data in inputs])
            outputs = [expert_rows(a, 256, seed + r, torch.bfloat16) for r, a in enumerate(arrived)]
            shared = None
            if step == 1:
                shared = [
                    rank_input(seed + 99, r, data.x.shape[0], 256, 7, 3).x.to(device) for r, data in enumerate(inputs)
                ]
            results.append((arrived, ranks.combine(arrived, outputs, shared)))
        (arrived_a, ys_a), (arrived_b, ys_b) = results
        for rank in range(world):
            a, b = arrived_a[rank], arrived_b[rank]
            total = int(a.group_offsets[-1])
            assert_same_bits(b.group_offsets, a.group_offsets, "group_offsets")
            assert_same_bits(b.handle.positions, a.handle.positions, "positions")
            assert_same_bits(b.handle.num_parts, a.handle.num_parts, "num_parts")
            if a.group_scale_offsets is not None and b.group_scale_offsets is not None:
                assert_same_bits(b.group_scale_offsets, a.group_scale_offsets, "group_scale_offsets")
            if a.row_index is not None and b.row_index is not None:
                assert_same_bits(b.row_index[:total], a.row_index[:total], "row_index")
            check_arrival(b, inputs, range(*ranks.dispatchers[0].geometry.starts[rank : rank + 2]))
            assert_same_bits(ys_b[rank], ys_a[rank], f"y of rank {rank}")


@pytest.mark.parametrize(
    ("engine", "fmt", "tiled"),
    [
        ("torch", "nvfp4", False),
        pytest.param(HOPPER, "mxfp8", False, marks=needs_hopper),
        pytest.param(HOPPER, "nvfp4", True, marks=needs_hopper),
    ],
)
def test_scales_of_many_rows_and_few_columns(
    engine: str, fmt: str, tiled: bool, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of 130 rows, with 3 or 6 scales in words of 4, where zeros lie behind them. `tiled` is a kernel of its
    own that fills them in."""
    monkeypatch.setattr(plan, "SMALL_CHUNK_BYTES", 0 if tiled else 1 << 20)
    monkeypatch.setattr(plan, "CHUNK", 32)
    forget_plans()
    settings = {"hidden_size": 96, "num_experts": 7, "top_k": 2, "max_tokens_per_rank": 70}
    ranks = Ranks(2, device, engine, token_format=fmt, mode="contiguous", **settings)
    if engine == HOPPER:
        assert plan.required_plan(ranks.dispatchers[0].geometry).tiled_scales == tiled
    inputs = [rank_input(seed, rank, 65, 96, 7, 2, "one") for rank in range(2)]
    for rank, arrived in enumerate(ranks.dispatch([data.to(device) for data in inputs])):
        check_arrival(arrived, inputs, range(*ranks.dispatchers[0].geometry.starts[rank : rank + 2]))


def rows_with_nan(arrived: DispatchedTokens, hidden: int, every: int, rng: torch.Generator) -> torch.Tensor:
    """fp32 expert outputs in which one number in `every` is a NaN of random bits, one an infinity and one huge."""
    rows = torch.randn(arrived.capacity, hidden, generator=rng)
    payloads = torch.randint(0x7F800001, 0x80000000, rows.shape, generator=rng).to(torch.int32).view(torch.float32)
    signs = torch.where(torch.rand(rows.shape, generator=rng) < 0.5, -1.0, 1.0)
    kinds = torch.randint(every, rows.shape, generator=rng)
    for kind, values in enumerate((payloads, torch.full_like(rows, torch.inf), torch.full_like(rows, 3e38))):
        rows = torch.where(kinds == kind, torch.copysign(values, signs), rows)
    return rows.to(arrived.rows.device)


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_results_are_nan_in_the_same_places(
    engine: str, wire: str, device: torch.device, seed: int, rng: torch.Generator
) -> None:
    """Of experts and of a shared expert that give NaN and infinities; all that is no NaN has the same bits."""
    settings = {**SETTINGS, "combine_format": wire, "mode": "contiguous"}
    inputs = [rank_input(seed, rank, 4, 256, 7, 3) for rank in range(2)]
    inputs[0].topk_weights[0] = 0
    shared = [data.x.clone() for data in inputs]
    shared[0][:, 5], shared[1][:, 6] = torch.nan, -torch.inf
    results, outputs = [], []
    for name in ("torch", engine):
        ranks = Ranks(2, device, name, **settings)
        arrived = ranks.dispatch([data.to(device) for data in inputs])
        # In other formats a NaN makes its whole block NaN.
        outputs = outputs or [rows_with_nan(a, 256, 20 if wire == "bf16" else 2000, rng) for a in arrived]
        results.append(ranks.combine(arrived, outputs, [x.to(device) for x in shared]))
    assert results[0][0].isnan().any() and results[0][1].isinf().any()
    for wanted, found in zip(*results, strict=True):
        nan = wanted.isnan()
        assert not nan.all()
        assert torch.equal(found.isnan(), nan)
        assert_same_bits(found[~nan], wanted[~nan], "numbers")


@needs_hopper
@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize("kernels_of", [(0,), (2,), (0, 1)], ids=str)
def test_ranks_may_run_different_engines(
    kernels_of: tuple[int, ...], mode: str, device: torch.device, seed: int
) -> None:
    """Hopper's kernels tell of each token by itself, and take what the references tell of by a flag alone."""
    settings = {**SETTINGS, "token_format": "nvfp4", "mode": mode}
    ranks = Ranks(3, device, "torch", **settings)
    for rank in kernels_of:
        assert plan.required_plan(ranks.dispatchers[rank].geometry).per_token_flags
        ranks.dispatchers[rank]._use(cuda)
    for step, tokens in enumerate(((5, 2, 0), (0, 5, 3), (1, 0, 5), (0, 0, 4))):
        routing = "one" if step == 2 else "random"
        inputs = [rank_input(seed + step, rank, t, 256, 7, 3, routing) for rank, t in enumerate(tokens)]
        check_step(ranks, inputs, seed + step, torch.bfloat16)
    for context in ranks.contexts:
        context.check_peers()


@needs_hopper
@pytest.mark.parametrize("max_tokens", [6, 200], ids=["one_chunk", "several"])
@pytest.mark.parametrize("token", ["nvfp4", "mxfp8"])
def test_scales_may_be_left_where_they_were_sent(
    token: str, max_tokens: int, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows and scales that the references group, found by index; results come home as always."""
    settings = {
        "hidden_size": 512,
        "num_experts": 7,
        "top_k": 3,
        "max_tokens_per_rank": max_tokens,
        "token_format": token,
        "mode": "gathered",
    }
    monkeypatch.setattr(plan, "SMALL_CHUNK_BYTES", 4096)
    forget_plans()
    references, kernels = Ranks(3, device, "torch", **settings), Ranks(3, device, HOPPER, **settings)
    assert not references.dispatchers[0].can_keep_scales_in_record and kernels.dispatchers[0].can_keep_scales_in_record
    for step, tokens in enumerate(((max_tokens, 0, 3), (1, max_tokens, 2), (0, 0, 0))):
        inputs = [rank_input(seed + step, r, t, 512, 7, 3).to(device) for r, t in enumerate(tokens)]
        wanted, handles = references.dispatch(inputs), []
        for own, data in zip(kernels.dispatchers, inputs, strict=True):
            handles.append(own.dispatch_send(*data, scales_in_record=True))
        found = [own.dispatch_recv(handle) for own, handle in zip(kernels.dispatchers, handles, strict=True)]
        for rank, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.scales_in_record and not b.scales_in_record
            assert_same_bits(a.group_offsets, b.group_offsets, f"offsets of rank {rank}")
            linear, other = ungrouped(a), ungrouped(b)
            assert linear.scales_RV is not None and other.scales_RV is not None
            assert_same_bits(linear.quants_RK, other.quants_RK, f"quants of rank {rank}")
            assert_same_bits(linear.scales_RV, other.scales_RV, f"scales of rank {rank}")
            if other.row_scale_R is not None:
                assert linear.row_scale_R is not None
                assert_same_bits(linear.row_scale_R, other.row_scale_R, f"row scales of rank {rank}")
        outputs = [
            torch.randn(a.capacity, 512, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
            for rank, a in enumerate(found)
        ]
        for y, want in zip(kernels.combine(found, outputs), references.combine(wanted, outputs), strict=True):
            assert_same_bits(y, want, "combined")
    forget_plans()


def test_rows_that_are_expected_are_those_of_experts_chosen_alike(device: torch.device) -> None:
    """40 tokens of 3 ranks choose 3 of 7 experts each: 360 rows, in parts as large as those of the experts."""
    sizes = {"hidden_size": 64, "num_experts": 7, "top_k": 3, "max_tokens_per_rank": 40}
    ranks = Ranks(3, device, "torch", token_format="bf16", **sizes)
    idx = torch.arange(40 * 3).view(40, 3)
    inputs = [rank_input(0, r, 40, 64, 7, 3)._replace(topk_idx=(idx + r) % 7).to(device) for r in range(3)]
    for own, found in zip(ranks.dispatchers, ranks.dispatch(inputs), strict=True):
        share = own.geometry.num_local_experts / 7
        assert found.expected_rows == own.geometry.expected_rows == round(360 * share) < found.capacity
        assert abs(int(found.group_offsets[-1]) - found.expected_rows) <= 0.1 * found.expected_rows
        assert found.likely_rows == found.expected_rows
        assert replace(found, expected_rows=None).likely_rows == found.capacity
        assert replace(own.geometry, row_capacity=7).expected_rows == 7


def test_rows_that_are_expected_of_a_router_with_more_experts(device: torch.device, seed: int) -> None:
    """One of eight ranks that hold the same tokens, with 16 of 128 experts: an eighth of the routes are here."""
    sizes = {"hidden_size": 64, "num_experts": 16, "top_k": 8, "max_tokens_per_rank": 2000}
    own = Ranks(1, device, "torch", token_format="bf16", **sizes).dispatchers[0].geometry
    ids = torch.rand(2000, 128, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :8]
    expected = replace(own, router_ids=RouterIds(32, 128)).expected_rows
    assert expected == 2000 < own.expected_rows == 16000
    assert abs(int(((ids >= 32) & (ids < 48)).sum()) - expected) <= 0.1 * expected


def test_scales_cannot_be_left_by_other_engines(device: torch.device, seed: int) -> None:
    sizes = {"hidden_size": 64, "num_experts": 2, "top_k": 1, "max_tokens_per_rank": 4}
    ranks = Ranks(1, device, "torch", token_format="nvfp4", **sizes)
    data = rank_input(seed, 0, 2, 64, 2, 1).to(device)
    with pytest.raises(ValueError, match=r"^scales_in_record: expected False"):
        ranks.dispatchers[0].dispatch_send(*data, scales_in_record=True)


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize("engine", ENGINES)
def test_slots_that_nobody_has_written_are_of_no_epoch(engine: str, mode: str, device: torch.device, seed: int) -> None:
    """Of 0 neither, which comes after 2^32 dispatches."""
    ranks = Ranks(3, device, engine, fresh=True, token_format="nvfp4", mode=mode, **SETTINGS)
    for context in ranks.contexts:
        layout, signals = context.signals_layout, context.signals
        context.epoch.fill_(-2)
        for flag in (layout.dispatch_flag, layout.combine_flag):
            signals[flag : flag + 3], signals[flag + 3 : flag + 6] = -2, -3
        signals[layout.ready : layout.ready + 3] = -2
    for step, tokens in enumerate(((5, 4, 3), (3, 5, 4), (5, 5, 5))):
        inputs = [rank_input(seed + step, rank, t, 256, 7, 3) for rank, t in enumerate(tokens)]
        check_step(ranks, inputs, seed, torch.bfloat16)
    assert [int(context.epoch) for context in ranks.contexts] == [1] * 3


@pytest.mark.parametrize("wire", ["fp8_block", "mxfp8"])
def test_a_quantized_wire_rounds_each_partial_result_once(wire: str, device: torch.device, seed: int) -> None:
    ranks = Ranks(2, device, "torch", combine_format=wire, **{**SETTINGS, "num_experts": 2, "top_k": 2})
    inputs = [rank_input(seed, r, 4, 256, 2, 2) for r in range(2)]
    arrived = ranks.dispatch([data.to(device) for data in inputs])
    outputs = [expert_rows(a, 256, seed + r, torch.bfloat16) for r, a in enumerate(arrived)]
    ys = ranks.combine(arrived, outputs)
    for rank, data in enumerate(inputs):
        total = torch.zeros(4, 256)
        for holder in range(2):
            positions = arrived[holder].handle.positions[rank * 5 : rank * 5 + 4]
            partial = torch.zeros(4, 256)
            for k in range(2):
                has = positions[:, k].cpu() >= 0
                rows = outputs[holder][positions[has.to(device), k].long()].float().cpu()
                partial[has] += data.topk_weights[has, k, None] * rows
            q = quantize_rows(partial, FORMATS[wire])
            sent = (positions >= 0).any(dim=1).cpu()
            total[sent] += dequantize_rows(QuantizedRows(q.format, q.quants_RK, q.scales_RV))[sent]
        assert_same_bits(ys[rank], total.to(torch.bfloat16), "y")


def test_a_capacity_above_the_worst_case_is_that() -> None:
    """7 experts, 3 of a token, on 2 ranks with 5 tokens each."""
    ranks = Ranks(2, torch.device("cpu"), "torch", expert_row_capacity=1000, **SETTINGS)
    assert [dispatcher.geometry.row_capacity for dispatcher in ranks.dispatchers] == [30, 30]


@pytest.mark.parametrize("input_scale", [0.003, 1e-36])
def test_a_static_input_scale_is_used_as_given(input_scale: float, device: torch.device, seed: int) -> None:
    ranks = Ranks(1, device, "torch", token_format="nvfp4", mode="contiguous", input_scale=input_scale, **SETTINGS)
    data = rank_input(seed, 0, 5, 256, 7, 3)
    arrived = ranks.dispatch([data.to(device)])[0]
    gsf = (torch.ones(1) / torch.tensor([input_scale])).clamp(max=MAX_ENCODE_SCALE)
    want = quantize_rows(data.x, FORMATS["nvfp4"], gsf=gsf)
    rows = [row for group in expected_groups([data], range(7)) for row in group]
    assert arrived.row_scale is not None
    for position, (_, token, _) in enumerate(rows):
        assert_same_bits(arrived.rows[position], want.quants_RK[token])
        assert float(arrived.row_scale[position]) == float(1 / gsf)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_may_be_parts_of_longer_ones(engine: str, device: torch.device, seed: int) -> None:
    """Of tokens, experts and a shared expert, by the engine that is named; the scale is static."""

    def part(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.full((rows.shape[0], rows.shape[1] + 64), 9.0, dtype=rows.dtype, device=device)
        wide[:, 32:-32] = rows
        return wide[:, 32:-32]

    settings = {**SETTINGS, "token_format": "nvfp4", "mode": "contiguous", "input_scale": 0.003}
    inputs = [rank_input(seed, rank, 4, 256, 7, 3).to(device) for rank in range(2)]
    shared = [rank_input(seed + 1, rank, 4, 256, 7, 3).x.to(device) for rank in range(2)]
    references, ranks = Ranks(2, device, "torch", **settings), Ranks(2, device, engine, **settings)
    wanted, found = references.dispatch(inputs), ranks.dispatch([data._replace(x=part(data.x)) for data in inputs])
    outputs = [expert_rows(a, 256, seed, torch.float32) for a in wanted]
    for a, b in zip(wanted, found, strict=True):
        total = int(a.group_offsets[-1])
        assert_same_bits(b.rows[:total], a.rows[:total], "rows")
        assert a.row_scale is not None and b.row_scale is not None
        assert_same_bits(b.row_scale[:total], a.row_scale[:total], "row scales")
    ys = ranks.combine(found, [part(rows) for rows in outputs], [part(rows) for rows in shared])
    for y, want in zip(ys, references.combine(wanted, outputs, shared), strict=True):
        assert_same_bits(y, want, "y")
