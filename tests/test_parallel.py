"""Expert-parallel models of every family against transformers' own: logits, generation, agreement, wrong use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.config import ParallelConfig
from moe_runtime.parallel import ExpertParallel, apply_expert_parallel
from moe_runtime.reference import error_bound

pytest.importorskip("transformers")

from tests import parallel_models, tiny_models

pytestmark = pytest.mark.cpu_only

FAMILIES = sorted(tiny_models.CLASSES)
SHAPES = [(2, 9), (1, 1), (3, 5), (1, 20)]
"""Batch and sequence of each rank."""
BLOCKS_OF_128: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}


def prompts(seed: int, world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, shape, generator=generator) for shape in SHAPES[:world]]


def save(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    if "moe_intermediate_size" in changes and family in ("mixtral", "gpt_oss"):
        changes = {**changes, "intermediate_size": changes["moe_intermediate_size"]}
    tiny_models.tiny_model(family, seed, **changes).bfloat16().save_pretrained(folder)
    return folder


def spread(path: Path, **settings: Any) -> tuple[Any, ExpertParallel]:
    """The saved model with its experts spread over the ranks of this pool."""
    model = parallel_models.load(path)
    limits = ParallelConfig(timeout_s=20.0, startup_timeout_s=30.0)
    return model, apply_expert_parallel(model, **({"max_tokens_per_rank": 32, "parallel": limits} | settings))


def logits_of_rank(rank: int, world: int, path: Path, ids: list[Any], routes: list[Any], settings: Any) -> Any:
    model, parallel = spread(path, **settings)
    with parallel:
        return parallel_models.logits_with(model, ids[rank], routes[rank])


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Relative error in the Frobenius norm over all ranks."""
    a, b = (torch.cat([x.double().flatten() for x in parts]) for parts in (found, exact))
    return ((a - b).norm() / b.norm()).item()


def check_logits(pool: Any, folder: Path, ids: list[torch.Tensor], fmt: str, weight_fmt: str) -> None:
    """Our error against float64 with the weights as quantized: the original's, and what the formats may add.

    What they add to the output of a layer's experts is bounded by `error_bound` (the weights being exact); what
    that comes to in the logits is found by disturbing the float64 model's layers by as much.
    """
    own = [parallel_models.record_routes(parallel_models.load(folder), x) for x in ids]
    routes = [route for _, route in own]
    settings = {"token_format": fmt, "weight_format": weight_fmt}
    found = pool.run(logits_of_rank, folder, ids, routes, settings, timeout=120.0)
    theirs, exact_model = parallel_models.load(folder), parallel_models.load(folder, torch.float64)
    parallel_models.dequantize_experts(theirs, weight_fmt)
    parallel_models.dequantize_experts(exact_model, weight_fmt)
    exact = [parallel_models.logits_with(exact_model, x, r) for x, r in zip(ids, routes, strict=True)]
    own_error = error([parallel_models.logits_with(theirs, x, r) for x, r in zip(ids, routes, strict=True)], exact)
    bound = error_bound(fmt, "bf16")
    disturbed = [parallel_models.logits_with(exact_model, x, r, bound) for x, r in zip(ids, routes, strict=True)]
    allowed = own_error + error(disturbed, exact)
    print(f"ours {error(found, exact):.3e}, theirs {own_error:.3e}, allowed {allowed:.3e}")
    assert error(found, exact) <= allowed


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, world: int, get_pool: Any, tmp_path: Path, seed: int) -> None:
    folder = save(tmp_path, family, seed)
    check_logits(get_pool(world), folder, prompts(seed, world), "bf16", "bf16")


@pytest.mark.parametrize(
    ("family", "fmt", "weight_fmt"),
    [(family, "nvfp4", "nvfp4") for family in FAMILIES]
    + [("gpt_oss", "bf16", "nvfp4"), ("deepseek_v3", "fp8_block", "fp8_block"), ("qwen3_moe", "mxfp8", "mxfp8")],
)
def test_logits_of_quantized_models(
    family: str, fmt: str, weight_fmt: str, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    folder = save(tmp_path, family, seed, **BLOCKS_OF_128)
    check_logits(get_pool(2), folder, prompts(seed, 2), fmt, weight_fmt)
