"""The baseline of a layer: plain expert parallelism in torch with all-to-all and `grouped_mm`, both in bf16.

A token travels once to each rank that has one of its experts and is copied there for each of them, by expert. The rows
travel back one by one and are weighted and summed. Sizes and indices follow from the routing and are computed before,
outside of what is timed, so that nothing waits for the host and a GPU can capture a step; a layer that learns its
routing on the way also has to exchange counts and wait for the host.

Shape letters: `T` tokens of a rank, `K` experts per token, `H` hidden size, `I` intermediate size, `E` experts of this
rank, `R` (token, expert) rows that come to this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch.nn import functional

from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.checkpoints.readers import dense
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.weights import SILU, Activation
from moe_runtime.reference import FUNCTION_GAINS, rounding_error

NAME = "torch all_to_all_single + grouped_mm bf16"


@dataclass(frozen=True)
class Route:
    """Sizes and indices of one step on one rank, on its device.

    Attributes:
        tokens_sent, tokens_came: tokens to and from each rank.
        rows_sent, rows_came: rows returned to, and from, each rank.
        send: int64, which own token each sent row is, by target rank.
        arrivals: int64 `[R]`, which row that came each row of an expert is.
        ends: int32 `[E]`, where the rows of each expert end.
        back: int64 `[R]`, which row of an expert each returned row is, by target rank.
        home: int64 `[T, K]`, which of the rows that returned each entry is; for an unrouted one the row after the last.
    """

    tokens_sent: list[int]
    tokens_came: list[int]
    rows_sent: list[int]
    rows_came: list[int]
    send: torch.Tensor
    arrivals: torch.Tensor
    ends: torch.Tensor
    back: torch.Tensor
    home: torch.Tensor

    @staticmethod
    def of(idx: Sequence[torch.Tensor], rank: int, starts: Sequence[int], device: torch.device) -> Route:
        """That of `rank`, whose experts are `starts[rank] .. starts[rank + 1]`; `idx[r]` is `[T, K]` of rank `r`."""
        ids = [part.cpu() for part in idx]
        own = [(ids[rank] >= first) & (ids[rank] < end) for first, end in pairwise(starts)]
        here = [(part >= starts[rank]) & (part < starts[rank + 1]) for part in ids]
        home = torch.full(ids[rank].shape, sum(int(mask.sum()) for mask in own))
        place = 0
        for mask in own:
            count = int(mask.sum())
            home[mask] = torch.arange(place, place + count)
            place += count
        mask = torch.cat(here)
        token, _ = mask.nonzero(as_tuple=True)
        expert = torch.cat(ids)[mask].long() - starts[rank]
        by_expert = expert.argsort(stable=True)
        came = mask.any(dim=1).cumsum(0) - 1
        counts = torch.bincount(expert, minlength=starts[rank + 1] - starts[rank])
        return Route(
            tokens_sent=[int(mask.any(dim=1).sum()) for mask in own],
            tokens_came=[int(mask.any(dim=1).sum()) for mask in here],
            rows_sent=[int(mask.sum()) for mask in here],
            rows_came=[int(mask.sum()) for mask in own],
            send=torch.cat([mask.any(dim=1).nonzero().flatten() for mask in own]).to(device),
            arrivals=came[token[by_expert]].to(device),
            ends=counts.cumsum(0).to(device, torch.int32),
            back=by_expert.argsort().to(device),
            home=home.to(device),
        )


class TorchLayer:
    """The routed experts of one rank, unquantized.

    Args:
        experts: gives any expert of the layer.
        local: ids of this rank's.
    """

    def __init__(
        self,
        experts: Callable[[int], ExpertTensors],
        local: Sequence[int],
        hidden: int,
        intermediate: int,
        activation: Activation,
        device: torch.device,
    ) -> None:
        count = len(local)
        self.activation = activation
        rows = activation.num_parts * intermediate
        self.gate_up_ENK = torch.empty(count, rows, hidden, dtype=torch.bfloat16, device=device)
        self.down_ENK = torch.empty(count, hidden, intermediate, dtype=torch.bfloat16, device=device)
        self.gate_up_bias_EN: torch.Tensor | None = None
        self.down_bias_EN: torch.Tensor | None = None
        for place, expert in enumerate(local):
            gate_up, down, gate_up_bias, down_bias = experts(expert)
            self.gate_up_ENK[place], self.down_ENK[place] = dense(gate_up), dense(down)
            if gate_up_bias is not None and down_bias is not None:
                if self.gate_up_bias_EN is None or self.down_bias_EN is None:
                    self.gate_up_bias_EN = self.gate_up_ENK.new_zeros(count, rows)
                    self.down_bias_EN = self.down_ENK.new_zeros(count, hidden)
                self.gate_up_bias_EN[place], self.down_bias_EN[place] = gate_up_bias, down_bias

    @property
    def weight_bytes(self) -> int:
        return self.gate_up_ENK.nbytes + self.down_ENK.nbytes

    def __call__(
        self, context: ExpertParallelContext, x_TH: torch.Tensor, weights_TK: torch.Tensor, route: Route
    ) -> torch.Tensor:
        """bf16 `[T, H]`; nothing waits for the host. Collective."""
        came = _all_to_all(context, x_TH[route.send], route.tokens_came, route.tokens_sent)
        rows_RH = self._experts(came[route.arrivals], route.ends)
        total = sum(route.rows_came)
        home = x_TH.new_empty(total + 1, x_TH.shape[1])
        # An unrouted entry reads this row, with weight 0.
        home[total].zero_()
        _all_to_all(context, rows_RH[route.back], route.rows_came, route.rows_sent, home[:total])
        return torch.bmm(weights_TK[:, None].to(home.dtype), home[route.home])[:, 0]

    def _experts(self, rows_RH: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not rows_RH.shape[0]:
            return rows_RH
        both = self._product(rows_RH, self.gate_up_ENK, self.gate_up_bias_EN, ends)
        return self._product(gated(both, self.activation), self.down_ENK, self.down_bias_EN, ends)

    @staticmethod
    def _product(
        rows_RK: torch.Tensor, w_ENK: torch.Tensor, bias_EN: torch.Tensor | None, ends: torch.Tensor
    ) -> torch.Tensor:
        function: Callable[..., torch.Tensor] = torch._grouped_mm
        out_RN = function(rows_RK, w_ENK.transpose(1, 2), offs=ends)
        if bias_EN is not None:
            place = torch.arange(out_RN.shape[0], device=out_RN.device, dtype=ends.dtype)
            out_RN += bias_EN[torch.searchsorted(ends, place, right=True)]
        return out_RN


def gated(both_RN: torch.Tensor, activation: Activation) -> torch.Tensor:
    """bf16 `[R, I]` by torch, of bf16 gate and up `[R, 2I]`, or of up: in bf16 for plain SwiGLU, else in fp32."""
    order, columns = activation.order, both_RN.shape[1]
    if activation == Activation(order):
        return functional.silu(both_RN[:, order.gate_rows(columns)]) * both_RN[:, order.up_rows(columns)]
    return activate(both_RN.float(), activation).to(both_RN.dtype)


def _all_to_all(
    context: ExpertParallelContext,
    rows: torch.Tensor,
    came: list[int],
    sent: list[int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if context.group is None or context.world_size == 1:
        return rows if out is None else out.copy_(rows)
    target = rows.new_empty(sum(came), rows.shape[1]) if out is None else out
    dist.all_to_all_single(target, rows, came, sent, group=context.group.group)
    return target


def error_bound() -> float:
    """Bound of the relative Frobenius error against the float64 layer, as `reference.error_bound` derives its own.

    Rounded to bf16 are the weights (where a checkpoint has others), gate and up, all of which goes through the
    activation; then silu, its product with up, the weights of down, the rows, the weights of the sum, and the sum.
    """
    growth = 1 + rounding_error("bf16") ** 2
    projected = growth**2
    activated = (1 + FUNCTION_GAINS[SILU.function] * (projected - 1)) * projected
    return math.sqrt(activated * growth**6 - 1)


def group_ends(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32: where each group of rows ends, as torch's grouped GEMMs take it."""
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def grouped_mm(
    sizes: Sequence[int], n: int, k: int, device: torch.device, copies: int
) -> Callable[[int], torch.Tensor]:
    """Calls of torch's grouped GEMM in bf16 with random operands, which use `copies` of the weights in turn."""
    function: Callable[..., torch.Tensor] = torch._grouped_mm
    ends = group_ends(sizes, device)
    a_RK = torch.randn(sum(sizes), k, device=device).to(torch.bfloat16)
    w_GNK = [torch.randn(len(sizes), n, k, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    return lambda number: function(a_RK, w_GNK[number % copies].transpose(1, 2), offs=ends)
