"""Layout of the signal region: int32 words with which ranks signal their progress to each other.

Every word has one writer. Flags hold the epoch (number of the dispatch, from 1) they were raised for, so nothing is
ever reset; those with two halves use the half `epoch % 2`. With `W` ranks, in words:

    dispatch_flag [2][W]   rank w's tokens of this epoch have landed here
    token_count   [2][W]   how many tokens rank w had, from bit `COUNT_BITS` on the number of the exchange, and in
                           `TURN_BIT` the turn of the epoch (written before dispatch_flag); the sign is set by kernels
                           that store the flag of each token on all ranks after its record has landed
    combine_flag  [2][W]   rank w's partial results of this epoch have landed here; or none will come, and rank w
                           has read the tokens of this epoch
    ready         [W]      rank w no longer reads what lies in the half of this epoch
    abort         [W][8]   (code, phase, epoch, rank it is about, detail, detail2, 1 + the rank that informed rank w of
                           it, or 0, 0) of rank w's failure; code is written last
    reason        [W][64]  UTF-8 text (256 bytes, zero padded) of rank w's failure; host-written
    progress      [2][7][W]  rank w's partial results of this epoch have landed for the first part of the tokens, the
                             first two parts, and so on; before combine_flag, by kernels that signal parts
    partial_flag  [2][64][W] rank w's partial result of this epoch has landed for a token of this rank; before
                             combine_flag, by kernels that have few tokens
    counted       [2][W]     rank w's counts of tokens for each expert of this epoch have landed here; by kernels that
                             send them
"""

from __future__ import annotations

from dataclasses import dataclass

ABORT_WORDS = 8
COUNT_BITS = 22
EXCHANGES = 256
"""Exchanges of a context are numbered, modulo this, so that tokens for another exchange are recognised."""
TURN_BIT = 30
"""This bit alternates between epochs of one half, and is set in the first epoch of each."""
WITHOUT_SIGN = 0x7FFFFFFF
"""The bits of a `token_count` that do not depend on which kernels wrote it."""
PROGRESS_PARTS = 7
"""Most parts of the tokens that a rank signals before it has sent all partial results."""
PARTIAL_FLAG_TOKENS = 64
"""Tokens of a rank whose partial results may be signalled one by one."""
REASON_WORDS = 64
ERROR_WORDS = 8
"""Words of a rank's own error record in host-visible memory, code written last:
(code, rank it is about, phase, epoch, detail, origin rank, detail2, 0)."""
COMBINED = 1
PLACED = COMBINED + 1 + PROGRESS_PARTS
PLACING = PLACED + 1
NUM_COUNTERS = PLACING + 1
"""Words in a rank's own memory by which the last block of a kernel knows itself: `dispatch_send` uses the first,
`combine_send` those from `COMBINED` on, `place_own_rows` that at `PLACED`. It sets the one at `PLACING` when places
are known, and `dispatch_send` resets it."""


ANY_AHEAD = 0x7FFFFFFF
"""Most that a flag can be ahead of an epoch, in wrapping int32 arithmetic."""


def has_reached(flag: int, epoch: int, most: int = ANY_AHEAD) -> bool:
    """`0 <= flag - epoch <= most` in wrapping int32 arithmetic."""
    return ((flag - epoch) & 0xFFFFFFFF) <= most


def count_tag_of(exchange_id: int) -> int:
    """The bits of `token_count` above the number of tokens, but for the turn of the epoch."""
    return exchange_id % EXCHANGES << COUNT_BITS


def tag_of(count_tag: int, epoch: int) -> int:
    """The bits of `token_count` in `epoch` above the number of tokens; `count_tag` is `count_tag_of` the exchange."""
    return count_tag | ((epoch >> 1 ^ epoch) & 1) << TURN_BIT


def exchange_of(word: int) -> int:
    """Number of the exchange in a `token_count`."""
    return (word & (1 << TURN_BIT) - 1) >> COUNT_BITS


@dataclass(frozen=True)
class SignalLayout:
    """Word offsets of each field for a group of `world_size` ranks."""

    world_size: int

    @property
    def dispatch_flag(self) -> int:
        return 0

    @property
    def token_count(self) -> int:
        return 2 * self.world_size

    @property
    def combine_flag(self) -> int:
        return 4 * self.world_size

    @property
    def ready(self) -> int:
        return 6 * self.world_size

    @property
    def abort(self) -> int:
        return 7 * self.world_size

    @property
    def reason(self) -> int:
        return self.abort + ABORT_WORDS * self.world_size

    @property
    def progress(self) -> int:
        return self.reason + REASON_WORDS * self.world_size

    @property
    def partial_flag(self) -> int:
        return self.progress + 2 * PROGRESS_PARTS * self.world_size

    @property
    def counted(self) -> int:
        return self.partial_flag + 2 * PARTIAL_FLAG_TOKENS * self.world_size

    @property
    def num_words(self) -> int:
        return self.counted + 2 * self.world_size

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_words

    def words_of(self, rank: int) -> list[int]:
        """The words that `rank` writes; for rank 0 of 2 they begin with 0, 2, 4, 6, 8, 10, 12, 14, 15."""
        flags = [field + half * self.world_size + rank for field in self._halved for half in (0, 1)]
        abort = self.abort + ABORT_WORDS * rank
        reason = self.reason + REASON_WORDS * rank
        # From there on each word is one of `W`.
        early = range(self.progress + rank, self.num_words, self.world_size)
        failure = [*range(abort, abort + ABORT_WORDS), *range(reason, reason + REASON_WORDS)]
        return [*flags, self.ready + rank, *failure, *early]

    @property
    def _halved(self) -> tuple[int, int, int]:
        return self.dispatch_flag, self.token_count, self.combine_flag
