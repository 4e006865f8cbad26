"""The checks of integers, seconds, paths and tensors at the boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_runtime.support.arguments import (
    check_device,
    check_flag,
    check_integer,
    check_is_tensor,
    check_kind,
    check_number,
    check_path,
    check_seconds,
)


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


def test_kinds() -> None:
    check_kind("x", 5, int)
    check_kind("x", "a", (int, str))
    with pytest.raises(ValueError, match=r"^x: expected an int or a str, got NoneType$"):
        check_kind("x", None, (int, str))


@pytest.mark.parametrize("value", [1, 0, None, "True", np.True_, torch.tensor(True)])
def test_no_flag(value: object) -> None:
    check_flag("x", True)
    check_flag("x", False)
    with pytest.raises(ValueError, match=r"^x: expected True or False, got "):
        check_flag("x", value)


@pytest.mark.parametrize(
    "value", [True, "1", None, float("nan"), float("inf"), 1e39, -1e39, 10**400, torch.tensor(1.0)]
)
def test_no_number(value: object) -> None:
    assert check_number("x", -2) == -2.0 and check_number("x", 3.4e38, positive=True) == 3.4e38
    with pytest.raises(ValueError, match=r"^x: expected a finite number, got "):
        check_number("x", value)
    for small in (0, -1.0, 1e-40):
        with pytest.raises(ValueError, match=r"^x: expected a positive finite number, got "):
            check_number("x", small, positive=True)


@pytest.mark.parametrize("value", [None, 0, -1, "cpu ", b"cpu", "xpu", "cuda:99", torch.float16, Path("cpu")])
def test_no_device(value: object) -> None:
    assert check_device("x", "cpu") == check_device("x", torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^x: expected a device "):
        check_device("x", value)
