"""MAX's `NVFP4TokenFormat`: an NVFP4 token as a message, with the names of MAX.

Messages are written and read with tensor operations, one or many at a time. The dispatcher does not use them: its wire
record is `moe_runtime.kernels.exchange.record.RecordLayout`.
"""

from __future__ import annotations

from types import EllipsisType

import torch

from moe_runtime.kernels.exchange.record import DEFAULT_ALIGNMENT, NO_EXPERT, check_alignment, check_top_k
from moe_runtime.kernels.formats import scale_blocks
from moe_runtime.kernels.formats.number_formats import MAX_ENCODE_SCALE, NVFP4, QuantizedRows, align, ceil_div
from moe_runtime.kernels.formats.quantize import check_gsf, quantize_rows
from moe_runtime.kernels.formats.reference_quantize import copy_as, raw_bits
from moe_runtime.ops.arguments import check_device
from moe_runtime.support.arguments import check_elements_apart, check_integer, check_is_tensor, check_no_grad

INTEGERS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)
"""Dtypes of indices that int64 holds."""


class NVFP4TokenFormat:
    """A token on the wire: `[quants] [scales, linear] [source index i32] [top-k ids u16 x top_k]`, each field aligned.

    Args:
        hid_dim: width of a token `H`, a multiple of 16.
        top_k: experts of a token.
        alignment: bytes, a power of two from 4 on; 0 means 16.
        output_tokens: `copy_msg_to_output_tensor` writes quants there, uint8 `[R, H/2]`.
        output_scales: it writes scales there, e4m3, contiguous `[blocks, ceil(H/64), 32, 4, 4]`.
        output_scales_offset: int32 or uint32 `[>= G]` that `pad_expert_offsets` fills in.

    Raises:
        ValueError: an argument that does not fit.

    >>> token = NVFP4TokenFormat(hid_dim=7168, top_k=8)
    >>> token.group_size, token.fp4_quant_size(), token.scales_size(), token.token_size(), token.msg_size()
    (16, 3584, 448, 4032, 4064)
    """

    group_size = NVFP4.block
    """Elements that share one block scale."""

    def __init__(
        self,
        hid_dim: int,
        top_k: int,
        alignment: int = 0,
        *,
        output_tokens: torch.Tensor | None = None,
        output_scales: torch.Tensor | None = None,
        output_scales_offset: torch.Tensor | None = None,
    ) -> None:
        for name, value in (("hid_dim", hid_dim), ("top_k", top_k), ("alignment", alignment)):
            check_integer(name, value, None)
        outputs = (output_tokens, output_scales, output_scales_offset)
        for name, output in zip(("output_tokens", "output_scales", "output_scales_offset"), outputs, strict=True):
            if output is not None:
                check_elements_apart(name, check_is_tensor(name, output))
        NVFP4.check_columns(hid_dim, "hid_dim")
        check_top_k(top_k)
        self.hid_dim = hid_dim
        self.top_k = top_k
        self.alignment = alignment or DEFAULT_ALIGNMENT
        check_alignment(self.alignment)
        self.output_tokens = output_tokens
        self.output_scales = output_scales
        self.output_scales_offset = output_scales_offset
        self.row_offsets: torch.Tensor | None = None
        self._check_outputs()

    def get_type_name(self) -> str:
        return f"{type(self).__name__}[hid_dim={self.hid_dim}, top_k={self.top_k}, alignment={self.alignment}]"

    def fp4_quant_size(self) -> int:
        """Bytes of the field of the quants."""
        return align(NVFP4.quant_bytes(self.hid_dim), self.alignment)

    def scales_size(self) -> int:
        """Bytes of the field of the scales."""
        return align(NVFP4.scale_bytes(self.hid_dim), self.alignment)

    def scales_offset(self) -> int:
        return self.fp4_quant_size()

    def token_size(self) -> int:
        """Bytes of quants and scales together."""
        return self.fp4_quant_size() + self.scales_size()

    def src_info_offset(self) -> int:
        return self.token_size()

    def src_info_size(self) -> int:
        return align(4, self.alignment)

    def topk_info_offset(self) -> int:
        return self.src_info_offset() + self.src_info_size()

    def topk_info_size(self) -> int:
        return align(2 * self.top_k, self.alignment)

    def msg_size(self) -> int:
        """Bytes of the whole message."""
        return self.topk_info_offset() + self.topk_info_size()

    def copy_token_to_send_buf(
        self,
        buf: torch.Tensor,
        src: torch.Tensor,
        input_scale: float | torch.Tensor | None = None,
        *,
        engine: str = "auto",
    ) -> None:
        """Quantize a token into the quants and scales of a message; the rest of `buf` is unchanged.

        Args:
            buf: uint8 `[>= token_size()]`, or `[T, >= token_size()]` for `T` tokens.
            src: bf16 or fp32 `[hid_dim]` or `[T, hid_dim]`.
            input_scale: the ENCODE scale (1 / the checkpoint's `input_scale`), which the message does not carry.
            engine: "auto", "cuda", "triton" or "torch", of the quantizer.
        """
        check_device("buf", buf)
        check_elements_apart("buf", buf)
        check_no_grad("src", check_is_tensor("src", src))
        if src.ndim not in (1, 2) or src.shape[-1] != self.hid_dim or src.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"src: expected bfloat16 or float32 [{self.hid_dim}] or [T, {self.hid_dim}], "
                f"got {src.dtype} of shape {tuple(src.shape)}"
            )
        _check_device("src", src, buf)
        buf = self._messages(buf, self.token_size(), src.shape[:-1])
        gsf = _encode_scale(input_scale, src.device)
        rows = quantize_rows(src.reshape(-1, self.hid_dim).contiguous(), NVFP4, gsf=gsf, engine=engine)
        assert rows.scales_RV is not None
        quants, scales = self._fields(buf)
        _write(quants, rows.quants_RK)
        _write(scales, rows.scales_RV.view(torch.uint8))

    def write_info(self, buf: torch.Tensor, source: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Write source index and top-k ids into messages. Checks the values on the host.

        Args:
            buf: uint8 `[T, >= msg_size()]` or `[>= msg_size()]`.
            source: integers `[T]` or `[]`, stored as int32.
            topk_idx: integers `[T, top_k]` or `[top_k]`, -1 (stored as 65535) to 65534.
        """
        check_device("buf", buf)
        check_elements_apart("buf", buf)
        source = _check_integers("source", source, -(2**31), 2**31 - 1, buf)
        topk_idx = _check_integers("topk_idx", topk_idx, -1, NO_EXPERT - 1, buf)
        if topk_idx.shape[-1:] != (self.top_k,) or topk_idx.shape[:-1] != source.shape:
            raise ValueError(
                f"topk_idx: expected shape {(*source.shape, self.top_k)} to go with source, got {tuple(topk_idx.shape)}"
            )
        buf = self._messages(buf, self.msg_size(), source.shape)
        for offset, values, dtype in (
            (self.src_info_offset(), source.reshape(-1, 1), torch.int32),
            # The low 16 bits of -1 are 65535.
            (self.topk_info_offset(), topk_idx.reshape(-1, self.top_k), torch.int16),
        ):
            raw = copy_as(values.to(dtype), torch.uint8)
            _write(buf[:, offset : offset + raw.shape[1]], raw)

    def read_info(self, buf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(source, topk_idx)` of messages as int32 `[T]` and `[T, top_k]` (without `T` for one), -1 for no expert."""
        rows = self._messages(buf, self.msg_size(), check_is_tensor("buf", buf).shape[:-1])
        source = copy_as(rows[:, self.src_info_offset() :][:, :4], torch.int32)
        ids = copy_as(rows[:, self.topk_info_offset() :][:, : 2 * self.top_k], torch.int16).to(torch.int32)
        ids = ids & NO_EXPERT
        ids = ids.masked_fill_(ids == NO_EXPERT, -1)
        return source.reshape(buf.shape[:-1]), ids.reshape(*buf.shape[:-1], self.top_k)

    def read_token(self, buf: torch.Tensor, input_scale: float | torch.Tensor | None = None) -> QuantizedRows:
        """The quantized rows of messages `[T, >= token_size()]` (or one), scales linear, as a copy.

        `input_scale` is the encode scale they were written with; `row_scale_R` is its inverse.
        """
        rows = self._messages(buf, self.token_size(), check_is_tensor("buf", buf).shape[:-1])
        quants, scales = self._fields(rows)
        gsf = _encode_scale(input_scale, buf.device).clamp(max=MAX_ENCODE_SCALE)
        row_scale = torch.ones_like(gsf).div(gsf).repeat(rows.shape[0])
        return QuantizedRows(NVFP4, copy_as(quants, torch.uint8), copy_as(scales, torch.float8_e4m3fn), row_scale)

    def pad_expert_offsets(self, row_offsets: torch.Tensor) -> torch.Tensor:
        """`dense_128` scale offsets of groups whose rows start at `row_offsets` `[G + 1]`: int32 `[G]`.

        Also writes them to `output_scales_offset`, if given. `copy_msg_to_output_tensor` uses a copy of
        `row_offsets`, so later changes to it have no effect. The scales of group `i` start at block
        `row_offsets[i] // 128 + result[i]`. On a CPU the values are checked here, on a GPU by the copies.

        >>> NVFP4TokenFormat(64, 2).pad_expert_offsets(torch.tensor([0, 100, 300, 400]))
        tensor([0, 1, 1], dtype=torch.int32)
        """
        check_device("row_offsets", row_offsets)
        offsets = scale_blocks.dense_128_offsets(row_offsets)
        if row_offsets.device.type == "cpu":
            self._check_row_offsets(row_offsets)
        bound = self.output_scales_offset
        if bound is not None:
            if bound.shape[0] < offsets.shape[0]:
                raise ValueError(
                    f"row_offsets: expected at most {bound.shape[0]} groups (the length of output_scales_offset), "
                    f"got {offsets.shape[0]}"
                )
            _write(bound.view(torch.int32)[: offsets.shape[0]], offsets)
        self.row_offsets = (row_offsets.view(torch.int32) if row_offsets.dtype == torch.uint32 else row_offsets).clone()
        return offsets

    def copy_msg_to_output_tensor(self, buf: torch.Tensor, token_index: int | torch.Tensor) -> None:
        """Copy the quants of messages to `output_tokens[token_index]` and their scales to `output_scales`.

        The scales go to the `dense_128` position of row `token_index`, by the row offsets of the last
        `pad_expert_offsets`. Checks the values of `token_index` on the host.

        Args:
            buf: uint8 `[>= token_size()]`, or `[T, >= token_size()]`.
            token_index: packed row of the message, or integers `[T]`.
        """
        if self.output_tokens is None or self.output_scales is None:
            raise ValueError("output_tokens, output_scales: expected tensors given to the constructor, got None")
        check_device("buf", buf)
        if isinstance(token_index, torch.Tensor):
            check_device("token_index", token_index)
        else:
            check_integer("token_index", token_index, 0, 2**31 - 1)
        index = torch.as_tensor(token_index, device=self.output_tokens.device)
        if index.dtype not in INTEGERS:
            raise ValueError(f"token_index: expected integers that fit in int64, got {index.dtype}")
        index = index.to(self.output_tokens.device, torch.int64)
        _check_device("buf", buf, self.output_tokens)
        rows = self._messages(buf, self.token_size(), index.shape)
        index = index.reshape(-1)
        if self.row_offsets is None:
            raise ValueError("token_index: call pad_expert_offsets first, it says where the groups lie")
        self._check_row_offsets(self.row_offsets)
        num_rows = int(self.row_offsets[-1])
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_rows:
            raise ValueError(f"token_index: expected 0..{num_rows - 1}, got {token_index}")
        # First, since it raises if the scales do not fit.
        scale_rows = self._scale_rows(index)
        quants, scales = self._fields(rows)
        _write(self.output_tokens, quants.contiguous(), index)
        num_columns = NVFP4.scale_columns(self.hid_dim)
        column = torch.arange(num_columns, device=index.device)
        place = scale_blocks.swizzled_offset(scale_rows[:, None], column[None, :], num_columns)
        _write(raw_bits(self.output_scales).view(-1), scales.contiguous(), place)

    def _check_row_offsets(self, row_offsets: torch.Tensor) -> None:
        rows = row_offsets[-1] if self.output_tokens is None else self.output_tokens.shape[0]
        scale_blocks.check_row_offsets(row_offsets, int(rows))

    def _scale_rows(self, index: torch.Tensor) -> torch.Tensor:
        """Row of the scale container, in `dense_128`, of each contiguous row."""
        assert self.row_offsets is not None and self.output_scales is not None
        offsets = self.row_offsets.to(torch.int64)
        group = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
        start = offsets[group]
        local = index - start
        scale_offset = scale_blocks.dense_128_offsets(self.row_offsets).to(torch.int64)[group]
        block = scale_blocks.dense_128_block(start, scale_offset, local)
        if index.numel() and int(block.max()) >= self.output_scales.shape[0]:
            raise ValueError(
                f"output_scales: expected more than {int(block.max())} blocks, got {self.output_scales.shape[0]}"
            )
        return block * scale_blocks.SCALE_BLOCK_ROWS + local % scale_blocks.SCALE_BLOCK_ROWS

    def _messages(self, buf: torch.Tensor, num_bytes: int, batch: torch.Size) -> torch.Tensor:
        """`buf` as `[T, >= num_bytes]`, checked to hold messages of shape `batch`."""
        if buf.dtype != torch.uint8 or buf.shape[:-1] != batch or buf.ndim not in (1, 2) or buf.shape[-1] < num_bytes:
            raise ValueError(
                f"buf: expected uint8 of shape {(*batch, num_bytes)} or longer messages, "
                f"got {buf.dtype} of shape {tuple(buf.shape)}"
            )
        return buf if buf.ndim == 2 else buf[None]

    def _fields(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the quants and the scales of messages `[T, >= token_size()]`."""
        start = self.scales_offset()
        quants = messages[:, : NVFP4.quant_bytes(self.hid_dim)]
        return quants, messages[:, start : start + NVFP4.scale_bytes(self.hid_dim)]

    def _check_outputs(self) -> None:
        tokens, scales, offsets = self.output_tokens, self.output_scales, self.output_scales_offset
        columns = NVFP4.quant_columns(self.hid_dim)
        if tokens is not None and (tokens.ndim != 2 or tokens.shape[1] != columns or tokens.dtype != torch.uint8):
            raise ValueError(
                f"output_tokens: expected torch.uint8 [R, {columns}], got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if scales is not None:
            wanted = (ceil_div(NVFP4.scale_columns(self.hid_dim), 4), 32, 4, 4)
            fits = scales.dtype == torch.float8_e4m3fn and tuple(scales.shape[1:]) == wanted
            if not fits or not scales.is_contiguous():
                raise ValueError(
                    f"output_scales: expected contiguous torch.float8_e4m3fn [*, {', '.join(map(str, wanted))}], "
                    f"got {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}"
                )
        if scales is not None and tokens is not None:
            _check_device("output_scales", scales, tokens)
        if offsets is not None and (offsets.ndim != 1 or offsets.dtype not in (torch.int32, torch.uint32)):
            raise ValueError(
                f"output_scales_offset: expected int32 or uint32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
            )


def _encode_scale(scale: float | torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """fp32 `[1]`."""
    gsf = check_gsf(scale, NVFP4, device, "input_scale")
    if gsf is None:
        raise ValueError("input_scale: expected an encode scale, got None")
    return gsf


def _write(target: torch.Tensor, values: torch.Tensor, index: torch.Tensor | EllipsisType = ...) -> None:
    """`target[index] = values`. A tensor made in inference mode may be changed only there, any other in both modes."""
    with torch.inference_mode():
        target[index] = values


def _check_integers(argument: str, values: torch.Tensor, low: int, high: int, buf: torch.Tensor) -> torch.Tensor:
    """`values` as int64, since torch cannot compute with most unsigned integers."""
    if check_is_tensor(argument, values).dtype not in INTEGERS:
        raise ValueError(f"{argument}: expected integers that fit in int64, got {values.dtype}")
    _check_device(argument, values, buf)
    values = values.to(torch.int64)
    if values.numel() and not low <= int(values.min()) <= int(values.max()) <= high:
        raise ValueError(f"{argument}: expected {low} .. {high}, got {int(values.min())} .. {int(values.max())}")
    return values


def _check_device(argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{argument}: expected device {other.device}, got {tensor.device}")
