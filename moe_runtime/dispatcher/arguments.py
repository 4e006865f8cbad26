"""What a dispatcher accepts: each wrong argument is a `ValueError` with its name, what was expected and what came."""

from __future__ import annotations

import re
from functools import cache

import torch

from moe_runtime.comm.signals import COUNT_BITS
from moe_runtime.config import MAX_EXPERTS, ModeName, resolve_mode, rows_per_expert
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry, RouterIds, most_tokens, worst_case_rows
from moe_runtime.kernels.exchange.padded_rows import PaddedRows, PaddedScales
from moe_runtime.kernels.exchange.plan import sm_shared_bytes
from moe_runtime.kernels.exchange.record import RecordLayout
from moe_runtime.kernels.formats.number_formats import TokenFormat, format_named
from moe_runtime.support.arguments import (
    FP32,
    check_flag,
    check_integer,
    check_is_tensor,
    check_kind,
    check_no_grad,
    describe,
)

BF16 = (torch.bfloat16,)


def check_router_ids(ids: object, num_experts: int, world_size: int) -> None:
    """Raise `ValueError` unless `ids` are those of a router that has the `num_experts` of a layer among its own.

    Where ranks have peers, the layer has all of the router's experts.
    """
    check_kind("router_ids", ids, RouterIds)
    assert isinstance(ids, RouterIds)
    first = check_integer("router_ids.first", ids.first, 0)
    most = check_integer("router_ids.num_experts", ids.num_experts, high=2**31 - 1)
    if first + num_experts > most:
        raise ValueError(
            f"router_ids: expected ids of the {num_experts} experts of config among those of the router, got "
            f"{first} .. {first + num_experts - 1} of {most}"
        )
    if world_size > 1 and most > num_experts:
        raise ValueError(
            f"router_ids.num_experts: expected {num_experts}, the experts of all {world_size} ranks, got {most}"
        )


def exchange_geometry(
    context: ExpertParallelContext,
    *,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    max_tokens_per_rank: int,
    token_format: str | TokenFormat,
    combine_format: str | TokenFormat,
    mode: ModeName,
    expert_row_capacity: int | None,
    num_sms: int | None,
    input_scale: float | None,
    output_size: int | None,
    kernel_prefix: str,
    accepts_repeats: bool,
    sums_by_entry: bool,
) -> ExchangeGeometry:
    """The geometry of an exchange of `context`, from the checked arguments of `TokenDispatcher`."""
    fmt, wire = format_named(token_format, "token_format"), format_named(combine_format, "combine_format")
    check_integer("hidden_size", hidden_size)
    check_integer("num_experts", num_experts)
    check_integer("max_tokens_per_rank", max_tokens_per_rank)
    check_integer("top_k", top_k)
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"num_experts: expected at most {MAX_EXPERTS} (ids travel as u16), got {num_experts}")
    check_flag("accepts_repeats", accepts_repeats)
    check_flag("sums_by_entry", sums_by_entry)
    if top_k > num_experts and not accepts_repeats:
        raise ValueError(f"top_k: expected at most num_experts = {num_experts}, got {top_k}")
    check_kind("mode", mode, str)
    many = rows_per_expert(context.world_size, max_tokens_per_rank, top_k, num_experts)
    rows = resolve_mode(mode, max_tokens_per_rank, fmt.name, many)
    fmt.check_columns(hidden_size, "hidden_size")
    check_kind("kernel_prefix", kernel_prefix, str)
    if not re.fullmatch("[A-Za-z_]*", kernel_prefix):
        raise ValueError(f"kernel_prefix: expected letters and _, got {describe(kernel_prefix)}")
    if output_size is None:
        wire.check_columns(hidden_size, "hidden_size")
    else:
        wire.check_columns(output_size, "output_size")
    if wire.has_row_scale:
        raise ValueError(f"combine_format: expected bf16, fp8_block or mxfp8, got {wire.name}")
    most = most_tokens(context.world_size, top_k)
    if max_tokens_per_rank > most:
        raise ValueError(
            f"max_tokens_per_rank: expected at most {most}, with {context.world_size} ranks and top_k = {top_k} "
            f"(rows are counted in int32, tokens in {COUNT_BITS} bits), got {max_tokens_per_rank}"
        )
    worst = worst_case_rows(num_experts, context.world_size, top_k, max_tokens_per_rank)
    if expert_row_capacity is not None:
        check_integer("expert_row_capacity", expert_row_capacity, high=2**31 - 1)
    if num_sms is not None:
        check_integer("num_sms", num_sms, high=2**31 - 1)
    if input_scale is not None:
        is_number = isinstance(input_scale, (int, float)) and not isinstance(input_scale, bool)
        if not (is_number and fmt.has_row_scale and FP32.tiny <= input_scale <= FP32.max):
            raise ValueError(f"input_scale: expected a positive number, with nvfp4 tokens, got {describe(input_scale)}")
    geometry = ExchangeGeometry(
        rank=context.rank,
        world_size=context.world_size,
        record=RecordLayout(fmt, hidden_size, top_k),
        combine_format=wire,
        num_experts=num_experts,
        max_tokens=max_tokens_per_rank,
        contiguous=rows == "contiguous",
        row_capacity=min(worst, expert_row_capacity or worst),
        num_sms=num_sms,
        combined_hidden=output_size,
        kernel_prefix=kernel_prefix,
        accepts_repeats=accepts_repeats,
        sums_by_entry=sums_by_entry,
        sm_shared_bytes=sm_shared_bytes(context.device),
    )
    return geometry if context.hosts is not None else geometry.placing_own_rows()


