"""Wrong and hostile values in place of right ones, for `tests.support.wrong_calls`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    E4M3,
    E5M2,
)
SEALED = ("DispatchHandle", "EPHandle", "ExchangeGeometry", "Placement")
"""Records that callers hand on whole; their constructors are called on their own."""
HUGE = (10**30, 2**62, 2**31)


def anything(draw: random.Random) -> Any:
    """A value that few arguments may have."""
    makers: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: draw.choice((True, False)),
        lambda: draw.choice(("", "x", "w\0", "3", "auto", "a" * 300)),
        lambda: draw.choice((b"", b"x")),
        lambda: draw.choice((float("nan"), float("inf"), float("-inf"), -0.0, 0.5, 1e300, 1e-320)),
        lambda: draw.choice((*HUGE, -1, 0, -(10**30), 7)),
        lambda: draw.choice(([], (), {}, set(), [1, 2], (0,), {"a": 1}, [None], [[1], [2]])),
        lambda: draw.choice((np.zeros(3), np.arange(4), np.zeros((2, 2), np.float32), np.array("x"))),
        lambda: draw.choice((np.float32(1.5), np.int64(3), np.bool_(True), np.float64("nan"))),
        lambda: draw.choice((1 + 2j, range(3), Ellipsis, NotImplemented, int, len, slice(3))),
        lambda: draw.choice(DTYPES),
        lambda: torch.device(draw.choice(("cpu", "meta", "cuda:0"))),
        lambda: draw.choice((torch.zeros(()), torch.zeros(0), torch.ones(2, 2), torch.tensor(True), torch.tensor([3]))),
        lambda: torch.nn.Linear(2, 2),
        object,
        lambda: Path("/nonexistent/file"),
    )
    return draw.choice(makers)()


def wrong_tensor(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    """A tensor unlike `right` in one respect, or equal to it in another form. `others` are those of the same call."""
    try:
        return draw.choice(_TENSORS)(right, others, draw)
    except (RuntimeError, NotImplementedError, TypeError):  # torch has no such form of this tensor
        return right.to("meta")


def _other_dtype(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    dtype = draw.choice([dtype for dtype in DTYPES if dtype != right.dtype])
    if dtype.itemsize == right.dtype.itemsize and dtype != torch.bool and draw.random() < 0.5:
        return right.contiguous().view(dtype)
    if dtype.is_complex and right.is_floating_point():
        return torch.complex(right.float(), right.float() + 1)
    try:
        return right.to(dtype)
    except (RuntimeError, NotImplementedError):
        return torch.zeros(right.shape, dtype=dtype)


def _other_size(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    """One element more or less, or none, along a dimension; a dimension more or less."""
    kind, shape = draw.randrange(6), list(right.shape)
    if kind == 0 or not shape:
        return right.reshape(1, *shape)
    if kind == 1:
        return right.flatten() if len(shape) > 1 else right[:1].reshape(())
    if kind == 2:
        return right.new_zeros(()) if draw.random() < 0.5 else right.new_zeros(0)
    if kind == 3:
        return right[..., None]
    at = draw.randrange(len(shape))
    shape[at] = draw.choice((0, 1, shape[at] - 1, shape[at] + 1, 2 * shape[at]))
    return right.new_zeros([max(0, size) for size in shape])


def _other_strides(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    """The same numbers (or one row of them in all rows) with other strides."""
    kind = draw.randrange(6)
    raw = right.contiguous().view(torch.uint8) if right.dtype.itemsize == 1 else right
    if kind == 0 or not raw.ndim:
        return right.mT if right.ndim >= 2 else right[None].expand(3, *right.shape)
    if kind == 1 and raw.numel():
        return right[:1].expand(right.shape)
    if kind == 2:
        at = draw.randrange(raw.ndim)
        wide = raw.new_zeros([size * (2 if axis == at else 1) for axis, size in enumerate(raw.shape)])
        part = wide[tuple(slice(None, None, 2) if axis == at else slice(None) for axis in range(raw.ndim))]
        return (
            part.copy_(raw).view(right.dtype) if right.dtype.itemsize == 1 and at < raw.ndim - 1 else _as(part, right)
        )
    if kind == 3 and raw.ndim >= 2:
        return right.mT.contiguous().mT
    if kind == 4:
        wide = torch.cat([raw.reshape(-1)[:1], raw.reshape(-1)]) if raw.numel() else raw
        return wide[1:].view(right.dtype).view(right.shape) if raw.numel() else right
    wide = raw.new_zeros((*raw.shape[:-1], raw.shape[-1] + 16))
    wide[..., : raw.shape[-1]] = raw
    return wide.view(right.dtype)[..., : raw.shape[-1]]


def _as(part: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`part`, every second column, which holds zeros, in the dtype of `right`."""
    return part.view(right.dtype) if right.dtype.itemsize == 1 else part.copy_(right)


