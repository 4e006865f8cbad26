"""Grouped GEMM over quantized rows: `C[rows of group] = A[rows of group] @ B[expert]^T`, and its activated form.

Both functions validate, ask `plan.plan_gemm` for the kernel and launch it. Hopper has its own kernels in CUDA C++:
`tma_gemm.py` for weights that tensor cores read as they are stored, `dequant_gemm.py` for prepacked weights. This file
has the Triton kernel for every GPU: one kernel, with the formats as constexprs. `reference.py` has
the torch references.

The device reads groups, row indices and scale offsets. The grid comes from the capacity; programs past the last tile
return at once. The order in which a row's K is summed depends on N, K and the formats only, not on the number of rows
or on a row's neighbours.

Epilogue, in fp32: `c = acc * row_scale[row] * expert_scales[expert] + bias[expert]`, then the activation.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels import nvrtc
from moe_runtime.kernels.formats.number_formats import TokenFormat, ceil_div, format_named
from moe_runtime.kernels.formats.quantize import CODE_BF16, CODE_FP8_BLOCK, CODE_MXFP4, CODE_MXFP8, CODE_NVFP4
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm import dequant_gemm, dequant_tokens, plan, reference, tma_gemm
from moe_runtime.kernels.gemm.activation import activated_tile, function_tile
from moe_runtime.kernels.gemm.arguments import Intermediate, check_activation, check_operands, check_out
from moe_runtime.kernels.gemm.epilogue import half_rows, scaled, store_plain, store_quantized
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights, expanded_activation
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.operands import (
    FP8_BLOCK_K,
    NVFP4_GAIN,
    NativeForm,
    dense_scale_rows,
    dot_step,
    find_tile,
    load_operand,
    native_step,
    row_scale_rows,
    weight_scale_rows,
)
from moe_runtime.kernels.gemm.plan import GemmKernel, GemmPlan, GemmProblem
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.shapes import GemmTile
from moe_runtime.kernels.gemm.weights import Activation, ExpertWeights, has_blocks_apart
from moe_runtime.kernels.launch_order import LaunchOrder
from moe_runtime.kernels.runtime import INTERPRET, capability, resolve_engine

_LOG = logging.getLogger(__name__)


@triton.jit
def _grouped_gemm_kernel(
    a_ptr,
    a_scales_ptr,
    row_scale_ptr,
    row_index_ptr,
    w_ptr,
    w_scales_ptr,
    expert_scales_ptr,
    bias_ptr,
    out_ptr,
    out_scales_ptr,
    out_gsf_ptr,
    group_offsets_ptr,
    a_scale_offsets_ptr,
    out_scale_offsets_ptr,
    expert_ids_ptr,
    num_active_ptr,
    num_groups,
    num_experts,
    capacity,
    columns,
    K,
    a_stride,
    out_stride,
    a_scale_ld,
    w_scale_ld,
    A_FMT: tl.constexpr,
    W_FMT: tl.constexpr,
    OUT_FMT: tl.constexpr,
    A_LAYOUT: tl.constexpr,
    W_LAYOUT: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    E5M2: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCKS_APART: tl.constexpr,
    ORDER: tl.constexpr,
    SCALES_PER_EXPERT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One `BLOCK_M x BLOCK_N` tile of the output of one group.

    `columns` are those of the output: `N`, or `I` where ACTIVATION (`Activation.constants`) combines gate and up.
    `a_stride` counts the words in which a row is loaded. `num_groups` counts the groups that may be active. `A_LAYOUT`
    and `W_LAYOUT` (`ScaleLayout`) give the positions of scales. A scale covers SCALE_BLOCK values of K (128 in
    `fp8_block` rows, whatever the weights), and ROWS_PER_SCALE rows if the scales are `unpadded`. Only the interpreter
    needs E5M2; compiled kernels know it from the pointers. NATIVE (`NativeForm`) uses Blackwell's block-scaled MMA
    instead of dequantizing to bf16. BLOCKS_APART is `weights.has_blocks_apart`.
    """
    ACTIVATED: tl.constexpr = ACTIVATION is not None
    GATED: tl.constexpr = ACTIVATED and ACTIVATION[1]
    PAIRS: tl.constexpr = (W_FMT == CODE_NVFP4) or (W_FMT == CODE_MXFP4)
    A_BLOCK: tl.constexpr = FP8_BLOCK_K if A_FMT == CODE_FP8_BLOCK else SCALE_BLOCK
    OUT_SWIZZLED: tl.constexpr = ACTIVATED and ((OUT_FMT == CODE_MXFP8) or (OUT_FMT == CODE_NVFP4))
    A_GAIN: tl.constexpr = NVFP4_GAIN if A_FMT == CODE_NVFP4 and not NATIVE else 1.0
    W_GAIN: tl.constexpr = NVFP4_GAIN if W_FMT == CODE_NVFP4 and not NATIVE else 1.0
    GAIN: tl.constexpr = A_GAIN * W_GAIN
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile_n = tl.program_id(0) % tiles_n
    if num_active_ptr is not None:
        num_groups = tl.minimum(num_groups, tl.load(num_active_ptr))
    expert, group, start, group_rows, block = find_tile(
        group_offsets_ptr, expert_ids_ptr, num_groups, num_experts, tl.program_id(0) // tiles_n, BLOCK_M, BLOCK_G
    )
    if expert < 0:
        return
    local = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position = start + local
    row_ok = (local < group_rows) & (position < capacity)
    source = position
    if row_index_ptr is not None:
        source = tl.load(row_index_ptr + position, mask=row_ok, other=0)
    position = position.to(tl.int64)
    a_offset = source.to(tl.int64) * a_stride
    a_scale_row = position
    if A_FMT != CODE_BF16:
        a_scale_row = row_scale_rows(a_scale_offsets_ptr, group, start, local, A_LAYOUT, ROWS_PER_SCALE)

    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < columns
    num_rows = columns * 2 if GATED else columns
    words = K // 2 if PAIRS else K
    row = half_rows(n, columns, 0, ORDER) if GATED else n
    w_offset = (expert.to(tl.int64) * num_rows + row) * words
    w_scale_row = weight_scale_rows(
        expert, row, num_rows, K, w_scale_ld, W_FMT, W_LAYOUT, SCALE_BLOCK, BLOCKS_APART
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATED:
        up_row = half_rows(n, columns, 1, ORDER)
        up_offset = (expert.to(tl.int64) * num_rows + up_row) * words
        up_scale_row = weight_scale_rows(
            expert, up_row, num_rows, K, w_scale_ld, W_FMT, W_LAYOUT, SCALE_BLOCK, BLOCKS_APART
        )  # fmt: skip
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_ok = n_ok
    if GATED and NATIVE:
        # One MMA with gate and up columns interleaved: in Triton 3.6 two MMAs cannot share the row scales.
        w_offset = tl.interleave(w_offset, up_offset)
        w_scale_row = tl.interleave(w_scale_row, up_scale_row)
        w_ok = tl.interleave(n_ok, n_ok)
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)

    for k in range(0, K, BLOCK_K):
        if NATIVE:
            acc = native_step(
                acc, a_ptr, a_scales_ptr, a_offset, a_scale_row, row_ok, a_scale_ld,
                w_ptr, w_scales_ptr, w_offset, w_scale_row, w_ok, w_scale_ld, k, K,
                W_FMT, W_LAYOUT, SCALE_BLOCK, NATIVE, BLOCK_K, EVEN_K,
            )  # fmt: skip
        else:
            a_even, a_odd, a_s = load_operand(
                a_ptr, a_scales_ptr, a_offset, a_scale_row, row_ok, k, K, a_scale_ld,
                A_FMT, A_LAYOUT, A_BLOCK, PAIRS, E5M2, BLOCK_K, EVEN_K, INTERPRET,
            )  # fmt: skip
            w_even, w_odd, w_s = load_operand(
                w_ptr, w_scales_ptr, w_offset, w_scale_row, n_ok, k, K, w_scale_ld,
                W_FMT, W_LAYOUT, SCALE_BLOCK, PAIRS, E5M2, BLOCK_K, EVEN_K, INTERPRET,
            )  # fmt: skip
            acc = dot_step(acc, a_even, a_odd, a_s, w_even, w_odd, w_s, W_FMT, PAIRS)
            if GATED:
                w_even, w_odd, w_s = load_operand(
                    w_ptr, w_scales_ptr, up_offset, up_scale_row, n_ok, k, K, w_scale_ld,
                    W_FMT, W_LAYOUT, SCALE_BLOCK, PAIRS, E5M2, BLOCK_K, EVEN_K, INTERPRET,
                )  # fmt: skip
                up_acc = dot_step(up_acc, a_even, a_odd, a_s, w_even, w_odd, w_s, W_FMT, PAIRS)

    if GATED and NATIVE:
        acc, up_acc = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    row_scale = None
    if row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + position, mask=row_ok, other=0.0)
    c = scaled(acc, row_scale, expert_scales_ptr, bias_ptr, expert, row, n_ok, num_rows, GAIN, SCALES_PER_EXPERT, ORDER)
    if GATED:
        up = scaled(
            up_acc,
            row_scale,
            expert_scales_ptr,
            bias_ptr,
            expert,
            up_row,
            n_ok,
            num_rows,
            GAIN,
            SCALES_PER_EXPERT,
            ORDER,
        )
        c = activated_tile(
            c,
            up,
            ACTIVATION[0],
            ACTIVATION[2],
            ACTIVATION[3],
            ACTIVATION[4],
            ACTIVATION[5],
            ACTIVATION[6],
            ACTIVATION[7],
        )
    elif ACTIVATED:
        c = function_tile(c, ACTIVATION[0], ACTIVATION[2])
    if ACTIVATED and OUT_FMT != CODE_BF16:
        out_scale_row = position
        if OUT_SWIZZLED:
            out_scale_row = dense_scale_rows(out_scale_offsets_ptr, group, start, local)
        store_quantized(
            out_ptr, out_scales_ptr, out_gsf_ptr, position, out_scale_row, row_ok, tile_n, columns, c, OUT_FMT
        )
    else:
        store_plain(out_ptr, position, row_ok, n, n_ok, out_stride, c)


