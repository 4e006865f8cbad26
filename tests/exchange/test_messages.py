"""What ranks tell each other is data: whoever writes to their store can stop or mislead a job, but not run code."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm import messages
from moe_runtime.comm import transport as transport_module
from moe_runtime.comm.errors import MoERuntimeError, PeerAbortedError, Phase
from moe_runtime.comm.heaps import nvshmem_heap, nvshmem_world, shared_heap, shared_memory
from moe_runtime.comm.heaps.collective import CollectiveHeap
from moe_runtime.comm.heaps.nvshmem_heap import NvshmemHeap
from moe_runtime.comm.heaps.shared_heap import SharedHeap
from moe_runtime.comm.heaps.shared_memory import NamelessMemory
from moe_runtime.comm.messages import hexadecimal, integer, many, optional, row, scalar, table, text
from moe_runtime.comm.number_exchange import NumberExchange
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import choose_transport
from moe_runtime.context.agreement import Agreement
from moe_runtime.context.peers import agree_on
from moe_runtime.integrations.transformers import DONE, MOST_TOKENS, ExpertParallel
from moe_runtime.launch.benchmarks.layer_bench import Work
from moe_runtime.launch.benchmarks.trace import Event
from moe_runtime.launch.common import environment
from moe_runtime.launch.demo import FormatResult, RankReport
from moe_runtime.launch.run import RankResult
from moe_runtime.launch.soak import SoakResult

pytestmark = pytest.mark.cpu_only

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Forger:
    """A store in which rank 1 says `forged[what]` in the call `what`, and in other calls what rank 0 says.

    With `once`, only in the first such call.
    """

    def __init__(self, forged: dict[str, Any], once: bool = False) -> None:
        self.forged = dict(forged)
        self.once = once
        self.said = b""

    def set(self, key: str, value: bytes) -> None:
        self.said = value

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        what = messages.read_answer(self.said, 1 << 24).what
        if not key.endswith("/1") or what not in self.forged:
            return self.said
        return messages.answer(what, self.forged.pop(what) if self.once else self.forged[what])

    def delete_key(self, key: str) -> None:
        pass


def group_of_two(store: object, rank: int = 0) -> RankGroup:
    """A rank of two that meet in `store`."""
    group = RankGroup(timeout_s=1.0)
    group.rank, group.world_size, group._store = rank, 2, store
    group.group = SimpleNamespace()  # type: ignore[assignment]
    return group


def forged(what: str, value: object) -> RankGroup:
    return group_of_two(Forger({what: value}))


VALUES = (
    *(None, True, False, 0, -1, 10**99, -(10**99), 0.1, -0.0, 5e-324, math.inf, -math.inf),
    *("", "a\0\x1b\n", "é 😀", "\ud83d\ude00", [], [[], {}], {}, {"a": [1, 2.0, None], "": "b"}),
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_the_same(value: object) -> None:
    found = messages.decode(messages.encode({"value": value}))["value"]
    assert repr(found) == repr(value) and type(found) is type(value)


def test_nan_comes_back() -> None:
    found = messages.decode(messages.encode({"value": math.nan}))["value"]
    assert isinstance(found, float) and math.isnan(found)


class Number(int):
    pass


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "expected what JSON carries, got tuple"),
        ({"a": {1}}, "expected what JSON carries, got set"),
        (b"bytes", "expected what JSON carries, got bytes"),
        (Number(1), "expected what JSON carries, got Number"),
        (torch.zeros(1), "expected what JSON carries, got Tensor"),
        ({1: "a"}, "expected texts as keys, got 1"),
        (10**100, "expected integers of at most 100 digits, got an integer of 333 bits"),
        (nested(100_000), "expected a value of few levels, got one that is too deep"),
        ("x" * (1 << 20), "expected at most 1048576 bytes of JSON, got 1048605"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_would_not_come_back_the_same_is_refused_where_it_is_sent(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"step: {re.escape(message)}"):
        RankGroup().gather("step", value, lambda found: found)


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


HOSTILE = {
    "no JSON": (b"what", "expected JSON, got something else"),
    "no text": (b"\xff\xfe", "expected JSON, got something else"),
    "nothing": (b"", "expected JSON, got something else"),
    "two values": (b'{"left":"a","cause":0}{"left":"b","cause":0}', "expected JSON, got something else"),
    "a key twice": (b'{"what":"step","value":1,"value":2}', "expected each key once, got one twice"),
    "no object": (b'["step",1]', "expected an answer of a rank, got other JSON"),
    "another key": (b'{"what":"step","value":1,"more":1}', "expected an answer of a rank, got other JSON"),
    "no value": (b'{"what":"step"}', "expected an answer of a rank, got other JSON"),
    "no name": (b'{"what":1,"value":1}', "expected a text, got 1"),
    "no reason": (b'{"left":[],"cause":0}', "expected a text, got list"),
    "no cause": (b'{"left":"a"}', "expected an answer of a rank, got other JSON"),
    "a cause that is no rank": (b'{"left":"a","cause":true}', "expected an integer"),
    "deep": (b"[" * 500_000 + b"]" * 500_000, "expected a value of few levels, got one that is too deep"),
    "long number": (b'{"what":"step","value":' + b"9" * 900_000 + b"}", "of at most 100 digits, got one of 900000"),
    "too large": (b'{"what":"step","value":"' + b"x" * (1 << 20) + b'"}', "at most 1048576 bytes of JSON"),
}


@pytest.mark.parametrize("raw", ["a pickle", *HOSTILE])
def test_what_another_process_puts_into_the_store_is_data(raw: str, tmp_path: Path) -> None:
    """It waits under the key of rank 1, as the store shows keys to whoever reaches it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    trap = tmp_path / "ran"
    bomb = (pickle.dumps(("step", Bomb(trap))), "expected JSON, got something else")
    forged_bytes, message = HOSTILE.get(raw, bomb)
    stranger.set("/1/1", forged_bytes)
    with pytest.raises(MoERuntimeError) as caught:
        group_of_two(host).gather("step", 1, integer())
    assert str(caught.value).startswith("step: the answer of rank 1 is not one that this program gives: ")
    assert message in str(caught.value) and len(str(caught.value)) < 300
    assert (caught.value.rank, caught.value.phase) == (1, Phase.START_UP)
    assert not trap.exists()
    pickle.loads(bomb[0])
    assert trap.exists(), "the trap works"


