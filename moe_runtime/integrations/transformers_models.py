"""Where transformers models keep their experts, how to read them, and how to create a model without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from moe_runtime.checkpoints.families import GPT_OSS, MIXTRAL, Family, family_of
from moe_runtime.checkpoints.layouts import COMPRESSED_NVFP4, EXPERTS_KEY, compressed_group
from moe_runtime.checkpoints.loading import ExpertTensors

EXPERT_CLASSES = {
    "mixtral": ("MixtralExperts",),
    "qwen2_moe": ("Qwen2MoeExperts",),
    "qwen3_moe": ("Qwen3MoeExperts",),
    "deepseek_v3": ("DeepseekV3Experts", "DeepseekV3NaiveMoe"),
    "gpt_oss": ("GptOssExperts",),
}
"""Classes of the experts of each family; of two, the last is that of older releases."""


class _NoExperts(nn.Module):
    """Placeholder for experts: empty tensors that transformers may initialise, and none that it would load."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            setattr(self, name, torch.empty(0))


@contextmanager
def without_experts() -> Iterator[None]:
    """Inside, transformers creates models of the known families without experts, and loads none.

    For models that are too large for one rank: `from_pretrained` loads all but the experts, and
    `apply_expert_parallel(..., experts=...)` those of each rank. transformers then warns that the experts' tensors are
    unexpected. Its FP8 and MXFP4 quantizers leave experts alone too.
    """
    swapped = []

    def swap(module: Any, name: str, other: Any) -> None:
        if hasattr(module, name):
            swapped.append((module, name, getattr(module, name)))
            setattr(module, name, other)

    try:
        for family, names in EXPERT_CLASSES.items():
            for name in names:
                swap(import_module(f"transformers.models.{family}.modeling_{family}"), name, _NoExperts)
        fp8 = import_module("transformers.integrations.finegrained_fp8")
        if hasattr(fp8, "should_convert_module"):
            swap(fp8, "should_convert_module", _unless_experts(fp8.should_convert_module))
        for name in ("transformers.integrations", "transformers.integrations.mxfp4"):
            swap(import_module(name), "replace_with_mxfp4_linear", lambda model, *args, **named: model)
        yield
    finally:
        for module, name, original in reversed(swapped):
            setattr(module, name, original)


def _unless_experts(should_convert_module: Callable[..., bool]) -> Callable[..., bool]:
    """`should_convert_module`, but False for experts."""

    def answer(full_name: str, *args: Any, **named: Any) -> bool:
        return not full_name.endswith(".experts") and should_convert_module(full_name, *args, **named)

    return answer


def model_config_of(model: nn.Module) -> dict[str, Any]:
    """The config of a transformers model of a known family. Raises `ValueError` for another model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(f"model: expected a transformers model with a config, got {type(model).__name__}")
    model_config: dict[str, Any] = config.to_dict()
    if family_of(model_config, source="model.config").name not in EXPERT_CLASSES:
        known = ", ".join(EXPERT_CLASSES)
        raise ValueError(f"model.config: model_type: expected one of {known}, got {model_config['model_type']!r}")
    return model_config


def check_read(model_config: dict[str, Any], family: Family, numbers: Sequence[int]) -> None:
    """Raise `ValueError` if transformers silently misreads the experts of the model's checkpoint.

    It drops the second-level scales of NVFP4, does not know `EXPERTS_KEY`, and cannot hold experts of gpt-oss as
    separate linears.
    """
    quant_config, wrong = model_config.get("quantization_config") or {}, EXPERTS_KEY in model_config
    if quant_config.get("quant_method") == "compressed-tensors" and quant_config.get("config_groups"):
        linear = "block_sparse_moe.experts.0.w1" if family is MIXTRAL else "mlp.experts.0.gate_proj"
        for number in numbers:
            where = "model.config: quantization_config"
            group, fmt = compressed_group(where, quant_config, f"model.layers.{number}.{linear}")
            wrong |= group is not None and (family is GPT_OSS or fmt == COMPRESSED_NVFP4.name)
    if wrong:
        raise ValueError(
            "model: its experts are quantized in the checkpoint in a way that transformers misreads; load it inside "
            "without_experts() and give experts=Checkpoint(path)"
        )


def moe_blocks(model: nn.Module, classes: Sequence[str] | None) -> list[tuple[int, Any]]:
    """Index of the decoder layer and MoE block of each layer with experts, in the order of the model.

    Without `classes` every block must have weights. With `classes` its experts must be of one of them, or left out.
    """
    blocks = [(name, module) for name, module in model.named_modules() if hasattr(module, "experts")]
    if not blocks:
        raise ValueError(f"model: expected MoE blocks with `experts`, found none in {type(model).__name__}")
    found = []
    for name, block in blocks:
        if getattr(block.experts, "is_expert_parallel", False):
            raise ValueError(f"model: {name}.experts are expert-parallel already")
        if classes is None:
            _check_weights(f"{name}.experts", block.experts)
        else:
            _check_class(f"{name}.experts", block.experts, classes)
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1:
            raise ValueError(f"model: expected the number of a decoder layer in the name of its block, got {name!r}")
        found.append((numbers[0], block))
    return found


def _check_class(name: str, experts: Any, classes: Sequence[str]) -> None:
    """Refuse other experts, such as a list of modules or those of a quantizer, which may be called differently."""
    bases = [base for base in type(experts).__mro__ if base.__module__.startswith("transformers.models.")]
    if not isinstance(experts, _NoExperts) and not any(base.__name__ in classes for base in bases):
        raise ValueError(
            f"model: {name}: expected {' or '.join(classes)} of transformers, or a model that was made inside "
            f"without_experts(), got {type(experts).__name__}"
        )


def _check_weights(name: str, experts: Any) -> None:
    for key in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, key, None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 3:
            raise ValueError(
                f"model: {name}: expected {key} of all experts in one tensor, as transformers 5 has it, got "
                f"{type(experts).__name__}"
            )
        if weight.is_meta or weight.dtype != torch.bfloat16:
            place = "on the meta device" if weight.is_meta else f"{weight.dtype}"
            raise ValueError(f"model: {name}.{key}: expected torch.bfloat16 with values, got {place}")


def own_experts(experts: Any, ids: Sequence[int]) -> Iterator[ExpertTensors]:
    """Experts `ids` of a block. gpt-oss stores them transposed, with biases."""
    transposed, has_bias = getattr(experts, "is_transposed", False), hasattr(experts, "gate_up_proj_bias")
    for expert in ids:
        gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
        yield ExpertTensors(
            gate_up.mT if transposed else gate_up,
            down.mT if transposed else down,
            experts.gate_up_proj_bias[expert] if has_bias else None,
            experts.down_proj_bias[expert] if has_bias else None,
        )
