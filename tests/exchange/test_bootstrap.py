"""Start-up of a group: who takes part, what is exchanged, which transport is chosen and why not another."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_runtime.build import context_from_config
from moe_runtime.comm import transport as transport_module
from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.comm.errors import PeerAbortedError, PeerTimeoutError, Phase, StoreLostError
from moe_runtime.comm.heaps.nvshmem_world import NvshmemWorld
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.messages import integer, table
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import choose_transport
from moe_runtime.config import ParallelConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.resilience.newcomer import newcomers_group
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once
from tests.unit.test_readme import FENCE, README

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()


def test_without_torch_distributed_there_is_one_rank() -> None:
    group = RankGroup()
    assert (group.rank, group.world_size, group.group) == (0, 1, None)
    assert group.gather("x", {"a": 1}, table(integer())) == [{"a": 1}]
    group.barrier()
    group.leave("nobody listens")
    assert group.missing("event", 0.0) == []


def test_single_rank_choices() -> None:
    group = RankGroup()
    choice = choose_transport(group, CPU)
    assert choice.name == "private"
    assert choice.reasons == {
        "nvshmem": "needs GPUs, the device is cpu",
        "shared": "one rank has nobody to share memory with",
        "hierarchical": "the ranks are on one host",
        "collective": "torch.distributed is not initialised",
    }
    assert choose_transport(group, CPU, "shared").name == "shared"
    on_gpu = choose_transport(group, torch.device("cuda"))
    assert on_gpu.name == "private"
    # With a GPU it depends on whether nvshmem4py is installed; `auto` has no use for it in either case.
    assert on_gpu.reasons["nvshmem"] if HAS_GPU else on_gpu.reasons["nvshmem"] == "no GPU can be seen"
    with pytest.raises(ValueError, match="transport: nvshmem cannot be used: needs GPUs"):
        choose_transport(group, CPU, "nvshmem")
    names = "auto, nvshmem, shared, private, hierarchical or collective"
    with pytest.raises(ValueError, match=f"transport: expected {names}, got 'tcp'"):
        choose_transport(group, CPU, "tcp")


def test_environment_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert init_from_env("cpu") == CPU
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="device: expected cpu, cuda or None, got 'tpu'"):
        init_from_env("tpu")
    for wrong in (True, [], torch.device("cpu"), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="device: expected cpu, cuda or None, got "):
            init_from_env(wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(ValueError, match="local rank 99 has no GPU"):
        init_from_env("cuda")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ValueError, match=r"LOCAL_RANK of the environment: expected .*'x'"):
        init_from_env("cpu")


def test_a_newcomer_hosts_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match="store: expected one in which ranks with on_failure='continue' have met"):
        newcomers_group(None, None, 5.0)


def test_without_torchrun_the_current_gpu_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    made_current: list[torch.device] = []
    gpus = {"is_available": lambda: True, "device_count": lambda: 4, "current_device": lambda: 3}
    for name, found in {**gpus, "set_device": made_current.append}.items():
        monkeypatch.setattr(torch.cuda, name, found)
    assert init_from_env() == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert init_from_env() == torch.device("cuda", 1)
    assert made_current == [torch.device("cuda", 3), torch.device("cuda", 1)]


def join_like_torchrun(rank: int, world: int, port: int) -> tuple[str, str, list[int]]:
    dist.destroy_process_group()
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    with pytest.raises(ValueError, match=rf"group: a launcher started {world} ranks .*init_from_env\(\) first"):
        ExpertParallelContext(device="cpu")
    # What README begins with makes one layer of all ranks.
    first = next(block for block in FENCE.finditer(README) if block[1] == "python")
    names: dict[str, Any] = {}
    exec(first[2], names)
    context, layer = names["context"], names["layer"]
    assert (context.rank, context.world_size, list(layer.local_experts)) == (
        rank,
        2,
        list(range(4 * rank, 4 * rank + 4)),
    )
    device = init_from_env("cpu")
    assert init_from_env("cpu") == device, "a second call changes nothing"
    ranks = RankGroup(timeout_s=20.0).gather("ranks", rank, integer())
    backend = dist.get_backend()
    dist.destroy_process_group()
    return device.type, backend, ranks


def test_environment_of_torchrun() -> None:
    # As its agent does, this process holds the store: a port that is only looked for may be another's when needed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for outcome in run_once(join_like_torchrun, 2, store.port):
        assert outcome.result == ("cpu", "gloo", [0, 1]), outcome


def join_again(rank: int, world: int, port: int) -> list[list[int]]:
    """What ranks that join, leave and join again tell each other each time."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    told = []
    for turn in range(3):
        init_from_env("cpu", timeout_s=PATIENCE_S)
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(numbers, torch.tensor([10 * turn + rank]))
        told.append([int(number) for number in numbers])
        dist.destroy_process_group()
    return told


