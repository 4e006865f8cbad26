"""What README tells a reader to type works: Python blocks run, YAML blocks are configs, commands and links exist.

Links of launch/results/README.md and of the notes on kernels, too.
"""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_runtime.config import load_config
from tests.programs import ROOT, without_interpreter
from tests.spawner import interpreter

pytestmark = pytest.mark.cpu_only

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "launch/results/README.md", *sorted(f"kernels/{path.name}" for path in ROOT.glob("kernels/*.md"))]
FENCE = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list[object]:
    """Fenced blocks in one of `languages`, as parameters called after their line."""
    return [
        pytest.param(match[2], id=f"line{README[: match.start()].count(chr(10)) + 1}")
        for match in FENCE.finditer(README)
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
    for module in re.findall(r"-m (moe_runtime[\w.]*)", text):
        assert find_spec(module), module
    for config in re.findall(r"--config[ =]([\w./-]+)", text):
        load_config(ROOT / config if config.endswith(".yaml") else config)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    targets = re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", file.read_text(encoding="utf-8"))
    assert targets
    for target in targets:
        path, _, heading = target.partition("#")
        linked = file.parent / path if path else file
        assert linked.exists(), target
        assert not heading or heading in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are written in links."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_result_is_linked() -> None:
    """A reader of the folder finds what each of its files is."""
    folder = ROOT / "launch" / "results"
    targets = re.findall(r"\]\(([^)\s]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert {path.name for path in folder.iterdir()} - {"README.md"} <= set(targets)


def test_readme_shows_code_and_a_config() -> None:
    assert blocks("python") and blocks("yaml")
