"""What a kernel may read before the kernel launched right before it has ended, and why that is right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class LaunchOrder:
    """What is there when a kernel begins that programmatic dependent launch (PDL) lets begin early.

    An `early` kernel (`bound_kernel.BoundKernel`) begins once each block of the kernel before it has called
    `griddepcontrol.launch_dependents` or has ended. Its own `griddepcontrol.wait` returns when the kernel before it has
    ended and all that was stored is visible. So it may read, ahead of that `wait`, only what kernels stored that have
    ended by then. Three rules of our kernels say which those are:

    1. Each kernel waits before it ends. Who has waited for a kernel has waited for all kernels before it.
    2. A kernel that calls `launch_dependents` after its `wait` begins the next one when all kernels before itself have
       ended. The next one then has to await only what this kernel stores. So it is with a kernel that never calls
       `launch_dependents`, and with one that was not launched early.
    3. A kernel that calls `launch_dependents` before its `wait` tells the next one nothing, unless it began itself when
       all that matters was there.

    In a step of a rank alone, dispatch (D), gate/up (G), down (W) and combine (C) follow one another:

    - D is one kernel and keeps rule 2. When G begins, the router has ended: `routed_ids` are there, and nobody writes
      them before W has ended, and so with `route_weights`. G counts its groups by them and loads weights while D
      quantizes. It awaits D for rows, and lets W begin after that. Without `routed_ids` G awaits D before it reads
      anything of the step.
    - When W begins, D has ended, by rule 2 for G: offsets, ids and indices of the groups are there, which W reads
      before G has ended. G stores only the rows: `only_rows_pending`.
    - C begins no earlier than W, when D has ended: epoch, positions and weights are there, which C reads before W has
      ended. That holds also where W lets C begin before it waits for G (rule 3). W stores only the rows:
      `only_rows_pending` again. By rule 1 C has waited for G, too, when it has waited for W.

    With peers, or many tokens, D is several kernels, of which the last ones let the next kernel begin before they have
    seen the flags that they wait for (rule 3). G then awaits them. W may still read ahead, as above.

    Kernels of the exchange read ahead of their `wait` what has been published to them, too:

    - by a fence before `launch_dependents`: `dispatch_send` stores the epoch of its handle, fences, and only then lets
      `recv_count` or `recv_permute` begin, which read it (`dispatch_send.cu`, `hierarchical.cu`);
    - by a flag, which a release stores after what it tells of: records of tokens, this rank's own among them, and
      partial sums, for which `combine_recv` needs no end of `combine_send`. With the output of a shared expert, which
      has no flag, `combine_recv` waits first. The waits and their fences are in `signalling.cuh`.

    One read is of what may not be there yet: `is_stale` (`signalling.cuh`) compares a handle's epoch with the last one.
    The kernel before stores at most one epoch more, so the answer is open only where the last epoch that can be seen is
    one ahead of the handle's. There it waits, and reads again.

    Each of them waits before it ends (rule 1).

    What a kernel stores while the one before it runs must lie in other memory than that one uses: outputs are allocated
    before the inputs of that kernel are freed (`exchange.interface.RecvBuffers`).

    Attributes:
        only_rows_pending: whether the kernel before stores nothing that this one reads but rows, and all else has been
            stored by kernels that have ended when this one begins. False where that is not known.
        routed_ids: int32 or int64 `[T, K]`, contiguous: ids of which the groups of rows are made, group `g` of the rows
            of id `first_id + g`, stored by kernels that have ended when this one begins. None where there are no such
            ids.
        route_weights: fp32 `[T, K]`, contiguous, stored as the ids are, where an id whose weight is NaN counts as none;
            None where all ids count.
        first_id: id of the first group.
        weights_after_ns: how long to wait with the first loads of weights, unless the kernel before ends sooner:
            earlier ones would delay those of that kernel. It concerns the time alone.
    """

    only_rows_pending: bool = False
    routed_ids: torch.Tensor | None = None
    route_weights: torch.Tensor | None = None
    first_id: int = 0
    weights_after_ns: int = 0

    @cached_property
    def read_early(self) -> dict[str, torch.Tensor | int | None]:
        """What a GEMM may read before the kernel that makes its rows has ended, and when: arguments of kernels."""
        ids = self.routed_ids
        return {
            "topk_idx": ids,
            "route_weights": self.route_weights,
            "num_ids": 0 if ids is None else ids.numel(),
            "id_bytes": 0 if ids is None else ids.element_size(),
            "first_id": self.first_id,
            "loads_after_ns": self.weights_after_ns,
        }


IN_ORDER = LaunchOrder()
"""Nothing is known to be there: all is awaited."""

ONLY_ROWS_PENDING = LaunchOrder(only_rows_pending=True)
