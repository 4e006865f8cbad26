"""Hooks before every store of a rank into symmetric memory, in torch references and interpreted kernels."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.regions import HALVED_REGIONS
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels import runtime
from moe_runtime.kernels.exchange import reference

OnStore = Callable[[str, int, int, int], None]
"""`(field, peer, half, value)`: `field` is that of `SignalLayout`, or a region; `value` of a region is 0."""
PHASES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
"""Functions of an exchange, in the order of a step."""


class Told:
    """A tensor whose stores are reported, where and what, before they are made."""

    def __init__(self, memory: torch.Tensor, tell: Callable[[Any, Any], None]) -> None:
        self._memory, self._tell = memory, tell

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self._memory[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._tell(at, value)
        self._memory[at] = value


def field_of(context: ExpertParallelContext, word: int) -> tuple[str, int]:
    """`(field, half)` of a word that this rank may write."""
    layout, world = context.signals_layout, context.world_size
    if word not in layout.words_of(context.rank):
        return "not its own", 0
    for field in ("dispatch_flag", "token_count", "combine_flag"):
        if 0 <= word - getattr(layout, field) < 2 * world:
            return field, (word - getattr(layout, field)) // world
    return ("ready" if word < layout.abort else "abort"), 0


@contextmanager
def hooked(
    dispatcher: TokenDispatcher,
    on_store: OnStore,
    on_phase: Callable[[str, bool], None],
    on_wait: Callable[[list[tuple[int, int]]], None] = lambda words: None,
) -> Iterator[None]:
    """Tell of this rank's stores, and of the begin (False) and end (True) of each phase, while steps run.

    `on_wait` hears what the torch reference waits for: `(word, epoch)`, of which one suffices.
    """
    context, geometry = dispatcher.context, dispatcher.geometry
    running = [""]

    def signal(peer: int, word: int, value: int) -> None:
        field, half = field_of(context, word)
        on_store(field, peer, half, value)

    def wrapped(phase: str, run: Callable[..., None]) -> Callable[..., None]:
        def run_phase(*args: Any, **kwargs: Any) -> None:
            on_phase(phase, False)
            running[0] = phase
            run(*args, **kwargs)
            running[0] = ""
            on_phase(phase, True)

        return run_phase

    def reference_region(region: str, phase: str, view: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def viewed(context: Any, geometry: Any, peer: int, half: int) -> Any:
            def tell(at: Any, value: Any) -> None:
                # Slots, or tokens and parts; there may be none for this peer.
                if (at[0] if isinstance(at, tuple) else at).numel():
                    on_store(region, peer, half, 0)

            memory = view(context, geometry, peer, half)
            return Told(memory, tell) if running[0] == phase else memory

        return viewed

    def reference_words(ctx: ExpertParallelContext, peer: int) -> Told:
        return Told(words(ctx, peer), lambda at, value: signal(peer, at, int(value)))

    def reference_wait(ctx: Any, awaited: list[tuple[int, int]], *args: Any) -> None:
        on_wait(awaited)
        wait(ctx, awaited, *args)

    words, wait = reference._signals_of, reference._wait
    exchange = dispatcher._exchange.backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dispatcher._exchange,
            "backend",
            SimpleNamespace(**{phase: wrapped(phase, getattr(exchange, phase)) for phase in PHASES}),
        )
        if exchange is reference:
            patch.setattr(reference, "_signals_of", reference_words)
            patch.setattr(reference, "_wait", reference_wait)
            for region, phase in (
                ("landing", "dispatch_send"),
                ("token_flags", "dispatch_send"),
                ("partials", "combine_send"),
            ):
                view = getattr(reference, f"_{region}")
                name = "combine" if region == "partials" else region
                patch.setattr(reference, f"_{region}", reference_region(name, phase, view))
        else:
            _hook_interpreter(patch, context, geometry.landing_half(context.half_bytes["landing"]), signal, on_store)
        yield


def _hook_interpreter(
    patch: pytest.MonkeyPatch,
    context: ExpertParallelContext,
    landing_half: int,
    signal: Callable[[int, int, int], None],
    on_store: OnStore,
) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    exchange_words = interpreter._ir.ATOMIC_OP.XCHG
    store, exchange = (
        interpreter.InterpreterBuilder.create_masked_store,
        interpreter.InterpreterBuilder.create_atomic_rmw,
    )
    halves = {**context.half_bytes, "landing": landing_half}
    places = sorted(
        (memory.data_ptr(), memory.data_ptr() + memory.numel(), region, peer)
        for region in ("signals", *HALVED_REGIONS)
        for peer in range(context.world_size)
        for memory in [context.heap.peer_tensor(region, peer)]
    )
    starts = [place[0] for place in places]

    def tell(address: int, values: Any) -> None:
        found = bisect_right(starts, address) - 1
        if found < 0 or address >= places[found][1]:
            return
        start, _, region, peer = places[found]
        if region == "signals":
            signal(peer, (address - start) // 4, int(values.flat[0]))
        else:
            on_store(region, peer, (address - start) // halves[region], 0)

    def told_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        addresses = pointers.data[mask.data]
        if addresses.size:
            # A store does not cross regions.
            tell(int(addresses.flat[0]), value.data)
        return store(self, pointers, value, mask, *more)

    def told_exchange(self: Any, operation: Any, pointers: Any, value: Any, *more: Any) -> Any:
        if operation == exchange_words:
            tell(int(pointers.data.flat[0]), value.data)
        return exchange(self, operation, pointers, value, *more)

    # Who waits leaves the cores to the others.
    patch.setattr(runtime, "os", SimpleNamespace(sched_yield=lambda: time.sleep(1e-3)))
    patch.setattr(interpreter.InterpreterBuilder, "create_masked_store", told_store)
    patch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", told_exchange)
