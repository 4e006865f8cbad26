"""Converts a checkpoint: its routed experts into another format, everything else copied byte for byte.

Each shard of the source becomes one of the target, under the same name. An expert goes into the shard that its gate
was in. Whatever ends a conversion, the next one goes on behind the last whole shard; `config.json` comes last.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.calibration import Calibration
from moe_runtime.checkpoint import Checkpoint
from moe_runtime.checkpoint_layouts import (
    COMPRESSED_MXFP4,
    COMPRESSED_MXFP8,
    COMPRESSED_NVFP4,
    CONFIG_FILE,
    EXPERTS_KEY,
    FP8_BLOCKS,
    MODELOPT_FILE,
    PLAIN,
    WeightLayout,
)
from moe_runtime.expert_readers import ExpertReader, dense
from moe_runtime.formats import ceil_div
from moe_runtime.kernels.quantize import quantize_rows
from moe_runtime.tensor_files import DTYPES, INDEX_FILE, SINGLE_FILE, SafetensorsFile, TensorEntry
from moe_runtime.tensor_writer import TensorWriter, write_whole
from moe_runtime.weights import ExpertWeights, amax_encode_scale

TARGET_LAYOUTS: dict[str, WeightLayout] = {
    "nvfp4": COMPRESSED_NVFP4,
    "mxfp4": COMPRESSED_MXFP4,
    "mxfp8": COMPRESSED_MXFP8,
    "fp8_block": FP8_BLOCKS,
}
"""What each format is written as: layouts that other programs read too."""

PLAN_KEY = "moe_runtime.conversion"
"""Key of a shard's metadata that tells which conversion wrote it."""

_SCALE_NAMES = (".weight_scale", ".weight_scale_inv")
"""Ends of the names of scales that some quantized linear has in every layout."""
_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""How a `quantization_config` speaks of the attention's cache."""

