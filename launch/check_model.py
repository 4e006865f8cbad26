"""Loads a whole checkpoint with its experts spread over the ranks, checks layers against float64, and generates.

`[torchrun --nproc-per-node=N] -m moe_runtime.launch.check_model FOLDER` loads a Hugging Face folder: transformers all
but the experts, and moe_runtime the experts of each rank, straight from the files. It

- compares one layer of each kind of stored weights with float64, on the hidden states of random token ids,
- generates greedily from `--tokens`, and times the first token and the others,
- prints the memory of each rank.

`--layer N` loads the router and the experts of decoder layer N alone, without transformers, and compares them on random
tokens.

The exit code is 0 only if every error is inside the bound that follows from the formats and all ranks generate the same
tokens; 2 for a wrong argument or checkpoint. The reference multiplies what the files hold; weights that a layer holds
in bf16 are rounded to it there too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from moe_runtime.build import context_from_config
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.layouts import hold_scales
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.checkpoints.readers import dense
from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.comm.transport import TRANSPORTS
from moe_runtime.config import CombineFormatName, FormatName, ParallelConfig, WeightFormatName
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.integrations.transformers import ExpertParallel, apply_expert_parallel
from moe_runtime.integrations.transformers_models import without_experts
from moe_runtime.kernels.formats.number_formats import weight_format_named
from moe_runtime.kernels.runtime import ENGINES
from moe_runtime.launch.common import cases, environment
from moe_runtime.layer import MoELayer
from moe_runtime.reference import relative_error

KIND = "check_model"
"""`kind` of the JSON."""

LOADING_S = 600.0
"""Seconds that a rank waits for one that is still loading."""

FORMATS = ("token_format", "weight_format", "combine_format")


@dataclass(frozen=True)
class LayerCheck:
    """One layer on one rank.

    Attributes:
        layer: of the decoder.
        stored: layout of its experts in the files.
        token_format, weight_format, combine_format: of the layer.
        tokens: how many were compared.
        error: relative, in the Frobenius norm.
        bound: of `error`, from the formats.
    """

    layer: int
    stored: str
    token_format: str
    weight_format: str
    combine_format: str
    tokens: int
    error: float
    bound: float

    @property
    def inside(self) -> bool:
        """Whether the error keeps to the bound; NaN does not."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Generation:
    """What one rank generated: ids, and the seconds until each of them came after the one before."""

    tokens: list[int]
    seconds: list[float]

    @property
    def rest_s(self) -> float | None:
        """Median of the tokens after the first."""
        return statistics.median(self.seconds[1:]) if len(self.seconds) > 1 else None


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at a moment: of its process, and in use on its GPU by whatever process; peaks so far.

    `device_peak_bytes` is what torch has allocated at most, without the memory between ranks.
    """

    when: str
    host_bytes: int
    host_peak_bytes: int
    device_bytes: int | None
    device_peak_bytes: int | None


@dataclass(frozen=True)
class RankResult:
    """Everything about one rank."""

    checks: list[LayerCheck]
    generation: Generation | None
    memory: list[Memory]


def memory_now(when: str, device: torch.device) -> Memory:
    """Of this process and its device."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    host, peak = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    if device.type != "cuda":
        return Memory(when, host, peak, None, None)
    free, total = torch.cuda.mem_get_info(device)
    return Memory(when, host, peak, total - free, torch.cuda.max_memory_allocated(device))


