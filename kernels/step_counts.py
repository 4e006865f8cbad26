"""Counters of a layer's steps, updated on the device in one launch; the host reads them by `observation.counters`.

`words` is int64 `[HEAD + E]`: steps, tokens, tokens sent to other ranks (once for each rank; with several hosts, to
other hosts, once for each), (token, expert) rows that this rank received, then the tokens of each expert by id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STEPS, TOKENS, SENT, ROWS, HEAD = range(5)
BLOCK_T = 64


@triton.jit(do_not_specialize=["num_tokens"])
def _count_step_kernel(
    ids_ptr, slots_ptr, num_parts_ptr, group_offsets_ptr, words_ptr,
    num_tokens, num_experts, num_groups, first_slot, end_slot,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr, SENT: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = program * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    place = token[:, None] * TOP_K + k[None, :]
    live = (token < num_tokens)[:, None] & (k < TOP_K)[None, :]
    ids = tl.load(ids_ptr + place, live, other=-1).to(tl.int64)
    known = (ids >= 0) & (ids < num_experts)
    tl.atomic_add(words_ptr + HEAD + ids, tl.full([BLOCK_T, BLOCK_K], 1, tl.int64), known, sem="relaxed")
    slots = tl.load(slots_ptr + place, live, other=-1)
    here = tl.max(((slots >= first_slot) & (slots < end_slot)).to(tl.int32), axis=1)
    parts = tl.load(num_parts_ptr + token, token < num_tokens, other=0)
    tl.atomic_add(words_ptr + SENT, tl.sum(parts - here, axis=0).to(tl.int64), sem="relaxed")
    if program == 0:
        tl.atomic_add(words_ptr, tl.full([], 1, tl.int64), sem="relaxed")
        tl.atomic_add(words_ptr + TOKENS, tl.full([], 0, tl.int64) + num_tokens, sem="relaxed")
        tl.atomic_add(words_ptr + ROWS, tl.load(group_offsets_ptr + num_groups).to(tl.int64), sem="relaxed")


def count_step(
    words: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    slots_TK: torch.Tensor,
    num_parts_T: torch.Tensor,
    group_offsets: torch.Tensor,
    own_slots: tuple[int, int],
    *,
    engine: str,
) -> None:
    """Add a step of this rank to `words`, without a host sync.

    Args:
        words: the counters, as in the module docstring.
        topk_idx_TK: int32 or int64 `[T, K]`, contiguous: expert ids; ids out of range are not counted.
        slots_TK: like `topk_idx_TK`, with ids of physical experts (equal to the expert ids without a placement).
        num_parts_T: int32 `[T]`, number of ranks, or of several hosts, that each token was sent to, this one included.
        group_offsets: int32 `[G + 1]` of the received rows.
        own_slots: first physical expert of this rank, or of this one of several hosts, and the one after its last.
        engine: "cuda", "triton" or "torch".
    """
    num_tokens, top_k = topk_idx_TK.shape
    num_experts, (first_slot, end_slot) = words.shape[0] - HEAD, own_slots
    if engine == "torch":
        ids = topk_idx_TK.flatten().long()
        known = (ids >= 0) & (ids < num_experts)
        words[HEAD:].index_add_(0, ids.clamp(0, num_experts - 1), known.long())
        here = ((slots_TK >= first_slot) & (slots_TK < end_slot)).any(dim=1)
        words[STEPS] += 1
        words[TOKENS] += num_tokens
        words[SENT] += num_parts_T.sum() - here.sum()
        words[ROWS] += group_offsets[-1]
        return
    _count_step_kernel[(max(1, triton.cdiv(num_tokens, BLOCK_T)),)](
        topk_idx_TK,
        slots_TK,
        num_parts_T,
        group_offsets,
        words,
        num_tokens,
        num_experts,
        group_offsets.shape[0] - 1,
        first_slot,
        end_slot,
        **_constexprs(top_k),
    )


def _constexprs(top_k: int) -> dict[str, int]:
    places = {"TOKENS": TOKENS, "SENT": SENT, "ROWS": ROWS, "HEAD": HEAD}
    return {"TOP_K": top_k, "BLOCK_K": triton.next_power_of_2(top_k), "BLOCK_T": BLOCK_T, **places}
