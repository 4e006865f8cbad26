"""Configs: what is written is what is meant, and every mistake is named with its file and key."""

from __future__ import annotations

import doctest
import os
import shutil
import subprocess
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from moe_runtime import config as config_module
from moe_runtime.config import (
    ActivationConfig,
    CheckpointConfig,
    MoELayerConfig,
    ParallelConfig,
    PlacementConfig,
    RouterConfig,
    RunConfig,
    _UniqueKeyLoader,
    find_config,
    load_config,
    resolve_mode,
)
from moe_runtime.context.memory import layer_geometry
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS
from moe_runtime.virtual import virtual_contexts
from tests.support.programs import ROOT, python_path
from tests.support.published_configs import PUBLISHED
from tests.support.spawner import interpreter

PACKAGED = (
    *("deepseek_v3", "deepseek_v3_half", "deepseek_v4_flash", "gpt_oss_120b", "kimi_k2", "mixtral_8x7b"),
    *("qwen3_235b_a22b", "tiny_cpu"),
    *(f"tiny_{family}" for family in ("deepseek_v3", "gpt_oss", "kimi_k2", "mixtral", "qwen2_moe", "qwen3_moe")),
    "tiny_nemotron_h",
)
MIXED_PAIRS = [("bf16", "nvfp4"), ("fp8_block", "nvfp4"), ("bf16", "mxfp4"), ("mxfp8", "mxfp4"), ("fp8_block", "mxfp4")]
"""Tokens and weights in different formats that a layer accepts."""
LAYER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 8,
    "top_k": 2,
    "max_tokens_per_rank": 16,
}
LIMITED: dict[str, Any] = {"limit": 7.0, "limit_on": "function"}
SHARED: dict[str, Any] = {"intermediate_size": 64}


def write(folder: Path, data: Any) -> Path:
    file = folder / "run.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return file


def test_packaged_configs_are_all_valid_and_all_known() -> None:
    assert sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")) == sorted(PACKAGED)
    for name in PACKAGED:
        assert find_config(name).is_file()
        assert load_config(name) == load_config(ROOT / "configs" / f"{name}.yaml")


def test_the_packaged_config_of_deepseek_v4_flash_has_its_sizes() -> None:
    """Those of other models are read from what they publish in `tests/models/test_families.py`; this one is refused."""
    said, layer = PUBLISHED["deepseek-ai/DeepSeek-V4-Flash"], load_config("deepseek_v4_flash").layer
    assert (layer.hidden_size, layer.intermediate_size) == (said["hidden_size"], said["moe_intermediate_size"])
    assert (layer.num_experts, layer.top_k) == (said["n_routed_experts"], said["num_experts_per_tok"])
    assert layer.activation.limit == said["swiglu_limit"]


