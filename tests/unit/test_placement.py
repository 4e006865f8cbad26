"""Placements as data, the planner against what is best, and the balance that ids of real steps get from it."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.config import PlacementConfig
from moe_runtime.launch.common import draws
from moe_runtime.placement import placement as placement_module
from moe_runtime.placement.physical_experts import SlotTable
from moe_runtime.placement.placement import Placement, placement_from_config, plan_placement

LOADS = st.lists(st.floats(0, 1e12), min_size=1, max_size=24)


def sizes_for(data: st.DataObject, num_experts: int) -> tuple[int, int]:
    """Ranks, and slots of each, that hold so many experts."""
    ranks = data.draw(st.integers(1, 9), "ranks")
    return ranks, data.draw(st.integers(-(-num_experts // ranks), num_experts), "slots")


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(placement_module)
    assert outcome.attempted > 0 and outcome.failed == 0


@given(LOADS, st.data())
def test_a_plan_is_valid_and_replicates_as_well_as_can_be(load: list[float], data: st.DataObject) -> None:
    ranks, slots = sizes_for(data, len(load))
    plan = plan_placement(load, ranks, slots)
    assert plan == plan_placement(load, ranks, slots)
    assert (plan.num_experts, plan.num_ranks, plan.slots_per_rank) == (len(load), ranks, slots)
    for rank in range(ranks):
        experts = plan.rank_experts(rank)
        assert len(set(experts)) == slots and list(experts) == sorted(experts)
    for rank in (-1, ranks):
        with pytest.raises(ValueError, match=rf"^rank: expected 0 \.\. {ranks - 1}, got {rank}$"):
            plan.rank_experts(rank)
    assert all(plan.replicas)
    # No other number of replicas has a smaller largest load per replica: with it, more slots would be needed.
    largest = max(value / len(held) for value, held in zip(load, plan.replicas, strict=True))
    if largest > 0:
        needed = [min((n for n in range(1, ranks + 1) if value / n < largest), default=None) for value in load]
        assert None in needed or sum(filter(None, needed)) > ranks * slots
    total = math.fsum(plan.rank_loads(load))
    assert math.isclose(total, math.fsum(load), rel_tol=1e-9, abs_tol=1e-300)


@given(LOADS, st.data())
def test_a_placement_survives_json_and_keeps_experts_where_they_were(load: list[float], data: st.DataObject) -> None:
    ranks, slots = sizes_for(data, len(load))
    plan = plan_placement(load, ranks, slots)
    again = Placement.from_json(plan.to_json())
    assert again == plan and again.fingerprint == plan.fingerprint
    old = plan_placement(load[::-1], ranks, slots)
    kept = plan.reordered_like(old)
    for rank in range(ranks):
        assert sorted(kept.rank_experts(rank)) == sorted(plan.rank_experts(rank))
        for before, after in zip(old.rank_experts(rank), kept.rank_experts(rank), strict=True):
            assert before == after or before not in plan.rank_experts(rank)
    assert (kept.fingerprint == old.fingerprint) == (kept == old)


@pytest.mark.parametrize("top_k", [1, 8])
def test_zipf_load_comes_within_a_tenth_of_the_mean(top_k: int, seed: int) -> None:
    """256 experts and 32 spare slots on 8 ranks, planned by the tokens of one step, measured by those of another.

    8192 rows of a rank: chance moves the rows of one by a ninetieth of the mean in each of the two steps, so a tenth
    is six standard deviations of their sum.
    """
    ranks, slots = 8, 36
    counted, other = (
        torch.cat([draws.routing("zipf", seed, r, step, 8192 // top_k, 256, top_k)[0] for r in range(ranks)])
        for step in (0, 1)
    )
    load = torch.bincount(counted.flatten(), minlength=256).tolist()
    x = torch.randn(other.shape[0], 64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)

    def busiest(placement: Placement) -> float:
        """Rows of the busiest rank, relative to the mean of all."""
        slot = SlotTable(placement, other.device)(other, x).flatten().long()
        rows = torch.bincount(slot // placement.slots_per_rank, minlength=ranks).double()
        return float(rows.max() / rows.mean())

    assert busiest(plan_placement(load, ranks, slots)) < 1.1
    # What would have been without replicas, contiguous or packed as well as can be.
    assert busiest(Placement.contiguous(256, ranks)) > 2
    assert top_k > 1 or busiest(plan_placement(load, ranks, 32)) > 1.2


def test_the_zipf_law_itself_is_balanced_to_a_thousandth() -> None:
    load = [1 / (expert + 1) for expert in range(256)]
    assert max(plan_placement(load, 8, 36).rank_loads(load)) < 1.001 * math.fsum(load) / 8


@given(exponent=st.floats(0, 1.3), ranks=st.sampled_from([2, 4, 8]), data=st.data())
def test_planned_loads_of_any_zipf_are_balanced(exponent: float, ranks: int, data: st.DataObject) -> None:
    """As long as no expert has more than a rank's share even on every rank."""
    load = data.draw(st.permutations([(e + 1) ** -exponent for e in range(128)]))
    plan = plan_placement(load, ranks, 128 // ranks + 4)
    assert max(plan.rank_loads(load)) <= 1.1 * math.fsum(load) / ranks


def test_ties_go_to_the_lowest_expert_and_rank() -> None:
    assert plan_placement([1, 1, 1, 1], 2, 3).slot_experts == (0, 1, 2, 0, 1, 3)
    assert plan_placement([0, 0, 0, 0], 2, 2).slot_experts == (0, 2, 1, 3)


@given(experts=st.integers(2, 40), ranks=st.integers(2, 8), data=st.data())
def test_experts_without_load_share_what_slots_are_left(experts: int, ranks: int, data: st.DataObject) -> None:
    """Such as those of a layer that has not run: whatever its load will be, replicas of few of them help little."""
    slots = data.draw(st.integers(-(-experts // ranks), experts))
    counts = [len(slots_of) for slots_of in plan_placement([0] * experts, ranks, slots).replicas]
    assert max(counts) - min(counts) <= 1


def test_a_spare_slot_goes_where_the_load_per_replica_is_largest() -> None:
    """10 is 5 on two ranks, still more than 4."""
    assert plan_placement([10, 4], 4, 1).slot_experts.count(0) == 3


def test_an_expert_makes_room_where_all_ranks_with_slots_left_hold_the_next() -> None:
    """Two hot experts on each of two ranks and one cold one that must give way."""
    for load in ([5, 5, 0, 0], [9, 0, 0, 0], [4, 3, 2, 1], [0, 0, 0, 0]):
        for ranks in (2, 3, 4):
            for slots in range(-(-4 // ranks), 5):
                assert plan_placement(load, ranks, slots).slots_per_rank == slots


def test_a_load_may_be_a_tensor() -> None:
    for load in (torch.tensor([8, 1, 3]), torch.tensor([8.0, 1.0, 3.0], dtype=torch.bfloat16)):
        assert plan_placement(load, 2, 2) == plan_placement([8, 1, 3], 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, -0.5], 2, 1), r"load: .* got -0\.5 for expert 1"),
        (([1.0, math.nan], 2, 1), "load: .* got nan for expert 1"),
        (([math.inf], 1, 1), "load: .* got inf for expert 0"),
        ((["a"], 1, 1), "load: expected numbers, got 'a' for expert 0"),
        (([1.0, None], 1, 2), "load: expected numbers, got None for expert 1"),
        ((None, 1, 1), "load: expected a number for each expert, got None"),
        (([], 1, 1), "load: expected a number for each expert, got none"),
        (([1e308, 1e308], 1, 2), "load: expected numbers with a finite sum"),
        (([1, 1, 1], 2, 1), r"slots_per_rank: expected 2 \.\. 3 slots for 3 experts on 2 rank\(s\), got 1"),
        (([1, 1, 1], 2, 4), r"slots_per_rank: expected 2 \.\. 3 .* got 4"),
        (([1], 0, 1), "num_ranks: expected a positive integer, got 0"),
        (([1], 1, True), "slots_per_rank: expected a positive integer, got True"),
    ],
)
def test_a_bad_call_of_the_planner_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_placement(*arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 1, ()), "num_experts: expected a positive integer, got 0"),
        ((2, 0, (0, 1)), "num_ranks: expected a positive integer, got 0"),
        ((2, 1, [0, 1]), "slot_experts: expected a tuple, got list"),
        ((2, 2, (0, 1, 0)), "slot_experts: expected as many slots on each of 2 ranks, got 3"),
        ((2, 1, (0, 2)), r"slot_experts: expected ids of 0 \.\. 1, got 2 in slot 1"),
        ((2, 1, (0, -1)), "got -1 in slot 1"),
        ((2, 1, (0, True)), "got True in slot 1"),
        ((2, 1, (0, 1.0)), "got 1.0 in slot 1"),
        ((3, 2, (0, 1)), "slot_experts: expected a slot for each expert, got none for expert 2"),
        ((2, 2, (0, 1, 1, 1)), "slot_experts: expected an expert once on a rank, rank 1 has expert 1 twice"),
        ((65536, 1, tuple(range(65536))), "slot_experts: expected at most 65535 slots, got 65536"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(*fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 9000,
        "x",
        None,
        '{"num_experts": 1, "num_ranks": 1}',
        json.dumps({"num_experts": 1, "num_ranks": 1, "slot_experts": [0], "more": 1}),
        json.dumps({"num_experts": 1, "num_ranks": 1, "slot_experts": "0"}),
        json.dumps({"num_experts": "1", "num_ranks": 1, "slot_experts": [0]}),
        json.dumps({"num_experts": 1, "num_ranks": 1, "slot_experts": [0.0]}),
    ],
)
def test_json_that_is_no_placement_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"^(text|num_experts|slot_experts): "):
        Placement.from_json(text)


