"""Low latency of `moe_runtime.deep_ep.Buffer` over processes, against a plain model of DeepEP's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.deep_ep import Buffer
from moe_runtime.deep_ep.utils.math import per_token_cast_back
from moe_runtime.kernels.exchange import padded, reference
from moe_runtime.kernels.exchange.padded import place_padded_rows
from moe_runtime.kernels.formats.quantize import quantize_rows
from tests.support.exchange_data import repeated_ids

EXPERTS, TOP_K, MOST = 16, 4, 6


def tokens_of(
    seed: int, rank: int, count: int, hidden: int, repeats: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With `repeats` tokens name experts several times, an expert at most `MOST` times: DeepEP has room for these."""
    g = torch.Generator().manual_seed(seed * 7919 + rank)
    x = torch.randn(count, hidden, generator=g) * torch.exp(2 * torch.randn(count, 1, generator=g))
    ids = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.2, -1, ids)
    if repeats:
        ids = repeated_ids(ids, MOST, g)
    return x.to(torch.bfloat16), ids, torch.rand(count, TOP_K, generator=g)


def quantized(row: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 `[H]` and fp32 `[H / 128]` of one token, block by block."""
    blocks = row.float().view(-1, 128)
    scales = blocks.abs().amax(dim=1).clamp(min=1e-4) / torch.tensor(448.0)
    if round_scale:
        scales = torch.tensor(2.0) ** torch.ceil(torch.log2(scales.double())).float()
    return (blocks / scales[:, None]).to(torch.float8_e4m3fn).view(-1), scales


def entries_for(everyone: list[Any], expert: int) -> list[tuple[int, int, int]]:
    """`(source rank, token, k)` of each entry that names the expert, in the order of its rows."""
    return [(r, t, k) for r, data in enumerate(everyone) for t, k in (data[1] == expert).nonzero().tolist()]


def dispatch_and_combine(
    rank: int, world: int, counts: list[int], hidden: int, seed: int, repeats: bool = False
) -> None:
    per_rank, slots = EXPERTS // world, world * MOST
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, hidden, world, EXPERTS)
    buffer = Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True)
    kinds = [(False, False, False), (True, False, False), (True, True, False)]
    if hidden % 512 == 0:
        kinds.append((True, True, True))
    statistics = torch.zeros(per_rank, dtype=torch.int32)
    received = torch.zeros(per_rank, dtype=torch.int32)
    for turn, (use_fp8, round_scale, use_ue8m0) in enumerate(kinds * 2):
        count_of = [counts[(r + turn) % len(counts)] for r in range(world)]
        everyone = [tokens_of(seed + turn, r, count_of[r], hidden, repeats) for r in range(world)]
        x, ids, weights = everyone[rank]
        with_hook = turn >= len(kinds)
        settings = dict(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0, return_recv_hook=with_hook)
        got, count, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, cumulative_local_expert_recv_stats=statistics, **settings
        )
        assert (hook is not None) == with_hook
        if hook is not None:
            hook()
        rows, scales = got if isinstance(got, tuple) else (got, None)
        assert rows.shape == (per_rank, slots, hidden)
        if scales is not None:
            columns = hidden // (512 if use_ue8m0 else 128)
            assert scales.shape == (per_rank, slots, columns) and scales.stride() == (columns * slots, 1, slots)
        source_tokens, layout_range, most, same_hidden, experts = handle
        assert (most, same_hidden, experts) == (MOST, hidden, EXPERTS)
        received += count
        for e in range(per_rank):
            expert = rank * per_rank + e
            arriving = entries_for(everyone, expert)
            assert int(count[e]) == len(arriving)
            assert source_tokens[e, : len(arriving)].tolist() == [t for _, t, _ in arriving]  # type: ignore[index]
            begin = 0
            for r in range(world):
                of_source = sum(1 for s, _, _ in arriving if s == r)
                assert int(layout_range[e, r]) == begin << 32 | of_source  # type: ignore[index]
                begin += of_source
            for row, (r, t, _) in enumerate(arriving):
                if not use_fp8:
                    assert torch.equal(rows[e, row], everyone[r][0][t])
                    continue
                quants, expected = quantized(everyone[r][0][t], round_scale)
                assert torch.equal(rows[e, row].view(torch.uint8), quants.view(torch.uint8))
                assert scales is not None
                if use_ue8m0:
                    exponents = torch.tensor(scales[e, row].tolist(), dtype=torch.int32).view(torch.uint8)
                    assert torch.equal(exponents.int(), expected.log2().int() + 127)
                else:
                    assert torch.equal(scales[e, row], expected)

        # Outputs that no other row has: of each (expert, source rank, token, k). Rows without a token are poisoned.
        def output(expert: int, r: int, t: int, k: int, turn: int = turn) -> torch.Tensor:
            g = torch.Generator().manual_seed(expert * 10007 + r * 101 + t + turn + 100003 * k)
            return torch.randn(hidden, generator=g).to(torch.bfloat16)

        out = torch.full((per_rank, slots, hidden), float("nan"), dtype=torch.bfloat16)
        for e in range(per_rank):
            for row, entry in enumerate(entries_for(everyone, rank * per_rank + e)):
                out[e, row] = output(rank * per_rank + e, *entry)
        for again in range(3):
            # Weights come now; later ones differ, and some entries are masked.
            now = weights * (again + 1)
            masked = ids if again < 2 else torch.where(torch.arange(TOP_K) == 1, -1, ids)
            given = torch.empty_like(x)
            if again == 1:
                buffer.get_next_low_latency_combine_buffer(handle).copy_(out)
            y, _, hook = buffer.low_latency_combine(
                out, masked, now, handle, zero_copy=again == 1, return_recv_hook=with_hook, out=given if again else None
            )
            if hook is not None:
                hook()
            if again:
                assert y.data_ptr() == given.data_ptr() or x.shape[0] == 0
            for t in range(x.shape[0]):
                total = torch.zeros(hidden)
                for r in range(world):
                    partial = torch.zeros(hidden)
                    for k, expert in enumerate(masked[t].tolist()):
                        if expert >= 0 and expert // per_rank == r:
                            partial += now[t, k] * output(expert, rank, t, k).float()
                    total += partial.to(torch.bfloat16).float()
                assert torch.equal(y[t], total.to(torch.bfloat16))
        if use_fp8 and x.shape[0]:
            assert scales is not None
            back = per_token_cast_back(rows.view(-1, hidden), scales.reshape(per_rank * slots, -1).contiguous())
            assert back.shape == (per_rank * slots, hidden)
    assert torch.equal(statistics, received)
    buffer.destroy()


def small_formats(rank: int, world: int, counts: list[int], hidden: int, seed: int, repeats: bool = False) -> None:
    """NVFP4 and MXFP8 rows: those that our quantizer gives, in the layouts of SGLang and of rows."""
    per_rank, slots = EXPERTS // world, world * MOST
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, hidden, world, EXPERTS)
    buffer = Buffer(dist.group.WORLD, 0, num_bytes, explicitly_destroy=True)
    everyone = [tokens_of(seed, r, counts[r % len(counts)], hidden, repeats) for r in range(world)]
    x, ids, _ = everyone[rank]
    gsf = torch.tensor(448 * 6 / max(float(data[0].abs().max()) for data in everyone if data[0].numel()))
    for fmt, settings in (("nvfp4", {"use_nvfp4": True, "x_global_scale": gsf}), ("mxfp8", {"use_mxfp8": True})):
        (rows, scales), count, _, _, hook = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=True, **settings
        )
        assert hook is not None
        hook()
        linear = scales
        if fmt == "nvfp4":
            blocks, columns = -(-slots // 128), -(-hidden // 64)
            assert rows.shape == (slots, hidden // 2, per_rank) and rows.dtype == torch.uint8
            assert scales.shape == (32, 4, blocks, 4, columns, per_rank) and scales.dtype == torch.float8_e4m3fn
            rows = rows.permute(2, 0, 1)
            # [32, 4 of rows, blocks, 4 of columns, columns, E] to [E, rows, columns].
            linear = scales.view(torch.uint8).permute(5, 2, 1, 0, 4, 3).reshape(per_rank, blocks * 128, columns * 4)
            linear = linear[:, :slots, : hidden // 16]
        else:
            assert rows.shape == (per_rank, slots, hidden) and scales.shape == (per_rank, slots, hidden // 32)
        for e in range(per_rank):
            arriving = entries_for(everyone, rank * per_rank + e)
            assert int(count[e]) == len(arriving)
            for row, (r, t, _) in enumerate(arriving):
                want = quantize_rows(everyone[r][0][t : t + 1], fmt, gsf=gsf.reshape(1) if fmt == "nvfp4" else None)
                assert torch.equal(rows[e, row].view(torch.uint8), want.quants_RK[0].view(torch.uint8))
                assert want.scales_RV is not None
                assert torch.equal(linear[e, row], want.scales_RV[0].view(torch.uint8))
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("repeats", [False, True])
def test_small_formats_arrive(world: int, repeats: bool, get_pool: Any, seed: int) -> None:
    get_pool(world).run(small_formats, [5, 0, 6, 1], 384, seed, repeats)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("hidden", [384, 512])
def test_rows_of_experts_arrive_and_come_home(world: int, hidden: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(dispatch_and_combine, [5, 0, 6, 1], hidden, seed)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_entry_of_a_token_is_a_row_where_it_names_an_expert_twice(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(dispatch_and_combine, [5, 0, 6, 1], 512, seed, True)


def interpreted(rank: int, world: int, counts: list[int], hidden: int, seed: int, repeats: bool, at_once: int) -> None:
    """The torch exchange, with rows placed by the kernel that the CUDA exchange places many tokens by."""
    with patch.object(reference, "place_reference", place_padded_rows), patch.object(padded, "MOST_AT_ONCE", at_once):
        dispatch_and_combine(rank, world, counts, hidden, seed, repeats)
        small_formats(rank, world, counts, hidden, seed, repeats)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("repeats", "at_once"), [(False, 4096), (True, 4096), (True, 2)])
def test_interpreted_kernels_place_the_same_rows(
    world: int, repeats: bool, at_once: int, get_pool: Any, seed: int
) -> None:
    get_pool(world).run(interpreted, [3, 1], 512, seed, repeats, at_once)


def combine_twice(rank: int, world: int) -> None:
    """A combine that may read its rows later leaves them alone: the next rows lie elsewhere. Others take one place."""
    hidden = 128
    num_bytes = Buffer.get_low_latency_rdma_size_hint(MOST, hidden, world, EXPERTS)
    buffer = Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True)
    torch.manual_seed(rank)
    x, ids, weights = torch.randn(MOST, hidden).bfloat16(), torch.arange(MOST)[:, None], torch.ones(MOST, 1)
    places = []
    for async_finish in (True, True, False, False):
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        assert isinstance(got, torch.Tensor)
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        assert rows.data_ptr() == buffer.get_next_low_latency_combine_buffer(handle).data_ptr()
        rows.copy_(got)
        places.append(rows.data_ptr())
        y = buffer.low_latency_combine(got, ids, weights, handle, zero_copy=True, async_finish=async_finish)[0]
        assert torch.equal(y, x)
    first, second, third, fourth = places
    assert first != second and third == first and fourth == third
    buffer.destroy()


@pytest.mark.cpu_only
def test_rows_of_a_combine_that_goes_on_are_left_alone(get_pool: Any) -> None:
    get_pool(2).run(combine_twice)


def first_asked_for_in_inference_mode(rank: int, world: int) -> None:
    """An engine warms up in another mode than it serves in. Both write the same memory."""
    buffer = Buffer(dist.group.WORLD, 0, 10**8, low_latency_mode=True, explicitly_destroy=True)
    x, ids, weights = tokens_of(5, rank, 5, 256)
    for async_finish in (False, True):
        places, sums = [], []
        for mode in (True, False):
            with torch.inference_mode(mode):
                got, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
                assert isinstance(got, torch.Tensor)
                rows = buffer.get_next_low_latency_combine_buffer(handle)
                rows.copy_(got)
                y = buffer.low_latency_combine(got, ids, weights, handle, zero_copy=True, async_finish=async_finish)[0]
                sums.append(y)
                places.append(rows.data_ptr())
        assert torch.equal(*sums) and (places[0] == places[1]) != async_finish
    buffer.destroy()


@pytest.mark.cpu_only
def test_rows_for_zero_copy_may_be_written_in_any_mode(get_pool: Any) -> None:
    get_pool(2).run(first_asked_for_in_inference_mode)


def combine_before_the_hook(rank: int, world: int) -> None:
    """Where the rows are is not known yet: refused, and the hook and a right combine go on."""
    buffer = Buffer(dist.group.WORLD, 0, 10**8, low_latency_mode=True, explicitly_destroy=True)
    torch.manual_seed(rank)
    x, ids, weights = torch.randn(MOST, 128).bfloat16(), torch.arange(MOST)[:, None], torch.ones(MOST, 1)
    for _ in range(2):
        got, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        assert isinstance(got, torch.Tensor) and hook is not None
        with pytest.raises(ValueError, match=r"^handle: expected the hook of its dispatch to be called first"):
            buffer.low_latency_combine(got, ids, weights, handle)
        hook()
        assert torch.equal(buffer.low_latency_combine(got, ids, weights, handle)[0], x)
    buffer.destroy()


@pytest.mark.cpu_only
def test_a_combine_before_the_hook_is_refused(get_pool: Any) -> None:
    get_pool(2).run(combine_before_the_hook)


def combine_late(rank: int, world: int) -> str:
    """Handles may be combined in any order, as late as one likes; hooks come before the second next call."""
    buffer = Buffer(dist.group.WORLD, 0, 10**8, low_latency_mode=True, explicitly_destroy=True)
    torch.manual_seed(rank)
    ids, weights = torch.arange(MOST)[:, None], torch.ones(MOST, 1)

    def dispatch() -> tuple[torch.Tensor, Any, Any]:
        x = torch.randn(MOST, 128).bfloat16()
        got, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        return x, got, handle

    brought = [dispatch() for _ in range(4)]
    for x, got, handle in (*brought, *reversed(brought)):
        assert torch.equal(buffer.low_latency_combine(got, ids, weights, handle)[0], x)
    (x, got, handle), other = brought[:2]
    y, _, hook = buffer.low_latency_combine(got, ids, weights, handle, return_recv_hook=True)
    buffer.low_latency_combine(other[1], ids, weights, other[2])
    assert hook is not None
    hook()
    assert torch.equal(y, x)
    _, _, hook = buffer.low_latency_combine(got, ids, weights, handle, return_recv_hook=True)
    assert hook is not None
    try:
        dispatch()
        # A peer may have come to its hook already, and tell this rank here.
        buffer.low_latency_combine(other[1], ids, weights, other[2])
        hook()
    except MoERuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.cpu_only
def test_combines_may_come_late_and_hooks_may_not(get_pool: Any) -> None:
    for found in get_pool(2).run(combine_late):
        assert found.startswith("StaleHandleError") and "combine_recv" in found


def wrong_calls(rank: int, world: int) -> None:
    """Refused by the rank that makes them before anything is sent: right calls go on."""
    buffer = Buffer(dist.group.WORLD, 0, 10**8, low_latency_mode=True, explicitly_destroy=True)
    x, ids, weights = tokens_of(3, rank, 5, 256)

    def dispatch(tokens: torch.Tensor = x, entries: torch.Tensor = ids, **how: Any) -> Any:
        return buffer.low_latency_dispatch(tokens, entries, MOST, EXPERTS, use_fp8=False, **how)

    rows, _, handle, _, _ = dispatch()
    rows = rows.nan_to_num(0.0)

    def combine(given: torch.Tensor = rows, **how: Any) -> Any:
        return buffer.low_latency_combine(given, ids, weights, handle, **how)[0]

    right, out = combine(), torch.empty(5, 512, dtype=torch.bfloat16)
    wrong: dict[str, Callable[[], object]] = {
        "x: expected contiguous rows": lambda: dispatch(x.t().contiguous().t()),
        "topk_idx: expected at least one expert": lambda: dispatch(entries=ids[:, :0]),
        "round_scale: expected True or False": lambda: dispatch(round_scale="no"),
        "x: expected bf16 .* on cpu, got .* on meta": lambda: combine(rows.to("meta")),
        r"out: expected shape \[5, 256\]": lambda: combine(out=out),
        "out: expected a contiguous tensor": lambda: combine(out=out[:, ::2]),
        "out: expected memory at a multiple of 16 bytes": lambda: combine(
            out=out.view(-1)[4 : 4 + 5 * 256].view(5, 256)
        ),
        "out: expected torch.bfloat16": lambda: combine(out=torch.empty(5, 256)),
        "async_finish: expected True or False": lambda: combine(async_finish="no"),
    }
    for complaint, call in wrong.items():
        # The other rank has not made a mistake.
        if rank == 0:
            with pytest.raises(ValueError, match=f"^{complaint}"):
                call()
        assert torch.equal(dispatch()[1], dispatch()[1]) and torch.equal(combine(), right)
    buffer.destroy()


@pytest.mark.cpu_only
def test_wrong_calls_leave_the_buffer_as_it_was(get_pool: Any) -> None:
    get_pool(2).run(wrong_calls)
