"""Files with ambiguous keys or impossible values: an error names the file, in short time and little memory."""

from __future__ import annotations

import json
import os
import re
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime import MoELayer
from moe_runtime.checkpoints import files as files_module
from moe_runtime.checkpoints.calibration import calibrate
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import INDEX_FILE, SINGLE_FILE, SafetensorsFile, TensorFiles, read_json
from moe_runtime.config import MoELayerConfig, PlacementConfig, load_config
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.placement.placement import placement_from_config, plan_placement
from tests.support.checkpoint_writers import change_config
from tests.support.published_configs import moe_layers

MAX_SECONDS = 1
MAX_BYTES = 200_000_000

CONFIG = MoELayerConfig(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2, max_tokens_per_rank=8)

Reader = Callable[[Path], object]


def from_checkpoint(path: Any) -> MoELayer:
    return MoELayer.from_checkpoint(path, max_tokens_per_rank=8)


@contextmanager
def refused(message: str, path: Path | None = None) -> Iterator[None]:
    """Expects a `ValueError` with `path` and `message` that costs less than `MAX_SECONDS` of CPU and `MAX_BYTES`."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, limits[1]))
    start = time.process_time()
    try:
        with pytest.raises(ValueError, match=f"(?s){re.escape(str(path or ''))}.*{message}") as caught:
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - start < MAX_SECONDS
    assert len(str(caught.value)) < 2000


def read_placement(path: Path) -> object:
    return placement_from_config(PlacementConfig(file=str(path)), 4, 2)


def read_load(path: Path) -> object:
    return placement_from_config(PlacementConfig(load=str(path)), 4, 2)


def read_index(path: Path) -> object:
    return TensorFiles(path.parent)


READERS: dict[str, Reader] = {
    "config.json": read_json,
    "run.yaml": load_config,
    "a.safetensors": SafetensorsFile,
    "placement.json": read_placement,
    "load.json": read_load,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    pipe, zeros, folder = tmp_path / f"pipe {name}", tmp_path / f"zeros {name}", tmp_path / f"folder {name}"
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    folder.mkdir()
    for path, kind in ((pipe, "a pipe"), (zeros, "a device"), (folder, "a folder")):
        if path is not folder or name != "run.yaml":
            with refused(f"expected a regular file, got {kind}", path):
                READERS[name](path)


@pytest.mark.parametrize("name", READERS)
def test_large_files_are_refused_unread(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b"\0\0\0\0\1\0\0\0")
        file.truncate(10**12)
    with refused("expected (at most|a header of)", path):
        READERS[name](path)
    with refused("expected at most 100000000 bytes, got 1000000000000", path.rename(tmp_path / INDEX_FILE)):
        read_index(tmp_path / INDEX_FILE)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [INDEX_FILE, SINGLE_FILE])
def test_an_index_or_shard_that_is_no_regular_file_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for make, kind in (
        (os.mkfifo, "a pipe"),
        (Path.mkdir, "a folder"),
        (lambda p: p.symlink_to("/dev/zero"), "a device"),
    ):
        make(path)
        with refused(f"expected a regular file, got {kind}", path), TensorFiles(tmp_path) as files:
            files.names()
        path.rmdir() if kind == "a folder" else path.unlink()


def test_an_index_of_too_many_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / INDEX_FILE
    path.write_text('{"weight_map": {' + ",".join(f'"{number}":"a"' for number in range(1_100_000)) + "}}")
    with refused("expected at most 1000000 values, got about 1100001", path):
        TensorFiles(tmp_path)
    path.write_text(json.dumps({"weight_map": {"w": ["x" * 100] * 100_000}}))
    with refused("tensor w: expected the name of a file", path), TensorFiles(tmp_path) as files:
        files.entry("w")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "x" * 10**6},
        {"model_type": "qwen3_moe", "num_hidden_layers": [1] * 10**5},
        {"model_type": "qwen3_moe", "num_hidden_layers": 2000, "mlp_only_layers": list(range(900_000))},
        {"model_type": "qwen3_moe", "num_hidden_layers": 2000, "mlp_only_layers": {"a": [1] * 10**5}},
    ],
)
def test_long_values_of_a_config_are_refused(config: dict[str, Any]) -> None:
    with refused("config: (model_type|num_hidden_layers|mlp_only_layers): expected"):
        moe_layers(config)


def test_a_list_of_all_layers_of_the_largest_model_takes_no_time() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2000, "mlp_only_layers": list(range(0, 4000, 2))}
    start = time.process_time()
    assert moe_layers(config) == list(range(1, 2000, 2))
    assert time.process_time() - start < MAX_SECONDS


@pytest.mark.parametrize("value", ["[],", "{},", '"",', "0,", '"a":'])
def test_json_of_too_many_values_is_refused(value: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    many = value * 2_000_000
    path.write_text(f'{{"a": [{many[:-1]}]}}' if value != '"a":' else "[" * 2_000_000)
    with refused("not valid JSON: expected at most 1000000 values", path):
        read_json(path)


def test_a_header_of_too_many_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    item = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(f'"{number}":{item}' for number in range(1_400_000)) + "}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    del text
    with refused("header: expected at most 500000 tensors, got about 1400001", path):
        SafetensorsFile(path)
    with refused("header: expected at most 500000 tensors, got about 1400001", path), TensorFiles(tmp_path) as files:
        files.names()


@pytest.mark.parametrize(
    "item",
    [
        {"dtype": "U8", "shape": [2**62] * 200_000, "data_offsets": [0, 0]},
        {"dtype": "U8", "shape": [0, 10**4000], "data_offsets": [0, 0]},
        {"dtype": "U8", "shape": "x" * 1_000_000, "data_offsets": [0, 0]},
        ["x" * 1_000_000],
    ],
)
def test_absurd_shapes_of_a_header_are_refused(item: object, tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    text = json.dumps({"w": item})
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with refused("tensor w: expected (dtype, |a )shape and data_offsets", path):
        SafetensorsFile(path)


def test_the_limits_leave_room_for_the_largest_models() -> None:
    """512 experts in each of 90 layers, four tensors a linear, each with a line of its own in every file."""
    tensors = 90 * 512 * 3 * 4
    assert 1.5 * tensors < files_module.MAX_JSON_VALUES
    assert tensors * 130 < files_module.MAX_HEADER_BYTES
    assert tensors / 4 * 100 < files_module.MAX_JSON_BYTES
    assert 60 * 512 * 3 * 4 < files_module.MAX_HEADER_TENSORS


ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
MERGES = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a0: &a0 [x]\n{ALIASES}seed: *a9\n", "aliases repeat too much"),
        (f"a0: &a0 {{k0: 1}}\n{MERGES}layer: *a9\n", "aliases repeat too much"),
        (f"seed: &a {'x' * 9000}\nlayer: [{'*a, ' * 4000}]\n", "aliases repeat too much"),
        ("layer: &a [*a]\n", "an alias within what it means"),
        ("layer: &a {<<: *a}\n", "an alias within what it means"),
        (f"seed: 0x{'f' * 30_000}\n", "seed: .*an integer of 120000 bits"),
        (f"layer: [{'{}, ' * 8000}]\n", "layer: "),
    ],
)
def test_yaml_that_grows_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with refused(message, path):
        load_config(path)


@pytest.mark.parametrize("value", [None, 5, b"x", "", "a\0b", ["x"]])
@pytest.mark.parametrize("call", [load_config, Checkpoint, MoELayer.from_yaml, from_checkpoint])
def test_what_is_no_path_is_named(call: Callable[[Any], object], value: object) -> None:
    with pytest.raises(ValueError, match=r"\Apath: expected a path"):
        call(value)


def test_a_path_that_is_too_long_is_an_error_of_the_caller(tmp_path: Path) -> None:
    for call in (load_config, Checkpoint):
        with pytest.raises(ValueError, match="x" * 300):
            call(tmp_path / ("x" * 300))


def test_the_id_of_a_model_has_to_be_downloaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (Checkpoint, from_checkpoint):
        with pytest.raises(ValueError, match=r"no folder Qwen/Qwen3-30B-A3B; a model .* has to be downloaded first"):
            call("Qwen/Qwen3-30B-A3B")
    Path("Qwen/Qwen3-30B-A3B").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\AQwen/Qwen3-30B-A3B/config\.json: cannot be read: No such file"):
        Checkpoint("Qwen/Qwen3-30B-A3B")


def test_a_packaged_config_in_an_archive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a zip, whose entries have no path of a file."""
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("configs/tiny_cpu.yaml", "layer: {}")
    monkeypatch.setattr(resources, "files", lambda name: zipfile.Path(archive, "configs/"))
    with pytest.raises(ValueError, match=f"{archive}/configs/tiny_cpu.yaml: cannot be read: Not a directory"):
        load_config("tiny_cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=1)
    return tmp_path


def test_arguments_of_a_checkpoint_are_checked(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        for call in (checkpoint.names, checkpoint.has_experts, checkpoint.stored_of):
            for layer in (None, "0", True, 0.0, [0], -1, 1, 10**5000):
                with pytest.raises(ValueError, match=r"\Alayer: "):
                    call(layer)  # type: ignore[arg-type]
        checkpoint.config["mlp_only_layers"] = [0]
        assert not checkpoint.has_experts(0)
        for call in (checkpoint.names, checkpoint.stored_of):
            with pytest.raises(ValueError, match=r"\Alayer: .* says that layer 0 has no experts"):
                call(0)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("config", lambda checkpoint: checkpoint.check_fits({})),
        (
            "but_for",
            lambda checkpoint: checkpoint.check_fits(checkpoint.layer_config(0, max_tokens_per_rank=1), but_for=5),
        ),
        ("but_for", lambda checkpoint: checkpoint.check_fits(CONFIG, but_for=[b"top_k"])),
        ("expert_ids", lambda checkpoint: list(checkpoint.experts(0, 5))),
        ("expert_ids", lambda checkpoint: list(checkpoint.experts(0, b""))),
        ("expert_ids", lambda checkpoint: list(checkpoint.experts(0, torch.tensor(0)))),
        ("expert_ids", lambda checkpoint: list(checkpoint.experts(0, ["0"]))),
        ("expert_ids", lambda checkpoint: list(checkpoint.experts(0, [10**5000]))),
        ("buffers", lambda checkpoint: list(checkpoint.experts(0, [0], (5, 5)))),
        ("layer", lambda checkpoint: checkpoint.quant_buffers("0", "bf16", 1, torch.device("cuda"))),
        ("weight_format", lambda checkpoint: checkpoint.quant_buffers(0, "fp4", 1, torch.device("cpu"))),
        ("count", lambda checkpoint: checkpoint.quant_buffers(0, "bf16", -1, torch.device("cpu"))),
        ("count", lambda checkpoint: checkpoint.quant_buffers(0, "bf16", 10**30, torch.device("cpu"))),
        ("device", lambda checkpoint: checkpoint.quant_buffers(0, "bf16", 1, None)),
    ],
)
def test_the_wrong_argument_of_a_checkpoint_is_named(name: str, call: Callable[[Any], object], folder: Path) -> None:
    with Checkpoint(folder) as checkpoint, pytest.raises(ValueError, match=rf"\A{name}: "):
        call(checkpoint)


