"""What `bench` says of a layer whose ranks are on several hosts: bytes over the network, and the least time for them.

Bytes are those of `HostGeometry`: a rank sends a chunk of fixed size to each other host, however full it is.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.comm.errors import Phase
from moe_runtime.comm.hosts import Hosts
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.hierarchical import HostGeometry
from moe_runtime.launch.benchmarks.timing import Timing, measure_steps
from moe_runtime.layer import MoELayer

PHASES = {"dispatch": Phase.DISPATCH_SEND, "combine": Phase.COMBINE_SEND}
"""The exchanges between hosts in a step."""

PARTS = {"dispatch": ("dispatch",), "combine": ("combine",), "dispatch+combine": tuple(PHASES), "layer": tuple(PHASES)}
"""Exchanges between hosts that an operation of `bench` has in it."""


@dataclass(frozen=True)
class Network:
    """What the ranks of a layer send to other hosts.

    Attributes:
        hosts: the ranks of each host.
        link: name of what carries the bytes.
        sent_bytes: of a rank in a step, by exchange of `PHASES`.
        gb_per_s: what floors count with, by exchange: given, or what the link alone reached with these bytes.
        given: whether the rate was given.
    """

    hosts: Hosts
    link: str
    sent_bytes: dict[str, int]
    gb_per_s: dict[str, float]
    given: bool

    def record(self, operation: str) -> dict[str, Any]:
        """For JSON: the network's part of one of our operations."""
        if operation not in PARTS:
            return self._record(None, None)
        sent = sum(self.sent_bytes[part] for part in PARTS[operation])
        return self._record(sent, sum(self.sent_bytes[part] / self.gb_per_s[part] * 1e-3 for part in PARTS[operation]))

    def baseline_record(self, sent_bytes: float | None) -> dict[str, Any]:
        """For JSON, of a baseline that sends other bytes, None where they are not counted.

        The rate of the link alone was measured with our bytes, and is no floor for others.
        """
        if sent_bytes is None or not self.given:
            return self._record(sent_bytes, None)
        return self._record(sent_bytes, sent_bytes / self.gb_per_s["dispatch"] * 1e-3)

    def _record(self, sent_bytes: float | None, floor_us: float | None) -> dict[str, Any]:
        return {
            "hosts": self.hosts.num_hosts,
            "ranks_per_host": self.hosts.ranks_per_host,
            "link": self.link,
            "network_bytes": sent_bytes,
            "network_gb_per_s": sent_bytes / floor_us * 1e-3 if sent_bytes and floor_us else None,
            "network_floor_us": floor_us,
        }


NO_NETWORK = dict.fromkeys(("hosts", "ranks_per_host", "link", "network_bytes", "network_gb_per_s", "network_floor_us"))
"""`Network.record` where the ranks are not on several hosts, or nothing of them is known."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `take_for_hosts` and `given_rate` read."""
    text = (
        "take the ranks that torchrun started on this machine for those of N hosts, in their order, as "
        "MOE_RUNTIME_HOST and NCCL_HOSTID of each rank do (NCCL then uses sockets unless NCCL_NET is set)"
    )
    parser.add_argument("--hosts", type=int, metavar="N", help=text)
    text = "of a rank, what floors between hosts count with (default: the link alone, timed in this run)"
    parser.add_argument("--network-gb-per-s", type=float, metavar="RATE", help=text)


def given_rate(options: argparse.Namespace) -> float | None:
    """The rate that the command line gives, if any. Raises `ValueError` for one that is not positive."""
    rate: float | None = options.network_gb_per_s
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"--network-gb-per-s: expected a positive number, got {rate}")
    return rate


