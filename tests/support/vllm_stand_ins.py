"""Stand-ins for what the adapter of vLLM replaces or asks beside a layer: configs, options, loaders, steps.

`tests/models/test_engine_signatures.py` looks for the attributes in vLLM's sources, where they are present.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from moe_runtime.integrations import vllm_experts
from tests.support.engine_stand_ins import StandInLayer, VllmMethod, modules

VERSION = "0.33.0"


class VllmConfig:
    """vLLM's `VllmConfig`: what the adapter reads of it."""

    def __init__(self, *, engine: str = "one", moe: bool = True, capture_sizes: Any = (), **changes: Any) -> None:
        parallel = {
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_expert_parallel": False,
            "enable_eplb": False,
            "expert_placement_strategy": "linear",
            "use_ubatching": False,
        }
        parallel |= {key: changes.pop(key) for key in list(changes) if key in parallel}
        self.instance_id = engine
        self.parallel_config = SimpleNamespace(**parallel)
        text = SimpleNamespace(**{name: changes.pop(name) for name in list(changes) if name == "zero_expert_type"})
        dtype = changes.pop("dtype", torch.bfloat16)
        self.model_config = SimpleNamespace(is_moe=moe, dtype=dtype, hf_text_config=text)
        self.compilation_config = SimpleNamespace(cudagraph_capture_sizes=capture_sizes)
        offload = {name: changes.pop(name, 0) for name in ("cpu_offload_gb", "offload_group_size")}
        self.offload_config = SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=offload["cpu_offload_gb"]),
            prefetch=SimpleNamespace(offload_group_size=offload["offload_group_size"]),
        )
        self.load_config = SimpleNamespace(load_format=changes.pop("load_format", "auto"))
        draft = changes.pop("num_speculative_tokens", None)
        self.speculative_config = None if draft is None else SimpleNamespace(num_speculative_tokens=draft)
        self.lora_config = changes.pop("lora_config", None)
        assert not changes

    def compute_hash(self, include_version: bool = True) -> str:
        return hashlib.sha256(f"{self.parallel_config} {include_version}".encode()).hexdigest()[:10]


class MoERunner(nn.Module):
    """Holds the routed experts of a layer, as vLLM's does."""

    def __init__(self, routed_experts: nn.Module) -> None:
        super().__init__()
        self.routed_experts = routed_experts


class Vllm:
    """A vLLM into which the adapter can be installed, with one `config`, `runners` by name, and `begun` reloads.

    Its classes are new for each, since the adapter replaces members of them. `modules` has them by dotted name.
    """

    def __init__(self, *, version: str = VERSION) -> None:
        self.config = VllmConfig()
        self.replaced: dict[str, Any] = {}
        self.runners: dict[str, MoERunner] = {}
        replaced = self.replaced

        class RoutedExperts(StandInLayer):
            @classmethod
            def register_oot(cls, decorated: Any = None, name: str | None = None) -> None:
                replaced[str(name)] = decorated

            def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
                return VllmMethod(moe_config)

            def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor, expert_id: int) -> None:
                param.data[expert_id].copy_(loaded_weight)

            weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

        class BaseModelLoader:
            def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
                for runner in (made := self.model).modules():  # type: ignore[attr-defined]
                    if isinstance(runner, RoutedExperts):
                        runner.quant_method.process_weights_after_loading(runner)
                return made  # type: ignore[no-any-return]

        config_kind = type("VllmConfig", (VllmConfig,), {"compute_hash": VllmConfig.compute_hash})

        class EngineArgs:
            def __init__(self, **options: Any) -> None:
                self.options = options

            def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
                return config_kind(**self.options)

        self.begun: list[nn.Module] = []

        def initialize_layerwise_reload(model: nn.Module) -> None:
            self.begun.append(model)

        def reload_weights(config: Any, model: nn.Module, weights: Any, path: Any, is_checkpoint_format: bool) -> None:
            self.begun.append(model)

        self.RoutedExperts, self.BaseModelLoader = RoutedExperts, BaseModelLoader
        self.EngineArgs, self.VllmConfig = EngineArgs, config_kind
        self.modules: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": version},
            "vllm.config": {"VllmConfig": config_kind, "get_current_vllm_config": lambda: self.config},
            "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
            "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
            vllm_experts.RELOAD: {vllm_experts.BEGIN_RELOAD: initialize_layerwise_reload},
            f"{vllm_experts.RELOAD}.inplace": {
                vllm_experts.BEGIN_RELOAD: initialize_layerwise_reload,
                vllm_experts.RELOAD_IN_PLACE: reload_weights,
            },
            "vllm.v1.worker.gpu.model_runner": {vllm_experts.RELOAD_IN_PLACE: reload_weights},
            "vllm.distributed": {},
            "vllm.forward_context": {
                "get_forward_context": lambda: SimpleNamespace(no_compile_layers=self.runners, dp_metadata=None)
            },
        }
        for name, path in vllm_experts.ROUTED_EXPERTS.items():
            self.modules.setdefault(path, {})[name] = RoutedExperts

    def set_group(self, group: Any) -> None:
        """The ranks of this engine, which are data-parallel."""
        alone = SimpleNamespace(world_size=1, rank_in_group=0)
        groups = {"get_ep_group": lambda: SimpleNamespace(device_group=group), "get_tp_group": lambda: alone}
        self.modules["vllm.distributed"] = groups

    def __call__(self) -> AbstractContextManager[None]:
        """With these modules in place of any that are installed."""
        return modules(self.modules)

    def make(self, layer: StandInLayer, moe_config: Any) -> MoERunner:
        """The runner of `layer`, as the model's code makes it."""
        layer.__class__ = self.replaced.get("RoutedExperts", self.RoutedExperts)
        layer.quant_method = layer._get_quant_method("", None, moe_config)
        runner = self.runners[layer.layer_name] = MoERunner(layer)
        return runner

    def load(self, model: nn.Module) -> nn.Module:
        """`model` with its weights processed, as a loader does it."""
        loader = self.BaseModelLoader()
        loader.model = model  # type: ignore[attr-defined]
        return loader.load_model(self.config, None)