def check_layer(
    layer: MoELayer, checkpoint: Checkpoint, number: int, x_TH: torch.Tensor, routes: Any, y_TH: torch.Tensor
) -> LayerCheck:
    """Compare `y_TH`, the layer's answer to `x_TH` with `routes` (ids and weights), with float64."""
    config, reader = layer.config, checkpoint.reader(number)
    reader.check_names()  # once: `Checkpoint.experts` would look through all names again for each expert

    def stored_expert(expert: int) -> ExpertTensors:
        one = reader.expert(expert)
        if config.weight_format != "bf16":
            return one
        return one._replace(gate_up=dense(one.gate_up).bfloat16(), down=dense(one.down).bfloat16())

    reference_TH = cases.layer_reference(layer, stored_expert, x_TH, *routes)
    exact = config.weight_format == "bf16" or reader.holds(weight_format_named(config.weight_format))
    return LayerCheck(
        layer=number,
        stored=checkpoint.stored_of(number).layout.name,
        **{name: getattr(config, name) for name in FORMATS},
        tokens=len(x_TH),
        error=relative_error(y_TH, reference_TH)[0],
        bound=cases.layer_bound(config, exact_weights=exact, several_hosts=layer.context.hosts is not None),
    )


def one_of_each_kind(checkpoint: Checkpoint, owner: ExpertParallel) -> list[int]:
    """Indices of the first layers of each layout in the files and each pair of formats."""
    found: dict[tuple[str, ...], int] = {}
    for index, (number, layer) in enumerate(zip(owner.decoder_layers, owner.layers, strict=True)):
        formats = (getattr(layer.config, name) for name in FORMATS)
        found.setdefault((checkpoint.stored_of(number).layout.name, *formats), index)
    return list(found.values())


