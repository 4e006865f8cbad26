"""Nothing imports upward: the import graph of the product, also what stands under `TYPE_CHECKING` or in a function."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import moe_runtime
from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

LINKED = ("kernels", "comm", "launch")
Graph = Mapping[str, frozenset[str]]


def module_files(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of the product; the linked folders by their names inside `moe_runtime`."""
    folders = {"moe_runtime": root / "moe_runtime"} | {f"moe_runtime.{name}": root / name for name in LINKED}
    found = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package == "moe_runtime" and parts[0] in (*LINKED, "configs"):
                continue
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def import_nodes(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Once for each text: to parse the product takes a second, and most tests change one module."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(text: str, module: str, modules: Mapping[str, object]) -> frozenset[str]:
    """Modules of the product that the text of `module` imports, wherever the import stands."""
    found = set()
    for node in import_nodes(text):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            assert node.module != "moe_runtime" or all(
                f"moe_runtime.{alias.name}" in modules for alias in node.names
            ), f"{module} imports a public name of moe_runtime: name the module that it lives in"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else str(node.module))
        else:
            found.update(alias.name for alias in node.names)
    return frozenset(name for name in found if name in modules and name != module)


def graph_of(texts: Mapping[str, str]) -> Graph:
    return {module: imports_of(text, module, texts) for module, text in texts.items()}


def rooms() -> list[list[str]]:
    """The layers that the docstring of `moe_runtime` draws, from the top: a line each, rooms separated by commas."""
    drawing = re.search(r"\n\n((?:    .+\n)+)", str(moe_runtime.__doc__))
    assert drawing is not None
    return [[room.strip() for room in line.split(",")] for line in drawing[1].splitlines()]


def level_of(module: str, layers: list[list[str]]) -> int:
    """How high a module stands, 0 being the lowest layer: that of the longest room whose name begins its own."""
    name = module.removeprefix("moe_runtime.")
    found = [
        (len(room), len(layers) - 1 - index)
        for index, line in enumerate(layers)
        for room in line
        if name == room or name.startswith(room + ".")
    ]
    assert found, f"{module} is in no room of the docstring of moe_runtime"
    return max(found)[1]


def upward_imports(graph: Graph, layers: list[list[str]]) -> list[str]:
    levels = {module: level_of(module, layers) for module in graph if module != "moe_runtime"}
    return [
        f"{module} (layer {levels[module]}) imports {other} (layer {levels[other]})"
        for module, others in graph.items()
        for other in others
        if module != "moe_runtime" and other != "moe_runtime" and levels[other] > levels[module]
    ]


def circle_in(graph: Graph) -> list[str]:
    """The modules of one circle, in order; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(graph) if (circle := visit(module, []))), [])


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    texts = {module: path.read_text() for module, path in module_files(ROOT).items()}
    # It only names what the package offers; names are imported when they are used.
    texts["moe_runtime"] = ""
    return texts


def test_no_module_imports_upward(texts: dict[str, str]) -> None:
    assert not upward_imports(graph_of(texts), rooms())


def test_there_is_no_circle(texts: dict[str, str]) -> None:
    assert not circle_in(graph_of(texts))


def test_folders_stand_on_each_other(texts: dict[str, str]) -> None:
    order = ("support", "comm", "kernels", "", "launch")

    def height(module: str) -> int:
        folder = module.removeprefix("moe_runtime").removeprefix(".").split(".")[0]
        return order.index(folder if folder in order else "")

    graph = graph_of(texts)
    assert not [f"{a} -> {b}" for a, others in graph.items() for b in others if height(b) > height(a)]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("moe_runtime.kernels.gemm.grouped_gemm", "from moe_runtime.layer import MoELayer"),
        ("moe_runtime.comm.signals", "if True:\n    from moe_runtime import config"),
        ("moe_runtime.placement.rebalance", "def f() -> None:\n    import moe_runtime.layer"),
        (
            "moe_runtime.kernels.exchange.interface",
            "if TYPE_CHECKING:\n    from moe_runtime.context import ExpertParallelContext",
        ),
    ],
)
def test_an_upward_import_is_found(texts: dict[str, str], module: str, line: str) -> None:
    assert module in texts
    graph = graph_of(texts | {module: texts[module] + "\n" + line + "\n"})
    found = upward_imports(graph, rooms())
    assert len(found) == 1 and found[0].startswith(module)


def test_a_circle_is_found(texts: dict[str, str]) -> None:
    lower, upper = "moe_runtime.kernels.formats.number_formats", "moe_runtime.kernels.formats.quantize"
    graph = graph_of(texts | {lower: texts[lower] + f"\nfrom {upper} import quantize_rows\n"})
    assert {lower, upper} <= set(circle_in(graph))
