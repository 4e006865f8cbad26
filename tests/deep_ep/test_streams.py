"""What calls beside the current stream tell the allocator, and what waits for them, on a CPU with stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.deep_ep import Buffer, Config, ElasticBuffer
from moe_runtime.deep_ep.events import EventHandle, EventOverlap

pytestmark = pytest.mark.cpu_only

HIDDEN, TOKENS, EXPERTS, TOP_K, MOST = 512, 12, 4, 2, 32


class BesideStream:
    """In place of the communication stream of a GPU: keeps what each call says that it reads and writes there."""

    stream = None

    def __init__(self) -> None:
        self.tensors: Sequence[torch.Tensor | None] = ()

    def running(self, *arguments: Any) -> Any:
        return nullcontext()

    def finish(self, beside: bool, async_finish: bool, tensors: Sequence[torch.Tensor | None]) -> EventOverlap:
        self.tensors = tensors if beside else ()
        return EventOverlap(EventHandle()) if async_finish else EventOverlap()

    def on_this_stream(self, call: Any) -> Any:
        return call

    def lacks(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """The places of those that were not named."""
        there = {tensor.untyped_storage().data_ptr() for tensor in self.tensors if tensor is not None}
        return [at for at, t in enumerate(tensors) if t is not None and t.untyped_storage().data_ptr() not in there]


def beside(rank: int, world: int, seed: int) -> dict[str, list[int]]:
    """By call, what it reads and does not name."""
    torch.manual_seed(seed)
    x, idx = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K]
    weights, group, stream, found = torch.rand(TOKENS, TOP_K), dist.group.WORLD, BesideStream(), dict[str, list[int]]()
    normal_bytes = Config().get_nvl_buffer_size_hint(2 * HIDDEN, world)
    low_latency_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, world, EXPERTS)
    buffer = Buffer(group, normal_bytes, low_latency_bytes, low_latency_mode=True, explicitly_destroy=True)
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, explicitly_destroy=True)
    buffer._comm = elastic._comm = stream  # type: ignore[assignment]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights)
    assert handle is not None
    buffer.dispatch(x, handle=handle, async_finish=True)
    found["cached dispatch"] = stream.lacks([x, *handle.tensors])
    buffer.combine(rows, handle, async_finish=True)  # type: ignore[arg-type]
    found["combine"] = stream.lacks([rows, *handle.tensors])  # type: ignore[list-item]
    gsf = torch.tensor(3.0)
    how: dict[str, Any] = {"use_fp8": False, "use_nvfp4": True, "x_global_scale": gsf, "async_finish": True}
    low = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, **how)[2]
    found["low-latency dispatch"] = stream.lacks([x, idx, gsf, low.positions, low.native.epoch])
    got, _, low, _, _ = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    buffer.low_latency_combine(got, idx, weights, low, async_finish=True)  # type: ignore[arg-type]
    found["low-latency combine"] = stream.lacks([got, low.positions, low.native.epoch])  # type: ignore[list-item]
    rows, _, _, elastic_handle, _ = elastic.dispatch(x, idx, weights, num_experts=EXPERTS)
    strided = torch.randn(HIDDEN, len(rows)).bfloat16().t()
    elastic.combine(strided, elastic_handle, async_with_compute_stream=True)
    found["combine of strided rows"] = stream.lacks([strided, *elastic_handle._tensors])
    for one in (buffer, elastic):
        one.destroy()
        with pytest.raises(ValueError, match="buffer: expected one that is not destroyed"):
            one._exchange_of(2 * HIDDEN, "num_bytes", 1 << 30, None)
    return found


def test_what_another_stream_reads_is_named(get_pool: Any, seed: int) -> None:
    for found in get_pool(2).run(beside, seed):
        assert not any(found.values()) and len(found) == 5, found


class Point(EventHandle):
    """An event that counts who waits for it."""

    def __init__(self, *, captured: bool = False) -> None:
        self.captured, self.waits = captured, 0

    def current_stream_wait(self) -> None:
        self.waits += 1


FIELDS = (
    "num_unaligned_recv_tokens_per_expert",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)


def read_fields(rank: int, world: int, seed: int) -> list[int]:
    """How often the event of a dispatch is waited for as each of `FIELDS` is read, twice."""
    torch.manual_seed(seed + rank)
    elastic = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=HIDDEN, explicitly_destroy=True)
    x, idx = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K]
    handle = elastic.dispatch(x, idx, num_experts=EXPERTS)[3]
    again, found = elastic.dispatch(x, idx, num_experts=EXPERTS, async_with_compute_stream=True)[3], []
    assert handle._event is None and isinstance(again._event, EventHandle)
    for name in FIELDS:
        again._event = point = Point()
        for _ in range(2):
            assert torch.equal(getattr(again, name), getattr(handle, name))
        found.append(point.waits)
    # One that was recorded in the capture of a graph is not waited for outside of it.
    again._event = point = Point(captured=True)
    again._await_dispatch()
    elastic.destroy()
    return [*found, point.waits]


def test_fields_that_are_made_later_wait_for_the_dispatch(get_pool: Any, seed: int) -> None:
    for found in get_pool(2).run(read_fields, seed):
        assert all(found[: len(FIELDS)]) and found[-1] == 0


def int32_scales(rank: int, world: int, seed: int) -> None:
    """Words of any meaning come as they were sent, in both kinds of dispatch."""
    torch.manual_seed(seed + rank)
    buffer = Buffer(dist.group.WORLD, Config().get_nvl_buffer_size_hint(2 * HIDDEN, world), explicitly_destroy=True)
    quants = torch.randn(TOKENS, HIDDEN).to(torch.float8_e4m3fn)
    words = torch.randint(-(2**31), 2**31 - 1, (TOKENS, 1), dtype=torch.int32)
    idx = (torch.arange(TOKENS) % EXPERTS)[:, None]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    got, *_, handle, _ = buffer.dispatch((quants, words), **layout, topk_idx=idx, topk_weights=torch.ones(TOKENS, 1))
    everyone = [torch.empty_like(words) for _ in range(world)]
    dist.all_gather(everyone, words)
    here = idx[:, 0] // (EXPERTS // world) == rank
    wanted = torch.cat([each[here] for each in everyone])
    again = buffer.dispatch((quants, words), handle=handle)[0]
    for found in (got, again):
        assert found[1].dtype == torch.int32 and torch.equal(found[1], wanted)
    buffer.destroy()


def test_scales_may_be_words(get_pool: Any, seed: int) -> None:
    get_pool(2).run(int32_scales, seed)