@contextmanager
def recorded(layer: MoELayer) -> Iterator[list[tuple[torch.Tensor, Any, torch.Tensor]]]:
    """Inside, each call of the layer adds its tokens, their routes, and its answer."""
    calls: list[tuple[torch.Tensor, Any, torch.Tensor]] = []

    def keep(module: Any, args: Any, named: Any, y_TH: torch.Tensor) -> None:
        # Later layers may write over them.
        routes = named["topk_idx"].clone(), named["topk_weights"].clone()
        calls.append((args[0].clone(), routes, y_TH.clone()))

    hook = layer.register_forward_hook(keep, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


@torch.no_grad()
def check_kinds(model: Any, checkpoint: Checkpoint, owner: ExpertParallel, ids: torch.Tensor) -> Iterator[LayerCheck]:
    """One layer of each kind, on the hidden states that it gets in a call of the model on `ids`. Collective."""
    for index in one_of_each_kind(checkpoint, owner):
        layer, number = owner.layers[index], owner.decoder_layers[index]
        with recorded(layer) as calls:
            model(ids, use_cache=False)
        ((x_TH, routes, y_TH),) = calls
        yield check_layer(layer, checkpoint, number, x_TH, routes, y_TH)


def load_model(checkpoint: Checkpoint, device: torch.device) -> Any:
    """The model in bf16 without its experts.

    Where only experts are quantized, transformers does not learn that anything is: it may lack what their method needs.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed; the extra hf has it, and --layer needs none") from None
    transformers.utils.logging.set_verbosity_error()  # it warns of the experts that it does not load
    config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
    names = (name for name in checkpoint.files.names() if ".experts." not in name)
    if hasattr(config, "quantization_config") and not hold_scales(names):
        del config.quantization_config
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    try:
        with without_experts():
            model = kind.from_pretrained(checkpoint.folder, config=config, dtype=torch.bfloat16)
    except ImportError as error:
        raise ValueError(f"transformers cannot load the rest of the model: {error}") from None
    return model.to(device).eval()


class _Clock:
    """What `generate` calls with the prompt and then with each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        """Ids are on the host, so the device has computed them."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


@torch.no_grad()
def generate(model: Any, owner: ExpertParallel, prompt: list[int], count: int) -> Generation:
    """At most `count` tokens after `prompt`, greedily; earlier if the model ends. Collective."""
    ids = torch.tensor([prompt], device=owner.context.device)
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    # Twice, so that kernels are there: cuDNN's attention prepares some 35 ms for each length that it has not seen.
    model.generate(ids, max_new_tokens=count, **settings)
    clock = _Clock()
    answer = model.generate(ids, max_new_tokens=count, streamer=clock, **settings)
    seconds = [end - start for start, end in pairwise(clock.times)]
    return Generation(answer[0, len(prompt) :].tolist(), seconds)


def run_model(options: argparse.Namespace, device: torch.device, parallel: ParallelConfig) -> int:
    """Load, check, generate and report; the exit code. Collective."""
    memory = []
    with Checkpoint(options.folder, routers=False, ignore_keys=options.ignore_key) as checkpoint:
        model = load_model(checkpoint, device)
        memory.append(memory_now("model without experts", device))
        vocabulary = model.get_input_embeddings().num_embeddings
        if (wrong := next((token for token in options.tokens if token >= vocabulary), None)) is not None:
            raise ValueError(f"--tokens: expected ids below {vocabulary}, got {wrong}")
        count = max(len(options.tokens), options.check_tokens)
        formats = {name: getattr(options, name) for name in FORMATS}
        sizes = {"max_tokens_per_rank": count, "token_buckets": (1,)}  # a prompt, and one token after it
        with apply_expert_parallel(
            model, experts=checkpoint, parallel=parallel, device=device, **sizes, **formats
        ) as owner:
            memory.append(memory_now("with experts", device))
            # Every rank has tokens of its own.
            rng = torch.Generator().manual_seed(options.seed + owner.context.rank)
            ids = torch.randint(vocabulary, (1, options.check_tokens), generator=rng).to(device)
            checks = list(check_kinds(model, checkpoint, owner, ids))
            generation = generate(model, owner, options.tokens, options.new)
            owner.context.check_peers()
            memory.append(memory_now("at the end", device))
            return finish(RankResult(checks, generation, memory), options, owner.context)


@torch.no_grad()
def run_layer(options: argparse.Namespace, context: ExpertParallelContext) -> int:
    """Load and check decoder layer `options.layer` alone, and report; the exit code. Collective."""
    formats = {name: getattr(options, name) for name in FORMATS}
    with Checkpoint(options.folder, ignore_keys=options.ignore_key) as checkpoint:
        layer = MoELayer.from_checkpoint(
            options.folder,
            layer=options.layer,
            context=context,
            ignore_keys=options.ignore_key,
            max_tokens_per_rank=options.check_tokens,
            **formats,
        )
        memory = [memory_now("with experts", context.device)]
        x_TH, *routes = cases.step_inputs(layer, "router", options.seed, context.rank, 0, options.check_tokens)
        y_TH = layer(x_TH, topk_idx=routes[0], topk_weights=routes[1])
        context.check_peers()
        checks = [check_layer(layer, checkpoint, options.layer, x_TH, routes, y_TH)]
        memory.append(memory_now("at the end", context.device))
    return finish(RankResult(checks, None, memory), options, context)


def report(results: list[RankResult], context: ExpertParallelContext, console: Console) -> None:
    """Print the results of all ranks."""
    console.print(
        f"{context.world_size} rank(s) on {context.device.type}, transport {context.transport}, engine {context.engine}"
    )
    table = Table(title="Layers against the float64 reference")
    for column in ("rank", "layer", "stored", "formats", "tokens", "error", "bound", ""):
        table.add_column(column, justify="right")
    for rank, result in enumerate(results):
        for one in result.checks:
            formats = f"{one.token_format} x {one.weight_format}"
            numbers = (str(one.tokens), f"{one.error:.2e}", f"{one.bound:.2e}")
            verdict = "inside" if one.inside else "[red]OUTSIDE[/red]"
            table.add_row(str(rank), str(one.layer), one.stored, formats, *numbers, verdict)
    console.print(table)
    table = Table(title="Memory of each rank")
    for column in ("rank", "", "host", "host, peak", "device in use", "torch's peak"):
        table.add_column(column, justify="right")
    for rank, result in enumerate(results):
        for memory in result.memory:
            device = (memory.device_bytes, memory.device_peak_bytes)
            sizes = (memory.host_bytes, memory.host_peak_bytes, *device)
            table.add_row(str(rank), memory.when, *("-" if size is None else decimal(size) for size in sizes))
    console.print(table)
    for rank, result in enumerate(results):
        if (made := result.generation) is not None:
            rest = "" if made.rest_s is None else f", each further one {made.rest_s * 1e3:.2f} ms (median)"
            console.print(f"rank {rank}: first token {made.seconds[0] * 1e3:.2f} ms{rest}")
    if results[0].generation is not None:
        console.print(f"generated {','.join(map(str, results[0].generation.tokens))}")
    if not agree(results):
        console.print("[red]Ranks generated different tokens.[/red]")


def agree(results: list[RankResult]) -> bool:
    """Whether all ranks generated the same."""
    made = [None if result.generation is None else result.generation.tokens for result in results]
    return made.count(made[0]) == len(made)


def finish(mine: RankResult, options: argparse.Namespace, context: ExpertParallelContext) -> int:
    """Print the results of all ranks and write the JSON; the exit code. Collective."""
    results = environment.gather(context, "results", mine, RankResult)
    passed = agree(results) and all(one.inside for result in results for one in result.checks)
    report(results, context, environment.console_of(context))
    if options.json is not None and context.rank == 0:
        found = {
            "kind": KIND,
            "environment": environment.environment_record(context),
            "model": options.folder.resolve().name,
            "passed": passed,
            "results": [asdict(result) for result in results],
        }
        environment.write_json(options.json, found)
    return 0 if passed else 1


def work(options: argparse.Namespace) -> int:
    """Load, check and report; 1 if a check failed."""
    environment.check_at_least(1, new=options.new, check_tokens=options.check_tokens)
    environment.check_at_least(0, layer=options.layer, seed=options.seed)
    if options.seed >= 2**63:
        raise ValueError(f"--seed: expected less than 2^63, got {options.seed}")
    for name in ("new", "tokens") if options.layer is not None else ():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name}: expected none with --layer, which generates nothing")
    options.new = 16 if options.new is None else options.new
    options.tokens = [3, 14, 15] if options.tokens is None else options.tokens
    environment.check_folder("--json", options.json)
    parallel = ParallelConfig(transport=options.transport, engine=options.engine, startup_timeout_s=LOADING_S)
    device = init_from_env(timeout_s=parallel.startup_timeout_s)
    if options.layer is None:
        return run_model(options, device, parallel)
    with context_from_config(parallel) as context:
        return run_layer(options, context)


def token_ids(text: str) -> list[int]:
    """`3,14,15` as a list of at least one id."""
    with suppress(ValueError):
        if min(ids := [int(part) for part in text.split(",")]) >= 0:
            return ids
    raise argparse.ArgumentTypeError(f"expected ids such as 3,14,15, got {text!r}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_runtime.launch.check_model", description="Load, check and time a whole checkpoint."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a checkpoint, as Hugging Face lays it out")
    parser.add_argument("--tokens", type=token_ids, metavar="IDS", help="prompt (default: 3,14,15)")
    parser.add_argument("--new", type=int, metavar="N", help="most tokens to generate (default: 16)")
    parser.add_argument("--check-tokens", type=int, default=64, metavar="N", help="tokens of a check (default: 64)")
    parser.add_argument("--layer", type=int, metavar="N", help="load and check this decoder layer alone")
    for name, kind in zip(FORMATS, (FormatName, WeightFormatName, CombineFormatName), strict=True):
        default = "bf16" if name == "combine_format" else None
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, choices=get_args(kind), default=default, help="default: the checkpoint's, or bf16")
    environment.add_ignore_key_option(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is random (default: 0)")
    parser.add_argument("--transport", choices=("auto", *TRANSPORTS), default="auto")
    parser.add_argument("--engine", choices=ENGINES, default="auto")
    environment.add_json_option(parser)
    return environment.run_parsed("check_model", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
