"""Weights prepacked for `dequant_gemm.cu`: what is kept, what comes back, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_runtime.kernels import runtime
from moe_runtime.kernels.formats.number_formats import WEIGHT_FORMATS
from moe_runtime.kernels.formats.swizzle import swizzle_scales
from moe_runtime.kernels.gemm import grouped_gemm
from moe_runtime.kernels.gemm import pack_units as pack_module
from moe_runtime.kernels.gemm import prepacked as packed_weights
from moe_runtime.kernels.gemm.dequant_layout import pack_units, source_rows, units_with_special_values
from moe_runtime.kernels.gemm.prepacked import PrepackedWeights
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, SwiGLU
from moe_runtime.kernels.runtime import has_nvrtc, resolve_engine
from tests.support.comparison import assert_same_bits
from tests.support.gemm_cases import make_rows, random_weights
from tests.support.virtual_exchange import engine

__all__ = ["engine"]

DEQUANTIZED = ("nvfp4", "mxfp8", "mxfp4")


def random_bytes(
    name: str, e: int, n: int, k: int, rng: torch.Generator, device: torch.device, order: GateUpOrder | None
) -> tuple[ExpertWeights, torch.Tensor]:
    """Weights of random bytes with everything that weights may have, and their linear scales on the CPU."""
    fmt = WEIGHT_FORMATS[name]
    assert fmt.scale_dtype is not None
    quants = torch.randint(0, 256, (e, n, fmt.quant_bytes(k)), generator=rng).to(torch.uint8)
    largest = 126 if name == "nvfp4" else 255
    scales = torch.randint(0, largest + 1, (e, n, fmt.scale_columns(k)), generator=rng).to(torch.uint8)
    w = ExpertWeights(
        fmt,
        quants.view(fmt.quant_dtype),
        swizzle_scales(scales, engine="torch").view(fmt.scale_dtype),
        torch.rand((e,) if order is None else (e, 2), generator=rng),
        torch.randn(e, n, generator=rng),
        order,
    )
    return w.to(device), scales


def assert_same_weights(actual: ExpertWeights, expected: ExpertWeights) -> None:
    assert actual.format is expected.format and actual.gate_up is expected.gate_up
    for name in ("quants", "scales", "expert_scales", "bias"):
        found, wanted = getattr(actual, name), getattr(expected, name)
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            assert found.device == wanted.device, name
            assert_same_bits(found, wanted, name)


@pytest.fixture
def packed_by(engine: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> str:
    """`engine`, where it is `cuda` also without a GPU."""
    if engine == "cuda" and device.type == "cpu":
        monkeypatch.setattr(packed_weights, "resolve_engine", lambda engine, device: engine)
    return engine


@pytest.mark.parametrize("name", DEQUANTIZED)
@pytest.mark.parametrize("order", [None, *GateUpOrder])
@pytest.mark.parametrize(("n", "k"), [(144, 160), (48, 320), (80, 32)])
def test_restored_is_what_was_prepacked(
    n: int, k: int, order: GateUpOrder | None, name: str, packed_by: str, rng: torch.Generator, device: torch.device
) -> None:
    w, linear = random_bytes(name, 3, n, k, rng, device, order)
    prepacked = PrepackedWeights.prepack(w, engine=packed_by)
    assert prepacked.num_experts == 3 and prepacked.device == w.device
    assert (prepacked.num_rows, prepacked.num_columns, prepacked.gate_up) == (n, k, order)
    rows = source_rows(n, order)
    for expert in range(3):
        want = pack_units(w.quants[expert].cpu().view(torch.uint8), linear[expert], w.format, rows)
        assert_same_bits(prepacked.units[expert], want, f"expert {expert}")
        if name != "nvfp4":
            want = units_with_special_values(w.quants[expert].cpu().view(torch.uint8), linear[expert], w.format, rows)
            assert prepacked.has_special_values is not None
            assert_same_bits(prepacked.has_special_values[expert], want, f"marks of expert {expert}")
    assert (prepacked.has_special_values is None) == (name == "nvfp4")
    assert_same_weights(prepacked.restore(), w)


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_quantized_weights_come_back(name: str, packed_by: str, rng: torch.Generator, device: torch.device) -> None:
    """Real quantizers, no bias; `mxfp8` has no scales of experts either."""
    w = random_weights(name, 2, 40, 64, rng, device, gate_up=False)
    prepacked = PrepackedWeights.prepack(w, engine=packed_by)
    assert_same_weights(prepacked.restore(), w)
    assert prepacked.has_special_values is None or not prepacked.has_special_values.any()


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_bytes_between_scales_do_not_matter(
    name: str, packed_by: str, rng: torch.Generator, device: torch.device
) -> None:
    """The padding of swizzled scales is not read: it is no NaN, and zeros come back."""
    w, _ = random_bytes(name, 2, 72, 96, rng, device, None)
    assert w.scales is not None
    everything = torch.full((2, 72, w.format.scale_columns(96)), 255, dtype=torch.uint8)
    used = swizzle_scales(everything, engine="torch").to(device) == 255
    assert not used.all()
    dirty = torch.where(used, w.scales.view(torch.uint8), 255).view(w.scales.dtype)
    prepacked = PrepackedWeights.prepack(replace(w, scales=dirty), engine=packed_by)
    assert_same_bits(prepacked.units, PrepackedWeights.prepack(w, engine="torch").units, "units")
    assert_same_weights(prepacked.restore(), w)


@pytest.mark.parametrize("name", DEQUANTIZED)
@pytest.mark.parametrize("most", [1, 13])
def test_experts_in_several_launches(
    most: int, name: str, packed_by: str, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "MOST_UNITS", most)
    w, _ = random_bytes(name, 5, 80, 160, rng, device, GateUpOrder.UP_GATE)
    one, other = (PrepackedWeights.prepack(w, engine=engine) for engine in (packed_by, "torch"))
    assert_same_bits(one.units, other.units, "units")
    if name != "nvfp4":
        assert one.has_special_values is not None and other.has_special_values is not None
        assert_same_bits(one.has_special_values, other.has_special_values, "marks")


@pytest.mark.parametrize("at", [1, 8])
def test_quants_may_begin_anywhere(at: int, packed_by: str, rng: torch.Generator, device: torch.device) -> None:
    w, _ = random_bytes("mxfp4", 2, 80, 160, rng, device, None)
    memory = torch.empty(w.quants.numel() + 64, dtype=torch.uint8, device=device)
    first = -memory.data_ptr() % 64 + at
    quants = memory[first : first + w.quants.numel()].view(w.quants.shape).copy_(w.quants)
    moved = PrepackedWeights.prepack(replace(w, quants=quants), engine=packed_by if at % 8 == 0 else "auto")
    assert_same_bits(moved.units, PrepackedWeights.prepack(w, engine="torch").units, "units")


def test_engines_prepare_the_same(rng: torch.Generator, device: torch.device) -> None:
    w, _ = random_bytes("nvfp4", 1, 40, 48, rng, device, None)
    one, other = (PrepackedWeights.prepack(w, engine=engine) for engine in ("torch", "triton"))
    assert_same_bits(one.units, other.units, "units")
    assert_same_weights(one.restore(engine="triton"), other.restore(engine="torch"))


def test_bytes(rng: torch.Generator, device: torch.device) -> None:
    """DeepSeek's ratio: whole units cost what quants and scales do. Partial ones are counted as they lie."""
    w, _ = random_bytes("nvfp4", 2, 128, 256, rng, device, GateUpOrder.GATE_UP)
    prepacked = PrepackedWeights.prepack(w)
    assert prepacked.num_bytes == 2 * 128 * (128 + 16) + 4 * (2 * 2 + 2 * 128) == w.num_bytes
    w, _ = random_bytes("mxfp8", 1, 72, 96, rng, device, None)
    plain = replace(PrepackedWeights.prepack(w), expert_scales=None, bias=None)
    assert plain.num_bytes == 2 * 2 * (4096 + 128) + 2


