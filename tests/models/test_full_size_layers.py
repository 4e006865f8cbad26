"""One layer of DeepSeek-V3 in ModelOpt's NVFP4 and one of gpt-oss-120b in MXFP4, from files on all ranks.

Small ones on CPUs, of full size on the GPUs that are there; the files hold random bytes that any reader would take.
What comes out is held to a float64 product of what the files say, dequantized here by ml_dtypes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.weights import GPT_OSS, SwiGLU
from moe_runtime.launch.research.published_layers import (
    PREFIX,
    PUBLISHED,
    LayerSizes,
    write_deepseek_nvfp4,
    write_gpt_oss_mxfp4,
)
from moe_runtime.layer import MoELayer
from moe_runtime.reference import activation_reference, error_bound, relative_error
from tests.support.checkpoint_writers import read_e2m1

TOKENS = 16


def read(folder: Path, names: list[str], expert: int | None = None) -> list[torch.Tensor]:
    """Tensors of the checkpoint, of stacked ones the slice of `expert`."""
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = []
    for name in names:
        with safe_open(folder / files[name], "pt") as file:
            found.append(file.get_tensor(name) if expert is None else file.get_slice(name)[expert])
    return found


def deepseek_expert(folder: Path, expert: int, x: torch.Tensor) -> torch.Tensor:
    """float64 `[T, H]`."""

    def weight(name: str) -> torch.Tensor:
        one = f"{PREFIX}experts.{expert}.{name}_proj.weight"
        quants, scales, second = read(folder, [one, f"{one}_scale", f"{one}_scale_2"])
        factors = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return torch.from_numpy(read_e2m1(quants) * factors.repeat(16, axis=1)) * second.double()

    both = torch.cat([x.double() @ weight(name).T for name in ("gate", "up")], dim=1)
    return activation_reference(both, SwiGLU()) @ weight("down").T


def gpt_oss_expert(folder: Path, expert: int, x: torch.Tensor) -> torch.Tensor:
    """float64 `[T, H]`."""

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        one = f"{PREFIX}experts.{name}"
        blocks, scales, bias = read(folder, [f"{one}_{part}" for part in ("blocks", "scales", "bias")], expert)
        factors = np.exp2(scales.numpy().astype(np.float64) - 127)
        values = read_e2m1(blocks.flatten(1)) * factors.repeat(32, axis=1)
        return rows.double() @ torch.from_numpy(values).T + bias.double()

    return product("down_proj", activation_reference(product("gate_up_proj", x), GPT_OSS))


def run_from_files(rank: int, world: int, folder: str, tokens: str | None, checked: int, seed: int) -> tuple[Any, ...]:
    """Formats, and the first tokens of this rank with their routing and output; in the format `tokens` if not None."""
    given = {} if tokens is None else {"token_format": tokens}
    with ExpertParallelContext(timeout_s=120) as context:
        layer = MoELayer.from_checkpoint(folder, layer=0, context=context, max_tokens_per_rank=TOKENS, **given)
        assert layer.router is not None
        rng = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(TOKENS, layer.config.hidden_size, generator=rng).bfloat16().to(context.device)
        idx, weights = layer.router(x)
        y = layer(x, topk_idx=idx, topk_weights=weights)
        assert y.isfinite().all()
        formats = layer.config.token_format, layer.config.weight_format
        return (formats, *(part[:checked].cpu() for part in (x, idx, weights, y)))


KINDS = {
    "deepseek_v3": (write_deepseek_nvfp4, deepseek_expert, ("nvfp4", "nvfp4"), "bf16"),
    "gpt_oss": (write_gpt_oss_mxfp4, gpt_oss_expert, ("bf16", "mxfp4"), "mxfp8"),
}
"""How a layer is written, what one of its experts gives, the formats of tokens and weights that its files want, and
the other tokens that these weights go with."""

FULL_SIZE = {"deepseek_v3": PUBLISHED["deepseek_v3_nvfp4"][1], "gpt_oss": PUBLISHED["gpt_oss_120b"][1]}
SMALL = {"deepseek_v3": LayerSizes(256, 128, 40, 5), "gpt_oss": LayerSizes(160, 96, 7, 3)}


def check(kind: str, sizes: LayerSizes, checked: int, ranks: Any, folder: Path, seed: int) -> None:
    """With the first `checked` tokens of each rank."""
    writer, expert_output, formats, others = KINDS[kind]
    writer(folder, sizes, seed)
    reference: torch.Tensor | None = None
    # One of the two is bf16, where errors are small beside what any wrong weight would do.
    for tokens in (None, others):
        results = ranks.run(run_from_files, str(folder), tokens, checked, seed, timeout=170)
        token_format, weight_format = tokens or formats[0], formats[1]
        assert {result[0] for result in results} == {(token_format, weight_format)}
        x, idx, weights, y = (torch.cat(parts) for parts in zip(*(result[1:] for result in results), strict=True))
        assert all(len(set(ids.tolist())) == sizes.top_k for ids in idx)
        if reference is None:
            reference = torch.zeros(x.shape, dtype=torch.float64)
            for expert in idx.unique().tolist():
                token, entry = (idx == expert).nonzero(as_tuple=True)
                reference[token] += expert_output(folder, expert, x[token]) * weights[token, entry, None].double()
        error, _ = relative_error(y, reference)
        assert 0 < error <= error_bound(token_format, "bf16")


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", KINDS)
def test_small_ones_on_three_ranks(kind: str, get_pool: Any, tmp_path: Path, seed: int) -> None:
    check(kind, SMALL[kind], TOKENS, get_pool(3), tmp_path, seed)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_full_size_on_all_gpus(kind: str, get_pool: Any, tmp_path: Path, seed: int) -> None:
    if shutil.disk_usage(tmp_path).free < 10 << 30:
        pytest.skip("needs 10 GB of disk")
    check(kind, FULL_SIZE[kind], 1, get_pool(torch.cuda.device_count(), gpus=True), tmp_path, seed)
    shutil.rmtree(tmp_path)
