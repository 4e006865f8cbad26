"""Dispatch and combine of a rank without peers, in CUDA C++: it waits for nobody.

`one_rank_combine` does its combine, `one_rank_dispatch` its dispatch of few tokens; that of many is `cuda`'s.
"""

from __future__ import annotations

import torch

from moe_runtime.kernels.bound_kernel import BoundKernel, SizedKernel
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import (
    ExchangeMemory,
    RecvBuffers,
    SentTokens,
    aligned,
    id_arguments,
    kept_by_memory,
    memory_arguments,
)
from moe_runtime.kernels.exchange.macros import one_rank_combine_macros, one_rank_dispatch_macros
from moe_runtime.kernels.exchange.plan import ONE_RANK_SUM_THREADS, required_plan
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder
from moe_runtime.kernels.nvrtc import most_sms


class OneRankKernels:
    """What a rank alone does in fewer launches: nothing travels, so nothing is awaited.

    It writes what `ExchangeBackend` would, also in the memory of the exchange. But nothing orders the flags: kernels
    that look at them must not begin before `dispatch` has ended. Partial results stay in registers.
    """

    def dispatches(self, geometry: ExchangeGeometry, num_tokens: int) -> bool:
        """Whether `dispatch` takes `num_tokens` tokens; `combine` takes any."""
        return required_plan(geometry).dispatches_at_once(num_tokens)

    def dispatch(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        tokens: SentTokens,
        handle_epoch: torch.Tensor,
        num_parts_T: torch.Tensor,
        buffers: RecvBuffers,
    ) -> None:
        """`ExchangeBackend.dispatch_send` and `dispatch_recv`, with their arguments."""
        x_TH, topk_idx_TK, topk_weights_TK, gsf = tokens
        x_TH, num_tokens, scales = aligned(x_TH), x_TH.shape[0], buffers.scales
        kernel = _dispatcher(context, geometry, topk_idx_TK.dtype == torch.int64, gsf is not None, scales is not None)
        arguments = {
            "x_TH": x_TH,
            "x_stride": x_TH.stride(0),
            "topk_idx": topk_idx_TK,
            "topk_weights": topk_weights_TK,
            "static_gsf": gsf,
            "num_tokens": num_tokens,
            "count_tag": count_tag,
            "group_offsets": buffers.group_offsets,
            "group_scale_offsets": buffers.group_scale_offsets,
            "row_index": buffers.row_index,
            "positions": buffers.positions,
            "rows": buffers.rows,
            "scales": scales,
            "row_scale": buffers.row_scale,
            "handle_epoch": handle_epoch,
            "num_parts": num_parts_T,
        }
        kernel.launch(arguments, num_tokens)

    def combine(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        output_RH: torch.Tensor,
        positions_SK: torch.Tensor,
        handle_epoch: torch.Tensor,
        shared_TH: torch.Tensor | None,
        y_TH: torch.Tensor,
        *,
        order: LaunchOrder = IN_ORDER,
    ) -> None:
        """`ExchangeBackend.combine_send` and `combine_recv`, with their arguments.

        `order`: what this kernel may read before the one that wrote `output_RH` has ended: what `dispatch` wrote, if
        only rows are pending.
        """
        num_tokens, output_RH = y_TH.shape[0], aligned(output_RH)
        shared_TH = None if shared_TH is None else aligned(shared_TH)
        kernel = _combiner(context, geometry, output_RH.dtype == torch.bfloat16, shared_TH is not None)
        arguments = {
            "y_TH": y_TH,
            "shared_TH": shared_TH,
            "shared_stride": 0 if shared_TH is None else shared_TH.stride(0),
            "output": output_RH,
            "row_bytes": output_RH.stride(0) * output_RH.element_size(),
            "positions": positions_SK,
            "num_tokens": num_tokens,
            "handle_epoch": handle_epoch,
            "settled": int(order.only_rows_pending),
        }
        kernel.launch(arguments, num_tokens)


@kept_by_memory
def _dispatcher(
    context: ExchangeMemory, geometry: ExchangeGeometry, ids_64: bool, static_gsf: bool, has_scales: bool
) -> SizedKernel:
    plan, sms, memory = required_plan(geometry), most_sms(context.device), memory_arguments(context, geometry)
    copies_scales = has_scales and geometry.token_format.scale_dtype is not None
    kernel = BoundKernel(
        "one_rank_dispatch.cu",
        geometry.kernel_prefix + "one_rank_dispatch",
        one_rank_dispatch_macros(geometry, ids_64=ids_64, static_gsf=static_gsf, scales=copies_scales),
        block=plan.one_rank_threads,
        bound={
            "num_slots": geometry.num_slots,
            "capacity": geometry.row_capacity,
            "token_flags": context.token_flags_pointers,
            "counter": context.counters,
            "first_row": memory["landing_half"] // geometry.record.record_bytes,
            "token_flags_half": context.half_bytes["token_flags"],
            **id_arguments(geometry),
            **memory,
        },
        device=context.device,
        shared_bytes=plan.one_rank_shared_bytes,
        early=plan.overlaps,
        all_shared=True,  # as the GEMM that starts beside it, so that they share an SM
    )
    return SizedKernel(kernel, lambda num_tokens: plan.one_rank_dispatch_blocks(num_tokens, sms))


@kept_by_memory
def _combiner(context: ExchangeMemory, geometry: ExchangeGeometry, output_bf16: bool, has_shared: bool) -> SizedKernel:
    plan, sms = required_plan(geometry), most_sms(context.device)
    kernel = BoundKernel(
        "one_rank_combine.cu",
        geometry.kernel_prefix + "one_rank_combine",
        one_rank_combine_macros(geometry, output_bf16=output_bf16, has_shared=has_shared),
        block=ONE_RANK_SUM_THREADS,
        bound=memory_arguments(context, geometry),
        device=context.device,
        early=plan.overlaps,
        all_shared=True,  # as the GEMM beside which it starts
    )
    return SizedKernel(kernel, lambda num_tokens: plan.one_rank_combine_blocks(num_tokens, sms))


ONE_RANK = OneRankKernels()
