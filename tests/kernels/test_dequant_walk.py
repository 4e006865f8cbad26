"""The walk of `dequant_gemm.cu` over its tiles, compiled for the CPU: nothing left out or done twice, little idle."""

from __future__ import annotations

import random
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from moe_runtime.kernels.formats.number_formats import ceil_div
from moe_runtime.kernels.nvrtc import source_path
from tests.support.on_host import between, compile_on_host, needs_compiler

pytestmark = [needs_compiler, pytest.mark.cpu_only]

TILE_UNITS, TILE_TOKENS = 4, 64
"""As in walk_on_host.cpp."""

Tile = tuple[int, int, int, int, int]
"""Group, first token and tokens, first unit of weight rows and units."""


@pytest.fixture(scope="module", params=[False, True], ids=["in_turn", "counted"])
def counted(request: pytest.FixtureRequest) -> bool:
    """Whether each block takes the next piece of work when it is done with one."""
    return bool(request.param)


@pytest.fixture(scope="module")
def binary(counted: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tile = between(
        source_path("dequant_result.cuh").read_text(), "// A tile of the output", "// Starts the copy of one value"
    )
    text = source_path("dequant_gemm.cu").read_text()
    walk = tile + between(text, "struct Groups {", "// Consumes the stages of a tile")
    path = tmp_path_factory.mktemp("walk") / "walk"
    compile_on_host("walk_on_host.cpp", "WALK", walk, path, "-O1", f"-DOVERLAPPED={int(counted)}")
    return path


def tiles_of(
    binary: Path, blocks: int, unit_rows: int, sizes: list[int], experts: list[int], off_by: int = 0
) -> dict[int, list[Tile]]:
    """What each block walks, in its order."""
    offsets = [sum(sizes[:g]) for g in range(len(sizes) + 1)]
    numbers = [off_by, blocks, unit_rows, len(sizes), *offsets, *experts]
    given = " ".join(map(str, numbers))
    done = subprocess.run([binary], input=given, capture_output=True, text=True, timeout=60, check=True)
    found: dict[int, list[Tile]] = defaultdict(list)
    for line in done.stdout.splitlines():
        block, *tile = map(int, line.split())
        found[block].append((tile[0], tile[1], tile[2], tile[3], tile[4]))
    return found


def least_units(blocks: int, unit_rows: int, parts: int, counted: bool) -> int:
    """Of the busiest block: of tiles in rounds, the last perhaps of pieces, or, not `counted`, of one cut for each."""
    cuts = ceil_div(unit_rows, TILE_UNITS)
    rounds, last = divmod(parts * cuts, blocks)
    pieces = min(blocks // last, unit_rows // cuts) if 0 < 3 * last <= blocks else 1
    in_rounds = TILE_UNITS * rounds + (ceil_div(TILE_UNITS, pieces) if last else 0)
    if counted or not 0 < parts <= blocks:
        return in_rounds
    one_cut = ceil_div(unit_rows, blocks // parts)
    return one_cut if one_cut < TILE_UNITS * ceil_div(parts * cuts, blocks) else in_rounds


def test_every_row_and_unit_is_in_one_tile(binary: Path, counted: bool, seed: int) -> None:
    draw = random.Random(seed)
    kinds = Counter()
    for _ in range(220):
        blocks, unit_rows = draw.randint(1, 140), draw.choice([draw.randint(1, 20), draw.randint(1, 300)])
        sizes = [draw.choice([0, 1, 8, 63, 64, 65, 200, draw.randint(0, 300)]) for _ in range(draw.randint(0, 40))]
        experts = [draw.choice([-1, 0, 1, 2, 3]) for _ in sizes]
        found = tiles_of(binary, blocks, unit_rows, sizes, experts, draw.randint(-2, 2))
        covered: Counter[tuple[int, int, int]] = Counter()
        for tiles in found.values():
            heights = [tile[4] for tile in tiles]
            large = [high for high in heights if high >= max(heights) - 1]
            pieces = len(heights) - len(large)
            assert heights[: len(large)] == large, "as even as whole units can be, but for pieces at the end"
            assert pieces <= 1 or counted
            for group, local, rows, unit, high in tiles:
                assert experts[group] >= 0 and 0 < rows <= TILE_TOKENS and 0 < high <= TILE_UNITS and local % 8 == 0
                covered.update((group, row, u) for row in (local, local + rows - 1) for u in range(unit, unit + high))
        wanted: Counter[tuple[int, int, int]] = Counter()
        parts = 0
        for group, size in enumerate(sizes):
            if size and experts[group] >= 0:
                pieces = ceil_div(size, TILE_TOKENS)
                each, parts = ceil_div(ceil_div(size, pieces), 8) * 8, parts + pieces
                for first in range(0, size, each):
                    ends = (first, min(first + each, size) - 1)
                    wanted.update((group, row, u) for row in ends for u in range(unit_rows))
        assert covered == wanted
        busiest = max((sum(tile[4] for tile in tiles) for tiles in found.values()), default=0)
        assert busiest <= least_units(blocks, unit_rows, parts, counted)
        tiles_in_all = parts * ceil_div(unit_rows, TILE_UNITS)
        rounds = ceil_div(tiles_in_all, blocks)
        if not counted and 0 < parts <= blocks and ceil_div(unit_rows, blocks // parts) < TILE_UNITS * rounds:
            kinds["cuts"] += 1
        else:
            kinds["pieces" if 0 < 3 * (tiles_in_all % blocks) <= blocks else "rounds"] += 1
    assert min(kinds.values()) > 10 and len(kinds) == 3 - counted, kinds


@pytest.mark.parametrize(
    ("groups", "unit_rows", "most"),
    [(8, 64, 4), (8, 112, 7), (26, 64, 13), (32, 64, 16), (32, 112, 28), (16, 48, 6), (16, 64, 8), (256, 64, 125)],
    ids=str,
)
def test_the_busiest_of_132_blocks(binary: Path, counted: bool, groups: int, unit_rows: int, most: int) -> None:
    """The reference model's products with 8 groups, with 26 of 32, and with all; Qwen3-235B's on 8 ranks; and 32 groups
    of 8 tiles of tokens each.
    """
    found = tiles_of(binary, 132, unit_rows, [16] * groups, list(range(groups)))
    busiest = max(sum(tile[4] for tile in tiles) for tiles in found.values())
    assert busiest == (least_units(132, unit_rows, groups, counted) if counted else most)
