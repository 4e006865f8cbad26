"""Dispatch and combine of a rank without peers, in CUDA C++: it waits for nobody.

`one_rank_combine` does its combine, `one_rank_dispatch` its dispatch of few tokens; that of many is `cuda`'s.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_runtime.kernels.bound_kernel import BoundKernel
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.exchange.interface import ExchangeMemory, RecvBuffers, aligned
from moe_runtime.kernels.exchange.macros import one_rank_combine_macros, one_rank_dispatch_macros
from moe_runtime.kernels.exchange.plan import ONE_RANK_SUM_THREADS, ExchangePlan, required_plan
from moe_runtime.kernels.launch_order import IN_ORDER, LaunchOrder
from moe_runtime.kernels.nvrtc import most_sms


class _OneRank:
    """The kernels of a rank alone: an `interface.OneRankKernels`."""

    def dispatches(self, geometry: ExchangeGeometry, num_tokens: int) -> bool:
        """See `interface.OneRankKernels`."""
        return required_plan(geometry).dispatches_at_once(num_tokens)

    def dispatch(
        self,
        context: ExchangeMemory,
        geometry: ExchangeGeometry,
        count_tag: int,
        x_TH: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        gsf: torch.Tensor | None,
        handle_epoch: torch.Tensor,
        num_parts_T: torch.Tensor,
        buffers: RecvBuffers,
    ) -> None:
        """See `interface.OneRankKernels`."""
        x_TH, num_tokens = aligned(x_TH), x_TH.shape[0]
        landing_half = geometry.landing_half(context.half_bytes["landing"])
        copies_scales = buffers.scales is not None and geometry.token_format.scale_dtype is not None
        ids_64 = topk_idx_TK.dtype == torch.int64
        kernel, plan = _one_rank_dispatch(geometry, x_TH.device, ids_64, gsf is not None, copies_scales)
        kernel.launch(
            {
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
                "scales": buffers.scales,
                "row_scale": buffers.row_scale,
                "landing": context.landing_pointers,
                "token_flags": context.token_flags_pointers,
                "signals": context.signal_pointers,
                "epoch_ptr": context.epoch,
                "handle_epoch": handle_epoch,
                "num_parts": num_parts_T,
                "error": context.error,
                "latch": context.latch,
                "counter": context.counters,
                "first_row": landing_half // geometry.record.record_bytes,
                "landing_half": landing_half,
                "token_flags_half": context.half_bytes["token_flags"],
            },
            (plan.one_rank_dispatch_blocks(num_tokens, most_sms(context.device)), 1, 1),
        )

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
        """See `interface.OneRankKernels`."""
        num_tokens, output_RH = y_TH.shape[0], aligned(output_RH)
        shared_TH = None if shared_TH is None else aligned(shared_TH)
        is_bf16 = output_RH.dtype == torch.bfloat16
        kernel, plan = _one_rank_combine(geometry, y_TH.device, is_bf16, shared_TH is not None)
        kernel.launch(
            {
                "y_TH": y_TH,
                "shared_TH": shared_TH,
                "shared_stride": shared_TH.stride(0) if shared_TH is not None else 0,
                "output": output_RH,
                "row_bytes": output_RH.stride(0) * output_RH.element_size(),
                "positions": positions_SK,
                "num_tokens": num_tokens,
                "landing": context.landing_pointers,
                "signals": context.signal_pointers,
                "epoch_ptr": context.epoch,
                "handle_epoch": handle_epoch,
                "error": context.error,
                "latch": context.latch,
                "landing_half": geometry.landing_half(context.half_bytes["landing"]),
                "settled": int(order.only_rows_pending),
            },
            (plan.one_rank_combine_blocks(num_tokens, most_sms(context.device)), 1, 1),
        )


@cache
def _one_rank_dispatch(
    geometry: ExchangeGeometry, device: torch.device, ids_64: bool, static_gsf: bool, scales: bool
) -> tuple[BoundKernel, ExchangePlan]:
    plan = required_plan(geometry)
    kernel = BoundKernel(
        "one_rank_dispatch.cu",
        geometry.kernel_prefix + "one_rank_dispatch",
        one_rank_dispatch_macros(geometry, ids_64=ids_64, static_gsf=static_gsf, scales=scales),
        block=plan.one_rank_threads,
        bound={"num_slots": geometry.num_slots, "capacity": geometry.row_capacity},
        device=device,
        shared_bytes=plan.one_rank_shared_bytes,
        early=plan.overlaps,
        all_shared=True,  # as the GEMM that starts beside it, so that they share an SM
    )
    return kernel, plan


@cache
def _one_rank_combine(
    geometry: ExchangeGeometry, device: torch.device, output_bf16: bool, has_shared: bool
) -> tuple[BoundKernel, ExchangePlan]:
    plan = required_plan(geometry)
    kernel = BoundKernel(
        "one_rank_combine.cu",
        geometry.kernel_prefix + "one_rank_combine",
        one_rank_combine_macros(geometry, output_bf16=output_bf16, has_shared=has_shared),
        block=ONE_RANK_SUM_THREADS,
        device=device,
        early=plan.overlaps,
        all_shared=True,  # as the GEMM beside which it starts
    )
    return kernel, plan


def forget_kernels() -> None:
    """As `cuda.forget_kernels`, which calls it."""
    for bound in (_one_rank_dispatch, _one_rank_combine):
        bound.cache_clear()


ONE_RANK = _OneRank()