@pytest.mark.parametrize("num_experts", [4, 60_000])
def test_sizes_that_the_router_does_not_have_are_refused_unallocated(num_experts: int, folder: Path) -> None:
    change_config(folder, hidden_size=1 << 24, num_experts=num_experts)
    for call in (from_checkpoint, lambda path: calibrate(path, 0, [])):
        with refused(rf"gate\.weight: expected shape \[{num_experts}, 16777216\], got \[4, 64\]", folder / SINGLE_FILE):
            call(folder)
    change_config(folder, hidden_size=10**12)
    with refused("hidden_size: .* got 1000000000000", folder / "config.json"):
        from_checkpoint(folder)


def test_a_size_that_the_shared_expert_does_not_have_is_refused_unallocated(folder: Path) -> None:
    file = folder / SINGLE_FILE
    shared = {f"model.layers.0.mlp.shared_expert.{name}_proj.weight": torch.ones(32, 64) for name in ("gate", "up")}
    save_file(load_file(file) | shared, file)
    change_config(folder, model_type="qwen2_moe", shared_expert_intermediate_size=10**9)
    with refused(r"gate_proj\.weight: expected shape \[1000000000, 64\], got \[32, 64\]", file):
        from_checkpoint(folder)


@pytest.mark.parametrize("part", ["layers.1.", "layers.", "a.", "."])
def test_names_of_many_parts_take_no_time(part: str, folder: Path) -> None:
    file = folder / SINGLE_FILE
    names = (
        f"{part * 1_000_000}.experts.0.w",
        f"{part * 1_000_000}experts.0.w",
        f"layers.1{'0' * 10**6}.a.experts.0.w",
    )
    save_file(load_file(file) | {name: torch.zeros(1) for name in names}, file)
    with Checkpoint(folder) as checkpoint:
        start = time.process_time()
        try:
            assert checkpoint.has_experts(0)
        except ValueError as error:
            assert "expected experts in one list of layers" in str(error) and len(str(error)) < 2000
        assert time.process_time() - start < 2 * MAX_SECONDS


