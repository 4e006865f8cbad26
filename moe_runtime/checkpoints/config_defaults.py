"""What keys mean that a `config.json` leaves out: what they mean in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from moe_runtime.checkpoints.family_table import text_config

CLASSES = {"kimi_k2": "deepseek_v3"}
"""Model types without a config class of their own in transformers, and that of the model whose class they use."""


@cache
def defaults_of(model_type: str) -> Mapping[str, Any]:
    """The defaults of the config class of a model type, of its part for text; empty if none is known.

    They are those of the installed transformers, or else those of `TABLE`.
    """
    model_type = CLASSES.get(model_type, model_type)
    found = _installed(model_type)
    return TABLE.get(model_type, {}) if found is None else found


def _installed(model_type: str) -> Mapping[str, Any] | None:
    """From the installed transformers; None if there is none, or if it does not have the model type."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        name = next((name for name in (model_type, f"{model_type}_text") if name in CONFIG_MAPPING), None)
        if name is None:
            return None
        made = CONFIG_MAPPING[name]().to_dict()
    except Exception:
        # Some classes cannot be made without arguments, and some installations lack what they import.
        return None
    return text_config(made)[1]


TABLE: dict[str, dict[str, Any]] = {}
