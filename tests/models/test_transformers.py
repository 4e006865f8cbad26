"""Expert-parallel models of every family against transformers' own: logits, generation, agreement, wrong use."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.conversion import convert_checkpoint
from moe_runtime.checkpoints.quantization import EXPERTS_KEY
from moe_runtime.comm.errors import PeerAbortedError, PeerTimeoutError
from moe_runtime.config import MoELayerConfig, ParallelConfig, RouterConfig, SharedExpertConfig
from moe_runtime.integrations.expert_modules import describe_experts
from moe_runtime.integrations.transformers import ExpertParallel, apply_expert_parallel
from moe_runtime.integrations.transformers_models import without_experts
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.reference import error_bound
from tests.support.comparison import assert_same_bits
from tests.support.pool import run_once

pytest.importorskip("transformers")

import transformers

from tests.support import parallel_models, tiny_models
from tests.support.parallel_models import generate

pytestmark = pytest.mark.cpu_only

FAMILIES = sorted(tiny_models.CLASSES)
SHAPES = [(2, 9), (1, 1), (3, 5), (1, 20)]
"""Batch and sequence of each rank."""
SHAPES_OF_LOGITS = [(10, 9), (1, 1), (3, 5), (1, 20)]
"""The same where errors are compared: of so many tokens that they hardly vary."""
WAIT_S = 60.0
BLOCKS_OF_128: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}


def prompts(seed: int, world: int, shapes: list[tuple[int, int]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, shape, generator=generator) for shape in shapes[:world]]


def save(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    if "moe_intermediate_size" in changes and family in ("mixtral", "gpt_oss"):
        changes = {**changes, "intermediate_size": changes["moe_intermediate_size"]}
    tiny_models.tiny_model(family, seed, **changes).bfloat16().save_pretrained(folder)
    return folder


def spread(path: Path, **settings: Any) -> tuple[Any, ExpertParallel]:
    """The saved model with its experts spread over the ranks of this pool."""
    model = parallel_models.load(path)
    limits = ParallelConfig(timeout_s=WAIT_S, startup_timeout_s=WAIT_S)
    return model, apply_expert_parallel(model, **({"max_tokens_per_rank": 32, "parallel": limits} | settings))


def logits_of_rank(rank: int, world: int, path: Path, ids: list[Any], routes: list[Any], settings: Any) -> Any:
    model, parallel = spread(path, **settings)
    with parallel:
        return parallel_models.logits_with(model, ids[rank], routes[rank])


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Relative error in the Frobenius norm over all ranks."""
    a, b = (torch.cat([x.double().flatten() for x in parts]) for parts in (found, exact))
    return ((a - b).norm() / b.norm()).item()


def check_logits(pool: Any, folder: Path, ids: list[torch.Tensor], fmt: str, weight_fmt: str, **settings: Any) -> None:
    """Our error against float64 with the weights as quantized: the original's, and what the formats may add.

    What they add to the output of a layer's experts is bounded by `error_bound` (the weights being exact); what
    that comes to in the logits is found by disturbing the float64 model's layers by as much.
    """
    own = [parallel_models.record_routes(parallel_models.load(folder), x) for x in ids]
    routes = [route for _, route in own]
    settings |= {"token_format": fmt, "weight_format": weight_fmt, "max_tokens_per_rank": 96}
    found = pool.run(logits_of_rank, folder, ids, routes, settings, timeout=120.0)
    theirs, exact_model = parallel_models.load(folder), parallel_models.load(folder, torch.float64)
    parallel_models.dequantize_experts(theirs, weight_fmt)
    parallel_models.dequantize_experts(exact_model, weight_fmt)
    exact = [parallel_models.logits_with(exact_model, x, r) for x, r in zip(ids, routes, strict=True)]
    own_error = error([parallel_models.logits_with(theirs, x, r) for x, r in zip(ids, routes, strict=True)], exact)
    bound = error_bound(fmt, "bf16")
    disturbed = [parallel_models.logits_with(exact_model, x, r, bound) for x, r in zip(ids, routes, strict=True)]
    allowed = own_error + error(disturbed, exact)
    print(f"ours {error(found, exact):.3e}, theirs {own_error:.3e}, allowed {allowed:.3e}")
    assert error(found, exact) <= allowed


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, world: int, get_pool: Any, tmp_path: Path, seed: int) -> None:
    folder = save(tmp_path, family, seed)
    check_logits(get_pool(world), folder, prompts(seed, world, SHAPES_OF_LOGITS), "bf16", "bf16")


