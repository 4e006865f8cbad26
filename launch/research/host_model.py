"""A model of the time of a layer's step over several hosts, part by part, from bytes and rates.

Each part is a fixed time and the larger of the times that its bytes take at the rates of what they cross. Nothing here
measures: `host_tables` writes what the model says, and `network_check` compares its network with a slow one.

Every rank has as much to do: tokens choose experts alike on average. `T` tokens of a rank, `H` hosts of `L` ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from math import comb

from moe_runtime.comm.hosts import Hosts
from moe_runtime.config import MoELayerConfig, ResolvedMode
from moe_runtime.context.memory import layer_geometry
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.kernels.formats.number_formats import BF16, FORMATS, weight_format_named
from moe_runtime.kernels.gemm.grouped_gemm import gemm_bytes, gemm_flops
from moe_runtime.launch.benchmarks import link_rate
from moe_runtime.launch.benchmarks.checks import format_bytes
from moe_runtime.launch.common.cases import with_token_format
from moe_runtime.launch.kernel_bench import ceilings as measured
from moe_runtime.launch.kernel_bench.ceilings import Ceilings

DISPATCH = ("pack", "network dispatch", "forward", "dispatch_recv")
COMBINE = ("combine_send", "relay", "network combine", "total")
PARTS = (*DISPATCH, "experts", *COMBINE)
"""Parts of a step over several hosts, in their order."""

ONE_HOST_DISPATCH, ONE_HOST_COMBINE = ("dispatch_send", "dispatch_recv"), ("combine_send", "combine_recv")
"""Parts of the exchange on one host."""

Parts = dict[str, float]
"""Microseconds by part."""


@dataclass(frozen=True)
class Machine:
    """Rates and fixed times of GPUs and of the network between their hosts.

    Attributes:
        network_gb_per_s: of a rank. Assumed: nine tenths of a card of 400 Gb/s for each rank. DeepEP V1 publishes 43 to
            58 GB/s for such cards (its page `docs/legacy.md`).
        network_latency_us: of an exchange between hosts without its bytes. What NCCL's all-to-all takes for one token
            between two H200s of one host (`h200x2.json`): over a network it is more.
        link_gb_per_s: out of a rank to ranks of its host (`links_h200x4.json`).
        memory_tb_per_s, bf16_tflop_per_s, fp8_tflop_per_s: those of `kernel_bench.ceilings`, measured on an H200.
        kernel_us: of a kernel of the exchange without its bytes: a quarter of dispatch and combine of one token in
            `h200x2.json`, which are two kernels each.
        experts_over_floor: times its floor that a layer takes: the median of DeepSeek-V3 in `models_h100.json`, in
            `nvfp4` and `fp8_block`, from 8 tokens on.

    Raises:
        ValueError: a rate is not positive, or a time is negative.
    """

    network_gb_per_s: float = 45.0
    network_latency_us: float = 10.2
    link_gb_per_s: float = link_rate.MEASURED.gb_per_s
    memory_tb_per_s: float = measured.MEMORY_TB_PER_S
    bf16_tflop_per_s: float = measured.BF16_TFLOP_PER_S
    fp8_tflop_per_s: float = measured.FP8_TFLOP_PER_S
    kernel_us: float = 3.8
    experts_over_floor: float = 1.14

    def __post_init__(self) -> None:
        for field in fields(self):
            value, time = getattr(self, field.name), field.name.endswith("_us")
            if not (0 if time else math.ulp(0.0)) <= value < math.inf:
                kind = "a number from 0 on" if time else "a positive number"
                raise ValueError(f"{field.name}: expected {kind}, got {value}")

    def memory_us(self, num_bytes: float) -> float:
        """Microseconds of so many bytes to and from the memory of a GPU."""
        return num_bytes / self.memory_tb_per_s * 1e-6

    def link_us(self, num_bytes: float) -> float:
        """Microseconds of so many bytes from a rank to others of its host."""
        return num_bytes / self.link_gb_per_s * 1e-3

    def network_us(self, num_bytes: float) -> float:
        """Microseconds of an exchange in which a rank sends so many bytes to other hosts; 0 for none."""
        return self.network_latency_us + num_bytes / self.network_gb_per_s * 1e-3 if num_bytes else 0.0

    def kernel(self, memory_bytes: float, link_bytes: float = 0.0) -> float:
        """Microseconds of a kernel of the exchange: what crosses memory and links does so at the same time."""
        return self.kernel_us + max(self.memory_us(memory_bytes), self.link_us(link_bytes))


@dataclass(frozen=True)
class Reach:
    """Where tokens go.

    Attributes:
        host: part of all tokens that has an expert on a given host.
        rank: part of all tokens that has an expert on a given rank.
    """

    host: float
    rank: float


def reached(experts_there: int, num_experts: int, top_k: int) -> float:
    """Part of all tokens with one of `experts_there` experts or more, if every set of `top_k` experts is chosen alike.

    >>> reached(128, 256, 8) > 0.995, reached(256, 256, 8), reached(1, 4, 1)
    (True, 1.0, 0.25)
    """
    return 1 - comb(num_experts - experts_there, top_k) / comb(num_experts, top_k)


@dataclass(frozen=True)
class Deployment:
    """A layer over `hosts` hosts of `ranks_per_host` ranks; `max_tokens_per_rank` of the config is `T`.

    Attributes:
        mode: how rows lie after dispatch; None is as a layer chooses.

    Raises:
        ValueError: fewer than one host or rank, or ranks that do not divide the experts.
    """

    config: MoELayerConfig
    hosts: int
    ranks_per_host: int
    mode: ResolvedMode | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.config.num_experts % self.ranks:
            raise ValueError(f"hosts: expected ranks that divide {self.config.num_experts} experts, got {self.ranks}")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def tokens(self) -> int:
        return self.config.max_tokens_per_rank

    @property
    def rows(self) -> int:
        """(token, expert) rows of a rank."""
        return self.tokens * self.config.top_k

    @cached_property
    def geometry(self) -> HostGeometry:
        """The exchange of rank 0, which has all sizes."""
        hosts = Hosts(self.hosts, self.ranks_per_host, 0, 0)
        return HostGeometry(hosts, layer_geometry(self.config, self.ranks), capacity=self.config.host_capacity)

    @property
    def network_bytes(self) -> dict[str, int]:
        """What a rank sends to other hosts in a step: chunks of fixed size, however full."""
        geometry, others = self.geometry, self.hosts - 1
        return {"dispatch": others * geometry.dispatch_chunk, "combine": others * geometry.combine_chunk}

    @cached_property
    def uniform(self) -> Reach:
        """Where tokens go if every set of experts is chosen alike."""
        experts, top_k = self.config.num_experts, self.config.top_k
        return Reach(*(reached(experts // parts, experts, top_k) for parts in (self.hosts, self.ranks)))


def experts_us(where: Deployment, machine: Machine) -> float:
    """Both grouped GEMMs of a rank: its floor by memory or by operations, times `experts_over_floor`.

    As many rows for each expert, and experts without rows are not read.
    """
    config = where.config
    total, local = config.num_experts, config.num_experts // where.ranks
    tokens = where.ranks * where.tokens
    active = round(local * (1 - (1 - config.top_k / total) ** tokens))
    return machine.experts_over_floor * _products_us(config, machine, where.rows, max(active, 1))


def shared_us(config: MoELayerConfig, machine: Machine, intermediate: int) -> float:
    """The floor of a shared expert of this intermediate size in bf16, which has all tokens of a rank."""
    plain = with_token_format(config, "bf16").replace(intermediate_size=intermediate)
    return _products_us(plain, machine, config.max_tokens_per_rank, 1)


def _products_us(config: MoELayerConfig, machine: Machine, rows: int, active: int) -> float:
    tokens, weights = FORMATS[config.token_format], weight_format_named(config.weight_format)
    hidden, inner, parts = config.hidden_size, config.intermediate_size, config.activation.num_parts
    ceilings = Ceilings(machine.memory_tb_per_s, machine.bf16_tflop_per_s, machine.fp8_tflop_per_s)
    found = 0.0
    for n, k, out in ((parts * inner, hidden, format_bytes(tokens, inner)), (hidden, inner, 2 * hidden)):
        moved = gemm_bytes(rows, n, k, a_format=tokens, w_format=weights, active_experts=active, out_bytes_per_row=out)
        pair = (config.weight_format or config.token_format, config.token_format)
        floor, _ = ceilings.floor_us(pair, moved, gemm_flops(rows, n, k))
        assert floor is not None
        found += floor
    return found


def recv_us(where: Deployment, machine: Machine, placed: float = 0.0) -> float:
    """dispatch_recv: rows are copied by expert where they are to be contiguous; else they are only found.

    `placed` is the part of the rows that their sender has stored there, beside what crosses the links.
    """
    row_bytes = format_bytes(FORMATS[where.config.token_format], where.config.hidden_size)
    mode = where.mode or where.config.mode_on(where.ranks)
    return machine.kernel(2 * (1 - placed) * where.rows * row_bytes if mode == "contiguous" else 0)


def step(where: Deployment, machine: Machine, reach: Reach | None = None, experts: float | None = None) -> Parts:
    """Microseconds of each of `PARTS`, one after the other.

    Args:
        where: over two hosts or more.
        reach: where tokens go; None for `where.uniform`.
        experts: of both GEMMs; None for `experts_us`.

    Raises:
        ValueError: there is one host.
    """
    if where.hosts < 2:
        raise ValueError("where: expected several hosts, got 1")
    reach, geometry, sent = reach or where.uniform, where.geometry, where.network_bytes
    tokens, hosts, others = where.tokens, where.hosts, where.ranks_per_host - 1
    rail, record = hosts * tokens, geometry.flat.record.record_bytes
    result, partial = BF16.quant_bytes(where.config.hidden_size), geometry.local.partial_bytes
    # With fewer slots than tokens records are built first, and then copied together.
    copies = 3 if geometry.compacts else 1
    return {
        "pack": machine.kernel(tokens * result + copies * rail * reach.host * record),
        "network dispatch": machine.network_us(sent["dispatch"]),
        "forward": machine.kernel(rail * reach.host * record, rail * others * reach.rank * record),
        "dispatch_recv": recv_us(where, machine),
        "experts": experts_us(where, machine) if experts is None else experts,
        "combine_send": machine.kernel(where.rows * result, rail * others * reach.rank * partial),
        "relay": machine.kernel(rail * (where.ranks_per_host * reach.rank * partial + reach.host * geometry.sum_bytes)),
        "network combine": machine.network_us(sent["combine"]),
        "total": machine.kernel(rail * reach.host * geometry.sum_bytes + tokens * result),
    }


def one_host_step(where: Deployment, machine: Machine) -> Parts:
    """Microseconds of each part on one host: the model there, which measured times of one host can be compared with.

    Raises:
        ValueError: there are several hosts.
    """
    if where.hosts != 1:
        raise ValueError(f"where: expected one host, got {where.hosts}")
    geometry, tokens, rank = where.geometry.flat, where.tokens, where.uniform.rank
    result, record, partial = BF16.quant_bytes(geometry.hidden), geometry.record.record_bytes, geometry.partial_bytes
    others, all_parts = where.ranks_per_host - 1, where.ranks_per_host * rank
    return {
        "dispatch_send": machine.kernel(tokens * result, tokens * others * rank * record),
        "dispatch_recv": recv_us(where, machine, geometry.placing_own_rows().own_rows / where.ranks_per_host),
        "experts": experts_us(where, machine),
        "combine_send": machine.kernel(where.rows * result, tokens * others * rank * partial),
        "combine_recv": machine.kernel(tokens * (all_parts * partial + result)),
    }


def serial_us(parts: Parts, shared: float = 0.0) -> float:
    """A step in which each part waits for the one before, the shared expert among them."""
    return sum(parts.values()) + shared


def overlapped_us(
    where: Deployment, machine: Machine, parts: Parts, shared: float = 0.0, num_parts: int | None = None
) -> float:
    """A step as it is built: kernels of a rank follow each other, and its exchanges between hosts run beside them.

    While tokens cross the network, a rank forwards its own and computes the shared expert. Then each part that has come
    is forwarded. On the way back each part is relayed before it crosses, own tokens are summed while the others cross,
    and `total` sums each part that has come. Every part has the fixed times of its exchange and of its kernels. That
    an exchange slows down the kernels beside it is not counted, nor that `relay` launches a kernel for each host.

    Args:
        parts: of `step`.
        shared: microseconds of a shared expert.
        num_parts: that an exchange has; None for as many as `HostGeometry` gives it.

    Raises:
        ValueError: fewer than one part.
    """
    count = len(where.geometry.parts) if num_parts is None else num_parts
    if count < 1:
        raise ValueError(f"num_parts: expected at least 1, got {num_parts}")
    own, kernel, latency = 1 / where.hosts, machine.kernel_us, machine.network_latency_us

    def share(name: str, fixed: float, part: float) -> float:
        return fixed + (parts[name] - fixed) * part

    clock = share("forward", kernel, own) + shared
    for part in range(1, count + 1):
        came = part * share("network dispatch", latency, 1 / count)
        clock = max(clock, came) + share("forward", kernel, (1 - own) / count)
    dispatched, clock, came, arrivals = clock, 0.0, 0.0, []
    for _ in range(count):
        clock += share("relay", kernel, (1 - own) / count)
        came = max(came, clock) + share("network combine", latency, 1 / count)
        arrivals.append(came)
    clock += share("relay", kernel, own)
    # Where slots are not tokens, all sums are awaited first.
    arrivals = arrivals[-1:] if where.geometry.compacts else arrivals
    for came in arrivals:
        clock = max(clock, came) + share("total", kernel, 1 / len(arrivals))
    return sum(us for name, us in parts.items() if name not in OVERLAPPED) + dispatched + clock


OVERLAPPED = ("network dispatch", "forward", "relay", "network combine", "total")
"""Parts that `overlapped_us` puts side by side."""
