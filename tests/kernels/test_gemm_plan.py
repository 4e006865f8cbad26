"""What multiplies, in which regime and tile: the plan for the sizes of well-known models, worked out by hand."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from moe_runtime.kernels.formats.number_formats import (
    BF16,
    FORMATS,
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    WEIGHT_FORMATS,
    TokenFormat,
)
from moe_runtime.kernels.gemm.operands import NativeForm
from moe_runtime.kernels.gemm.plan import (
    AHEAD_ROWS,
    EXPANDED_DECODE_ROWS,
    MAX_TMA_GROUPS,
    TMA_DOZEN_GATHERED_K,
    TMA_DOZEN_K,
    TMA_DOZEN_ROWS,
    TMA_FEW_ROWS,
    TMA_SOME_ROWS,
    DequantOverlap,
    GemmKernel,
    GemmPlan,
    GemmProblem,
    choose_tma_shape,
    few_shape,
    plan_gemm,
)
from moe_runtime.kernels.gemm.shapes import (
    DEQUANT_DECODE,
    DEQUANT_FEW,
    DEQUANT_FEW_EVEN,
    DEQUANT_FEW_MORE,
    DEQUANT_MIDDLE,
    DEQUANT_PREFILL,
    FEW_TOKENS,
    MANY_TOKENS,
    MAX_FEW_STAGES,
    MAX_STAGES,
    TMA_AHEAD,
    TMA_DECODE,
    TMA_DOZEN,
    TMA_FEW,
    TMA_PREFILL,
    TMA_SHAPES,
    TMA_SOME,
    DequantShape,
    GemmTile,
    Regime,
    TmaShape,
)

H200 = {"engine": "cuda", "capability": (9, 0), "sms": 132}


def problem(
    weights: TokenFormat, groups: int, n: int, k: int, rows: int, tokens: TokenFormat | None = None, /, **more: object
) -> GemmProblem:
    """A product on an H200, with as many rows as are expected; prepacked where a layer prepacks."""
    facts = H200 | {
        "weight_format": weights,
        "token_format": weights if tokens is None else tokens,
        "experts": groups,
        "n": n,
        "k": k,
        "rows": rows,
        "capacity": max(rows, 1),
        "groups": groups,
        "active_groups": groups,
        "prepacked": weights in (NVFP4, MXFP8),
    }
    return GemmProblem(**(facts | more))  # type: ignore[arg-type]


def plan(*arguments: object, **more: object) -> GemmPlan:
    return plan_gemm(problem(*arguments, **more))  # type: ignore[arg-type]


# --- DeepSeek-V3 on 8 ranks: 32 experts of a rank, 8 rows a token of a rank, H = 7168, I = 2048


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [
        (1, TMA_FEW),
        (4 * TMA_FEW_ROWS, TMA_FEW),
        (4 * TMA_FEW_ROWS + 1, TMA_SOME),
        (4 * TMA_SOME_ROWS, TMA_SOME),
        (4 * TMA_SOME_ROWS + 1, TMA_DECODE),
        (256, TMA_DECODE),
        (257, TMA_PREFILL),
    ],
)
def test_deepseek_v3_in_fp8(tokens: int, shape: TmaShape) -> None:
    """256 tokens of a rank are 64 rows of an expert."""
    gate_up = plan(FP8_BLOCK, 32, 4096, 7168, 8 * tokens, out_format=FP8_BLOCK, gathered=True)
    down = plan(FP8_BLOCK, 32, 7168, 2048, 8 * tokens)
    for found in (gate_up, down):
        assert found.kernel is GemmKernel.TMA and found.tma is not None and found.tma.shape is shape
        # A tile has 128 bytes of K.
        assert found.tile == ((shape.tile_rows, 128, 128) if shape.few else (128, 256, 128))
        assert found.blocks == (264 if shape.few else 132)
        assert found.regime is shape.regime
        assert found.tma.copies_scales == (shape is TMA_PREFILL)


def test_deepseek_v3_in_nvfp4() -> None:
    # 32 rows of an expert: tiles of 64 tokens and 4 warpgroups of 64 weight rows, stages of 4 units of 64 columns.
    few = plan(NVFP4, 32, 4096, 7168, 8 * 128, out_format=NVFP4, gathered=True)
    assert (few.kernel, few.regime, few.tile, few.blocks) == (GemmKernel.DEQUANT, Regime.DECODE, (64, 256, 256), 132)
    assert few.dequant is not None and few.dequant.shape is DEQUANT_DECODE
    # 1024 rows of 7168 numbers are 14 MiB in bf16, of the 16 that L2 keeps.
    assert few.dequant.keep_tokens and few.dequant.tokens is MANY_TOKENS and few.dequant.overlap is None
    # 128 rows: tiles of 160 tokens. 32 tiles of 128 weight rows for 132 SMs are 5 times 20 blocks of tokens, twice.
    middle = plan(NVFP4, 32, 4096, 7168, 8 * 512, out_format=NVFP4)
    assert middle.regime is Regime.MIDDLE and middle.tile == (160, 128, 128)
    assert middle.dequant is not None and middle.dequant.shape is DEQUANT_MIDDLE
    assert middle.dequant.overlap == DequantOverlap(first=2 * 5 * 20, sms=5)
    # 1024 rows: tiles of 128 tokens, 16 of 256 weight rows: 9 rounds.
    many = plan(NVFP4, 32, 4096, 7168, 8 * 4096, out_format=NVFP4)
    assert many.regime is Regime.PREFILL and many.tile == (128, 256, 256)
    assert many.dequant is not None and many.dequant.shape is DEQUANT_PREFILL
    assert many.dequant.overlap == DequantOverlap(first=2 * 9 * 16, sms=5) and not many.dequant.keep_tokens
    down = plan(NVFP4, 32, 7168, 2048, 8 * 4096, dequantized=True)
    assert down.dequant is not None and down.dequant.overlap is down.dequant.tokens is None


# --- Qwen3-235B-A22B on 8 ranks: 16 experts of a rank, 8 rows a token of a rank, H = 4096, I = 1536


def test_qwen3_in_mxfp8() -> None:
    few = plan(MXFP8, 16, 3072, 4096, 8 * 8, out_format=MXFP8)
    assert few.regime is Regime.DECODE and few.dequant is not None and not few.dequant.keep_tokens
    # (64 + 7 * 16) / 8 blocks of 64 units are more than 132 SMs load at once, 4 warps of one piece each.
    assert few.dequant.tokens is MANY_TOKENS
    # 3 stages of 4 units, 4224 bytes of weights and 1 KiB of tokens each, do not fit: 2 units.
    many = plan(MXFP8, 16, 3072, 4096, 8 * 4096, out_format=MXFP8)
    assert many.regime is Regime.PREFILL and many.tile == (128, 256, 128)
    assert many.dequant is not None and many.dequant.overlap == DequantOverlap(first=2 * 11 * 16, sms=6)
    # Fewer rows than twice those of the first two rounds.
    assert (some := plan(MXFP8, 16, 3072, 4096, 8 * 512).dequant) is not None and some.overlap is None


def test_qwen3_in_bf16() -> None:
    """128 bytes of K are 64 numbers; nothing has scales that could be copied."""
    many = plan(BF16, 16, 3072, 4096, 8 * 1024, out_format=BF16)
    assert many.kernel is GemmKernel.TMA and many.tile == (128, 256, 64)
    assert many.tma is not None and many.tma.shape is TMA_PREFILL and not many.tma.copies_scales
    assert plan(BF16, 16, 3072, 4096, 8, out_format=BF16, sm_limit=7).blocks == 7
    assert plan(FP8_BLOCK, 16, 3072, 4096, 8, out_format=FP8_BLOCK, sm_limit=7).blocks == 6
    assert plan(BF16, 16, 3072, 4096, 8 * 1024, out_format=BF16, sm_limit=7).blocks == 6
    assert plan(BF16, 16, 3072, 4096, 8 * 1024, out_format=BF16, sm_limit=1).blocks == 2


# --- gpt-oss-120b on 8 ranks: 16 experts of a rank, H = I = 2880, MXFP4 weights


@pytest.mark.parametrize("engine", ["cuda", "triton"])
def test_gpt_oss_in_mxfp4(engine: str) -> None:
    """No kernel of Hopper takes these weights. Tiles do not depend on the rows."""
    for rows in (8, 4096):
        more = {"capacity": 10_000, "engine": engine}
        gate_up = plan(MXFP4, 16, 5760, 2880, rows, BF16, out_format=BF16, **more)
        assert gate_up.kernel is GemmKernel.TRITON and gate_up.regime is Regime.ANY
        assert gate_up.triton == GemmTile(64, 128, 64, num_warps=8, num_stages=2)
        assert gate_up.blocks == (157 + 16) * 23
        down = plan(MXFP4, 16, 2880, 2880, rows, BF16, **more)
        assert down.triton == GemmTile(64, 128, 64, num_warps=4, num_stages=3) and down.tile == (64, 128, 64)
    for major, form, block_m in (
        (9, NativeForm.NONE, 64),
        (10, NativeForm.AS_STORED, 128),
        (12, NativeForm.WIDENED, 64),
    ):
        more = {"engine": "triton", "capability": (major, 0)}
        native = plan(MXFP4, 16, 5760, 2880, 8, MXFP8, out_format=MXFP8, **more)
        assert native.native is form and native.tile == (block_m, 128, 128)


# --- which kernel


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_engines(name: str) -> None:
    fmt = WEIGHT_FORMATS[name]
    tokens = BF16 if fmt is MXFP4 else fmt
    hopper = {"nvfp4": GemmKernel.DEQUANT, "mxfp8": GemmKernel.DEQUANT, "mxfp4": GemmKernel.TRITON}
    wanted = {"torch": GemmKernel.TORCH, "triton": GemmKernel.TRITON, "cuda": hopper.get(name, GemmKernel.TMA)}
    for engine, kernel in wanted.items():
        found = plan(fmt, 4, 512, 512, 100, tokens, engine=engine)
        assert found.kernel is kernel
        assert found.restores == (fmt in (NVFP4, MXFP8) and engine != "cuda")
    if fmt in (NVFP4, MXFP8):
        raw = plan(fmt, 4, 512, 512, 100, prepacked=False)
        assert raw.kernel is GemmKernel.TRITON and not raw.restores


def test_what_tma_does_not_take() -> None:
    def takes(fmt: TokenFormat = FP8_BLOCK, n: int = 512, **more: object) -> bool:
        return plan(fmt, 4, n, 512, 100, **more).kernel is GemmKernel.TMA

    assert takes() and takes(BF16) and takes(out_format=FP8_BLOCK) and takes(FP8_BLOCK, out_format=BF16)
    assert not takes(aligned=False) and not takes(groups=0) and not takes(groups=MAX_TMA_GROUPS + 1)
    assert not takes(capacity=0) and not takes(experts=0)
    # Scales are found by 32-bit numbers: 4 of each row.
    assert takes(capacity=2**29 - 1) and not takes(capacity=2**29)
    # 128 rows of a weight share scales, which must not be of gate and up both.
    assert takes(n=384, out_format=FP8_BLOCK) and not takes(n=384, out_format=FP8_BLOCK, tiled_blocks=False)
    assert takes(BF16, n=384, out_format=BF16)
    assert not takes(out_format=NVFP4) and not takes(BF16, out_format=MXFP8)
    assert not takes(e5m2=True) and not takes(rows_per_scale=128)


def test_scales_are_copied_for_many_rows() -> None:
    def copies(k: int, groups: int = 3, rows: int = 1000, fmt: TokenFormat = FP8_BLOCK, **more: object) -> bool:
        found = plan(fmt, groups, 128, k, rows * groups, **more).tma
        assert found is not None
        return found.copies_scales

    assert copies(512) and copies(1536)
    assert not copies(640), "rows of scales are not whole 16 bytes"
    assert copies(512, gathered=True) and not copies(512, rows=64)
    assert not copies(512, groups=MAX_TMA_GROUPS), "three stages"
    assert not copies(512, scales_aligned=False) and not copies(512, fmt=BF16)


def test_shared_memory_of_tma_fits_whatever_the_number_of_groups() -> None:
    for shape in TMA_SHAPES:
        for groups in (1, 32, 256, MAX_TMA_GROUPS):
            assert 3 <= shape.stages(groups) <= (MAX_FEW_STAGES if shape.few else MAX_STAGES)
            # The driver takes 1 KB of an SM's 228 KB for each block.
            assert shape.blocks_per_sm * (shape.shared_bytes(groups) + 1024) <= 228 * 1024


def test_shape_of_tma_is_a_function_of_sizes() -> None:
    def shape(rows: int, k: int = 7168, gathered: bool = True) -> TmaShape:
        return choose_tma_shape(rows, 8, k, gathered=gathered)

    assert shape(8 * 64) is TMA_DECODE
    assert shape(8 * 64 + 1) is TMA_PREFILL
    assert shape(8 * TMA_FEW_ROWS) is choose_tma_shape(0, 1, 64, gathered=False) is TMA_FEW
    assert shape(8 * TMA_FEW_ROWS + 1) is shape(8 * TMA_SOME_ROWS) is TMA_SOME
    assert shape(8 * TMA_SOME_ROWS + 1) is TMA_DECODE
    for gathered, k in ((True, TMA_DOZEN_GATHERED_K), (False, TMA_DOZEN_K)):
        assert shape(8 * TMA_SOME_ROWS + 1, k, gathered) is shape(8 * TMA_DOZEN_ROWS, k, gathered) is TMA_DOZEN
        assert shape(8 * TMA_DOZEN_ROWS + 1, k, gathered) is shape(8 * TMA_DOZEN_ROWS, k + 1, gathered) is TMA_DECODE


def test_shape_of_tma_that_expands_weights() -> None:
    def shape(rows: int) -> TmaShape:
        return choose_tma_shape(8 * rows, 8, 7168, gathered=False, expanded=True)

    assert shape(TMA_SOME_ROWS + 1) is shape(EXPANDED_DECODE_ROWS) is TMA_DECODE
    assert shape(EXPANDED_DECODE_ROWS + 1) is shape(AHEAD_ROWS - 1) is TMA_PREFILL
    assert shape(AHEAD_ROWS) is TMA_AHEAD


def test_a_limit_on_sms_keeps_dequantization_before_the_product() -> None:
    free = plan(NVFP4, 32, 4096, 7168, 32768)
    limited = plan(NVFP4, 32, 4096, 7168, 32768, sm_limit=100)
    assert free.dequant is not None and limited.dequant is not None
    assert free.dequant.overlap is not None and limited.dequant.overlap is None
    assert (free.blocks, limited.blocks) == (132, 100)
    assert free.dequant.starts_early and limited.dequant.starts_early
    after = plan(NVFP4, 32, 4096, 7168, 32768, sm_limit=100, dequantized=True)
    assert after.dequant is not None and not after.dequant.starts_early


@pytest.mark.parametrize("fmt", [FP8_BLOCK, BF16])
def test_a_product_of_few_rows_starts_early_unless_sms_are_limited(fmt: TokenFormat) -> None:
    for rows, limit, early in ((8, None, True), (8, 100, False), (32768, None, False)):
        how = plan(fmt, 32, 4096, 7168, rows, sm_limit=limit).tma
        assert how is not None and how.starts_early is early


def test_few_tokens_leave_room_for_the_product() -> None:
    few = plan(NVFP4, 8, 7168, 2048, 128)
    assert few.dequant is not None and few.dequant.tokens is FEW_TOKENS
    assert (all_of_them := plan(NVFP4, 0, 7168, 2048, 128).dequant) is not None
    assert all_of_them.shape is DEQUANT_DECODE, "no groups"


@pytest.mark.parametrize(
    ("tiles", "shape", "blocks", "wide"),
    [
        (396, DEQUANT_FEW, 3, DEQUANT_FEW),
        (397, DEQUANT_FEW_MORE, 4, DEQUANT_FEW_EVEN),
        (528, DEQUANT_FEW_MORE, 4, DEQUANT_FEW_EVEN),
        (529, DEQUANT_FEW_EVEN, 1, DEQUANT_FEW_EVEN),
    ],
)
def test_each_tile_gets_a_block_or_each_sm_as_many_tiles(
    tiles: int, shape: DequantShape, blocks: int, wide: DequantShape
) -> None:
    how = plan(NVFP4, tiles, 64 * tiles, 2048, 1)
    assert how.dequant is not None and how.dequant.shape is shape
    assert how.blocks == blocks * 132
    assert few_shape(tiles, 7168, NVFP4, 132) is wide, "a token of such a width leaves little room for weights"
    assert few_shape(tiles, 2880, MXFP8, 132) is wide, "nor do three units of 64 in a stage"
    assert plan(NVFP4, tiles, 64 * tiles, 2048, 1, sm_limit=100).dequant.shape is DEQUANT_DECODE  # type: ignore[union-attr]


def test_a_second_product_puts_off_its_loads_until_those_of_the_first_end() -> None:
    """8 experts of Qwen3-235B-A22B have 57 MB of gate and up, which take 13.5 us; 8 of Qwen3-30B-A3B less than 4."""
    for experts, n, k, least, most in ((8, 3072, 4096, 9000, 10000), (8, 1536, 2048, 0, 0)):
        how = plan(NVFP4, 128, n, k, experts).dequant
        assert how is not None and how.shape is DEQUANT_FEW and least <= how.next_loads_ns <= most
        tma = plan(FP8_BLOCK, 128, n, k, experts).tma
        # 101 MB would take 24 us, but they are 192 tiles for 132 SMs. The 25 MB of the others are 96 tiles.
        assert tma is not None and tma.shape is TMA_FEW and tma.next_loads_ns == (0 if n == 3072 else 1992)
    many = plan(NVFP4, 128, 3072, 4096, 4096).dequant
    assert many is not None and many.next_loads_ns == 0, "only a few rows"


@pytest.mark.parametrize("form", ["dequantized", "scales_in_record"])
def test_rows_that_only_prepacked_weights_take(form: str) -> None:
    assert plan(NVFP4, 8, 512, 512, 128, **{form: True}).kernel is GemmKernel.DEQUANT
    name = {"dequantized": "a.dequantized", "scales_in_record": "a.scales_in_record"}[form]
    for more in ({"engine": "triton"}, {"engine": "torch"}, {"prepacked": False}):
        with pytest.raises(ValueError, match=rf"^{name}: expected "):
            plan(NVFP4, 8, 512, 512, 128, **{form: True}, **more)


def test_operations() -> None:
    """Blackwell multiplies their NVFP4 and MXFP8 as they are; weights that Hopper's kernel cannot read are restored."""
    for fmt in (NVFP4, MXFP8):
        ready = plan(fmt, 4, 512, 512, 100, operation=True)
        assert ready.kernel is GemmKernel.DEQUANT and not ready.restores
        off = plan(fmt, 4, 512, 512, 100, operation=True, aligned=False)
        assert off.kernel is GemmKernel.TRITON and off.restores
        assert plan(fmt, 4, 512, 512, 100, aligned=False).kernel is GemmKernel.DEQUANT, "a layer's are an error"
        more = {"engine": "triton", "capability": (10, 0), "prepacked": False}
        assert plan(fmt, 4, 512, 512, 100, **more).native is NativeForm.NONE
        native = plan(fmt, 4, 512, 512, 100, operation=True, max_tile_n=64, **more)
        assert native.native is NativeForm.AS_STORED and native.triton == GemmTile(128, 64, 128, 4, 2)
    assert plan(FP8_BLOCK, 4, 512, 512, 100, operation=True).kernel is GemmKernel.TMA


def test_a_plan_is_frozen_and_kept() -> None:
    assert plan(NVFP4, 8, 512, 512, 128) is plan(NVFP4, 8, 512, 512, 128)
    with pytest.raises(FrozenInstanceError):
        plan(NVFP4, 8, 512, 512, 128).blocks = 3  # type: ignore[misc]
    assert set(FORMATS) <= set(WEIGHT_FORMATS)
