"""Compile every kernel for every architecture it declares. No GPU is needed.

`python -m moe_runtime.launch.research.aot [--json FILE] [--jobs N] [--operations NAME ...] [--assemble-once]` prints a
table operation x format x architecture with the matrix instructions found in the PTX. It fails if a kernel does not
compile or lacks its declared instruction. It must run without `TRITON_INTERPRET`: the interpreter compiles nothing.

The cases are the `AOT_CASES` of `MODULES`.

Half of the time is ptxas. With `--assemble-once`, Blackwell's cases are compiled to PTX, which suffices to look for the
instructions, and only one case of each operation and instruction to a binary. Hopper's cases are all compiled to
binaries, because kernels run there. Where a case says how much dynamic shared memory its blocks have, a binary's must
fit into those of its architecture.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, INTERPRET
from moe_runtime.launch.research.aot_cases import SM_SHARED_BYTES_OF, AotCase, CudaCase, compile_with_log

INTERPRETED = "ahead-of-time compilation needs a process without TRITON_INTERPRET; unset it and run again"
MATRIX_INSTRUCTION = re.compile(r"\b(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*")

MODULES = tuple(f"moe_runtime.launch.research.aot_{name}" for name in ("exchange", "formats", "gemm", "layer"))
"""Those with `AOT_CASES`."""


@dataclass(frozen=True)
class AotResult:
    """Result of one case on one architecture (compute capability times ten); `error` is empty on success.

    `instructions` are the distinct matrix instructions of the PTX. `assembled` says whether a binary was made.
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
    """`(module, index, case)` of all `AOT_CASES` of `MODULES`."""
    found = ((name, importlib.import_module(name).AOT_CASES) for name in MODULES)
    return [(name, index, case) for name, cases in found for index, case in enumerate(cases)]


def check_ones(case: AotCase) -> None:
    """Lower `case` again with 1 for every integer argument, because a launch makes a constant of an argument 1.

    Raises the errors of the compiler's front end, e.g. for `.to` of a constant argument.
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
    # The binary is never run, so ptxas need not optimize fully: a tenth of the time. Options are in the cache's key.
    options = {**case.options, "ptx_options": "-O1" if assemble else "not assembled"}
    with triton.knobs.compilation.scope(), triton.knobs.runtime.scope():
        # Line information would take a fifth of the time.
        triton.knobs.compilation.disable_line_info = True
        if not assemble:
            triton.knobs.runtime.add_stages_inspection_hook = _without_assembler
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return compiled.asm["ptx"], int(compiled.metadata.shared)


def _compile_cuda(case: CudaCase, arch: int, assemble: bool) -> tuple[str, str]:
    """The PTX, and how the kernel's shared memory does not fit; "" where it does, or nothing is known of it."""
    if not assemble:
        return nvrtc.compile_source(case.file, case.defines, f"compute_{arch}a").decode(), ""
    found = compile_with_log(case.file, case.defines, f"sm_{arch}a")
    if case.shared_bytes is None:
        return found.ptx, ""
    most = SM_SHARED_BYTES_OF[arch] - BLOCK_RESERVED_BYTES
    about = found.log.partition(f"entry function '{case.kernel}'")[2].partition("entry function")[0]
    needed = case.shared_bytes + sum(int(static) for static in re.findall(r"(\d+) bytes smem", about))
    return found.ptx, f"a block needs {needed} bytes of shared memory, of {most}" if needed > most else ""


def compile_case(case: AotCase | CudaCase, arch: int, assemble: bool = True) -> AotResult:
    """Compile `case` for `arch` and look for its instruction. Failures are recorded, not raised.

    The result is a binary, or with `assemble=False` only PTX.
    """
    kernel = case.kernel if isinstance(case, CudaCase) else getattr(case.kernel, "__name__", str(case.kernel))
    start = time.perf_counter()
    ptx, shared_bytes, error = "", 0, ""
    try:
        if isinstance(case, CudaCase):
            ptx, error = _compile_cuda(case, arch, assemble)
        else:
            if arch == case.archs[0]:
                check_ones(case)
            ptx, shared_bytes = _compile_triton(case, arch, assemble)
        wanted = case.instruction.get(arch)
        if wanted and not error and not re.search(wanted, ptx):
            error = f"no instruction matches {wanted!r}"
    except Exception as failure:
        # Any failure becomes a row of the table, so that one bad kernel does not hide the others.
        error = f"{type(failure).__name__}: {failure}".strip()
    instructions = tuple(sorted(set(MATRIX_INSTRUCTION.findall(ptx))))
    seconds = time.perf_counter() - start
    return AotResult(case.operation, case.format, kernel, arch, instructions, shared_bytes, assemble, seconds, error)


