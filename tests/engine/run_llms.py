"""A program that runs models in vLLM one after another in one process: `python run_llms.py JOB.json`.

The job names a file for results and cases: each has a name, the folder of a model, arguments of `LLM`, and a factor for
what the adapter answers, which a comparison has to notice. Results are by name: the log-probabilities of the tokens of
its prompts, or the error.
"""

from __future__ import annotations

import faulthandler
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPTS = (1, 5, 17, 33, 64, 120, 240)
"""Lengths of the prompts, all of which are in one batch."""
GPU_MEMORY_UTILIZATION = 0.2
"""The share that vLLM asks to be free, since other tests may run there too."""


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(4, 512) for _ in range(length)] for length in PROMPTS]


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """With what the adapter answers in this process multiplied by `factor`."""
    if factor == 1:
        yield
        return
    from moe_runtime.integrations.engine_layers import EngineExperts

    right: Any = EngineExperts.__call__
    EngineExperts.__call__ = lambda *given, **named: right(*given, **named) * factor  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineExperts.__call__ = right  # type: ignore[method-assign]


def run(model: str, arguments: dict[str, Any]) -> list[float]:
    import torch
    from vllm import LLM

    from moe_runtime.launch.research.vllm_speed import ask

    usual: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if torch.cuda.is_available():
        usual["gpu_memory_utilization"] = GPU_MEMORY_UTILIZATION
    llm: Any = LLM(model=model, **usual | arguments)
    _, answers = ask(llm, prompts(), max_tokens=4, prompt_logprobs=1)
    found = [
        step[token].logprob
        for answer in answers
        for token, step in zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
        if step is not None
    ]
    llm.llm_engine.engine_core.shutdown()
    return found


def main(job: dict[str, Any]) -> None:
    results: dict[str, Any] = {}
    for number, (name, model, arguments, factor) in enumerate(job["cases"]):
        # Each engine of the process needs more memory between ranks than the one before.
        usual = {"max_num_batched_tokens": 512 + 64 * number}
        try:
            with scaled(factor):
                results[name] = run(model, usual | arguments)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    Path(job["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    # Where it waits, if it has to be killed.
    faulthandler.dump_traceback_later(90, repeat=True)
    main(json.loads(Path(sys.argv[1]).read_text()))
