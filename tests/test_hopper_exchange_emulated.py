"""Hopper's exchange emulated on the CPU: the bits of the twins, whatever the order in which lanes, copies and ranks go on."""

from __future__ import annotations

import pytest
import torch

from moe_runtime import dispatcher
from moe_runtime.kernels import hopper_exchange
from tests.emulator import Emulator
from tests.on_host import needs_compiler
from tests.test_exchange import Ranks, poisoned_memory
from tests.test_hopper_exchange import assert_same_steps

__all__ = ["poisoned_memory"]

pytestmark = needs_compiler


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch, seed: int) -> Emulator:
    """What stands for the launches of CUDA kernels, on a GPU of 5 SMs."""
    emulator = Emulator(seed)
    monkeypatch.setattr(dispatcher, "runs_cuda", lambda engine, device: True)
    monkeypatch.setattr(hopper_exchange, "launch", emulator.launch)
    monkeypatch.setattr(hopper_exchange, "most_sms", lambda device, limit=None: min(5, limit or 5))
    return emulator


CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["indexed", "packed"])
@pytest.mark.parametrize(
    ("fmt", "wire"), [("nvfp4", "bf16"), ("mxfp8", "fp8_block"), ("fp8_block", "mxfp8"), ("bf16", "bf16")]
)
def test_bits_of_the_twins(fmt: str, wire: str, mode: str, emulator: Emulator, seed: int) -> None:
    settings = {"hidden_size": 512, "num_experts": 10, "top_k": 3, "max_tokens_per_rank": 7}
    both = [
        Ranks(3, CPU, engine, token_format=fmt, combine_format=wire, mode=mode, **settings)
        for engine in ("torch", "triton")
    ]
    assert_same_steps(both, seed)
    assert {"dispatch_send", "arrive_place", "combine_send", "combine_wait"} <= {name for _, name in emulator.launched}
