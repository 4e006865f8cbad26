"""Which layers of a checkpoint have experts, and how their tensors are named and stored."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.families import family_of, guessed, is_moe_layer, layer_config, num_layers
from moe_runtime.checkpoints.family_table import DEFAULT, GPT_OSS, MAX_LAYERS, MTP_KEYS, Family, text_config
from moe_runtime.checkpoints.files import INDEX_FILE, TensorFiles, read_json, stamp_of
from moe_runtime.checkpoints.layouts import (
    FLOAT_DTYPES,
    PLAIN,
    PLAIN_FUSED,
    PLAIN_FUSED_TRANSPOSED,
    PLAIN_STACKED,
    QUANTIZED_DTYPES,
    SCALE_NAMES,
    SHORT_SCALE_NAME,
    STACKED_SCALE,
    STACKED_UNUSED,
    WEIGHT_NAMES,
    WeightLayout,
)
from moe_runtime.checkpoints.quantization import CONFIG_FILE, EXPERTS_KEY, MODELOPT_FILE, Quantization
from moe_runtime.checkpoints.readers import ExpertNames, layout_of
from moe_runtime.checkpoints.stored_experts import StoredExperts
from moe_runtime.checkpoints.unread_keys import check_ignored
from moe_runtime.config import MoELayerConfig
from moe_runtime.kernels.gemm.weights import GateUpOrder
from moe_runtime.support.arguments import check_flag, check_path, describe

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


class StoredLayers:
    """Names and layouts of a checkpoint's MoE layers. `Checkpoint`, which reads them, has arguments and attributes."""

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
        # Before they are read: what changes meanwhile must not seem to be what was read.
        described = {name: stamp_of(self.folder / name) for name in (CONFIG_FILE, MODELOPT_FILE, INDEX_FILE)}
        self._described = {name: stamp for name, stamp in described.items() if stamp is not None}
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

    def _quantization_of(self, config: Mapping[str, Any]) -> Quantization:
        return Quantization.of(self.folder, config, stacked=self.family is GPT_OSS, ignore_keys=self.ignore_keys)

    @cached_property
    def rest(self) -> Quantization:
        """How its other linears are quantized, shared experts among them."""
        others = {key: value for key, value in self.config.items() if key != EXPERTS_KEY}
        return self._quantization_of(others)

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers without those for multi-token prediction, which follow them."""
        return num_layers(self.config, source=self._source, prediction=False)

    def moe_layers(self) -> list[int]:
        """Decoder layers with routed experts, those for multi-token prediction included."""
        layers = num_layers(self.config, source=self._source)
        if self._no_prediction:
            layers = max(layers, *(layer + 1 for layer in self._blocks if layer < MAX_LAYERS), 0)
        return [layer for layer in range(layers) if self._is_moe_layer(layer)]

    def has_experts(self, layer: int) -> bool:
        """Whether the checkpoint holds a layer's experts; layers for multi-token prediction may be left out."""
        return self._is_moe_layer(layer) and layer in self._blocks

    def check_layer(self, layer: int) -> None:
        """Raise `ValueError` unless decoder layer `layer` has routed experts."""
        if not self._is_moe_layer(layer):
            where = self.files.index if self.family is DEFAULT or not self.routers else self._source
            raise ValueError(f"layer: {where} says that layer {layer} has no experts")

    def _is_moe_layer(self, layer: int) -> bool:
        """As `is_moe_layer`, but the files say which layers have experts if the family is `DEFAULT`.

        They also say which layers for multi-token prediction there are, if the config does not. Without routers,
        nothing but the files counts.
        """
        if not self.routers:
            return type(layer) is int and layer in self._blocks
        if self._no_prediction and type(layer) is int and layer >= self.num_hidden_layers and layer in self._blocks:
            return True
        found = is_moe_layer(self.config, layer, source=self._source)
        return found and (self.family is not DEFAULT or layer in self._blocks)

    @cached_property
    def _no_prediction(self) -> bool:
        """Whether the config says nothing of layers for multi-token prediction."""
        return all(text_config(self.config)[1].get(key) is None for key in MTP_KEYS)

    @property
    def _blocks(self) -> dict[int, str]:
        return self._stack[1]

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

    def _block(self, layer: int) -> str:
        stack, blocks = self._stack
        return blocks.get(layer, f"{stack}.{layer}.{self.family.names.block}")

    def _gate(self, layer: int) -> str:
        return self._found(layer, self.family.names.routers, ".weight")

    def _shared_gate(self, layer: int) -> str:
        return f"{self._block(layer)}.{self.family.names.shared_gate}.weight"

    def _shared_linears(self, layer: int) -> list[str]:
        block, names = self._block(layer), self.family.names
        found = [
            [f"{block}.{shared}.{part}" for part in parts if part is not None]
            for shared in names.shared_experts
            for parts in names.projections
        ]
        return next((linears for linears in found if self._holds_linear(linears[0])), found[0])

    def _shared_modules(self, layer: int) -> list[str]:
        """The shared expert and its gate, where the config has them."""
        shared = self._stated(layer).shared_expert
        if shared is None:
            return []
        module = self._shared_linears(layer)[0].rpartition(".")[0]
        return [module, self._shared_gate(layer).removesuffix(".weight")] if shared.gated else [module]

    def _expert_tensors(self, layer: int) -> list[str]:
        """Names of all tensors of the experts of a layer."""
        names = self.names(layer)
        return [name for name in self.files.names() if name.startswith((f"{names.block}.", *names.stacks))]

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
        if layout is PLAIN and stored.layout.is_fp8 and f"{names.stacks[0]}_{STACKED_SCALE}" in self.files:
            return _with_stacked_scales(stored, "stacked scales", stacked_scales=True)
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

        Which way round they are is seen from their shapes: those of gate-and-up or those of down differ.
        """
        sizes = self._stated(layer)
        experts, hidden, inner = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
        found = [self.files.entry(stack).shape for stack in names.stacks]
        rows = inner * sizes.activation.num_parts
        transposed = [(experts, hidden, rows), (experts, inner, hidden)]
        plain = [(experts, rows, hidden), (experts, hidden, inner)]
        turned = found == transposed and found != plain
        if stored.layout.is_fp8 and self.files.entry(names.stacks[0]).dtype in stored.layout.quant_dtypes:
            how = "fused, transposed" if turned else "fused"
            return _with_stacked_scales(stored, how, stacked=True, fused=True, transposed=turned)
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

    def _shared_weights(self, layer: int, inner: int) -> tuple[WeightLayout, dict[str, tuple[int, int]]]:
        """How a shared expert of size `inner` is stored, and the shape of each of its linears.

        Raises `ValueError` if they are not stored as the JSON files say.
        """
        linears, hidden = self._shared_linears(layer), self._stated(layer).hidden_size
        stored = self.rest.stored(linears)
        self._check_left_out(self.rest, stored, linears)
        shapes = dict.fromkeys(linears, (inner, hidden)) | {linears[-1]: (hidden, inner)}
        return layout_of(self.files, stored.layout, linears), shapes

    def _check_left_out(self, quantization: Quantization, stored: StoredExperts, linears: Sequence[str]) -> None:
        """Raise `ValueError` if linears have scales although the JSON files leave them out of quantization."""
        if stored.layout.scale is not None:
            return
        for name in linears:
            for scale in (f"{name}{end}" for end in (*SCALE_NAMES, SHORT_SCALE_NAME)):
                if scale in self.files:
                    quantization.refuse_plain([linears[0], name], f"{self.files.path_of(scale)} has tensor {scale}")

    def check_sizes(self, layer: int) -> None:
        """Raise `ValueError` naming file and tensor if router or shared expert have other shapes than in `config.json`.

        Also if there is a shared expert, or a gate of one, that `config.json` does not have. Reads headers only, so
        that nobody allocates what a wrong `config.json` asks for.
        """
        sizes = self._stated_with_router(layer)
        shared = sizes.shared_expert
        self.files.check(f"{self._gate(layer)}.weight", (sizes.num_experts, sizes.hidden_size), FLOAT_DTYPES)
        if shared is None or not shared.gated:
            self._check_none(self._shared_gate(layer), "no shared expert with a gate")
        if shared is None:
            for weight in WEIGHT_NAMES:
                self._check_none(f"{self._shared_linears(layer)[0]}.{weight}", "no shared expert")
        else:
            layout, shapes = self._shared_weights(layer, shared.intermediate_size)
            for name, shape in shapes.items():
                self.files.check(f"{name}.{layout.weight}", layout.quant_shape(*shape), layout.quant_dtypes)

    def _check_none(self, name: str, said: str) -> None:
        """Raise `ValueError` if the files have a tensor that the config leaves no use for."""
        if name in self.files:
            raise ValueError(f"{self.files.path_of(name)}: tensor {name} is not expected: {self._source} says {said}")

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


def _with_stacked_scales(stored: StoredExperts, how: str, **ways: Any) -> StoredExperts:
    """FP8 experts of a layer whose scales share a tensor: `how` ends the layout's name, `ways` are fields of it."""
    name = f"{stored.layout.name}, {how}"
    return replace(stored, layout=replace(stored.layout, name=name, scale=STACKED_SCALE, unused=STACKED_UNUSED, **ways))
