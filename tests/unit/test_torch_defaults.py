"""What a program says to torch as a whole, such as a default dtype, changes nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime import ops
from moe_runtime.checkpoints.calibration import calibrate
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.dispatcher.gradients import DifferentiableDispatcher
from moe_runtime.integrations.shared_tokens import run_in_steps
from moe_runtime.kernels.formats.number_formats import FORMATS, WEIGHT_FORMATS
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.ops import inputs
from moe_runtime.placement.placement import Placement
from moe_runtime.virtual import VirtualRanks
from tests.support.comparison import assert_same_bits

SETTINGS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 4,
    "top_k": 2,
    "max_tokens_per_rank": 16,
    "shared_expert": {"intermediate_size": 64, "gated": True},
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(device: torch.device, **changes: Any) -> MoELayer:
    layer = MoELayer(MoELayerConfig(**{**SETTINGS, **changes}), ExpertParallelContext(device=device, timeout_s=10))
    layer.load_random(0)
    return layer


def some_tokens(device: torch.device) -> torch.Tensor:
    drawn = torch.randn(9, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    return drawn.to(device, torch.bfloat16)


def all_bits(device: torch.device, folder: Path) -> dict[str, torch.Tensor]:
    """Of layers in every format, of weights and rows there and back, and of a calibration."""
    x = some_tokens(device)
    bits = {f"layer {fmt}": made(device, token_format=fmt)(x) for fmt in FORMATS}
    for fmt in WEIGHT_FORMATS:
        w = ExpertWeights.quantize(x[None, :8].repeat(1, 16, 1), fmt, engine="torch")
        bits[f"weights {fmt}"] = w.dequantize(engine="torch")
        bits[f"factors {fmt}"] = w.row_factors()
    for fmt in ("nvfp4", "mxfp8", "fp8"):
        quants = getattr(inputs, f"quantize_{fmt}")(x)
        quants = quants if isinstance(quants, tuple) else (quants,)
        bits[f"rows {fmt}"] = getattr(inputs, f"dequantize_{fmt}")(*quants)
    bits["scale of nothing"] = inputs.nvfp4_encode_scale(x[:0])
    found = calibrate(folder, 0, [x.cpu()])
    scales = [found.token_amax, found.intermediate_amax, found.token_gsf, found.intermediate_gsf]
    bits["calibration"] = torch.tensor(scales, dtype=torch.float64)
    return bits


def test_the_default_dtype_changes_no_bit(device: torch.device, tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, MoELayerConfig(**{**SETTINGS, "shared_expert": None}), seed=0)
    expected = all_bits(device, tmp_path)
    for dtype in (torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            found = all_bits(device, tmp_path)
        for name, bits in found.items():
            assert_same_bits(bits, expected[name], f"{name}, {dtype} by default")


def test_the_default_dtype_changes_no_gradient(device: torch.device) -> None:
    sizes = {"hidden_size": 64, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8}
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 64, generator=g).bfloat16().to(device), torch.rand(5, 2, generator=g).to(device)
    idx = torch.rand(5, 4, generator=g).argsort(1)[:, :2].to(device)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with default_dtype(dtype), ExpertParallelContext(device=device, timeout_s=10) as context:
            dispatcher = DifferentiableDispatcher(context, **sizes)
            given = x.clone().requires_grad_(), weights.clone().requires_grad_()
            arrived = dispatcher.dispatch(given[0], idx)
            y = dispatcher.combine(2 * arrived.rows, arrived, given[1])
            found.append(torch.autograd.grad((y.float() ** 2).sum(), given))
    for gradients in found[1:]:
        for gradient, expected in zip(gradients, found[0], strict=True):
            assert_same_bits(gradient, expected)


@pytest.mark.cpu_only
def test_the_default_device_takes_no_waits(device: torch.device) -> None:
    config = MoELayerConfig(**{**SETTINGS, "shared_expert": None})
    with torch.device("meta"), VirtualRanks(config, 2, lambda one: one.load_random(0), device=device) as ranks:
        waits = [layer.count_waits() for layer in ranks.layers]
        ranks([some_tokens(device)] * 2)
        assert all(one.read()[16].steps == 1 for one in waits)


@pytest.mark.parametrize("name", ["mxfp8", "bf16"])
def test_the_default_device_changes_no_bit(name: str, device: torch.device, tmp_path: Path) -> None:
    """Tensors that no device was said for would be on "meta": without numbers, as on another GPU out of reach."""
    config = MoELayerConfig(**{**SETTINGS, "shared_expert": None, "token_format": name})
    x = some_tokens(device)
    write_qwen3_moe_checkpoint(tmp_path / "expected", config, seed=0)

    def outputs(folder: Path) -> list[torch.Tensor]:
        given = {"context": ExpertParallelContext(device=device, timeout_s=10), "max_tokens_per_rank": 16}
        read = MoELayer.from_checkpoint(folder, **given, token_format=name)
        placed = MoELayer(config, ExpertParallelContext(device=device), placement=Placement.contiguous(4, 1))
        placed.load_random(0)
        placed.count_steps()
        return [read(x), placed(x), made(device, token_format=name)(x)]

    expected = outputs(tmp_path / "expected")
    with torch.device("meta"):
        write_qwen3_moe_checkpoint(tmp_path / "written", config, seed=0)
        found = outputs(tmp_path / "written")
    for y, other in zip(found, expected, strict=True):
        assert_same_bits(y, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype, device: torch.device) -> None:
    x = some_tokens(device)
    layer = made(device, token_format="nvfp4")
    assert layer.router is not None
    y, (idx, weights) = layer(x), layer.router(x)
    with torch.autocast(device.type, dtype):
        assert_same_bits(layer(x), y)
        for found, expected in zip(layer.router(x), (idx, weights), strict=True):
            assert_same_bits(found, expected)
        in_two_steps = run_in_steps(layer, x, *(t.clone() for t in (idx, weights)), steps=2)
        quants, scales = ops.quantize_nvfp4(x, 2.0)
    assert_same_bits(layer(x), y, "afterwards")
    assert_same_bits(in_two_steps, run_in_steps(layer, x, idx, weights, steps=2))
    for found, expected in zip((quants, scales), ops.quantize_nvfp4(x, 2.0), strict=True):
        assert_same_bits(found, expected)


def test_an_operation_of_mxfp8_is_compiled(rng: torch.Generator, device: torch.device) -> None:
    x, w = torch.randn(24, 256, generator=rng).to(device), torch.randn(2, 64, 256, generator=rng).to(device)
    ends = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)
    (a, a_scales), (b, b_scales) = ops.quantize_mxfp8(x), ops.quantize_mxfp8(w)
    packed = ops.pack_ue8m0_rows(a_scales, ends), ops.pack_ue8m0_weights(b_scales)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.moe_gemm_mxfp8_nt_groupwise(a, b, *packed, ends, (1, 1, 32))

    assert_same_bits(torch.compile(product, backend="aot_eager")(a, b), product(a, b))
    torch.compiler.reset()


def test_a_layer_made_in_inference_mode_is_loaded_outside_of_it(device: torch.device) -> None:
    config = MoELayerConfig(**SETTINGS, router={"kind": "sigmoid", "bias": True, "correction_bias": True})
    other = MoELayer(config, ExpertParallelContext(device=device, timeout_s=10))
    other.load_random(1)
    assert other.router is not None and other.shared_expert is not None
    with torch.inference_mode():
        layer = MoELayer(config, ExpertParallelContext(device=device, timeout_s=10))
    assert layer.router is not None and layer.shared_expert is not None
    layer.load_random(1)
    one = other.router
    layer.router.load(one.weight, bias=one.bias, correction_bias=one.e_score_correction_bias)
    layer.shared_expert.load(**dict(other.shared_expert.named_parameters()))
    layer.load_state_dict(other.state_dict())
    x = some_tokens(device)
    assert_same_bits(layer(x), other(x))
    layer.load_state_dict({name: value.double() for name, value in other.state_dict().items()}, assign=True)
    assert_same_bits(layer(x), other(x))


def test_a_router_that_was_moved_away_is_named(device: torch.device) -> None:
    layer, x = made(device), some_tokens(device)
    layer.to("meta")
    with pytest.raises(ValueError, match=f"x: expected device meta, as the router's weight, got {device.type}"):
        layer(x)


def test_a_compiled_model_takes_any_number_of_tokens(device: torch.device) -> None:
    """Dynamo, inside of a step, made a tensor too small from the second number of tokens on."""
    layer = made(device, shared_expert=None)
    rows = torch.ones(layer.dispatcher.geometry.row_capacity, 256, dtype=torch.bfloat16, device=device)
    ids = torch.arange(18, device=device).view(9, 2) % 4
    weights = torch.full((9, 2), 0.5, dtype=torch.float32, device=device)

    def by_dispatcher(x: torch.Tensor) -> torch.Tensor:
        arrived = layer.dispatcher.dispatch(x, ids[: len(x)], weights[: len(x)])
        return layer.dispatcher.combine(rows, arrived.handle)

    for function in (layer, by_dispatcher):
        compiled = torch.compile(function, backend="aot_eager")
        xs = [some_tokens(device)[:count] for count in (9, 3)]
        ys = [compiled(x) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            assert_same_bits(y, function(x), f"{len(x)} tokens")
    torch.compiler.reset()
