"""Writes a checkpoint of one MoE layer at a published size and in its makers' layout, filled with random quants.

`python -m moe_runtime.launch.research.published_layers NAME FOLDER` does, and `check_model FOLDER --layer 0` checks it.
Every byte is one that a reader must take, and scales keep gates and outputs near one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_runtime.launch.common import environment

EXPERTS_PER_FILE = 32
PREFIX = "model.layers.0.mlp."
"""Of the names of the tensors."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer; experts of a token are `top_k`."""

    hidden: int
    inner: int
    experts: int
    top_k: int


def write_deepseek_nvfp4(folder: Path, sizes: LayerSizes, seed: int) -> None:
    """DeepSeek-V3 in ModelOpt's NVFP4: linears of each expert, with second-level and input scales."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inner = sizes.hidden, sizes.inner

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        yield {
            f"{PREFIX}gate.weight": (torch.randn(sizes.experts, hidden, generator=rng) * hidden**-0.5).bfloat16(),
            f"{PREFIX}gate.e_score_correction_bias": torch.randn(sizes.experts, generator=rng) * 0.01,
        }
        for first in range(0, sizes.experts, EXPERTS_PER_FILE):
            tensors: dict[str, torch.Tensor] = {}
            for expert in range(first, min(first + EXPERTS_PER_FILE, sizes.experts)):
                for name, n, k in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                    one = f"{PREFIX}experts.{expert}.{name}_proj."
                    tensors[one + "weight"] = _random_bytes((n, k // 2), 0, 255, rng)
                    # 2^-3 to 15; with the second scale, sums over K are near one.
                    scales = _random_bytes((n, k // 16), 0x20, 0x57, rng)
                    tensors[one + "weight_scale"] = scales.view(torch.float8_e4m3fn)
                    tensors[one + "weight_scale_2"] = torch.tensor(2.0**-4 * k**-0.5)
                    # The intermediate, a product of two numbers near one, passes 8 now and then, but never 64.
                    tensors[one + "input_scale"] = torch.tensor(64.0 / 2688)
            yield tensors

    config = {
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "n_routed_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "n_shared_experts": 0,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    }
    _write(folder, parts(), config)


def write_gpt_oss_mxfp4(folder: Path, sizes: LayerSizes, seed: int) -> None:
    """gpt-oss in MXFP4: stacked blocks and scales, with biases."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inner, experts = sizes.hidden, sizes.inner, sizes.experts

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        tensors = {
            f"{PREFIX}router.weight": (torch.randn(experts, hidden, generator=rng) * hidden**-0.5).bfloat16(),
            f"{PREFIX}router.bias": (torch.randn(experts, generator=rng) * 0.1).bfloat16(),
        }
        for name, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            one = f"{PREFIX}experts.{name}"
            tensors[f"{one}_blocks"] = _random_bytes((experts, n, k // 32, 16), 0, 255, rng)
            tensors[f"{one}_scales"] = _random_bytes((experts, n, k // 32), 118, 121, rng)
            tensors[f"{one}_bias"] = (torch.randn(experts, n, generator=rng) * 0.1).bfloat16()
        yield tensors

    config = {
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": sizes.top_k,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    _write(folder, parts(), config)


LayerWriter = Callable[[Path, LayerSizes, int], None]
"""Writes a folder, from a seed."""

PUBLISHED: dict[str, tuple[LayerWriter, LayerSizes]] = {
    "gpt_oss_20b": (write_gpt_oss_mxfp4, LayerSizes(2880, 2880, 32, 4)),
    "gpt_oss_120b": (write_gpt_oss_mxfp4, LayerSizes(2880, 2880, 128, 4)),
    "deepseek_v3_nvfp4": (write_deepseek_nvfp4, LayerSizes(7168, 2048, 256, 8)),
}
"""How a layer of a published checkpoint is written, and its sizes."""


def _random_bytes(shape: tuple[int, ...], first: int, last: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(first, last + 1, shape, dtype=torch.uint8, generator=rng)


def _write(folder: Path, parts: Iterator[dict[str, torch.Tensor]], config: dict[str, Any]) -> None:
    """Files of one part each, their index and the config, which is last."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, **config}))


def work(options: argparse.Namespace) -> int:
    """Write a layer of `PUBLISHED` to a folder that is empty or not there; 0."""
    folder: Path = options.folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"FOLDER: expected an empty folder or none, {folder} has files")
    folder.mkdir(parents=True, exist_ok=True)
    writer, sizes = PUBLISHED[options.name]
    writer(folder, sizes, options.seed)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    program = "python -m moe_runtime.launch.research.published_layers"
    parser = argparse.ArgumentParser(prog=program, description="Write a random layer of a published size.")
    parser.add_argument("name", choices=PUBLISHED, metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="empty, or not there yet")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    return environment.run_parsed("published_layers", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
