"""Copies of loaded experts in host memory, in files of /dev/shm, from which processes that start again load them.

There is a folder for each layer of a checkpoint in one form, and in it a safetensors file for each expert. So ranks of
one host share the copies of replicas, and a rank finds its experts also after another placement was made.

A file appears under its name when it is complete; a writer that is killed before leaves nothing. A file is used if it
says that it is of the same checkpoint files (path, size, time of change), the same layer and the same form, and if its
tensors have the expected dtypes and shapes. Another one is removed, with a line in the log. The bytes of the tensors
are not checked: nobody else can write them, since folders must belong to this user (`support/trusted_folders.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from moe_runtime.checkpoints.files import SafetensorsFile, parsed_json
from moe_runtime.checkpoints.writer import DTYPE_NAMES
from moe_runtime.support.arguments import check_path
from moe_runtime.support.host_memory import memory_bytes
from moe_runtime.support.trusted_folders import distrust, make_trusted, trusted_folder

_LOG = logging.getLogger(__name__)

VARIABLE = "MOE_RUNTIME_KEPT_WEIGHTS"
"""Environment variable: the folder of all copies."""
SHARED_MEMORY = "/dev/shm"
RESERVE = 8
"""One part in so many stays free, of the file system and of the memory."""

_FOLDER = re.compile("[0-9a-f]{24}").fullmatch
_FILE = re.compile(r"expert-[0-9]{1,5}\.safetensors").fullmatch
_KEY = "moe_runtime kept"
_WANTED_FOR = "experts that are kept in host memory"

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def kept_folder() -> Path:
    """Where the copies are: `MOE_RUNTIME_KEPT_WEIGHTS` of the environment, else a folder of this user in /dev/shm."""
    return Path(os.environ.get(VARIABLE) or f"{SHARED_MEMORY}/moe_runtime-weights-{os.geteuid()}")


@dataclass(frozen=True)
class Room:
    """How much may be kept in a folder.

    Attributes:
        free_bytes: of the file system, or of the memory where that is less.
        usable_bytes: without the part that stays free (`RESERVE`).
    """

    free_bytes: int
    usable_bytes: int

    @classmethod
    def of(cls, folder: Path) -> Room:
        """That of the file system of `folder`, which need not exist. Raises `OSError` where that cannot be seen."""
        there = next(path for path in (folder, *folder.parents) if path.exists())
        found, memory = os.statvfs(there), memory_bytes()
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        usable = min(free - total // RESERVE, memory["available"] - memory["total"] // RESERVE)
        return cls(min(free, memory["available"]), max(usable, 0))


class KeptFiles:
    """The copies of the experts of one layer in one form.

    Args:
        about: what they are of, such as path, layer and formats, as JSON has it; other values are other copies.
        stamps: size and time of change of the files that they were read from; copies of other stamps are outdated.

    Attributes:
        folder: where they are.
        full: why no more is kept; None while there is room.
    """

    def __init__(self, about: Mapping[str, object], stamps: Mapping[str, object]) -> None:
        self._about = json.loads(json.dumps(about))
        # One text: the library writes several in any order.
        self._metadata = {_KEY: json.dumps({"about": about, "files": stamps}, sort_keys=True)}
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = kept_folder() / name
        self.full: str | None = None
        try:
            self._trusted = trusted_folder(self.folder, self._distrust) is not None
        except OSError as error:
            self._trusted = False
            self._distrust(str(error))

    def find(self, expert: int, shapes: Shapes) -> SafetensorsFile | None:
        """The open file of an expert; None if there is none. One that cannot be used is removed.

        Args:
            expert: its id.
            shapes: dtype and shape of each of its tensors by name.
        """
        path = self._path(expert)
        if not self._trusted or not os.path.lexists(path):
            return None
        try:
            if (reason := distrust(path.lstat())) is not None:
                raise ValueError(f"{path}: {reason}")
            file = SafetensorsFile(path, _WANTED_FOR)
        except FileNotFoundError:
            return None  # another rank has removed it
        except (ValueError, OSError) as error:
            self.set_aside(expert, error)
            return None
        entries = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
        if file.metadata != self._metadata:
            same = _about(file) == self._about
            problem = "the checkpoint has changed since" if same else "of something else"
        elif entries != {name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in shapes.items()}:
            problem = "other tensors than expected"
        else:
            return file
        file.close()
        self.drop(expert, f"{path}: {problem}")
        return None

    def set_aside(self, expert: int, error: Exception) -> None:
        """`drop` the copy of an expert for what it holds; one that cannot be read for now is logged alone.

        That may be right, where too many files are open, say.
        """
        if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
            _LOG.warning("a copy of experts in host memory is not used: %s", error)
        else:
            self.drop(expert, str(error))

    def drop(self, expert: int, reason: str) -> None:
        """Remove the copy of an expert, with `reason` in the log."""
        _LOG.warning("a copy of experts in host memory is not used and removed: %s", reason)
        with suppress(OSError):
            self._path(expert).unlink()

    def keep(self, expert: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keep the tensors of an expert, on any device, unless there is a copy; whether there is one then.

        Where there is no room, and where the folder cannot be written, nothing is kept from then on (`full`).
        """
        if self.full is None and self._trusted:
            try:
                data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, self._metadata)
                self._write(self._path(expert), data)
            except OSError as error:
                self.full = f"{self.folder}: {error.strerror}"
        return self.full is None and self._trusted

    def _write(self, path: Path, data: bytes) -> None:
        room = Room.of(path)
        if len(data) > room.usable_bytes:
            self.full = (
                f"{self.folder}: {room.free_bytes} bytes are free in file system and memory, of which one in {RESERVE} "
                "of all stays so"
            )
            return
        if make_trusted(self.folder, self._distrust) is None:
            self._trusted = False
            return
        # Without a name until it is complete: the system frees it if this process is killed.
        descriptor = os.open(self.folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            with suppress(FileExistsError):  # A rank with a replica was faster.
                # With `src_dir_fd` Python calls linkat, which can follow a link; link does not.
                os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)

    def _path(self, expert: int) -> Path:
        return self.folder / f"expert-{expert}.safetensors"

    def _distrust(self, reason: str) -> None:
        _LOG.warning("experts are not kept in host memory: %s", reason)