def gemm_flops(rows: int, n: int, k: int) -> int:
    """Floating-point operations of `rows` rows times an `[n, k]` weight (`n = 2I` for gate and up)."""
    return 2 * rows * n * k


def gemm_bytes(
    rows: int,
    n: int,
    k: int,
    *,
    a_format: TokenFormat,
    w_format: TokenFormat,
    active_experts: int,
    out_bytes_per_row: int,
) -> int:
    """Least memory traffic of a GEMM: each row and each active expert's weight read once, each output written once.

    An `fp8_block` weight has one scale per 128x128 block, as if gate and up had none apart. Padding of swizzled scales
    is not counted.
    """
    a_row = a_format.quant_bytes(k) + a_format.scale_bytes(k) + 4 * a_format.has_row_scale
    scale_rows = ceil_div(n, 128) if w_format.scale_dtype == torch.float32 else n
    w_expert = n * w_format.quant_bytes(k) + scale_rows * w_format.scale_bytes(k)
    return rows * (a_row + out_bytes_per_row) + active_experts * w_expert


def grouped_gemm(
    a: GroupedRows,
    w: StoredWeights,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    engine: str = "auto",
    num_sms: int | None = None,
) -> torch.Tensor:
    """Multiply the rows of each group by the weight of its expert: `acc * row_scale * expert_scale + bias`.

    Args:
        a: the rows; formats as in `w`, or `bf16` and `fp8_block` rows with `nvfp4` and `mxfp4` weights, or `mxfp8` rows
            with `mxfp4`.
        w: the weights `[E, N, K]`. Prepacked and expanded weights must be plain (without `gate_up`); expanded ones
            are multiplied as those in `fp8_block`.
        out: bf16, fp16 or fp32 `[>= capacity, N]`, last dimension contiguous; allocated if None.
        out_dtype: dtype of a new output.
        engine: "auto", "cuda", "triton" or "torch" (`runtime.resolve_engine`).
        num_sms: most SMs that Hopper's GEMM uses; None means all. Other kernels ignore it.

    Returns:
        The output. Not written: rows past the last group, of groups with an expert outside `0 .. E-1`, and of groups
        past `num_active_experts`.

    Raises:
        ValueError: a shape, dtype, device, stride or format that does not fit; the message names the argument.
    """
    check_operands(a, w)
    if not isinstance(w, ExpertWeights) and w.gate_up is not None:
        raise ValueError("w.gate_up: expected None: prepacked weights with gate_up are in the order of the activation")
    out = check_out(a, w, out, out_dtype)
    plan = _plan(a, w, engine, num_sms, out=out)
    if w.num_experts == 0:
        return out
    raw = _readable(w, plan)
    if isinstance(raw, PrepackedWeights):
        dequant_gemm.multiply(a, raw, plan, out=out)
    elif plan.kernel is GemmKernel.TMA:
        tma_gemm.multiply(a, raw, plan, out=out)
    elif plan.kernel is GemmKernel.TORCH:
        assert isinstance(raw, ExpertWeights)
        reference.grouped_gemm(a, raw, out=out)
    else:
        assert isinstance(raw, ExpertWeights)
        target = raw_bits(out) if out.dtype == torch.bfloat16 else out
        _launch(a, raw, plan, w.num_rows, (target, None, None, None), out.stride(0), 0, None)
    return out


