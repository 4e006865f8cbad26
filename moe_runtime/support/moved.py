"""Modules that moved: their old names import the new ones for one release, with a `DeprecationWarning`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from moe_runtime.support.deprecation import warn_renamed

MOVED: dict[str, str] = {}
"""Old name -> new name, both below `moe_runtime`."""

PACKAGE = __name__.split(".")[0]


class _MovedModule(Loader):
    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warn_renamed(name, self.new, stacklevel=2)
        sys.modules[name] = import_module(self.new)


class MovedModules(MetaPathFinder):
    """Finds the old names in `MOVED`; asked last, so that it costs nothing where a module exists."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname.removeprefix(f"{PACKAGE}."))
        return None if new is None else ModuleSpec(fullname, _MovedModule(f"{PACKAGE}.{new}"))


def install() -> None:
    """Let `import` find the old names. Safe to call twice."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
