"""Triton kernels that copy rows compute offsets from 2^31 on in 64 bits. The memory is a file with holes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, worst_case_rows
from moe_runtime.kernels.exchange.landing import LandedTokens
from moe_runtime.kernels.exchange.padded import place_padded_rows
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.exchange.payload import PayloadLayout, pack_tokens
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import BF16, NVFP4
from moe_runtime.kernels.runtime import INTERPRET

pytestmark = [pytest.mark.cpu_only, pytest.mark.skipif(not INTERPRET, reason="the memory is the host's")]

FAR = 2**31


def memory_around(path: Path, num_bytes: int) -> torch.Tensor:
    """uint8 `[num_bytes]`, zeros, in the middle of memory in which an offset that is negative by mistake lies, too."""
    return torch.from_file(str(path), shared=True, size=3 * num_bytes, dtype=torch.uint8)[num_bytes : 2 * num_bytes]


@pytest.mark.parametrize("what", ["scales", "ids", "weights"])
def test_columns_that_lie_far_apart_are_packed(what: str, tmp_path: Path) -> None:
    layout = PayloadLayout(16, num_scales=3, top_k=3)
    tokens = torch.arange(32, dtype=torch.uint8).view(2, 16).view(torch.float8_e4m3fn)
    scales, ids, weights = torch.rand(2, 3), torch.tensor([[3, -1, 5], [7, 9, 2]]), torch.rand(2, 3)
    brought = {"scales": scales, "ids": ids, "weights": weights}
    near = brought[what]
    memory = memory_around(tmp_path / "memory", (FAR + 2) * near.element_size()).view(near.dtype)
    far = memory.as_strided((2, 3), (1, FAR // 2), memory.storage_offset())
    far.copy_(near)
    expected = pack_tokens(layout, tokens, scales, ids, weights, engine="torch")
    packed = pack_tokens(layout, tokens, **(brought | {what: far}), engine="triton")
    end = layout.weights_at + 4 * layout.top_k  # what is behind has no meaning
    assert torch.equal(packed.view(torch.uint8)[:, :end], expected.view(torch.uint8)[:, :end])


def test_swizzled_scales_of_an_expert_that_begin_far_away_are_placed(tmp_path: Path) -> None:
    """Those of the first expert take 2^31 bytes."""
    slots, num_scales = 2048, FAR // 2048
    record = RecordLayout(NVFP4, 16 * num_scales, 1)
    rows = worst_case_rows(2, 1, 1, slots)
    geometry = ExchangeGeometry(0, 1, record, BF16, 2, slots, False, rows)
    records = torch.from_file(str(tmp_path / "records"), shared=True, size=record.record_bytes, dtype=torch.uint8)
    records = records.view(1, -1)
    scales = torch.randint(1, 127, (num_scales,), dtype=torch.uint8)
    records[0, record.scales_offset : record.scales_offset + num_scales] = scales
    records[0, record.ids_offset : record.ids_offset + 2].view(torch.int16)[0] = 1
    positions = torch.full((slots, 1), -1, dtype=torch.int32)
    positions[0] = 0
    index = torch.zeros(rows, dtype=torch.int32)
    offsets = torch.tensor([0, 0, 1], dtype=torch.int32)
    landed = LandedTokens(records, index, offsets, geometry, 0, positions, torch.zeros(1, dtype=torch.int32))
    placed = memory_around(tmp_path / "scales", 2 * FAR).view(2, slots // 128, num_scales // 4, 32, 4, 4)
    out = PaddedRows(
        torch.empty(2, slots, 16, dtype=torch.uint8),
        placed,
        torch.empty(2, dtype=torch.int32),
        torch.empty(2, slots, dtype=torch.int32),
        torch.empty(2, 1, dtype=torch.int64),
        torch.empty(slots, 1, dtype=torch.int32),
        PaddedScales.SWIZZLED,
        num_scales,
    )
    place_padded_rows(landed, record.scales_offset, out, None)
    assert out.counts.tolist() == [0, 1] and out.positions[0].item() == slots
    assert torch.equal(placed[1, 0, :, 0, 0, :].flatten(), scales)
