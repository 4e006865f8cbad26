"""Dispatch and combine on few SMs: as many programs as SMs at most, and the bits of a launch on all SMs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moe_runtime.config import load_config
from moe_runtime.kernels.exchange.plan import plan_exchange
from moe_runtime.kernels.formats.number_formats import COMBINE_FORMATS, FORMATS
from moe_runtime.layer import MoELayer
from moe_runtime.virtual import virtual_contexts
from tests.exchange.test_cuda_exchange import EXPERTS, HIDDEN, TOP_K, WORLD, assert_same_steps
from tests.exchange.test_exchange_compile import EDGES, geometry_of, launches, of_kernel
from tests.kernels.test_dequant_compile import (
    REGISTERS_OF_A_BLOCK,
    SHARED_BYTES_OF_A_BLOCK,
    SPILL_BYTES,
    compile_recorded,
)
from tests.support.virtual_exchange import HOPPER, Ranks, poisoned_memory

__all__ = ["poisoned_memory"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_sms", "fmt", "wire", "mode", "max_tokens"),
    [
        (1, "nvfp4", "mxfp8", "gathered", 128),
        (1, "fp8_block", "bf16", "contiguous", 700),
        (3, "mxfp8", "fp8_block", "contiguous", 700),
        (3, "bf16", "bf16", "contiguous", 128),
        (16, "nvfp4", "bf16", "contiguous", 700),
        (16, "fp8_block", "bf16", "gathered", 700),
    ],
)
def test_bits_on_a_gpu(
    num_sms: int, fmt: str, wire: str, mode: str, max_tokens: int, device: torch.device, seed: int
) -> None:
    settings = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "max_tokens_per_rank": max_tokens}
    settings |= {"token_format": fmt, "combine_format": wire, "mode": mode}
    both = [Ranks(WORLD, device, HOPPER, **settings), Ranks(WORLD, device, HOPPER, num_sms=num_sms, **settings)]
    assert_same_steps(both, seed)


@pytest.mark.cpu_only
@given(data=st.data())
def test_launches_of_hopper_keep_to_the_limit(data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(sorted(FORMATS)), "format")
    wire = data.draw(st.sampled_from(COMBINE_FORMATS), "combine format")
    experts = data.draw(st.integers(1, 1000), "experts")
    geometry = geometry_of(
        fmt,
        wire,
        128 * data.draw(st.integers(1, 100), "blocks"),
        data.draw(st.integers(1, min(experts, 16)), "top_k"),
        data.draw(st.integers(1, 16), "ranks"),
        experts,
        data.draw(st.integers(1, 8192), "max_tokens"),
        data.draw(st.booleans(), "contiguous"),
    )
    assume(plan_exchange(geometry) is not None)
    num_sms = data.draw(st.integers(1, 200), "num_sms")
    found = launches(replace(geometry, num_sms=num_sms))
    assert [launch.name for launch in found] == [launch.name for launch in launches(geometry)]
    for launch in found:
        assert 1 <= launch.grid[0] <= num_sms, launch.name
        assert launch.block % 32 == 0 and launch.block <= 1024, launch.name
        assert launch.shared_bytes <= SHARED_BYTES_OF_A_BLOCK, launch.name
        assert not launch.early, "beside the kernel before it, a kernel takes SMs of its own"
        teams = int(launch.defines.get("TEAMS", 0))
        assert teams <= 15, "named barriers"
    place = next(launch for launch in found if launch.name == "recv_permute")
    assert place.defines["LOOPED"] == 1


@pytest.mark.cpu_only
@pytest.mark.parametrize("case", ["smallest", "most ranks and ids", "widest records", "deepseek_v3"])
def test_limited_launches_compile_to_what_can_be_launched(case: str) -> None:
    geometry = replace(geometry_of(*EDGES[case]), num_sms=16)
    for launch in launches(geometry):
        kernel = of_kernel(compile_recorded(launch), launch.name)
        assert launch.block * kernel.number(r"Used (\d+) registers") <= REGISTERS_OF_A_BLOCK, kernel.log
        assert kernel.number(r"(\d+) bytes smem") + launch.shared_bytes <= SHARED_BYTES_OF_A_BLOCK
        if launch.block < 1024:
            assert kernel.spilled_bytes <= SPILL_BYTES, kernel.log


def test_few_sms_have_many_bytes_under_way() -> None:
    """At DeepSeek-V3's size, where a block has an SM for itself: 4 tokens to send, or 14 and 16 rows to add up."""
    found = {launch.name: launch for launch in launches(replace(geometry_of(*EDGES["deepseek_v3"]), num_sms=16))}
    send, combine_send, combine_recv = (found[name] for name in ("dispatch_send", "combine_send", "combine_recv"))
    assert (send.grid[0], send.block, send.defines["TEAMS"]) == (16, 4 * 224, 4)
    assert (combine_send.grid[0], combine_send.defines["PLACES"]) == (16, 14)
    assert (combine_recv.grid[0], combine_recv.defines["PARTIALS"]) == (16, 16)
    assert 14 * 14336 < combine_send.shared_bytes and 16 * 14336 == combine_recv.shared_bytes


@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_a_wrong_limit_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="num_sms: expected a positive integer"):
        Ranks(
            1,
            torch.device("cpu"),
            "torch",
            hidden_size=128,
            num_experts=1,
            top_k=1,
            max_tokens_per_rank=1,
            num_sms=value,
        )


def test_a_layer_hands_its_limit_on() -> None:
    config = load_config("tiny_cpu").layer.replace(num_sms=5)
    with virtual_contexts(1)[0] as context:
        assert MoELayer(config, context).dispatcher.geometry.num_sms == 5
