"""Tiny models of every family of transformers that has experts, what becomes of each, and docs/families.md's table.

Families are found by looking through transformers, not from a list. `python -m tests.support.families_table` writes the
table anew; with `--ranks 2` it also runs every family over two ranks.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from moe_runtime.config import ActivationConfig, ParallelConfig
from moe_runtime.integrations.expert_modules import DescribedExperts, describe_experts
from moe_runtime.integrations.transformers import apply_expert_parallel
from moe_runtime.integrations.transformers_registry import NAME, close_experts, experts_settings
from moe_runtime.reference import error_bound, relative_error
from tests.support.programs import ROOT

PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- made by python -m tests.support.families_table -->", "<!-- end of the table -->"
MODELS = Path(transformers.__file__).parent / "models"

WAIT_S = 60.0
TOKENS = (4, 24)
"""Batch and sequence of each rank."""
VOCABULARY = 96
MOST_PARAMETERS = 20_000_000
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "moe_hidden_size": 64,
    "d_model": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "zero_expert_num": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "depth": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a config gets of these, where it has such a key."""
NEEDED = ("num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim")
"""Of these, what a config gets also where it has none by default."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2": {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "sparse"]},
    "diffusion_gemma": {"top_k_experts": 2},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [48, 32], "rope_parameters": ROPE | {"mrope_section": [6, 6, 4]}},
    "gemma4": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "glm4v_moe": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
    "glm5_next": {"qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 2},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 2},
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 0, "layer_types": ["full_attention", "conv"]},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "mistral4": {"qk_rope_head_dim": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "step3p7": {"sliding_window": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys that a family needs besides, to be small and valid."""


def families() -> list[str]:
    """Families of the installed transformers whose modeling file has a class of experts."""
    pattern = re.compile(r"^class \w*Experts\w*\(", re.MULTILINE)
    files = sorted(MODELS.glob("*/modeling_*.py"))
    return sorted({path.parent.name for path in files if pattern.search(path.read_text(encoding="utf-8"))})


def tiny_model(family: str, seed: int = 0) -> Any:
    """A small random model of `family` in bf16 that has experts; of several classes the first that can be made.

    Raises `LookupError` with what each class said if there is none.
    """
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    problems = []
    for kind in _model_classes(module):
        for layers in (2, 4, 6):
            for with_types in (True, False):
                try:
                    config = tiny_config(kind.config_class, layers, with_types, SPECIAL.get(family, {}))
                    with torch.device("meta"):
                        sketch = kind(config)
                except Exception as error:
                    problems.append(f"{kind.__name__} of {layers} layers: {error!r}"[:200])
                    continue
                size = sum(parameter.numel() for parameter in sketch.parameters())
                if size > MOST_PARAMETERS:
                    problems.append(f"{kind.__name__} of {layers} layers: {size} parameters")
                elif not experts_of(sketch):
                    problems.append(f"{kind.__name__} of {layers} layers: no experts")
                else:
                    return _filled(kind, config, seed)
    raise LookupError(f"{family}: no tiny model: {'; '.join(problems)}")


def _model_classes(module: Any) -> list[Any]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and not value.__name__.endswith("PreTrainedModel")
        and value.config_class is not None
    ]
    ends = ("ForCausalLM", "TextModel", "ThinkerModel", "Model", "")
    return sorted(found, key=lambda kind: next(i for i, end in enumerate(ends) if kind.__name__.endswith(end)))


def tiny_config(kind: Any, layers: int, with_types: bool, special: dict[str, Any]) -> Any:
    """A config of class `kind`, small wherever a key says a size, and so in the configs inside it."""
    plain = kind()
    changes: dict[str, Any] = {}
    for key, value in (SIZES | {"num_hidden_layers": layers, "n_layers": layers, "num_layers": layers}).items():
        try:
            present = getattr(plain, key, None)
        except Exception:  # a key that differs between layers
            present = value
        if present is None and not (key in NEEDED and hasattr(plain, key)):
            continue
        if not isinstance(present, list | tuple):
            changes[key] = value
        elif isinstance(present, list | tuple) and isinstance(value, int):
            changes[key] = [value] * len(present)
    if not with_types and hasattr(plain, "layer_types"):
        changes["layer_types"] = None
    for key, value in vars(plain).items():
        if isinstance(value, transformers.PretrainedConfig):
            changes[key] = tiny_config(type(value), layers, with_types, {})
    return kind(**(changes | special))