def test_to_moves_every_tensor(rng: torch.Generator, device: torch.device) -> None:
    prepacked = PrepackedWeights.prepack(random_bytes("nvfp4", 1, 32, 64, rng, device, GateUpOrder.INTERLEAVED)[0])
    moved = prepacked.to("meta")
    assert moved.expert_scales is not None and moved.bias is not None
    assert {t.device.type for t in (moved.units, moved.expert_scales, moved.bias)} == {"meta"}
    assert moved.device.type == "meta" and moved.gate_up is GateUpOrder.INTERLEAVED
    assert (moved.num_rows, moved.num_columns, moved.format) == (32, 64, prepacked.format)
    bare = replace(prepacked, expert_scales=None, bias=None).to("meta")
    assert bare.expert_scales is None and bare.bias is None
    assert_same_weights(prepacked.to(device).to("cpu").restore(), prepacked.restore().to("cpu"))


def test_one_expert_and_a_copy(rng: torch.Generator, device: torch.device) -> None:
    w, _ = random_bytes("nvfp4", 3, 48, 64, rng, device, GateUpOrder.UP_GATE)
    prepacked = PrepackedWeights.prepack(w)
    assert_same_weights(prepacked.expert(2).restore(), w.expert(2))
    copy = prepacked.clone()
    assert_same_weights(copy.restore(), w)
    assert copy.units.data_ptr() != prepacked.units.data_ptr()
    plain = w.clone()
    assert_same_weights(plain, w)
    assert plain.scales is not None and w.scales is not None
    assert plain.quants.data_ptr() != w.quants.data_ptr() and plain.scales.data_ptr() != w.scales.data_ptr()