_COPIED = (".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt")
_Shapes = dict[str, tuple[str, tuple[int, ...]]]


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
    progress: Callable[[Iterator[None], int], Iterator[None]] | None = None,
) -> None:
    """Write `source` to the folder `target` with the routed experts of every layer in `weight_format`.

    `nvfp4` has one second-level scale for gate and up together, as other readers want it. Without `calibrations` it is
    meant for bf16 tokens, and readers here default to these; with them, activations are NVFP4 too, and the scale of
    the intermediate is stored. Where the source's other linears are quantized, its `quantization_config` stays and
    the experts have one of their own (`EXPERTS_KEY`), which this project alone reads.

    Args:
        source: a folder that `Checkpoint` reads, of a family whose experts are not stacked.
        target: made if it is not there. Whole shards that the same conversion has written are left as they are.
        weight_format: `nvfp4`, `mxfp4`, `mxfp8` or `fp8_block`; not what the source holds.
        calibrations: by layer, of every layer with experts; for `nvfp4` only.
        device: where to quantize.
        progress: takes an iterator over the experts (and, once, each shard's other tensors), and how many there are.

    Raises:
        ValueError: as `Checkpoint`, naming file and tensor; another format; sizes that the format cannot block;
            calibrations of other layers; a `target` that holds something else.
    """
    if weight_format not in TARGET_LAYOUTS:
        raise ValueError(f"weight_format: expected one of {', '.join(TARGET_LAYOUTS)}, got {weight_format!r}")
    layout, folder = TARGET_LAYOUTS[weight_format], Path(target)
    with Checkpoint(source) as checkpoint:
        conversion = _Conversion(checkpoint, folder, layout, dict(calibrations or {}), torch.device(device))
        folder.mkdir(parents=True, exist_ok=True)
        shards = conversion.check_target()
        steps = conversion.run(shards)
        total = sum(len(conversion.experts[shard]) + 1 for shard in shards)
        for _ in steps if progress is None else progress(steps, total):
            pass
        conversion.finish()


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
        if checkpoint.stored.layout.stacked:
            raise ValueError(f"source: stacked experts, as of {checkpoint.family.name}, are not converted")
        held = checkpoint.stored.layout.format
        if held is layout.format:
            raise ValueError(f"weight_format: expected another than the source holds, got {held.name}")
        self.shards = checkpoint.files.shards()
        self.experts: dict[str, list[_Expert]] = {shard: [] for shard in self.shards}
        self.replaced: set[str] = set()
        self.layers = self._find_experts()
        if calibrations and layout is not COMPRESSED_NVFP4:
            raise ValueError(f"calibrations: expected none for {layout.format.name}, got {len(calibrations)}")
        if calibrations and sorted(calibrations) != self.layers:
            raise ValueError(f"calibrations: expected those of layers {self.layers}, got {sorted(calibrations)}")
        self.plan = self._digest()

    def _find_experts(self) -> list[int]:
        """Fill `experts` and `replaced`; the layers that have any."""
        checkpoint, layers = self.checkpoint, []
        for layer in checkpoint.moe_layers():
            if layer >= checkpoint.config["num_hidden_layers"] and not checkpoint.has_experts(layer):
                continue
            layers.append(layer)
            reader = checkpoint.reader(layer)
            reader.check_names()
            self.layout.format.check_columns(reader.hidden, "hidden_size")
            self.layout.format.check_columns(reader.inner, "intermediate_size")
            for expert in range(reader.num_experts):
                names = reader.tensors(expert)
                self.replaced.update(names)
                self.experts[checkpoint.files.shard_of(names[0])].append(_Expert(layer, expert, reader))
        return layers

    def _digest(self) -> str:
        scales = {layer: [c.token_gsf, c.intermediate_gsf] for layer, c in sorted(self.calibrations.items())}
        # Two trainings of one model have the same JSON files, and often the same gates.
        source = [self.checkpoint.digests(), self.shards, self.checkpoint.files.beginnings()]
        what = [self.layout.name, source, scales]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def check_target(self) -> list[str]:
        """The shards that are still to be written."""
        left = []
        for shard in self.shards:
            path = self.target / shard
            if not path.exists():
                left.append(shard)
                continue
            file = SafetensorsFile(path)
            file.close()
            if file.metadata.get(PLAN_KEY) != self.plan:
                raise ValueError(f"{path}: expected nothing, or a shard that the same conversion wrote")
        if left == list(self.shards) and (self.target / CONFIG_FILE).exists():
            raise ValueError(f"{self.target / CONFIG_FILE}: expected an empty folder, or one of the same conversion")
        return left

    def run(self, shards: list[str]) -> Iterator[None]:
        """Write the shards, yielding after each expert and after the other tensors of each."""
        files = self.checkpoint.files
        for shard in shards:
            copied = [name for name in self.shards[shard] if name not in self.replaced]
            shapes: _Shapes = {}
            for name in copied:
                entry = files.entry(name)
                if entry.dtype not in DTYPES:
                    raise ValueError(f"{files.path_of(name)}: tensor {name}: {entry.dtype} is no dtype of torch")
                shapes[name] = (entry.dtype, entry.shape)
            for one in self.experts[shard]:
                shapes |= self._shapes(one)
            with TensorWriter(self.target / shard, shapes, {"format": "pt", PLAN_KEY: self.plan}) as writer:
                for name in copied:
                    dtype, shape = shapes[name]
                    writer.write(name, files.read(name, shape, (dtype,)))
                yield
                for one in self.experts[shard]:
                    for name, tensor in self._converted(one).items():
                        writer.write(name, tensor)
                    yield

    def finish(self) -> None:
        """Index and the other files, `config.json` last."""
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
            write_whole(self.target / INDEX_FILE, json.dumps(index, indent=2) + "\n")
        for path in sorted(self.checkpoint.folder.iterdir()):
            made = path.name in (CONFIG_FILE, INDEX_FILE)
            if path.is_file() and path.suffix in _COPIED and not made:
                shutil.copyfile(path, self.target / path.name)
        plain = [name.removesuffix(".weight") for name, entry in entries.items() if _is_plain_linear(name, entry)]
        write_whole(self.target / CONFIG_FILE, json.dumps(self._config(plain), indent=2) + "\n")

    def _config(self, plain: list[str]) -> dict[str, Any]:
        config = dict(self.checkpoint.config)
        names = self.checkpoint.names(self.layers[0]) if self.layers else None
        linears = "|".join((names.gate, names.up, names.down)) if names is not None else ""
        targets = rf"re:.*\.experts\.\d+\.({linears})$"
        experts = quantization_config(self.layout, targets, plain, calibrated=bool(self.calibrations))
        config.pop(EXPERTS_KEY, None)
        return config | {"quantization_config" if self._rest_is_plain() else EXPERTS_KEY: experts}

    def _rest_is_plain(self) -> bool:
        """Whether the source says nothing of other linears, nor of a cache, that would be lost with what it says."""
        checkpoint = self.checkpoint
        said = checkpoint.config.get("quantization_config") or {}
        if (checkpoint.folder / MODELOPT_FILE).is_file() or any(said.get(key) for key in _CACHE_KEYS):
            return False
        others = (name for name in checkpoint.files.names() if name not in self.replaced)
        return not any(name.endswith(_SCALE_NAMES) for name in others)

    def _linears(self, one: _Expert) -> list[tuple[str, int, int]]:
        """`(prefix, N, K)` of gate, up and down."""
        gate, up, down = one.reader.names.linears(one.expert)
        hidden, inner = one.reader.hidden, one.reader.inner
        return [(gate, inner, hidden), (up, inner, hidden), (down, hidden, inner)]

    def _shapes(self, one: _Expert) -> _Shapes:
        fmt, layout, shapes = self.layout.format, self.layout, _Shapes()
        for prefix, rows, columns in self._linears(one):
            shapes[f"{prefix}.{layout.weight}"] = (layout.quant_dtypes[0], (rows, fmt.quant_columns(columns)))
            scale_rows = rows if fmt.swizzled else ceil_div(rows, 128)
            shapes[f"{prefix}.{layout.scale}"] = (layout.scale_dtypes[0], (scale_rows, fmt.scale_columns(columns)))
            if layout.weight_scale is not None:
                shapes[f"{prefix}.{layout.weight_scale.suffix}"] = ("F32", (1,))
            if layout.input_scale is not None and self.calibrations:
                shapes[f"{prefix}.{layout.input_scale.suffix}"] = ("F32", (1,))
        return shapes

    def _converted(self, one: _Expert) -> dict[str, torch.Tensor]:
        """The tensors of `_shapes`, in its order."""
        expert = one.reader.expert(one.expert)
        gate_up, down = (dense(weight).to(self.device) for weight in (expert.gate_up, expert.down))
        linears = self._linears(one)
        tensors: dict[str, torch.Tensor] = {}
        calibration = self.calibrations.get(one.layer)
        for (prefix, _, _), w, shared in zip(linears, (*gate_up.chunk(2), down), (gate_up, gate_up, down), strict=True):
            tensors |= {f"{prefix}.{part}": tensor for part, tensor in quantized_linear(w, shared, self.layout).items()}
            if calibration is not None and self.layout.input_scale is not None:
                gsf = calibration.intermediate_gsf if shared is down else calibration.token_gsf
                tensors[f"{prefix}.{self.layout.input_scale.suffix}"] = torch.tensor([gsf])
        return tensors


