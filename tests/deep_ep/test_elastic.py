"""`moe_runtime.deep_ep.ElasticBuffer` over processes, against a plain model of DeepEP's layouts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError
from moe_runtime.deep_ep import ElasticBuffer, EPHandle, group_buffer
from moe_runtime.deep_ep.utils.math import per_token_cast_to_fp8
from tests.support.exchange_data import order_sensitive
from tests.support.pool import run_once

HIDDEN, EXPERTS, TOP_K, MOST = 256, 16, 4, 12


@dataclass(frozen=True)
class Tokens:
    """What a rank brings: bf16 `[T, H]`, int64 `[T, K]`, fp32 `[T, K]`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_tokens(seed: int, rank: int, count: int) -> Tokens:
    g = torch.Generator().manual_seed(seed * 7919 + rank)
    x = torch.randn(count, HIDDEN, generator=g).to(torch.bfloat16)
    ids = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -1, ids)
    return Tokens(x, ids, torch.randn(count, TOP_K, generator=g))


def routed(seed: int, rank: int, count: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
    tokens = random_tokens(seed, rank, count)
    return Tokens(tokens.x, change(tokens.ids), tokens.weights)


CASES: dict[str, Callable[[int, int], Tokens]] = {
    "ragged": lambda seed, rank: random_tokens(seed, rank, (5, 0, 12, 1)[rank % 4]),
    "as many as may come": lambda seed, rank: random_tokens(seed, rank, MOST),
    "one token": lambda seed, rank: random_tokens(seed, rank, int(rank == 0)),
    "no tokens": lambda seed, rank: random_tokens(seed, rank, 0),
    "one expert": lambda seed, rank: routed(seed, rank, 7, lambda ids: only(ids, EXPERTS - 1)),
    "no experts": lambda seed, rank: routed(seed, rank, 7, lambda ids: torch.full_like(ids, -1)),
    "ids without an expert": lambda seed, rank: routed(
        seed, rank, 6, lambda ids: torch.where(ids % 3 == 0, torch.tensor([EXPERTS, -(2**31), -7, EXPERTS + 5]), ids)
    ),
    "ids by column": lambda seed, rank: routed(seed, rank, 6, lambda ids: ids.t().contiguous().t()),
}


def only(ids: torch.Tensor, expert: int) -> torch.Tensor:
    changed = torch.full_like(ids, -1)
    changed[:, 1] = expert
    return changed


class Model:
    """The layouts of a dispatch on one rank, from their definition.

    `rows` are `(rank, token)` in the order in which they come. `entries` are `(expert, row, k)` in the order of
    expanded rows, and `at` says where each lies.
    """

    def __init__(self, everyone: list[Tokens], rank: int, alignment: int) -> None:
        self.everyone, self.rank, self.alignment = everyone, rank, alignment
        self.local = EXPERTS // len(everyone)
        self.rows = [
            (r, t)
            for r, tokens in enumerate(everyone)
            for t, ids in enumerate(tokens.ids.tolist())
            if any(self.here(id) for id in ids)
        ]
        self.entries = sorted(
            (everyone[r].ids[t, k].item() - rank * self.local, row, k)
            for row, (r, t) in enumerate(self.rows)
            for k in range(TOP_K)
            if self.here(everyone[r].ids[t, k].item())
        )
        self.counts = [sum(e == expert for e, _, _ in self.entries) for expert in range(self.local)]
        self.rounded = [-(-count // alignment) * alignment for count in self.counts]
        starts = [sum(self.rounded[:e]) for e in range(self.local)]
        before = [sum(self.counts[:e]) for e in range(self.local)]
        self.at = [starts[e] + i - before[e] for i, (e, _, _) in enumerate(self.entries)]
        self.ends = [start + count for start, count in zip(starts, self.counts, strict=True)]

    def here(self, id: int) -> bool:
        return self.rank * self.local <= id < (self.rank + 1) * self.local

    @cached_property
    def slots(self) -> torch.Tensor:
        slots = torch.full((len(self.rows), TOP_K), -1, dtype=torch.int32)
        for (_, row, k), at in zip(self.entries, self.at, strict=True):
            slots[row, k] = at
        return slots

    def of_rows(self, each: list[torch.Tensor]) -> torch.Tensor:
        """What the rows have of `each` rank's tokens."""
        empty = each[0][:0]
        return torch.stack([each[r][t] for r, t in self.rows]) if self.rows else empty

    def ids(self) -> torch.Tensor:
        ids = self.of_rows([tokens.ids for tokens in self.everyone]) - self.rank * self.local
        return torch.where((ids >= 0) & (ids < self.local), ids, -1)

    def weights(self, everyone: list[Tokens]) -> torch.Tensor:
        return torch.where(self.ids() >= 0, self.of_rows([tokens.weights for tokens in everyone]), 0.0)

    def most(self) -> int:
        most = len(self.everyone) * MOST * min(TOP_K, self.local) + (self.alignment - 1) * self.local
        return -(-most // self.alignment) * self.alignment


def placed(value: Any) -> Any:
    """Tensors where buffers of this process are."""
    if isinstance(value, tuple):
        return tuple(placed(part) for part in value)
    return value.cuda() if isinstance(value, torch.Tensor) and torch.cuda.is_available() else value


def on_cpu(value: Any) -> Any:
    """Tensors of a tuple on the CPU, for comparison."""
    if isinstance(value, tuple):
        return tuple(on_cpu(part) for part in value)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def a_buffer(**settings: Any) -> ElasticBuffer:
    assert dist.group.WORLD is not None
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOP_K}
    return ElasticBuffer(dist.group.WORLD, **sizes, explicitly_destroy=True, **settings)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(a: torch.Tensor) -> torch.Tensor:
    return a.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def parts(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def sent_as(fmt: str, x: torch.Tensor) -> Any:
    if fmt == "bf16":
        return x
    quants, scales = per_token_cast_to_fp8(x)
    if fmt == "packed":
        return quants, scales[:, :1].contiguous().view(torch.int32)
    return quants, scales.t().contiguous().t()


def poison(buffer: ElasticBuffer) -> None:
    """What is not written must not be read: between two calls of all ranks, memory that they share gets NaN."""
    meet()
    for context in buffer._contexts:
        for region in ("landing", "combine"):
            if context.allocated:
                context.heap.tensor(region).fill_(255)
    meet()


def meet() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def check_rows(
    model: Model, got: tuple[Any, ...], everyone: list[Tokens], fmt: str, form: dict[str, Any], with_weights: bool
) -> None:
    """Rows, ids and weights of a dispatch of `everyone`, on the way of `model`."""
    handle, strides = got[3], parts(got[0])[-1].stride()
    rows, ids, weights = on_cpu(got[:3])
    expand, sync = form.get("do_expand", False), form.get("do_cpu_sync", True)
    num_rows, num_expanded = len(model.rows), sum(model.rounded)
    if not sync:
        num_rows, num_expanded = len(model.everyone) * MOST, model.most()
    assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (num_rows, num_expanded)
    shown = num_expanded if expand else num_rows
    each = [parts(sent_as(fmt, tokens.x)) for tokens in everyone]
    for part, came in enumerate(parts(rows)):
        assert came.shape[0] == shown and came.dtype == each[0][part].dtype
        want = model.of_rows([of_rank[part] for of_rank in each])
        if not expand:
            assert same_bits(came[: len(model.rows)], want)
            continue
        assert same_bits(came[model.at], want[[row for _, row, _ in model.entries]])
        if form.get("do_zero_padding"):
            padding = sorted(set(range(shown)) - set(model.at))
            assert not bytes_of(came[padding]).any()
    if fmt != "bf16":
        by_column = form.get("use_tma_aligned_col_major_sf", False)
        assert shown == 0 or strides == ((1, -(-shown // 4) * 4) if by_column else (rows[1].shape[1], 1))
    count = len(model.rows)
    if expand:
        assert ids is None
    else:
        assert ids.shape == (shown, TOP_K) and ids.dtype == torch.int64
        assert torch.equal(ids[:count], model.ids()) and (ids[count:] == -1).all()
    assert (weights is not None) == with_weights
    if with_weights and not expand:
        assert torch.equal(weights[:count], model.weights(everyone)) and not weights[count:].any()
    elif with_weights:
        want = torch.zeros(shown)
        of_rows = model.weights(everyone)
        for (_, row, k), at in zip(model.entries, model.at, strict=True):
            want[at] = of_rows[row, k]
        assert torch.equal(weights, want)


def check_handle(model: Model, handle: EPHandle, topk_idx: torch.Tensor, sync: bool) -> None:
    """All that DeepEP's handle has."""
    count, world = len(model.rows), len(model.everyone)
    assert handle.num_recv_tokens_per_expert_list == (model.rounded if sync else [])
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == model.counts
    ends = model.ends if handle.do_expand else [sum(model.rounded[: e + 1]) for e in range(model.local)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    of_ranks = [sum(r <= rank for r, _ in model.rows) for rank in range(world)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == of_ranks
    metadata = handle.recv_src_metadata.cpu()
    assert metadata.shape == (handle.num_recv_tokens, 2 + TOP_K) and (metadata[count:] == -1).all()
    assert metadata[:count, 0].tolist() == [r * MOST + t for r, t in model.rows]
    last = [max(k for k in range(TOP_K) if row[k] >= 0) for row in model.ids().tolist()]
    assert metadata[:count, 1].tolist() == [r * TOP_K + k for (r, _), k in zip(model.rows, last, strict=True)]
    slots = model.slots if handle.do_expand else torch.full((count, TOP_K), -1, dtype=torch.int32)
    assert torch.equal(metadata[:count, 2:], slots)
    assert torch.equal(handle.topk_idx.cpu(), topk_idx)
    landed = handle.dst_buffer_slot_idx.cpu()
    assert torch.equal(landed >= 0, (topk_idx.int() >= 0) & (topk_idx.int() < EXPERTS))
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
    for made in (handle.psum_num_recv_tokens_per_scaleup_rank, handle.psum_num_recv_tokens_per_expert, metadata):
        assert made.dtype == torch.int32


@cache
def outputs(seed: int, world: int) -> torch.Tensor:
    """bf16 `[W, max, K + W, H]`: what is sent home for each token, by entry, and, not expanded, by rank."""
    g = torch.Generator().manual_seed(seed)
    return order_sensitive(world, MOST, TOP_K + world, HIDDEN, generator=g).to(torch.bfloat16)


def check_combine(
    buffer: ElasticBuffer, models: list[Model], handle: EPHandle, seed: int, num_biases: int, with_weights: bool
) -> None:
    """Rows and weights that depend on their source go home; each rank knows what must come."""
    rank, mine = buffer.rank_idx, models[buffer.rank_idx].everyone[buffer.rank_idx]
    model, num_tokens, out = models[rank], mine.x.shape[0], outputs(seed, len(models))
    shown = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    x = torch.full((shown, HIDDEN), float("nan"), dtype=torch.bfloat16)
    weights = torch.full((shown,) if handle.do_expand else (shown, TOP_K), float("nan"))
    for (_, row, k), at in zip(model.entries, model.at, strict=True):
        r, t = model.rows[row]
        if handle.do_expand:
            x[at], weights[at] = out[r, t, k], float(r * 1000 + t * 10 + k)
        else:
            weights[row, k] = float(r * 1000 + t * 10 + k)
    for row, (r, t) in enumerate(model.rows if not handle.do_expand else []):
        x[row] = out[r, t, TOP_K + rank]
    biases = tuple(order_sensitive(num_tokens, HIDDEN).to(torch.bfloat16) for _ in range(num_biases))
    bias: Any = biases if num_biases == 2 else biases[0] if biases else None
    y, home, _ = on_cpu(
        buffer.combine(placed(x), handle, topk_weights=placed(weights) if with_weights else None, bias=placed(bias))
    )

    once = handle.do_expand and not buffer.allow_multiple_reduction
    want, want_weights = torch.zeros(num_tokens, HIDDEN), torch.zeros(num_tokens, TOP_K)
    if biases:
        want = torch.stack([bias.float() for bias in biases]).sum(dim=0)
    for t in range(num_tokens):
        ids = mine.ids[t].to(torch.int32).tolist()
        owners = [id // models[0].local if 0 <= id < EXPERTS else -1 for id in ids]
        for k, owner in enumerate(owners):
            if owner >= 0:
                want_weights[t, k] = float(rank * 1000 + t * 10 + k)
            if once and owner >= 0:
                want[t] += out[rank, t, k].float()
        # DeepEP adds ranks in the order of their last entries.
        for owner in sorted({*owners} - {-1}, key=lambda owner: owners[::-1].index(owner), reverse=True):
            of_owner = [k for k, other in enumerate(owners) if other == owner]
            if once:
                continue
            if handle.do_expand:
                local = torch.zeros(HIDDEN)
                for k in of_owner:
                    local += out[rank, t, k].float()
                want[t] += local.to(torch.bfloat16).float()
            else:
                want[t] += out[rank, t, TOP_K + owner].float()
    assert same_bits(y, want.to(torch.bfloat16))
    assert (home is not None) == with_weights
    if home is not None:
        assert torch.equal(home, want_weights)


FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"do_cpu_sync": False, "use_tma_aligned_col_major_sf": True},
    {"do_expand": True, "expert_alignment": 8, "do_zero_padding": True},
    {"do_expand": True, "expert_alignment": 1, "use_tma_aligned_col_major_sf": True},
    {"do_expand": True, "expert_alignment": 8, "do_cpu_sync": False, "do_zero_padding": True},
    {"do_expand": True, "do_cpu_sync": False},
)


def every_call(rank: int, world: int, names: list[str], formats: list[str], seed: int, **settings: Any) -> None:
    buffer = a_buffer(**settings)
    for name in names:
        everyone = [CASES[name](seed, r) for r in range(world)]
        others = [CASES[name](seed + 1, r) for r in range(world)]
        mine, again = everyone[rank], others[rank]
        for number, form in enumerate(FORMS):
            fmt = formats[number % len(formats)]
            models = [Model(everyone, r, form.get("expert_alignment", 1)) for r in range(world)]
            model, sync = models[rank], form.get("do_cpu_sync", True)
            statistics = placed(torch.full((EXPERTS // world,), 5, dtype=torch.int32))
            sent_ids = placed(mine.ids)
            with_weights = number % 3 != 1
            poison(buffer)
            got = buffer.dispatch(
                placed(sent_as(fmt, mine.x)),
                topk_idx=sent_ids,
                topk_weights=placed(mine.weights) if with_weights else None,
                cumulative_local_expert_recv_stats=statistics,
                num_experts=EXPERTS,
                do_handle_copy=number % 2,
                **form,
            )
            handle = got[3]
            check_rows(model, got, everyone, fmt, form, with_weights)
            check_handle(model, handle, mine.ids, sync)
            assert (statistics - 5).tolist() == model.counts
            assert (handle.topk_idx.data_ptr() != sent_ids.data_ptr()) == bool(number % 2) or sent_ids.numel() == 0

            # Other tokens take the same way, with other weights or none; callers may have written to what they got.
            if got[1] is not None:
                got[1].fill_(-7)
            for weighted in (True, False):
                forms = {key: value for key, value in form.items() if key not in ("do_cpu_sync", "expert_alignment")}
                changed = [Tokens(o.x, e.ids, o.weights) for o, e in zip(others, everyone, strict=True)]
                poison(buffer)
                new_weights = placed(again.weights) if weighted else None
                x = placed(sent_as(fmt, again.x))
                cached = buffer.dispatch(x, topk_weights=new_weights, handle=handle, **forms)
                assert cached[3] is handle
                check_rows(model, cached, changed, fmt, form, weighted)
            # A handle of expanded rows has those that are not expanded, too.
            if handle.do_expand:
                plain = buffer.dispatch(placed(sent_as(fmt, again.x)), handle=handle)
                check_rows(model, plain, others, fmt, {"do_cpu_sync": sync}, False)
            for turn in range(2):
                poison(buffer)
                check_combine(buffer, models, handle, seed + turn, (number + turn) % 3, turn == 0)
        buffer.barrier()
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_and_option(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(every_call, list(CASES), ["bf16", "fp8", "packed"], seed)


@pytest.mark.cpu_only
def test_eight_ranks(get_pool: Any, seed: int) -> None:
    get_pool(8).run(every_call, ["ragged"], ["fp8", "bf16"], seed)


def rounded_once(rank: int, world: int, seed: int) -> None:
    every_call(rank, world, ["ragged", "one expert"], ["bf16"], seed, allow_multiple_reduction=False)


@pytest.mark.cpu_only
def test_sums_that_are_rounded_once(get_pool: Any, seed: int) -> None:
    get_pool(2).run(rounded_once, seed)


def other_contexts(rank: int, world: int, how: dict[str, str], formats: list[str], seed: int) -> None:
    contexts = group_buffer.ExpertParallelContext
    try:
        group_buffer.ExpertParallelContext = partial(contexts, **how)  # type: ignore[misc, assignment]
        every_call(rank, world, ["ragged"], formats, seed)
    finally:
        group_buffer.ExpertParallelContext = contexts  # type: ignore[misc]


@pytest.mark.cpu_only
@pytest.mark.parametrize("how", [{"engine": "triton"}, {"transport": "collective"}])
def test_interpreted_kernels_and_ranks_without_common_memory(how: dict[str, str], get_pool: Any, seed: int) -> None:
    get_pool(2).run(other_contexts, how, ["packed", "bf16", "fp8"], seed)


def named_twice(rank: int, world: int) -> None:
    """An expert that a token names twice has a row for each, for which there may be no room where nobody waits."""
    buffer = a_buffer()
    x = torch.full((2, HIDDEN), rank + 1.0, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1, 0, -1], [1, 1, 1, 0]])
    weights = torch.arange(8.0).view(2, 4)
    rows, _, row_weights, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_experts=world, do_expand=True
    )
    count = [3, 4][rank]
    assert rows.shape == (world * count, HIDDEN)
    y, home, _ = buffer.combine(rows, handle, topk_weights=row_weights)
    assert torch.equal(y, x * (ids >= 0).sum(dim=1, keepdim=True))
    assert home is not None and torch.equal(home, torch.where(ids >= 0, weights, 0.0))
    most = dict(num_experts=world, do_expand=True, do_cpu_sync=False)
    buffer.dispatch(x, topk_idx=ids, **most)
    with pytest.raises(ValueError, match="topk_idx: expected each expert of a token once"):
        everything = torch.tensor([0, 1, 1, 0]).expand(MOST, TOP_K)
        buffer.dispatch(x.new_zeros(MOST, HIDDEN), topk_idx=everything, **most)
    buffer.destroy()


@pytest.mark.cpu_only
def test_experts_that_a_token_names_twice(get_pool: Any) -> None:
    get_pool(2).run(named_twice)


def other_buffers(rank: int, world: int, seed: int) -> None:
    """A handle outlives its buffer, as where a caller makes a larger one between forward and backward."""
    mine = random_tokens(seed, rank, 5 + rank)
    small = a_buffer()
    rows, _, _, handle, _ = small.dispatch(mine.x, topk_idx=mine.ids, num_experts=EXPERTS)
    small.destroy()
    assert dist.group.WORLD is not None
    large = ElasticBuffer(dist.group.WORLD, a_buffer_bytes(10 * MOST), explicitly_destroy=True)
    again, *_ = large.dispatch(mine.x, handle=handle)
    assert torch.equal(again, rows)
    y, _, _ = large.combine(again, handle)
    owners = torch.where(mine.ids >= 0, mine.ids // (EXPERTS // world), -1)
    times = sum((owners == r).any(dim=1, keepdim=True).int() for r in range(world))
    assert torch.equal(y, (mine.x.float() * times).to(torch.bfloat16))
    # Room is for tokens of other widths, too; few tokens of many elements.
    wide = torch.randn(1, 4 * HIDDEN).to(torch.bfloat16)
    rows, *_ = large.dispatch(wide, topk_idx=mine.ids[:1], num_experts=EXPERTS, num_max_tokens_per_rank=1)
    assert rows.shape[1] == 4 * HIDDEN
    large.destroy()


def a_buffer_bytes(tokens: int) -> int:
    assert dist.group.WORLD is not None
    return ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, tokens, HIDDEN)


@pytest.mark.cpu_only
def test_handles_in_other_buffers(get_pool: Any, seed: int) -> None:
    get_pool(2).run(other_buffers, seed)


def refuse(rank: int, world: int) -> None:
    buffer, group = a_buffer(), dist.group.WORLD
    x, ids = torch.zeros(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, TOP_K, dtype=torch.int64)
    fp8 = x.to(torch.float8_e4m3fn), torch.ones(2, 2)
    given: dict[str, Any] = {"topk_idx": ids, "num_experts": EXPERTS}
    *_, plain, event = buffer.dispatch(x, **given)
    *_, expanded, _ = buffer.dispatch(x, **given, do_expand=True)
    assert event.event is None
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("group: expected", lambda: ElasticBuffer(None, 1 << 20)),  # type: ignore[arg-type]
        ("num_bytes: expected it, or", lambda: ElasticBuffer(group, hidden=HIDDEN)),
        ("num_cpu_bytes: expected", lambda: ElasticBuffer(group, 1 << 20, 1 << 20)),
        ("num_gpu_timeout_secs: expected", lambda: ElasticBuffer(group, 1 << 20, num_gpu_timeout_secs=0)),
        ("hidden: expected a multiple of 16", lambda: ElasticBuffer.get_buffer_size_hint(group, 8, 40)),
        ("explicitly_destroy: expected", lambda: ElasticBuffer(group, 1 << 20).destroy()),
        ("get_comm_stream: expected a GPU", buffer.get_comm_stream),
        ("x: expected a hidden size", lambda: buffer.dispatch(x[:, :8].contiguous(), **given)),
        (r"x\[1\]: expected 1 to 2 columns", lambda: buffer.dispatch((fp8[0], torch.ones(2, 3)), **given)),
        (r"x\[1\]: expected torch.float32 or", lambda: buffer.dispatch((fp8[0], fp8[1].double()), **given)),
        ("topk_idx: expected a tensor", lambda: buffer.dispatch(x, num_experts=EXPERTS)),
        ("topk_idx: expected 1 to 32", lambda: buffer.dispatch(x, topk_idx=ids[:, :0], num_experts=EXPERTS)),
        ("topk_weights: expected shape", lambda: buffer.dispatch(x, **given, topk_weights=torch.ones(2, 1))),
        ("num_experts: expected", lambda: buffer.dispatch(x, topk_idx=ids)),
        (
            "num_experts: expected",
            lambda: buffer.dispatch(x, topk_idx=ids, num_experts=EXPERTS + 1 if world > 1 else 0),
        ),
        (
            "num_max_tokens_per_rank: expected at most",
            lambda: buffer.dispatch(x, **given, num_max_tokens_per_rank=4096),
        ),
        ("expert_alignment: expected", lambda: buffer.dispatch(x, **given, expert_alignment=0)),
        ("do_zero_padding: expected False", lambda: buffer.dispatch(x, **given, do_zero_padding=True)),
        ("do_expand: expected True or False", lambda: buffer.dispatch(x, **given, do_expand=2)),
        (
            "cumulative_local_expert_recv_stats: expected",
            lambda: buffer.dispatch(x, **given, cumulative_local_expert_recv_stats=torch.zeros(EXPERTS // world)),
        ),
        (
            "cumulative_local_expert_recv_stats: expected None",
            lambda: buffer.dispatch(x, handle=plain, cumulative_local_expert_recv_stats=ids[0].int()),
        ),
        ("topk_idx: expected None", lambda: buffer.dispatch(x, topk_idx=ids, handle=plain)),
        ("do_cpu_sync: expected False or None", lambda: buffer.dispatch(x, handle=plain, do_cpu_sync=True)),
        ("do_expand: expected False", lambda: buffer.dispatch(x, handle=plain, do_expand=True)),
        ("num_experts: expected None, or", lambda: buffer.dispatch(x, handle=plain, num_experts=2 * EXPERTS)),
        ("expert_alignment: expected None, or", lambda: buffer.dispatch(x, handle=plain, expert_alignment=8)),
        ("x: expected 2 tokens", lambda: buffer.dispatch(x[:1], handle=plain)),
        ("handle: expected an EPHandle", lambda: buffer.dispatch(x, handle=())),  # type: ignore[arg-type]
        ("previous_event: expected", lambda: buffer.dispatch(x, **given, previous_event=1)),  # type: ignore[arg-type]
        ("handle: expected an EPHandle", lambda: buffer.combine(x, ())),  # type: ignore[arg-type]
        ("x: expected shape", lambda: buffer.combine(x.new_zeros(999, HIDDEN), expanded)),
        ("x: expected torch.bfloat16", lambda: buffer.combine(torch.zeros(plain.num_recv_tokens, HIDDEN), plain)),
        (
            "topk_weights: expected torch.float32",
            lambda: buffer.combine(
                x.new_zeros(expanded.num_expanded_tokens, HIDDEN), expanded, topk_weights=torch.zeros(999)
            ),
        ),
        (
            "bias: expected at most two",
            lambda: buffer.combine(x.new_zeros(plain.num_recv_tokens, HIDDEN), plain, bias=(x, x, x)),  # type: ignore[arg-type]
        ),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    absent = [name for name, value in vars(ElasticBuffer).items() if (value.__doc__ or "").startswith("Not there")]
    absent += ["get_engram_storage_size_hint", "get_pp_buffer_size_hint", "get_agrs_buffer_size_hint"]
    assert {"engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv", "all_gather"} <= set(absent)
    assert {"create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config"} <= set(absent)
    for name in absent:
        with pytest.raises(NotImplementedError, match=name):
            getattr(buffer, name)(x, 1)
    # Nothing of this has disturbed the ranks.
    assert torch.equal(buffer.dispatch(x, handle=plain)[0], x.new_zeros(plain.num_recv_tokens, HIDDEN))
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_wrong_or_absent_is_named(world: int, get_pool: Any) -> None:
    get_pool(world).run(refuse)


def too_many(rank: int, world: int, sync: bool) -> str:
    buffer = a_buffer()
    x = torch.zeros(2 + MOST * rank, HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int64)
    try:
        buffer.dispatch(x, topk_idx=ids, num_experts=world, do_cpu_sync=sync)
    except (ValueError, PeerAbortedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.cpu_only
@pytest.mark.parametrize("sync", [False, True])
def test_peers_learn_of_a_rank_with_too_many_tokens(sync: bool, get_pool: Any) -> None:
    peer, own = get_pool(2).run(too_many, sync)
    assert own.startswith(f"ValueError: x: expected at most num_max_tokens_per_rank = {MOST} tokens")
    assert peer.startswith("PeerAbortedError") and "rank 1" in peer and "num_max_tokens_per_rank" in peer


def limits(rank: int, world: int) -> list[tuple[float, float]]:
    """Seconds for which a call waits for a peer, and the first of its kind, by what was asked for."""
    found = []
    for asked in (3, 100, 1800.5):
        buffer = a_buffer(num_gpu_timeout_secs=asked)
        buffer.barrier()  # whose memory is its own
        (found_here,) = {(each.timeout_ns / 1e9, each.startup_timeout_ns / 1e9) for each in buffer._contexts}
        found.append(found_here)
        buffer.destroy()
    return found


@pytest.mark.cpu_only
def test_the_first_call_waits_for_no_less_than_later_ones(get_pool: Any) -> None:
    """Engines ask for half an hour, since a peer may compile its model's kernels before its first call."""
    for found in get_pool(2).run(limits):
        assert found == [(3, 120), (100, 120), (1800.5, 1800.5)]


def die(rank: int, world: int, last: int, seed: int) -> None:
    """Rank 1 dies before its call `last`, after a round of calls: the first of each kind wait for longer."""
    buffer, mine = a_buffer(num_gpu_timeout_secs=3), random_tokens(seed, rank, 6)
    calls = 0

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if rank == 1 and calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return getattr(buffer, name)(*args, **kwargs)

    for step in range(4):
        expand = step % 2 == 1
        rows, *_, handle, _ = call("dispatch", mine.x, topk_idx=mine.ids, num_experts=EXPERTS, do_expand=expand)
        call("dispatch", mine.x, handle=handle, do_expand=expand)
        call("combine", rows, handle)


@pytest.mark.cpu_only
def test_survivors_name_a_rank_that_dies(seed: int) -> None:
    survivor, dead = run_once(die, 2, 6 + seed % 6, seed)
    assert dead.exitcode == -signal.SIGKILL
    assert isinstance(survivor.error, MoERuntimeError) and "rank 1" in str(survivor.error), survivor.trace


def close_all(rank: int, world: int) -> None:
    buffer = a_buffer()
    buffer.barrier()  # whose memory is its own
    first, second = buffer._contexts
    closed: list[int] = []

    def close(number: int, own: Any) -> None:
        closed.append(number)
        own()
        if number == 0:
            raise RuntimeError("first")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="first"):
        for number, context in enumerate((first, second)):
            patch.setattr(context, "close", partial(close, number, context.close))
        buffer.destroy()
    assert closed == [0, 1] and first.closed and second.closed


@pytest.mark.cpu_only
def test_destroy_closes_all_that_it_can(get_pool: Any) -> None:
    get_pool(2).run(close_all)
