"""CUDA C++ sources: what their compiler says is passed on, what it makes is kept, and launched with typed arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.kernels import bound_kernel, kernel_cache, nvrtc
from moe_runtime.kernels.bound_kernel import launch
from moe_runtime.kernels.signature import parameters_of
from moe_runtime.launch.research import aot_cases
from tests.support.comparison import assert_same_bits
from tests.support.programs import ROOT
from tests.support.spawner import interpreter

FILL = """
extern "C" __global__ void fill(float* out, int value) { out[threadIdx.x] = value * FACTOR; }
"""
ARGUMENTS = """
extern __shared__ int memory[];
extern "C" __global__ void arguments(long long* out, const int* in, const int* none, int small, long long large) {
  memory[threadIdx.x + OFFSET] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    out[4 * blockIdx.x] = memory[OFFSET];
    out[4 * blockIdx.x + 1] = none ? 1 : 0;
    out[4 * blockIdx.x + 2] = small;
    out[4 * blockIdx.x + 3] = large;
  }
}
"""
BAD = """
extern "C" __global__ void bad(float* out) { out[0] = no_such_name; }
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Small sources in place of the library's, a cache of their own, nothing compiled before."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for name, text in (("fill", FILL), ("bad", BAD), ("arguments", ARGUMENTS)):
        (tmp_path / f"{name}.cu").write_text(text)
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """As in a new process."""
    nvrtc._compiled.cache_clear()
    aot_cases._compiled_with_log.cache_clear()
    nvrtc._loaded.cache_clear()
    parameters_of.cache_clear()
    bound_kernel._KERNELS.clear()


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache").iterdir())


def kept_contents(folder: Path) -> dict[str, bytes | None]:
    """What the cache gives, by suffix."""
    return {path.suffix: kernel_cache.read(path.parent, path.name) for path in kept(folder)}


@pytest.mark.cpu_only
def test_the_log_of_the_compiler_is_in_the_error(sources: Path) -> None:
    with pytest.raises(nvrtc.NvrtcError, match="no_such_name") as caught:
        nvrtc.compile_source("bad.cu", {"FACTOR": 3})
    message = str(caught.value)
    assert "bad.cu" in message and "'FACTOR': 3" in message and "sm_90a" in message and "undefined" in message
    assert not (sources / "cache").exists()


@pytest.mark.cpu_only
def test_a_macro_that_is_missing_is_an_error_of_the_source() -> None:
    with pytest.raises(nvrtc.NvrtcError, match='"FACTOR" is undefined'):
        nvrtc.compile_source("fill.cu", {})


@pytest.mark.cpu_only
def test_the_interpreter_keeps_its_bytes() -> None:
    """An empty log is one zero, written to memory of its own: `bytes` of length 1 are shared by all of a process."""
    nvrtc.compile_source("fill.cu", {"FACTOR": 3}, "compute_90a")
    assert (b" " * 1).hex() == "20"


@pytest.mark.cpu_only
def test_ptx_and_cubin(sources: Path) -> None:
    ptx = nvrtc.compile_source("fill.cu", {"FACTOR": 3}, "compute_90a").decode()
    assert ".target sm_90a" in ptx and ".entry fill(" in ptx
    cubin = nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    assert cubin.startswith(b"\x7fELF") and b"fill" in cubin
    files = kept_contents(sources)
    assert files == {".cubin": cubin, ".ptx": ptx.encode()}
    for path in kept(sources):
        path.unlink()
    log = aot_cases.compile_with_log("fill.cu", {"FACTOR": 3}).log
    assert re.search(r"entry function 'fill' for 'sm_90a'(?s:.*)Used \d+ registers", log)
    for _ in range(2):
        compiled = aot_cases.compile_with_log("fill.cu", {"FACTOR": 3})
        assert compiled == nvrtc.Compiled(cubin, ptx, log), "compiled, then read"
        assert kept_contents(sources) == files | {".log": log.encode()}
        forget()


