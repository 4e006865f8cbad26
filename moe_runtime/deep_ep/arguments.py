"""What the buffers accept: each wrong argument is a `ValueError` with its name, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_runtime.deep_ep import low_latency
from moe_runtime.deep_ep.normal_handle import Tokens
from moe_runtime.deep_ep.sizes import FP8_BLOCK_SIZE, MOST_TOP_K
from moe_runtime.support.arguments import check_integer, check_is_tensor, describe

topk_idx_t = torch.int64
"""dtype of expert ids."""
IDS, BF16, FP32, E4M3 = (topk_idx_t,), (torch.bfloat16,), (torch.float32,), (torch.float8_e4m3fn,)
WORDS, BOOL = (torch.float32, torch.int32), (torch.bool,)
_Tensor, _STRIDED = torch.Tensor, torch.strided  # which take longer to find in a module

Bit = bool | int
"""True or False, or, as DeepEP's tests pass them, 1 or 0."""
Bias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None


def check_bit(name: str, value: object) -> bool:
    """`value` as a bool, if it is a `Bit`."""
    if value is True or value is False:
        return value
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name}: expected True or False, got {describe(value)}")
    return bool(value)


def check_flags(**flags: object) -> None:
    """Each is a `Bit`."""
    for name, value in flags.items():
        # Most often, and in less time than a call.
        if value is not True and value is not False:
            check_bit(name, value)


def check_experts(num_experts: int | None, num_ranks: int) -> int:
    """`num_experts`, which is a multiple of the ranks."""
    found = check_integer("num_experts", num_experts)
    if found % num_ranks:
        raise ValueError(f"num_experts: expected a multiple of {num_ranks} ranks, got {found}")
    return found


def check_top_k(top_k: int, name: str = "topk_idx") -> int:
    """`top_k`, the columns of `topk_idx` or `topk_weights`, if normal mode takes as many."""
    if not 0 < top_k <= MOST_TOP_K:
        raise ValueError(f"{name}: expected 1 to {MOST_TOP_K} experts of a token, got {top_k}")
    return top_k


def check_matrix(
    name: str,
    tensor: torch.Tensor | None,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    rows: int | None = None,
    columns: int | None = None,
) -> torch.Tensor:
    """`tensor`, if it is a matrix of these dtypes and sizes on `device`."""
    if not (
        isinstance(tensor, _Tensor) and tensor.device == device and tensor.layout is _STRIDED and not tensor.is_nested
    ):
        raise _misplaced(name, tensor, device)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    shape = tensor.shape
    if len(shape) != 2 or (rows is not None and shape[0] != rows) or (columns is not None and shape[1] != columns):
        expected = ", ".join("any" if size is None else str(size) for size in (rows, columns))
        raise ValueError(f"{name}: expected shape [{expected}], got {list(tensor.shape)}")
    return tensor


def check_vector(
    name: str, tensor: torch.Tensor | None, device: torch.device, dtype: torch.dtype, size: int | None = None
) -> torch.Tensor:
    """`tensor`, if it is a vector of this dtype and size on `device`."""
    if not (
        isinstance(tensor, _Tensor) and tensor.device == device and tensor.layout is _STRIDED and not tensor.is_nested
    ):
        raise _misplaced(name, tensor, device)
    shape = tensor.shape
    if tensor.dtype != dtype or len(shape) != 1 or (size is not None and shape[0] != size):
        expected = "any" if size is None else size
        raise ValueError(f"{name}: expected {dtype} [{expected}], got {tensor.dtype} {list(tensor.shape)}")
    return tensor


def check_tokens(x: Tokens, device: torch.device) -> int:
    """`x` is what normal mode takes: bf16, or e4m3 and scales. Returns `H`.

    Scales are fp32 or int32 words of any meaning, at most one for each 128 elements.
    """
    if isinstance(x, tuple):
        if len(x) != 2:
            raise ValueError(f"x: expected a tensor, or quants and scales, got {len(x)} tensors")
        quants, scales = x
        num_tokens, hidden = check_matrix("x[0]", quants, device, E4M3).shape
        most, left = divmod(hidden, FP8_BLOCK_SIZE)
        if left:
            raise ValueError(f"x[0]: expected a multiple of {FP8_BLOCK_SIZE} columns, got {hidden}")
        check_matrix("x[1]", scales, device, WORDS, num_tokens)
        if not 0 < (columns := scales.shape[1]) <= most:
            raise ValueError(f"x[1]: expected 1 to {most} columns, got {columns}")
    else:
        quants = x
        hidden = check_matrix("x", x, device, BF16).shape[1]
    if not quants.is_contiguous():
        raise ValueError(f"x: expected contiguous rows, got strides {list(quants.stride())}")
    return check_hidden(hidden)


