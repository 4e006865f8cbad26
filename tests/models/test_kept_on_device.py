"""Copies in host memory on the device at hand: on a GPU they go through pinned memory into the order of its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_runtime.checkpoints.kept_files import VARIABLE
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.expert_slots import tensors_of
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from tests.models.test_kept_experts import assert_same_experts, experts_of, files_in, formats, spoil
from tests.support.exchange_data import EXPERTS, config


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_copies_have_the_bits_of_the_checkpoint(
    weights: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    folder = tmp_path / "checkpoint"
    write_qwen3_moe_checkpoint(folder, config(), seed=3)

    def loaded(keep: bool) -> Experts:
        settings = {**config().model_dump(), **formats(weights)}
        with ExpertParallelContext(device=device) as context:
            made = MoELayer.from_checkpoint(folder, context=context, keep_in_host_memory=keep, **settings)
            return experts_of(made)

    expected = loaded(False)
    assert_same_experts(loaded(True), expected)
    assert len(files_in(tmp_path / "kept")) == EXPERTS
    spoil(folder)
    assert_same_experts(loaded(True), expected)
    # One that is missing is read, here from what was spoiled; the others still come from their copies.
    files_in(tmp_path / "kept")[3].unlink()
    found = loaded(True)
    for slot in range(EXPERTS):
        same = torch.equal(_bytes(found, slot), _bytes(expected, slot))
        assert same == (slot != 3), slot


def _bytes(experts: Experts, slot: int) -> torch.Tensor:
    tensors = tensors_of(experts)
    name = "down.units" if "down.units" in tensors else "down.quants"
    return tensors[name][slot].contiguous().view(torch.uint8)
