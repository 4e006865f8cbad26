"""Stand-ins for the layers and modules of vLLM and SGLang, which do not import without a GPU, and a plain MoE.

Layers have the attributes and parameters that the engines give theirs. `tests/models/test_engine_signatures.py` looks
for these in the sources of the engines, where they are present.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.support.checkpoint_writers import fp8_blocks, modelopt_nvfp4, mxfp4_blocks, read_e2m1

HIDDEN, INNER = 160, 160
"""No multiples of 128: FP8 blocks of gate and up end with short ones."""
NUM_EXPERTS, TOP_K = 7, 3

Stored = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Projection:
    """One linear `[N, K]` of each expert as an engine stores it, by the end of the parameter's name, and what it says.

    `second` has the second-level scales, fp32 `[E]`; `value` is float64 `[E, N, K]`.
    """

    stored: Stored
    value: torch.Tensor
    second: Stored


def _spread(scales: torch.Tensor, quants: torch.Tensor, high: int, wide: int) -> torch.Tensor:
    spread = scales.double().repeat_interleave(high, 1).repeat_interleave(wide, 2)
    return spread[:, : quants.shape[1], : quants.shape[2]]


def _bf16(w: torch.Tensor) -> Projection:
    quants = w.bfloat16()
    return Projection({"weight": quants}, quants.double(), {})


def _fp8_block(w: torch.Tensor) -> Projection:
    each = [fp8_blocks(one) for one in w]
    quants, scales = (torch.stack([one[key] for one in each]) for key in ("weight", "weight_scale_inv"))
    value = quants.double() * _spread(scales, quants, 128, 128)
    return Projection({"weight": quants, "weight_scale_inv": scales}, value, {})


def _fp8_tensor(w: torch.Tensor) -> Projection:
    scales = (w.abs().amax((1, 2)) / 448).float()
    quants = (w / scales[:, None, None]).to(torch.float8_e4m3fn)
    return Projection({"weight": quants}, quants.double() * scales.double()[:, None, None], {"weight_scale": scales})


def _mxfp8(w: torch.Tensor) -> Projection:
    blocks = w.double().unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(3))) - 8
    quants = (blocks / torch.exp2(exponents)[..., None]).flatten(2).clamp(-448, 448).to(torch.float8_e4m3fn)
    value = quants.double() * torch.exp2(exponents).repeat_interleave(32, 2)
    return Projection({"weight": quants, "weight_scale": (exponents + 127).to(torch.uint8)}, value, {})


def _e2m1(quants: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.stack([read_e2m1(one) for one in quants]).astype(np.float64))


def _nvfp4(w: torch.Tensor) -> Projection:
    each = [modelopt_nvfp4(one) for one in w]
    quants, scales, second = (
        torch.stack([one[key] for one in each]) for key in ("weight", "weight_scale", "weight_scale_2")
    )
    value = _e2m1(quants) * scales.double().repeat_interleave(16, 2) * second.double()[:, None, None]
    return Projection({"weight": quants, "weight_scale": scales}, value, {"weight_scale_2": second})


def _compressed_nvfp4(w: torch.Tensor) -> Projection:
    plain = _nvfp4(w)
    stored = {"weight_packed": plain.stored["weight"], "weight_scale": plain.stored["weight_scale"]}
    return Projection(stored, plain.value, {"weight_global_scale": 1 / plain.second["weight_scale_2"]})


def _mxfp4(w: torch.Tensor) -> Projection:
    blocks, scales = mxfp4_blocks(w)
    quants = blocks.flatten(2)
    powers = torch.from_numpy(scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    return Projection({"weight": quants, "weight_scale": scales}, _e2m1(quants) * powers.repeat_interleave(32, 2), {})


FORMS: dict[str, Callable[[torch.Tensor], Projection]] = {
    "bf16": _bf16,
    "fp8_block": _fp8_block,
    "fp8_tensor": _fp8_tensor,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
    "compressed_nvfp4": _compressed_nvfp4,
    "mxfp4": _mxfp4,
}
"""Ways in which engines store experts."""

FORMATS = {"fp8_tensor": "fp8_block", "compressed_nvfp4": "nvfp4"}
"""The format of a form where the names differ."""


@dataclass(frozen=True)
class ExpertsData:
    """The experts of a layer: parameters by name, and float64 values of gate, up and down, and of their biases."""

    parameters: Stored
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def of(self, experts: slice) -> Stored:
        """The parameters of some experts."""
        return {name: value[experts].clone() for name, value in self.parameters.items()}


def make_experts(form: str, seed: int, *, order: str = "gate_up", bias: str | None = None) -> ExpertsData:
    """Random experts in one of `FORMS`; `bias` is the end of the names of their biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(NUM_EXPERTS, *shape, generator=generator)

    gate, up, down = (
        FORMS[form](normal(*shape) * shape[1] ** -0.5) for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    )

    def rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if order == "interleaved":
            return torch.stack([first, second], 2).flatten(1, 2)
        return torch.cat([first, second] if order == "gate_up" else [second, first], 1)

    parameters = {f"w13_{end}": rows(gate.stored[end], up.stored[end]) for end in gate.stored}
    parameters |= {f"w13_{end}": torch.stack([gate.second[end], up.second[end]], 1) for end in gate.second}
    parameters |= {f"w2_{end}": value for end, value in (down.stored | down.second).items()}
    biases = None
    if bias is not None:
        own = normal(INNER).bfloat16(), normal(INNER).bfloat16(), normal(HIDDEN).bfloat16()
        parameters |= {f"w13_{bias}": rows(*own[:2]), f"w2_{bias}": own[2]}
        biases = own[0].double(), own[1].double(), own[2].double()
    return ExpertsData(parameters, gate.value, up.value, down.value, biases)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def clamped_silu(gate: torch.Tensor, up: torch.Tensor, limit: float = 1.5) -> torch.Tensor:
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def limited_silu(gate: torch.Tensor, up: torch.Tensor, limit: float = 1.5) -> torch.Tensor:
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def swiglu_step(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return limited_silu(gate, up, 7.0)


def gpt_oss(gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def plain_moe(
    data: ExpertsData,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu,
) -> torch.Tensor:
    """float64 `[T, H]`, expert by expert with torch's own functions; ids of -1 add nothing."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(NUM_EXPERTS):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (None, None, None) if data.biases is None else (bias[expert] for bias in data.biases)
        rows = x[tokens].double()
        inner = activation(
            functional.linear(rows, data.gate[expert], gate), functional.linear(rows, data.up[expert], up)
        )
        out = functional.linear(inner, data.down[expert], down)
        y.index_add_(0, tokens, out * weights[tokens, places, None].double())
    return y


def draw_tokens(seed: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens in bf16, ids of different experts, and weights of both signs.

    From a seed of their own: tokens that are rows of an expert's weights would meet them in a few large numbers.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].to(torch.int32)
    return x, ids, torch.randn(num_tokens, TOP_K, generator=generator)


class StandInLayer(nn.Module):
    """A module with `parameters`, and any other attributes."""

    def __init__(self, parameters: Stored, **attributes: Any) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        for name, value in attributes.items():
            setattr(self, name, value)


def expert_slice(rank: int, world: int) -> slice:
    """The experts of a rank by a linear placement, the first ranks having one more."""
    few, more = divmod(NUM_EXPERTS, world)
    first = rank * few + min(rank, more)
    return slice(first, first + few + (rank < more))


def vllm_layer(parameters: Stored, experts: slice = slice(0, NUM_EXPERTS), **changes: Any) -> StandInLayer:
    """What vLLM's `RoutedExperts` has once its weights are loaded."""
    own = range(*experts.indices(NUM_EXPERTS))
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
    expert_map[experts] = torch.arange(len(own), dtype=torch.int32)
    attributes = {
        "layer_name": "model.layers.0.mlp.experts",
        "global_num_experts": NUM_EXPERTS,
        "local_num_experts": len(own),
        "top_k": TOP_K,
        "activation": SimpleNamespace(value="silu"),
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "apply_router_weight_on_input": False,
        "_expert_map": None if len(own) == NUM_EXPERTS else expert_map,
    }
    return StandInLayer(parameters, **attributes | changes)


def vllm_config(*, tp: int = 1, dp: int = 1, sequence_parallel: bool = False, **changes: Any) -> SimpleNamespace:
    """What vLLM's `FusedMoEConfig` has, with expert parallelism over `tp * dp` ranks."""
    parallel = {
        "tp_size": 1,
        "pcp_size": 1,
        "dp_size": dp,
        "ep_size": tp * dp,
        "sp_size": tp if sequence_parallel else 1,
        "is_sequence_parallel": sequence_parallel,
        "enable_eplb": False,
    }
    parallel |= {key: changes.pop(key) for key in list(changes) if key in parallel}
    config = {
        "moe_parallel_config": SimpleNamespace(**parallel),
        "is_lora_enabled": False,
        "in_dtype": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "intermediate_size_per_partition": INNER,
        "max_num_tokens": 64,
        "skip_final_all_reduce": False,
    }
    return SimpleNamespace(**config | changes)


class _MethodBase(ABC):
    @abstractmethod
    def process_weights_after_loading(self, layer: Any) -> None: ...


class VllmMethod(_MethodBase):
    """Stands for a quantization method of vLLM, with the properties of `FusedMoEMethodBase` that an adapter changes."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_kernel: Any = None

    @property
    def supports_internal_mk(self) -> bool:
        return self.moe_kernel is not None

    @property
    def is_monolithic(self) -> bool:
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("vLLM's own method must not run")


def sglang_layer(parameters: Stored, rank: int = 0, world: int = 1, **changes: Any) -> StandInLayer:
    """What SGLang's `FusedMoE` has once its weights are loaded; ranks have equal numbers of experts there."""
    config = {
        "activation": "silu",
        "is_gated": True,
        "gemm1_alpha": None,
        "gemm1_beta": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "gate_up_interleaved": True,
        "routed_scaling_factor": None,
        "apply_router_weight_on_input": False,
        "no_combine": False,
        "runner_backend": SimpleNamespace(value="triton"),
    }
    config |= {key: changes.pop(key) for key in list(changes) if key in config}
    attributes = {
        "layer_name": "model.layers.0.mlp.experts",
        "layer_id": 0,
        "num_experts": NUM_EXPERTS,
        "num_local_experts": NUM_EXPERTS // world,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size_per_partition": INNER,
        "params_dtype": torch.bfloat16,
        "num_fused_shared_experts": 0,
        "reduce_results": False,
        "moe_tp_size": 1,
        "moe_ep_size": world,
        "moe_ep_rank": rank,
        "should_fuse_routed_scaling_factor_in_topk": False,
    }
    layer = StandInLayer(parameters, **attributes | changes)
    # Not an attribute of the module: the config holds the layer.
    object.__setattr__(layer, "moe_runner_config", SimpleNamespace(**config, layer=layer))
    return layer


@dataclass(frozen=True)
class TopK:
    """SGLang's `StandardTopKOutput`."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


@contextmanager
def modules(named: dict[str, dict[str, Any]]) -> Iterator[None]:
    """With these modules, by dotted name, in place of any that are installed."""
    found: dict[str, ModuleType] = {}
    for name, members in named.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            found.setdefault(path, ModuleType(path))
        vars(found[name]).update(members)
    before = {name: sys.modules.get(name) for name in found}
    sys.modules.update(found)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def vllm_modules(
    *, ep_group: Any = None, tp_group: Any = None, counts: torch.Tensor | None = None, **more: dict[str, Any]
) -> Any:
    """`modules` of vLLM: its groups, and the tokens of the data-parallel ranks in a step."""
    metadata = None if counts is None else SimpleNamespace(num_tokens_across_dp_cpu=counts)
    named = {
        "vllm.distributed": {
            "get_ep_group": lambda: SimpleNamespace(device_group=ep_group),
            "get_tp_group": lambda: tp_group,
        },
        "vllm.forward_context": {"get_forward_context": lambda: SimpleNamespace(dp_metadata=metadata)},
    }
    return modules(named | more)


class A2ABackend(SimpleNamespace):
    """SGLang's `MoeA2ABackend`."""

    def is_none(self) -> bool:
        return bool(self.value == "none")

    def is_flashinfer(self) -> bool:
        return bool(self.value == "flashinfer")


def sglang_modules(
    *,
    backend: str = "none",
    ep_group: Any = None,
    counts: list[int] | None = None,
    settings: dict[str, Any] | None = None,
    **more: dict[str, Any],
) -> Any:
    """`modules` of SGLang: its settings, its group, and the tokens of the attention groups in a step."""
    of_moe: dict[str, Any] = {"enable_eplb": False, "enable_paged_experts": False, "kt_weight_path": None}
    switches = of_moe | dict.fromkeys(("enable_two_batch_overlap", "enable_lora"), False)
    sizes = dict.fromkeys(("moe_dp_size", "dwdp_size", "attn_tp_size"), 1)
    of_offload = {"cpu_offload_gb": 0, "offload_group_size": -1}
    of_model = {"load_format": "auto", "weight_cache_mode": "off", "model_path": "/model"}
    settings = {**switches, **sizes, **of_offload, **of_model, **(settings or {})}
    execution = SimpleNamespace(
        moe=SimpleNamespace(**{name: settings[name] for name in of_moe}),
        overlap=SimpleNamespace(enable_two_batch_overlap=settings["enable_two_batch_overlap"]),
        offload=SimpleNamespace(**{name: settings[name] for name in of_offload}),
    )
    parallel = SimpleNamespace(
        moe_ep_group=SimpleNamespace(device_group=ep_group),
        moe_dp_size=settings["moe_dp_size"],
        dwdp_size=settings["dwdp_size"],
        attn_tp_size=settings["attn_tp_size"],
    )
    checker = SimpleNamespace(
        format_is_bypassed=lambda topk: hasattr(topk, "to_standard"), format_is_standard=lambda t: isinstance(t, TopK)
    )
    named = {
        "sglang.srt.runtime_context": {
            "get_exec": lambda: execution,
            "get_parallel": lambda: parallel,
            "get_model": lambda: SimpleNamespace(**{name: settings[name] for name in of_model}),
            "get_lora": lambda: SimpleNamespace(enable_lora=settings["enable_lora"]),
        },
        "sglang.srt.layers.moe": {"get_moe_a2a_backend": lambda: A2ABackend(value=backend)},
        "sglang.srt.layers.moe.topk": {"TopKOutputChecker": checker},
        "sglang.srt.layers.moe.token_dispatcher.base": {"BaseDispatcher": object},
        "sglang.srt.layers.moe.token_dispatcher.standard": {
            "StandardDispatchOutput": SimpleNamespace,
            "StandardCombineInput": SimpleNamespace,
        },
        "sglang.srt.layers.dp_attention": {"get_dp_global_num_tokens": lambda: counts},
    }
    return modules(named | more)
