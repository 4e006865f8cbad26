"""Reads the MoE layers of checkpoints in HuggingFace folders, in the names and layouts that model makers use.

A folder holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`. The family of
the model (`moe_runtime.checkpoints.families`) and the layout of its experts (`moe_runtime.checkpoints.quantization`)
follow from `config.json`, the layout also from `hf_quant_config.json` if `config.json` says nothing of it.
`moe_runtime.checkpoints.stored_layers` has names and layouts.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.checkpoints.layouts import FLOAT_DTYPES
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffer, QuantBuffers, check_buffers
from moe_runtime.checkpoints.quantization import CONFIG_FILE, MODELOPT_FILE
from moe_runtime.checkpoints.readers import ExpertReader, dense, read_linear, tensors_of
from moe_runtime.checkpoints.stored_experts import StoredExperts
from moe_runtime.checkpoints.stored_layers import StoredLayers
from moe_runtime.checkpoints.unread_tensors import names_beside_experts, refuse_bias, refuse_unread
from moe_runtime.config import MAX_EXPERTS, MoELayerConfig, SharedExpertConfig
from moe_runtime.kernels.formats.number_formats import format_named, token_formats_for, weight_format_named
from moe_runtime.support.arguments import check_flag, check_integer, check_kind, check_path, describe


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


class Checkpoint(StoredLayers):
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

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self.files.close()

    def reopened(self) -> Checkpoint:
        """The same folder, opened once more with the same settings."""
        kept = self.keep_in_host_memory
        return Checkpoint(self.folder, routers=self.routers, keep_in_host_memory=kept, ignore_keys=self.ignore_keys)

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

        `layer` is the decoder layer that is meant, where layers differ. Formats and `intermediate_gsf` may differ from
        the checkpoint's.
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

        They are of the files that this checkpoint reads, also where others have taken their names. Raises `ValueError`
        also for a file that is missing.
        """
        self.check_layer(layer)
        return self._described | self.files.stamps(self._expert_tensors(layer))

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
        sizes, names = self._stated_with_router(layer), self.names(layer)
        gate, correction_bias = self._gate(layer), self._found(layer, self.family.names.correction_biases)
        experts, router = sizes.num_experts, sizes.router
        if not router.correction_bias:
            self._check_none(correction_bias, f"a {router.kind} router without it")
        if not router.bias and f"{gate}.bias" in self.files:
            said = f"{self._source} says a {router.kind} router without it"
            refuse_bias(self.files, f"{gate}.bias", (experts,), said)
        # Experts, and a shared expert that the config has, look at their own.
        left = names_beside_experts(self.files, self._block(layer), (names.block, *self._shared_modules(layer)))
        # The norm of experts is in their module. Only a transformers model that brings its router brings it too.
        left += [name for name in names.others if name in self.files]
        used = {f"{gate}.weight", f"{gate}.bias", correction_bias, *names.stacks, *names.stacked_biases()}
        most = max(sizes.hidden_size, sizes.intermediate_size, experts)
        said = f"{self._source} says {self._kind}, of which nothing reads it"
        refuse_unread(self.files, (name for name in left if name not in used), most, said, self.ignore_keys)
        return RouterTensors(
            self._gate_weight(layer),
            self.files.read(f"{gate}.bias", (experts,), FLOAT_DTYPES) if router.bias else None,
            self.files.read(correction_bias, (experts,), FLOAT_DTYPES) if router.correction_bias else None,
        )

    def _gate_weight(self, layer: int) -> torch.Tensor:
        sizes = self._stated(layer)
        shape = sizes.num_experts, sizes.hidden_size
        return self.files.read(f"{self._gate(layer)}.weight", shape, FLOAT_DTYPES)

    def shared_expert(self, layer: int) -> SharedExpertTensors | None:
        """The shared expert of a layer; None if the model has none. Raises `ValueError` as `router`."""
        sizes = self._stated_with_router(layer)
        shared: SharedExpertConfig | None = sizes.shared_expert
        if shared is None:
            return None
        hidden, inner = sizes.hidden_size, shared.intermediate_size
        layout, shapes = self._shared_weights(layer, inner)
        used = {name for linear in shapes for name in tensors_of(layout, linear)} | {self._shared_gate(layer)}
        within = tuple(f"{module}." for module in self._shared_modules(layer))
        unread = (name for name in self.files.names() if name.startswith(within) and name not in used)
        said = f"{self._source} says {self._kind}, of whose shared expert nothing reads it"
        refuse_unread(self.files, unread, max(hidden, inner), said, self.ignore_keys)
        *gate, up, down = (dense(read_linear(self.files, layout, name, *shape)) for name, shape in shapes.items())
        return SharedExpertTensors(
            gate[0] if gate else None,
            up,
            down,
            self.files.read(self._shared_gate(layer), (1, hidden), FLOAT_DTYPES) if shared.gated else None,
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


def opened(checkpoint: Checkpoint | str | Path) -> AbstractContextManager[Checkpoint]:
    """For a `with` statement: opens and closes the checkpoint at a path; an open checkpoint is left open.

    Raises `ValueError` for anything else, and as `Checkpoint`.
    """
    if isinstance(checkpoint, Checkpoint):
        return nullcontext(checkpoint)
    if not isinstance(checkpoint, (str, Path)):
        raise ValueError(f"checkpoint: expected a Checkpoint or a path, got {type(checkpoint).__name__}")
    return Checkpoint(check_path("checkpoint", checkpoint))