_Task = tuple[str, int, int, bool]
"""Module, index of the case there, architecture, whether to assemble."""


def _compile_by_name(tasks: Sequence[_Task]) -> list[AotResult]:
    cases = ((importlib.import_module(module).AOT_CASES[index], *how) for module, index, *how in tasks)
    return [compile_case(*case) for case in cases]


def _code_of(case: AotCase | CudaCase, arch: int) -> str:
    """Equal for cases that compile to the same code."""
    if isinstance(case, CudaCase):
        return repr((case.file, sorted(case.defines.items()), arch))
    parts: tuple[Mapping[str, Any], ...] = (case.signature, case.constexprs, case.options)
    return repr((case.kernel.__name__, *(sorted(part.items()) for part in parts), arch))


def compile_all(jobs: int = 1, operations: Sequence[str] | None = None, assemble_once: bool = False) -> list[AotResult]:
    """Compile all cases (of `operations`, where given) for all their architectures in `jobs` processes.

    With `assemble_once`, only one Blackwell case of each operation and instruction is compiled to a binary.

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
    first: dict[tuple[str, int, str | None], str] = {}  # code of the first case of each operation and instruction
    for _, _, case, arch in cases:
        first.setdefault((case.operation, arch, case.instruction.get(arch)), _code_of(case, arch))
    assembled = set(first.values())
    # One process compiles all equal code: two processes would start at once and share nothing. CUDA C++ is last: by
    # then the cache has what others compile meanwhile, such as tests.
    same: dict[str, list[_Task]] = defaultdict(list)
    for module, index, case, arch in sorted(cases, key=lambda entry: isinstance(entry[2], CudaCase)):
        code = _code_of(case, arch)
        same[code].append((module, index, arch, not assemble_once or arch == 90 or code in assembled))
    if jobs <= 1:
        results = [_compile_by_name(group) for group in same.values()]
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(_compile_by_name, same.values()))
    groups = zip(same.values(), results, strict=True)
    found = {task[:3]: result for group, part in groups for task, result in zip(group, part, strict=True)}
    return [found[module, index, arch] for module, index, _, arch in cases]


def _print_table(results: list[AotResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    archs = sorted({result.arch for result in results})
    headers = ("operation", "format", "kernel", *(f"sm_{arch}" for arch in archs))
    table = Table(*headers, title=f"Triton {triton.__version__} and NVRTC, compiled ahead of time")
    cells: dict[tuple[str, str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for result in results:
        short = [text.replace(".sync.aligned", "").replace(".row.col", "") for text in result.instructions]
        # One line for all widths of an instruction.
        short = [re.sub(r"(wgmma\S*\.m64n)\d+", r"\1*", text) for text in short]
        found = ["[red]failed[/red]"] if result.error else short or ["ok"]
        cells[result.operation, result.format, result.kernel][result.arch].update(found)
        if result.error:
            where = f"{result.operation} {result.format} {result.kernel} sm_{result.arch}"
            print(f"{where}: {result.error}", file=sys.stderr)
    for key, row in sorted(cells.items()):
        table.add_row(*key, *("\n".join(sorted(row.get(arch, {"-"}))) for arch in archs))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if everything compiled as declared, 1 if not. Exits with 2 under the interpreter."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.research.aot", description="Compile all kernels."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    once = "assemble only one Blackwell case of each operation and instruction"
    parser.add_argument("--assemble-once", action="store_true", help=once)
    parser.add_argument("--operations", nargs="+", metavar="NAME", help="only kernels of these (default: all)")
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
