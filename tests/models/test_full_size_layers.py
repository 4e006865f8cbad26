"""One layer of DeepSeek-V3 in ModelOpt's NVFP4 and one of gpt-oss-120b in MXFP4, from files on all ranks.

Small ones on CPUs, of full size on the GPUs that are there; the files hold random bytes that any reader would take.
What comes out is held to a float64 product of what the files say, dequantized here by ml_dtypes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.weights import GPT_OSS, SwiGLU
from moe_runtime.layer import MoELayer
from moe_runtime.reference import activation_reference, error_bound, relative_error
from tests.support.checkpoint_writers import read_e2m1

EXPERTS_PER_FILE = 32
TOKENS = 16
PREFIX = "model.layers.0.mlp."

Sizes = tuple[int, int, int, int]
"""Hidden and intermediate size, experts, experts of a token."""


def random_bytes(shape: tuple[int, ...], first: int, last: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(first, last + 1, shape, dtype=torch.uint8, generator=rng)


def write(folder: Path, parts: Iterator[dict[str, torch.Tensor]], config: dict[str, Any]) -> None:
    """Files of one part each, their index and the config."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **config}))


def write_deepseek(folder: Path, sizes: Sizes, rng: torch.Generator) -> None:
    hidden, inner, experts, top_k = sizes

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        yield {
            f"{PREFIX}gate.weight": (torch.randn(experts, hidden, generator=rng) * hidden**-0.5).bfloat16(),
            f"{PREFIX}gate.e_score_correction_bias": torch.randn(experts, generator=rng) * 0.01,
        }
        for first in range(0, experts, EXPERTS_PER_FILE):
            tensors: dict[str, torch.Tensor] = {}
            for expert in range(first, min(first + EXPERTS_PER_FILE, experts)):
                for name, n, k in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                    one = f"{PREFIX}experts.{expert}.{name}_proj."
                    tensors[one + "weight"] = random_bytes((n, k // 2), 0, 255, rng)
                    # 2^-3 to 15; with the second scale, sums over K are near one.
                    scales = random_bytes((n, k // 16), 0x20, 0x57, rng)
                    tensors[one + "weight_scale"] = scales.view(torch.float8_e4m3fn)
                    tensors[one + "weight_scale_2"] = torch.tensor(2.0**-4 * k**-0.5)
                    # The intermediate, a product of two numbers near one, passes 8 now and then, but never 64.
                    tensors[one + "input_scale"] = torch.tensor(64.0 / 2688)
            yield tensors

    config = {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "n_shared_experts": 0,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    }
    write(folder, parts(), config)


def write_gpt_oss(folder: Path, sizes: Sizes, rng: torch.Generator) -> None:
    hidden, inner, experts, top_k = sizes

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        tensors = {
            f"{PREFIX}router.weight": (torch.randn(experts, hidden, generator=rng) * hidden**-0.5).bfloat16(),
            f"{PREFIX}router.bias": (torch.randn(experts, generator=rng) * 0.1).bfloat16(),
        }
        for name, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            one = f"{PREFIX}experts.{name}"
            tensors[f"{one}_blocks"] = random_bytes((experts, n, k // 32, 16), 0, 255, rng)
            tensors[f"{one}_scales"] = random_bytes((experts, n, k // 32), 118, 121, rng)
            tensors[f"{one}_bias"] = (torch.randn(experts, n, generator=rng) * 0.1).bfloat16()
        yield tensors

    config = {
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    write(folder, parts(), config)


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
    "deepseek_v3": (write_deepseek, deepseek_expert, ("nvfp4", "nvfp4"), "bf16"),
    "gpt_oss": (write_gpt_oss, gpt_oss_expert, ("bf16", "mxfp4"), "mxfp8"),
}
"""How a layer is written, what one of its experts gives, the formats of tokens and weights that its files want, and
the other tokens that these weights go with."""

FULL_SIZE: dict[str, Sizes] = {"deepseek_v3": (7168, 2048, 256, 8), "gpt_oss": (2880, 2880, 128, 4)}
SMALL: dict[str, Sizes] = {"deepseek_v3": (256, 128, 40, 5), "gpt_oss": (160, 96, 7, 3)}


def check(kind: str, sizes: Sizes, checked: int, ranks: Any, folder: Path, seed: int) -> None:
    """With the first `checked` tokens of each rank."""
    writer, expert_output, formats, others = KINDS[kind]
    writer(folder, sizes, torch.Generator().manual_seed(seed))
    reference: torch.Tensor | None = None
    # One of the two is bf16, where errors are small beside what any wrong weight would do.
    for tokens in (None, others):
        results = ranks.run(run_from_files, str(folder), tokens, checked, seed, timeout=170)
        token_format, weight_format = tokens or formats[0], formats[1]
        assert {result[0] for result in results} == {(token_format, weight_format)}
        x, idx, weights, y = (torch.cat(parts) for parts in zip(*(result[1:] for result in results), strict=True))
        assert all(len(set(ids.tolist())) == sizes[3] for ids in idx)
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