def test_a_long_reason_is_cut_off() -> None:
    store = dist.HashStore()
    group_of_two(store, rank=1).leave("x" * (2 << 20))
    with pytest.raises(PeerAbortedError, match=r"^step: rank 1 gave up: x{10000}$"):
        group_of_two(store).gather("step", 1, integer())


def test_more_bytes_may_come_where_the_call_says_so() -> None:
    long = "x" * (1 << 20)
    assert forged("step", None).gather("step", long, optional(text), max_bytes=2 << 20) == [long, None]


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (messages.nothing, 0, "expected None, got 0"),
        (text, 1, "expected a text, got 1"),
        (scalar, [], "expected a number, a text, a bool or None, got list"),
        (integer(0), -1, "expected an integer from 0, got -1"),
        (integer(0, 7), 8, "expected an integer from 0 to 7, got 8"),
        (integer(), True, "expected an integer, got True"),
        (integer(), 1.0, "expected an integer, got 1.0"),
        (hexadecimal(2), "abc", "expected 2 bytes in hexadecimal, got 'abc'"),
        (hexadecimal(2), "ab cd", "expected 2 bytes in hexadecimal, got 'ab cd'"),
        (hexadecimal(2), "abcd\n", "expected 2 bytes in hexadecimal"),
        (hexadecimal(2), 7, "expected a text, got 7"),
        (optional(text), 1, "expected a text, got 1"),
        (row(text, text), ["a"], "expected a list of 2, got a list of 1"),
        (row(text), "a", "expected a list of 1, got 'a'"),
        (row(text, integer()), ["a", "b"], "expected an integer, got 'b'"),
        (many(integer(), 2), [1, 2, 3], "expected a list of 2, got a list of 3"),
        (many(integer(), 2), {"0": 1, "1": 2}, "expected a list of 2, got dict"),
        (many(integer(), 1), [None], "expected an integer, got None"),
        (table(text), ["a"], "expected a dict, got list"),
        (table(text), {"a": 1}, "expected a text, got 1"),
    ],
)
def test_a_reader_refuses(read: Callable[[Any], object], value: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(value)


def test_readers_return_what_they_expect() -> None:
    read = row(optional(text), many(hexadecimal(1), 2), table(scalar), integer(0, 3))
    assert read([None, ["00", "ff"], {"a": 1.5}, 3]) == (None, [b"\0", b"\xff"], {"a": 1.5}, 3)


def refuses(what: str, call: Callable[[], object]) -> None:
    with pytest.raises(MoERuntimeError, match=f"^{re.escape(what)}: the answer of rank 1 is not one ") as caught:
        call()
    assert (caught.value.rank, caught.value.phase) == (1, Phase.START_UP)


@pytest.mark.parametrize("value", [None, "auto", ["auto", "cpu"], ["auto", "cpu", 1], [["auto"], "cpu", "host"]])
def test_a_choice_of_a_transport(value: object) -> None:
    refuses("choose_transport", lambda: choose_transport(forged("choose_transport", value), CPU))


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("GPUs", None),
        ("GPUs", [None, 1, None]),
        ("GPUs", [None, "uuid", []]),
        ("GPUs", [None, "uuid", ["token", -1, 2, 0]]),
        ("GPUs", [None, "uuid", ["token", 0, 2]]),
        ("GPUs", [7, "uuid", None]),
        ("peer access", "0"),
        ("peer access", 2),
        ("peer access", -1),
    ],
)
def test_the_gpu_of_a_peer(what: str, value: object) -> None:
    call = f"choose_transport: {what}"
    refuses(call, lambda: choose_transport(forged(call, value), GPU))


