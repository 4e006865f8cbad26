"""MAX's token messages are written, read and taken apart."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch

from moe_runtime.kernels.formats import scale_blocks
from moe_runtime.kernels.formats.number_formats import NVFP4
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.formats.swizzle import swizzle_scales, unswizzle_scales
from moe_runtime.ops import token_format
from moe_runtime.ops.token_format import NVFP4TokenFormat
from tests.support.comparison import assert_same_bits

GSF = 300.0


def test_worked_examples() -> None:
    results = doctest.testmod(token_format)
    assert results.attempted >= 3
    assert results.failed == 0


def test_the_sizes_of_an_nvfp4_message() -> None:
    token = NVFP4TokenFormat(7168, 8)
    assert (token.group_size, token.hid_dim, token.top_k, token.alignment) == (16, 7168, 8, 16)
    assert (token.fp4_quant_size(), token.scales_size(), token.token_size()) == (3584, 448, 4032)
    assert token.scales_offset() == token.fp4_quant_size()
    assert token.msg_size() == 4032 + 16 + 16
    odd = NVFP4TokenFormat(hid_dim=48, top_k=3, alignment=128)
    assert (odd.fp4_quant_size(), odd.scales_size(), odd.msg_size()) == (128, 128, 512)
    assert token.get_type_name() == "NVFP4TokenFormat[hid_dim=7168, top_k=8, alignment=16]"


def test_pad_expert_offsets_fills_the_bound_tensor(device: torch.device) -> None:
    bound = torch.full((5,), 99, dtype=torch.int32, device=device).view(torch.uint32)
    token = NVFP4TokenFormat(64, 2, output_scales_offset=bound)
    rows = torch.tensor([0, 100, 300, 400], dtype=torch.int32, device=device).view(torch.uint32)
    assert token.pad_expert_offsets(rows).tolist() == [0, 1, 1]
    assert bound.view(torch.int32).tolist() == [0, 1, 1, 99, 99]
    with pytest.raises(ValueError, match="row_offsets"):
        token.pad_expert_offsets(torch.zeros(8, dtype=torch.int32, device=device))


def test_message_round_trip(device: torch.device, rng) -> None:
    hidden, top_k, count, gsf = 384, 3, 5, GSF
    message = NVFP4TokenFormat(hidden, top_k, 64)
    x = torch.randn(count, hidden, generator=rng).to(torch.bfloat16).to(device)
    # An odd row stride: nothing may rely on the buffer being aligned.
    buf = torch.full((count, message.msg_size() + 3), 0xA5, dtype=torch.uint8, device=device)
    source = torch.tensor([7, 0, -1, 2**31 - 1, 12], device=device)
    ids = torch.tensor([[0, 65534, -1], [1, 2, 3], [-1, -1, -1], [300, 40000, 5], [9, 8, 7]], device=device)
    message.copy_token_to_send_buf(buf, x, gsf)
    message.write_info(buf, source, ids)

    rows = quantize_rows(x, NVFP4, gsf=gsf)
    back = message.read_token(buf, gsf)
    assert_same_bits(back.quants_RK, rows.quants_RK)
    assert_same_bits(dequantize_rows(back), dequantize_rows(rows))
    assert message.read_token(buf, 2.0**120).row_scale_R.tolist() == [2.0**-100] * count
    huge = torch.tensor([2.0**120], device=device)
    assert message.read_token(buf, huge).row_scale_R.tolist() == [2.0**-100] * count
    read_source, read_ids = message.read_info(buf)
    assert read_source.tolist() == source.tolist()
    assert read_ids.tolist() == ids.tolist()
    used = torch.zeros(message.msg_size() + 3, dtype=torch.bool)
    for start, size in (
        (0, NVFP4.quant_bytes(hidden)),
        (message.scales_offset(), NVFP4.scale_bytes(hidden)),
        (message.src_info_offset(), 4),
        (message.topk_info_offset(), 2 * top_k),
    ):
        used[start : start + size] = True
    assert (buf[:, ~used.to(device)] == 0xA5).all()  # gaps keep what they held

    one = torch.full((message.msg_size(),), 0xA5, dtype=torch.uint8, device=device)
    message.copy_token_to_send_buf(one, x[3], gsf)
    message.write_info(one, source[3], ids[3])
    assert_same_bits(one, buf[3, : message.msg_size()])
    assert [t.tolist() for t in message.read_info(one)] == [source[3].tolist(), ids[3].tolist()]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_messages_at_odd_addresses(count: int, device: torch.device, rng) -> None:
    """Of an odd length, from an odd byte on; none of them with the strides that numpy gives, which are 0."""
    hidden, top_k = 256, 3
    v = NVFP4.scale_columns(hidden)
    tokens = torch.zeros(4, hidden // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros((1, v // 4, 32, 4, 4), dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    message = NVFP4TokenFormat(hidden, top_k, output_tokens=tokens, output_scales=scales)
    message.pad_expert_offsets(torch.tensor([0, 4], device=device))
    size = message.msg_size()
    plain = torch.randint(0, 256, (count, size), generator=rng).to(torch.uint8).numpy()
    storage = torch.zeros(1 + count * (size + 1), dtype=torch.uint8, device=device)
    odd = storage[1:].view(count, size + 1)[:, :size]
    bufs = [odd] if count else [odd, torch.from_numpy(np.zeros((0, size), np.uint8)).to(device)]
    quants = plain[:, : NVFP4.quant_bytes(hidden)]
    linear = plain[:, message.scales_offset() :][:, : NVFP4.scale_bytes(hidden)]
    for buf in bufs:
        buf.copy_(torch.from_numpy(plain))
        rows = message.read_token(buf, GSF)
        assert_same_bits(rows.quants_RK.view(torch.uint8), quants)
        assert rows.scales_RV is not None
        assert_same_bits(rows.scales_RV.view(torch.uint8), linear)
        source, ids = message.read_info(buf)
        wanted = plain[:, message.src_info_offset() :][:, :4].copy().view(np.int32)[:, 0]
        assert_same_bits(source, wanted)
        wanted = plain[:, message.topk_info_offset() :][:, : 2 * top_k].copy().view(np.uint16).astype(np.int32)
        assert_same_bits(ids, np.where(wanted == 65535, np.int32(-1), wanted))
        message.copy_msg_to_output_tensor(buf, torch.arange(count, device=device))
        assert_same_bits(tokens[:count], quants)
        written = unswizzle_scales(scales, 4, v)[:count]
        assert_same_bits(written.contiguous().view(torch.uint8), linear)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int64])
def test_indices_of_any_integers(dtype: torch.dtype, device: torch.device) -> None:
    token = token_of_400_rows(device)
    token.pad_expert_offsets(torch.tensor([0, 400], device=device))
    buf = torch.zeros(2, token.msg_size(), dtype=torch.uint8, device=device)
    index, ids = torch.tensor([7, 100]).to(device, dtype), torch.tensor([[0, 1], [127, 2]]).to(device, dtype)
    token.write_info(buf, index, ids)
    assert [t.tolist() for t in token.read_info(buf)] == [index.tolist(), ids.tolist()]
    if dtype == torch.uint32:
        with pytest.raises(ValueError, match=r"^source: expected .*4294967295"):
            token.write_info(buf, torch.full_like(index, 2**32 - 1), ids)
    buf[:, 0] = 1
    token.copy_msg_to_output_tensor(buf, index)
    assert token.output_tokens is not None and token.output_tokens[:, 0].nonzero()[:, 0].tolist() == [7, 100]


@pytest.mark.parametrize("dtype", [torch.uint64, torch.bool, torch.float32, torch.complex64])
def test_indices_that_int64_does_not_hold(dtype: torch.dtype, device: torch.device) -> None:
    token = token_of_400_rows(device)
    token.pad_expert_offsets(torch.tensor([0, 400], device=device))
    buf = torch.zeros(2, token.msg_size(), dtype=torch.uint8, device=device)
    index, ids = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)
    for call, name in (
        (lambda: token.write_info(buf, index.to(dtype), ids), "source"),
        (lambda: token.write_info(buf, index, ids.to(dtype)), "topk_idx"),
        (lambda: token.copy_msg_to_output_tensor(buf, index.to(dtype)), "token_index"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected integers that fit in int64, got {dtype}"):
            call()


def test_ids_that_are_a_column(device: torch.device) -> None:
    """The stride of a dimension of size 1 is any."""
    message = NVFP4TokenFormat(64, 1)
    buf = torch.zeros(3, message.msg_size(), dtype=torch.uint8, device=device)
    ids = torch.tensor([[4, -1, 9]], dtype=torch.int16, device=device).t()
    assert ids.stride() == (1, 3)
    message.write_info(buf, torch.arange(3, device=device), ids)
    assert message.read_info(buf)[1].tolist() == [[4], [-1], [9]]


def test_copy_msg_to_output_tensor_swizzles_into_dense_128(device: torch.device, rng) -> None:
    hidden = 96  # 6 scale columns: not a multiple of 4
    counts = [100, 0, 200, 1]
    rows = torch.tensor([0, 100, 100, 300, 301], dtype=torch.int32, device=device)
    blocks = scale_blocks.dense_128_blocks_needed(301, 4)
    tokens = torch.full((310, hidden // 2), 0xA5, dtype=torch.uint8, device=device)
    scales = torch.full((blocks, 2, 32, 4, 4), 0xA5, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    token = NVFP4TokenFormat(hidden, 2, output_tokens=tokens, output_scales=scales)
    x = torch.randn(301, hidden, generator=rng).to(device)
    buf = torch.zeros(301, token.msg_size(), dtype=torch.uint8, device=device)
    token.copy_token_to_send_buf(buf, x, GSF)
    offsets = token.pad_expert_offsets(rows)

    order = torch.randperm(301, generator=rng).to(device)
    token.copy_msg_to_output_tensor(buf[order[:-1]], order[:-1])
    token.copy_msg_to_output_tensor(buf[order[-1]], int(order[-1]))

    quantized = quantize_rows(x, NVFP4, gsf=GSF)
    assert_same_bits(tokens[:301], quantized.quants_RK)
    assert (tokens[301:] == 0xA5).all()
    expected = torch.full_like(scales.view(torch.uint8), 0xA5)
    for g, count in enumerate(counts):
        first, start = int(rows[g]), int(rows[g]) // 128 + int(offsets[g])
        swizzled = swizzle_scales(quantized.scales_RV[first : first + count]).view(torch.uint8)
        ones = torch.ones(count, 6, dtype=torch.uint8, device=device)
        written = swizzle_scales(ones).bool()
        expected[start : start + len(swizzled)][written] = swizzled[written]
    assert_same_bits(scales.view(torch.uint8), expected)


def block_of_row_300(token: NVFP4TokenFormat) -> int:
    """The block of 128 rows that has scales once row 300 was copied."""
    assert token.output_scales is not None
    scales = token.output_scales.view(torch.uint8)
    buf = torch.zeros(token.token_size(), dtype=torch.uint8, device=scales.device)
    token.copy_token_to_send_buf(buf, torch.ones(64, device=scales.device), 1.0)
    token.copy_msg_to_output_tensor(buf, 300)
    return int(scales.flatten(1).any(1).nonzero())


def token_of_400_rows(device: torch.device) -> NVFP4TokenFormat:
    scales = torch.zeros(6, 1, 32, 4, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    tokens = torch.zeros(400, 32, dtype=torch.uint8, device=device)
    return NVFP4TokenFormat(64, 2, output_tokens=tokens, output_scales=scales)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_row_offsets_are_kept(dtype: torch.dtype, device: torch.device) -> None:
    """A caller may use its buffer of row offsets again."""
    token, rows = token_of_400_rows(device), torch.tensor([0, 100, 300, 400], dtype=torch.int32, device=device)
    assert token.pad_expert_offsets(rows.view(dtype)).tolist() == [0, 1, 1]
    rows.copy_(torch.tensor([0, 10, 20, 400]))
    assert block_of_row_300(token) == 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize("bad", [[100, 300], [0, 300, 100], [-5, 300], [0, 401]], ids=str)
def test_wrong_row_offsets(bad: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Refused by name, on a GPU when a message is copied; nothing is written."""
    token = token_of_400_rows(device)
    rows = torch.tensor(bad, device=device)
    rows = rows.to(torch.int32).view(dtype) if dtype == torch.uint32 else rows.to(dtype)
    token.output_scales_offset = torch.full((2,), 99, dtype=torch.int32, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"^row_offsets: expected"):
            token.pad_expert_offsets(rows)
        assert token.row_offsets is None and token.output_scales_offset.tolist() == [99, 99]
        token.row_offsets = rows.view(torch.int32) if dtype == torch.uint32 else rows
    else:
        token.pad_expert_offsets(rows)
    message = torch.full((token.token_size(),), 0x38, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"^row_offsets: expected"):
        token.copy_msg_to_output_tensor(message, 50)
    assert not token.output_tokens.any() and not token.output_scales.view(torch.uint8).any()


