"""`launch.check_model`: whole tiny checkpoints and single layers, what is printed and written, and wrong arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from moe_runtime.checkpoints.readers import ExpertReader
from moe_runtime.launch import check_model
from moe_runtime.launch.research import published_layers
from moe_runtime.launch.research.published_layers import LayerSizes, write_deepseek_nvfp4, write_gpt_oss_mxfp4
from moe_runtime.reference import error_bound
from tests.cli.test_launch import TWO_RANKS, program
from tests.support import checkpoint_writers, parallel_models, tiny_models

pytestmark = pytest.mark.cpu_only

SMALL = {
    "gpt_oss_120b": (write_gpt_oss_mxfp4, LayerSizes(160, 96, 7, 3)),
    "deepseek_v3_nvfp4": (write_deepseek_nvfp4, LayerSizes(256, 128, 40, 5)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments: object) -> int:
    return check_model.main([str(argument) for argument in arguments])


def save(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    tiny_models.tiny_model(family, seed, **changes).bfloat16().save_pretrained(folder)
    return folder


def test_a_whole_model_on_two_ranks(tmp_path: Path, seed: int) -> None:
    folder, file = save(tmp_path / "model", "deepseek_v3", seed), tmp_path / "found.json"
    done = program("check_model", folder, "--tokens", "5,6,7,8", "--new", 3, "--json", file, launcher=TWO_RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rank(s) on cpu, transport shared, engine torch" in done.stdout
    assert "rank 1: first token " in done.stdout and "UNEXPECTED" not in done.stderr
    found = json.loads(file.read_text())
    assert found["passed"] and found["model"] == "model" and found["environment"]["ranks"] == 2
    for result in found["results"]:
        # Layer 0 is dense.
        (check,) = result["checks"]
        assert (check["layer"], check["stored"], check["tokens"]) == (1, "plain", 64)
        assert 0 < check["error"] <= check["bound"] == error_bound("bf16")
        assert result["generation"]["tokens"] == found["results"][0]["generation"]["tokens"]
        assert len(result["generation"]["tokens"]) == len(result["generation"]["seconds"]) <= 3
        assert [memory["device_bytes"] for memory in result["memory"]] == [None] * 3
        assert all(10**8 < memory["host_bytes"] <= memory["host_peak_bytes"] for memory in result["memory"])
    errors = [result["checks"][0]["error"] for result in found["results"]]
    assert errors[0] != errors[1], "each rank brings tokens of its own"
    assert f"generated {','.join(map(str, found['results'][0]['generation']['tokens']))}" in done.stdout


def test_a_check_looks_through_the_names_once(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a large checkpoint has some 270 thousand, and 384 experts in a layer."""
    folder, looks = save(tmp_path / "model", "qwen3_moe", seed), []
    check_names = ExpertReader.check_names

    def counted(reader: ExpertReader) -> None:
        looks.append(reader.names.block)
        check_names(reader)

    monkeypatch.setattr(ExpertReader, "check_names", counted)
    assert run(folder, "--layer", 1) == 0
    assert looks == ["model.layers.1.mlp.experts"] * 2, "to load them and to check them"