@pytest.mark.cpu_only
@pytest.mark.parametrize("suffix", [".cubin", ".ptx", ".log"])
def test_what_is_missing_of_an_earlier_run_is_made_anew(suffix: str, sources: Path) -> None:
    """By `compile_source` there may be a cubin alone."""
    compiled = aot_cases.compile_with_log("fill.cu", {"FACTOR": 3})
    (missing,) = (path for path in kept(sources) if path.suffix == suffix)
    missing.unlink()
    forget()
    again = aot_cases.compile_with_log("fill.cu", {"FACTOR": 3})
    assert (again.cubin, again.ptx) == (compiled.cubin, compiled.ptx) and "Used" in again.log
    assert kept_contents(sources) == {
        ".cubin": again.cubin,
        ".ptx": again.ptx.encode(),
        ".log": again.log.encode(),
    }


@pytest.mark.cpu_only
def test_a_new_process_reads_what_was_compiled(sources: Path) -> None:
    first = nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    (file,) = kept(sources)
    assert kernel_cache.read(file.parent, file.name) == first
    kernel_cache.write(file.parent, file.name, b"from the cache")
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}) == first, "one process compiles once"
    forget()
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}) == b"from the cache"
    script = (
        "from pathlib import Path\n"
        "from moe_runtime.kernels import nvrtc\n"
        f"nvrtc.FOLDER = Path({str(sources)!r})\n"
        "print(nvrtc.compile_source('fill.cu', {'FACTOR': 3}).decode())"
    )
    done = subprocess.run(
        [interpreter(), "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "from the cache", done.stderr


@pytest.mark.cpu_only
def test_what_anybody_could_have_written_is_compiled_anew(sources: Path) -> None:
    """Once a folder is closed to others, it is used."""
    first = nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    (file,) = kept(sources)
    kernel_cache.write(file.parent, file.name, b"from the cache")
    file.parent.chmod(0o777)
    forget()
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}) == first
    file.parent.chmod(0o700)
    forget()
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}) == b"from the cache", "nor was it written"


@pytest.mark.cpu_only
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, -1])
def test_a_file_that_is_cut_off_is_compiled_anew(length: int, sources: Path) -> None:
    first = nvrtc.compile_source("fill.cu", {"FACTOR": 3}, "compute_90a")
    (file,) = kept(sources)
    file.write_bytes(file.read_bytes()[:length])
    forget()
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}, "compute_90a") == first
    assert kernel_cache.read(file.parent, file.name) == first, "and written again"


@pytest.mark.cpu_only
def test_whatever_changes_the_code_changes_the_file(sources: Path) -> None:
    nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    nvrtc.compile_source("fill.cu", {"FACTOR": 4})
    nvrtc.compile_source("fill.cu", {"FACTOR": 3}, "sm_100a")
    (sources / "fill.cu").write_text(FILL + "\n")
    forget()
    nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    assert len(kept(sources)) == 4


@pytest.mark.cpu_only
def test_a_changed_header_compiles_anew(sources: Path) -> None:
    header = sources / "answer.cuh"
    (sources / "asks.cu").write_text(
        '#include "answer.cuh"\nextern "C" __global__ void asks(int* p) { *p = ANSWER; }\n'
    )
    for answer in (41, 42):
        header.write_text(f"#define ANSWER {answer}\n")
        forget()
        assert f", {answer};" in nvrtc.compile_source("asks.cu", {}, "compute_90a").decode()
    assert len(kept(sources)) == 2


@pytest.mark.cpu_only
def test_only_headers_that_are_included_count(sources: Path) -> None:
    """Also through others, and where two include each other; spaces do not matter."""
    (sources / "asks.cu").write_text(
        '# include  "first.cuh"\nextern "C" __global__ void asks(int* p) { *p = ANSWER; }\n'
    )
    (sources / "first.cuh").write_text('#pragma once\n  #include "second.cuh"\n')
    (sources / "other.cuh").write_text("#define ANSWER 1\n")
    for answer in (41, 42):
        (sources / "second.cuh").write_text(f'#include "first.cuh"\n#define ANSWER {answer}\n')
        forget()
        assert f", {answer};" in nvrtc.compile_source("asks.cu", {}, "compute_90a").decode()
    assert len(kept(sources)) == 2
    (sources / "other.cuh").write_text("#define ANSWER 2\n")
    forget()
    nvrtc.compile_source("asks.cu", {}, "compute_90a")
    assert len(kept(sources)) == 2


