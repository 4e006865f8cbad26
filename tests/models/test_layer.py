"""`MoELayer` from the outside: against transformers' own block, from YAML and checkpoints, and used wrongly."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.families import layer_config
from moe_runtime.checkpoints.loading import ExpertTensors
from moe_runtime.comm.errors import PeerAbortedError
from moe_runtime.config import ModeName, MoELayerConfig, load_config
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.integrations.expert_modules import describe_experts
from moe_runtime.kernels.exchange.geometry import RouterIds
from moe_runtime.kernels.formats.number_formats import FORMATS
from moe_runtime.kernels.formats.quantize import dequantize_rows, quantize_rows
from moe_runtime.kernels.formats.scale_blocks import expert_starts
from moe_runtime.kernels.gemm.weights import ExpertWeights, GateUpOrder, SwiGLU
from moe_runtime.launch.common.qwen3_checkpoint import write_qwen3_moe_checkpoint
from moe_runtime.layer import MoELayer
from moe_runtime.observation.phases import PhaseTimes
from moe_runtime.placement.placement import Placement
from moe_runtime.reference import error_bound, moe_reference, relative_error
from moe_runtime.virtual import VirtualRanks, virtual_contexts
from tests.support.comparison import assert_same_bits
from tests.support.exchange_data import set_mode
from tests.support.waiting import synchronize

SETTINGS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 8,
    "top_k": 3,
    "max_tokens_per_rank": 64,
}


def make_layer(device: torch.device, seed: int = 0, **changes: Any) -> MoELayer:
    layer = MoELayer(MoELayerConfig(**{**SETTINGS, **changes}), ExpertParallelContext(device=device, timeout_s=10))
    layer.load_random(seed)
    return layer


def tokens(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, 256, generator=rng).to(torch.bfloat16)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_bf16_is_no_worse_than_transformers_own_block(
    world: int, norm_topk_prob: bool, device: torch.device, rng: torch.Generator
) -> None:
    """Frobenius norm and largest element of the error against float64: at most the block's own plus 2^-8.

    On several ranks also what rounding their partial results to the combine format adds.
    """
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    from transformers import Qwen3MoeConfig

    settings = Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
        hidden_act="silu",
    )
    settings._experts_implementation = "eager"
    block = modeling.Qwen3MoeSparseMoeBlock(settings).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * scale)
    block = block.to(torch.bfloat16)
    x = tokens(rng, 64)
    state = block.state_dict()
    gate_up, down = state["experts.gate_up_proj"], state["experts.down_proj"]
    with torch.no_grad():
        own = block(x[None])
        own = (own[0] if isinstance(own, tuple) else own)[0]
        routed = block.gate(x)
    topk_weights, topk_idx = (t for t in routed[1:]) if routed[1].is_floating_point() else (routed[2], routed[1])

    reference = moe_reference(x, topk_idx, topk_weights.float(), gate_up, down, SwiGLU())

    def load(layer: MoELayer) -> None:
        layer.load_experts((gate_up[e], down[e]) for e in layer.local_experts)

    with VirtualRanks(MoELayerConfig(**SETTINGS), world, load, device=device) as ranks:
        none = (x[:0].to(device), topk_idx[:0].to(device), topk_weights[:0].float().to(device))
        mine = (x.to(device), topk_idx.to(device), topk_weights.float().to(device))
        inputs = [mine] + [none] * (world - 1)
        y = ranks([i[0] for i in inputs], [(i[1], i[2].contiguous()) for i in inputs])[0]
    # One rank's partial result is the sum itself. Several ranks' are rounded to bf16 each, half a unit in the last
    # place (2^-9 to 2^-8 of it), before they are added: by what that can come to at most, the layer may be worse.
    rounding = torch.zeros_like(reference)
    if world > 1:
        starts = expert_starts(8, world)
        for first, end in pairwise(starts):
            here = torch.where((topk_idx >= first) & (topk_idx < end), topk_idx, -1)
            rounding += 2.0**-8 * moe_reference(x, here, topk_weights.float(), gate_up, down, SwiGLU()).abs()
    allowed = rounding.norm() / reference.norm(), rounding.max() / reference.abs().max()
    found, own_error = relative_error(y.cpu(), reference), relative_error(own.cpu(), reference)
    for ours, theirs, more in zip(found, own_error, allowed, strict=True):
        assert ours <= theirs + 2.0**-8 + float(more)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_layer_is_no_worse_than_the_block_of_its_family(
    family: str, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """Router, shared expert and biases of the layer's own, loaded from a block of transformers.

    Against the block in float64, over the tokens that both route alike: the error of the block in bf16, which is
    given the float64 block's experts and weights, plus 2^-8, in the Frobenius norm.
    """
    pytest.importorskip("transformers")
    from tests.support.parallel_models import hooked
    from tests.support.tiny_models import gate_of, moe_blocks, shared_of, tiny_model

    model = tiny_model(family, seed, num_hidden_layers=2)
    config = layer_config(model.config.to_dict(), max_tokens_per_rank=200)
    block = moe_blocks(model)[0]
    gate, experts, shared = gate_of(block), block.experts, shared_of(block)
    x = torch.randn(200, config.hidden_size, generator=rng).to(torch.bfloat16)
    layer = MoELayer(config, ExpertParallelContext(device=device, timeout_s=10))
    assert layer.router is not None
    layer.router.load(
        gate.weight,
        bias=getattr(gate, "bias", None),
        correction_bias=getattr(gate, "e_score_correction_bias", None),
    )
    layer.load_experts(describe_experts(experts).tensors(layer.local_experts))
    if layer.shared_expert is not None:
        token_gate = getattr(block, "shared_expert_gate", None)
        layer.shared_expert.load(
            shared.gate_proj.weight,
            shared.up_proj.weight,
            shared.down_proj.weight,
            None if token_gate is None else token_gate.weight,
        )
    y = layer(x.to(device)).cpu()
    routed_alike = layer.router(x.to(device))[0].long().cpu().sort().values
    routes: list[Any] = []

    def whole(block: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output = block(x[None])
        return (output[0] if isinstance(output, tuple) else output)[0]

    def keep(module: Any, args: Any, output: Any) -> None:
        routes.append(output)

    def force(module: Any, args: Any, output: Any) -> Any:
        return output[0], routes[0][1].to(output[1].dtype), routes[0][2]

    with hooked([gate], lambda _: keep):
        exact = whole(block.double(), x.double())
    with hooked([gate], lambda _: force):
        own = whole(block.to(torch.bfloat16), x)
    alike = (routes[0][2].sort().values == routed_alike).all(dim=1)
    assert alike.sum() >= 195
    assert relative_error(y[alike], exact[alike])[0] <= relative_error(own[alike], exact[alike])[0] + 2.0**-8


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_every_format_is_within_its_bound_of_float64(
    fmt: str, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    layer = make_layer(device, seed, token_format=fmt)
    x = tokens(rng, 64)
    y = layer(x.to(device))
    topk_idx, topk_weights = layer.router(x.to(device))
    experts = [random_expert(layer.config, seed, e, device) for e in range(8)]
    gate_up, down = (torch.stack([pair[i] for pair in experts]) for i in (0, 1))
    reference = moe_reference(x, topk_idx.cpu(), topk_weights.cpu(), gate_up.cpu(), down.cpu(), SwiGLU())
    assert relative_error(y.cpu(), reference)[0] <= error_bound(fmt)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(192, 320), (288, 192), (960, 192), (2880, 320), (288, 1408), (192, 1856), (320, 2880)]
)
@pytest.mark.parametrize("order", [*GateUpOrder])
def test_fp8_blocks_may_be_short(
    order: GateUpOrder, hidden: int, inner: int, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """Of tokens, weights, the intermediate and partial results of two ranks, within the bound of whole ones."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_experts": 4, "top_k": 2}
    formats = {"token_format": "fp8_block", "combine_format": "fp8_block", "activation": {"order": order.value}}
    config = MoELayerConfig(**SETTINGS | sizes | formats)
    experts = [random_expert(config, seed, e) for e in range(4)]
    xs = [torch.randn(count, hidden, generator=rng).to(torch.bfloat16) for count in (40, 24)]

    def load(layer: MoELayer) -> None:
        layer.load_random(seed)
        layer.load_experts(experts[e] for e in layer.local_experts)

    with VirtualRanks(config, 2, load, device=device) as ranks:
        routes = [ranks.layers[0].router(x.to(device)) for x in xs]
        y = torch.cat(ranks([x.to(device) for x in xs], routes)).cpu()
    idx, weights = (torch.cat([route[i].cpu() for route in routes]) for i in (0, 1))
    gate_up, down = (torch.stack([expert[i] for expert in experts]) for i in (0, 1))
    reference = moe_reference(torch.cat(xs), idx, weights, gate_up, down, SwiGLU(order))
    assert relative_error(y, reference)[0] <= error_bound("fp8_block", combine_format="fp8_block")


