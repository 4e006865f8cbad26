"""Converts the routed experts of a checkpoint into another format. Other tensors are copied byte for byte.

Each shard of the source becomes one of the target, under the same name. An expert goes into the shard of its gate
projection (or of its stack). An interrupted conversion can be resumed after the last complete shard. `config.json`
is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import moe_runtime
from moe_runtime.checkpoints.calibration import Calibration
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.converted_experts import (
    TARGET_LAYOUTS,
    Shapes,
    converted_parts,
    converted_shapes,
    quantization_config,
    replaced_tensors,
)
from moe_runtime.checkpoints.family_table import text_config
from moe_runtime.checkpoints.files import DTYPES, INDEX_FILE, SINGLE_FILE, SafetensorsFile, TensorEntry, json_bytes
from moe_runtime.checkpoints.layouts import (
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    GPT_OSS_MXFP4,
    PLAIN,
    WeightLayout,
    hold_scales,
)
from moe_runtime.checkpoints.quantization import CONFIG_FILE, EXPERTS_KEY, MODELOPT_FILE, OLD_KEY
from moe_runtime.checkpoints.readers import ExpertReader
from moe_runtime.checkpoints.writer import TensorWriter, sync_folder, write_whole
from moe_runtime.support.arguments import check_path
from moe_runtime.support.folder_lock import locked_folder

PLAN_KEY = "moe_runtime.checkpoints.conversion"
"""Key of a shard's metadata that identifies the conversion that wrote it."""

