"""Wrong calls of the whole public interface; `tests.support.wrong_calls` says what may follow one."""

from __future__ import annotations

import torch

from tests.support import wrong_calls
from tests.support.wrong_calls import Target, differs, fits, judge_accepted, judge_error


def test_every_public_call_has_right_arguments() -> None:
    assert len(wrong_calls.targets()) > 150
    assert wrong_calls.unmade() == []


def _scaled(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return x * factor


def test_what_counts_as_a_fault() -> None:
    target = Target("scaled", _scaled)
    arguments = {"x": None, "factor": 2.0}
    assert judge_error(target, arguments, ["x"], ValueError("x: expected a tensor, got None")) is None
    for error in (
        ValueError("expected a tensor"),
        ValueError("y: expected a tensor"),
        TypeError("x: no"),
        KeyError("x"),
    ):
        assert judge_error(target, arguments, ["x"], error)
    assert judge_accepted(target, "factor", 2) is None and judge_accepted(target, "x", torch.ones(2)) is None
    for key, value in (("factor", True), ("factor", "2"), ("factor", float("nan")), ("x", None), ("x", [1.0])):
        assert judge_accepted(target, key, value), (key, value)
    assert not fits(torch.Tensor, torch.ones(2, 2).to_sparse())
    assert differs(torch.zeros(2), -torch.zeros(2)) and differs((1, 2), [1, 2]) and differs({"a": 1.0}, {"a": 2.0})
    assert differs(torch.zeros(2), torch.zeros(2)) is None and differs(float("nan"), float("nan")) is None
