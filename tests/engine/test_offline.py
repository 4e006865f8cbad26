"""vLLM with the adapter answers as vLLM alone does, on one rank and two, compiled or not; and what it says of itself.

Judged by the mean difference of log-probabilities of prompts. A token may differ where two are nearly as likely, and
wrong experts may leave all tokens as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.comparison import FP8_CONTROL, FP8_LIMIT, NAMES, ON_TWO, cases, difference
from tests.engine.processes import run_llms

EAGER: dict[str, Any] = {"enforce_eager": True}
TWO = EAGER | {"tensor_parallel_size": 2}


@pytest.mark.parametrize("name", NAMES)
def test_one_rank(
    name: str, adapter: tuple[dict[str, Any], str], alone: dict[str, Any], limits: dict[str, float]
) -> None:
    """At most two thirds as far from vLLM alone as with experts whose results are `CONTROL` of what they should be."""
    right = difference(alone[name], adapter[0][name])
    print(f"{name}: {right:.4f}, limit {limits[name]:.4f}")
    assert right <= limits[name]


def test_fp8_blocks(adapter: tuple[dict[str, Any], str], alone: dict[str, Any]) -> None:
    """Against the same weights in bf16, since vLLM has no kernel for them on CPUs. Tokens are rounded to FP8 too."""
    ends = "", f" x {FP8_CONTROL}"
    right, wrong = (difference(alone["qwen3_rounded"], adapter[0][f"qwen3_fp8{end}"]) for end in ends)
    print(f"{right:.4f}, wrong experts {wrong:.4f}")
    assert right <= FP8_LIMIT < wrong


def test_fp8_blocks_in_bf16(folder: Path, models: Path, alone: dict[str, Any], limits: dict[str, float]) -> None:
    """Weights that the settings have converted, where nothing else is rounded."""
    settings = folder / "bf16.yaml"
    settings.write_text("layer: {weight_format: bf16}\n")
    found, log = run_llms(folder, "converted", cases(models, ["qwen3_fp8"], **EAGER), str(settings))
    right = difference(alone["qwen3_rounded"], found["qwen3_fp8"])
    print(f"{right:.4f}, limit {limits['qwen3']:.4f}")
    assert right <= limits["qwen3"]
    assert "weights bf16, tokens bf16" in log


def test_the_log_tells_what_runs(adapter: tuple[dict[str, Any], str]) -> None:
    lines = re.findall(r"moe_runtime: (.*)", adapter[1])
    assert len(lines) == 2 * len(NAMES) + 3
    for line in lines[: len(NAMES)]:
        assert line.startswith("2 of 2 MoE layers taken over: weights bf16, tokens bf16, 1 rank, transport private, ")
    fp8, dense = lines[len(NAMES) : len(NAMES) + 2]
    assert "weights fp8_block, tokens fp8_block" in fp8
    assert re.fullmatch(r"0 of 0 MoE layers of \w+ taken over .it has none.: .*", dense)


def test_two_ranks(folder: Path, models: Path, limits: dict[str, float]) -> None:
    """Tensor and expert parallelism. Without the adapter, expert parallelism crashes on CPUs, so that is without it."""
    alone, _ = run_llms(folder, "two_alone", cases(models, ON_TWO, **TWO))
    found, log = run_llms(folder, "two", cases(models, ON_TWO, **TWO, enable_expert_parallel=True), "1")
    for name in ON_TWO:
        apart = difference(alone[name], found[name])
        print(f"{name}: {apart:.4f}, limit {limits[name]:.4f}")
        assert apart <= limits[name], name
    assert len(
        re.findall(r"moe_runtime: 2 of 2 MoE layers taken over: .*, 2 ranks with experts of their own, ", log)
    ) == len(ON_TWO)


def test_compiled_graphs_are_not_mixed_up(folder: Path, models: Path, limits: dict[str, float]) -> None:
    """torch.compile, vLLM's default, over one cache: alone, with the adapter, alone again."""
    found = [
        run_llms(folder, f"compiled{number}", cases(models, ["qwen3"]), adapter)[0]["qwen3"]
        for number, adapter in enumerate("010")
    ]
    apart = difference(found[0], found[1])
    print(f"compiled: {apart:.4f}, limit {limits['qwen3']:.4f}")
    assert 0 < apart <= limits["qwen3"]
    assert difference(found[0], found[2]) == 0
    kept = folder / "cache" / "torch_compile_cache" / "torch_aot_compile"
    assert len(list(kept.iterdir())) == 2


def test_refusals_are_the_error_that_the_user_sees(folder: Path, models: Path) -> None:
    qwen3 = str(models / "qwen3")
    refused = {
        "--enable-expert-parallel: expected it": TWO,
        "--enable-lora: expected a run without": EAGER | {"enable_lora": True},
        "--dtype: expected bfloat16, got float": EAGER | {"dtype": "float32"},
    }
    jobs = [[complaint, qwen3, arguments, 1] for complaint, arguments in refused.items()]
    found, _ = run_llms(folder, "refused", jobs, "1")
    for complaint, error in found.items():
        assert isinstance(error, str) and f"MOE_RUNTIME_VLLM: {complaint}" in error


def test_an_error_names_what_was_set(folder: Path, models: Path) -> None:
    settings = folder / "tokens.yaml"
    settings.write_text("layer: {token_format: bf16}\n")
    found, _ = run_llms(folder, "set", cases(models, ["qwen3_fp8"], **EAGER), str(settings))
    assert "token_format: expected fp8_block with the fp8_block weights that the engine holds" in found["qwen3_fp8"]
