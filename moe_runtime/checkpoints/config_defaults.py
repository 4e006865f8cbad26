"""What keys mean that a `config.json` leaves out: what they mean in transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.family_table import text_config

CLASSES = {"kimi_k2": "deepseek_v3"}
"""Model types without a config class of their own in transformers, and that of the model whose class they use."""
TABLE = Path(__file__).with_name("config_defaults.json")
"""From the release of transformers that it names, by `python -m tests.support.config_defaults`."""


@cache
def defaults_of(model_type: str) -> Mapping[str, Any]:
    """The defaults of the config class of a model type, of its part for text; empty if none is known.

    They are those of the installed transformers, or else those of the table `TABLE`. Where the table is from the
    installed release, transformers is not imported, which takes a second.
    """
    model_type = CLASSES.get(model_type, model_type)
    release, defaults = table()
    if model_type in defaults and release == _installed_release():
        return defaults[model_type]
    found = installed(model_type)
    return defaults.get(model_type, {}) if found is None else found


@cache
def table() -> tuple[str, Mapping[str, Mapping[str, Any]]]:
    """The release of the table, and by model type the keys that are read, and those that look as if they were to be."""
    found = json.loads(TABLE.read_text(encoding="utf-8"))
    return found["transformers"], found["defaults"]


def _installed_release() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def installed(model_type: str) -> Mapping[str, Any] | None:
    """The defaults in the installed transformers; None if there is none, or if it does not have the model type."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        name = next((name for name in (f"{model_type}_text", model_type) if name in CONFIG_MAPPING), None)
        if name is None:
            return None
        made = CONFIG_MAPPING[name]().to_dict()
    except Exception:
        # Some classes cannot be made without arguments, and some installations lack what they import.
        return None
    return text_config(made)[1]
