"""Checks of the arguments of `moe_runtime.ops`: every mistake is a `ValueError` that names the argument.

Shapes, dtypes, devices and strides are checked always. The `check_*_values` functions read offsets and ids on the host,
which makes a GPU wait: operations call them under `validate` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moe_runtime.kernels.formats import scale_blocks
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.support.arguments import check_choice, check_is_tensor, check_no_grad, describe

OUT_DTYPES_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AtLeast:
    """A size of a shape that may be larger."""

    size: int

    def __str__(self) -> str:
        return f"at least {self.size}"


Size = int | AtLeast | str
"""An exact size, a smallest one, or the letter of one that is free."""


def check_device(name: str, tensor: torch.Tensor) -> torch.device:
    """The device that all arguments must share, a CPU or a GPU."""
    check_is_tensor(name, tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor on cpu or cuda, got {tensor.device}")
    return tensor.device


def check_tensor(
    name: str,
    tensor: object,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[Size],
    device: torch.device,
    *,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """The tensor, if it has one of `dtypes`, the `shape`, lies on `device` and has `strides` (None: is contiguous).

    Strides of dimensions of size 1 do not matter, nor any where there are no elements.
    """
    tensor = check_is_tensor(name, tensor)
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: expected {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    fits = tensor.ndim == len(shape) and all(_fits(s, w) for s, w in zip(tensor.shape, shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if strides is None:
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    elif tensor.numel():
        pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
        if any(size > 1 and found != wanted for size, found, wanted in pairs):
            raise ValueError(f"{name}: expected strides {list(strides)}, got {list(tensor.stride())}")
    check_no_grad(name, tensor)
    return tensor


def _fits(size: int, wanted: Size) -> bool:
    return isinstance(wanted, str) or (size >= wanted.size if isinstance(wanted, AtLeast) else size == wanted)


@dataclass(frozen=True)
class Operands:
    """What `a` `[R, K]` and `b` `[E, N, K]` say of a call."""

    device: torch.device
    rows: int
    experts: int
    n: int
    k: int


def check_weights(b: torch.Tensor, dtype: torch.dtype, unit_k: int, *, per_byte: int = 1) -> tuple[int, int, int]:
    """`(E, N, K)` of weights `b` `[E, N, K / per_byte]`, N a multiple of 8, K of its unit."""
    check_tensor("b", b, dtype, ("E", "N", "columns"), check_device("b", b))
    k = check_multiple("b", per_byte * b.shape[2], unit_k, "K")
    return b.shape[0], check_multiple("b", b.shape[1], 8, "N"), k


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor | PrepackedWeights,
    dtypes: Sequence[torch.dtype],
    unit_n: int,
    unit_k: int,
    *,
    per_byte: int = 1,
) -> Operands:
    """Sizes of `a` and `b`, of one of `dtypes` both, N and K multiples of their units, `per_byte` elements a byte.

    Prepacked weights are taken where `dtypes` is the one of their quants.
    """
    device = check_device("a", a)
    check_tensor("a", a, dtypes, ("R", "K" if per_byte == 1 else f"K/{per_byte}"), device)
    k = check_multiple("a", per_byte * a.shape[1], unit_k, "K" if per_byte == 1 else "K (twice the columns)")
    if isinstance(b, PrepackedWeights):
        if tuple(dtypes) != (b.format.quant_dtype,) or b.gate_up is not None:
            raise ValueError(f"b: expected plain prepacked weights of {dtypes}, got {b.format.name}, {b.gate_up}")
        if b.expert_scales is not None or b.bias is not None:
            raise ValueError("b: expected prepacked weights without expert_scales and bias, got some with them")
        if b.num_columns != k or b.device != device:
            raise ValueError(f"b: expected K = {k} on {device}, got {b.num_columns} on {b.device}")
        return Operands(device, a.shape[0], b.num_experts, check_multiple("b", b.num_rows, unit_n, "N"), k)
    check_tensor("b", b, a.dtype, ("E", "N", a.shape[1]), device)
    return Operands(device, a.shape[0], b.shape[0], check_multiple("b", b.shape[1], unit_n, "N"), k)


def check_no_scales(name: str, scales: object) -> None:
    """Raise unless `scales` is None: prepacked weights hold theirs."""
    if scales is not None:
        raise ValueError(f"{name}: expected None with prepacked weights, got {type(scales).__name__}")


def check_output(
    name: str, tensor: object, dtypes: Sequence[torch.dtype], rows: int, columns: int, device: torch.device
) -> torch.Tensor:
    """`tensor` if it can be written: `[rows, columns]`, any row stride that keeps rows apart."""
    tensor = check_is_tensor(name, tensor)
    strides = (max(tensor.stride(0), columns), 1) if tensor.ndim == 2 else None
    return check_tensor(name, tensor, dtypes, (rows, columns), device, strides=strides)


def make_output(out: object, out_dtype: object, dtypes: Sequence[torch.dtype], operands: Operands) -> torch.Tensor:
    """`out` `[R, N]` checked, or a new tensor of `out_dtype` (None: bf16)."""
    o = operands
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if not isinstance(dtype, torch.dtype) or dtype not in dtypes:
        found = dtype if isinstance(dtype, torch.dtype) else describe(dtype)
        raise ValueError(f"out_dtype: expected {' or '.join(map(str, dtypes))} or None, got {found}")
    if out is None:
        return torch.empty(o.rows, o.n, dtype=dtype, device=o.device)
    out = check_output("out", out, dtypes, o.rows, o.n, o.device)
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"out_dtype: expected {out.dtype} as out, got {out_dtype}")
    return out


def check_gated(is_gated: object, o: Operands) -> Operands:
    """The sizes of the result: `N / 2` columns if `is_gated`, for which N must be even."""
    check_choice("is_gated", is_gated, (True, False))
    if not is_gated:
        return o
    return replace(o, n=check_multiple("b", o.n, 2, "N with is_gated") // 2)


def check_multiple(name: str, size: int, unit: int, letter: str) -> int:
    """`size` if it is a positive multiple of `unit`; `letter` is what it is called in a shape."""
    if size <= 0 or size % unit:
        raise ValueError(f"{name}: expected {letter} a positive multiple of {unit}, got {size}")
    return size


def check_granularity(value: object, allowed: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    """`scale_granularity_mnk` as a tuple of three integers, if it is one of `allowed`."""
    if not isinstance(value, tuple | list) or any(type(size) is not int for size in value):
        raise ValueError(f"scale_granularity_mnk: expected three integers, got {value!r}")
    found = tuple(value)
    check_choice("scale_granularity_mnk", found, allowed)
    m, n, k = found
    return m, n, k


def resolve_validate(validate: object, device: torch.device) -> bool:
    """Whether values are checked: None means on a CPU, where reading them is free."""
    check_choice("validate", validate, (None, True, False))
    return device.type == "cpu" if validate is None else bool(validate)


def signed(offsets: torch.Tensor) -> torch.Tensor:
    """int32 view of int32 or uint32 offsets; values above 2^31 become negative, which no offset may be."""
    return offsets.view(torch.int32) if offsets.dtype == torch.uint32 else offsets


def check_num_active(value: object, num_groups: int, device: torch.device) -> tuple[int, torch.Tensor | None]:
    """`(groups that may be active, device scalar of those that are or None)` of `num_active_experts`.

    `num_groups` is what the offsets and ids have room for.
    """
    name = "num_active_experts"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype not in (torch.int32, torch.uint32) or value.device != device:
            found = f"{value.dtype} {list(value.shape)} on {value.device}"
            raise ValueError(f"{name}: expected an int or one int32 on {device}, got {found}")
        return num_groups, signed(value.reshape(1))
    if type(value) is not int:
        raise ValueError(f"{name}: expected an int or an int32 tensor, got {value!r}")
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    return value, None


def check_active_values(active: torch.Tensor | None, num_groups: int) -> int:
    """How many groups are active; raises if it is outside `0 .. num_groups`."""
    if active is None:
        return num_groups
    value = int(active)
    if not 0 <= value <= num_groups:
        raise ValueError(f"num_active_experts: expected 0 .. {num_groups} (the groups of the offsets), got {value}")
    return value


def check_expert_values(expert_ids: torch.Tensor, num_active: int, num_experts: int) -> None:
    """Raise unless each id is -1 (skip the group) or an expert."""
    for group, expert in enumerate(expert_ids[:num_active].tolist()):
        if not -1 <= expert < num_experts:
            raise ValueError(f"expert_ids: expected -1 .. {num_experts - 1}, got {expert} for group {group}")


def check_scale_signs(name: str, scales: torch.Tensor, live: Callable[[], torch.Tensor]) -> None:
    """Raise if one of the e4m3 scales that `live` gives has a sign; the others of `scales` may be anything."""
    if (raw_bits(scales) >= 128).any() and (raw_bits(live()) >= 128).any():
        raise ValueError(f"{name}: expected no negative scale, got one")


def check_indptr_values(m_indptr: torch.Tensor, num_rows: int, unit: int = 1, granularity_m: int = 1) -> None:
    """Raise unless `m_indptr` starts at 0, does not decrease, ends within the rows, and keeps to its multiples."""
    values = m_indptr.tolist()
    scale_blocks.check_row_offsets(values, num_rows, "m_indptr")
    for index, value in enumerate(values):
        if value % unit:
            raise ValueError(f"m_indptr: expected multiples of {unit}, got {value} at index {index}")
    scale_blocks.check_unpadded(values, granularity_m, "m_indptr")
