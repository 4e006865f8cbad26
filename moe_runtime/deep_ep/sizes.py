"""Settings with DeepEP's names, and how many bytes a buffer takes: the formulas that hints, checks and docs share.

A dispatcher reserves two halves on each rank (`ExchangeGeometry.half_bytes`):

    2 * ((W T + 1) * record + 4 W T + T * parts * partial)

with `W` ranks, `T` tokens of a rank in a step, and `partial = align(2 H, 128)` bytes of a partial sum.

Normal mode: a token goes once to a rank, so its "experts" are the ranks: `parts = W`, and `record` has the token, its
scales, 32 expert ids and weights, and `W` ids and weights of the ranks. Low latency: `parts = min(K, W)`, and `record`
has a bf16 token, `K` ids and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, most_tokens, worst_case_rows
from moe_runtime.kernels.exchange.payload import WORD, PayloadLayout
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import BF16, FP8_BLOCK, TokenFormat, align, ceil_div
from moe_runtime.support.arguments import check_integer

MOST_TOP_K = 32
"""Expert ids that a token of normal mode may bring."""
HINTED_TOKENS = 4096
"""Tokens of a rank in one step that a hinted buffer of normal mode has room for; more travel in several steps."""
FP8_BLOCK_SIZE = FP8_BLOCK.block
"""Elements of a row that share a scale."""


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning of normal mode. Here tokens are not sent in chunks, so only the sizes of buffers follow from it.

    Attributes:
        num_sms: kept, without effect: `Buffer.set_num_sms` says how many SMs calls take.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: kept, without effect.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: kept, without effect.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes with which 4096 tokens of a rank travel in one step; `hidden_bytes` is the size of a bf16 token."""
        check_integer("hidden_bytes", hidden_bytes, WORD)
        check_integer("num_ranks", num_ranks)
        return normal_bytes(align(hidden_bytes // WORD, 16), num_ranks, HINTED_TOKENS)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: ranks of one host need no such buffer in normal mode."""
        check_integer("hidden_bytes", hidden_bytes, WORD)
        check_integer("num_ranks", num_ranks)
        return 0


def normal_words(hidden: int) -> int:
    """bf16 words of the widest token of normal mode: `H` elements, fp32 scales, 32 int32 ids and 32 fp32 weights."""
    return PayloadLayout(WORD * hidden, ceil_div(hidden, FP8_BLOCK_SIZE), MOST_TOP_K).words


def exchange_bytes(words: int, hidden: int, num_ranks: int, num_experts: int, top_k: int, tokens: int) -> int:
    """Bytes that a dispatcher with bf16 payload of `words` and bf16 partial sums of `hidden` reserves on a rank."""
    geometry = ExchangeGeometry(
        rank=0,
        world_size=num_ranks,
        record=RecordLayout(BF16, words, top_k),
        combine_format=BF16,
        num_experts=num_experts,
        max_tokens=tokens,
        contiguous=False,
        row_capacity=worst_case_rows(num_experts, num_ranks, top_k, tokens),
        combined_hidden=hidden,
    )
    return 2 * sum(geometry.half_bytes().values())


def normal_bytes(hidden: int, num_ranks: int, tokens: int) -> int:
    """Bytes of normal mode on each rank for steps of `tokens`."""
    return exchange_bytes(normal_words(hidden), hidden, num_ranks, num_ranks, num_ranks, tokens)


def combine_bytes(hidden: int, num_ranks: int, tokens: int) -> int:
    """Bytes of rows and their 32 weights that come home from the peers of a rank in a step."""
    return tokens * (num_ranks - 1) * align(WORD * hidden + 4 * MOST_TOP_K, 16)


@cache
def normal_tokens(num_bytes: int, hidden: int, num_ranks: int) -> int:
    """Most tokens of a rank in one step of normal mode for which `num_bytes` suffice; 0 where none fits.

    A step has at most those that exchanges of entries for ranks, and for experts, can count.
    """
    fixed = normal_bytes(hidden, num_ranks, 1)
    each = normal_bytes(hidden, num_ranks, 2) - fixed
    if num_bytes < fixed:
        return 0
    return min((num_bytes - fixed) // each + 1, most_tokens(num_ranks, max(num_ranks, MOST_TOP_K)))


def low_latency_bytes(tokens: int, hidden: int, num_ranks: int, num_experts: int, top_k: int = MOST_TOP_K) -> int:
    """Bytes of low latency on each rank for steps of `tokens`."""
    top_k = min(top_k, num_experts)
    return exchange_bytes(hidden, hidden, num_ranks, num_experts, top_k, tokens)


def padded_bytes(tokens: int, hidden: int, num_ranks: int, num_experts: int, fmt: TokenFormat) -> int:
    """Bytes of the rows and scales that a low-latency dispatch returns, `[E / W, W T, H]`.

    `E / W * W T * (bytes of a row + bytes of its scales)`, plus 4 for the token of each row at its rank.
    """
    rows = num_experts // num_ranks * num_ranks * tokens
    return rows * (fmt.quant_bytes(hidden) + fmt.scale_bytes(hidden) + 4)


def memory_of(hidden: int, num_ranks: int, num_experts: int, top_k: int, tokens: int) -> dict[str, int]:
    """Bytes on each rank of both modes for `tokens` of a rank: what is reserved, and what a dispatch returns at most.

    Normal mode returns a row for each token that wants this rank, `W T` rows at most.
    """
    return {
        "normal_reserved": normal_bytes(hidden, num_ranks, tokens),
        "normal_rows_bf16": num_ranks * tokens * BF16.quant_bytes(hidden),
        "low_latency_reserved": low_latency_bytes(tokens, hidden, num_ranks, num_experts, top_k),
        "low_latency_rows_bf16": padded_bytes(tokens, hidden, num_ranks, num_experts, BF16),
        "low_latency_rows_fp8": padded_bytes(tokens, hidden, num_ranks, num_experts, FP8_BLOCK),
    }
