"""`kernel_bench models`: a layer of the sizes of published models in every pair of formats, beside torch, on one GPU.

It looks for sizes, formats and numbers of tokens at which a layer is slower than plain torch, or far from the least
time that its bytes and operations take. All experts of a layer are on one rank. Every row is checked as `bench layer`
checks it, and timed on the same inputs. On a CPU, or with `--small`, sizes are small and times mean little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.testing import get_dram_gbps

from moe_runtime.config import ActivationConfig, MoELayerConfig, ParallelConfig, RunConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS, token_formats_for, weight_format_named
from moe_runtime.kernels.gemm.grouped_gemm import gemm_flops
from moe_runtime.kernels.runtime import Engine
from moe_runtime.launch.benchmarks import layer_operations
from moe_runtime.launch.benchmarks.checks import format_bytes
from moe_runtime.launch.benchmarks.layer_bench import Baselines, Bench, Settings
from moe_runtime.launch.benchmarks.layer_report import OURS
from moe_runtime.launch.benchmarks.timing import measure_steps
from moe_runtime.launch.common import environment
from moe_runtime.launch.kernel_bench.ceilings import Ceilings
from moe_runtime.launch.kernel_bench.options import chosen_cases
from moe_runtime.layer import MoELayer
from moe_runtime.support.progress import with_progress

KIND = "models"
"""`kind` of the JSON."""

TOKENS = (1, 8, 32, 128, 512, 1024, 4096)
"""Tokens of a step when the command line names none."""

ROUTING = "uniform"

IN_FP8 = " in fp8"
"""Behind the format of FP4 weights that are multiplied in FP8 (`fp4_multiplied_in`)."""

PAIRS = (
    *((weights, tokens) for weights in WEIGHT_FORMATS for tokens in token_formats_for(weights)),
    *((weights + IN_FP8, "fp8_block") for weights in ("nvfp4", "mxfp4")),
)
"""`(weight_format, token_format)` that a layer accepts."""


@dataclass(frozen=True)
class Model:
    """The sizes of one MoE layer; `gpt_oss` has its biases and its clamped, interleaved SwiGLU."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gpt_oss: bool = False

    def config(self, weights: str, tokens: str, max_tokens: int) -> MoELayerConfig:
        """The layer in these formats. Raises `ValueError` where the sizes do not fit them."""
        return MoELayerConfig.model_validate(
            {
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_experts": self.experts,
                "top_k": self.top_k,
                "max_tokens_per_rank": max_tokens,
                "weight_format": weights.removesuffix(IN_FP8),
                "fp4_multiplied_in": "fp8" if weights.endswith(IN_FP8) else "bf16",
                "token_format": tokens,
                "expert_bias": self.gpt_oss,
                "activation": ActivationConfig(order="interleaved", alpha=1.702, limit=7.0, up_offset=1.0)
                if self.gpt_oss
                else ActivationConfig(),
            }
        )


MODELS = (
    Model("gpt-oss-20b", 2880, 2880, 32, 4, gpt_oss=True),
    Model("gpt-oss-120b", 2880, 2880, 128, 4, gpt_oss=True),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("Qwen3-235B-A22B", 4096, 1536, 128, 8),
    Model("Mixtral-8x7B", 4096, 14336, 8, 2),
    Model("GLM-4.5", 5120, 1536, 160, 8),
    Model("MiniMax-M2", 3072, 1536, 256, 8),
    Model("odd sizes", 2688, 1856, 128, 6),
    Model("DeepSeek-V3", 7168, 2048, 256, 8),
    Model("Kimi-K2", 7168, 2048, 384, 8),
)
"""Published sizes, and those of Nemotron 3 Nano, which are no multiples of 128 (here with a gate). The two that take
longest are last."""


def cases() -> Iterator[tuple[Model, str, str]]:
    """Every model in every pair of formats."""
    return ((model, weights, tokens) for model in MODELS for weights, tokens in PAIRS)


def name_of(model: Model, weights: str, tokens: str) -> str:
    """What `--cases` selects by: `DeepSeek-V3 nvfp4 x bf16`, weights first."""
    return f"{model.name} {weights} x {tokens}"


def measured_ceilings(context: ExpertParallelContext, iterations: int) -> Ceilings:
    """Those of this GPU; GEMMs are timed as everything else is, on random data."""
    device, size = context.device, 8192
    if device.type != "cuda":
        return Ceilings()
    rng = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, size, size, generator=rng, device=device).to(torch.bfloat16)
    out, one = torch.empty_like(x[0]), torch.ones((), device=device)
    q = x.to(torch.float8_e4m3fn)

    def microseconds(step: Callable[[int], object]) -> float:
        return measure_steps(context, step, iterations=iterations).median_us

    flops = 2 * size**3
    return Ceilings(
        memory_tb_per_s=get_dram_gbps(device.index) * 1e-3,
        bf16_tflop_per_s=flops / microseconds(lambda _: torch.mm(x[0], x[1], out=out)) * 1e-6,
        fp8_tflop_per_s=flops
        / microseconds(lambda _: torch._scaled_mm(q[0], q[1].T, one, one, out_dtype=torch.bfloat16))
        * 1e-6,
    )


