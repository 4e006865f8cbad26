"""Kernels in CUDA C++ run on the CPU: their own text, translated for a compiler of the host, under a random schedule.

What is emulated: warps whose lanes take turns, barriers of blocks, of clusters and in shared memory, copies by the copy
engine and by threads that are done late, boxes of tensors that go to several blocks, products of warpgroups, blocks
that come one after the other, kernels launched early, and several ranks at once. What is not: memory that is seen out
of order, be it by other threads or by what reads for them (fences do nothing). See `scheduler.h`, `tensor_maps.h` and
`tensor_cores.h`.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.bound_kernel import BoundKernel
from tests.support.kept_files import folder_for, made_once
from tests.support.on_host import COMPILER

HERE = Path(__file__).parent
CAN_EMULATE = COMPILER is not None and platform.machine() == "x86_64"
needs_emulator = pytest.mark.skipif(not CAN_EMULATE, reason="needs a C++ compiler for x86-64")
MOST_SCHEDULES = 300
"""In which a planted mistake has to show; most do at once."""
OPTIONS = ("-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off", "-w")
OF_KERNELS = "-Og"
"""Compiles in half the time of -O1, and the kernels hardly run longer: most of that is the emulator's."""
LINKED = ("-Wl,-Bsymbolic", "-nostdlib")
"""The scheduler has brought the libraries: to look into them takes a tenth of the time of a kernel."""


class EmulatorError(AssertionError):
    """A kernel that did what a GPU would not forgive, or that could not go on, and who waited for what."""


