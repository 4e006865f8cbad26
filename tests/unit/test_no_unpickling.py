"""The product unpickles nothing: a pickle from a peer, a store or a file runs the code of whoever wrote it."""

from __future__ import annotations

import ast

import pytest

from tests.support.programs import ROOT
from tests.unit.test_import_graph import module_files

pytestmark = pytest.mark.cpu_only

UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "send_object_list", "recv_object_list"),
    *("broadcast_object_list", "scatter_object_list"),
}
LOADERS = {"torch": ("weights_only", True), "np": ("allow_pickle", False), "numpy": ("allow_pickle", False)}
"""Modules whose `load` is safe only with this keyword."""


def unsafe(text: str) -> list[str]:
    """What in the text of a module may unpickle, or calls a collective of torch that does."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module)] if str(node.module).split(".")[0] in UNPICKLERS else []
            found += [alias.name for alias in node.names if alias.name in OBJECT_COLLECTIVES]
            found += [f"{node.module}.load" for alias in node.names if node.module in LOADERS and alias.name == "load"]
        elif isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
            found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            module = ast.unparse(node.func.value)
            if module in LOADERS:
                key, wanted = LOADERS[module]
                given = {one.arg: one.value for one in node.keywords}
                if not (isinstance(value := given.get(key), ast.Constant) and value.value is wanted):
                    found.append(f"{module}.load")
    return found


def test_no_module_unpickles() -> None:
    files = module_files(ROOT)
    assert len(files) > 100
    assert not {module: found for module, path in files.items() if (found := unsafe(path.read_text()))}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pickle", ["pickle"]),
        ("import os, dill.source as source", ["dill.source"]),
        ("def f():\n    from pickle import loads", ["pickle"]),
        ("dist.broadcast_object_list(told, 0)", ["broadcast_object_list"]),
        ("from torch.distributed import all_gather_object as gather", ["all_gather_object"]),
        ("gather = torch.distributed.gather_object", ["gather_object"]),
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=trusted)", ["torch.load"]),
        ("from torch import load", ["torch.load"]),
        ("np.load(file, allow_pickle=True)", ["np.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("import pickles, json; json.loads(text); library.load()", []),
    ],
)
def test_what_unpickles_is_found(line: str, found: list[str]) -> None:
    assert unsafe(line) == found
