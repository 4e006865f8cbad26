"""The cache of compiled kernels holds nothing that another user could have put there."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_runtime.kernels import kernel_cache

pytestmark = pytest.mark.cpu_only

NAME, CONTENT = "kernel.cubin", b"compiled"
OTHER_USER = 65534
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one file, two folders below that of the test; no warning was given before."""
    monkeypatch.setattr(kernel_cache, "_WARNED", set())
    place = tmp_path / "above" / "cache"
    kernel_cache.write(place, NAME, CONTENT)
    assert kernel_cache.read(place, NAME) == CONTENT
    return place


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_suffix(".moved")))


def replace_by(make: Change) -> Change:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files to another user")
    os.chown(path, OTHER_USER, OTHER_USER)


def rewrite(edit: Callable[[bytes], bytes]) -> Change:
    return lambda file: file.write_bytes(edit(file.read_bytes()))


FILES: dict[str, tuple[Change, str]] = {
    "of another user": (give_away, f"got user {OTHER_USER} and mode 0600"),
    "writable by a group": (lambda file: file.chmod(0o620), "got user .* and mode 0620"),
    "writable by all": (lambda file: file.chmod(0o602), "got user .* and mode 0602"),
    "a link": (link, "symbolic link"),
    "a pipe": (replace_by(os.mkfifo), "expected a regular file"),
    "a folder": (replace_by(Path.mkdir), "expected a regular file"),
    "empty": (rewrite(lambda _: b""), "expected the digest"),
    "cut off": (rewrite(lambda stored: stored[:-1]), "expected the digest"),
    "too long": (rewrite(lambda stored: stored + b"0"), "expected the digest"),
    "changed": (rewrite(lambda stored: stored[:-1] + b"D"), "expected the digest"),
    "without a digest": (rewrite(lambda _: CONTENT), "expected the digest"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_trusted_is_missing(case: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning per folder names the file; it can be written anew."""
    change, message = FILES[case]
    change(folder / NAME)
    for _ in range(2):
        assert kernel_cache.read(folder, NAME) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(f"{re.escape(str(folder / NAME))}: .*{message}", record.getMessage())
    if case != "a folder":
        kernel_cache.write(folder, NAME, CONTENT)
        assert kernel_cache.read(folder, NAME) == CONTENT


def test_a_file_under_another_name_is_missing(folder: Path) -> None:
    (folder / NAME).rename(folder / "other.cubin")
    assert kernel_cache.read(folder, "other.cubin") is None


FOLDERS: dict[str, Change] = {
    "the folder is another user's": give_away,
    "its group writes it": lambda folder: folder.chmod(0o770),
    "all write it": lambda folder: folder.chmod(0o707),
    "the one above is another user's": lambda folder: give_away(folder.parent),
    "all write the one above": lambda folder: folder.parent.chmod(0o777),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_cannot_be_trusted_is_neither_read_nor_written(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FOLDERS[case](folder)
    for _ in range(2):
        assert kernel_cache.read(folder, NAME) is None
        kernel_cache.write(folder, "new", CONTENT)
        kernel_cache.write(folder / "below", "new", CONTENT)
    assert [path.name for path in folder.iterdir()] == [NAME]
    place = folder.parent if "above" in case else folder
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "one for each folder"
    assert all(f"{place}: expected user" in message for message in messages)


def test_a_sticky_folder_above_is_trusted(folder: Path) -> None:
    """Others cannot rename what is not theirs there, as in /tmp. They can put files into it."""
    folder.parent.chmod(0o1777)
    assert kernel_cache.read(folder, NAME) == CONTENT
    folder.chmod(0o1777)
    assert kernel_cache.read(folder, NAME) is None


def test_the_folder_that_a_link_leads_to_counts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert kernel_cache.read(tmp_path / "link", NAME) == CONTENT
    folder.parent.chmod(0o777)
    assert kernel_cache.read(tmp_path / "link", NAME) is None


def test_folders_and_files_are_made_for_this_user_alone(folder: Path) -> None:
    """Whatever the umask is."""
    before = os.umask(0)
    try:
        kernel_cache.write(folder.parent / "wide" / "cache", NAME, CONTENT)
    finally:
        os.umask(before)
    made = folder.parent / "wide"
    assert [path.stat().st_mode & 0o7777 for path in (made, made / "cache")] == [0o700, 0o700]
    assert (made / "cache" / NAME).stat().st_mode & 0o7777 == 0o600
    assert kernel_cache.read(made / "cache", NAME) == CONTENT


def test_what_is_not_there_is_no_reason_to_warn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in (folder, folder / "none", folder / NAME / "below"):
        assert kernel_cache.read(place, "none") is None
    kernel_cache.write(folder / NAME / "below", NAME, CONTENT)
    assert caplog.records == [] and [path.name for path in folder.iterdir()] == [NAME]