def grouped_gemm_swiglu(
    a: GroupedRows,
    w: StoredWeights,
    activation: Activation,
    *,
    out_format: str | TokenFormat,
    out_gsf: float | torch.Tensor | None = None,
    then: StoredWeights | None = None,
    engine: str = "auto",
    num_sms: int | None = None,
) -> GroupedRows:
    """Multiply by gate and up, apply the activation in fp32 and quantize, with no other rounding between.

    SwiGLU, which it is named after, is one of the activations.

    Args:
        a: the rows, as for `grouped_gemm`.
        w: the weights `[E, 2I, K]` of gate and up, or `[E, I, K]` where the activation has no gate. Prepacked weights
            must have `gate_up`, or none, and so must expanded ones.
        activation: formula and order of gate and up; the order must be that of `w`, if `w` has one.
        out_format: format of the result; `I` must be a multiple of its `unit`.
        out_gsf: encode scale of an `nvfp4` result, a positive number or one fp32 element on the device, clamped to
            2^100; None means `arguments.DEFAULT_INTERMEDIATE_GSF`. Must be None for other formats.
        then: weights of the GEMM that reads the result and is launched next. If both weights are prepacked and
            Hopper's kernels run, the result is stored dequantized (`GroupedRows.dequantized`) for that GEMM only.
        engine: "auto", "cuda", "triton" or "torch" (`runtime.resolve_engine`).
        num_sms: most SMs that Hopper's GEMM uses; None means all. Other kernels ignore it.

    Returns:
        Contiguous rows `[capacity, I]` of the same groups by row position, `row_index` None, scales in the consumer's
        layout; `row_scale` is `1 / out_gsf` for `nvfp4`. Rows that `grouped_gemm` would not write are
        uninitialized.

    Raises:
        ValueError: a shape, dtype, device, stride or format that does not fit; the message names the argument.
    """
    check_operands(a, w)
    check_activation(w, activation)
    plan = _plan(a, w, engine, num_sms, out_format=format_named(out_format), activation=activation)
    if w.num_experts == 0:
        return Intermediate.of(w, activation, out_format, out_gsf).empty(a)
    raw = _readable(w, plan)
    if isinstance(w, ExpandedWeights) and raw is not w:
        activation = expanded_activation(activation)
    if plan.kernel is GemmKernel.TORCH:
        assert isinstance(raw, ExpertWeights)
        return reference.grouped_gemm_swiglu(a, raw, activation, out_format=out_format, out_gsf=out_gsf)
    stored = _intermediate(a, raw, activation, out_format, out_gsf, then, plan)
    out = stored.empty(a)
    if isinstance(raw, PrepackedWeights):
        dequant_gemm.multiply(a, raw, plan, out=out.rows, result=out, activation=activation, gsf=stored.gsf)
    elif plan.kernel is GemmKernel.TMA:
        tma_gemm.multiply(a, raw, plan, out=out.rows, result=out, activation=activation)
    else:
        assert isinstance(raw, ExpertWeights)
        scales = None if out.scales is None else raw_bits(out.scales)
        target = (raw_bits(out.rows), scales, stored.gsf, out.group_scale_offsets)
        _launch(a, raw, plan, out.num_columns, target, out.num_columns, int(out.format.code), activation)
    return out


