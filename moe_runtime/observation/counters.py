"""What a layer has done, for a serving engine to read while it runs: tokens per expert, rows, bytes moved.

Each step counts with one small kernel, which a CUDA graph captures with the step. Reading copies the counts to pinned
memory without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from moe_runtime.comm.hosts import Hosts
from moe_runtime.config import MAX_EXPERTS
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.kernels.step_counts import HEAD, ROWS, SENT, STEPS, TOKENS, count_step
from moe_runtime.observation.polled import PolledWords
from moe_runtime.support.arguments import check_device, check_integer, check_is_tensor, check_kind


@dataclass(frozen=True)
class LayerCounts:
    """Counts of one layer on one rank since counting began; subtract two of them for the time in between.

    Attributes:
        steps: number of steps, those without tokens of this rank included.
        tokens: tokens that this rank brought.
        expert_tokens: how many of them were routed to each expert, by id.
        rows: (token, expert) rows that this rank's experts got, from all ranks.
        dispatch_bytes: bytes of this rank's tokens that went to other ranks in dispatch; with several hosts, over the
            network, once to each other host.
        combine_bytes: bytes of their results that came back from there in combine.
    """

    steps: int
    tokens: int
    expert_tokens: tuple[int, ...]
    rows: int
    dispatch_bytes: int
    combine_bytes: int

    def __sub__(self, earlier: LayerCounts) -> LayerCounts:
        check_counts("earlier", earlier)
        if len(earlier.expert_tokens) != len(self.expert_tokens):
            sizes = f"{len(self.expert_tokens)} and {len(earlier.expert_tokens)}"
            raise ValueError(f"earlier: expected counts of the same layer, one expert_tokens is shorter: got {sizes}")
        pairs = zip(self.expert_tokens, earlier.expert_tokens, strict=True)
        return LayerCounts(
            self.steps - earlier.steps,
            self.tokens - earlier.tokens,
            tuple(now - before for now, before in pairs),
            self.rows - earlier.rows,
            self.dispatch_bytes - earlier.dispatch_bytes,
            self.combine_bytes - earlier.combine_bytes,
        )


def check_counts(name: str, counts: LayerCounts) -> None:
    """Raise `ValueError` unless `counts` are numbers as a layer counts them."""
    check_kind(name, counts, LayerCounts)
    check_kind(f"{name}.expert_tokens", counts.expert_tokens, tuple)
    for field in fields(counts):
        value = getattr(counts, field.name)
        for number in value if field.name == "expert_tokens" else (value,):
            check_integer(f"{name}.{field.name}", number, None)


def imbalance(ranks: Sequence[LayerCounts]) -> float:
    """Rows of the busiest rank over the mean of all, from each rank's counts of the same steps; 1 without rows.

    Raises `ValueError` for anything else than counts.
    """
    check_kind("ranks", ranks, (list, tuple))
    for counts in ranks:
        check_counts("ranks", counts)
        check_integer("ranks.rows", counts.rows, 0, 2**63 - 1)
    return most_over_mean([counts.rows for counts in ranks])


def most_over_mean(rows: Sequence[float]) -> float:
    """The largest number over the mean of all, for numbers that are not negative; 1 where all are 0."""
    return max(rows) * len(rows) / sum(rows) if any(rows) else 1.0


def _check_ids(
    name: str, ids: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    check_is_tensor(name, ids)
    if ids.dtype not in dtypes or ids.shape != shape or ids.device != device:
        expected = f"{' or '.join(map(str, dtypes))} {list(shape)} on {device}"
        raise ValueError(f"{name}: expected {expected}, got {ids.dtype} {list(ids.shape)} on {ids.device}")


class LayerCounters:
    """Counters of one layer on one rank, on its device; made by `MoELayer.count_steps`.

    Args:
        geometry: of the layer's exchange.
        num_experts: experts of the layer; tokens are counted by expert id, whatever the placement.
        device: of the layer.
        engine: of its context.
        hosts: of its context; None for one host.

    Attributes:
        words: int64, the counts on the device.
    """

    def __init__(
        self,
        geometry: ExchangeGeometry,
        num_experts: int,
        device: torch.device,
        engine: str,
        hosts: Hosts | None = None,
    ) -> None:
        check_kind("geometry", geometry, ExchangeGeometry)
        if hosts is not None:
            check_kind("hosts", hosts, Hosts)
        check_integer("num_experts", num_experts, high=MAX_EXPERTS)
        device = check_device("device", device)
        self._geometry, self._hosts = geometry, hosts
        self._engine = resolve_engine(engine, device)
        self._polled = PolledWords(HEAD + num_experts, device)
        self.words = self._polled.words

    def _follow(self, geometry: ExchangeGeometry) -> None:
        """Count steps of `geometry` from now on: after the death of a rank. Counts stay."""
        self._geometry = geometry

    @torch.inference_mode()
    def add(
        self, topk_idx: torch.Tensor, slots: torch.Tensor, num_parts: torch.Tensor, group_offsets: torch.Tensor
    ) -> None:
        """Count a step: the arguments of `kernels.step_counts.count_step`. Nothing waits for the host.

        Raises `ValueError` for tensors of other shapes or dtypes.
        """
        geometry = self._geometry
        device, int32, ids_dtypes = self._polled.words.device, (torch.int32,), (torch.int32, torch.int64)
        tokens = check_is_tensor("topk_idx", topk_idx).numel() // geometry.top_k
        _check_ids("topk_idx", topk_idx, ids_dtypes, (tokens, geometry.top_k), device)
        _check_ids("slots", slots, (topk_idx.dtype,), (tokens, geometry.top_k), device)
        _check_ids("num_parts", num_parts, int32, (tokens,), device)
        _check_ids("group_offsets", group_offsets, int32, (geometry.num_local_experts + 1,), device)
        first, ranks = geometry.rank, 1
        if self._hosts is not None:
            first, ranks = self._hosts.host * self._hosts.ranks_per_host, self._hosts.ranks_per_host
        near = geometry.starts[first], geometry.starts[first + ranks]
        ids = topk_idx.contiguous(), slots.contiguous()
        count_step(self._polled.words, *ids, num_parts, group_offsets, near, engine=self._engine)

    def poll(self) -> LayerCounts:
        """The newest counts that have reached the host, all of the same step. Never waits.

        On a GPU they are those of the last copy to the host that has ended, and each call starts one behind what is
        queued on the current stream, unless one is under way. Call it between steps, from the thread that queues them.
        While that thread captures a graph nothing is copied. On a CPU the counts are current.
        """
        return self._counts(self._polled.poll())

    def read(self) -> LayerCounts:
        """The current counts. Waits for the work that is queued on the current stream."""
        return self._counts(self._polled.read())

    def _counts(self, found: list[int]) -> LayerCounts:
        return LayerCounts(
            steps=found[STEPS],
            tokens=found[TOKENS],
            expert_tokens=tuple(found[HEAD:]),
            rows=found[ROWS],
            dispatch_bytes=found[SENT] * self._geometry.record.record_bytes,
            combine_bytes=found[SENT] * self._geometry.partial_bytes,
        )
