"""Reads the safetensors files of a folder: headers are checked against the file, tensors are read into own memory.

The format is safetensors (github.com/huggingface/safetensors): eight bytes of length, a JSON header with dtype, shape
and byte range of each tensor, then these bytes. Files are read, not mapped: mapped pages would count as memory of the
process on top of the tensors made from them, and arrive a few kilobytes at a time from a disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch

from moe_runtime.support.arguments import describe
from moe_runtime.support.regular_files import open_regular, read_regular

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}

MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as in the safetensors library, and of an index."""

MAX_HEADER_TENSORS = 500_000
"""Most tensors of one file. Layers of 512 quantized experts have 6144 of them, and 60 such layers fit."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor, as in torch."""

MAX_JSON_BYTES = 1 << 25
"""Most bytes of a `config.json`, which may say for every linear of a model how it is quantized."""

MAX_JSON_VALUES = 1_000_000
"""Most values in a JSON file: an index has one for each tensor of the model."""

DROPPED_BYTES = 1 << 20
"""Reads of at least this many bytes leave the page cache again, if the files are too large to stay there."""

BEGINNING_BYTES = 4096
"""Bytes of each tensor that `TensorFiles.beginnings` reads."""


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: `num_bytes` bytes from `start` of its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """One file, open for reading until it is closed or garbage collected.

    Args:
        path: path of the file.
        wanted_for: what the file is needed for, in error messages.
        drop: whether large reads leave the system's page cache again.

    Attributes:
        path: path of the file.
        entries: its tensors by name, in the order of the header.
        metadata: the strings of the header's `__metadata__`.
        digest: beginning of the SHA-256 of the header and its length, which determines the file's size.

    Raises:
        ValueError: a file that is missing, truncated, longer than its header says, or of another format; names it.
    """

    def __init__(self, path: Path, wanted_for: str = "the tensors of its index", *, drop: bool = False) -> None:
        self.path = path
        self._drop = drop
        try:
            self._file = open_regular(path)
        except FileNotFoundError:
            raise ValueError(f"{path}: shard is missing (wanted for {wanted_for})") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror} (wanted for {wanted_for})") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error} (wanted for {wanted_for})") from None
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            header = _header_bytes(self._file)
            self.entries, self.metadata = _read_header(self._file, header)
        except (ValueError, OSError, RecursionError) as error:
            self.close()
            raise ValueError(f"{path}: broken or cut off (wanted for {wanted_for}): {error}") from error
        self.digest = _digest(header)

    def close(self) -> None:
        self._close()

    def stamp(self) -> list[int]:
        """As `stamp_of`, of what is open. By now another file may have its name."""
        return _stamp(os.fstat(self._file))

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
        self.read(name, out)
        return out

    def read(self, name: str, out: torch.Tensor, first_byte: int = 0) -> None:
        """Fill the contiguous CPU tensor `out` from byte `first_byte` of the tensor `name`."""
        if not out.numel():
            return
        target = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        position, done = self.entries[name].start + first_byte, 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], position + done)
            if count == 0:
                raise ValueError(f"{self.path}: tensor {name}: the file ends within it")
            done += count
        if self._drop and len(target) >= DROPPED_BYTES:
            os.posix_fadvise(self._file, position, len(target), os.POSIX_FADV_DONTNEED)


