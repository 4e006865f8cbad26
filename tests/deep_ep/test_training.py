"""The buffers as Megatron and torchtitan call them, forward and backward, against dense models in float64.

The exchange carries bf16 tokens, and no float64 for `gradcheck`. `Buffer` is compared within bf16's roundings. For
`ElasticBuffer` all numbers are small integers and powers of two: bf16 and fp32 hold every value and sum, and results
and gradients must be those of float64, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.deep_ep import Buffer, ElasticBuffer, EPHandle
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


class ElasticDispatch(torch.autograd.Function):
    """`FusedDispatch` over `ElasticBuffer`, expanded or not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor, call: _Call) -> Any:
        rows, got_ids, got_probs, call.handle, _ = call.buffer.dispatch(
            x, topk_idx=ids, topk_weights=probs, num_experts=EXPERTS, **call.form
        )
        ctx.call, call.ids = call, got_ids
        return rows, got_probs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        d_rows, d_probs = (grad.contiguous() for grad in grads)
        dx, home, _ = ctx.call.buffer.combine(d_rows, ctx.call.handle, topk_weights=d_probs)
        return dx, home, None, None


class ElasticCombine(torch.autograd.Function):
    """Of weighted rows; backward as that of `FusedCombine`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, call: _Call) -> torch.Tensor:
        ctx.call = call
        y, _, _ = call.buffer.combine(rows, call.handle)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call = ctx.call
        d_rows, *_ = call.buffer.dispatch(
            grads[0].contiguous(), handle=call.handle, do_expand=call.handle.do_expand, do_cpu_sync=False
        )
        return d_rows, None


class _Call:
    """A dispatch, for its combine."""

    def __init__(self, buffer: ElasticBuffer, form: dict[str, Any]) -> None:
        self.buffer, self.form = buffer, form
        self.handle: EPHandle
        self.ids: torch.Tensor | None

    def weights_of(self, probs: torch.Tensor, e: int) -> torch.Tensor:
        """`[rows, 1]`: the weight of each row at local expert `e`."""
        if self.ids is not None:
            return torch.where(self.ids == e, probs, 0.0).sum(dim=1, keepdim=True)
        counts = self.handle.num_unaligned_recv_tokens_per_expert.tolist()
        end = self.handle.psum_num_recv_tokens_per_expert.tolist()[e]
        row = torch.arange(probs.shape[0], device=probs.device)
        return torch.where((row >= end - counts[e]) & (row < end), probs, 0.0)[:, None]


def signs(g: torch.Generator) -> torch.Tensor:
    """bf16 `[E, H, H]`: each expert swaps and negates elements."""
    columns = torch.stack([torch.randperm(HIDDEN, generator=g) for _ in range(EXPERTS)])
    matrix = torch.zeros(EXPERTS, HIDDEN, HIDDEN).scatter_(2, columns[:, :, None], 1.0)
    return (matrix * (torch.randint(0, 2, (EXPERTS, HIDDEN, 1), generator=g) * 2 - 1)).to(torch.bfloat16)


def train_elastic(rank: int, world: int, counts: list[int], seed: int, form: dict[str, Any], once: bool) -> None:
    sizes = {"num_max_tokens_per_rank": max(counts), "hidden": HIDDEN, "allow_multiple_reduction": not once}
    assert dist.group.WORLD is not None
    buffer = ElasticBuffer(dist.group.WORLD, **sizes, explicitly_destroy=True)
    experts = signs(torch.Generator().manual_seed(seed))
    own = torch.Generator().manual_seed(seed + 1 + rank)
    count, per_rank = counts[rank % len(counts)], EXPERTS // world
    start = torch.randint(-4, 5, (count, HIDDEN), generator=own).to(torch.bfloat16)
    dy = torch.randint(-4, 5, (count, HIDDEN), generator=own).to(torch.bfloat16)
    chances = 2.0 ** torch.randint(-1, 2, (count, TOP_K), generator=own)
    ids = torch.rand(count, EXPERTS, generator=own).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=own) < 0.2, -1, ids)

    call = _Call(buffer, form)
    x, probs = (part.to(buffer.device).requires_grad_() for part in (start.clone(), chances.clone()))
    rows, got_probs = ElasticDispatch.apply(x, probs, ids.to(buffer.device), call)
    out = torch.zeros(rows.shape, device=buffer.device)
    for e in range(per_rank):
        expert = experts[rank * per_rank + e].float().to(buffer.device)
        out = out + call.weights_of(got_probs, e) * (rows.float() @ expert.T)
    y = ElasticCombine.apply(out.to(torch.bfloat16), call)
    y.backward(dy.to(buffer.device))

    exact_x, exact_probs = start.double().requires_grad_(), chances.double().requires_grad_()
    mapped = torch.einsum("eij,tj->tei", experts.double(), exact_x)
    chosen = mapped[torch.arange(count)[:, None], ids.clamp(min=0)]
    exact = (torch.where(ids >= 0, exact_probs, 0.0)[:, :, None] * chosen).sum(dim=1)
    exact.backward(dy.double())
    for got, want in ((y, exact), (x.grad, exact_x.grad), (probs.grad, exact_probs.grad)):
        assert got is not None and want is not None
        assert torch.equal(got.detach().double().cpu(), want.detach())
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("expand", [False, True])
def test_elastic_dispatch_and_combine_train(expand: bool, sync: bool, once: bool, get_pool: Any, seed: int) -> None:
    form = {"do_expand": expand, "do_cpu_sync": sync, "expert_alignment": 4 if expand else 1}
    get_pool(2).run(train_elastic, [6, 1], seed, form, once)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", [1, 4])
def test_elastic_training_on_other_numbers_of_ranks(world: int, get_pool: Any, seed: int) -> None:
    get_pool(world).run(train_elastic, [6, 0, 4, 1], seed, {"do_expand": True}, False)
