"""Programs of Triton's exchange kernels take one branch, even if their threads see different values."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_runtime.kernels.exchange.combine import AOT_CASES as COMBINE_CASES
from moe_runtime.kernels.exchange.dispatch_recv import AOT_CASES as RECV_CASES
from moe_runtime.kernels.exchange.dispatch_send import AOT_CASES as DISPATCH_CASES
from moe_runtime.kernels.exchange.signalling import MAX_THREADS, agreed
from moe_runtime.kernels.runtime import ALL_ARCHS, AotCase
from tests.support.programs import ROOT
from tests.support.spawner import interpreter

THREADS = MAX_THREADS.value


@triton.jit
def _threads_kernel(out_ptr, N: tl.constexpr):
    # Of a scalar, so that each thread has its own number in what the compiler takes for one.
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr + tl.arange(0, N), tl.full([N], 0, tl.int32) + agreed(thread))


def compiled() -> list[str]:
    """The PTX of `_threads_kernel` for each architecture; not where Triton interprets."""
    source = ASTSource(_threads_kernel, signature={"out_ptr": "*i32", "N": "constexpr"}, constexprs={"N": THREADS})
    targets = [GPUTarget("cuda", arch, 32) for arch in ALL_ARCHS]
    return [triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"] for target in targets]


@pytest.mark.cpu_only
def test_threads_agree_through_shared_memory() -> None:
    program = "import json; from tests.exchange.test_signalling import compiled; print(json.dumps(compiled()))"
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [interpreter(), "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for ptx in json.loads(done.stdout):
        # What warps found is exchanged: stored, all wait, and read.
        assert re.search(r"st\.shared.*?bar\.sync.*?ld\.shared", ptx, re.DOTALL)


def test_all_warps_of_the_exchange_take_part() -> None:
    cases = [case for case in (*DISPATCH_CASES, *RECV_CASES, *COMBINE_CASES) if isinstance(case, AotCase)]
    assert cases and all(32 * case.options["num_warps"] <= THREADS for case in cases)


@pytest.mark.gpu
def test_the_largest_number_of_all_threads_is_taken() -> None:
    out = torch.full((THREADS,), -1, dtype=torch.int32, device="cuda")
    _threads_kernel[(1,)](out, N=THREADS, num_warps=8)
    assert out.tolist() == [THREADS - 1] * THREADS
