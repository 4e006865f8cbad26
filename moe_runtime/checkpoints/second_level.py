"""Second-level scales of linears: one fp32 value each, of its weight or of its inputs."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence

import torch

from moe_runtime.checkpoints.files import TensorFiles
from moe_runtime.checkpoints.layouts import ScaleName
from moe_runtime.kernels.formats.number_formats import MAX_ENCODE_SCALE

SMALLEST_GSF = 2.0**-126
"""The smallest normal number of fp32, which is the smallest encode scale that kernels take."""
MAX_WEIGHT_SCALE = 2.0**116
"""Largest second-level scale of a weight: NVFP4 quants times block scales reach 2688, so more could be infinite."""
MAX_SPREAD = 2.0**14
"""Largest quotient of two scales of inputs in a layer without a warning."""
_COARSE_SPREAD = 448 * 2.0**6
"""From this quotient on, an expert's largest block scale is below the normal numbers of e4m3, from 2^-6 to 448."""
_ZERO_SPREAD = 448 * 2.0**10
"""From this quotient on, it rounds to 0: e4m3 ends at 2^-9, and half of that is rounded down."""


def read_second_level(
    files: TensorFiles, prefix: str, scale: ScaleName, *, may_be_zeros: Callable[[], bool] = lambda: True
) -> torch.Tensor:
    """A second-level scale as it is stored, fp32 `[]`.

    That of values that are all 0, which is 0, or infinite if it divides, is refused unless `may_be_zeros`.
    """
    name = f"{prefix}.{scale.suffix}"
    shape = files.entry(name).shape
    value = files.read(name, shape if shape == (1,) else (), ("F32",)).view(())
    if not (0 < value.item() < math.inf or (value.item() == (math.inf if scale.divides else 0) and may_be_zeros())):
        raise files.wrong(name, f"expected a positive number, got {float(value)}")
    return value


def read_weight_scale(files: TensorFiles, prefix: str, scale: ScaleName) -> torch.Tensor:
    """What the weight of a linear is multiplied by at last, fp32 `[]`: 0 for one that is all 0.

    Denormals are as they are. Raises `ValueError` naming file and tensor if weights could be infinite.
    """
    stored = read_second_level(files, prefix, scale)
    value = reciprocal(stored) if scale.divides else stored
    if value.item() > MAX_WEIGHT_SCALE:
        name = f"{prefix}.{scale.suffix}"
        expected = "at least 2^-116, which weights are divided by" if scale.divides else "at most 2^116"
        raise files.wrong(name, f"expected {expected}, got {stored.item():.6g}")
    return value


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """`1 / x` by one IEEE division, which `number / tensor` need not be."""
    return torch.ones_like(x) / x


def smallest_input_gsf(
    files: TensorFiles,
    block: str,
    linears: Sequence[str],
    scale: ScaleName,
    may_be_zeros: Callable[[int], bool],
) -> float | None:
    """The smallest encode scale that is stored for the inputs of `linears`; None if none is stored.

    Args:
        files: the tensors of the checkpoint.
        block: the module of the linears, in messages.
        linears: one of each expert, in the order of experts.
        scale: their scale.
        may_be_zeros: whether all inputs of an expert's linear may be 0.

    Raises `ValueError` naming file and tensor for a scale whose encode scale no kernel takes, and as `ExpertReader`.

    Warns (`UserWarning`) of scales that lie too far apart for one number format.
    """
    found = {
        f"{prefix}.{scale.suffix}": read_second_level(
            files, prefix, scale, may_be_zeros=functools.partial(may_be_zeros, expert)
        ).item()
        for expert, prefix in enumerate(linears)
        if f"{prefix}.{scale.suffix}" in files
    }
    if not found:
        return None
    reached = {name: value for name, value in found.items() if 0 < value < math.inf}
    if not reached:
        raise ValueError(
            f"{files.index}: expected one of the {scale.suffix} of the down projections in {block} "
            f"to be {'finite' if scale.divides else 'positive'}, got none; give intermediate_gsf"
        )
    if scale.divides:
        reached = {name: value for name, value in reached.items() if value != 1} or reached
    low, high = min(reached, key=reached.__getitem__), max(reached, key=reached.__getitem__)
    name = low if scale.divides else high
    stored = torch.tensor(reached[name], dtype=torch.float32, device="cpu")
    gsf = (stored if scale.divides else reciprocal(stored)).item()
    if gsf < SMALLEST_GSF:
        expected = "at least 2^-126" if scale.divides else "at most 2^126"
        raise files.wrong(name, f"expected {expected}, got {reached[name]:.6g}")
    if reached[high] > MAX_SPREAD * reached[low]:
        _warn(files, block, {name: reached[name] for name in ((high, low) if scale.divides else (low, high))})
    return min(gsf, MAX_ENCODE_SCALE)


def _warn(files: TensorFiles, block: str, extremes: dict[str, float]) -> None:
    """Warn that one scale serves the inputs of two linears, of which the first has the smaller ones."""
    (small, one), (large, other) = extremes.items()
    spread = max(one, other) / min(one, other)
    cost = "blocks below the largest have coarse scales"
    if spread >= _ZERO_SPREAD:
        cost = "all become 0"
    elif spread > _COARSE_SPREAD:
        cost = "all blocks have coarse scales, or become 0"
    warnings.warn(
        f"{files.path_of(small)}: scales of the inputs of down projections in {block} are 2^{math.log2(spread):.1f} "
        f"apart: {small} is {one:.6g}, {large} in {files.path_of(large).name} is {other:.6g}. One scale, that of the "
        f"largest inputs, serves all experts of a layer. Of the inputs of the first one, {cost} "
        f"(docs/accuracy.md). If one of the two is wrong, give intermediate_gsf",
        stacklevel=2,
    )
