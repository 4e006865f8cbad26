"""The configuration of a layer and of a run, as frozen pydantic models that refuse unknown keys and impossible values.

YAML is read with a safe loader. Every complaint is a `ValueError` that names the file and the key.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from moe_runtime.kernels.formats.number_formats import (
    WEIGHT_FORMATS,
    ceil_div,
    format_named,
    intermediate_format_for,
    token_formats_for,
    weight_format_named,
)
from moe_runtime.support.arguments import FP32, check_integer, check_path, describe, is_real
from moe_runtime.support.regular_files import read_regular

FormatName = Literal["bf16", "fp8_block", "mxfp8", "nvfp4"]
WeightFormatName = Literal["bf16", "fp8_block", "mxfp8", "nvfp4", "mxfp4"]
CombineFormatName = Literal["bf16", "fp8_block", "mxfp8"]
Auto = Literal["auto"]
ModeName = Literal["auto", "contiguous", "gathered"]
ResolvedMode = Literal["contiguous", "gathered"]

GATHERED_MAX_TOKENS = 256
"""Largest `max_tokens_per_rank` for which mode `auto` means `gathered` for `fp8_block`, too."""
GATHERED_MAX_ROWS = 64
"""Most rows of an expert, on average, for which it does: gathering more takes the GEMM longer than copying first."""
GATHERED_MAX_EXPANDED_ROWS = 4
"""The same for FP4 weights that are multiplied in FP8, whatever `max_tokens_per_rank` is. On one H200 a layer of 64
experts of DeepSeek-V3 took as long in both modes with 4 rows, and 4, 12 and 15% less with 8, 16 and 32 in
`contiguous`."""

MAX_EXPERTS = 65535
"""Expert ids travel as u16, and 65535 means unrouted."""

MAX_YAML_BYTES = 1 << 15
"""Most bytes of a YAML file: a config with every key and its comments has a few thousand."""

_MOST = 2**31 - 1
"""Largest size: kernels count in int32."""
_Positive = Annotated[int, Field(gt=0, le=_MOST)]
_Natural = Annotated[int, Field(ge=0, le=_MOST)]
_Keys = Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
_Sizes = Annotated[tuple[_Positive, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


def _real(value: object) -> object:
    """`value` if it is a real number. Pydantic alone takes what has a `__float__`, such as numpy's bools."""
    if not is_real(value):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


def _finite(value: float) -> float:
    if not abs(value) <= FP32.max:
        raise PydanticCustomError("finite_number", "Input should be a number that is finite in fp32")
    return value


def _positive(value: float) -> float:
    if value < FP32.tiny:
        raise PydanticCustomError("greater_than", "Input should be greater than 0 and no denormal in fp32")
    return value