def check_hidden(hidden: int) -> int:
    """`hidden`, the columns of `x`, if normal mode takes them."""
    if hidden == 0 or hidden % 16:
        raise ValueError(f"x: expected a hidden size that is a multiple of 16, got {hidden}")
    return hidden


def check_layout(
    num_tokens: int,
    num_ranks: int,
    device: torch.device,
    per_rank: torch.Tensor | None,
    in_rank: torch.Tensor | None,
    per_expert: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `get_dispatch_layout` gave: `(is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert)`."""
    per_rank = check_vector("num_tokens_per_rank", per_rank, device, torch.int32, num_ranks)
    per_expert = check_vector("num_tokens_per_expert", per_expert, device, torch.int32)
    in_rank = check_matrix("is_token_in_rank", in_rank, device, BOOL, num_tokens, num_ranks)
    check_experts(per_expert.numel(), num_ranks)
    return in_rank, per_rank, per_expert


def check_routing(
    topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, num_tokens: int, device: torch.device
) -> None:
    """Ids and weights come together, or neither."""
    if (topk_idx is None) != (topk_weights is None):
        raise ValueError("topk_weights: expected it together with topk_idx")
    if topk_idx is not None and topk_weights is not None:
        check_matrix("topk_idx", topk_idx, device, IDS, num_tokens)
        check_matrix("topk_weights", topk_weights, device, FP32, num_tokens, topk_idx.shape[1])


def check_statistics(statistics: torch.Tensor | None, num_local_experts: int, device: torch.device) -> None:
    """`statistics` is None, or a count of each local expert that can be added to."""
    if statistics is not None:
        name = "cumulative_local_expert_recv_stats"
        check_vector(name, statistics, device, torch.int32, num_local_experts)
        if not statistics.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(statistics.stride())}")


def check_bias(bias: Bias, device: torch.device, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """The tensors of `bias`, two at most; None among them stands for none."""
    given, biases = bias if isinstance(bias, tuple) else (bias,), tuple[torch.Tensor, ...]()
    if len(given) > 2:
        raise ValueError(f"bias: expected at most two tensors, got {len(given)}")
    for one in given:
        if one is not None:
            check_matrix("bias", one, device, BF16, rows, columns)
            biases += (one,)
    return biases


def payload_of(
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    use_nvfp4: bool,
    x_global_scale: torch.Tensor | None,
    use_mxfp8: bool,
    device: torch.device,
) -> tuple[low_latency.Payload, torch.Tensor | None]:
    """What a low-latency dispatch sends, and fp32 `[1]`, the encode scale of NVFP4 tokens."""
    if use_nvfp4 and use_mxfp8:
        raise ValueError("use_mxfp8: expected False with use_nvfp4")
    if not use_nvfp4:
        if x_global_scale is not None:
            raise ValueError("x_global_scale: expected None without use_nvfp4")
        if use_mxfp8:
            return low_latency.MX, None
        if not use_fp8:
            return low_latency.PLAIN, None
        rounded = low_latency.FP8_UE8M0 if use_ue8m0 else low_latency.FP8_ROUNDED
        return (rounded if round_scale else low_latency.FP8), None
    if not isinstance(x_global_scale, torch.Tensor) or x_global_scale.numel() != 1:
        raise ValueError("x_global_scale: expected a tensor of one element with use_nvfp4, for all experts")
    if x_global_scale.device != device or not x_global_scale.dtype.is_floating_point:
        got = f"{x_global_scale.dtype} on {x_global_scale.device}"
        raise ValueError(f"x_global_scale: expected fp32 on {device}, got {got}")
    return low_latency.NV, x_global_scale.float().reshape(1)


def _misplaced(name: str, tensor: object, device: torch.device) -> ValueError:
    """Of what is not a strided tensor on `device`."""
    found = check_is_tensor(name, tensor)
    return ValueError(f"{name}: expected device {device}, got {found.device}")