def _filled(kind: Any, config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for experts in experts_of(model).values():
            fill(experts)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # experts of each token of the vocabulary, from the checkpoint
                buffer.copy_(torch.argsort(torch.rand(buffer.shape[0], 8), dim=1)[:, : buffer.shape[1]])
    model.bfloat16()
    # As transformers loads it.
    kept = model._keep_in_fp32_modules_strict or ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(part in name for part in kept):
            tensor.data = tensor.data.float()
    return model


@torch.no_grad()
def fill(experts: nn.Module) -> None:
    """Weights with variance 1 / fan-in, biases of about a third."""
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.3)
        elif parameter.ndim == 3:
            down = name == "down_proj"
            wide = max(parameter.shape[1:])
            parameter.normal_(std=(48 if down else wide if wide == 64 else 64) ** -0.5)
        else:
            parameter.normal_(std=64**-0.5)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The experts modules of a model by name."""
    return {f"{name}.experts": module.experts for name, module in model.named_modules() if hasattr(module, "experts")}


@dataclass(frozen=True)
class Outcome:
    """What became of one family.

    Attributes:
        family: folder of the family in transformers.
        model: class of the tiny model.
        experts: classes of its experts.
        formula: what they compute, in words; empty if they are refused.
        interface: whether `set_experts_implementation` runs them.
        refused: why `apply_expert_parallel` refuses them; empty if it does not.
        error: largest relative error of a layer against transformers' own forward in float64; 0 if none ran.
    """

    family: str
    model: str
    experts: str
    formula: str
    interface: bool
    refused: str
    error: float


def outcome_of(family: str, rank: int = 0) -> Outcome:
    """Run the tiny model of `family` in both ways and compare each call of its experts. Collective over the ranks.

    Raises `AssertionError` where an error is above the bound.
    """
    model = tiny_model(family)
    experts = experts_of(model)
    names = ", ".join(sorted({type(module).__name__ for module in experts.values()}))
    errors: list[float] = []
    with_interface = all(hasattr(module, "has_gate") for module in experts.values())
    try:
        described = [describe_experts(module) for module in experts.values()]
    except ValueError as problem:
        return Outcome(family, type(model).__name__, names, "", False, _reason(problem), 0.0)
    if with_interface:
        model.set_experts_implementation("eager")
    exact, refused = _exact(experts), ""
    if with_interface:
        model.set_experts_implementation(NAME)
        with experts_settings(max_tokens_per_rank=64):
            errors += _errors(model, exact, rank)
        close_experts(model)
    limits = ParallelConfig(timeout_s=WAIT_S, startup_timeout_s=WAIT_S)
    try:
        parallel = apply_expert_parallel(model, max_tokens_per_rank=96, parallel=limits)
    except ValueError as problem:
        refused = _reason(problem)
    else:
        with parallel:
            errors += _errors(model, exact, rank)
    assert errors, f"{family}: its experts were never called"
    normed = any(one.norm_eps is not None for one in described)
    worst, bound = max(errors), error_bound("bf16", post_expert_norm=normed)
    assert worst <= bound, f"{family}: relative error {worst:.3e} above {bound:.3e}"
    formula = "; ".join(dict.fromkeys(_formula(one) for one in described))
    return Outcome(family, type(model).__name__, names, formula, with_interface, refused, worst)


def _exact(experts: dict[str, Any]) -> dict[str, Any]:
    """Copies in float64, with transformers' own forward."""
    return {name: copy.deepcopy(module).double() for name, module in experts.items()}


