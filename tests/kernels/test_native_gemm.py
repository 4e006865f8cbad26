"""The layer's grouped GEMM for the block-scaled MMA of Blackwell: `mxfp8` rows with `mxfp4` weights.

On a CPU the kernel is interpreted, with the instruction's arithmetic by ml_dtypes; a GPU without the instruction runs
what the compiler makes of it there. That the instruction is compiled is shown in `test_aot.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from moe_runtime.kernels.formats.number_formats import FORMATS, MXFP4, MXFP8, WEIGHT_FORMATS
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.operands import NativeForm
from moe_runtime.kernels.gemm.plan import choose_tile, native_form
from moe_runtime.kernels.gemm.weights import GPT_OSS, ExpertWeights, GateUpOrder, SwiGLU
from moe_runtime.kernels.runtime import INTERPRET
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import UNIT, check_inside, decode, exact_gemm, make_rows, random_weights
from tests.support.gemm_checks import check_quantized, check_untouched, poison_intermediates, poisoned
from tests.support.gemm_plans import choose

OPERANDS = {"e4m3": MXFP8, "e2m1": MXFP4}


def dot_scaled(a: Any, a_s: Any, a_kind: str, w: Any, w_s: Any, w_kind: str, acc: Any) -> Any:
    """`acc + a @ w` as `tl.dot_scaled` documents it: `w` is transposed, its scales are not."""
    x = decode(OPERANDS[a_kind], a.handle.data, a_s.handle.data)
    m = decode(OPERANDS[w_kind], np.ascontiguousarray(w.handle.data.T), w_s.handle.data)
    total = acc.handle.data + (x @ m.T).astype(np.float32)
    return tl.tensor(TensorHandle(total, tl.float32), acc.type)


@pytest.fixture(params=[NativeForm.AS_STORED, NativeForm.WIDENED], ids=lambda form: form.name.lower())
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeForm:
    """The form that the kernel takes, whatever the device."""
    chosen: NativeForm = request.param
    choose(monkeypatch, native_form=lambda *_: chosen)
    if INTERPRET:
        monkeypatch.setattr(tl, "dot_scaled", dot_scaled)
    return chosen


def test_ragged_groups(form: NativeForm, rng: torch.Generator, device: torch.device) -> None:
    """Empty groups, one row, skipped experts, inactive groups, gathered strided rows, spare capacity, partial tiles."""
    k, sizes, ids = 416, [3, 0, 150, 5, 1, 2, 40, 4], [2, 0, 0, -1, 1, 3, 2, 1]
    w = random_weights("mxfp4", 3, 136, k, rng, device)
    w = replace(w, bias=torch.randn(3, 136, generator=rng).to(device))
    a = make_rows(
        "mxfp8", sizes, k, rng, device, num_experts=3, expert_ids=ids, gather=True, spare=9, sparse_scales=True
    )
    a = replace(a, num_active_experts=torch.tensor([7], dtype=torch.int32, device=device))
    out = poisoned(a.capacity + 2, 136, torch.bfloat16, device)
    before = out.clone()
    grouped_gemm(a, w, out=out, engine="triton")
    exact = exact_gemm(a, w, device)
    assert exact.written.sum() == 194
    check_inside(out, exact, UNIT[torch.bfloat16])
    check_untouched(out, before, exact.written)


@pytest.mark.parametrize(
    "activation", [SwiGLU(), SwiGLU(GateUpOrder.UP_GATE, alpha=0.7), GPT_OSS], ids=lambda a: a.order.value
)
def test_swiglu_requantized(
    activation: SwiGLU,
    form: NativeForm,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`I` is no multiple of the tile; gate and up differ in size and bias; what no group owns is not written."""
    poison_intermediates(monkeypatch)
    k, inner = 160, 160
    w = torch.randn(2, 2 * inner, k, generator=rng) * 0.2
    w[:, activation.order.up_rows(2 * inner)] *= 3
    bias = torch.randn(2, 2 * inner, generator=rng)
    weights = ExpertWeights.quantize(w, "mxfp4", gate_up=activation.order, bias=bias, engine="torch").to(device)
    a = make_rows(
        "mxfp8", [5, 0, 3, 140], k, rng, device, num_experts=2, expert_ids=[1, 0, -1, 0], gather=True, spare=2
    )
    hidden = grouped_gemm_swiglu(a, weights, activation, out_format="mxfp8", engine="triton")
    exact = exact_gemm(a, weights, device)
    assert exact.written.sum() == 145
    check_quantized(hidden, exact, activation, 1.0)
    assert (hidden.rows.view(torch.uint8).cpu().numpy()[~exact.written] == 0xA5).all()


def test_rows_do_not_depend_on_neighbours(form: NativeForm, rng: torch.Generator, device: torch.device) -> None:
    """A row alone, and the same row among others, on GPUs at another place of a tile."""
    row = 133 if device.type == "cuda" else 5
    w = random_weights("mxfp4", 2, 136, 256, rng, device)
    x = torch.randn(140, 256, generator=rng)
    many = make_rows("mxfp8", [5, 135], 256, rng, device, num_experts=2, x=x)
    one = make_rows("mxfp8", [0, 1], 256, rng, device, num_experts=2, x=x[row : row + 1])
    together = grouped_gemm(many, w, out_dtype=torch.float32, engine="triton")
    assert_same_bits(grouped_gemm(one, w, out_dtype=torch.float32, engine="triton")[0], together[row])


def test_it_is_for_mxfp4_weights_and_mxfp8_tokens_on_blackwell_alone() -> None:
    forms = {9: NativeForm.NONE, 10: NativeForm.AS_STORED, 12: NativeForm.WIDENED}
    for major, wanted in forms.items():
        for w in WEIGHT_FORMATS.values():
            for a in FORMATS.values():
                assert native_form(a, w, (major, 0)) is (wanted if (a, w) == (MXFP8, MXFP4) else NativeForm.NONE)
    assert native_form(MXFP8, MXFP4, None) is NativeForm.NONE
    rows = [choose_tile(4096, MXFP8, out_block=out, native=form).block_m for out in (0, 32) for form in NativeForm]
    assert rows == [64, 128, 64] * 2