def test_marks_of_special_values_go_with_their_weights(rng: torch.Generator, device: torch.device) -> None:
    """Of one expert, of a copy, on another device; weights without them are refused, and NVFP4 has none."""
    w, linear = random_bytes("mxfp8", 3, 72, 64, rng, device, None)
    quants = w.quants.view(torch.uint8).clone() & 63
    linear.fill_(127)
    linear[1, 70, 1] = 135
    usual = replace(w, quants=quants.view(w.quants.dtype), scales=swizzle_scales(linear, engine="torch").to(device))
    prepacked = PrepackedWeights.prepack(usual)
    assert prepacked.has_special_values is not None and prepacked.has_special_values.tolist() == [
        [0, 0],
        [0, 1],
        [0, 0],
    ]
    one, copy, moved = prepacked.expert(1), prepacked.clone(), prepacked.to("meta")
    assert (
        one.has_special_values is not None
        and copy.has_special_values is not None
        and moved.has_special_values is not None
    )
    assert (
        one.has_special_values.tolist() == [[0, 1]]
        and copy.has_special_values.tolist() == prepacked.has_special_values.tolist()
    )
    assert moved.has_special_values.device.type == "meta"
    with pytest.raises(ValueError, match=r"^has_special_values: expected a tensor for mxfp8"):
        replace(prepacked, has_special_values=None)
    with pytest.raises(ValueError, match=r"^has_special_values: expected contiguous torch.uint8 \[3, 2\]"):
        replace(prepacked, has_special_values=prepacked.has_special_values[:, :1])
    nvfp4 = PrepackedWeights.prepack(random_bytes("nvfp4", 3, 72, 64, rng, device, None)[0])
    with pytest.raises(ValueError, match=r"^has_special_values: expected None for nvfp4"):
        replace(nvfp4, has_special_values=prepacked.has_special_values)


