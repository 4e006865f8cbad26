"""The exchange of normal mode where kernels in CUDA C++ store to peers: counts, which the host reads as they come, and
rows (`kernels.exchange.rows`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.comm.signals import count_tag_of
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.deep_ep.sizes import MOST_TOP_K, combine_bytes
from moe_runtime.kernels.exchange import rows
from moe_runtime.kernels.exchange.payload import WORD, PayloadLayout
from moe_runtime.kernels.exchange.plan import WARP, exchange_engine, sm_shared_bytes
from moe_runtime.kernels.exchange.row_sums import RowsOfRank, SumGeometry, SumKernels
from moe_runtime.kernels.exchange.rows import CountKernel, Route, RowGeometry, RowKernels, RowsToCome, TokensOfRank

LOOKS = 256
"""How often the host looks for counts before it looks for failures."""
PATIENCE_S = 0.5
"""From then on it also looks whether its kernels have ended, and leaves the processor to others in between."""


@dataclass(slots=True)
class Counts:
    """What the host knows of a dispatch, equal on all ranks but for the last two.

    Attributes:
        most_tokens: of a rank.
        most_sent: of a pair of ranks at most.
        num_rows: that come here.
        of_experts: tokens for each expert of this rank.
    """

    most_tokens: int
    most_sent: int
    num_rows: int
    of_experts: list[int]


def has_kernels(context: ExpertParallelContext) -> bool:
    """Whether ranks of `context` store to each other by kernels in CUDA C++."""
    engine, _ = exchange_engine(context.engine, context.device)
    one_memory = context.hosts is None and context.heap.directly_mapped
    return engine == "cuda" and one_memory and context.world_size <= WARP


class DirectExchange:
    """The kernels of counts, rows and sums over a context. All calls are collective.

    They come in this order for a dispatch: `count`, `send`, `await_counts` if the host is to know them, `receive`.

    Args:
        context: that is not allocated yet.
        hidden: elements of a token.
        max_tokens: of a pair of ranks in one step.
    """

    def __init__(self, context: ExpertParallelContext, hidden: int, max_tokens: int) -> None:
        self.context, self.hidden, self.max_tokens = context, hidden, max_tokens
        context.register(
            staging_bytes=rows.table_bytes(context.world_size),
            combine=combine_bytes(hidden, context.world_size, max_tokens),
        )
        self._count_tag = count_tag_of(context.next_exchange_id())
        self._on_gpu = context.device.type == "cuda"
        self._ranks: dict[str, Any] = {
            "rank": context.rank,
            "world_size": context.world_size,
            "sm_shared_bytes": sm_shared_bytes(context.device),
        }
        with torch.inference_mode(False):
            self._host = torch.zeros(
                rows.host_words(context.world_size), dtype=torch.int32, device="cpu", pin_memory=self._on_gpu
            )
        self._words = self._host.numpy()
        self._ticket = 0
        # Bound to memory that is not there yet.
        self._counts: CountKernel | None = None
        self._rows: dict[tuple[int, int, int, int | None, bool], RowKernels] = {}
        self._sums: dict[tuple[int, int, int, int | None], SumKernels] = {}
        self._cold: set[object] = set()  # kernels that the next step compiles
        widest = PayloadLayout(WORD * hidden, 0, MOST_TOP_K)
        sums = SumGeometry(**self._ranks, hidden=hidden, top_k=MOST_TOP_K)
        self._fits = sums.fits and RowGeometry(**self._ranks, max_tokens=max_tokens, layout=widest).fits

    def bind(self) -> None:
        """Point at the memory of the context, which has been allocated."""
        with torch.inference_mode(False):
            self._counts = CountKernel(self.context, self.context.heap.peer_pointers("staging"), self._host)
            self._cold.add(self._counts)
            # Of the last step, written by what sends and read by what receives: steps follow each other.
            self._epoch = torch.zeros(1, dtype=torch.int32, device=self.context.device)

    def check_can_wait(self) -> None:
        """Raise `ValueError` in the capture of a CUDA graph, where the host cannot wait for counts."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise ValueError("num_worst_tokens: expected it in a capture, where the host cannot wait for the counts")

    def takes(self, num_experts: int) -> bool:
        """Whether the kernels take a token, and the experts of all ranks."""
        return self._fits and num_experts <= rows.MOST_LOCAL * self.context.world_size

    def row_kernels(self, layout: PayloadLayout, num_sms: int | None, own_too: bool = False) -> RowKernels:
        """The kernels for tokens with this payload; in a step that has begun."""
        # A layout takes a call of Python to hash.
        key = layout.token_bytes, layout.num_scales, layout.top_k, num_sms, own_too
        found = self._rows.get(key)
        if found is None:
            geometry = RowGeometry(
                **self._ranks, max_tokens=self.max_tokens, layout=layout, num_sms=num_sms, own_too=own_too
            )
            if not geometry.fits:
                raise ValueError(f"x: expected fewer columns, got tokens of {layout.token_bytes} bytes")
            found = self._rows[key] = RowKernels(self.context, geometry, self._count_tag, self._epoch)
            self._cold.add(found)
        return found

    def count(
        self,
        routing: torch.Tensor,
        per_expert: torch.Tensor | None,
        num_experts: int,
        num_worst_tokens: int,
        with_entries: bool,
    ) -> Route:
        """Count this rank's tokens and exchange the counts.

        Args:
            routing, per_expert: as of `CountKernel.launch`.
            num_experts: of all ranks.
            num_worst_tokens: most rows that may come; 0 for the host to know.
            with_entries: as of `Route.allocate`.
        """
        context = self.context
        assert self._counts is not None
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.count(routing, per_expert, num_experts, num_worst_tokens, with_entries)
        ticket = 0
        if not num_worst_tokens:
            ticket = self._ticket = self._ticket % (2**31 - 1) + 1
        world = context.world_size
        route = Route.allocate(routing.shape[0], world, num_experts // world, context.device, with_entries)
        timeout_ns = context.startup_timeout_ns if self._counts in self._cold else context.timeout_ns
        self._counts.launch(routing, per_expert, route, num_worst_tokens, ticket, timeout_ns)
        return route

    def has_counts(self) -> bool:
        """Whether the counts of the last `count` for which the host waits are there."""
        return bool(self._words[rows.HOST_TICKET] == self._ticket)

    def await_counts(self, route: Route) -> Counts:
        """Wait for the counts of all ranks, and for nothing else.

        Raises `MoERuntimeError` for a rank that failed or did not come.
        """
        words, context, on_gpu = self._words, self.context, self._on_gpu
        looks, began = 0, 0.0
        while words[rows.HOST_TICKET] != self._ticket:
            looks += 1
            if on_gpu and looks % LOOKS:
                continue
            context.check()
            began = began or time.monotonic()
            if on_gpu and time.monotonic() - began < PATIENCE_S:
                continue
            # Every wait of a kernel ends, so the kernels do; an error of CUDA is raised here.
            ended = not on_gpu or torch.cuda.current_stream(context.device).query()
            if ended and words[rows.HOST_TICKET] != self._ticket:
                context.check()
                raise MoERuntimeError("dispatch: the kernel that counts tokens ended without counts")
            time.sleep(0.001)
        # By now a failure is known.
        context.check()
        world, num_local = context.world_size, route.num_local
        end = rows.HOST_PREFIX + world * world
        found = words[: end + num_local].tolist()
        most_tokens = most_sent = found[rows.HOST_MOST]
        if most_tokens > self.max_tokens:
            prefix = [0] * world + found[rows.HOST_PREFIX : end]
            most_sent = max(upto - before for upto, before in zip(prefix[world:], prefix, strict=False))
        return Counts(most_tokens, most_sent, found[end - world + context.rank], found[end:])

    def send(self, kernels: RowKernels, tokens: TokensOfRank, route: Route, window: int, after_counts: bool) -> None:
        """Send a step of tokens; `after_counts` right after `count`."""
        context = self.context
        context.dispatches += 1
        timeout_ns = context.startup_timeout_ns if kernels in self._cold else context.timeout_ns
        kernels.send(tokens, route, window, after_counts, timeout_ns)

    def receive(self, kernels: RowKernels, route: Route, to_come: RowsToCome, is_first: bool, num_local: int) -> None:
        """Make rows of the tokens of the step that was sent last; arguments are as of `RowKernels.receive`."""
        kernels.receive(route, to_come, is_first, num_local)
        if self._cold:
            self._cold -= {self._counts, kernels}

    def combine(
        self,
        rows_of_rank: RowsOfRank,
        route: Route,
        source_tokens: torch.Tensor,
        biases: tuple[torch.Tensor, ...],
        most_tokens: int,
        num_sms: int | None,
        home_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the rows of each token, and their weights.

        Args:
            rows_of_rank: what this rank brings.
            route, source_tokens: of the dispatch.
            biases: bf16 `[T, H]`, contiguous, two at most.
            most_tokens: of a rank.
            num_sms: most SMs; None is all.
            home_ids: int64 `[T, K]` of the dispatch, contiguous: ranks are added in the order of their last entries in
                the token; None for ascending.

        Returns bf16 `[T, H]`, and fp32 `[T, K]` or None without weights.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.combine(rows_of_rank, route, source_tokens, biases, most_tokens, num_sms, home_ids)
        context, weights, num_tokens = self.context, rows_of_rank.weights, route.num_tokens
        top_k = 0 if weights is None else weights.shape[1]
        entries = 0 if home_ids is None else home_ids.shape[1]
        key = top_k, len(biases), entries, num_sms
        kernels = self._sums.get(key)
        if kernels is None:
            sizes = {"top_k": top_k, "biases": len(biases), "entries": entries}
            geometry = SumGeometry(**self._ranks, hidden=self.hidden, **sizes, num_sms=num_sms)
            if not geometry.fits:
                raise ValueError(f"x: expected fewer columns, got rows of {geometry.record_bytes} bytes")
            kernels = self._sums[key] = SumKernels(context, geometry, self._count_tag, self._epoch)
            self._cold.add(kernels)
        y = torch.empty(num_tokens, self.hidden, dtype=torch.bfloat16, device=context.device)
        summed = None
        if top_k:
            summed = torch.empty(num_tokens, top_k, dtype=torch.float32, device=context.device)
        for start in range(0, max(1, most_tokens), self.max_tokens):
            of_step = y, summed, biases
            first = min(start, num_tokens)
            if most_tokens > self.max_tokens:
                there = slice(first, min(start + self.max_tokens, num_tokens))
                of_step = y[there], None if summed is None else summed[there], tuple(bias[there] for bias in biases)
            context.dispatches += 1
            timeout_ns = context.startup_timeout_ns if kernels in self._cold else context.timeout_ns
            kernels.send(rows_of_rank, route, source_tokens, start, self.max_tokens, timeout_ns)
            kernels.receive(route, *of_step, first, home_ids)
            self._cold.discard(kernels)
        return y, summed

    def records(self, geometry: RowGeometry) -> torch.Tensor:
        """uint8 `[rows of both halves, record_bytes]`, of rows that stay where they landed."""
        half = geometry.landing_half(self.context.half_bytes["landing"]) // geometry.record_bytes
        num_records = half + geometry.world_size * geometry.max_tokens
        region = self.context.heap.tensor("landing")
        return region[: num_records * geometry.record_bytes].view(num_records, geometry.record_bytes)
