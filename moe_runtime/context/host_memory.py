"""Memory of what travels between hosts."""

from __future__ import annotations

import torch

from moe_runtime.comm.heaps.heap import align_region
from moe_runtime.comm.heaps.private_heap import aligned_zeros
from moe_runtime.kernels.exchange.hierarchical import PACK_WORDS


class LinkBuffers:
    """What a rank sends to other hosts and gets from them: as large as the largest layer asks for.

    Attributes:
        chunk_bytes: for each host, by kind of exchange, `dispatch` and `combine`, and of what is not sent, `staging`.
        words: int32, zeros, for kernels that pack records (after `allocate`).
        under_way: kinds of exchanges whose chunks have been sent and not been read yet.
    """

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self.chunk_bytes = {"dispatch": 0, "combine": 0, "staging": 0}
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.words = torch.empty(0)
        self.under_way: set[str] = set()

    def grow(self, **chunk_bytes: int) -> None:
        """Make each kind at least as large. Raises `ValueError` where memory is allocated and does not suffice."""
        for kind, num_bytes in chunk_bytes.items():
            if self._buffers and num_bytes > self.chunk_bytes[kind]:
                raise ValueError(
                    f"{kind}: {num_bytes} bytes for each host needed, but the context is allocated with "
                    f"{self.chunk_bytes[kind]}; create all layers before the first step"
                )
            self.chunk_bytes[kind] = max(self.chunk_bytes[kind], num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return link_bytes(self.num_hosts, **self.chunk_bytes)

    def allocate(self, device: torch.device) -> None:
        self.words = torch.zeros(PACK_WORDS, dtype=torch.int32, device=device)
        for kind, size in self.chunk_bytes.items():
            out = aligned_zeros(max(1, self.num_hosts * size), device)
            back = out if kind == "staging" else torch.zeros_like(out)
            self._buffers[kind] = out, back

    def chunks(self, kind: str, chunk_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 `[hosts, chunk_bytes]` to send and to receive; of `staging` twice the same."""
        out, back = self._buffers[kind]
        num_bytes = self.num_hosts * chunk_bytes
        return out[:num_bytes].view(self.num_hosts, -1), back[:num_bytes].view(self.num_hosts, -1)


def link_bytes(num_hosts: int, *, dispatch: int, combine: int, staging: int) -> int:
    """Bytes that `LinkBuffers` with chunks of these sizes take."""
    return sum(count * align_region(num_hosts * size) for count, size in ((2, dispatch), (2, combine), (1, staging)))