def _intermediate(
    a: GroupedRows,
    w: StoredWeights,
    activation: Activation,
    out_format: str | TokenFormat,
    out_gsf: float | torch.Tensor | None,
    then: StoredWeights | None,
    how: GemmPlan,
) -> Intermediate:
    """What the GEMM of the plan `how` stores for the one with `then`."""
    more: dict[str, Any] = {}
    if how.tma is not None:
        more = {"order": LaunchOrder(only_rows_pending=True, weights_after_ns=how.tma.next_loads_ns)}
    elif how.dequant is not None:
        more = {"finished": False}
        if dequant_gemm.takes_dequantized(then):
            assert isinstance(then, PrepackedWeights)
            more["order"] = LaunchOrder(weights_after_ns=how.dequant.next_loads_ns)
            more["dequantized"] = dequant_tokens.dequantized_shape(a, then.num_columns), torch.uint8
            if plan.holds_tokens(then.num_columns, then.format, how.dequant.shape):
                more["dequantized"] = (a.capacity, then.num_columns), torch.bfloat16
    return Intermediate.of(w, activation, out_format, out_gsf, **more)


class BoundExperts:
    """Both GEMMs of experts for steps of one size: plans, kernels and their memory for arguments are made once.

    It holds the addresses of the weights, which it keeps, and no others: those of rows and results come with each step.
    So it stays right as long as the weights do, whatever memory the exchange gets; other weights need another one.
    """

    def __init__(
        self,
        first: tma_gemm.TmaGemm | dequant_gemm.DequantGemm,
        between: Intermediate,
        second: tma_gemm.TmaGemm | dequant_gemm.DequantGemm,
    ) -> None:
        self._first, self._between, self._second = first, between, second

    def multiply_first(self, a: GroupedRows) -> GroupedRows:
        """`grouped_gemm_swiglu` of `a`, which is not checked."""
        out = self._between.empty(a)
        self._first.launch(a, out.rows, out)
        return out

    def multiply_second(self, a: GroupedRows, out: torch.Tensor) -> None:
        """`grouped_gemm` of what `multiply_first` gave into `out`."""
        self._second.launch(a, out)


