"""What `Buffer` and `ElasticBuffer` share: the ranks, the memory of their exchanges, and the communication stream."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.deep_ep.arguments import Bit, check_bit
from moe_runtime.deep_ep.events import CommStream, EventOverlap
from moe_runtime.deep_ep.normal import NormalExchange
from moe_runtime.deep_ep.sizes import normal_bytes, normal_tokens
from moe_runtime.support.arguments import check_flag, check_kind

_LOG = logging.getLogger(__name__)


class GroupBuffer:
    """Memory of a group of ranks. Constructing it is collective.

    Args:
        group: ranks of one host (gloo or NCCL), or CPU ranks.
        explicitly_destroy: whether `destroy` will be called. It frees memory on all ranks together.
        timeouts: `timeout_s` and others, as of `ExpertParallelContext`.

    Raises `ValueError` for arguments of a wrong kind.
    """

    def __init__(self, group: dist.ProcessGroup | None, explicitly_destroy: bool, **timeouts: float) -> None:
        if group is None:
            raise ValueError("group: expected a process group, got None")
        check_flag("explicitly_destroy", explicitly_destroy)
        self.group, self.explicitly_destroy = group, explicitly_destroy
        self._timeouts: dict[str, Any] = timeouts
        # Ranks that cannot share memory find out here.
        self._contexts: list[ExpertParallelContext] = []
        self._destroyed = False
        self._spare: ExpertParallelContext | None = self._new_context()
        if self._spare.transport == "collective":
            _warn_once(
                "moe_runtime.deep_ep: these ranks share no memory; torch.distributed carries the tokens, and calls "
                f"wait for the host ({self._spare.transport_reasons})"
            )
        self.device = self._spare.device
        self._comm = CommStream(self.device)
        self._normal: dict[int, NormalExchange] = {}

    def _new_context(self) -> ExpertParallelContext:
        if self._destroyed:
            raise ValueError("buffer: expected one that is not destroyed")
        context = ExpertParallelContext(self.group, one_memory=True, **self._timeouts)
        self._contexts.append(context)
        return context

    def _context(self) -> ExpertParallelContext:
        """One that nothing is registered with."""
        spare, self._spare = self._spare, None
        return self._new_context() if spare is None else spare

    def destroy(self) -> None:
        """Free the memory, on all ranks together.

        Raises `ValueError` without `explicitly_destroy`, and what a context raises that cannot be closed, after all
        others have been.
        """
        if not self.explicitly_destroy:
            raise ValueError("explicitly_destroy: expected True for a Buffer that is to be destroyed")
        if not self._destroyed:
            self._destroyed = True
            with ExitStack() as closing:
                for context in reversed(self._contexts):  # closed in the order in which they were made
                    closing.callback(context.close)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of calls that run beside the current one. Raises `ValueError` on CPUs."""
        if self._comm.stream is None:
            raise ValueError("get_comm_stream: expected a GPU, this Buffer is on a CPU")
        return self._comm.stream

    def _exchange_of(self, hidden: int, name: str, num_bytes: int, num_sms: int | None) -> NormalExchange:
        """The exchange for tokens of `hidden` elements, in `num_bytes`, the argument `name`."""
        exchange = self._normal.get(hidden)
        if exchange is None:
            num_ranks = self.group.size()
            tokens = normal_tokens(num_bytes, hidden, num_ranks)
            if tokens == 0:
                least = normal_bytes(hidden, num_ranks, 1)
                raise ValueError(f"{name}: expected at least {least} for H = {hidden}, got {num_bytes}")
            exchange = self._normal[hidden] = NormalExchange(self._context(), hidden, tokens)
        exchange.num_sms = num_sms
        return exchange


def runs_beside(previous_event: EventOverlap | None, asked: Mapping[str, Bit]) -> bool:
    """Whether a call runs on the communication stream: where a flag asks for it, or an event is to be waited for.

    Raises `ValueError` naming a flag of `asked` that is none.
    """
    for name, flag in asked.items():  # here, and not in `check_flags`: each call counts
        if flag is not True and flag is not False:
            check_bit(name, flag)
    if previous_event is None:
        return any(asked.values())
    check_kind("previous_event", previous_event, EventOverlap)
    return True


def not_there(name: str, why: str) -> NoReturn:
    """Refuse what is not there."""
    raise NotImplementedError(f"moe_runtime.deep_ep: {name}: {why}")


def absent(name: str, why: str) -> Callable[..., NoReturn]:
    """A method, or a static one, that refuses to be called."""

    def refuse(*arguments: object, **settings: object) -> NoReturn:
        not_there(name, why)

    refuse.__name__, refuse.__doc__ = name, f"Not there: {why}."
    return refuse


@functools.cache
def _warn_once(text: str) -> None:
    _LOG.warning(text)
