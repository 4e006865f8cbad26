"""Tensors of a layer that nothing reads: biases of zeros change nothing, whatever could change something is named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.build import read_dense
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.files import INDEX_FILE, SINGLE_FILE
from moe_runtime.checkpoints.readers import dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from tests.models.test_published_layouts import FP8, LAYOUTS, fused, per_tensor, values
from tests.support.checkpoint_writers import (
    MODELOPT,
    LibraryScheme,
    compressed_config,
    fp8_blocks,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    rewrite,
    stack_experts,
    write_gpt_oss_mxfp4,
)
from tests.support.comparison import assert_same_bits

CONFIG = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
ROWS = {"gate_proj": 128, "up_proj": 128, "down_proj": 256}
BLOCK = "model.layers.0.mlp"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
Writer = Callable[[Path], object]


def _fused_fp8(folder: Path, *, one_scale: bool) -> None:
    size = None if one_scale else [128, 128]
    made = fused(folder, per_tensor if one_scale else fp8_blocks, apart=one_scale)
    rewrite(folder, made, quantization_config=FP8 | {"weight_block_size": size})


def _by_library(preset: str) -> Writer:
    def write(folder: Path) -> None:
        pytest.importorskip("compressed_tensors")
        library = LibraryScheme(preset, "re:.*experts.*")
        quantize_experts(folder, library.compress, quantization_config=compressed_config(library.group))

    return write


def _by_quantizer(name: str) -> Writer:
    quantizer, said, _ = LAYOUTS[name]
    return lambda folder: quantize_experts(folder, quantizer, quantization_config=said)


LINEARS: dict[str, Writer] = {
    "plain": lambda folder: None,
    "modelopt NVFP4": lambda folder: quantize_experts(folder, modelopt_nvfp4, quantization_config=MODELOPT),
    "fp8": lambda folder: quantize_experts(folder, fp8_blocks, quantization_config=FP8),
    **{name: _by_quantizer(name) for name in LAYOUTS},
    **{preset: _by_library(preset) for preset in (*LibraryScheme.FORMATS, *LibraryScheme.DEQUANTIZED)},
}
STACKS: dict[str, Writer] = {
    "plain, fused": stack_experts,
    "plain, fused, transposed": lambda folder: stack_experts(folder, transposed=True),
    "fp8, fused": lambda folder: _fused_fp8(folder, one_scale=False),
    "fp8, fused, per tensor": lambda folder: _fused_fp8(folder, one_scale=True),
}
WRITERS = LINEARS | STACKS


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    return tmp_path


def biases(layout: str) -> dict[str, torch.Tensor]:
    """A bias of zeros of every linear that writers may give one, each of another dtype, and an empty one."""
    made = {
        f"{BLOCK}.experts.{expert}.{part}.bias": torch.zeros(rows, dtype=DTYPES[(3 * expert + n) % len(DTYPES)])
        for expert in range(3)
        for n, (part, rows) in enumerate(ROWS.items())
    }
    made[f"{BLOCK}.experts.1.up_proj.bias"] = torch.empty(0)
    if layout in STACKS:
        made = {f"{BLOCK}.experts.gate_up_proj_bias": torch.zeros(3, 256, dtype=torch.float16)}
        made[f"{BLOCK}.experts.down_proj_bias"] = -torch.zeros(3, 256, dtype=torch.bfloat16)
    return made


def add(folder: Path, extra: dict[str, torch.Tensor]) -> None:
    save_file({**load_file(folder / SINGLE_FILE), **extra}, folder / SINGLE_FILE)


@pytest.mark.parametrize("layout", WRITERS)
def test_biases_of_zeros_change_nothing(layout: str, folder: Path) -> None:
    WRITERS[layout](folder)
    want = values(folder)
    add(folder, biases(layout))
    for prefix, got in values(folder).items():
        assert_same_bits(got, want[prefix])
    with ExpertParallelContext(device="cpu") as context:
        layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
        assert layer(torch.randn(8, 256).bfloat16()).isfinite().all()
    with Checkpoint(folder, routers=False) as checkpoint:
        assert [expert.down_bias for expert in checkpoint.experts(0, range(3), biases=False)] == [None] * 3


@pytest.mark.parametrize("bad", [2.0**-149, float("nan")])
@pytest.mark.parametrize("layout", WRITERS)
def test_a_bias_that_is_not_zero_is_named(layout: str, bad: float, folder: Path) -> None:
    WRITERS[layout](folder)
    made = {name: tensor.float() for name, tensor in biases(layout).items()}
    name = list(made)[-1]
    made[name].view(-1)[-1] = bad
    add(folder, made)
    message = rf"{folder / SINGLE_FILE}: tensor {re.escape(name)} is not expected: "
    said = r".*config\.json says model_type 'qwen3_moe', whose experts have no biases; only 0 everywhere .*, got "
    with pytest.raises(ValueError, match=message + said):
        values(folder)
    with pytest.raises(ValueError, match=message + said), ExpertParallelContext(device="cpu") as context:
        MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
    with Checkpoint(folder, routers=False) as checkpoint, pytest.raises(ValueError, match=message + "the model's exp"):
        list(checkpoint.experts(0, range(3), biases=False))
    with Checkpoint(folder) as checkpoint:
        assert len(list(checkpoint.experts(0, range(2)))) == 2, "whoever reads an expert looks at its own"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("0.down_proj.bias", torch.zeros(128), r"expected shape \[256\], got \[128\]"),
        ("0.down_proj.bias", torch.zeros(256, dtype=torch.int32), "expected U?.* or .*, got I32"),
        ("gate_up_proj_bias", torch.zeros(4, 256), r"expected shape \[3, 256\], got \[4, 256\]"),
        ("3.down_proj.bias", torch.zeros(256), "is not expected: 3 experts in layout plain"),
        ("0.other_proj.bias", torch.zeros(256), "is not expected: 3 experts in layout plain"),
    ],
)
def test_other_biases_are_named(name: str, tensor: torch.Tensor, message: str, folder: Path) -> None:
    """Before any of their size is read."""
    add(folder, {f"{BLOCK}.experts.{name}": tensor})
    with pytest.raises(ValueError, match=rf"tensor {BLOCK}\.experts\.{name}:? {message}"):
        values(folder)


def test_biases_of_experts_that_are_not_read_need_not_be_there(tmp_path: Path, seed: int) -> None:
    write_qwen3_moe_checkpoint(tmp_path / "one", CONFIG, seed=seed)
    add(tmp_path / "one", biases("plain"))
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed, num_shards=3)
    tensors = load_all(tmp_path / "one")
    shards = {name: f"{2 * ('.experts.2.' in name)}.safetensors" for name in tensors}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX_FILE).write_text(f'{{"weight_map": {shards}}}'.replace("'", '"'))
    (tmp_path / "2.safetensors").unlink()
    with Checkpoint(tmp_path) as checkpoint:
        assert len(list(checkpoint.experts(0, range(2)))) == 2
        with pytest.raises(ValueError, match=r"2\.safetensors: shard is missing"):
            list(checkpoint.experts(0, range(3)))


@pytest.mark.parametrize("more", ["experts.1.up_proj.bias", "experts.1.up_proj.weight_zero_point"])
def test_tensors_that_the_index_leaves_out_are_found(more: str, tmp_path: Path, seed: int) -> None:
    """transformers reads whole files, and so finds them."""
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    tensors = load_all(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    save_file(
        tensors | {f"{BLOCK}.{more}": torch.ones(128), "elsewhere.bias": torch.ones(1)}, tmp_path / "1.safetensors"
    )
    shards = dict.fromkeys(tensors, "1.safetensors")
    (tmp_path / INDEX_FILE).write_text(f'{{"weight_map": {shards}}}'.replace("'", '"'))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=rf"tensor {BLOCK}\.{more} is missing"):
        list(checkpoint.experts(0, range(3)))
    save_file(tensors | {"elsewhere.bias": torch.ones(1)}, tmp_path / "1.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert len(list(checkpoint.experts(0, range(3)))) == 3


@pytest.mark.parametrize("layout", ["gptq", "plain, fused"])
def test_biases_of_zeros_are_converted_with_the_rest(layout: str, folder: Path) -> None:
    WRITERS[layout](folder)
    convert_checkpoint(folder, folder / "without", "nvfp4")
    want = values(folder / "without")
    add(folder, biases(layout))
    convert_checkpoint(folder, folder / "with", "nvfp4")
    for prefix, got in values(folder / "with").items():
        assert_same_bits(got, want[prefix])
    name = list(biases(layout))[-1]
    add(folder, {name: biases(layout)[name].float() + 1})
    with pytest.raises(ValueError, match=rf"tensor {re.escape(name)} is not expected: .* whose experts have no biases"):
        convert_checkpoint(folder, folder / "other", "nvfp4")


def test_the_model_says_whether_experts_have_biases_where_no_router_is_read(folder: Path) -> None:
    """Of linears as of stacks; what a model says itself comes before what its files look like."""
    made = {name: torch.randn(len(tensor)) for name, tensor in biases("plain").items()}
    made[f"{BLOCK}.experts.1.up_proj.bias"] = torch.randn(128)
    add(folder, made)
    with Checkpoint(folder, routers=False) as checkpoint:
        for number, expert in enumerate(checkpoint.experts(0, range(3), biases=True)):
            assert expert.gate_up_bias is not None and expert.down_bias is not None
            gate, up, down = (made[f"{BLOCK}.experts.{number}.{part}.bias"] for part in ROWS)
            assert_same_bits(expert.gate_up_bias, torch.cat([gate, up]))
            assert_same_bits(expert.down_bias, down)
        with pytest.raises(ValueError, match="biases: expected"):
            next(checkpoint.experts(0, range(3), biases=1))  # type: ignore[arg-type]


def _granite(folder: Path) -> str:
    """Stacks with names of their own, outside of a module of experts."""
    stack_experts(folder)
    names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    names["gate.weight"] = "router.layer.weight"
    block = "model.layers.0.block_sparse_moe"
    renamed = {f"{block}.{new}": load_all(folder)[f"{BLOCK}.{old}"] for old, new in names.items()}
    rewrite(folder, renamed, model_type="granitemoe", num_local_experts=3, intermediate_size=128)
    return f"{block}.input_linear.bias"


def _nemotron(folder: Path) -> str:
    """Experts without a gate."""
    tensors = {name: tensor for name, tensor in load_all(folder).items() if "gate_proj" not in name}
    tensors[f"{BLOCK}.gate.e_score_correction_bias"] = torch.zeros(3)
    said = {"n_routed_experts": 3, "layers_block_type": ["moe"], "hidden_act": None}
    said["moe_shared_expert_intermediate_size"] = 64
    rewrite(folder, tensors, model_type="nemotron_h", **said)
    return f"{BLOCK}.experts.2.up_proj.bias"


@pytest.mark.parametrize("write", [_granite, _nemotron])
def test_biases_by_other_names(write: Callable[[Path], str], folder: Path) -> None:
    name = write(folder)
    shape = (3, 256) if "linear" in name else (128,)
    for value in (0, 1):
        add(folder, {name: torch.full(shape, float(value))})
        with Checkpoint(folder) as checkpoint:
            if value == 0:
                assert [expert.gate_up_bias for expert in checkpoint.experts(0, range(3))] == [None] * 3
                checkpoint.router(0)
                continue
            with pytest.raises(ValueError, match=rf"tensor {re.escape(name)} is not expected: .* have no biases"):
                list(checkpoint.experts(0, range(3)))


UNREAD: list[tuple[str, torch.Tensor, bool]] = [
    ("gate.bias", torch.zeros(3), True),
    ("gate.bias", torch.tensor([0, 0, 1e-30]), False),
    ("gate.bias", torch.zeros(4), False),
    ("gate.per_expert_scale", torch.ones(3), True),
    ("gate.per_expert_scale", torch.tensor([1, 1, 1.5]), False),
    ("router.per_expert_scale", torch.full((3,), 2.0), False),
    ("gate.weight_scale", torch.tensor(0.5), False),
    ("gate.input_scale", torch.tensor(0.5), True),
    ("gate.scale", torch.ones(1000), False),
    ("gate.tid2eid", torch.zeros(3, dtype=torch.int64), False),
    ("norm.weight", torch.ones(256), False),
    ("pre_expert_norm.weight", torch.ones(256), False),
    ("pre_expert_norm.scale", torch.ones(256), False),
    ("experts.post_expert_norm.weight", torch.zeros(256), False),
    ("fc1_latent_proj.weight", torch.zeros(64, 256), False),
    ("fc2_latent_proj.bias", torch.zeros(256), True),
    ("residual_mlp.up_proj.weight", torch.zeros(64, 256), False),
    ("zeros.bias", torch.empty(0, 2), True),
]


@pytest.mark.parametrize(("name", "tensor", "harmless"), UNREAD)
def test_what_nothing_reads_beside_the_experts(name: str, tensor: torch.Tensor, harmless: bool, folder: Path) -> None:
    """A transformers model that brings its router may read it, so only who reads the router is told."""
    name = f"{BLOCK}.{name}"
    add(folder, {name: tensor})
    with ExpertParallelContext(device="cpu") as context:
        if harmless:
            MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
        else:
            with pytest.raises(ValueError, match=rf"{folder / SINGLE_FILE}: tensor {name}(?: is not|: exp)"):
                MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
    with Checkpoint(folder, routers=False) as checkpoint:
        assert len(list(checkpoint.experts(0, range(3)))) == 3
    with Checkpoint(folder) as checkpoint:
        assert len(list(checkpoint.experts(0, range(3)))) == 3 and checkpoint.digests(0)


@pytest.mark.parametrize("name", ["shared_mlp.up_proj.weight", "share_expert.down_proj.weight", "shared_experts.x"])
def test_a_shared_expert_beside_the_block_is_named(name: str, folder: Path) -> None:
    """As GraniteMoeShared and Step have it. The norms around a block, and heads for prediction, belong to others."""
    others = ("post_attention_layernorm.weight", "shared_head.norm.weight", "pre_moe_norm.weight", "expert_norm.weight")
    add(folder, {f"model.layers.0.{other}": torch.ones(256) for other in others})
    with Checkpoint(folder) as checkpoint:
        checkpoint.router(0)
    add(folder, {f"model.layers.0.{name}": torch.zeros(256)})
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=rf"tensor model\.layers\.0\.{name} is not"):
        checkpoint.router(0)


def test_experts_without_a_block_of_their_own(folder: Path) -> None:
    """Beside attention, which has gates too."""
    renamed = {name.replace(".mlp.", "."): tensor for name, tensor in load_all(folder).items()}
    renamed |= {f"model.layers.0.{name}.weight": torch.ones(2) for name in ("self_attn.gate", "mlp.up_proj")}
    rewrite(folder, renamed)
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.router(0).weight.shape == (3, 256)
    rewrite(folder, renamed | {"model.layers.0.router.scale": torch.full((1,), 2.0)})
    with (
        Checkpoint(folder) as checkpoint,
        pytest.raises(ValueError, match=r"tensor model\.layers\.0\.router\.scale is"),
    ):
        checkpoint.router(0)


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "gpt_oss in mxfp4")


def _saved(folder: Path, family: str, seed: int) -> tuple[int, str]:
    """A model of transformers; its last layer and the block with the router."""
    pytest.importorskip("transformers")
    from tests.support.tiny_models import tiny_model

    family, _, fmt = family.partition(" in ")
    tiny_model(family, seed, **({"intermediate_size": 64} if fmt else {})).save_pretrained(folder)
    if fmt:
        write_gpt_oss_mxfp4(folder)
    with Checkpoint(folder) as checkpoint:
        layer = checkpoint.moe_layers()[-1]
        return layer, checkpoint.names(layer).block.removesuffix(".experts")


def _result(folder: Path, layer: int) -> torch.Tensor:
    """What a layer makes of some tokens, without a warning."""
    with ExpertParallelContext(device="cpu") as context, warnings.catch_warnings():
        warnings.simplefilter("error")
        made = MoELayer.from_checkpoint(folder, layer=layer, context=context, max_tokens_per_rank=8)
        return made(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()).clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_of_each_family(family: str, tmp_path: Path, seed: int) -> None:
    """Of every linear in its block that has none: zeros are read as nothing, and another number is named."""
    layer, block = _saved(tmp_path, family, seed)
    tensors, want = load_all(tmp_path), _result(tmp_path, layer)
    linears = [name for name in tensors if name.startswith(f"{block}.") and name.endswith(".weight")]
    zeros = {f"{name.removesuffix('weight')}bias": torch.zeros(len(tensors[name])).half() for name in linears}
    zeros = {name: bias for name, bias in zeros.items() if name not in tensors}
    assert bool(zeros) == (not family.startswith("gpt_oss")), "that one has all biases"
    rewrite(tmp_path, tensors | zeros)
    assert_same_bits(_result(tmp_path, layer), want)
    others = {re.sub(r"\d+", "N", name): name for name in zeros}.values()
    for name in others or [f"{block}.experts.{part}" for part in ("0.gate_proj.bias", "down_proj.bias", "bias")]:
        rewrite(tmp_path, tensors | zeros | {name: torch.ones(zeros[name].shape if zeros else 48)})
        with pytest.raises(ValueError, match=rf"tensor {re.escape(name)} is not expected: "):
            _result(tmp_path, layer)


SHARED: list[tuple[str, str, torch.Tensor, bool]] = [
    ("qwen2_moe", "shared_expert.up_proj.bias", torch.zeros(80), True),
    ("qwen2_moe", "shared_expert.up_proj.bias", torch.ones(80), False),
    ("qwen2_moe", "shared_expert.up_proj.input_scale", torch.ones(()) / 3, True),
    ("qwen2_moe", "shared_expert.up_proj.weight_shape", torch.tensor([80, 64]), True),
    ("qwen2_moe", "shared_expert.up_proj.pre_quant_scale", torch.full((64,), 2.0), False),
    ("qwen2_moe", "shared_expert.norm.weight", torch.ones(64), False),
    ("qwen2_moe", "shared_expert_gate.bias", torch.zeros(1), True),
    ("qwen2_moe", "shared_expert_gate.bias", torch.ones(1), False),
    ("qwen2_moe", "shared_experts.up_proj.weight", torch.ones(80, 64), False),
    ("deepseek_v3", "shared_experts.down_proj.bias", torch.ones(64), False),
    ("deepseek_v3", "shared_expert_gate.weight", torch.ones(1, 64), False),
    ("deepseek_v3", "gate.expert_bias", torch.ones(12), False),
]


@pytest.mark.parametrize(("family", "name", "tensor", "harmless"), SHARED)
def test_what_nothing_reads_of_a_shared_expert(
    family: str, name: str, tensor: torch.Tensor, harmless: bool, tmp_path: Path, seed: int
) -> None:
    layer, block = _saved(tmp_path, family, seed)
    rewrite(tmp_path, load_all(tmp_path) | {f"{block}.{name}": tensor})
    if harmless:
        _result(tmp_path, layer)
    else:
        with pytest.raises(ValueError, match=rf"{tmp_path / SINGLE_FILE}: tensor {block}\.{name} is not expected: "):
            _result(tmp_path, layer)
    with Checkpoint(tmp_path) as checkpoint:
        # A caller that brings the shared expert itself does not need it to be read.
        config = checkpoint.layer_config(layer, max_tokens_per_rank=8)
        assert len(list(checkpoint.experts(layer, range(2)))) == 2
        if name.startswith("shared_expert."):
            with ExpertParallelContext(device="cpu") as context:
                made = MoELayer(config.replace(shared_expert=None), context)
                read_dense(checkpoint, layer, made.router, None)


@pytest.mark.parametrize("quantizer", ["gptq", "awq", "modelopt FP8"])
def test_quantized_shared_experts_with_biases(quantizer: str, tmp_path: Path, seed: int) -> None:
    """GPTQ writers give every linear a bias of zeros, and all tensors that a layout has are known."""
    shared = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 128}
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    make, said, _ = LAYOUTS[quantizer]
    made: dict[str, Any] = quantize_experts(tmp_path, make, quantization_config=said, **shared)
    weights = {part: torch.randn(rows, 384 - rows) for part, rows in ROWS.items()}
    for part, w in weights.items():
        prefix = f"{BLOCK}.shared_expert.{part}."
        made |= {prefix + key: tensor for key, tensor in make(w).items()} | {f"{prefix}bias": torch.zeros(len(w))}
    made[f"{BLOCK}.shared_expert_gate.weight"] = torch.randn(1, 256)
    rewrite(tmp_path, made)
    with Checkpoint(tmp_path) as checkpoint:
        read = checkpoint.shared_expert(0)
        assert read is not None and dense(read.down_proj).shape == (256, 128)
    made[f"{BLOCK}.shared_expert.up_proj.bias"] += 1
    rewrite(tmp_path, made)
    message = rf"tensor {BLOCK}\.shared_expert\.up_proj\.bias is not expected: .* of whose shared expert nothing reads"
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=message):
        checkpoint.shared_expert(0)
