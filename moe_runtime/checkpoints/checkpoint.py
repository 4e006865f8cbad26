"""Reads the MoE layers of checkpoints in HuggingFace folders, in the names and layouts that model makers use.

A folder holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`. The family of
the model (`moe_runtime.checkpoints.families`) and the layout of its experts (`moe_runtime.checkpoints.quantization`)
follow from `config.json`, the layout also from `hf_quant_config.json` if `config.json` says nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moe_runtime.checkpoints.families import family_of, guessed, is_moe_layer, layer_config, num_layers
from moe_runtime.checkpoints.family_table import DEFAULT, GPT_OSS, MAX_LAYERS, MTP_KEYS, Family, text_config
from moe_runtime.checkpoints.files import INDEX_FILE, TensorFiles, read_json
from moe_runtime.checkpoints.layouts import (
    FLOAT_DTYPES,
    PLAIN,
    PLAIN_FUSED,
    PLAIN_FUSED_TRANSPOSED,
    PLAIN_STACKED,
    QUANTIZED_DTYPES,
    SCALE_NAMES,
    SHORT_SCALE_NAME,
    WEIGHT_NAMES,
    WeightLayout,
)
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffer, QuantBuffers, check_buffers
from moe_runtime.checkpoints.quantization import CONFIG_FILE, EXPERTS_KEY, MODELOPT_FILE, Quantization
from moe_runtime.checkpoints.readers import ExpertNames, ExpertReader, dense, layout_of, read_linear, tensors_of
from moe_runtime.checkpoints.stored_experts import StoredExperts
from moe_runtime.checkpoints.unread_keys import check_ignored
from moe_runtime.checkpoints.unread_tensors import names_beside_experts, refuse_bias, refuse_unread
from moe_runtime.config import MAX_EXPERTS, MoELayerConfig, SharedExpertConfig
from moe_runtime.kernels.formats.number_formats import format_named, token_formats_for, weight_format_named
from moe_runtime.kernels.gemm.weights import GateUpOrder
from moe_runtime.support.arguments import check_flag, check_integer, check_kind, check_path, describe

_NUMBER = re.compile("[0-9]{1,4}").fullmatch
"""A number of a decoder layer."""
_STACK_OF_GRANITE = ".block_sparse_moe.input_linear.weight"
"""Stacked experts without a module of their own."""
_NORM = "post_expert_norm.weight"
"""A norm over the output of each expert, in their module."""
_OTHER_STACKS = ("mtp", "draft", "talker")
"""Modules that may have decoder layers of their own, which are not the model's."""

MAX_NAME = 500
"""Most characters of the name of a module with experts; in published checkpoints they have some thirty."""

_HUB_ID = r"\w[\w.-]{0,95}/\w[\w.-]{0,95}"
"""Owner and name of a model of the Hugging Face Hub."""


