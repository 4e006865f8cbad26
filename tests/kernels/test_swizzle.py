"""The 128x4 swizzle against its formula written out as a loop; and back."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moe_runtime.kernels.formats import scale_blocks
from moe_runtime.kernels.formats.bits import swizzled_offset
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from tests.support.comparison import assert_same_bits

SHAPES = [(1, 1), (3, 5), (127, 4), (128, 8), (129, 7), (300, 18), (0, 8), (5, 0)]


def brute_force(scales: torch.Tensor) -> torch.Tensor:
    r_count, v_count = scales.shape
    blocks, atoms = -(-r_count // 128), -(-v_count // 4)
    flat = torch.zeros(blocks * atoms * 512, dtype=torch.uint8)
    for r in range(r_count):
        for v in range(v_count):
            flat[(r // 128) * atoms * 512 + (v // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + v % 4] = scales[
                r, v
            ]
    return flat.view(blocks, atoms, 32, 4, 4)


def random_scales(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=rng).to(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle_is_the_formula(shape: tuple[int, int], device: torch.device, rng) -> None:
    scales = random_scales(rng, *shape)
    blocks = swizzle_scales(scales.to(device))
    assert_same_bits(blocks, brute_force(scales))
    assert blocks.is_contiguous()
    assert_same_bits(unswizzle_scales(blocks, *shape), scales)


def test_weights_get_the_expert_in_front(device: torch.device, rng) -> None:
    scales = random_scales(rng, 3, 130, 6)
    blocks = swizzle_scales(scales.to(device))
    assert tuple(blocks.shape) == (3, 2, 2, 32, 4, 4)
    assert_same_bits(blocks, torch.stack([brute_force(s) for s in scales]))
    assert_same_bits(unswizzle_scales(blocks, 130, 6), scales)


def test_dtype_strides_and_fewer_rows(device: torch.device, rng) -> None:
    wide = random_scales(rng, 2, 140, 20).to(device)[:, 3:, 2:11]
    assert not wide.is_contiguous()
    blocks = swizzle_scales(wide.contiguous().view(torch.float8_e4m3fn))
    assert blocks.dtype == torch.float8_e4m3fn
    assert_same_bits(swizzle_scales(wide), blocks.view(torch.uint8))
    aligned = random_scales(rng, 128 * 8 + 3).to(device)[3:].view(1, 128, 8)
    assert_same_bits(swizzle_scales(aligned)[0], brute_force(aligned[0].cpu()))
    assert_same_bits(unswizzle_scales(blocks, 7, 9), wide[:, :7].view(torch.float8_e4m3fn))
    shifted = torch.cat([torch.zeros(3), blocks.view(torch.uint8).cpu().flatten()]).to(torch.uint8).to(device)[3:]
    assert_same_bits(unswizzle_scales(shifted.view(blocks.shape), 7, 9), wide[:, :7])


def test_padding_is_zero_and_not_read(device: torch.device, rng) -> None:
    scales = random_scales(rng, 130, 5)
    blocks = swizzle_scales(scales.to(device))
    assert int((blocks != 0).sum()) == 130 * 5
    blocks[blocks == 0] = 0xA5
    assert_same_bits(unswizzle_scales(blocks, 130, 5), scales)


@triton.jit
def _offset_kernel(out_ptr, rows, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, swizzled_offset(i // columns, i % columns, columns), i < rows * columns)


def test_offsets_of_kernel_and_host_are_one_formula(device: torch.device) -> None:
    rows, columns = 260, 7
    out = torch.full((rows, columns), -1, dtype=torch.int32, device=device)
    _offset_kernel[(triton.cdiv(rows * columns, 1024),)](out, rows, columns, BLOCK=1024)
    expected = [[scale_blocks.swizzled_offset(r, v, columns) for v in range(columns)] for r in range(rows)]
    assert out.tolist() == expected
    assert len(set(out.flatten().tolist())) == rows * columns
    assert [scale_blocks.swizzled_offset(r, v, 4) for r, v in [(0, 1), (1, 0), (32, 0), (128, 0)]] == [1, 16, 4, 512]


def test_bad_input(device: torch.device) -> None:
    scales = torch.zeros(8, 8, dtype=torch.uint8, device=device)
    for bad in (scales[0], scales[None, None], scales.float(), scales.t()[:, :3].t()[:, ::2]):
        with pytest.raises(ValueError, match="scales_RV"):
            swizzle_scales(bad)
    blocks = swizzle_scales(scales)
    for bad, rows, columns in (
        (blocks[0], 8, 8),
        (blocks, 129, 8),
        (blocks, 8, 9),
        (blocks.view(1, 2, 32, 16), 8, 8),
        (blocks.int(), 8, 8),
        (blocks.transpose(3, 4), 8, 8),
        (blocks, -1, 8),
    ):
        with pytest.raises(ValueError, match=r"blocks|num_rows"):
            unswizzle_scales(bad, rows, columns)
    with pytest.raises(ValueError, match="engine"):
        swizzle_scales(scales, engine="")