@pytest.mark.parametrize(("ranks", "slots", "experts"), [(30_000, 2, 40_000), (60_000, 1, 3), (16, 4000, 60_000)])
def test_a_placement_on_many_ranks_is_planned_in_short_time(ranks: int, slots: int, experts: int) -> None:
    start = time.process_time()
    plan = plan_placement([1.0, *[0.5] * (experts // 2), *[0.1] * (experts - experts // 2 - 1)], ranks, slots)
    assert time.process_time() - start < MAX_SECONDS
    assert (plan.num_ranks, plan.slots_per_rank) == (ranks, slots)


@pytest.mark.parametrize("value", ["2001-99-99", "9" * 6000])
def test_a_yaml_value_that_python_cannot_hold_names_the_file(tmp_path: Path, value: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: {value}\n")
    with pytest.raises(ValueError, match=r"run\.yaml: not valid YAML: "):
        load_config(file)


def test_a_yaml_file_of_many_keys_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"key{number}: 1\n" for number in range(7000)))
    with pytest.raises(ValueError, match=r"run\.yaml: expected at most 32768 bytes, got 75890"):
        load_config(file)


def test_a_key_twice_in_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON: key 'b' is there twice"):
        read_json(file)


def test_a_tensor_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    item = '"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
    header = f"{{{item}, {item}}}".encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*key 'w' is there twice"):
        SafetensorsFile(file)


def test_a_shard_name_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "w\0"}}))
    with TensorFiles(tmp_path) as files, pytest.raises(ValueError, match="tensor w: expected the name of a file"):
        files.entry("w")


def test_a_model_of_a_million_layers_is_refused() -> None:
    config = {"model_type": "mixtral", "num_hidden_layers": 10**6}
    with pytest.raises(ValueError, match=r"num_hidden_layers and .*: expected at most 2000 in all, got 1000000"):
        moe_layers(config)