def test_one_layer_of_each_kind_is_checked(tmp_path: Path, seed: int) -> None:
    """NVFP4 but for one layer, as ModelOpt leaves some out; transformers does not know its method."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    folder = save(tmp_path / "model", "qwen3_moe", seed, **sizes)
    plain = checkpoint_writers.load_all(folder)
    quant_config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["*layers.1.*"]}
    quantized = checkpoint_writers.quantize_experts(folder, checkpoint_writers.modelopt_nvfp4)
    left_out = "model.layers.1."
    tensors = {name: tensor for name, tensor in quantized.items() if not name.startswith(left_out)}
    tensors |= {name: tensor for name, tensor in plain.items() if name.startswith(left_out)}
    checkpoint_writers.rewrite(folder, tensors, quantization_config=quant_config)
    file = tmp_path / "found.json"
    assert run(folder, "--new", 1, "--json", file) == 0
    checks = json.loads(file.read_text())["results"][0]["checks"]
    assert [(one["layer"], one["stored"], one["token_format"], one["weight_format"]) for one in checks] == [
        (0, "modelopt nvfp4", "nvfp4", "nvfp4"),
        (1, "plain", "bf16", "bf16"),
    ]
    # Weights that are stored in the layer's format add no error.
    assert [one["bound"] for one in checks] == [error_bound("nvfp4", "bf16"), error_bound("bf16")]


def test_what_is_generated_is_what_the_model_generates(tmp_path: Path, seed: int) -> None:
    """MXFP4 of gpt-oss with bf16 tokens, beside transformers, which dequantizes the files itself."""
    folder, file = save(tmp_path / "model", "gpt_oss", seed, intermediate_size=96), tmp_path / "found.json"
    checkpoint_writers.write_gpt_oss_mxfp4(folder)
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        experts_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    assert run(folder, "--tokens", "7,8,9,10,11", "--new", 6, "--json", file) == 0
    found = json.loads(file.read_text())["results"][0]
    assert found["checks"][0]["stored"] == "mxfp4" and found["checks"][0]["bound"] == error_bound("bf16")
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    made = eager.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    sure = parallel_models.sure_tokens(eager.double(), ids, made.sequences[:, 5:], made.logits)[0]
    assert found["generation"]["tokens"][:sure] == made.sequences[0, 5 : 5 + sure].tolist()


@pytest.mark.parametrize("folds", [False, True], ids=["stored", "folded"])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_a_model_of_four_bits_with_fp8_tokens(name: str, folds: bool, tmp_path: Path, seed: int) -> None:
    """MXFP4 and NVFP4, with the weights as they are stored or folded into FP8: layers are within their bounds, and
    the model generates."""
    sizes = {"intermediate_size": 96} if name == "gpt_oss" else {"hidden_size": 128, "moe_intermediate_size": 128}
    folder, file = save(tmp_path / "model", name, seed, **sizes), tmp_path / "found.json"
    if name == "gpt_oss":
        stored = "mxfp4"
        checkpoint_writers.write_gpt_oss_mxfp4(folder)
    else:
        stored = "nvfp4"
        quant_config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        checkpoint_writers.quantize_experts(folder, checkpoint_writers.modelopt_nvfp4, quantization_config=quant_config)
    formats = ("--token-format", "fp8_block", *(("--weight-format", "fp8_block") if folds else ()))
    assert run(folder, *formats, "--check-tokens", 64, "--new", 3, "--json", file) == 0
    found = json.loads(file.read_text())["results"][0]
    held = "fp8_block" if folds else stored
    assert {(one["token_format"], one["weight_format"]) for one in found["checks"]} == {("fp8_block", held)}
    bound = error_bound("fp8_block", held, exact_weights=not folds)
    assert all(0 < one["error"] <= one["bound"] == bound for one in found["checks"])
    tokens = found["generation"]["tokens"]
    # A random model may choose the end.
    assert len(tokens) == 3 or (
        0 < len(tokens) < 3 and tokens[-1] == json.loads((folder / "config.json").read_text())["eos_token_id"]
    )


@pytest.mark.parametrize(("name", "formats"), [("gpt_oss_120b", ()), ("deepseek_v3_nvfp4", ("--token-format", "bf16"))])
def test_a_layer_is_made_and_checked(
    name: str, formats: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, seed: int
) -> None:
    monkeypatch.setattr(published_layers, "PUBLISHED", SMALL)
    folder, file = tmp_path / "made", tmp_path / "found.json"
    arguments = (folder, "--layer", 0, "--check-tokens", 32, "--seed", seed, *formats)
    make = [name, str(folder), "--seed", str(seed)]
    assert published_layers.main(make) == 0
    assert run(*arguments, "--json", file) == 0
    found = json.loads(file.read_text())
    (check,) = found["results"][0]["checks"]
    assert found["model"] == "made" and found["results"][0]["generation"] is None
    assert check["tokens"] == 32 and 0 < check["error"] <= check["bound"] == error_bound("bf16")
    capsys.readouterr()
    assert published_layers.main(make) == 2
    assert f"FOLDER: expected an empty folder or none, {folder} has files" in capsys.readouterr().err
    # A wrong layer is not inside: the reference reads the files again, which are others now.
    monkeypatch.setattr(check_model.MoELayer, "from_checkpoint", _of_another_seed(name, tmp_path, seed))
    assert run(*arguments) == 1
    assert "OUTSIDE" in capsys.readouterr().out


def _of_another_seed(name: str, tmp_path: Path, seed: int) -> Any:
    """`MoELayer.from_checkpoint` of a folder with other weights."""
    writer, sizes = SMALL[name]
    other, original = tmp_path / "other", check_model.MoELayer.from_checkpoint
    other.mkdir()
    writer(other, sizes, seed + 1)
    return lambda folder, **named: original(other, **named)


def test_the_sizes_are_those_of_packaged_configs() -> None:
    from moe_runtime.config import load_config

    for name, config in (("gpt_oss_120b", "gpt_oss_120b"), ("deepseek_v3_nvfp4", "deepseek_v3")):
        layer, sizes = load_config(config).layer, published_layers.PUBLISHED[name][1]
        found = (layer.hidden_size, layer.intermediate_size, layer.num_experts, layer.top_k)
        assert found == (sizes.hidden, sizes.inner, sizes.experts, sizes.top_k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "3,96"), "--tokens: expected ids below 96, got 96"),
        (("--new", "0"), "--new: expected at least 1, got 0"),
        (("--seed", str(2**63)), "--seed: expected less than 2^63"),
        (("--layer", "0", "--new", "3"), "--new: expected none with --layer"),
        (("--layer", "0", "--tokens", "3"), "--tokens: expected none with --layer"),
        (("--check-tokens", "0"), "--check-tokens: expected at least 1, got 0"),
        (("--layer", "3"), "asked for layer 3"),
        (("--token-format", "nvfp4", "--weight-format", "mxfp8"), "expected nvfp4, got mxfp8 with nvfp4 tokens"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: Any) -> None:
    assert run(save(tmp_path / "model", "mixtral", 0), *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ids", ["", "3,x", "-1", "3,,4"])
def test_wrong_ids(ids: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run("folder", f"--tokens={ids}")
    assert "expected ids such as 3,14,15" in capsys.readouterr().err
