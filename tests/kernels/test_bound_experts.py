"""Experts whose products are bound for each size of step: the bits of products that are checked and planned anew."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from moe_runtime.config import MoELayerConfig
from moe_runtime.context.memory import layer_geometry
from moe_runtime.experts import Experts, plan_experts
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.gemm import dequant_gemm, grouped_gemm, tma_gemm
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import GemmPlan
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.launch_order import LaunchOrder
from tests.emulator import Emulator, needs_emulator
from tests.emulator.tensor_maps import encode_tiled
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows, random_weights

pytestmark = [needs_emulator, pytest.mark.cpu_only]

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS = 128, 64, 3
PACKED = ("nvfp4", "mxfp8")


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Emulator]:
    """A Hopper GPU of two SMs."""
    emulator = Emulator(seed)
    emulator.stand_in(monkeypatch)
    monkeypatch.setattr(nvrtc, "most_sms", lambda device: 2)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(dequant_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(grouped_gemm, "resolve_engine", lambda engine, device: "cuda")
    tma_gemm._tensor_map.cache_clear()
    yield emulator
    tma_gemm._tensor_map.cache_clear()


def experts_of(name: str, rng: torch.Generator) -> Experts:
    """`expanded` ones are stored in MXFP4, and multiplied in FP8."""
    if name == "expanded":
        gate_up = random_weights("mxfp4", EXPERTS, 2 * INNER, HIDDEN, rng, CPU, gate_up=True)
        return Experts(
            *map(ExpandedWeights.prepack, (gate_up, random_weights("mxfp4", EXPERTS, HIDDEN, INNER, rng, CPU)))
        )
    gate_up = random_weights(name, EXPERTS, 2 * INNER, HIDDEN, rng, CPU, gate_up=True)
    down = random_weights(name, EXPERTS, HIDDEN, INNER, rng, CPU)
    if name in PACKED:
        return Experts(*map(PrepackedWeights.prepack, (gate_up, down)))
    return Experts(gate_up, down)


def rows_of(name: str, sizes: list[int], rng: torch.Generator, **more: bool) -> GroupedRows:
    a = make_rows("fp8_block" if name == "expanded" else name, sizes, HIDDEN, rng, CPU, num_experts=EXPERTS, **more)
    return replace(a, expert_ids=torch.arange(EXPERTS, dtype=torch.int32))


def ran(experts: Experts, a: GroupedRows, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = torch.full((a.capacity, HIDDEN), 7, dtype=dtype)
    experts._run(a, out)
    return out


def called(experts: Experts, a: GroupedRows, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return experts(a, out=torch.full((a.capacity, HIDDEN), 7, dtype=dtype))


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "expanded", *PACKED])
def test_steps_of_sizes_that_alternate(name: str, emulator: Emulator, rng: torch.Generator) -> None:
    """Rows, results and the numbers of rows are others in each step, and lie elsewhere."""
    experts, steps = experts_of(name, rng), []
    for sizes, dtype in (([1, 0, 2], torch.bfloat16), ([9, 0, 20], torch.bfloat16), ([2, 1, 0], torch.float32)):
        for gather in (False, True):
            steps += [(rows_of(name, sizes, rng, gather=gather), dtype) for _ in range(2)]
    steps += [(replace(a, num_active_experts=2), dtype) for a, dtype in steps[:2]]
    ids = torch.tensor([[0], [2], [2]])
    steps.append((replace(steps[0][0], order=LaunchOrder(routed_ids=ids)), torch.bfloat16))
    for _ in range(2):
        for a, dtype in steps:
            assert_same_bits(ran(experts, a, dtype), called(experts, a, dtype), name)
    assert len(experts._bound) == 7 and None not in experts._bound.values()


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_what_is_bound_are_these_weights(name: str, emulator: Emulator, rng: torch.Generator) -> None:
    """Weights that are changed where they lie are read; copies of experts read their own, as do those with others."""
    experts, a = experts_of(name, rng), rows_of(name, [2, 0, 1], rng)
    want = ran(experts, a)
    copies = [copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), replace(experts)]
    assert [len(made._bound) for made in (experts, *copies)] == [1, 0, 0, 0]
    other = experts_of(name, rng)
    changed = replace(experts, down=other.down)
    for part in ("quants", "units"):
        if hasattr(experts.gate_up, part):
            getattr(experts.gate_up, part).copy_(getattr(other.gate_up, part))
    if isinstance(experts.gate_up, PrepackedWeights):
        assert experts.gate_up.expert_scales is not None and other.gate_up.expert_scales is not None
        experts.gate_up.expert_scales.copy_(other.gate_up.expert_scales)
    for made in copies[:2]:
        assert_same_bits(ran(made, a), want, name)
    for made in (experts, copies[2], changed):
        assert_same_bits(ran(made, a), called(made, a), name)
    assert not torch.equal(ran(experts, a), want) and not torch.equal(ran(changed, a), ran(experts, a))


def test_other_kernels_are_not_bound(rng: torch.Generator) -> None:
    """And steps without rows or experts."""
    experts = replace(experts_of("bf16", rng), engine="torch")
    a = rows_of("bf16", [2, 0, 1], rng)
    assert_same_bits(ran(experts, a), called(experts, a), "torch")
    assert list(experts._bound.values()) == [None]


def test_the_first_step_of_a_size_is_checked(emulator: Emulator, rng: torch.Generator) -> None:
    experts, a = experts_of("bf16", rng), rows_of("bf16", [2, 0, 1], rng)
    with pytest.raises(ValueError, match=r"^out: expected"):
        experts._run(a, torch.empty(a.capacity, HIDDEN + 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"^a.format: expected"):
        experts._run(rows_of("fp8_block", [2, 0, 1], rng), torch.empty(a.capacity, HIDDEN))
    assert not experts._bound and not emulator.launched


@pytest.mark.parametrize("tokens", [1, 3, 40, 400])
@pytest.mark.parametrize(
    ("weights", "token"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4", "bf16"),
        ("mxfp4", "mxfp8"),
        ("mxfp8", "mxfp8"),
        ("fp8_block", None),
        ("bf16", None),
        ("mxfp4", "fp8_block"),
    ],
)
def test_what_doctor_prints_is_what_a_step_runs(
    weights: str,
    token: str | None,
    tokens: int,
    emulator: Emulator,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`plan_experts` has the plans of both products, also of a second one whose rows come in bf16."""
    found: list[GemmPlan] = []
    product = grouped_gemm._product

    def recorded(a: GroupedRows, w: StoredWeights, how: GemmPlan, *more: Any) -> Any:
        found.append(how)
        return product(a, w, how, *more)

    monkeypatch.setattr(grouped_gemm, "_product", recorded)
    for inner in (96, 128):
        config = MoELayerConfig(
            hidden_size=HIDDEN,
            intermediate_size=inner,
            num_experts=8,
            top_k=2,
            max_tokens_per_rank=tokens,
            weight_format=weights,
            token_format=token or weights,
            fp4_multiplied_in="fp8" if token == "fp8_block" else "bf16",
        )
        geometry = layer_geometry(config, 1)
        gate_up = random_weights(weights, 8, 2 * inner, HIDDEN, rng, CPU, gate_up=True)
        down = random_weights(weights, 8, HIDDEN, inner, rng, CPU)
        if weights in (*PACKED, "mxfp4"):
            prepack = ExpandedWeights.prepack if token == "fp8_block" else PrepackedWeights.prepack
            gate_up, down = map(prepack, (gate_up, down))
        experts = Experts(gate_up, down, intermediate_format=config.intermediate_format)
        sizes = [geometry.row_capacity, *[0] * 7]
        a = make_rows(config.token_format, sizes, HIDDEN, rng, CPU, num_experts=8, gather=not geometry.contiguous)
        a = replace(a, expected_rows=geometry.expected_rows)
        found.clear()
        assert experts._bind(a, torch.empty(a.capacity, HIDDEN, dtype=torch.bfloat16)) is not None
        assert tuple(found) == plan_experts(config, geometry, "cuda", None, 2)


@pytest.mark.parametrize("name", [*PACKED, "expanded", "fp8_block", "bf16"])
def test_a_rank_without_experts_does_nothing(
    name: str, emulator: Emulator, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restoring none of them would take copies from the host in each step, which no graph can hold."""
    for kind, restores in ((PrepackedWeights, "restore"), (ExpandedWeights, "expand")):
        monkeypatch.setattr(kind, restores, lambda self, **_: pytest.fail("restored"))
    whole = experts_of(name, rng)
    none = replace(whole, gate_up=whole.gate_up._each(lambda t: t[:0]), down=whole.down._each(lambda t: t[:0]))
    for groups in (0, 2):
        a = make_rows(whole.gate_up.format, [0] * groups, HIDDEN, rng, CPU, num_experts=1, spare=9)
        assert (ran(none, a) == 7).all() and (called(none, a) == 7).all()
    assert emulator.runs == 0
