"""The table of `moe_runtime.checkpoints.config_defaults`, from the installed transformers.

`python -m tests.support.config_defaults` writes it anew.
"""

from __future__ import annotations

import json
from typing import Any

import transformers

from moe_runtime.checkpoints import config_defaults, family_table
from moe_runtime.checkpoints.config_keys import LOOKS, WITHOUT_INFLUENCE, is_of_other_part
from moe_runtime.checkpoints.unread_keys import acts

READ = {"hidden_size", "num_hidden_layers", "topk_method", "mlp_layer_types", "layers_block_type"} | {
    key
    for name, keys in vars(family_table).items()
    if name.endswith("_KEYS") and name not in ("TEXT_KEYS", "MTP_KEYS")
    for key in keys
}
"""Keys whose defaults are read."""


def model_types() -> list[str]:
    """Those that are known to be read rightly and have a config class."""
    families = (*family_table.FAMILIES, family_table.DEFAULT)
    listed = {config_defaults.CLASSES.get(kind, kind) for family in families for kind in family.model_types}
    return sorted(listed)


def defaults(model_type: str) -> dict[str, Any] | None:
    """What the table has of a model type; None if the installed transformers does not have it."""
    found = config_defaults.installed(model_type)
    if found is None:
        return None
    kept = {key: value for key, value in found.items() if key in READ or _looks(key)}
    made = {key: _short(value) for key, value in kept.items() if not isinstance(value, dict)}
    return {key: made[key] for key in sorted(made) if made[key] is not None and (key in READ or acts(key, made[key]))}


def _looks(key: str) -> bool:
    return key not in WITHOUT_INFLUENCE and LOOKS.search(key.lower()) is not None and not is_of_other_part(key)


def _short(value: Any) -> Any:
    """Of a list, what is read: dense layers at the beginning, and whatever follows them."""
    if not isinstance(value, list | tuple):
        return value
    dense = next((place for place, kind in enumerate(value) if kind != "dense"), len(value))
    return [*value[: dense + 1]] if set(value) <= {"dense", "sparse"} else list(value)


def table() -> dict[str, dict[str, Any]]:
    """The whole table."""
    return {kind: found for kind in model_types() if (found := defaults(kind)) is not None}


def main() -> None:
    """Write the table, a line for each model type."""
    lines = ",\n".join(f"    {json.dumps(kind)}: {json.dumps(found)}" for kind, found in table().items())
    text = f'{{\n  "transformers": "{transformers.__version__}",\n  "defaults": {{\n{lines}\n  }}\n}}\n'
    config_defaults.TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
