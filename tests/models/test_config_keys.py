"""Keys of `config.json`: each that may change what is computed is read or refused; missing ones mean what they mean
in transformers."""

from __future__ import annotations

import json
import logging
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.checkpoints import config_defaults as defaults_module
from moe_runtime.checkpoints import unread_keys
from moe_runtime.checkpoints.calibration import calibrate
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.config_defaults import table
from moe_runtime.checkpoints.config_keys import LOOKS, WITHOUT_INFLUENCE, is_of_other_part
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.families import layer_config
from moe_runtime.checkpoints.family_table import DEFAULT, FAMILIES, MTP_KEYS, NUM_EXPERTS_KEYS, text_config
from moe_runtime.config import ActivationConfig, MoELayerConfig, load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.common.cases import expert_source
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from tests.support.checkpoint_writers import change_config
from tests.support.programs import ROOT, without_interpreter
from tests.support.published_configs import PUBLISHED, REFUSED, moe_layers
from tests.support.spawner import interpreter

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
config_defaults = pytest.importorskip("tests.support.config_defaults")

pytestmark = pytest.mark.cpu_only

CONFIG = MoELayerConfig(hidden_size=64, intermediate_size=48, num_experts=4, top_k=2, max_tokens_per_rank=8)
LAYER = 5
KNOWN = {kind for family in (*FAMILIES, DEFAULT) for kind in family.model_types}

REFUSED_DEFAULTS = {
    "aria": "moe_num_shared_experts",
    "axk1": "model_type",
    "deepseek_ocr2": "num_experts_per_tok",
    "deepseek_v2": "num_experts_per_tok",
    "deepseek_v4": "model_type",
    "dots3_note": "shared_experts_intermediate_size",
    "dots3_note_vision_encoder": "num_local_experts",
    "ernie4_5_moe": "num_experts_per_tok",
    "ernie4_5_vl_moe": "moe_intermediate_size",
    "glm5_next": "swiglu_limit",
    "granitemoehybrid": "shared_intermediate_size",
    "hy_v3": "router_scaling_factor",
    "hy_v4": "swiglu_limit",
    "inkling2": "mlp_gate_softcap",
    "inkling": "shared_expert_sink",
    "inkling_mm_model": "shared_expert_sink",
    "jetmoe": "activation_function",
    "laguna": "model_type",
    "llama4": "model_type",
    "longcat_flash": "model_type",
    "minimax_m3_vl": "swiglu_limit",
    "muse_spark": "moe_hidden_size",
    "nllb-moe": "hidden_size",
    "openai_privacy_filter": "swiglu_limit",
    "phimoe": "model_type",
    "step3p5": "share_expert_dim",
    "step3p7": "share_expert_dim",
    "switch_transformers": "hidden_size",
    "vitpose_backbone": "intermediate_size",
    "zaya": "router_hidden_size",
}
"""Model types whose default config is refused, and the key that says why: their layers compute something else, or the
config has no value of what is needed."""

SUSPICIOUS: dict[str, Any] = {
    "expert_swiglu_limit_list": [0.5] * 8,
    "share_expert_swiglu_limit_list": [0.5] * 8,
    "swiglu_limits": [0.5] * 8,
    "swiglu_limits_shared": [0.5] * 8,
    "swiglu_limit": 3.0,
    "swiglu_alpha": 1.5,
    "swiglu_beta": 0.5,
    "gemm1_clamp_limit": 7.0,
    "gemm1_alpha": 1.702,
    "activation_clamp": 1.0,
    "expert_hidden_act": "gelu",
    "hidden_act": "gelu",
    "mlp_hidden_act": "gelu",
    "moe_latent_size": 32,
    "mlp_bias": True,
    "use_bias": True,
    "expert_bias": True,
    "moe_apply_router_weight_on_input": True,
    "moe_norm_expert_output": True,
    "pre_expert_norm": True,
    "router_bias": True,
    "router_logit_softcapping": 30.0,
    "moe_router_logit_softcapping": 30.0,
    "router_temperature": 0.5,
    "router_scaling_factor": 3.0,
    "moe_router_topk_scaling_factor": 3.0,
    "norm_topk_prob": False,
    "norm_topk_sqrt": True,
    "scoring_func": "sqrtsoftplus",
    "use_grouped_topk_mean": True,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "num_expert_copies": 2,
    "moe_symmetric_gate": True,
    "expert_params": {"swiglu_limit": 3.0},
}