def bind_experts(
    a: GroupedRows,
    gate_up: StoredWeights,
    down: StoredWeights,
    activation: Activation,
    out: torch.Tensor,
    *,
    between: TokenFormat,
    gsf: torch.Tensor | None,
    engine: str,
    num_sms: int | None,
) -> BoundExperts | None:
    """`BoundExperts` for steps with rows and results like `a` and `out`; None where other kernels than Hopper's run.

    Raises `ValueError` as `grouped_gemm` and `grouped_gemm_swiglu` do.
    """
    check_operands(a, gate_up)
    how = _plan(a, gate_up, engine, num_sms, out_format=between, activation=activation)
    if how.kernel not in HOPPER_KERNELS or a.capacity == 0 or a.num_groups == 0 or gate_up.num_experts == 0:
        return None
    stored = _intermediate(a, gate_up, activation, between, gsf, down, how)
    hidden = stored.empty(a)
    check_operands(hidden, down)
    check_out(hidden, down, out, torch.bfloat16)
    then = _plan(hidden, down, engine, num_sms, out=out)
    if then.kernel not in HOPPER_KERNELS:
        return None
    first = _product(a, gate_up, how, hidden.rows, activation, stored.gsf, hidden)
    return BoundExperts(first, stored, _product(hidden, down, then, out))


HOPPER_KERNELS = (GemmKernel.TMA, GemmKernel.DEQUANT)


def _product(
    a: GroupedRows,
    w: StoredWeights,
    how: GemmPlan,
    out: torch.Tensor,
    activation: Activation | None = None,
    gsf: torch.Tensor | None = None,
    result: GroupedRows | None = None,
) -> tma_gemm.TmaGemm | dequant_gemm.DequantGemm:
    if isinstance(w, PrepackedWeights):
        dequant_gemm.check(a, w, out, result)
        return dequant_gemm.DequantGemm(a, w, how, out=out, activation=activation, gsf=gsf, result=result)
    return tma_gemm.TmaGemm(a, w, how, out=out, activation=activation, result=result)


def _plan(
    a: GroupedRows,
    w: StoredWeights,
    engine: str,
    num_sms: int | None,
    *,
    out: torch.Tensor | None = None,
    out_format: TokenFormat | None = None,
    activation: Activation | None = None,
) -> GemmPlan:
    """The plan for checked operands; `out` is the output of a plain GEMM, `out_format` and `activation` are of one
    that is activated."""
    order = None if activation is None else activation.gate_up
    device, resolved = a.rows.device, resolve_engine(engine, a.rows.device)
    aligned = scales_aligned = True
    if resolved == "cuda" and not isinstance(w, PrepackedWeights):
        aligned = tma_gemm.aligned(a.rows, w.quants if isinstance(w, ExpertWeights) else w.units, out)
        scales_aligned = tma_gemm.scales_aligned(a.scales, w.scales)
    return plan.plan_gemm(
        GemmProblem(
            resolved,
            capability(device),
            nvrtc.most_sms(device) if resolved == "cuda" else 0,
            weight_format=w.format,
            token_format=a.format,
            experts=w.num_experts,
            n=w.num_rows,
            k=w.num_columns,
            rows=a.likely_rows,
            capacity=a.capacity,
            groups=a.num_groups,
            active_groups=a.max_active_groups,
            out_format=out_format,
            gated=activation is None or activation.gated,
            tiled_blocks=not isinstance(w, ExpertWeights)
            or w.blocks_apart == has_blocks_apart(w.format, w.num_rows, order),
            prepacked=isinstance(w, PrepackedWeights),
            gathered=a.row_index is not None,
            scales_in_record=a.scales_in_record,
            dequantized=a.dequantized is not None,
            dequantized_rows=a.dequantized is not None and a.dequantized.ndim == 2,
            sm_limit=num_sms,
            aligned=aligned,
            scales_aligned=scales_aligned,
            expanded_from=w.stored_format if isinstance(w, ExpandedWeights) else None,
        )
    )


