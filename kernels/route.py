"""Router on the GPU: logits, scores and the choice of experts in two kernels, without a host sync.

A sum over K is a sum of `SPLITS` splits, each a sum of parts of `PART` columns. A program of `_logits_kernel` sums a
split for a tile of tokens and experts, or, with few tokens, a part. `_choose_kernel` adds what is left to add, in the
same order, computes scores, and chooses one expert after the other. An fp32 weight is split into three bf16 values,
which MMA multiplies exactly. If all weights of a tile are bf16 values, the other two are zero and are skipped, which
changes no bit. Sums are fp32, in an order that depends only on the sizes, so a token's result does not depend on its
neighbours. The reference, in float64, is `moe_runtime.router.Router`.

With few tokens `_logits_kernel` starts, and loads its weights, before the kernel before it has ended. With many that
lost: programs crowded on the SMs that were free first (256 tokens, 256 experts, one H200: 29 us instead of 22).

Cost at H = 7168, E = 256: 7.3 MB of weights, 2 us at 4.3 TB/s for any number of tokens; 15 GFLOP at 4096 tokens with
bf16-valued weights, three times that with others.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats.bits import bf16_bits_to_f32, bits_f32, f32_bits, f32_to_bf16_bits, magnitude_bits
from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.runtime import INTERPRET

if not INTERPRET:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK_K = 64
SPLITS = 8
PART = 2 * BLOCK_K
FEW_TILES = 8
"""Tiles of tokens and experts up to which each part has a program of its own, so that there are as many as SMs."""
TILE, LARGE_TILE = 64, 128
"""Tokens and experts of a program."""
FEW_TOKENS = 16
"""Tokens of a program that sums a part, where all tokens are so few. Only on Hopper, whose `mma.sync` is known to give
the bits of the instructions of larger tiles."""
MANY_TILES = 16
"""Large tiles from which on there are only such: each value is read from L2 half as often."""
MAX_ROUTED_EXPERTS = 4096
CHOOSING_WARPS = (256, 1), (512, 2), (MAX_ROUTED_EXPERTS, 4)
"""Experts, and the warps that choose for a token among up to so many. More add partial sums faster and choose slower: a
token of 384 experts (H=7168) takes 11.1, 9.2 and 9.1 us with 1, 2 and 4, one of 256 takes 8.1, 10.4 and 8.4."""

KINDS = ("softmax", "topk_softmax", "sigmoid")
SOFTMAX, TOPK_SOFTMAX, SIGMOID = (tl.constexpr(kind) for kind in range(3))
NAN_KEY = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
LOWEST_KEY = tl.constexpr(-(2**31))  # below all of `_key`
LARGEST = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _dot(acc, x, w, INTERPRET: tl.constexpr):
    """`acc + x @ bf16(w)^T` for fp32 `w`, and the rounding error `w - bf16(w)`."""
    if INTERPRET:
        rounded = bf16_bits_to_f32(f32_to_bf16_bits(w))
        # Not tl.dot: a BLAS result may depend on the row's position in the block.
        acc += tl.sum(x[:, None, :] * rounded[None, :, :], axis=2)
        rest = w - rounded
    else:
        rounded = w.to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(rounded), acc)
        rest = w - rounded.to(tl.float32)
    return acc, rest


@triton.jit
def _add_product(acc, x, w, INTERPRET: tl.constexpr):
    """`acc + x @ w^T` for fp32 `w`, whose second and third bf16 value are multiplied if one of them is not zero."""
    acc, rest = _dot(acc, x, w, INTERPRET)
    if tl.max(tl.max(magnitude_bits(rest), axis=1), axis=0) > 0:
        acc, rest = _dot(acc, x, rest, INTERPRET)
        acc, rest = _dot(acc, x, rest, INTERPRET)
    return acc


@triton.jit
def _load(ptr, row, ok, k, end):
    """Columns `k`, as far as they come before `end`, of rows that start at `row`; zeros of rows that are not `ok`."""
    return tl.load(ptr + row[:, None] + k[None, :], mask=ok[:, None] & (k < end)[None, :], other=0.0)


@triton.jit
def _load_tokens(ptr, row, ok, k, end, INTERPRET: tl.constexpr):
    """`_load` of bf16, in the type that `_dot` takes."""
    x = _load(ptr, row, ok, k, end)
    if INTERPRET:
        x = bf16_bits_to_f32(x)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x_ptr,
    w_ptr,
    partial_ptr,
    num_tokens,
    E,
    K,
    x_stride,
    chunk,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """fp32 `partial[program, token, expert]` over the columns of a split, `chunk` of them, or of one of its PARTS."""
    if EARLY and PARTS > 1:  # few programs, which leave room for those of `_choose_kernel` to wait
        gdc_launch_dependents()
    t = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    e = tl.program_id(1) * TILE_E + tl.arange(0, TILE_E)
    number = tl.program_id(2)
    t_ok, e_ok = t < num_tokens, e < E
    x_row, w_row = t.to(tl.int64) * x_stride, e.to(tl.int64) * K
    first = number // PARTS * chunk
    end = tl.minimum(first + chunk, K)
    if PARTS > 1:
        first += number % PARTS * PART
        end = tl.minimum(first + PART, end)
    acc = tl.zeros([TILE_T, TILE_E], tl.float32)
    total = tl.zeros([TILE_T, TILE_E], tl.float32)
    if PARTS > 1:
        # All weights are on their way before the tokens are awaited.
        tl.static_assert(PART == 2 * BLOCK_K)
        k_low = first + tl.arange(0, BLOCK_K)
        k_high = k_low + BLOCK_K
        w_low = _load(w_ptr, w_row, e_ok, k_low, end)
        w_high = _load(w_ptr, w_row, e_ok, k_high, end)
        if EARLY:
            gdc_wait()
        x_low = _load_tokens(x_ptr, x_row, t_ok, k_low, end, INTERPRET)
        x_high = _load_tokens(x_ptr, x_row, t_ok, k_high, end, INTERPRET)
        acc = _add_product(acc, x_low, w_low, INTERPRET)
        acc = _add_product(acc, x_high, w_high, INTERPRET)
    else:
        for start in range(first, end, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = _load_tokens(x_ptr, x_row, t_ok, k, K, INTERPRET)
            acc = _add_product(acc, x, _load(w_ptr, w_row, e_ok, k, K), INTERPRET)
            if (start - first) % PART == PART - BLOCK_K:
                total += acc
                acc = tl.zeros([TILE_T, TILE_E], tl.float32)
    to = partial_ptr + (number.to(tl.int64) * num_tokens + t[:, None]) * E + e[None, :]
    tl.store(to, total + acc, mask=t_ok[:, None] & e_ok[None, :])


@triton.jit
def _key(x):
    """int32 keys in the order of fp32 `x`: NaN above everything, zeros equal."""
    bits = f32_bits(x + 0.0)
    return tl.where(magnitude_bits(x) > INF_BITS, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _best(keys, ids, AXIS: tl.constexpr = 0):
    """The lowest of the int32 `ids` that have the largest of the int32 `keys`. A warp reduces int32 at once."""
    return tl.min(tl.where(keys == tl.max(keys, axis=AXIS, keep_dims=True), ids, LARGEST), axis=AXIS)


@triton.jit
def _of_best_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """`choice` with -inf for experts outside the TOP_GROUPS groups with the largest sum of their two best."""
    SIZE: tl.constexpr = BLOCK // GROUPS
    grouped = tl.reshape(choice, [GROUPS, SIZE])
    within = tl.broadcast_to(tl.arange(0, SIZE)[None, :], [GROUPS, SIZE])
    keys = _key(grouped)
    is_first = within == _best(keys, within, 1)[:, None]
    is_second = within == _best(tl.where(is_first, LOWEST_KEY, keys), within, 1)[:, None]
    best = tl.sum(tl.where(is_first, grouped, 0.0), axis=1) + tl.sum(tl.where(is_second, grouped, 0.0), axis=1)
    g = tl.arange(0, GROUPS)
    groups = _key(best)
    allowed = g < 0
    for _ in tl.static_range(TOP_GROUPS):
        chosen = _best(groups, g)
        allowed = allowed | (g == chosen)
        groups = tl.where(g == chosen, LOWEST_KEY, groups)
    kept = tl.reshape(tl.broadcast_to(allowed.to(tl.int32)[:, None], [GROUPS, SIZE]), [BLOCK])
    # A bias may be -inf. Allowed experts must still rank above masked ones.
    return tl.where(kept > 0, tl.where(choice < LOWEST, LOWEST, choice), float("-inf"))


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    partial_ptr,
    bias_ptr,
    correction_ptr,
    idx_ptr,
    weights_ptr,
    num_tokens,
    E,
    scaling_factor,
    KIND: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Ids and weights of one token, as `moe_runtime.router` defines them."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    ok = e < E
    logits = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        of_split = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            row = token + (token * 0 + split * PARTS + part) * num_tokens
            of_split += tl.load(partial_ptr + row * E + e, mask=ok, other=0.0)
        logits += of_split
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + e, mask=ok, other=0.0)
    scores = logits
    choice = logits
    if KIND == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores
        if correction_ptr is not None:
            choice += tl.load(correction_ptr + e, mask=ok, other=0.0)
        if TOP_GROUPS < GROUPS:
            choice = _of_best_groups(choice, GROUPS, TOP_GROUPS, BLOCK)
    elif KIND == SOFTMAX:
        # The maximum may drop a NaN, the sum keeps it.
        powers = tl.where(ok, tl.exp(logits - tl.max(tl.where(ok, logits, float("-inf")), axis=0)), 0.0)
        scores = powers / tl.sum(powers, axis=0)

    keys = tl.where(ok, _key(choice), LOWEST_KEY)
    j = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    bits = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        chosen = _best(keys, e)
        ids = tl.where(j == k, chosen, ids)
        bits = tl.where(j == k, tl.max(tl.where(e == chosen, f32_bits(scores), LOWEST_KEY), axis=0), bits)
        keys = tl.where(e == chosen, LOWEST_KEY, keys)
    weights = bits_f32(bits)
    real = j < TOP_K
    if KIND == TOPK_SOFTMAX:
        largest = tl.sum(tl.where(j == 0, weights, 0.0), axis=0)
        weights = tl.where(real, tl.exp(weights - largest), 0.0)
        weights = weights / tl.sum(weights, axis=0)
    elif RENORMALIZE:
        total = tl.sum(weights, axis=0)
        if KIND == SIGMOID:
            total += 1e-20
        weights = weights / total
    tl.store(idx_ptr + token * TOP_K + j, ids, mask=real)
    tl.store(weights_ptr + token * TOP_K + j, weights * scaling_factor, mask=real)


class RouterSettings(Protocol):
    """The settings of a router that the kernels read, as in `moe_runtime.config.RouterConfig`, which describes them."""

    @property
    def kind(self) -> str: ...
    @property
    def renormalize(self) -> bool: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def scaling_factor(self) -> float: ...


def supports(x_TH: torch.Tensor, num_experts: int, config: RouterSettings) -> bool:
    """Whether `route` supports this input: bf16 tokens with contiguous rows, at most `MAX_ROUTED_EXPERTS` experts.

    With group selection, numbers of groups and of experts must be powers of two.
    """
    grouped = config.top_groups < config.num_groups
    powers = triton.next_power_of_2(num_experts) == num_experts and config.num_groups & (config.num_groups - 1) == 0
    side_by_side = x_TH.shape[0] == 0 or x_TH.stride(1) == 1
    return (
        x_TH.dtype == torch.bfloat16 and side_by_side and num_experts <= MAX_ROUTED_EXPERTS and (powers or not grouped)
    )


class Tiling(NamedTuple):
    """Tokens and experts of a program of `_logits_kernel`, and the programs that share a split."""

    tokens: int
    experts: int
    parts: int


def choosing_warps(experts: int) -> int:
    """Warps of a program of `_choose_kernel`. By experts alone: sums over these may depend on it in their last bit."""
    return next(warps for most, warps in CHOOSING_WARPS if experts <= most)


def choose_tiling(tokens: int, experts: int, chunk: int, major: int) -> Tiling:
    """The tiles for splits of `chunk` columns. No choice changes a bit.

    `major` is the first number of the GPU's compute capability. Only Hopper and the large Blackwell GPUs have the
    shared memory of large tiles.
    """
    large = ceil_div(tokens, LARGE_TILE) * ceil_div(experts, LARGE_TILE)
    if large >= MANY_TILES and experts > TILE and major in (9, 10):
        return Tiling(LARGE_TILE, LARGE_TILE, 1)
    if ceil_div(tokens, TILE) * ceil_div(experts, TILE) > FEW_TILES:
        return Tiling(TILE, TILE, 1)
    return Tiling(FEW_TOKENS if tokens <= FEW_TOKENS and major == 9 else TILE, TILE, ceil_div(chunk, PART))


def route(
    x_TH: torch.Tensor,
    weight_EH: torch.Tensor,
    top_k: int,
    config: RouterSettings,
    *,
    bias_E: torch.Tensor | None = None,
    correction_bias_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and weights of tokens, for input that `supports` accepts.

    Args:
        x_TH: bf16 `[T, H]`. The weights of a token that is not finite, or whose logits are not, may be NaN here where
            the reference has numbers.
        weight_EH: fp32 `[E, H]`, contiguous; finite. No kernel before may let this one start and then write them.
        bias_E: fp32 `[E]`, added to the logits.
        correction_bias_E: fp32 `[E]`, added to sigmoid scores for the choice.

    Returns:
        ids int32 `[T, K]` and weights fp32 `[T, K]`, by descending score, ties to the lowest id, NaN first.
    """
    (tokens, hidden), experts, device = x_TH.shape, weight_EH.shape[0], x_TH.device
    idx_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    if tokens == 0:
        return idx_TK, weights_TK
    capability = (9, 0) if INTERPRET else torch.cuda.get_device_capability(device)
    early = not INTERPRET and capability >= (9, 0)
    pdl = {"launch_pdl": True} if early else {}
    chunk = ceil_div(hidden, SPLITS * BLOCK_K) * BLOCK_K
    tiling = choose_tiling(tokens, experts, chunk, capability[0])
    tiles, parts = (ceil_div(tokens, tiling.tokens), ceil_div(experts, tiling.experts)), tiling.parts
    partial_PTE = torch.empty(SPLITS * parts, tokens, experts, dtype=torch.float32, device=device)
    _logits_kernel[(*tiles, SPLITS * parts)](
        raw_bits(x_TH) if INTERPRET else x_TH,
        weight_EH,
        partial_PTE,
        tokens,
        experts,
        hidden,
        x_TH.stride(0),
        chunk,
        TILE_T=tiling.tokens,
        TILE_E=tiling.experts,
        BLOCK_K=BLOCK_K,
        PART=PART,
        PARTS=parts,
        EARLY=early,
        INTERPRET=INTERPRET,
        num_warps=8 if tiling.tokens == LARGE_TILE else 4,
        num_stages=3,
        enable_fp_fusion=False,
        **(pdl if parts > 1 else {}),
    )
    _choose_kernel[(tokens,)](
        partial_PTE,
        bias_E,
        correction_bias_E,
        idx_TK,
        weights_TK,
        tokens,
        experts,
        config.scaling_factor,
        KIND=KINDS.index(config.kind),
        RENORMALIZE=config.renormalize,
        TOP_K=top_k,
        GROUPS=config.num_groups,
        TOP_GROUPS=config.top_groups,
        SPLITS=SPLITS,
        PARTS=parts,
        BLOCK=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        EARLY=early,
        num_warps=choosing_warps(experts),
        enable_fp_fusion=False,
        **pdl,
    )
    return idx_TK, weights_TK