def take_for_hosts(num_hosts: int | None, variables: MutableMapping[str, str] = os.environ) -> None:
    """Let this rank take itself for one of host `rank * num_hosts // ranks`; before it joins the others.

    Args:
        num_hosts: None where ranks are on the hosts that they are on.
        variables: of the environment. What torchrun sets is read, and what names a host is set.

    Raises:
        ValueError: ranks are on several machines or have names of hosts, or `num_hosts` does not divide their number.
    """
    if num_hosts is None:
        return
    if variables.get("MOE_RUNTIME_HOST"):
        raise ValueError("--hosts: MOE_RUNTIME_HOST names the host of each rank already, expected one of them only")
    ranks, here = (int(variables.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks != here:
        raise ValueError(f"--hosts: expected the ranks of one machine, {here} of {ranks} are on this one")
    if num_hosts < 1 or ranks % num_hosts:
        raise ValueError(f"--hosts: expected a divisor of {ranks} ranks, got {num_hosts}")
    if num_hosts > 1:
        name = f"host{int(variables.get('RANK', '0')) * num_hosts // ranks}"
        variables["MOE_RUNTIME_HOST"] = variables["NCCL_HOSTID"] = name
        variables.setdefault("NCCL_NET", "Socket")


def of_layer(layer: MoELayer, gb_per_s: float | None, iterations: int) -> Network | None:
    """The network of a layer; None where its ranks are not on several hosts. Collective.

    Args:
        gb_per_s: the rate of a rank; None to time the link alone, as often as `iterations`.
    """
    context = layer.context
    if context.link is None:
        return None
    geometry = geometry_of(layer)
    others = len(geometry.others)
    sent = {"dispatch": others * geometry.dispatch_chunk, "combine": others * geometry.combine_chunk}
    rates = {}
    for name in PHASES:
        rates[name] = gb_per_s or sent[name] / time_link(context, geometry, name, iterations).median_us * 1e-3
    return Network(context.link.hosts, context.link.name, sent, rates, given=gb_per_s is not None)


def geometry_of(layer: MoELayer) -> HostGeometry:
    """What a layer exchanges between hosts; its context has a link."""
    assert layer.context.hosts is not None
    return HostGeometry(layer.context.hosts, layer.dispatcher.geometry, capacity=layer.config.host_capacity)


def time_link(context: ExpertParallelContext, geometry: HostGeometry, exchange: str, iterations: int) -> Timing:
    """An exchange of `PHASES` over the link alone, in its parts. Collective."""
    link = context.link
    assert link is not None
    chunk = geometry.dispatch_chunk if exchange == "dispatch" else geometry.combine_chunk
    part_of = geometry.dispatch_part if exchange == "dispatch" else geometry.combine_part
    outgoing = torch.zeros(link.hosts.num_hosts, chunk, dtype=torch.uint8, device=context.device)
    incoming = torch.empty_like(outgoing)
    parts = [part_of(part) for part in range(len(geometry.parts))]

    def step(number: int) -> None:
        under_way = [
            link.start([c[at] for c in outgoing], [c[at] for c in incoming], PHASES[exchange], part, context.timeout_s)
            for part, at in enumerate(parts)
        ]
        for one in under_way:
            one.wait()

    return measure_steps(context, step, iterations=iterations, capturable=context.graph_safe, sustained=False)


def within_hosts(traffic: torch.Tensor, hosts: Hosts) -> torch.Tensor:
    """Who sends how much to whom inside of the hosts: a token of any host comes to the rank of its rail first.

    Args:
        traffic: `[W, W]`, from each rank (row) to each rank, as if all were on one host.

    >>> within_hosts(torch.arange(16).view(4, 4), Hosts(2, 2, 0, 0)).tolist()
    [[8, 10, 0, 0], [16, 18, 0, 0], [0, 0, 12, 14], [0, 0, 20, 22]]
    """
    count, per_host = hosts.num_hosts, hosts.ranks_per_host
    by_rail = traffic.view(count, per_host, count, per_host).sum(dim=0)
    return torch.block_diag(*by_rail.unbind(dim=1))


def between_hosts(traffic: torch.Tensor, hosts: Hosts) -> torch.Tensor:
    """`traffic` `[W, W]` without what stays on its host.

    >>> between_hosts(torch.ones(2, 2), Hosts(2, 1, 0, 0)).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    host = torch.arange(len(traffic)) // hosts.ranks_per_host
    return torch.where(host[:, None] == host, 0, traffic)
