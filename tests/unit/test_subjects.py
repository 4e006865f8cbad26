"""Each test file belongs to a subject of the Makefile, and CONTRIBUTING.md says which to run after a change."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

MAKEFILE = (ROOT / "Makefile").read_text()
SUBJECTS = re.findall(r"^test-(\w+):", MAKEFILE, re.MULTILINE)
ALONE = "tests/engine/"
"""`make engine-test` runs these."""


def files_of(target: str) -> set[str]:
    """Test files that the target gives to pytest."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    (command,) = (line for line in done.stdout.splitlines() if " -m pytest " in line)
    named = [ROOT / word for word in command.split() if word.startswith("tests/")]
    assert named and all(path.exists() for path in named), command
    found = {file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return {file.relative_to(ROOT).as_posix() for file in found}


def test_each_test_file_belongs_to_a_subject() -> None:
    assert {"exchange", "gemm", "checkpoints", "engines", "tools"} <= set(SUBJECTS)
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    subjects = set().union(*(files_of(f"test-{subject}") for subject in SUBJECTS))
    assert {file for file in files if not file.startswith(ALONE)} == subjects


def test_quick_tests_are_of_several_subjects() -> None:
    quick = files_of("quick")
    assert all(
        quick & files_of(f"test-{subject}") for subject in ("exchange", "gemm", "layers", "checkpoints", "tools")
    )


def test_each_folder_of_the_product_has_a_line_that_says_what_to_run() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (table,) = re.findall(r"^\| changed \| run \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert set(re.findall(r"\btest-(\w+)", table)) == set(SUBJECTS)
    named = {name.rstrip("/") for line in table.splitlines() for name in re.findall(r"`([\w/]+)/`", line.split("|")[1])}
    top = ("comm", "kernels", "moe_runtime", "launch", "configs")
    folders = {
        path.relative_to(ROOT).as_posix()
        for name in top
        for path in (ROOT / name).iterdir()
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__"
    }
    assert len(folders) > 10
    assert not {
        folder for folder in folders if folder not in named and folder.split("/")[0] not in named - {"moe_runtime"}
    }
