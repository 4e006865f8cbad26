"""What `moe_runtime.deep_ep` is beside its exchange: names, sizes, helpers, and arguments that are refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.errors import PeerAbortedError
from moe_runtime.deep_ep import Buffer, EventHandle, EventOverlap, alias, sizes
from moe_runtime.deep_ep.__main__ import main
from moe_runtime.deep_ep.utils import math, testing
from moe_runtime.dispatcher.token_dispatcher import RoutingDispatcher, TokenDispatcher
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK
from moe_runtime.launch import doctor
from moe_runtime.virtual import virtual_contexts
from tests.support.programs import python_path, without_interpreter
from tests.support.spawner import interpreter


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = without_interpreter(PYTHONPATH=f"{folder}:{python_path()}")
    return subprocess.run([interpreter(), "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_package_deep_ep_is_written_only_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "--write-alias" in capsys.readouterr().out
    assert main(["--write-alias", str(tmp_path)]) == 0
    assert main(["--write-alias", str(tmp_path)]) == 0  # again
    code = (
        "import deep_ep, moe_runtime.deep_ep as ours\n"
        "from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventOverlap, topk_idx_t\n"
        "from deep_ep.utils import EventHandle\n"
        "from deep_ep.buffer import Buffer as first\n"
        "from deep_ep.buffers.legacy import Buffer as second\n"
        "from deep_ep.buffers.elastic import ElasticBuffer as third\n"
        "import deep_ep.buffers.elastic\n"
        "assert first is second is Buffer and third is ElasticBuffer\n"
        "import deep_ep.buffers.legacy as fourth, deep_ep.buffers.elastic as fifth\n"
        "from deep_ep.buffers import legacy\n"
        "assert fourth is legacy is deep_ep.buffers.legacy and fourth.Buffer is Buffer\n"
        "assert fifth is deep_ep.buffers.elastic and fifth.ElasticBuffer is ElasticBuffer\n"
        "from deep_ep.utils.envs import init_dist\n"
        "from deep_ep.utils.math import calc_diff\n"
        "from deep_ep.utils.testing import bench\n"
        "assert deep_ep is ours and deep_ep.Buffer is Buffer is ours.Buffer, deep_ep\n"
        "assert (ElasticBuffer, EPHandle) == (ours.ElasticBuffer, ours.EPHandle)\n"
    )
    result = run(tmp_path, code)
    assert result.returncode == 0, result.stderr
    utils = tmp_path / "checkout" / "deep_ep" / "utils"
    utils.mkdir(parents=True)
    (utils / "refs.py").write_text("from .envs import get_global_seed\nfrom .math import ceil_div\nHERE = True\n")
    assert main(["--write-alias", str(tmp_path), "--checkout", str(tmp_path / "checkout")]) == 0
    result = run(tmp_path, "import deep_ep; from deep_ep.utils import math, refs; assert refs.HERE and math.safe_div")
    assert result.returncode == 0, result.stderr
    # A checkout that is none, or that nothing is written for.
    (tmp_path / "new").mkdir()
    with pytest.raises(ValueError, match=r"^checkout: expected one of DeepEP with deep_ep/utils, got .*new"):
        alias.write_alias(tmp_path / "new", tmp_path / "new")
    for wrong in (["--checkout", str(tmp_path / "checkout")], ["--write-alias", str(tmp_path), "--checkout", "none"]):
        with pytest.raises(SystemExit):
            main(wrong)
        assert "checkout: expected" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "other" / "deep_ep").mkdir(parents=True)
    with pytest.raises(ValueError, match="folder: expected one without another deep_ep"):
        alias.write_alias(tmp_path / "other")
    with pytest.raises(SystemExit):
        main(["--write-alias", str(tmp_path / "other")])


def test_the_alias_refuses_to_replace_another_deep_ep(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("")
    result = run(tmp_path, "import deep_ep; from moe_runtime.deep_ep import install_alias; install_alias()")
    assert "expected to come before any import of deep_ep" in result.stderr


def test_events_on_cpus_are_there_at_once() -> None:
    event = EventOverlap(EventHandle())
    called = []
    event.register_hook_after_wait(lambda: called.append(1))
    with pytest.raises(ValueError, match="hook_after_wait: expected one hook"):
        event.register_hook_after_wait(lambda: called.append(2))
    with event(release_handle=True):
        pass
    assert called == [1] and event.event is None
    with pytest.raises(ValueError, match="event: expected one to wait for"):
        EventOverlap().current_stream_wait()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_bytes_of_both_modes_hold_what_they_say(ranks: int) -> None:
    hidden = 7168
    for tokens in (1, 2, 128, 4096):
        num_bytes = sizes.normal_bytes(hidden, ranks, tokens)
        assert sizes.normal_tokens(num_bytes, hidden, ranks) == tokens
        assert sizes.normal_tokens(num_bytes - 1, hidden, ranks) == tokens - 1
    # The formula of the docstring, counted by hand for 8 ranks.
    if ranks == 8:
        record = -(-(2 * (7168 + 2 * 56 + 128) + 16 + 16 + 4 * 8) // 128) * 128
        assert sizes.normal_bytes(hidden, 8, 100) == 2 * (801 * record + 4 * 800 + 100 * 8 * 14336)
    assert sizes.normal_tokens(0, hidden, ranks) == 0
    hint = Buffer.get_low_latency_rdma_size_hint(128, hidden, ranks, 256)
    assert hint >= sizes.low_latency_bytes(128, hidden, ranks, 256, 8)
    assert sizes.padded_bytes(128, hidden, ranks, 256, FP8_BLOCK) == 256 * 128 * (7168 + 4 * 56 + 4)


@pytest.mark.parametrize("ranks", [1, 2, 17, 31])
def test_a_step_of_a_buffer_of_many_bytes_has_no_more_tokens_than_an_exchange_takes(ranks: int) -> None:
    """8 GB are room for 4.4 million tokens of 128 elements of a rank alone."""
    tokens = sizes.normal_tokens(2**45, 128, ranks)
    assert tokens == sizes.normal_tokens(2**46, 128, ranks)
    context = virtual_contexts(ranks, engine="torch")[0]
    exchange = {"hidden_size": sizes.normal_words(128), "max_tokens_per_rank": tokens, "output_size": 128}
    TokenDispatcher(context, num_experts=ranks, top_k=ranks, **exchange)
    RoutingDispatcher(
        context,
        num_experts=64,
        top_k=sizes.MOST_TOP_K,
        max_tokens_per_rank=tokens,
        output_size=128,
        accepts_repeats=True,
    )


def test_the_doctor_tells_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--config", "deepseek_v3", "--world-size", "8", "--tokens", "128"])
    assert "moe_runtime.deep_ep on each of 8 rank(s)" in capsys.readouterr().out


def test_helpers_quantize_and_compare() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 300, generator=g).to(torch.bfloat16)
    quants, scales = math.per_token_cast_to_fp8(x)
    assert quants.shape == (5, 300) and scales.shape == (5, 3)
    back = math.per_token_cast_back(quants, scales)
    assert (back.float() - x.float()).abs().max() <= 2**-4 * x.float().abs().max()
    rounded = torch.tensor(2.0) ** torch.ceil(torch.log2(scales))
    bytes_of = (rounded.log2().int() + 127).to(torch.uint8)
    packed = torch.nn.functional.pad(bytes_of, (0, 1)).view(torch.int32)
    whole = torch.randn(5, 512, generator=g).to(torch.float8_e4m3fn)
    words = torch.full((5, 1), 0x7F7F7F7F, dtype=torch.int32)
    assert torch.equal(math.per_token_cast_back(whole, words), whole.to(torch.bfloat16))
    assert packed.shape == (5, 1)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-12) and math.calc_diff(x, -x) > 0.1
    ids = torch.tensor([[3, 1, 1, -1], [0, 0, 0, 0], [-1, -1, -1, -1]])
    math.inplace_unique(ids, 4)
    assert ids.tolist() == [[1, 3, -1, -1], [0, -1, -1, -1], [-1, -1, -1, -1]]
    assert math.hash_tensor(x) == math.hash_tensor(x.clone()) != math.hash_tensor(x + 1)
    assert math.per_token_cast_to_fp8(x[:0])[0].shape == (0, 300)
    assert math.count_bytes(x, None, [quants, (scales,)]) == 5 * 300 * 3 + 5 * 3 * 4
    assert (math.safe_div(3, 2), math.safe_div(0, 0)) == (1.5, 0)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)


def test_parts_of_a_call_are_cut_at_its_pauses() -> None:
    call = [(0.0, 2.0), (1.5, 3.0), (10.0, 12.0), (12.5, 14.0)]
    assert testing._seconds_of_parts(call, 1) == [pytest.approx(14e-6)]
    assert testing._seconds_of_parts(call, 2) == [pytest.approx(3e-6), pytest.approx(4e-6)]


def refuse(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for settings in ({"comm": object()}, {"enable_shrink": True}, {"allow_nvlink_for_low_latency_mode": False}):
        with pytest.raises(NotImplementedError, match=next(iter(settings))):
            Buffer(group, **settings)
    with pytest.raises(ValueError, match="group: expected a process group"):
        Buffer(None)
    num_bytes = sizes.normal_bytes(64, world, 4)
    buffer = Buffer(group, num_bytes, 1000)
    with pytest.raises(ValueError, match="explicitly_destroy"):
        buffer.destroy()
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    weights = torch.zeros(2, 1)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2 * world)
    names: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }
    wrong: list[tuple[str, Any]] = [
        ("x: expected", lambda: buffer.dispatch(x.float(), **names)),
        ("x: expected a hidden size", lambda: buffer.dispatch(x[:, :8].contiguous(), **names)),
        ("is_token_in_rank: expected", lambda: buffer.dispatch(x, **(names | {"is_token_in_rank": in_rank.int()}))),
        ("num_tokens_per_rank: expected", lambda: buffer.dispatch(x)),
        ("topk_weights: expected it together", lambda: buffer.dispatch(x, **names, topk_idx=ids)),
        ("topk_idx: expected", lambda: buffer.get_dispatch_layout(ids.int(), 2 * world)),
        ("num_experts: expected", lambda: buffer.get_dispatch_layout(ids, 2 * world + 1 if world > 1 else 0)),
        ("num_nvl_bytes: expected at least", lambda: buffer.dispatch(x.repeat(1, 1024), **names)),
        ("num_rdma_bytes: expected at least", lambda: buffer.low_latency_dispatch(x.repeat(1, 2), ids, 8, 2 * world)),
        ("use_ue8m0", lambda: buffer.low_latency_dispatch(x.repeat(1, 8), ids, 8, 2 * world, use_ue8m0=True)),
        ("x_global_scale", lambda: buffer.low_latency_dispatch(x.repeat(1, 2), ids, 8, 2 * world, use_nvfp4=True)),
        ("handle: expected", lambda: buffer.combine(x, ())),
        ("new_num_sms: expected an even", lambda: Buffer.set_num_sms(3)),
        ("expected a GPU", buffer.get_comm_stream),
    ]
    for message, call in wrong:
        if "x_global_scale" in message or "num_rdma_bytes" in message:
            buffer.num_rdma_bytes = 1000 if "rdma" in message else 10**8
        with pytest.raises(ValueError, match=message):
            call()
    absent: list[tuple[str, Any]] = [
        ("use_logfmt", lambda: buffer.low_latency_combine(x, ids, weights, (), use_logfmt=True)),  # type: ignore[arg-type]
        ("wait_recv_cost", lambda: buffer.low_latency_dispatch(x, ids, 8, 2, dispatch_wait_recv_cost_stats=ids)),
        ("mask", lambda: buffer.low_latency_update_mask_buffer(0)),
        ("internode_dispatch", buffer.internode_dispatch),
        ("get_local_buffer_tensor", lambda: buffer.get_local_buffer_tensor(torch.int8)),
    ]
    for message, call in absent:
        with pytest.raises(NotImplementedError, match=message):
            call()


def take_handles_of_others(rank: int, world: int) -> None:
    """Handles of another number of ranks, or with more room, and too many weights: refused, and nothing is lost."""
    groups = [dist.new_group([each]) for each in range(world)]
    torch.manual_seed(rank)
    x, ids = torch.randn(5, 64).bfloat16(), torch.rand(5, 2 * world).argsort(dim=1)[:, :1]

    def dispatch(buffer: Buffer, times: int = 1) -> Any:
        many, few = x.repeat(times, 1), ids.repeat(times, 1)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(few, 2 * world)
        return buffer.dispatch(many, None, per_rank, None, in_rank, per_expert)

    alone = Buffer(groups[rank], sizes.normal_bytes(64, 1, 8), explicitly_destroy=True)
    roomy = Buffer(dist.group.WORLD, sizes.normal_bytes(64, world, 256), explicitly_destroy=True)
    buffer = Buffer(dist.group.WORLD, sizes.normal_bytes(64, world, 8), explicitly_destroy=True)
    rows, _, _, _, own, _ = dispatch(buffer)
    of_one, more = dispatch(alone), dispatch(roomy, 20)
    with pytest.raises(ValueError, match=f"^handle: expected one of {world} ranks, got one of 1"):
        buffer.combine(of_one[0], of_one[4])
    with pytest.raises(ValueError, match=f"^handle: expected one of {world} ranks, got one of 1"):
        buffer.dispatch(x, of_one[4])
    with pytest.raises(ValueError, match=r"^handle: expected steps of 8 tokens at most, got 128"):
        buffer.combine(more[0], more[4])
    with pytest.raises(ValueError, match=r"^handle: expected steps of 8 tokens at most, got 128"):
        buffer.dispatch(x.repeat(20, 1), more[4])
    with pytest.raises(ValueError, match=r"^topk_weights: expected 1 to 32"):
        buffer.combine(rows, own, torch.zeros(len(rows), 33))
    assert torch.equal(buffer.combine(rows, own)[0], x)
    for each in (alone, roomy, buffer):
        each.destroy()


@pytest.mark.cpu_only
def test_handles_that_do_not_fit_are_refused(get_pool: Any) -> None:
    get_pool(2).run(take_handles_of_others)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_wrong_or_absent_is_named(world: int, get_pool: Any) -> None:
    get_pool(world).run(refuse)


def take_gradients(rank: int, world: int) -> None:
    """Tensors of a training step give what detached ones give, and no graph; a bias may be left out of two."""
    experts, ways = 2 * world, {"num_max_dispatch_tokens_per_rank": 4, "num_experts": 2 * world}
    least = Buffer.get_low_latency_rdma_size_hint(4, 128, world, experts)
    buffer = Buffer(
        dist.group.WORLD, sizes.normal_bytes(128, world, 8), least, low_latency_mode=True, explicitly_destroy=1
    )  # type: ignore[arg-type]
    x, bias = torch.randn(3, 128).bfloat16(), torch.randn(3, 128).bfloat16()
    ids, weights = torch.tensor([[0], [experts - 1], [1]]), torch.rand(3, 1)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    names = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    found = []
    for learns in (False, True):
        x, bias, weights = (part.detach().requires_grad_(learns) for part in (x, bias, weights))
        rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **names, topk_idx=ids, topk_weights=weights)
        rows, row_weights = (part.detach().requires_grad_(learns) for part in (rows, row_weights))
        y, y_weights, _ = buffer.combine(rows, handle, row_weights, bias=(bias, None))
        both, _, _ = buffer.combine(rows, handle, bias=(bias, bias))
        (tokens, _, low, _, _) = buffer.low_latency_dispatch(x, ids, **ways, use_fp8=False)  # type: ignore[arg-type]
        mine, _, _ = buffer.low_latency_combine(tokens.detach().requires_grad_(learns), ids, weights, low)
        found.append((rows, y, y_weights, both, mine))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after)
    assert not any(part.requires_grad for part in found[1][1:])
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2])
def test_tensors_that_require_gradients_are_taken_as_they_are(world: int, get_pool: Any) -> None:
    get_pool(world).run(take_gradients)


def too_few(rank: int, world: int) -> None:
    buffer = Buffer(dist.group.WORLD, sizes.normal_bytes(128, world, 4))
    x, ids = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, world)
    names = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    with pytest.raises(ValueError, match=r"^num_worst_tokens: expected at least 3, the rows that come, got 2"):
        buffer.dispatch(x, **names, topk_idx=ids, topk_weights=torch.zeros(3, 1), num_worst_tokens=2)


@pytest.mark.cpu_only
def test_room_for_too_few_rows_is_named_on_cpus(get_pool: Any) -> None:
    get_pool(1).run(too_few)


def too_many(rank: int, world: int) -> str:
    """Rank 1 brings more tokens than fit where nobody waits for the host: it is told why, and its peer by whom."""
    buffer = Buffer(dist.group.WORLD, sizes.normal_bytes(64, world, 4))
    x = torch.zeros(2 + 3 * rank, 64, dtype=torch.bfloat16)
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int64)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, world)
    names = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    try:
        buffer.dispatch(x, **names, topk_idx=ids, topk_weights=torch.zeros(ids.shape), num_worst_tokens=16)
    except (ValueError, PeerAbortedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.cpu_only
def test_peers_learn_of_a_rank_with_too_many_tokens(get_pool: Any) -> None:
    peer, own = get_pool(2).run(too_many)
    assert own.startswith("ValueError: x: expected at most 4 tokens")
    assert peer.startswith("PeerAbortedError") and "rank 1" in peer and "expected at most 4 tokens" in peer


def disagree(rank: int, world: int) -> list[str]:
    """Ranks that bring other sizes: each is told what differs, before any token travels."""
    told = []
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    ids = torch.zeros(2, 1 + rank, dtype=torch.int64)
    for experts, top_k in ((8 * (1 + rank), 1), (8, 1 + rank)):
        buffer = Buffer(dist.group.WORLD, 0, 10**7)
        with pytest.raises(ValueError) as error:
            buffer.low_latency_dispatch(x, ids[:, :top_k].contiguous(), 4, experts)
        told.append(str(error.value))
    buffer = Buffer(dist.group.WORLD, sizes.normal_bytes(128, world, 4 + rank))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids[:, :1], world)
    with pytest.raises(ValueError) as error:
        buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
    return [*told, str(error.value)]


@pytest.mark.cpu_only
def test_ranks_that_bring_other_sizes_are_told(get_pool: Any) -> None:
    for experts, top_k, tokens in get_pool(2).run(disagree):
        assert "num_experts" in experts and "8" in experts and "16" in experts
        assert "top_k" in top_k
        assert "max_tokens_per_rank" in tokens
