"""What is asked of a whole engine of vLLM: its version, its options, and the key of its compile cache.

`install` replaces two methods of vLLM. `EngineArgs.create_engine_config` runs in the process that the user started, so
what it refuses is the last error that the user sees. `VllmConfig.compute_hash` is part of every key under which vLLM
keeps compiled graphs, which differ by what the adapter takes over.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import moe_runtime
from moe_runtime.integrations import VLLM_VARIABLE
from moe_runtime.integrations.layer_settings import LayerSettings
from moe_runtime.kernels.formats.number_formats import ceil_div

VERSIONS = (0, 29), (0, 33)
"""The first and the last version of vLLM whose names `tests/models/test_engine_signatures.py` finds."""

LOG = logging.getLogger("vllm.plugins.moe_runtime")
"""Below vLLM's own, so that its messages are shown as vLLM's are."""

LEAST_BUCKET = 8
EAGER_STEP = 4
"""From one token bucket to the next where vLLM captures no graphs."""
SHARDED_FORMATS = ("sharded_state", "runai_streamer_sharded")
"""Of files that a worker wrote after its kernels had reordered weights, such as gate and up, often in equal shapes."""
COPIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""vLLM's list of variables that its workers under Ray get beside those with known beginnings."""


def check_version(version: str) -> None:
    """Raise `ValueError` naming `version`, of vLLM, where the adapter does not know it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = (".".join(map(str, each)) for each in VERSIONS)
    if found is None or not VERSIONS[0] <= (int(found[1]), int(found[2])) <= VERSIONS[1]:
        raise ValueError(f"vLLM: expected a version from {first} to {last}, got {version} (docs/engines.md)")


def refusals(config: Any) -> Iterator[str]:
    """The options of vLLM's `VllmConfig` that the adapter has no way to run, and what was expected."""
    parallel = config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if ranks > 1 and not parallel.enable_expert_parallel:
        yield "--enable-expert-parallel: expected it, since experts are not split"
    if parallel.prefill_context_parallel_size > 1:
        yield "--prefill-context-parallel-size: expected 1"
    if parallel.enable_eplb:
        yield (
            "--enable-eplb: expected a run without, since experts stay on the ranks where vLLM loads them; replicas of "
            "hot experts need layers of moe_runtime's own (docs/placement.md)"
        )
    if parallel.expert_placement_strategy != "linear":
        got = parallel.expert_placement_strategy
        yield f"--expert-placement-strategy: expected linear, the placement of the layers here, got {got}"
    if config.offload_config.uva.cpu_offload_gb or config.offload_config.prefetch.offload_group_size:
        yield "--cpu-offload-gb, --offload-group-size: expected 0, since experts that are taken over stay on the GPU"
    if parallel.use_ubatching:
        yield "--enable-dbo, --ubatch-size: expected a run without, since one thread at a time is in a step"
    load_format = config.load_config.load_format
    if load_format == "tensorizer":
        yield "--load-format: expected one with which vLLM processes weights after loading them, got tensorizer"
    elif load_format in SHARDED_FORMATS:
        yield f"--load-format: expected one of weights that no kernel of vLLM has reordered, got {load_format}"
    if config.lora_config is not None:
        yield "--enable-lora: expected a run without"
    if str(config.model_config.dtype) != "torch.bfloat16":
        yield f"--dtype: expected bfloat16, got {str(config.model_config.dtype).removeprefix('torch.')}"


def has_zero_experts(config: Any) -> bool:
    """Whether the model of vLLM's `VllmConfig` has experts that compute nothing, beside others."""
    model = getattr(config, "model_config", None)
    return getattr(getattr(model, "hf_text_config", None), "zero_expert_type", None) is not None


def check_config(config: Any) -> bool:
    """Whether the model has experts. Raises `ValueError` naming each of the `refusals` of one that has."""
    if config.model_config is None or not config.model_config.is_moe:
        return False
    if found := list(refusals(config)):
        raise ValueError(f"{VLLM_VARIABLE}: {'; '.join(found)}")
    return True


def cache_key(settings: LayerSettings) -> str:
    """Equal for equal settings of one version of this package."""
    routes = None if settings.routes is None else settings.routes.model_dump()
    stated = {"parallel": settings.parallel.model_dump(), "fields": dict(settings.fields), "routes": routes}
    return f"moe_runtime {moe_runtime.__version__} {json.dumps(stated, sort_keys=True, default=str)}"


def captured_sizes(config: Any) -> tuple[int, ...]:
    """Of the graphs of vLLM's `VllmConfig`: with speculation, whole drafts with the token before them."""
    speculative = config.speculative_config
    draft = 1 if speculative is None else 1 + (speculative.num_speculative_tokens or 0)
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    return tuple(sorted({ceil_div(size, draft) * draft for size in sizes}))


def buckets_of(capture_sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Token buckets for the sizes of which vLLM captures graphs, each at least twice the one before, and the largest.

    Without graphs each has four times the one before, below `most` tokens. Every bucket takes time to warm up.

    >>> buckets_of([1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72], 512), buckets_of([1, 2, 4], 512), buckets_of([], 512)
    ((8, 16, 32, 64, 72), (4,), (8, 32, 128))
    """
    sizes, kept, size = sorted(capture_sizes), list[int](), LEAST_BUCKET
    while not sizes and size < most:
        kept.append(size)
        size *= EAGER_STEP
    for size in sizes:
        if size >= max(LEAST_BUCKET, 2 * (kept[-1] if kept else 0)):
            kept.append(size)
    return tuple(dict.fromkeys([*kept, *sizes[-1:]]))


def install(settings: LayerSettings) -> None:
    """Have vLLM refuse in this process what the adapter cannot run, and keep the graphs of these settings apart.

    Raises `ImportError` or `AttributeError` where vLLM has not what is replaced.
    """
    key = cache_key(settings)
    copied = [name for name in os.environ.get(COPIED_BY_RAY, "").split(",") if name]
    os.environ[COPIED_BY_RAY] = ",".join(dict.fromkeys([*copied, VLLM_VARIABLE]))

    def hash_with_settings(compute_hash: Any) -> Any:
        def compute(self: Any, *given: Any, **named: Any) -> str:
            own = str(compute_hash(self, *given, **named))
            return hashlib.sha256(f"{own} {key}".encode()).hexdigest()[: len(own)]

        return compute

    def create_checked(create: Any) -> Any:
        def checked(self: Any, *given: Any, **named: Any) -> Any:
            config = create(self, *given, **named)
            if check_config(config):
                LOG.info("%s: MoE layers will run in %s", VLLM_VARIABLE, key)
            return config

        return checked

    replace_method(import_module("vllm.config").VllmConfig, "compute_hash", hash_with_settings)
    replace_method(import_module("vllm.engine.arg_utils").EngineArgs, "create_engine_config", create_checked)


def replace_method(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace `name` of a class or module of vLLM by what `wrap` makes of it, not of an earlier replacement."""
    method = getattr(owner, name)
    original = getattr(method, "moe_runtime_original", method)
    ours: Any = functools.wraps(original)(wrap(original))
    ours.moe_runtime_original = original
    setattr(owner, name, ours)
