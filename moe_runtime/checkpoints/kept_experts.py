"""Loads the experts of a layer from their copies in host memory, and keeps copies of those that have none."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import moe_runtime
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import SafetensorsFile
from moe_runtime.checkpoints.kept_files import KeptFiles
from moe_runtime.config import MoELayerConfig
from moe_runtime.expert_slots import empty_slots, put, tensors_of
from moe_runtime.experts import Experts

_LOG = logging.getLogger(__name__)

FORM = 2
"""To be raised when the same version of the package gives weights another form."""
THREADS = 4
"""Most threads that copy at the same time on a CPU."""


def load_kept(
    checkpoint: Checkpoint,
    layer: int,
    config: MoELayerConfig,
    ids: Sequence[int],
    none: Experts,
    read: Callable[[Sequence[int]], Experts],
) -> Experts:
    """The experts `ids` of decoder layer `layer`, in order.

    Those that have a copy in host memory (`KeptFiles`) come from there. The others are read, and a copy is kept where
    there is room. The bits are the same.

    Args:
        none: zero experts, in the form that is wanted.
        read: reads experts of the checkpoint in this form.

    Raises what `read` raises, and `ValueError` as `Checkpoint.stamps`.
    """
    began = time.monotonic()
    kept = KeptFiles(_about(checkpoint, layer, config, none), checkpoint.stamps(layer))
    shapes = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors_of(none).items()}
    found = {slot: file for slot, expert in enumerate(ids) if (file := kept.find(expert, shapes)) is not None}
    try:
        whole = empty_slots(none, len(ids)) if found else None
        filled = set() if whole is None else _fill(whole, found, ids, kept)
    finally:
        for file in found.values():
            file.close()
    missing = [slot for slot in range(len(ids)) if slot not in filled]
    if missing or whole is None:
        whole = _with_missing(whole, missing, read([ids[slot] for slot in missing]), ids, kept)
    text = "layer %d: %d of %d experts came from copies in host memory, in %.2f s (%s)"
    _LOG.info(text, layer, len(filled), len(ids), time.monotonic() - began, kept.folder)
    return whole


def _with_missing(
    whole: Experts | None, missing: Sequence[int], made: Experts, ids: Sequence[int], kept: KeptFiles
) -> Experts:
    """`whole` with the experts of `made` in its `missing` slots; `made` itself without it. Copies of these are kept."""
    for number, slot in enumerate(missing):
        tensors = {name: tensor[number] for name, tensor in tensors_of(made).items()}
        if not kept.keep(ids[slot], tensors):
            break
    if kept.full is not None:
        _LOG.warning("not all experts are kept in host memory: %s", kept.full)
    if whole is None:
        return made
    put(whole, missing, made)
    return whole


def _fill(whole: Experts, files: dict[int, SafetensorsFile], ids: Sequence[int], kept: KeptFiles) -> set[int]:
    """Read the files into their slots of `whole`. Returns the slots that have been filled."""
    tensors, staging = tensors_of(whole), _staging(whole)

    def fill(slot: int) -> bool:
        try:
            for name, tensor in tensors.items():
                target = tensor[slot]
                if staging is None:
                    files[slot].read(name, target)
                else:
                    out = staging[: target.numel() * target.element_size()].view(target.dtype).view(target.shape)
                    files[slot].read(name, out)
                    target.copy_(out)
        except (ValueError, OSError) as error:  # Such as one that was cut off since it was opened.
            kept.set_aside(ids[slot], error)
            return False
        return True

    if staging is not None:
        return {slot for slot in files if fill(slot)}
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        return {slot for slot, done in zip(files, pool.map(fill, files), strict=True) if done}


def _staging(whole: Experts) -> torch.Tensor | None:
    """Memory of the host, for any one tensor of an expert, that a GPU copies from at full speed; None on a CPU."""
    if whole.gate_up.device.type == "cpu":
        return None
    most = max(math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors_of(whole).values())
    return torch.empty(most, dtype=torch.uint8, device="cpu", pin_memory=True)


def _about(checkpoint: Checkpoint, layer: int, config: MoELayerConfig, none: Experts) -> dict[str, object]:
    """What the bits of a layer's weights depend on, besides the bytes of the checkpoint."""
    return {
        "package": f"{moe_runtime.__version__}, form {FORM}",
        "checkpoint": str(checkpoint.folder.resolve()),
        "layer": layer,
        "weight_format": config.weight_format,
        "multiplied_format": config.multiplied_format,
        "sizes": [config.num_experts, config.hidden_size, config.intermediate_size],
        "activation": [config.activation.order, config.activation.gated],
        "bias": config.expert_bias,
        "forms": [type(none.gate_up).__name__, type(none.down).__name__],
        "device": none.gate_up.device.type,
    }
