"""Right values and objects of every public class, for `tests.support.wrong_calls`."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from moe_runtime import ops
from moe_runtime.checkpoints import Checkpoint
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.config import (
    ActivationConfig,
    CheckpointConfig,
    MoELayerConfig,
    ParallelConfig,
    PlacementConfig,
    PostExpertNormConfig,
    RouterConfig,
    RunConfig,
    SharedExpertConfig,
)
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.deep_ep import ElasticBuffer
from moe_runtime.dispatcher import CombineSink, DifferentiableDispatcher, TokenDispatcher
from moe_runtime.experts import Experts
from moe_runtime.integrations import ExpertParallel, apply_expert_parallel
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.formats.quantize import quantize_rows
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights, SwiGLU
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.observation.counters import LayerCounters, LayerCounts
from moe_runtime.observation.routes import RecordedRoutes
from moe_runtime.placement import Placement
from moe_runtime.router import Router
from moe_runtime.virtual import VirtualRanks

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K, MOST = 64, 32, 4, 2, 8
OFFSETS = [0, 4, 4, 12]


class World:
    """Right values, drawn from `draw`; files lie in one folder of this process."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.generator = torch.Generator().manual_seed(draw.randrange(2**31))

    folders: ClassVar[list[tempfile.TemporaryDirectory[str]]] = []

    @cached_property
    def folder(self) -> Path:
        if not self.folders:
            self.folders.append(tempfile.TemporaryDirectory(prefix="wrong-calls-"))
            folder = Path(self.folders[0].name)
            write_qwen3_moe_checkpoint(folder / "checkpoint", self.config("bf16"), 1)
            sizes = f"hidden_size: {HIDDEN}, intermediate_size: {INNER}, num_experts: {EXPERTS}, top_k: {TOP_K}"
            text = f"layer: {{{sizes}, max_tokens_per_rank: {MOST}}}\nparallel: {{transport: private}}\n"
            (folder / "run.yaml").write_text(text)
            (folder / "load.json").write_text("[1, 2, 3, 4]")
        return Path(self.folders[0].name)

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def codes(self, *shape: int, high: int = 120) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator, dtype=torch.uint8)

    def ints(self, end: int, *shape: int) -> torch.Tensor:
        """int32 from 0 on, below `end`."""
        return torch.randint(end, shape, generator=self.generator).to(torch.int32)

    def routing(self, tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.rand(tokens, EXPERTS, generator=self.generator).argsort(dim=1)[:, :TOP_K]
        return {"topk_idx": ids.to(torch.int32), "topk_weights": self.numbers(tokens, TOP_K).abs()}

    def config(self, fmt: str | None = None, **more: Any) -> MoELayerConfig:
        fmt = fmt or self.draw.choice(("bf16", "mxfp8", "nvfp4"))
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "top_k": TOP_K}
        return MoELayerConfig(**sizes, max_tokens_per_rank=MOST, token_format=fmt, **more)

    def context(self) -> ExpertParallelContext:
        return ExpertParallelContext(transport="private", engine="torch", device="cpu")

    def group(self) -> dist.ProcessGroup:
        """One rank; `leave_group` ends it."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def elastic_arguments(self) -> dict[str, Any]:
        sizes = {"num_max_tokens_per_rank": MOST, "hidden": 2 * HIDDEN, "num_topk": TOP_K}
        return {"group": self.group(), **sizes, "explicitly_destroy": True, "num_cpu_bytes": 0}

    def elastic_buffer(self) -> ElasticBuffer:
        once = self.draw.random() < 0.3
        return _Zeroing(**self.elastic_arguments(), allow_multiple_reduction=not once)

    def elastic_tokens(self) -> dict[str, Any]:
        """What `ElasticBuffer.dispatch` takes of a rank."""
        x: Any = self.numbers(5, 2 * HIDDEN, dtype=torch.bfloat16)
        if self.draw.random() < 0.4:
            scales = self.numbers(5, 1).abs()
            x = x.to(torch.float8_e4m3fn), self.draw.choice((scales, scales.view(torch.int32)))
        routing = self.routing(5)
        return {"x": x, "topk_idx": routing["topk_idx"].to(torch.int64), "topk_weights": routing["topk_weights"]}

    def placement(self) -> Placement:
        ids = [0, 1, 2, 3]
        self.draw.shuffle(ids)
        return Placement(EXPERTS, 1, tuple(ids))

    def layer(self, loaded: bool = True) -> MoELayer:
        placed = self.placement() if self.draw.random() < 0.5 else None
        layer = MoELayer(self.config(), self.context(), placement=placed)
        if loaded:
            layer.load_random(self.draw.randrange(100))
        return layer

    def placed_layer(self) -> MoELayer:
        layer = MoELayer(self.config(), self.context(), placement=self.placement())
        layer.load_random(1)
        return layer

    def dispatcher_arguments(self) -> dict[str, Any]:
        fmt = self.draw.choice(("bf16", "nvfp4", "mxfp8"))
        scale = {"input_scale": self.draw.choice((None, 0.5))} if fmt == "nvfp4" else {"input_scale": None}
        return {
            "context": self.context(),
            "hidden_size": HIDDEN,
            "num_experts": EXPERTS,
            "top_k": TOP_K,
            "max_tokens_per_rank": MOST,
            "token_format": fmt,
            "combine_format": self.draw.choice(("bf16", "mxfp8")),
            "mode": self.draw.choice(("auto", "contiguous", "gathered")),
            "expert_row_capacity": self.draw.choice((None, 16)),
            "num_sms": self.draw.choice((None, 4)),
            "output_size": self.draw.choice((None, HIDDEN)),
            "reusable_handles": self.draw.random() < 0.3,
            "kernel_prefix": "",
            "accepts_repeats": self.draw.random() < 0.3,
            "sums_by_entry": self.draw.random() < 0.3,
            "agreed": False,
            **scale,
        }

    def dispatcher(self) -> TokenDispatcher:
        return TokenDispatcher(**self.dispatcher_arguments())

    def reusing_dispatcher(self) -> TokenDispatcher:
        """With gathered bf16 rows and handles that can be used again."""
        given = {"token_format": "bf16", "input_scale": None, "mode": "gathered", "expert_row_capacity": None}
        return TokenDispatcher(**self.dispatcher_arguments() | given | {"reusable_handles": True})

    def differentiable_arguments(self) -> dict[str, Any]:
        given = self.dispatcher_arguments()
        names = ("context", "hidden_size", "num_experts", "top_k", "max_tokens_per_rank", "num_sms")
        return {name: given[name] for name in names} | {"expert_row_capacity": None}

    def differentiable_dispatcher(self) -> DifferentiableDispatcher:
        dispatcher = DifferentiableDispatcher(**self.differentiable_arguments())
        dispatcher._dispatcher.context.allocate()
        return dispatcher

    def tokens(self, tokens: int = 5) -> dict[str, torch.Tensor]:
        return {"x": self.numbers(tokens, HIDDEN, dtype=torch.bfloat16), **self.routing(tokens)}

    def expert_weights(self, rows: int = 2 * INNER, columns: int = HIDDEN, **more: Any) -> ExpertWeights:
        fmt = more.pop("fmt", None) or self.draw.choice(("bf16", "mxfp8", "nvfp4"))
        return ExpertWeights.quantize(self.numbers(EXPERTS, rows, columns) / 8, fmt, **more)

    def experts_arguments(self, fmt: str | None = None) -> dict[str, Any]:
        fmt = fmt or self.draw.choice(("bf16", "mxfp8", "nvfp4"))
        gate_up = self.expert_weights(fmt=fmt, gate_up=True, bias=self.numbers(EXPERTS, 2 * INNER))
        return {
            "gate_up": gate_up,
            "down": self.expert_weights(HIDDEN, INNER, fmt=fmt),
            "activation": SwiGLU(limit=self.draw.choice((None, 7.0))),
            "intermediate_format": None,
            "intermediate_gsf": 8.0 if fmt == "nvfp4" else None,
            "engine": "auto",
            "num_sms": None,
            "norm": None,
        }

    def prepacked(self) -> PrepackedWeights:
        fmt = self.draw.choice(("nvfp4", "mxfp8"))
        return PrepackedWeights.prepack(self.expert_weights(fmt=fmt, gate_up=self.draw.choice((False, True))))

    def rows(self, fmt: str | None = None) -> GroupedRows:
        """Three groups of rows of a format, as dispatch hands them to the experts."""
        fmt = fmt or self.draw.choice(("bf16", "mxfp8", "nvfp4"))
        q = quantize_rows(self.numbers(OFFSETS[-1], HIDDEN), fmt)
        scales, shifts = q.scales_RV, None
        if q.format.swizzled:
            scales, shifts = ops.pack_dense_128(q.scales_RV, OFFSETS)
        return GroupedRows(
            q.format,
            q.quants_RK,
            scales,
            q.row_scale_R,
            None,
            torch.tensor(OFFSETS, dtype=torch.int32),
            shifts,
            torch.tensor([2, 0, 1], dtype=torch.int32),
            OFFSETS[-1],
            HIDDEN,
            3,
        )

    def token_format(self) -> ops.NVFP4TokenFormat:
        made = ops.NVFP4TokenFormat(**self.token_format_arguments())
        made.pad_expert_offsets(torch.tensor([0, 4, 8], dtype=torch.int32))
        return made

    def token_format_arguments(self) -> dict[str, Any]:
        return {
            "hid_dim": HIDDEN,
            "top_k": TOP_K,
            "alignment": 16,
            "output_tokens": torch.zeros(8, HIDDEN // 2, dtype=torch.uint8),
            "output_scales": torch.zeros(3, 1, 32, 4, 4, dtype=torch.float8_e4m3fn),
            "output_scales_offset": torch.zeros(2, dtype=torch.int32),
        }

    def counts(self) -> LayerCounts:
        tokens = self.draw.randrange(9)
        return LayerCounts(1, tokens, (tokens, 0, 1, 2), 2 * tokens, 128, 64)

    def counters(self) -> LayerCounters:
        return LayerCounters(self.dispatcher().geometry, EXPERTS, CPU, "torch")

    def rings(self, *layers: int) -> dict[str, Any]:
        dtype = self.draw.choice((torch.int16, torch.int32))
        shape = *layers, 3, MOST, TOP_K
        return {"ids": torch.zeros(shape, dtype=dtype), "weights": torch.zeros(shape)}

    def given_routes(self) -> dict[str, Any]:
        """For two layers."""
        ids = torch.tensor([self.draw.sample(range(EXPERTS), TOP_K) for _ in range(2 * 5)]).view(2, 5, TOP_K)
        dtype = self.draw.choice((torch.int16, torch.int32, torch.int64))
        return {"ids": ids.to(dtype), "weights": self.draw.choice((None, torch.rand(ids.shape)))}

    def routes_arguments(self) -> dict[str, Any]:
        sizes = {"max_tokens": MOST, "top_k": TOP_K, "num_experts": EXPERTS}
        return {**self.rings(), **sizes, "device": CPU, "engine": "torch"}

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.folder / "checkpoint")

    def heap(self) -> PrivateHeap:
        heap = PrivateHeap.group(2)[1]
        heap.reserve("landing", 512)
        return heap

    def allocated_heap(self) -> PrivateHeap:
        heap = self.heap()
        for member in heap._members:
            if member is not heap:
                member.reserve("landing", 512)
            member.allocate()
        return heap

    def virtual_ranks(self) -> VirtualRanks:
        return VirtualRanks(**self.virtual_ranks_arguments())

    def virtual_ranks_arguments(self) -> dict[str, Any]:
        seed = self.draw.randrange(100)
        return {
            "config": self.config(),
            "world_size": 2,
            "load": lambda layer: layer.load_random(seed),
            "placement": Placement(EXPERTS, 2, (3, 1, 0, 2)),
        }

    def model(self) -> nn.Module:
        return _Model(self)

    def parallel(self) -> ExpertParallel:
        model = self.model()
        made = apply_expert_parallel(
            model,
            max_tokens_per_rank=MOST,
            placement=Placement.contiguous(EXPERTS, 1),
            parallel=ParallelConfig(transport="private"),
        )
        made.count_tokens()
        made.__dict__["model"] = model  # which it does not keep alive itself
        return made


def leave_group() -> None:
    """End the group of `World.group`, if there is one: without it a rank is alone."""
    if dist.is_initialized():
        dist.destroy_process_group()


class _Zeroing(ElasticBuffer):
    """Rows that no token has may hold anything; here they are 0, so that results can be compared. On a CPU."""

    def _new_context(self) -> ExpertParallelContext:
        context = ExpertParallelContext(self.group, device="cpu", one_memory=True, **self._timeouts)
        self._contexts.append(context)
        return context

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        got = super().dispatch(*args, **kwargs)
        metadata = got[3].recv_src_metadata
        rows = metadata[:, 2:].flatten() if got[1] is None else torch.arange(len(metadata))[metadata[:, 0] >= 0]
        for part in got[0] if isinstance(got[0], tuple) else (got[0],):
            there = torch.zeros(part.shape[0], dtype=torch.bool)
            there[rows[rows >= 0].long()] = True
            part.view(torch.uint8 if part.dtype.itemsize == 1 else part.dtype)[~there] = 0
        return got


class _Experts(nn.Module):
    def __init__(self, w: World) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(w.numbers(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16) / 8)
        self.down_proj = nn.Parameter(w.numbers(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16) / 8)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class _Model(nn.Module):
    """What `apply_expert_parallel` reads of a Qwen3-MoE model of transformers, without transformers."""

    def __init__(self, w: World) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.Module()}) for _ in range(2)])
        for layer in self.layers:
            layer["mlp"].experts = _Experts(w)
        values = {
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "moe_intermediate_size": INNER,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        self.config = SimpleNamespace(to_dict=lambda: dict(values))


def _sink(w: World) -> CombineSink:
    return CombineSink(w.dispatcher().dispatch_send(**w.tokens()))


INSTANCES: dict[str, Callable[[World], Any]] = {
    "Checkpoint": World.checkpoint,
    "CombineSink": _sink,
    "ExpertParallel": World.parallel,
    "ExpertParallelContext": World.context,
    "ExpertWeights": World.expert_weights,
    "ElasticBuffer": World.elastic_buffer,
    "Experts": lambda w: Experts(**w.experts_arguments()),
    "LayerCounters": World.counters,
    "LayerCounts": World.counts,
    "MoELayer": World.layer,
    "MoELayerConfig": World.config,
    "NVFP4TokenFormat": World.token_format,
    "ActivationConfig": lambda w: ActivationConfig(),
    "CheckpointConfig": lambda w: CheckpointConfig(path="x"),
    "ParallelConfig": lambda w: ParallelConfig(),
    "Placement": World.placement,
    "PlacementConfig": lambda w: PlacementConfig(spare_slots=2),
    "PrivateHeap": World.allocated_heap,
    "PrepackedWeights": World.prepacked,
    "Router": lambda w: Router(HIDDEN, EXPERTS, TOP_K, router_config(w)),
    "RecordedRoutes": lambda w: RecordedRoutes(**w.routes_arguments()),
    "RouterConfig": lambda w: RouterConfig(),
    "RunConfig": lambda w: RunConfig(layer=w.config()),
    "SharedExpertConfig": lambda w: SharedExpertConfig(intermediate_size=INNER),
    "DifferentiableDispatcher": World.differentiable_dispatcher,
    "PostExpertNormConfig": lambda w: PostExpertNormConfig(),
    "TokenDispatcher": World.dispatcher,
    "TokenFormat": lambda w: w.draw.choice(list(FORMATS.values())),
    "VirtualRanks": World.virtual_ranks,
}
"""An object for the methods of each public class that has any."""

OTHER_INSTANCES: dict[str, Callable[[World], Any]] = {
    "MoELayer.replace_experts": World.placed_layer,
    "PrivateHeap.allocate": World.heap,
    "PrivateHeap.reserve": World.heap,
    "TokenDispatcher.dispatch_recv_padded": World.reusing_dispatcher,
    "TokenDispatcher.renew": World.reusing_dispatcher,
}
"""An object for methods that need one in another state."""


def router_config(w: World) -> RouterConfig:
    return w.draw.choice(
        (
            RouterConfig(),
            RouterConfig(kind="topk_softmax", bias=True),
            RouterConfig(kind="sigmoid", correction_bias=True, num_groups=2, top_groups=1),
        )
    )
