"""Checkpoints that quantize linears in several ways: how the experts are stored is found from what is said of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.compressed_tensors_config import target_matches
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support.checkpoint_writers import (
    NVFP4_RTOL,
    LibraryScheme,
    change_config,
    compress_layers,
    compressed_config,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    rewrite,
)
from tests.support.comparison import assert_same_bits

CONFIG = MoELayerConfig(hidden_size=128, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
EXPERTS = "model.layers.{}.mlp.experts"
FP8_GROUP = {"format": "float-quantized", "weights": {"strategy": "channel"}, "input_activations": {"num_bits": 8}}
BLOCKS = {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
FP8_BLOCK_GROUP = {"format": "float-quantized", "weights": BLOCKS, "input_activations": {"dynamic": True}}
NVFP4_GROUP = {"format": "nvfp4-pack-quantized", "weights": {"group_size": 16}, "input_activations": {"num_bits": 4}}
W4A16_GROUP = NVFP4_GROUP | {"input_activations": None}
MXFP4_GROUP = {"format": "mxfp4-pack-quantized", "weights": {"group_size": 32}, "input_activations": None}

FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
W4A4 = {"targets": ["Linear"], "weights": FLOAT4, "input_activations": FLOAT4}
WEIGHTS_ALONE = W4A4 | {"input_activations": None}


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed, num_layers=2)
    return tmp_path


def compressed(*groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> dict[str, Any]:
    return compressed_config(*groups, ignore=ignore) | more


def on(group: dict[str, Any], *targets: str) -> dict[str, Any]:
    return group | {"targets": list(targets)}


def modelopt(algorithm: str | None, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def mixed(**recipes: str) -> dict[str, Any]:
    """Of `attention`, and of modules whose names begin with `experts`: `_0` for a layer, then a linear."""
    listed = {}
    for key, algorithm in recipes.items():
        name = "model.layers.0.self_attn.q_proj" if key == "attention" else EXPERTS.format(key.split("_")[1])
        name += key[len("experts_0") :].replace("_", ".", 2) if key != "attention" else ""
        listed[name] = {"quant_algo": algorithm} | ({} if algorithm == "FP8" else {"group_size": 16})
    return modelopt("MIXED_PRECISION", quantized_layers=listed, kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])


def groups(*given: dict[str, Any]) -> dict[str, Any]:
    """`config_groups`."""
    return {f"group_{number}": group for number, group in enumerate(given)}


def transforms(*targets: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """A `transform_config` that rotates what goes into `targets`."""
    places = [{"targets": list(targets), "location": "input", "ignore": list(ignore)}]
    return {"config_groups": {"R4": {"type": "hadamard", "apply": places}}}


GROUP = r"quantization_config\.config_groups\.group_0"
R4 = r"quantization_config\.transform_config\.config_groups\.R4\.apply\[0\]"
EVERY_EXPERT = r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"
PLAIN, NVFP4 = ("plain", "bf16"), ("nvfp4-pack-quantized", "nvfp4")
W4A16, MXFP4 = ("nvfp4-pack-quantized", "bf16"), ("mxfp4-pack-quantized", "bf16")
MODELOPT, MODELOPT_W4A16 = ("modelopt nvfp4", "nvfp4"), ("modelopt nvfp4", "bf16")
WEIGHTS_ALONE_TWICE = MODELOPT_W4A16, MODELOPT_W4A16
Stored = tuple[str, str]
CASES: dict[str, tuple[dict[str, Any], Stored, Stored]] = {
    "attention in fp8": (compressed(on(FP8_GROUP, r"re:.*self_attn.*"), on(NVFP4_GROUP, EVERY_EXPERT)), NVFP4, NVFP4),
    "a pattern before Linear": (compressed(on(FP8_GROUP, "Linear"), on(W4A16_GROUP, EVERY_EXPERT)), W4A16, W4A16),
    "the experts ignored": (compressed(on(FP8_GROUP, "Linear"), ignore=(r"re:.*mlp\.experts.*",)), PLAIN, PLAIN),
    "the experts no target": (compressed(on(FP8_GROUP, r"re:.*self_attn.*")), PLAIN, PLAIN),
    "a layer ignored": (compressed(on(MXFP4_GROUP, "Linear"), ignore=(r"re:model\.layers\.1\..*",)), MXFP4, PLAIN),
    "a name before patterns": (
        compressed(
            on(FP8_GROUP, EVERY_EXPERT, "Linear"),
            on(NVFP4_GROUP, *(f"{EXPERTS.format(n)}.0.{part}_proj" for n in (0, 1) for part in ("gate", "up", "down"))),
        ),
        NVFP4,
        NVFP4,
    ),
    "the cache alone": (compressed(kv_cache_scheme={"num_bits": 8}), PLAIN, PLAIN),
    "attention rotated": (
        compressed(on(NVFP4_GROUP, "Linear"), transform_config=transforms("re:.*q_proj$")),
        NVFP4,
        NVFP4,
    ),
    "all but experts rotated": (
        compressed(on(NVFP4_GROUP, "Linear"), transform_config=transforms("Linear", ignore=(EVERY_EXPERT,))),
        NVFP4,
        NVFP4,
    ),
    "nothing rotated": (compressed(on(W4A16_GROUP, "Linear"), transform_config={}), W4A16, W4A16),
    "mxfp4 for mxfp8 tokens": (
        compressed(on(MXFP4_GROUP | {"input_activations": {"num_bits": 8, "type": "float"}}, "Linear")),
        MXFP4,
        MXFP4,
    ),
    "two formats": (
        compressed(on(NVFP4_GROUP, r"re:.*layers\.0\..*"), on(MXFP4_GROUP, r"re:.*layers\.1\..*")),
        NVFP4,
        MXFP4,
    ),
    "activations in one layer": (
        compressed(on(NVFP4_GROUP, r"re:.*layers\.0\..*"), on(W4A16_GROUP, r"re:.*layers\.1\..*")),
        NVFP4,
        W4A16,
    ),
    "blocks in one layer": (
        compressed(on(FP8_BLOCK_GROUP, r"re:.*layers\.0\..*"), on(W4A16_GROUP, "Linear")),
        ("float-quantized", "fp8_block"),
        W4A16,
    ),
    "blocks, weights alone": (
        compressed(on({"format": "naive-quantized", "weights": BLOCKS}, EVERY_EXPERT)),
        ("float-quantized", "bf16"),
        ("float-quantized", "bf16"),
    ),
    "modelopt, experts of each layer": (
        mixed(attention="FP8", experts_0="NVFP4", experts_1="W4A16_NVFP4"),
        MODELOPT,
        MODELOPT_W4A16,
    ),
    "modelopt, one layer": (mixed(attention="FP8", experts_1="W4A16_NVFP4"), PLAIN, MODELOPT_W4A16),
    "modelopt, linears": (
        mixed(experts_0_0_gate_proj="NVFP4", experts_0_0_up_proj="NVFP4", experts_0_0_down_proj="NVFP4"),
        MODELOPT,
        PLAIN,
    ),
    "modelopt, what is nearest": (mixed(experts_0="FP8", experts_0_0="NVFP4"), MODELOPT, PLAIN),
    "modelopt, attention alone": (mixed(attention="FP8"), PLAIN, PLAIN),
    "modelopt, the cache alone": (modelopt(None, kv_cache_quant_algo="FP8"), PLAIN, PLAIN),
    "modelopt, experts excluded": (modelopt("FP8", exclude_modules=["lm_head", "*mlp.experts*"]), PLAIN, PLAIN),
    "modelopt, a layer excluded": (modelopt("NVFP4", exclude_modules=["*layers.0.mlp*"]), PLAIN, MODELOPT),
    "modelopt, experts ignored by module": (
        modelopt("FP8", ignore=[EXPERTS.format(0), EXPERTS.format(1)]),
        PLAIN,
        PLAIN,
    ),
    "modelopt, tokens too": (modelopt("NVFP4", config_groups=groups(W4A4)), MODELOPT, MODELOPT),
    "modelopt, weights alone": (modelopt("NVFP4", config_groups=groups(WEIGHTS_ALONE)), *WEIGHTS_ALONE_TWICE),
    "modelopt, no word of tokens": (modelopt("NVFP4", config_groups=groups({"targets": []})), *WEIGHTS_ALONE_TWICE),
    "modelopt, weights alone by algorithm": (
        modelopt("W4A16_NVFP4", config_groups=groups(W4A4)),
        *WEIGHTS_ALONE_TWICE,
    ),
    "modelopt, weights alone in one layer": (
        mixed(experts_0="NVFP4", experts_1="NVFP4")
        | {"config_groups": groups(on(WEIGHTS_ALONE, EXPERTS.format(0)), on(W4A4, EXPERTS.format(1)))},
        MODELOPT_W4A16,
        MODELOPT,
    ),
    "modelopt, the nearest group": (
        modelopt(
            "NVFP4",
            config_groups=groups(
                W4A4, on(W4A4, "*layers.1.*"), on(WEIGHTS_ALONE, EXPERTS.format(1)), on(W4A4, "model.layers.1")
            ),
        ),
        MODELOPT,
        MODELOPT_W4A16,
    ),
    "modelopt, a pattern before Linear": (
        modelopt("NVFP4", config_groups=groups(WEIGHTS_ALONE, on(W4A4, "*layers.1.*"))),
        MODELOPT_W4A16,
        MODELOPT,
    ),
    "modelopt, a group of other linears": (
        modelopt("NVFP4", config_groups=groups(on(WEIGHTS_ALONE, "*self_attn*"))),
        MODELOPT,
        MODELOPT,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_the_experts_of_a_layer_counts(case: str, folder: Path) -> None:
    quantization, *layers = CASES[case]
    change_config(folder, quantization_config=quantization)
    with Checkpoint(folder) as checkpoint:
        for layer, want in enumerate(layers):
            found = checkpoint.quantization.stored(checkpoint.names(layer).linears(0))
            assert (found.layout.name, found.token_format) == want


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            mixed(experts_1="INT4_AWQ"),
            r'quantization_config\.quantized_layers\["model\.layers\.1\.mlp\.experts"\]\.quant_algo of model.*gate_proj'
            ": expected one of NVFP4, W4A16_NVFP4, .*, got 'INT4_AWQ'",
        ),
        (modelopt("MIXED_PRECISION"), r"quantization_config\.quantized_layers: expected an object, got None"),
        (modelopt(None), r"quantization_config\.quant_algo of model\..*: expected one of NVFP4, .*, got None"),
        (
            modelopt("FP8", exclude_modules="lm_head"),
            r"quantization_config\.exclude_modules: expected a list of names and patterns, got 'lm_head'",
        ),
        (
            mixed(experts_1_0_gate_proj="NVFP4", experts_1_0_up_proj="NVFP4"),
            r"expected one way to store a layer's experts, got modelopt nvfp4 \(for nvfp4 tokens\) for model\.*"
            r".*0\.gate_proj and plain \(for bf16 tokens\) for model.*0\.down_proj",
        ),
        (
            compressed(on(NVFP4_GROUP, r"re:.*(gate|up)_proj"), on(MXFP4_GROUP, r"re:.*down_proj")),
            "expected one way to store a layer's experts, got nvfp4-pack-quantized .* and mxfp4-pack-quantized",
        ),
        (
            compressed(on(NVFP4_GROUP, r"re:.*(gate|up)_proj"), on(W4A16_GROUP, r"re:.*down_proj")),
            r"expected one way .*, got .*\(for nvfp4 tokens\) for .* and .*\(for bf16 tokens\) for .*down_proj",
        ),
        (
            compressed(on(FP8_GROUP | {"format": "marlin-24"}, "Linear")),
            GROUP + r"\.format of model\..*: expected one of .*, got 'marlin-24'",
        ),
        (
            compressed(on(FP8_GROUP | {"weights": {"num_bits": 8, "strategy": "attn_head"}}, "Linear")),
            GROUP + r"\.weights\.strategy of model\..*gate_proj: expected one of block, tensor, .*, got 'attn_head'",
        ),
        (
            compressed(on(FP8_BLOCK_GROUP | {"weights": BLOCKS | {"block_structure": [64]}}, "Linear")),
            GROUP + r"\.weights\.block_structure of model\..*gate_proj: expected two positive integers, got \[64\]",
        ),
        (
            compressed(on(FP8_BLOCK_GROUP | {"input_activations": {"dynamic": False}}, "Linear")),
            GROUP + r"\.input_activations\.dynamic of model\..*gate_proj: expected True, got False",
        ),
        (
            compressed(on(NVFP4_GROUP | {"output_activations": {"num_bits": 8, "type": "float"}}, "Linear")),
            GROUP + r"\.output_activations of model\..*gate_proj: expected None, got \{'num_bits': 8",
        ),
        *(
            (
                compressed(on(group | {"input_activations": {"dynamic": True} | activations}, "Linear")),
                GROUP
                + rf"\.input_activations\.{key} of model\..*gate_proj: expected {want!r}, got {activations[key]!r}",
            )
            for group, activations, key, want in [
                (NVFP4_GROUP, {"num_bits": 8, "type": "float"}, "num_bits", 4),
                (NVFP4_GROUP, {"num_bits": 4, "type": "int"}, "type", "float"),
                (MXFP4_GROUP, {"num_bits": 16, "type": "float"}, "num_bits", 4),
                (MXFP4_GROUP, {"num_bits": 8, "type": "int"}, "type", "float"),
                (FP8_BLOCK_GROUP, {"num_bits": 4, "type": "float"}, "num_bits", 8),
            ]
        ),
        *(
            (
                compressed(on(group | {"weights": group["weights"] | {"symmetric": False}}, "Linear")),  # type: ignore[dict-item]
                GROUP + r"\.weights\.symmetric of model\..*gate_proj: expected True, got False",
            )
            for group in (NVFP4_GROUP, MXFP4_GROUP, FP8_BLOCK_GROUP)
        ),
        *(
            (compressed(on(W4A16_GROUP, "Linear"), transform_config=transforms(*targets)), message)
            for targets, message in [
                (
                    (r"re:.*down_proj$",),
                    R4 + r": expected none for model\..*down_proj, got \{'targets'",
                ),
                (
                    ("Linear",),
                    R4 + r": expected none for model\..*gate_proj, got \{'targets'",
                ),
            ]
        ),
        (
            compressed(on(W4A16_GROUP, "Linear"), transform_config={"R4": {}}),
            r"quantization_config\.transform_config\.config_groups: expected an object, got",
        ),
        (
            compressed(on(FP8_GROUP, "Linear"), ignore=(EVERY_EXPERT,), transform_config=transforms(r"re:.*up_proj$")),
            R4 + r": expected none for model\..*up_proj, got \{'targets'",
        ),
        *(
            (
                modelopt("NVFP4", config_groups=groups(W4A4 | {part: FLOAT4 | {key: bad}})),
                GROUP + rf"\.{part}\.{key} of model\..*gate_proj: expected {want!r}, got {bad!r}",
            )
            for part, key, bad, want in [
                ("weights", "group_size", 32, 16),
                ("input_activations", "num_bits", 8, 4),
                ("input_activations", "type", "int", "float"),
            ]
        ),
        (modelopt("NVFP4", config_groups=[]), r"quantization_config\.config_groups: expected an object, got \[\]"),
        (
            compressed(on(NVFP4_GROUP, "re:(")),
            GROUP + r"\.targets: 're:\(': missing \), unterminated subpattern",
        ),
        (
            compressed(on(NVFP4_GROUP, 3)),  # type: ignore[arg-type]
            GROUP + r"\.targets: expected a list of names and patterns, got \[3\]",
        ),
    ],
)
def test_experts_stored_in_ways_that_are_not_read_are_named(
    quantization: dict[str, Any], message: str, folder: Path
) -> None:
    change_config(folder, quantization_config=quantization)
    with (
        Checkpoint(folder) as checkpoint,
        pytest.raises(ValueError, match=f"{re.escape(str(folder / 'config.json'))}: {message}"),
    ):
        checkpoint.layer_config(1, max_tokens_per_rank=1)


def test_experts_beside_linears_in_fp8_are_read_as_alone(folder: Path) -> None:
    quantize_experts(folder, modelopt_nvfp4, quantization_config=modelopt("NVFP4"))
    with Checkpoint(folder) as checkpoint:
        alone = list(checkpoint.experts(1, range(3)))
    change_config(folder, quantization_config=mixed(attention="FP8", experts_0="NVFP4", experts_1="NVFP4"))
    with Checkpoint(folder) as checkpoint:
        for one, other in zip(checkpoint.experts(1, range(3)), alone, strict=True):
            for a, b in ((one.gate_up, other.gate_up), (one.down, other.down)):
                assert isinstance(a, ExpertWeights) and isinstance(b, ExpertWeights)
                assert_same_bits(a.quants, b.quants)
                assert_same_bits(a.dequantize(), b.dequantize())


def test_layers_in_formats_of_their_own(tmp_path: Path, seed: int) -> None:
    """Written by compressed-tensors, by four of its presets and in bf16, held to its decompressors; each layer runs in
    its own formats, that of MXFP4 also with MXFP8 tokens, within the bound of these."""
    pytest.importorskip("compressed_tensors")
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed, num_layers=5)
    schemes, tensors = compress_layers(tmp_path, "NVFP4", "FP8_BLOCK", "MXFP4A16", "MXFP8")
    formats = [("nvfp4", "nvfp4"), ("fp8_block", "fp8_block"), ("bf16", "mxfp4"), ("mxfp8", "mxfp8"), ("bf16", "bf16")]
    asked: list[tuple[int, dict[str, Any]]] = [(number, {}) for number in range(5)]
    asked, formats = [*asked, (2, {"token_format": "mxfp8"})], [*formats, ("mxfp8", "mxfp4")]
    # Bounds are of many tokens: the error of eight strays by a sixteenth of it, that of 256 by a seventieth.
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with Checkpoint(tmp_path) as checkpoint, ExpertParallelContext(device="cpu") as context:
        layers = [
            MoELayer.from_checkpoint(tmp_path, layer=number, context=context, max_tokens_per_rank=256, **given)
            for number, given in asked
        ]
        for (number, _), layer, wanted in zip(asked, layers, formats, strict=True):
            assert (layer.config.token_format, layer.config.weight_format) == wanted
            weights = []
            for expert, one in enumerate(checkpoint.experts(number, range(3))):
                gate_up, down = dense(one.gate_up), dense(one.down)
                for part, value in (("gate", gate_up[:128]), ("up", gate_up[128:]), ("down", down)):
                    prefix = f"{EXPERTS.format(number)}.{expert}.{part}_proj."
                    if number == len(schemes):
                        assert_same_bits(value, tensors[f"{prefix}weight"])
                    else:
                        back = schemes[number].decompress(prefix, tensors)
                        torch.testing.assert_close(value, back, rtol=NVFP4_RTOL if number == 0 else 0.0, atol=0)
                weights.append((gate_up.float(), down.float()))
            assert layer.router is not None and layer.experts is not None
            gate_ups, downs = (torch.stack(each) for each in zip(*weights, strict=True))
            exact = moe_reference(x, *layer.router(x), gate_ups, downs, layer.experts.activation)
            # The weights are the checkpoint's: tokens and intermediates alone are rounded.
            assert relative_error(layer(x), exact)[0] <= error_bound(layer.config.token_format, "bf16")


def test_experts_of_one_layer_in_two_formats_are_named(folder: Path) -> None:
    pytest.importorskip("compressed_tensors")
    tensors = load_all(folder)
    schemes = [
        LibraryScheme("NVFP4", r"re:.*\.experts\.0\..*"),
        LibraryScheme("FP8_BLOCK", r"re:.*\.experts\.[12]\..*"),
    ]
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        scheme = schemes[".experts.0." not in name]
        parts = scheme.compress(tensor.float()) if ".experts." in name else {"weight": tensor}
        made |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    rewrite(folder, made, quantization_config=compressed_config(*(scheme.group for scheme in schemes)))
    message = "nvfp4-pack-quantized .* for .*0.gate_proj and float-quantized .* for .*layers.0.*experts.1.gate_proj"
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=message):
        list(checkpoint.experts(0, [0]))


@pytest.mark.parametrize(
    ("quantization", "linear"),
    [
        (compressed(on(NVFP4_GROUP, r"re:.*experts\.[01]\..*"), on(W4A16_GROUP, "Linear")), "2.gate_proj"),
        (compressed(on(NVFP4_GROUP, "Linear"), on(W4A16_GROUP, f"{EXPERTS.format(0)}.1.down_proj")), "1.down_proj"),
        (mixed(experts_0="NVFP4", experts_0_2_up_proj="W4A16_NVFP4", experts_1="NVFP4"), "2.up_proj"),
        (
            modelopt("NVFP4", config_groups=groups(W4A4, on(WEIGHTS_ALONE, f"{EXPERTS.format(0)}.2.up_proj"))),
            "2.up_proj",
        ),
    ],
)
def test_an_expert_meant_for_other_tokens_is_named(quantization: dict[str, Any], linear: str, folder: Path) -> None:
    """Its tensors are those of the others; only what is said of it differs."""
    quantize_experts(folder, modelopt_nvfp4, quantization_config=quantization)
    message = (
        rf"for nvfp4 tokens\) for .*\.0\.gate_proj and .*for bf16 tokens\) for .*layers\.0\..*{re.escape(linear)}, by "
    )
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.stored_of(0)


def test_one_rotated_expert_is_named(folder: Path) -> None:
    rotated = transforms(f"{EXPERTS.format(0)}.2.down_proj")
    quantization = compressed(on(W4A16_GROUP, "Linear"), transform_config=rotated)
    quantize_experts(folder, modelopt_nvfp4, quantization_config=quantization)
    with Checkpoint(folder) as checkpoint:
        with pytest.raises(
            ValueError,
            match=r"transform_config\.config_groups\.R4\.apply\[0\]: expected none for .*layers\.0\..*2\.down_proj",
        ):
            checkpoint.stored_of(0)
        assert checkpoint.stored_of(1).layout.name == "nvfp4-pack-quantized"


def test_names_in_other_layers_do_not_count(folder: Path) -> None:
    """A config may list each linear of a model; a group is none of `Linear` where all its names are of other layers."""
    names = [
        [f"{EXPERTS.format(n)}.{e}.{part}_proj" for e in range(3) for part in ("gate", "up", "down")] for n in (0, 1)
    ]
    quantization = compressed(on(W4A16_GROUP, *names[1]), on(NVFP4_GROUP, *names[0]))
    quantize_experts(folder, modelopt_nvfp4, quantization_config=quantization)
    with Checkpoint(folder) as checkpoint:
        assert [checkpoint.stored_of(layer).token_format for layer in (0, 1)] == ["nvfp4", "bf16"]


def test_a_shared_expert_that_is_not_read_does_not_keep_the_experts_from_it(folder: Path) -> None:
    """It is stored as what is said of itself; only who asks for it is told."""
    change_config(folder, model_type="qwen2_moe", shared_expert_intermediate_size=128)
    experts = on(NVFP4_GROUP, EVERY_EXPERT)
    unread = on(FP8_GROUP | {"format": "marlin-24"}, "re:.*shared_expert.*")
    change_config(folder, quantization_config=compressed(experts, unread))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.quantization.stored(checkpoint.names(0).linears(0)).layout.name == "nvfp4-pack-quantized"
        with pytest.raises(
            ValueError, match=r"format of .*shared_expert\.gate_proj: expected one of .*, got 'marlin-24'"
        ):
            checkpoint.shared_expert(0)
    change_config(folder, quantization_config=compressed(experts))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.rest.stored(["model.layers.0.mlp.shared_expert.up_proj"]).layout.name == "plain"


def test_targets_match_as_in_compressed_tensors() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    names = ("model.layers.0.mlp.experts.0.up_proj", "lm_head", "model.layers.10.self_attn.q_proj")
    targets = (
        "Linear",
        "lm_head",
        "re:.*experts.*",
        "re:lm",
        "re:head",
        r"re:model\.layers\.1\.",
        "up_proj",
        "re:.*proj$",
    )
    seen = set()
    for name in names:
        for target in targets:
            expected = match.is_match(name, torch.nn.Linear(1, 1), target)
            assert target_matches("targets", name, target) == expected, (name, target)
            seen.add(expected)
    assert seen == {True, False}
