"""The checks of integers, seconds, paths and tensors at the boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_runtime.comm.arguments import check_integer, check_is_tensor, check_path, check_seconds


def test_integers() -> None:
    assert check_integer("n", 1) == 1
    assert check_integer("n", -5, None) == -5
    assert check_integer("n", 7, 0, 7) == 7


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.int64(1), torch.tensor(1), 0, -1, 9, 10**30])
def test_no_integer(value: object) -> None:
    with pytest.raises(ValueError, match=r"^n: expected a positive integer to 8, got ") as error:
        check_integer("n", value, 1, 8)
    assert len(str(error.value)) < 120


def test_seconds() -> None:
    assert check_seconds("timeout_s", 3) == 3.0


@pytest.mark.parametrize("value", [True, "1", None, 0, -1.0, float("nan"), float("inf"), 10**400])
def test_no_seconds(value: object) -> None:
    with pytest.raises(ValueError, match=r"^timeout_s: expected "):
        check_seconds("timeout_s", value)


def test_paths() -> None:
    assert check_path("path", "a/b") == Path("a/b") == check_path("path", Path("a/b"))


@pytest.mark.parametrize("value", [None, 3, b"a", "", "a\0b", ["a"]])
def test_no_path(value: object) -> None:
    with pytest.raises(ValueError, match=r"^path: expected a path"):
        check_path("path", value)


def test_no_tensor() -> None:
    strided = torch.ones(2, 2)
    assert check_is_tensor("x", strided) is strided
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for value in (None, [1.0], np.ones(2), torch.bfloat16, strided.to_sparse(), nested):
        with pytest.raises(ValueError, match=r"^x: expected a (strided )?tensor, got "):
            check_is_tensor("x", value)
