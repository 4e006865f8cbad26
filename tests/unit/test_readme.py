"""What README and the other pages tell a reader to type works, and what they name exists.

Python blocks run, YAML blocks are configs, and commands, modules, files, links and anchors exist.
"""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import moe_runtime
from moe_runtime import deep_ep, ops
from moe_runtime.config import load_config
from tests.support.programs import ROOT, without_interpreter
from tests.support.spawner import interpreter

pytestmark = pytest.mark.cpu_only

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
"""Pages whose blocks are run and whose paths are looked up. CHANGELOG.md also names what is gone."""
PAGES = [
    *GUIDES,
    "launch/results/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("kernels/**/*.md")),
]
FENCE = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
TEXT = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
FOLDERS = ("comm", "kernels", "moe_runtime", "launch", "configs", "tests", "docs", "examples")
MAX_README_LINES = 200


def blocks(*languages: str) -> list[object]:
    """Fenced blocks in one of `languages`, as parameters called after their page and line."""
    return [
        pytest.param(match[2], id=f"{Path(page).stem}-line{TEXT[page][: match.start()].count(chr(10)) + 1}")
        for page in GUIDES
        for match in FENCE.finditer(TEXT[page])
        if match[1] in languages
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_block_runs_as_written(code: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(code)
    done = subprocess.run(
        [interpreter(), script],
        cwd=ROOT,
        env=without_interpreter(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_block_is_a_config(text: str, tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(text)
    load_config(file)


@pytest.mark.parametrize("text", blocks("bash", "sh", "shell", "console"))
def test_commands_name_what_exists(text: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$?\s*make ([a-z][\w-]*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for config in re.findall(r"--config[ =]([\w./-]+)", text):
        load_config(ROOT / config if config.endswith(".yaml") else config)


@pytest.mark.parametrize("page", [page for page in GUIDES if page != "CHANGELOG.md"])
def test_named_programs_and_files_exist(page: str) -> None:
    for module in re.findall(r"-m (moe_runtime[\w.]*\w)", TEXT[page]):
        assert find_spec(module), module
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", TEXT[page]):
        assert list(ROOT.glob(path.rstrip("/"))), path


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    targets = re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", FENCE.sub("", TEXT[page]))
    for target in targets:
        path, _, heading = target.partition("#")
        linked = file.parent / path if path else file
        assert linked.exists(), target
        assert not heading or heading in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are written in links; of equal headings the first."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_result_is_linked() -> None:
    """A reader of the folder finds what each of its files is."""
    folder = ROOT / "launch" / "results"
    targets = re.findall(r"\]\(([^)\s]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert {path.name for path in folder.iterdir()} - {"README.md"} <= set(targets)


def test_readme_is_a_front_door() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES
    for language in ("python", "yaml", "bash"):
        assert any(match[1] == language for match in FENCE.finditer(README)), language
    linked = set(re.findall(r"\]\(([^)\s#]+)", README))
    assert {page for page in GUIDES if page != "README.md"} <= linked


@pytest.mark.parametrize("page", [page for page in GUIDES if page.startswith("docs/")])
def test_a_page_says_first_whom_it_is_for(page: str) -> None:
    first = TEXT[page].split("\n\n")[1]
    assert first.startswith("This page is for ") and not first.startswith("#")


@pytest.mark.parametrize("module", [moe_runtime, deep_ep])
def test_public_names_are_in_a_page(module: ModuleType) -> None:
    named = set(re.findall(r"\w+", "".join(TEXT[page] for page in GUIDES if page != "CHANGELOG.md")))
    assert set(module.__all__) <= named


def test_operations_and_what_makes_their_inputs_are_named() -> None:
    """Inverses go by the names of what they undo."""
    named = set(re.findall(r"\w+", TEXT["docs/operations.md"]))
    inverse = re.compile("^(un(?=pack|swizzle)|de(?=quantize))")
    assert {inverse.sub("", name) for name in ops.__all__ if name != "PrepackedWeights"} <= named


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony.split() == re.findall(r"^([a-z-]+):.* ## \S", makefile, re.MULTILINE)
    assert ".DEFAULT_GOAL := help" in makefile
