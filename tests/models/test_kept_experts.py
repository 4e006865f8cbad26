"""Experts that are kept in host memory: the bits of the checkpoint, without reading it; what is wrong is not used."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import moe_runtime
from moe_runtime.checkpoints import expert_loader, files, kept_experts, kept_files
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.expert_loader import ExpertLoader
from moe_runtime.checkpoints.files import SafetensorsFile
from moe_runtime.checkpoints.kept_experts import load_kept
from moe_runtime.checkpoints.kept_files import VARIABLE, Room, free_kept, kept_layers
from moe_runtime.comm.errors import MoERuntimeError
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.expert_slots import tensors_of
from moe_runtime.experts import Experts
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import EXPERTS, HIDDEN, TOKENS, TOP_K, config, placements, rank_input
from tests.support.pool import PATIENCE_S, WITHOUT_ONE_S, run_once

pytestmark = pytest.mark.cpu_only

TOKEN_FORMATS = {"bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "mxfp4": "bf16"}
"""A format of tokens for each of weights."""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the copies."""
    folder = tmp_path / "kept"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One of bf16."""
    folder = tmp_path / "checkpoint"
    write_qwen3_moe_checkpoint(folder, config(), seed=3, num_layers=2, num_shards=2)
    return folder


def formats(weights: str) -> dict[str, str]:
    return {"weight_format": weights, "token_format": TOKEN_FORMATS[weights]}


def load(folder: Path, weights: str = "bf16", *, keep: bool = True, tokens: int = TOKENS, layer: int = 0) -> MoELayer:
    context = ExpertParallelContext(device="cpu")
    settings = {**config().model_dump(), "max_tokens_per_rank": tokens, **formats(weights)}
    return MoELayer.from_checkpoint(folder, layer=layer, context=context, keep_in_host_memory=keep, **settings)


def experts_of(layer: MoELayer) -> Experts:
    assert layer.experts is not None
    return layer.experts


def assert_same_experts(found: Experts, expected: Experts) -> None:
    forms = [[(type(w), w.format, w.gate_up) for w in (e.gate_up, e.down)] for e in (found, expected)]
    assert forms[0] == forms[1]
    assert tensors_of(found).keys() == tensors_of(expected).keys()
    for name, tensor in tensors_of(expected).items():
        assert_same_bits(tensors_of(found)[name], tensor, name)


def spoil(folder: Path) -> None:
    """Overwrite the experts of a checkpoint, and leave what can be seen without reading them."""
    for path in folder.glob("*.safetensors"):
        status, file = path.stat(), SafetensorsFile(path)
        with path.open("r+b") as out:
            for name, entry in file.entries.items():
                if ".experts." in name:
                    out.seek(entry.start)
                    out.write(b"\x22" * entry.num_bytes)  # a number in every format
        file.close()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def files_in(kept: Path) -> list[Path]:
    return sorted(path for path in kept.rglob("*") if path.is_file())


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("stored", ["bf16", "as loaded"])
def test_copies_have_the_bits_of_the_checkpoint(
    weights: str, stored: str, checkpoint: Path, tmp_path: Path, kept: Path
) -> None:
    if stored == "as loaded" and weights != "bf16":
        target = tmp_path / "converted"
        convert_checkpoint(checkpoint, target, weights)
        checkpoint = target
    expected = load(checkpoint, weights, keep=False)
    assert not kept.exists()
    assert_same_experts(experts_of(load(checkpoint, weights)), experts_of(expected))
    assert [path.name for path in files_in(kept)] == sorted(f"expert-{e}.safetensors" for e in range(EXPERTS))
    spoil(checkpoint)
    again = load(checkpoint, weights)
    assert_same_experts(experts_of(again), experts_of(expected))
    assert not torch.equal(
        experts_of(load(checkpoint, weights, keep=False)).down.quants.view(torch.uint8),  # type: ignore[union-attr]
        experts_of(expected).down.quants.view(torch.uint8),  # type: ignore[union-attr]
    ), "the checkpoint was spoiled"
    mine = rank_input(0, 0, TOKENS, HIDDEN, EXPERTS, TOP_K)
    assert_same_bits(again(mine.x), expected(mine.x))


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_the_way_through_other_memory(weights: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for GPUs, with memory that is not pinned."""
    expected = experts_of(load(checkpoint, weights))
    asked = []

    def staging(whole: Experts) -> torch.Tensor:
        asked.append(max(tensor[0].nbytes for tensor in tensors_of(whole).values()))
        return torch.full((asked[-1],), 0xFF, dtype=torch.uint8)

    monkeypatch.setattr(kept_experts, "_staging", staging)
    spoil(checkpoint)
    assert_same_experts(experts_of(load(checkpoint, weights)), expected)
    assert len(asked) == 1


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp8", "mxfp4"])
def test_prepacked_weights(weights: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hopper's kernels read them, which a GPU would make. Those of the other form are no copies of these."""
    plain = experts_of(load(checkpoint, weights))
    monkeypatch.setattr(PrepackedWeights, "wanted", staticmethod(lambda w, engine: True))
    expected = experts_of(load(checkpoint, weights, keep=False))
    assert isinstance(expected.gate_up, PrepackedWeights) and not isinstance(plain.gate_up, PrepackedWeights)
    assert_same_experts(experts_of(load(checkpoint, weights)), expected)
    spoil(checkpoint)
    assert_same_experts(experts_of(load(checkpoint, weights)), expected)


def test_more_experts_than_are_prepacked(checkpoint: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have no copy are read in the form of all, which are too many to be prepacked."""
    monkeypatch.setattr(expert_loader, "MAX_PREPACKED_EXPERTS", EXPERTS - 1)
    monkeypatch.setattr(PrepackedWeights, "wanted", staticmethod(lambda w, engine: w.num_experts < EXPERTS))
    expected = experts_of(load(checkpoint, "nvfp4", keep=False))
    assert not isinstance(expected.gate_up, PrepackedWeights)
    assert_same_experts(experts_of(load(checkpoint, "nvfp4")), expected)
    for path in files_in(kept)[::2]:
        path.unlink()
    assert_same_experts(experts_of(load(checkpoint, "nvfp4")), expected)
    assert len(files_in(kept)) == EXPERTS


def test_biases(tmp_path: Path, kept: Path) -> None:
    """Those of gpt-oss, with interleaved gate and up."""
    tiny_models = pytest.importorskip("tests.support.tiny_models")
    folder = tmp_path / "gpt_oss"
    tiny_models.tiny_model("gpt_oss", 1).bfloat16().save_pretrained(folder)

    def loaded(keep: bool) -> Experts:
        context = ExpertParallelContext(device="cpu")
        made = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8, keep_in_host_memory=keep)
        return experts_of(made)

    expected = loaded(False)
    assert "gate_up.bias" in tensors_of(expected)
    assert_same_experts(loaded(True), expected)
    spoil(folder)
    assert_same_experts(loaded(True), expected)


def test_a_model_of_transformers(tmp_path: Path, kept: Path) -> None:
    tiny_models = pytest.importorskip("tests.support.tiny_models")
    folder = tmp_path / "qwen3_moe"
    model = tiny_models.tiny_model("qwen3_moe", 1).bfloat16()
    model.save_pretrained(folder)

    def loaded(keep: bool) -> list[Experts]:
        spread = copy.deepcopy(model)
        with Checkpoint(folder, keep_in_host_memory=keep) as files:
            with moe_runtime.apply_expert_parallel(spread, max_tokens_per_rank=8, experts=files) as owner:
                return [experts_of(layer) for layer in owner.layers]

    expected = loaded(False)
    assert not kept.exists()
    for _ in range(2):
        for found, other in zip(loaded(True), expected, strict=True):
            assert_same_experts(found, other)
        spoil(folder)
    assert len(kept_layers()) == len(expected) > 0


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def exchange(file: Path) -> None:
    """The copy of another layer in its place."""
    other = next(path for path in file.parent.parent.rglob(file.name) if path != file)
    file.write_bytes(other.read_bytes())


def writable_by_others(file: Path) -> None:
    file.chmod(0o666)


def other_shape(file: Path) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for entry in header.values():
        if "shape" in entry:
            entry["shape"] = entry["shape"][::-1]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "broken or cut off"),
        (empty, "broken or cut off"),
        (exchange, "of something else"),
        (writable_by_others, "nobody else to write it"),
        (other_shape, "other tensors than expected"),
    ],
)
def test_a_file_that_cannot_be_used_is_read_again_and_replaced(
    damage: object, message: str, checkpoint: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = experts_of(load(checkpoint))
    load(checkpoint, layer=1)
    file = next(path for path in files_in(kept) if path.name == "expert-5.safetensors" and of_layer(path) == 0)
    before = file.read_bytes()
    damage(file)  # type: ignore[operator]
    with caplog.at_level(logging.INFO):
        assert_same_experts(experts_of(load(checkpoint)), expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message in warning and file.name in warning
    assert f"{EXPERTS - 1} of {EXPERTS} experts came from copies" in caplog.text
    assert file.read_bytes() == before and file.stat().st_mode & 0o777 == 0o600


def of_layer(file: Path) -> int:
    opened = SafetensorsFile(file)
    opened.close()
    return int(json.loads(opened.metadata["moe_runtime kept"])["about"]["layer"])


def test_a_file_that_is_cut_off_while_it_is_read(
    checkpoint: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = experts_of(load(checkpoint))
    find = kept_files.KeptFiles.find

    def find_and_cut(self: kept_files.KeptFiles, expert: int, shapes: kept_files.Shapes) -> SafetensorsFile | None:
        found = find(self, expert, shapes)
        if found is not None and expert == 2:
            truncate(found.path)
        return found

    monkeypatch.setattr(kept_files.KeptFiles, "find", find_and_cut)
    assert_same_experts(experts_of(load(checkpoint)), expected)
    assert "the file ends within it" in caplog.text


def test_a_checkpoint_that_has_changed_is_read_again(
    checkpoint: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(checkpoint)
    count = len(files_in(kept))
    write_qwen3_moe_checkpoint(checkpoint, config(), seed=4, num_layers=2, num_shards=2)
    expected = experts_of(load(checkpoint, keep=False))
    assert_same_experts(experts_of(load(checkpoint)), expected)
    assert caplog.text.count("the checkpoint has changed since") == count == len(files_in(kept))
    spoil(checkpoint)
    assert_same_experts(experts_of(load(checkpoint)), expected)


def test_files_that_are_replaced_while_layers_are_read_leave_no_wrong_copies(checkpoint: Path, tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(new := tmp_path / "new", config(), seed=4, num_layers=2, num_shards=2)
    expected = [experts_of(load(folder, layer=1, keep=False)) for folder in (checkpoint, new)]
    with Checkpoint(checkpoint, keep_in_host_memory=True) as opened:
        opened.files.names(), opened.stamps(1)
        for file in new.iterdir():
            file.replace(checkpoint / file.name)
        layer = MoELayer(config(), ExpertParallelContext(device="cpu"))
        layer.load_checkpoint(opened, 1)
    assert_same_experts(experts_of(layer), expected[0])
    assert_same_experts(experts_of(load(checkpoint, layer=1)), expected[1])


def test_a_copy_that_cannot_be_opened_for_now_stays(
    checkpoint: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, before = experts_of(load(checkpoint)), files_in(kept)
    open_regular = files.open_regular

    def limited(path: Path) -> int:
        if kept in path.parents and path.name > "expert-2":
            raise OSError(errno.EMFILE, "Too many open files")
        return open_regular(path)

    monkeypatch.setattr(files, "open_regular", limited)
    assert_same_experts(experts_of(load(checkpoint)), expected)
    assert files_in(kept) == before and "is not used: " in caplog.text


def test_another_config_has_other_copies(checkpoint: Path, kept: Path) -> None:
    expected = {weights: experts_of(load(checkpoint, weights, keep=False)) for weights in ("bf16", "mxfp8")}
    for weights, experts in expected.items():
        assert_same_experts(experts_of(load(checkpoint, weights)), experts)
    other_layer = experts_of(load(checkpoint, layer=1))
    assert len({path.parent for path in files_in(kept)}) == 3
    spoil(checkpoint)
    for weights, experts in expected.items():
        assert_same_experts(experts_of(load(checkpoint, weights, tokens=2 * TOKENS)), experts)
    assert_same_experts(experts_of(load(checkpoint, layer=1)), other_layer)


def test_experts_in_another_order_come_from_copies_and_only_new_ones_are_read(checkpoint: Path) -> None:
    """As on a rank with another placement."""
    whole = experts_of(load(checkpoint, keep=False))
    layer, read = load(checkpoint, keep=False), list[list[int]]()
    loader = ExpertLoader(layer.config, layer.context, None)
    with Checkpoint(checkpoint, keep_in_host_memory=True) as files:

        def read_some(ids: Sequence[int]) -> Experts:
            read.append(list(ids))
            return loader.make(files.experts(0, list(ids)), len(ids))

        for ids, missing in (([0, 1, 2], [[0, 1, 2]]), ([5, 2, 7, 0], [[5, 7]]), ([7, 5], [])):
            read.clear()
            none = loader.none(len(ids))
            found = load_kept(files, 0, layer.config, ids, none, read_some)
            assert read == missing and found.num_experts == len(ids)
            for name, tensor in tensors_of(found).items():
                for slot, expert in enumerate(ids):
                    assert_same_bits(tensor[slot], tensors_of(whole)[name][expert], f"{name} of {expert}")


def test_what_does_not_fit_is_not_kept(
    checkpoint: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        Room, "of", classmethod(lambda cls, folder: Room(10**9, 0 if len(files_in(kept)) > 2 else 10**9))
    )
    expected = experts_of(load(checkpoint, keep=False))
    for _ in range(2):
        assert_same_experts(experts_of(load(checkpoint)), expected)
        assert len(files_in(kept)) == 3
    assert caplog.text.count("not all experts are kept in host memory") == 2
    assert "1000000000 bytes are free" in caplog.text


def test_room_leaves_a_part_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = os.statvfs_result((4096, 4096, 1000, 500, 400, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    for memory, room in (
        ({"total": 1 << 40, "available": 1 << 40}, Room(400 * 4096, 275 * 4096)),
        ({"total": 8 << 20, "available": (1 << 20) + 7}, Room((1 << 20) + 7, 7)),
        ({"total": 8 << 20, "available": 5}, Room(5, 0)),
    ):
        monkeypatch.setattr(kept_files, "memory_bytes", lambda memory=memory: memory)
        assert Room.of(tmp_path / "not" / "there") == room


def test_folders_of_others_are_not_used(checkpoint: Path, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.mkdir()
    kept.chmod(0o777)
    expected = experts_of(load(checkpoint, keep=False))
    assert_same_experts(experts_of(load(checkpoint)), expected)
    assert not files_in(kept) and "nobody else to write it" in caplog.text
    with pytest.raises(ValueError, match=rf"{VARIABLE}: .*nobody else to write it"):
        kept_layers()


def test_copies_are_not_used_once_others_can_write_their_folder(checkpoint: Path, kept: Path) -> None:
    load(checkpoint)
    assert files_in(kept)
    spoil(checkpoint)
    kept.chmod(0o777)
    assert_same_experts(experts_of(load(checkpoint)), experts_of(load(checkpoint, keep=False)))


def test_a_folder_that_cannot_be_made(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "kept"))
    expected = experts_of(load(checkpoint, keep=False))
    assert_same_experts(experts_of(load(checkpoint)), expected)
    assert "experts are not kept in host memory" in caplog.text


def test_folders_are_for_this_user_alone(checkpoint: Path, kept: Path) -> None:
    load(checkpoint)
    folders = {path.parent for path in files_in(kept)} | {kept}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert {file.stat().st_mode & 0o777 for file in files_in(kept)} == {0o600}


def killed_while_it_keeps(rank: int, world: int, folder: str, kept: str) -> None:
    os.environ[VARIABLE] = kept
    link, linked = os.link, []

    def link_or_die(*arguments: object, **named: object) -> None:
        if len(linked) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        linked.append(arguments)
        link(*arguments, **named)  # type: ignore[arg-type]

    os.link = link_or_die  # type: ignore[assignment]
    load(Path(folder))


def test_a_writer_that_is_killed_leaves_nothing_half(checkpoint: Path, kept: Path) -> None:
    assert run_once(killed_while_it_keeps, 1, str(checkpoint), str(kept))[0].exitcode == -signal.SIGKILL
    assert [path.name for path in files_in(kept)] == [f"expert-{expert}.safetensors" for expert in range(3)]
    expected = experts_of(load(checkpoint, keep=False))
    assert_same_experts(experts_of(load(checkpoint)), expected)
    assert len(files_in(kept)) == EXPERTS


def serve(rank: int, world: int, folder: str, kept: str, dies: bool, placed: bool) -> torch.Tensor:
    """A server's process: it loads and runs; rank 1 may be killed in the second step. Its result of the first."""
    os.environ[VARIABLE] = kept
    placement = placements(world)[1] if placed else None
    with ExpertParallelContext(transport="shared", timeout_s=WITHOUT_ONE_S, startup_timeout_s=PATIENCE_S) as context:
        settings = config("fp8_block", weight_format="fp8_block").model_dump()
        layer = MoELayer.from_checkpoint(
            folder, context=context, placement=placement, keep_in_host_memory=True, **settings
        )
        layer.warm_up()
        mine = rank_input(0, rank, TOKENS, HIDDEN, EXPERTS, TOP_K)
        y = layer(mine.x)
        if dies:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            layer(mine.x)
        return y


@pytest.mark.parametrize("placed", [False, True])
def test_ranks_that_start_again_after_a_death_do_not_read_the_checkpoint(
    placed: bool, checkpoint: Path, kept: Path
) -> None:
    """Nor with another placement, since ranks of a host share the copies."""
    expected = [
        outcome.trace or outcome.result for outcome in run_once(serve, 3, str(checkpoint), str(kept), False, placed)
    ]
    assert free_kept() > 0
    outcomes = run_once(serve, 3, str(checkpoint), str(kept), True, False)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert all(isinstance(outcomes[rank].error, MoERuntimeError) for rank in (0, 2))
    spoil(checkpoint)
    for found, y in zip(run_once(serve, 3, str(checkpoint), str(kept), False, placed), expected, strict=True):
        assert found.error is None, found.trace
        assert_same_bits(found.result, y)


def test_freeing(checkpoint: Path, tmp_path: Path, kept: Path) -> None:
    assert kept_layers() == [] and free_kept() == 0
    other = tmp_path / "other"
    write_qwen3_moe_checkpoint(other, config(), seed=1)
    load(checkpoint), load(checkpoint, layer=1), load(other, "nvfp4")
    sizes = {str(folder): 0 for folder in (checkpoint, other)}
    for layer in kept_layers():
        assert len(layer.files) == EXPERTS and layer.num_bytes == sum(file.stat().st_size for file in layer.files)
        sizes[layer.about["checkpoint"]] += layer.num_bytes
    assert {layer.about["weight_format"] for layer in kept_layers()} == {"bf16", "nvfp4"}
    (stranger := kept / "notes.txt").write_text("of somebody else")
    assert free_kept(checkpoint) == sizes[str(checkpoint)]
    assert [layer.about["checkpoint"] for layer in kept_layers()] == [str(other)]
    files_in(kept)[0].write_bytes(b"broken")
    (new := kept_layers()[0].folder / "notes.txt").write_text("kept meanwhile")
    load(checkpoint)
    assert free_kept() > 0
    assert files_in(kept) == sorted([stranger, new])
    new.unlink(), new.parent.rmdir()
    assert files_in(kept) == [stranger]
    with pytest.raises(ValueError, match="checkpoint: expected a path"):
        free_kept(3)  # type: ignore[arg-type]


def test_the_flag_is_checked(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="keep_in_host_memory: expected True or False"):
        Checkpoint(checkpoint, keep_in_host_memory=1)  # type: ignore[arg-type]


def test_a_yaml_file_asks_for_it(checkpoint: Path, tmp_path: Path, kept: Path) -> None:
    file = tmp_path / "run.yaml"
    sizes = {key: value for key, value in config().flat().items() if key in ("hidden_size", "top_k", "num_experts")}
    sizes |= {"intermediate_size": 128, "max_tokens_per_rank": TOKENS}
    text = json.dumps({"layer": sizes, "checkpoint": {"path": str(checkpoint), "keep_in_host_memory": True}})
    file.write_text(text)  # JSON is YAML
    with MoELayer.from_yaml(file) as layer:
        expected = experts_of(layer)
    assert len(files_in(kept)) == EXPERTS
    spoil(checkpoint)
    with MoELayer.from_yaml(file) as layer:
        assert_same_experts(experts_of(layer), expected)
