"""Times models of published layer sizes in vLLM, with its own experts and with those of moe_runtime.

Each case is an engine in processes of its own: `alone1` and `adapter1` on one GPU, `alone2` and `adapter2` on two, with
tensor and expert parallelism. Weights are random, lengths fixed. `decode` is the time of a step, from the difference of
two generations; `whole` is the longer of them, with its prefill; `prefill` is one step with all tokens of its prompts.
The fastest of the repeats counts. Log-probabilities of prompts are compared with those of the first case. A profile
gives the time of each kernel in a step, and that of the experts. What vLLM says of its memory is in the log of a case.

The scheduler is paused until all prompts of a call have reached it. Else vLLM, whose engine core is a process of its
own, begins a step with those that have come by then, and a prefill takes two or three steps, as it happens.

Engines take longer to start than to be timed. With `--turns` all of them start together, and take turns once all are
up: a case has a lock while it times a batch. So others are timed soon before and after, with as many engines beside.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moe_runtime.launch.common import environment
from moe_runtime.launch.research.vllm_models import FORMATS, SIZES, ModelSizes, write_model

KIND = "vllm"
PROMPT_TOKENS, FIRST_STEPS = 32, 16
COMPARED = (5, 17, 64, 128, 200, 33, 90, 7)
"""Lengths of the prompts whose log-probabilities are compared."""
PREFILL = 8, 1024
"""Prompts of prefill, and tokens of each."""
PROFILED_STEPS = 16
POLL_S = 0.2
"""Between looks at which cases are still starting."""
EXPERTS = re.compile(
    r"fused_moe|moe_|[Mm]arlin|matmul_ogs|act_and_mul|silu|swiglu|topk|routing|per_token_group_quant|cvt_fp"
)
"""Kernels of vLLM's experts, with the router's top-k, which both cases have."""
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compile": {},
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Environment of a case, unless the user has set it."""


def own_kernels() -> re.Pattern[str]:
    """Names of the kernels of moe_runtime, by its sources."""
    folder = Path(str(import_module("moe_runtime.kernels").__path__[0]))
    attributes, found = r"(?:__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*", set()
    for file in folder.rglob("*"):
        if file.suffix == ".cu":
            found.update(re.findall(rf"__global__\s+void\s+{attributes}(\w+)\s*\(", file.read_text()))
        elif file.suffix == ".py":
            found.update(re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE))
    return re.compile("|".join(rf"\b{name}\b" for name in sorted(found)))