def test_ranks_join_again_where_the_store_stays() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for outcome in run_once(join_again, 2, store.port):
        assert outcome.result == [[0, 1], [10, 11], [20, 21]], outcome


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", "RANK of the environment: expected an integer from 0 to 1, got 2"),
        ("RANK", "one", "RANK of the environment: expected an integer from 0 to 1, got 'one'"),
        ("WORLD_SIZE", "0", "WORLD_SIZE of the environment: expected a positive integer, got 0"),
        ("MASTER_PORT", "70000", "MASTER_PORT of the environment: expected an integer from 0 to 65535, got 70000"),
        ("MASTER_PORT", "", "MASTER_PORT of the environment: expected an integer from 0 to 65535, got ''"),
        ("MASTER_ADDR", "", "MASTER_ADDR: expected the address of rank 0 in the environment, got none"),
    ],
)
def test_wrong_variables_of_torchrun(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, setting in (right | {name: value}).items():
        monkeypatch.setenv(key, setting)
    with pytest.raises(ValueError, match=re.escape(message)):
        init_from_env("cpu", timeout_s=1.0)


def test_a_store_that_nobody_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for key, value in (place | {"RANK": "1", "WORLD_SIZE": "2"}).items():
            monkeypatch.setenv(key, value)
        for by_agent, host, name in (("False", 0, "rank 0"), ("True", -1, "torchrun's agent")):
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", by_agent)
            with pytest.raises(StoreLostError, match=f"rank 1 cannot reach .* 0.2 s, {name}, which hosts") as caught:
                init_from_env("cpu", timeout_s=0.2)
            assert (caught.value.rank, caught.value.phase) == (host, Phase.START_UP)
    assert not dist.is_initialized()


def test_what_takes_the_port_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, and never answers: as a store whose process is stopped."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(16)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": "2"}
        for key, value in place.items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        for rank, message in ((0, "rank 0 cannot host the store at .*in use"), (1, "1 s, rank 0, .* another program")):
            monkeypatch.setenv("RANK", str(rank))
            with pytest.raises(StoreLostError, match=f"init_from_env: .*{message}") as caught:
                init_from_env("cpu", timeout_s=1.0)
            assert (caught.value.rank, caught.value.phase) == (0, Phase.START_UP)
    assert not dist.is_initialized()