class TensorFiles:
    """The tensors of a checkpoint by name, from one file or several; opens each shard on first use.

    Attributes:
        folder: the folder of `model.safetensors` or `model.safetensors.index.json`.
        index: path of the index, or of the single file.

    Raises:
        ValueError: neither file is there, the index is broken, or there is a `model.safetensors` too that the index
            does not name; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, SafetensorsFile] = {}
        # The page cache cannot hold files this large until the next read. Its new pages only evict others, which slows
        # down every allocation, here of the weights.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._drop = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file()) > memory // 2
        self._shard_of: dict[str, Any] | None = None
        self.index = folder / INDEX_FILE
        if self.index.exists():
            shard_of = read_json(self.index, MAX_HEADER_BYTES).get("weight_map")
            if not isinstance(shard_of, dict):
                raise ValueError(f"{self.index}: weight_map: expected a mapping from tensor to shard")
            others = any(shard != SINGLE_FILE for shard in shard_of.values())
            if others and (folder / SINGLE_FILE).is_file():
                # With both present, transformers reads the single file.
                raise ValueError(
                    f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE} with its shards, found both: one is stale"
                )
            self._shard_of = shard_of
            return
        self.index = folder / SINGLE_FILE
        if not self.index.exists():
            raise ValueError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found neither")

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all open files. Safe to call twice."""
        while self._open:
            self._open.popitem()[1].close()

    def names(self) -> list[str]:
        """Every tensor of the checkpoint, in the order of the index or of the single file's header."""
        if self._shard_of is not None:
            return list(self._shard_of)
        return list(self._opened(SINGLE_FILE, "the names of its tensors").entries)

    def shards(self) -> dict[str, list[str]]:
        """Names of tensors by file name, both in the order of the index."""
        found: dict[str, list[str]] = {}
        for name in self.names():
            found.setdefault(self.shard_of(name), []).append(name)
        return found

    def __contains__(self, name: str) -> bool:
        if self._shard_of is not None:
            return name in self._shard_of
        return name in self._opened(SINGLE_FILE, name).entries

    def unlisted(self, first: str) -> list[str]:
        """Tensors whose names begin with `first` that lie beside others of these, and that the index leaves out.

        Programs that read whole files find them. Files that are not here are not looked into.
        """
        if self._shard_of is None:
            return []
        shards = {self.shard_of(name) for name in self._shard_of if name.startswith(first)}
        shards = {shard for shard in shards if (self.folder / shard).is_file()}
        entries = (name for shard in sorted(shards) for name in self._opened(shard, f"the names in {shard}").entries)
        return [name for name in entries if name.startswith(first) and name not in self._shard_of]

    def shard_of(self, name: str) -> str:
        """Name of the file that holds a tensor. Raises `ValueError` if the index does not have it."""
        if self._shard_of is None:
            return SINGLE_FILE
        if name not in self._shard_of:
            raise ValueError(f"{self.index}: tensor {name} is missing")
        shard = self._shard_of[name]
        if not isinstance(shard, str) or os.path.basename(shard) != shard or shard in ("", ".", "..") or "\0" in shard:
            got = shortened(shard)
            raise ValueError(f"{self.index}: tensor {name}: expected the name of a file in its folder, got {got}")
        return shard

    def entry(self, name: str) -> TensorEntry:
        """Dtype and shape of a tensor, from the header of its file. Raises `ValueError` if it is missing."""
        return self._find(name)[1]

    def check(self, name: str, shape: tuple[int, ...], dtypes: Iterable[str]) -> TensorEntry:
        """The entry of a tensor. Raises `ValueError` naming file and tensor for another shape or dtype."""
        entry = self.entry(name)
        if entry.dtype not in dtypes:
            raise self.wrong(name, f"expected {' or '.join(dtypes)}, got {entry.dtype}")
        if entry.shape != shape:
            raise self.wrong(name, f"expected shape {list(shape)}, got {list(entry.shape)}")
        return entry

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._find(name)[0].path

    def wrong(self, name: str, text: str) -> ValueError:
        """The error for a tensor of which `text` says what was expected; it names the file and the tensor."""
        return ValueError(f"{self.path_of(name)}: tensor {name}: {text}")

    def read(
        self, name: str, shape: tuple[int, ...], dtypes: Iterable[str], *, item: int | None = None
    ) -> torch.Tensor:
        """The tensor `name`, on the CPU, or only `item` of its first dimension.

        `shape` and `dtypes` must be those of the whole tensor, which is checked before a byte of it is read. Raises
        `ValueError` as `check`, and if the file ends too early.
        """
        entry = self.check(name, shape, dtypes)
        out = torch.empty(shape if item is None else shape[1:], dtype=DTYPES[entry.dtype], device="cpu")
        self.read_into(name, out, item=item)
        return out

    def read_into(self, name: str, out: torch.Tensor, *, item: int | None = None) -> None:
        """As `read`, into a contiguous CPU tensor, after a call of `check`."""
        self._find(name)[0].read(name, out, 0 if item is None else item * out.nbytes)

    def beginnings(self) -> str:
        """SHA-256 of dtype, shape and the first `BEGINNING_BYTES` of every tensor. Opens all shards.

        Unlike `file_digests` it differs between trainings of one model.
        """
        digest = hashlib.sha256()
        for name in self.names():
            file, entry = self._find(name)
            head = torch.empty(min(entry.num_bytes, BEGINNING_BYTES), dtype=torch.uint8, device="cpu")
            file.read(name, head)
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode() + head.numpy().tobytes())
        return digest.hexdigest()

    def file_digests(self, json_files: Iterable[str]) -> dict[str, str]:
        """Beginnings of the SHA-256 of the present `json_files`, and of the index or the single file's header.

        They distinguish checkpoints without reading tensors. Shards do not count and need not be there.
        """
        files = [self.folder / name for name in (*json_files, INDEX_FILE)]
        digests = {
            f"sha256 of {file.name}": _digest(read_regular(file, MAX_HEADER_BYTES)) for file in files if file.is_file()
        }
        return digests if self._shard_of is not None else digests | self._digest_of(SINGLE_FILE)

    def stamps(self, names: Iterable[str]) -> dict[str, list[int]]:
        """`SafetensorsFile.stamp` of each file that holds one of the tensors `names`, by file name."""
        shards = sorted({self.shard_of(name) for name in names})
        return {shard: self._opened(shard, "the time of its change").stamp() for shard in shards}

    def header_digests(self, names: Iterable[str]) -> dict[str, str]:
        """Digest of the header of each file that holds one of the tensors `names`.

        They show whether names, dtypes, shapes and positions of tensors differ between ranks, without reading tensors.
        """
        digests: dict[str, str] = {}
        for shard in dict.fromkeys(self.shard_of(name) for name in names):
            digests |= self._digest_of(shard)
        return digests

    def _digest_of(self, shard: str) -> dict[str, str]:
        return {f"sha256 of the header of {shard}": self._opened(shard, "the digest of its header").digest}

    def _find(self, name: str) -> tuple[SafetensorsFile, TensorEntry]:
        file = self._opened(self.shard_of(name), name)
        if name not in file.entries:
            raise ValueError(f"{file.path}: tensor {name} is missing")
        return file, file.entries[name]

    def _opened(self, shard: str, wanted_for: str) -> SafetensorsFile:
        if shard not in self._open:
            self._open[shard] = SafetensorsFile(self.folder / shard, wanted_for, drop=self._drop)
        return self._open[shard]


