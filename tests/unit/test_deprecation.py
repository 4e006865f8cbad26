"""Names of the release before: they do what the new ones do, and warn of it at the caller's line."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch

import moe_runtime
from moe_runtime import ops
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.layer import MoELayer
from moe_runtime.support.deprecation import warn_renamed
from moe_runtime.support.moved import MOVED
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOP_K, config, rank_input
from tests.support.programs import ROOT, python_path, without_interpreter
from tests.support.spawner import interpreter


@contextmanager
def warned(*texts: str) -> Iterator[None]:
    """Inside, exactly these warnings come, each of which names this file."""
    with pytest.warns(DeprecationWarning) as caught:
        yield
    assert [str(warning.message) for warning in caught] == list(texts)
    assert {warning.filename for warning in caught} == {__file__}


def renamed(old: str, new: str) -> str:
    return f"{old} is now {new}; the old name goes with release 0.3"


def test_a_level_may_be_given() -> None:
    def function() -> None:
        warn_renamed("old", "new", stacklevel=3)

    with warned(renamed("old", "new")):
        function()


def test_the_halves_of_the_dispatcher(device: torch.device, seed: int) -> None:
    data = rank_input(seed, 0, 5, HIDDEN, EXPERTS, TOP_K).to(device)
    routed = data.x, data.topk_idx, data.topk_weights
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config(), context)
        layer.load_random(seed)
        assert layer.experts is not None
        dispatcher = layer.dispatcher
        with warned(renamed("leave_scales", "scales_in_record")):
            handle = dispatcher.dispatch_send(*routed, leave_scales=False)
        with warned(renamed("dispatch_wait", "dispatch_recv")):
            received = dispatcher.dispatch_wait(handle)
        dispatcher.combine_send(layer.experts(received), handle)
        with warned(renamed("combine_wait", "combine_recv")):
            y = dispatcher.combine_wait(handle, shared=data.x)
        assert_same_bits(y, layer(data.x, topk_idx=data.topk_idx, topk_weights=data.topk_weights, shared=data.x))
        with warned(renamed("leave_scales", "scales_in_record")):
            received = dispatcher.dispatch(*routed, leave_scales=False)
        with warned(renamed("leave_scales", "scales_in_record")):
            assert received.handle.leave_scales is False
        with warned(renamed("can_leave_scales", "can_keep_scales_in_record")):
            assert dispatcher.can_leave_scales == dispatcher.can_keep_scales_in_record


@pytest.mark.parametrize("compiled", [False, True])
def test_the_parts_of_a_step(compiled: bool, device: torch.device, seed: int) -> None:
    """Also once `torch._dynamo` is loaded, through whose frames calls then go."""
    if compiled:
        import_module("torch._dynamo")
    x = rank_input(seed, 0, 5, HIDDEN, EXPERTS, TOP_K).x.to(device)
    instead = "forward runs a whole step; for work in between, call the halves of the layer's dispatcher"
    with ExpertParallelContext(device=device) as context:
        layer = MoELayer(config(), context)
        layer.load_random(seed)
        with warned(f"MoELayer.begin goes with release 0.3; {instead}"):
            step = layer.begin(x)
        with pytest.raises(ValueError, match="step: expected compute to be called"), pytest.warns(DeprecationWarning):
            layer.finish(step)
        with warned(f"MoELayer.compute goes with release 0.3; {instead}"):
            layer.compute(step)
        with warned(f"MoELayer.finish goes with release 0.3; {instead}"):
            y = layer.finish(step)
        assert_same_bits(y, layer(x))
        with warned(renamed("MoELayer.number", "layer_id")):
            assert layer.number == layer.layer_id == 0
        with warned(renamed("MoELayer.leaves_scales", "scales_in_record")):
            assert layer.leaves_scales == layer.scales_in_record


def test_names_of_prepacked_weights() -> None:
    with warned(renamed("moe_runtime.PreparedWeights", "PrepackedWeights")):
        assert moe_runtime.PreparedWeights is PrepackedWeights  # type: ignore[attr-defined]
    for old, new in {"prepare_nvfp4": "prepack_nvfp4", "prepare_mxfp8": "prepack_mxfp8"}.items():
        with warned(renamed(f"moe_runtime.ops.{old}", new)):
            assert getattr(ops, old) is getattr(ops, new)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ops.nothing  # type: ignore[attr-defined]


@pytest.mark.cpu_only
def test_modules_that_moved_are_found_by_their_old_names() -> None:
    """In a process of its own, in which none of them has been imported yet."""
    script = f"""
import importlib, sys, warnings
import moe_runtime
for old, new in {MOVED!r}.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module("moe_runtime." + old)
    assert module is sys.modules["moe_runtime." + new], old
    assert module.__name__ == module.__spec__.name == "moe_runtime." + new, old
    text = f"moe_runtime.{{old}} is now moe_runtime.{{new}}; the old name goes with release 0.3"
    assert text in [str(warning.message) for warning in caught], (old, caught)
from moe_runtime.prepared import PrepackedWeights
"""
    subprocess.run(
        [interpreter(), "-c", script], check=True, timeout=120, env=without_interpreter(PYTHONPATH=python_path())
    )


@pytest.mark.cpu_only
def test_no_module_that_moved_is_still_there() -> None:
    for old, new in MOVED.items():
        assert not (ROOT / "moe_runtime" / f"{old.replace('.', '/')}.py").exists()
        assert (ROOT / "moe_runtime" / f"{new.replace('.', '/')}.py").exists()
