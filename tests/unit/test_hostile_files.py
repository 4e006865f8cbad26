"""Files with ambiguous keys or impossible values: the error names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_runtime.checkpoints.families import moe_layers
from moe_runtime.checkpoints.files import INDEX_FILE, SafetensorsFile, TensorFiles, read_json
from moe_runtime.config import load_config


@pytest.mark.parametrize("value", ["2001-99-99", "9" * 6000])
def test_a_yaml_value_that_python_cannot_hold_names_the_file(tmp_path: Path, value: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: {value}\n")
    with pytest.raises(ValueError, match=r"run\.yaml: not valid YAML: "):
        load_config(file)


def test_a_yaml_file_of_many_keys_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"key{number}: 1\n" for number in range(7000)))
    with pytest.raises(ValueError, match=r"run\.yaml: expected at most 65536 bytes, got 75890"):
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
    with pytest.raises(ValueError, match=r"num_hidden_layers and .*: expected at most 10000 in all, got 1000000"):
        moe_layers(config)
