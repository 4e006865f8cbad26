"""Layers whose FP4 weights are multiplied in FP8: the bits of FP8 layers with the same weights folded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moe_runtime.config import ActivationConfig, MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.expert_slots import empty_slots, put, tensors_of, with_slots
from moe_runtime.experts import Experts, activation_of
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, expanded_activation
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, SwiGLU
from moe_runtime.launch.common.cases import layer_bound, with_token_format
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import moe_reference, relative_error
from tests.support.checkpoint_writers import modelopt_nvfp4, quantize_experts
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows, random_weights

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 256, 160, 3, 2, 50
STORED = ["nvfp4", "mxfp4"]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
ACTIVATIONS = {
    "gate_up": ActivationConfig(),
    "up_gate": ActivationConfig(order="up_gate", limit=1.5),
    "interleaved": ActivationConfig(order="interleaved", alpha=1.702, limit=7.0, up_offset=1.0),
    "ungated": ActivationConfig(function="relu2", gated=False),
}


def config_of(stored: str, activation: ActivationConfig, **more: Any) -> MoELayerConfig:
    fields: dict[str, Any] = {"token_format": "fp8_block", "weight_format": stored, "activation": activation, **more}
    return MoELayerConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        **fields,
    )


def above(w: torch.Tensor, order: GateUpOrder | None) -> torch.Tensor:
    """Rows of a weight or a bias, those of gate first."""
    rows = 2 * INNER
    return w if order is None else torch.cat([w[order.gate_rows(rows)], w[order.up_rows(rows)]])


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("stored", STORED)
def test_the_bits_of_a_layer_with_folded_weights(
    stored: str, activation: ActivationConfig, biased: bool, rng: torch.Generator
) -> None:
    """Whatever the order of gate and up, whose blocks of 128 rows are apart. And errors within the bound."""
    order, rows = activation_of(activation).gate_up, (1 + activation.gated) * INNER
    first_order = None if order is None else GateUpOrder.GATE_UP
    dense = [(torch.randn(rows, HIDDEN, generator=rng) / 16, torch.randn(HIDDEN, INNER, generator=rng)) for _ in "abc"]
    biases = [(torch.randn(rows, generator=rng), torch.randn(HIDDEN, generator=rng)) for _ in dense]

    def quantized(w: torch.Tensor, order: GateUpOrder | None) -> ExpertWeights:
        return ExpertWeights.quantize(w[None], stored, gate_up=order or False, engine="torch")

    given = [
        (quantized(above(w1, order), first_order), quantized(w2, None), *([above(b1, order), b2] if biased else ()))
        for (w1, w2), (b1, b2) in zip(dense, biases, strict=True)
    ]
    x = torch.randn(TOKENS, HIDDEN, generator=rng).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=rng).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=rng)
    config = config_of(stored, activation, fp4_multiplied_in="fp8", expert_bias=biased)
    ordered = activation if order is None else activation.replace(order="gate_up")
    folded = config_of("fp8_block", ordered, expert_bias=biased)
    with ExpertParallelContext(device="cpu") as context:
        layer, other = (MoELayer(each, context, router=False) for each in (config, folded))
        layer.load_experts((*one, *(bias if biased else ())) for one, bias in zip(dense, biases, strict=True))
        other.load_experts(given)  # type: ignore[arg-type]
        got = layer(x, topk_idx=ids, topk_weights=weights)
        assert_same_bits(got, other(x, topk_idx=ids, topk_weights=weights), stored)
    values = [[w.dequantize(engine="torch")[0].double() for w in one[:2]] for one in given]
    reference = moe_reference(
        x,
        ids,
        weights,
        *(torch.stack(each) for each in zip(*values, strict=True)),
        replace(activation_of(activation), order=GateUpOrder.GATE_UP),
        gate_up_bias=torch.stack([above(b1, order) for b1, _ in biases]) if biased else None,
        down_bias=torch.stack([b2 for _, b2 in biases]) if biased else None,
    )
    assert relative_error(got, reference)[0] <= layer_bound(config, exact_weights=True)


@pytest.mark.parametrize("engine", ["torch", "triton"])
@pytest.mark.parametrize("stored", STORED)
def test_products_of_other_engines(stored: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """They restore expanded weights in each call."""
    activation = SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5)
    gate_up = random_weights(stored, EXPERTS, 2 * INNER, HIDDEN, rng, device, gate_up=activation.gate_up)
    down = random_weights(stored, EXPERTS, HIDDEN, INNER, rng, device)
    a = make_rows("fp8_block", [5, 0, 17], HIDDEN, rng, device, num_experts=EXPERTS)
    first, second = ExpandedWeights.prepack(gate_up), ExpandedWeights.prepack(down)
    got = Experts(first, second, activation, engine=engine)(a)
    above = expanded_activation(activation)
    hidden = grouped_gemm_swiglu(a, first.expand(), above, out_format="fp8_block", engine=engine)
    assert_same_bits(got[:22], grouped_gemm(hidden, second.expand(), engine=engine)[:22], stored)
    with pytest.raises(ValueError, match=r"down: expected plain prepacked weights, got some of gate and up"):
        Experts(first, first, activation)


def test_experts_move_between_slots(rng: torch.Generator) -> None:
    """As placements and checkpoints that are kept move them, also from none."""
    made = [
        ExpandedWeights.prepack(random_weights("nvfp4", EXPERTS, n, k, rng, torch.device("cpu"), gate_up=gate_up))
        for n, k, gate_up in ((2 * INNER, HIDDEN, True), (HIDDEN, INNER, False))
    ]
    experts = Experts(*made)
    more = with_slots(experts, 2, 2)
    put(more, [3], Experts(*(w.expert(2) for w in made)))
    empty = empty_slots(experts, 1)
    put(empty, [0], Experts(*(w.expert(0) for w in made)))
    for name, tensor in tensors_of(experts).items():
        found = tensors_of(more)[name]
        assert len(found) == 4 and torch.equal(found[:2], tensor[:2]) and torch.equal(found[3], tensor[2]), name
        assert torch.equal(tensors_of(empty)[name], tensor[:1]), name


def test_a_rank_without_experts(rng: torch.Generator) -> None:
    """Has weights of none in the same form."""
    config = config_of("nvfp4", ActivationConfig(), fp4_multiplied_in="fp8").replace(num_experts=2)
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer(config, context, router=False)
        none, some = layer._loader.none(0), layer._loader.random(3, [0, 1])
    assert {name: (t.dtype, t.shape[1:]) for name, t in tensors_of(none).items()} == {
        name: (t.dtype, t.shape[1:]) for name, t in tensors_of(some).items()
    }
    packed = ExpandedWeights.prepack(random_weights("mxfp4", 2, HIDDEN, INNER, rng, torch.device("cpu")))
    assert packed.num_experts == 2 and packed.expert(1).expand().num_experts == 1


def test_a_layer_of_nvfp4_files(tmp_path: Path, seed: int) -> None:
    """The bits of the layer that folds them as it loads them."""
    config = config_of("bf16", ActivationConfig(), token_format="bf16")
    write_qwen3_moe_checkpoint(tmp_path, config, seed=seed)
    quantize_experts(tmp_path, modelopt_nvfp4, quantization_config=MODELOPT)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    with ExpertParallelContext(device="cpu") as context:
        found = []
        for fields in ({"fp4_multiplied_in": "fp8"}, {"weight_format": "fp8_block"}):
            layer = MoELayer.from_checkpoint(
                tmp_path, context=context, max_tokens_per_rank=64, token_format="fp8_block", **fields
            )
            found.append(layer(x))
    assert_same_bits(*found, "layers")


@pytest.mark.parametrize(
    "fields",
    [{"weight_format": "fp8_block"}, {"weight_format": "nvfp4", "token_format": "bf16"}, {"weight_format": "mxfp8"}],
)
def test_formats_that_do_not_go_with_it(fields: dict[str, str]) -> None:
    more = {"token_format": "mxfp8"} if fields["weight_format"] == "mxfp8" else {}
    with pytest.raises(
        ValidationError, match="fp4_multiplied_in: expected fp8 with fp8_block tokens and nvfp4 or mxfp4"
    ):
        config_of(**{"stored": "nvfp4", "activation": ActivationConfig(), "fp4_multiplied_in": "fp8"} | fields | more)


def test_other_formats_of_a_layer_keep_it_where_it_goes_with_them() -> None:
    config = config_of("nvfp4", ActivationConfig(), fp4_multiplied_in="fp8")
    for formats, kept in ((("fp8_block", "mxfp4"), "fp8"), (("fp8_block", None), "bf16"), (("nvfp4", "nvfp4"), "bf16")):
        assert with_token_format(config, *formats).fp4_multiplied_in == kept