def test_bare_names_are_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "tiny_cpu").mkdir()  # a folder of that name in the way is not a config
    code = "from moe_runtime.config import load_config; print(load_config('tiny_cpu').layer.hidden_size)"
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [interpreter(), "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "256"


def test_what_is_absent_gets_its_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"layer": LAYER}))
    assert config.layer.token_format == config.layer.weight_format == config.layer.combine_format == "bf16"
    assert config.layer.router == RouterConfig()
    assert config.layer.activation == ActivationConfig()
    assert config.layer.activation.limit_on == "gate"
    assert config.parallel == ParallelConfig()
    assert (config.tokens_per_rank, config.seed, config.checkpoint) == (0, 0, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, r"layer\.hiden_size: unknown key"),
        ({"hidden_size": None}, r"layer\.hidden_size: .*None"),
        ({"hidden_size": 0}, r"layer\.hidden_size: .*greater than 0, got 0"),
        ({"hidden_size": 252}, r"layer\.hidden_size: .*multiple of 8, got 252"),
        ({"hidden_size": 264, "token_format": "nvfp4"}, r"layer\.hidden_size: format nvfp4 .*16, got 264"),
        ({"hidden_size": 272, "combine_format": "mxfp8"}, r"layer\.hidden_size: format mxfp8 .*32, got 272"),
        ({"intermediate_size": 200, "token_format": "fp8_block"}, r"layer\.intermediate_size: .*16, got 200"),
        ({"top_k": 9}, r"layer\.top_k: expected at most num_experts = 8, got 9"),
        ({"top_k": "2"}, r"layer\.top_k: .*integer, got '2'"),
        ({"top_k": True}, r"layer\.top_k: .*integer, got True"),
        ({"num_experts": 65536}, r"layer\.num_experts: .*65535, got 65536"),
        ({"token_format": "fp4"}, r"layer\.token_format: .*nvfp4.*, got 'fp4'"),
        ({"combine_format": "nvfp4"}, r"layer\.combine_format: .*got 'nvfp4'"),
        ({"weight_format": "mxfp8"}, r"layer\.weight_format: expected bf16 .*got mxfp8 with bf16 tokens"),
        ({"intermediate_gsf": 4.0}, r"layer\.intermediate_gsf: only nvfp4"),
        ({"expert_row_capacity": 0}, r"layer\.expert_row_capacity: .*got 0"),
        ({"router": {"kind": "softmax", "num_groups": 2}}, r"layer\.router\.num_groups: .*expected 1, got 2"),
        ({"router": {"correction_bias": True}}, r"layer\.router\.correction_bias: only the sigmoid"),
        ({"router": {"kind": "topk_softmax", "renormalize": False}}, r"layer\.router\.renormalize: .*expected true"),
        ({"router": {"kind": "topk_softmax", "correction_bias": True}}, r"layer\.router\.correction_bias: .*topk_soft"),
        ({"shared_expert": {}}, r"layer\.shared_expert\.intermediate_size: missing"),
        ({"shared_expert": {"intermediate_size": 0}}, r"layer\.shared_expert\.intermediate_size: .*got 0"),
        ({"expert_bias": 1}, r"layer\.expert_bias: .*got 1"),
        ({"router": {"kind": "sigmoid", "num_groups": 2, "top_groups": 3}}, r"layer\.router\.top_groups: .*got 3"),
        ({"router": {"kind": "sigmoid", "num_groups": 3}}, r"layer\.router\.num_groups: expected a divisor .*got 3"),
        ({"router": {"kind": "sigmoid", "num_groups": 8}}, r"layer\.router\.num_groups: .*at most .*= 4, got 8"),
        (
            {"top_k": 3, "router": {"kind": "sigmoid", "num_groups": 4}},
            r"layer\.router\.top_groups: 1 groups of 2 experts cannot give top_k = 3",
        ),
        ({"router": {"scaling_factor": float("nan")}}, r"layer\.router\.scaling_factor: .*got nan"),
        ({"post_expert_norm": {"eps": 0.0}}, r"layer\.post_expert_norm\.eps: .*got 0\.0"),
        ({"post_expert_norm": True}, r"layer\.post_expert_norm: .*got True"),
        ({"activation": {"limit": -1.0}}, r"layer\.activation\.limit: .*got -1\.0"),
        ({"activation": {"order": "up"}}, r"layer\.activation\.order: .*got 'up'"),
        ({"activation": {"function": "swish"}}, r"layer\.activation\.function: .*got 'swish'"),
        ({"activation": {"gated": 0}}, r"layer\.activation\.gated: .*got 0"),
        ({"activation": {"function": "gelu", "alpha": 2.0}}, r"layer\.activation\.alpha: only silu .* gelu, got 2\.0"),
        (
            {"activation": {"function": "gelu", "up_softcap": 4.0}},
            r"layer\.activation\.up_softcap: only silu .* expected none with gelu",
        ),
        ({"activation": {"gated": False, "gate_softcap": 4.0}}, r"layer\.activation\.gate_softcap: .*gate, got 4\.0"),
        ({"activation": {"gate_softcap": 0.0}}, r"layer\.activation\.gate_softcap: .*got 0\.0"),
        ({"activation": {"gated": False, "limit": 7.0}}, r"layer\.activation\.limit: .*without a gate, got 7\.0"),
        ({"activation": {"gated": False, "up_offset": 1.0}}, r"layer\.activation\.up_offset: .*gate, got 1\.0"),
        ({"activation": {"gated": False, "order": "up_gate"}}, r"layer\.activation\.order: .*gate, got 'up_gate'"),
        (
            {"activation": {"limit": 7.0, "limit_on": "up"}},
            r"layer\.activation\.limit_on: .*'gate' or 'function'.*up'",
        ),
        (
            {"activation": {"limit_on": "function"}},
            r"layer\.activation\.limit_on: expected gate without a limit, got f",
        ),
        ({"activation": LIMITED | {"function": "gelu"}}, r"layer\.activation\.function: expected silu .*, got gelu"),
        ({"activation": LIMITED | {"alpha": 1.5}}, r"layer\.activation\.alpha: expected 1\.0 with .*, got 1\.5"),
        ({"activation": LIMITED | {"up_softcap": 4.0}}, r"layer\.activation\.up_softcap: expected None .*, got 4\.0"),
        ({"activation": LIMITED | {"gate_softcap": 4.0}}, r"layer\.activation\.gate_softcap: expected None .*got 4\.0"),
        ({"shared_expert": SHARED | {"limit": 0.0}}, r"layer\.shared_expert\.limit: .*got 0\.0"),
        (
            {"shared_expert": SHARED | {"limit": 7.0}, "activation": {"function": "gelu"}},
            r"layer\.shared_expert\.limit: only silu of a gate has one, expected none with gelu, got 7\.0",
        ),
        (
            {"shared_expert": SHARED | {"limit": 7.0}, "activation": {"function": "silu", "gated": False}},
            r"layer\.shared_expert\.limit: .* expected none with silu without a gate, got 7\.0",
        ),
    ],
)
def test_a_bad_layer_key_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = write(tmp_path, {"layer": LAYER | change})
    with pytest.raises(ValueError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_rank": 17}, r"tokens_per_rank: expected at most layer\.max_tokens_per_rank = 16, got 17"),
        ({"seed": -1}, r"seed: .*got -1"),
        ({"parallel": {"timeout_s": float("inf")}}, r"parallel\.timeout_s: .*got inf"),
        ({"parallel": {"engine": "nvcc"}}, r"parallel\.engine: .*got 'nvcc'"),
        ({"checkpoint": {"layer": 0}}, r"checkpoint\.path: missing"),
        ({"placement": {"spare_slots": -1}}, r"placement\.spare_slots: .*got -1"),
        ({"placement": {"load": ""}}, r"placement\.load: .*got ''"),
        ({"checkpoint": {"path": "x", "layer": -1}}, r"checkpoint\.layer: .*got -1"),
        ({"layer": None}, r"layer: "),
    ],
)
def test_a_bad_run_key_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, {"layer": LAYER} | change))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    layer = {key: value for key, value in LAYER.items() if key != "top_k"} | {"token_format": "fp4", "hidden": 1}
    with pytest.raises(ValueError) as caught:
        load_config(write(tmp_path, {"layer": layer, "seed": "x"}))
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "layer.top_k",
        "layer.token_format",
        "layer.hidden",
        "seed",
    ]