def _is_plain_linear(name: str, entry: TensorEntry) -> bool:
    return name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in PLAIN.quant_dtypes


def quantized_linear(w_NK: torch.Tensor, shared: torch.Tensor, layout: WeightLayout) -> dict[str, torch.Tensor]:
    """The tensors of one linear in a layout of `TARGET_LAYOUTS`, by the last part of their names.

    The second-level scale, where there is one, is that of `shared`, of which `w_NK` is a part.
    """
    fmt = layout.format
    assert layout.scale is not None
    if fmt.scale_dtype is torch.float32:
        one = ExpertWeights.quantize(w_NK[None], fmt)
        assert one.scales is not None
        return {layout.weight: one.quants[0], layout.scale: one.scales[0]}
    gsf = amax_encode_scale(shared[None]) if fmt.has_row_scale else None
    rows = quantize_rows(w_NK.contiguous(), fmt, gsf=gsf)
    assert rows.scales_RV is not None
    tensors = {layout.weight: rows.quants_RK, layout.scale: rows.scales_RV}
    return tensors if gsf is None or layout.weight_scale is None else tensors | {layout.weight_scale.suffix: gsf}


def quantization_config(
    layout: WeightLayout, targets: str, others: Sequence[str], *, calibrated: bool
) -> dict[str, Any]:
    """What `config.json` says where linears that `targets` matches are quantized and `others` are not."""
    if layout is FP8_BLOCKS:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(others),
        }
    fmt = layout.format
    weights: dict[str, Any] = {
        "num_bits": fmt.element_bits,
        "type": "float",
        "symmetric": True,
        "group_size": fmt.block,
        "strategy": "tensor_group" if fmt.has_row_scale else "group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if fmt.has_row_scale else "torch.uint8",
    }
    activations = None
    if layout is COMPRESSED_MXFP8:
        activations = weights | {"dynamic": True}
    elif calibrated:
        activations = weights | {"dynamic": "local"}
    group = {"targets": [targets], "weights": weights, "input_activations": activations, "format": layout.name}
    return {
        "quant_method": "compressed-tensors",
        "format": layout.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
