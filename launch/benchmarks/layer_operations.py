"""The operations of `bench` over one layer: each is checked, then timed, and compared with torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from moe_runtime.experts import Experts
from moe_runtime.kernels.gemm.expanded_weights import StoredWeights
from moe_runtime.kernels.gemm.grouped_gemm import gemm_bytes, gemm_flops, grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.launch.benchmarks import bounds, checks, network, torch_layer
from moe_runtime.launch.benchmarks.layer_bench import Bench, Measured, Work
from moe_runtime.launch.benchmarks.timing import TOTAL, Lap, Step, copies_to_rotate
from moe_runtime.launch.benchmarks.trace import record
from moe_runtime.launch.common import cases, environment
from moe_runtime.reference import relative_error


def exchange(bench: Bench) -> None:
    """Dispatch and combine, each alone and both together, compared with an all-to-all of the same bytes.

    Called as by the layer: block scales stay in the records if its experts read them there.
    Every dispatch is combined, since the next but one waits for that.
    """
    dispatcher, geometry = bench.layer.dispatcher, bench.layer.dispatcher.geometry
    wanted = [name for name in ("dispatch", "combine") if name in bench.settings.operations]
    scales_in_record = bench.layer.scales_in_record
    arrived = dispatcher.dispatch(*bench.turns[0], scales_in_record=scales_in_record)
    hosts = bench.context.hosts
    rows_RH = checks.combine_input(arrived, bench.inputs, hosts)
    found = {"dispatch": checks.check_dispatch(arrived, bench.inputs, hosts)}
    y_TH = dispatcher.combine(rows_RH, arrived.handle)
    found["combine"] = checks.check_combine(y_TH, bench.inputs, geometry, hosts)
    passed = {name: bench.agree(found[name]) for name in wanted}
    # Other turns have rows where the first has none.
    rows_RH.nan_to_num_(0.0)
    sent = [checks.sent_tokens(idx, geometry) for idx in bench.ids_of_turns]
    traffic = _traffic(sent, geometry.record.record_bytes, geometry.partial_bytes)
    ours = traffic
    if hosts is not None:
        here = [network.within_hosts(tokens, hosts) for tokens in sent]
        ours = _traffic(here, geometry.record.record_bytes, network.geometry_of(bench.layer).local.partial_bytes)
    work = {name: Work(statistics.mean(map(bounds.busiest_bytes, ours[name]))) for name in ours}

    def step(number: int, lap: Lap) -> None:
        handle = dispatcher.dispatch(*bench.turn(number), scales_in_record=scales_in_record).handle
        lap("dispatch")
        dispatcher.combine(rows_RH, handle)
        lap("combine")

    graph_safe = bench.context.graph_safe
    measured = bench.time(step, list(passed.values()), capturable=graph_safe, laps=True)
    for name in wanted:
        bench.add(name, measured, name, work[name], passed[name])
        _add_all_to_all(bench, name, traffic[name])
    if len(wanted) == 2:
        both = bench.time(step, list(passed.values()), capturable=graph_safe)
        total = Work(moved_bytes=sum(part.moved_bytes or 0 for part in work.values()))
        bench.add("dispatch+combine", both, TOTAL, total, None)


def _traffic(sent: list[torch.Tensor], record_bytes: int, partial_bytes: int) -> dict[str, list[torch.Tensor]]:
    """Bytes from each rank to each other one, by turn, of tokens that `sent` counts; combine goes the other way."""
    others = [tokens.clone().fill_diagonal_(0) for tokens in sent]
    return {
        "dispatch": [tokens * record_bytes for tokens in others],
        "combine": [tokens.T * partial_bytes for tokens in others],
    }


def _add_all_to_all(bench: Bench, name: str, traffic_bytes: list[torch.Tensor]) -> None:
    """Time torch's all-to-all of the same bytes between the same ranks, without what it would still need.

    Over several hosts it sends each token to each rank of its experts by itself.
    """
    if bench.context.group is None or bench.context.world_size == 1:
        return
    work, hosts = Work(statistics.mean(map(bounds.busiest_bytes, traffic_bytes))), bench.context.hosts
    if hosts is not None:
        away = [bounds.busiest_bytes(network.between_hosts(traffic, hosts)) for traffic in traffic_bytes]
        work = replace(work, network_bytes=statistics.mean(away))
    group, rank = bench.context.group.group, bench.context.rank
    sizes = [(matrix[rank].tolist(), matrix[:, rank].tolist()) for matrix in traffic_bytes]
    most_sent, most_came = (max(sum(pair[way]) for pair in sizes) for way in (0, 1))
    device = bench.context.device
    copies = copies_to_rotate(device, most_sent)
    sources = [torch.randint(256, (most_sent,), dtype=torch.uint8, device=device) for _ in range(copies)]
    target = torch.empty(most_came, dtype=torch.uint8, device=device)

    def step(number: int, lap: Lap) -> None:
        (sent, came), source = sizes[number % len(sizes)], sources[number % copies]
        dist.all_to_all_single(target[: sum(came)], source[: sum(sent)], came, sent, group=group)

    measured = bench.time(step, [], capturable=True)
    bench.add(name, measured, TOTAL, work, None, "torch all_to_all_single")


def gemm(bench: Bench) -> None:
    """Both grouped GEMMs on the rows that arrive in the first turn, compared with torch's in bf16 on GPUs."""
    experts, config = bench.experts, bench.layer.config
    inner, hidden, engine = config.intermediate_size, config.hidden_size, bench.context.engine
    arrived = bench.layer.dispatcher.dispatch(*bench.turns[0], scales_in_record=bench.layer.scales_in_record)
    fmt = experts.intermediate_format
    assert fmt is not None and not isinstance(fmt, str)
    gate_up, down = (_rotated(w, bench.context.device) for w in (experts.gate_up, experts.down))

    def project(number: int, *, stored: bool = False) -> GroupedRows:
        w, gsf, then = gate_up[number % len(gate_up)], experts.intermediate_gsf, None if stored else down[0]
        return grouped_gemm_swiglu(
            arrived, w, experts.activation, out_format=fmt, out_gsf=gsf, then=then, engine=engine
        )

    middle, between = project(0, stored=True), project(0)
    out_RH = torch.full((arrived.capacity, hidden), torch.nan, dtype=torch.bfloat16, device=bench.context.device)
    grouped_gemm(between, down[0], out=out_RH, engine=engine)
    passed = (
        bench.agree(checks.check_gate_up(middle, arrived, experts.gate_up, experts.activation)),
        bench.agree(checks.check_down(out_RH, middle, experts.down)),
    )
    counts = arrived.group_offsets.diff().tolist()
    steps: tuple[Step, ...] = (
        lambda number, lap: project(number),
        lambda number, lap: grouped_gemm(between, down[number % len(down)], out=out_RH, engine=engine),
    )
    sizes = (
        (config.activation.num_parts * inner, hidden, arrived, checks.format_bytes(fmt, inner)),
        (hidden, inner, middle, 2 * hidden),
    )
    weights = (experts.gate_up, experts.down)
    for index, (n, k, rows, row_bytes) in enumerate(sizes):
        name = ("gemm gate+up", "gemm down")[index]
        moved = gemm_bytes(
            sum(counts),
            n,
            k,
            a_format=rows.format,
            w_format=weights[index].format,
            active_experts=sum(count > 0 for count in counts),
            out_bytes_per_row=row_bytes,
        )
        work = _most(bench, Work(moved_bytes=moved, flops=gemm_flops(sum(counts), n, k)))
        measured = bench.time(steps[index], [passed[index]], capturable=True)
        bench.add(name, measured, TOTAL, work, passed[index], weight_bytes=weights[index].num_bytes)
        if bench.context.device.type == "cuda":
            _add_grouped_mm(bench, name, counts, n, k, work)
    bench.layer.dispatcher.combine(out_RH, arrived.handle)


