"""The models of these tests, and how far two runs of one are apart."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ASKED = os.environ.get("ENGINE_TEST_MODELS", "qwen3,glm4,gpt_oss,deepseek_v3").split(",")
"""Fewer where a build of vLLM has no kernel for the attention of one. qwen3 is always needed."""
NAMES = tuple(name for name in ("qwen3", "glm4", "gpt_oss", "deepseek_v3") if name in ASKED)
ON_TWO = tuple(name for name in ("qwen3", "deepseek_v3") if name in ASKED)
"""Those that run on two ranks too: without and with a shared expert."""

HAS_AVX512 = "avx512" in Path("/proc/cpuinfo").read_text()
CONTROL, FP8_CONTROL = 0.96 if torch.cuda.is_available() else 0.98 if HAS_AVX512 else 0.95, 0.7
"""Factors of results of the experts that comparisons must notice.

On GPUs vLLM itself differs more than on CPUs: on H200s by 0.037 between eager and compiled mode, and by 0.020 between
one GPU and two, where the adapter differed from it by 0.012. On a CPU without AVX-512 it has other kernels, and the
adapter differed from it by 0.012 to 0.019, where experts times 0.98 did by 0.016 to 0.021.
"""

FP8_LIMIT = 0.1
"""The most by which a model may differ whose tokens are rounded to FP8: 0.066 were seen."""


def cases(models: Path, names: Sequence[str], *, factor: float = 1, **arguments: Any) -> list[Any]:
    """For `run_llms`, with these arguments of `LLM`. With another `factor` it is part of a case's name."""
    named = "" if factor == 1 else f" x {factor}"
    return [[name + named, str(models / name), arguments, factor] for name in names]


def difference(first: Any, other: Any) -> float:
    """Mean difference of log-probabilities of the same tokens; what failed is an error here."""
    assert isinstance(first, list) and isinstance(other, list), (first, other)
    assert len(first) > 400
    return statistics.mean(abs(a - b) for a, b in zip(first, other, strict=True))