def test_random_experts_are_all_others(seed: int) -> None:
    """By expert and by seed, and the same again; gate and up apart."""
    c = MoELayerConfig(**SETTINGS)
    drawn = [random_expert(c, s, e) for s in (seed, seed + 1) for e in (0, 1, 2)]
    for number, expert in enumerate(drawn):
        gate, up = expert.gate_up.chunk(2)
        assert not torch.equal(gate, up)
        for other in drawn[:number]:
            assert not torch.equal(expert.gate_up, other.gate_up) and not torch.equal(expert.down, other.down)
    assert_same_bits(random_expert(c, seed, 2).down, drawn[2].down)


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
def test_of_mxfp4_weights_mxfp8_tokens_lose_nothing(
    mode: ModeName, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """Three ranks, one without tokens, against float64 with the weights as they are stored."""
    config = MoELayerConfig(**SETTINGS, token_format="mxfp8", weight_format="mxfp4")
    plain = [random_expert(config, seed, e)[:2] for e in range(8)]
    stored = [[ExpertWeights.quantize(w[None], "mxfp4", engine="torch") for w in pair] for pair in plain]
    gate_up, down = (torch.stack([pair[i].dequantize(engine="torch")[0] for pair in stored]) for i in (0, 1))
    xs = [tokens(rng, count) for count in (64, 0, 33)]
    scores = [torch.randn(len(x), 8, generator=rng).topk(3) for x in xs]
    routes = [(best.indices.int(), best.values.softmax(1)) for best in scores]

    def load(layer: MoELayer) -> None:
        set_mode(layer, mode).load_experts(ExpertTensors(*stored[e]) for e in layer.local_experts)

    with VirtualRanks(config, 3, load, device=device) as ranks:
        ys = ranks([x.to(device) for x in xs], [(idx.to(device), weights.to(device)) for idx, weights in routes])
    reference = [moe_reference(x, *route, gate_up, down, SwiGLU()) for x, route in zip(xs, routes, strict=True)]
    error, _ = relative_error(torch.cat(ys).cpu(), torch.cat(reference))
    assert error_bound("bf16") < error <= error_bound("mxfp8", "bf16")


@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_fp8_tokens_of_four_bit_weights_are_bf16_tokens_of_their_values(
    weights: str, mode: ModeName, device: torch.device, rng: torch.Generator, seed: int
) -> None:
    """The same bits on three ranks, one without tokens, and within the bound of float64. The intermediate is bf16."""
    xs = [tokens(rng, count) for count in (64, 0, 33)]
    values = [
        dequantize_rows(quantize_rows(x, "fp8_block", engine="torch"), engine="torch").bfloat16() if len(x) else x
        for x in xs
    ]
    scores = [torch.randn(len(x), 8, generator=rng).topk(3) for x in xs]
    routes = [(best.indices.int().to(device), best.values.softmax(1).to(device)) for best in scores]
    plain = [random_expert(MoELayerConfig(**SETTINGS), seed, e)[:2] for e in range(8)]
    found = []
    for fmt, given in (("fp8_block", xs), ("bf16", values)):
        config = MoELayerConfig(**SETTINGS, token_format=fmt, weight_format=weights)
        assert config.intermediate_format == "bf16"

        def load(layer: MoELayer) -> None:
            set_mode(layer, mode).load_experts(ExpertTensors(*plain[e]) for e in layer.local_experts)

        with VirtualRanks(config, 3, load, device=device) as ranks:
            found.append(torch.cat(ranks([x.to(device) for x in given], routes)))
    assert_same_bits(*found, "tokens")
    gate_up, down = (torch.stack([pair[i] for pair in plain]) for i in (0, 1))
    routes = [(idx.cpu(), weights.cpu()) for idx, weights in routes]
    reference = [moe_reference(x, *route, gate_up, down, SwiGLU()) for x, route in zip(xs, routes, strict=True)]
    error, _ = relative_error(found[0].cpu(), torch.cat(reference))
    assert error_bound("fp8_block") < error <= error_bound("fp8_block", weights)


@pytest.mark.parametrize(
    ("fmt", "weights"),
    [*((fmt, fmt) for fmt in sorted(FORMATS)), ("mxfp8", "mxfp4"), ("fp8_block", "nvfp4"), ("fp8_block", "mxfp4")],
    ids="-".join,
)
@pytest.mark.parametrize("mode", ["gathered", "contiguous"])
def test_modes_repetitions_and_neighbours_do_not_change_a_bit(
    fmt: str, weights: str, mode: ModeName, device: torch.device, rng: torch.Generator
) -> None:
    formats = {"token_format": fmt, "weight_format": weights}
    layer, contiguous = (set_mode(make_layer(device, **formats), rows) for rows in (mode, "contiguous"))
    x = tokens(rng, 40).to(device)
    y = layer(x)
    assert_same_bits(layer(x), y, "the second time")
    assert_same_bits(contiguous(x), y, "with contiguous rows")
    assert_same_bits(layer(x[7:9]), y[7:9], "two tokens alone")
    assert_same_bits(layer(x.flip(0)).flip(0), y, "in another order")


def test_any_leading_shape_and_no_tokens_at_all(device: torch.device, rng: torch.Generator) -> None:
    layer = make_layer(device)
    x = tokens(rng, 2, 5).to(device)
    y = layer(x)
    assert y.shape == x.shape and y.dtype == torch.bfloat16
    assert_same_bits(y.view(10, 256), layer(x.view(10, 256)))
    assert_same_bits(layer(x[0, 0]), y[0, 0])
    assert layer(x[:, :0]).shape == (2, 0, 256)


def test_a_shared_expert_is_added_first_and_an_unrouted_token_is_only_that(
    device: torch.device, rng: torch.Generator
) -> None:
    layer = make_layer(device)
    x, shared = tokens(rng, 4).to(device), tokens(rng, 4).to(device)
    none = torch.full((4, 3), -1, device=device)
    weights = torch.rand(4, 3, device=device)
    assert_same_bits(layer(x, topk_idx=none, topk_weights=weights, shared=shared), shared)
    assert_same_bits(layer(x, topk_idx=none, topk_weights=weights), torch.zeros_like(x))


def test_a_nan_stays_in_its_token(device: torch.device, rng: torch.Generator) -> None:
    for fmt in FORMATS:
        layer = make_layer(device, token_format=fmt)
        x = tokens(rng, 6).to(device)
        topk_idx = torch.tensor([[0, 1, 2]] * 6, device=device)
        topk_weights = torch.rand(6, 3, generator=rng).to(device)
        clean = layer(x, topk_idx=topk_idx, topk_weights=topk_weights)
        x[2, 100] = float("nan")
        y = layer(x, topk_idx=topk_idx, topk_weights=topk_weights)
        assert y[2].isnan().all(), fmt
        keep = [0, 1, 3, 4, 5]
        assert_same_bits(y[keep], clean[keep], fmt)


def test_from_yaml_and_from_checkpoint_give_the_layer_that_was_written(
    tmp_path: Path, device: torch.device, rng: torch.Generator
) -> None:
    config = MoELayerConfig(**SETTINGS)
    write_qwen3_moe_checkpoint(tmp_path / "model", config, seed=5, num_layers=2)
    context = ExpertParallelContext(device=device)
    direct = MoELayer.from_checkpoint(
        tmp_path / "model", layer=1, context=context, max_tokens_per_rank=64, token_format="mxfp8"
    )
    lines = ["layer:"] + [f"  {key}: {value}" for key, value in SETTINGS.items()]
    lines += ["  token_format: mxfp8", "checkpoint:", f"  path: {tmp_path / 'model'}", "  layer: 1"]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    by_yaml = MoELayer.from_yaml(tmp_path / "run.yaml", context=context)
    x = tokens(rng, 9).to(device)
    assert_same_bits(by_yaml(x), direct(x))
    other = MoELayer.from_checkpoint(
        tmp_path / "model", layer=0, context=context, max_tokens_per_rank=64, token_format="mxfp8"
    )
    assert not torch.equal(other(x), direct(x))


def test_formats_of_a_yaml_that_are_auto_are_those_of_its_checkpoint(tmp_path: Path, rng: torch.Generator) -> None:
    config = MoELayerConfig(**SETTINGS)
    write_qwen3_moe_checkpoint(tmp_path / "plain", config, seed=5)
    convert_checkpoint(tmp_path / "plain", tmp_path / "model", "mxfp4")
    for asked, found in (
        ({"weight_format": "auto"}, ("bf16", "mxfp4")),
        ({"token_format": "auto", "weight_format": "auto"}, ("bf16", "mxfp4")),
        ({"token_format": "mxfp8", "weight_format": "auto"}, ("mxfp8", "mxfp4")),
        ({"token_format": "fp8_block", "weight_format": "auto"}, ("fp8_block", "mxfp4")),
        ({"token_format": "nvfp4", "weight_format": "auto"}, ("nvfp4", "nvfp4")),
        ({"token_format": "auto", "weight_format": "nvfp4"}, ("bf16", "nvfp4")),
    ):
        run = {"layer": SETTINGS | asked, "checkpoint": {"path": str(tmp_path / "model")}}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        with MoELayer.from_yaml(tmp_path / "run.yaml") as layer:
            assert (layer.config.token_format, layer.config.weight_format) == found


def test_a_layer_closes_the_context_that_was_made_for_it_and_no_other(tmp_path: Path, rng: torch.Generator) -> None:
    config = MoELayerConfig(**SETTINGS)
    write_qwen3_moe_checkpoint(tmp_path / "model", config, seed=5)
    run = {"layer": SETTINGS, "checkpoint": {"path": str(tmp_path / "model")}, "parallel": {"timeout_s": 7.0}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    ways: list[Callable[[ExpertParallelContext | None], MoELayer]] = [
        lambda context: MoELayer.from_yaml(tmp_path / "run.yaml", context=context),
        lambda context: MoELayer.from_run_config(load_config(tmp_path / "run.yaml"), context),
        lambda context: MoELayer.from_checkpoint(tmp_path / "model", context=context, max_tokens_per_rank=64),
        lambda context: MoELayer(config, context),
    ]
    ys, x = [], tokens(rng, 3)
    for number, way in enumerate(ways):
        with way(None) as layer:
            if number == 3:
                layer.load_checkpoint(tmp_path / "model", 0)
            ys.append(layer(x.to(layer.context.device)))
            assert layer.context.timeout_s == (7.0 if number < 2 else 30.0)
        assert layer.context.closed
        layer.close()
        assert_same_bits(ys[-1], ys[0])
        with ExpertParallelContext() as context:
            with way(context) as layer:
                pass
            layer.close()
            assert not context.closed
    left = MoELayer(config)
    with pytest.raises(KeyError), left:
        raise KeyError("a step")
    assert left.context.closed and left.context.failed


def test_a_checkpoint_is_loaded_from_a_path_or_one_that_is_open(tmp_path: Path, rng: torch.Generator) -> None:
    write_qwen3_moe_checkpoint(tmp_path, MoELayerConfig(**SETTINGS), seed=5)
    with Checkpoint(tmp_path) as checkpoint, MoELayer(MoELayerConfig(**SETTINGS)) as layer:
        x = tokens(rng, 3).to(layer.context.device)
        layer.load_checkpoint(checkpoint, 0)
        y = layer(x)
        assert checkpoint.files._open, "left open"
        checkpoint.close()
        assert not checkpoint.files._open
        layer.load_random(0)
        layer.load_checkpoint(str(tmp_path), 0)
        assert_same_bits(layer(x), y)
        with pytest.raises(ValueError, match="checkpoint: expected a Checkpoint or a path, got int"):
            layer.load_checkpoint(3, 0)  # type: ignore[arg-type]


def test_a_checkpoint_that_fails_leaves_all_weights_of_the_one_before(tmp_path: Path, rng: torch.Generator) -> None:
    for seed, folder in enumerate((tmp_path / "first", tmp_path / "second")):
        write_qwen3_moe_checkpoint(folder, MoELayerConfig(**SETTINGS), seed=seed)
    path = next((tmp_path / "second").glob("*.safetensors"))
    data = load_file(path)
    name = next(name for name in data if "experts.7.down_proj" in name)
    save_file(data | {name: data[name][:, 1:].contiguous()}, path)
    with MoELayer(MoELayerConfig(**SETTINGS)) as layer:
        x = tokens(rng, 3).to(layer.context.device)
        layer.load_checkpoint(tmp_path / "first", 0)
        y = layer(x)
        with pytest.raises(ValueError, match=r"experts\.7\.down_proj"):
            layer.load_checkpoint(tmp_path / "second", 0)
        assert_same_bits(layer(x), y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 16}, "num_experts: .*config.json says 8, got 16"),
        ({"hidden_size": 128}, "hidden_size: .*config.json says 256, got 128"),
        ({"top_k": 2}, "top_k: .*config.json says 3, got 2"),
        ({"router": {"renormalize": False}}, "router: .*config.json says"),
        ({"activation": {"order": "interleaved"}}, "activation: .*config.json says .*order='gate_up'"),
    ],
)
def test_a_yaml_that_contradicts_its_checkpoint_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, device: torch.device
) -> None:
    write_qwen3_moe_checkpoint(tmp_path / "model", MoELayerConfig(**SETTINGS), seed=5)
    run = {"layer": {**SETTINGS, **change}, "checkpoint": {"path": str(tmp_path / "model")}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(ValueError, match=message):
        MoELayer.from_yaml(tmp_path / "run.yaml", context=ExpertParallelContext(device=device))


def test_any_seed_that_a_config_may_have_gives_weights(device: torch.device) -> None:
    make_layer(device, 2**63 - 1)


def test_phases_are_timed_when_asked_for(device: torch.device, rng: torch.Generator) -> None:
    layer = make_layer(device)
    layer.times = PhaseTimes(device)
    for _ in range(2):
        layer(tokens(rng, 4).to(device))
    times = layer.times.milliseconds()
    assert list(times) == ["route", "dispatch_send", "dispatch_recv", "experts", "combine_send", "combine_recv"]
    assert all(len(values) == 2 and min(values) >= 0 for values in times.values())


@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_a_layer_is_not_copied(way: Callable[[MoELayer], object], device: torch.device) -> None:
    with pytest.raises(TypeError, match="ExpertParallelContext: cannot be copied or pickled, nor can a layer over it"):
        way(make_layer(device))


def test_steps_may_be_in_inference_mode_or_not(device: torch.device, rng: torch.Generator) -> None:
    x = tokens(rng, 5).to(device)
    for first in (True, False):
        layer = make_layer(device)
        ys = []
        for inference in (first, not first, first):
            with torch.inference_mode(inference):
                counters = layer.count_steps()
                ys.append(layer(x))
                counters.poll()
                synchronize(device)
        assert counters.poll().steps >= 2
        for y in ys:
            assert_same_bits(y, ys[0], f"first in inference mode: {first}")
        with pytest.raises(ValueError, match=r"x: expected torch\.bfloat16"):
            layer(x.float())
        layer.context.close()


def test_a_later_layer_that_needs_more_memory_is_refused(device: torch.device, rng: torch.Generator) -> None:
    context = ExpertParallelContext(device=device)
    layer = MoELayer(MoELayerConfig(**SETTINGS), context)
    layer.load_random(0)
    layer(tokens(rng, 4).to(device))
    smaller = MoELayer(MoELayerConfig(**{**SETTINGS, "max_tokens_per_rank": 8}), context)
    smaller.load_random(1)
    smaller(tokens(rng, 4).to(device))
    with pytest.raises(ValueError, match=r"token_flags|landing"):
        MoELayer(MoELayerConfig(**{**SETTINGS, "max_tokens_per_rank": 640}), context)


def test_a_cpu_has_no_number(rng: torch.Generator) -> None:
    layer = make_layer(torch.device("cpu:0"))
    assert layer.context.device == torch.device("cpu")
    assert layer(tokens(rng, 4)).isfinite().all()


def test_one_rank_goes_on_after_a_wrong_call(device: torch.device, rng: torch.Generator) -> None:
    x = tokens(rng, 4).to(device)
    with ExpertParallelContext(device=device, timeout_s=10) as context:
        layer, empty = (MoELayer(MoELayerConfig(**SETTINGS), context) for _ in range(2))
        layer.load_random(0)
        y = layer(x)
        with pytest.raises(ValueError, match="x: expected"):
            layer(x.float())
        with pytest.raises(ValueError, match="experts: no weights are loaded"):
            empty(x)
        assert_same_bits(layer(x), y)


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_one_rank_goes_on_after_a_step_that_was_left_half_done(
    fmt: str, device: torch.device, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was left, and with other tokens: nothing of it is read later."""
    x, other = tokens(rng, 5).to(device), tokens(rng, 64).to(device)

    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    with ExpertParallelContext(device=device, timeout_s=10) as context:
        config = MoELayerConfig(**{**SETTINGS, "token_format": fmt, "shared_expert": {"intermediate_size": 64}})
        layer = MoELayer(config, context)
        layer.load_random(0)
        assert layer.experts is not None and layer.shared_expert is not None
        y = layer(x)
        for stages in range(len(layer._stages) + 1):
            for _ in range(3):
                step = layer._route(other)
                layer._run(step, layer._stages[:stages])
            assert_same_bits(layer(x), y)
        for part in (layer.shared_expert, layer.experts):
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(type(part), "forward" if part is layer.shared_expert else "_run", out_of_memory)
                layer(other)
            assert_same_bits(layer(x), y)


def test_wrong_use_is_named(device: torch.device, rng: torch.Generator) -> None:
    x = tokens(rng, 4).to(device)
    with pytest.raises(
        ValueError, match="config: expected a MoELayerConfig, got RunConfig; of a RunConfig it is `layer`"
    ):
        MoELayer(load_config("tiny_cpu"))
    with pytest.raises(ValueError, match="run: expected a RunConfig, got MoELayerConfig"):
        MoELayer.from_run_config(MoELayerConfig(**SETTINGS))  # type: ignore[arg-type]
    for make in (
        lambda: MoELayer(MoELayerConfig(**SETTINGS), "x"),  # type: ignore[arg-type]
        lambda: MoELayer.from_run_config(load_config("tiny_cpu"), "x"),  # type: ignore[arg-type]
        lambda: MoELayer.from_checkpoint("nowhere", context="x", max_tokens_per_rank=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="context: expected an ExpertParallelContext or None, got str"):
            make()
    with pytest.raises(ValueError, match="experts: no weights are loaded"):
        MoELayer(MoELayerConfig(**SETTINGS), ExpertParallelContext(device=device))(x)
    with pytest.raises(ValueError, match="topk_idx: expected together"):
        make_layer(device)(x, topk_idx=torch.zeros(4, 3, dtype=torch.int32, device=device))
    unrouted = MoELayer(MoELayerConfig(**SETTINGS), ExpertParallelContext(device=device), router=False)
    unrouted.load_random(0)
    assert unrouted.router is None and not list(unrouted.parameters())
    with pytest.raises(ValueError, match="topk_idx: expected a router's answer, the layer was made without a router"):
        unrouted(x)
    with pytest.raises(ValueError, match="x: expected"):
        make_layer(device)(x[:, :100])
    with pytest.raises(ValueError, match="x: requires grad"):
        make_layer(device)(x.clone().requires_grad_())
    with pytest.raises(ValueError, match="shared: expected the shape of x"):
        make_layer(device)(x, shared=x[:2])
    with pytest.raises(ValueError, match=r"shared: expected torch\.bfloat16"):
        make_layer(device)(x, shared=x.float())
    with pytest.raises(ValueError, match="x: expected device"):
        make_layer(device)(x.to("meta"))
    with pytest.raises(ValueError, match="shared: expected a tensor, got list"):
        make_layer(device)(x, shared=[1])
    with pytest.raises(ValueError, match="x: expected a tensor, got list"):
        make_layer(device)(x.tolist())
    layer = make_layer(device)
    with pytest.raises(ValueError, match="experts: expected 8 for this rank, got 7"):
        layer.load_experts(random_expert(layer.config, 0, e) for e in range(7))
    with pytest.raises(ValueError, match="experts: expected 8 for this rank, got more"):
        layer.load_experts(random_expert(layer.config, 0, e) for e in range(9))
    with pytest.raises(ValueError, match="down of expert 0: expected shape"):
        layer.load_experts((a, a) for a, *_ in (random_expert(layer.config, 0, e) for e in range(8)))
    with VirtualRanks(layer.config, 2, lambda one: one.load_random(0), device=device) as ranks:
        routed = (torch.zeros(4, 3, dtype=torch.int32, device=device), torch.zeros(4, 3, device=device))
        for count in (1, 3):
            with pytest.raises(ValueError, match=f"xs: expected one for each of 2 ranks, got {count}"):
                ranks([x] * count)
        with pytest.raises(ValueError, match="routing: expected one for each of 2 ranks, got 1"):
            ranks([x] * 2, [routed])
        assert len(ranks([x] * 2)) == 2


def test_routes_are_checked_before_those_of_lost_experts_are_dropped(device: torch.device) -> None:
    layer = make_layer(device)

    class Lost:
        def ended(self) -> bool:
            return False

        def without(self, *_: torch.Tensor) -> None:
            raise AssertionError("routes were not checked")

    layer._members.lost = Lost()  # type: ignore[assignment]
    x, ids = (
        torch.zeros(4, 256, dtype=torch.bfloat16, device=device),
        torch.zeros(4, 3, dtype=torch.int32, device=device),
    )
    for idx, weights, name in ((ids, ids[:, :1].float(), "topk_weights"), (ids.short(), ids.float(), "topk_idx")):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            layer(x, topk_idx=idx, topk_weights=weights)


def make_with_other_placements(rank: int, world: int) -> str:
    """Both ranks have the default context; one gives a placement of other ranks."""
    try:
        with MoELayer(MoELayerConfig(**SETTINGS), placement=Placement.contiguous(8, world if rank else 1)) as layer:
            layer.load_random(0)
            layer(torch.zeros(1, 256, dtype=torch.bfloat16))
    except (ValueError, PeerAbortedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.cpu_only
def test_peers_learn_of_a_layer_that_could_not_be_made(get_pool: Any) -> None:
    own, peer = get_pool(2).run(make_with_other_placements)
    assert own.startswith("ValueError: placement: expected 8 experts on 2 rank")
    assert peer.startswith("PeerAbortedError") and "rank 0 gave up: placement: expected" in peer


def make_again(rank: int, world: int) -> int:
    """Rank 0 is told of a wrong placement, and makes the layer again."""
    with ExpertParallelContext(device="cpu") as context:
        if rank == 0:
            with pytest.raises(ValueError, match="placement: expected 8 experts on 2 rank"):
                MoELayer(MoELayerConfig(**SETTINGS), context, placement=Placement.contiguous(8, 1))
        layer = MoELayer(MoELayerConfig(**SETTINGS), context)
        layer.load_random(0)
        layer(torch.zeros(1, 256, dtype=torch.bfloat16))
        return layer.layer_id


@pytest.mark.cpu_only
def test_a_layer_that_could_not_be_made_is_made_again(get_pool: Any) -> None:
    assert get_pool(2).run(make_again) == [0, 0]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_layer_takes_the_ids_of_a_router_with_more_experts(
    ids: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """Three parts of a layer, each with all of its tokens: the bits of the whole where other experts are left out."""
    whole = MoELayer(MoELayerConfig(**SETTINGS | {"num_experts": 24}), ExpertParallelContext(device=device))
    whole.load_random(0)
    x = tokens(rng, 30).to(device)
    topk_idx = torch.rand(30, 24, generator=rng).argsort(1)[:, : whole.config.top_k].to(device, ids)
    topk_weights = torch.rand(topk_idx.shape, generator=rng).to(device)
    topk_idx[3], topk_weights[4, 1] = -1, torch.nan
    for first in (0, 8, 16):
        context = ExpertParallelContext(device=device)
        config = MoELayerConfig(**SETTINGS | {"num_experts": 8})
        layer = MoELayer(config, context, router=False, router_ids=RouterIds(first, 24))
        layer.load_experts(random_expert(whole.config, 0, first + expert, device) for expert in range(8))
        counters, shape = layer.count_steps(), (2, config.max_tokens_per_rank, config.top_k)
        routes = layer.record_routes(torch.empty(shape, dtype=torch.int16, device=device))
        y = layer(x, topk_idx=topk_idx, topk_weights=topk_weights)
        here = (topk_idx >= first) & (topk_idx < first + 8) & ~topk_weights.isnan()
        kept = torch.where(here, topk_idx, -1)
        assert_same_bits(y, whole(x, topk_idx=kept, topk_weights=topk_weights.nan_to_num(0.0)))
        (step,) = routes.read()
        assert torch.equal(step.topk_idx, topk_idx.int()) and counters.read().rows == int(here.sum()) > 0
        assert_same_bits(layer(x, topk_idx=step.topk_idx, topk_weights=topk_weights), y)
        with pytest.raises(ValueError, match="topk_idx: expected"):
            layer(x, topk_idx=topk_idx.short(), topk_weights=topk_weights)
        with pytest.raises(ValueError, match="topk_weights: expected"):
            layer(x, topk_idx=topk_idx, topk_weights=topk_weights.double())
        with pytest.raises(ValueError, match="topk_weights: expected"):
            layer(x, topk_idx=topk_idx, topk_weights=topk_weights[:, :1])


@pytest.mark.parametrize(
    ("router_ids", "given", "complaint"),
    [
        ((0, 8), {}, "router_ids: expected a RouterIds, got tuple"),
        (RouterIds(0, 8), {"router": True}, "router_ids: expected None, or router=False"),
        (RouterIds(0, 8), {"placement": Placement.contiguous(8, 1)}, "router_ids: expected None with a placement"),
        (RouterIds(-1, 8), {}, r"router_ids\.first: expected"),
        (RouterIds(0, 8.0), {}, r"router_ids\.num_experts: expected"),  # type: ignore[arg-type]
        (RouterIds(1, 8), {}, r"router_ids: expected ids of the 8 experts .*, got 1 \.\. 8 of 8"),
    ],
)
def test_wrong_ids_of_a_router_are_named(
    router_ids: Any, given: dict[str, Any], complaint: str, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=complaint):
        config = MoELayerConfig(**SETTINGS)
        MoELayer(config, ExpertParallelContext(device=device), **{"router": False} | given, router_ids=router_ids)


def test_ranks_with_peers_have_all_experts_of_a_router() -> None:
    config = MoELayerConfig(**SETTINGS)
    with pytest.raises(ValueError, match=r"router_ids\.num_experts: expected 8, the experts of all 2 ranks, got 16"):
        MoELayer(config, virtual_contexts(2)[0], router=False, router_ids=RouterIds(0, 16))


@pytest.mark.parametrize("number", ["0", 0.0, True, None])
def test_the_number_of_a_decoder_layer_is_an_integer(number: Any, tmp_path: Path) -> None:
    write_qwen3_moe_checkpoint(tmp_path, MoELayerConfig(**SETTINGS), seed=0)
    with pytest.raises(ValueError, match=f"layer: expected an integer, got {number!r}"):
        MoELayer.from_checkpoint(tmp_path, layer=number, max_tokens_per_rank=4)


@pytest.mark.parametrize("source", ["random", "tensors", "checkpoint", "yaml"])
def test_weights_of_a_layer_that_nobody_holds_are_freed_at_once(
    source: str, device: torch.device, tmp_path: Path, rng: torch.Generator
) -> None:
    """Their memory is back before the next layer is made, whenever Python looks for garbage."""
    config = MoELayerConfig(**SETTINGS)
    write_qwen3_moe_checkpoint(tmp_path, config, seed=5)
    x = tokens(rng, 3).to(device)
    with ExpertParallelContext(device=device, timeout_s=10) as context:
        # A layer stays behind where any object that lives on has it: the second is as the first.
        for _ in range(2):
            layer = MoELayer(config, context)
            if source == "random":
                layer.load_random(0)
            elif source == "tensors":
                layer.load_experts(random_expert(config, 0, expert, device) for expert in range(8))
            elif source == "checkpoint":
                layer.load_checkpoint(tmp_path, 0)
            else:
                run = {"layer": SETTINGS, "checkpoint": {"path": str(tmp_path)}}
                (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
                layer = MoELayer.from_yaml(tmp_path / "run.yaml", context=context)
            layer(x)
            assert layer.experts is not None
            freed = [weakref.ref(layer), weakref.ref(layer.experts), weakref.ref(layer.dispatcher)]
            gc.collect()
            gc.disable()
            try:
                del layer
                assert [reference() for reference in freed] == [None] * 3
            finally:
                gc.enable()
