"""The float64 reference against transformers, and the derived bound against quantized layers, sound and broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS, format_named
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.gemm.weights import (
    GEGLU,
    GEGLU_TANH,
    GPT_OSS,
    SQUARED_RELU,
    Activation,
    ActivationFunction,
    GateUpOrder,
    SwiGLU,
)
from moe_runtime.reference import (
    FUNCTION_GAINS,
    activation_reference,
    error_bound,
    moe_reference,
    relative_error,
    rounding_error,
)

T, H, INNER, E, K = 96, 384, 256, 8, 2
RANKS = 2
GELU_ALONE = Activation(function=ActivationFunction.GELU, gated=False)


def test_reference_is_transformers_qwen3_moe_block() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=48, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config).double()
    for parameter in block.parameters():
        parameter.data.normal_(std=0.2)
    x_TH = torch.randn(50, 48, dtype=torch.float64)
    with torch.no_grad():
        want = block(x_TH[None])[0]
        _, topk_weights, topk_idx = block.gate(x_TH)
        got = moe_reference(x_TH, topk_idx, topk_weights, block.experts.gate_up_proj, block.experts.down_proj)
    assert got.dtype == torch.float64 and want.dtype == torch.float64
    assert relative_error(got, want)[1] < 2**-45


def test_activation_is_transformers_gpt_oss() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = GptOssExperts(transformers.GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    gate_up = torch.randn(40, 16, dtype=torch.float64) * 6
    torch.testing.assert_close(
        activation_reference(gate_up, GPT_OSS), experts._apply_gate(gate_up), rtol=2**-45, atol=2**-45
    )


@pytest.mark.parametrize("order", list(GateUpOrder))
def test_the_order_of_gate_and_up_is_a_matter_of_rows(order: GateUpOrder) -> None:
    torch.manual_seed(1)
    gate, up = torch.randn(2, 10, 7, dtype=torch.float64)
    mixed = torch.empty(10, 14, dtype=torch.float64)
    mixed[:, order.gate_rows(14)], mixed[:, order.up_rows(14)] = gate, up
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(activation_reference(mixed, SwiGLU(order)), want, rtol=2**-45, atol=2**-45)


def test_reference_with_biases_is_transformers_gpt_oss_experts() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    from transformers import GptOssConfig

    config = GptOssConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E, experts_implementation="eager")
    experts = modeling.GptOssExperts(config).double()
    x, idx, weights, *_ = random_layer(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
        want = experts(x.double(), idx.long(), weights.double())
    got = moe_reference(
        x,
        idx,
        weights,
        experts.gate_up_proj.mT,
        experts.down_proj.mT,
        GPT_OSS,
        gate_up_bias=experts.gate_up_proj_bias,
        down_bias=experts.down_proj_bias,
    )
    torch.testing.assert_close(got, want, rtol=2**-40, atol=2**-40)


def test_unrouted_entries_add_nothing_and_no_tokens_are_no_rows() -> None:
    x, idx, weights, gate_up, down = random_layer(2)
    full = moe_reference(x, idx, weights, gate_up, down)
    hole = idx.clone()
    hole[3] = -1
    hole[5, 0] = -1
    got = moe_reference(x, hole, weights, gate_up, down)
    assert (got[3] == 0).all()
    only_second = moe_reference(x[5:6], idx[5:6, 1:], weights[5:6, 1:], gate_up, down)
    torch.testing.assert_close(got[5:6], only_second, rtol=2**-45, atol=2**-45)
    torch.testing.assert_close(got[6:], full[6:], rtol=2**-45, atol=2**-45)
    assert moe_reference(x[:0], idx[:0], weights[:0], gate_up, down).shape == (0, H)


def test_bad_arguments_are_named() -> None:
    x, idx, weights, gate_up, down = random_layer(2)
    with pytest.raises(ValueError, match=rf"x: expected \[T, {H}\]"):
        moe_reference(x[:, :-1], idx, weights, gate_up, down)
    with pytest.raises(ValueError, match="topk_idx, topk_weights"):
        moe_reference(x, idx, weights[:, :1], gate_up, down)
    with pytest.raises(ValueError, match="down: expected"):
        moe_reference(x, idx, weights, gate_up, down[:-1])
    with pytest.raises(ValueError, match=rf"down_bias: expected \[{E}, {H}\]"):
        moe_reference(x, idx, weights, gate_up, down, down_bias=torch.zeros(E, H + 1))
    with pytest.raises(ValueError, match=rf"gate_up_bias: expected \[{E}, {2 * INNER}\]"):
        moe_reference(x, idx, weights, gate_up, down, gate_up_bias=torch.zeros(2 * INNER))
    for bad in (-2, E):
        with pytest.raises(ValueError, match=rf"topk_idx: expected ids of -1 \.\. {E - 1}, got .*{bad}"):
            moe_reference(x, torch.where(idx == idx[0, 0], bad, idx), weights, gate_up, down)


def test_relative_error() -> None:
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    y = torch.tensor([[3.0, 1.0], [0.0, 2.0]], dtype=torch.bfloat16)
    assert relative_error(y, reference) == (math.sqrt(5) / 5, 0.5)
    assert relative_error(reference, reference) == (0.0, 0.0)
    assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == (0.0, 0.0)
    assert relative_error(y, torch.zeros(2, 2)) == (math.inf, math.inf)
    assert relative_error(y[:0], reference[:0]) == (0.0, 0.0)
    y[0, 0] = math.nan
    assert all(map(math.isnan, relative_error(y, reference) + relative_error(y, torch.zeros(2, 2))))
    with pytest.raises(ValueError, match=r"y: expected shape \[2, 2\], got \[1, 2\]"):
        relative_error(y[:1], reference)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gains_are_the_maxima_that_the_derivation_names(name: str) -> None:
    """`p` and the slope `s` are those of torch."""
    a = torch.linspace(1e-4, 40, 400_001, dtype=torch.float64, requires_grad=True)
    y = getattr(torch.nn.functional, name.split("_")[0])(a, **({"approximate": "tanh"} if "_" in name else {}))
    (s,) = torch.autograd.grad(y.sum(), a)
    p = (y / a).detach()
    squares = p**2 + (1 - p) ** 2
    ratio = ((s**2 + (1 - s) ** 2) / squares).max().item()
    assert ratio <= FUNCTION_GAINS[ActivationFunction.of(name)] < ratio + 1e-4
    assert (squares.diff() >= -1e-15).all()  # what Chebyshev's inequality needs


@pytest.mark.parametrize("activation", [SwiGLU(), GEGLU, GEGLU_TANH, SQUARED_RELU, GELU_ALONE], ids=str)
def test_activations_are_those_of_torch(activation: Activation, rng: torch.Generator) -> None:
    x = torch.randn(20, 14, generator=rng, dtype=torch.float64) * 3
    gate, up = x.chunk(2, dim=1)
    functional = torch.nn.functional
    want = {
        SwiGLU(): functional.silu(gate) * up,
        GEGLU: functional.gelu(gate) * up,
        GEGLU_TANH: functional.gelu(gate, approximate="tanh") * up,
        SQUARED_RELU: functional.relu(x) ** 2,
        GELU_ALONE: functional.gelu(x),
    }[activation]
    torch.testing.assert_close(activation_reference(x, activation), want, rtol=2**-45, atol=2**-45)


SAMPLES: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "normal": lambda g: torch.randn(512, 1024, generator=g),
    "uniform": lambda g: torch.rand(512, 1024, generator=g) - 0.5,
    "laplace": lambda g: torch.randn(512, 1024, generator=g) * torch.empty(512, 1024).exponential_(generator=g).sqrt(),
    "swiglu": lambda g: activation_reference(torch.randn(512, 2048, generator=g)).float(),
    # Up to 55 times; where one column outweighs all others, errors are that column's alone.
    "columns of very different size": lambda g: (
        torch.randn(512, 1024, generator=g) * torch.randn(1024, generator=g).clamp(-2, 2).exp()
    ),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_rounding_error_bounds_the_quantizers_and_is_tight(fmt: str, sample: str, seed: int) -> None:
    x = SAMPLES[sample](torch.Generator().manual_seed(seed))
    error, _ = relative_error(dequantize_rows(quantize_rows(x, fmt)), x)
    # That of mxfp4 is for one large number among small ones, which no sample here is.
    part = 0.35 if fmt == "mxfp4" else 0.5
    assert part * rounding_error(fmt) < error <= rounding_error(fmt)


def random_layer(
    seed: int, rows: int = 2 * INNER
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens bf16 `[T, H]`, ids, weights, gate_up and down bf16; every expert of a token is another one.

    Each expert has `T * K / E` tokens, of about half their weight each: on that depends the error of a layer that is
    broken at one expert.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=g).bfloat16()
    token = torch.randperm(T, generator=g)
    # Of E tokens in turn each begins with another expert, and goes on to one that is as many further for all of them.
    step = token // E % (E - 1) + 1
    idx = ((token[:, None] + step[:, None] * torch.arange(K)) % E).int()
    weights = torch.rand(T, K, generator=g).add(2.0)
    gate_up = (torch.randn(E, rows, H, generator=g) * H**-0.5).bfloat16()
    down = (torch.randn(E, H, INNER, generator=g) * INNER**-0.5).bfloat16()
    return x, idx, weights / weights.sum(1, keepdim=True), gate_up, down


def stored(x: torch.Tensor, fmt: str, gsf: float | None = None, shifted: bool = False) -> torch.Tensor:
    """`x` `[*, n]` as it reads back from `fmt`, in float64; `shifted` reads it with the scale of the block before."""
    rows = quantize_rows(x.float().flatten(0, -2), fmt, gsf=gsf)
    if shifted and rows.scales_RV is not None:
        raw = rows.scales_RV.view(torch.uint8) if rows.scales_RV.element_size() == 1 else rows.scales_RV
        raw.copy_(raw.roll(1, dims=1))
    return dequantize_rows(rows).double().view(x.shape)


def quantized_layer(
    layer: tuple[torch.Tensor, ...],
    token: str,
    weight: str,
    combine: str,
    bug: str | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """The layer with every rounding that the formats ask for, on `RANKS` ranks, with float64 sums."""
    x, idx, weights, gate_up, down = layer
    x = stored(x, token, shifted=bug == "block scale off by one")
    gate_up, down = stored(gate_up, weight), stored(down, weight)
    if bug == "gate and up swapped":
        gate_up = gate_up.roll(INNER, dims=1)
    if bug == "scale twice too large":
        down[1] *= 2
    if bug == "expert dropped":
        idx = torch.where(idx == 1, -1, idx)
    # A calibrated constant: the largest intermediate of order 16 fills the range.
    gsf = 2688 / 16 if token == "nvfp4" else None
    y = torch.zeros(T, H, dtype=torch.float64)
    for rank in range(RANKS):
        partial = torch.zeros(T, H, dtype=torch.float64)
        for expert in range(rank * E // RANKS, (rank + 1) * E // RANKS):
            t, k = torch.where(idx == expert)
            inner = stored(activation_reference(x[t] @ gate_up[expert].T, activation), token, gsf)
            partial.index_add_(0, t, weights[t, k].double()[:, None] * (inner @ down[expert].T).bfloat16().double())
        y += stored(partial, combine)
    return y.bfloat16()


CASES = [
    ("bf16", "bf16", "bf16"),
    ("fp8_block", "fp8_block", "bf16"),
    ("mxfp8", "mxfp8", "fp8_block"),
    ("nvfp4", "nvfp4", "bf16"),
    ("nvfp4", "nvfp4", "mxfp8"),
    ("bf16", "nvfp4", "bf16"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_quantized_layers_are_inside_the_bound(case: tuple[str, str, str], seed: int) -> None:
    for offset in range(4):
        layer = random_layer(seed + offset)
        error, _ = relative_error(quantized_layer(layer, *case), moe_reference(*layer))
        assert 0.5 * error_bound(*case) < error <= error_bound(*case)


OTHERS = {"gelu": GEGLU, "gelu_tanh": GEGLU_TANH, "relu2": SQUARED_RELU, "gelu_alone": GELU_ALONE}


@pytest.mark.parametrize("activation", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids="-".join)
def test_other_activations_are_inside_their_bounds(
    case: tuple[str, str, str], activation: Activation, seed: int
) -> None:
    layer = random_layer(seed, activation.num_parts * INNER)
    error, _ = relative_error(quantized_layer(layer, *case, activation=activation), moe_reference(*layer, activation))
    bound = error_bound(*case, activation=activation)
    assert 0.4 * bound < error <= bound
    if case[0] == "mxfp8":
        wrong = Activation(function="silu", gated=activation.gated)
        assert relative_error(moe_reference(*layer, wrong), moe_reference(*layer, activation))[0] > bound


BUGS = ["gate and up swapped", "scale twice too large", "expert dropped", "block scale off by one"]


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_broken_layers_are_outside_the_bound(case: tuple[str, str, str], bug: str, seed: int) -> None:
    if bug == "block scale off by one" and format_named(case[0]).scale_dtype is None:
        pytest.skip("bf16 tokens have no block scales")
    layer = random_layer(seed)
    error, _ = relative_error(quantized_layer(layer, *case, bug=bug), moe_reference(*layer))
    assert error > error_bound(*case)


def test_bounds_grow_with_coarser_formats_and_know_their_defaults() -> None:
    def bound(*formats: Any, **named: Any) -> float:
        return error_bound(*formats, **named)

    assert bound("bf16") < bound("fp8_block") == bound("mxfp8") < bound("bf16", "nvfp4") < bound("nvfp4") < 0.35
    assert bound("mxfp8", combine_format="fp8_block") > bound("mxfp8")
    assert bound("nvfp4", "nvfp4", "bf16", "nvfp4") == bound("nvfp4")
    assert bound("nvfp4", intermediate_format="mxfp8") < bound("nvfp4")
    # In bf16 only roundings of results count: four of them.
    assert bound("bf16") == pytest.approx(2 * rounding_error("bf16"), rel=1e-4)


@pytest.mark.parametrize(("combine", "roundings"), [("bf16", 1), ("fp8_block", 2), ("mxfp8", 2)])
def test_the_bound_of_several_hosts_counts_each_rounding(combine: str, roundings: int) -> None:
    """To bf16: of partial sums, and of a host's sum before it is quantized."""
    one_host, several = (error_bound("nvfp4", combine_format=combine, several_hosts=hosts) for hosts in (False, True))
    expected = (1 + one_host**2) * (1 + rounding_error("bf16") ** 2) ** roundings
    assert 1 + several**2 == pytest.approx(expected, rel=1e-12)