_Real = Annotated[float, BeforeValidator(_real)]
_Seconds = Annotated[_Real, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Finite = Annotated[_Real, AfterValidator(_finite)]
_Factor = Annotated[_Finite, AfterValidator(_positive)]


def resolve_mode(
    mode: str,
    max_tokens_per_rank: int,
    token_format: str,
    rows_per_expert: int | None = None,
    weight_format: str = "fp8_block",
    *,
    expanded: bool = False,
) -> ResolvedMode:
    """How rows lie after dispatch. All ranks must pass equal values.

    `gathered` keeps one row per token and rank, which `row_index` finds: least traffic and memory, low latency.
    `contiguous` sorts rows by expert. `auto` is `gathered`, but `contiguous` for tokens and weights in `fp8_block` with
    more than 256 tokens per rank and more than 64 rows per expert: a GEMM multiplies so many faster than it can gather
    them. It gathers more slowly while it expands weights: then more than 4 rows per expert are enough. For other
    weights rows are gathered as they are dequantized.

    Args:
        rows_per_expert: as the function of this name says; None is many.
        weight_format: that the GEMMs multiply, `MoELayerConfig.multiplied_format`.
        expanded: whether they make these weights of FP4 ones (`fp4_multiplied_in`).

    Raises `ValueError` for another `mode`.

    >>> [resolve_mode("auto", count, "fp8_block") for count in (256, 257)], resolve_mode("auto", 4096, "bf16")
    (['gathered', 'contiguous'], 'gathered')
    >>> [resolve_mode("auto", 512, "fp8_block", rows) for rows in (64, 65)]
    ['gathered', 'contiguous']
    >>> [resolve_mode("auto", 8, "fp8_block", rows, expanded=True) for rows in (4, 5)]
    ['gathered', 'contiguous']
    """
    if mode in get_args(ResolvedMode):
        return cast(ResolvedMode, mode)
    if mode != "auto":
        raise ValueError(f"mode: expected auto, contiguous or gathered, got {mode!r}")
    most = GATHERED_MAX_EXPANDED_ROWS if expanded else GATHERED_MAX_ROWS
    few = not expanded and max_tokens_per_rank <= GATHERED_MAX_TOKENS
    few |= rows_per_expert is not None and rows_per_expert <= most
    return "gathered" if few or not token_format == weight_format == "fp8_block" else "contiguous"


def _is_unset(key: object, value: object) -> bool:
    """Whether a format is as if it were not given: `auto`, or no `weight_format`."""
    auto = isinstance(value, str) and value == "auto" and key in ("token_format", "weight_format")
    return auto or (key == "weight_format" and value is None)


def rows_per_expert(world_size: int, max_tokens_per_rank: int, top_k: int, num_experts: int) -> int:
    """Rows of an expert, rounded up, if all ranks bring `max_tokens_per_rank` and all experts are chosen alike."""
    return ceil_div(world_size * max_tokens_per_rank * top_k, num_experts)


class _Model(BaseModel):
    """Strict: no unknown keys, no silent conversions (`"8"` is not 8, `true` is not 1), no later assignment."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def replace(self, **changes: Any) -> Any:
        """A validated copy with `changes`. Fields that were never set get their defaults again."""
        return type(self).model_validate(
            {name: getattr(self, name) for name in self.model_fields_set if name not in changes} | changes
        )


class RouterConfig(_Model):
    """How a token chooses its experts."""

    kind: Literal["softmax", "topk_softmax", "sigmoid"] = Field(
        default="softmax",
        description="softmax before the top-k (Qwen-MoE, Mixtral), topk_softmax after it (gpt-oss), "
        "sigmoid (DeepSeek-V3)",
    )
    renormalize: bool = Field(default=True, description="divide the chosen weights by their sum (norm_topk_prob)")
    bias: bool = Field(default=False, description="the linear gate has a bias, which counts in top-k and weights")
    num_groups: _Positive = Field(default=1, description="sigmoid: groups that the experts fall into (n_group)")
    top_groups: _Positive = Field(default=1, description="sigmoid: groups a token may choose from (topk_group)")
    scaling_factor: _Factor = Field(
        default=1.0, description="multiplies the weights at the end (routed_scaling_factor)"
    )
    correction_bias: bool = Field(
        default=False, description="sigmoid: a learned bias per expert that counts in the top-k, not in the weights"
    )

    @model_validator(mode="after")
    def _check(self) -> RouterConfig:
        if self.kind != "sigmoid" and self.num_groups != 1:
            raise ValueError(f"num_groups: only the sigmoid router has a limit, expected 1, got {self.num_groups}")
        if self.kind != "sigmoid" and self.correction_bias:
            raise ValueError(f"correction_bias: only the sigmoid router has one, got true with kind {self.kind}")
        if self.kind == "topk_softmax" and not self.renormalize:
            raise ValueError("renormalize: weights of the topk_softmax router always add up to 1, expected true")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups: expected at most num_groups = {self.num_groups}, got {self.top_groups}")
        return self


class ActivationConfig(_Model):
    """`function(gate) * (up + up_offset)`, clamped first where a limit is set, or `function(up)` without a gate.

    The defaults are SwiGLU. gpt-oss is `order: interleaved, alpha: 1.702, limit: 7.0, up_offset: 1.0`, Gemma 4 is
    `function: gelu_tanh`, Nemotron-H is `function: relu2, gated: false`. Step 3.5 and Ling 3.0 have
    `limit_on: function` in some layers: `min(silu(gate), limit) * clamp(up, -limit, limit)`.
    """

    function: Literal["silu", "gelu", "gelu_tanh", "relu2"] = Field(
        default="silu", description="x * sigmoid(alpha * x), GELU, its approximation by tanh, or max(x, 0)^2"
    )
    gated: bool = Field(default=True, description="whether experts have a gate; without, the function is that of up")
    order: Literal["gate_up", "up_gate", "interleaved"] = Field(
        default="gate_up", description="rows of the first weight: gate above up, up above gate, or one by one"
    )
    alpha: _Factor = Field(default=1.0, description="slope inside the sigmoid of silu")
    limit: _Factor | None = Field(
        default=None, description="gate is clamped to at most this, up to plus and minus this"
    )
    limit_on: Literal["gate", "function"] = Field(
        default="gate",
        description="what limit bounds beside up: gate, or function, its function (silu with alpha 1, no softcaps)",
    )
    up_offset: _Finite = Field(default=0.0, description="added to up after the clamp")
    gate_softcap: _Factor | None = Field(
        default=None, description="silu: c, where the gate outside of the sigmoid is c * tanh(gate / c)"
    )
    up_softcap: _Factor | None = Field(default=None, description="silu: c, where up is c * tanh(up / c)")

    @model_validator(mode="after")
    def _check(self) -> ActivationConfig:
        if self.function != "silu" and self.alpha != 1.0:
            raise ValueError(f"alpha: only silu has one, expected 1 with {self.function}, got {self.alpha}")
        for name in ("gate_softcap", "up_softcap"):
            if self.function != "silu" and getattr(self, name) is not None:
                raise ValueError(f"{name}: only silu has one, expected none with {self.function}")
        if not self.gated:
            for name in ("order", "limit", "up_offset", "gate_softcap", "up_softcap"):
                value, default = getattr(self, name), type(self).model_fields[name].default
                if value != default:
                    raise ValueError(f"{name}: expected {default!r} without a gate, got {value!r}")
        if self.limit_on == "function":
            if self.limit is None:
                raise ValueError("limit_on: expected gate without a limit, got function")
            for name in ("function", "alpha", "gate_softcap", "up_softcap"):
                value, default = getattr(self, name), type(self).model_fields[name].default
                if value != default:
                    raise ValueError(f"{name}: expected {default} with limit_on function, got {value}")
        return self

    @property
    def num_parts(self) -> int:
        """Parts of `I` rows in the first weight of an expert: 2, gate and up, or 1."""
        return 2 if self.gated else 1


class SharedExpertConfig(_Model):
    """An expert for every token, computed on the token's own rank, of linears without biases.

    It has the function of the layer's `activation`, with alpha 1, and a gate if its experts have one; no offset. A
    `limit` is its own: `min(silu(gate), limit) * clamp(up, -limit, limit)` (Step 3.5, Ling 3.0), whatever that of the
    experts bounds.
    """

    intermediate_size: _Positive = Field(description="width between its projections")
    gated: bool = Field(
        default=False, description="its output is multiplied by the sigmoid of a learned dot product with the token"
    )
    limit: _Factor | None = Field(
        default=None,
        description="silu of gate is clamped to at most this, up to plus and minus this; only with silu and a gate",
    )


def check_shared_limit(name: str, limit: float | None, activation: ActivationConfig) -> None:
    """Raise `ValueError` if a shared expert of a layer with `activation` has a `limit` that it cannot have."""
    if limit is not None and not (activation.gated and activation.function == "silu"):
        got = activation.function if activation.gated else f"{activation.function} without a gate"
        raise ValueError(f"{name}: only silu of a gate has one, expected none with {got}, got {limit}")


class PostExpertNormConfig(_Model):
    """An RMSNorm over the output of each expert, before it is weighted, with one weight for all experts.

    The weight comes before the norm: `y * rsqrt(mean(y^2) + eps)`, `y = bf16(x * (1 + weight))` (Muse Spark).
    """

    eps: _Factor = Field(default=1e-6, description="added to the mean square")


class MoELayerConfig(_Model):
    """One expert-parallel layer. All ranks of a group must hold equal values."""

    hidden_size: _Positive = Field(description="H, width of a token")
    intermediate_size: _Positive = Field(description="I, width between the projections of one expert")
    num_experts: Annotated[int, Field(gt=0, le=MAX_EXPERTS)] = Field(description="experts of the layer over all ranks")
    top_k: _Positive = Field(description="experts of one token")
    max_tokens_per_rank: _Positive = Field(description="most tokens of a rank in one step")
    token_buckets: _Sizes = Field(
        default=(),
        description="sizes below max_tokens_per_rank that get kernels of their own; a step takes the smallest bucket "
        "that holds its max_tokens (MoELayer.forward)",
    )
    token_format: FormatName = Field(
        default="bf16",
        description="tokens on the wire and into the GEMMs; that of the checkpoint, if there is one, when not given "
        "(or auto)",
    )
    weight_format: WeightFormatName = Field(
        default_factory=lambda data: data.get("token_format", "bf16"),
        description="weights as stored; when not given (or auto or null) that of the checkpoint if it goes with "
        "token_format, else token_format",
    )
    fp4_multiplied_in: Literal["bf16", "fp8"] = Field(
        default="bf16",
        description="nvfp4 and mxfp4 weights: numbers that tensor cores multiply. fp8 is for fp8_block tokens; each "
        "weight is then rounded once to e4m3 with a scale for a block of 128x128",
    )
    combine_format: CombineFormatName = Field(default="bf16", description="partial sums that combine sends back")
    expert_row_capacity: _Positive | None = Field(
        default=None, description="most (token, expert) rows a rank receives in one step; the worst case when not given"
    )
    host_capacity: _Positive | None = Field(
        default=None,
        description="several hosts: most tokens of a rank that go to one host in a step; all of them when not given",
    )
    num_sms: _Positive | None = Field(
        default=None, description="most SMs of a GPU that dispatch and combine use at a time; all when not given"
    )
    intermediate_gsf: _Factor | None = Field(
        default=None, description="nvfp4 tokens: encode scale of the intermediate; a default when not given"
    )
    router: RouterConfig = Field(default_factory=RouterConfig)
    activation: ActivationConfig = Field(default_factory=ActivationConfig)
    expert_bias: bool = Field(default=False, description="both projections of every expert have a bias (gpt-oss)")
    post_expert_norm: PostExpertNormConfig | None = Field(
        default=None, description="a norm over the output of each expert; none when not given"
    )
    shared_expert: SharedExpertConfig | None = Field(default=None, description="none when not given")

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        """A `weight_format` of null is an absent one, and so is a format `auto`."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if not _is_unset(key, value)}

    @model_validator(mode="after")
    def _check(self) -> MoELayerConfig:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected at most num_experts = {self.num_experts}, got {self.top_k}")
        if self.token_format not in token_formats_for(self.weight_format):
            possible = [name for name in WEIGHT_FORMATS if self.token_format in token_formats_for(name)]
            raise ValueError(
                f"weight_format: expected {' or '.join(possible)}, got {self.weight_format} with {self.token_format} "
                "tokens"
            )
        if self.fp4_multiplied_in == "fp8" and (self.token_format != "fp8_block" or not self._has_fp4_weights):
            raise ValueError(
                "fp4_multiplied_in: expected fp8 with fp8_block tokens and nvfp4 or mxfp4 weights alone, got it with "
                f"{self.token_format} tokens and {self.weight_format} weights"
            )
        for name in (self.token_format, self.weight_format, self.combine_format):
            weight_format_named(name).check_columns(self.hidden_size, "hidden_size")
        for name in (self.token_format, self.weight_format):
            weight_format_named(name).check_columns(self.intermediate_size, "intermediate_size")
        if self.intermediate_gsf is not None and self.token_format != "nvfp4":
            raise ValueError(f"intermediate_gsf: only nvfp4 tokens have one, got it with {self.token_format} tokens")
        if self.shared_expert is not None:
            check_shared_limit("shared_expert.limit", self.shared_expert.limit, self.activation)
        self._check_router_groups()
        return self

    def _check_router_groups(self) -> None:
        router = self.router
        if router.num_groups == 1:
            return
        if self.num_experts % router.num_groups:
            raise ValueError(
                f"router.num_groups: expected a divisor of num_experts = {self.num_experts}, got {router.num_groups}"
            )
        group_size = self.num_experts // router.num_groups
        if group_size < 2:
            raise ValueError(
                f"router.num_groups: a group is judged by its two best experts, so expected at most num_experts / 2 "
                f"= {self.num_experts // 2}, got {router.num_groups}"
            )
        if self.top_k > router.top_groups * group_size:
            raise ValueError(
                f"router.top_groups: {router.top_groups} groups of {group_size} experts cannot give "
                f"top_k = {self.top_k}"
            )

    @property
    def all_token_buckets(self) -> tuple[int, ...]:
        """Each of `token_buckets` below `max_tokens_per_rank`, ascending, then `max_tokens_per_rank`."""
        limit = self.max_tokens_per_rank
        return (*sorted({size for size in self.token_buckets if size < limit}), limit)

    @property
    def _has_fp4_weights(self) -> bool:
        return weight_format_named(self.weight_format).element_bits == 4

    @property
    def multiplied_format(self) -> str:
        """The format of the weights that the GEMMs multiply: `weight_format`, or `fp8_block` where `fp4_multiplied_in`
        is fp8."""
        return "fp8_block" if self.fp4_multiplied_in == "fp8" else self.weight_format

    @property
    def intermediate_format(self) -> str:
        """The format between both GEMMs of an expert: `token_format`, but `bf16` for `fp8_block` tokens with `nvfp4` or
        `mxfp4` weights that are multiplied in bf16."""
        weights = weight_format_named(self.multiplied_format)
        return intermediate_format_for(format_named(self.token_format), weights).name

    def mode_on(self, world_size: int, max_tokens: int | None = None, chosen_from: int | None = None) -> ResolvedMode:
        """How rows lie after dispatch on `world_size` ranks, by `resolve_mode`, in steps of up to `max_tokens`; None is
        the largest steps.

        Tokens choose among `chosen_from` experts; None is those of the layer alone.

        Raises `ValueError` for a `world_size` that is no positive integer below 2^31, `max_tokens` that is not at most
        `max_tokens_per_rank`, and `chosen_from` that is less than `num_experts`.
        """
        check_integer("world_size", world_size, high=_MOST)
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        check_integer("max_tokens", tokens, high=self.max_tokens_per_rank)
        choice = self.num_experts if chosen_from is None else chosen_from
        check_integer("chosen_from", choice, self.num_experts)
        rows = rows_per_expert(world_size, tokens, self.top_k, choice)
        expanded = self.multiplied_format != self.weight_format
        return resolve_mode("auto", tokens, self.token_format, rows, self.multiplied_format, expanded=expanded)

    def flat(self) -> dict[str, int | float | str | bool | None]:
        """Every value by dotted key (`router.kind`), to compare configs between ranks."""
        return _flatten(self.model_dump(), "")


class ParallelConfig(_Model):
    """How ranks reach each other, and which kernels they run."""

    transport: Literal["auto", "nvshmem", "shared", "hierarchical", "collective", "private"] = Field(
        default="auto",
        description="memory between ranks: nvshmem (GPUs), shared (processes of one host), collective "
        "(torch.distributed), private (ranks within one process)",
    )
    engine: Literal["auto", "cuda", "triton", "torch"] = Field(
        default="auto",
        description="cuda (CUDA C++ kernels of Hopper where there are such, else Triton), triton (Triton alone, "
        "but for dispatch and combine), torch (the references); auto is cuda on Hopper, triton on other GPUs, torch on "
        "CPUs",
    )
    timeout_s: _Seconds = Field(default=30.0, description="seconds a step waits for a silent peer")
    startup_timeout_s: _Seconds = Field(default=120.0, description="the same limit while ranks start up")
    on_failure: Literal["abort", "continue"] = Field(
        default="abort",
        description="a rank that dies in a step: abort ends the group, continue has the others go on without it",
    )
    lost_experts: Literal["wait", "drop"] = Field(
        default="wait",
        description="experts that died without a replica, with continue: steps wait until they are loaded again, or "
        "drop them from the choices of tokens meanwhile",
    )


class CheckpointConfig(_Model):
    """Where the weights come from."""

    path: str = Field(min_length=1, description="folder in HuggingFace layout; relative to the working directory")
    layer: _Natural = Field(default=0, description="index of the decoder layer")
    keep_in_host_memory: bool = Field(
        default=False, description="keep a copy of the loaded experts in /dev/shm, for a faster restart"
    )
    ignore_keys: _Keys = Field(
        default=(), description="keys of its JSON files without influence, although they look as if they had one"
    )


class PlacementConfig(_Model):
    """Which rank holds which experts: read from a file, or planned from load (`plan_placement`)."""

    spare_slots: _Natural = Field(default=0, description="slots for replicas, over all ranks")
    load: str | None = Field(
        default=None,
        min_length=1,
        description="JSON file with a number for each expert, such as its tokens; equal when not given",
    )
    file: str | None = Field(
        default=None, min_length=1, description="JSON file with a whole placement (Placement.to_json), instead of both"
    )

    @model_validator(mode="after")
    def _check(self) -> PlacementConfig:
        if self.file is not None and (self.spare_slots or self.load is not None):
            raise ValueError("file: expected neither spare_slots nor load with it, it holds a whole placement")
        return self


class RecordedRoutesConfig(_Model):
    """What an inference engine's layers record of the experts that tokens take (docs/engines.md)."""

    steps: _Positive = Field(description="steps of a layer's ring; the oldest are overwritten")
    weights: bool = Field(default=False, description="record the weights of the experts, too")


class RunConfig(_Model):
    """A whole YAML file."""

    layer: MoELayerConfig
    placement: PlacementConfig | None = Field(default=None, description="contiguous ids, one slot each, by default")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    tokens_per_rank: _Natural = Field(
        default=0, description="tokens of each rank in a step; layer.max_tokens_per_rank when 0"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=0, description="of weights and tokens")
    checkpoint: CheckpointConfig | None = Field(default=None, description="random weights from the seed when not given")

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        limit = self.layer.max_tokens_per_rank
        if self.tokens_per_rank > limit:
            raise ValueError(
                f"tokens_per_rank: expected at most layer.max_tokens_per_rank = {limit}, got {self.tokens_per_rank}"
            )
        return self


def find_config(name: str) -> Path:
    """The packaged config called `name` (`"tiny_cpu"` is `configs/tiny_cpu.yaml`). Raises `ValueError` if unknown."""
    folder = resources.files("moe_runtime.configs")
    known = {entry.name.removesuffix(".yaml"): entry for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    if name not in known:
        raise ValueError(f"config: expected a YAML file or one of {', '.join(sorted(known))}, got {name!r}")
    return Path(str(known[name]))


def load_config(path: str | Path) -> RunConfig:
    """Read and validate a YAML file, given by path or by the bare name of a packaged config.

    Raises:
        ValueError: naming the file and every wrong key, or the line where the YAML is broken.
    """
    file = check_path("path", path)
    if not os.path.exists(file) or os.path.isdir(file):
        if file.name != str(path) or file.suffix:
            raise ValueError(f"config: no file {path}")
        file = find_config(str(path))
    data = read_yaml(file)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{file}:\n" + "\n".join(f"  {line}" for line in complaints(error))) from None


def read_yaml(file: Path) -> dict[str, Any]:
    """What a YAML file with settings of layers says, a mapping.

    Raises `ValueError` naming the file, and the line where the YAML is broken.
    """
    raw = read_regular(file, MAX_YAML_BYTES)
    try:
        data = yaml.load(raw.decode(), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        # PyYAML raises the last two for scalars that are not of the type of their tag.
        raise ValueError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a mapping with the key `layer`, got {type(data).__name__}")
    return data


def check_stated(who: str, stated: Mapping[str, object], made: MoELayerConfig) -> None:
    """Raise `ValueError` naming the key if overrides made `made` contradict what `who`, a model or a file, states."""
    for key, value in stated.items():
        if getattr(made, key) != value:
            raise ValueError(f"{key}: {who} says {value!r}, got {getattr(made, key)!r}")


def complaints(error: ValidationError) -> list[str]:
    """One line `dotted.key: what is wrong` per problem. Cross-checks name their key in the message themselves."""
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "default_factory_not_called":
            continue  # a default that depends on a key with a line of its own
        if problem["type"] == "value_error":
            lines.append(f"{key}.{problem['ctx']['error']}" if key else str(problem["ctx"]["error"]))
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            lines.append(f"{key}: {problem['msg']}, got {_shown(problem['input'])}")
    return lines


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits, or one within
        return describe(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _flatten(data: dict[str, Any], prefix: str) -> dict[str, int | float | str | bool | None]:
    flat: dict[str, int | float | str | bool | None] = {}
    for key, value in data.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class _UniqueKeyLoader(yaml.SafeLoader):
    """`yaml.safe_load` that refuses duplicate keys, of which YAML silently keeps the last, and excessive aliases."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[yaml.MappingNode] = set()
        self._lengths: dict[yaml.Node, int | None] = {}

    def construct_document(self, node: yaml.Node) -> Any:
        """What the document says, unless its aliases repeat too much."""
        if self._length(node) > 2 * MAX_YAML_BYTES:
            raise yaml.constructor.ConstructorError(None, None, "aliases repeat too much", node.start_mark)
        return super().construct_document(node)

    def _length(self, node: yaml.Node) -> int:
        """Characters of the values in `node`, at least one each; those behind an alias count each time."""
        if node not in self._lengths:
            self._lengths[node] = None
            parts = node.value
            if isinstance(node, yaml.ScalarNode):
                length = len(parts)
            elif isinstance(node, yaml.MappingNode):
                length = sum(self._length(key) + self._length(value) for key, value in parts)
            else:
                length = sum(self._length(part) for part in parts)
            self._lengths[node] = 1 + length
        known = self._lengths[node]
        if known is None:
            raise yaml.constructor.ConstructorError(None, None, "an alias within what it means", node.start_mark)
        return known

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the written keys of `node`, then merge what `<<` names, which may repeat them."""
        if node not in self._checked:
            self._checked.add(node)
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in own]
            seen = set()
            for written, key in zip(own, keys, strict=True):
                if not isinstance(key, Hashable):
                    raise yaml.constructor.ConstructorError(None, None, "unhashable key", written.start_mark)
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is there twice", written.start_mark
                    )
                seen.add(key)
        super().flatten_mapping(node)