def test_a_gpu_comes_as_it_is() -> None:
    for world in (None, nvshmem_world.NvshmemWorld("ab", 1, 2, 3)):
        gpu = transport_module._Gpu("a problem", "uuid", world)
        assert transport_module._Gpu.from_message(gpu.to_message()) == gpu


@pytest.mark.parametrize("value", [None, [64], [64, "ab"], [-64, "0" * 16], ["64", "0" * 16], [64, "0" * 15 + "/"]])
def test_a_heap_of_the_collective_transport(value: object) -> None:
    heap = CollectiveHeap(forged("CollectiveHeap.allocate", value))
    refuses("CollectiveHeap.allocate", lambda: heap._allocate(64))


NAME = "moe_runtime-" + "0" * 32


PROBLEMS = (7, [2], ["2", "text"], [2, None], [0, "text"])


def shared_heap_beside(call: str, value: object, folder: Path | None) -> SharedHeap:
    return SharedHeap(forged(f"SharedHeap.allocate: {call}", value), directory=None if folder is None else str(folder))


@pytest.mark.parametrize("value", [None, [4096], ["4096", None, 0], [-4096, None, 0], [4096, 1, 0], [4096, None, None]])
def test_the_size_of_shared_memory(value: object) -> None:
    refuses("SharedHeap.allocate: size", lambda: shared_heap_beside("size", value, None)._allocate(4096))


def test_memory_that_is_not_there_is_refused() -> None:
    if NamelessMemory.problem() is not None:
        pytest.skip("ranks share files here")
    with pytest.raises(OSError, match=r"shared memory of rank 1: .*: 4096 bytes .* 8191 available in memory") as caught:
        shared_heap_beside("size", [4096, None, 8191], None)._allocate(4096)
    assert caught.value.errno == errno.ENOSPC
    shared_heap_beside("size", [4096, None, 8192], None)._allocate(4096)


@pytest.mark.parametrize("kind", ["nameless", "files"])
@pytest.mark.parametrize("what", ["create", "map"])
def test_a_problem_of_shared_memory(what: str, kind: str, tmp_path: Path) -> None:
    call, folder = f"SharedHeap.allocate: {what}", tmp_path if kind == "files" else None
    for problem in PROBLEMS:
        value = problem if what == "map" else [None, problem]
        refuses(call, lambda value=value: shared_heap_beside(what, value, folder)._allocate(4096))  # type: ignore[misc]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", [None, [None, None], [[f"/{NAME}"], [2, "text"]], [f"/{NAME}", None], [[], None]])