def check_tokens(
    geometry: ExchangeGeometry,
    device: torch.device,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Tokens and routing are what `TokenDispatcher.dispatch` takes."""
    if _are_plain(geometry, device, x, topk_idx, topk_weights):
        return
    _check_place("x", x, device)
    if x.ndim != 2:
        raise ValueError(f"x: expected [T, {geometry.hidden}], got shape {list(x.shape)}")
    _check_matrix("x", x, (x.shape[0], geometry.hidden), BF16)
    if x.shape[0] > geometry.max_tokens:
        raise ValueError(f"x: expected at most max_tokens_per_rank = {geometry.max_tokens} tokens, got {x.shape[0]}")
    expected = (x.shape[0], geometry.top_k)
    _check_place("topk_idx", topk_idx, device)
    _check_shape("topk_idx", topk_idx, expected, (torch.int32, torch.int64))
    _check_place("topk_weights", topk_weights, device)
    _check_shape("topk_weights", topk_weights, expected, (torch.float32,))


def _are_plain(
    geometry: ExchangeGeometry,
    device: torch.device,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> bool:
    """Whether `check_tokens` has nothing to say, in one look: every step asks."""
    for tensor in (x, topk_idx, topk_weights):
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout != torch.strided:
            return False
        if tensor.device != device or tensor.requires_grad or tensor.ndim != 2:
            return False
    (num_tokens, hidden), shape = x.shape, topk_idx.shape
    return (
        x.dtype is torch.bfloat16
        and hidden == geometry.hidden
        and num_tokens <= geometry.max_tokens
        and (num_tokens == 0 or x.stride(1) == 1)
        and shape == (num_tokens, geometry.top_k)
        and topk_weights.shape == shape
        and topk_idx.dtype in (torch.int32, torch.int64)
        and topk_weights.dtype is torch.float32
    )


def check_expert_output(
    geometry: ExchangeGeometry, device: torch.device, output: torch.Tensor, num_rows: int | None = None
) -> None:
    """`output` is bf16 or fp32 `[num_rows, H]`, with `row_capacity` rows where they are None."""
    _check_place("expert_output", output, device)
    shape = (geometry.row_capacity if num_rows is None else num_rows, geometry.output_hidden)
    _check_matrix("expert_output", output, shape, (torch.bfloat16, torch.float32))


def check_shared(
    geometry: ExchangeGeometry, device: torch.device, shared: torch.Tensor | None, num_tokens: int
) -> None:
    """`shared` is None or bf16 `[num_tokens, H]`."""
    if shared is not None:
        _check_place("shared", shared, device)
        _check_matrix("shared", shared, (num_tokens, geometry.output_hidden), BF16)


def check_gsf(geometry: ExchangeGeometry, device: torch.device, gsf: torch.Tensor) -> None:
    """`gsf` is fp32 `[1]`, and tokens are in a format with an encode scale."""
    if not geometry.token_format.has_row_scale:
        raise ValueError(f"gsf: expected None with {geometry.token_format.name} tokens, got a tensor")
    _check_place("gsf", gsf, device)
    _check_shape("gsf", gsf, (1,), (torch.float32,))


def check_out(geometry: ExchangeGeometry, device: torch.device, out: torch.Tensor, num_tokens: int) -> None:
    """`out` is bf16 `[num_tokens, H]`, contiguous, at a multiple of 16 bytes: kernels store as many at a time."""
    _check_place("out", out, device)
    _check_shape("out", out, (num_tokens, geometry.output_hidden), BF16)
    _check_contiguous("out", out)
    _check_aligned("out", out)


@cache
def _layout_of_scales(
    kind: PaddedScales, experts: int, slots: int, num_scales: int
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of the scales that `PaddedScales.allocate` makes."""
    plain = kind.allocate(experts, slots, num_scales, torch.device("meta"))
    assert plain is not None
    return tuple(plain.shape), plain.stride(), plain.dtype


def check_padded(
    geometry: ExchangeGeometry,
    device: torch.device,
    out: PaddedRows,
    scales_at: int | None,
    statistics: torch.Tensor | None,
) -> int:
    """`out` is for the rows of `geometry`, `statistics` int32 `[E]` or None. Returns where scales are in a record."""
    check_kind("out", out, PaddedRows)
    record, experts = geometry.record, geometry.num_local_experts
    num_bytes = record.format.quant_bytes(geometry.hidden)
    fits = out.rows.ndim == 3 and out.rows.shape[:2] == (experts, geometry.num_slots)
    if not fits or not 0 < out.rows.shape[2] <= num_bytes:
        expected = f"[{experts}, {geometry.num_slots}, {num_bytes}]"
        raise ValueError(f"out.rows: expected {expected}, got {list(out.rows.shape)}")
    if out.rows.shape[2] % 8:
        raise ValueError(f"out.rows: expected rows of a multiple of 8 bytes, got {out.rows.shape[2]}")
    if out.kind == PaddedScales.PACKED_COLUMNS and out.num_scales % 4:
        raise ValueError(f"out.num_scales: expected a multiple of 4, the scales of a word, got {out.num_scales}")
    slots, ranks = geometry.num_slots, geometry.world_size
    for name, shape, dtype in (
        ("rows", tuple(out.rows.shape), torch.uint8),
        ("counts", (experts,), torch.int32),
        ("source_tokens", (experts, slots), torch.int32),
        ("layout_range", (experts, ranks), torch.int64),
        ("positions", (slots, geometry.top_k), torch.int32),
    ):
        _check_place(f"out.{name}", getattr(out, name), device)
        _check_shape(f"out.{name}", getattr(out, name), shape, (dtype,))
    _check_aligned("out.rows", out.rows)
    if out.scales is not None:
        shape, strides, dtype = _layout_of_scales(out.kind, experts, slots, out.num_scales)
        _check_place("out.scales", out.scales, device)
        _check_shape("out.scales", out.scales, shape, (dtype,))
        if out.scales.stride() != strides:
            raise ValueError(f"out.scales: expected strides {strides}, got {out.scales.stride()}")
    at = record.scales_offset if scales_at is None else check_integer("scales_at", scales_at, 0)
    end = at + out.num_scales * out.kind.scale_bytes
    if at % 4 or end > record.source_offset:
        raise ValueError(f"scales_at: expected room for {out.num_scales} scales in a record of this format, got {at}")
    if statistics is not None:
        _check_place("statistics", statistics, device)
        _check_shape("statistics", statistics, (experts,), (torch.int32,))
        _check_contiguous("statistics", statistics)
    return at


def _check_matrix(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> None:
    _check_shape(name, tensor, shape, dtypes)
    if tensor.shape[0] > 0 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())}")


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")


def _check_aligned(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name}: expected memory at a multiple of 16 bytes, got {tensor.data_ptr():#x}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def _check_place(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    check_is_tensor(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    check_no_grad(name, tensor)


def flat_tokens(geometry: ExchangeGeometry, device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """`x` `[..., H]` as `[T, H]`; the dispatcher checks its dtype and the number of tokens."""
    check_is_tensor("x", x)
    if x.device != device:
        raise ValueError(f"x: expected device {device}, got {x.device}")
    if x.ndim < 1 or x.shape[-1] != geometry.hidden:
        raise ValueError(f"x: expected [..., {geometry.hidden}], got shape {list(x.shape)}")
    return x if x.ndim == 2 else x.reshape(-1, geometry.hidden)


def flat_shared(
    geometry: ExchangeGeometry, device: torch.device, shared: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """`shared`, which has the `shape` of `x`, as bf16 `[T, H]`."""
    check_is_tensor("shared", shared)
    if shared.shape != shape:
        raise ValueError(f"shared: expected the shape of x, {list(shape)}, got {list(shared.shape)}")
    shared_TH = shared.reshape(-1, geometry.hidden)
    check_shared(geometry, device, shared_TH, shared_TH.shape[0])
    return shared_TH
