"""The kernels between hosts, emulated on the CPU: the bits of their references, and the same failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.comm.errors import CapacityError, MoERuntimeError, PeerTimeoutError, RoutingError, StepMismatchError
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.handle import DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.hierarchical import HierarchicalExchange
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.exchange import cuda, hierarchical, hierarchical_cuda, reference
from moe_runtime.virtual import virtual_contexts
from tests.emulator import needs_emulator
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import RankInput, rank_input
from tests.support.virtual_exchange import emulator, expert_rows, poisoned_memory

__all__ = ["emulator", "poisoned_memory"]

pytestmark = [needs_emulator, pytest.mark.cpu_only]

SETTINGS: dict[str, Any] = {"hidden_size": 256, "num_experts": 10, "top_k": 3, "max_tokens_per_rank": 7}


class VirtualHosts:
    """A dispatcher on each virtual rank of some virtual hosts, with kernels or their references."""

    def __init__(self, num_hosts: int, per_host: int, kernels: bool, layers: int = 1, **settings: Any) -> None:
        self.contexts = virtual_contexts(num_hosts * per_host, num_hosts=num_hosts, engine="torch", timeout_s=5)
        self.layers = [[self._made(context, kernels, settings) for context in self.contexts] for _ in range(layers)]
        for context in self.contexts:
            context.allocate()
            for region in ("token_flags", "landing", "combine"):
                context.heap.tensor(region).fill_(0xCD)
            assert context.link_buffers is not None
            for kind in context.link_buffers.chunk_bytes:
                for buffer in context.link_buffers.chunks(kind, context.link_buffers.chunk_bytes[kind]):
                    buffer.fill_(0xCD)

    def _made(self, context: ExpertParallelContext, kernels: bool, settings: dict[str, Any]) -> TokenDispatcher:
        dispatcher = TokenDispatcher(context, **(SETTINGS | settings))
        if kernels:
            dispatcher._use(cuda)
            assert isinstance(dispatcher._exchange, HierarchicalExchange)
            dispatcher._exchange._parts = hierarchical_cuda
        return dispatcher

    def _leave_old_flags(self) -> None:
        """Records of a layer of other sizes may look like token flags of the next epoch."""
        for context in self.contexts:
            buffers, epoch = context.link_buffers, reference.next_epoch(int(context.epoch[0]))
            assert buffers is not None
            for kind in ("dispatch", "staging"):
                for buffer in buffers.chunks(kind, buffers.chunk_bytes[kind]):
                    buffer.flatten().view(torch.int32).fill_(epoch)

    def dispatch(self, inputs: list[RankInput], layers: list[int] | None = None) -> list[DispatchedTokens]:
        self._leave_old_flags()
        chosen = [self.layers[0 if layers is None else layers[rank]][rank] for rank in range(len(inputs))]
        handles = [d.dispatch_send(*i) for d, i in zip(chosen, inputs, strict=True)]
        for d, handle in zip(chosen, handles, strict=True):
            d._exchange.dispatch_forward(handle)
        return [d.dispatch_recv(handle) for d, handle in zip(chosen, handles, strict=True)]

    def combine(
        self,
        arrived: list[DispatchedTokens],
        outputs: list[torch.Tensor],
        shared: list[torch.Tensor] | None,
        layer: int = 0,
    ) -> list[torch.Tensor]:
        dispatchers = self.layers[layer]
        for d, a, output in zip(dispatchers, arrived, outputs, strict=True):
            d.combine_send(output, a.handle)
        for d, a in zip(dispatchers, arrived, strict=True):
            d._exchange.combine_forward(a.handle)
        return [
            d.combine_recv(a.handle, shared=None if shared is None else shared[rank])
            for rank, (d, a) in enumerate(zip(dispatchers, arrived, strict=True))
        ]


def inputs_of(seed: int, step: int, world: int, most: int = 7) -> list[RankInput]:
    """At most `most` of 7 tokens go anywhere."""
    routing = ("random", "one", "none", "random")[step % 4]
    inputs = [rank_input(seed + step, r, (7, 0, 1, 5)[(r + step) % 4], 256, 10, 3, routing) for r in range(world)]
    for mine in inputs:
        mine.topk_idx[most - 2 : -2] = -1
    return inputs


ARRIVED = ("group_offsets", "group_scale_offsets", "row_scale")


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize(
    ("fmt", "combine"), [("nvfp4", "bf16"), ("bf16", "bf16"), ("fp8_block", "fp8_block"), ("mxfp8", "mxfp8")]
)
@pytest.mark.parametrize(
    ("num_hosts", "per_host", "parts", "capacity"), [(2, 1, 1, None), (2, 2, 3, None), (2, 2, 1, 6), (3, 2, 2, 6)]
)
def test_kernels_equal_their_references(
    num_hosts: int,
    per_host: int,
    parts: int,
    capacity: int | None,
    fmt: str,
    combine: str,
    mode: Any,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hierarchical, "PART_TOKENS", (capacity or 7) // parts)
    world = num_hosts * per_host
    settings = {"token_format": fmt, "combine_format": combine, "mode": mode, "host_capacity": capacity}
    both = [VirtualHosts(num_hosts, per_host, kernels, **settings) for kernels in (False, True)]
    plain = VirtualHosts(num_hosts, per_host, False, **(settings | {"host_capacity": None}))
    assert all(len(d._exchange.host_geometry.parts) == parts for ranks in both for d in ranks.layers[0])  # type: ignore[attr-defined]
    for step in range(4):
        inputs = inputs_of(seed, step, world, most=capacity or 7)
        shared = [i.x for i in inputs] if step % 2 else None
        found = []
        for ranks in (*both, plain):
            arrived = ranks.dispatch(inputs)
            outputs = [expert_rows(a, 256, seed + rank, torch.bfloat16) for rank, a in enumerate(arrived)]
            found.append((arrived, ranks.combine(arrived, outputs, shared)))
        (wanted, wanted_y), (arrived, y), (_, plain_y) = found
        for rank in range(world):
            what = f"of rank {rank} in step {step}"
            total = int(wanted[rank].group_offsets[-1])
            for name in ARRIVED:
                ours, theirs = getattr(arrived[rank], name), getattr(wanted[rank], name)
                if theirs is not None:
                    rows = slice(None) if "offsets" in name else slice(total)
                    assert_same_bits(ours[rows], theirs[rows], f"{name} {what}")
            assert_same_bits(arrived[rank].handle.positions, wanted[rank].handle.positions, f"positions {what}")
            assert_same_bits(arrived[rank].handle.num_parts, wanted[rank].handle.num_parts, f"num_parts {what}")
            assert_same_bits(y[rank], wanted_y[rank], f"y {what}")
            assert_same_bits(y[rank], plain_y[rank], f"y with all slots {what}")


def told_to(ranks: VirtualHosts, inputs: list[RankInput]) -> list[MoERuntimeError]:
    """What each rank raises in a dispatch."""
    raised: dict[int, MoERuntimeError] = {}
    handles: dict[int, DispatchHandle] = {}
    for stage in ("dispatch_send", "dispatch_forward", "dispatch_recv"):
        for rank, (dispatcher, mine) in enumerate(zip(ranks.layers[0], inputs, strict=True)):
            try:
                if stage == "dispatch_send":
                    handles[rank] = dispatcher.dispatch_send(*mine)
                elif rank not in raised and stage == "dispatch_forward":
                    dispatcher._exchange.dispatch_forward(handles[rank])
                elif rank not in raised:
                    dispatcher.dispatch_recv(handles[rank])
            except MoERuntimeError as error:
                raised[rank] = error
    assert sorted(raised) == list(range(len(inputs)))
    return [raised[rank] for rank in range(len(inputs))]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_wrong_id_is_told_on_all_ranks_of_all_hosts(
    kernels: bool, parts: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hierarchical, "PART_TOKENS", 7 // parts)
    ranks = VirtualHosts(2, 2, kernels, token_format="nvfp4")
    inputs = inputs_of(seed, 0, 4)
    wrong = inputs[2].topk_idx.clone()
    wrong[0, 1] = 10
    inputs[2] = RankInput(inputs[2].x, wrong, inputs[2].topk_weights)
    for error in told_to(ranks, inputs):
        assert error.rank == 2 and "expert id 10 of token 0 of rank 2" in str(error)
        assert isinstance(error, RoutingError)


@pytest.mark.parametrize("kernels", [False, True])
def test_more_tokens_for_a_host_than_its_capacity_are_told_on_all_ranks(kernels: bool, seed: int) -> None:
    """And as many as it are not."""
    ranks = VirtualHosts(2, 2, kernels, token_format="bf16", host_capacity=4)
    inputs = [rank_input(seed, rank, 4, 256, 10, 3) for rank in range(4)]
    arrived = ranks.dispatch(inputs)
    ranks.combine(arrived, [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived], None)
    more = rank_input(seed, 1, 5, 256, 10, 3)
    # All on the other host, which has experts 6 to 9.
    inputs[1] = RankInput(more.x, torch.tensor([[6, 8, 9]] * 5, dtype=more.topk_idx.dtype), more.topk_weights)
    for error in told_to(ranks, inputs):
        assert error.rank == 1
        assert "5 tokens of rank 1 go to one host, more than its host_capacity of 4" in str(error)
        assert isinstance(error, CapacityError)


@pytest.mark.parametrize("kernels", [False, True])
def test_ranks_of_another_layer_are_named(kernels: bool, seed: int) -> None:
    ranks = VirtualHosts(2, 1, kernels, layers=2, token_format="bf16")
    with pytest.raises(StepMismatchError, match="rank 1 was in exchange 1 of the context, rank 0 in 0"):
        ranks.dispatch(inputs_of(seed, 0, 2), layers=[0, 1])


def test_a_second_dispatch_must_wait_for_the_first(seed: int) -> None:
    """Between hosts there is memory for one."""
    ranks = VirtualHosts(2, 1, False)
    mine = inputs_of(seed, 0, 2)[0]
    dispatcher = ranks.layers[0][0]
    dispatcher.dispatch_send(*mine)
    with pytest.raises(ValueError, match="over several hosts dispatch_recv of the step before"):
        dispatcher.dispatch_send(*mine)


@pytest.mark.parametrize("how", ["dispatch alone", "combine alone", "dispatch for combine"])
def test_virtual_ranks_out_of_turn_are_told_so(how: str, seed: int) -> None:
    """They get nothing of an earlier step."""
    ranks = VirtualHosts(2, 1, False)
    inputs = [rank_input(seed, rank, 5, 256, 10, 3) for rank in range(2)]

    def rows(arrived: list[DispatchedTokens]) -> list[torch.Tensor]:
        return [expert_rows(a, 256, seed, torch.bfloat16) for a in arrived]

    for _ in range(2):
        arrived = ranks.dispatch(inputs)
        ranks.combine(arrived, rows(arrived), None)
    assert not any(context.link._outgoing for context in ranks.contexts)  # type: ignore[union-attr]
    first, second = ranks.layers[0]
    error, text = PeerTimeoutError, r"rank 1 \(host 1\) did not take part"
    if how == "dispatch for combine":
        error, text = StepMismatchError, r"rank 1 \(host 1\) was at dispatch_send, part 0"
    with pytest.raises(error, match=text) as caught:
        if how == "dispatch alone":
            first.dispatch(*inputs[0])
        arrived = ranks.dispatch(inputs)
        if how == "dispatch for combine":
            second.dispatch_send(*inputs[1])
        first.combine(rows(arrived)[0], arrived[0].handle)
    assert caught.value.rank == 1
