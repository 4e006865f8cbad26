"""Argument checks for all modules. They raise a `ValueError` that names the argument."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

import torch

FP32 = torch.finfo(torch.float32)


def check_integer(name: str, value: Any, low: int | None = 1, high: int | None = None) -> int:
    """`value` if it is an int (no bool) from `low` to `high`, both included, None for no limit."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or (low is not None and value < low) or (high is not None and value > high):
        kind = "a positive integer" if low == 1 else "an integer" if low is None else f"an integer from {low}"
        raise ValueError(f"{name}: expected {kind}{'' if high is None else f' to {high}'}, got {describe(value)}")
    return value


def is_real(value: object) -> TypeGuard[Real]:
    """Whether `value` is a real number, also one of numpy; bools of any kind, texts, arrays and tensors are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_seconds(name: str, value: object, high: float = math.inf) -> float:
    """`value` as a float, if it is a positive, finite number (no bool) of at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected seconds as a number, got {describe(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not (0 < seconds < math.inf and seconds <= high):
        most = "" if high == math.inf else f", at most {high:g}"
        raise ValueError(f"{name}: expected a positive, finite number of seconds{most}, got {describe(value)}")
    return seconds


def check_path(name: str, value: object) -> Path:
    """`value` as a path, if it is a text or a path object and not empty. Whether the path exists is not checked."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a path, got {describe(value)}")
    if not value or "\0" in value:
        raise ValueError(f"{name}: expected a path that is not empty and holds no zero byte, got {describe(value)}")
    return Path(value)


def check_is_tensor(name: str, value: object) -> torch.Tensor:
    """`value` if it is a strided tensor: no numpy array, no sparse or nested tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise ValueError(f"{name}: expected a strided tensor, got {kind}")
    return value


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` if autograd would need a gradient through `tensor`."""
    if tensor.requires_grad and torch.is_grad_enabled():
        how = "for inference only: detach it or use no_grad"
        raise ValueError(f"{name}: requires grad, expected no gradient ({how}), got requires_grad=True")


def describe(value: object) -> str:
    """`value` for an error message: a short number or text as it is, anything else by its type.

    >>> describe(True), describe("nvfp4"), describe([1, 2]), describe(10**40)
    ('True', "'nvfp4'", 'list', 'an integer of 133 bits')
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    return type(value).__name__


def check_apart(name: str, out: torch.Tensor, inputs: dict[str, torch.Tensor | None]) -> None:
    """Raise `ValueError` if a row of `out` `[R, N]` shares memory with one of `inputs`, whose elements are dense."""
    if out.numel() == 0:
        return
    size, start = out.element_size(), out.data_ptr()
    width, stride = out.shape[1] * size, max(out.stride(0), out.shape[1]) * size
    for other, tensor in inputs.items():
        if tensor is None or tensor.numel() == 0 or tensor.device != out.device:
            continue
        first = tensor.data_ptr()
        last = first + tensor.element_size() * sum(
            (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        )
        row = max(0, (first - start - width) // stride + 1)  # the first row that does not end before the input
        if row < out.shape[0] and start + row * stride < last + tensor.element_size():
            raise ValueError(f"{name}: expected memory apart from {other}, got an overlap")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    """Raise `ValueError` unless `value` is of a class `kind`, or of one of them."""
    if not isinstance(value, kind):
        names = [one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))]
        kinds = " or ".join(f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}" for name in names)
        raise ValueError(f"{name}: expected {kinds}, got {type(value).__name__}")


def check_flag(name: str, value: object) -> None:
    """Raise `ValueError` unless `value` is True or False."""
    if value is not True and value is not False:
        raise ValueError(f"{name}: expected True or False, got {describe(value)}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed`, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        *most, last = map(str, allowed)
        expected = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{name}: expected {expected}, got {describe(value)}")


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """`value` as a float, if it is a number (no bool) that fp32 holds as a finite one; not denormal if `positive`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = FP32.tiny if positive else -FP32.max
        if low <= value <= FP32.max:
            return float(value)
    raise ValueError(f"{name}: expected a {'positive ' if positive else ''}finite number, got {describe(value)}")


def check_device(name: str, value: object, *, meta: bool = True) -> torch.device:
    """The device meant by `value`, if it names one of this machine or, with `meta`, the meta device."""
    try:
        if not isinstance(value, str | torch.device):
            raise TypeError
        device = torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"{name}: expected a device such as cpu or cuda:0, got {describe(value)}") from None
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type not in ("cpu", "cuda", *(("meta",) if meta else ())) or (
        device.type == "cuda" and (device.index or 0) >= gpus
    ):
        raise ValueError(f"{name}: expected a device of this machine, got {device}")
    return device


def check_lies_on(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise `ValueError` unless `tensor` lies on `device`, which is any of its type if it has no index."""
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def check_elements_apart(name: str, tensor: torch.Tensor) -> None:
    """Raise `ValueError` if two elements of `tensor`, which is written, share memory, as those of `expand` do."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            raise ValueError(f"{name}: expected elements apart in memory, got strides {list(tensor.stride())}")
        reach += (size - 1) * stride