def _add_grouped_mm(bench: Bench, name: str, counts: Sequence[int], n: int, k: int, work: Work) -> None:
    """Time torch's grouped GEMM of the same shapes in bf16, without activation or quantization."""
    device = bench.context.device
    call = torch_layer.grouped_mm(counts, n, k, device, copies_to_rotate(device, 2 * len(counts) * n * k))
    measured = bench.time(lambda number, lap: call(number) if sum(counts) else None, [], capturable=True)
    bench.add(name, measured, TOTAL, replace(work, moved_bytes=None), None, "torch grouped_mm bf16")


def _most(bench: Bench, work: Work) -> Work:
    """The work of the rank that has most."""
    ranks = environment.gather(bench.context, "work", work, Work)
    return max(ranks, key=lambda other: other.flops or 0)


def whole_layer(bench: Bench) -> None:
    """The layer, with its router where that chooses the experts, compared with torch, which knows the routing before.

    Where there is a trace to write, the layer is recorded and nothing is timed: profiling would slow what comes after.
    """
    layer, config = bench.layer, bench.layer.config
    part = slice(0, bench.checked_tokens)
    by_itself = bench.routing == "router"
    experts = _experts_in_turn(bench)

    def forward(number: int) -> torch.Tensor:
        x_TH, idx_TK, weights_TK = bench.turn(number)
        layer.experts = experts[number % len(experts)]
        try:
            return layer(x_TH) if by_itself else layer(x_TH, topk_idx=idx_TK, topk_weights=weights_TK)
        finally:
            layer.experts = experts[0]

    y_TH = forward(0)[part]
    key = (bench.routing, config.max_tokens_per_rank, part.stop)
    reference_TH = bench.baselines.reference(layer, key, *(tensor[part] for tensor in bench.turns[0]))
    error, _ = relative_error(y_TH, reference_TH)
    bound = cases.layer_bound(config, several_hosts=bench.context.hosts is not None)
    check = bench.agree(checks.Check("layer: relative Frobenius error", error, bound))
    if bench.settings.trace is not None:
        title = f"{config.token_format} > {config.combine_format}, {config.max_tokens_per_rank} tokens, {bench.routing}"
        phases = record(bench.context, forward, bench.settings.trace, f"layer {title}") if check.passed else None
        bench.add("layer", Measured({}), TOTAL, Work(), check, phases=phases)
        return
    starts = layer.dispatcher.geometry.starts
    rows = statistics.mean(max(_rows_of_ranks(idx, starts)) for idx in bench.ids_of_turns)
    width = (config.activation.num_parts + 1) * config.intermediate_size
    work = Work(flops=gemm_flops(1, width, config.hidden_size) * rows)
    measured = bench.time(lambda number, lap: forward(number), [check], capturable=bench.context.graph_safe)
    weight_bytes = bench.experts.gate_up.num_bytes + bench.experts.down.num_bytes
    bench.add("layer", measured, TOTAL, work, check, weight_bytes=weight_bytes, weight_copies=len(experts))
    del experts[1:]  # torch's layer needs their memory
    if bench.settings.with_torch:
        _add_torch_layer(bench, part, reference_TH, work)