def least_work(bench: Bench) -> tuple[float, float]:
    """`(bytes, flops)` of a step, on average over the turns: weights of the experts that have rows, tokens, results."""
    config = bench.layer.config
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = weight_format_named(config.weight_format)
    expert_bytes = 2 * inner * format_bytes(weights, hidden) + hidden * format_bytes(weights, inner)
    ids = [turn[0] for turn in bench.ids_of_turns]
    active = statistics.mean(len(set(idx.flatten().tolist()) - {-1}) for idx in ids)
    rows = statistics.mean(int((idx >= 0).sum()) for idx in ids)
    moved = active * expert_bytes + 2 * 2 * hidden * config.max_tokens_per_rank
    return moved, rows * gemm_flops(1, 3 * inner, hidden)


def run_model(
    model: Model, pairs: list[tuple[str, str]], tokens: list[int], engine: Engine, iterations: int, ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """A record per pair and number of tokens. torch's layer, which has no formats, is timed with the first pair."""
    baselines: Baselines | None = None
    torch_layers: dict[int, dict[str, Any]] = {}
    # Made once for all pairs with this format of weights, which come one after another.
    experts: Experts | None = None
    made = ""
    for pair in pairs:
        about = {"model": model.name, "weight_format": pair[0], "token_format": pair[1]}
        try:
            config = model.config(*pair, max(tokens))
        except ValueError as error:
            yield about | {"refused": environment.one_line(error)}
            continue
        run = RunConfig(layer=config, parallel=ParallelConfig(engine=engine), seed=0)
        baselines = baselines or Baselines(run)
        with ExpertParallelContext(engine=engine) as context:
            if experts is None or made != pair[0]:
                experts = None  # before others come
                gc.collect()  # The largest models leave no room for what is garbage and still there.
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                experts, made = MoELayer.from_run_config(run, context).experts, pair[0]
            assert experts is not None
            experts = replace(
                experts, intermediate_format=config.intermediate_format, intermediate_gsf=config.intermediate_gsf
            )
            layers = [MoELayer(config.replace(max_tokens_per_rank=count), context) for count in tokens]
            for count, layer in zip(tokens, layers, strict=True):
                layer.experts = experts
                settings = Settings(["layer"], iterations, with_torch=count not in torch_layers, sustained=False)
                bench = Bench(layer, run, ROUTING, settings, baselines)
                layer_operations.whole_layer(bench)
                results = {result["implementation"]: result for result in bench.results}
                ours = results.pop(OURS)
                for baseline in results.values():
                    torch_layers[count] = baseline
                multiplied = config.multiplied_format, config.token_format
                yield about | _record(ours, torch_layers[count], *least_work(bench), multiplied, ceilings)
        del context, layers, layer, bench


def _record(
    ours: dict[str, Any],
    torch_layer: dict[str, Any],
    moved_bytes: float,
    flops: float,
    multiplied: tuple[str, str],
    ceilings: Ceilings,
) -> dict[str, Any]:
    """A row: times, checks, and the time as a multiple of torch's and of its floor.

    `multiplied` are the formats of weights and tokens in the tensor cores.
    """
    floor_us, bound_by = ceilings.floor_us(multiplied, moved_bytes, flops)
    median_us, torch_us = ours["median_us"], torch_layer["median_us"]
    return {
        "tokens": ours["tokens_per_rank"],
        **{key: ours[key] for key in ("median_us", "smallest_us", "largest_us", "check")},
        "torch_us": torch_us,
        "torch_check": torch_layer["check"],
        "ratio_to_torch": median_us / torch_us if median_us and torch_us else None,
        "moved_bytes": moved_bytes,
        "work_flop": flops,
        "floor_us": floor_us,
        "bound_by": bound_by,
        "times_floor": median_us / floor_us if median_us and floor_us else None,
    }


def select(pattern: str | None) -> dict[Model, list[tuple[str, str]]]:
    """Pairs of the models in whose names the regular expression is found. Raises `ValueError` where there is none."""
    chosen = chosen_cases([name_of(*case) for case in cases()], pattern)
    found: dict[Model, list[tuple[str, str]]] = {}
    for model, weights, tokens in cases():
        if name_of(model, weights, tokens) in chosen:
            found.setdefault(model, []).append((weights, tokens))
    return found


def small(model: Model) -> Model:
    """The same kind of layer in a size for CPUs."""
    hidden, inner = 288 if model.hidden % 128 else 256, 160 if model.intermediate % 128 else 128
    return replace(model, hidden=hidden, intermediate=inner, experts=min(model.experts, 8), top_k=min(model.top_k, 2))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Check and time with `cases`, `tokens`, `small`, `json`, `engine` and `steps` of the command line; the report."""
    chosen = select(options.cases)
    environment.check_at_least(1, steps=options.steps)
    tokens = options.tokens or list(TOKENS)
    environment.check_at_least(1, tokens=min(tokens))
    with ExpertParallelContext(engine=options.engine or "auto") as context:
        if options.small or context.device.type != "cuda":
            chosen = {small(model): pairs for model, pairs in chosen.items()}
        record, results = environment.environment_record(context), list[dict[str, Any]]()
        engine, ceilings = context.engine, measured_ceilings(context, options.steps)
    gc.freeze()  # whoever captures a graph collects garbage, and need not look at what is there by now
    for model, pairs in with_progress(chosen.items(), "kernel_bench models", len(chosen)):
        for result in run_model(model, pairs, tokens, engine, options.steps, ceilings):
            results.append(result)
            checks = [result.get(key) for result in results for key in ("check", "torch_check")]
            report = {
                "kind": KIND,
                "environment": record,
                "ceilings": vars(ceilings),
                "passed": all(check["passed"] for check in checks if check is not None),
                "results": results,
            }
            if options.json is not None:
                # After each row, so that an interrupted run leaves what it has.
                environment.write_json(options.json, report)
    return report
