"""Reading safetensors files against the library that defines them, and headers that lie."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.checkpoints.files import DTYPES, INDEX_FILE, SINGLE_FILE, SafetensorsFile, TensorFiles, write_json
from tests.support.comparison import assert_same_bits


def test_every_dtype_and_shape_of_the_library(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{number}": torch.randint(0, 2, shape).to(dtype)
        for name, dtype in DTYPES.items()
        for number, shape in enumerate([(), (1,), (0, 3), (2, 3, 4)])
    }
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    back = load_file(tmp_path / SINGLE_FILE)
    with TensorFiles(tmp_path) as files:
        assert sorted(files.names()) == sorted(tensors)
        for name, tensor in back.items():
            kind = name.partition(".")[0]
            got = files.read(name, tuple(tensor.shape), (kind,))
            assert got.dtype == DTYPES[kind] == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_one_item_of_the_first_dimension(tmp_path: Path, rng: torch.Generator) -> None:
    tensor = torch.randn(5, 3, 7, generator=rng).bfloat16()
    save_file({"before": torch.zeros(3, dtype=torch.uint8), "x": tensor}, tmp_path / SINGLE_FILE)
    with TensorFiles(tmp_path) as files:
        for item in range(5):
            assert_same_bits(files.read("x", (5, 3, 7), ("BF16",), item=item), tensor[item])


def file_of(path: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry("F32", [4], 0, 12)}, r"tensor x: 12 bytes are not \[4\] of F32"),
        ({"x": entry("F32", [5], 0, 20)}, "tensor x: its bytes end at .*, the file at"),
        ({"x": entry("F32", [2], 8, 16), "y": entry("I8", [0], 20, 20)}, "tensor y: its bytes end at"),
        ({"x": entry("F32", [2], 0, 8)}, "its tensors end at .*, the file at"),
        (
            {"x": entry("F32", [4], 0, 16), "y": entry("F32", [4], 0, 16)},
            "tensor y: its bytes begin at",
        ),
        (
            {"x": entry("F32", [3], 0, 12), "y": entry("F32", [2], 8, 16)},
            "tensor y: its bytes begin at",
        ),
        (
            {"x": entry("F32", [1], 0, 4), "y": entry("F32", [2], 8, 16)},
            "tensor y: its bytes begin at",
        ),
        ({"x": entry("F32", [2], 8, 16)}, "tensor x: its bytes begin at"),
        ({"x": {"dtype": "F32"}}, "tensor x: expected dtype, shape and data_offsets"),
        ({"x": [1]}, "tensor x: expected dtype, shape and data_offsets"),
        ({"x": entry(["F32"], [4], 0, 16)}, "tensor x: expected dtype, shape and data_offsets"),  # type: ignore[arg-type]
        ({"x": entry("F32", [-2, -2], 0, 16)}, "tensor x: expected a shape and data_offsets of whole numbers"),
        ({"x": entry("F32", [4.0], 0, 16)}, "tensor x: expected a shape and data_offsets of whole numbers"),  # type: ignore[list-item]
        ({"x": entry("F32", [4], "0", "16")}, "tensor x: expected a shape and data_offsets of whole numbers"),  # type: ignore[arg-type]
        ({"__metadata__": ["pt"]}, "__metadata__: expected an object, got list"),
        (b"[" * 100_000, "recursion"),
        ([], "header: expected an object, got list"),
        (b"{", "Expecting"),
        (b"\x80{}", "codec can't decode"),
    ],
)
def test_a_header_that_lies_is_named(header: Any, message: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.safetensors", header)
    with pytest.raises(ValueError, match=rf"{path}: broken or cut off \(wanted for y\): .*{message}"):
        SafetensorsFile(path, "y")


@pytest.mark.parametrize("length", [0, 7, 8, 12])
def test_a_file_without_a_whole_header_is_named(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((1000).to_bytes(8, "little") + b"\0" * 8)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{path}: broken or cut off"):
        SafetensorsFile(path)


def test_files_that_nobody_has_any_more_are_closed(tmp_path: Path) -> None:
    def still_open() -> list[Path]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [path for link in links if (path := link.readlink()).parent == tmp_path]

    save_file({"x": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    files = TensorFiles(tmp_path)
    assert files.read("x", (4,), ("F32",)).tolist() == [0.0] * 4
    assert still_open() == [tmp_path / SINGLE_FILE]
    del files
    gc.collect()
    assert still_open() == []


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4096)}, tmp_path / SINGLE_FILE)
    with TensorFiles(tmp_path) as files:
        files.check("x", (4096,), ("F32",))
        with (tmp_path / SINGLE_FILE).open("r+b") as stream:
            stream.truncate(1000)
        with pytest.raises(ValueError, match=f"{tmp_path / SINGLE_FILE}: tensor x: the file ends within it"):
            files.read("x", (4096,), ("F32",))


def test_digests_tell_checkpoints_apart(tmp_path: Path) -> None:
    def digests() -> dict[str, str]:
        with TensorFiles(tmp_path) as files:
            return files.file_digests(("config.json", "absent.json"))

    save_file({"x": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    write_json(tmp_path / "config.json", {"a": 1})
    write_json(tmp_path / "other.json", {"b": 1})
    before = digests()
    assert set(before) == {"sha256 of config.json", f"sha256 of the header of {SINGLE_FILE}"}
    write_json(tmp_path / "other.json", {"b": 2})
    assert digests() == before
    with TensorFiles(tmp_path) as files:
        assert files.header_digests(["x"]).items() <= before.items()
    write_json(tmp_path / "config.json", {"a": 2})
    save_file({"x": torch.zeros(5)}, tmp_path / SINGLE_FILE)
    after = digests()
    assert all(after[key] != value for key, value in before.items())
    # An index counts instead of the headers of its shards, which need not be there.
    (tmp_path / SINGLE_FILE).unlink()
    write_json(tmp_path / INDEX_FILE, {"weight_map": {"x": "absent.safetensors"}})
    assert set(digests()) == {"sha256 of config.json", f"sha256 of {INDEX_FILE}"}


def test_an_index_beside_a_single_file_that_it_does_not_mean_is_refused(tmp_path: Path) -> None:
    """As they are left where a model was saved twice, in shards and in one file; transformers reads the file."""
    save_file({"x": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    save_file({"x": torch.ones(4)}, tmp_path / "a.safetensors")
    write_json(tmp_path / INDEX_FILE, {"weight_map": {"x": "a.safetensors"}})
    with pytest.raises(ValueError, match=f"{tmp_path}: expected {SINGLE_FILE} or {INDEX_FILE} .* one is stale"):
        TensorFiles(tmp_path)
    write_json(tmp_path / INDEX_FILE, {"weight_map": {"x": SINGLE_FILE}})
    with TensorFiles(tmp_path) as files:
        assert files.read("x", (4,), ("F32",)).tolist() == [0.0] * 4


@pytest.mark.parametrize("memory", [1 << 20, 1 << 40])
def test_files_too_large_for_the_page_cache_leave_it_again(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is dropped is the range of a large tensor, after it was read; nothing of files that can stay."""
    x = torch.arange(1 << 18, dtype=torch.int32)
    save_file({"x": x, "y": x[:7].clone()}, tmp_path / SINGLE_FILE)
    dropped = []
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": memory >> 12, "SC_PAGE_SIZE": 1 << 12}.__getitem__)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *arguments: dropped.append(arguments))
    with TensorFiles(tmp_path) as files:
        for name, want in (("x", x), ("y", x[:7])):
            assert torch.equal(files.read(name, tuple(want.shape), ("I32",)), want)
        start = files.entry("x").start
    assert dropped == ([(start, x.nbytes, os.POSIX_FADV_DONTNEED)] if memory == 1 << 20 else [])
