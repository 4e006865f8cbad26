"""A program that runs models in SGLang one after another: `python run_sglang.py JOB.json`, a job as for `run_llms.py`.

Imports take a quarter of a minute, so they are made once. Each case is a process that is forked from there, and so are
all processes of its engine.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.engine.run_llms import prompts, scaled


def run(model: str, arguments: dict[str, Any]) -> list[float]:
    import sglang

    usual = {
        "dtype": "bfloat16",
        "device": "cpu",
        "attention_backend": "torch_native",
        "moe_runner_backend": "triton",
        "disable_shared_experts_fusion": True,
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "skip_server_warmup": True,
        "skip_tokenizer_init": True,
        "context_length": 512,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "random_seed": 0,
        "log_level": "info",
    }
    llm = sglang.Engine(model_path=model, **usual | arguments)
    asked = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    answers = llm.generate(input_ids=prompts(), sampling_params=asked, return_logprob=True, logprob_start_len=0)
    llm.shutdown()
    # The first token of a prompt has none.
    return [logprob for each in answers for logprob, *_ in each["meta_info"]["input_token_logprobs"][1:]]


def run_case(results: Path, model: str, arguments: dict[str, Any], factor: float) -> Any:
    """In a process of its own, which also ends if SGLang kills it."""
    pid = os.fork()
    if pid == 0:
        # Where it waits, if it has to be killed.
        faulthandler.dump_traceback_later(90, repeat=True)
        try:
            with scaled(factor):
                results.write_text(json.dumps(run(model, arguments)))
        except BaseException as error:
            traceback.print_exc()
            results.write_text(json.dumps(f"{type(error).__name__}: {error}"))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(results.read_text()) if results.exists() else f"exit status {status}"


def main(job: dict[str, Any]) -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    multiprocessing.set_start_method("fork")
    # SGLang asks for "spawn", with which each of its processes would import everything again.
    multiprocessing.set_start_method = lambda *given, **named: None  # type: ignore[assignment]
    results = Path(job["results"])
    found = {
        name: run_case(results.with_suffix(f".{number}.json"), *case)
        for number, (name, *case) in enumerate(job["cases"])
    }
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