def test_other_sizes_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"num_ranks: expected a divisor of num_experts = 3, got 2"):
        Placement.contiguous(3, 2)
    with pytest.raises(ValueError, match=r"num_experts: expected a positive integer, got '8'"):
        Placement.contiguous("8", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"other: expected a Placement, got NoneType"):
        Placement.contiguous(4, 2).reordered_like(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"other: expected 4 experts in 4 slots on 2 rank\(s\), got 4 .* on 1 rank"):
        Placement.contiguous(4, 2).reordered_like(Placement.contiguous(4, 1))
    with pytest.raises(ValueError, match="load"):
        Placement.contiguous(4, 2).rank_loads([1, 1, 1, math.nan])
    with pytest.raises(ValueError, match="load: expected 4 numbers, got 3"):
        Placement.contiguous(4, 2).rank_loads([1, 1, 1])


def test_a_section_of_a_config_is_planned_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text("[8, 1, 3]")
    section = PlacementConfig(spare_slots=1, load=str(file))
    assert placement_from_config(section, 3, 2) == plan_placement([8, 1, 3], 2, 2)
    assert placement_from_config(PlacementConfig(spare_slots=3), 3, 2) == plan_placement([1, 1, 1], 2, 3)


@pytest.mark.parametrize(
    ("spare", "text", "message"),
    [
        (0, None, r"placement\.spare_slots: expected equally many slots on each of 2 rank\(s\), at most 3, got 3 \+ 0"),
        (5, None, r"placement\.spare_slots: .* got 3 \+ 5"),
        (1, "[1, 2", r"placement\.load: .*load\.json: Expecting"),
        (1, "[1, 2]", r"placement\.load: .*load\.json: expected a list of 3 numbers"),
        (1, '[1, 2, "3"]', "expected a list of 3 numbers"),
        (1, "[1, 2, true]", "expected a list of 3 numbers"),
        (1, '{"0": 1}', "expected a list of 3 numbers"),
        (1, "[1, 2, NaN]", r"placement\.load: .*load\.json: load: expected finite numbers .* got nan for expert 2"),
        (1, "[1, 2, -3]", r"load\.json: load: .* got -3\.0 for expert 2"),
        (1, "", r"placement\.load: .*load\.json: "),
        (1, "[" * 200_000, r"placement\.load: .*load\.json: maximum recursion depth"),
    ],
)
def test_a_section_that_cannot_be_planned_names_key_and_file(
    spare: int, text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "load.json"
    if text is not None:
        file.write_text(text)
    section = PlacementConfig(spare_slots=spare, load=None if text is None else str(file))
    with pytest.raises(ValueError, match=message):
        placement_from_config(section, 3, 2)
    with pytest.raises(ValueError, match=r"placement\.load: .*missing\.json: .*No such file"):
        placement_from_config(PlacementConfig(spare_slots=1, load=str(tmp_path / "missing.json")), 3, 2)


def test_a_section_of_a_config_may_name_a_placement(tmp_path: Path) -> None:
    """Such as that of a server before it was started again."""
    file, wanted = tmp_path / "placement.json", plan_placement([8, 1, 3], 2, 2)
    section = PlacementConfig(file=str(file))
    with pytest.raises(ValueError, match=r"placement\.file: .*placement\.json: .*No such file"):
        placement_from_config(section, 3, 2)
    file.write_text(wanted.to_json())
    assert placement_from_config(section, 3, 2) == wanted
    with pytest.raises(ValueError, match=r"placement\.file: .*: expected 3 experts on 4 rank\(s\), got 3 experts in 4"):
        placement_from_config(section, 3, 4)
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"placement\.file: .*placement\.json: text: expected a JSON object"):
        placement_from_config(section, 3, 2)
    for other in ({"spare_slots": 1}, {"load": "load.json"}):
        with pytest.raises(ValueError, match="file: expected neither spare_slots nor load with it"):
            PlacementConfig(file=str(file), **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Placement(2**31, 2, (0, 1, 2, 0)), "num_experts"),
        (lambda: Placement.from_json('{"num_experts":1000000000000,"num_ranks":1,"slot_experts":[0]}'), "num_experts"),
        (lambda: Placement.contiguous(2**31, 2), "num_experts"),
        (lambda: Placement.contiguous(10**30, 2), "num_experts"),
        (lambda: plan_placement([8, 1, 3], 10**6, 2), "slots_per_rank"),
        (lambda: plan_placement([1.0] * 3, 50000, 2), "slots_per_rank"),
        (lambda: plan_placement(torch.tensor(1), 1, 1), "load"),
        (lambda: Placement(3, 2, (0, 1, 2, 0)).rank_experts(None), "rank"),
        (lambda: Placement(1, 1, (0,)).rank_loads(["1"]), "load"),
        (lambda: Placement(1, 1, (0,)).rank_loads([True]), "load"),
        (lambda: Placement(1, 1, (0,)).rank_loads(np.array(1.0)), "load"),  # type: ignore[arg-type]
        (lambda: Placement(1, 1, (0,)).rank_loads([torch.tensor(1.0)]), "load"),
        (lambda: Placement(1, 1, (0,)).rank_loads(torch.ones(1, device="meta")), "load"),
        (lambda: Placement(1, 1, (0,)).rank_loads(torch.ones(1).to_sparse()), "load"),
        (lambda: Placement(1, 1, (0,)).rank_loads(torch.ones(10**12, dtype=torch.uint8, device="meta")), "load"),
        (lambda: Placement.contiguous(4, 10**5000), "num_ranks"),
        (lambda: Placement(1, 10**5000, (0,)), "slot_experts"),
        (lambda: placement_from_config("x", 4, 2), "section"),
        (lambda: placement_from_config(PlacementConfig(), 2**31, 2), "num_experts"),
        (lambda: placement_from_config(PlacementConfig(), 4, torch.tensor(2)), "num_ranks"),
        (lambda: Placement.from_json(b'{"num_experts":1,"num_ranks":1,"slot_experts":[0]}'), "text"),
        (lambda: Placement.from_json('{"num_experts":1,"num_experts":1,"num_ranks":1,"slot_experts":[0]}'), "text"),
        (lambda: Placement.from_json(Placement(1, 1, (0,)).to_json() + " " * (1 << 21)), "text"),
    ],
)
def test_hostile_sizes_are_refused_before_work(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"\A{name}: "):
        call()
