"""Names of the release before: they do what the new ones do, and warn of it at the caller's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.support.deprecation import warn_renamed
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOP_K, config, rank_input


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
