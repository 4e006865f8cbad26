"""The plugin for SGLang (entry point `sglang.srt.plugins`), which is off unless `MOE_RUNTIME_SGLANG` is set.

`MOE_RUNTIME_SGLANG=1` runs the routed experts of MoE layers here; the path of a YAML file does so with its settings
(docs/engines.md). SGLang imports this module in all its processes, so the rest of moe_runtime is imported only once it
is switched on.
"""

from __future__ import annotations

import os

VARIABLE = "MOE_RUNTIME_SGLANG"


def register() -> None:
    """Switch the adapter on if the environment asks for it; else do nothing.

    Raises `ValueError` for a wrong value of the variable, `ImportError` or `AttributeError` for an engine that has not
    what the adapter replaces.
    """
    if os.environ.get(VARIABLE, "").strip() in ("", "0"):
        return
    from moe_runtime.integrations.layer_settings import settings_of_variable
    from moe_runtime.integrations.sglang_experts import install

    install(settings_of_variable(VARIABLE))
