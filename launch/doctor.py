"""What this machine has, and what the runtime would use of it; reserves nothing.

`[torchrun …] -m moe_runtime.launch.doctor [--config NAME [--world-size N [--hosts N]]] [--json]` shows versions,
devices, the engine and the transport that would be used and why not the others, limits on shared memory, the bytes
that each rank would reserve in every token format, and the kernels of the exchange and of the experts (`--hopper`: on
an H100 or H200, wherever this runs). Under torchrun all ranks agree on the transport and rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from moe_runtime.checkpoints.kept_files import Room, kept_folder, kept_layers
from moe_runtime.comm.bootstrap import init_from_env
from moe_runtime.comm.heaps import nvshmem_world
from moe_runtime.comm.heaps.shared_memory import room_for_heaps
from moe_runtime.comm.host_link import graph_caution
from moe_runtime.comm.rank_group import RankGroup
from moe_runtime.comm.transport import AFTER_DEATH, choose_transport
from moe_runtime.config import MoELayerConfig, ParallelConfig, complaints, load_config
from moe_runtime.context.memory import REGIONS, expert_bytes, layer_geometry, reserved_bytes
from moe_runtime.deep_ep.sizes import FP8_BLOCK_SIZE, MOST_TOP_K, memory_of
from moe_runtime.experts import plan_experts
from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.exchange.cuda import can_keep_scales_in_record
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.plan import exchange_engine, required_plan, sm_shared_bytes
from moe_runtime.kernels.formats.number_formats import (
    FORMATS,
    WEIGHT_FORMATS,
    token_formats_for,
    weight_format_named,
)
from moe_runtime.kernels.gemm.plan import GemmKernel, GemmPlan, multiplied_in
from moe_runtime.kernels.runtime import (
    INTERPRET,
    SM_SHARED_BYTES,
    Engine,
    capability,
    missing_for_cuda,
    resolve_engine,
)
from moe_runtime.launch.common import environment
from moe_runtime.launch.common.cases import with_token_format
from moe_runtime.support.host_memory import memory_bytes

PLANNED_TOKENS = (1, 8, 128, 1024, 4096)
"""Tokens of a rank for which exchange and GEMMs are planned."""
HOPPER_SMS = 132


def examine(
    layer: MoELayerConfig | None,
    parallel: ParallelConfig,
    world_size: int,
    group: RankGroup,
    device: torch.device,
    tokens: Sequence[int] = (),
    *,
    placed: bool = False,
    hopper: bool = False,
    num_hosts: int | None = None,
) -> dict[str, Any]:
    """Everything the doctor knows, ready for JSON: sizes in bytes, None for what is absent or unlimited. Collective.

    `world_size` is the number of ranks whose reserved bytes are asked for; `group` the ranks that are really there.
    A rank holds `copies` times its `reserved_bytes`: the collective transport stages one copy for each peer.
    `expert_bytes` are those of the weights of one layer's experts on a rank, in the format of its config;
    `expert_bytes_by_format` has them in every format. `reserved_bytes` is by `max_tokens_per_rank` (those of `tokens`,
    or the layer's own), format and region; `placed` layers have a placement, and where peers are mapped a region to
    move experts through. So have layers of `parallel` with `on_failure: continue` where ranks can come back.
    `exchange_plans` and
    `gemm_plans` (gate/up and down) are by tokens of each rank; `hopper` asks for those of an H100 or H200 instead of
    this machine's. `num_hosts` is how many hosts the reserved bytes are for, by default those that are there.
    """
    transport = _transport(parallel, group, device)
    # A process alone needs no shared memory; those that it speaks for, on the CPUs of one host, do.
    for_others = transport["name"] == "private" and world_size > 1 and num_hosts in (None, 1) and device.type == "cpu"
    comes_back = parallel.on_failure == "continue" and (transport["name"] == "shared" or for_others)
    placed = comes_back or (placed and transport["name"] != "collective")
    if num_hosts is None:
        num_hosts = transport["hosts"] if world_size == group.world_size else 1
    exchange, gemm = plans(layer, world_size, parallel.engine, device, hopper=hopper) if layer else ({}, {})
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": environment.package_versions(),
        "cuda": torch.version.cuda,
        "devices": environment.gpu_records(),
        "peer_access": _peer_access(),
        "nvlinks": _nvlinks(),
        "nvshmem": nvshmem_world.version() if torch.cuda.is_available() else None,
        "limits": _limits(),
        "ranks": group.world_size,
        "engine": _engine(parallel, device),
        "transport": transport,
        "world_size": world_size,
        "num_hosts": num_hosts,
        "reserved_bytes": {
            count: reserved_by_format(layer, world_size, count, placed=placed, num_hosts=num_hosts)
            for count in tokens or [layer.max_tokens_per_rank]
        }
        if layer
        else {},
        "expert_bytes": expert_bytes(layer, world_size) if layer else None,
        "expert_bytes_by_format": expert_bytes_by_format(layer, world_size) if layer else {},
        "exchange_plans": exchange,
        "gemm_plans": gemm,
        "deep_ep_bytes": deep_ep_bytes(layer, world_size, tokens or [layer.max_tokens_per_rank]) if layer else {},
        "copies": world_size if transport["name"] == "collective" else 1,
    }


def reserved_by_format(
    layer: MoELayerConfig,
    world_size: int,
    max_tokens: int | None = None,
    *,
    placed: bool = False,
    num_hosts: int = 1,
) -> dict[str, dict[str, int] | str]:
    """What `layer` would reserve on each rank in every token format; a format that it cannot have says why.

    `max_tokens` stands in for the `max_tokens_per_rank` of the layer. Weights have its `weight_format` where the tokens
    go with it, else that of the tokens.
    """
    if max_tokens is not None:
        layer = layer.replace(max_tokens_per_rank=max_tokens)
    reserved: dict[str, dict[str, int] | str] = {}
    for name in FORMATS:
        weights = layer.weight_format if name in token_formats_for(layer.weight_format) else None
        try:
            changed = with_token_format(layer, name, weights)
        except ValidationError as error:
            reserved[name] = complaints(error)[0]
        else:
            reserved[name] = reserved_bytes(changed, world_size, placed=placed, num_hosts=num_hosts)
    return reserved


def expert_bytes_by_format(layer: MoELayerConfig, world_size: int) -> dict[str, int | str]:
    """`expert_bytes` of `layer` with its weights in each format; a format that it cannot have says why."""
    found: dict[str, int | str] = {}
    for name in WEIGHT_FORMATS:
        tokens = token_formats_for(name)[0]
        try:
            changed = with_token_format(layer, tokens, name)
        except ValidationError as error:
            found[name] = complaints(error)[0]
        else:
            found[name] = expert_bytes(changed, world_size)
    return found


def deep_ep_bytes(layer: MoELayerConfig, world_size: int, tokens: Sequence[int]) -> dict[int, dict[str, int]]:
    """What the modes of `moe_runtime.deep_ep` take on each rank, by tokens of a rank (`deep_ep.sizes.memory_of`).

    Empty for a layer that they do not take.
    """
    if layer.num_experts % world_size or layer.hidden_size % FP8_BLOCK_SIZE or layer.top_k > MOST_TOP_K:
        return {}
    return {count: memory_of(layer.hidden_size, world_size, layer.num_experts, layer.top_k, count) for count in tokens}


def plans(
    layer: MoELayerConfig, world_size: int, engine: str, device: torch.device, *, hopper: bool = False
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """How `kernels.exchange.plan` dispatches and combines, and how `kernels.gemm.plan` multiplies the experts.

    By tokens that each of `world_size` ranks brings, on `device`, or on an H100 or H200; empty for an engine that
    cannot run there. The exchange is without `num_sms`, its blocks are those of a step that brings all its tokens.
    """
    exchange: dict[int, dict[str, Any]] = {}
    gemm: dict[int, dict[str, Any]] = {}
    resolved: Engine = "cuda"
    architecture: tuple[int, int] | None = (9, 0)
    sms, sm_bytes = HOPPER_SMS, SM_SHARED_BYTES
    if not hopper:
        try:
            resolved = resolve_engine(engine, device)
        except ValueError:
            return exchange, gemm
        sms = nvrtc.most_sms(device) if device.type == "cuda" else HOPPER_SMS
        sm_bytes, architecture = sm_shared_bytes(device), capability(device)
    for count in PLANNED_TOKENS:
        geometry = layer_geometry(layer.replace(max_tokens_per_rank=count, token_buckets=[]), world_size)
        geometry = replace(geometry, sm_shared_bytes=sm_bytes)
        products = plan_experts(layer, geometry, resolved, architecture, sms)
        exchange[count] = _exchange_plan(geometry, count, resolved, device, sms, products[0])
        gemm[count] = {"engine": resolved, "rows_per_expert": geometry.expected_rows / geometry.num_local_experts}
        formats = layer.token_format, layer.intermediate_format
        for name, rows, plan in zip(("gate_up", "down"), formats, products, strict=True):
            gemm[count][name] = {
                "rows": rows,
                "weights": layer.weight_format,
                "multiplied_in": multiplied_in(plan, weight_format_named(layer.multiplied_format)),
                "kernel": plan.kernel.value,
                "regime": plan.regime.value,
                "tile": plan.tile,
                "blocks": plan.blocks,
                "overlapped": plan.dequant is not None and plan.dequant.overlap is not None,
            }
    return exchange, gemm


def _exchange_plan(
    geometry: ExchangeGeometry, count: int, engine: Engine, device: torch.device, sms: int, gate_up: GemmPlan
) -> dict[str, Any]:
    """How `count` tokens of each rank are dispatched to experts whose first GEMM is `gate_up`, and combined."""
    used, why_not = exchange_engine(engine, device, geometry)
    found: dict[str, Any] = {
        "engine": used,
        "why_not_cuda": why_not,
        "rows": "contiguous" if geometry.contiguous else "gathered",
        "record_bytes": geometry.record.record_bytes,
        "partial_bytes": geometry.partial_bytes,
    }
    if used != "cuda":
        return found
    plan = required_plan(geometry)
    in_record = gate_up.kernel is GemmKernel.DEQUANT and can_keep_scales_in_record(geometry)
    copies_scales = geometry.token_format.scale_dtype is not None and not in_record
    found |= {
        "flags": "each token" if plan.per_token_flags else "each rank",
        "parts": plan.num_parts + 1,
        "blocks": {
            "dispatch_send": plan.send_blocks(count, sms),
            "recv_permute": plan.place_blocks(plan.place_split(sms, copies_scales)[1]),
            "combine_send": plan.combine_send_blocks(sms),
            "combine_recv": plan.combine_recv_blocks(count, sms),
        },
    }
    if plan.one_rank:
        blocks = {"one_rank_dispatch": plan.one_rank_dispatch_blocks(count, sms)}
        if plan.dispatches_at_once(count):
            found["flags"] = "none"
        else:
            blocks = {name: found["blocks"][name] for name in ("dispatch_send", "recv_permute")}
        found["blocks"] = blocks | {"one_rank_combine": plan.one_rank_combine_blocks(count, sms)}
    return found


def _peer_access() -> list[list[bool]]:
    """Whether GPU `i` of this host can load and store the memory of GPU `j`."""
    gpus = _gpu_indices()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in gpus] for i in gpus]


def _nvlinks() -> list[int] | None:
    """Active NVLinks of each GPU; None without GPUs, or without NVIDIA's management library for Python."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return [_active_links(pynvml, str(torch.cuda.get_device_properties(i).uuid)) for i in _gpu_indices()] or None
    except pynvml.NVMLError:
        return None


def _gpu_indices() -> range:
    return range(torch.cuda.device_count())


def _active_links(pynvml: Any, uuid: str) -> int:
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(gpu, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            break  # The GPU has no more links.
    return active


def _limits() -> dict[str, Any]:
    shared = room_for_heaps()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "shared_memory": {
            "folder": shared.folder,
            "total_bytes": shared.total_bytes,
            "free_bytes": shared.available_bytes,
        },
        "locked_memory_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "kept_weights": _kept_weights(),
    }


def _kept_weights() -> dict[str, Any]:
    """What layers keep in host memory for a restart, and the room for more."""
    folder = kept_folder()
    try:
        kept, room, problem = sum(layer.num_bytes for layer in kept_layers()), Room.of(folder).usable_bytes, None
    except (ValueError, OSError) as error:
        kept, room, problem = 0, 0, str(error)
    return {"folder": str(folder), "bytes": kept, "usable_bytes": room, "problem": problem}


def _engine(parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    """The engine, which kernels run the experts' GEMMs with it, and why not Hopper's."""
    found = dict.fromkeys(("name", "grouped_gemm", "problem")) | {"device": device.type, "interpreted": INTERPRET}
    try:
        name = resolve_engine(parallel.engine, device)
    except ValueError as error:
        return found | {"problem": str(error)}
    kernels = {"torch": "torch", "cuda": "CUDA C++, Triton for operands that those do not support"}
    why = "as asked for" if parallel.engine == "triton" else f"({missing_for_cuda(device)})"
    return found | {"name": name, "grouped_gemm": kernels.get(name, f"Triton {why}")}


def _transport(parallel: ParallelConfig, group: RankGroup, device: torch.device) -> dict[str, Any]:
    try:
        kernels, _ = exchange_engine(resolve_engine(parallel.engine, device), device)
        choice = choose_transport(group, device, parallel.transport, kernels)
    except ValueError as error:
        nothing = {"between_hosts": None, "after_death": None}
        return {"name": None, "why_not": {}, "problem": str(error), "hosts": 1, **nothing}
    hosts, between = 1, None
    if choice.name == "hierarchical" and choice.hosts is not None:
        hosts = choice.hosts.num_hosts
        between = f"{hosts} hosts of {choice.hosts.ranks_per_host} ranks: {choice.local} inside, "
        between += f"NCCL between ({graph_caution() or 'also in graphs'})" if device.type == "cuda" else "gloo between"
    return {
        "name": choice.name,
        "why_not": choice.reasons,
        "problem": None,
        "hosts": hosts,
        "between_hosts": between,
        "after_death": AFTER_DEATH[choice.name],
    }


def _print_report(report: dict[str, Any], console: Console) -> None:
    facts = Table(title="This machine", show_header=False)
    versions = (f"{name} {version or 'not installed'}" for name, version in report["packages"].items())
    facts.add_row("python", f"{report['python']} on {report['platform']}")
    facts.add_row("packages", ", ".join(versions))
    devices = [f"{d['name']} ({d['arch']}, {decimal(d['memory_bytes'])})" for d in report["devices"]]
    without = f"none (this torch is built for CUDA {report['cuda']})" if report["cuda"] else "none (torch for CPUs)"
    facts.add_row("GPUs", escape("\n".join(devices)) or without)
    if report["devices"]:
        facts.add_row("links", _describe_links(report))
        facts.add_row("NVSHMEM", report["nvshmem"] or "cannot be loaded")
    limits = report["limits"]
    memory, shared = limits["memory_bytes"], limits["shared_memory"]
    facts.add_row("cores", str(limits["cores"]))
    facts.add_row("memory", f"{decimal(memory['total'])}, {decimal(memory['available'])} available")
    if shared["folder"] is None:
        facts.add_row("shared memory", "without a name: as much as memory is available, whatever the size of /dev/shm")
    else:
        free = f"{decimal(shared['total_bytes'])}, {decimal(shared['free_bytes'])} free"
        facts.add_row("shared memory", f"files in {shared['folder']}: {free}")
    locked = limits["locked_memory_bytes"]
    facts.add_row("locked memory", decimal(locked) if locked is not None else "unlimited")
    kept = limits["kept_weights"]
    text = f"{decimal(kept['bytes'])} in {kept['folder']}, room for {decimal(kept['usable_bytes'])}"
    facts.add_row("kept weights", escape(kept["problem"] or text))
    console.print(facts)

    choice = Table(title=f"What {report['ranks']} rank(s) would use", show_header=False)
    engine, transport = report["engine"], report["transport"]
    how = " (interpreted)" if engine["interpreted"] and engine["name"] == "triton" else ""
    choice.add_row("engine", escape(engine["problem"] or f"{engine['name']} on {engine['device']}{how}"))
    if engine["grouped_gemm"]:
        choice.add_row("grouped GEMM", escape(engine["grouped_gemm"]))
    choice.add_row("transport", escape(transport["problem"] or transport["name"]))
    if transport["between_hosts"] is not None:
        choice.add_row("between hosts", escape(transport["between_hosts"]))
    if transport["after_death"] is not None:
        choice.add_row("after a death", escape(transport["after_death"]))
    for name, reason in transport["why_not"].items():
        choice.add_row(f"not {name}", escape(reason))
    console.print(choice)
    if report["ranks"] == 1:
        console.print("One rank has no peers; run this under torchrun to see the choice for more.")
    if report["expert_bytes"] is not None:
        size, formats = decimal(report["expert_bytes"]), report["expert_bytes_by_format"]
        others = ", ".join(f"{decimal(size)} in {name}" for name, size in formats.items() if isinstance(size, int))
        console.print(f"Weights of the experts of one layer, on each of {report['world_size']} rank(s): {size}")
        console.print(f"With these weights in other formats: {others}")
    for count, formats in report["reserved_bytes"].items():
        _print_reserved(report, count, formats, console)
    if report["deep_ep_bytes"]:
        _print_deep_ep(report, console)
    if report["exchange_plans"]:
        _print_exchange_plans(report, console)
    if report["gemm_plans"]:
        _print_gemm_plans(report, console)


def _print_deep_ep(report: dict[str, Any], console: Console) -> None:
    title = f"moe_runtime.deep_ep on each of {report['world_size']} rank(s)"
    columns = ("normal: reserved", "rows, bf16", "low latency: reserved", "rows, bf16", "rows, FP8")
    table = Table("tokens per rank", *columns, title=title)
    for count, sizes in report["deep_ep_bytes"].items():
        table.add_row(str(count), *map(decimal, sizes.values()))
    console.print(table)


def _print_exchange_plans(report: dict[str, Any], console: Console) -> None:
    kernels = "dispatch_send, recv_permute, combine_send, combine_recv"
    if report["world_size"] == 1:
        kernels = "one_rank_dispatch, or dispatch_send and recv_permute; one_rank_combine"
    title = f"Exchange on {report['world_size']} rank(s); blocks of {kernels}"
    columns = ("tokens per rank", "engine", "rows", "record", "partial sum", "a flag for", "combine parts", "blocks")
    table = Table(*columns, title=title)
    for count, plan in report["exchange_plans"].items():
        cells = [plan["engine"], plan["rows"], f"{plan['record_bytes']} B", f"{plan['partial_bytes']} B"]
        if "blocks" in plan:
            cells += [plan["flags"], str(plan["parts"]), ", ".join(map(str, plan["blocks"].values()))]
        table.add_row(str(count), *cells)
    console.print(table)


def _print_gemm_plans(report: dict[str, Any], console: Console) -> None:
    ranks = f"{report['world_size']} rank(s)"
    title = f"Grouped GEMMs of the experts on {ranks}: kernel, regime, tile of rows x columns x K"
    table = Table("tokens per rank", "rows per expert", "engine", "gate/up", "down", title=title)
    for count, plans in report["gemm_plans"].items():
        cells = []
        for plan in (plans["gate_up"], plans["down"]):
            tile = f", {' x '.join(map(str, plan['tile']))}" if plan["blocks"] else ""
            overlapped = ", dequantization overlapped" if plan["overlapped"] else ""
            cells.append(f"{plan['kernel']}, {plan['regime']}{tile}{overlapped}")
        table.add_row(str(count), f"{plans['rows_per_expert']:g}", plans["engine"], *cells)
    console.print(table)
    for title, name in (("gate/up", "gate_up"), ("down", "down")):
        products = [plans[name] for plans in report["gemm_plans"].values()]
        found = {f"{plan['rows']} rows x {plan['weights']} weights in {plan['multiplied_in']}" for plan in products}
        console.print(f"{title} multiplies {' or '.join(sorted(found))}")


def _describe_links(report: dict[str, Any]) -> str:
    """In words: NVLinks of each GPU, and which pairs of GPUs cannot access each other."""
    links, access = report["nvlinks"], report["peer_access"]
    apart = [f"{i}-{j}" for i, row in enumerate(access) for j, reachable in enumerate(row) if not reachable]
    text = "NVLinks unknown (no pynvml)" if links is None else f"NVLinks per GPU: {', '.join(map(str, links))}"
    return f"{text}; {'no access: ' + ', '.join(apart) if apart else 'every GPU can access every other'}"


def _print_reserved(
    report: dict[str, Any], count: int, formats: dict[str, dict[str, int] | str], console: Console
) -> None:
    world_size = report["world_size"]
    free = report["limits"]["shared_memory"]["free_bytes"]
    title = f"Symmetric memory that each of {world_size} rank(s) would reserve, max_tokens_per_rank {count}"
    table = Table(title=title)
    more = (name for name in ("staging", "link") if any(name in regions for regions in formats.values()))
    columns = (*REGIONS, *more)
    for column in ("token format", *columns, "per rank", "all ranks"):
        table.add_column(column, justify="left" if column == "token format" else "right")
    for name, regions in formats.items():
        if isinstance(regions, str):
            table.add_row(name, escape(regions))
            continue
        total = report["copies"] * sum(regions.values())
        sizes = (*(regions[region] for region in columns), total, world_size * total)
        table.add_row(name, *(decimal(size) for size in sizes))
        if world_size * total > free and not report["devices"]:
            console.print(f"{name}: {world_size} ranks on this host need more shared memory than is free")
    console.print(table)
    if report["copies"] > 1:
        console.print("`per rank` counts the copy of all regions that the collective transport stages for each peer.")


def work(options: argparse.Namespace) -> int:
    """Examine and print; 0. Collective."""
    environment.check_at_least(1, world_size=options.world_size, tokens=min(options.tokens, default=None))
    if options.hosts is not None and options.world_size is None:
        raise ValueError("--hosts: expected it with --world-size")
    if options.hosts is not None and (options.hosts < 1 or options.world_size % options.hosts):
        raise ValueError(f"--hosts: expected a divisor of --world-size {options.world_size}, got {options.hosts}")
    config = None if options.config is None else load_config(options.config)
    for name in ("tokens", "hopper", "world_size"):
        if config is None and getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')}: expected it with --config")
    parallel = environment.with_options(config.parallel if config else ParallelConfig(), options)
    device = init_from_env(timeout_s=parallel.startup_timeout_s)
    group = RankGroup(timeout_s=parallel.startup_timeout_s)
    layer = config.layer if config else None
    world_size, placed = options.world_size or group.world_size, bool(config and config.placement)
    how = {"placed": placed, "hopper": options.hopper, "num_hosts": options.hosts}
    report = examine(layer, parallel, world_size, group, device, options.tokens, **how)
    if group.rank == 0 and options.json:
        print(json.dumps(report, indent=1))
    elif group.rank == 0:
        _print_report(report, Console())
    group.barrier("doctor")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.launch.doctor", description="Examine this machine.")
    environment.add_common_options(parser, None)
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks to reserve for (default: those running)")
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts of those ranks (default: those running)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", metavar="N", default=[], help="max_tokens_per_rank instead of the config's"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--hopper", action="store_true", help="plan the experts' GEMMs for an H100 or H200")
    return environment.run_parsed("doctor", parser, work, arguments)


if __name__ == "__main__":
    sys.exit(main())
