"""The layer in torch: every rank gets the weights of all experts when the layer is made."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

BootstrapConfig = FleetParams = MegaConfig = MoEEpTensors = MoEWeightPack = SimpleNamespace


@dataclass
class _Config:
    intermediate_size: int
    top_k: int


@dataclass
class Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(_Config):
    fuse_fc1_epilogue: bool
    init_timeout_s: float


@dataclass
class Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig(_Config):
    fp8_scale_mode: str
    knobs: Any
    load_balance_mode: str
    fc1_activation_dequant_scale: float
    fc2_activation_dequant_scale: float


@dataclass
class Sm90_Fp8_Nvfp4_Bf16_PullCutedsl_MegaMoeConfig(_Config):
    knobs: Any


def bootstrap_moe_ep_runtime(bootstrap, requirements):
    assert requirements == bootstrap.world_size and bootstrap.auto_bootstrap is False
    return object()


def preprocess_sm90_push_fp8_mega_weights(pack, intermediate_size, hidden_size, num_local_experts, fuse_fc1_epilogue):
    assert pack.w13.shape == (num_local_experts, 2 * intermediate_size, hidden_size)
    return pack


def preprocess_sm90_pull_fp8_mega_weights(
    pack,
    intermediate_size,
    hidden_size,
    kind,
    fp8_scale_mode,
    fc1_activation_dequant_scale,
    fc2_activation_dequant_scale,
):
    return pack


def preprocess_sm90_pull_nvfp4_mega_weights(pack, intermediate_size, hidden_size):
    from flashinfer.fused_moe import prepare

    packed = torch.zeros(1, 16, 32, dtype=torch.uint8)
    assert prepare.interleave_moe_weights_for_sm90_mixed_gemm(packed, "fp4_fp8").shape == packed.shape
    return pack


class MoEEpLayer:
    def __init__(self, bootstrap, fleet_params, weights, backend):
        assert weights is None and backend.quantize_input and not backend.preprocess_weights
        packs = [None] * bootstrap.world_size
        mine = backend.transformed_weights
        dist.all_gather_object(packs, (mine.w13, mine.w2))
        self.w13, self.w2 = (torch.cat([pack[place] for pack in packs]).float() for place in (0, 1))
        self.most, self.warm = fleet_params.max_tokens_per_rank, False
        pushes = "PushCuda" in type(backend.megakernel).__name__
        self.ids_dtype = torch.int32 if pushes else torch.int64

    def warmup(self, tensors):
        self.warm = True

    def forward(self, tensors):
        assert self.warm and tensors.topk_ids.dtype == self.ids_dtype and tensors.hidden_states.shape[0] <= self.most
        x, y = tensors.hidden_states.float(), torch.zeros(tensors.output.shape)
        for expert in tensors.topk_ids.unique().tolist():
            token, slot = (tensors.topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.w13[expert].T).chunk(2, dim=1)
            rows = (torch.nn.functional.silu(gate) * up) @ self.w2[expert].T
            y.index_add_(0, token, rows * tensors.topk_weights[token, slot, None])
        return tensors.output.copy_(y)

    def destroy(self):
        del self.w13, self.w2
