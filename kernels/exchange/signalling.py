"""Waiting for peers and signalling failures in Triton kernels. Every wait ends, by the flag, a failure or the clock.

The words are those of `comm/signals.py`; `own_ptr` is this rank's signal region as an int32 pointer. The first
failure of a rank takes the latch; it writes the rank's error record and the abort words of every peer, so that nobody
waits for a rank that has given up. Epochs are compared by difference, which holds across the wrap of int32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_runtime.comm.errors import ErrorCode
from moe_runtime.comm.signals import ABORT_WORDS as _ABORT_WORDS
from moe_runtime.comm.signals import COUNT_BITS as _COUNT_BITS
from moe_runtime.comm.signals import TURN_BIT as _TURN_BIT
from moe_runtime.comm.signals import WITHOUT_SIGN as _WITHOUT_SIGN
from moe_runtime.kernels.runtime import AotCase, clock_ns, store_release

MAX_THREADS = tl.constexpr(256)
ABORT_WORDS = tl.constexpr(_ABORT_WORDS)
COUNT_BITS = tl.constexpr(_COUNT_BITS)
TURN_BIT = tl.constexpr(_TURN_BIT)
BELOW_TURN = tl.constexpr((1 << _TURN_BIT) - 1)
WITHOUT_SIGN = tl.constexpr(_WITHOUT_SIGN)
TIMEOUT = tl.constexpr(int(ErrorCode.TIMEOUT))


@triton.jit
def signals_of(signal_ptrs, rank):
    """The signal region of `rank` as an int32 pointer."""
    return tl.load(signal_ptrs + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def tag_of(count_tag, epoch):
    """The bits of `token_count` in `epoch` above the number of tokens, as `comm.signals.tag_of`."""
    return count_tag | (((epoch >> 1) ^ epoch) & 1) << TURN_BIT


@triton.jit
def exchange_of(word):
    """Number of the exchange in a `token_count`."""
    return (word & BELOW_TURN) >> COUNT_BITS


@triton.jit
def agreed(seen):
    """The largest int32 `seen` of all threads of a program of at most `MAX_THREADS`.

    What others may change while it is read, and the clock, each thread reads for itself. A branch must not depend on
    that where barriers lie behind it, as they do behind reductions and atomics: warps would wait at different ones.
    """
    return tl.max(tl.where(tl.arange(0, MAX_THREADS) >= 0, seen, 0), axis=0)


@triton.jit
def has_failed(latch_ptr):
    """Whether this rank has failed so far, the same for all threads."""
    return agreed((tl.load(latch_ptr, volatile=True) != 0).to(tl.int32)) != 0


@triton.jit
def record_failure(
    error_ptr,
    latch_ptr,
    signal_ptrs,
    code,
    about,
    phase,
    epoch,
    detail,
    detail2,
    rank,
    ABORT: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Record this rank's first failure on the host-visible record and on every peer; later ones change nothing."""
    record_failure_of(
        error_ptr, latch_ptr, signal_ptrs, code, about, phase, epoch, detail, detail2, rank, rank, ABORT, WORLD
    )


@triton.jit
def record_failure_of(
    error_ptr,
    latch_ptr,
    signal_ptrs,
    code,
    about,
    phase,
    epoch,
    detail,
    detail2,
    origin,
    rank,
    ABORT: tl.constexpr,
    WORLD: tl.constexpr,
):
    """The same, also for a failure learned from rank `origin`."""
    if tl.atomic_cas(latch_ptr, 0, code, sem="acq_rel", scope="gpu") == 0:
        tl.store(error_ptr + 1, about)
        tl.store(error_ptr + 2, phase)
        tl.store(error_ptr + 3, epoch)
        tl.store(error_ptr + 4, detail)
        tl.store(error_ptr + 5, origin)
        tl.store(error_ptr + 6, detail2)
        tl.debug_barrier()
        store_release(error_ptr, code)
        for peer in range(WORLD):
            if peer != rank:
                words = signals_of(signal_ptrs, peer) + ABORT + rank * ABORT_WORDS
                tl.store(words + 1, phase)
                tl.store(words + 2, epoch)
                tl.store(words + 3, about)
                tl.store(words + 4, detail)
                tl.store(words + 5, detail2)
                tl.store(words + 6, tl.where(origin == rank, 0, origin + 1))
                tl.debug_barrier()
                tl.atomic_xchg(words, code, sem="release", scope="sys")
        tl.debug_barrier()
        tl.atomic_xchg(latch_ptr + 1, 1, sem="release", scope="sys")


@triton.jit
def await_abort_sent(latch_ptr):
    """Wait until the abort messages of this rank's failure have been sent: another kernel may still be sending them."""
    while tl.atomic_add(latch_ptr + 1, 0, sem="acquire", scope="gpu") == 0:
        pass