@dataclass(frozen=True)
class RouterTensors:
    """The router of a layer: weight `[E, H]`, and the biases `[E]` of its family; bf16, fp16 or fp32."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class SharedExpertTensors:
    """A shared expert: `gate_proj` and `up_proj` `[S, H]`, `down_proj` `[H, S]`, and the gate `[1, H]` of gated ones.

    bf16; fp32 if they are stored so or in fp16, or quantized. The gate is as it is stored. `gate_proj` is None where
    the model's experts have none.
    """

    gate_proj: torch.Tensor | None
    up_proj: torch.Tensor
    down_proj: torch.Tensor
    token_gate: torch.Tensor | None = None


class Checkpoint:
    """A checkpoint folder, open for reading; a context manager. Tensors are read only on request.

    Args:
        path: of the folder.
        routers: False for `apply_expert_parallel`, where the model brings its own routers and says what its experts
            compute. Then what `config.json` says of these is not read, and any kind of model will do.
        keep_in_host_memory: whether layers keep a copy of the experts that they load in host memory, and load those of
            which there is one from there (docs/failures.md).
        ignore_keys: keys of the JSON files that have no influence, although they look as if they changed what is
            computed, and names of tensors beside router and shared expert that have none (the last parts will do). They
            are refused otherwise. Each that is ignored is logged.

    Attributes:
        folder: its path.
        config: the parsed `config.json`.
        routers, keep_in_host_memory, ignore_keys: as given.
        family: the family of the model.
        quantization: how its routed experts are quantized.
        files: its tensors.

    Raises:
        ValueError: a JSON file that is missing or broken, a model without experts, an unknown quantization method;
            names file and key. All methods raise it too: for linears of the layer with an unknown quantization (names
            file, key and linear); for a missing tensor or shard, a truncated file, a shape or dtype other than in
            `config.json`, a tensor that the config leaves no use for, or a NaN scale (names file and tensor).

    Warns (`UserWarning`) of a `model_type` that no family has: what its config does not say is guessed (`DEFAULT`).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        routers: bool = True,
        keep_in_host_memory: bool = False,
        ignore_keys: Collection[str] = (),
    ) -> None:
        self.folder = check_path("path", path)
        check_flag("routers", routers)
        check_flag("keep_in_host_memory", keep_in_host_memory)
        self.routers, self.keep_in_host_memory = routers, keep_in_host_memory
        self.ignore_keys = check_ignored(ignore_keys)
        if re.fullmatch(_HUB_ID, str(path)) and not os.path.exists(self.folder):
            raise ValueError(f"path: no folder {path}; a model of the Hugging Face Hub has to be downloaded first")
        self._source = str(self.folder / CONFIG_FILE)
        self.config = read_json(self.folder / CONFIG_FILE)
        self.family: Family = family_of(self.config, source=self._source)
        self._configs: dict[int, MoELayerConfig] = {}
        if routers:
            # Keys that nobody reads are refused before anything is read. Layer 0 stands for all of them.
            router, guess = self._stated(0).router, guessed(self.config, source=self._source)
            if guess is not None:
                warnings.warn(f"{self._source}: {guess} is not known; its router is read as {router!r}", stacklevel=2)
        self.quantization = self._quantization_of(self.config)
        self.files = TensorFiles(self.folder)
        self._stored: dict[int, StoredExperts] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self.files.close()

    def reopened(self) -> Checkpoint:
        """The same folder, opened once more with the same settings."""
        return Checkpoint(
            self.folder,
            routers=self.routers,
            keep_in_host_memory=self.keep_in_host_memory,
            ignore_keys=self.ignore_keys,
        )

    def _quantization_of(self, config: Mapping[str, Any]) -> Quantization:
        stacked = self.family is GPT_OSS
        return Quantization.of(self.folder, config, stacked=stacked, ignore_keys=self.ignore_keys)

    @cached_property
    def rest(self) -> Quantization:
        """How its other linears are quantized, shared experts among them."""
        others = {key: value for key, value in self.config.items() if key != EXPERTS_KEY}
        return self._quantization_of(others)

    def layer_config(self, layer: int, **overrides: Any) -> MoELayerConfig:
        """Decoder layer `layer` as the JSON files describe it. `overrides` set the other fields.

        They must have `max_tokens_per_rank`, which has no default. Formats default to `choose_formats`, and
        `intermediate_gsf` to the smallest one stored for the layer's experts. A whole config
        (`**config.model_dump()`) checks that it fits the checkpoint.

        Warns (`UserWarning`) where the sizes are no multiples of the `unit` of the default formats, 16 for FP8. Tokens
        are then bf16, and so are weights that do not go with them. Also where `intermediate_gsf` is stored, and some
        expert's own is more than 2^14 times as large.

        Raises:
            ValueError: a layer without experts, values that `MoELayerConfig` refuses, or overrides that contradict the
                checkpoint; names file and key.
        """
        self.check_layer(layer)
        sizes, stored = self._stated(layer), self.stored_of(layer)
        try:
            return self._layer_config(layer, overrides)
        except ValueError as error:
            unit, asked = stored.layout.format.unit, [overrides.get(key) for key in ("token_format", "weight_format")]
            if (
                any(name not in (None, "auto") for name in asked)
                or sizes.hidden_size % unit == sizes.intermediate_size % unit == 0
            ):
                raise
            made = self._layer_config(layer, overrides | {"token_format": "bf16"})
            said = f"{stored.key} says {stored.layout.name}"
            warnings.warn(f"{error}; {said}, but tokens are bf16 and weights {made.weight_format}", stacklevel=2)
            return made

    def _layer_config(self, layer: int, overrides: dict[str, Any]) -> MoELayerConfig:
        token, weight = choose_formats(
            self.stored_of(layer), overrides.get("token_format"), overrides.get("weight_format")
        )
        found: dict[str, Any] = {"token_format": token, "weight_format": weight}
        if token == "nvfp4" and overrides.get("intermediate_gsf") is None:
            found["intermediate_gsf"] = self.reader(layer).smallest_input_gsf()
        made = self._read_config(layer, **overrides | found)
        if made.activation.order != (order := self.names(layer).order.value):
            raise ValueError(f"activation.order: {self._source} is read as {order}, got {made.activation.order}")
        return made

    def check_fits(self, config: MoELayerConfig, *, layer: int | None = None, but_for: Collection[str] = ()) -> None:
        """Raise `ValueError` naming the field if `config` contradicts `config.json`, except in the fields `but_for`.

        `layer` is the decoder layer that is meant, where layers differ.

        Formats and `intermediate_gsf` may differ from the checkpoint's.
        """
        check_kind("config", config, MoELayerConfig)
        if layer is not None:
            self.check_layer(layer)
        check_kind("but_for", but_for, (list, tuple, set, frozenset, dict))
        for name in but_for:
            if not isinstance(name, str) or name not in MoELayerConfig.model_fields:
                raise ValueError(f"but_for: expected names of fields, got {describe(name)}")
        but_for = set(but_for) if self.routers else {*but_for} & {"hidden_size", "intermediate_size", "num_experts"}
        fields = {name: value for name, value in config.model_dump().items() if name not in but_for}
        self._read_config(layer, **fields)

    def digests(self, layer: int | None = None) -> dict[str, str]:
        """Hashes that must be equal on ranks that read one checkpoint (`TensorFiles.file_digests`).

        A `layer` adds the hash of its router, if routers are read, which differs between trainings of one model, and
        those of the headers of the files with its experts, which must all be there.
        """
        found = self.files.file_digests((CONFIG_FILE, MODELOPT_FILE))
        if layer is not None:
            self.check_layer(layer)
            if self.routers:
                # Without a look at the rest of its block, which a transformers model may read.
                raw = self._gate_weight(layer).view(torch.uint8).numpy().tobytes()
                found[f"sha256 of {self._gate(layer)}.weight"] = hashlib.sha256(raw).hexdigest()[:16]
            found |= self.files.header_digests(self._expert_tensors(layer))
        return found

    def stamps(self, layer: int) -> dict[str, list[int]]:
        """Size in bytes and time of change in ns of each file that the experts of a layer depend on, by name.

        Raises `ValueError` also for a file that is missing.
        """
        self.check_layer(layer)
        shards = {self.files.shard_of(name) for name in self._expert_tensors(layer)}
        described = (CONFIG_FILE, MODELOPT_FILE, INDEX_FILE)
        found = {}
        for name in (*(name for name in described if (self.folder / name).is_file()), *sorted(shards)):
            try:
                status = (self.folder / name).stat()
            except OSError as error:
                raise ValueError(f"{self.folder / name}: cannot be read: {error.strerror}") from error
            found[name] = [status.st_size, status.st_mtime_ns]
        return found

    def _expert_tensors(self, layer: int) -> list[str]:
        """Names of all tensors of the experts of a layer."""
        names = self.names(layer)
        return [name for name in self.files.names() if name.startswith((f"{names.block}.", *names.stacks))]

    def check_layer(self, layer: int) -> None:
        """Raise `ValueError` unless decoder layer `layer` has routed experts."""
        if not self._is_moe_layer(layer):
            where = self.files.index if self.family is DEFAULT or not self.routers else self._source
            raise ValueError(f"layer: {where} says that layer {layer} has no experts")

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers without those for multi-token prediction, which follow them."""
        return num_layers(self.config, source=self._source, prediction=False)

    def _is_moe_layer(self, layer: int) -> bool:
        """As `is_moe_layer`, but the files say which layers have experts if the family is `DEFAULT`.

        They also say which layers for multi-token prediction there are, if the config does not. Without routers,
        nothing but the files counts.
        """
        if not self.routers:
            return type(layer) is int and layer in self._blocks
        if (
            self._says_no_prediction
            and type(layer) is int
            and layer >= self.num_hidden_layers
            and layer in self._blocks
        ):
            return True
        found = is_moe_layer(self.config, layer, source=self._source)
        return found and (self.family is not DEFAULT or layer in self._blocks)

    @cached_property
    def _says_no_prediction(self) -> bool:
        return all(text_config(self.config)[1].get(key) is None for key in MTP_KEYS)

    @cached_property
    def _stack(self) -> tuple[str, dict[int, str]]:
        """The name of the list of decoder layers, and by layer that of the block whose experts the files hold.

        Raises `ValueError` if experts are in several such lists, or in two blocks of one layer.
        """
        stacks: dict[str, dict[int, str]] = {}
        seen = set()
        for name in self.files.names():
            block, found, _ = name.partition(".experts.")
            if name.endswith(_STACK_OF_GRANITE):
                block, found, _ = name.rpartition(".input_linear")
            if not found or block in seen or len(block) > MAX_NAME:
                continue
            seen.add(block)
            parts = block.split(".")
            place = next((n for n in range(1, len(parts)) if parts[n - 1] == "layers" and _NUMBER(parts[n])), None)
            if place is None or not set(_OTHER_STACKS).isdisjoint(parts):
                continue
            blocks, layer = stacks.setdefault(".".join(parts[:place]), {}), int(parts[place])
            if blocks.setdefault(layer, block) != block:
                got = f"{blocks[layer]} and {block}"
                raise ValueError(f"{self.files.index}: expected experts of layer {layer} in one module, got {got}")
        if len(stacks) > 1:
            raise ValueError(
                f"{self.files.index}: expected experts in one list of layers, got {' and '.join(list(stacks)[:2])}"
            )
        return next(iter(stacks.items()), ("model.layers", {}))

    @property
    def _blocks(self) -> dict[int, str]:
        return self._stack[1]

    def check_sizes(self, layer: int) -> None:
        """Raise `ValueError` naming file and tensor if router or shared expert have other shapes than in `config.json`.

        Also if there is a shared expert, or a gate of one, that `config.json` does not have.
        Reads headers only, so that nobody allocates what a wrong `config.json` asks for.
        """
        sizes = self._stated_with_router(layer)
        hidden, shared = sizes.hidden_size, sizes.shared_expert
        self.files.check(f"{self._gate(layer)}.weight", (sizes.num_experts, hidden), FLOAT_DTYPES)
        if shared is None or not shared.gated:
            self._check_none(self._shared_gate(layer), "no shared expert with a gate")
        if shared is None:
            for weight in WEIGHT_NAMES:
                self._check_none(f"{self._shared_linears(layer)[0]}.{weight}", "no shared expert")
        else:
            linears, inner = self._shared_linears(layer), shared.intermediate_size
            layout = self._shared_layout(linears)
            for name, (rows, columns) in zip(linears, _shapes(linears, inner, hidden), strict=True):
                shape = layout.quant_shape(rows, columns)
                self.files.check(f"{name}.{layout.weight}", shape, layout.quant_dtypes)

    def stored_of(self, layer: int) -> StoredExperts:
        """How the experts of a layer are stored: as the JSON files say, or plain if not quantized."""
        self.check_layer(layer)
        if layer not in self._stored:
            self._stored[layer] = self._find_stored(layer)
        return self._stored[layer]

    def _find_stored(self, layer: int) -> StoredExperts:
        names, experts = self.names(layer), range(self._stated(layer).num_experts)
        stored = self.quantization.stored(names.linears(0))
        if stored.layout.stacked and names.stacks[0] in self.files:
            return StoredExperts(PLAIN_STACKED, "bf16")
        if self.family is not GPT_OSS and names.stacks[0] in self.files:
            return self._find_fused(layer, names, stored)
        linears = [prefix for expert in experts for prefix in names.linears(expert)]
        self._check_left_out(self.quantization, stored, linears)
        layout = layout_of(self.files, stored.layout, linears)
        if layout is PLAIN and stored.layout is not PLAIN:
            quantized = (name for name in linears if self.files.entry(f"{name}.weight").dtype in QUANTIZED_DTYPES)
            if stored.layout.scale is not None and (first := next(quantized, None)) is not None:
                self._check_agrees(stored, first)
            return StoredExperts(layout, "bf16")
        if layout.scale is not None:
            self.quantization.check_block(linears, names.block)
            weight = f"{linears[0]}.{layout.weight}"
            other = weight in self.files and self.files.entry(weight).dtype not in layout.quant_dtypes
            if other or self.quantization.unread is not None:
                self._check_agrees(replace(stored, layout=layout), linears[0])
        return replace(stored, layout=layout)

    def _find_fused(self, layer: int, names: ExpertNames, stored: StoredExperts) -> StoredExperts:
        """How stacked experts are stored.

        Which way round plain ones are is seen from their shapes: those of gate-and-up or those of down differ.
        """
        if stored.layout.is_fp8 and self.files.entry(names.stacks[0]).dtype in stored.layout.quant_dtypes:
            name, unused = f"{stored.layout.name}, fused", ("activation_scale",)
            made = replace(stored.layout, name=name, scale="scale_inv", unused=unused, stacked=True, fused=True)
            return replace(stored, layout=made)
        sizes = self._stated(layer)
        experts, hidden, inner = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
        found = [self.files.entry(stack).shape for stack in names.stacks]
        rows = inner * sizes.activation.num_parts
        transposed = [(experts, hidden, rows), (experts, inner, hidden)]
        plain = [(experts, rows, hidden), (experts, hidden, inner)]
        turned = found == transposed and found != plain
        return StoredExperts(PLAIN_FUSED_TRANSPOSED if turned else PLAIN_FUSED, "bf16")

    def _check_agrees(self, stored: StoredExperts, linear: str) -> None:
        """Raise `ValueError` if a quantized linear has other tensors than the JSON file that was read says."""
        layout = stored.layout
        try:
            for part, dtypes in ((layout.weight, layout.quant_dtypes), (layout.scale, layout.scale_dtypes)):
                name = f"{linear}.{part}"
                self.files.check(name, self.files.entry(name).shape, dtypes)
        except ValueError as error:
            raise ValueError(self.quantization.message(f"{stored.key} says {layout.name}, but {error}")) from None

    def _check_left_out(self, quantization: Quantization, stored: StoredExperts, linears: Sequence[str]) -> None:
        """Raise `ValueError` if linears have scales although the JSON files leave them out of quantization."""
        if stored.layout.scale is not None:
            return
        for name in linears:
            for scale in (f"{name}{end}" for end in (*SCALE_NAMES, SHORT_SCALE_NAME)):
                if scale in self.files:
                    quantization.refuse_plain([linears[0], name], f"{self.files.path_of(scale)} has tensor {scale}")

    def moe_layers(self) -> list[int]:
        """Decoder layers with routed experts, those for multi-token prediction included."""
        layers = num_layers(self.config, source=self._source)
        if self._says_no_prediction:
            layers = max(layers, *(layer + 1 for layer in self._blocks if layer < MAX_LAYERS), 0)
        return [layer for layer in range(layers) if self._is_moe_layer(layer)]

    def has_experts(self, layer: int) -> bool:
        """Whether the checkpoint holds a layer's experts; layers for multi-token prediction may be left out."""
        return self._is_moe_layer(layer) and layer in self._blocks

    def names(self, layer: int) -> ExpertNames:
        """The names of a layer's experts."""
        self.check_layer(layer)
        outer, known, stacks = self._block(layer), self.family.names.projections, self.family.names.stacks
        block = f"{outer}.experts"
        parts = next((parts for parts in known if self._holds_linear(f"{block}.0.{parts[0] or parts[1]}")), known[0])
        gate_up, down = next((pair for pair in stacks if f"{outer}.{pair[0]}" in self.files), stacks[0])
        order = GateUpOrder.INTERLEAVED if self.family.clamped_swiglu else GateUpOrder.GATE_UP
        correction_bias = self._found(layer, self.family.names.correction_biases)
        return ExpertNames(
            block,
            *parts,
            stacks=(f"{outer}.{gate_up}", f"{outer}.{down}"),
            order=order,
            biases=self.family.expert_bias or (not self.routers and f"{outer}.{gate_up}_bias" in self.files),
            others=(correction_bias, f"{block}.{_NORM}"),
            no_biases=f"{self._source} says {self._kind}, whose experts have no biases",
        )

    @property
    def _kind(self) -> str:
        kind = text_config(self.config)[1].get("model_type", self.config.get("model_type"))
        return f"model_type {describe(kind)}"

    def _holds_linear(self, prefix: str) -> bool:
        return any(f"{prefix}.{weight}" in self.files for weight in WEIGHT_NAMES)

    def _found(self, layer: int, names: Sequence[str], end: str = "") -> str:
        """The first of these names within the block of a layer that the files hold with `end`, or else the first."""
        block = self._block(layer)
        return next(
            (name for part in names if f"{(name := f'{block}.{part}')}{end}" in self.files), f"{block}.{names[0]}"
        )

    def reader(self, layer: int) -> ExpertReader:
        """A reader of the experts of a layer."""
        self.check_layer(layer)
        sizes = self._stated(layer)
        layout = self.stored_of(layer).layout
        return ExpertReader(
            self.files, self.names(layer), layout, sizes.hidden_size, sizes.intermediate_size, sizes.num_experts
        )

    def experts(
        self, layer: int, expert_ids: Sequence[int], buffers: QuantBuffers = FRESH, *, biases: bool | None = None
    ) -> Generator[ExpertTensors, None, None]:
        """Experts of a layer one by one, in the order of `expert_ids`, as they are stored.

        `buffers` allocate the quants of gate-and-up and of down (`quant_buffers`). Without routers, `biases` says
        whether the model's experts have biases; None means that they do if the files have stacked ones.

        Raises `ValueError` also for an expert that `config.json` does not have, for unexpected tensors, and for biases
        that are not 0 where experts have none.
        """
        reader = self.reader(layer)
        check_buffers(buffers)
        if biases is not None:
            check_flag("biases", biases)
            if not self.routers:
                reader = reader.with_biases(biases)
        if not isinstance(expert_ids, list | tuple | range):
            raise ValueError(f"expert_ids: expected a list of ids, got {describe(expert_ids)}")
        for expert in expert_ids:
            check_integer("expert_ids", expert, low=None)
            if not 0 <= expert < reader.num_experts:
                raise ValueError(
                    f"expert_ids: {self._source} says {reader.num_experts} experts, asked for expert {describe(expert)}"
                )
        reader.check_names()
        yield from reader.experts(expert_ids, buffers)

    def quant_buffers(self, layer: int, weight_format: str, count: int, device: torch.device) -> QuantBuffers:
        """Allocators for the quants of `count` experts.

        If a layer with `weight_format` on `device` keeps quants as they are stored, they are read into their final
        place.
        """
        self.check_layer(layer)
        check_integer("count", count, 0, MAX_EXPERTS)
        fmt = weight_format_named(weight_format, "weight_format")
        check_kind("device", device, torch.device)
        if device.type != "cpu" or not self.reader(layer).holds(fmt):
            return FRESH
        return QuantBuffer(count), QuantBuffer(count)

    def router(self, layer: int) -> RouterTensors:
        """The router of a layer, with its biases.

        Raises `ValueError` also where routers are not read, and for tensors beside it that may count and nothing reads.
        """
        sizes = self._stated_with_router(layer)
        gate, correction_bias = self._gate(layer), self._found(layer, self.family.names.correction_biases)
        experts, floats = sizes.num_experts, FLOAT_DTYPES
        router = sizes.router
        if not router.correction_bias:
            self._check_none(correction_bias, f"a {router.kind} router without it")
        if not router.bias and f"{gate}.bias" in self.files:
            said = f"{self._source} says a {router.kind} router without it"
            refuse_bias(self.files, f"{gate}.bias", (experts,), said)
        self._refuse_unread(layer, {f"{gate}.weight", f"{gate}.bias", correction_bias})
        return RouterTensors(
            self._gate_weight(layer),
            self.files.read(f"{gate}.bias", (experts,), floats) if router.bias else None,
            self.files.read(correction_bias, (experts,), floats) if router.correction_bias else None,
        )

    def _gate_weight(self, layer: int) -> torch.Tensor:
        sizes = self._stated(layer)
        shape = sizes.num_experts, sizes.hidden_size
        return self.files.read(f"{self._gate(layer)}.weight", shape, FLOAT_DTYPES)

    def _refuse_unread(self, layer: int, used: Collection[str]) -> None:
        """Raise `ValueError` naming file and tensor for one in the block of a layer that may count and nothing reads.

        `used` are the router's. Experts, and a shared expert that the config has, look at their own.
        """
        sizes, names = self._stated(layer), self.names(layer)
        left = names_beside_experts(self.files, self._block(layer), (names.block, *self._shared_modules(layer)))
        # The norm of experts is in their module. Only a transformers model that brings its router brings it too.
        norm = f"{names.block}.{_NORM}"
        left += [norm] if norm in self.files else []
        used = {*used, *names.stacks, *names.stacked_biases()}
        most = max(sizes.hidden_size, sizes.intermediate_size, sizes.num_experts)
        said = f"{self._source} says {self._kind}, of which nothing reads it"
        refuse_unread(self.files, (name for name in left if name not in used), most, said, self.ignore_keys)

    def shared_expert(self, layer: int) -> SharedExpertTensors | None:
        """The shared expert of a layer; None if the model has none. Raises `ValueError` as `router`."""
        sizes = self._stated_with_router(layer)
        shared: SharedExpertConfig | None = sizes.shared_expert
        if shared is None:
            return None
        linears, hidden, inner = self._shared_linears(layer), sizes.hidden_size, shared.intermediate_size
        layout = self._shared_layout(linears)
        used = {name for prefix in linears for name in tensors_of(layout, prefix)} | {self._shared_gate(layer)}
        within = tuple(f"{module}." for module in self._shared_modules(layer))
        left = [name for name in self.files.names() if name.startswith(within)]
        said = f"{self._source} says {self._kind}, of whose shared expert nothing reads it"
        unread = (name for name in left if name not in used)
        refuse_unread(self.files, unread, max(hidden, inner), said, self.ignore_keys)
        shapes = _shapes(linears, inner, hidden)
        *gate, up, down = (
            dense(read_linear(self.files, layout, name, *shape)) for name, shape in zip(linears, shapes, strict=True)
        )
        return SharedExpertTensors(
            gate[0] if gate else None,
            up,
            down,
            self.files.read(self._shared_gate(layer), (1, hidden), FLOAT_DTYPES) if shared.gated else None,
        )

    def _shared_modules(self, layer: int) -> list[str]:
        """The shared expert and its gate, where the config has them."""
        shared = self._stated(layer).shared_expert
        if shared is None:
            return []
        module = self._shared_linears(layer)[0].rpartition(".")[0]
        return [module, self._shared_gate(layer).removesuffix(".weight")] if shared.gated else [module]

    def _shared_gate(self, layer: int) -> str:
        return f"{self._block(layer)}.{self.family.names.shared_gate}.weight"

    def _check_none(self, name: str, said: str) -> None:
        """Raise `ValueError` if the files have a tensor that the config leaves no use for."""
        if name in self.files:
            raise ValueError(f"{self.files.path_of(name)}: tensor {name} is not expected: {self._source} says {said}")

    def _shared_linears(self, layer: int) -> list[str]:
        block, names = self._block(layer), self.family.names
        found = [
            [f"{block}.{shared}.{part}" for part in parts if part is not None]
            for shared in names.shared_experts
            for parts in names.projections
        ]
        return next((linears for linears in found if self._holds_linear(linears[0])), found[0])

    def _shared_layout(self, linears: Sequence[str]) -> WeightLayout:
        """How the linears of a shared expert are stored. Raises `ValueError` if they are not as the JSON files say."""
        stored = self.rest.stored(linears)
        self._check_left_out(self.rest, stored, linears)
        return layout_of(self.files, stored.layout, linears)

    def _gate(self, layer: int) -> str:
        return self._found(layer, self.family.names.routers, ".weight")

    def _block(self, layer: int) -> str:
        stack, blocks = self._stack
        return blocks.get(layer, f"{stack}.{layer}.{self.family.names.block}")

    def _stated_with_router(self, layer: int) -> MoELayerConfig:
        """`_stated` for what reads a router or a shared expert. Raises `ValueError` where these are not read."""
        if not self.routers:
            raise ValueError("routers: expected True where a router or a shared expert is read")
        self.check_layer(layer)
        return self._stated(layer)

    def _stated(self, layer: int) -> MoELayerConfig:
        """All that `config.json` says of a decoder layer; without routers, only the sizes of experts."""
        if layer not in self._configs:
            top_k = {} if self.routers else {"top_k": 1}
            self._configs[layer] = self._read_config(layer, max_tokens_per_rank=1, **top_k)
        return self._configs[layer]

    def _read_config(self, layer: int | None, **fields: Any) -> MoELayerConfig:
        return layer_config(
            self.config,
            source=self._source,
            layer=layer,
            experts_only=not self.routers,
            ignore_keys=self.ignore_keys,
            **fields,
        )


