"""Symmetric memory that a rank reserves for a layer: a pure function of the config and the number of ranks.

With `W` ranks, `T = max_tokens_per_rank`, `K = top_k`, each region holds two halves, used in turn:

    landing      2 * (W * T + 1) * record     one record per token of every rank, however many experts share it, and
                                              4 bytes for each expert where own rows are placed
    token_flags  2 * W * T * 4                the epoch of what lies in each slot of landing
    combine      2 * T * min(K, W) * partial  one partial sum per token and rank that holds one of its experts
    signals      small, see `moe_runtime.comm.signals`
    staging      the weights of one expert in bf16, at most 16 MiB: only for layers with a placement, and where ranks
                 can come back (`ExpertParallelContext.can_rejoin`)

`record` and `partial` are the bytes of a token in `token_format` and of a partial sum in `combine_format`. Halves are
aligned to 256 bytes. Layers of one context share these regions, so the largest layer counts, not the sum.
The collective transport holds one more copy of all this for each peer (`moe_runtime.comm.heaps.collective`).

On `H` hosts of `L` ranks, landing, token_flags and combine are those of `L` ranks with `H (T + 1)` tokens each. Beside
them there is what travels between hosts, out and in:

    link         2 * H * (T * (record + 4) + header + (T + 1) * sum)

`sum` are the bytes of a host's partial sum in `combine_format`; partial sums within a host are bf16.
"""

from __future__ import annotations

import math

from moe_runtime.comm.heaps.heap import align_region
from moe_runtime.comm.hosts import Hosts
from moe_runtime.comm.signals import SignalLayout
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.host_memory import link_bytes
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, worst_case_rows
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import ceil_div, format_named, weight_format_named
from moe_runtime.kernels.gemm.weights import GateUpOrder, scales_shape
from moe_runtime.support.arguments import check_flag, check_integer, check_kind

REGIONS = ("landing", "token_flags", "combine", "signals")

CHUNK_BYTES = 16 << 20
"""Most bytes of an expert that move between ranks at once."""
MAX_RANKS = 1 << 20
"""Most ranks that sizes are asked for, far more than there are GPUs in one machine."""
STAGING_WORDS = 5
"""Words per rank at the start of region `staging`; `moe_runtime.placement.migration` has their meaning."""


def _check_sizes(config: object, world_size: object) -> None:
    check_kind("config", config, MoELayerConfig)
    check_integer("world_size", world_size, high=MAX_RANKS)


def layer_geometry(config: MoELayerConfig, world_size: int) -> ExchangeGeometry:
    """What rank 0 of `world_size` exchanges for a layer with `config`, without a placement.

    Raises `ValueError` unless `config` is a `MoELayerConfig` and `world_size` an integer from 1 to `MAX_RANKS`.
    """
    _check_sizes(config, world_size)
    return ExchangeGeometry(
        rank=0,
        world_size=world_size,
        record=RecordLayout(format_named(config.token_format), config.hidden_size, config.top_k),
        combine_format=format_named(config.combine_format),
        num_experts=config.num_experts,
        max_tokens=config.max_tokens_per_rank,
        contiguous=config.mode_on(world_size) == "contiguous",
        row_capacity=config.expert_row_capacity
        or worst_case_rows(config.num_experts, world_size, config.top_k, config.max_tokens_per_rank),
        num_sms=config.num_sms,
    ).placing_own_rows()


def reserved_bytes(
    config: MoELayerConfig, world_size: int, *, placed: bool = False, num_hosts: int = 1
) -> dict[str, int]:
    """Bytes of each symmetric region that every rank of `world_size` reserves for one layer with `config`.

    `placed` adds region `staging`, as for a layer with a placement, or where ranks can come back. With several hosts
    `link` is added: memory of what travels between them, which is not symmetric.

    Raises `ValueError` unless `config` is a `MoELayerConfig`, `world_size` an integer from 1 to `MAX_RANKS`, `placed` a
    bool and `num_hosts` a divisor of `world_size`.
    """
    check_flag("placed", placed)
    geometry, ranks = layer_geometry(config, world_size), world_size
    check_integer("num_hosts", num_hosts, high=world_size)
    if world_size % num_hosts:
        raise ValueError(f"num_hosts: expected a divisor of {world_size} ranks, got {num_hosts}")
    more = {"staging": staging_bytes(config, world_size // num_hosts)} if placed else {}
    if num_hosts > 1:
        hosts = Hosts(num_hosts, world_size // num_hosts, 0, 0)
        between = HostGeometry(hosts, geometry, capacity=config.host_capacity)
        geometry, ranks = between.local, between.hosts.ranks_per_host
        more["link"] = link_bytes(num_hosts, **between.chunk_bytes)
    region_bytes = {name: 2 * align_region(size) for name, size in geometry.half_bytes().items()}
    region_bytes["signals"] = align_region(SignalLayout(ranks).num_bytes)
    return {name: region_bytes[name] for name in REGIONS} | more


def expert_bytes(config: MoELayerConfig, world_size: int) -> int:
    """Bytes of the quants and block scales of the experts of one layer, on the rank with the most experts.

    Raises `ValueError` unless `config` is a `MoELayerConfig` and `world_size` an integer from 1 to `MAX_RANKS`.
    """
    _check_sizes(config, world_size)
    fmt, total = weight_format_named(config.weight_format), 0
    hidden, inner, activation = config.hidden_size, config.intermediate_size, config.activation
    gate_up_order = GateUpOrder(activation.order) if activation.gated else None
    for rows, columns, order in ((activation.num_parts * inner, hidden, gate_up_order), (hidden, inner, None)):
        total += rows * fmt.quant_bytes(columns)
        if (shape := scales_shape(fmt, 1, rows, columns, order)) is not None and fmt.scale_dtype is not None:
            total += math.prod(shape) * fmt.scale_dtype.itemsize
    return ceil_div(config.num_experts, world_size) * total


def staging_bytes(config: MoELayerConfig, num_ranks: int) -> int:
    """Bytes of region `staging`: words of the `num_ranks` of a host, and at most `CHUNK_BYTES` of an expert in bf16."""
    matrices = config.activation.num_parts + 1
    expert_bytes = align_region(matrices * config.hidden_size * config.intermediate_size * 2)
    return staging_words_bytes(num_ranks) + min(expert_bytes, CHUNK_BYTES)


def staging_words_bytes(num_ranks: int) -> int:
    """Bytes of the words at the start of region `staging`, aligned."""
    return align_region(STAGING_WORDS * num_ranks * 4)
