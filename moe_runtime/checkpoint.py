"""BF16 checkpoints in HuggingFace Qwen3-MoE naming: only the tensors asked for are read, and each is checked first.

A folder holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`. Layer `L`
is `model.layers.{L}.mlp.gate.weight [E, H]` and, for each expert `e`, `model.layers.{L}.mlp.experts.{e}.` followed by
`gate_proj.weight [I, H]`, `up_proj.weight [I, H]`, `down_proj.weight [H, I]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_runtime.config import ActivationConfig, MoELayerConfig, RouterConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class ExpertTensors(NamedTuple):
    """One expert: `gate_up [2I, H]` (gate above up) and `down [H, I]`, bf16 on the CPU, in memory of their own."""

    expert_id: int
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class LayerWeights:
    """The router of a layer and `n` of its experts, bf16 on the CPU.

    Attributes:
        expert_ids: which experts, in the order of the tensors.
        router_EH: `[E, H]`, all experts of the layer.
        gate_up: `[n, 2I, H]`, gate above up.
        down: `[n, H, I]`.
    """

    expert_ids: range
    router_EH: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def layer_config_from_checkpoint(path: str | Path, **overrides: Any) -> MoELayerConfig:
    """The layer that `config.json` in the folder `path` describes; the rest comes from `overrides`.

    `max_tokens_per_rank` has no default and must be among the overrides. A whole config may be given
    (`**config.model_dump()`) to check that it fits the checkpoint.

    Raises:
        ValueError: for a `config.json` that is missing, broken or of another kind of model, for values that
            `MoELayerConfig` refuses, and for overrides that contradict the checkpoint; names file and key.
    """
    sizes = _Sizes.read(Path(path))
    router = RouterConfig(kind="softmax", renormalize=sizes.norm_topk_prob)
    stored = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_experts": sizes.num_experts,
        "top_k": sizes.top_k,
        "router": router,
    }
    config = MoELayerConfig.model_validate(stored | overrides)
    for key, value in stored.items():
        if getattr(config, key) != value:
            raise ValueError(f"{key}: {sizes.file} says {value!r}, got {getattr(config, key)!r}")
    if config.activation != ActivationConfig():
        raise ValueError(f"activation: {sizes.file} says plain SwiGLU, gate above up, got {config.activation!r}")
    return config


def read_qwen3_moe_router(path: str | Path, layer: int) -> torch.Tensor:
    """The gate `[E, H]` of a layer, bf16. Raises `ValueError` as `iter_qwen3_moe_experts` does."""
    folder = Path(path)
    sizes = _Sizes.read(folder)
    with _Shards(folder) as shards:
        return shards.tensor(f"model.layers.{layer}.mlp.gate.weight", (sizes.num_experts, sizes.hidden_size)).clone()


def iter_qwen3_moe_experts(path: str | Path, layer: int, expert_ids: Sequence[int]) -> Iterator[ExpertTensors]:
    """Experts one by one, in the order of `expert_ids`, so that at most one is held in bf16 while loading.

    Raises:
        ValueError: naming the file and the tensor: a tensor or a shard is missing, a file is cut off, a shape or
            dtype is not what `config.json` says, or an expert is asked for that it does not have.
    """
    folder = Path(path)
    sizes = _Sizes.read(folder)
    for expert in expert_ids:
        if not 0 <= expert < sizes.num_experts:
            raise ValueError(f"expert_ids: {sizes.file} says {sizes.num_experts} experts, asked for expert {expert}")
    intermediate, hidden = sizes.intermediate_size, sizes.hidden_size
    with _Shards(folder) as shards:
        for expert in expert_ids:
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            gate = shards.tensor(f"{prefix}.gate_proj.weight", (intermediate, hidden))
            up = shards.tensor(f"{prefix}.up_proj.weight", (intermediate, hidden))
            down = shards.tensor(f"{prefix}.down_proj.weight", (hidden, intermediate))
            yield ExpertTensors(expert, torch.cat([gate, up]), down.clone())


def read_qwen3_moe_layer(path: str | Path, layer: int, expert_ids: range) -> LayerWeights:
    """The router and the experts `expert_ids` of a layer, stacked. Raises as `iter_qwen3_moe_experts` does."""
    router = read_qwen3_moe_router(path, layer)
    hidden, intermediate = router.shape[1], _Sizes.read(Path(path)).intermediate_size
    gate_up = torch.empty(len(expert_ids), 2 * intermediate, hidden, dtype=torch.bfloat16)
    down = torch.empty(len(expert_ids), hidden, intermediate, dtype=torch.bfloat16)
    for i, expert in enumerate(iter_qwen3_moe_experts(path, layer, expert_ids)):
        gate_up[i] = expert.gate_up
        down[i] = expert.down
    return LayerWeights(expert_ids, router, gate_up, down)


def write_qwen3_moe_checkpoint(
    path: str | Path, config: MoELayerConfig, seed: int, num_layers: int = 1, num_shards: int = 1
) -> None:
    """Write a synthetic checkpoint of `num_layers` MoE layers (attention and embeddings are left out).

    Weights are normal with variance 1 / fan-in, as trained ones are to within a small factor, so that unit tokens
    give logits, gates and outputs of order 1. One shard gives `model.safetensors`, more give an index.
    """
    if config.router.kind != "softmax" or config.activation != ActivationConfig():
        raise ValueError("config: a Qwen3-MoE checkpoint has a softmax router and plain SwiGLU with gate above up")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)

    hidden, intermediate = config.hidden_size, config.intermediate_size
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = weight(config.num_experts, hidden)
        for expert in range(config.num_experts):
            tensors[f"{prefix}.experts.{expert}.gate_proj.weight"] = weight(intermediate, hidden)
            tensors[f"{prefix}.experts.{expert}.up_proj.weight"] = weight(intermediate, hidden)
            tensors[f"{prefix}.experts.{expert}.down_proj.weight"] = weight(hidden, intermediate)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "moe_intermediate_size": intermediate,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.router.renormalize,
            "num_hidden_layers": num_layers,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    )
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


@dataclass(frozen=True)
class _Sizes:
    """What `config.json` says about the MoE layers."""

    file: Path
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool

    @staticmethod
    def read(folder: Path) -> _Sizes:
        file = folder / "config.json"
        data = _read_json(file)
        if data.get("model_type") != "qwen3_moe":
            raise ValueError(f"{file}: model_type: expected qwen3_moe, got {data.get('model_type')!r}")
        if data.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{file}: hidden_act: expected silu, got {data['hidden_act']!r}")

        def positive(*keys: str) -> int:
            value = next((data[key] for key in keys if key in data), None)
            if type(value) is not int or value <= 0:
                raise ValueError(f"{file}: {' or '.join(keys)}: expected a positive integer, got {value!r}")
            return value

        return _Sizes(
            file,
            positive("hidden_size"),
            positive("moe_intermediate_size"),
            # Published files say num_experts; transformers 5 writes num_local_experts.
            positive("num_experts", "num_local_experts"),
            positive("num_experts_per_tok"),
            # The default of transformers' Qwen3MoeConfig.
            bool(data.get("norm_topk_prob", False)),
        )


class _Shards:
    """Tensors by name, from one file or many; a shard is opened (mapped, not read) when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._weight_map: dict[str, str] | None = None
        if (folder / INDEX_FILE).is_file():
            weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{folder / INDEX_FILE}: weight_map: expected a mapping from tensor to shard")
            self._weight_map = weight_map
        elif not (folder / SINGLE_FILE).is_file():
            raise ValueError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither")

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def tensor(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """The bf16 tensor `name`, checked by the header before its bytes are touched; it may alias the mapped file."""
        shard = self._shard_of(name)
        file = self._folder / shard
        if shard not in self._open:
            if not file.is_file():
                raise ValueError(f"{file}: shard is missing (wanted for {name})")
            try:
                self._open[shard] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: broken or cut off (wanted for {name}): {error}") from error
        try:
            header = self._open[shard].get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: tensor {name} is missing") from error
        if header.get_dtype() != "BF16":
            raise ValueError(f"{file}: tensor {name}: expected BF16, got {header.get_dtype()}")
        if tuple(header.get_shape()) != shape:
            raise ValueError(f"{file}: tensor {name}: expected shape {list(shape)}, got {header.get_shape()}")
        return self._open[shard].get_tensor(name)

    def _shard_of(self, name: str) -> str:
        if self._weight_map is None:
            return SINGLE_FILE
        index = self._folder / INDEX_FILE
        if name not in self._weight_map:
            raise ValueError(f"{index}: tensor {name} is missing")
        shard = self._weight_map[name]
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: tensor {name}: expected the name of a file beside it, got {shard!r}")
        return shard


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