def test_which_weights_are_better_prepacked(rng: torch.Generator, device: torch.device) -> None:
    """Those of a dequantized format on a Hopper GPU, unless an engine is asked for by its name."""
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    for name in WEIGHT_FORMATS:
        w = random_weights(name, 1, 32, 128, rng, device)
        assert PrepackedWeights.wanted(w) == (on_hopper and name in DEQUANTIZED)
        assert not PrepackedWeights.wanted(w, "torch")
        if device.type == "cuda":
            assert not PrepackedWeights.wanted(w, "triton")
        assert not PrepackedWeights.wanted(w.to("cpu"))


def test_no_experts(rng: torch.Generator, device: torch.device) -> None:
    """A rank may have none."""
    w = random_bytes("nvfp4", 1, 32, 64, rng, device, None)[0]
    assert w.scales is not None and w.expert_scales is not None and w.bias is not None
    none = replace(w, quants=w.quants[:0], scales=w.scales[:0], expert_scales=w.expert_scales[:0], bias=w.bias[:0])
    prepacked = PrepackedWeights.prepack(none)
    assert prepacked.num_experts == 0
    assert_same_weights(prepacked.restore(), none)


@pytest.mark.parametrize("name", ["bf16", "fp8_block"])
def test_other_formats_are_refused(name: str, rng: torch.Generator, device: torch.device) -> None:
    w = random_weights(name, 1, 32, 128, rng, device)
    with pytest.raises(ValueError, match=rf"^w\.format: expected one of nvfp4, mxfp8, mxfp4, got {name}$"):
        PrepackedWeights.prepack(w)


@pytest.mark.parametrize("scale", [0x7F, 0x80, 0x81, 0xB8, 0xFF])
def test_nvfp4_scales_that_have_no_code_are_refused(
    scale: int, packed_by: str, rng: torch.Generator, device: torch.device
) -> None:
    """NaN, minus zero, negative numbers: in the last row and block of the last expert."""
    w, linear = random_bytes("nvfp4", 2, 40, 48, rng, device, None)
    linear[1, 39, 2] = scale
    bad = replace(w, scales=swizzle_scales(linear, engine="torch").view(torch.float8_e4m3fn).to(device))
    with pytest.raises(ValueError, match=r"^w\.scales: expected .*not negative"):
        PrepackedWeights.prepack(bad, engine=packed_by)


def test_mxfp8_scales_may_be_any_byte(rng: torch.Generator, device: torch.device) -> None:
    """255 is NaN and poisons its block; the layout keeps it."""
    w, linear = random_bytes("mxfp8", 1, 40, 64, rng, device, None)
    linear[0, ::2] = 255
    w = replace(w, scales=swizzle_scales(linear, engine="torch").to(device))
    assert_same_weights(PrepackedWeights.prepack(w).restore(), w)


@pytest.mark.gpu
def test_hopper_takes_its_own_kernels(device: torch.device) -> None:
    """What every GPU test of those kernels stands on: engine "auto" is CUDA C++ there, another named engine is not."""
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert has_nvrtc(), "the GPU tests need cuda-bindings and NVRTC"
    device = torch.device("cuda", torch.cuda.current_device())
    assert resolve_engine("auto", device) == ("cuda" if on_hopper else "triton")
    assert resolve_engine("triton", device) == "triton" and resolve_engine("torch", device) == "torch"
    if on_hopper:
        assert resolve_engine("cuda", device) == "cuda"


