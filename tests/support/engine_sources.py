"""Sources of vLLM and SGLang, read and not imported: what names they define, with which parameters.

`MOE_RUNTIME_VLLM_SOURCES` and `MOE_RUNTIME_SGLANG_SOURCES` name the folder in which the package lies, such as that of
an unpacked wheel. Without them an installed package is read.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

FUSED = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization"
SRT = "sglang.srt"


def find_sources(engine: str) -> Sources | None:
    """The sources of `vllm` or `sglang`; None where there are none."""
    given = os.environ.get(f"MOE_RUNTIME_{engine.upper()}_SOURCES")
    if given:
        return Sources(Path(given))
    spec = importlib.util.find_spec(engine)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return Sources(Path(folders[0]).parent) if folders else None


def sources_of(engine: str) -> Sources:
    """The sources of an engine; the test is skipped where there are none."""
    found = find_sources(engine)
    if found is None:
        pytest.skip(f"no sources of {engine}: MOE_RUNTIME_{engine.upper()}_SOURCES names none, none is installed")
    return found


class Sources:
    """The modules below `root`. Names that are not there are an `AssertionError` that says which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}

    def path(self, module: str) -> Path:
        """The file of a module."""
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        raise AssertionError(f"{module}: no such module below {self.root}")

    def text(self, module: str) -> str:
        return self.path(module).read_text()

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self.text(module))
        return self._trees[module]

    def find(self, module: str, name: str) -> Any:
        """The definition of a function, a class or, as `Class.method`, a method."""
        body: list[ast.stmt] = self.tree(module).body
        node: ast.AST | None = None
        for part in name.split("."):
            node = next((each for each in body if getattr(each, "name", None) == part), None)
            assert node is not None, f"{module}: no {name}"
            body = getattr(node, "body", [])
        return node

    def parameters(self, module: str, name: str) -> list[str]:
        """Names of the parameters of a function or method, without `self` and `cls`."""
        arguments = self.find(module, name).args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return [each for each in names if each not in ("self", "cls")]

    def members(self, module: str, name: str) -> set[str]:
        """What a class has: methods, fields, attributes that methods set, and names of buffers and parameters."""
        found: set[str] = set()
        for node in self.find(module, name).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
            if isinstance(node, ast.FunctionDef):
                found |= {node.name} | _set_by(node)
        return found

    def bases(self, module: str, name: str) -> set[str]:
        """The base classes of a class, as they are written."""
        return {ast.unparse(base) for base in self.find(module, name).bases}

    def constants(self, module: str, name: str) -> set[Any]:
        """All constants in a function or class."""
        return {node.value for node in ast.walk(self.find(module, name)) if isinstance(node, ast.Constant)}

    def exported(self, module: str) -> set[str]:
        """Names that a module defines or imports at its top."""
        found: set[str] = set()
        for node in self.tree(module).body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                package = module if self.path(module).name == "__init__.py" else module.rpartition(".")[0]
                found |= self.exported(f"{package}.{node.module}" if node.level else str(node.module))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found

    def keywords_of_call(self, module: str, function: str, called: str) -> list[str]:
        """Names of the keyword arguments, and `*` for each other one, with which `function` calls `called`."""
        for node in ast.walk(self.find(module, function)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == called:
                return [*("*" for _ in node.args), *(str(each.arg) for each in node.keywords)]
        raise AssertionError(f"{module}: {function} does not call {called}")

    def run(self, module: str, names: list[str], given: dict[str, Any], keep: set[str] | None = None) -> dict[str, Any]:
        """Run the definitions `names` of a module, undecorated, with the names `given`; of classes only `keep`."""
        nodes = [self.find(module, name) for name in names]
        for node in nodes:
            node.decorator_list = []
            if keep is not None:
                node.body = [each for each in node.body if getattr(each, "name", None) in keep]
        future = ast.parse("from __future__ import annotations").body
        program = ast.fix_missing_locations(ast.Module([*future, *nodes], type_ignores=[]))
        space = dict(given)
        exec(compile(program, str(self.path(module)), "exec"), space)
        self._trees.pop(module, None)
        return space


def _set_by(method: ast.FunctionDef) -> set[str]:
    """Attributes of `self` that a method sets, also as buffers and parameters."""
    found = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "self.register_buffer",
            "self.register_parameter",
        ):
            found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return found
