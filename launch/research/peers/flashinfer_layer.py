"""FlashInfer's `moe_ep` layer, Hopper mega kernels, end to end: its own staging included (written for 0.7.4).

`push` compiles CUDA C++ (it needs nvcc), `pull` and `nvfp4` are in CuTe (they need `nvidia-cutlass-dsl`). FP8 weights
have 128x128 blocks; `nvfp4` multiplies NVFP4 weights by FP8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from moe_runtime.launch.research.peers.case import Case, Point, Turn, Way

E4M3_MAX = 448.0
LARGEST_INPUT = 8.0
"""Tokens and activated values stay below it, which `pull` wants to know: its scales are static."""
INIT_TIMEOUT_S = 300.0


def push(case: Case) -> Point:
    def config(ep: Any, sizes: dict[str, int]) -> Any:
        return ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(
            **sizes, fuse_fc1_epilogue=False, init_timeout_s=INIT_TIMEOUT_S
        )

    def weights(ep: Any, pack: Any, sizes: dict[str, int]) -> Any:
        local = len(case.local)
        return ep.preprocess_sm90_push_fp8_mega_weights(pack, **sizes, num_local_experts=local, fuse_fc1_epilogue=False)

    return _layers(case, "FP8", config, weights, case.bound("fp8_block"), ids_dtype=torch.int32)


def pull(case: Case) -> Point:
    scale = LARGEST_INPUT / (0.95 * E4M3_MAX)
    scales = {"fc1_activation_dequant_scale": scale, "fc2_activation_dequant_scale": scale}

    def config(ep: Any, sizes: dict[str, int]) -> Any:
        return ep.Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig(
            **sizes, **scales, fp8_scale_mode="blockwise", knobs=None, load_balance_mode="atomic_counter"
        )

    def weights(ep: Any, pack: Any, sizes: dict[str, int]) -> Any:
        return ep.preprocess_sm90_pull_fp8_mega_weights(
            pack, **sizes, **scales, kind="fp8_e4m3", fp8_scale_mode="blockwise"
        )

    return _layers(case, "FP8", config, weights, case.bound("fp8_block"))


def nvfp4(case: Case) -> Point:
    def config(ep: Any, sizes: dict[str, int]) -> Any:
        return ep.Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig(**sizes, knobs=None)

    def weights(ep: Any, pack: Any, sizes: dict[str, int]) -> Any:
        # Theirs is built with all CUTLASS kernels of their fused layer, for minutes.
        prepare: Any = import_module("flashinfer.fused_moe.prepare")
        prepare.interleave_moe_weights_for_sm90_mixed_gemm = interleave_fp4
        return ep.preprocess_sm90_pull_nvfp4_mega_weights(pack, **sizes)

    return _layers(case, "NVFP4 weights, FP8 tokens", config, weights, case.bound("fp8_block", "nvfp4"))


def _layers(
    case: Case,
    variant: str,
    config_of: Callable[[Any, dict[str, int]], Any],
    weights_of: Callable[[Any, Any, dict[str, int]], Any],
    bound: float,
    ids_dtype: torch.dtype = torch.int64,
) -> Point:
    case.check_plain()
    ep: Any = import_module("flashinfer.moe_ep")
    registry: Any = import_module("flashinfer.moe_ep.core.kernel.registry")
    layer = case.run.layer

    def config() -> Any:
        return config_of(ep, {"intermediate_size": layer.intermediate_size, "top_k": layer.top_k})

    bootstrap = ep.BootstrapConfig(world_size=case.world, rank=case.rank, auto_bootstrap=False)
    kernel = registry.create_mega_kernel(config())
    runtime = ep.bootstrap_moe_ep_runtime(bootstrap, kernel.runtime_requirements(bootstrap))
    sizes = {"intermediate_size": layer.intermediate_size, "hidden_size": layer.hidden_size}
    weights = weights_of(ep, ep.MoEWeightPack(w13=case.local_weights(0), w2=case.local_weights(1)), sizes)

    def point(tokens: int) -> Iterator[Way]:
        _ = runtime  # as long as the layers
        made = ep.MoEEpLayer(
            bootstrap=bootstrap,
            fleet_params=ep.FleetParams(
                num_experts=layer.num_experts, max_tokens_per_rank=tokens, token_hidden_size=layer.hidden_size
            ),
            weights=None,
            backend=ep.MegaConfig(
                megakernel=config(), quantize_input=True, preprocess_weights=False, transformed_weights=weights
            ),
        )
        try:
            turns = case.turns(tokens)
            y_TH = torch.empty_like(turns[0].x)

            def tensors(turn: Turn) -> Any:
                ids = turn.idx.to(ids_dtype)
                more = {"topk_ids": ids, "topk_weights": turn.weights, "output": y_TH}
                return ep.MoEEpTensors(hidden_states=turn.x, **more)

            bundles = [tensors(turn) for turn in turns]
            made.warmup(bundles[0])
            case.meet()
            made.forward(bundles[0])
            error = case.layer_error(tokens, y_TH)
            yield Way("layer", variant, lambda number: made.forward(bundles[number % len(bundles)]), error, bound)
            case.meet()
        finally:
            made.destroy()

    return point


def interleave_fp4(weight: torch.Tensor, quant_type: str = "fp4_fp8") -> torch.Tensor:
    """The order in which their kernel reads packed FP4 weights, uint8 `[E, N, K / 2]`, `N` a multiple of 16 and `K` of
    64.

    Rows `r` and `r + 8` of 16 go together: 16-bit words of both make one of 32 bits, whose sign bits move to where the
    conversion to FP8 expects them.
    """
    if quant_type != "fp4_fp8":
        raise ValueError(f"quant_type: expected fp4_fp8, got {quant_type}")
    experts, rows, columns = weight.shape
    words = weight.contiguous().view(torch.int16).view(experts, rows // 16, 2, 8, columns // 32, 2, 2, 4)
    low, high = (words[:, :, half].to(torch.int64) & 0xFFFF for half in (0, 1))
    pairs = low | high << 16
    moved = pairs & 0x77777777
    for source, target in ((3, 7), (7, 15), (11, 23), (15, 31), (19, 3), (23, 11), (27, 19), (31, 27)):
        moved |= (pairs >> source & 1) << target
    # [E, N / 16, row, part, m, h, q] -> [E, N / 16, h, row, part, m, q], then the two words.
    halves = torch.stack((moved & 0xFFFF, moved >> 16 & 0xFFFF), dim=-1).permute(0, 1, 5, 2, 3, 4, 6, 7)
    signed = torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16)
    return signed.contiguous().view(experts, rows, columns // 2).view(torch.uint8).view(experts, rows, columns)
