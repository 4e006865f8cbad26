"""`Buffer` as Megatron's fused dispatch and combine call it, forward and backward, against a dense model in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.deep_ep import Buffer
from moe_runtime.deep_ep.sizes import normal_bytes

HIDDEN, EXPERTS, TOP_K = 64, 8, 3


class FusedDispatch(torch.autograd.Function):
    """Backward: the rows' gradients and those of their probabilities come home by a combine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor, buffer: Buffer) -> Any:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        rows, got_ids, got_probs, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            topk_idx=ids,
            topk_weights=probs.float(),
        )
        ctx.handle, ctx.buffer = handle, buffer
        ctx.mark_non_differentiable(got_ids)
        FusedDispatch.last = handle  # type: ignore[attr-defined]
        return rows, got_ids, got_probs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        d_rows, _, d_probs = grads
        dx, home_probs, _ = ctx.buffer.combine(
            d_rows.to(torch.bfloat16).contiguous(), ctx.handle, topk_weights=d_probs.float()
        )
        return dx, home_probs, None, None


class FusedCombine(torch.autograd.Function):
    """Backward: the gradient of the sum goes the way of the tokens again."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: Any, buffer: Buffer) -> torch.Tensor:
        ctx.handle, ctx.buffer = handle, buffer
        y, _, _ = buffer.combine(rows, handle)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        d_rows, _, _, _, _, _ = ctx.buffer.dispatch(grads[0].to(torch.bfloat16).contiguous(), handle=ctx.handle)
        return d_rows, None, None


def train(rank: int, world: int, counts: list[int], seed: int) -> None:
    buffer = Buffer(dist.group.WORLD, normal_bytes(HIDDEN, world, 5), explicitly_destroy=True)
    g = torch.Generator().manual_seed(seed)
    experts = (torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=g) / HIDDEN**0.5).to(torch.bfloat16)
    own = torch.Generator().manual_seed(seed + 1 + rank)
    count, per_rank = counts[rank % len(counts)], EXPERTS // world
    start = torch.randn(count, HIDDEN, generator=own).to(torch.bfloat16)
    chances = torch.rand(count, TOP_K, generator=own)
    dy = torch.randn(count, HIDDEN, generator=own).to(torch.bfloat16)
    ids = torch.rand(count, EXPERTS, generator=own).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=own) < 0.2, -1, ids)

    x, probs = start.clone().requires_grad_(), chances.clone().requires_grad_()
    rows, got_ids, got_probs = FusedDispatch.apply(x, probs, ids, buffer)
    handle = FusedDispatch.last  # type: ignore[attr-defined]
    out = torch.zeros(rows.shape, dtype=torch.float32)
    for e in range(per_rank):
        weight = torch.where(got_ids == e, got_probs, 0.0).sum(dim=1, keepdim=True)
        out = out + weight * (rows.float() @ experts[rank * per_rank + e].float().T)
    y = FusedCombine.apply(out.to(torch.bfloat16), handle, buffer)
    y.backward(dy)

    exact_x, exact_probs = start.double().requires_grad_(), chances.double().requires_grad_()
    exact = torch.zeros(count, HIDDEN, dtype=torch.float64)
    for t in range(count):
        for k, e in enumerate(ids[t].tolist()):
            if e >= 0:
                row = exact_probs[t, k] * (experts[e].double() @ exact_x[t])
                exact = exact.index_add(0, torch.tensor([t]), row[None])
    if exact.requires_grad:
        exact.backward(dy.double())
    for got, want in ((y, exact), (x.grad, exact_x.grad), (probs.grad, exact_probs.grad)):
        assert got is not None
        want = torch.zeros(got.shape, dtype=torch.float64) if want is None else want.detach()
        # bf16 at each of at most three roundings.
        assert (got.detach().double() - want).norm() <= 3 * 2**-9 * want.norm() + 1e-12
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fused_dispatch_and_combine_train(world: int, get_pool: Any, seed: int) -> None:
    # More tokens than one step has room for on the first rank, and none on the second.
    get_pool(world).run(train, [9, 0, 4, 1], seed)
