"""Refuses tensors of a layer that nothing reads, unless their values change nothing.

A file may hold a bias or a scale that its config has no use for. Leaving it out gives other results than the model's,
and nobody would see it. Biases that are all 0 and scales that are all 1 change nothing: writers of GPTQ store a bias
for every linear. Headers are compared before values are read, so a hostile file costs no more than a bias of each
linear does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence

from moe_runtime.checkpoints.files import DTYPES, TensorFiles
from moe_runtime.checkpoints.unread_keys import log_ignored

_FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_floating_point and name != "F8_E8M0")
"""Dtypes of floats that have a 0."""
_BIAS = re.compile(r"(?:.*_)?bias").fullmatch
_SCALE = re.compile(r"(?:.*_)?scales?").fullmatch
_ROUTING = re.compile("gate|rout|expert|moe|latent|share").search
"""Modules of a decoder layer that belong to its experts if these have no block of their own."""
_SHARED = "shared?_(?:experts?|mlp)"
"""Modules of a decoder layer that belong to its experts even if these have one."""
WITHOUT_INFLUENCE = (
    *("input_scale", "input_global_scale", "input_zero_point", "azp_adj", "activation_scale", "output_scale"),
    "weight_shape",
)
"""Last parts of names of tensors that change no weight: a linear's shape, and scales of its inputs and outputs."""


def names_beside_experts(files: TensorFiles, block: str, without: Sequence[str]) -> list[str]:
    """Tensors of the MoE block of a decoder layer, but for those of the modules `without` in it.

    Those of a shared expert beside the block are among them. Where the block is the whole layer, they are those of
    modules that are called like parts of a router or of experts.
    """
    outer, _, own = block.rpartition(".")
    whole = own.isdecimal()
    first, others = f"{block if whole else outer}.", tuple(f"{name}." for name in without)
    belongs = _ROUTING if whole else re.compile(f"{re.escape(own)}$|{_SHARED}").match
    return [
        name
        for name in files.names()
        if name.startswith(first) and not name.startswith(others) and belongs(name[len(first) :].partition(".")[0])
    ]


def refuse_unread(
    files: TensorFiles, names: Iterable[str], most: int, said: str, ignored: Collection[str] = ()
) -> None:
    """Raise `ValueError` naming file and tensor for the first of `names` that may change what is computed.

    Args:
        files: the tensors of the checkpoint.
        names: tensors that nothing reads.
        most: most numbers of a bias or scale whose values are looked at; one with more is refused.
        said: why none of them is expected, in messages.
        ignored: names, or last parts of names, of those that the caller says have no influence.
    """
    for name in names:
        if any(f".{name}".endswith(f".{part}") for part in ignored):
            log_ignored(str(files.path_of(name)), f"tensor {name}")
            continue
        last = name.rpartition(".")[2]
        if last in WITHOUT_INFLUENCE:
            continue
        neutral = 0 if _BIAS(last) else 1 if _SCALE(last) else None
        if "norm" in name.split(".")[-2]:
            neutral = None  # a norm changes values whatever its scale and bias are
        shape = files.entry(name).shape
        if neutral is None or math.prod(shape) > most:
            raise ValueError(f"{files.path_of(name)}: tensor {name} is not expected: {said}")
        if math.prod(shape) > 0:
            refuse_values(files, name, shape, neutral, said)


def refuse_bias(files: TensorFiles, name: str, shape: tuple[int, ...], said: str, item: int | None = None) -> None:
    """Raise `ValueError` naming file and tensor unless a bias that nothing reads is empty, or all 0 and of this shape.

    Of a stacked one only `item` of its first dimension is read.
    """
    if math.prod(files.entry(name).shape) > 0:
        refuse_values(files, name, shape, 0, said, item)


def refuse_values(
    files: TensorFiles, name: str, shape: tuple[int, ...], neutral: int, said: str, item: int | None = None
) -> None:
    """Raise `ValueError` naming file and tensor unless all numbers of a tensor of this shape are `neutral`."""
    values = files.read(name, shape, _FLOATS, item=item).double().flatten()
    if len(other := values[values != neutral]):
        only = f"only {neutral} everywhere would change nothing, got {other[0].item():.6g}"
        raise ValueError(f"{files.path_of(name)}: tensor {name} is not expected: {said}; {only}")