@cache
def default_configs() -> dict[str, dict[str, Any]]:
    """The default config of each model type of transformers that has experts, as its `config.json` would be."""
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    found = {}
    for kind in mapping:
        try:
            made = json.loads(json.dumps(mapping[kind]().to_dict(), default=str))
        except Exception:
            continue  # Some cannot be made without arguments.
        if any(text_config(made)[1].get(key) for key in NUM_EXPERTS_KEYS):
            found[kind] = made
    assert len(found) > 80
    return found


def matters(config: dict[str, Any]) -> list[str]:
    """The keys that are read, or look as if they were to be."""
    return [key for key in config if key in config_defaults.READ or LOOKS.search(key.lower())]


def read(config: dict[str, Any], **options: Any) -> MoELayerConfig:
    return layer_config(config, source="file", layer=LAYER, max_tokens_per_rank=8, **options)


def read_or_refused(config: dict[str, Any]) -> MoELayerConfig | str:
    """What is read, or the message without what came."""
    try:
        return read(config)
    except ValueError as error:
        return str(error).partition(", got")[0]


def test_default_configs_are_read_or_refused_for_a_stated_reason() -> None:
    for kind, config in default_configs().items():
        reason = REFUSED_DEFAULTS.get(kind.removesuffix("_text"))
        if reason is None:
            read(config)
        else:
            with pytest.raises(ValueError, match=rf"^file: [\w. ]*{reason}"):
                read(config)


@pytest.mark.parametrize("key", SUSPICIOUS)
def test_a_key_that_may_change_values_is_read_or_refused(key: str) -> None:
    """In every family, at the place where its config says how many experts there are, and around it."""
    value, checked = SUSPICIOUS[key], 0
    for kind, config in default_configs().items():
        if kind.removesuffix("_text") in REFUSED_DEFAULTS:
            continue
        at, text = text_config(config)
        before = read(config)
        if text.get(key) == value:
            continue
        within = json.loads(json.dumps(config))
        text_config(within)[1][key] = value
        try:
            after = read(within)
        except ValueError as error:
            assert str(error).startswith(f"file: {at}") and key in str(error), f"{kind}: {error}"
        else:
            # Without a shared expert, there is nothing that a key of it could change.
            unused = "share" in key and before.shared_expert is None
            # The softmax of the chosen logits adds up to 1.
            unused |= (kind, key) == ("cohere2_moe", "norm_topk_prob")
            # What it says already.
            unused |= key == "norm_topk_prob" and not before.router.renormalize
            assert after != before or unused, f"{kind} reads {key} without effect"
        if at and unread_keys.acts(key, value):
            with pytest.raises(ValueError, match=f"^file: {key}"):
                read(config | {key: value})
        checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    ("kind", "more", "complaint"),
    [
        # transformers refuses it, and code before took it for false.
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob: expected true or false, got None"),
        ("qwen3_moe", {"normalize_expert_weights": False}, "normalize_expert_weights: "),
        ("qwen3_moe", {"norm_after_topk": False}, "norm_after_topk: "),
        ("qwen3_moe", {"swiglu_up_offset": 1.0}, "swiglu_up_offset: "),
        ("qwen3_moe", {"layer_configs": [{"size": 1}, {"hidden_act": "gelu"}]}, r"layer_configs\.1\.hidden_act: "),
        # vLLM clamps before the activation, and the shared expert, too.
        ("exaone_moe", {"swiglu_limits": [7.0]}, "swiglu_limits: "),
        ("kimi_linear", {"num_expert_group": 8, "topk_group": 4, "use_grouped_topk": False}, "use_grouped_topk: "),
    ],
)
def test_keys_that_act_by_an_unusual_value_are_refused(kind: str, more: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^file: {complaint}"):
        read(default_configs()[kind] | more)


def test_grouped_choices_may_say_that_they_are() -> None:
    config = default_configs()["kimi_linear"]
    for groups in ({}, {"num_expert_group": 8, "topk_group": 4}):
        assert read(config | groups | {"use_grouped_topk": True}) == read(config | groups)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, 1.0, "", [], {}, [0.0, None], {"a": None}])
