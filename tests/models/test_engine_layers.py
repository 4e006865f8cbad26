"""Experts of inference engines: every form of weights, ranks that share tokens or not, refusals, both adapters.

The engines do not import without a GPU. Their layers and modules are stand-ins (`tests/support/engine_stand_ins.py`).
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_runtime.comm.errors import PeerAbortedError
from moe_runtime.config import ParallelConfig, RecordedRoutesConfig
from moe_runtime.integrations import sglang_experts, vllm_experts
from moe_runtime.integrations.engine_layers import EngineLayers, recorded_routes, replay_routes
from moe_runtime.integrations.layer_settings import (
    ENGINE_FIELDS,
    LayerSettings,
    settings_from_yaml,
    settings_of_variable,
)
from moe_runtime.observation.routes import StepRoutes
from moe_runtime.reference import error_bound, relative_error
from tests.support import engine_stand_ins as stand_ins
from tests.support.engine_stand_ins import (
    FORMATS,
    FORMS,
    HIDDEN,
    NUM_EXPERTS,
    VllmMethod,
    draw_tokens,
    expert_slice,
    make_experts,
    plain_moe,
    sglang_layer,
    sglang_modules,
    vllm_config,
    vllm_layer,
    vllm_modules,
)
from tests.support.programs import ROOT
from tests.support.vllm_stand_ins import Vllm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where layers of a single rank lie; processes of several see no GPU."""

LIMITS = ParallelConfig(timeout_s=60.0, startup_timeout_s=60.0)


def layers_of(**fields: Any) -> EngineLayers:
    return EngineLayers(LayerSettings(LIMITS, fields))


def check(found: torch.Tensor, exact: torch.Tensor, token_format: str = "bf16") -> None:
    """Within the bound of the token format, the weights being exact as they are stored."""
    found = found.cpu()
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert relative_error(found, exact)[0] <= error_bound(token_format, "bf16")


def default_tokens(form: str) -> str:
    """The token format of a layer whose settings name none."""
    fmt = FORMATS.get(form, form)
    return fmt if fmt in ("fp8_block", "mxfp8") else "bf16"


def load(method: Any, layer: Any) -> None:
    """As engines do it: with the model's dtype as torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(before)


def run_vllm(layers: EngineLayers, layer: Any, config: Any, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a method of vLLM that was taken over answers, after the weights of `layer` were loaded."""
    x, ids, weights = (tensor.to(DEVICE) for tensor in tokens)
    method = vllm_experts.taken_over(VllmMethod(config), layers)
    load(method, layer.to(DEVICE))
    assert all(parameter.numel() == 0 for name, parameter in layer.named_parameters() if "weight" in name)
    with torch.inference_mode():
        return method.apply(layer, x, weights, ids, None, None)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights(form: str, seed: int) -> None:
    data = make_experts(form, seed)
    tokens = draw_tokens(seed, 13)
    with vllm_modules():
        found = run_vllm(layers_of(), vllm_layer(data.of(slice(None))), vllm_config(), tokens)
    check(found, plain_moe(data, *tokens), default_tokens(form))


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("nvfp4", {"token_format": "nvfp4"}),
        ("nvfp4", {"token_format": "fp8_block"}),
        ("mxfp4", {"token_format": "mxfp8"}),
        ("mxfp4", {"token_format": "fp8_block"}),
    ],
)
def test_settings_choose_the_tokens(form: str, fields: dict[str, Any], seed: int) -> None:
    data, tokens = make_experts(form, seed), draw_tokens(seed, 64)
    with vllm_modules():
        found = run_vllm(layers_of(**fields), vllm_layer(data.of(slice(None))), vllm_config(), tokens)
    check(found, plain_moe(data, *tokens), fields["token_format"])
    # Rounding of the tokens is there, so they did travel in that format.
    assert relative_error(found.cpu(), plain_moe(data, *tokens))[0] > error_bound("bf16")


def test_routes_are_recorded_as_the_engine_states_them(seed: int) -> None:
    """By the name of the layer; a server's first step warms up, and that is not recorded."""
    data, (x, ids, weights) = make_experts("bf16", seed), draw_tokens(seed, 13)
    layers = EngineLayers(LayerSettings(LIMITS, {}, RecordedRoutesConfig(steps=4, weights=True)))
    with vllm_modules():
        layer = vllm_layer(data.of(slice(None)))
        method = vllm_experts.taken_over(VllmMethod(vllm_config()), layers)
        load(method, layer.to(DEVICE))
        with torch.inference_mode():
            for _ in range(2):
                method.apply(layer, x.to(DEVICE), weights.to(DEVICE), ids.to(DEVICE), None, None)
        found = recorded_routes()[layer.layer_name].read()
    assert [step.step for step in found] == [0, 1]
    for step in found:
        assert step.topk_weights is not None and torch.equal(step.topk_weights.cpu(), weights.float())
        assert torch.equal(step.topk_idx.cpu(), ids.int())


