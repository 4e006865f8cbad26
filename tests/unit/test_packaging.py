"""What is installed is exactly `moe_runtime`, importable from anywhere."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import moe_runtime
from tests.support.programs import ROOT
from tests.unit.test_import_graph import graph_of, module_files

pytestmark = pytest.mark.cpu_only

LINKED = ("kernels", "comm", "configs", "launch")
IN_CLONES_ONLY = tuple(f"moe_runtime.launch.{name}" for name in ("kernel_bench", "report", "research"))
"""Folders that the sdist has and the wheel has not: who installs runs none of it."""
TOPS = {"moe_runtime": ROOT / "moe_runtime"} | {f"moe_runtime.{name}": ROOT / name for name in LINKED}
FOLDERS = TOPS | {
    f"{package}.{path.parent.relative_to(folder).as_posix().replace('/', '.')}": path.parent
    for package, folder in TOPS.items()
    for path in (*sorted(folder.rglob("*.py")), *sorted(folder.rglob("*.cuh")))
    if path.parent != folder and not any((folder / part).is_symlink() for part in path.relative_to(folder).parts[:1])
}
"""Every folder with code in it, by the name of its package."""
MODULES = {
    package if path.stem == "__init__" else f"{package}.{path.stem}": path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.glob("*.py"))
}
INSTALLED = {
    package: folder
    for package, folder in FOLDERS.items()
    if not f"{package}.".startswith(tuple(f"{name}." for name in IN_CLONES_ONLY))
}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed, without what this process set for itself."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree, built from a copy because setuptools leaves its work beside the sources,
    and with the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=hidden)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=folder / "tree")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed_python(wheel: Path) -> Path:
    """Interpreter of a fresh environment with the wheel; what it depends on is borrowed from this one."""
    folder = wheel.parent / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=wheel.parent).strip())
    # A path file is not read through another one, so an editable install of this tree stays behind.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    return python


def test_wheel_holds_everything_and_nothing_beside_moe_runtime(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"moe_runtime", f"moe_runtime-{moe_runtime.__version__}.dist-info"}
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in INSTALLED.items()
        for kind in ("*.py", "*.cu*", "*.yaml", "*.json", "py.typed")
        for path in folder.glob(kind)
    }
    assert {name for name in names if name.startswith("moe_runtime/")} == expected
    assert "moe_runtime/py.typed" in names
    assert "moe_runtime/configs/tiny_cpu.yaml" in names
    assert "moe_runtime/checkpoints/config_defaults.json" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_sdist_has_what_the_wheel_leaves_out(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for package in FOLDERS:
        folder = FOLDERS[package].relative_to(ROOT)
        assert {f"{folder}/{path.name}" for kind in ("*.py", "*.cu*") for path in (ROOT / folder).glob(kind)} <= names


def test_what_is_installed_imports_nothing_that_is_not() -> None:
    """Not in a function either, where only a user of the wheel would find it."""
    texts = {module: path.read_text() for module, path in module_files(ROOT).items()}
    graph = graph_of(texts | {"moe_runtime": ""})
    outside = {module for module in graph if module.startswith(tuple(f"{name}." for name in IN_CLONES_ONLY))}
    assert len(outside) > len(IN_CLONES_ONLY)
    assert not [(module, sorted(graph[module] & outside)) for module in set(graph) - outside if graph[module] & outside]


def test_every_module_imports_from_an_installed_wheel(installed_python: Path, tmp_path: Path) -> None:
    script = f"""
import importlib, importlib.metadata, pathlib, sys
import torch
compiler = "torch._dynamo"
loaded = compiler in sys.modules
importlib.import_module("moe_runtime.layer")
assert (compiler in sys.modules) == loaded, "it takes as long as torch"
for name in {[name for name in sorted(MODULES) if name.rpartition(".")[0] in INSTALLED or name in INSTALLED]!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
import moe_runtime
assert importlib.metadata.version("moe_runtime") == moe_runtime.__version__
for name in moe_runtime.__all__:
    getattr(moe_runtime, name)
print(moe_runtime.load_config("tiny_cpu").layer.hidden_size)
"""
    assert int(run(installed_python, "-c", script, cwd=tmp_path)) > 0


def test_importing_the_package_loads_neither_torch_nor_triton(tmp_path: Path) -> None:
    script = "import sys, moe_runtime; print(sorted({'torch', 'triton', 'pydantic'} & set(sys.modules)))"
    assert run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(ROOT)) == "[]\n"


def test_public_names_agree() -> None:
    tree = ast.parse((ROOT / "moe_runtime" / "__init__.py").read_text())
    (offered,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = {
        alias.name: node.module.removeprefix("moe_runtime.")
        for node in offered.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("moe_runtime.")
        for alias in node.names
    }
    assert imports == moe_runtime._MODULE_OF
    assert sorted(imports) == sorted(moe_runtime.__all__)
    assert set(moe_runtime.__all__) <= set(dir(moe_runtime))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = moe_runtime.nothing  # type: ignore[attr-defined]


@pytest.mark.timeout(600)  # without its cache mypy reads all of torch
def test_a_users_type_checker_knows_what_calls_take_and_return(tmp_path: Path) -> None:
    """`nn.Module.__call__` takes and gives Any: without a declaration of our own, `layer(x)` is checked nowhere.

    What README tells to type passes too.
    """
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text("""
from typing import assert_type
import torch
from moe_runtime import MoELayer, Router

def step(layer: MoELayer, router: Router, x: torch.Tensor) -> None:
    topk_idx, topk_weights = router(x)
    assert_type(topk_idx, torch.Tensor)
    assert_type(layer(x, topk_idx=topk_idx, topk_weights=topk_weights), torch.Tensor)
    layer(x, topk_ids=topk_idx)  # type: ignore[call-arg]
""")
    options = ("--strict", "--follow-imports=silent", "--cache-dir", ROOT / ".cache" / "mypy")
    readme, example = (ROOT / "README.md").read_text(encoding="utf-8"), tmp_path / "example.py"
    example.write_text("".join(re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)))
    run(sys.executable, "-m", "mypy", *options, script, example, cwd=tmp_path, MYPYPATH=str(ROOT))


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_never_packages_of_their_own(name: str) -> None:
    link = ROOT / "moe_runtime" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert not list((ROOT / name).rglob("__init__.py"))


def test_every_folder_with_code_is_installed_but_those_for_clones() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {*INSTALLED, "moe_runtime.configs"}


def test_no_file_mentions_a_path_of_one_machine() -> None:
    """A place below somebody's home or checkout is right on one machine only."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(rb"(?<![\w.-])/(?:home|root|Users|work|workspace)/\w")
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            lines = path.read_bytes().splitlines()
            found += [f"{name}:{i}" for i, line in enumerate(lines, 1) if b"\0" not in line and pattern.search(line)]
    assert not found, found
