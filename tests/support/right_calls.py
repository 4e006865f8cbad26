"""Right arguments for every public function, constructor and method, for `tests.support.wrong_calls`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_runtime import ops
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.config import (
    ParallelConfig,
    PlacementConfig,
    RouterConfig,
    RunConfig,
)
from moe_runtime.deep_ep import ElasticBuffer
from moe_runtime.dispatcher import DifferentiableDispatcher, TokenDispatcher
from moe_runtime.kernels.exchange.padded_rows import PaddedRows
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import GateUpOrder
from moe_runtime.layer import MoELayer
from moe_runtime.placement import Placement
from moe_runtime.router import Router
from tests.support import op_cases
from tests.support.right_objects import CPU, EXPERTS, HIDDEN, INNER, MOST, OFFSETS, TOP_K, World, router_config


def _fields(made: Any, kind: type | None = None) -> dict[str, Any]:
    """The arguments of the dataclass `kind`, by default its own, that `made` was made with."""
    return {name: getattr(made, name) for name in (kind or type(made)).__dataclass_fields__}


def _dispatched(w: World) -> dict[str, Any]:
    dispatcher = w.dispatcher()
    rows = _fields(dispatcher.dispatch(**w.tokens()), GroupedRows)
    return rows | {"handle": dispatcher.dispatch(**w.tokens()).handle}


def _group_case(name: str) -> Callable[[World, Any], dict[str, Any]]:
    def arguments(w: World, on: Any) -> dict[str, Any]:
        k = 64 if name == "nvfp4_dense" else 128
        case = getattr(op_cases, name)([4, 0, 8], 32, k, w.generator, CPU)
        if name not in ("fp8", "moe_fp8") and w.draw.random() < 0.2:
            case = case.prepacked()
        made = dict(case.arguments)
        made["c" if case.is_in_place else "out"] = case.empty()
        return made

    return arguments


def _scales(w: World, *shape: int) -> torch.Tensor:
    codes = w.codes(*shape)
    return codes.view(torch.float8_e4m3fn) if w.draw.random() < 0.5 else codes


def _handle(stages: tuple[str, ...]) -> Callable[[World, Any], dict[str, Any]]:
    """A handle of `on` after `stages`, and what the next stage takes beside it."""

    def arguments(w: World, on: TokenDispatcher) -> dict[str, Any]:
        handle = on.dispatch_send(**w.tokens())
        output = w.numbers(on.geometry.row_capacity, HIDDEN, dtype=torch.bfloat16)
        for stage in stages:
            getattr(on, stage)(*((output, handle) if stage == "combine_send" else (handle,)))
        return {"handle": handle, "expert_output": output, "shared": w.numbers(5, HIDDEN, dtype=torch.bfloat16)}

    return arguments


def _padded(w: World, on: TokenDispatcher) -> dict[str, Any]:
    geometry, experts = on.geometry, on.geometry.num_local_experts
    row_bytes = geometry.token_format.quant_bytes(HIDDEN)
    out = PaddedRows.allocate(experts, geometry.num_slots, row_bytes, 1, geometry.top_k, device=CPU)
    # A row without a token keeps what memory held.
    for written in (out.rows, out.source_tokens):
        written.zero_()
    return {
        "handle": on.dispatch_send(**w.tokens()),
        "out": out,
        "scales_at": None,
        "statistics": torch.zeros(experts, dtype=torch.int32),
    }


def _rows_to_combine(w: World, on: DifferentiableDispatcher) -> dict[str, Any]:
    given = w.tokens()
    weights = given.pop("topk_weights")
    dispatched = on.dispatch(**given)
    return {"expert_output": torch.randn_like(dispatched.rows), "dispatched": dispatched, "topk_weights": weights}


def _elastic_dispatch(w: World, on: ElasticBuffer) -> dict[str, Any]:
    expand, sync = w.draw.random() < 0.5, w.draw.random() < 0.5
    given = w.elastic_tokens() | {"num_experts": EXPERTS, "do_expand": expand, "do_cpu_sync": sync}
    given["use_tma_aligned_col_major_sf"] = w.draw.random() < 0.5
    given |= {"num_max_tokens_per_rank": None, "expert_alignment": None, "previous_event": None}
    given |= {"previous_event_before_epilogue": None, "cumulative_local_expert_recv_stats": None, "handle": None}
    if w.draw.random() < 0.4:
        handle = on.dispatch(**given)[3]
        return given | {"handle": handle, "topk_idx": None, "do_cpu_sync": None}
    given["cumulative_local_expert_recv_stats"] = torch.zeros(EXPERTS, dtype=torch.int32)
    return given | {"expert_alignment": w.draw.choice((1, 4)), "previous_event": w.draw.choice((None, on.capture()))}


def _elastic_combine(w: World, on: ElasticBuffer) -> dict[str, Any]:
    expand = w.draw.random() < 0.5
    handle = on.dispatch(**w.elastic_tokens(), num_experts=EXPERTS, do_expand=expand)[3]
    rows = handle.num_expanded_tokens if expand else handle.num_recv_tokens
    biases = tuple(w.numbers(5, 2 * HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    return {
        "x": w.numbers(rows, 2 * HIDDEN, dtype=torch.bfloat16),
        "handle": handle,
        "topk_weights": w.draw.choice((None, w.numbers(rows) if expand else w.numbers(rows, TOP_K))),
        "bias": w.draw.choice((None, biases[0], biases)),
        "previous_event": None,
        "previous_event_before_epilogue": on.capture(),
    }


def _layer_arguments(w: World, on: Any) -> dict[str, Any]:
    return {"config": w.config(), "context": w.context(), "placement": w.placement(), "router": True}


def _step_arguments(w: World, on: MoELayer) -> dict[str, Any]:
    return {**w.tokens(), "shared": w.numbers(5, HIDDEN, dtype=torch.bfloat16), "max_tokens": 6}


def _load_router(w: World, on: Router) -> dict[str, Any]:
    return {
        "weight": w.numbers(EXPERTS, HIDDEN),
        "bias": None if on.bias is None else w.numbers(EXPERTS),
        "correction_bias": None if on.e_score_correction_bias is None else w.numbers(EXPERTS),
    }


def _loads(w: World) -> list[float]:
    return [float(w.draw.randrange(1, 50)) for _ in range(EXPERTS)]


def _experts_list(w: World, on: Any = None) -> dict[str, Any]:
    tensors = [(w.numbers(2 * INNER, HIDDEN), w.numbers(HIDDEN, INNER)) for _ in range(EXPERTS)]
    return {"experts": tensors}


def _nvfp4_weights(w: World, on: Any) -> dict[str, Any]:
    q, scales = ops.quantize_nvfp4(w.numbers(2, 32, 64))
    return {"b": q, "b_scales": ops.swizzle_scales(scales)}


def _mxfp8_weights(w: World, on: Any) -> dict[str, Any]:
    q, scales = ops.quantize_mxfp8(w.numbers(2, 32, 256), 128)
    return {"b": q, "b_scale": ops.pack_ue8m0_weights(scales), "scale_granularity_mnk": (1, 1, 128)}


def _activation_fields(w: World) -> dict[str, Any]:
    fields = {"order": GateUpOrder.GATE_UP, "alpha": 1.5, "limit": 7.0, "up_offset": 0.5, "limit_on": "gate"}
    return fields | {"function": "silu", "gated": True, "gate_softcap": 4.0, "up_softcap": 25.0}


def _quantized(w: World, on: Any) -> dict[str, Any]:
    return {"q": quantize_rows(w.numbers(3, 128), w.draw.choice(list(WEIGHT_FORMATS)))}


def _pair(quantize: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return lambda w, on: dict(zip(("q", "scales"), quantize(w.numbers(3, 128)), strict=True))


def _run_config(w: World) -> RunConfig:
    return RunConfig(layer=w.config(), parallel=ParallelConfig(transport="private"))


def _logits(w: World) -> dict[str, Any]:
    return {"logits_TE": w.numbers(5, 8), "top_k": 3}


_NONE: Callable[[World, Any], dict[str, Any]] = lambda w, on: {}  # noqa: E731

ARGUMENTS: dict[str, Callable[[World, Any], dict[str, Any]]] = {
    # Operations.
    "dequantize_fp8": lambda w, on: _pair(ops.quantize_fp8)(w, on) | {"granularity_mn": 1},
    "dequantize_mxfp8": lambda w, on: _pair(ops.quantize_mxfp8)(w, on) | {"granularity_k": 32},
    "dequantize_nvfp4": lambda w, on: _pair(ops.quantize_nvfp4)(w, on) | {"decode_scale": 0.25},
    "dequantize_rows": _quantized,
    "group_gemm_fp8_nt_groupwise": _group_case("fp8"),
    "group_gemm_nvfp4_nt_groupwise": _group_case("nvfp4_closed"),
    "grouped_matmul_dynamic_scaled_nvfp4": _group_case("nvfp4_dense"),
    "moe_gemm_fp8_nt_groupwise": _group_case("moe_fp8"),
    "moe_gemm_mxfp8_nt_groupwise": _group_case("mxfp8"),
    "nvfp4_encode_scale": lambda w, on: {"x": w.numbers(3, 16)},
    "pack_closed_form_128": lambda w, on: {"scales_RV": _scales(w, 12, 8), "m_indptr": list(OFFSETS)},
    "pack_dense_128": lambda w, on: {
        "scales_RV": _scales(w, 12, 8),
        "group_offsets": list(OFFSETS),
        "group_scale_offsets": [0, 1, 1],
        "num_blocks": 5,
    },
    "pack_scale_major": lambda w, on: {"scales": w.numbers(3, 5), "major": w.draw.choice(("K", "MN"))},
    "pack_swizzled_weights": lambda w, on: {"scales_ENV": _scales(w, 2, 9, 8)},
    "pack_ue8m0_rows": lambda w, on: {"scales_RV": w.codes(12, 6), "m_indptr": list(OFFSETS)},
    "pack_ue8m0_weights": lambda w, on: {"scales_ENV": w.codes(2, 9, 6)},
    "prepack_mxfp8": _mxfp8_weights,
    "prepack_nvfp4": _nvfp4_weights,
    "quantize_fp8": lambda w, on: {"x": w.numbers(3, 256), "granularity_mn": 1, "dtype": torch.float8_e4m3fn},
    "quantize_mxfp8": lambda w, on: {"x": w.numbers(3, 256), "granularity_k": w.draw.choice((32, 128))},
    "quantize_nvfp4": lambda w, on: {
        "x": w.numbers(2, 3, 32),
        "gsf": w.draw.choice((2.0, torch.ones(2), torch.ones(1))),
    },
    "quantize_rows": lambda w, on: {"x_RK": w.numbers(3, 128), "fmt": "nvfp4", "gsf": w.draw.choice((None, 2.0))},
    "swizzle_scales": lambda w, on: {"scales_RV": _scales(w, 9, 6)},
    "unpack_closed_form_128": lambda w, on: {
        "packed": w.codes((12 + 127 * 3) // 128 * 128, 8),
        "m_indptr": list(OFFSETS),
        "dtype": torch.uint8,
    },
    "unpack_dense_128": lambda w, on: {
        "blocks": w.codes(4, 2, 32, 4, 4),
        "group_offsets": list(OFFSETS),
        "group_scale_offsets": [0, 1, 1],
        "num_columns": 8,
    },
    "unpack_swizzled_weights": lambda w, on: {"packed": w.codes(2, 128, 8), "num_rows": 9, "dtype": torch.uint8},
    "unpack_ue8m0_rows": lambda w, on: {
        "packed": w.ints(2**31, 20, 2),
        "m_indptr": list(OFFSETS),
        "num_columns": 6,
    },
    "unpack_ue8m0_weights": lambda w, on: {"packed": w.ints(2**31, 2, 9, 2), "num_columns": 6},
    "unswizzle_scales": lambda w, on: {"blocks": w.codes(2, 2, 32, 4, 4), "num_rows": 130, "num_columns": 6},
    "NVFP4TokenFormat": lambda w, on: w.token_format_arguments(),
    "NVFP4TokenFormat.copy_msg_to_output_tensor": lambda w, on: {
        "buf": w.codes(3, on.msg_size()),
        "token_index": torch.tensor([0, 5, 3]),
    },
    "NVFP4TokenFormat.copy_token_to_send_buf": lambda w, on: {
        "buf": w.codes(3, on.msg_size()),
        "src": w.numbers(3, HIDDEN),
        "input_scale": 2.0,
    },
    "NVFP4TokenFormat.pad_expert_offsets": lambda w, on: {"row_offsets": torch.tensor([0, 4, 8], dtype=torch.int32)},
    "NVFP4TokenFormat.read_info": lambda w, on: {"buf": w.codes(3, on.msg_size())},
    "NVFP4TokenFormat.read_token": lambda w, on: {"buf": w.codes(3, on.msg_size()), "input_scale": 2.0},
    "NVFP4TokenFormat.write_info": lambda w, on: {
        "buf": w.codes(3, on.msg_size()),
        "source": torch.tensor([7, 8, 9]),
        "topk_idx": torch.tensor([[0, 1], [2, -1], [3, 0]]),
    },
    # Weights and rows.
    "ExpertWeights": lambda w, on: _fields(w.expert_weights(gate_up=True)),
    "ExpertWeights.dequantize": _NONE,
    "ExpertWeights.expert": lambda w, on: {"expert": 1},
    "ExpertWeights.quantize": lambda w, on: {
        "w_ENK": w.numbers(2, 32, 64),
        "fmt": w.draw.choice(("bf16", "mxfp8", "nvfp4", "mxfp4")),
        "gate_up": w.draw.choice((True, False, GateUpOrder.INTERLEAVED)),
        "bias": w.numbers(2, 32),
    },
    "ExpertWeights.to": _NONE,
    "Activation": lambda w, on: _activation_fields(w),
    "Experts": lambda w, on: w.experts_arguments(),
    "Experts.__call__": lambda w, on: {"rows": w.rows(on.gate_up.format.name), "out": w.numbers(12, HIDDEN)},
    "Experts.to": _NONE,
    "GateUpOrder": lambda w, on: {"value": "gate_up"},
    "GroupedRows": lambda w, on: _fields(w.rows()),
    "PrepackedWeights": lambda w, on: _fields(w.prepacked()),
    "PrepackedWeights.expert": lambda w, on: {"expert": 1},
    "PrepackedWeights.prepack": lambda w, on: {"w": w.expert_weights(fmt="nvfp4"), "argument": "w.scales"},
    "PrepackedWeights.restore": _NONE,
    "PrepackedWeights.to": _NONE,
    "PrepackedWeights.wanted": lambda w, on: {"w": w.expert_weights()},
    "QuantizedRows": lambda w, on: _fields(_quantized(w, on)["q"]),
    "RecordLayout": lambda w, on: {"format": "nvfp4", "hidden": HIDDEN, "top_k": TOP_K, "alignment": 16},
    "SwiGLU": lambda w, on: _activation_fields(w),
    "TokenFormat": lambda w, on: _fields(w.draw.choice(list(WEIGHT_FORMATS.values()))),
    "TokenFormat.check_columns": lambda w, on: {"k": 128, "argument": "k"},
    # Routing, exchange and layers.
    "CombineSink": lambda w, on: {"handle": w.dispatcher().dispatch_send(**w.tokens())},
    "DispatchedTokens": lambda w, on: _dispatched(w),
    "LayerCounters": lambda w, on: {
        "geometry": w.dispatcher().geometry,
        "num_experts": EXPERTS,
        "device": CPU,
        "engine": "torch",
    },
    "LayerCounters.add": lambda w, on: {
        "topk_idx": w.routing(3)["topk_idx"],
        "slots": w.routing(3)["topk_idx"],
        "num_parts": w.ints(2, 3),
        "group_offsets": torch.tensor([0, 1, 2, 4, 6], dtype=torch.int32),
    },
    "LayerCounts": lambda w, on: {
        "steps": 1,
        "tokens": 5,
        "expert_tokens": (1, 2, 3, 4),
        "rows": 10,
        "dispatch_bytes": 20,
        "combine_bytes": 30,
    },
    "LayerCounts.__sub__": lambda w, on: {"earlier": w.counts()},
    "RecordedRoutes": lambda w, on: w.routes_arguments(),
    "RecordedRoutes.add": lambda w, on: {**w.routing(3), "settled": False},
    "MoELayer.record_routes": lambda w, on: w.rings(),
    "MoELayer": _layer_arguments,
    "MoELayer.forward": _step_arguments,
    "MoELayer.from_checkpoint": lambda w, on: {
        "path": w.folder / "checkpoint",
        "layer": 0,
        "context": w.context(),
        "placement": w.placement(),
        "max_tokens_per_rank": MOST,
    },
    "MoELayer.from_run_config": lambda w, on: {"run": _run_config(w), "context": w.context()},
    "MoELayer.from_yaml": lambda w, on: {"path": w.folder / "run.yaml", "context": w.context()},
    "MoELayer.load_checkpoint": lambda w, on: {
        "checkpoint": w.draw.choice((w.folder / "checkpoint", w.checkpoint())),
        "layer": 0,
        "shared_elsewhere": False,
    },
    "MoELayer.load_experts": _experts_list,
    "MoELayer.load_random": lambda w, on: {"seed": 3},
    "MoELayer.replace_experts": lambda w, on: {"placement": w.placement()},
    "Router": lambda w, on: {
        "hidden_size": HIDDEN,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "config": router_config(w),
        "device": CPU,
    },
    "Router.forward": lambda w, on: {"x_TH": w.numbers(3, HIDDEN, dtype=torch.bfloat16)},
    "Router.load": _load_router,
    "Router.logits": lambda w, on: {"x_TH": w.numbers(3, HIDDEN, dtype=torch.bfloat16)},
    "DifferentiableDispatcher": lambda w, on: w.differentiable_arguments(),
    "DifferentiableDispatcher.combine": _rows_to_combine,
    "DifferentiableDispatcher.dispatch": lambda w, on: {
        name: value for name, value in w.tokens().items() if name != "topk_weights"
    },
    "TokenDispatcher": lambda w, on: w.dispatcher_arguments(),
    "TokenDispatcher.combine": _handle(("dispatch_recv",)),
    "TokenDispatcher.combine_recv": _handle(("dispatch_recv", "combine_send")),
    "TokenDispatcher.combine_send": _handle(("dispatch_recv",)),
    "TokenDispatcher.dispatch": lambda w, on: {**w.tokens(), "scales_in_record": False},
    "TokenDispatcher.dispatch_recv": _handle(()),
    "TokenDispatcher.dispatch_recv_padded": _padded,
    "TokenDispatcher.dispatch_send": lambda w, on: {**w.tokens(), "scales_in_record": False},
    "TokenDispatcher.from_config": lambda w, on: {
        "context": w.context(),
        "config": w.config(),
        "max_tokens": 4,
        "num_slots": EXPERTS,
        "mode": "auto",
        "agreed": False,
    },
    "TokenDispatcher.of_all_sizes": lambda w, on: {
        "context": w.context(),
        "config": w.config(),
        "num_slots": EXPERTS,
        "mode": "auto",
    },
    "TokenDispatcher.renew": lambda w, on: {
        "handle": on.dispatch(**w.tokens()).handle,
        "topk_weights": w.numbers(5, TOP_K),
    },
    "imbalance": lambda w, on: {"ranks": [w.counts(), w.counts()]},
    "sigmoid_topk": lambda w, on: (
        _logits(w)
        | {
            "correction_bias_E": w.numbers(8),
            "num_groups": 2,
            "top_groups": 1,
            "renormalize": True,
            "scaling_factor": 2.5,
        }
    ),
    "softmax_topk": lambda w, on: _logits(w) | {"renormalize": True, "scaling_factor": 1.5},
    "topk_softmax": lambda w, on: _logits(w) | {"scaling_factor": 1.5},
    # DeepEP's interface.
    "ElasticBuffer": lambda w, on: w.elastic_arguments() | {"num_bytes": w.draw.choice((None, 1 << 20))},
    "ElasticBuffer.barrier": lambda w, on: {},
    "ElasticBuffer.combine": _elastic_combine,
    "ElasticBuffer.dispatch": _elastic_dispatch,
    "ElasticBuffer.get_buffer_size_hint": lambda w, on: {
        "group": w.group(),
        "num_max_tokens_per_rank": MOST,
        "hidden": HIDDEN,
    },
    "ElasticBuffer.get_theoretical_num_qps": lambda w, on: {"num_sms": 24},
    "ElasticBuffer.get_theoretical_num_sms": lambda w, on: {"num_experts": EXPERTS, "num_topk": TOP_K},
    # Contexts, configs, placements, checkpoints, models.
    "Checkpoint": lambda w, on: {"path": w.folder / "checkpoint", "routers": True, "keep_in_host_memory": False},
    "Checkpoint.check_fits": lambda w, on: {"config": w.config(), "layer": 0, "but_for": ["top_k"]},
    "Checkpoint.check_layer": lambda w, on: {"layer": 0},
    "Checkpoint.check_sizes": lambda w, on: {"layer": 0},
    "Checkpoint.digests": lambda w, on: {"layer": 0},
    "Checkpoint.stamps": lambda w, on: {"layer": 0},
    "Checkpoint.experts": lambda w, on: {"layer": 0, "expert_ids": [0, 2], "biases": False},
    "Checkpoint.has_experts": lambda w, on: {"layer": 0},
    "Checkpoint.layer_config": lambda w, on: {"layer": 0, "max_tokens_per_rank": MOST},
    "Checkpoint.names": lambda w, on: {"layer": 0},
    "Checkpoint.quant_buffers": lambda w, on: {"layer": 0, "weight_format": "bf16", "count": 4, "device": CPU},
    "Checkpoint.reader": lambda w, on: {"layer": 0},
    "Checkpoint.router": lambda w, on: {"layer": 0},
    "Checkpoint.shared_expert": lambda w, on: {"layer": 0},
    "Checkpoint.stored_of": lambda w, on: {"layer": 0},
    "ExpertParallel": lambda w, on: {"context": w.context()},
    "ExpertParallel.record_routes": lambda w, on: w.rings(2),
    "ExpertParallel.replay_routes": lambda w, on: w.given_routes(),
    "ExpertParallel.replace_experts": lambda w, on: {
        "placement": w.draw.choice((w.placement(), {0: w.placement(), 1: w.placement()}))
    },
    "ExpertParallelContext": lambda w, on: (
        {
            "group": None,
            "device": CPU,
            "heap": None,
            "transport": "private",
            "timeout_s": 30.0,
            "startup_timeout_s": 120.0,
            "on_failure": "continue",
            "lost_experts": "drop",
        }
        if w.draw.random() < 0.7
        else {"heap": PrivateHeap(), "transport": "auto"}
    ),
    "ExpertParallelContext.abort": lambda w, on: {"reason": "wrong input"},
    "ExpertParallelContext.register": lambda w, on: {
        "agree": {"top_k": 2},
        "about": "layer 3",
        "staging_bytes": 128,
        "landing": 4096,
    },
    "MoELayerConfig": lambda w, on: (
        w.config().model_dump() | {"router": RouterConfig(), "activation": w.config().activation}
    ),
    "MoELayerConfig.mode_on": lambda w, on: {"world_size": 2},
    "MoELayerConfig.replace": lambda w, on: {"top_k": 1},
    "ActivationConfig": lambda w, on: _activation_fields(w) | {"order": "gate_up"},
    "ActivationConfig.replace": lambda w, on: {"alpha": 2.0},
    "PostExpertNormConfig": lambda w, on: {"eps": 1e-5},
    "PostExpertNormConfig.replace": lambda w, on: {"eps": 1e-8},
    "CheckpointConfig": lambda w, on: {"path": "folder", "layer": 1},
    "CheckpointConfig.replace": lambda w, on: {"layer": 1},
    "PlacementConfig": lambda w, on: {"spare_slots": 2, "load": "load.json", "file": None},
    "PlacementConfig.replace": lambda w, on: {"spare_slots": 1},
    "PrivateHeap": lambda w, on: {"device": CPU},
    "PrivateHeap.close": lambda w, on: {"failed": False},
    "PrivateHeap.group": lambda w, on: {"world_size": 2, "device": CPU},
    "PrivateHeap.peer_pointers": lambda w, on: {"region": "landing"},
    "PrivateHeap.peer_tensor": lambda w, on: {"region": "landing", "rank": 1},
    "PrivateHeap.region": lambda w, on: {"region": "landing"},
    "PrivateHeap.reserve": lambda w, on: {"region": "more", "num_bytes": 512, "ones": 256},
    "PrivateHeap.tensor": lambda w, on: {"region": "landing"},
    "SharedExpertConfig": lambda w, on: {"intermediate_size": INNER, "gated": True, "limit": 7.0},
    "SharedExpertConfig.replace": lambda w, on: {"gated": True},
    "VirtualRanks": lambda w, on: w.virtual_ranks_arguments(),
    "VirtualRanks.__call__": lambda w, on: {
        "xs": [w.numbers(tokens, HIDDEN, dtype=torch.bfloat16) for tokens in (3, 5)],
        "routing": [tuple(w.routing(tokens).values()) for tokens in (3, 5)],
        "max_tokens": 6,
    },
    "VirtualRanks.replace_experts": lambda w, on: {"placement": Placement(EXPERTS, 2, (0, 1, 2, 3))},
    "ParallelConfig": lambda w, on: ParallelConfig().model_dump(),
    "ParallelConfig.replace": lambda w, on: {"timeout_s": 2.0},
    "Placement": lambda w, on: {"num_experts": 3, "num_ranks": 2, "slot_experts": (0, 1, 2, 0)},
    "Placement.contiguous": lambda w, on: {"num_experts": 4, "num_ranks": 2},
    "Placement.from_json": lambda w, on: {"text": w.placement().to_json()},
    "Placement.rank_experts": lambda w, on: {"rank": 0},
    "Placement.rank_loads": lambda w, on: {"load": _loads(w)},
    "Placement.reordered_like": lambda w, on: {"other": w.placement()},
    "RouterConfig": lambda w, on: router_config(w).model_dump(),
    "RouterConfig.replace": lambda w, on: {"scaling_factor": 2.0},
    "RunConfig": lambda w, on: {
        "layer": w.config(),
        "placement": PlacementConfig(),
        "parallel": ParallelConfig(),
        "tokens_per_rank": 4,
        "seed": 3,
    },
    "RunConfig.replace": lambda w, on: {"seed": 1},
    "close_experts": lambda w, on: {"model": w.model()},
    "experts_settings": lambda w, on: {
        "max_tokens_per_rank": MOST,
        "token_format": "mxfp8",
        "weight_format": None,
        "combine_format": "bf16",
        "parallel": None,
    },
    "replay_routes": lambda w, on: {"model": w.model(), **w.given_routes()},
    "apply_expert_parallel": lambda w, on: {
        "model": w.model(),
        "mesh": None,
        "max_tokens_per_rank": MOST,
        "token_format": None,
        "weight_format": None,
        "combine_format": "bf16",
        "experts": None,
        "placement": Placement.contiguous(EXPERTS, 1),
        "parallel": ParallelConfig(transport="private"),
        "device": CPU,
        "token_buckets": (4,),
    },
    "init_from_env": lambda w, on: {"device": "cpu", "timeout_s": 5.0},
    "load_config": lambda w, on: {"path": w.folder / "run.yaml"},
    "placement_from_config": lambda w, on: {
        "section": PlacementConfig(load=str(w.folder / "load.json")),
        "num_experts": EXPERTS,
        "num_ranks": 2,
    },
    "plan_placement": lambda w, on: {"load": _loads(w), "num_ranks": 2, "slots_per_rank": 3},
    "reserved_bytes": lambda w, on: {"config": w.config(), "world_size": 4, "placed": True, "num_hosts": 2},
}
"""Right arguments by name of the call, from the world and the object whose method it is (None for others)."""

BY_NAME: dict[str, Callable[[World], Any]] = {
    "engine": lambda w: w.draw.choice(("auto", "torch")),
    "validate": lambda w: w.draw.choice((None, True)),
    "device": lambda w: w.draw.choice(("cpu", CPU)),
}
"""Right values of parameters that mean the same everywhere."""
