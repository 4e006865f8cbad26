"""Ahead-of-time cases of the router, of the norm of experts, and of the counts of a step."""

from __future__ import annotations

import triton

from moe_runtime.kernels import route, step_counts
from moe_runtime.kernels.gemm import expert_norm
from moe_runtime.launch.research.aot_cases import ALL_ARCHS, AotCase


def _logits(tokens: int, experts: int, parts: int, archs: tuple[int, ...] = ALL_ARCHS) -> AotCase:
    constants = {"TILE_T": tokens, "TILE_E": experts, "BLOCK_K": route.BLOCK_K, "PART": route.PART, "PARTS": parts}
    constants |= {"EARLY": True, "INTERPRET": False}
    signature = {
        "x_ptr": "*bf16",
        "w_ptr": "*fp32",
        "partial_ptr": "*fp32",
        "num_tokens": "i32",
        "E": "i32",
        "K": "i32",
    }
    signature |= {"x_stride": "i64", "chunk": "i32", **dict.fromkeys(constants, "constexpr")}
    options = {"num_warps": 8 if tokens == route.LARGE_TILE else 4, "num_stages": 3, "enable_fp_fusion": False}
    mma = {
        90: r"mma\.sync" if tokens == route.FEW_TOKENS else r"wgmma\.mma_async",
        100: r"tcgen05\.mma",
        120: r"mma\.sync",
    }
    wanted = {arch: mma[arch] for arch in archs}
    return AotCase("route_logits", "bf16", route._logits_kernel, signature, constants, options, archs, wanted)


def _choose(
    kind: str, experts: int, *, parts: int = 1, groups: int = 1, bias: bool = False, correction: bool = False
) -> AotCase:
    constants: dict[str, object] = {"KIND": route.KINDS.index(kind), "RENORMALIZE": True, "TOP_K": 8}
    constants |= {"GROUPS": groups, "TOP_GROUPS": max(groups // 2, 1), "SPLITS": route.SPLITS, "PARTS": parts}
    constants |= {"BLOCK": triton.next_power_of_2(experts), "BLOCK_K": 8, "EARLY": True}
    constants |= {name: None for name, there in (("bias_ptr", bias), ("correction_ptr", correction)) if not there}
    signature = {"partial_ptr": "*fp32", "bias_ptr": "*fp32", "correction_ptr": "*fp32", "idx_ptr": "*i32"}
    signature |= {"weights_ptr": "*fp32", "num_tokens": "i32", "E": "i32", "scaling_factor": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {"num_warps": route.choosing_warps(experts)}
    return AotCase("route_choose", "any", route._choose_kernel, signature, constants, options)


def _norm(hidden: int) -> AotCase:
    signature = {"rows_ptr": "*i16", "stride": "i64", "scale_ptr": "*fp32", "group_offsets_ptr": "*i32"}
    signature |= {"expert_ids_ptr": "*i32", "num_active_ptr": "*i32", "eps": "fp32"}
    signature |= dict.fromkeys(("num_groups", "num_experts", "capacity"), "i32")
    constexprs = expert_norm._options(hidden, 32)
    return AotCase(
        "expert_norm",
        "bf16",
        expert_norm._expert_norm_kernel,
        signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs,
        {"enable_fp_fusion": False},
    )


def _counts(ids: str) -> AotCase:
    signature = {"ids_ptr": ids, "slots_ptr": ids, "num_parts_ptr": "*i32", "group_offsets_ptr": "*i32"}
    signature |= {"words_ptr": "*i64"}
    signature |= dict.fromkeys(("num_tokens", "num_experts", "num_groups", "first_slot", "end_slot"), "i32")
    constexprs = step_counts._constexprs(8)
    return AotCase(
        "count_step",
        "any",
        step_counts._count_step_kernel,
        signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs,
    )


AOT_CASES: tuple[AotCase, ...] = (
    _logits(route.FEW_TOKENS, route.TILE, 7, (90,)),
    _logits(route.TILE, route.TILE, 1),
    _logits(route.TILE, route.TILE, 7),
    _logits(route.LARGE_TILE, route.LARGE_TILE, 1, (90, 100)),
    _choose("softmax", 128, parts=3),
    _choose("topk_softmax", 128, bias=True),
    _choose("sigmoid", 256, parts=7, groups=8, correction=True),
    _choose("sigmoid", 384, correction=True),
    _norm(4096),
    _norm(2880),
    _counts("*i32"),
    _counts("*i64"),
)