@torch.no_grad()
def _errors(model: Any, exact: dict[str, Any], rank: int) -> Iterator[float]:
    """The relative error of each call of experts in one call of `model`, on the inputs of that call."""
    calls: list[tuple[str, tuple[Any, ...], torch.Tensor]] = []

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, named: Any, output: torch.Tensor) -> None:
            calls.append((name, (*args, *named.values()), output))

        return hook

    hooks = [module.register_forward_hook(keep(name), with_kwargs=True) for name, module in experts_of(model).items()]
    try:
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(3, VOCABULARY, TOKENS, generator=generator)
        found = model(**inputs_of(model, ids))
    finally:
        for hook in hooks:
            hook.remove()
    assert found is not None
    for name, (x, topk_idx, topk_weights), y in calls:
        if not x.numel():
            continue
        expected = exact[name](x.double(), topk_idx, topk_weights.double())
        yield relative_error(y, expected)[0]


def inputs_of(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """The arguments of a call on tokens `ids`."""
    named = {"input_ids": ids, "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        named["decoder_input_ids"] = ids
    return named


def _formula(described: DescribedExperts) -> str:
    """The activation, biases and layout in words."""
    activation = described.activation
    parts = [_activation(activation)]
    parts += ["interleaved"] if activation.order == "interleaved" else []
    parts += ["biases"] if described.expert_bias else []
    parts += ["a norm after each expert"] if described.norm_eps is not None else []
    parts += ["transposed"] if described.transposed else []
    parts += ["identity experts"] if described.identity_experts else []
    return ", ".join(parts)


_NAMES = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU by tanh", "relu2": "squared ReLU"}


def _activation(activation: ActivationConfig) -> str:
    parts = []
    if activation.alpha != 1.0:
        parts.append(f"alpha {activation.alpha:g}")
    if activation.limit is not None:
        parts.append(f"limit {activation.limit:g}" + " after silu" * (activation.limit_on == "function"))
    if activation.up_offset:
        parts.append(f"up + {activation.up_offset:g}")
    for name, cap in (("gate", activation.gate_softcap), ("up", activation.up_softcap)):
        if cap is not None:
            parts.append(f"{name} softcap {cap:g}")
    if not activation.gated:
        return f"{_NAMES[activation.function]} without a gate"
    name = "SwiGLU" if activation.function == "silu" else f"{_NAMES[activation.function]} of gate"
    return f"{name} with {', '.join(parts)}" if parts else name


def _reason(problem: ValueError) -> str:
    """The message without the name of the module that it begins with."""
    return re.sub(r"^(model: )?(\S*experts: )?", "", str(problem))


def outcomes(rank: int = 0, world: int = 1, names: list[str] | None = None) -> list[Outcome]:
    """Of every family, or of those in `names`."""
    return [outcome_of(family, rank) for family in names or families()]


def table(found: list[Outcome]) -> str:
    """Two tables in Markdown: what works, and what is refused."""
    works = [one for one in found if one.formula]
    lines = [
        f"{len(works)} of {len(found)} families of transformers {transformers.__version__} work.",
        "",
        "| family | experts | they compute | `set_experts_implementation` | `apply_expert_parallel` |",
        "|---|---|---|---|---|",
    ]
    for one in works:
        interface = "works" if one.interface else "no interface"
        spread = one.refused or "works"
        lines.append(f"| {one.family} | {one.experts} | {one.formula} | {interface} | {spread} |")
    lines += ["", "| refused | experts | why |", "|---|---|---|"]
    lines += [f"| {one.family} | {one.experts} | {one.refused} |" for one in found if not one.formula]
    return "\n".join(lines)


def committed() -> str:
    """The table in docs/families.md."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="families_table", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=1, help="also run every family over so many ranks")
    parser.add_argument("--show", action="store_true", help="print the errors and write nothing")
    parser.add_argument("names", nargs="*", help="families; all if none is given, and only then is the table written")
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # models this small only wait for threads
    found = outcomes(names=args.names)
    for one in found:
        print(f"{one.family:24} {one.model:40} {one.error:.2e} {one.formula or 'refused: ' + one.refused}")
    if args.ranks > 1:
        from tests.support.pool import WorkerPool

        pool = WorkerPool(args.ranks)
        try:
            results = pool.run(outcomes, args.names, timeout=3000.0)
        finally:
            pool.close()
        for of_rank in results:
            assert table(of_rank) == table(found), "other outcomes over several ranks"
        print(f"the same over {args.ranks} ranks")
    if not (args.show or args.names):
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
