"""SwiGLU and requantization in the epilogue of the grouped GEMM, against float64, code by code, on both engines."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_runtime.kernels.gemm.activation import activate
from moe_runtime.kernels.gemm.arguments import DEFAULT_INTERMEDIATE_GSF, Intermediate
from moe_runtime.kernels.gemm.grouped_gemm import grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GPT_OSS,
    SQUARED_RELU,
    Activation,
    ExpertWeights,
    GateUpOrder,
    SwiGLU,
)
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import (
    ENGINES,
    PAIRS,
    exact_gemm,
    make_rows,
    random_weights,
    scale_rows,
    swizzled,
)
from tests.support.gemm_checks import (
    check_inf_before_missing_columns,
    check_quantized,
    parts_of,
    poison_intermediates,
)
from tests.support.programs import ROOT
from tests.support.spawner import interpreter

ACTIVATIONS = [
    SwiGLU(),
    SwiGLU(GateUpOrder.UP_GATE, alpha=0.7),
    SwiGLU(GateUpOrder.INTERLEAVED, limit=0.5),
    GPT_OSS,
    GEGLU,
    Activation(GateUpOrder.INTERLEAVED, limit=0.5, function="gelu_tanh"),
    SQUARED_RELU,
    Activation(gate_softcap=2.0, up_softcap=4.0),
    Activation(GateUpOrder.UP_GATE, limit=0.5, limit_on="function"),
    Activation(GateUpOrder.INTERLEAVED, limit=0.5, up_offset=1.0, limit_on="function"),
]
IDS = ["silu", "up_gate", "limit", "gpt_oss", "gelu", "gelu_tanh", "relu2", "softcaps"]
IDS += ["function", "function_interleaved"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("weight", "token"), PAIRS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=IDS)
def test_swiglu_requantized(
    activation: Activation, weight: str, token: str, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    """Fused activation and requantization against float64; `I` is no multiple of the tile where the format allows."""
    k = 128
    inner = {"bf16": 40, "fp8_block": 256, "mxfp8": 160, "nvfp4": 144}[token]
    n = activation.num_parts * inner
    w = torch.randn(2, n, k, generator=rng) * 0.2
    w[:, parts_of(activation, n)[-1]] *= 3
    bias = torch.randn(2, n, generator=rng) if activation.up_offset or not activation.gated else None
    weights = ExpertWeights.quantize(w, weight, gate_up=activation.gate_up or False, bias=bias, engine="torch")
    weights = weights.to(device)
    a = make_rows(token, [5, 0, 3, 66], k, rng, device, num_experts=2, expert_ids=[1, 0, -1, 0], gather=True, spare=2)
    gsf = 11.0 if token == "nvfp4" else None
    hidden = grouped_gemm_swiglu(a, weights, activation, out_format=token, out_gsf=gsf, engine=engine)
    assert hidden.num_columns == inner and hidden.capacity == a.capacity and hidden.row_index is None
    exact = exact_gemm(a, weights, device)
    assert exact.written.sum() == 71
    check_quantized(hidden, exact, activation, gsf or 1.0)
    if token == "nvfp4":
        assert hidden.row_scale is not None
        assert_same_bits(hidden.row_scale, torch.full((a.capacity,), np.float32(1) / np.float32(11)), "row_scale")
        huge = torch.tensor([2.0**120], device=device)
        clamped = grouped_gemm_swiglu(a, weights, activation, out_format=token, out_gsf=huge, engine=engine)
        assert clamped.row_scale is not None and (clamped.row_scale == 2.0**-100).all()
        check_quantized(clamped, exact, activation, 2.0**100)
        default = grouped_gemm_swiglu(a, weights, activation, out_format=token, engine=engine)
        check_quantized(default, exact, activation, DEFAULT_INTERMEDIATE_GSF)


SHORT_BLOCKS = [
    pytest.param(activation, *sizes, apart, id=f"{name}-{sizes[0]}-{sizes[1]}-{'apart' if apart else 'together'}")
    for i, (activation, name) in enumerate(zip([*ACTIVATIONS[:4], SQUARED_RELU], [*IDS[:4], "relu2"], strict=True))
    for j, sizes in enumerate([(288, 320), (192, 352), (320, 192), (16, 96)])
    for apart in [(i + j) % 2 == 0 or not activation.gated]
]
"""Each activation with each K and `I`, and each of both with blocks apart and together: where blocks begin follows from
the sizes and from `apart`, before the activation."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("activation", "k", "inner", "apart"), SHORT_BLOCKS)
def test_swiglu_in_short_fp8_blocks(
    activation: Activation,
    k: int,
    inner: int,
    apart: bool,
    engine: str,
    rng: torch.Generator,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights that do not say that they are gate and up have blocks that run on from one to the other.

    The last columns are much smaller or larger than those before: the scale of the short block is theirs alone.
    """
    poison_intermediates(monkeypatch)
    n, tail = activation.num_parts * inner, inner // 128 * 128
    for factor in (1e-4, 1e4):
        w = torch.randn(2, n, k, generator=rng) * 0.2
        for rows in parts_of(activation, n):
            w[:, rows][:, tail:] *= factor
        bias = torch.randn(2, n, generator=rng) * 1e-4 if activation.up_offset else None
        order = activation.gate_up if apart else None
        weights = ExpertWeights.quantize(w, "fp8_block", gate_up=order or False, bias=bias, engine="torch").to(device)
        sizes, ids = [5, 0, 3, 66], [1, 0, -1, 0]
        a = make_rows("fp8_block", sizes, k, rng, device, num_experts=2, expert_ids=ids, gather=True, spare=2)
        hidden = grouped_gemm_swiglu(a, weights, activation, out_format="fp8_block", engine=engine)
        assert hidden.num_columns == inner and hidden.scales is not None
        assert hidden.scales.shape == (a.capacity, inner // 128 + 1)
        exact = exact_gemm(a, weights, device)
        check_quantized(hidden, exact, activation, 1.0)
        if engine == "triton":
            untouched = ~torch.from_numpy(exact.written)
            assert (hidden.rows.view(torch.uint8).cpu()[untouched] == 0xA5).all()
            assert (hidden.scales.view(torch.uint8).cpu()[untouched] == 0xA5).all()


@pytest.mark.parametrize("activation", [SwiGLU(), SQUARED_RELU], ids=["silu", "relu2"])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_nothing_but_the_result_is_written(
    name: str, activation: Activation, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel leaves padding of scales, skipped groups and gaps as they were; tiles reach past the `I` columns."""
    poison_intermediates(monkeypatch)
    inner = {"fp8_block": 384, "mxfp8": 160, "nvfp4": 144}[name]
    w = random_weights(name, 2, activation.num_parts * inner, 128, rng, device, gate_up=activation.gate_up or False)
    sizes, ids = [130, 3, 0, 5], [0, -1, 1, 1]
    a = make_rows(name, sizes, 128, rng, device, num_experts=2, expert_ids=ids, spare=2, sparse_scales=True)
    hidden = grouped_gemm_swiglu(a, w, activation, out_format=name, engine="triton")
    written = exact_gemm(a, w, device).written
    assert hidden.scales is not None
    assert (hidden.rows.view(torch.uint8).cpu().numpy()[~written] == 0xA5).all()
    raw = hidden.scales.view(torch.uint8).cpu().numpy().reshape(-1).copy()
    columns = hidden.format.scale_columns(inner)
    if hidden.format.swizzled:
        places = swizzled(scale_rows(hidden)[written], columns)
        raw[places] = 0xA5
    else:
        raw.reshape(hidden.capacity, -1)[written] = 0xA5
    assert (raw == 0xA5).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("out", ["mxfp8", "nvfp4"])
def test_swizzled_result_of_unswizzled_rows(out: str, engine: str, rng: torch.Generator, device: torch.device) -> None:
    """Rows without scale offsets: the result gets those of `dense_128`."""
    w = random_weights("bf16", 3, 64, 64, rng, device, gate_up=True)
    a = make_rows("bf16", [100, 20, 30], 64, rng, device, num_experts=3)
    hidden = grouped_gemm_swiglu(a, w, SwiGLU(), out_format=out, engine=engine)
    assert hidden.group_scale_offsets is not None and hidden.group_scale_offsets.tolist() == [0, 1, 2]
    check_quantized(hidden, exact_gemm(a, w, device), SwiGLU(), DEFAULT_INTERMEDIATE_GSF)


def test_gpt_oss_activation_is_that_of_transformers(rng: torch.Generator) -> None:
    model = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    x = torch.randn(64, 128, generator=rng, dtype=torch.float64) * 8
    want = model.GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), x)
    torch.testing.assert_close(activate(x, GPT_OSS), want, rtol=1e-14, atol=1e-14)
    want = torch.nn.functional.silu(x[:, ::2]) * x[:, 1::2]
    torch.testing.assert_close(activate(x, SwiGLU(GateUpOrder.INTERLEAVED)), want, rtol=1e-14, atol=1e-14)


def test_the_first_exp_of_a_process_is_made_on_one_thread() -> None:
    program = (
        "import torch\n"
        "real, sizes = torch.exp, []\n"
        "torch.exp = lambda x: (sizes.append(x.numel()), real(x))[1]\n"
        "import moe_runtime.kernels.gemm.activation\n"
        "assert sizes == [1], sizes\n"
    )
    subprocess.run([interpreter(), "-c", program], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("activation", [SQUARED_RELU, Activation(limit=7.0, up_offset=1.0)], ids=["relu2", "limit"])
def test_inf_before_columns_that_are_not_there(
    activation: Activation, engine: str, rng: torch.Generator, device: torch.device
) -> None:
    def run(a: GroupedRows, w: ExpertWeights) -> Intermediate:
        return grouped_gemm_swiglu(a, w, activation, out_format="fp8_block", engine=engine)

    check_inf_before_missing_columns(208, activation, run, rng, device)
