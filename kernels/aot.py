"""Compile every kernel of `AOT_CASES` for every architecture it declares, on a machine that needs no GPU.

`python -m moe_runtime.kernels.aot [--json FILE] [--jobs N] [--operations NAME ...] [--assemble-once]` prints a table
operation x format x architecture with the matrix instructions found in the PTX, and fails if a kernel does not compile
or lacks the instruction it is meant to use. It must run without `TRITON_INTERPRET`: under the interpreter there is
nothing to compile.

Half of the time is ptxas. With `--assemble-once` Blackwell's cases go down to PTX, in which the instructions are looked
for, and one of each operation and instruction to a binary; those of Hopper, where kernels run, all do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.runtime import INTERPRET, AotCase, CudaCase

INTERPRETED = "ahead-of-time compilation needs a process without TRITON_INTERPRET; unset it and run again"
MATRIX_INSTRUCTION = re.compile(r"\b(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*")


@dataclass(frozen=True)
class AotResult:
    """What came of one case on one architecture.

    Attributes:
        operation, format: of the case.
        kernel: name of the jit function, or of the kernel in CUDA C++.
        arch: compute capability times ten.
        instructions: distinct matrix instructions of the PTX, sorted.
        shared_bytes: shared memory of a Triton program.
        assembled: whether it went on from PTX to a binary.
        seconds: time that compiling took.
        error: why it failed; empty when it did not.
    """

    operation: str
    format: str
    kernel: str
    arch: int
    instructions: tuple[str, ...] = ()
    shared_bytes: int = 0
    assembled: bool = True
    seconds: float = 0.0
    error: str = ""


def collect_cases() -> list[tuple[str, int, AotCase | CudaCase]]:
    """`(module, index, case)` of all `AOT_CASES` under `moe_runtime.kernels`."""
    package = importlib.import_module("moe_runtime.kernels")
    names = sorted(f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__))
    cases: list[tuple[str, int, AotCase | CudaCase]] = []
    for name in names:
        if name != f"{package.__name__}.aot":
            found = getattr(importlib.import_module(name), "AOT_CASES", ())
            cases += [(name, index, case) for index, case in enumerate(found)]
    return cases


def check_ones(case: AotCase) -> None:
    """Lower `case` once more with 1 for every integer, which a launch turns into a constant: it has to do for both.

    Raises what the front end of the compiler does, e.g. for `.to` of an argument.
    """
    ones = {name: 1 for name, kind in case.signature.items() if kind in ("i32", "i64")}
    signature = {**case.signature, **dict.fromkeys(ones, "constexpr")}
    target = GPUTarget("cuda", case.archs[0], 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(case.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(case.kernel, signature=signature, constexprs={**case.constexprs, **ones})
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def _without_assembler(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    stages["cubin"] = lambda ptx, metadata: b"not assembled"


def _compile_triton(case: AotCase, arch: int, assemble: bool) -> tuple[str, int]:
    """The PTX, and the bytes of shared memory."""
    source = ASTSource(case.kernel, signature=dict(case.signature), constexprs=dict(case.constexprs))
    # Nobody runs the binary, so ptxas may do less about it: a tenth of the time. Options are part of the cache's key.
    options = {**case.options, "ptx_options": "-O1" if assemble else "not assembled"}
    with triton.knobs.compilation.scope(), triton.knobs.runtime.scope():
        # A fifth of the time would go into lines of a source that nobody steps through.
        triton.knobs.compilation.disable_line_info = True
        if not assemble:
            triton.knobs.runtime.add_stages_inspection_hook = _without_assembler
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return compiled.asm["ptx"], int(compiled.metadata.shared)


def compile_case(case: AotCase | CudaCase, arch: int, assemble: bool = True) -> AotResult:
    """Compile `case` for `arch` and look for its instruction; failures are recorded, not raised.

    Down to a binary, or, unless `assemble`, a Triton kernel to PTX.
    """
    kernel = case.kernel if isinstance(case, CudaCase) else getattr(case.kernel, "__name__", str(case.kernel))
    start = time.perf_counter()
    ptx, shared_bytes, error = "", 0, ""
    try:
        if isinstance(case, CudaCase):
            ptx = nvrtc.compile_with_log(case.file, case.defines, f"sm_{arch}a").ptx
        else:
            if arch == case.archs[0]:
                check_ones(case)
            ptx, shared_bytes = _compile_triton(case, arch, assemble)
        wanted = case.instruction.get(arch)
        if wanted and not re.search(wanted, ptx):
            error = f"no instruction matches {wanted!r}"
    except Exception as failure:
        # Any failure of the compiler is a row of the table, so that one bad kernel does not hide the others.
        error = f"{type(failure).__name__}: {failure}".strip()
    instructions = tuple(sorted(set(MATRIX_INSTRUCTION.findall(ptx))))
    seconds = time.perf_counter() - start
    return AotResult(case.operation, case.format, kernel, arch, instructions, shared_bytes, assemble, seconds, error)


@dataclass(frozen=True)
class _Task:
    module: str
    index: int
    arch: int
    assemble: bool


def _compile_by_name(tasks: Sequence[_Task]) -> list[AotResult]:
    return [
        compile_case(importlib.import_module(task.module).AOT_CASES[task.index], task.arch, task.assemble)
        for task in tasks
    ]


def _code_of(case: AotCase | CudaCase, arch: int) -> str:
    """Equal for cases that compile to the same code."""
    if isinstance(case, CudaCase):
        return repr((case.file, sorted(case.defines.items()), arch))
    parts = (case.signature, case.constexprs, case.options)
    return repr((case.kernel.__name__, *(sorted(part.items()) for part in parts), arch))


def compile_all(jobs: int = 1, operations: Sequence[str] | None = None, assemble_once: bool = False) -> list[AotResult]:
    """Compile all cases (of `operations`, where given) for all their architectures in `jobs` processes.

    With `assemble_once`, of those for Blackwell only one of each operation and instruction down to a binary.

    Raises `RuntimeError` under `TRITON_INTERPRET=1`, where `triton.jit` functions cannot be compiled.
    """
    if INTERPRET:
        raise RuntimeError(INTERPRETED)
    cases = [
        (module, index, case, arch)
        for module, index, case in collect_cases()
        if operations is None or case.operation in operations
        for arch in case.archs
    ]
    first: dict[tuple[str, int, str | None], str] = {}  # of each operation and instruction, the code
    for _, _, case, arch in cases:
        first.setdefault((case.operation, arch, case.instruction.get(arch)), _code_of(case, arch))
    assembled = set(first.values())
    # Equal code is compiled by one process: two would begin at once, before either has anything to share. CUDA C++ is
    # last: what others compile meanwhile, such as tests, is in the cache then.
    same: dict[str, list[_Task]] = defaultdict(list)
    for module, index, case, arch in sorted(cases, key=lambda entry: isinstance(entry[2], CudaCase)):
        code = _code_of(case, arch)
        assemble = not assemble_once or arch == 90 or code in assembled
        same[code].append(_Task(module, index, arch, assemble))
    if jobs <= 1:
        results = [_compile_by_name(group) for group in same.values()]
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(_compile_by_name, same.values()))
    found = {
        (task.module, task.index, task.arch): result
        for group, part in zip(same.values(), results, strict=True)
        for task, result in zip(group, part, strict=True)
    }
    return [found[module, index, arch] for module, index, _, arch in cases]


def _print_table(results: list[AotResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    archs = sorted({result.arch for result in results})
    table = Table(title=f"Triton {triton.__version__} and NVRTC, compiled ahead of time")
    for column in ("operation", "format", "kernel", *(f"sm_{arch}" for arch in archs)):
        table.add_column(column)
    cells: dict[tuple[str, str, str], dict[int, set[str]]] = {}
    for result in results:
        row = cells.setdefault((result.operation, result.format, result.kernel), {})
        short = [text.replace(".sync.aligned", "").replace(".row.col", "") for text in result.instructions]
        # Widths of one instruction in one line.
        short = [re.sub(r"(wgmma\S*\.m64n)\d+", r"\1*", text) for text in short]
        row.setdefault(result.arch, set()).update(["[red]failed[/red]"] if result.error else short or ["ok"])
    for key, row in sorted(cells.items()):
        table.add_row(*key, *("\n".join(sorted(row.get(arch, {"-"}))) for arch in archs))
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    for result in results:
        if result.error:
            where = f"{result.operation} {result.format} {result.kernel} sm_{result.arch}"
            print(f"{where}: {result.error}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if everything compiled as declared, 1 if not. Exits with 2 under the interpreter."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.kernels.aot", description="Compile all kernels.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument(
        "--assemble-once", action="store_true", help="of Blackwell's cases only one of each operation and instruction"
    )
    parser.add_argument("--operations", nargs="+", metavar="NAME", help="kernels of these alone (default: all)")
    options = parser.parse_args(arguments)
    if INTERPRET:
        parser.error(INTERPRETED)
    known = {case.operation for _, _, case in collect_cases()}
    if unknown := set(options.operations or ()) - known:
        parser.error(f"--operations: expected any of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    results = compile_all(options.jobs, options.operations, options.assemble_once)
    _print_table(results)
    if options.json:
        payload = {"triton": triton.__version__, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(payload, indent=1) + "\n")
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