def test_merge_keys_give_what_is_not_written(tmp_path: Path) -> None:
    """Also where a mapping that merges one is merged in its turn, before it is read itself."""
    text = """
layer:
  shared_expert: &shared {intermediate_size: 64, gated: true}
  router: &router
    <<: {kind: softmax, renormalize: true}
    renormalize: false
  <<: [{hidden_size: 512, num_experts: 8, top_k: 2}, {top_k: 3, intermediate_size: 128, max_tokens_per_rank: 64}]
  hidden_size: 256
seed: 7
"""
    run = load_config(write(tmp_path, text))
    assert (run.layer.hidden_size, run.layer.num_experts, run.layer.top_k) == (256, 8, 2)
    assert (run.layer.intermediate_size, run.layer.router.renormalize, run.seed) == (128, False, 7)
    nested = "a: {b: {c: &one {<<: {x: 1, y: 2}, y: 3}}}\nd: {<<: *one, x: 4}\n"
    expected = {"a": {"b": {"c": {"x": 1, "y": 3}}}, "d": {"x": 4, "y": 3}}
    assert yaml.load(nested, Loader=_UniqueKeyLoader) == yaml.safe_load(nested) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer: [", "not valid YAML"),
        ("layer: " + "[" * 9000, "not valid YAML: maximum recursion depth"),
        ("seed: 1\nseed: 2\n", "key 'seed' is there twice.*\n.*line 2"),
        ("layer:\n  <<: {top_k: 1}\n  top_k: 2\n  top_k: 3\n", "key 'top_k' is there twice.*\n.*line 4"),
        ("layer:\n  <<: {top_k: 1,\n    top_k: 2}\n", "key 'top_k' is there twice.*\n.*line 3"),
        ("- 1\n", "expected a mapping"),
        ("", "expected a mapping .*NoneType"),
        ("layer: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ('seed: !!int "-"\n', "not valid YAML"),
        ('seed: !!bool "x"\n', "not valid YAML"),
        ('seed: !!timestamp "x"\n', "not valid YAML"),
    ],
)
def test_bad_yaml_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_and_an_unknown_name_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ValueError, match=r"tiny_cpu.*got 'tiny'"):
        load_config("tiny")


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"layer: \xff\xfe")
    with pytest.raises(ValueError, match=r"run\.yaml"):
        load_config(file)