def join_with(rank: int, world: int, port: int, how: str) -> tuple[int, str]:
    """Rank 1 does not come, or fails to connect."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    if rank == 1 and how == "absent":
        return 1, "absent"
    if rank == 1:
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeoutError) as caught:
        init_from_env("cpu", timeout_s=WITHOUT_ONE_S)
    assert not dist.is_initialized()
    return caught.value.rank, str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("absent", f"init_from_env: rank 1 of 3 did not come within {WITHOUT_ONE_S:g} s"),
        ("killed", "init_from_env: rank {} cannot connect to its peers, rank 1 did not take part: "),
    ],
)
def test_a_rank_that_does_not_join_is_named(how: str, message: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_once(join_with, 3, store.port, how)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert outcomes[rank].result[0] == 1
        # The other one may have told it first.
        told = outcomes[rank].result[1].removeprefix(f"init_from_env: rank {2 - rank} gave up: PeerTimeoutError: ")
        assert told.startswith((message.format(rank), message.format(2 - rank)))


def test_ranks_of_a_launcher_do_not_each_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    # As other programs set it, too; `init_from_env` finds no ranks either.
    RankGroup()
    monkeypatch.setenv("RANK", "3")
    for make in (RankGroup, SharedHeap, ExpertParallelContext, lambda: context_from_config(ParallelConfig())):
        with pytest.raises(ValueError, match=r"group: a launcher started 4 ranks .*init_from_env\(\) first"):
            make()
    with ExpertParallelContext(device="cpu", transport="private") as context:
        assert context.world_size == 1
    ExpertParallelContext(heap=PrivateHeap())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert RankGroup().world_size == 1


def choose_on_hosts(rank: int, world: int, hosts: list[int], one_memory: bool) -> tuple[str, str, str, str | None]:
    original = transport_module.host_identity
    transport_module.host_identity = lambda: f"host {hosts[rank]}"
    try:
        group = RankGroup(timeout_s=20.0)
        choice = choose_transport(group, CPU, one_memory=one_memory)
        return choice.name, choice.local, choice.reasons["shared"], choice.reasons.get("hierarchical")
    finally:
        transport_module.host_identity = original


@pytest.mark.parametrize(
    ("hosts", "one_memory", "name", "local", "why_not"),
    [
        ([0, 0, 1, 1], False, "hierarchical", "shared", None),
        ([0, 1, 2, 3], False, "hierarchical", "private", None),
        ([0, 0, 1, 1], True, "collective", "shared", "padded rows"),
        ([0, 0, 0, 1], False, "collective", "", "the hosts have different numbers of ranks, 3, 1"),
        ([0, 1, 0, 1], False, "collective", "", "the ranks of a host do not follow each other"),
    ],
)
def test_what_several_hosts_take(
    hosts: list[int], one_memory: bool, name: str, local: str, why_not: str | None, get_pool
) -> None:
    shared = f"the ranks are on {len(set(hosts))} hosts (or containers)"
    for answer in get_pool(4).run(choose_on_hosts, hosts, one_memory):
        assert answer[:3] == (name, local, shared)
        assert answer[3] is None if why_not is None else answer[3].startswith(why_not)


class Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(f"{record.name} {record.levelname} {record.getMessage()}")


def choose_among_gpus(
    rank: int, world: int, gpus: list[tuple], hosts: int, transport: str
) -> tuple[str, str | None, list[str]]:
    """The choice where rank `r` has the GPU `gpus[r]`: why not NVSHMEM, uuid, and the world joined before.

    And what is logged of it.
    """
    listener = Listener()
    logging.getLogger("moe_runtime").addHandler(listener)
    original = transport_module.host_identity
    gpu_of, unreachable = transport_module._gpu_of, transport_module._unreachable
    transport_module.host_identity = lambda: f"host {rank % hosts}"
    transport_module._gpu_of = lambda device: transport_module._Gpu(*gpus[rank])
    transport_module._unreachable = lambda device, uuids: 0 if rank == 1 and "far" in uuids else None
    try:
        choice = choose_transport(RankGroup(timeout_s=20.0), torch.device("cuda", 0), transport)
        return choice.name, choice.reasons.get("nvshmem"), listener.heard
    finally:
        logging.getLogger("moe_runtime").removeHandler(listener)
        transport_module.host_identity = original
        transport_module._gpu_of, transport_module._unreachable = gpu_of, unreachable


def joined(token: str, rank: int, num_ranks: int = 2) -> NvshmemWorld:
    return NvshmemWorld(token, rank, num_ranks, 0)


GOOD = [(None, "a", None), (None, "b", None)]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("gpus", "hosts", "reason"),
    [
        (GOOD, 1, None),
        ([(None, "a", joined("x", 0)), (None, "b", joined("x", 1))], 1, None),
        (GOOD, 2, "the ranks are on 2 hosts (or containers), whose GPUs are not mapped to each other"),
        ([GOOD[0], ("nvshmem4py is not installed", "b", None)], 1, "rank 1: nvshmem4py is not installed"),
        ([GOOD[0], GOOD[0]], 1, "ranks 0 and 1 share a GPU, each rank needs its own"),
        ([(None, "far", None), GOOD[1]], 1, "the GPU of rank 1 cannot access that of rank 0 (no peer access)"),
        ([(None, "a", joined("x", 0, 1)), (None, "b", joined("y", 0, 1))], 1, "a rank has joined other ranks"),
        ([(None, "a", joined("x", 0, 3)), (None, "b", joined("x", 1, 3))], 1, "a rank has joined other ranks"),
        ([(None, "a", joined("x", 0)), GOOD[1]], 1, "a rank has joined other ranks"),
    ],
)
def test_gpus_use_nvshmem_unless_there_is_a_reason_not_to(
    gpus: list[tuple], hosts: int, reason: str | None, get_pool
) -> None:
    for rank, (name, why_not, heard) in enumerate(get_pool(2).run(choose_among_gpus, gpus, hosts, "auto")):
        if reason is None:
            assert (name, why_not, heard) == ("nvshmem", None, [])
        else:
            assert name == "collective" and why_not.startswith(reason)
            warning = "transport: GPUs exchange by `collective`, which waits for the host: "
            between = "the ranks are on one host" if hosts == 1 else "GPUs of several hosts need a group with NCCL"
            text = f"moe_runtime.comm.transport WARNING {warning}{why_not}; {between}"
            assert heard == ([text] if rank == 0 else [])


@pytest.mark.cpu_only
def test_a_transport_that_was_asked_for_is_no_surprise(get_pool) -> None:
    for name, _, heard in get_pool(2).run(choose_among_gpus, GOOD, 1, "collective"):
        assert (name, heard) == ("collective", [])


def disagree(rank: int, world: int, what: str) -> None:
    group = RankGroup(timeout_s=20.0)
    if what == "transport":
        choose_transport(group, CPU, "shared" if rank else "auto")
    elif what == "device":
        choose_transport(group, torch.device("cuda") if rank else CPU)
    elif what == "step":
        group.barrier("one step" if rank else "another step")
    elif rank == 0:
        group.leave("no checkpoint")
    else:
        group.barrier("any step")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("transport", "transport: ranks disagree, rank 0: 'auto', rank 1: 'shared'"),
        ("device", "device: ranks disagree, rank 0: 'cpu', rank 1: 'cuda'"),
        ("step", "group: its ranks are not at the same step, rank 0: 'another step', rank 1: 'one step'"),
    ],
)
def test_disagreement_is_an_error_on_every_rank(what: str, message: str, get_pool) -> None:
    for outcome in get_pool(2).outcomes(disagree, what):
        assert isinstance(outcome.error, ValueError) and str(outcome.error) == message


def test_a_rank_that_leaves_is_heard(get_pool) -> None:
    left, told = get_pool(2).outcomes(disagree, "leave")
    assert left.error is None
    assert isinstance(told.error, PeerAbortedError) and told.error.rank == 0
    assert str(told.error) == "any step: rank 0 gave up: no checkpoint"