def _experts_in_turn(bench: Bench) -> list[Experts]:
    """The layer's experts, and copies of them where a step would find much of them in the cache."""
    experts = bench.experts
    count = copies_to_rotate(bench.context.device, experts.gate_up.num_bytes + experts.down.num_bytes)
    copies = (replace(experts, gate_up=experts.gate_up.clone(), down=experts.down.clone()) for _ in range(count - 1))
    return [experts, *copies]


def _add_torch_layer(bench: Bench, part: slice, reference_TH: torch.Tensor, work: Work) -> None:
    baseline, context = bench.baselines.torch_layer(bench.layer), bench.context
    starts = bench.layer.dispatcher.geometry.starts
    routes = [torch_layer.Route.of(idx, context.rank, starts, context.device) for idx in bench.ids_of_turns]

    def forward(number: int) -> torch.Tensor:
        x_TH, _, weights_TK = bench.turn(number)
        return baseline(context, x_TH, weights_TK, routes[number % len(routes)])

    error, _ = relative_error(forward(0)[part], reference_TH)
    bound = torch_layer.error_bound()
    check = bench.agree(checks.Check("torch's layer: relative Frobenius error", error, bound))
    measured = bench.time(lambda number, lap: forward(number), [check], capturable=True)
    bench.add("layer", measured, TOTAL, work, check, torch_layer.NAME, weight_bytes=baseline.weight_bytes)


def _rows_of_ranks(idx: Sequence[torch.Tensor], starts: Sequence[int]) -> list[int]:
    """(token, expert) rows that come to each rank."""
    ids = torch.cat(list(idx))
    return [int(((ids >= first) & (ids < end)).sum()) for first, end in pairwise(starts)]


def _rotated(w: StoredWeights, device: torch.device) -> list[StoredWeights]:
    """`w`, and copies of it where it would stay in the cache."""
    return [w, *(w.clone() for _ in range(copies_to_rotate(device, w.num_bytes) - 1))]
