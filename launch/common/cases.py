"""Inputs and references of layers in runs and benchmarks: any rank can make any rank's data from a seed alone.

Shape letters: `T` tokens of a rank, `H` hidden size, `E` experts of the layer, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig, RunConfig
from moe_runtime.experts import activation_of
from moe_runtime.kernels.formats.number_formats import weight_format_named
from moe_runtime.kernels.gemm.expert_norm import ExpertNorm
from moe_runtime.kernels.gemm.weights import Activation
from moe_runtime.launch.common import draws
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference

CHECK_WEIGHTS = 2**28
"""Weights in all experts up to which every token is checked by default: the reference makes each expert anew."""

FEW_TOKENS = 4
"""Tokens per rank that are checked by default in larger layers."""

ExpertSource = Callable[[int], ExpertTensors]


def counts_of(tokens_per_rank: Sequence[int], world_size: int, max_tokens: int) -> list[int]:
    """Tokens of each rank from a command line: one number for all ranks, or one for each.

    Raises `ValueError` for another number of counts, or for one outside `0 .. max_tokens`.
    """
    if len(tokens_per_rank) not in (1, world_size):
        raise ValueError(f"--tokens: expected 1 number or {world_size}, one per rank, got {len(tokens_per_rank)}")
    for count in tokens_per_rank:
        if not 0 <= count <= max_tokens:
            raise ValueError(f"--tokens: expected 0 .. max_tokens_per_rank = {max_tokens}, got {count}")
    return list(tokens_per_rank) * (world_size if len(tokens_per_rank) == 1 else 1)


def step_inputs(
    layer: MoELayer, kind: str, seed: int, rank: int, step: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(x, topk_idx, topk_weights)` of any rank, on the layer's device."""
    config, device = layer.config, layer.context.device
    x_TH = draws.tokens(seed, rank, step, num_tokens, config.hidden_size, device)
    if kind == "router":
        assert layer.router is not None
        return x_TH, *layer.router(x_TH)
    return x_TH, *draws.routing(kind, seed, rank, step, num_tokens, config.num_experts, config.top_k, device)


@contextmanager
def expert_source(run: RunConfig, device: torch.device) -> Iterator[ExpertSource]:
    """A function that gives any expert of the layer that `run` describes, before this run quantizes it on `device`.

    It is good inside the `with` statement: files are opened, and their names looked through, once for all experts.
    """
    checkpoint = run.checkpoint
    if checkpoint is None:
        yield lambda expert: random_expert(run.layer, run.seed, expert, device)
        return
    with Checkpoint(checkpoint.path, ignore_keys=checkpoint.ignore_keys) as files:
        reader = files.reader(checkpoint.layer)
        reader.check_names()
        yield reader.expert


def layer_reference(
    layer: MoELayer,
    experts: ExpertSource,
    x_TH: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
) -> torch.Tensor:
    """float64 `[T, H]` of `moe_reference` with unquantized weights; one expert is held at a time.

    The output of a shared expert comes from the layer's own, which is not quantized and not exchanged.
    """
    assert layer.experts is not None
    y_TH = routed_reference(
        experts, x_TH, topk_idx_TK, topk_weights_TK, layer.experts.activation, norm=layer.experts.norm
    )
    return y_TH if layer.shared_expert is None else y_TH + layer.shared_expert(x_TH)


def routed_reference(
    experts: ExpertSource,
    x_TH: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    activation: Activation,
    *,
    norm: ExpertNorm | None = None,
) -> torch.Tensor:
    """float64 `[T, H]` of `moe_reference` with experts that are made one at a time."""
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float64, device=x_TH.device)
    for expert in topk_idx_TK.unique().tolist():
        if expert < 0:
            continue
        gate_up, down, gate_up_bias, down_bias = (
            None if tensor is None else dense(tensor).to(x_TH.device)[None] for tensor in experts(expert)
        )
        assert gate_up is not None and down is not None
        y_TH += moe_reference(
            x_TH,
            torch.where(topk_idx_TK == expert, 0, -1),
            topk_weights_TK,
            gate_up,
            down,
            activation,
            norm=norm,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
    return y_TH


def layer_bound(config: MoELayerConfig, *, exact_weights: bool = False, several_hosts: bool = False) -> float:
    """The derived bound of the error of a layer, in the Frobenius norm over many tokens.

    With `exact_weights` the reference has the weights that the layer holds. `several_hosts` is of its context.
    """
    activation = activation_of(config.activation)
    formats = config.token_format, config.weight_format, config.combine_format, config.intermediate_format
    return error_bound(
        *formats,
        activation=activation,
        exact_weights=exact_weights,
        multiplied_format=None if config.fp4_multiplied_in == "bf16" else config.multiplied_format,
        post_expert_norm=config.post_expert_norm is not None,
        several_hosts=several_hosts,
    )


def default_check_tokens(config: MoELayerConfig) -> int:
    """Tokens of a rank and step that are checked when nothing is asked for: all, or few in a large layer."""
    weights = 3 * config.num_experts * config.hidden_size * config.intermediate_size
    return config.max_tokens_per_rank if weights <= CHECK_WEIGHTS else FEW_TOKENS


def with_token_format(config: MoELayerConfig, name: str, weights: str | None = None) -> MoELayerConfig:
    """The layer with tokens in format `name`, and weights in it or in `weights`.

    Fields that go with other formats alone have their defaults then. Raises `ValueError` where sizes do not fit, or the
    formats do not go together.
    """
    has_fp4 = name == "fp8_block" and weights is not None and weight_format_named(weights).element_bits == 4
    changed: MoELayerConfig = config.replace(
        token_format=name,
        weight_format=weights,
        fp4_multiplied_in=config.fp4_multiplied_in if has_fp4 else "bf16",
        intermediate_gsf=config.intermediate_gsf if name == "nvfp4" else None,
    )
    return changed
