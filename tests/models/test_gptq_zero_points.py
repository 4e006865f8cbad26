"""Zero points of GPTQ: what `sym`, `checkpoint_format` and the stored ones mean together, and where they contradict."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from tests.support.checkpoint_writers import load_all, quantize_experts, rewrite

CONFIG = MoELayerConfig(hidden_size=128, intermediate_size=64, num_experts=2, top_k=1, max_tokens_per_rank=8)
GROUP = 32
LINEAR = "model.layers.0.mlp.experts.1.up_proj"


def said(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, **more}


def packed(values_AB: np.ndarray, bits: int) -> torch.Tensor:
    """int32 `[A, B * bits / 32]`, low bits first."""
    per = 32 // bits
    words = np.zeros((values_AB.shape[0], values_AB.shape[1] // per), np.uint32)
    for place in range(per):
        words |= values_AB[:, place::per].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def written(
    folder: Path, bits: int, stored_zeros: Any, config: dict[str, Any], seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A checkpoint with random quants `[N, K]` and scales `[N, K / GROUP]`; zero points are what `stored_zeros` packs,
    from a shape `[G, N]`. Gives all three by the name of the linear."""
    write_qwen3_moe_checkpoint(folder, CONFIG, seed=seed)
    rng, parts = np.random.default_rng(seed), []

    def quantized(w: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = w.shape
        q_NK = rng.integers(0, 1 << bits, (rows, columns))
        scales_GN = rng.uniform(0.5, 2, (columns // GROUP, rows)).astype(np.float16)
        words, zeros_GN = stored_zeros((columns // GROUP, rows), rng)
        parts.append((q_NK, zeros_GN, scales_GN))
        return {
            "qweight": packed(q_NK, bits).mT.contiguous(),
            "qzeros": words,
            "scales": torch.from_numpy(scales_GN),
            "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
        }

    order = [name.removesuffix(".weight") for name in load_all(folder) if ".experts." in name]
    quantize_experts(folder, quantized, quantization_config=config)
    return dict(zip(order, parts, strict=True))


def read(folder: Path) -> dict[str, np.ndarray]:
    with Checkpoint(folder) as checkpoint:
        names, experts = checkpoint.names(0), list(checkpoint.experts(0, range(2)))
    found = {}
    for number, expert in enumerate(experts):
        for name, w in zip(names.linears(number), (*dense(expert.gate_up).chunk(2), dense(expert.down)), strict=True):
            found[name] = w.numpy()
    return found


def same(folder: Path, wanted: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    found = read(folder)
    assert set(found) == set(wanted)
    for name, (q_NK, zeros_GN, scales_GN) in wanted.items():
        groups = np.arange(q_NK.shape[1]) // GROUP
        exact = (q_NK - zeros_GN.T[:, groups]) * scales_GN.T.astype(np.float64)[:, groups]
        np.testing.assert_array_equal(found[name], exact.astype(np.float32))


def uniform(bits: int, stored: int) -> Any:
    """All stored as `stored`, which means the middle of the range."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        return packed(np.full(shape, stored), bits), np.full(shape, 1 << bits - 1)

    return make


def varied(bits: int, less: int, *, low: int = 1) -> Any:
    """Zero points of `low` and more, stored less `less`."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        zeros = rng.integers(low, 1 << bits, shape)
        return packed(zeros - less, bits), zeros

    return make


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("form", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, None])
def test_symmetric_zero_points_are_the_middle(
    sym: bool | None, form: str | None, less: int, bits: int, tmp_path: Path, seed: int
) -> None:
    """Published files store either, whatever they call their format. Nothing said is `sym: true`, as in AutoGPTQ."""
    more = {} if form is None else {"checkpoint_format": form}
    config = said(bits, **more) if sym is None else said(bits, sym=sym, **more)
    same(tmp_path, written(tmp_path, bits, uniform(bits, (1 << bits - 1) - less), config, seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("more", [{"sym": False}, {}])
def test_other_zero_points_are_those_of_the_format(
    more: dict[str, Any], form: str, bits: int, tmp_path: Path, seed: int
) -> None:
    zeros = varied(bits, 1 if form == "gptq" else 0)
    same(tmp_path, written(tmp_path, bits, zeros, said(bits, checkpoint_format=form, **more), seed))


@pytest.mark.parametrize(("form", "less"), [("gptq", 1), ("gptq_v2", 0)])
def test_uniform_ones_of_asymmetric_files_are_those_of_the_format(
    form: str, less: int, tmp_path: Path, seed: int
) -> None:
    def make(shape: tuple[int, int], rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        return packed(np.full(shape, 8), 4), np.full(shape, 8 + less)

    same(tmp_path, written(tmp_path, 4, make, said(4, sym=False, checkpoint_format=form), seed))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_symmetric_files_with_other_zero_points_are_refused(form: str, bits: int, tmp_path: Path, seed: int) -> None:
    middle = 1 << bits - 1

    def make(shape: tuple[int, int], rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        stored = np.full(shape, middle)
        stored[0, 0] = middle - 1
        return packed(stored, bits), stored

    written(tmp_path, bits, make, said(bits, sym=True, checkpoint_format=form), seed)
    message = (
        rf"model\.safetensors: tensor model\.layers\.0\.mlp\.experts\.\d\.\w+\.qzeros: expected all {middle} or all "
        rf"{middle - 1}, as sym = true says, got {middle - 1} to {middle}$"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_0_are_borrowed_by_gptqmodel(bits: int, tmp_path: Path, seed: int) -> None:
    """It subtracts 1 from each of a word's zero points by one subtraction from the word."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray]:
        zeros = rng.integers(0, 1 << bits, shape)
        zeros[0, 0] = 0  # which 8 bits seldom draw
        words = packed(zeros, bits).numpy().view(np.uint32)
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        return torch.from_numpy((words - ones).view(np.int32)), zeros

    config = said(bits, sym=False, checkpoint_format="gptq")
    wanted = written(tmp_path, bits, make, config | {"meta": {"quantizer": ["gptqmodel:4.0.0"]}}, seed)
    same(tmp_path, wanted)
    rewrite(tmp_path, load_all(tmp_path), quantization_config=config)
    largest = (1 << bits) - 1
    with pytest.raises(
        ValueError,
        match=rf"qzeros: expected zero points of 0 to {largest - 1}, which are stored less 1, got {largest}: ",
    ):
        read(tmp_path)


def test_an_order_of_columns_needs_its_tensor(tmp_path: Path, seed: int) -> None:
    written(tmp_path, 4, uniform(4, 7), said(4, sym=True) | {"desc_act": True}, seed)
    read(tmp_path)
    rewrite(tmp_path, {name: tensor for name, tensor in load_all(tmp_path).items() if name != f"{LINEAR}.g_idx"})
    with pytest.raises(ValueError, match=rf"tensor {re.escape(LINEAR)}\.g_idx is missing, but desc_act says"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"sym": "yes"}, "sym"),
        ({"sym": 1}, "sym"),
        ({"desc_act": "false"}, "desc_act"),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, "format"),
        ({"format": "gptq_p"}, "checkpoint_format"),
        ({"groupsize": 64}, "groupsize"),
        ({"actorder": True}, "actorder"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"pack_dtype": "int16"}, "pack_dtype"),
        ({"data_type": "fp"}, "data_type"),
        ({"adapter": {"name": "lora", "rank": 64}}, "adapter.name"),
        ({"rotation": "hadamard"}, "rotation"),
    ],
)
def test_keys_that_contradict_or_are_not_read_are_named(
    more: dict[str, Any], key: str, tmp_path: Path, seed: int
) -> None:
    written(tmp_path, 4, uniform(4, 7), said(4, sym=True) | more, seed)
    message = rf"config\.json: quantization_config\.{re.escape(key)}: expected .*, got "
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