def choose_formats(
    stored: StoredExperts, token_format: str | None = None, weight_format: str | None = None
) -> tuple[str, str]:
    """Formats of tokens and weights, where None or `auto` asks for the checkpoint's if possible.

    Quants and scales that no format has count as `bf16`, to which weights are rounded.

    Weights stay as stored if they go with `token_format`, else they take that format. Tokens take the format that the
    checkpoint is meant for if it goes with `weight_format`, else one that does. Weight-only quantization keeps bf16
    tokens.

    Raises `ValueError` naming the argument that is no format.
    """
    token_format, weight_format = (None if name == "auto" else name for name in (token_format, weight_format))
    if token_format is not None:
        format_named(token_format, "token_format")
    if weight_format is not None:
        weight_format_named(weight_format, "weight_format")
    held = stored.layout.format.name
    if weight_format is None:
        token_format = token_format or stored.token_format
        return token_format, held if token_format in token_formats_for(held) else token_format
    if token_format is None:
        possible = token_formats_for(weight_format)
        token_format = stored.token_format if stored.token_format in possible else (*possible, "bf16")[0]
    return token_format, weight_format


def _shapes(linears: Sequence[str], inner: int, hidden: int) -> list[tuple[int, int]]:
    """Shapes of gate, if there is one, up and down."""
    return [(inner, hidden)] * (len(linears) - 1) + [(hidden, inner)]


def opened(checkpoint: Checkpoint | str | Path) -> AbstractContextManager[Checkpoint]:
    """For a `with` statement: opens and closes the checkpoint at a path; an open checkpoint is left open.

    Raises `ValueError` for anything else, and as `Checkpoint`.
    """
    if isinstance(checkpoint, Checkpoint):
        return nullcontext(checkpoint)
    if not isinstance(checkpoint, (str, Path)):
        raise ValueError(f"checkpoint: expected a Checkpoint or a path, got {type(checkpoint).__name__}")
    return Checkpoint(check_path("checkpoint", checkpoint))
