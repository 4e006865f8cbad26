"""What crosses the network while experts move between hosts: chunks of experts, between the ranks of each rail."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_runtime.comm.errors import Phase
from moe_runtime.comm.host_link import Exchange
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.placement.migration_plan import Crossing, MigrationPlan

PAD = 16
"""Bytes that each exchange sends to every host besides chunks.

So no exchange ends before all ranks of the rail have come to it, and those that wait in it name those that have not.
"""


class Rail:
    """One rank's exchanges with the ranks of its rail. Each has at most one chunk to send, and one to get.

    Args:
        context: allocated, over several hosts.
        plan: whose crossings are made.
        chunk_bytes: most bytes of a chunk.

    Attributes:
        outgoing, incoming: uint8 `[chunk_bytes]`, the chunk to send and the one that came; `[0]` where the plan has
            none for this rank.
        limit_s: seconds that an exchange may take: twice as long as a wait inside a host. A rank that waits in vain for
            one of its host then says so before ranks of other hosts miss it.
    """

    def __init__(self, context: ExpertParallelContext, plan: MigrationPlan, chunk_bytes: int) -> None:
        assert context.hosts is not None and context.link is not None
        self._rank, self._hosts, self._link, self._plan = context.rank, context.hosts, context.link, plan
        self.limit_s = 2 * context.timeout_s
        used = any(self._rank in (plan.sender(crossing), plan.receiver(crossing)) for crossing in plan.crossings)
        size = chunk_bytes if used else 0
        self._buffers = torch.zeros(2, size + PAD, dtype=torch.uint8, device=context.device)
        self._pads = torch.zeros(2, self._hosts.num_hosts, PAD, dtype=torch.uint8, device=context.device)
        self.outgoing, self.incoming = self._buffers[:, :size]

    def start(self, crossings: Sequence[Crossing], num_bytes: int) -> Exchange:
        """Send the chunk of `num_bytes` bytes in `outgoing`, and await one in `incoming`, as `crossings` say.

        All ranks of the rail call it with the same crossings; without any it is a barrier of the rail.
        """
        plan, per_host = self._plan, self._hosts.ranks_per_host
        targets = [c.move.target_rank // per_host for c in crossings if plan.sender(c) == self._rank]
        sources = [c.move.source_rank // per_host for c in crossings if plan.receiver(c) == self._rank]
        outgoing, incoming = (
            [buffer[: num_bytes + PAD] if host in hosts else pad for host, pad in enumerate(pads)]
            for buffer, pads, hosts in zip(self._buffers, self._pads, (targets, sources), strict=True)
        )
        return self._link.start(outgoing, incoming, Phase.REPLACEMENT, 0, self.limit_s)
