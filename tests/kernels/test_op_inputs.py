"""Quantizers and packers of the operations refuse what does not fit with a `ValueError` that names the argument."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from moe_runtime import ops
from tests.support.comparison import assert_same_bits
from tests.support.op_cases import E4M3


def _bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _e4m3(*shape: int) -> torch.Tensor:
    return _bytes(*shape).view(E4M3)


RIGHT: dict[str, dict[str, Any]] = {
    "nvfp4_encode_scale": {"x": torch.zeros(4, 128)},
    "quantize_nvfp4": {"x": torch.zeros(4, 128), "gsf": 1.0},
    "dequantize_nvfp4": {"q": _bytes(4, 64), "scales": _bytes(4, 8), "decode_scale": 1.0},
    "quantize_mxfp8": {"x": torch.zeros(4, 128), "granularity_k": 32},
    "dequantize_mxfp8": {"q": _e4m3(4, 128), "scales": _bytes(4, 4), "granularity_k": 32},
    "quantize_fp8": {"x": torch.zeros(4, 128), "granularity_mn": 1, "dtype": E4M3},
    "dequantize_fp8": {"q": _e4m3(4, 128), "scales": torch.zeros(4, 1), "granularity_mn": 1},
    "pack_dense_128": {"scales_RV": _bytes(8, 4), "group_offsets": [0, 8], "group_scale_offsets": [0], "num_blocks": 1},
    "unpack_dense_128": {
        "blocks": _bytes(2, 1, 32, 4, 4),
        "group_offsets": [0, 8],
        "group_scale_offsets": [0],
        "num_columns": 4,
    },
    "pack_closed_form_128": {"scales_RV": _bytes(8, 4), "m_indptr": [0, 8]},
    "unpack_closed_form_128": {"packed": _bytes(128, 4), "m_indptr": [0, 8], "dtype": torch.uint8},
    "pack_swizzled_weights": {"scales_ENV": _bytes(1, 8, 4)},
    "unpack_swizzled_weights": {"packed": _bytes(1, 128, 4), "num_rows": 8, "dtype": torch.uint8},
    "pack_ue8m0_rows": {"scales_RV": _bytes(8, 4), "m_indptr": [0, 8]},
    "unpack_ue8m0_rows": {"packed": torch.zeros(8, 1, dtype=torch.int32), "m_indptr": [0, 8], "num_columns": 4},
    "pack_ue8m0_weights": {"scales_ENV": _bytes(1, 8, 4)},
    "unpack_ue8m0_weights": {"packed": torch.zeros(1, 8, 1, dtype=torch.int32), "num_columns": 4},
    "pack_scale_major": {"scales": torch.zeros(4, 1), "major": "K"},
}
MAY_BE_EMPTY = {"x of nvfp4_encode_scale", "scales of pack_scale_major"}
OPTIONAL = {"decode_scale", "group_scale_offsets"}


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


WRONG: dict[str, Any] = {
    "None": None,
    "array": np.zeros((4, 128), np.float32),
    "text": "x",
    "floats": [1.0],
    "object": object(),
    "dtype": torch.bfloat16,
    "nested": _nested(),
    "sparse": torch.zeros(4, 128).to_sparse(),
    "complex": torch.zeros(8, 128, dtype=torch.complex64),
    "bool tensor": torch.zeros(8, 4, dtype=torch.bool),
    "meta fp32": torch.empty(4, 128, device="meta"),
    "meta bytes": torch.empty(8, 4, dtype=torch.uint8, device="meta"),
    "True": True,
    "nothing in a row": torch.zeros(8, 0),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", RIGHT)
def test_wrong_inputs_are_refused_by_name(name: str, wrong: str) -> None:
    operation = getattr(ops, name)
    operation(**RIGHT[name])
    for argument in RIGHT[name]:
        if WRONG[wrong] is None and argument in OPTIONAL:
            continue
        if wrong == "nothing in a row" and f"{argument} of {name}" in MAY_BE_EMPTY:
            continue
        with pytest.raises(ValueError, match=rf"^{argument}: .*expected"):
            operation(**(RIGHT[name] | {argument: WRONG[wrong]}))


@pytest.mark.parametrize("value", [10**30, -(10**30), 10**400, 128.0, -1, float("nan")])
def test_numbers_are_bounded(value: float) -> None:
    calls = [
        (ops.quantize_mxfp8, {"x": torch.zeros(4, 128)}, "granularity_k"),
        (ops.quantize_fp8, {"x": torch.zeros(4, 128)}, "granularity_mn"),
        (ops.unpack_swizzled_weights, {"packed": _bytes(1, 128, 4)}, "num_rows|packed"),
        (ops.unpack_ue8m0_weights, {"packed": torch.zeros(1, 8, 1, dtype=torch.int32)}, "num_columns|packed"),
    ]
    for operation, arguments, names in calls:
        with pytest.raises(ValueError, match=f"^({names}): expected"):
            operation(**arguments, **{names.split("|")[0]: value})


def test_scale_numbers_past_int64() -> None:
    x, q, scales = torch.ones(4, 128), _bytes(4, 64) + 0x22, _bytes(4, 8) + 0x38
    for huge in (10**31, 10**400):
        for found, want in zip(ops.quantize_nvfp4(x, huge), ops.quantize_nvfp4(x, 2.0**100), strict=True):
            assert_same_bits(found.view(torch.uint8), want.view(torch.uint8))
    assert (ops.dequantize_nvfp4(q, scales, 10**30) == torch.tensor(1e30)).all()
    for value in (10**40, -(10**400), float("inf")):
        with pytest.raises(ValueError, match=r"^decode_scale: expected a number that fp32 holds, got"):
            ops.dequantize_nvfp4(q, scales, value)
