"""Second-level scales at the ends of their range, and scales of inputs that lie far apart: named, never silent."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.files import SINGLE_FILE, TensorFiles
from moe_runtime.checkpoints.layouts import COMPRESSED_NVFP4, MODELOPT_NVFP4, WeightLayout
from moe_runtime.checkpoints.readers import ExpertNames, ExpertReader, dense
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.kernels.formats.number_formats import NVFP4
from moe_runtime.kernels.formats.reference_quantize import quantize_rows
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from tests.support.checkpoint_writers import (
    LibraryScheme,
    change_tensor,
    compressed_config,
    layer_config_of,
    load_all,
    modelopt_nvfp4,
    quantize_experts,
    rewrite,
)

CONFIG = MoELayerConfig(hidden_size=256, intermediate_size=128, num_experts=3, top_k=2, max_tokens_per_rank=8)
BLOCK = "model.layers.0.mlp.experts"
LAYOUTS = {"modelopt": MODELOPT_NVFP4, "modelopt awq": MODELOPT_NVFP4, "compressed-tensors": COMPRESSED_NVFP4}
INF = math.inf


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    write_qwen3_moe_checkpoint(tmp_path, CONFIG, seed=seed)
    return tmp_path


def write(folder: Path, layout: str) -> None:
    if layout == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        library = LibraryScheme("NVFP4", "re:.*experts.*")
        quantize_experts(folder, library.compress, quantization_config=compressed_config(library.group))
        return
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4" if layout == "modelopt" else "NVFP4_AWQ"}
    quantize_experts(folder, modelopt_nvfp4, quantization_config=said | {"group_size": 16})


def smallest(folder: Path, layout: WeightLayout, stored: tuple[float | None, ...]) -> float | None:
    """What becomes of scales of the inputs of down projections, one of each expert that has one."""
    assert layout.input_scale is not None
    scales = {
        f"{BLOCK}.{expert}.down_proj.{layout.input_scale.suffix}": torch.tensor(value, dtype=torch.float32)
        for expert, value in enumerate(stored)
        if value is not None
    }
    save_file(scales | {"other": torch.ones(1)}, folder / SINGLE_FILE)
    with TensorFiles(folder) as files:
        return ExpertReader(files, ExpertNames(BLOCK), layout, 256, 128, len(stored)).smallest_input_gsf()


def name_of(layout: WeightLayout, expert: int) -> str:
    assert layout.input_scale is not None
    return re.escape(f"{BLOCK}.{expert}.down_proj.{layout.input_scale.suffix}")


@pytest.mark.parametrize(
    ("spread", "cost"),
    [
        (2.0**14, None),
        (2.0**14 * 1.001, "blocks below the largest have coarse scales"),
        (28600.0, "blocks below the largest have coarse scales"),
        (2.0**15, "all blocks have coarse scales, or become 0"),
        (2.0**18, "all blocks have coarse scales, or become 0"),
        (2.0**19, "all become 0"),
        (1e30, "all become 0"),
    ],
)
@pytest.mark.parametrize("layout", [MODELOPT_NVFP4, COMPRESSED_NVFP4], ids=lambda layout: layout.name)
def test_scales_of_inputs_that_lie_far_apart_are_warned_of(
    layout: WeightLayout, spread: float, cost: str | None, tmp_path: Path
) -> None:
    """With both tensors, both values and what it costs. The scale is that of the largest inputs, as without it."""
    decode = (0.5, 0.5 / spread, 0.25)
    divides = layout is COMPRESSED_NVFP4
    stored = tuple(1 / value for value in decode) if divides else decode
    if cost is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert smallest(tmp_path, layout, stored) == 2.0
        return
    first, other = f"{stored[1]:.6g}", f"{stored[0]:.6g}"
    message = (
        rf"^{tmp_path / SINGLE_FILE}: scales of the inputs of down projections in {BLOCK} are 2\^[\d.]+ apart: "
        rf"{name_of(layout, 1)} is {re.escape(first)}, {name_of(layout, 0)} in {SINGLE_FILE} is {re.escape(other)}\. "
        rf".*\. Of the inputs of the first one, {cost} \(docs/accuracy\.md\)"
    )
    with pytest.warns(UserWarning, match=message) as seen:
        assert smallest(tmp_path, layout, stored) == 2.0
    assert len(seen) == 1


def test_what_a_spread_costs_is_what_the_warning_says() -> None:
    """By the quantizer: how the largest block of an expert fares with a scale that is this many times too large."""

    def scale_of(spread: float) -> float:
        amax = 0.5 * 2688 / spread
        row = torch.full((1, 16), amax)
        rows = quantize_rows(row, NVFP4, gsf=torch.tensor([2.0]))
        assert rows.scales_RV is not None
        return float(rows.scales_RV.view(torch.float8_e4m3fn).float())

    assert scale_of(1.0) == 448
    # Normal numbers of e4m3 are an eighth apart, those below 2^-6 are 2^-9 apart.
    assert scale_of(28672.0 / 1.125) == 2.0**-6 * 1.125 and scale_of(28672.0) == 2.0**-6
    assert scale_of(28672.0 * 2 / 1.125) == 2.0**-7
    assert scale_of(458751.0) == 2.0**-9 and scale_of(458752.0) == 0


@pytest.mark.parametrize(
    ("layout", "stored", "want"),
    [
        (MODELOPT_NVFP4, (0.5, 0.25, None), 2.0),
        (MODELOPT_NVFP4, (None, None, 0.25), 4.0),
        (MODELOPT_NVFP4, (1.0, 0.25, 0.5), 1.0),
        (MODELOPT_NVFP4, (None, None, None), None),
        (COMPRESSED_NVFP4, (INF, 8.0, 6.0), 6.0),
        (COMPRESSED_NVFP4, (7.0, None, 8.0), 7.0),
        (COMPRESSED_NVFP4, (1.0, 8.0, 6.0), 6.0),
        (COMPRESSED_NVFP4, (1.0, 0.5, INF), 0.5),
        (COMPRESSED_NVFP4, (1.0, 1.0, INF), 1.0),
        (COMPRESSED_NVFP4, (INF, None, INF), "give intermediate_gsf"),
        (COMPRESSED_NVFP4, (8.0, 0.0, 6.0), "expected a positive number, got 0.0"),
        (COMPRESSED_NVFP4, (8.0, math.nan, 6.0), "expected a positive number, got nan"),
        (COMPRESSED_NVFP4, (-INF, 8.0, 6.0), "expected a positive number, got -inf"),
    ],
)
def test_experts_that_calibration_never_reached_do_not_count(
    layout: WeightLayout, stored: tuple[float | None, ...], want: float | str | None, tmp_path: Path
) -> None:
    """Their scale is not there, or infinite or 1, by who wrote it. All of a layer count on every rank, so that ranks
    agree whichever they have."""
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            smallest(tmp_path, layout, stored)
    else:
        assert smallest(tmp_path, layout, stored) == want


@pytest.mark.parametrize(
    ("layout", "stored", "expert"),
    [
        (MODELOPT_NVFP4, (0.5, 1e-6, 1.0, 0.5), 1),
        (COMPRESSED_NVFP4, (INF, 2.0, 1.0, 2.0**14), None),
        (COMPRESSED_NVFP4, (1.0, 1.0, 1.0, INF), None),
        (COMPRESSED_NVFP4, (1.0, 2.0**16, 2.0**17, 2.0**16), None),
        (COMPRESSED_NVFP4, (1.0, 2.0, 2.0**17, 2.0), 2),
    ],
)
def test_experts_that_calibration_never_reached_are_not_warned_of(
    layout: WeightLayout, stored: tuple[float, ...], expert: int | None, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        smallest(tmp_path, layout, stored)
    assert len(seen) == (expert is not None)
    assert expert is None or re.search(name_of(layout, expert), str(seen[0].message))


@pytest.mark.parametrize(
    ("layout", "bad", "message"),
    [
        ("modelopt", 3e38, r"expected at most 2\^126, got 3e\+38"),
        ("modelopt", 2.0**126 * 1.5, r"expected at most 2\^126, got 1\.27"),
        ("modelopt", INF, "expected a positive number, got inf"),
        ("modelopt", -0.5, "expected a positive number, got -0.5"),
        ("modelopt", 0.0, "expected a positive number, got 0.0"),
        ("modelopt", math.nan, "expected a positive number, got nan"),
        ("compressed-tensors", 1e-40, r"expected at least 2\^-126, got 9\.99995e-41"),
        ("compressed-tensors", 2.0**-127, r"expected at least 2\^-126, got 5\.87"),
        ("compressed-tensors", 0.0, "expected a positive number, got 0.0"),
        ("compressed-tensors", -INF, "expected a positive number, got -inf"),
    ],
)
def test_a_scale_of_inputs_that_no_kernel_takes_is_named(layout: str, bad: float, message: str, folder: Path) -> None:
    """By file and tensor, whatever field of a layer it would become; on every rank, since all experts' count."""
    write(folder, layout)
    scale = LAYOUTS[layout].input_scale
    assert scale is not None
    name = f"{BLOCK}.1.down_proj.{scale.suffix}"
    change_tensor(folder, name, torch.full_like(load_all(folder)[name], bad))
    message = rf"{folder / SINGLE_FILE}: tensor {re.escape(name)}: {message}"
    with pytest.raises(ValueError, match=message), ExpertParallelContext(device="cpu") as context:
        MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
    # Whoever gives a scale does not need the stored ones.
    assert layer_config_of(folder, max_tokens_per_rank=8, intermediate_gsf=3.0).intermediate_gsf == 3.0