def test_where_a_file_is(made: object, tmp_path: Path) -> None:
    refuses("SharedHeap.allocate: create", lambda: shared_heap_beside("create", made, tmp_path)._allocate(4096))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "place", [[1, 2, 3], [0, 3, 4, 5], [-1, 3, 4, 5], [1, -1, 4, 5], [1, 3, "4", 5], ["self", 3, 4, 5], [1, 3, 4, 5.0]]
)
def test_where_memory_without_a_name_is(place: object) -> None:
    made = [place, None]
    refuses("SharedHeap.allocate: create", lambda: shared_heap_beside("create", made, None)._allocate(4096))


def test_memory_without_a_name_that_is_none_of_a_heap_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer tells of another file that this process has open. Then memory is in files, and what is open is kept."""
    if NamelessMemory.problem() is not None:
        pytest.skip("ranks share files here")
    important, folder = tmp_path / "important", tmp_path / "folder"
    important.write_bytes(bytes(4096))
    folder.mkdir()
    monkeypatch.setattr(shared_heap, "shared_memory_directory", lambda: str(folder))
    with open(important, "r+b") as file:
        status = os.fstat(file.fileno())
        place = [os.getpid(), file.fileno(), status.st_dev, status.st_ino]
        group = group_of_two(Forger({"SharedHeap.allocate: create": [place, None]}, once=True))
        heap = SharedHeap(group)
        heap.reserve("data", 4096, ones=4096)
        heap.allocate()
    assert important.read_bytes() == bytes(4096) and not list(folder.iterdir())
    assert heap.peer_tensor("data", 1).all()
    assert f"shared memory of rank 0: /proc/{place[0]}/fd/{place[1]}: expected the memory of a heap" in caplog.text


@pytest.mark.parametrize(
    "name", ["important", f"{NAME}/important", f"x{NAME}", f"{NAME}\n", f"{NAME}\0", "moe_runtime-" + "0" * 31, "", "."]
)
def test_no_other_file_is_mapped_or_unlinked(name: str, tmp_path: Path) -> None:
    important = tmp_path / "important"
    important.write_bytes(bytes(4096))
    call = "SharedHeap.allocate: create"
    refuses(call, lambda: shared_heap_beside("create", [[f"{tmp_path}/{name}"], None], tmp_path)._allocate(4096))
    assert list(tmp_path.iterdir()) == [important] and important.read_bytes() == bytes(4096)
    refuses(call, lambda: shared_heap_beside("create", [[NAME], None], tmp_path)._allocate(4096))


def test_memory_of_another_user_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: os.getuid() + 1)
    for folder in (tmp_path, None):
        monkeypatch.setattr(shared_heap, "shared_memory_directory", lambda: str(tmp_path))
        with pytest.raises(OSError, match=r"shared memory of rank 0: .*: expected a file of this user") as caught:
            shared_heap_beside("", None, folder)._allocate(4096)
        assert caught.value.errno == errno.EPERM and not list(tmp_path.iterdir())


def test_a_file_of_another_size_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(bytes(4095))
    with pytest.raises(OSError, match=r"shared memory of rank 0: .*: expected 4096 bytes, got 4095"):
        shared_heap_beside("create", [[str(path)], None], tmp_path)._allocate(4096)


def test_a_pipe_is_not_mapped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(OSError, match=r"shared memory of rank 0: .*: expected a file of this user"):
        shared_heap_beside("create", [[f"{tmp_path}/{NAME}"], None], tmp_path)._allocate(4096)


@pytest.mark.parametrize("value", [None, [64], [64, None], ["64", 1 << 40], [-64, 1 << 40]])
def test_the_size_of_gpu_memory(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_heap, "_free_bytes", lambda device, wanted: 1 << 40)
    call = "NvshmemHeap.allocate: size"
    refuses(call, lambda: NvshmemHeap(forged(call, value), GPU)._allocate(64))


def test_a_problem_of_gpu_memory_keeps_its_kind() -> None:
    heap = NvshmemHeap(forged("map", [None, "transport: cannot map"]), GPU)
    with pytest.raises(ValueError, match=r"^transport: cannot map$"):
        heap._raise_first("map", None)
    heap = NvshmemHeap(forged("map", [errno.ENOMEM, "too small"]), GPU)
    with pytest.raises(OSError, match="too small") as caught:
        heap._raise_first("map", None)
    assert caught.value.errno == errno.ENOMEM
    for value in ("text", [None, None], ["12", "text"], [0, "text"]):
        heap = NvshmemHeap(forged("map", value), GPU)
        refuses("map", lambda heap=heap: heap._raise_first("map", None))  # type: ignore[misc]


class UniqueId:
    """As nvshmem4py's: bytes at a pointer, not set where it is made empty."""

    def __init__(self, content: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(content, nvshmem_world.UNIQUE_ID_BYTES)
        self.ptr = ctypes.addressof(self.buffer)


@pytest.fixture
def nvshmem(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What NVSHMEM is initialised with."""
    made: list[dict[str, Any]] = []
    core = SimpleNamespace(
        get_unique_id=lambda empty: UniqueId(b"" if empty else bytes(range(128))),
        init=lambda **given: made.append(given),
    )
    device = SimpleNamespace(Device=lambda index: SimpleNamespace(set_current=lambda: None))
    monkeypatch.setattr(nvshmem_world, "load_nvshmem", lambda: core)
    monkeypatch.setattr(nvshmem_world, "_joined", [])
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(core=device))
    monkeypatch.setitem(sys.modules, "cuda.core", device)
    for name in nvshmem_world.ENVIRONMENT:
        monkeypatch.setenv(name, "as it is")
    return made


def test_ranks_join_nvshmem_by_the_id_of_rank_0(nvshmem: list[dict[str, Any]]) -> None:
    store = dist.HashStore()
    tokens = []
    for rank in (1, 0):
        # Both answers must be there: a rank alone would wait.
        other = group_of_two(store, rank=1 - rank)
        wanted = UniqueId(bytes(range(128)) if rank else b"").buffer.raw
        other._answer("NvshmemWorld.join", messages.answer("NvshmemWorld.join", [wanted.hex(), "0a" * 8]))
        tokens.append(nvshmem_world.join(group_of_two(store, rank), GPU).token)
        nvshmem_world._joined.clear()
        store = dist.HashStore()
    assert [(one["rank"], one["nranks"], one["uid"].buffer.raw) for one in nvshmem] == [
        (1, 2, bytes(range(128))),
        (0, 2, bytes(range(128))),
    ]
    assert tokens[0] == "0a" * 8 and re.fullmatch("[0-9a-f]{16}", tokens[1])


@pytest.mark.parametrize("value", [None, [None, "00" * 8], ["00" * 127, "00" * 8], ["00" * 128, 8], ["zz" * 128, "00"]])
def test_an_id_of_nvshmem(value: object, nvshmem: list[dict[str, Any]]) -> None:
    call = "NvshmemWorld.join"
    refuses(call, lambda: nvshmem_world.join(forged(call, value), GPU))
    assert not nvshmem


@pytest.mark.parametrize("value", [None, 7, ["a"], {"a": {}}, {"a": [[]]}])
def test_values_to_agree_on(value: object) -> None:
    call = "ExpertParallelContext.allocate"
    refuses(call, lambda: Agreement().compare(forged(call, value), {}))


def test_sequences_may_be_agreed_on() -> None:
    agreement = Agreement()
    agreement.add({"sizes": (8, 16), "scale": np.float64(0.5)}, "layer 0")
    agreement.compare(forged("", None), {})
    agreement.add({"sizes": (8, 16)}, "layer 1")
    peer = forged("ExpertParallelContext.allocate", {"sizes (layer 1)": [8, 32]})
    with pytest.raises(ValueError, match=r"sizes \(layer 1\): rank 0: \(8, 16\), rank 1: \(8, 32\)"):
        agreement.compare(peer, {})


@pytest.mark.parametrize("value", [torch.zeros(1), {"a": 1}, [[1]], b"a"])
def test_values_that_ranks_cannot_agree_on(value: object) -> None:
    with pytest.raises(ValueError, match=r"^agree: top_k: expected a number, a text, a bool or None, got "):
        Agreement().add({"top_k": value}, None)


@pytest.mark.parametrize("value", [None, [{}], ["placement", None], [{"a": []}, None], [{}, 7]])
def test_a_proposal(value: object) -> None:
    group = forged("replace_experts", value)
    context: Any = SimpleNamespace(group=group, timeout_s=1.0, abort=lambda reason, error: None)
    refuses("replace_experts", lambda: agree_on(context, {"placement": "a"}, None))


def test_a_proposal_without_a_key_is_another_one() -> None:
    context: Any = SimpleNamespace(group=forged("replace_experts", [{}, None]), timeout_s=1.0)
    with pytest.raises(ValueError, match="placement: ranks disagree, rank 0: 'a', rank 1: 'not given'"):
        agree_on(context, {"placement": "a"}, None)


def model_over(group: RankGroup) -> Any:
    """As much of a transformers model as its exchanges with peers need: two layers of 2 experts."""
    model: Any = object.__new__(ExpertParallel)
    model.context = SimpleNamespace(group=group, recovery=None)
    model._tokens = NumberExchange("call of the model", group, integer(DONE, MOST_TOKENS))
    model.layers = [SimpleNamespace(config=SimpleNamespace(num_experts=2))] * 2
    model._counted_from = None
    return model


@pytest.mark.parametrize("value", [7, [[1, 2]], [[1, 2], [1]], [[1, 2], [1, -2]], [[1, 2], [1, 2.0]], [[1, 2], None]])
def test_counts_of_tokens(value: object) -> None:
    refuses("expert_loads", lambda: model_over(forged("expert_loads", value)).expert_loads())


@pytest.mark.parametrize("value", [None, 1, "", "00" * 7, "0g" * 8])
def test_the_key_for_the_tokens_of_calls(value: object) -> None:
    refuses("call of the model", lambda: model_over(forged("call of the model", value))._agree(1))


SOAK = SoakResult(4, 0, 9, 0, None, 0, 0, "00", 0.5)
RUN = RankResult(8, {"experts": 0.5}, 8, math.nan, math.inf, [1, 2])
REPORT = RankReport({"bf16": FormatResult(0.5, 0.5, {"experts": 1.0})}, None)
EVENT = {"ph": "X", "cat": "kernel", "name": "k", "dur": 1.5, "tid": 7, "start_ns": 10**18, "on": "GPU"}


@pytest.mark.parametrize("kind", [SoakResult, RankResult, RankReport, Work, list[Event], dict[str, list[float]], float])
def test_results_of_a_program(kind: Any) -> None:
    mine = {SoakResult: SOAK, RankResult: RUN, RankReport: REPORT, Work: Work(1.0, None), float: 0.5}
    other: Any = [EVENT] if kind == list[Event] else {"total": [1.0]}
    value = mine.get(kind, other)
    context: Any = SimpleNamespace(group=forged("", None))
    both = environment.gather(context, "results", value, kind)
    assert repr(both) == repr([value, value]) and all(type(one) is type(value) for one in both)
    for wrong in (None, [7], "text", {"total": 7}, {}, [{**EVENT, "start_ns": None}], [{**EVENT, "more": 1}]):
        context.group = forged("results", wrong)
        refuses("results", lambda: environment.gather(context, "results", value, kind))


def test_results_have_the_same_keys_on_all_ranks() -> None:
    wrong = {"formats": {"fp8": {"frobenius": 0.5, "largest": 0.5, "phase_ms": {"experts": 1.0}}}, "pss_bytes": None}
    context: Any = SimpleNamespace(group=forged("reports", wrong))
    refuses("reports", lambda: environment.gather(context, "reports", REPORT, RankReport))