def ask(llm: Any, prompts: list[list[int]], **sampling: Any) -> tuple[float, Any]:
    """Seconds from the first step on, and what `llm` answers."""
    parameters = import_module("vllm").SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
    llm.sleep(level=0, mode="keep")
    llm.enqueue([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    begun = time.perf_counter()
    llm.wake_up(["scheduling"])
    answers = llm.wait_for_completion(use_tqdm=False)
    return time.perf_counter() - begun, answers


def without_folders(line: str) -> str:
    """`line` with the names alone of files below `/`, whose folders are of one machine."""
    return re.sub(r"(?<![\w.:/-])/(?:[^\s/]+/)+", "", line)


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans, each a begin and an end: a kernel launched by PDL begins while another ends."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def kernel_times(folder: Path, ours: re.Pattern[str], steps: int) -> dict[str, Any]:
    """Microseconds of a step on the GPU of one rank, from the largest trace of a profile of `steps`.

    `gpu_us` is time in which any kernel runs, `experts_us` time in which one of the experts does. Those by kernel are
    sums.
    """
    traces = [file for file in folder.rglob("*.json*") if file.stat().st_size]
    if not traces:
        return {"error": "no trace was written"}
    file = max(traces, key=lambda each: each.stat().st_size)
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as text:
        events = json.load(text)["traceEvents"]
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    sums = ((name, sum(end - begin for begin, end in each) / steps, len(each) / steps) for name, each in spans.items())
    rows = sorted(sums, key=lambda row: -row[1])
    kinds = {name: "ours" if ours.search(name) else "experts" if EXPERTS.search(name) else "other" for name in spans}
    everything = [span for each in spans.values() for span in each]
    of_experts = [span for name, each in spans.items() if kinds[name] != "other" for span in each]
    return {
        "gpu_us": round(covered(everything) / steps, 1),
        "experts_us": round(covered(of_experts) / steps, 1),
        "kernels": [
            {"name": name[:120], "kind": kinds[name], "us": round(us, 1), "launches": round(count, 1)}
            for name, us, count in rows[:40]
        ],
    }


def is_starting(marker: Path) -> bool:
    """Whether the run that wrote `marker` still goes on: one that was killed leaves its files."""
    try:
        os.kill(int(marker.name.partition("-")[0]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


class Turns:
    """Of a case whose engine is up, by a lock on the file of `--turns`. Without one nobody waits.

    Attributes:
        waited_s: seconds that it has waited for its turns.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._file = None if job["turns"] is None else Path(job["turns"])
        self.waited_s = 0.0
        if self._file is not None:
            self._marker = Path(job["starting"])
            self._marker.unlink(missing_ok=True)

    @contextmanager
    def next(self) -> Iterator[None]:
        """A turn, which begins when no case of runs with that file is still starting."""
        if self._file is None:
            yield
            return
        begun = time.perf_counter()
        with self._file.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # With the lock in hand: who waited long for it may find that another run has begun.
            while any(is_starting(each) for each in self._marker.parent.iterdir()):
                time.sleep(POLL_S)
            self.waited_s += time.perf_counter() - begun
            yield
        # Else the lock would be taken again before those who wait for it have woken up.
        time.sleep(POLL_S)


def run_case(job: dict[str, Any], file: Path) -> None:
    """One engine, and a JSON file of what is measured."""
    begun = time.perf_counter()
    llm = import_module("vllm").LLM(**engine_arguments(job))
    found: dict[str, Any] = {"startup_s": round(time.perf_counter() - begun, 1)}
    turns = Turns(job)
    found |= measure(llm, job, turns)
    if job["turns"] is not None:
        found["waited_s"] = round(turns.waited_s, 1)
    environment.write_json(file, found)  # whole, or not there


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Of vLLM's `LLM`."""
    batches = job["batches"]
    most = max([*batches, 8])
    arguments = {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(PREFILL[0] * PREFILL[1], most),
        "enable_prefix_caching": False,
        "seed": 0,
        "tensor_parallel_size": job["gpus"],
        "enable_expert_parallel": job["gpus"] > 1,
        "disable_log_stats": True,
    }
    if job["profiled"]:
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": job["profile"],
            "torch_profiler_with_stack": False,
        }
    mode = dict(MODES[job["mode"]])
    if "compilation_config" in mode:
        # No other sizes, which would take longer to capture than all that is timed.
        mode["compilation_config"] = {**mode["compilation_config"], "cudagraph_capture_sizes": sorted({*batches, 8})}
    return arguments | mode | job["engine"]


def measure(llm: Any, job: dict[str, Any], turns: Turns) -> dict[str, Any]:
    """Log-probabilities, then times, then profiles, each in a turn."""
    draw, profile = random.Random(3), Path(job["profile"])

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [[draw.randrange(3, job["vocabulary"]) for _ in range(length)] for length in lengths]

    found: dict[str, Any] = {}
    with turns.next():
        _, answers = ask(llm, prompts(list(COMPARED)), max_tokens=1, prompt_logprobs=1)
    found["logprobs"] = [
        step[token].logprob
        for answer in answers
        for token, step in zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
        if step is not None
    ]
    times: list[dict[str, Any]] = []
    found["times"] = times
    for batch in job["batches"]:
        some, steps = prompts([PROMPT_TOKENS] * batch), job["steps"]
        counts = FIRST_STEPS, FIRST_STEPS + steps
        with turns.next():
            # The whole length: some kernels of vLLM are tuned when they first see one.
            ask(llm, some, max_tokens=counts[1])
            short, long = zip(
                *([ask(llm, some, max_tokens=count)[0] for count in counts] for _ in range(job["repeats"])), strict=True
            )
        before = min(short)
        times.append(_times("decode", batch, batch, [(each - before) / steps for each in long]))
        times.append(_times("whole", batch, batch * counts[1], list(long)))
    taken = []
    with turns.next():
        for _ in range(2 * job["repeats"] + 1):
            taken.append(ask(llm, prompts([PREFILL[1]] * PREFILL[0]), max_tokens=1)[0])
    times.append(_times("prefill", PREFILL[0], PREFILL[0] * PREFILL[1], taken[1:]))
    if job["profiled"]:
        # A prefill, then decode steps whose prompts have one token, so that the first step is like the others.
        kinds = [("prefill", PREFILL[0], prompts([PREFILL[1]] * PREFILL[0]), 1)]
        kinds += [("decode", batch, prompts([1] * batch), PROFILED_STEPS) for batch in job["profiled"]]
        found["profiles"] = []
        for phase, batch, some, steps in kinds:
            shutil.rmtree(profile, ignore_errors=True)
            profile.mkdir(parents=True)
            with turns.next():
                ask(llm, some, max_tokens=steps)
                llm.start_profile()
                ask(llm, some, max_tokens=steps)
                llm.stop_profile()
            found["profiles"].append({"phase": phase, "batch": batch} | kernel_times(profile, own_kernels(), steps))
    return found


def _times(phase: str, batch: int, tokens: int, taken: list[float]) -> dict[str, Any]:
    """Of a step, or of a prefill. The fastest counts: what else a host does only adds time."""
    fastest = min(taken)
    return {
        "phase": phase,
        "batch": batch,
        "ms": round(fastest * 1e3, 3),
        "ms_median": round(statistics.median(taken) * 1e3, 3),
        "ms_all": [round(each * 1e3, 3) for each in taken],
        "tokens_per_s": round(tokens / fastest, 1),
    }


def difference(first: list[float], other: list[float]) -> dict[str, float]:
    """Of log-probabilities of the same tokens."""
    apart = [abs(a - b) for a, b in zip(first, other, strict=True)]
    return {"mean": round(statistics.mean(apart), 5), "max": round(max(apart), 5)}


class Place(NamedTuple):
    """Where a case runs that has others beside it."""

    gpus: list[str]
    cores: list[int]


def places(counts: list[int]) -> list[Place]:
    """GPUs for cases that take so many each, and as equal shares of the cores."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = given.split(",") if given else [str(each) for each in range(import_module("torch").cuda.device_count())]
    if sum(counts) > len(gpus):
        raise ValueError(f"--beside: expected cases with at most {len(gpus)} GPUs together, got {counts}")
    cores = sorted(os.sched_getaffinity(0))
    share, first, found = len(cores) // len(counts), 0, []
    for place, count in enumerate(counts):
        found.append(Place(gpus[first : first + count], cores[place * share : (place + 1) * share]))
        first += count
    return found


def start_case(
    case: str, job: dict[str, Any], folder: Path, adapter: str, limit_s: float, place: Place | None
) -> dict[str, Any]:
    """What `run_case` finds in a process of its own, or why it found nothing."""
    env = QUIET | dict(os.environ) | {"MOE_RUNTIME_VLLM": adapter, "VLLM_CACHE_ROOT": str(folder / "cache")}
    if place is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    file, log = folder / f"{case}.json", folder / f"{case}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "moe_runtime.launch.research.vllm_speed", "--run", json.dumps(job), str(file)]
    begun = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        if place is not None:
            os.sched_setaffinity(process.pid, place.cores)
        try:
            state = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            state = f"not done after {limit_s:.0f} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    said = [
        without_folders(line)
        for line in lines
        if re.search(r"moe_runtime: \d|[Uu]sing .*(MoE|Moe|attention) |Model loading took|KV cache (size|memory)", line)
    ]
    result: dict[str, Any] = {"case": case, "seconds": round(time.perf_counter() - begun, 1), "log": said[:12]}
    if place is not None:
        result["beside_others"] = {"gpus": place.gpus, "cores": len(place.cores)}
    if job["turns"] is not None:
        result["turns"] = True
    if file.exists():
        return result | json.loads(file.read_text())
    errors = [line for line in lines if re.search(r"Error\b|Exception", line)]
    return result | {"error": state, "lines": (errors or lines)[-12:]}


def show(result: dict[str, Any], first: dict[str, Any] | None) -> None:
    print(f"== {result['case']}: {result['seconds']} s", *result["log"], sep="\n   ", flush=True)
    if "error" in result:
        print("  ", result["error"], *result["lines"], sep="\n   ", flush=True)
        return
    before = {} if first is None else {(row["phase"], row["batch"]): row for row in first["times"]}
    for row in result["times"]:
        other = before.get((row["phase"], row["batch"]))
        times = "" if other is None else f"   {other['ms'] / row['ms']:.3f} x the tokens of {(first or {})['case']}"
        print(f"   {row['phase']:8}{row['batch']:5}{row['ms']:10.3f} ms {row['tokens_per_s']:12.1f} tokens/s{times}")
    for profile in result.get("profiles", ()):
        print(
            f"   profile of {profile['phase']} {profile['batch']}:",
            {key: value for key, value in profile.items() if key != "kernels"},
        )
    if "difference" in result:
        print("   log-probabilities:", result["difference"], flush=True)


def run(options: argparse.Namespace) -> int:
    """Check the options, then `run_cases`."""
    environment.check_folder("--json", options.json)
    environment.check_at_least(1, steps=options.steps, repeats=options.repeats, layers=options.layers)
    for name, batches in (("batches", options.batches), ("profile", options.profile)):
        for batch in batches:
            environment.check_at_least(1, **{name: batch})
    if options.format not in (formats := FORMATS[SIZES[options.model].kind]):
        raise ValueError(f"--format: expected {' or '.join(formats)} for {options.model}, got {options.format}")
    if not isinstance(options.engine, dict):
        raise ValueError(f"--engine: expected a JSON object, got {json.dumps(options.engine)}")
    cases = options.cases.split(",")
    for case in cases:
        if not re.fullmatch(r"(alone|adapter)[1-9]\d*", case):
            raise ValueError(f"--cases: expected names such as alone1 and adapter2, got {case!r}")
    if options.turns is not None:
        environment.check_folder("--turns", options.turns)
        if options.beside:
            raise ValueError("--turns: expected a run without --beside, since all cases have the same GPUs")
    if (options.turns is not None or options.beside) and len(set(cases)) < len(cases):
        raise ValueError(f"--cases: expected no case twice where they run at the same time, got {options.cases}")
    # Before all that takes time: others with the same file are not timed while this run writes a model.
    with starting(options.turns, cases) as markers:
        return run_cases(options, cases, markers)


@contextmanager
def starting(turns: Path | None, cases: list[str]) -> Iterator[dict[str, Path]]:
    """A file for each of `cases` that says that it is still starting; none without `--turns`."""
    markers: dict[str, Path] = {}
    if turns is not None:
        folder = turns.absolute().with_name(f"{turns.name}.starting")
        folder.mkdir(exist_ok=True)
        markers = {case: folder / f"{os.getpid()}-{case}" for case in cases}
    try:
        for marker in markers.values():
            marker.touch()
        yield markers
    finally:
        for marker in markers.values():
            marker.unlink(missing_ok=True)


def run_cases(options: argparse.Namespace, cases: list[str], markers: dict[str, Path]) -> int:
    """Write the model, run the cases, write the JSON file; `markers` are those of `starting`."""
    sizes = SIZES[options.model]
    if options.layers is not None:
        sizes = replace(sizes, layers=options.layers)
    folder = options.folder or Path(tempfile.gettempdir()) / "vllm_speed"
    model = folder / f"{options.model}-{options.format}-{sizes.layers}"
    if not (model / "config.json").exists():
        begun = time.perf_counter()
        # In a process of its own, which frees what it took of a GPU.
        arguments = [json.dumps(asdict(sizes)), options.format, str(model)]
        subprocess.run(
            [sys.executable, "-m", "moe_runtime.launch.research.vllm_speed", "--write", *arguments], check=True
        )
        print(f"{model.name} written in {time.perf_counter() - begun:.1f} s", flush=True)
    jobs = [
        {
            "model": str(model),
            "gpus": int(case.lstrip("aledoptrn")),
            "vocabulary": sizes.vocabulary,
            "mode": options.mode,
            "batches": options.batches,
            "profiled": options.profile,
            "profile": str(folder / f"profile_{case}"),
            "steps": options.steps,
            "repeats": options.repeats,
            "engine": options.engine,
            "turns": None if options.turns is None else str(options.turns.absolute()),
            "starting": str(markers[case]) if case in markers else None,
        }
        for case in cases
    ]
    where = places([job["gpus"] for job in jobs]) if options.beside else [None] * len(cases)
    ends = time.monotonic() + options.limit

    def start(case: str, job: dict[str, Any], place: Place | None) -> dict[str, Any]:
        left = ends - time.monotonic()
        try:
            if left < 30:
                return {"case": case, "seconds": 0, "log": [], "error": f"left out, {left:.0f} s are left", "lines": []}
            return start_case(case, job, folder, options.settings if case.startswith("adapter") else "0", left, place)
        finally:
            # One that died while it started holds up no other.
            if case in markers:
                markers[case].unlink(missing_ok=True)

    results: list[dict[str, Any]] = []
    first: dict[str, Any] | None = None
    compared: list[float] = []
    described = {"model": options.model, "format": options.format, "mode": options.mode, "sizes": asdict(sizes)}
    described["multiprocessing"] = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    data = {"kind": KIND, "environment": environment.machine_record(), "config": described, "results": results}
    with ThreadPoolExecutor(len(cases) if options.beside or markers else 1) as pool:
        for result in pool.map(start, cases, jobs, where):
            probabilities = result.pop("logprobs", None)
            if probabilities is not None and first is not None:
                result["difference"] = difference(compared, probabilities)
            show(result, first)
            results.append(result)
            if probabilities is not None and first is None:
                first, compared = result, probabilities
            if options.json is not None:
                # After each case, so that an interrupted run leaves what it has.
                environment.write_json(options.json, data)
    return int(any("error" in result for result in results))


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--write"]:
        write_model(Path(given[3]), ModelSizes(**json.loads(given[1])), given[2])
        return 0
    if given[:1] == ["--run"]:
        run_case(json.loads(given[1]), Path(given[2]))
        # An engine may take long to end.
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_30b", choices=list(SIZES), help="sizes of the layers")
    parser.add_argument("--format", default="bf16", help="of the experts: bf16, fp8, nvfp4; mxfp4 for gpt-oss")
    parser.add_argument("--layers", type=int, help="instead of those of the model")
    parser.add_argument(
        "--cases", default="alone1,adapter1", metavar="NAMES", help="alone or adapter and GPUs, in order"
    )
    parser.add_argument(
        "--beside", action="store_true", help="the cases at the same time, each with GPUs and cores of its own"
    )
    parser.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="start the cases at the same time, all on the same GPUs, and time a batch of one and then of another, by "
        "a lock on FILE; runs at the same time with one FILE, each with a --folder of its own, take turns too. GPU "
        "memory has to be "
        """enough for all engines: --engine '{"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4000000000}' """
        "(without the second, vLLM takes what others allocate while it starts for its own)",
    )
    parser.add_argument("--mode", default="graphs", choices=list(MODES), help="how vLLM runs its steps")
    parser.add_argument(
        "--batches", type=_integers, default=[1, 8, 32, 128, 256], metavar="N,N", help="of decode steps"
    )
    parser.add_argument("--steps", type=int, default=64, help="decode steps of one repeat")
    parser.add_argument("--repeats", type=int, default=9, help="of each time; the fastest counts")
    parser.add_argument("--profile", type=_integers, default=[], metavar="N,N", help="batches to profile at the end")
    parser.add_argument("--settings", default="1", metavar="FILE", help="MOE_RUNTIME_VLLM of the adapter's cases")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vLLM's LLM")
    parser.add_argument("--limit", type=float, default=500.0, metavar="SECONDS", help="no case goes on for longer")
    parser.add_argument("--folder", type=Path, help="for the model, logs and caches")
    environment.add_json_option(parser)
    return environment.run_parsed("vllm_speed", parser, run, given)


if __name__ == "__main__":
    sys.exit(main())
