"""A grouped product with MXFP4 weights, in torch."""

from itertools import pairwise

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class HummingLayer:
    def __init__(self, shape_n, shape_k, weight_config, num_experts, torch_dtype):
        assert weight_config == {"quant_method": "gpt_oss_mxfp4"} and torch_dtype == torch.bfloat16
        self.humming_config = self.shape = (num_experts, shape_n, shape_k)

    def to(self, device):
        return self

    def load_from_tensors(self, tensors):
        quants, scales = tensors["weight"], tensors["weight_scale"]
        nibbles = torch.stack([quants & 15, quants >> 4], dim=-1).view(self.shape).long()
        values = torch.tensor(E2M1)[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
        self.loaded = values * torch.pow(2.0, scales.float() - 127).repeat_interleave(32, dim=2)

    def transform(self):
        self.weight = self.loaded

    def __call__(self, x, outputs, expert_layout, compute_config, tuning_config):
        assert compute_config == {"gemm_type": "grouped_contiguous"} and tuning_config == {"block_shape": (64, 64, 64)}
        ends = expert_layout.tolist()
        for expert, (first, end) in enumerate(pairwise(ends)):
            outputs[first:end] = x[first:end].float() @ self.weight[expert].T
