"""Two thousand different wrong calls of `NVFP4TokenFormat`: each a ValueError that names its argument."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_runtime import ops
from tests.kernels.test_op_arguments import NOT_TENSORS, OTHER_DTYPES

WRONG_CALLS = 2000
HIDDEN, TOKENS, ROWS, TOP_K = 64, 3, 4, 2
Wrong = tuple[str, tuple[Any, ...]]
"""The argument that the message must name, and the arguments of the call."""


def shapes(right: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
    """Another shape: a size changed, a dimension more or less."""
    size = list(right)
    kind = draw.randrange(3)
    if kind == 0:
        at = draw.randrange(len(size))
        size[at] = draw.choice([n for n in range(0, 40) if n != size[at]])
    elif kind == 1:
        size.insert(draw.randrange(len(size) + 1), draw.randrange(1, 6))
    else:
        size = [draw.randrange(1, 50) for _ in range(draw.choice((0, 3, 4)))]
    return tuple(size)


def wrong_constructors(draw: random.Random) -> Iterator[Wrong]:
    for bad in (*NOT_TENSORS, True, 1.0, "64"):
        for at, name in enumerate(("hid_dim", "top_k", "alignment")):
            if type(bad) is not int:
                yield name, (*(HIDDEN, TOP_K, 16)[:at], bad, *(HIDDEN, TOP_K, 16)[at + 1 :])
    for hidden in range(-200, 1000):
        if hidden <= 0 or hidden % 16:
            yield "hid_dim", (hidden, TOP_K, 16)
    for top_k in range(-50, 1):
        yield "top_k", (HIDDEN, top_k, 16)
    for alignment in range(-100, 300):
        if alignment and (alignment < 4 or alignment & (alignment - 1)):
            yield "alignment", (HIDDEN, TOP_K, alignment)


def wrong_sends(token: ops.NVFP4TokenFormat, draw: random.Random) -> Iterator[Wrong]:
    buf, src = torch.zeros(TOKENS, token.msg_size(), dtype=torch.uint8), torch.zeros(TOKENS, HIDDEN)
    for bad in NOT_TENSORS:
        yield "buf", (bad, src, 1.0)
        yield "src", (buf, bad, 1.0)
    for dtype in OTHER_DTYPES:
        if dtype != torch.uint8:
            yield "buf", (buf.to(dtype), src, 1.0)
        if dtype not in (torch.float32, torch.bfloat16):
            yield "src", (buf, src.to(dtype), 1.0)
    yield "src", (buf, src.to("meta"), 1.0)
    for scale in (None, 0.0, -1.0, float("nan"), torch.ones(2), torch.ones(1, dtype=torch.float64), *range(-40, 1)):
        yield "input_scale", (buf, src, scale)
    while True:
        size = shapes(tuple(src.shape), draw)
        if len(size) not in (1, 2) or size[-1] != HIDDEN:
            yield "src", (buf, torch.zeros(size), 1.0)
        size = shapes((TOKENS, token.token_size()), draw)
        if len(size) != 2 or size[0] != TOKENS or size[1] < token.token_size():
            yield "buf", (torch.zeros(size, dtype=torch.uint8), src, 1.0)


def wrong_arrivals(token: ops.NVFP4TokenFormat, draw: random.Random) -> Iterator[Wrong]:
    buf, index = torch.zeros(TOKENS, token.msg_size(), dtype=torch.uint8), torch.arange(TOKENS)
    for bad in NOT_TENSORS:
        yield "buf", (bad, index)
        if type(bad) is not int:
            yield "token_index", (buf[0], bad)
    for dtype in OTHER_DTYPES:
        if dtype != torch.uint8:
            yield "buf", (buf.to(dtype), index)
        if dtype.is_floating_point or dtype == torch.bool:
            yield "token_index", (buf, index.to(dtype))
    for one in (*range(-200, 0), *range(ROWS, 200)):
        yield "token_index", (buf[0], one)
    while True:
        rows = [draw.randrange(-30, 40) for _ in range(TOKENS)]
        if min(rows) < 0 or max(rows) >= ROWS:
            yield "token_index", (buf, torch.tensor(rows))
        size = shapes((TOKENS, token.token_size()), draw)
        if len(size) != 2 or size[0] != TOKENS or size[1] < token.token_size():
            yield "buf", (torch.zeros(size, dtype=torch.uint8), index)


def mark(name: str, arguments: tuple[Any, ...]) -> tuple[object, ...]:
    """What makes a call another one."""
    parts: list[object] = [name]
    for value in arguments:
        if isinstance(value, torch.Tensor):
            numbers = tuple(value.tolist()) if value.dtype == torch.int64 and value.numel() <= TOKENS else ()
            parts.append((str(value.dtype), tuple(value.shape), str(value.device), numbers))
        else:
            parts.append((type(value).__name__, repr(value) if type(value) is not object else ""))
    return tuple(parts)


def test_wrong_calls_are_refused_by_name(seed: int) -> None:
    draw = random.Random(seed)
    token = ops.NVFP4TokenFormat(
        HIDDEN,
        TOP_K,
        output_tokens=torch.zeros(ROWS, HIDDEN // 2, dtype=torch.uint8),
        output_scales=torch.zeros(1, 1, 32, 4, 4, dtype=torch.float8_e4m3fn),
    )
    token.pad_expert_offsets(torch.tensor([0, ROWS]))
    refused: Counter[str] = Counter()
    seen = set()
    callers: tuple[tuple[Callable[..., object], Iterator[Wrong], int], ...] = (
        (ops.NVFP4TokenFormat, wrong_constructors(draw), 1200),
        (token.copy_token_to_send_buf, wrong_sends(token, draw), 700),
        (token.copy_msg_to_output_tensor, wrong_arrivals(token, draw), 900),
    )
    for call, wrong, most in callers:
        taken = 0
        for name, arguments in wrong:
            if (found := (str(call), *mark(name, arguments))) in seen:
                continue
            seen.add(found)
            with pytest.raises(ValueError, match=rf"^{name}: ") as error:
                call(*arguments)
            assert "got" in str(error.value) or "needs" in str(error.value)
            refused[name] += 1
            taken += 1
            if taken == most:
                break
    assert refused.total() >= WRONG_CALLS
    assert set(refused) == {"hid_dim", "top_k", "alignment", "buf", "src", "input_scale", "token_index"}
