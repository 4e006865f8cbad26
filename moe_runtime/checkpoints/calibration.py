"""Calibrates NVFP4 activations: runs tokens through a layer unquantized and records the largest inputs of its GEMMs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.readers import dense
from moe_runtime.experts import activation_of
from moe_runtime.kernels.formats.number_formats import MAX_ENCODE_SCALE, NVFP4_FULL_SCALE
from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.router import Router


@dataclass(frozen=True)
class Calibration:
    """Largest magnitudes of a layer's tokens, and of the intermediate of its experts."""

    token_amax: float
    intermediate_amax: float

    def __post_init__(self) -> None:
        for name in ("token_amax", "intermediate_amax"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected a positive finite number, got {getattr(self, name)}")

    @property
    def token_gsf(self) -> float:
        """Encode scale that maps `token_amax` to the largest NVFP4 number, at most `MAX_ENCODE_SCALE`."""
        return _gsf(self.token_amax)

    @property
    def intermediate_gsf(self) -> float:
        """The same for the intermediate: `MoELayerConfig.intermediate_gsf`."""
        return _gsf(self.intermediate_amax)


def calibrate(
    path: str | Path,
    layer: int,
    batches: Sequence[torch.Tensor],
    *,
    device: torch.device | str = "cpu",
    ignore_keys: Collection[str] = (),
) -> Calibration:
    """Run tokens through the router and the experts of a checkpoint's layer, in fp32 without quantization.

    Experts are read one at a time. Quantized ones are dequantized.

    Args:
        path: folder of the checkpoint.
        layer: index of the decoder layer.
        batches: tokens that enter the layer's MoE block, bf16 or fp32 `[T, H]` each.
        device: where to compute.
        ignore_keys: as `Checkpoint` has them.

    Raises:
        ValueError: as `Checkpoint`; a batch of another shape; tokens that are all 0, or not finite.
    """
    with Checkpoint(path, ignore_keys=ignore_keys) as checkpoint:
        config = checkpoint.layer_config(layer, max_tokens_per_rank=1, token_format="bf16", weight_format="bf16")
        for number, batch in enumerate(batches):
            if batch.ndim != 2 or batch.shape[1] != config.hidden_size or not batch.is_floating_point():
                raise ValueError(
                    f"batch {number} of layer {layer}: expected floats [T, {config.hidden_size}], "
                    f"got {batch.dtype} {list(batch.shape)}"
                )
        none_TH = torch.empty(0, config.hidden_size, dtype=torch.float32, device=device)
        tokens_TH = torch.cat([none_TH, *(batch.to(device).float() for batch in batches)])
        stored = checkpoint.router(layer)
        router = Router(config.hidden_size, config.num_experts, config.top_k, config.router, tokens_TH.device)
        router.load(stored.weight, bias=stored.bias, correction_bias=stored.correction_bias)
        topk_idx, _ = router(tokens_TH)
        activation = activation_of(config.activation)
        largest = torch.zeros((), dtype=torch.float32, device=tokens_TH.device)
        for number, expert in enumerate(checkpoint.experts(layer, range(config.num_experts))):
            rows_RH = tokens_TH[(topk_idx == number).any(1)]
            if not len(rows_RH):
                continue
            c = rows_RH @ dense(expert.gate_up).to(device).float().T
            if expert.gate_up_bias is not None:
                c = c + expert.gate_up_bias.to(device)
            # `maximum` keeps a NaN.
            largest = torch.maximum(largest, activate(c, activation).abs().max())
        token_amax = float(tokens_TH.abs().max()) if len(tokens_TH) else 0.0
    try:
        return Calibration(token_amax, float(largest))
    except ValueError as error:
        raise ValueError(f"batches of layer {layer}: {error}") from None


def _gsf(amax: float) -> float:
    full, largest = torch.tensor([NVFP4_FULL_SCALE, amax], dtype=torch.float32, device="cpu")
    return float((full / largest).clamp(max=MAX_ENCODE_SCALE))
