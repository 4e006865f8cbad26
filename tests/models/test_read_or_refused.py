"""Every family of transformers with experts: a layer of its files computes what the model does, or is refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, relative_error
from tests.support.checkpoint_writers import change_config

table = pytest.importorskip("tests.support.families_table")
kinds = pytest.importorskip("tests.models.test_published_kinds")

pytestmark = pytest.mark.cpu_only

TOKENS = 64
REFUSED = {
    "afmoe": "tensor model.layers.1.mlp.expert_bias is not expected",
    "aria": "moe_num_shared_experts: ",
    "axk1": "model_type: expected another kind, since a norm follows",
    "axk2": "is not expected",
    "dbrx": "model_type: expected a model with experts",
    "deepseek_v4": "model_type: expected another kind",
    "diffusion_gemma": "num_experts_per_tok or ",
    "dots3_note": "shared_experts_intermediate_size: ",
    "ernie4_5_moe": "num_experts_per_tok or ",
    "ernie4_5_vl_moe": "moe_intermediate_size: expected a positive integer",
    "flint": "shared_expert_gate.weight is missing",
    "gemma4": "num_experts_per_tok or ",
    "glm5_next": "swiglu_limit: expected none",
    "granitemoehybrid": "shared_intermediate_size: ",
    "hunyuan_v1_moe": "shared_mlp.gate_proj.weight is not expected",
    "hy_v3": "router_scaling_factor: ",
    "hy_v4": "swiglu_limit: expected none",
    "inkling": "shared_expert_sink: ",
    "inkling2": "mlp_gate_softcap: ",
    "jetmoe": "activation_function: ",
    "kolibri1": "shared_expert_gate.weight is missing",
    "laguna": "model_type: expected another kind",
    "llama4": "model_type: expected another kind",
    "longcat_flash": "model_type: expected another kind",
    "minimax_m3_vl": "swiglu_limit: expected none",
    "mistral_large4": "e_score_correction_bias is missing",
    "muse_spark": "moe_hidden_size: ",
    "nllb_moe": "hidden_size: expected a positive integer",
    "openai_privacy_filter": "swiglu_limit: expected none",
    "phimoe": "model_type: expected another kind",
    "step3p7": "share_expert_dim: ",
    "switch_transformers": "hidden_size: expected a positive integer",
    "zaya": "router_hidden_size: ",
}
"""Families that are refused, and what the message says. All others compute what the model does."""


def layer_output(folder: Path, x_TH: torch.Tensor | None = None, **settings: Any) -> tuple[int, torch.Tensor, Any]:
    """The number of the last layer with experts, tokens, and what it makes of them."""
    with Checkpoint(folder) as checkpoint:
        index = max(layer for layer in checkpoint.moe_layers() if checkpoint.has_experts(layer))
    with ExpertParallelContext(device="cpu") as context:
        settings = {"layer": index, "max_tokens_per_rank": TOKENS} | settings
        layer = MoELayer.from_checkpoint(folder, context=context, **settings)
        if x_TH is None:
            x_TH = torch.randn(TOKENS, layer.config.hidden_size).bfloat16()
        return index, x_TH, layer(x_TH)


def block_of(model: nn.Module, index: int) -> nn.Module:
    """The module that holds router and experts of a decoder layer."""
    found = [
        block
        for name, block in model.named_modules()
        if hasattr(getattr(block, "experts", None), "down_proj") and re.search(rf"layers\.{index}\.", f"{name}.")
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("family", table.families())
def test_a_family_is_read_rightly_or_refused(family: str, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = table.tiny_model(family)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Kinds that are not listed are read with a warning.
        if family in REFUSED:
            with pytest.raises(ValueError, match=re.escape(REFUSED[family])):
                layer_output(tmp_path)
            return
        index, x_TH, y_TH = layer_output(tmp_path)
    with torch.no_grad():
        want: Any = block_of(model.float(), index)(x_TH.float()[None])
    while isinstance(want, tuple):
        want = want[0]
    # A shared expert rounds once more to bf16, and so does the sum.
    assert relative_error(y_TH, want.reshape(TOKENS, -1).double())[0] <= 2 * error_bound("bf16", "bf16")


def limited(x_RI: torch.Tensor, up_RI: torch.Tensor, limit: float) -> torch.Tensor:
    return (x_RI * torch.sigmoid(x_RI)).clamp(max=limit) * up_RI.clamp(-limit, limit)


@pytest.mark.parametrize("routed", [0.25, None])
@pytest.mark.parametrize(
    "formats",
    [
        {},
        {"token_format": "mxfp8", "weight_format": "mxfp8"},
        {"token_format": "fp8_block", "weight_format": "fp8_block"},
        {"token_format": "nvfp4", "weight_format": "nvfp4"},
        {"token_format": "bf16", "weight_format": "mxfp4"},
    ],
    ids=lambda formats: formats.get("weight_format", "bf16"),
)
def test_the_limits_of_ling_are_computed(
    formats: dict[str, str], routed: float | None, tmp_path: Path, seed: int
) -> None:
    """Held to float64 of the formula, since transformers' own model does not know these keys."""
    model = kinds.tiny_model("bailing_hybrid", seed, **kinds.KINDS["bailing_hybrid"], moe_intermediate_size=64).double()
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "gate_proj.weight", "up_proj.weight")):
            parameter.data.mul_(2)  # Many values lie beyond the limits.
    model.bfloat16().save_pretrained(tmp_path)
    model.double()
    shared = 0.5
    change_config(tmp_path, expert_swiglu_limit_list=[9.0, routed], share_expert_swiglu_limit_list=[0, shared])
    x_TH = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    index, _, y_TH = layer_output(tmp_path, x_TH, layer=1, **formats)
    block: Any = block_of(model, index)
    with torch.no_grad():
        x = x_TH.double()
        chosen = block.gate(x[None])
        weights_TK, idx_TK = (part.view(TOKENS, -1) for part in chosen[-2:])
        want, beyond = torch.zeros_like(x), 0.0
        for expert in range(12):
            gate, up = (x @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
            made = limited(gate, up, float("inf") if routed is None else routed) @ block.experts.down_proj[expert].T
            want += (weights_TK * (idx_TK == expert)).sum(1, keepdim=True) * made
            beyond += float((up.abs() > 0.25).double().mean()) / 12
        gate, up = block.shared_experts.gate_proj(x), block.shared_experts.up_proj(x)
        want += block.shared_experts.down_proj(limited(gate, up, shared))
    assert beyond > 0.5
    bound = error_bound(formats.get("token_format", "bf16"), formats.get("weight_format", "bf16"))
    assert relative_error(y_TH, want)[0] <= 2 * bound
