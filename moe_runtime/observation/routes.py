"""Which experts the tokens of each step took, recorded into a ring of steps that the caller owns.

Each step copies its routes with one small kernel, which a CUDA graph captures with the step: replays take one place of
the ring after the other. A step that is given recorded ids and weights (`topk_idx`, `topk_weights`) takes the same
routes, and gives the same bits for the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.config import MAX_EXPERTS
from moe_runtime.kernels.recorded_routes import HEAD, STEPS, record_routes
from moe_runtime.observation.polled import PolledWords
from moe_runtime.support.arguments import (
    check_choice,
    check_device,
    check_flag,
    check_integer,
    check_is_tensor,
    check_lies_on,
)


@dataclass(frozen=True)
class StepRoutes:
    """The routes of one step of this rank, in the order of its tokens; a copy.

    Attributes:
        step: number of the step since recording began.
        topk_idx: int32 `[T, K]`, expert ids; -1 for none.
        topk_weights: fp32 `[T, K]`; None where weights are not recorded.
    """

    step: int
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None


class RecordedRoutes:
    """Records the routes of steps into tensors of the caller; made by `MoELayer.record_routes`.

    Args:
        ids: int16 or int32 `[S, M, K]`, contiguous: `S` steps of up to `M` tokens. Step `n` takes `ids[n % S]`, whose
            rows from the step's number of tokens on stay as they were.
        weights: fp32, of the same shape; None to record ids alone.
        max_tokens: most tokens of a step.
        top_k: `K`.
        num_experts: ids from 0 on that exist; others are recorded as -1.
        device: of the steps.
        engine: of the exchange, `cuda` or `torch`.

    Attributes:
        ids, weights: as above.
        words: int64 `[2 + S]` on `device`: steps so far, a word of the kernel's own, tokens at each place of the ring.
        overwritten: steps that `read` found overwritten so far, because the ring came round before it was called.

    Raises:
        ValueError: a ring that is too small, or of another dtype, shape or device; it is named.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        device: torch.device,
        engine: str,
    ) -> None:
        check_integer("max_tokens", max_tokens)
        check_integer("top_k", top_k)
        check_integer("num_experts", num_experts, high=MAX_EXPERTS)
        check_choice("engine", engine, ("cuda", "torch"))
        device = check_device("device", device)
        check_is_tensor("ids", ids)
        if ids.dtype not in (torch.int16, torch.int32):
            raise ValueError(f"ids: expected torch.int16 or torch.int32, got {ids.dtype}")
        if ids.dtype == torch.int16 and num_experts > 2**15:
            raise ValueError(f"ids: expected torch.int32 for {num_experts} experts, got torch.int16")
        if ids.ndim != 3 or ids.shape[0] < 1 or ids.shape[1] < max_tokens or ids.shape[2] != top_k:
            least = f"[steps, at least {max_tokens} tokens, {top_k}]"
            raise ValueError(f"ids: expected {least}, got {list(ids.shape)}")
        _check_place("ids", ids, device)
        device = ids.device
        if weights is not None:
            check_is_tensor("weights", weights)
            if weights.dtype != torch.float32 or weights.shape != ids.shape:
                expected = f"torch.float32 {list(ids.shape)}"
                raise ValueError(f"weights: expected {expected}, got {weights.dtype} {list(weights.shape)}")
            _check_place("weights", weights, device)
        self.ids, self.weights, self.overwritten = ids, weights, 0
        self._num_experts, self._engine, self._read = num_experts, engine, 0
        self._polled = PolledWords(HEAD + ids.shape[0], device)
        self.words = self._polled.words
        # A graph may be captured next: load the kernels.
        for dtype in (torch.int32, torch.int64):
            self.add(ids.new_empty(0, top_k, dtype=dtype), torch.empty(0, top_k, dtype=torch.float32, device=device))
        self.words.zero_()

    @torch.inference_mode()
    def add(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *, settled: bool = False) -> None:
        """Record a step: ids int32 or int64 `[T, K]`, weights fp32 `[T, K]`. Nothing waits for the host.

        `settled` as of `kernels.recorded_routes.record_routes`.

        Raises `ValueError` for more tokens than a place of the ring has, other shapes, dtypes or devices.
        """
        _, most, top_k = self.ids.shape
        check_is_tensor("topk_idx", topk_idx)
        check_is_tensor("topk_weights", topk_weights)
        check_flag("settled", settled)
        shape = (topk_idx.shape[0] if topk_idx.ndim else 0, top_k)
        for name, tensor, dtypes in (
            ("topk_idx", topk_idx, (torch.int32, torch.int64)),
            ("topk_weights", topk_weights, (torch.float32,)),
        ):
            if tensor.dtype not in dtypes or tensor.shape != shape or tensor.device != self.words.device:
                expected = f"{' or '.join(map(str, dtypes))} {list(shape)} on {self.words.device}"
                raise ValueError(f"{name}: expected {expected}, got {tensor.dtype} {list(tensor.shape)}")
        if shape[0] > most:
            raise ValueError(f"topk_idx: expected at most {most} tokens, as the ring has room for, got {shape[0]}")
        record_routes(
            topk_idx.contiguous(),
            topk_weights.contiguous(),
            self.ids,
            self.weights,
            self.words,
            self._num_experts,
            engine=self._engine,
            settled=settled,
        )

    @property
    def steps(self) -> int:
        """Steps that were recorded so far, replays of graphs included. Waits for the current stream."""
        return int(self.words[STEPS])

    def poll(self) -> tuple[int, int]:
        """Steps that were recorded so far, and how many of them are lost, those included that no `read` has missed yet.

        The newest numbers that have reached the host. Never waits; see `LayerCounters.poll`.
        """
        steps = self._polled.poll()[STEPS]
        return steps, self.overwritten + max(0, steps - self._read - self.ids.shape[0])

    def read(self) -> list[StepRoutes]:
        """The steps since the last call that the ring still has, oldest first; those that it lost are `overwritten`.

        Waits for the work that is queued on the current stream. Call it between steps, on their stream.
        """
        size = self.ids.shape[0]
        words = self.words.tolist()
        steps, tokens = words[STEPS], words[HEAD:]
        first = max(self._read, steps - size)
        self.overwritten += first - self._read
        self._read = steps
        found = []
        for step in range(first, steps):
            place, rows = step % size, tokens[step % size]
            weights = None if self.weights is None else self.weights[place, :rows].clone()
            found.append(StepRoutes(step, self.ids[place, :rows].to(torch.int32, copy=True), weights))
        return found


def _check_place(name: str, ring: torch.Tensor, device: torch.device) -> None:
    check_lies_on(name, ring, device)
    if not ring.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {ring.stride()}")