@pytest.mark.cpu_only
def test_another_compiler_compiles_anew(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Major and minor version count."""
    from cuda.bindings import nvrtc as bindings

    nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    status, major, minor = bindings.nvrtcVersion()
    for version in ((major + 1, minor), (major, minor + 1)):
        forget()
        monkeypatch.setattr(bindings, "nvrtcVersion", lambda version=version: (status, *version))
        nvrtc.compile_source("fill.cu", {"FACTOR": 3})
    assert len(kept(sources)) == 3


@pytest.mark.cpu_only
def test_the_order_of_macros_does_not_matter(sources: Path) -> None:
    nvrtc.compile_source("fill.cu", {"FACTOR": 3, "OTHER": 1})
    nvrtc.compile_source("fill.cu", {"OTHER": 1, "FACTOR": 3})
    assert len(kept(sources)) == 1


@pytest.mark.cpu_only
def test_macros_are_equal_in_any_order_and_changed_by_nobody() -> None:
    given: dict[str, int | str] = {"B": 2, "A": "one"}
    defines = nvrtc.Defines(given)
    given["B"] = 3
    assert list(defines.items()) == [("A", "one"), ("B", 2)] and defines["B"] == 2 and len(defines) == 2
    same = nvrtc.Defines({"A": "one", "B": 2})
    assert defines == same and hash(defines) == hash(same) and defines != nvrtc.Defines(given)
    assert str(defines) == "Defines({'A': 'one', 'B': 2})"


@pytest.mark.cpu_only
def test_programs_are_loaded_with_the_macros_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    driver = SimpleNamespace(cuModuleLoadData=lambda binary: (0, binary), cuModuleGetFunction=lambda *of: (0, of))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(bindings, "driver", driver, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(nvrtc, "_compiled", cache(lambda *of: of))
    monkeypatch.setitem(nvrtc.EVERY_PROGRAM, "EACH_LANE_ARRIVES", 1)
    monkeypatch.setitem(nvrtc.EVERY_PROGRAM, "FACTOR", 2)
    found = nvrtc._loaded.__wrapped__("fill.cu", "fill", nvrtc.Defines({"FACTOR": 3}), 0, 0)
    assert found == (("fill.cu", nvrtc.Defines({"EACH_LANE_ARRIVES": 1, "FACTOR": 3}), "sm_90a"), b"fill")


@pytest.mark.cpu_only
def test_a_cache_that_cannot_be_written_is_no_error(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder below a regular file cannot be made, whoever runs this."""
    (sources / "file").write_text("")
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(sources / "file" / "cache"))
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}).startswith(b"\x7fELF")
    assert not (sources / "cache").exists()


@pytest.mark.cpu_only
def test_a_failed_write_leaves_nothing_behind(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    assert nvrtc.compile_source("fill.cu", {"FACTOR": 3}).startswith(b"\x7fELF")
    assert kept(sources) == []


@pytest.mark.cpu_only
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "/some/where")
    assert nvrtc.cache_dir() == Path("/some/where")
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv(nvrtc.CACHE_VARIABLE)
        else:
            monkeypatch.setenv(nvrtc.CACHE_VARIABLE, unset)
        assert nvrtc.cache_dir() == Path.home() / ".cache" / "moe_runtime"