@pytest.mark.parametrize("stored", [2.0**126, 2.0**-100, 2.0**-101, 1e-40])
def test_scales_of_inputs_at_the_ends_make_a_layer(stored: float, folder: Path) -> None:
    write(folder, "modelopt")
    names = [name for name in load_all(folder) if name.endswith("down_proj.input_scale")]
    rewrite(folder, load_all(folder) | {name: torch.tensor(stored) for name in names})
    with ExpertParallelContext(device="cpu") as context, warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)
    assert layer.config.intermediate_gsf == min(1 / stored, 2.0**100)


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
@pytest.mark.parametrize(
    ("layout", "bad", "message"),
    [
        ("modelopt", 3e38, r"expected at most 2\^116, got 3e\+38"),
        ("modelopt awq", 1e36, r"expected at most 2\^116, got 1e\+36"),
        ("modelopt", INF, "expected a positive number, got inf"),
        ("modelopt", -1.0, "expected a positive number, got -1.0"),
        ("modelopt awq", -INF, "expected a positive number, got -inf"),
        ("compressed-tensors", 1e-40, r"expected at least 2\^-116, which weights are divided by, got 9\.99995e-41"),
        ("compressed-tensors", 2.0**-117, r"expected at least 2\^-116, which weights are divided by, got 6\.0"),
        ("compressed-tensors", 0.0, "expected a positive number, got 0.0"),
        ("compressed-tensors", -INF, "expected a positive number, got -inf"),
    ],
)
def test_a_scale_that_makes_weights_infinite_is_named(
    layout: str, bad: float, message: str, part: str, folder: Path
) -> None:
    write(folder, layout)
    scale = LAYOUTS[layout].weight_scale
    assert scale is not None
    name = f"{BLOCK}.1.{part}.{scale.suffix}"
    change_tensor(folder, name, torch.full_like(load_all(folder)[name], bad))
    with (
        pytest.raises(ValueError, match=rf"{folder / SINGLE_FILE}: tensor {re.escape(name)}: {message}"),
        ExpertParallelContext(device="cpu") as context,
    ):
        MoELayer.from_checkpoint(folder, context=context, max_tokens_per_rank=8)


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        ("modelopt", 1e-44),
        ("modelopt", 2.0**-126),
        ("modelopt", 2.0**116),
        ("modelopt awq", 1e-42),
        ("compressed-tensors", 3e38),
        ("compressed-tensors", 2.0**126),
        ("compressed-tensors", 2.0**-116),
    ],
)
def test_scales_of_weights_at_the_ends_are_read_as_they_are(layout: str, stored: float, folder: Path) -> None:
    """Denormal ones too, to what fp32 has of their reciprocal."""
    write(folder, layout)
    scale = LAYOUTS[layout].weight_scale
    assert scale is not None
    name = f"{BLOCK}.1.down_proj.{scale.suffix}"
    before = load_all(folder)
    with Checkpoint(folder) as checkpoint:
        want = dense(checkpoint.reader(0).expert(1).down).double()
    old, new = (torch.tensor(value, dtype=torch.float32).double() for value in (before[name].item(), stored))
    change_tensor(folder, name, torch.full_like(before[name], stored))
    with Checkpoint(folder) as checkpoint:
        got = dense(checkpoint.reader(0).expert(1).down).double()
    want *= old / new if scale.divides else new / old
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=2.0**-21, atol=2.0**-148)