def stamp_of(file: Path) -> list[int] | None:
    """Size in bytes and time of change in ns; None where there is no such file."""
    try:
        return _stamp(file.stat())
    except OSError:
        return None


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises `ValueError` naming the file if it cannot be read, is no regular file, is too large or holds no object.
    """
    raw = read_regular(file, max_bytes)
    try:
        data = parsed_json(raw, MAX_JSON_VALUES)
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data


def parsed_json(raw: bytes, max_values: int, first: int = 0) -> Any:
    """What the JSON from byte `first` holds.

    Raises `ValueError` for broken JSON, a key that is there twice, or too many values.
    """
    # Each value but the first of a list or object follows a comma.
    if (count := raw.count(b",") + raw.count(b"[") + raw.count(b"{")) > max_values:
        raise ValueError(f"expected at most {max_values} values, got about {count}")
    try:
        return json.loads(str(memoryview(raw)[first:], "utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `ValueError` for a key that is there twice, of which JSON keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {describe(twice)} is there twice")
    return found


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """An object as the bytes of an indented JSON file."""
    return (json.dumps(data, indent=2) + "\n").encode()


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write an object as JSON, indented."""
    file.write_bytes(json_bytes(data))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _header_bytes(file: int) -> bytes:
    """The length and the header of an open file. Raises `ValueError` if it has none."""
    size = os.fstat(file).st_size
    length_bytes = os.pread(file, 8, 0)
    if len(length_bytes) < 8:
        raise ValueError(f"{size} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", length_bytes)
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise ValueError(f"expected a header of {length} bytes, the file has {size}")
    return os.pread(file, 8 + length, 0)


def _read_header(file: int, raw: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries and metadata of an open file with the `raw` header. Raises `ValueError` for a broken one."""
    size, first = os.fstat(file).st_size, len(raw)
    if (count := raw.count(b"{")) > MAX_HEADER_TENSORS + 2:
        raise ValueError(f"header: expected at most {MAX_HEADER_TENSORS} tensors, got about {count}")
    header = parsed_json(raw, 10 * MAX_HEADER_TENSORS, 8)
    if not isinstance(header, dict):
        raise ValueError(f"header: expected an object, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"__metadata__: expected an object, got {type(metadata).__name__}")
    entries: dict[str, TensorEntry] = {}
    for name, item in header.items():
        try:
            dtype, shape = item["dtype"], tuple(item["shape"])
            begin, end = item["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"tensor {name}: expected dtype, shape and data_offsets, got {shortened(item)}") from None
        if not isinstance(dtype, str):
            raise ValueError(f"tensor {name}: expected dtype, shape and data_offsets, got {shortened(item)}")
        if len(shape) > MAX_DIMENSIONS or not all(
            type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)
        ):
            raise ValueError(
                f"tensor {name}: expected a shape and data_offsets of whole numbers, got {shortened(item)}"
            )
        if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"tensor {name}: {end - begin} bytes are not {list(shape)} of {dtype}")
        if not 0 <= begin <= end <= size - first:
            raise ValueError(f"tensor {name}: its bytes end at {first + end}, the file at {size}")
        entries[name] = TensorEntry(dtype, shape, first + begin, end - begin)
    last = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != last:
            raise ValueError(f"tensor {name}: its bytes begin at {entry.start}, those before it end at {last}")
        last = entry.start + entry.num_bytes
    if last != size:
        raise ValueError(f"its tensors end at {last}, the file at {size}")
    return entries, metadata
