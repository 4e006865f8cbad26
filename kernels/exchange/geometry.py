"""Sizes and offsets of one layer's exchange, computed once from values that are equal on all ranks.

Letters: `W` ranks, `T` tokens of a rank (at most `max_tokens`), `K` top-k, `E` experts of this rank,
`S = W * max_tokens` landing slots. Token `t` of source rank `s` always lands in slot `s * max_tokens + t`: no rank has
to be told where its rows may go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moe_runtime.comm.signals import COUNT_BITS
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import FP8_BLOCK, TokenFormat, align, ceil_div
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.kernels.runtime import BLOCK_RESERVED_BYTES, SM_SHARED_BYTES

OWN_ROWS_TOKENS = 2048
"""Tokens of a rank from which on its own may be stored to their rows. On 2 H200s dispatch lost 2 us by it with 1024 and
gained 21 with 4096 (kernels/exchange/notes.md)."""
OWN_ROWS_EXPERTS = 1024
"""Experts whose entries a block counts, at most."""


@dataclass(frozen=True)
class RouterIds:
    """The ids of a router that chooses among more experts than an exchange has.

    Expert `e` of the exchange has the id `first + e`. Another expert's id is unrouted, as -1 is, and so is a route
    whose weight is NaN. An id that no expert of the router has is wrong.

    Attributes:
        first: id of the first expert of the exchange.
        num_experts: of the router.
    """

    first: int
    num_experts: int


@dataclass(frozen=True)
class ExchangeGeometry:
    """What dispatch and combine of one layer look like on rank `rank` of `world_size`.

    Attributes:
        record: layout of a token on the wire.
        combine_format: how a partial result travels home.
        num_experts: experts of all ranks; rank `r` owns ids `starts[r] .. starts[r + 1]`.
        max_tokens: most tokens that any rank dispatches in a step.
        contiguous: rows are copied to contiguous positions on arrival (otherwise gathered through `row_index`).
        row_capacity: (token, expert) rows that may arrive here in a step.
        num_sms: most SMs of a GPU that the exchange takes at a time; None where it may take all.
        kernel_prefix: before the names of CUDA C++ kernels, by which profiles tell dispatchers apart.
        combined_hidden: elements of an expert's row in combine; None where that is `hidden`.
        accepts_repeats: whether a token may name an expert several times, for a row each, and negative ids are none,
            not only -1. An expert has at most `num_slots` rows.
        sums_by_entry: whether the partial results of a token are added in the order of their ranks' last entries in the
            token; else by rank, ascending.
        own_rows: whether this rank's own tokens may be stored to their rows as they are sent.
        router_ids: of whom the ids of tokens are, for a rank without peers; None where they are those of the exchange,
            and a weight may be NaN.
        sm_shared_bytes: shared memory of an SM of this rank's GPU. Ranks may differ in it: it changes no bits and no
            protocol, only how many rows and tokens a block has in shared memory.

    Exchanges of equal sizes have equal geometries: plans, macros and compiled kernels are kept by them. Which exchange
    of its context one is, each launch is told (`count_tag` of `ExchangeBackend`).
    """

    rank: int
    world_size: int
    record: RecordLayout
    combine_format: TokenFormat
    num_experts: int
    max_tokens: int
    contiguous: bool
    row_capacity: int
    num_sms: int | None = None
    combined_hidden: int | None = None
    kernel_prefix: str = ""
    accepts_repeats: bool = False
    sums_by_entry: bool = False
    own_rows: bool = False
    router_ids: RouterIds | None = None
    sm_shared_bytes: int = SM_SHARED_BYTES

    def __hash__(self) -> int:
        """Hash some of the fields, for speed: plans and macros are looked up by a geometry."""
        return hash((self.rank, self.world_size, self.num_experts, self.max_tokens, self.row_capacity))

    @cached_property
    def number(self) -> int:
        """The same for all equal geometries of this process: it is found in a table sooner than they are."""
        return _NUMBERS.setdefault(self, len(_NUMBERS))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return expert_starts(self.num_experts, self.world_size)

    @cached_property
    def first_expert(self) -> int:
        return self.starts[self.rank]

    @cached_property
    def num_local_experts(self) -> int:
        return self.starts[self.rank + 1] - self.first_expert

    @cached_property
    def token_format(self) -> TokenFormat:
        return self.record.format

    @cached_property
    def hidden(self) -> int:
        return self.record.hidden

    @cached_property
    def output_hidden(self) -> int:
        """Elements of an expert's row, of a partial result and of the sum."""
        return self.hidden if self.combined_hidden is None else self.combined_hidden

    @cached_property
    def top_k(self) -> int:
        return self.record.top_k

    @cached_property
    def num_slots(self) -> int:
        return self.world_size * self.max_tokens

    @cached_property
    def most_rows_of_expert(self) -> int:
        """Rows of an expert at most, where arrival has to see to it; 0 where no token has two."""
        return self.num_slots if self.accepts_repeats else 0

    @cached_property
    def block_shared_bytes(self) -> int:
        """Most shared memory of a block."""
        return self.sm_shared_bytes - BLOCK_RESERVED_BYTES

    @cached_property
    def parts(self) -> int:
        """Partial results that a token can get: one from each rank that holds one of its experts."""
        return min(self.top_k, self.world_size)

    @cached_property
    def partial_scales_offset(self) -> int:
        """Bytes from the start of a partial result to its block scales."""
        return align(self.combine_format.quant_bytes(self.output_hidden), 16)

    @cached_property
    def partial_bytes(self) -> int:
        """Bytes of one partial result on the wire."""
        return align(self.partial_scales_offset + self.combine_format.scale_bytes(self.output_hidden), 128)

    @cached_property
    def expected_rows(self) -> int:
        """(token, expert) rows that arrive here if all ranks dispatch `max_tokens`, and choose all experts alike, those
        of `router_ids` too."""
        chosen = self.num_experts if self.router_ids is None else self.router_ids.num_experts
        share = self.num_local_experts / chosen
        return min(round(self.num_slots * self.top_k * share), self.row_capacity)

    @cached_property
    def scale_blocks(self) -> int:
        """128-row blocks of consumer-layout scales that `row_capacity` rows need, however they are grouped."""
        return self.row_capacity // 128 + self.num_local_experts

    def placing_own_rows(self) -> ExchangeGeometry:
        """This, with `own_rows` where that pays: many FP8 tokens, whose rows are copied.

        For ranks that store to each other's memory.
        """
        many = self.max_tokens >= OWN_ROWS_TOKENS and self.num_experts <= OWN_ROWS_EXPERTS and self.world_size > 1
        copied = self.contiguous and self.token_format is FP8_BLOCK and not self.accepts_repeats
        return replace(self, own_rows=many and copied and self.num_sms is None)

    def programs(self, items: int) -> int:
        """Programs of a launch over `items`: one for each, at least one, and at most `num_sms`.

        A launch of as many programs as SMs leaves the other SMs free, however few programs an SM could hold.
        """
        return max(1, items if self.num_sms is None else min(items, self.num_sms))

    def half_bytes(self) -> dict[str, int]:
        """Bytes that one half of each region needs.

        The landing half has room for one record more, so that a half can start at a multiple of `record_bytes` in
        a region that is shared with layers of other record sizes (see `landing_half`). With `own_rows` counts of all
        ranks lie behind the slots.
        """
        counts = 4 * self.world_size * ceil_div(self.num_experts, self.world_size) if self.own_rows else 0
        return {
            "token_flags": 4 * self.num_slots,
            "landing": (self.num_slots + 1) * self.record.record_bytes + counts,
            "combine": self.max_tokens * self.parts * self.partial_bytes,
        }

    def landing_half(self, region_half_bytes: int) -> int:
        """Bytes from the first half of the landing region to the second: whole records, not less than the half."""
        return ceil_div(region_half_bytes, self.record.record_bytes) * self.record.record_bytes


_NUMBERS: dict[ExchangeGeometry, int] = {}


def worst_case_rows(num_experts: int, world_size: int, top_k: int, max_tokens: int) -> int:
    """(token, expert) rows that arrive at one rank at most: every token of every rank, on all its local experts."""
    most_local = ceil_div(num_experts, world_size)
    return world_size * max_tokens * min(top_k, most_local)


def most_tokens(world_size: int, top_k: int) -> int:
    """Tokens of a rank in a step at most: rows are counted in int32, tokens in `COUNT_BITS` bits."""
    return min((2**31 - 1) // (world_size * top_k), 2**COUNT_BITS - 1)