def test_a_step_takes_given_routes_in_place_of_the_engines(seed: int) -> None:
    """The bits of the step that was recorded, whatever the engine's router chose; a step afterwards takes its own."""
    gc.collect()  # Errors of other tests have frames with layers.
    data, (x, ids, weights) = make_experts("bf16", seed), draw_tokens(seed, 13)
    x, ids, weights = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
    layers = EngineLayers(LayerSettings(LIMITS, {}, RecordedRoutesConfig(steps=8, weights=True)))
    with vllm_modules():
        layer = vllm_layer(data.of(slice(None)))
        method = vllm_experts.taken_over(VllmMethod(vllm_config()), layers)
        load(method, layer.to(DEVICE))
        name = layer.layer_name
        others = (ids + 1) % NUM_EXPERTS, weights.flip(-1).contiguous()

        def step(chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return method.apply(layer, x[: len(chosen)], weight, chosen, None, None)

        own, recorded = step(ids, weights), recorded_routes()[name].read()[0]
        different = step(*others)
        assert not torch.equal(own, different)
        for dtype in (torch.int16, torch.int32, torch.int64):
            routes = {name: StepRoutes(0, recorded.topk_idx.to(dtype), recorded.topk_weights)}
            with replay_routes(routes):
                assert torch.equal(step(*others), own)
            assert torch.equal(step(*others), different)
        taken = recorded_routes()[name].read()[1::2]
        assert len(taken) == 3 and all(torch.equal(one.topk_idx, recorded.topk_idx) for one in taken)
        # A whole pass of this layer is one call with these tokens.
        for message, run in {
            f"got none for a call of {name}": lambda: [step(ids, weights), step(ids, weights)],
            rf"expected \[12, {ids.shape[1]}\] for this call of {name}, got \[13": lambda: step(ids[1:], weights[1:]),
            f"got no call of {name}; a CUDA graph": lambda: None,
            "replay_routes: expected no other in force": lambda: replay_routes(routes).__enter__(),
        }.items():
            with pytest.raises(ValueError, match=message), replay_routes(routes):
                run()
            assert torch.equal(step(ids, weights), own)
        first, other = recorded.topk_idx, recorded.topk_weights
        for message, wrong in {
            "routes: expected a Mapping, got list": [recorded],
            f"routes: expected names of layers .*{name}.*, got 'x'": {"x": recorded},
            f"routes.'{name}'.: expected a StepRoutes, got Tensor": {name: first},
            "topk_weights: expected a tensor, got None; record": {name: StepRoutes(0, first, None)},
            f"topk_idx: expected ids from -1 to {NUM_EXPERTS - 1}, got": {name: StepRoutes(0, first + 99, other)},
            r"topk_idx: expected \[T, ": {name: StepRoutes(0, first[:, 1:], other)},
            "topk_idx: expected torch.int16": {name: StepRoutes(0, first.float(), other)},
            "topk_idx: expected a tensor on .*, got one on meta": {name: StepRoutes(0, first.to("meta"), other)},
            "topk_weights: expected torch.float32 .*, got torch.float64": {name: StepRoutes(0, first, other.double())},
        }.items():
            with pytest.raises(ValueError, match=message):
                replay_routes(wrong)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures a CUDA graph")
def test_a_captured_step_is_not_given_routes(seed: int) -> None:
    data, (x, ids, weights) = make_experts("bf16", seed), (one.to(DEVICE) for one in draw_tokens(seed, 8))
    with vllm_modules(), torch.inference_mode():
        layer = vllm_layer(data.of(slice(None)))
        method = vllm_experts.taken_over(VllmMethod(vllm_config()), layers_of())
        load(method, layer.to(DEVICE))
        method.apply(layer, x, weights, ids, None, None)
        routes = {layer.layer_name: StepRoutes(0, ids, weights.float())}
        with (
            pytest.raises(ValueError, match=rf"routes: {layer.layer_name} is captured in a CUDA graph"),
            replay_routes(routes),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            method.apply(layer, x, weights, ids, None, None)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_settings_fold_four_bits_into_fp8(form: str, seed: int) -> None:
    """With the tokens that go with that."""
    data, tokens = make_experts(form, seed), draw_tokens(seed, 64)
    with vllm_modules():
        layers = layers_of(weight_format="fp8_block")
        found = run_vllm(layers, vllm_layer(data.of(slice(None))), vllm_config(), tokens)
    error, _ = relative_error(found.cpu(), plain_moe(data, *tokens))
    assert error_bound("bf16") < error <= error_bound("fp8_block", exact_weights=form == "mxfp4")


def test_settings_choose_the_weights(seed: int) -> None:
    """Weights in bf16 are quantized only where the settings say so; tokens that need it are refused."""
    data, tokens = make_experts("bf16", seed), draw_tokens(seed, 64)
    with vllm_modules():
        with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts: token_format: expected bf16"):
            run_vllm(layers_of(token_format="nvfp4"), vllm_layer(data.of(slice(None))), vllm_config(), tokens)
        layers = layers_of(weight_format="nvfp4")
        found = run_vllm(layers, vllm_layer(data.of(slice(None))), vllm_config(), tokens)
    assert (
        error_bound("bf16") < relative_error(found.cpu(), plain_moe(data, *tokens))[0] <= error_bound("bf16", "nvfp4")
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 150])
def test_any_number_of_tokens(num_tokens: int, seed: int) -> None:
    """150 are split into steps of at most 64. Routes of -1 and NaN weights count as none."""
    data = make_experts("bf16", seed)
    x, ids, weights = draw_tokens(seed, num_tokens)
    ids[:1, 1], weights[-1:, 0] = -1, float("nan")
    clean = weights.nan_to_num(0.0)
    with vllm_modules():
        found = run_vllm(layers_of(), vllm_layer(data.of(slice(None))), vllm_config(), (x, ids, weights))
    check(found, plain_moe(data, x, ids, clean))


@pytest.mark.parametrize(
    ("order", "bias", "form", "changes", "activation"),
    [
        ("gate_up", "bias", "fp8_block", {}, stand_ins.silu),
        ("gate_up", None, "bf16", {"swiglu_limit": 1.5}, stand_ins.clamped_silu),
        ("interleaved", "bias", "mxfp4", {"activation": SimpleNamespace(value="swigluoai")}, stand_ins.gpt_oss),
        (
            "interleaved",
            "bias",
            "mxfp4",
            {"activation": SimpleNamespace(value="swigluoai"), "swiglu_limit": 7.0},
            stand_ins.gpt_oss,
        ),
        ("gate_up", "bias", "fp8_block", {"activation": SimpleNamespace(value="swiglustep")}, stand_ins.swiglu_step),
        (
            "gate_up",
            None,
            "nvfp4",
            {
                "activation": SimpleNamespace(value="swigluoai_uninterleave"),
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
                "swiglu_beta": 1.0,
            },
            stand_ins.gpt_oss,
        ),
    ],
)
def test_activations_of_vllm(order: str, bias: str, form: str, changes: Any, activation: Any, seed: int) -> None:
    data, tokens = make_experts(form, seed, order=order, bias=bias), draw_tokens(seed, 40)
    with vllm_modules():
        found = run_vllm(layers_of(), vllm_layer(data.of(slice(None)), **changes), vllm_config(), tokens)
    check(found, plain_moe(data, *tokens, activation), default_tokens(form))


@pytest.mark.gpu
def test_a_graph_captures_a_step(seed: int) -> None:
    """After the first step, of any number of tokens, which warms up. Replays read new tokens in the old place."""
    data, config = make_experts("fp8_block", seed), vllm_config()
    method = vllm_experts.taken_over(VllmMethod(config), layers_of(token_buckets=(8,)))
    layer = vllm_layer(data.of(slice(None))).to(DEVICE)
    x, ids, weights = (tensor.to(DEVICE) for tensor in draw_tokens(seed, 8))
    graph = torch.cuda.CUDAGraph()
    with vllm_modules(), torch.inference_mode():
        method.process_weights_after_loading(layer)
        method.apply(layer, x[:3], weights[:3], ids[:3])
        with torch.cuda.graph(graph):
            y = method.apply(layer, x, weights, ids)
        for step in range(2):
            tokens = draw_tokens(seed + step, 8)
            for place, tensor in zip((x, ids, weights), tokens, strict=True):
                place.copy_(tensor)
            graph.replay()
            check(y, plain_moe(data, *tokens), "fp8_block")


def test_what_vllm_asks_a_method(seed: int) -> None:
    """A method keeps its class and name, and answers that its results need no reduction and its tokens no gathering."""

    class ModelOptMethod(VllmMethod):
        pass

    config = vllm_config()
    method = vllm_experts.taken_over(ModelOptMethod(config), layers_of())
    assert isinstance(method, ModelOptMethod) and "ModelOpt" in type(method).__name__
    assert method.supports_internal_mk and not method.is_monolithic and not method.supports_eplb
    assert method.supports_pre_processed_weights is False
    assert method.maybe_roundup_sizes(160, 96, torch.bfloat16, None) == (160, 96)
    for skipped in (False, True):
        config.skip_final_all_reduce = skipped
        layer = vllm_layer(make_experts("bf16", seed).of(slice(None)))
        with vllm_modules():
            method.process_weights_after_loading(layer)
        assert method.moe_kernel.output_is_reduced() is not skipped
        assert method.moe_kernel.fused_experts.consumes_expert_mask is False


@pytest.mark.parametrize(
    ("changes", "config", "complaint"),
    [
        ({}, {"tp_size": 2}, "--enable-expert-parallel"),
        ({}, {"pcp_size": 2}, "--prefill-context-parallel-size"),
        ({}, {"is_lora_enabled": True}, "--enable-lora"),
        ({}, {"in_dtype": torch.float16}, "--dtype: expected bfloat16, got torch.float16"),
        ({"apply_router_weight_on_input": True}, {}, "apply_router_weight_on_input"),
        ({"activation": SimpleNamespace(value="gelu")}, {}, "activation: expected silu, .*, got gelu"),
        ({"swiglu_limit": 0.0}, {}, "swiglu_limit: expected a positive one, got 0.0"),
        (
            {"activation": SimpleNamespace(value="swiglustep"), "swiglu_limit": 4.0},
            {},
            r"activation: expected .* swiglustep with a limit of 7, .*, got swiglustep .swiglu_limit=4\.0",
        ),
        (
            {"activation": SimpleNamespace(value="swiglustep"), "swiglu_alpha": 1.702},
            {},
            r"activation: .*, got swiglustep .*swiglu_alpha=1\.702",
        ),
        ({}, {"hidden_dim": HIDDEN + 16}, r"w13_weight: expected shape \[7, 320, 176\], got \[7, 320, 160\]"),
        ({"_expert_map": torch.arange(NUM_EXPERTS).flip(0)}, {}, "expected the experts 0 .. 6 .7. on rank 0"),
    ],
)
def test_what_vllm_must_not_ask(changes: Any, config: Any, complaint: str) -> None:
    layer = vllm_layer(make_experts("bf16", 0).of(slice(None)), **changes)
    method = vllm_experts.taken_over(VllmMethod(vllm_config(**config)), layers_of())
    with vllm_modules(), pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts: .*{complaint}"):
        method.process_weights_after_loading(layer)


def test_an_activation_is_refused_before_weights_are_loaded() -> None:
    vllm = Vllm()
    with vllm():
        vllm_experts.install(LayerSettings(LIMITS, {}))
        with pytest.raises(ValueError, match=r"experts: activation: expected silu, .*, got gelu"):
            vllm.make(vllm_layer({}, activation=SimpleNamespace(value="gelu")), vllm_config())


def test_weights_in_other_forms_are_refused() -> None:
    experts = make_experts("bf16", 0).of(slice(None))
    halves = {name: value.half() for name, value in experts.items()}
    with vllm_modules():
        for parameters in (halves, {name: value.to("meta") for name, value in experts.items()}, {}):
            method = vllm_experts.taken_over(VllmMethod(vllm_config()), layers_of())
            with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts: expected "):
                method.process_weights_after_loading(vllm_layer(parameters))

    quantized = make_experts("fp8_block", 0).of(slice(None))
    for name in ("w13_weight_scale_2", "w2_weight_zero_point", "w2_bias"):
        method = vllm_experts.taken_over(VllmMethod(vllm_config()), layers_of())
        with vllm_modules(), pytest.raises(ValueError, match=rf"\.experts: {name.replace('w2_b', 'w13_b')}: expected"):
            method.process_weights_after_loading(vllm_layer(quantized | {name: torch.zeros(1)}))

    class OnlineMoEMethodBase(VllmMethod):
        pass

    class OnlineMethod(OnlineMoEMethodBase):
        pass

    with pytest.raises(ValueError, match="OnlineMethod, which quantizes weights"):
        vllm_experts.taken_over(OnlineMethod(vllm_config()), layers_of())


def test_install_replaces_classes_of_vllm(seed: int) -> None:
    """As `PluggableLayer` does it: a class is looked up by its name when it is instantiated."""
    data, tokens, vllm = make_experts("bf16", seed), draw_tokens(seed, 5), Vllm()
    with vllm():
        vllm_experts.install(LayerSettings(LIMITS, {}))
        assert set(vllm.replaced) == set(vllm_experts.ROUTED_EXPERTS)
        layer = vllm_layer(data.of(slice(None)))
        vllm.make(layer, vllm_config())
        assert isinstance(layer, vllm.RoutedExperts) and type(layer).__name__ == "MoERuntimeRoutedExperts"
        # vLLM's loaders compare names.
        kind = type(layer.quant_method)
        assert kind is not VllmMethod and (kind.__name__, kind.__qualname__) == ("VllmMethod", "VllmMethod")
        layer.quant_method.process_weights_after_loading(layer.to(DEVICE))
        x, ids, weights = (tensor.to(DEVICE) for tensor in tokens)
        check(layer.quant_method.apply(layer, x, weights, ids, None, None), plain_moe(data, *tokens))


OWN = {"own": [40, 9], "sequence_parallel": [20, 20]}
"""Tokens of each rank where ranks have their own. In sequence-parallel layers they are parts of those of a group."""


def vllm_of_rank(rank: int, world: int, case: str, seed: int, fields: Any) -> Any:
    """Results of this rank in two steps, the tokens that it passed, and how many its layer can hold."""
    data = make_experts("fp8_block" if case == "own" else "bf16", seed)
    # Ranks that hold the same tokens draw them from the same seed.
    num_tokens, start = (OWN[case][rank], seed + 1000 * rank) if case in OWN else (25, seed)
    steps = [draw_tokens(start + step, num_tokens) for step in range(2)]
    split = case == "sequence_parallel"
    config = vllm_config(
        tp=1 if case == "own" else world,
        dp=world if case == "own" else 1,
        sequence_parallel=split,
        skip_final_all_reduce=case == "summed_later",
    )
    experts = expert_slice(rank, world)
    tp_group = SimpleNamespace(world_size=1 if case == "own" else world, rank_in_group=rank)
    counts = {"own": torch.tensor(OWN["own"]), "sequence_parallel": torch.tensor([40])}.get(case)
    with vllm_modules(ep_group=dist.group.WORLD, tp_group=tp_group, counts=counts):
        layer = vllm_layer(data.of(experts), experts)
        if case == "few_experts":
            # The top-k of a layer may be more than the experts of a rank; these tokens have fewer.
            layer.top_k = 4
            steps = [(x, *(nn.functional.pad(t, (0, 1), value=-1) for t in routes)) for x, *routes in steps]
        method = vllm_experts.taken_over(VllmMethod(config), layers_of(**fields))
        load(method, layer)
        with torch.inference_mode():
            found = [method.apply(layer, x, weights, ids) for x, ids, weights in steps]
        assert method.moe_kernel.output_is_reduced() is (case in OWN)
    ours = method.moe_runtime_experts.layer
    ours.context.close()
    return steps, found, (ours.config.max_tokens_per_rank, ours.context.world_size)


@pytest.mark.cpu_only
@pytest.mark.parametrize("fields", [{}, {"max_tokens_per_rank": 8}])
@pytest.mark.parametrize("case", ["own", "sequence_parallel", "shared", "summed_later", "few_experts"])
def test_vllm_on_two_ranks(case: str, fields: Any, get_pool: Any, seed: int) -> None:
    """Tokens of each rank's own, or shared ones whose results vLLM sums; steps of 8 too."""
    results = get_pool(2).run(vllm_of_rank, case, seed, fields)
    data = make_experts("fp8_block" if case == "own" else "bf16", seed)
    alone = case in ("shared", "summed_later")
    for rank, (steps, found, (limit, world)) in enumerate(results):
        assert world == 1 if alone else 2
        assert limit == fields.get("max_tokens_per_rank", 32 if case in ("sequence_parallel", "few_experts") else 64)
        for step, (tokens, y) in enumerate(zip(steps, found, strict=True)):
            if case not in OWN:
                y = y + results[1 - rank][1][step]
            check(y, plain_moe(data, *tokens), "fp8_block" if case == "own" else "bf16")


def wrong_of_rank(rank: int, world: int, seed: int) -> str:
    experts = expert_slice(rank, world)
    changes = {"top_k": None} if rank == 1 else {}
    layer = vllm_layer(make_experts("bf16", seed).of(experts), experts, **changes)
    tp_group = SimpleNamespace(world_size=1, rank_in_group=0)
    with vllm_modules(ep_group=dist.group.WORLD, tp_group=tp_group, counts=torch.tensor([4, 4])):
        method = vllm_experts.taken_over(VllmMethod(vllm_config(dp=world)), layers_of())
        try:
            method.process_weights_after_loading(layer)
            x, ids, weights = draw_tokens(seed, 4)
            method.apply(layer, x, weights, ids)
        except (PeerAbortedError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.cpu_only
def test_an_error_of_one_rank_ends_the_others(get_pool: Any, seed: int) -> None:
    other, own = get_pool(2).run(wrong_of_rank, seed)
    assert own.startswith("ValueError: model.layers.0.mlp.experts: top_k")
    assert other.startswith("PeerAbortedError: ") and "top_k" in other


def taken_over_sglang(layers: EngineLayers, layer: Any) -> tuple[Any, Any]:
    """The dispatcher and the method of a layer of SGLang."""

    class Method:
        pass

    method = Method()
    return sglang_experts.take_over(layers, layer.moe_runner_config, method), method


def run_sglang(dispatcher: Any, method: Any, layer: Any, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, ids, weights = (tensor.to(DEVICE) for tensor in tokens)
    dispatched = dispatcher.dispatch(hidden_states=x, topk_output=stand_ins.TopK(weights, ids))
    return dispatcher.combine(combine_input=method.apply(layer=layer, dispatch_output=dispatched))


@pytest.mark.parametrize(
    ("form", "bias", "order", "changes", "factor", "activation"),
    [
        ("bf16", None, "gate_up", {}, 1.0, stand_ins.silu),
        # On CPUs SGLang's models apply it.
        ("bf16", None, "gate_up", {"routed_scaling_factor": 2.5}, 1.0 if DEVICE.type == "cpu" else 2.5, stand_ins.silu),
        (
            "fp8_block",
            None,
            "gate_up",
            {"routed_scaling_factor": 2.5, "should_fuse_routed_scaling_factor_in_topk": True},
            1.0,
            stand_ins.silu,
        ),
        ("fp8_block", None, "gate_up", {"swiglu_limit": 1.5}, 1.0, stand_ins.clamped_silu),
        ("nvfp4", None, "up_gate", {}, 1.0, stand_ins.silu),
        ("bf16", None, "gate_up", {"gemm1_clamp_limit": 1.5}, 1.0, stand_ins.limited_silu),
        ("nvfp4", None, "up_gate", {"gemm1_clamp_limit": 1.5}, 1.0, stand_ins.limited_silu),
        (
            "mxfp4",
            "weight_bias",
            "interleaved",
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
            1.0,
            stand_ins.gpt_oss,
        ),
    ],
)
def test_sglang(form: str, bias: Any, order: str, changes: Any, factor: float, activation: Any, seed: int) -> None:
    data, (x, ids, weights) = make_experts(form, seed, order=order, bias=bias), draw_tokens(seed, 33)
    layer = sglang_layer(data.of(slice(None)), **changes)
    with sglang_modules():
        dispatcher, method = taken_over_sglang(layers_of(), layer)
        method.load_up_proj_weight_first = order == "up_gate"
        load(method, layer.to(DEVICE))
        found = run_sglang(dispatcher, method, layer, (x, ids, weights))
        with pytest.raises(ValueError, match="expected no update of weights"):
            method.restore_weights_before_loading(layer)
        # SGLang asks for it before it changes anything, and answers with it.
        assert "expected no update of weights" in layer._derived_weight_cache_error  # type: ignore[operator]
    check(found, plain_moe(data, x, ids, weights * factor, activation), default_tokens(form))


def test_routes_of_sglang_to_experts_that_compute_nothing(seed: int) -> None:
    """They have the id 0 and the weight 0, in blocks that say that they have such experts."""
    data, (x, ids, weights) = make_experts("bf16", seed), draw_tokens(seed, 9)
    ids[:5, 0], ids[:3, 1] = 0, 0
    weights[:5, 0], weights[:3, 1] = 0.0, 0.0
    layer = sglang_layer(data.of(slice(None)))
    block = torch.nn.Module()
    block.experts, block.zero_expert_type = layer, "identity"  # type: ignore[assignment]
    with sglang_modules():
        dispatcher, method = taken_over_sglang(layers_of(), layer)
        layer.quant_method = method
        load(method, layer.to(DEVICE))
        sglang_experts.mark_zero_experts(torch.nn.ModuleList([block]))
        found = run_sglang(dispatcher, method, layer, (x, ids, weights))
    check(found, plain_moe(data, x, ids, weights), "bf16")


def sglang_of_rank(rank: int, world: int, backend: str, seed: int) -> Any:
    data = make_experts("bf16", seed)
    own = backend == "flashinfer"
    counts = [21, 4]
    tokens = draw_tokens(seed + 1000 * rank * own, counts[rank] if own else 25)
    # SGLang has as many experts on each rank: 6 of these.
    x, ids, weights = tokens
    ids = ids.masked_fill(ids == 6, -1)
    layer = sglang_layer(data.of(slice(3 * rank, 3 * rank + 3)), rank, world, num_experts=6)
    with sglang_modules(backend=backend, ep_group=dist.group.WORLD, counts=counts if own else None):
        dispatcher, method = taken_over_sglang(layers_of(max_tokens_per_rank=16), layer)
        load(method, layer)
        y = run_sglang(dispatcher, method, layer, (x, ids, weights))
    method.moe_runtime_experts.layer.context.close()
    return (x, ids, weights), y


@pytest.mark.cpu_only
@pytest.mark.parametrize("backend", ["none", "flashinfer"])
def test_sglang_on_two_ranks(backend: str, get_pool: Any, seed: int) -> None:
    """Partial results of shared tokens, which SGLang sums, and complete ones of each rank's own, in steps of 16."""
    results = get_pool(2).run(sglang_of_rank, backend, seed)
    data = make_experts("bf16", seed)
    summed = results[0][1] + results[1][1] if backend == "none" else None
    for tokens, y in results:
        check(y if summed is None else summed, plain_moe(data, *tokens))


@pytest.mark.parametrize(
    ("changes", "settings", "complaint"),
    [
        ({}, {"backend": "deepep"}, "--moe-a2a-backend: expected none or flashinfer, got deepep"),
        ({"runner_backend": SimpleNamespace(value="flashinfer_trtllm")}, {}, "--moe-runner-backend"),
        ({"runner_backend": None}, {}, "--moe-runner-backend"),
        ({"moe_tp_size": 2}, {}, "--ep-size"),
        ({}, {"settings": {"moe_dp_size": 2}}, "--moe-dp-size"),
        ({}, {"settings": {"dwdp_size": 2}}, "--dwdp-size"),
        ({}, {"settings": {"enable_eplb": True}}, "--enable-eplb"),
        ({}, {"settings": {"enable_two_batch_overlap": True}}, "--enable-two-batch-overlap"),
        ({}, {"settings": {"cpu_offload_gb": 2}}, "--cpu-offload-gb"),
        ({}, {"settings": {"offload_group_size": 4}}, "--cpu-offload-gb, --offload-group-size"),
        ({}, {"settings": {"load_format": "sharded_state"}}, "--load-format"),
        ({}, {"settings": {"load_format": "presharded"}}, "--load-format: .*, got presharded"),
        ({}, {"settings": {"load_format": "remote_instance"}}, "--load-format"),
        ({}, {"settings": {"load_format": "remote", "model_path": "redis://host/model"}}, "--load-format"),
        ({}, {"settings": {"weight_cache_mode": "client"}}, "--weight-cache-mode"),
        ({}, {"settings": {"enable_lora": True}}, "--enable-lora"),
        ({}, {"settings": {"enable_paged_experts": True}}, "--enable-paged-experts"),
        ({}, {"settings": {"kt_weight_path": "/experts"}}, "--kt-weight-path"),
        ({"num_fused_shared_experts": 1}, {}, "--disable-shared-experts-fusion"),
        ({"apply_router_weight_on_input": True}, {}, "apply_router_weight_on_input"),
        ({"no_combine": True}, {}, "no_combine"),
        ({"reduce_results": True}, {"backend": "flashinfer"}, "reduce_results"),
        ({"params_dtype": torch.float16}, {}, "--dtype"),
        ({"top_k": None}, {}, "top_k"),
        ({"activation": "gelu"}, {}, "activation: expected gated silu"),
    ],
)
def test_what_sglang_must_not_ask(changes: Any, settings: Any, complaint: str) -> None:
    layer = sglang_layer({}, **changes)
    with sglang_modules(**settings), pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts: {complaint}"):
        taken_over_sglang(layers_of(), layer)


@pytest.mark.parametrize("path", ["s3://bucket/model", "/redis/model"])
def test_what_sglang_may_load_from(path: str) -> None:
    """What it processes once it has loaded it."""
    with sglang_modules(settings={"load_format": "remote", "model_path": path}):
        taken_over_sglang(layers_of(), sglang_layer({}))


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu"},
        {"is_gated": False},
        {"gemm1_clamp_limit": 7.0, "swiglu_limit": 7.0},
        {"gemm1_clamp_limit": 7.0, "gemm1_beta": 1.0},
        {"gemm1_alpha": 1.702},
        {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gemm1_beta": 0.5},
    ],
)
def test_activations_that_sglang_must_not_ask(changes: Any) -> None:
    config = sglang_layer({}, **changes).moe_runner_config
    with pytest.raises(ValueError, match="layer: activation: expected gated silu"):
        sglang_experts.activation_of(config, "layer", up_first=False)


@pytest.mark.parametrize("name", ["gemm1_clamp_limit", "swiglu_limit"])
def test_a_limit_that_leaves_nothing_is_named(name: str) -> None:
    config = sglang_layer({}, **{name: 0.0}).moe_runner_config
    with pytest.raises(ValueError, match=f"layer: {name}: expected a positive one, got 0.0"):
        sglang_experts.activation_of(config, "layer", up_first=False)


def test_install_hooks_sglang(seed: int) -> None:
    registered: list[tuple[str, Any, str]] = []
    registry = SimpleNamespace(register=lambda *given: registered.append(given))
    hooks = {"HookRegistry": registry, "HookType": SimpleNamespace(AROUND="around", AFTER="after")}
    data, tokens = make_experts("bf16", seed), draw_tokens(seed, 5)
    layer = sglang_layer(data.of(slice(None)))
    with sglang_modules(**{"sglang.srt.plugins.hook_registry": hooks}):
        sglang_experts.install(LayerSettings(LIMITS, {}))
        (target, around, kind), (loaded, _, after) = registered
        assert (target, kind) == (sglang_experts.HOOKED, "around")
        assert (loaded, after) == (sglang_experts.LOADED, "after")
        method = VllmMethod(None)
        # As SGLang calls what it hooks.
        dispatcher = around(lambda *args, **named: None, layer.moe_runner_config, quant_method=method)
        load(method, layer.to(DEVICE))
        check(run_sglang(dispatcher, method, layer, tokens), plain_moe(data, *tokens))


@pytest.mark.cpu_only
def test_plugins_are_entry_points_and_off_until_they_are_asked_for() -> None:
    """Installed, they import nothing of ours and change nothing, also where transformers is there."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entries == {
        "vllm.general_plugins": {"moe_runtime": "moe_runtime.integrations.vllm:register"},
        "sglang.srt.plugins": {"moe_runtime": "moe_runtime.integrations.sglang:register"},
    }
    program = (
        "import json, sys\n"
        "from importlib.metadata import EntryPoint\n"
        "for value in sys.argv[1:]:\n"
        "    EntryPoint('moe_runtime', value, 'group').load()()\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] in ('torch', 'triton', 'transformers')]))"
    )
    targets = [target for group in entries.values() for target in group.values()]
    run = subprocess.run(
        [sys.executable, "-c", program, *targets], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(run.stdout) == []


@pytest.mark.cpu_only
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_variable_switches_an_adapter_on(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(f"moe_runtime.integrations.{engine}", fromlist=["register"])
    variable = f"MOE_RUNTIME_{engine.upper()}"
    installed: list[LayerSettings] = []
    monkeypatch.setattr(f"moe_runtime.integrations.{engine}_experts.install", installed.append)
    for value in ("", "0", " "):
        monkeypatch.setenv(variable, value)
        module.register()
    assert not installed
    monkeypatch.setenv(variable, "1")
    module.register()
    assert installed == [LayerSettings(fields={})]
    monkeypatch.setenv(variable, "no_such_file.yaml")
    with pytest.raises(ValueError, match=f"{variable}: expected 0, 1 or the path of a YAML file: .*no_such"):
        module.register()


@pytest.mark.cpu_only
def test_the_settings_of_the_page_are_right(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    block = re.search(r"\n\n((?:    .*\n)*    layer:\n(?:    .*\n)*)", page)
    assert block is not None
    file = tmp_path / "settings.yaml"
    file.write_text(textwrap.dedent(block[1]))
    settings = settings_from_yaml(file)
    assert set(settings.fields) == set(ENGINE_FIELDS) and settings.parallel.transport == "nvshmem"


@pytest.mark.cpu_only
def test_settings_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("layer: {token_format: nvfp4, token_buckets: [128]}\nparallel: {timeout_s: 5.0}\n")
    expected = LayerSettings(ParallelConfig(timeout_s=5.0), {"token_format": "nvfp4", "token_buckets": [128]})
    assert settings_from_yaml(file) == expected
    monkeypatch.setenv("MOE_RUNTIME_TRIED", str(file))
    assert settings_of_variable("MOE_RUNTIME_TRIED") == expected
    file.write_text("routes: {steps: 4, weights: true}")
    assert settings_from_yaml(file).routes == RecordedRoutesConfig(steps=4, weights=True)
    # The engine's weights may be in FP4.
    file.write_text("layer: {fp4_multiplied_in: fp8, token_format: fp8_block}\nparallel:\n")
    assert settings_from_yaml(file).fields == {"fp4_multiplied_in": "fp8", "token_format": "fp8_block"}
    for text, complaint in {
        "other: 1": "other: unknown key",
        "routes: {steps: 0}": "routes.steps: ",
        "layer: {hidden_size: 8}": "layer.hidden_size: unknown key",
        "layer: {token_format: fp5}": "layer.token_format: ",
        "layer: [1]": "layer: expected a mapping",
        "layer: 0": "layer: expected a mapping",
        "parallel: false": "parallel: expected a mapping",
        "routes: false": "routes: expected a mapping",
        "layer: {fp4_multiplied_in: fp8, token_format: bf16}": "layer.fp4_multiplied_in: ",
        "layer: {fp4_multiplied_in: fp8, weight_format: bf16}": "layer.fp4_multiplied_in: ",
        "parallel: {transport: pigeon}": "parallel.transport: ",
        "parallel: {on_failure: continue}": "parallel.on_failure: expected abort, since an engine ends",
        "parallel: {lost_experts: drop}": "parallel.lost_experts: expected wait, since an engine ends",
        "[1]": "expected a mapping",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=f"settings.yaml: {complaint}"):
            settings_from_yaml(file)
