"""Our own rows: the layer in several formats, DeepEP's interface, and the experts alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from moe_runtime import deep_ep
from moe_runtime.config import MoELayerConfig
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.formats.reference_quantize import raw_bits
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common import cases
from moe_runtime.launch.research.peers import deep_ep_buffer
from moe_runtime.launch.research.peers.case import Case, Point, Rows, Turn, Way, in_turn
from moe_runtime.layer import MoELayer

FORMATS: dict[str, tuple[str, tuple[str, str | None, str | None]]] = {
    "nvfp4": ("NVFP4", ("nvfp4", None, None)),
    "fp8": ("FP8", ("fp8_block", None, None)),
    "mxfp4_in_fp8": ("MXFP4 in FP8", ("fp8_block", "mxfp4", "fp8")),
    "nvfp4_in_fp8": ("NVFP4 in FP8", ("fp8_block", "nvfp4", "fp8")),
    "mxfp4": ("MXFP4 weights, BF16 tokens", ("bf16", "mxfp4", None)),
    "bf16": ("BF16", ("bf16", None, None)),
}
"""Of the layer, by name: how tables call them; formats of tokens and weights, and `fp4_multiplied_in`."""
DEFAULT_FORMATS = ("nvfp4", "fp8", "mxfp4_in_fp8", "nvfp4_in_fp8")


def config_of(base: MoELayerConfig, name: str) -> MoELayerConfig:
    """The routed experts of the layer in one of `FORMATS`. Raises `ValueError` where sizes do not fit."""
    tokens, weights, multiplied = FORMATS[name][1]
    made = cases.with_token_format(base.replace(shared_expert=None), tokens, weights)
    changed: MoELayerConfig = made if multiplied is None else made.replace(fp4_multiplied_in=multiplied)
    return changed


def layers(case: Case) -> Point:
    """`MoELayer` in each of the formats. All layers exist before the first step: they share one memory."""
    made: dict[tuple[str, int], MoELayer] = {}
    for name in case.formats:
        config = config_of(case.run.layer, name)
        for tokens in case.tokens:
            layer = MoELayer(config.replace(max_tokens_per_rank=tokens), case.context)
            first = made.setdefault((name, case.tokens[0]), layer)
            made[name, tokens] = layer
            if layer is first:
                layer.load_random(case.run.seed)
            layer.router, layer.experts = first.router, first.experts

    def point(tokens: int) -> Iterator[Way]:
        turns = case.turns(tokens)
        for name in case.formats:
            layer = made[name, tokens]
            step = in_turn(turns, partial(_forward, layer))
            y_TH = _forward(layer, turns[0])
            error, bound = case.layer_error(tokens, y_TH), cases.layer_bound(layer.config)
            yield Way("layer", FORMATS[name][0], step, error, bound, case.context.graph_safe)

    return point


def _forward(layer: MoELayer, turn: Turn) -> torch.Tensor:
    return layer(turn.x, topk_idx=turn.idx, topk_weights=turn.weights)


def low_latency(case: Case) -> Point:
    """The low-latency calls of `moe_runtime.deep_ep`."""
    return deep_ep_buffer.low_latency_of(case, deep_ep)


def normal(case: Case) -> Point:
    """The calls of normal mode of `moe_runtime.deep_ep`."""
    return deep_ep_buffer.normal_of(case, deep_ep)


def experts(case: Case, name: str) -> Point:
    """Gate and up, SwiGLU with requantization, down, in one of `FORMATS`, on rows that lie by expert."""
    label, (token_format, weight_format, _) = FORMATS[name]
    weight_format = weight_format or token_format
    gate_up, down = local_weights(case, weight_format)
    held = Experts(gate_up, down, case.activation).prepacked()

    def point(tokens: int) -> Iterator[Way]:
        rows = case.rows(tokens)
        grouped = _grouped(rows, token_format)
        out_RH = torch.full_like(rows.x, torch.nan)
        held(grouped, out=out_RH)
        bound = cases.layer_bound(cases.with_token_format(case.run.layer, token_format, weight_format))
        error = case.experts_error(rows, out_RH)
        note = "with SwiGLU and requantization"
        yield Way("experts", label, lambda number: held(grouped, out=out_RH), error, bound, note=note)

    return point


def _grouped(rows: Rows, token_format: str) -> GroupedRows:
    q, device = quantize_rows(rows.x, token_format), rows.x.device
    assert not q.format.swizzled
    offsets = torch.tensor([0, *rows.sizes], device=device).cumsum(0, dtype=torch.int32)
    ids = torch.arange(len(rows.sizes), dtype=torch.int32, device=device)
    count, columns = rows.x.shape
    stored = q.quants_RK, q.scales_RV, q.row_scale_R
    return GroupedRows(q.format, *stored, None, offsets, None, ids, count, columns)


def local_weights(case: Case, weight_format: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Gate and up, and down, of this rank's experts."""
    gate_up, down = (
        _joined(
            [
                ExpertWeights.quantize(case.weight(number, place)[None], weight_format, gate_up=place == 0)
                for number in case.local
            ]
        )
        for place in (0, 1)
    )
    return gate_up, down


def linear_mxfp4(case: Case, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 `[E, N, K / 2]` and `[E, N, K / 32]`, as checkpoints have them, of `Case.weight`."""
    made = [quantize_rows(case.weight(number, place), "mxfp4") for number in case.local]
    scales = [raw_bits(one.scales_RV) for one in made if one.scales_RV is not None]
    return torch.stack([raw_bits(one.quants_RK) for one in made]), torch.stack(scales)


def _joined(parts: list[ExpertWeights]) -> ExpertWeights:
    def along_experts(name: str) -> torch.Tensor | None:
        tensors = [one for part in parts if (one := getattr(part, name)) is not None]
        return torch.cat([raw_bits(one) for one in tensors]).view(tensors[0].dtype) if tensors else None

    quants = along_experts("quants")
    assert quants is not None
    scales, of_experts = along_experts("scales"), along_experts("expert_scales")
    return ExpertWeights(parts[0].format, quants, scales, of_experts, gate_up=parts[0].gate_up)
