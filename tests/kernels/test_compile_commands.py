"""Macros of CUDA sources: each that a kernel needs is in what editors open it with, and a wrong one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.kernels import nvrtc
from moe_runtime.launch.research.compile_commands import cases_by_file, main

pytestmark = pytest.mark.cpu_only

SOURCES = sorted(path.name for path in nvrtc.FOLDER.rglob("*.cu"))

WRONG = [
    ("dispatch_send.cu", {"TEAM": 48}, "TEAM: whole warps"),
    ("dispatch_send.cu", {"WORLD": 33}, "WORLD: a lane of a warp stands for a rank"),
    ("dispatch_send.cu", {"RECORD_BYTES": 1024}, "RECORD_BYTES: the copy engine sends 16 bytes at a time"),
    ("dispatch_recv.cu", {"CHUNK": 48}, "CHUNK: bitmaps of slots are whole words"),
    ("dispatch_recv.cu", {"PLACES_BYTES": 1000}, "PLACES_BYTES: too few for what recv_permute shares"),
    ("dispatch_recv.cu", {"PADDED": 1, "PER_TOKEN_FLAGS": 0}, "PADDED: all slots are one chunk"),
    ("combine.cu", {"PARTIAL_BYTES": 32}, "PARTIAL_BYTES: too few for a partial result"),
    ("combine.cu", {"K": 33}, "K: a lane of a warp has an entry"),
    ("hierarchical.cu", {"HOST": 4}, "HOST: one of HOSTS"),
    ("one_rank_dispatch.cu", {"MOST": 160}, "MOST: scales of an expert's rows"),
    ("one_rank_combine.cu", {"WORLD": 2}, "WORLD: this kernel is for a rank without peers"),
    ("row_counts.cu", {"TABLE_WORDS": 512}, "TABLE_WORDS: too few for the counts of a source"),
    ("rows.cu", {"K": 33}, "K: a lane has an expert of a token"),
    ("rows.cu", {"STAGES": 1}, "STAGES: one record is loaded while another is stored"),
    ("rows.cu", {"RECORD_BYTES": 1024}, "RECORD_BYTES: too few for what travels"),
    ("row_sums.cu", {"HIDDEN": 36}, "HIDDEN: a lane reads 16 bytes at a time"),
    ("row_sums.cu", {"BIASES": 3}, "BIASES: none, one or two"),
    ("tma_gemm.cu", {"ROWS": 24}, "ROWS: wgmma has no such tile here"),
    ("tma_gemm.cu", {"STAGES": 7}, "STAGES: the ring is larger than the shared memory"),
    ("tma_gemm.cu", {"A_BOX": 48}, "A_BOX: boxes fill a tile"),
    ("dequant_gemm.cu", {"WARPGROUPS": 8}, "WARPGROUPS: with two more warps they are a block"),
    ("dequant_gemm.cu", {"W_FMT": 0}, "W_FMT: no format that is dequantized in registers"),
    ("dequant_few.cu", {"MAX_BLOCKS": 2}, "MAX_BLOCKS: a tile is one block of 8 tokens"),
    ("dequant_tokens.cu", {"TEAM": 3}, "TEAM: a block is whole teams of warps"),
]


@pytest.mark.parametrize(("file", "wrong", "message"), WRONG, ids=[f"{file} {wrong}" for file, wrong, _ in WRONG])
def test_a_macro_that_does_not_fit_is_named(file: str, wrong: dict[str, int], message: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(nvrtc.NvrtcError, match=f'static assertion failed with "{message}'):
        nvrtc.compile_source(file, {**cases_by_file()[file].defines, **wrong}, "compute_90a")


def test_editors_get_all_macros(tmp_path: Path) -> None:
    """Of sources and headers; a source compiles with no others, which all those of the flags are."""
    pytest.importorskip("cuda.bindings.nvrtc")
    assert main(["--to", str(tmp_path / "commands.json")]) == 0
    commands = {Path(entry["file"]).name: entry for entry in json.loads((tmp_path / "commands.json").read_text())}
    assert set(commands) == {path.name for path in nvrtc.FOLDER.rglob("*.cu*")}
    for name in SOURCES:
        flags = [flag[2:].partition("=") for flag in commands[name]["arguments"] if flag.startswith("-D")]
        nvrtc.compile_source(name, {macro: value for macro, _, value in flags}, "compute_90a")
