"""Reads the values of a `config.json` with checks, and keeps account of the keys that it has read.

What a missing key means is what it means in transformers (`config_defaults`). Keys that look as if they changed what
experts or the router compute, and that were not read, are refused (`ConfigKeys.refuse_unread`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from reprlib import repr as shortened
from typing import Any, NoReturn

from moe_runtime.checkpoints.config_defaults import defaults_of
from moe_runtime.checkpoints.family_table import (
    DEFAULT,
    DENSE_KEYS,
    FAMILIES,
    MAX_LAYERS,
    NUM_EXPERTS_KEYS,
    Family,
    text_config,
)
from moe_runtime.checkpoints.unread_keys import KnownKeys, acts, refuse_unread

LOOKS = re.compile(
    r"clamp|limit|alpha|softcap|latent|(^|_)act(_|$)|activation|rout|expert|moe|glu|zero|sym|bias|gate|top_?k|scor|"
    r"mlp|ffn|feed_forward|up_proj|down_proj|shared|jitter|hash|sinkhorn|ngpt"
)
"""What keys look like that say what experts, the router or a norm around them compute."""

WITHOUT_INFLUENCE = frozenset(
    {
        # Read with the quantization.
        "expert_dtype",
        # Training, or what a model returns.
        *("aux_loss_alpha", "router_aux_loss_coef", "router_z_loss_coef", "output_router_logits"),
        *("moe_loss_weight", "moe_jitter_eps", "moe_capacity", "moe_drop_tokens", "moe_random_routing_dropped_token"),
        *("router_jitter_noise", "input_jitter_noise", "moe_token_dropout", "bias_update_speed"),
        # How to generate, which older releases of transformers wrote into every config.
        "top_k",
        # Precision in which others compute logits of the router: here it is fp32.
        *("router_dtype", "moe_router_dtype", "need_fp32_gate"),
        # How others spread or compute the same.
        *("moe_router_enable_routed_scaling", "moe_shared_expert_overlap"),
        *("experts_implementation", "enable_moe_fp32_combine"),
        # Where experts are: the names of tensors say that.
        *("expert_layer_period", "expert_layer_offset", "moe_layers_enum", "moe_layer_start_index"),
        *("moe_layer_end_index", "moe_layer_interval", "interleave_moe_layer_step"),
        # Other parts of a decoder layer, and the rest of the model.
        *("layernorm_mlp_alpha", "layernorm_mlp_beta", "mlp_alpha_factor", "mlp_beta_factor"),
        "final_logit_softcapping",
        *("activation_dropout", "lm_head_bias", "log_scaling_alpha", "time_step_limit", "qkv_bias"),
        *("head_bias", "o_bias", "out_bias", "output_gate_type"),
        *("no_bias", "residual_gate_temperature"),
        *("gate_lower_bound", "use_full_rank_gate", "shared_moe_mode"),
        *("use_double_wide_mlp", "intermediate_size_mlp", "gated_norm_rank"),
        *("mlp_intermediate_size", "hc_sinkhorn_iters"),
    }
)
"""Keys that change nothing that a layer of experts computes, of those that look otherwise."""

_OTHER_PARTS = re.compile(
    r"attention|attn|^(mla|mamba|rope|rotary|index|ssm|conv|kda|mtp|vision|audio|image|video|projector)_|_(conv|qkv|rotary)_"
)
_EXPERTS = re.compile(r"expert|moe|rout|glu|mlp|ffn|shared")


def is_of_other_part(key: str) -> bool:
    """Whether a key looks like one of attention, another mixer, or another part of a model, and not of experts.

    >>> is_of_other_part("attention_bias"), is_of_other_part("attn_moe_bias"), is_of_other_part("mlp_bias")
    (True, False, False)
    """
    return _OTHER_PARTS.search(key.lower()) is not None and _EXPERTS.search(key.lower()) is None


PARTS = (
    *("quantization_config", "compression_config", "expert_quantization_config", "rope_scaling", "rope_parameters"),
    *("vision_config", "audio_config", "image_config", "video_config", "speech_config", "talker_config"),
    *("code2wav_config", "token2wav_config", "projector_config", "vit_config", "vision_tower_config", "auto_map"),
    *("task_specific_params", "linear_attn_config", "attention_other_setting", "generation_config"),
)
"""Keys of objects that describe something else than the decoder layers, or that are read elsewhere."""

LARGEST = sys.float_info.max
"""Largest number of a config: integers of JSON may be too large for a float."""


@dataclass(frozen=True)
class ConfigKeys:
    """The part of a `config.json` that describes MoE layers.

    Of several keys, the first one that is there counts. A missing one has the default of its model's config class, or
    else the `default` of the call; one that is null has the latter. Without a `default`, both are errors.

    Attributes:
        config: the part.
        source: name of the file, in messages.
        at: what goes before the keys in messages, such as `text_config.`.
        family: the family of the model.
        kind: its `model_type`, without `_text`.
        used: keys that were read.
    """

    config: Mapping[str, Any]
    source: str
    at: str
    family: Family
    kind: str = ""
    used: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> ConfigKeys:
        at, found = text_config(config)
        model_type = found.get("model_type", config.get("model_type"))
        kind = model_type.removesuffix("_text") if isinstance(model_type, str) else ""
        family = next((family for family in FAMILIES if kind in family.model_types), DEFAULT)
        keys = cls(found, source, at, family, kind)
        if not isinstance(model_type, str):
            keys.refuse("model_type", "a text", model_type)
        if family is DEFAULT and not any(keys.has(key) for key in NUM_EXPERTS_KEYS):
            keys.refuse("model_type", f"a model with experts ({' or '.join(NUM_EXPERTS_KEYS)})", model_type)
        return keys

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """What keys that are missing mean in transformers; empty for models that it does not have."""
        return defaults_of(self.kind)

    def first(self, names: Sequence[str]) -> str | None:
        """The first of these keys that is there, and not null if one is not."""
        there = [name for name in names if name in self.config]
        return next((name for name in there if self.config[name] is not None), there[0] if there else None)

    def refuse(self, key: str, expected: str, *got: Any) -> NoReturn:
        """Raise `ValueError` for the value of `key`, or for `got` in it."""
        value = got[0] if got else self.config.get(key)
        raise ValueError(f"{self.source}: {self.at}{key}: expected {expected}, got {shortened(value)}")

    def refuse_unread(self, whole: Mapping[str, Any], ignored: Collection[str]) -> None:
        """Raise `ValueError` for a key that looks as if it changed what the layers compute and that was not read.

        Args:
            whole: the config that this is a part of. Its own keys are looked at too.
            ignored: keys that the caller says have no influence.

        Of models that are known to be read rightly, keys with the value that transformers has by default are none.
        Of others, defaults of transformers that were not read are refused like keys of the file.
        """
        known = self.kind in self.family.model_types
        given = dict(self.config) if known else {**self.defaults, **self.config}
        harmless = {
            *WITHOUT_INFLUENCE,
            *(key for key in (*given, *whole) if isinstance(key, str) and is_of_other_part(key)),
        }
        keys = KnownKeys(self.used, harmless, LOOKS, PARTS, self.defaults if known else None)
        refuse_unread(given, keys, source=self.source, at=self.at, ignored=ignored)
        level: Mapping[str, Any] = whole
        path = ""
        # What stands around the part, but for the configs of other parts and for what the part says too.
        keys = replace(keys, used=())
        for part in self.at.split(".")[:-1]:
            around = {
                key: value
                for key, value in level.items()
                if key != part and not key.endswith("_config") and (key not in given or given[key] != value)
            }
            refuse_unread(around, keys, source=self.source, at=path, ignored=ignored)
            level, path = level[part], f"{path}{part}."

    def raw(self, key: str) -> Any:
        """The value of `key`; if it is missing, what that means in transformers, unless it is a list or an object."""
        self.used.add(key)
        if key in self.config:
            return self.config[key]
        value = self.defaults.get(key)
        return None if isinstance(value, list | tuple | Mapping) else value

    def positive(self, *names: str, default: int | None = None, alike: bool = True) -> int:
        """A positive integer. Keys that are not `alike` only stand in for the first one, and may say something else."""
        return self._integer(names, 1, "a positive integer", default, alike)

    def count(self, *names: str) -> int:
        return self._integer(names, 0, "an integer of at least 0", 0, True)

    def flag(self, *names: str, default: bool) -> bool:
        key, value = self._value(names, default)
        # Null is no flag: it is true for no model, unless one says so.
        if type(value) is not bool or (value and self.config.get(key, True) is None):
            self.refuse(key, "true or false", self.config.get(key, value))
        return value

    def fixed_flag(self, *names: str, value: bool) -> bool:
        """`value`, which the family says. Raise `ValueError` if a key says otherwise."""
        key = self._taken(names)
        if key is not None and self.config[key] not in (None, value):
            self.refuse(key, f"{str(value).lower()} in {self.kind}")
        return value

    def positive_float(self, *names: str, default: float) -> float:
        key, value = self._value(names, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST:
            self.refuse(key, "a positive number", value)
        return float(value)

    def choice(self, *names: str) -> Any:
        """One of several words; None if no key says it."""
        return self._value(names, None)[1]

    def has(self, key: str) -> bool:
        """Whether the config or its class in transformers has a value of `key` that is not null."""
        return self.config.get(key, self.defaults.get(key)) is not None

    def text(self, key: str) -> str:
        """A text; empty if there is none."""
        self.used.add(key)
        value = self.config.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a text")
        return value or ""

    def list_of_layers(self, key: str) -> Sequence[Any]:
        """A list with at most one item for each layer; empty if there is none."""
        self.used.add(key)
        value = self.config.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.refuse(key, "a list of layers")
        if len(value) > MAX_LAYERS:
            raise ValueError(f"{self.source}: {self.at}{key}: expected at most {MAX_LAYERS} layers, got {len(value)}")
        return value

    def dense_layers(self) -> int:
        """The number of layers without experts at the beginning."""
        kinds = self.defaults.get("mlp_layer_types") or ()
        first = next((place for place, kind in enumerate(kinds) if kind != "dense"), 0)
        return self._integer(DENSE_KEYS, 0, "an integer of at least 0", first, True)

    def block_types(self) -> Sequence[Any]:
        """What each decoder layer is, of models whose layers have one part each; empty for others."""
        stated = self.list_of_layers("layers_block_type") or self.text("hybrid_override_pattern")
        return stated or self.defaults.get("layers_block_type") or ()

    def number_of_layer(self, names: Sequence[str], layer: int | None) -> float | None:
        """The positive number of decoder layer `layer` in a list; None where it is 0, null or beyond the end.

        Without a `layer`, all layers must have the same.
        """
        key = self._taken(names)
        if key is None:
            return None
        values = self.list_of_layers(key)
        for value in values:
            if value is not None and (type(value) not in (int, float) or not 0 <= value <= LARGEST):
                self.refuse(key, "null, 0 or a positive number for each layer", value)
        if layer is None:
            if len(set(values)) > 1 and any(acts(key, value) for value in values):
                self.refuse(key, "one value for all layers where no layer is asked for")
            layer = 0
        return float(values[layer] or 0) or None if layer < len(values) else None

    def _integer(self, names: tuple[str, ...], least: int, expected: str, default: int | None, alike: bool) -> int:
        key, value = self._value(names, default, alike)
        if type(value) is not int or value < least:
            self.refuse(key, expected, value)
        return value

    def _value(self, names: tuple[str, ...], default: Any, alike: bool = True) -> tuple[str, Any]:
        """The key that counts, or all of them if none is there, and its value."""
        key = self._taken(names, alike)
        if key is None:
            known = (self.defaults[name] for name in names if self.defaults.get(name) is not None)
            return " or ".join(names), next(known, default)
        value = self.config[key]
        return key, default if value is None else value

    def _taken(self, names: Sequence[str], alike: bool = True) -> str | None:
        """The key that counts, marked as read. Raise `ValueError` if others that are `alike` say something else.

        A key that the model's config class has beside an earlier one means something else than that one.
        """
        own = [name for name in names if self.defaults.get(name) is not None]
        names = [name for name in names if name not in own[1:]]
        key = self.first(names)
        if key is None:
            return None
        self.used.update(names if alike else (key,))
        for other in names if alike else ():
            if self.config.get(other) is not None and self.config[other] != self.config[key]:
                self.refuse(other, f"{shortened(self.config[key])}, as {key} says")
        return key
