"""Hooks before every store of a rank into symmetric memory, in the torch exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
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
    on_wait: Callable[[list[tuple[int, int, int]]], None] = lambda words: None,
) -> Iterator[None]:
    """Tell of this rank's stores, and of the begin (False) and end (True) of each phase, while steps run.

    `on_wait` hears what the torch reference waits for: the words of `reference._wait`, of which one suffices.
    """
    context = dispatcher.context
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

    def reference_wait(ctx: Any, awaited: list[tuple[int, int, int]], *args: Any) -> None:
        on_wait(awaited)
        wait(ctx, awaited, *args)

    words, wait = reference._signals_of, reference._wait
    exchange = dispatcher._exchange.backend
    assert exchange is reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dispatcher._exchange,
            "backend",
            SimpleNamespace(**{phase: wrapped(phase, getattr(exchange, phase)) for phase in PHASES}),
        )
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
        yield