def test_values_that_cannot_act_are_no_alarm(value: Any) -> None:
    config = default_configs()["qwen3_moe"]
    assert read(config | {"router_new_factor": value}) == read(config)


def test_each_key_that_is_known_to_have_no_influence_looks_otherwise() -> None:
    """Others need no place in the list."""
    assert all(LOOKS.search(key) and not is_of_other_part(key) for key in WITHOUT_INFLUENCE)


def test_a_bound_of_one_acts() -> None:
    config = default_configs()["qwen3_moe"]
    for key in ("router_new_limit", "expert_clamp", "moe_softcap"):
        with pytest.raises(ValueError, match=f"^file: {key}: expected a key that is known here, got 1.0; "):
            read(config | {key: 1.0})


def test_a_key_that_contradicts_its_family_is_refused() -> None:
    for kind, key, value in (
        ("mixtral", "norm_topk_prob", False),
        ("jamba", "norm_topk_prob", True),
        ("deepseek_v3", "use_expert_bias", False),
        ("qwen3_moe", "use_expert_bias", True),
        ("gpt_oss", "scoring_func", "sigmoid"),
    ):
        with pytest.raises(ValueError, match=f"^file: {key}: expected .*, got {value!r}"):
            read(default_configs()[kind] | {key: value})


def test_two_keys_of_one_thing_must_agree() -> None:
    config = default_configs()["glm4_moe"]
    read(config | {"num_shared_experts": config["n_shared_experts"]})
    with pytest.raises(ValueError, match=r"^file: num_shared_experts: expected 1, as n_shared_experts says, got 2"):
        read(config | {"num_shared_experts": 2})


def test_several_shared_experts_of_a_size_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^config: num_shared_experts: expected at most 1 beside moe_shared_"):
        layer_config(ling(num_shared_experts=2, moe_shared_expert_intermediate_size=48), layer=0, max_tokens_per_rank=8)