@pytest.mark.cpu_only
def test_cuda_is_asked_once_what_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ask of each launch."""
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (9, 0) if device.index == 0 else (10, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    forget_devices()
    try:
        for _ in range(3):
            assert runtime.is_hopper(torch.device("cuda:0")) and not runtime.is_hopper(torch.device("cuda:1"))
            assert not runtime.is_hopper(torch.device("cpu"))
    finally:
        forget_devices()
    assert [device.index for device in asked] == [0, 1]


@pytest.mark.cpu_only
def test_a_hopper_gpu_without_nvrtc_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "INTERPRET", False)
    monkeypatch.setattr(runtime, "has_nvrtc", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 + device.index, 0))
    forget_devices()
    try:
        for name in ("cuda:1", "cuda:0", "cuda:0", "cpu"):
            device = torch.device(name)
            assert resolve_engine("auto", device) == ("torch" if name == "cpu" else "triton")
            assert resolve_engine("triton" if device.type == "cuda" else "torch", device) != "cuda"
        with pytest.raises(ValueError, match=r"^engine: expected .* on cuda:0, .* finds no NVRTC"):
            resolve_engine("cuda", torch.device("cuda:0"))
        with pytest.raises(ValueError, match=r"^engine: expected .* on cuda:1, where .* are for Hopper GPUs\)"):
            resolve_engine("cuda", torch.device("cuda:1"))
    finally:
        forget_devices()
    (record,) = caplog.records
    assert record.name == "moe_runtime.kernels.runtime" and record.levelname == "WARNING"
    assert record.getMessage().startswith("cuda:0: cuda-bindings finds no NVRTC, install the extra gpu; slower Triton")


@pytest.mark.cpu_only
def test_an_engine_is_resolved_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 + device.index, 0))
    monkeypatch.setattr(runtime, "has_nvrtc", lambda: True)
    hopper, other, cpu = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    for interpreted in (False, True):
        monkeypatch.setattr(runtime, "INTERPRET", interpreted)
        forget_devices()
        try:
            found = [resolve_engine("auto", device) for device in (hopper, other, cpu)]
            assert found == ["triton" if interpreted else "cuda", "triton", "torch"]
            assert resolve_engine("triton", hopper) == "triton" and resolve_engine("torch", hopper) == "torch"
            with pytest.raises(ValueError, match=r"^engine: expected auto or torch on cpu, .* Hopper GPUs"):
                resolve_engine("cuda", cpu)
            if interpreted:
                assert resolve_engine("triton", cpu) == "triton"
                with pytest.raises(ValueError, match=r"^engine: expected .* on cuda:0, .*TRITON_INTERPRET is set"):
                    resolve_engine("cuda", hopper)
            else:
                assert resolve_engine("cuda", hopper) == "cuda"
                with pytest.raises(ValueError, match=r"^engine: triton on CPU tensors needs TRITON_INTERPRET=1"):
                    resolve_engine("triton", cpu)
            with pytest.raises(ValueError, match=r"^engine: expected auto, cuda, triton or torch, got 'nvcc'"):
                resolve_engine("nvcc", cpu)
        finally:
            forget_devices()


@pytest.mark.cpu_only
def test_weights_that_are_restored_in_each_call_are_told_of_once(
    rng: torch.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    raw = random_weights("nvfp4", 1, 64, 64, rng, cpu, gate_up=True), random_weights("nvfp4", 1, 64, 64, rng, cpu)
    a = make_rows("nvfp4", [3], 64, rng, cpu, num_experts=1)
    gate_up, down = (PrepackedWeights.prepack(w) for w in raw)
    grouped_gemm._warn_of_restoring.cache_clear()
    grouped_gemm.grouped_gemm(a, raw[1], engine="torch")
    assert not caplog.records
    for _ in range(2):
        grouped_gemm.grouped_gemm(a, down, engine="torch")
        grouped_gemm.grouped_gemm_swiglu(a, gate_up, SwiGLU(), out_format="nvfp4", engine="torch")
    (record,) = caplog.records
    assert record.name == "moe_runtime.kernels.gemm.grouped_gemm" and record.levelname == "WARNING"
    assert record.getMessage().startswith("prepacked or expanded weights are restored in every call, which is slow")


def forget_devices() -> None:
    """As in a new process."""
    runtime.capability.cache_clear()
    runtime._resolved.cache_clear()