def _other_kind(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    """Sparse, nested, of another device, numpy, with a gradient, lazy negative."""
    kind = draw.randrange(9)
    dense = right if right.is_floating_point() and right.dtype.itemsize > 1 else right.view(torch.uint8).float()
    if kind == 0:
        return dense.to_sparse()
    if kind == 1:
        return torch.nested.nested_tensor([dense.reshape(-1), dense.reshape(-1)[:1]])
    if kind == 2:
        return right.to("meta")
    if kind == 3:
        return right.tolist() if draw.random() < 0.5 else dense.float().numpy()
    if kind == 4:
        return dense.clone().requires_grad_()
    if kind == 5:
        return torch.nn.Parameter(right.clone(), requires_grad=dense is right)
    if kind == 6 and right.dtype == torch.float32:
        return torch.complex(torch.zeros_like(right), -right).conj().imag
    if kind == 7 and right.ndim == 2:
        return dense.to_sparse_csr()
    with torch.inference_mode():
        return right.clone()


def _other_values(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    """One or all numbers out of range, not finite, repeated or in another order."""
    changed = right.clone(memory_format=torch.contiguous_format)
    if not changed.numel():
        return changed
    flat = changed.view(-1)
    if right.dtype.itemsize == 1:
        flat = flat.view(torch.uint8)
        numbers: tuple[float, ...] = (0, 0x7F, 0x80, 0xFF)
    elif right.is_floating_point():
        numbers = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, -1.0, 3e38, 1e-40, 448.0)
    else:
        numbers = (-1, -2, 0, 1, 65535, 2**31 - 1, -(2**31)) if right.dtype != torch.uint32 else (0, 2**31, 2**32 - 1)
    number = draw.choice(numbers)
    if draw.random() < 0.2:
        flat.fill_(number)
    elif draw.random() < 0.2:
        flat.copy_(flat.clone().flip(0))
    else:
        flat[draw.randrange(flat.numel())] = number
    return changed


def _other_tensor(right: torch.Tensor, others: list[torch.Tensor], draw: random.Random) -> Any:
    """Another argument of the call, or memory that it shares."""
    if not others:
        return right.clone()
    other = draw.choice(others)
    try:
        return other.view(-1).view(torch.uint8)[: right.nbytes].view(right.dtype).view(right.shape)
    except RuntimeError:
        return other


_TENSORS = (_other_dtype, _other_size, _other_strides, _other_kind, _other_values, _other_tensor)


def wrong_value(right: Any, others: list[torch.Tensor], draw: random.Random) -> Any:
    """A wrong value in place of `right`: of any kind, or near to it."""
    if draw.random() < 0.3:
        return anything(draw)
    if isinstance(right, torch.Tensor):
        return wrong_tensor(right, others, draw)
    if isinstance(right, bool):
        return draw.choice((int(right), str(right), np.bool_(right), not right, None, float(right)))
    if isinstance(right, Enum):
        return draw.choice((right.value, right.name, str(right.value).upper(), None))
    if isinstance(right, int):
        near = (right - 1, right + 1, 2 * right, -right, 0, float(right), right + 0.5, str(right), np.int64(right))
        return draw.choice((*near, *HUGE, torch.tensor(right), [right], np.array(right), True, np.int32(-1)))
    if isinstance(right, float):
        numbers = (float("nan"), float("inf"), 0.0, -0.0, -right, 1e300, 1e-320, 10**30, int(right), 10**400)
        return draw.choice((*numbers, str(right), np.float32(right), torch.tensor(right), True, [right]))
    if isinstance(right, str):
        return draw.choice(
            (right.upper(), right + " ", right[:-1], right.encode(), [right], "", right + "\0", Path(right))
        )
    if isinstance(right, Path):
        return draw.choice((str(right), right / "no", str(right).encode(), right.parent, f"{right}\0", [right]))
    if isinstance(right, torch.dtype):
        return draw.choice((*DTYPES, str(right), np.float32))
    if isinstance(right, torch.device):
        return draw.choice((str(right), "meta", torch.device("meta"), "cuda:99", "xpu", -1, 0))
    if isinstance(right, list | tuple) and not hasattr(right, "_fields"):
        return _wrong_sequence(right, others, draw)
    if isinstance(right, dict):
        changed = dict(right)
        changed[draw.choice((*right, "more", 5, None))] = anything(draw)
        return draw.choice((changed, {}, list(right), None))
    if dataclasses.is_dataclass(right) and not isinstance(right, type) and type(right).__name__ not in SEALED:
        return _wrong_record(right, others, draw)
    return anything(draw)


def _wrong_sequence(right: list[Any] | tuple[Any, ...], others: list[torch.Tensor], draw: random.Random) -> Any:
    values = list(right)
    kind = draw.choice((0, 0, 0, 0, 0, 1, 2, 3, 4, 5))
    if kind == 0 and values:
        at = draw.randrange(len(values))
        values[at] = wrong_value(values[at], others, draw)
    elif kind == 1 and values:
        values.pop(draw.randrange(len(values)))
    elif kind == 2:
        values.append(values[-1] if values else 0)
    elif kind == 3:
        values.reverse()
    elif kind == 4:
        return tuple(values) if isinstance(right, list) else values
    elif all(isinstance(value, int | float) for value in values):
        return draw.choice((np.array, torch.tensor))(values)
    return values if isinstance(right, list) else tuple(values)


def _wrong_record(right: Any, others: list[torch.Tensor], draw: random.Random) -> Any:
    """The record with one field wrong, unless its constructor refuses that; then the error."""
    field = draw.choice([field for field in dataclasses.fields(right) if not field.name.startswith("_")])
    value = wrong_value(getattr(right, field.name), others, draw)
    try:
        return dataclasses.replace(right, **{field.name: value})
    except Exception:  # what constructors raise is judged where they are called
        return anything(draw)