@triton.jit
def adopt_aborts(
    error_ptr, latch_ptr, signal_ptrs, rank, ABORT: tl.constexpr, WORLD: tl.constexpr, WORLD_PAD: tl.constexpr
):
    """Adopt the failure of a peer, if there is an abort message, and forward it.

    This rank is about to raise flags without data, maybe before that peer has sent its message to all others.
    """
    own_ptr = signals_of(signal_ptrs, rank)
    peers = tl.arange(0, WORLD_PAD)
    codes = tl.load(own_ptr + ABORT + peers * ABORT_WORDS, mask=peers < WORLD, other=0, volatile=True)
    if agreed(tl.max(codes, axis=0)) != 0:
        for peer in range(WORLD):
            words = own_ptr + ABORT + peer * ABORT_WORDS
            code = tl.atomic_add(words, 0, sem="acquire", scope="sys")
            if code != 0:
                origin = tl.load(words + 6, volatile=True)
                record_failure_of(
                    error_ptr, latch_ptr, signal_ptrs, code,
                    tl.load(words + 3, volatile=True), tl.load(words + 1, volatile=True),
                    tl.load(words + 2, volatile=True), tl.load(words + 4, volatile=True),
                    tl.load(words + 5, volatile=True), tl.where(origin == 0, peer, origin - 1), rank, ABORT, WORLD,
                )  # fmt: skip


@triton.jit
def wait_either(
    flag_a,
    value_a,
    flag_b,
    value_b,
    latch_ptr,
    own_ptr,
    timeout_ns,
    ABORT: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
):
    """Spin until `flag_a` has reached `value_a` or `flag_b` has reached `value_b`; True where the clock ran out.

    Ends early, returning False, once this rank has failed or a peer has aborted: the caller looks at the latch.
    """
    peers = tl.arange(0, WORLD_PAD)
    ahead_a = tl.atomic_add(flag_a, 0, sem="acquire", scope="sys") - value_a
    ahead_b = tl.atomic_add(flag_b, 0, sem="acquire", scope="sys") - value_b
    waiting = (ahead_a < 0) & (ahead_b < 0)
    late = ahead_a != ahead_a
    if waiting:
        start = clock_ns()
        while waiting:
            ahead_a = tl.atomic_add(flag_a, 0, sem="acquire", scope="sys") - value_a
            ahead_b = tl.atomic_add(flag_b, 0, sem="acquire", scope="sys") - value_b
            behind = (ahead_a < 0) & (ahead_b < 0)
            aborts = tl.load(own_ptr + ABORT + peers * ABORT_WORDS, mask=peers < WORLD, other=0, volatile=True)
            given_up = (tl.max(aborts, axis=0) != 0) | (tl.load(latch_ptr, volatile=True) != 0)
            seen = agreed(given_up.to(tl.int32) + 2 * (clock_ns() - start > timeout_ns).to(tl.int32))
            late = behind & (seen >= 2)
            waiting = behind & (seen == 0)
    return late


@triton.jit
def milliseconds(timeout_ns):
    """What a `TIMEOUT` is recorded with, as int32."""
    return tl.minimum(timeout_ns // 1000000, 2147483647).to(tl.int32)


@triton.jit
def wait_for_peer(
    flag,
    value,
    peer,
    phase,
    epoch,
    error_ptr,
    latch_ptr,
    signal_ptrs,
    rank,
    timeout_ns,
    ABORT: tl.constexpr,
    WORLD: tl.constexpr,
    WORLD_PAD: tl.constexpr,
):
    """Wait for a flag of `peer`; a late peer is recorded as `TIMEOUT`, an abort is adopted. Both set the latch."""
    own = signals_of(signal_ptrs, rank)
    if has_failed(latch_ptr) == 0:
        if wait_either(flag, value, flag, value, latch_ptr, own, timeout_ns, ABORT, WORLD, WORLD_PAD):
            record_failure(
                error_ptr, latch_ptr, signal_ptrs, TIMEOUT, peer, phase, epoch, milliseconds(timeout_ns), 0, rank,
                ABORT, WORLD,
            )  # fmt: skip
    adopt_aborts(error_ptr, latch_ptr, signal_ptrs, rank, ABORT, WORLD, WORLD_PAD)


@triton.jit
def turns_of(items):
    """How many of `items` this program takes: its own number, then each a whole grid further on.

    Example: of 5 items, programs 0 and 1 take 3 and 2.
    """
    return (items - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)


@triton.jit
def last_to_arrive(counter_ptr, num_programs):
    """True in the last program, which sees all that the others stored before; resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


_AOT_TYPES = {
    "x_ptr": "*bf16",
    "y_ptr": "*bf16",
    "shared_ptr": "*bf16",
    "output_ptr": "*bf16",
    "topk_idx_ptr": "*i64",
    "topk_weights_ptr": "*fp32",
    "gsf_ptr": "*fp32",
    "rows_ptr": "*u8",
    "scales_ptr": "*u8",
    "row_scale_ptr": "*fp32",
    "landing_half": "i64",
    "token_flags_half": "i64",
    "combine_half": "i64",
    "timeout_ns": "i64",
}


def exchange_aot_case(
    operation: str, fmt: str, kernel: Any, constexprs: dict[str, Any], types: dict[str, str] | None = None
) -> AotCase:
    """The `AotCase` of an exchange kernel: argument types follow from names, `types` overrides them."""
    signature = {}
    for name in kernel.arg_names:
        fallback = "*i64" if name.endswith("_ptrs") else "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constexprs else (types or {}).get(name, _AOT_TYPES.get(name, fallback))
    return AotCase(operation, fmt, kernel, signature, constexprs, {"num_warps": 8, "enable_fp_fusion": False})