def test_configs_are_frozen() -> None:
    config = MoELayerConfig.model_validate(LAYER)
    with pytest.raises(ValidationError):
        config.top_k = 3


@pytest.mark.parametrize("name", ["token_format", "weight_format"])
def test_a_format_auto_is_not_set(name: str) -> None:
    config = MoELayerConfig.model_validate(LAYER | {name: "auto"})
    assert config == MoELayerConfig.model_validate(LAYER) and name not in config.model_fields_set
    assert MoELayerConfig.model_validate(LAYER | {"token_format": "nvfp4"} | {name: "auto"}).weight_format in (
        ("nvfp4",) if name == "weight_format" else ("bf16",)
    )
    with pytest.raises(ValidationError, match="combine_format"):
        MoELayerConfig.model_validate(LAYER | {"combine_format": "auto"})


def test_replace_validates_and_derives_defaults_again() -> None:
    config = MoELayerConfig.model_validate(LAYER)
    assert config.replace(token_format="nvfp4").weight_format == "nvfp4"
    assert config.replace(weight_format="nvfp4").replace(top_k=3).weight_format == "nvfp4"
    assert MoELayerConfig.model_validate(LAYER | {"weight_format": None}).weight_format == "bf16"
    with pytest.raises(ValidationError, match="top_k"):
        config.replace(top_k=9)
    with pytest.raises(ValidationError, match="topk"):
        config.replace(topk=2)


def test_sizes_of_steps_are_sorted_and_end_with_the_largest() -> None:
    """A YAML file has a list, and a config may be made for fewer tokens afterwards."""
    config = MoELayerConfig.model_validate(LAYER | {"max_tokens_per_rank": 64, "token_buckets": [32, 8, 32]})
    assert config.token_buckets == (32, 8, 32) and config.all_token_buckets == (8, 32, 64)
    assert config.replace(max_tokens_per_rank=32).all_token_buckets == (8, 32)
    assert config.replace(max_tokens_per_rank=4).all_token_buckets == (4,)
    assert config.replace(token_buckets=()).all_token_buckets == (64,)
    for wrong in ([0], [-8], ["8"], [8.0], [True], 8, "8", None):
        with pytest.raises(ValidationError, match="token_buckets"):
            config.replace(token_buckets=wrong)


def test_flat_has_every_value_once() -> None:
    flat = MoELayerConfig.model_validate(LAYER | {"router": {"kind": "sigmoid"}}).flat()
    assert flat["router.kind"] == "sigmoid" and flat["hidden_size"] == 256 and flat["activation.limit"] is None
    assert len(flat) == len(MoELayerConfig.model_fields) - 2 + len(RouterConfig.model_fields) + len(
        ActivationConfig.model_fields
    )


def test_every_key_is_described() -> None:
    for model in (MoELayerConfig, RouterConfig, ActivationConfig, ParallelConfig):
        for name, field in model.model_fields.items():
            assert field.description or name in ("router", "activation"), f"{model.__name__}.{name}"


@given(
    st.integers(1, 10**6),
    st.sampled_from(sorted(FORMATS)),
    st.none() | st.integers(0, 200),
    st.sampled_from(["fp8_block", "nvfp4", "mxfp4"]),
)
def test_resolve_mode(tokens: int, fmt: str, rows: int | None, weights: str) -> None:
    gathers = tokens <= 256 or (fmt, weights) != ("fp8_block",) * 2 or (rows is not None and rows <= 64)
    assert resolve_mode("auto", tokens, fmt, rows, weights) == ("gathered" if gathers else "contiguous")
    gathers = (fmt, weights) != ("fp8_block",) * 2 or (rows is not None and rows <= 4)
    assert resolve_mode("auto", tokens, fmt, rows, weights, expanded=True) == ("gathered" if gathers else "contiguous")
    assert resolve_mode("gathered", tokens, fmt) == "gathered"
    assert resolve_mode("contiguous", tokens, fmt) == "contiguous"


