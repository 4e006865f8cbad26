"""Where transformers models keep their experts, how to read them, and how to create a model without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import nn

from moe_runtime.checkpoints.compressed_tensors_config import compressed_group
from moe_runtime.checkpoints.family_table import GPT_OSS, MIXTRAL
from moe_runtime.checkpoints.layouts import COMPRESSED_NVFP4
from moe_runtime.checkpoints.quantization import EXPERTS_KEY
from moe_runtime.integrations.expert_modules import WEIGHTS, DescribedExperts, describe_experts

TOP_K = ("top_k", "num_experts_per_tok", "top_k_experts")
"""What blocks, routers and configs call the number of experts of a token."""


class _NoExperts(nn.Module):
    """Stands for experts that were left out: empty tensors that some models initialise, and none that would be loaded.

    Attributes:
        described: what they compute; its module is on the meta device.
        config: the config that they had, if any.
        post_expert_norm: the norm after each expert, which stays and is loaded; None if there is none.
    """

    def __init__(self, described: DescribedExperts, post_expert_norm: nn.Module | None) -> None:
        super().__init__()
        self.post_expert_norm = post_expert_norm
        self.described = described
        self.config = getattr(described.module, "config", None)
        for name in WEIGHTS:
            setattr(self, name, torch.empty(0))

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("model: its experts were left out; apply_expert_parallel(model, experts=...) loads them")


@contextmanager
def without_experts() -> Iterator[None]:
    """Inside, transformers creates models without experts, and loads none.

    For models that are too large for one rank: `from_pretrained` loads all but the experts, and
    `apply_expert_parallel(..., experts=...)` those of each rank. transformers then warns that the experts' tensors are
    unexpected. Its FP8 and MXFP4 quantizers leave experts alone too.

    Creating a model whose experts a layer cannot compute raises `ValueError`, as `describe_experts`.
    """
    swapped = []

    def swap(module: Any, name: str, other: Any) -> None:
        if hasattr(module, name):
            swapped.append((module, name, getattr(module, name)))
            setattr(module, name, other)

    base = import_module("transformers.modeling_utils").PreTrainedModel
    post_init = base.post_init

    def leave_out_experts(model: Any, *args: Any, **named: Any) -> Any:
        # Every model ends its __init__ with post_init, which gives memory its first values.
        for name, block in with_experts(model):
            if not isinstance(block.experts, _NoExperts):
                norm = copy.deepcopy(getattr(block.experts, "post_expert_norm", None))
                block.experts = _NoExperts(describe_experts(block.experts.to("meta"), f"model: {name}.experts"), norm)
        return post_init(model, *args, **named)

    try:
        swap(base, "post_init", leave_out_experts)
        fp8 = import_module("transformers.integrations.finegrained_fp8")
        if hasattr(fp8, "should_convert_module"):
            swap(fp8, "should_convert_module", _unless_experts(fp8.should_convert_module))
        for name in ("transformers.integrations", "transformers.integrations.mxfp4"):
            swap(import_module(name), "replace_with_mxfp4_linear", lambda model, *args, **named: model)
        yield
    finally:
        for module, name, original in reversed(swapped):
            setattr(module, name, original)


def with_experts(model: nn.Module) -> list[tuple[str, Any]]:
    """Names and modules of the blocks that have `experts`."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "experts")]


def _unless_experts(should_convert_module: Callable[..., bool]) -> Callable[..., bool]:
    """`should_convert_module`, but False for experts."""

    def answer(full_name: str, *args: Any, **named: Any) -> bool:
        return not full_name.endswith(".experts") and should_convert_module(full_name, *args, **named)

    return answer


def model_config_of(model: nn.Module) -> dict[str, Any]:
    """The config of a transformers model. Raises `ValueError` for another model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(f"model: expected a transformers model with a config, got {type(model).__name__}")
    model_config: dict[str, Any] = config.to_dict()
    return model_config


def check_read(model_config: dict[str, Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` if transformers silently misreads the experts of the model's checkpoint.

    It drops the second-level scales of NVFP4, does not know `EXPERTS_KEY`, and cannot hold experts of gpt-oss as
    separate linears.
    """
    model_type = model_config.get("model_type")
    quant_config, wrong = model_config.get("quantization_config") or {}, EXPERTS_KEY in model_config
    if quant_config.get("quant_method") == "compressed-tensors" and quant_config.get("config_groups"):
        linear = "block_sparse_moe.experts.0.w1" if model_type in MIXTRAL.model_types else "mlp.experts.0.gate_proj"
        for number in numbers:
            where = "model.config: quantization_config"
            group, fmt = compressed_group(where, quant_config, f"model.layers.{number}.{linear}")
            wrong |= group is not None and (model_type in GPT_OSS.model_types or fmt == COMPRESSED_NVFP4.name)
    if wrong:
        raise ValueError(
            "model: its experts are quantized in the checkpoint in a way that transformers misreads; load it inside "
            "without_experts() and give experts=Checkpoint(path)"
        )


@dataclass(frozen=True)
class MoEBlock:
    """A block of a model that has `experts`.

    Attributes:
        number: index of its decoder layer.
        name: of its experts in the model.
        module: the block.
        described: its experts, also where they were left out.
    """

    number: int
    name: str
    module: Any
    described: DescribedExperts

    def top_k(self, model_config: dict[str, Any], asked: int | None) -> int:
        """Experts of a token, as the block, its router or the config says, else `asked`."""
        config = getattr(self.module.experts, "config", None)
        found = [getattr(place, key, None) for place in (self.module, *self.module.children(), config) for key in TOP_K]
        for value in (*found, *map(model_config.get, TOP_K)):
            if type(value) is int and value > 0:
                return value
        if asked is None:
            raise ValueError(f"top_k: expected it as an argument, the block of {self.name} does not say it")
        return asked


def moe_blocks(model: nn.Module, *, has_weights: bool) -> list[MoEBlock]:
    """The blocks of a model that have experts, in its order.

    Experts must be such that a layer can compute them (`describe_experts`), with weights if `has_weights`; else they
    may have been left out (`without_experts`).
    """
    blocks = with_experts(model)
    if not blocks:
        raise ValueError(f"model: expected MoE blocks with `experts`, found none in {type(model).__name__}")
    found: dict[int, MoEBlock] = {}
    for block_name, block in blocks:
        name = f"{block_name}.experts"
        if getattr(block.experts, "is_expert_parallel", False):
            raise ValueError(f"model: {name} are expert-parallel already")
        if not has_weights and isinstance(block.experts, _NoExperts):
            described = block.experts.described
        else:
            if not has_weights:
                _check_class(name, block.experts)
            described = describe_experts(block.experts, f"model: {name}")
            if has_weights:
                described.check_weights()
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1:
            raise ValueError(f"model: expected the number of a decoder layer in the name of its block, got {name!r}")
        if numbers[0] in found:
            raise ValueError(
                f"model: expected one block with experts in each decoder layer, got {found[numbers[0]].name} and "
                f"{name}; give a part of the model, or use its set_experts_implementation"
            )
        found[numbers[0]] = MoEBlock(numbers[0], name, block, described)
    return list(found.values())


def _check_class(name: str, experts: Any) -> None:
    """Refuse other experts, such as those of a quantizer, which may be called differently."""
    if not any(base.__module__.startswith("transformers.models.") for base in type(experts).__mro__):
        raise ValueError(
            f"model: {name}: expected experts of a model of transformers, or a model that was made inside "
            f"without_experts(), got {type(experts).__name__}"
        )