@pytest.mark.parametrize(
    ("family", "fmt", "weight_fmt", "world"),
    [
        ("mixtral", "nvfp4", "nvfp4", 4),
        ("qwen2_moe", "nvfp4", "nvfp4", 1),
        ("qwen3_moe", "nvfp4", "nvfp4", 2),
        ("deepseek_v3", "nvfp4", "nvfp4", 4),
        ("gpt_oss", "nvfp4", "nvfp4", 2),
        ("gpt_oss", "bf16", "nvfp4", 4),
        ("mixtral", "bf16", "nvfp4", 1),
        ("deepseek_v3", "fp8_block", "fp8_block", 1),
        ("qwen2_moe", "fp8_block", "fp8_block", 4),
        ("qwen3_moe", "mxfp8", "mxfp8", 4),
        ("gpt_oss", "mxfp8", "mxfp8", 1),
        ("gpt_oss", "mxfp8", "mxfp4", 2),
    ],
)
def test_logits_of_quantized_models(
    family: str, fmt: str, weight_fmt: str, world: int, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    folder = save(tmp_path, family, seed, **BLOCKS_OF_128)
    check_logits(get_pool(world), folder, prompts(seed, world, SHAPES_OF_LOGITS), fmt, weight_fmt)


def generate_of_rank(rank: int, world: int, path: Path, ids: list[Any], ends: list[Any], settings: Any) -> Any:
    model, parallel = spread(path, **settings)
    with parallel:
        return [generate(model, ids[rank], *ends[rank])[0] for _ in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_ranks_that_finish_at_different_lengths(
    family: str, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """The original's tokens, as far as its best two logits are further apart than errors may bring them together.

    Every expert is chosen, so that no near tie between experts can do more than an error does. Prompts have more
    tokens than `max_tokens_per_rank`; one rank ends with its first token, rows of another at a token of their own.
    """
    changes: dict[str, Any] = {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if hasattr(tiny_models.tiny_config(family), key):
            changes[key] = 6
    # Some models and prompts leave too few tokens that are sure; the next are taken then.
    for number in itertools.count(seed):
        folder = save(tmp_path / str(number), family, number, **changes)
        ids = prompts(number, 4, [(8, 9), (1, 1), (6, 5), (4, 20)])
        original, exact = parallel_models.load(folder), parallel_models.load(folder, torch.float64)
        plain = [generate(original, x, n, None) for x, n in zip(ids, (4, 1, 8, 6), strict=True)]
        ends = [(4, None), (1, None), (8, None), (6, int(plain[3][0][0, 2]))]
        sure = [parallel_models.sure_tokens(exact, x, *seen) for x, seen in zip(ids, plain, strict=True)]
        if sum(count > 0 for row in sure for count in row) >= 5:
            break
    found = get_pool(4).run(generate_of_rank, folder, ids, ends, {"max_tokens_per_rank": 8}, timeout=120.0)
    for (tokens, _), (_, eos), (again, repeated), counts in zip(plain, ends, found, sure, strict=True):
        assert torch.equal(again, repeated)
        for row, wanted in enumerate(tokens.tolist()):
            length = wanted.index(eos) + 1 if eos in wanted else len(wanted)
            same = min(counts[row], length)
            assert again[row, :same].tolist() == wanted[:same]
            if same == length:
                assert not again[row, length:].any()


def bits_of_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    whole, parallel = spread(path, max_tokens_per_rank=32)
    with parallel:
        expected = whole(ids[rank]).logits
    answers = []
    for limit in (1, 6):
        model, parallel = spread(path, max_tokens_per_rank=limit)
        with parallel, parallel.join():
            with parallel.join():
                pass  # within another it changes nothing: no rank is done yet
            # Ranks call it different numbers of times, one of them never.
            answers += [model(ids[rank]).logits for _ in range(3 - rank)]
    return expected, answers


def test_a_split_batch_gives_the_same_bits(get_pool: Any, tmp_path: Path, seed: int) -> None:
    folder = save(tmp_path, "qwen2_moe", seed)
    results = get_pool(4).run(bits_of_rank, folder, prompts(seed, 4), timeout=120.0)
    assert [len(answers) for _, answers in results] == [6, 4, 2, 0]
    for expected, answers in results:
        for answer in answers:
            assert_same_bits(answer, expected)


def sizes_of_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    plain, parallel = spread(path, max_tokens_per_rank=32)
    with parallel, parallel.join():
        expected = [plain(x).logits for x in ids[rank]]
    model, parallel = spread(path, max_tokens_per_rank=8, token_buckets=(2, 5))
    parallel.warm_up()
    assert all(d._stepped for layer in parallel.layers for d in layer.dispatchers.values())
    taken = []
    for layer in parallel.layers:
        for size, dispatcher in layer.dispatchers.items():

            def send(*args: Any, size: int = size, own: Any = dispatcher._dispatch_send, **named: Any) -> Any:
                taken.append(size)
                return own(*args, **named)

            dispatcher._dispatch_send = send
    with parallel, parallel.join():
        answers = [model(x).logits for x in ids[rank]]
    return answers, expected, taken, len(parallel.layers)


def test_calls_take_the_size_that_has_room_for_all_ranks(get_pool: Any, tmp_path: Path, seed: int) -> None:
    """Of 8 tokens or 2 and 5; 20 tokens go in three steps of at most 7. One rank ends after its first call."""
    folder = save(tmp_path, "qwen2_moe", seed)
    calls = [prompts(seed, 3, [(1, n) for n in counts]) for counts in ((1, 2, 5), (2, 1, 1), (3, 20, 1))]
    ids = [[call[0] for call in calls], [call[1] for call in calls], [calls[0][2]]]
    results = get_pool(3).run(sizes_of_rank, folder, ids, timeout=120.0)
    for answers, expected, taken, layers in results:
        assert taken == [5] * layers + [2] * layers + [8] * 3 * layers
        for answer, wanted in zip(answers, expected, strict=True):
            assert_same_bits(answer, wanted)


def router_logits_of_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    model, parallel = spread(path, max_tokens_per_rank=64)
    with parallel:
        output = model(ids[rank], output_router_logits=True)
    return [logits.shape for logits in output.router_logits], output.logits.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_what_routers_record_is_still_there(family: str, get_pool: Any, tmp_path: Path, seed: int) -> None:
    folder, ids = save(tmp_path, family, seed), prompts(seed, 2)
    blocks = len(tiny_models.moe_blocks(tiny_models.tiny_model(family, seed)))
    for x, (shapes, requires_grad) in zip(ids, get_pool(2).run(router_logits_of_rank, folder, ids), strict=True):
        assert shapes == [(x.numel(), 12)] * blocks
        assert not requires_grad


def memory_of_rank(rank: int, world: int, path: Path) -> Any:
    model, parallel = spread(path, token_format="bf16")
    with parallel:
        counts = [(layer.experts.gate_up.num_experts, layer.local_experts) for layer in parallel.layers]
        return counts, [name for name, _ in model.named_parameters() if "experts." in name]


def test_a_rank_keeps_itsown_experts_only(get_pool: Any, tmp_path: Path) -> None:
    folder = save(tmp_path, "gpt_oss", 0)
    first, second = get_pool(2).run(memory_of_rank, folder)
    assert first == ([(6, range(6))] * 3, [])
    assert second == ([(6, range(6, 12))] * 3, [])


def left_out_on_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    whole, parallel = spread(path)
    with parallel:
        expected = whole(ids[rank]).logits
    layers = parallel_models.load(path).model.layers
    asked = []

    def experts(layer: int, local: range) -> Any:
        asked.append((layer, local))
        return describe_experts(layers[layer].mlp.experts).tensors(local)

    with without_experts():
        model = parallel_models.load(path)
    names = [name for name in model.state_dict() if "mlp.experts." in name]
    with apply_expert_parallel(model, max_tokens_per_rank=32, experts=experts):
        return expected, model(ids[rank]).logits, asked, names


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_may_come_from_elsewhere(family: str, get_pool: Any, tmp_path: Path, seed: int) -> None:
    folder, ids = save(tmp_path, family, seed), prompts(seed, 2)
    decoders = tiny_models.tiny_model(family, 0).model.layers
    layers = [number for number, decoder in enumerate(decoders) if hasattr(decoder.mlp, "experts")]
    for rank, (expected, found, asked, names) in enumerate(get_pool(2).run(left_out_on_rank, folder, ids)):
        assert_same_bits(found, expected)
        assert asked == [(layer, range(6 * rank, 6 * rank + 6)) for layer in layers]
        assert names == []


@pytest.mark.parametrize(("family", "fmt"), [("qwen3_moe", "nvfp4"), ("mixtral", "nvfp4"), ("gpt_oss", "mxfp8")])
def test_quantized_experts_that_transformers_misreads_are_refused(family: str, fmt: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source = save(tmp_path / "source", family, 0, **BLOCKS_OF_128)
    convert_checkpoint(source, tmp_path / "target", fmt)
    message = r"model: its experts are quantized .* without_experts\(\) and give experts=Checkpoint\(path\)"
    with pytest.raises(ValueError, match=message):
        spread(tmp_path / "target")
    with without_experts():
        model = parallel_models.load(tmp_path / "target")
    with (
        Checkpoint(tmp_path / "target") as checkpoint,
        apply_expert_parallel(model, max_tokens_per_rank=8, experts=checkpoint, device="cpu"),
    ):
        assert model(torch.tensor([[4, 5, 6]])).logits.isfinite().all()


def test_quantized_experts_that_transformers_reads_right_are_taken(tmp_path: Path) -> None:
    """Those in MXFP4, and plain ones beside linears in NVFP4; not those that `EXPERTS_KEY` describes."""
    pytest.importorskip("compressed_tensors")
    source = save(tmp_path / "source", "qwen3_moe", 0, **BLOCKS_OF_128)
    convert_checkpoint(source, tmp_path / "target", "mxfp4")
    model, parallel = spread(tmp_path / "target")
    assert "model.layers.1.self_attn.q_proj" in model.config.quantization_config.to_dict()["ignore"]
    with parallel, Checkpoint(tmp_path / "target") as checkpoint:
        (expert,) = checkpoint.experts(1, [3])
        assert isinstance(expert.down, ExpertWeights)
        assert_same_bits(
            parallel.layers[1].experts.down.dequantize()[3].bfloat16(), expert.down.dequantize()[0].bfloat16()
        )
    plain = parallel_models.load(source)
    plain.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": [r"re:.*\.experts\."],
    }
    apply_expert_parallel(plain, max_tokens_per_rank=8, device="cpu").close()
    described = parallel_models.load(source)
    setattr(described.config, EXPERTS_KEY, model.config.quantization_config.to_dict())
    with pytest.raises(ValueError, match="model: its experts are quantized in the checkpoint"):
        apply_expert_parallel(described, max_tokens_per_rank=8, device="cpu")


def fp8_quantizer() -> Any:
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    return FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=True)


def mxfp4_quantizer() -> Any:
    from transformers import Mxfp4Config
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    return Mxfp4HfQuantizer(Mxfp4Config(), pre_quantized=True)


@pytest.mark.parametrize(
    ("family", "make", "quantized"),
    [("qwen3_moe", fp8_quantizer, "FP8Experts"), ("gpt_oss", mxfp4_quantizer, "Mxfp4GptOssExperts")],
)
def test_quantizers_put_no_experts_where_they_were_left_out(
    family: str, make: Any, quantized: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they prepare a model on a GPU. Experts of theirs, of a model made outside, are refused."""
    from transformers.integrations import hub_kernels
    from transformers.quantizers import quantizer_mxfp4

    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **named: None)
    with without_experts():
        model = tiny_models.tiny_model(family, 0)
        make()._process_model_before_weight_loading(model)
    blocks = tiny_models.moe_blocks(model)
    assert {type(block.experts).__name__ for block in blocks} == {"_NoExperts"}
    assert [name for name, _ in model.named_parameters() if ".experts." in name] == []
    if family == "qwen3_moe":
        assert type(model.model.layers[0].self_attn.q_proj).__name__ == "FP8Linear"
    experts = functools.partial(random_experts, expert_bias=family == "gpt_oss")
    for block in blocks:
        block.bfloat16()
    with apply_expert_parallel(model, max_tokens_per_rank=8, experts=experts, device="cpu"):
        assert blocks[0](torch.ones(1, 3, 64, dtype=torch.bfloat16))[0].isfinite().all()
    outside = tiny_models.tiny_model(family, 0)
    make()._process_model_before_weight_loading(outside)
    assert type(tiny_models.moe_blocks(outside)[0].experts).__name__ == quantized
    with pytest.raises(ValueError, match=rf"model: model\.layers\.0\.mlp\.experts: expected .*, got {quantized}"):
        apply_expert_parallel(outside, max_tokens_per_rank=8, experts=random_experts, device="cpu")


def random_experts(layer: int, ids: Any, expert_bias: bool = False) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_experts": 12, "top_k": 3, "max_tokens_per_rank": 8}
    config = MoELayerConfig.model_validate(sizes | {"expert_bias": expert_bias})
    return (random_expert(config, layer, expert) for expert in ids)


def mesh_of_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, parallel = spread(path, mesh=mesh["ep"])
    with parallel:
        return parallel.context.world_size, model(ids[rank]).logits


def test_a_part_of_a_mesh(get_pool: Any, tmp_path: Path, seed: int) -> None:
    """Two pairs of ranks, each with all experts: the bits of one pair do not depend on the other."""
    folder, ids = save(tmp_path, "mixtral", seed), prompts(seed, 2)
    results = get_pool(4).run(mesh_of_rank, folder, [*ids, *ids])
    assert [size for size, _ in results] == [2] * 4
    for (_, here), (_, there) in zip(results[:2], results[2:], strict=True):
        assert_same_bits(here, there)


def failing_rank(rank: int, world: int, path: Path, ids: list[Any], where: str) -> Any:
    model, parallel = spread(path)
    started = time.monotonic()
    try:
        with parallel:
            if where == "outside":
                model(torch.cat([ids[0]] * 3) if rank == 0 else ids[rank])
            with parallel.join():
                model(ids[rank])
                if rank == 0:
                    raise RuntimeError("out of ideas")
                for _ in range(3):
                    model(ids[rank])
    except Exception as error:
        return type(error), str(error), time.monotonic() - started
    return None


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_rank_that_fails_is_named_at_once(where: str, get_pool: Any, tmp_path: Path) -> None:
    outcomes = get_pool(2).outcomes(failing_rank, save(tmp_path, "qwen3_moe", 0), prompts(0, 2), where)
    (kind, message, _), (other, told, seconds) = (outcome.result for outcome in outcomes)
    if where == "inside":
        assert (kind, message) == (RuntimeError, "out of ideas")
        assert "rank 0 gave up: RuntimeError: out of ideas" in told
    else:
        assert kind is ValueError
        assert message == "max_tokens_per_rank: 32, got 54 tokens; inside `ExpertParallel.join` they would be split"
        assert "max_tokens_per_rank: 32, got 54 tokens" in told
    assert other is PeerAbortedError and seconds < WAIT_S


def absent_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    """Rank 0 comes when rank 1 has given up."""
    given_up = path / "given_up"
    model, parallel = spread(path)
    assert parallel.context.group is not None
    parallel.context.group.timeout_s = 1.5
    try:
        with parallel, parallel.join():
            if rank == 0:
                deadline = time.monotonic() + WAIT_S
                while not given_up.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
            model(ids[rank])
    except Exception as error:
        given_up.touch()
        return type(error), str(error)
    return None


def test_a_rank_that_does_not_come_is_named(get_pool: Any, tmp_path: Path) -> None:
    outcomes = get_pool(2).outcomes(absent_rank, save(tmp_path, "qwen3_moe", 0), prompts(0, 2))
    late, waiting = (outcome.result for outcome in outcomes)
    assert waiting == (PeerTimeoutError, "call of the model: rank 0 of 2 did not come within 1.5 s")
    assert late[0] is PeerAbortedError and "did not come within 1.5 s" in late[1]


def rank_1_leaves(rank: int, world: int, path: Path, ids: list[Any], how: str) -> Any:
    """What ranks are told that wait for a call of rank 1, which came to two calls; in a second `join`."""
    model, parallel = spread(path)
    pids = [0] * world
    dist.all_gather_object(pids, os.getpid())
    with parallel.join():
        model(ids[rank])
    assert parallel.context.group is not None
    parallel.context.group.timeout_s = 2.0 if how == "stopped" else WAIT_S
    started = time.monotonic()
    try:
        with parallel, parallel.join():
            model(ids[rank])
            if rank == 1:
                time.sleep(0.5)  # The others wait.
                if how == "raises":
                    raise RuntimeError("out of ideas")
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            model(ids[rank])
    except Exception as error:
        if how == "stopped" and rank != 1:
            time.sleep(1.0)
            os.kill(pids[1], signal.SIGCONT)
        return type(error), str(error), getattr(error, "rank", None), time.monotonic() - started
    return None


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("how", ["killed", "raises", "stopped"])
def test_a_rank_that_comes_to_no_further_call_is_named(how: str, world: int, tmp_path: Path) -> None:
    outcomes = run_once(rank_1_leaves, world, save(tmp_path, "qwen3_moe", 0), prompts(0, world), how)
    for outcome in outcomes[:1] + outcomes[2:]:
        assert outcome.exitcode == 0
        kind, message, named, seconds = outcome.returned()
        assert kind is (PeerAbortedError if how == "raises" else PeerTimeoutError), message
        assert named == 1 and "rank 1" in message and seconds < WAIT_S / 2
        assert ("out of ideas" in message) == (how == "raises")
    if how == "killed":
        assert outcomes[1].exitcode == -signal.SIGKILL


def joins_of_rank(rank: int, world: int, path: Path, ids: list[Any]) -> Any:
    """Logits of calls in three `join`s: rank `r` makes `(r + n) % 3` calls in number `n`; and those of a call alone."""
    model, parallel = spread(path)
    top_k, most = parallel.layers[0].config.top_k, parallel.layers[0].config.max_tokens_per_rank
    with parallel, torch.no_grad():
        found = []
        recorded = parallel.record_routes(torch.zeros(len(parallel.layers), 50, most, top_k, dtype=torch.int16))
        for number in range(3):
            with parallel.join():
                found += [model(ids[rank]).logits for _ in range((rank + number) % 3)]
        # None of the steps in which this rank waited for the others, which had none of its tokens.
        assert all(len(step.topk_idx) for routes in recorded.values() for step in routes.read())
        assert all(layer.routes is not None for layer in parallel.layers)
        return found, model(ids[rank]).logits


def test_ranks_join_again_with_other_numbers_of_calls(get_pool: Any, tmp_path: Path, seed: int) -> None:
    for found, alone in get_pool(3).run(joins_of_rank, save(tmp_path, "mixtral", seed), prompts(seed, 3)):
        assert len(found) == 3
        for logits in found:
            assert_same_bits(logits, alone)


def idles_with_other_choices(rank: int, world: int) -> Any:
    """Layers whose tokens have one expert and two, on ranks of which one calls the model more often."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "num_experts": 4, "moe_topk": [1, 2]}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "eod_token_id": 3}
    config = transformers.HunYuanMoEV1Config(**sizes, **heads, **ids)
    model, prompt = transformers.HunYuanMoEV1ForCausalLM(config).bfloat16().eval(), torch.tensor([[4, 5, 6 + rank]])
    with torch.no_grad(), apply_expert_parallel(model, max_tokens_per_rank=8) as parallel:
        assert [layer.config.top_k for layer in parallel.layers] == [1, 2]
        alone = model(prompt).logits
        with parallel.join():
            return [model(prompt).logits for _ in range(1 + rank)], alone


def test_a_rank_that_is_done_takes_part_in_layers_of_other_choices(get_pool: Any) -> None:
    for found, alone in get_pool(2).run(idles_with_other_choices):
        for logits in found:
            assert_same_bits(logits, alone)


def wrong_on_rank(rank: int, world: int, path: Path) -> Any:
    model = parallel_models.load(path, torch.float32 if rank == 1 else torch.bfloat16)
    started = time.monotonic()
    try:
        apply_expert_parallel(model, max_tokens_per_rank=8, parallel=ParallelConfig(startup_timeout_s=WAIT_S))
    except Exception as error:
        return type(error), str(error), time.monotonic() - started
    return None


def test_a_model_that_does_not_fit_on_one_rank_is_told_to_the_others(get_pool: Any, tmp_path: Path) -> None:
    outcomes = get_pool(2).outcomes(wrong_on_rank, save(tmp_path, "qwen3_moe", 0))
    (other, told, seconds), (kind, message, _) = (outcome.result for outcome in outcomes)
    assert kind is ValueError and "expected torch.bfloat16 with values, got torch.float32" in message
    assert other is PeerAbortedError and message in told and seconds < WAIT_S


def change(model: Any, how: str) -> Any:
    if how == "float32":
        return model.float()
    if how == "meta":
        return model.to("meta")
    if how == "twice":
        apply_expert_parallel(model, max_tokens_per_rank=8)
    if how == "module list":
        model.model.layers[1].mlp.experts = torch.nn.ModuleList()
    if how == "left out":
        with without_experts():
            return tiny_models.tiny_model("qwen3_moe", 0).bfloat16()
    if how == "no config":
        model.config = None
    if how == "dense":
        for layer in model.model.layers:
            del layer.mlp.experts
    return model


def test_other_experts_are_refused_though_they_are_not_needed() -> None:
    """Blocks with a list of experts, as remote code has them, do not call it as `ParallelExperts` is called."""
    model = change(tiny_models.tiny_model("qwen3_moe", 0).bfloat16(), "module list")
    message = r"model: model\.layers\.1\.mlp\.experts: expected experts of a .*without_experts\(\), got ModuleList"
    with pytest.raises(ValueError, match=message):
        apply_expert_parallel(model, max_tokens_per_rank=8, experts=random_experts, device="cpu")
    assert all(type(block.experts).__name__ != "ParallelExperts" for block in tiny_models.moe_blocks(model))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "float32",
            r"model\.layers\.0\.mlp\.experts\.gate_up_proj: expected torch\.bfloat16 .*, got torch\.float32",
        ),
        ("meta", r"experts\.gate_up_proj: expected torch\.bfloat16 with values, got on the meta device"),
        ("twice", r"model: model\.layers\.0\.mlp\.experts are expert-parallel already"),
        ("module list", r"model\.layers\.1\.mlp\.experts: expected gate_up_proj of all experts .*got ModuleList"),
        ("left out", r"model\.layers\.0\.mlp\.experts: expected gate_up_proj of all experts .*got _NoExperts"),
        ("no config", "model: expected a transformers model with a config, got Qwen3MoeForCausalLM"),
        ("dense", "model: expected MoE blocks with `experts`, found none in Qwen3MoeForCausalLM"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(how: str, message: str) -> None:
    model = change(tiny_models.tiny_model("qwen3_moe", 0).bfloat16(), how)
    with pytest.raises(ValueError, match=message):
        apply_expert_parallel(model, max_tokens_per_rank=8, device="cpu")


def differing_arguments(rank: int, world: int) -> str:
    model = tiny_models.tiny_model("mixtral", 0).bfloat16()
    ids = torch.tensor([[4, 5, 6]])
    before = model(ids).logits
    with pytest.raises(ValueError) as caught:
        apply_expert_parallel(model, max_tokens_per_rank=8 + rank, device="cpu")
    assert torch.equal(model(ids).logits, before), "its experts are there"
    with apply_expert_parallel(model, max_tokens_per_rank=8, device="cpu"):
        assert model(ids).logits.isfinite().all()
    return str(caught.value)


def test_ranks_that_disagree_leave_the_model_as_it_was(get_pool: Any) -> None:
    for problem in get_pool(2).run(differing_arguments):
        assert re.match(r"agree: ranks disagree on .*max_tokens_per_rank \(layer 0\): rank 0: 8, rank 1: 9", problem)


def test_a_model_without_its_experts_is_not_saved(tmp_path: Path) -> None:
    model = tiny_models.tiny_model("mixtral", 0).bfloat16()
    with apply_expert_parallel(model, max_tokens_per_rank=8):
        with pytest.raises(ValueError, match="save_pretrained: the experts of this model are spread over ranks; save"):
            model.save_pretrained(tmp_path / "saved")
        with pytest.raises(ValueError, match="save_pretrained: the experts of this model are spread over ranks; save"):
            model.model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_one_rank_goes_on_after_a_wrong_call() -> None:
    model = tiny_models.tiny_model("mixtral", 0).bfloat16()
    ids = torch.tensor([[4, 5, 6]])
    with apply_expert_parallel(model, max_tokens_per_rank=8) as parallel:
        wanted = model.generate(ids, max_new_tokens=4)
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(ids, nonsense=3)
        with pytest.raises(RuntimeError, match="out of ideas"), parallel.join():
            raise RuntimeError("out of ideas")
        with pytest.raises(ValueError, match="max_tokens_per_rank: 8, got 9 tokens"):
            model(ids.repeat(3, 1))
        assert torch.equal(model.generate(ids, max_new_tokens=4), wanted)


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, vocab_size=32)).bfloat16()
    with pytest.raises(ValueError, match=r"model: expected MoE blocks with `experts`, found none in LlamaForCausalLM"):
        apply_expert_parallel(llama, max_tokens_per_rank=8)
    model = tiny_models.tiny_model("mixtral", 0).bfloat16()
    with pytest.raises(ValueError, match=r"top_k: the model says 3, got 2"):
        apply_expert_parallel(model, max_tokens_per_rank=8, top_k=2)
    with pytest.raises(ValueError, match="shared_expert: expected none, the model keeps its own, got SharedExp"):
        shared = SharedExpertConfig(intermediate_size=32)
        apply_expert_parallel(model, max_tokens_per_rank=8, shared_expert=shared)
    with pytest.raises(ValueError, match="router: expected none, the model keeps its own, got RouterConfig"):
        apply_expert_parallel(model, max_tokens_per_rank=8, router=RouterConfig(kind="sigmoid"))
    with pytest.raises(ValueError, match="weight_format: expected nvfp4, got mxfp8 with nvfp4 tokens"):
        apply_expert_parallel(model, max_tokens_per_rank=8, token_format="nvfp4", weight_format="mxfp8")
    with pytest.raises(ValueError, match=r"^mesh: expected a DeviceMesh or a ProcessGroup, got str"):
        apply_expert_parallel(model, "world", max_tokens_per_rank=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parallel: expected a ParallelConfig, got dict"):
        apply_expert_parallel(model, max_tokens_per_rank=8, parallel={"timeout_s": 3.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="experts: expected a Checkpoint, a callable or None, got str"):
        apply_expert_parallel(model, max_tokens_per_rank=8, experts="folder")  # type: ignore[arg-type]
    # Nothing was changed by what was refused.
    with apply_expert_parallel(model, max_tokens_per_rank=8):
        assert model(torch.tensor([[4, 5, 6]])).logits.isfinite().all()
    with pytest.raises(ValueError, match="context: it is closed"):
        model(torch.tensor([[4, 5, 6]]))
