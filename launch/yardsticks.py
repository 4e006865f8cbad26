"""What layers of a run are held against, made no more often than needed: references, and layers to be timed beside."""

from __future__ import annotations

import torch

from moe_runtime.config import RunConfig
from moe_runtime.experts import Experts
from moe_runtime.launch import cases
from moe_runtime.launch.torch_layer import TorchLayer
from moe_runtime.launch.unfused_layer import UnfusedLayer, plain_gate_up
from moe_runtime.layer import MoELayer
from moe_runtime.prepared import PreparedWeights
from moe_runtime.weights import ExpertWeights


class Yardsticks:
    """Of the layers of one run, which differ in formats and in tokens per rank."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._references: dict[tuple[object, ...], torch.Tensor] = {}
        self._torch_layer: TorchLayer | None = None
        self._plain: tuple[Experts, ExpertWeights | PreparedWeights] | None = None

    def _experts(self, layer: MoELayer) -> cases.ExpertSource:
        return cases.expert_source(self._run, layer.context.device)

    def reference(
        self,
        layer: MoELayer,
        key: tuple[object, ...],
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """`cases.layer_reference`, kept under `key`, which must tell these tokens from all others of the run."""
        if key not in self._references:
            self._references[key] = cases.layer_reference(
                layer, self._experts(layer), x_TH, topk_idx_TK, topk_weights_TK
            )
        return self._references[key]

    def torch_layer(self, layer: MoELayer) -> TorchLayer:
        """The layer of torch with this rank's experts as they were before `layer` quantized them."""
        if self._torch_layer is None:
            assert layer.experts is not None
            sizes = layer.config.hidden_size, layer.config.intermediate_size
            activation = layer.experts.activation
            self._torch_layer = TorchLayer(
                self._experts(layer), layer.local_experts, *sizes, activation, layer.context.device
            )
        return self._torch_layer

    def unfused_layer(self, layer: MoELayer) -> UnfusedLayer:
        """`layer` with its experts in separate passes."""
        experts = layer.experts
        assert experts is not None
        if self._plain is None or self._plain[0] is not experts:
            self._plain = experts, plain_gate_up(experts)
        return UnfusedLayer(layer, self._plain[1])
