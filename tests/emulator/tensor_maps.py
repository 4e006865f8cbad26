"""Stands for the driver's `cuTensorMapEncodeTiled`: tensor maps that the emulator reads (tensor_maps.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

KINDS = driver.CUtensorMapDataType
SWIZZLES = driver.CUtensorMapSwizzle
ELEMENT_BYTES = {
    KINDS.CU_TENSOR_MAP_DATA_TYPE_UINT8: 1,
    KINDS.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: 2,
    KINDS.CU_TENSOR_MAP_DATA_TYPE_FLOAT32: 4,
}
ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """As `TensorMap` of tensor_maps.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("element_bytes", ctypes.c_uint64),
        ("dimensions", ctypes.c_uint64),
        ("swizzled", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 4),
        ("strides", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint64 * 4),
        ("unused", ctypes.c_uint64),
    )


def _is_valid(element_bytes: int, address: int, sizes: list[int], strides: list[int], box: list[int]) -> bool:
    """What the driver asks of maps without interleaving, as its reference says."""
    return (
        1 <= len(sizes) <= 4
        and len(strides) == len(sizes) - 1
        and len(box) == len(sizes)
        and address % 16 == 0
        and all(0 < size <= 2**32 for size in sizes)
        and all(stride % 16 == 0 and 0 <= stride < 2**40 for stride in strides)
        and all(0 < size <= 256 for size in box)
        and box[0] * element_bytes % 16 == 0
    )


def encode_tiled(
    kind: Any,
    rank: int,
    address: int,
    dims: Sequence[Any],
    strides: Sequence[Any],
    box: Sequence[Any],
    element_strides: Sequence[Any],
    interleave: Any,
    swizzle: Any,
    promotion: Any,
    fill: Any,
) -> tuple[Any, TensorMap | None]:
    """`(status, map)`; only what the kernels use is emulated: no interleaving, the 128-byte swizzle or none, zeros."""
    assert interleave == driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert fill == driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    assert swizzle in (SWIZZLES.CU_TENSOR_MAP_SWIZZLE_128B, SWIZZLES.CU_TENSOR_MAP_SWIZZLE_NONE)
    assert [int(stride) for stride in element_strides] == [1] * rank
    numbers = [[int(value) for value in values] for values in (dims, strides, box)]
    size, swizzled = ELEMENT_BYTES[kind], swizzle == SWIZZLES.CU_TENSOR_MAP_SWIZZLE_128B
    fits = not swizzled or numbers[2][0] * size <= 128
    if rank != len(dims) or not fits or not _is_valid(size, address, *numbers):
        return driver.CUresult.CUDA_ERROR_INVALID_VALUE, None
    memory = (ctypes.c_uint8 * (ctypes.sizeof(TensorMap) + ALIGNMENT))()
    tensor_map = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % ALIGNMENT)
    tensor_map.address, tensor_map.element_bytes = address, size
    tensor_map.dimensions, tensor_map.swizzled = rank, swizzled
    for field, values in zip(("sizes", "strides", "box"), numbers, strict=True):
        for i, value in enumerate(values):
            getattr(tensor_map, field)[i] = value
    return driver.CUresult.CUDA_SUCCESS, tensor_map