@dataclass(frozen=True)
class KeptLayer:
    """What is kept of a layer in one form.

    Attributes:
        folder: where.
        about: what it is of, as it was kept; empty where no file says it.
        files: one for each expert.
        num_bytes: of these.
    """

    folder: Path
    about: dict[str, Any]
    files: tuple[Path, ...]
    num_bytes: int


def kept_layers() -> list[KeptLayer]:
    """All that is kept. Raises `ValueError` where others could have written to the folder, or it cannot be read."""
    root = kept_folder()
    found = []
    try:
        if not root.exists():
            return []
        if not root.is_dir():
            _refuse(f"expected a folder, {root} is none")
        if trusted_folder(root, _refuse) is None:
            raise AssertionError("it raises")
        for folder in sorted(path for path in root.iterdir() if _FOLDER(path.name) and path.is_dir()):
            files = tuple(sorted(path for path in folder.iterdir() if _FILE(path.name)))
            sizes = [size for path in files if (size := _size(path)) is not None]
            about = next(_abouts(files), {})
            found.append(KeptLayer(folder, about, files, sum(sizes)))
    except OSError as error:
        raise ValueError(f"{VARIABLE}: {root}: {error.strerror}") from error
    return found


def free_kept(checkpoint: str | Path | None = None) -> int:
    """Remove what is kept of a checkpoint, or everything. Processes that run need none of it.

    Args:
        checkpoint: its folder; None for all.

    Returns:
        How many bytes have become free.

    Raises `ValueError` as `kept_layers`, and where files cannot be removed, after all others have been.
    """
    source = None if checkpoint is None else str(check_path("checkpoint", checkpoint).resolve())
    freed, problems = 0, []
    for layer in kept_layers():
        if source is not None and layer.about.get("checkpoint") != source:
            continue
        try:
            for path in layer.files:
                path.unlink(missing_ok=True)
            freed += layer.num_bytes
            layer.folder.rmdir()
        except OSError as error:
            # Another process has removed it, or has kept something in it since, or it holds other files.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                problems.append(f"{layer.folder}: cannot be removed: {error.strerror}")
    if problems:
        raise ValueError("; ".join(problems))
    return freed


def _abouts(files: tuple[Path, ...]) -> Iterator[dict[str, Any]]:
    """What readable ones of these files say that they are of."""
    for path in files:
        with suppress(ValueError):
            file = SafetensorsFile(path, _WANTED_FOR)
            file.close()
            if about := _about(file):
                yield about


def _about(file: SafetensorsFile) -> dict[str, Any]:
    """What a file says that it is of; empty where it does not."""
    with suppress(ValueError):
        said = parsed_json(str(file.metadata.get(_KEY)).encode(), 1000)
        if isinstance(said, dict) and isinstance(about := said.get("about"), dict):
            return about
    return {}


def _size(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _refuse(reason: str) -> None:
    raise ValueError(f"{VARIABLE}: {reason}")