@pytest.mark.cpu_only
def test_a_thread_without_a_context_gets_that_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per thread; one that has a context keeps it."""
    bindings = pytest.importorskip("cuda.bindings")
    calls: list[tuple[object, ...]] = []
    contexts = threading.local()

    def of_driver(name: str, answer: Callable[..., object]) -> Callable[..., tuple[object, ...]]:
        def call(*arguments: int) -> tuple[object, ...]:
            calls.append((name, *arguments))
            return 0, answer(*arguments)

        return call

    fake = SimpleNamespace(
        cuCtxGetCurrent=of_driver("get", lambda: getattr(contexts, "current", 0)),
        cuCtxSetCurrent=of_driver("set", lambda context: setattr(contexts, "current", context)),
        cuDeviceGet=of_driver("device", lambda device: 10 + device),
        cuDevicePrimaryCtxRetain=of_driver("retain", lambda device: 100 + device),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(bindings, "driver", fake, raising=False)

    def begin(before: int) -> int:
        contexts.current = before
        for _ in range(2):
            nvrtc._ensure_context(3)
        return contexts.current

    def in_a_thread(before: int) -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(begin, before).result()

    assert in_a_thread(0) == 113
    assert calls == [("get",), ("device", 3), ("retain", 13), ("set", 113)]
    assert in_a_thread(7) == 7
    assert calls[4:] == [("get",)]


def fill(out: torch.Tensor, *, kernel: str = "fill", block: int = 32) -> None:
    """Launch a kernel of FILL with one block, which puts 8 into each element of `out`."""
    arguments = {"out": out, "value": 4}
    defines = nvrtc.Defines({"FACTOR": 2})
    launch("fill.cu", kernel, defines, grid=(1, 1, 1), block=block, arguments=arguments, device=out.device)


@pytest.mark.gpu
def test_a_thread_may_begin_with_a_launch() -> None:
    """Its first work of CUDA, with everything compiled and loaded before; on GPU 0, which is current to begin with."""
    out = torch.zeros(32, device="cuda:0")
    fill(out)
    out.zero_()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill, out).result()
    assert (out == 8).all()


@pytest.mark.gpu
def test_launch_passes_every_kind_of_argument(device: torch.device) -> None:
    """Pointers, None, 32 and 64 bits; more dynamic shared memory than the default limit; the grid as given."""
    given = torch.arange(7, 39, dtype=torch.int32, device=device)
    out = torch.full((3, 4), -1, dtype=torch.int64, device=device)
    launch(
        "arguments.cu",
        "arguments",
        nvrtc.Defines({"OFFSET": 100 * 1024 // 4 - 32}),
        grid=(2, 1, 1),
        block=32,
        arguments={"out": out, "in": given, "none": None, "small": -5, "large": 2**40 + 1},
        device=device,
        shared_bytes=100 * 1024,
    )
    row = [7, 0, -5, 2**40 + 1]
    assert out.tolist() == [row, row, [-1] * 4]


@pytest.mark.gpu
def test_launch_is_captured_on_the_current_stream(device: torch.device) -> None:
    """After one launch to load it; replays read what the tensors hold then."""
    given = torch.zeros(32, dtype=torch.int32, device=device)
    out = torch.zeros(4, dtype=torch.int64, device=device)

    def run() -> None:
        launch(
            "arguments.cu",
            "arguments",
            nvrtc.Defines({"OFFSET": 0}),
            grid=(1, 1, 1),
            block=32,
            arguments={"out": out, "in": given, "none": given, "small": 1, "large": 2},
            device=device,
            shared_bytes=128,
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    given.fill_(9)
    graph.replay()
    assert_same_bits(out, torch.tensor([9, 1, 1, 2]), "replay")


@pytest.mark.gpu
def test_a_refused_launch_is_an_error(device: torch.device) -> None:
    out = torch.zeros(2048, device=device)
    with pytest.raises(nvrtc.NvrtcError, match="INVALID_VALUE"):
        fill(out, block=2048)
    with pytest.raises(nvrtc.NvrtcError, match="NOT_FOUND"):
        fill(out, kernel="no_such_kernel")


@pytest.mark.gpu
def test_a_kernel_is_loaded_once(sources: Path, device: torch.device) -> None:
    out = torch.zeros(32, device=device)
    for _ in range(3):
        fill(out)
    assert (out == 8).all()
    assert nvrtc._loaded.cache_info().misses == 1 and len(kept(sources)) == 1
