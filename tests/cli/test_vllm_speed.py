"""`research.vllm_speed` without vLLM: models that are written, sums over a trace, wrong options."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.research import vllm_speed
from moe_runtime.launch.research.vllm_models import FORMATS, SIZES, ModelSizes, write_model
from moe_runtime.layer import MoELayer

pytestmark = pytest.mark.cpu_only

GPT_OSS = ModelSizes("gpt_oss", 256, 128, 8, 2, 2, 4, 2, 64)


@pytest.mark.parametrize(
    ("sizes", "fmt"),
    [(SIZES["qwen3_tiny"], fmt) for fmt in FORMATS["qwen3"]] + [(GPT_OSS, fmt) for fmt in FORMATS["gpt_oss"]],
)
def test_models_are_checkpoints(sizes: ModelSizes, fmt: str, tmp_path: Path) -> None:
    """Every layer can be read, in the format of its experts."""
    write_model(tmp_path, sizes, fmt)
    with ExpertParallelContext(transport="private") as context:
        for layer in range(sizes.layers):
            made = MoELayer.from_checkpoint(tmp_path, layer=layer, context=context, max_tokens_per_rank=8)
            assert made.config.weight_format == {"fp8": "fp8_block"}.get(fmt, fmt)
            assert made.config.num_experts == sizes.experts and made.config.hidden_size == sizes.hidden


def test_sizes_are_those_of_published_models() -> None:
    assert {kind for sizes in SIZES.values() for kind in [sizes.kind]} == set(FORMATS)
    assert replace(SIZES["gpt_oss_120b"], experts=32, layers=24) == SIZES["gpt_oss_20b"]
    with pytest.raises(ValueError, match="--format: expected mxfp4 for gpt_oss, got bf16"):
        write_model(Path("nowhere"), SIZES["gpt_oss_20b"], "bf16")


def test_times_of_a_profile(tmp_path: Path) -> None:
    ours = vllm_speed.own_kernels()
    for name in ("tma_gemm", "dequant_few", "one_rank_dispatch", "dispatch_send", "_grouped_gemm_kernel"):
        assert ours.fullmatch(name), name
    assert not ours.search("__launch_bounds__") and not ours.search("fused_moe_kernel")
    steps = vllm_speed.PROFILED_STEPS
    events = [
        {"cat": "kernel", "name": name, "ts": 20.0 * step + begin, "dur": us}
        for step in range(steps)
        for name, begin, us in (
            ("fused_moe_kernel", 0.0, 3.0),
            ("fused_moe_kernel", 2.0, 3.0),  # Begins before the first one has ended.
            ("flash_fwd", 4.0, 5.0),
            ("nvjet_tst", 12.0, 1.0),
        )
    ]
    events.append({"cat": "cpu_op", "name": "fused_moe_kernel", "ts": 0.0, "dur": 100.0})
    with gzip.open(tmp_path / "rank0.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    (tmp_path / "small.json").write_text('{"traceEvents": []}')
    found = vllm_speed.kernel_times(tmp_path, ours, steps)
    assert (found["gpu_us"], found["experts_us"]) == (10.0, 5.0)
    assert found["kernels"][0] == {"name": "fused_moe_kernel", "kind": "experts", "us": 6.0, "launches": 2.0}
    assert vllm_speed.kernel_times(tmp_path / "none", ours, 1) == {"error": "no trace was written"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cases", "alone"], "--cases: expected names such as alone1 and adapter2, got 'alone'"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--json", "no_folder/x.json"], "--json: no folder no_folder"),
    ],
)
def test_wrong_options(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_speed.main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_what_is_kept_of_a_log_names_no_folder() -> None:
    line = "Using default MoE config at 9.5 tokens/s. No file /opt/of/one.machine/configs/E=64,N=768.json, see https://a.b/c"
    kept = line.replace("/opt/of/one.machine/configs/", "")
    assert vllm_speed.without_folders(line) == kept
