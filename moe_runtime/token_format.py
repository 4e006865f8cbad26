"""How a token travels: byte layouts of messages, in any format, whose fields never overlap and are each aligned.

`RecordLayout` is what the dispatcher sends. `TokenMessage` is the message of MAX's `NVFP4TokenFormat`, generalised
to the other formats, with the names it has there: written and read with tensor operations, one or many at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moe_runtime import plan
from moe_runtime.arguments import check_is_tensor
from moe_runtime.formats import MAX_ENCODE_SCALE, NVFP4, QuantizedRows, TokenFormat, align, ceil_div, token_format
from moe_runtime.kernels.quantize import check_gsf, quantize_rows
from moe_runtime.kernels.reference_quantize import copy_as, raw_bits

DEFAULT_ALIGNMENT = 16
RECORD_ALIGNMENT = 128
NO_EXPERT = 65535
"""The uint16 that stands for the expert id -1."""

INTEGERS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)
"""Dtypes of indices that int64 holds."""


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of the fields of the dispatcher's record of one token, each a multiple of `alignment`.

    Record: `[quants | scales, linear | row scale f32 | source i32 | top-k ids u16 | top-k weights f32]`, in whole
    multiples of 128 bytes. The row scale is there only in formats that have one; in the others its field is empty
    (`row_scale_offset == source_offset`), as is the field of the scales in bf16. An id of 65535 means none.

    >>> layout = RecordLayout(NVFP4, hidden=64, top_k=2)
    >>> layout.scales_offset, layout.row_scale_offset, layout.source_offset, layout.ids_offset, layout.weights_offset
    (32, 48, 64, 80, 96)
    >>> layout.record_bytes
    128

    Attributes:
        format: number format of the token (a name is looked up).
        hidden: numbers in a token, whole blocks of the format.
        top_k: experts of a token.
        alignment: bytes, a power of two from 4 to 128.
    """

    format: TokenFormat
    hidden: int
    top_k: int
    alignment: int = DEFAULT_ALIGNMENT

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", token_format(self.format))
        for name in ("hidden", "top_k", "alignment"):
            _check_is_int(name, getattr(self, name))
        self.format.check_columns(self.hidden, "hidden")
        _check_top_k(self.top_k)
        _check_alignment(self.alignment, RECORD_ALIGNMENT)

    @cached_property
    def quants_offset(self) -> int:
        return 0

    @cached_property
    def scales_offset(self) -> int:
        return align(self.format.quant_bytes(self.hidden), self.alignment)

    @cached_property
    def row_scale_offset(self) -> int:
        return self.scales_offset + align(self.format.scale_bytes(self.hidden), self.alignment)

    @cached_property
    def source_offset(self) -> int:
        return self.row_scale_offset + (align(4, self.alignment) if self.format.has_row_scale else 0)

    @cached_property
    def ids_offset(self) -> int:
        return self.source_offset + align(4, self.alignment)

    @cached_property
    def weights_offset(self) -> int:
        return self.ids_offset + align(2 * self.top_k, self.alignment)

    @cached_property
    def record_bytes(self) -> int:
        return align(self.weights_offset + 4 * self.top_k, RECORD_ALIGNMENT)

    @cached_property
    def constants(self) -> dict[str, int]:
        """Bytes of a record and where its fields lie, by the names that kernels have for them."""
        return {
            "RECORD_BYTES": self.record_bytes,
            "SCALES_AT": self.scales_offset,
            "ROW_SCALE_AT": self.row_scale_offset,
            "SOURCE_AT": self.source_offset,
            "IDS_AT": self.ids_offset,
            "WEIGHTS_AT": self.weights_offset,
        }