_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a `quantization_config` that describe the KV cache."""

_COPIED = (".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")


@dataclass(frozen=True)
class _Expert:
    """One expert to convert."""

    layer: int
    expert: int
    reader: ExpertReader


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    weight_format: str,
    *,
    calibrations: Mapping[int, Calibration] | None = None,
    device: torch.device | str = "cpu",
    ignore_keys: Collection[str] = (),
    progress: Callable[[Iterator[None], int], Iterator[None]] | None = None,
) -> None:
    """Write `source` to the folder `target` with the routed experts of every layer in `weight_format`.

    `nvfp4` gets one second-level scale for gate and up together, which other readers expect. Without `calibrations`
    the result is meant for bf16 tokens, the default of readers here. With them, activations are NVFP4 too, and the
    scale of the intermediate is stored. If other linears of the source are quantized, its `quantization_config` stays,
    and the experts get one of their own (`EXPERTS_KEY`). Other programs do not know it and misread the experts.

    Stacked experts, as in gpt-oss, stay stacked in `mxfp4`, in that model's own layout, and become separate linears in
    other formats, as fused ones do in all. Since a layer interleaves the rows of gate and up of gpt-oss, it dequantizes
    128x128 blocks of `fp8_block` and quantizes them again.

    Copied are the other tensors that the index (or the single file) names, and files in the folder that end in
    `.json`, `.jinja`, `.md`, `.model`, `.py`, `.tiktoken` or `.txt`. Tensors that the index does not name, and other
    files and folders, are left out.

    A resumed conversion recognizes its source by the JSON files and by the dtype, shape and first 4096 bytes of each
    tensor, so another copy will do. A change after these bytes goes unnoticed and mixes old and new shards. Another
    version of moe_runtime does not resume it.

    Args:
        source: a folder that `Checkpoint` reads. Nobody may write to it until the conversion ends.
        target: created if missing. Complete shards of the same conversion are left as they are.
        weight_format: `nvfp4`, `mxfp4`, `mxfp8` or `fp8_block`; not the format of a layer of the source.
        calibrations: by layer, for every layer with experts; `nvfp4` only. Layers for multi-token prediction may be
            left out, and are then meant for bf16 tokens.
        device: where to quantize.
        ignore_keys: as `Checkpoint` has them.
        progress: wraps an iterator over the experts and, once per shard, its other tensors; gets their number too.

    Raises:
        ValueError: as `Checkpoint`, and for a NaN or infinite weight (names file and tensor); another format; sizes
            that the format cannot block; calibrations of other layers; a `target` with other contents, or that another
            process writes to.
    """
    if weight_format not in TARGET_LAYOUTS:
        raise ValueError(f"weight_format: expected one of {', '.join(TARGET_LAYOUTS)}, got {weight_format!r}")
    layout, folder = TARGET_LAYOUTS[weight_format], check_path("target", target)
    with Checkpoint(source, ignore_keys=ignore_keys) as checkpoint:
        conversion = _Conversion(checkpoint, folder, layout, dict(calibrations or {}), torch.device(device))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            where = "is" if isinstance(error, FileExistsError) else "lies below"
            raise ValueError(f"target: expected a folder, {folder} {where} a file") from error
        with locked_folder(folder):
            shards = conversion.check_target()
            total = sum(len(conversion.experts[shard]) + 1 for shard in shards)
            # Closed before the lock is released: an error's traceback keeps the generator, and with it a shard, open.
            with closing(conversion.run(shards)) as steps:
                for _ in steps if progress is None else progress(steps, total):
                    pass
            conversion.finish()


def check_calibrated(checkpoint: Checkpoint, weight_format: str, layers: Collection[int]) -> None:
    """Raise `ValueError` unless `convert_checkpoint` takes calibrations of these layers for `weight_format`."""
    if TARGET_LAYOUTS[weight_format] is not COMPRESSED_NVFP4:
        raise ValueError(f"calibrations: expected none for {weight_format}, got {len(layers)}")
    known = _layers_with_experts(checkpoint)
    needed = [layer for layer in known if layer < checkpoint.num_hidden_layers]
    if not set(needed) <= set(layers) <= set(known):
        raise ValueError(f"calibrations: expected those of layers {needed}, got {sorted(layers)}")


def _layers_with_experts(checkpoint: Checkpoint) -> list[int]:
    """Layers for multi-token prediction count only if the checkpoint has their experts."""
    first = checkpoint.num_hidden_layers
    return [n for n in checkpoint.moe_layers() if n < first or checkpoint.has_experts(n)]


class _Conversion:
    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Path,
        layout: WeightLayout,
        calibrations: dict[int, Calibration],
        device: torch.device,
    ) -> None:
        self.checkpoint, self.target, self.layout, self.device = checkpoint, target, layout, device
        self.calibrations = calibrations
        if checkpoint.folder.resolve() == target.resolve():
            raise ValueError(f"target: expected another folder than the source, got {target}")
        self.shards = checkpoint.files.shards()
        readers = self._readers()
        self.layers = list(readers)
        own = [reader.layout.stacked and not reader.layout.fused for reader in readers.values()]
        if layout is COMPRESSED_MXFP4 and own and all(own):
            self.layout = GPT_OSS_MXFP4
        self.experts: dict[str, list[_Expert]] = {shard: [] for shard in self.shards}
        self.replaced: set[str] = set()
        for layer, reader in readers.items():
            for expert in range(reader.num_experts):
                first = reader.tensors(expert)[0]
                self.experts[checkpoint.files.shard_of(first)].append(_Expert(layer, expert, reader))
                self.replaced.update(replaced_tensors(reader, expert, self.layout))
        if calibrations:
            check_calibrated(checkpoint, layout.format.name, calibrations)
        self.plan = self._digest()

    def _readers(self) -> dict[int, ExpertReader]:
        """Readers of the layers with experts, each checked."""
        checkpoint, fmt, readers = self.checkpoint, self.layout.format, {}
        for layer in _layers_with_experts(checkpoint):
            reader = checkpoint.reader(layer)
            reader.check_names()
            if reader.names.gate is None:
                raise ValueError(
                    f"source: {reader.names.block} of {checkpoint.folder} have no gate, expected experts with one"
                )
            if reader.layout.format is fmt:
                raise ValueError(
                    f"weight_format: expected another than the source holds, got {fmt.name}, as of layer {layer}"
                )
            fmt.check_columns(reader.hidden, "hidden_size")
            fmt.check_columns(reader.inner, "intermediate_size")
            readers[layer] = reader
        return readers

    def _digest(self) -> str:
        scales = {layer: [c.token_gsf, c.intermediate_gsf] for layer, c in sorted(self.calibrations.items())}
        # Two trainings of one model have the same JSON files, and often the same routers.
        source = [self.checkpoint.digests(), self.shards, self.checkpoint.files.beginnings()]
        # Other versions may quantize into other bits.
        what = [moe_runtime.__version__, self.layout.name, source, scales]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def check_target(self) -> list[str]:
        """The shards that are not written yet. Raises `ValueError` if the target holds files of anything else."""
        modelopt = [] if (self.checkpoint.folder / MODELOPT_FILE).is_file() else [self.target / MODELOPT_FILE]
        for path in [*modelopt, *sorted(self.target.glob("*.safetensors"))]:
            if path.exists() and path.name not in self.shards:
                raise ValueError(f"{path}: expected an empty folder, or one of the same conversion")
        left = []
        for shard in self.shards:
            path = self.target / shard
            if not path.exists():
                left.append(shard)
                continue
            file = SafetensorsFile(path)
            file.close()
            if file.metadata.get(PLAN_KEY) != self.plan:
                wrote = f"the same conversion wrote, with moe_runtime {moe_runtime.__version__}"
                raise ValueError(f"{path}: expected nothing, or a shard that {wrote}")
        if left != list(self.shards):
            return left
        for path in (self.target / CONFIG_FILE, self.target / INDEX_FILE):
            if path.exists():
                raise ValueError(f"{path}: expected an empty folder, or one of the same conversion")
        for path in self._copied():
            there = self.target / path.name
            if there.exists() and not (there.is_file() and there.read_bytes() == path.read_bytes()):
                raise ValueError(f"{there}: expected nothing, or what the source has: it would be overwritten")
        return left

    def _copied(self) -> list[Path]:
        """The source's files that are copied as they are."""
        made = (CONFIG_FILE, INDEX_FILE)
        paths = sorted(self.checkpoint.folder.iterdir())
        return [path for path in paths if path.is_file() and path.suffix in _COPIED and path.name not in made]

    def run(self, shards: list[str]) -> Generator[None, None, None]:
        """Write the shards. Yields after each expert and after the other tensors of each shard."""
        files = self.checkpoint.files
        for shard in shards:
            copied = [name for name in self.shards[shard] if name not in self.replaced]
            shapes: Shapes = {}
            for name in copied:
                entry = files.entry(name)
                if entry.dtype not in DTYPES:
                    raise files.wrong(name, f"{entry.dtype} is no dtype of torch")
                shapes[name] = (entry.dtype, entry.shape)
            for one in self.experts[shard]:
                calibrated = one.layer in self.calibrations
                shapes |= converted_shapes(one.reader, one.expert, self.layout, calibrated=calibrated)
            with TensorWriter(self.target / shard, shapes, {"format": "pt", PLAN_KEY: self.plan}) as writer:
                for name in copied:
                    dtype, shape = shapes[name]
                    writer.write(name, files.read(name, shape, (dtype,)))
                yield
                for one in self.experts[shard]:
                    calibration = self.calibrations.get(one.layer)
                    for part in converted_parts(one.reader, one.expert, self.layout, calibration, self.device):
                        writer.write(*part)
                    yield

    def finish(self) -> None:
        """Write the index and the other files, `config.json` last."""
        entries: dict[str, TensorEntry] = {}
        weight_map: dict[str, str] = {}
        for shard in self.shards:
            file = SafetensorsFile(self.target / shard)
            file.close()
            entries |= file.entries
            weight_map |= dict.fromkeys(file.entries, shard)
        if list(self.shards) != [SINGLE_FILE]:
            total = sum(entry.num_bytes for entry in entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_whole(self.target / INDEX_FILE, json_bytes(index))
        else:
            # Some readers prefer an index to a single file.
            (self.target / INDEX_FILE).unlink(missing_ok=True)
        for path in self._copied():
            write_whole(self.target / path.name, path.read_bytes())
        plain = [name.removesuffix(".weight") for name, entry in entries.items() if _is_plain_linear(name, entry)]
        write_whole(self.target / CONFIG_FILE, json_bytes(self._config(plain)))
        sync_folder(self.target)

    def _config(self, plain: list[str]) -> dict[str, Any]:
        config = dict(self.checkpoint.config)
        names = self.checkpoint.names(self.layers[0]) if self.layers else None
        linears = "|".join((str(names.gate), names.up, names.down)) if names is not None else ""
        linears = rf"\.experts\.\d+\.({linears})$"
        targets = {rf"re:.*{linears}": bool(self.calibrations)}
        if self.calibrations and (rest := [str(layer) for layer in self.layers if layer not in self.calibrations]):
            where = rf".*\.layers\.({'|'.join(rest)})\."
            targets = {rf"re:(?!{where}).*{linears}": True, rf"re:{where}.*{linears}": False}
        experts = quantization_config(self.layout, targets, plain)
        config.pop(EXPERTS_KEY, None)
        if not self._rest_is_plain():
            return config | {EXPERTS_KEY: experts}
        config.pop(OLD_KEY, None)
        return config | {"quantization_config": experts}

    def _rest_is_plain(self) -> bool:
        """Whether the source's `quantization_config` may go: it describes no other linear, and no KV cache."""
        checkpoint = self.checkpoint
        at, text = text_config(checkpoint.config)
        if at and any(text.get(key) for key in ("quantization_config", OLD_KEY)):
            return False
        quant_config = checkpoint.config.get("quantization_config") or checkpoint.config.get(OLD_KEY) or {}
        if (checkpoint.folder / MODELOPT_FILE).is_file() or any(quant_config.get(key) for key in _CACHE_KEYS):
            return False
        return not hold_scales(name for name in checkpoint.files.names() if name not in self.replaced)


def _is_plain_linear(name: str, entry: TensorEntry) -> bool:
    return name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in PLAIN.quant_dtypes