def _readable(w: StoredWeights, how: GemmPlan) -> StoredWeights:
    """`w` in a form that the kernel of the plan reads: one alone reads prepacked weights, and one expanded ones."""
    if isinstance(w, ExpertWeights):
        return w
    if how.kernel is (GemmKernel.DEQUANT if isinstance(w, PrepackedWeights) else GemmKernel.TMA):
        return w
    _warn_of_restoring()
    return w.restore() if isinstance(w, PrepackedWeights) else w.expand()


@cache
def _warn_of_restoring() -> None:
    """Warn once per process."""
    _LOG.warning(
        "prepacked or expanded weights are restored in every call, which is slow: only Hopper's CUDA C++ kernels read "
        'them, with engine "auto" or "cuda" on a Hopper GPU that has NVRTC; elsewhere pass other weights'
    )


_WORDS = {torch.bfloat16: torch.int32, torch.float8_e4m3fn: torch.int16}
"""Integer types of two values."""


def _operand(t: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Quants as the kernel loads them: words of two values if `pairs`; bits under the interpreter."""
    if pairs and t.dtype in _WORDS:
        word = _WORDS[t.dtype]
        if t.stride(0) % 2 or t.data_ptr() % word.itemsize:
            unit = f"{word.itemsize}-byte boundaries"
            raise ValueError(f"a.rows: expected rows on {unit}, got strides {list(t.stride())}")
        return t.view(word)
    return raw_bits(t) if INTERPRET else t


def _launch(
    a: GroupedRows,
    w: ExpertWeights,
    plan: GemmPlan,
    columns: int,
    out: tuple[torch.Tensor | None, ...],
    out_stride: int,
    out_code: int,
    activation: Activation | None,
) -> None:
    if a.capacity == 0 or a.num_groups == 0:
        return
    assert plan.triton is not None
    rows = _operand(a.rows, w.format.element_bits == 4 and not plan.native)
    order = w.gate_up if activation is None else activation.gate_up
    _grouped_gemm_kernel[(plan.blocks,)](
        rows,
        None if a.scales is None else raw_bits(a.scales),
        a.row_scale,
        a.row_index,
        _operand(w.quants, False),
        None if w.scales is None else raw_bits(w.scales),
        w.expert_scales,
        w.bias,
        *out[:3],
        a.group_offsets,
        a.group_scale_offsets if a.format.swizzled else None,
        out[3],
        a.expert_ids,
        a.active_on_device,
        a.max_active_groups,
        w.num_experts,
        a.capacity,
        columns,
        a.num_columns,
        rows.stride(0),
        out_stride,
        None,
        None,
        A_FMT=int(a.format.code),
        W_FMT=int(w.format.code),
        OUT_FMT=out_code,
        A_LAYOUT=int(a.format.scale_layout),
        W_LAYOUT=int(w.format.scale_layout),
        SCALE_BLOCK=w.format.block,
        ROWS_PER_SCALE=1,
        E5M2=False,
        BLOCKS_APART=w.blocks_apart,
        ORDER=0 if order is None else order.code,
        SCALES_PER_EXPERT=0 if w.expert_scales is None else w.expert_scales.ndim,
        ACTIVATION=None if activation is None else activation.constants,
        **tile_options(plan.triton, plan.native, a.num_groups, a.num_columns),
    )


def tile_options(tile: GemmTile, native: NativeForm, num_groups: int, k: int) -> dict[str, Any]:
    """The constexprs and options of a launch that come from its plan."""
    return {
        "NATIVE": int(native),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_G": max(16, triton.next_power_of_2(num_groups)),
        "EVEN_K": k % tile.block_k == 0,
        "INTERPRET": INTERPRET,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": False,
    }