class TokenMessage:
    """A token on the wire: `[quants] [scales, linear] [source index i32] [top-k ids u16 x top_k]`, each field aligned.

    Args:
        fmt: number format, by name or descriptor.
        hid_dim: numbers in a token, whole blocks of the format.
        top_k: experts of a token.
        alignment: bytes, a power of two from 4 on; 0 means 16.
        output_tokens: where `copy_msg_to_output_tensor` puts quants, `[R, quant_columns(hid_dim)]`.
        output_scales: where it puts scales: for swizzled formats a contiguous `[blocks, ceil(V/4), 32, 4, 4]`,
            otherwise `[R, V]`; None for bf16.
        output_scales_offset: int32 or uint32 `[>= G]` that `pad_expert_offsets` fills in.

    Raises:
        ValueError: for any of them that does not fit.
    """

    def __init__(
        self,
        fmt: str | TokenFormat,
        hid_dim: int,
        top_k: int,
        alignment: int = 0,
        *,
        output_tokens: torch.Tensor | None = None,
        output_scales: torch.Tensor | None = None,
        output_scales_offset: torch.Tensor | None = None,
    ) -> None:
        self.format = token_format(fmt)
        for name, value in (("hid_dim", hid_dim), ("top_k", top_k), ("alignment", alignment)):
            _check_is_int(name, value)
        outputs = (output_tokens, output_scales, output_scales_offset)
        for name, output in zip(("output_tokens", "output_scales", "output_scales_offset"), outputs, strict=True):
            if output is not None:
                check_is_tensor(name, output)
        self.format.check_columns(hid_dim, "hid_dim")
        _check_top_k(top_k)
        self.hid_dim = hid_dim
        self.top_k = top_k
        self.alignment = alignment or DEFAULT_ALIGNMENT
        _check_alignment(self.alignment)
        self.output_tokens = output_tokens
        self.output_scales = output_scales
        self.output_scales_offset = output_scales_offset
        self.row_offsets: torch.Tensor | None = None
        self._check_outputs()

    @property
    def group_size(self) -> int:
        """Elements that share one block scale."""
        return self.format.block

    def get_type_name(self) -> str:
        return f"{type(self).__name__}[hid_dim={self.hid_dim}, top_k={self.top_k}, alignment={self.alignment}]"

    def quant_size(self) -> int:
        """Bytes of the field of the quants."""
        return align(self.format.quant_bytes(self.hid_dim), self.alignment)

    def scales_size(self) -> int:
        """Bytes of the field of the scales."""
        return align(self.format.scale_bytes(self.hid_dim), self.alignment)

    def scales_offset(self) -> int:
        return self.quant_size()

    def token_size(self) -> int:
        """Bytes of quants and scales together."""
        return self.quant_size() + self.scales_size()

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
        """Quantize a token into the quants and scales of a message; the rest of `buf` keeps what it held.

        Args:
            buf: uint8 `[>= token_size()]`, or `[T, >= token_size()]` for `T` tokens.
            src: bf16 or fp32 `[hid_dim]` or `[T, hid_dim]`.
            input_scale: NVFP4's ENCODE scale (1 / the checkpoint's `input_scale`), for the message does not carry one;
                None in the other formats.
            engine: "auto", "cuda", "triton" or "torch", of the quantizer.
        """
        check_is_tensor("buf", buf)
        check_is_tensor("src", src)
        if self.format.has_row_scale and input_scale is None:
            raise ValueError(f"input_scale: format {self.format.name} needs an encode scale, got None")
        if src.ndim not in (1, 2) or src.shape[-1] != self.hid_dim or src.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"src: expected bfloat16 or float32 [{self.hid_dim}] or [T, {self.hid_dim}], "
                f"got {src.dtype} of shape {tuple(src.shape)}"
            )
        _check_device("src", src, buf)
        buf = self._messages(buf, self.token_size(), src.shape[:-1])
        gsf = check_gsf(input_scale, self.format, src.device, "input_scale")
        rows = quantize_rows(src.reshape(-1, self.hid_dim).contiguous(), self.format, gsf=gsf, engine=engine)
        buf[:, : self.format.quant_bytes(self.hid_dim)] = rows.quants_RK.view(torch.uint8)
        if rows.scales_RV is not None:
            start = self.scales_offset()
            buf[:, start : start + self.format.scale_bytes(self.hid_dim)] = rows.scales_RV.view(torch.uint8)

    def write_info(self, buf: torch.Tensor, source: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Write source index and top-k ids into messages. Checks their values on the host.

        Args:
            buf: uint8 `[T, >= msg_size()]` or `[>= msg_size()]`.
            source: integers `[T]` or `[]`, stored as int32.
            topk_idx: integers `[T, top_k]` or `[top_k]`, -1 (stored as 65535) to 65534.
        """
        check_is_tensor("buf", buf)
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
            buf[:, offset : offset + raw.shape[1]] = raw

    def read_info(self, buf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(source, topk_idx)` of messages as int32 `[T]` and `[T, top_k]` (without `T` for one), -1 for no expert."""
        rows = self._messages(buf, self.msg_size(), check_is_tensor("buf", buf).shape[:-1])
        source = copy_as(rows[:, self.src_info_offset() :][:, :4], torch.int32)
        ids = copy_as(rows[:, self.topk_info_offset() :][:, : 2 * self.top_k], torch.int16).to(torch.int32)
        ids = ids & NO_EXPERT
        ids = ids.masked_fill_(ids == NO_EXPERT, -1)
        return source.reshape(buf.shape[:-1]), ids.reshape(*buf.shape[:-1], self.top_k)

    def read_token(self, buf: torch.Tensor, input_scale: float | torch.Tensor | None = None) -> QuantizedRows:
        """The quantized rows of messages `[T, >= token_size()]` (or one), scales linear, in memory of their own.

        `input_scale` is the encode scale that they were written with; `row_scale_R` is its inverse.
        """
        rows = self._messages(buf, self.token_size(), check_is_tensor("buf", buf).shape[:-1])
        fmt = self.format
        quants = copy_as(rows[:, : fmt.quant_bytes(self.hid_dim)], fmt.quant_dtype)
        scales = row_scale = None
        if fmt.scale_dtype is not None:
            start = self.scales_offset()
            scales = copy_as(rows[:, start : start + fmt.scale_bytes(self.hid_dim)], fmt.scale_dtype)
        if fmt.has_row_scale:
            gsf = check_gsf(input_scale, fmt, buf.device, "input_scale")
            if gsf is None:
                raise ValueError(f"input_scale: format {fmt.name} needs an encode scale, got None")
            gsf = gsf.clamp(max=MAX_ENCODE_SCALE)
            row_scale = torch.ones_like(gsf).div(gsf).repeat(rows.shape[0])
        return QuantizedRows(fmt, quants, scales, row_scale)

    def pad_expert_offsets(self, row_offsets: torch.Tensor) -> torch.Tensor:
        """`dense_128` scale offsets of groups whose rows start at `row_offsets` `[G + 1]`: int32 `[G]`.

        They are written to `output_scales_offset` too, where there is one, and `copy_msg_to_output_tensor` goes by
        them: what `row_offsets` holds later does not matter. The scales of group `i` start at block
        `row_offsets[i] // 128 + result[i]`. The values are checked here on a CPU, by the copies on a GPU.

        >>> NVFP4TokenFormat(64, 2).pad_expert_offsets(torch.tensor([0, 100, 300, 400]))
        tensor([0, 1, 1], dtype=torch.int32)
        """
        check_is_tensor("row_offsets", row_offsets)
        offsets = plan.dense_128_offsets(row_offsets)
        if row_offsets.device.type == "cpu":
            self._check_row_offsets(row_offsets)
        bound = self.output_scales_offset
        if bound is not None:
            if bound.shape[0] < offsets.shape[0]:
                raise ValueError(
                    f"row_offsets: expected at most {bound.shape[0]} groups (the length of output_scales_offset), "
                    f"got {offsets.shape[0]}"
                )
            bound.view(torch.int32)[: offsets.shape[0]] = offsets
        self.row_offsets = (row_offsets.view(torch.int32) if row_offsets.dtype == torch.uint32 else row_offsets).clone()
        return offsets

    def copy_msg_to_output_tensor(self, buf: torch.Tensor, token_index: int | torch.Tensor) -> None:
        """Take messages apart: quants to `output_tokens[token_index]`, scales to `output_scales`.

        In swizzled formats the scales go to the `dense_128` place of row `token_index`, by the row offsets last given
        to `pad_expert_offsets`; otherwise to row `token_index`. Checks the values of `token_index` on the host.

        Args:
            buf: uint8 `[>= token_size()]`, or `[T, >= token_size()]`.
            token_index: packed row of the message, or integers `[T]`.
        """
        if self.output_tokens is None or (self.output_scales is None and self.format.scale_dtype is not None):
            raise ValueError("output_tokens, output_scales: expected tensors given to the constructor, got None")
        check_is_tensor("buf", buf)
        if not isinstance(token_index, torch.Tensor) and type(token_index) is not int:
            raise ValueError(f"token_index: expected integers, got {token_index!r}")
        index = torch.as_tensor(token_index, device=self.output_tokens.device)
        if index.dtype not in INTEGERS:
            raise ValueError(f"token_index: expected integers that fit in int64, got {index.dtype}")
        index = index.to(self.output_tokens.device, torch.int64)
        _check_device("buf", buf, self.output_tokens)
        rows = self._messages(buf, self.token_size(), index.shape)
        index = index.reshape(-1)
        if self.format.swizzled:
            if self.row_offsets is None:
                raise ValueError("token_index: call pad_expert_offsets first, it says where the groups lie")
            self._check_row_offsets(self.row_offsets)
            num_rows = int(self.row_offsets[-1])
        else:
            num_rows = self.output_tokens.shape[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < num_rows:
            raise ValueError(f"token_index: expected 0..{num_rows - 1}, got {token_index}")
        # First, since it raises where the scales have no room.
        scale_rows = self._scale_rows(index) if self.format.swizzled else index
        quants = copy_as(rows[:, : self.format.quant_bytes(self.hid_dim)], self.output_tokens.dtype)
        raw_bits(self.output_tokens)[index] = raw_bits(quants)
        if self.output_scales is None:
            return
        start = self.scales_offset()
        scales = copy_as(rows[:, start : start + self.format.scale_bytes(self.hid_dim)], self.output_scales.dtype)
        if self.format.swizzled:
            num_columns = self.format.scale_columns(self.hid_dim)
            column = torch.arange(num_columns, device=index.device)
            place = plan.swizzled_offset(scale_rows[:, None], column[None, :], num_columns)
            raw_bits(self.output_scales).view(-1)[place] = raw_bits(scales)
        else:
            self.output_scales[scale_rows] = scales

    def _check_row_offsets(self, row_offsets: torch.Tensor) -> None:
        rows = row_offsets[-1] if self.output_tokens is None else self.output_tokens.shape[0]
        plan.check_row_offsets(row_offsets, int(rows))

    def _scale_rows(self, index: torch.Tensor) -> torch.Tensor:
        """Row of the scale container, in `dense_128`, of each packed row."""
        assert self.row_offsets is not None and self.output_scales is not None
        offsets = self.row_offsets.to(torch.int64)
        group = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
        start = offsets[group]
        local = index - start
        scale_offset = plan.dense_128_offsets(self.row_offsets).to(torch.int64)[group]
        block = plan.dense_128_block(start, scale_offset, local)
        if index.numel() and int(block.max()) >= self.output_scales.shape[0]:
            raise ValueError(
                f"output_scales: expected more than {int(block.max())} blocks, got {self.output_scales.shape[0]}"
            )
        return block * plan.SCALE_BLOCK_ROWS + local % plan.SCALE_BLOCK_ROWS

    def _messages(self, buf: torch.Tensor, num_bytes: int, batch: torch.Size) -> torch.Tensor:
        """`buf` as `[T, >= num_bytes]`, checked to hold messages of shape `batch`."""
        if buf.dtype != torch.uint8 or buf.shape[:-1] != batch or buf.ndim not in (1, 2) or buf.shape[-1] < num_bytes:
            raise ValueError(
                f"buf: expected uint8 of shape {(*batch, num_bytes)} or longer messages, "
                f"got {buf.dtype} of shape {tuple(buf.shape)}"
            )
        return buf if buf.ndim == 2 else buf[None]

    def _check_outputs(self) -> None:
        fmt, tokens, scales, offsets = self.format, self.output_tokens, self.output_scales, self.output_scales_offset
        columns = fmt.quant_columns(self.hid_dim)
        if tokens is not None and (tokens.ndim != 2 or tokens.shape[1] != columns or tokens.dtype != fmt.quant_dtype):
            raise ValueError(
                f"output_tokens: expected {fmt.quant_dtype} [R, {columns}], got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if scales is not None:
            v = fmt.scale_columns(self.hid_dim)
            wanted = (ceil_div(v, 4), 32, 4, 4) if fmt.swizzled else (v,)
            if scales.dtype != fmt.scale_dtype or tuple(scales.shape[1:]) != wanted or not scales.is_contiguous():
                raise ValueError(
                    f"output_scales: expected contiguous {fmt.scale_dtype} [*, {', '.join(map(str, wanted))}], "
                    f"got {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}"
                )
        if scales is not None and tokens is not None:
            _check_device("output_scales", scales, tokens)
            if not fmt.swizzled and scales.shape[0] < tokens.shape[0]:
                raise ValueError(
                    f"output_scales: expected a row for each of {tokens.shape[0]} tokens, got {scales.shape[0]}"
                )
        if offsets is not None and (offsets.ndim != 1 or offsets.dtype not in (torch.int32, torch.uint32)):
            raise ValueError(
                f"output_scales_offset: expected int32 or uint32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
            )


class NVFP4TokenFormat(TokenMessage):
    """MAX's struct of this name: `[quants: align(H/2, A)] [scales: align(H/16, A)] [source, align A] [ids, align A]`.

    >>> token = NVFP4TokenFormat(hid_dim=7168, top_k=8)
    >>> token.group_size, token.fp4_quant_size(), token.scales_size(), token.token_size(), token.msg_size()
    (16, 3584, 448, 4032, 4064)
    """

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
        super().__init__(
            NVFP4,
            hid_dim,
            top_k,
            alignment,
            output_tokens=output_tokens,
            output_scales=output_scales,
            output_scales_offset=output_scales_offset,
        )

    def fp4_quant_size(self) -> int:
        """Bytes of the field of the quants."""
        return self.quant_size()


def _check_is_int(argument: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{argument}: expected an int, got {value!r}")


def _check_integers(argument: str, values: torch.Tensor, low: int, high: int, buf: torch.Tensor) -> torch.Tensor:
    """`values` as int64, which torch computes with; it does not with most unsigned integers."""
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


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")


def _check_alignment(alignment: int, largest: int | None = None) -> None:
    if alignment < 4 or alignment & (alignment - 1) or (largest is not None and alignment > largest):
        limit = "on" if largest is None else f"to {largest}"
        raise ValueError(f"alignment: expected a power of two from 4 {limit}, got {alignment}")
