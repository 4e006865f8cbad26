"""Transport between ranks that cannot map each other: kernels store into local staging, torch.distributed carries it.

The staging for peer `r` mirrors the heap of rank `r`, so the kernels are the same as with mapped peers. After a send
kernel the transport gathers the staged rows, exchanges them all-to-all and scatters them where the kernel would have
stored them. The signal words follow. It waits on the host at every step and cannot be captured in a graph.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import traceback
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_runtime.comm.errors import MoERuntimeError, PeerTimeoutError, Phase, StepMismatchError
from moe_runtime.comm.heaps.heap import GroupHeap
from moe_runtime.comm.heaps.private_heap import aligned_zeros
from moe_runtime.comm.left_groups import keep_until
from moe_runtime.comm.messages import hexadecimal, integer, row
from moe_runtime.comm.rank_group import ROLL_CALL_S, RankGroup
from moe_runtime.comm.signals import SignalLayout

_HEADER = 5
"""Words of a message before the signal words: (phase, epoch, number of the exchange, bytes of a row, rows)."""
_STEP = 4
"""The first of them, in which ranks at the same step agree."""
NO_EXCHANGE = -1
"""In place of the number of an exchange, for bytes of none."""

_KEY_BYTES = 8
"""Bytes of the random key under which the ranks of a heap connect."""

_POLL_S = 1e-4


class CollectiveHeap(GroupHeap):
    """Own memory plus one staging copy of the whole heap per peer: `world_size` times the bytes of a mapped heap.

    `peer_tensor(region, r)` with `r != rank` is the staging for `r`. It travels through `gloo`, a group of the heap's
    own, so that a failure leaves no unfinished exchange in the caller's group. On GPUs with NCCL it travels through the
    caller's group, and `gloo` is None.
    """

    name = "collective"
    directly_mapped = False
    graph_safe = False

    def __init__(self, group: RankGroup, device: torch.device | str = "cpu") -> None:
        super().__init__(group, torch.device(device))
        if group.group is None:
            raise ValueError("group: the collective transport needs torch.distributed to be initialised")
        self.key = ""
        self.gloo: Any = None
        self._bases: list[torch.Tensor] = []

    def _allocate(self, num_bytes: int) -> None:
        mine = [num_bytes, secrets.token_hex(_KEY_BYTES)]
        answers = self.group.gather("CollectiveHeap.allocate", mine, row(integer(0), hexadecimal(_KEY_BYTES)))
        self._check_sizes([size for size, _ in answers])
        self.key = answers[0][1].hex()
        if nccl_of(self.group.group, self.device) is None:
            self.gloo = self.group.connect("CollectiveHeap.allocate", f"moe_runtime/{self.key}")
        self._bases = [aligned_zeros(num_bytes, self.device) for _ in range(self.world_size)]
        for base in self._bases:
            self._write_ones(base)

    def _peer_base(self, rank: int) -> torch.Tensor:
        return self._bases[rank]

    def _close(self, *, failed: bool) -> None:
        gloo, self.gloo = self.gloo, None
        try:
            self._part(failed=failed)
            if self.allocated and not failed:
                gloo = None
        finally:
            if gloo is not None:
                # Peers may still read from its connections.
                keep_until(lambda: True, gloo)
            self._bases.clear()


class CarryContext(Protocol):
    """The part of an `ExpertParallelContext` that the transport needs."""

    device: torch.device
    half_bytes: dict[str, int]
    timeout_s: float

    def fail(self, error: MoERuntimeError) -> Exception: ...

    def check_peers(self) -> None: ...


class CollectiveTransport:
    """Carries what is staged in a `CollectiveHeap`. All methods except `post_abort` are collective, in the same order.

    Every exchange starts with a header per peer: the step, the number of rows that follow, and the signal words staged
    for it. A header with an abort word ends the exchange on all ranks, so they learn at once of a rank that gave up. So
    do headers of different steps, before rows of different sizes are sent.

    An NCCL group is unusable after a `PeerTimeoutError` or an abort outside of a step. Its own timeout must be longer
    than the limits of the context: at its timeout, and at errors that it finds itself, NCCL ends the process. The
    heap's gloo group instead ends exchanges at the limit of their step, since a process with a running one cannot
    exit.
    """

    def __init__(self, heap: CollectiveHeap) -> None:
        self.heap = heap
        self.layout = SignalLayout(heap.world_size)
        self._group = heap.group.group
        words = [self.layout.words_of(rank) for rank in range(heap.world_size)]
        self._words_of = torch.tensor(words, dtype=torch.int64, device=heap.device)
        self._abort_column = _HEADER + words[0].index(self.layout.abort)
        self._exchanges = 0
        # Peers know that this rank has failed, or cannot be told any more.
        self._over = False
        self._posted: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        self._nccl = nccl_of(self._group, heap.device)

    def carry_dispatch(
        self,
        context: CarryContext,
        *,
        epoch: int,
        exchange_id: int,
        num_tokens: int,
        max_tokens: int,
        record_bytes: int,
        timeout_ns: int,
        landing_half: int | None = None,
    ) -> None:
        """Bring the records staged by the send kernel of dispatch `epoch` to their ranks.

        Carries rows `t < num_tokens` of this rank's part of `landing` in the staging of each peer (half `epoch % 2`,
        `[W][max_tokens][record_bytes]`), if their token flag (`[W][max_tokens]` int32) is `epoch`. At the peer the
        record appears first, then its token flag, then the signal words (dispatch_flag, token_count, ready, abort).
        `landing_half` is where the second half of `landing` starts; default `context.half_bytes["landing"]`.
        `exchange_id` is the number of the exchange in its context, whose sizes are equal on all ranks.

        Raises the error in a peer's abort words, `StepMismatchError` on all ranks if a peer carries something else,
        and `PeerTimeoutError` if one does not take part within `timeout_ns`.
        """
        half = epoch % 2
        rank, world = self.heap.rank, self.heap.world_size
        indices, rows = [], []
        for peer in range(world):
            token_flags = self._half(context, "token_flags", peer, half, torch.int32, (world, max_tokens))
            landing = self._half(
                context, "landing", peer, half, torch.uint8, (world, max_tokens, record_bytes), landing_half
            )
            sent = (token_flags[rank, :num_tokens] == epoch) & (peer != rank)
            tokens = sent.nonzero().to(torch.int32)
            indices.append(tokens)
            rows.append(landing[rank, tokens[:, 0].long()])
        token_flags = self._half(context, "token_flags", rank, half, torch.int32, (world, max_tokens))
        landing = self._half(
            context, "landing", rank, half, torch.uint8, (world, max_tokens, record_bytes), landing_half
        )
        step = Phase.DISPATCH_SEND, epoch, exchange_id
        header, came = self._exchange(context, step, record_bytes, indices, rows, timeout_ns * 1e-9)
        for source, (tokens, records) in enumerate(came):
            landing[source, tokens[:, 0].long()] = records
            token_flags[source, tokens[:, 0].long()] = epoch
        self._write_signals(header)

    def carry_combine(
        self,
        context: CarryContext,
        *,
        epoch: int,
        exchange_id: int,
        max_tokens: int,
        parts: int,
        row_bytes: int,
        part_index: torch.Tensor,
        timeout_ns: int,
    ) -> None:
        """Bring the partial rows staged by the combine kernel of dispatch `epoch` back to their tokens' ranks.

        Args:
            part_index: int32 `[W, max_tokens]`; `j` where this rank staged entry `(t, j)` of the combine region
                (half `epoch % 2`, `[max_tokens][parts][row_bytes]`) of source `s`, and -1 where it staged none.

        At the source the rows, then the signal words (combine_flag, ready, abort) appear. Raises as `carry_dispatch`.
        """
        half = epoch % 2
        rank, world = self.heap.rank, self.heap.world_size
        if part_index.shape != (world, max_tokens) or part_index.dtype != torch.int32:
            shape = f"{part_index.dtype} {list(part_index.shape)}"
            raise ValueError(f"part_index: expected int32 [{world}, {max_tokens}], got {shape}")
        indices, rows = [], []
        for peer in range(world):
            combine = self._half(context, "combine", peer, half, torch.uint8, (max_tokens, parts, row_bytes))
            sent = (part_index[peer] >= 0) & (peer != rank)
            tokens = sent.nonzero()[:, 0]
            part = part_index[peer, tokens]
            indices.append(torch.stack([tokens.to(torch.int32), part], dim=1))
            rows.append(combine[tokens, part.long()])
        combine = self._half(context, "combine", rank, half, torch.uint8, (max_tokens, parts, row_bytes))
        step = Phase.COMBINE_SEND, epoch, exchange_id
        header, came = self._exchange(context, step, row_bytes, indices, rows, timeout_ns * 1e-9)
        for entries, values in came:
            combine[entries[:, 0].long(), entries[:, 1].long()] = values
        self._write_signals(header)

    def carry_bytes(
        self, context: CarryContext, *, phase: Phase, epoch: int, num_bytes: int, parcels: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Bring `parcels[r]`, uint8 `[num_bytes]`, to each rank `r` named there; what came, by source.

        Every rank takes part, those with nothing to send too. Raises as `carry_dispatch`, with the limit of a step.
        """
        device, world = self.heap.device, self.heap.world_size
        none = torch.empty((0, num_bytes), dtype=torch.uint8, device=device)
        rows = [parcels[peer][None] if peer in parcels else none for peer in range(world)]
        indices = [torch.zeros((part.shape[0], 1), dtype=torch.int32, device=device) for part in rows]
        step = phase, epoch, NO_EXCHANGE
        header, came = self._exchange(context, step, num_bytes, indices, rows, context.timeout_s)
        self._write_signals(header)
        return {source: values[0] for source, (_, values) in enumerate(came) if values.shape[0]}

    def post_abort(self, limit: float) -> None:
        """Start the exchange of a header with the abort words staged for all peers, without waiting for them.

        They hear of it if they take part within `limit` seconds. Does nothing where they have heard, or cannot.
        """
        if self._over:
            return
        self._over = True
        header = self._header((Phase.HOST, 0, NO_EXCHANGE, 0), [0] * self.heap.world_size)
        answer = torch.empty_like(header)
        work = self._start(answer, header, None, None, limit)
        # The exchange runs on in the background, so its tensors must stay alive.
        if self._nccl is None:
            keep_until(work.is_completed, self.heap.gloo, header, answer)
        self._posted.append((work, header, answer))

    def settle(self, limit: float) -> None:
        """Wait at most `limit` seconds for what was posted on a GPU, then end it: the device is not idle before."""
        if self._nccl is not None:
            for work, *_ in self._posted:
                with contextlib.suppress(RuntimeError):  # The peers have gone, too.
                    self._finish(work, limit)

    def _half(
        self,
        context: CarryContext,
        region: str,
        rank: int,
        half: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: int | None = None,
    ) -> torch.Tensor:
        """One half of a region of `rank` as `dtype` `[shape]`."""
        num_bytes = dtype.itemsize
        for extent in shape:
            num_bytes *= extent
        start = half * (context.half_bytes[region] if stride is None else stride)
        room = 2 * context.half_bytes[region]
        if start + num_bytes > room:
            raise ValueError(f"{region}: half {half} of {list(shape)} ends at {start + num_bytes} of {room} bytes")
        return self.heap.peer_tensor(region, rank)[start : start + num_bytes].view(dtype).view(shape)

    def _signals(self, rank: int) -> torch.Tensor:
        return self.heap.peer_tensor("signals", rank).view(torch.int32)

    def _header(self, step: tuple[int, int, int, int], counts: list[int]) -> torch.Tensor:
        """int32 `[W, 5 + words]`: for each peer `step`, the rows that follow, and the words staged for it."""
        rank, device = self.heap.rank, self.heap.device
        first = torch.tensor([(*step, count) for count in counts], dtype=torch.int32, device=device)
        words = [self._signals(peer)[self._words_of[rank]] for peer in range(self.heap.world_size)]
        return torch.cat([first, torch.stack(words)], dim=1)

    def _write_signals(self, header: torch.Tensor) -> None:
        """Make the words of each peer's header visible in this rank's signals."""
        signals = self._signals(self.heap.rank)
        for peer in range(self.heap.world_size):
            if peer != self.heap.rank:
                signals[self._words_of[peer]] = header[peer, _HEADER:]

    def _exchange(
        self,
        context: CarryContext,
        step: tuple[Phase, int, int],
        row_bytes: int,
        indices: list[torch.Tensor],
        rows: list[torch.Tensor],
        limit: float,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """All-to-all of `indices[r]` int32 `[n_r, c]` and `rows[r]` uint8 `[n_r, b]`; headers and pairs by source.

        `step` is the phase, the epoch and the number of the exchange.
        """
        phase, epoch, _ = step
        self._exchanges += 1
        try:
            sent = [int(part.shape[0]) for part in rows]
            mine = (*step, row_bytes)
            staged = self._header(mine, sent)
            header = torch.empty_like(staged)
            self._all_to_all(context, phase, epoch, header, staged, None, None, limit)
            self._check_headers(context, mine, staged, header)
            came = header[:, _STEP].tolist()
            arrived = []
            for parts in (indices, rows):
                source = torch.cat(parts)
                target = source.new_empty((sum(came), source.shape[1]))
                self._all_to_all(context, phase, epoch, target, source, came, sent, limit)
                arrived.append(target.split(came))
        except MoERuntimeError:
            raise
        except BaseException:
            # Peers that are inside the exchange would take the next header for its rows. The end of the connections
            # ends it.
            self._over, self.heap.gloo = True, None
            raise
        return header, list(zip(*arrived, strict=True))

    def _check_headers(
        self, context: CarryContext, step: tuple[int, int, int, int], staged: torch.Tensor, header: torch.Tensor
    ) -> None:
        """Raise the error of a rank that has failed, or `StepMismatchError` where a rank is not at `step`.

        `staged` are the headers that were sent, `header` those that came.
        """
        rank = self.heap.rank
        own = (staged[:, self._abort_column] != 0).nonzero()[:, 0].tolist()
        if own or bool((header[:, self._abort_column] != 0).any()):
            self._over = True
            if own:
                # A kernel here staged an abort for the peers. Put it where this rank's own check looks.
                self._signals(rank)[self._words_of[rank]] = staged[own[0], _HEADER:]
            self._write_signals(header)
            context.check_peers()
        steps = [tuple(words) for words in header[:, :_STEP].tolist()]
        other = next((peer for peer, theirs in enumerate(steps) if theirs != step), None)
        if other is not None:
            self._over = True
            where = ", ".join(f"rank {peer}: {_describe(theirs)}" for peer, theirs in enumerate(steps))
            text = (
                f"rank {rank}, {_describe(step)}: ranks are not at the same step, {where}: all ranks have to call the "
                "same layers in the same order, with equal max_tokens"
            )
            raise context.fail(StepMismatchError(text, other, Phase(step[0])))

    def _all_to_all(
        self,
        context: CarryContext,
        phase: Phase,
        epoch: int,
        target: torch.Tensor,
        source: torch.Tensor,
        came: list[int] | None,
        sent: list[int] | None,
        limit: float,
    ) -> None:
        start = time.monotonic()
        try:
            self._finish(self._start(target, source, came, sent, limit), limit)
        except RuntimeError as error:
            waited = time.monotonic() - start
            self._over = True
            if self._nccl is None:
                # Its connections close with the last reference, which ends at once what peers wait for in vain.
                traceback.clear_frames(error.__traceback__)
                self.heap.gloo = None
            event = f"{self.heap.key}/{self._exchanges}"
            missing = self.heap.group.missing(event, min(ROLL_CALL_S, limit))
            names = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
            where = f"{phase.name.lower()} of epoch {epoch}"
            # A lost connection ends the exchange long before the limit.
            ended = f"the exchange ended after {waited:.1f} s, its limit is {limit:g} s"
            message = f"rank {self.heap.rank}, {where}: {names} did not take part; {ended}"
            failure = PeerTimeoutError(message, missing[0] if missing else -1, phase)
            raise context.fail(failure) from error

    def _start(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        came: list[int] | None,
        sent: list[int] | None,
        limit: float,
    ) -> dist.Work:
        """Begin an exchange like `dist.all_to_all_single`, but with its own timeout instead of the group's."""
        if self._nccl is not None:
            work = dist.all_to_all_single(target, source, came, sent, group=self._group, async_op=True)
            assert work is not None
            return work
        options = dist.AllToAllOptions()
        options.asyncOp = True
        options.timeout = _time(limit)
        return self.heap.gloo.alltoall_base(target, source, came or [], sent or [], options)

    def _finish(self, work: dist.Work, limit: float) -> None:
        """Wait for an exchange. Raises `RuntimeError` if it fails, or does not end within `limit` seconds."""
        if self._nccl is None:
            work.wait(_time(limit))
            return
        # If NCCL's own wait times out, it aborts one communicator. The watchdog of the group takes that for an error
        # and ends the process a minute later. It ignores a group that is aborted as a whole.
        deadline = time.monotonic() + limit
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._nccl.abort()
                raise RuntimeError(f"NCCL: the exchange did not end within {limit:g} s")
            time.sleep(_POLL_S)
        work.wait()


def _describe(step: tuple[int, ...]) -> str:
    """The phase of a step, its epoch, and the number of its exchange.

    >>> _describe((Phase.COMBINE_SEND, 3, 1, 64)), _describe((Phase.REPLACEMENT, 3, NO_EXCHANGE, 4096))
    ('combine_send of epoch 3 in exchange 1', 'replacement of epoch 3')
    """
    phase, epoch, exchange_id, _ = step
    name = f"{Phase(phase).name.lower()} of epoch {epoch}"
    return name if exchange_id == NO_EXCHANGE else f"{name} in exchange {exchange_id}"


def _time(limit: float) -> timedelta:
    """`limit` seconds for torch.distributed, which ignores limits below a millisecond."""
    return timedelta(seconds=max(limit, 0.001))


def nccl_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """The NCCL backend of `group` for `device`; None if it has another one."""
    if group is None or device.type != "cuda" or not dist.is_nccl_available():
        return None
    backend = group._get_backend(device)
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