def test_nothing_is_written_where_the_scales_have_no_room(device: torch.device) -> None:
    token = token_of_400_rows(device)
    assert token.output_scales is not None and token.output_tokens is not None
    token.output_scales = token.output_scales[:2]
    token.pad_expert_offsets(torch.tensor([0, 400], device=device))
    message = torch.full((2, token.token_size()), 0x38, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"^output_scales: expected more than 2 blocks"):
        token.copy_msg_to_output_tensor(message, torch.tensor([0, 300], device=device))
    assert not token.output_tokens.any()


@pytest.mark.gpu
def test_row_offsets_are_kept_by_each_replay(device: torch.device) -> None:
    token, rows = token_of_400_rows(device), torch.tensor([0, 10, 20, 400], dtype=torch.int32, device=device)
    token.pad_expert_offsets(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offsets = token.pad_expert_offsets(rows)
    rows.copy_(torch.tensor([0, 100, 300, 400]))
    graph.replay()
    rows.zero_()
    assert offsets.tolist() == [0, 1, 1]
    assert block_of_row_300(token) == 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: NVFP4TokenFormat(40, 2), "hid_dim"),
        (lambda: NVFP4TokenFormat(64, 0), "top_k"),
        (lambda: NVFP4TokenFormat(64, 2, 24), "alignment"),
        (lambda: NVFP4TokenFormat(64, 2, 2), "alignment"),
        (lambda: NVFP4TokenFormat(64, 2, output_tokens=torch.zeros(4, 64, dtype=torch.uint8)), "output_tokens"),
        (lambda: NVFP4TokenFormat(64, 2, output_scales=torch.zeros(1, 1, 32, 4, 4)), "output_scales"),
        (lambda: NVFP4TokenFormat(64, 2, output_scales_offset=torch.zeros(3)), "output_scales_offset"),
    ],
)
def test_bad_construction(call, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()


def test_bad_calls() -> None:
    tokens, scales = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(1, 1, 32, 4, 4).to(torch.float8_e4m3fn)
    token = NVFP4TokenFormat(64, 2, output_tokens=tokens, output_scales=scales)
    buf, x = torch.zeros(3, token.msg_size(), dtype=torch.uint8), torch.zeros(3, 64)
    source = torch.zeros(3, dtype=torch.int64)
    for call, name in (
        (lambda: token.copy_token_to_send_buf(buf[:2], x, 1.0), "buf"),
        (lambda: token.copy_token_to_send_buf(buf.int(), x, 1.0), "buf"),
        (lambda: token.copy_token_to_send_buf(buf[:, :30], x, 1.0), "buf"),
        (lambda: token.copy_token_to_send_buf(buf, x[:, :48], 1.0), "src"),
        (lambda: token.copy_token_to_send_buf(buf, x), "input_scale"),
        (lambda: token.copy_token_to_send_buf(buf, x, -1.0), "^input_scale"),
        (lambda: token.copy_token_to_send_buf(buf, x, torch.ones(2)), "^input_scale"),
        (lambda: token.copy_token_to_send_buf(buf, x.half(), 1.0), "^src"),
        (lambda: token.copy_token_to_send_buf(buf, x.to("meta"), 1.0), "^src"),
        (lambda: token.read_token(buf), "^input_scale"),
        (lambda: token.read_token(buf, 0.0), "^input_scale"),
        (lambda: token.read_token(buf, torch.ones(2)), "^input_scale"),
        (lambda: token.read_token(None, 1.0), "^buf: expected a tensor, got NoneType"),  # type: ignore[arg-type]
        (lambda: token.read_info(None), "^buf: expected a tensor, got NoneType"),  # type: ignore[arg-type]
        (lambda: token.write_info(None, source, source), "^buf: expected a tensor"),  # type: ignore[arg-type]
        (lambda: token.write_info(buf, [0], source), "^source: expected a tensor"),  # type: ignore[arg-type]
        (lambda: token.copy_token_to_send_buf(buf, x, "1"), "^input_scale: expected a positive"),  # type: ignore[arg-type]
        (lambda: token.write_info(buf, source, torch.zeros(3, 3, dtype=torch.int32)), "^topk_idx"),
        (lambda: token.write_info(buf, source, torch.zeros(3, 2)), "^topk_idx: expected integers"),
        (lambda: token.write_info(buf, source, torch.full((3, 2), 65535)), "^topk_idx: expected -1 .. 65534"),
        (lambda: token.write_info(buf, source, torch.full((3, 2), -2)), "^topk_idx"),
        (lambda: token.write_info(buf, source + 2**31, torch.zeros(3, 2, dtype=torch.int32)), "^source"),
        (lambda: token.copy_msg_to_output_tensor(buf[0], 1.5), "^token_index"),  # type: ignore[arg-type]
        (lambda: token.copy_msg_to_output_tensor(buf[0].to("meta"), 0), "^buf"),
        (lambda: NVFP4TokenFormat(64, 2, output_tokens=tokens, output_scales=scales.to("meta")), "^output_scales"),
        (lambda: token.copy_msg_to_output_tensor(buf[0], 0), "pad_expert_offsets"),
        (lambda: token.pad_expert_offsets([0, 2, 4]), "row_offsets: expected a tensor, got list"),  # type: ignore[arg-type]
        (lambda: NVFP4TokenFormat(64, 2).copy_msg_to_output_tensor(buf[0], 0), "output_tokens"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    token.pad_expert_offsets(torch.tensor([0, 2, 4]))
    for index in (-1, 4):
        with pytest.raises(ValueError, match="token_index"):
            token.copy_msg_to_output_tensor(buf[0], index)
    with pytest.raises(ValueError, match="output_scales"):
        token.copy_msg_to_output_tensor(buf[0], 2)
