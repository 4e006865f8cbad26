"""Bit-for-bit comparison of tensors; a failure names the coordinate, both values and both byte patterns."""

from __future__ import annotations

import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor | np.ndarray, what: str = "") -> None:
    """Raise `AssertionError` unless shapes, dtypes and all bits agree (NaNs with their payloads, zeros with signs)."""
    expected = torch.from_numpy(np.ascontiguousarray(expected)) if isinstance(expected, np.ndarray) else expected.cpu()
    actual = actual.cpu()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    integer = _INTEGERS[actual.dtype.itemsize]
    a, e = actual.contiguous().view(integer), expected.contiguous().view(integer)
    if torch.equal(a, e):
        return
    where = (a != e).nonzero()
    lines = [f"{what}: {len(where)} of {a.numel()} elements differ"]
    mask = (1 << 8 * integer.itemsize) - 1
    for place in where[:8]:
        i = tuple(place.tolist())
        lines.append(
            f"  at {i}: {_value(actual[i])} ({int(a[i]) & mask:#x}), "
            f"expected {_value(expected[i])} ({int(e[i]) & mask:#x})"
        )
    raise AssertionError("\n".join(lines))


def _value(element: torch.Tensor) -> float | int:
    return element.float().item() if element.dtype.is_floating_point else int(element.item())
