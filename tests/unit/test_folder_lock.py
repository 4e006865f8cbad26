"""One process at a time writes to a folder, even if the one before was killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.config import MoELayerConfig
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.support.folder_lock import LOCK_FILE, locked_folder
from tests.support.interruptions import Stopped, contents, stopping
from tests.support.programs import python_path

HELD = """
import sys
from moe_runtime.support.folder_lock import locked_folder
with locked_folder(__import__("pathlib").Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.read()
"""
CONVERTS = """
import sys
from moe_runtime.checkpoints.conversion import convert_checkpoint
def wait(steps, total):
    yield next(steps)
    print("inside", flush=True)
    sys.stdin.read()
convert_checkpoint(sys.argv[1], sys.argv[2], "nvfp4", progress=wait)
"""


@contextmanager
def another(program: str, *arguments: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that stays inside until it is told or killed."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": python_path()}, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "inside\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_lock_file_that_is_another_file_is_refused(make: Any, tmp_path: Path) -> None:
    (other := tmp_path / "other").touch(0o600)
    (folder := tmp_path / "folder").mkdir()
    make(other, folder / LOCK_FILE)
    with pytest.raises(ValueError, match=rf"{LOCK_FILE}: (cannot be opened|expected an empty file)"):
        with locked_folder(folder):
            pass
    assert stat.S_IMODE(other.stat().st_mode) == 0o600 and (folder / LOCK_FILE).exists()
    with pytest.raises(ValueError, match=rf"{LOCK_FILE}: cannot be opened: No such file"):
        with locked_folder(tmp_path / "absent"):
            pass


def refused(folder: Path) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(str(folder))}: another process writes to this folder$")


def test_a_second_process_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    with another(HELD, tmp_path) as process:
        for _ in range(2):  # a refusal takes nothing away from who is inside
            with refused(tmp_path), locked_folder(tmp_path):
                raise AssertionError
        process.communicate("", timeout=60)
        assert process.returncode == 0
    with locked_folder(tmp_path), refused(tmp_path), locked_folder(tmp_path):
        raise AssertionError
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    with another(HELD, tmp_path) as process:
        process.kill()
        process.wait(timeout=60)
    assert (tmp_path / LOCK_FILE).exists()
    for _ in range(2):
        with locked_folder(tmp_path):
            pass
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("another_follows", [False, True])
def test_a_file_that_was_removed_before_it_was_locked_does_not_count(
    another_follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever locks it would be alone with a file that nobody else finds."""
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        (tmp_path / LOCK_FILE).unlink()
        if another_follows:
            (tmp_path / LOCK_FILE).touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with refused(tmp_path), locked_folder(tmp_path):
        raise AssertionError
    assert (tmp_path / LOCK_FILE).exists() == another_follows


def test_the_file_of_a_killed_process_may_be_opened_by_everybody(tmp_path: Path) -> None:
    """Whatever files of that process may be otherwise."""
    before = os.umask(0o077)
    try:
        with locked_folder(tmp_path):
            assert stat.S_IMODE((tmp_path / LOCK_FILE).stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_a_file_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, *arguments: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", forbidden)
    advice = "; the file may be removed if no process writes to its folder"
    for message in ("", advice):
        path = re.escape(str(tmp_path / LOCK_FILE))
        with pytest.raises(ValueError, match=f"^{path}: cannot be opened: Permission denied{message}$"):
            with locked_folder(tmp_path):
                raise AssertionError
        (tmp_path / LOCK_FILE).write_bytes(b"")


def test_another_users_file_may_stay_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode, and in a folder such as /tmp the file itself, are not for others to change."""

    def forbidden(*arguments: Any, **settings: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchmod", forbidden)
    monkeypatch.setattr(Path, "unlink", forbidden)
    for _ in range(2):
        with locked_folder(tmp_path), refused(tmp_path), locked_folder(tmp_path):
            raise AssertionError
    assert (tmp_path / LOCK_FILE).exists()


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", missing)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: cannot be locked: No locks available$"):
        with locked_folder(tmp_path):
            raise AssertionError


def test_two_conversions_into_one_folder(tmp_path: Path, seed: int) -> None:
    """The second is refused, and has changed nothing; it goes on where the first was killed."""
    source, target, whole = tmp_path / "source", tmp_path / "target", tmp_path / "whole"
    sizes = MoELayerConfig(hidden_size=64, intermediate_size=32, num_experts=2, top_k=1, max_tokens_per_rank=1)
    write_qwen3_moe_checkpoint(source, sizes, seed=seed, num_shards=2)
    convert_checkpoint(source, whole, "nvfp4")
    with another(CONVERTS, source, target) as process:
        before = contents(target)
        with refused(target):
            convert_checkpoint(source, target, "nvfp4")
        assert contents(target) == before
        process.kill()
        process.wait(timeout=60)
    with pytest.raises(Stopped):
        convert_checkpoint(source, target, "nvfp4", progress=stopping(0))
    convert_checkpoint(source, target, "nvfp4")
    assert contents(target) == contents(whole)