@pytest.mark.parametrize(
    ("ranks", "tokens", "weights", "multiplied", "mode"),
    [
        (2, 512, "fp8_block", "bf16", "gathered"),
        (2, 513, "fp8_block", "bf16", "contiguous"),
        (4, 512, "fp8_block", "bf16", "contiguous"),
        (4, 512, "nvfp4", "bf16", "gathered"),
        (4, 4096, "mxfp4", "bf16", "gathered"),
        (2, 32, "nvfp4", "fp8", "gathered"),
        (2, 33, "mxfp4", "fp8", "contiguous"),
    ],
)
def test_rows_are_gathered_where_experts_have_few(
    ranks: int, tokens: int, weights: str, multiplied: str, mode: str
) -> None:
    """64 rows of each of 128 experts, and more; 4, and more, of weights that are expanded. The dispatcher and the sizes
    of its memory say the same. Weights that are dequantized have all rows gathered."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_experts": 128, "top_k": 8, "token_format": "fp8_block"}
    sizes |= {"weight_format": weights, "fp4_multiplied_in": multiplied}
    config = MoELayerConfig.model_validate(sizes | {"max_tokens_per_rank": tokens})
    assert config.mode_on(ranks) == config.replace(max_tokens_per_rank=5000).mode_on(ranks, tokens) == mode
    with pytest.raises(ValueError, match="max_tokens: expected"):
        config.mode_on(ranks, tokens + 1)
    with pytest.raises(ValueError, match="chosen_from: expected"):
        config.mode_on(ranks, tokens, 127)
    assert layer_geometry(config, ranks).contiguous == (mode == "contiguous")
    context = virtual_contexts(ranks)[0]
    assert TokenDispatcher.from_config(context, config).geometry.contiguous == (mode == "contiguous")


def test_examples_in_docstrings() -> None:
    outcome = doctest.testmod(config_module)
    assert outcome.attempted > 0 and outcome.failed == 0


@given(
    hidden=st.integers(-8, 600),
    intermediate=st.integers(-8, 600),
    num_experts=st.integers(-1, 12),
    top_k=st.integers(-1, 12),
    token=st.sampled_from(sorted(FORMATS)),
    weight=st.sampled_from([None, *sorted(WEIGHT_FORMATS)]),
    combine=st.sampled_from(["bf16", "fp8_block", "mxfp8"]),
)
def test_a_layer_is_accepted_exactly_when_it_can_run(
    hidden: int, intermediate: int, num_experts: int, top_k: int, token: str, weight: str | None, combine: str
) -> None:
    weights, units = weight or token, {"bf16": 8, "fp8_block": 16, "mxfp8": 32, "nvfp4": 16, "mxfp4": 32}
    possible = (
        hidden > 0
        and intermediate > 0
        and 0 < top_k <= num_experts
        and (weights == token or (token, weights) in MIXED_PAIRS)
        and all(hidden % units[name] == 0 for name in (token, weights, combine))
        and all(intermediate % units[name] == 0 for name in (token, weights))
    )
    data = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_experts": num_experts,
        "top_k": top_k,
        "max_tokens_per_rank": 4,
        "token_format": token,
        "weight_format": weight,
        "combine_format": combine,
    }
    if possible:
        config = MoELayerConfig.model_validate(data)
        assert config.weight_format == weights
        assert MoELayerConfig.model_validate(config.model_dump()) == config
    else:
        with pytest.raises(ValueError):
            MoELayerConfig.model_validate(data)


def test_yaml_round_trip(tmp_path: Path) -> None:
    for name in PACKAGED:
        config = load_config(name)
        assert load_config(write(tmp_path, config.model_dump())) == config
    shutil.copy(find_config("tiny_cpu"), tmp_path / "mine.yaml")
    assert load_config(tmp_path / "mine.yaml") == load_config("tiny_cpu")


@pytest.mark.parametrize("value", [np.True_, np.array(1.0), torch.tensor(1.0), Decimal(1), np.complex64(1)], ids=repr)
def test_no_key_takes_what_is_no_plain_number(value: object) -> None:
    models = [RunConfig, ParallelConfig, CheckpointConfig, PlacementConfig, *_models_within(MoELayerConfig)]
    for model in models:
        for key in model.model_fields:
            with pytest.raises(ValidationError) as caught:
                model(**{key: value})
            assert key in {problem["loc"][0] for problem in caught.value.errors() if problem["loc"]}, (model, key)


def _models_within(model: type[BaseModel]) -> list[type[BaseModel]]:
    """`model` and the models of its keys."""
    found = [model]
    for field in model.model_fields.values():
        kinds = (field.annotation, *get_args(field.annotation))
        found += [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return found


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), Fraction(2)], ids=repr)
def test_numbers_of_numpy_are_numbers(value: Any) -> None:
    assert RouterConfig(scaling_factor=value).scaling_factor == 2.0
    assert type(ParallelConfig(timeout_s=value).timeout_s) is float
