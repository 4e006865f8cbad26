"""How vLLM and SGLang call `deep_ep`, looked up in their sources where these are present: every call fits `Buffer`.

`tests/support/engine_sources.py` says how to name the sources; without them these tests skip.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from moe_runtime import deep_ep
from moe_runtime.deep_ep import Buffer
from tests.support.engine_sources import FUSED, SRT, sources_of

pytestmark = pytest.mark.cpu_only

MODULES = {
    "vllm": [
        f"{FUSED}.prepare_finalize.deepep_ht",
        f"{FUSED}.prepare_finalize.deepep_ll",
    ],
    "sglang": [f"{SRT}.layers.moe.token_dispatcher.deepep"],
}


def fits(call: ast.Call, method: Any) -> str | None:
    """What is wrong with the arguments of a call, as far as they are written out."""
    parameters = list(inspect.signature(method).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    names = [p.name for p in parameters]
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if len(call.args) > len(positional) and not any(isinstance(arg, ast.Starred) for arg in call.args):
        return f"{len(call.args)} arguments by position"
    unknown = [word.arg for word in call.keywords if word.arg is not None and word.arg not in names]
    return f"unknown {unknown}" if unknown else None


def calls_of(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Calls of `Buffer` and of its methods, by what they are called on: a name with `buffer` in it."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "Buffer":
            found.append(("__init__", node))
        if isinstance(node.func, ast.Attribute) and "buffer" in ast.unparse(node.func.value).lower():
            found.append((node.func.attr, node))
    return found


@pytest.mark.parametrize("engine", sorted(MODULES))
def test_every_call_of_an_engine_fits(engine: str) -> None:
    sources = sources_of(engine)
    seen = set()
    for module in MODULES[engine]:
        for name, call in calls_of(sources.tree(module)):
            method = getattr(Buffer, name, None)
            if method is None or isinstance(method, int):
                continue
            seen.add(name)
            problem = fits(call, method)
            assert problem is None, f"{module}: {ast.unparse(call)}: {problem}"
    assert {"get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine"} <= seen


@pytest.mark.parametrize("engine", sorted(MODULES))
def test_every_name_that_an_engine_imports_is_there(engine: str) -> None:
    sources = sources_of(engine)
    for module in MODULES[engine]:
        for node in ast.walk(sources.tree(module)):
            if isinstance(node, ast.ImportFrom) and node.module == "deep_ep":
                assert all(hasattr(deep_ep, alias.name) for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("deep_ep", "deep_ep.Buffer"):
                owner = deep_ep if ast.unparse(node.value) == "deep_ep" else Buffer
                assert hasattr(owner, node.attr), ast.unparse(node)


def test_a_call_that_does_not_fit_is_noticed() -> None:
    (wrong,) = (call for _, call in calls_of(ast.parse("self.buffer.dispatch(x, topk=ids)")))
    assert fits(wrong, Buffer.dispatch) == "unknown ['topk']"
    (many,) = (call for _, call in calls_of(ast.parse("buffer.get_next_low_latency_combine_buffer(a, b)")))
    assert fits(many, Buffer.get_next_low_latency_combine_buffer) == "2 arguments by position"
