"""Putting `moe_runtime.deep_ep` under the name `deep_ep`: only where someone asks for it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAME = "deep_ep"
OURS = "moe_runtime.deep_ep"
MODULES = ("", ".buffer", ".utils", ".utils.envs", ".utils.event", ".utils.math", ".utils.testing")
OTHER_NAMES = {".buffers": "", ".buffers.legacy": ".buffer", ".buffers.elastic": ".elastic"}
"""Modules of DeepEP, by what is here in their place."""

PACKAGE = '''"""DeepEP's name for moe_runtime.deep_ep."""

from moe_runtime.deep_ep.alias import install_alias

install_alias()
'''


def install_alias(checkout: str | Path | None = None) -> None:
    """Let `import deep_ep` of this process give `moe_runtime.deep_ep`.

    Args:
        checkout: of DeepEP, for its tests: modules of `deep_ep.utils` that are not here, such as the references of
            tests/elastic, are imported from there.

    Raises `ValueError` where another `deep_ep` was imported before, and for a `checkout` that is none.
    """
    utils = None if checkout is None else _utils_of(checkout)
    ours = importlib.import_module(OURS)
    loaded = sys.modules.get(NAME)
    if loaded is not None and loaded is not ours and getattr(loaded, "__doc__", None) != PACKAGE.split('"""')[1]:
        raise ValueError(f"install_alias: expected to come before any import of {NAME}, got {loaded}")
    for module in (*MODULES, *OTHER_NAMES):
        sys.modules[NAME + module] = importlib.import_module(OURS + OTHER_NAMES.get(module, module))
    for module in OTHER_NAMES:  # of no module here, so that no import has made them attributes of their packages
        package, _, name = (NAME + module).rpartition(".")
        setattr(sys.modules[package], name, sys.modules[NAME + module])
    if utils is not None:
        sys.modules[NAME + ".utils"].__path__.append(str(utils))


def write_alias(folder: str | Path, checkout: str | Path | None = None) -> Path:
    """Write a package `deep_ep` into `folder` that imports `moe_runtime.deep_ep`; for `PYTHONPATH`.

    `checkout` is as of `install_alias`. Raises `ValueError` where `folder` has another `deep_ep`, and for a `checkout`
    that is none.
    """
    where = "" if checkout is None else repr(str(_utils_of(checkout).parents[1]))
    package = Path(folder) / NAME
    file = package / "__init__.py"
    head, _, _ = PACKAGE.partition("install_alias()")
    if package.exists() and not (file.is_file() and file.read_text().startswith(head)):
        raise ValueError(f"folder: expected one without another {NAME}, got {package}")
    package.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{head}install_alias({where})\n")
    return package


def _utils_of(checkout: str | Path) -> Path:
    """The folder of `deep_ep.utils` in a checkout of DeepEP."""
    utils = Path(checkout).resolve() / NAME / "utils"
    if not utils.is_dir():
        raise ValueError(f"checkout: expected one of DeepEP with {NAME}/utils, got {checkout}")
    return utils
