"""Results of public calls by torch, numpy and ml_dtypes alone, for `tests.support.wrong_calls`.

Each takes the result and the plain arguments of a call and says what differs, or returns None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.support.op_cases import VALUES


def _near(found: torch.Tensor, expected: torch.Tensor, bound: float = 2.0**-22) -> str | None:
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    expected = expected.double()
    # Numbers that leave the range of fp32 on the way may be anything from 0 to Inf.
    limits = (expected.abs() < 1e38) & ((expected.abs() > 1e-36) | (expected == 0))
    ok = (found.double() - expected).abs() <= bound * expected.abs() + 1e-37
    ok |= expected.isnan() & found.isnan()
    return None if bool((ok | ~limits & ~expected.isnan()).all()) else "values"


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).int()


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(widths[t.dtype.itemsize])


def _dequantize_fp8(y: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, granularity_mn: int) -> str | None:
    rows = scales.double().repeat_interleave(granularity_mn, -2)[..., : q.shape[-2], :]
    return _near(y, VALUES[q.dtype][_bytes(q)] * rows.repeat_interleave(128, -1)[..., : q.shape[-1]])


def _dequantize_mxfp8(y: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, granularity_k: int) -> str | None:
    factors = VALUES["e8m0"][scales.int()].repeat_interleave(granularity_k, -1)[..., : q.shape[-1]]
    return _near(y, VALUES[q.dtype][_bytes(q)] * factors)


def _dequantize_nvfp4(
    y: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, decode_scale: Any, engine: str
) -> str | None:
    codes = torch.stack([q & 15, q >> 4], -1).flatten(-2)
    factors = VALUES[torch.float8_e4m3fn][_bytes(scales)].repeat_interleave(16, -1)
    value = VALUES["e2m1"][codes.int()] * factors
    if isinstance(decode_scale, torch.Tensor):
        scale = decode_scale.double()
        scale = scale.reshape(()) if scale.numel() == 1 else scale
        decode_scale = scale[:, None, None] if scale.ndim == 1 and q.ndim == 3 else scale
    elif decode_scale is not None:
        decode_scale = float(decode_scale)  # torch multiplies by no integer of more than 64 bits
    return _near(y, value if decode_scale is None else value * decode_scale, 2.0**-21)


def _encode_scale(y: torch.Tensor, x: torch.Tensor) -> str | None:
    most = float((x if x.is_complex() else x.double()).abs().double().amax()) if x.numel() else 0.0
    usable = 0 < most < math.inf and np.float32(most) > 0
    return _near(y, torch.tensor([min(2688 / most, 2.0**100) if usable else 1.0], dtype=torch.float64), 2.0**-20)


def _swizzle(blocks: torch.Tensor, linear: torch.Tensor) -> str | None:
    """`blocks` are the swizzle of `linear` `[E, N, V]`."""
    e, n, v = linear.shape
    expected = np.zeros((e, -(-n // 128), -(-v // 4), 32, 4, 4), np.uint8)
    row, column = np.meshgrid(np.arange(n), np.arange(v), indexing="ij")
    places = row // 128, column // 4, row % 32, row % 128 // 32, column % 4
    expected[:, *places] = linear.numpy()
    return None if np.array_equal(blocks.numpy().reshape(expected.shape), expected) else "bytes"


def _swizzle_scales(y: torch.Tensor, scales_RV: torch.Tensor, engine: str) -> str | None:
    linear = scales_RV.view(torch.uint8)
    return _swizzle(y.contiguous().view(torch.uint8), linear if linear.ndim == 3 else linear[None])


def _unswizzle_scales(
    y: torch.Tensor, blocks: torch.Tensor, num_rows: int, num_columns: int, engine: str
) -> str | None:
    shape = tuple(blocks.shape[-5:])
    source = blocks.view(torch.uint8).reshape(-1, *shape).numpy()
    row, column = np.meshgrid(np.arange(num_rows), np.arange(num_columns), indexing="ij")
    found = source[:, row // 128, column // 4, row % 32, row % 128 // 32, column % 4]
    same = np.array_equal(y.contiguous().view(torch.uint8).numpy().reshape(found.shape), found)
    return None if same else "bytes"


def _scale_major(y: torch.Tensor, scales: torch.Tensor, major: str) -> str | None:
    found, given = (_bits(t).numpy() for t in (y, scales))
    return None if np.array_equal(found, np.swapaxes(given, -1, -2) if major == "MN" else given) else "bits"


def _softmax_topk(
    y: tuple[torch.Tensor, torch.Tensor],
    logits_TE: torch.Tensor,
    top_k: int,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> str | None:
    logits = logits_TE.double()
    if not bool(logits.isfinite().all()):
        return None
    ids = y[0].long()
    if bool((logits.gather(1, ids) < logits.topk(top_k).values).any()):
        return "ids"
    weights = logits.softmax(-1).gather(1, ids)
    if renormalize:
        weights = logits.gather(1, ids).softmax(-1)
    return _near(y[1], weights * float(scaling_factor), 1e-4)


def _sigmoid_topk(
    y: tuple[torch.Tensor, torch.Tensor],
    logits_TE: torch.Tensor,
    top_k: int,
    correction_bias_E: torch.Tensor | None,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scaling_factor: float,
) -> str | None:
    logits, bias = logits_TE.double(), 0.0 if correction_bias_E is None else correction_bias_E.double()
    scores, ids = logits.sigmoid(), y[0].long()
    choice = scores + bias
    if not bool(choice.isfinite().all()) or bool((choice.abs() > 1e30).any()):
        return None
    groups = choice.unflatten(-1, (num_groups, -1))
    if num_groups > 1:
        best = groups.topk(2).values.sum(-1)
        kept = (best[..., None, :] > best[..., :, None]).sum(-1) < top_groups
        if bool((best.sort().values.diff() < 1e-6).any()):
            return None  # groups so close that fp32 may order them otherwise
        groups = groups.masked_fill(~kept[..., None], -math.inf)
    eligible = groups.flatten(-2)
    if bool((eligible.gather(1, ids) < eligible.topk(top_k).values - 1e-6).any()):
        return "ids"
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return _near(y[1], weights * float(scaling_factor), 2.0**-20)


def _dequantize_rows(y: torch.Tensor, q: Any, engine: str = "auto") -> str | None:
    fmt = q.format
    if fmt.name == "bf16":
        return _near(y, q.quants_RK.double())
    raw = _bytes(q.quants_RK)
    if fmt.element_bits == 4:
        value = VALUES["e2m1"][torch.stack([raw & 15, raw >> 4], -1).flatten(-2)]
    else:
        value = VALUES[q.quants_RK.dtype][raw]
    scales = q.scales_RV
    if scales.dtype.itemsize == 1:
        scales = VALUES[torch.float8_e4m3fn if fmt.name == "nvfp4" else "e8m0"][_bytes(scales)]
    factors = scales.double().repeat_interleave(fmt.block, -1)[:, : value.shape[1]]
    return _near(y, value * factors * (1.0 if q.row_scale_R is None else q.row_scale_R.double()[:, None]), 2.0**-21)


def _contiguous(y: Any, num_experts: int, num_ranks: int) -> str | None:
    return None if tuple(y.slot_experts) == tuple(range(num_experts)) and y.num_ranks == num_ranks else "slots"


def _reserved_bytes(y: dict[str, int], config: Any, world_size: int, placed: bool, num_hosts: int) -> str | None:
    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // 256) * 256

    tokens, hidden, ranks = config.max_tokens_per_rank, config.hidden_size, world_size // num_hosts
    # Of a rank of a host: those of its rail, and one more of each.
    slots = tokens if num_hosts == 1 else num_hosts * (tokens + 1)
    expected = {
        "token_flags": 2 * aligned(4 * ranks * slots),
        "signals": aligned(4 * (8 + 7 + 64 + 6 + 128) * ranks),
    }
    if config.combine_format == "bf16" or num_hosts > 1:
        partial = -(-2 * hidden // 128) * 128
        expected["combine"] = 2 * aligned(slots * min(config.top_k, ranks) * partial)
    if ("link" in y) != (num_hosts > 1):
        return "link"
    if placed:
        expert = aligned(6 * hidden * config.intermediate_size)
        expected["staging"] = aligned(20 * world_size) + min(expert, 16 << 20)
    if ("staging" in y) != placed:
        return "staging"
    return next((f"{name} {y[name]}, expected {size}" for name, size in expected.items() if y[name] != size), None)


def _imbalance(y: float, ranks: Any) -> str | None:
    rows = [counts.rows for counts in ranks]
    expected = max(rows) / (sum(rows) / len(rows)) if any(rows) else 1.0
    return None if math.isclose(y, expected, rel_tol=1e-12) else f"{y}, expected {expected}"


def _plan(y: Any, load: Any, num_ranks: int, slots_per_rank: int) -> str | None:
    loads = np.asarray(load, dtype=np.float64)
    held = np.asarray(y.slot_experts).reshape(num_ranks, slots_per_rank)
    if set(held.reshape(-1).tolist()) != set(range(len(loads))):
        return "an expert is missing"
    return None if all(len(set(row)) == slots_per_rank for row in held.tolist()) else "an expert twice on a rank"


REFERENCES: dict[str, Callable[..., str | None]] = {
    "dequantize_fp8": _dequantize_fp8,
    "dequantize_mxfp8": _dequantize_mxfp8,
    "dequantize_nvfp4": _dequantize_nvfp4,
    "dequantize_rows": _dequantize_rows,
    "Placement.contiguous": _contiguous,
    "imbalance": _imbalance,
    "nvfp4_encode_scale": _encode_scale,
    "pack_scale_major": _scale_major,
    "plan_placement": _plan,
    "reserved_bytes": _reserved_bytes,
    "sigmoid_topk": _sigmoid_topk,
    "softmax_topk": _softmax_topk,
    "swizzle_scales": _swizzle_scales,
    "topk_softmax": _softmax_topk,
    "unswizzle_scales": _unswizzle_scales,
}
"""By name of the call."""
