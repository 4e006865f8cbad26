"""The operations on the shapes that their seeds test, at full size: float64 products on the GPU, element by element."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.support.comparison import assert_same_bits
from tests.support.op_cases import E4M3, E5M2, SEED_GROUPS, check, fp8, mxfp8, nvfp4_closed, nvfp4_dense

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

POWERS = (128, 256, 512, 4096, 8192)


@pytest.fixture
def gpu_rng(seed: int, device: torch.device) -> torch.Generator:
    """Draws on the GPU, where the large operands are packed too."""
    return torch.Generator(device).manual_seed(seed)


@pytest.mark.parametrize("offsets_dtype", [torch.uint32, torch.int32], ids=str)
@pytest.mark.parametrize("ids", [None, [0, 3, 2, 4], [-1, 0, 2], [-1, -1, -1]], ids=str)
@pytest.mark.parametrize("sizes", SEED_GROUPS, ids=str)
def test_dynamic_scaled_nvfp4(
    sizes: list[int],
    ids: list[int] | None,
    offsets_dtype: torch.dtype,
    gpu_rng: torch.Generator,
    device: torch.device,
) -> None:
    """(E, N, K) is (6, 4096, 7168); fewer ids than sizes use the first groups."""
    sizes = sizes if ids is None else sizes[: len(ids)]
    ids = None if ids is None else ids[: len(sizes)]
    case = nvfp4_dense(sizes, 4096, 7168, gpu_rng, device, ids=ids, num_experts=6, offsets_dtype=offsets_dtype)
    check(case, "triton")
    check(case.prepacked(), "auto")


@pytest.mark.parametrize(
    ("experts", "n", "k", "sizes"), [(8, 1856, 2688, [3, 1, 5, 2]), (4, 2048, 1024, [0, 256, 0, 512])], ids=str
)
def test_dynamic_scaled_nvfp4_of_other_models(
    experts: int, n: int, k: int, sizes: list[int], gpu_rng: torch.Generator, device: torch.device
) -> None:
    active = torch.tensor(len(sizes), dtype=torch.int32, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = nvfp4_dense(sizes, n, k, gpu_rng, device, num_experts=experts, gaps=dtype == torch.float16)
        check(case, "triton", dtype, num_active_experts=active, validate=True)
        check(case.prepacked(), "auto", dtype, num_active_experts=active, validate=True)


@pytest.mark.parametrize("m", [4, 128, 512])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_nvfp4_groupwise(m: int, groups: int, gpu_rng: torch.Generator, device: torch.device) -> None:
    """All tile and swap arguments give the same bits."""
    for n, k in itertools.product((128, 256, 512), repeat=2):
        case = nvfp4_closed([m] * groups, n, k, gpu_rng, device)
        check(case.prepacked(), "auto")
        check(case, "triton", torch.float16)
        expected = check(case, "triton")
        for tile_n, tile_k, swap in itertools.product((32, 64, 128), (128, 256), (True, False)):
            out = case.run(engine="triton", tile_m=128, tile_n=tile_n, tile_k=tile_k, swap_ab=swap)
            assert_same_bits(out, expected, f"tile_n {tile_n}, tile_k {tile_k}, swap_ab {swap}")


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (256, 2176), (3008, 2960)])
def test_mxfp8(n: int, k: int, block: int, gpu_rng: torch.Generator, device: torch.device) -> None:
    """Groups are the seed's alone, with a single row between, and all at once; prepacked weights want whole blocks."""
    rows = (0, 1, 8, 12, 15, 16, 32, 64, 376)
    for sizes in (*([m, 1, m] for m in rows), [376], list(rows)):
        case = mxfp8(sizes, n, k, gpu_rng, device, block=block)
        check(case, "triton")
        if k % 32 == 0:
            check(case.prepacked(), "auto")


@pytest.mark.parametrize("n", POWERS)
@pytest.mark.parametrize("k", POWERS)
def test_fp8(n: int, k: int, gpu_rng: torch.Generator, device: torch.device) -> None:
    """Rows of each group 4 to 8192; 1 to 8 groups, granularities, majors, dtypes and output dtypes in any order."""
    pick = random.Random(f"{n} {k}").choice
    for m in (4, *POWERS):
        for gm in (1,) if m % 128 else (1, 128):
            groups = min(pick((1, 2, 4, 8)), max(1, 8192 // m))
            case = fp8([m] * groups, n, k, gpu_rng, device, gm=gm, major=pick(("K", "MN")), dtype=pick((E4M3, E5M2)))
            for engine in ("auto", "triton"):
                check(case, engine, pick((torch.bfloat16, torch.float16)), mma_sm=pick((1, 2)))


@pytest.mark.parametrize("gm", [1, 128])
@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_in_every_form(
    gm: int, major: str, dtype: torch.dtype, gpu_rng: torch.Generator, device: torch.device
) -> None:
    """Also where groups differ in size, and the last block of rows is partial."""
    for sizes, n, k in (([128, 0, 384, 60], 4096, 7168), ([256, 128, 4], 136, 2048), ([8192], 512, 512)):
        case = fp8(sizes, n, k, gpu_rng, device, gm=gm, major=major, dtype=dtype)
        for engine in ("auto", "triton"):
            check(case, engine)


def test_fp8_groups_that_share_a_block_of_rows_are_refused(gpu_rng: torch.Generator, device: torch.device) -> None:
    case = fp8([4, 252], 128, 256, gpu_rng, device, gm=128)
    with pytest.raises(ValueError, match=r"^m_indptr: expected groups to start at multiples of 128"):
        case.run(validate=True)
