"""Which ranks share a host, and how ranks are named where the memory of a context covers one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """A group whose ranks are on `num_hosts` hosts, `ranks_per_host` on each, numbered host by host.

    Rank `r` of a host is on the same rail as rank `r` of every other host: these exchange over the network.

    Attributes:
        host: that of this process.
        local_rank: of this process on its host.
    """

    num_hosts: int
    ranks_per_host: int
    host: int
    local_rank: int

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def rank(self) -> int:
        return self.rank_on(self.host)

    def rank_on(self, host: int) -> int:
        """The rank on the rail of this process on `host`."""
        return host * self.ranks_per_host + self.local_rank

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this host."""
        first = self.host * self.ranks_per_host
        return list(range(first, first + self.ranks_per_host))

    @property
    def rail(self) -> list[int]:
        """The ranks of this rail, by host."""
        return [self.rank_on(host) for host in range(self.num_hosts)]

    def recorded(self, rank: int) -> int:
        """How error records of this host name `rank` of the group: local ranks as they are, and above them all ranks.

        Kernels know local ranks alone. They pass on what they do not write themselves.
        """
        return self.ranks_per_host + rank

    def of_recorded(self, number: int) -> int:
        """The rank of the group that an error record of this host names."""
        count = self.ranks_per_host
        return number - count if number >= count else self.host * count + number


def find_hosts(identities: Sequence[str], rank: int) -> Hosts | str:
    """The hosts of a group from the identity of each rank's host; a text that says why not, where they do not fit.

    >>> find_hosts(["a", "a", "b", "b"], 2)
    Hosts(num_hosts=2, ranks_per_host=2, host=1, local_rank=0)
    >>> find_hosts(["a", "b", "b"], 0)
    'the hosts have different numbers of ranks, 1, 2'
    >>> find_hosts(["a", "b", "a", "b"], 0)
    'the ranks of a host do not follow each other: rank 2 is on the host of rank 0'
    """
    order = list(dict.fromkeys(identities))
    counts = [identities.count(host) for host in order]
    for other in range(1, len(identities)):
        first = identities.index(identities[other])
        if first < other and identities[other - 1] != identities[other]:
            return f"the ranks of a host do not follow each other: rank {other} is on the host of rank {first}"
    if len(set(counts)) > 1:
        return f"the hosts have different numbers of ranks, {', '.join(map(str, counts))}"
    return Hosts(len(order), counts[0], rank // counts[0], rank % counts[0])