def test_shared_experts_that_are_averaged_are_refused() -> None:
    config = default_configs()["cohere2_moe"] | {"num_shared_experts": 1}
    with pytest.raises(ValueError, match=r"^file: shared_expert_combination_strategy: expected sum, got 'average'"):
        read(config)
    assert read(config | {"shared_expert_combination_strategy": "sum"}).shared_expert is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_or_refused_for_a_stated_reason(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^file: [\w. ]*{REFUSED[name]}"):
            read(PUBLISHED[name])
    else:
        read(PUBLISHED[name])


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_a_key_that_is_missing_means_what_it_means_in_transformers(kind: str) -> None:
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    kind = next((name for name in (f"{kind}_text", kind) if name in default_configs()), "")
    if not kind:
        pytest.skip("this transformers has no such models")
    config = default_configs()[kind]

    def completed(given: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(json.dumps(mapping[kind].from_dict(dict(given)).to_dict(), default=str))
        return made

    def layers(given: dict[str, Any]) -> list[int] | str:
        try:
            return moe_layers(given)
        except ValueError as error:
            return str(error).partition(", got")[0]

    checked = 0
    for key in matters(config):
        if key in MTP_KEYS:
            continue
        given = {name: value for name, value in config.items() if name != key}
        want, got = read_or_refused(completed(given)), read_or_refused(given)
        assert got == want or (isinstance(got, str) and isinstance(want, str)), f"without {key}"
        assert layers(given) == layers(completed(given)), f"without {key}"
        checked += 1
    assert checked > 5


def test_the_table_of_defaults_is_that_of_transformers() -> None:
    """Of the release that the table is from, where this is it."""
    release, defaults = table()
    if release != transformers.__version__:
        pytest.skip("another release of transformers")
    assert json.loads(json.dumps(config_defaults.table())) == defaults


def test_other_releases_of_transformers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults_module, "_installed_release", lambda: "0")
    monkeypatch.setattr(defaults_module, "installed", lambda kind: {"n_group": 5} if kind == "deepseek_v3" else None)
    defaults_module.defaults_of.cache_clear()
    try:
        assert defaults_module.defaults_of("kimi_k2") == {"n_group": 5}
        assert defaults_module.defaults_of("glm4_moe") == table()[1]["glm4_moe"], "which it does not have"
        assert defaults_module.defaults_of("no_such_model") == {}
    finally:
        defaults_module.defaults_of.cache_clear()


def test_reading_a_config_does_not_import_transformers() -> None:
    program = """
import json, sys
from moe_runtime.checkpoints.families import layer_config
layer_config(json.loads(sys.argv[1]), layer=5, max_tokens_per_rank=8)
assert "transformers" not in sys.modules
"""
    if table()[0] != transformers.__version__:
        pytest.skip("another release of transformers")
    config = json.dumps(default_configs()["deepseek_v3"])
    subprocess.run([interpreter(), "-c", program, config], cwd=ROOT, check=True, env=without_interpreter())


def test_without_transformers_the_same_is_read(tmp_path: Path) -> None:
    program = """
import json, sys
sys.modules["transformers"] = None
from moe_runtime.checkpoints.config_defaults import table
from moe_runtime.checkpoints.config_keys import LOOKS, WITHOUT_INFLUENCE, is_of_other_part
from moe_runtime.checkpoints.families import layer_config
from tests.support.published_configs import moe_layers
for config in json.load(open(sys.argv[1])):
    try:
        made = layer_config(config, source="file", layer=5, max_tokens_per_rank=8)
        print(made.model_dump_json(), moe_layers(config))
    except ValueError as error:
        print(error)
"""
    configs = [config for kind, config in default_configs().items() if kind.removesuffix("_text") in KNOWN]
    configs = [config for config in configs if "text_config" not in config]
    less = [
        {key: value for key, value in config.items() if key != left} for config in configs for left in matters(config)
    ]
    (tmp_path / "configs.json").write_text(json.dumps(less))
    command = [interpreter(), "-c", program, str(tmp_path / "configs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=without_interpreter())
    got = done.stdout.splitlines()
    want = []
    for config in less:
        try:
            want.append(f"{read(config).model_dump_json()} {moe_layers(config)}")
        except ValueError as error:
            want.append(str(error))
    assert len(got) == len(less) > 400
    for config, one, other in zip(less, got, want, strict=True):
        assert one == other, config["model_type"]


LING = [0.0, None, 4.0, 0, 7.0]


def ling(**changes: Any) -> dict[str, Any]:
    config = {"model_type": "bailing_hybrid", "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8}
    config |= {"num_experts_per_tok": 2, "num_hidden_layers": 5, "n_group": 1, "topk_group": 1}
    return config | {"expert_swiglu_limit_list": LING, "share_expert_swiglu_limit_list": LING[::-1]} | changes


def test_limits_are_those_of_the_layer() -> None:
    for layer, limit in enumerate(LING):
        made = layer_config(ling(), layer=layer, max_tokens_per_rank=8)
        shared = LING[::-1][layer]
        want = ActivationConfig(limit=limit, limit_on="function") if limit else ActivationConfig()
        assert made.activation == want
        assert made.shared_expert is not None and made.shared_expert.limit == (shared or None)
    beyond = layer_config(ling(), layer=5, max_tokens_per_rank=8)
    assert beyond.activation == ActivationConfig(), "a layer for multi-token prediction"
    same = ling(expert_swiglu_limit_list=[3.0] * 5, share_expert_swiglu_limit_list=None)
    assert layer_config(same, max_tokens_per_rank=8).activation.limit == 3.0


@pytest.mark.parametrize(
    ("limits", "layer", "message"),
    [
        (LING, None, "expected one value for all layers where no layer is asked for, got "),
        ([-1.0] * 5, 0, "expected null, 0 or a positive number for each layer, got -1.0"),
        ([True] * 5, 0, "expected null, 0 or a positive number for each layer, got True"),
        (["4"] * 5, 0, "expected null, 0 or a positive number for each layer, got '4'"),
        ([float("nan")] * 5, 0, "expected null, 0 or a positive number for each layer, got nan"),
        ([float("inf")] * 5, 0, "expected null, 0 or a positive number for each layer, got inf"),
        ([10**400] * 5, 0, "expected null, 0 or a positive number for each layer, got 1000"),
        ([[1.0]] * 5, 0, r"expected null, 0 or a positive number for each layer, got \[1.0\]"),
        (4.0, 0, "expected a list of layers, got 4.0"),
        ([4.0] * 2001, 0, "expected at most 2000 layers, got 2001"),
    ],
)
def test_limits_that_are_wrong_are_named(limits: Any, layer: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: expert_swiglu_limit_list: {message}"):
        layer_config(ling(expert_swiglu_limit_list=limits), layer=layer, max_tokens_per_rank=8)


def changed(folder: Path, **changes: Any) -> Path:
    """A checkpoint whose config has these keys too."""
    write_qwen3_moe_checkpoint(folder, CONFIG, seed=0)
    change_config(folder, **changes)
    return folder


def test_a_caller_can_say_that_a_key_has_no_influence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(tmp_path / "model", router_new=3, expert_new={"alpha": 2.0})
    message = rf"{folder / 'config.json'}: router_new: expected a key that is known here, got 3; .* ignore_keys"
    tokens = [torch.ones(4, 64)]
    for call in (
        lambda: Checkpoint(folder),
        lambda: MoELayer.from_checkpoint(folder, max_tokens_per_rank=8),
        lambda: convert_checkpoint(folder, tmp_path / "converted", "nvfp4"),
        lambda: calibrate(folder, 0, tokens),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"expert_new\.alpha: expected a key that is known here, got 2\.0"):
        Checkpoint(folder, ignore_keys=["router_new"])
    caplog.clear()
    keys = ["router_new", "expert_new.alpha"]
    unread_keys.log_ignored.cache_clear()
    with caplog.at_level(logging.WARNING), ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, context=context, ignore_keys=keys, max_tokens_per_rank=8)
        x = torch.randn(4, 64).bfloat16()
        assert layer(x).isfinite().all()
    told = [record.message for record in caplog.records if "ignore_keys" in record.message]
    assert told == [
        f"{folder / 'config.json'}: router_new: 3 is ignored, as ignore_keys says",
        f"{folder / 'config.json'}: expert_new.alpha: 2.0 is ignored, as ignore_keys says",
    ], "once for each key"
    convert_checkpoint(folder, tmp_path / "converted", "nvfp4", ignore_keys=keys)
    calibrate(folder, 0, tokens, ignore_keys=tuple(keys))
    yaml = tmp_path / "run.yaml"
    sizes = "hidden_size: 64, intermediate_size: 48, num_experts: 4, top_k: 2, max_tokens_per_rank: 8"
    yaml.write_text(f"layer: {{{sizes}}}\ncheckpoint: {{path: {folder}, ignore_keys: {keys}}}\n")
    run = load_config(yaml)
    assert run.checkpoint is not None and run.checkpoint.ignore_keys == tuple(keys)
    with ExpertParallelContext(device="cpu") as context:
        MoELayer.from_run_config(run, context)
    with expert_source(run, torch.device("cpu")) as experts:
        experts(0)


@pytest.mark.parametrize("keys", ["router_new", 5, [3], None, {"router_new": 1}])
def test_ignored_keys_that_are_none_are_refused(keys: Any, tmp_path: Path) -> None:
    folder = changed(tmp_path)
    with pytest.raises(ValueError, match=r"^ignore_keys: expected names of keys, got "):
        Checkpoint(folder, ignore_keys=keys)


def test_models_that_bring_their_own_routers_need_no_keys_of_them(tmp_path: Path) -> None:
    folder = changed(tmp_path, router_new=3, hidden_act="gelu")
    with Checkpoint(folder, routers=False) as checkpoint:
        assert len(list(checkpoint.experts(0, range(4)))) == 4