@cache
def _folder() -> Path:
    """Of this compiler, these options and this emulator; what is in it is named by the text that it was made of."""
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, text=True, timeout=60, check=True)
    sources = [path.read_bytes() for path in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp")))]
    return folder_for("emulated", version.stdout, repr((OPTIONS, OF_KERNELS, LINKED)), *sources)


def _compiled(sources: Sequence[Path], name: str, *options: str) -> Path:
    """`name` in the folder, compiled from `sources` unless it is there."""

    def compile_to(binary: Path) -> None:
        command = [str(COMPILER), *options, *OPTIONS, f"-I{HERE}", *map(str, sources), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[:4000]}"

    return made_once(_folder() / name, compile_to)


def _preprocessed(text: str, defines: nvrtc.Defines) -> str:
    """`text` with its macros expanded, without comments."""
    command = [
        str(COMPILER),
        "-std=c++17",
        "-E",
        "-P",
        "-x",
        "c++",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
    return subprocess.run([*command, "-"], input=text, capture_output=True, text=True, timeout=60, check=True).stdout


@cache
def _scheduler() -> ctypes.CDLL:
    return ctypes.CDLL(str(_compiled(sorted(HERE.glob("*.cpp")), "scheduler.so", "-O2")), mode=ctypes.RTLD_GLOBAL)


def _end(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at `start`; strings are passed over."""
    depth = 0
    for match in re.compile(r'"(?:\\.|[^"\\])*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    raise ValueError(f"nothing closes {text[start : start + 60]!r}")


def _split(text: str, at: str) -> list[str]:
    """`text` cut at each `at` outside of strings and parentheses."""
    parts, last, depth = [], 0, 0
    for match in re.compile(rf'"(?:\\.|[^"\\])*"|[()\[\]{{}}]|{at}').finditer(text):
        token = match.group()
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token, 0)
        if token == at and depth == 0:
            parts.append(text[last : match.start()])
            last = match.end()
    return [*parts, text[last:]]


def _instruction(statement: str) -> str:
    """What is in the parentheses of an `asm`, as the call of a function of instructions.h.

    A special register that is read belongs to the name; numbers that the text holds come after the operands.
    """
    template, *operands = _split(statement, ":")
    code = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', template)).replace("\\n", "\n")
    names, numbers = [], []
    for line in re.split(r"[;\n]", code):
        words = [word for word in line.replace("{", " ").replace("}", " ").split() if not word.startswith("@")]
        if words and not words[0].startswith(".") and words[0][0].isalpha() and not words[0].endswith((",", ":")):
            special = [word for word in words[1:] if word.startswith("%%")]
            names.append(re.sub(r"[^a-zA-Z0-9]+", "_", "".join([words[0], *special])))
            numbers += re.findall(r"(?<![%\w.])(?:0x[0-9a-fA-F]+|\d+)(?![\w.])", " ".join(words[1:]))
    values = []
    for section in operands[:2]:
        for operand in _split(section, ","):
            if operand.strip():
                values.append(operand[operand.index("(") + 1 : operand.rindex(")")])
    return f"ptx::{'__'.join(names) or 'nothing'}({', '.join([*values, *numbers])})"


def _with_instructions(text: str) -> str:
    parts, last = [], 0
    for match in re.finditer(r"\basm\b\s*(?:volatile\s*)?\(", text):
        if match.start() < last:
            continue
        end = _end(text, match.end() - 1)
        parts += [text[last : match.start()], _instruction(text[match.end() : end - 1])]
        last = end
    return "".join([*parts, text[last:]])


def _with_shared_variables(text: str) -> str:
    def declared(match: re.Match[str]) -> str:
        kind, rest = match.group(1), match.group(2)
        lines = []
        for declarator in _split(rest, ","):
            name = re.match(r"\s*(\w+)", declarator).group(1)  # type: ignore[union-attr]
            sizes = declarator.strip()[len(name) :]
            lines.append(
                f"using Type_of_{name} = {kind}{sizes}; Type_of_{name}& {name} = *static_cast<Type_of_{name}*>("
                f'emulator::shared_variable("{name}", sizeof(Type_of_{name}), alignof(Type_of_{name})));'
            )
        return " ".join(lines)

    # Outside of functions it is not yet known of which block.
    text = re.sub(
        r"^extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"#define \2 (static_cast<\1*>(emulator::dynamic_shared()))",
        text,
        flags=re.M,
    )
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1* const \2 = static_cast<\1*>(emulator::dynamic_shared());",
        text,
    )
    return re.sub(r"__shared__ ((?:__align__\(\d+\) )?\w+) ([^;]+);", declared, text)


@cache
def _source(file: str) -> str:
    """A source of the kernels with what it includes."""
    text = nvrtc.source_path(file).read_text()
    return re.sub(r'^#include "(.*)"$', lambda match: _source(match.group(1)), text, flags=re.M)


def _translated(file: str, defines: nvrtc.Defines) -> str:
    """A source of the kernels and what it includes, for a compiler of the host.

    It is kept: the preprocessor alone takes longer than most kernels run.
    """
    text = _source(file)
    key = hashlib.sha256(repr((text, tuple(defines.items()))).encode() + Path(__file__).read_bytes()).hexdigest()[:32]
    kept = made_once(
        _folder() / f"{file}-{key}.zlib",
        lambda path: path.write_bytes(zlib.compress(_translate(text, defines).encode(), 1)),
    )
    return zlib.decompress(kept.read_bytes()).decode()


def _translate(text: str, defines: nvrtc.Defines) -> str:
    text = _preprocessed(text, defines)
    kernels = []
    for match in re.finditer(r'extern "C" __global__ void\s', text):
        at = match.end()
        while not (name := re.compile(r"\s*(\w+)\s*").match(text, at)) or name.group(1).startswith("__"):
            assert name is not None
            at = _end(text, name.end())
        kernels.append(name.group(1))
    text = _with_shared_variables(_with_instructions(text))
    calls = "".join(
        f'\nextern "C" void emulate_{name}(void** arguments) {{ call_kernel({name}, arguments); }}' for name in kernels
    )
    return f'#include "instructions.h"\n{text}{calls}\n'


@cache
def _library(file: str, defines: nvrtc.Defines, edit: Callable[[str], str] | None) -> ctypes.CDLL:
    _scheduler()
    # instructions.h compiled by itself: half of what a kernel takes otherwise.
    _compiled([HERE / "instructions.h"], "instructions.h.gch", OF_KERNELS, "-x", "c++-header")
    text = _translated(file, defines)
    text = text if edit is None else edit(text)
    name = f"{file}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{file}.cpp"
        source.write_text(text)
        return ctypes.CDLL(str(_compiled([source], name, OF_KERNELS, *LINKED, f"-I{_folder()}")))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("early", ctypes.c_uint32),
        ("at_once", ctypes.c_uint32),
    )


def _copied(kernel: BoundKernel) -> tuple[ctypes.Array[ctypes.c_void_p], Any]:
    """The values of a launch that may run when the kernel has those of the next: pointers to them, and what to keep."""
    values = (ctypes.c_int64 * len(kernel.parameters))()
    places = list[int](kernel._pointers)
    for number, at in enumerate(places):
        if number not in kernel._by_value:
            values[number] = ctypes.c_int64.from_address(at).value
            places[number] = ctypes.addressof(values) + 8 * number
    return (ctypes.c_void_p * len(places))(*places), (values, kernel, dict(kernel._by_value))


def planted(right: str, wrong: str, only_in: str = "") -> Callable[[str], str]:
    """An `Emulator.edit` that plants a mistake: `wrong` for `right`, which is once in each source that has `only_in`,
    and in no other."""

    def edit(text: str) -> str:
        assert text.count(right) == int(only_in in text), text.count(right)
        return text.replace(right, wrong)

    return edit


@dataclass(eq=False)
class Replaced:
    """An `Emulator.edit` that replaces a regular expression in sources that have `only_in`, after the edit `before`.

    Attributes:
        times: how often it has been found in all of them.
    """

    pattern: str
    replacement: str
    before: Callable[[str], str] = lambda text: text
    only_in: str = ""
    times: int = 0

    def __call__(self, text: str) -> str:
        text = self.before(text)
        if self.only_in not in text:
            return text
        text, times = re.subn(self.pattern, self.replacement, text)
        self.times += times
        return text


@dataclass
class Emulator:
    """Stands for `BoundKernel.launch`. Kernels run when they are launched, or, inside `together`, all at its end.

    Attributes:
        seed: of the schedule; each run draws another from it.
        edit: makes another kernel of a translated source, such as one that a test should find wrong.
        defines: macros besides those of a launch.
        stream: where what is launched goes; kernels of different streams run beside each other.
    """

    seed: int
    edit: Callable[[str], str] | None = None
    defines: Mapping[str, int | str] = field(default_factory=dict)
    stream: int = 0
    runs: int = 0
    launched: set[tuple[str, str]] = field(default_factory=set)
    _waiting: list[tuple[_Launch, Any]] | None = None

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run here what is launched during the test."""

        def launch(kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int] | None = None) -> None:
            self.launch(kernel, arguments, grid)

        monkeypatch.setattr(BoundKernel, "launch", launch)

    def launch(
        self, kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int] | None = None
    ) -> None:
        """As `BoundKernel.launch`."""
        kernel.fill(arguments, grid)
        library = _library(kernel.file, nvrtc.Defines({**kernel.defines, **self.defines}), self.edit)
        cluster = int(kernel.defines.get("CLUSTER", 1))
        assert kernel.grid[0] % cluster == 0, f"{kernel.grid} blocks in clusters of {cluster}"
        pointers, kept = _copied(kernel)
        launch = _Launch(
            ctypes.cast(getattr(library, f"emulate_{kernel.name}"), ctypes.c_void_p),
            ctypes.addressof(pointers),
            kernel.name.encode(),
            (ctypes.c_uint32 * 3)(*kernel.grid),
            kernel.block,
            kernel.shared_bytes,
            cluster,
            self.stream,
            int(kernel.early),
            int(kernel.defines.get("AHEAD", 0)),  # its blocks wait for each other
        )
        self.launched.add((kernel.file, kernel.name))
        entry = (launch, (pointers, kept, dict(arguments)))
        if self._waiting is None:
            self._run([entry])
        else:
            self._waiting.append(entry)

    @contextmanager
    def together(self) -> Iterator[Callable[[int], None]]:
        """What is launched inside runs at the end, all streams at once; gives what chooses the stream."""
        assert self._waiting is None
        self._waiting = []

        def choose(stream: int) -> None:
            self.stream = stream

        try:
            yield choose
            waiting, self._waiting = self._waiting, None
            self._run(waiting)
        finally:
            self._waiting, self.stream = None, 0

    def _run(self, entries: list[tuple[_Launch, Any]]) -> None:
        self.runs += 1
        launches = (_Launch * len(entries))(*(entry[0] for entry in entries))
        message = ctypes.create_string_buffer(20000)
        seed = ctypes.c_uint64(self.seed * 1000003 + self.runs)
        if _scheduler().emulator_run(launches, len(entries), seed, message, ctypes.c_size_t(len(message))):
            raise EmulatorError(message.value.decode())
