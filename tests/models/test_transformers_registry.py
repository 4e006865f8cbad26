"""`moe_runtime` as transformers' implementation of experts and of expert parallelism: what it computes and refuses."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_runtime.integrations.transformers  # noqa: F401  (registers)
from moe_runtime.comm.errors import RoutingError
from moe_runtime.config import ParallelConfig, RouterConfig, SharedExpertConfig
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher
from moe_runtime.experts import activation_of
from moe_runtime.integrations.expert_modules import describe_experts
from moe_runtime.integrations.transformers_registry import _BUILT, _SHARED, NAME, close_experts, experts_settings
from moe_runtime.kernels.gemm.weights import ExpertWeights
from moe_runtime.reference import error_bound, moe_reference, relative_error
from tests.support import tiny_models
from tests.support.comparison import assert_same_bits

pytestmark = pytest.mark.cpu_only

LIMITS = ParallelConfig(timeout_s=60.0, startup_timeout_s=60.0)


def model_of(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny model in bf16 whose experts run here."""
    model = tiny_models.tiny_model(family, seed, **changes).bfloat16()
    model.set_experts_implementation(NAME)
    return model


def recorded(model: Any) -> list[tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]]:
    """A list that gets module, inputs and output of each later call of experts."""
    calls: list[tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]] = []
    for block in tiny_models.moe_blocks(model):
        block.experts.register_forward_hook(lambda module, args, output: calls.append((module, args, output)))
    return calls


@contextmanager
def without_accelerate() -> Iterator[None]:
    """Inside, transformers loads a model to the device of its rank also where `accelerate` is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("accelerate") is None:
            patch.setattr(transformers.modeling_utils, "check_and_set_device_map", lambda device: {"": device})
        yield


def spread(path: Path, sizes: dict[str, int], **settings: Any) -> Any:
    """A saved model that transformers spreads over the ranks, with these settings of experts."""
    with experts_settings(parallel=LIMITS, **settings), without_accelerate():
        config = DistributedConfig(**sizes, ep_implementation=NAME)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, distributed_config=config)


def ep_of_rank(rank: int, world: int, path: Path, ids: list[torch.Tensor], sizes: dict[str, int], limit: int) -> Any:
    """Inputs and outputs of each layer of a model that transformers spread over the ranks."""
    model = spread(path, sizes, max_tokens_per_rank=limit)
    calls = recorded(model)
    try:
        with torch.no_grad():
            for _ in range(2):
                model(ids[rank])
        held = {len(layer.layer.local_experts) for built in _BUILT.values() for layer in built.values()}
        close_experts(model)
    except Exception as error:
        return error
    return held, [(args, output) for _, args, output in calls]


@pytest.mark.parametrize(
    ("family", "world", "sizes", "limit"),
    [
        ("qwen3_moe", 2, {"ep_size": 2, "fsdp_size": 2}, 96),
        ("gpt_oss", 2, {"ep_size": 2, "fsdp_size": 2}, 96),
        ("qwen3_moe", 2, {"ep_size": 2, "tp_size": 2}, 16),
        ("qwen3_moe", 4, {"ep_size": 4, "tp_size": 2, "fsdp_size": 2}, 96),
        ("qwen3_moe", 4, {"ep_size": 2, "fsdp_size": 4}, 96),
    ],
)
def test_transformers_spreads_a_model(
    family: str, world: int, sizes: dict[str, int], limit: int, get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """Ranks with tokens of their own, ranks that share them (more than fit a step), both, and two copies of experts."""
    tiny_models.tiny_model(family, seed).bfloat16().save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    shared = sizes.get("tp_size", 1)
    batches = [torch.randint(3, 96, (5, 19), generator=generator) for _ in range(world // shared)]
    ids = [batches[rank // shared] for rank in range(world)]
    results = get_pool(world).run(ep_of_rank, tmp_path, ids, sizes, limit, timeout=120.0)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    experts = [block.experts for block in tiny_models.moe_blocks(exact)]
    for held, calls in results:
        assert held == {12 // sizes["ep_size"]}
        assert len(calls) == 2 * len(experts)
        for number, ((x, idx, weights), y) in enumerate(calls):
            expected = experts[number % len(experts)](x.double(), idx, weights.double())
            assert relative_error(y, expected)[0] <= error_bound("bf16")


def sizes_of_rank(rank: int, world: int, path: Path, ids: list[torch.Tensor], buckets: tuple[int, ...]) -> Any:
    """Logits of each call of a model whose ranks share the tokens, and the sizes of the steps of all calls."""
    model = spread(path, {"ep_size": 2, "tp_size": 2}, max_tokens_per_rank=16, token_buckets=buckets)
    taken = []

    def send(dispatcher: TokenDispatcher, *args: Any, own: Any = TokenDispatcher._dispatch_send, **named: Any) -> Any:
        taken.append(dispatcher.geometry.max_tokens)
        return own(dispatcher, *args, **named)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenDispatcher, "_dispatch_send", send)
        logits = [model(each).logits for each in ids]
    close_experts(model)
    return logits, taken, len(tiny_models.moe_blocks(model))


def test_ranks_that_share_tokens_take_the_size_that_has_room_for_a_part(
    get_pool: Any, tmp_path: Path, seed: int
) -> None:
    """Parts of 1, 3 and 20 tokens: sizes of 2 and 4, and two steps of 10 in the largest."""
    tiny_models.tiny_model("qwen3_moe", seed).bfloat16().save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 96, (1, count), generator=generator) for count in (1, 5, 39)]
    plain = get_pool(2).run(sizes_of_rank, tmp_path, ids, (), timeout=120.0)
    for (logits, taken, layers), (expected, *_) in zip(
        get_pool(2).run(sizes_of_rank, tmp_path, ids, (2, 4), timeout=120.0), plain, strict=True
    ):
        assert taken == [2] * layers + [4] * layers + [16] * 2 * layers
        for answer, wanted in zip(logits, expected, strict=True):
            assert_same_bits(answer, wanted)


def too_many_of_rank(rank: int, world: int, path: Path) -> str:
    ids = torch.full((1, 9 if rank == 1 else 4), 7)
    found = ep_of_rank(rank, world, path, [ids, ids], {"ep_size": 2, "fsdp_size": 2}, 8)
    assert isinstance(found, Exception)
    return f"{type(found).__name__}: {found}"


def test_too_many_tokens_of_one_rank_end_the_call_of_all(get_pool: Any, tmp_path: Path) -> None:
    tiny_models.tiny_model("qwen3_moe", 0).bfloat16().save_pretrained(tmp_path)
    other, own = get_pool(2).run(too_many_of_rank, tmp_path, timeout=120.0)
    assert own.startswith("ValueError: max_tokens_per_rank: 8, got 9 tokens; load the model inside experts_settings(")
    assert other.startswith("PeerAbortedError: ") and "max_tokens_per_rank: 8, got 9 tokens" in other


def training_of_rank(rank: int, world: int, path: Path) -> str:
    model = spread(path, {"ep_size": 2, "fsdp_size": 2})
    ids = torch.full((1, 4), 7)
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    experts, x = tiny_models.moe_blocks(model)[0].experts, torch.ones(2, 64, dtype=torch.bfloat16)
    try:
        with torch.set_grad_enabled(rank == 1):
            experts(x.requires_grad_(rank == 1), torch.tensor([[0, 1, 2]] * 2), torch.ones(2, 3))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_trains_is_told_to_the_others(get_pool: Any, tmp_path: Path) -> None:
    tiny_models.tiny_model("qwen3_moe", 0).bfloat16().save_pretrained(tmp_path)
    other, own = get_pool(2).run(training_of_rank, tmp_path, timeout=120.0)
    assert own.startswith("ValueError: hidden_states: the experts of moe_runtime are for inference")
    assert other.startswith("PeerAbortedError: ") and "are for inference" in other


@pytest.mark.parametrize("family", sorted(tiny_models.CLASSES))
def test_a_model_in_one_process(family: str, seed: int) -> None:
    """Against float64; 40 tokens in steps of at most 16, which gives the same bits as in one step."""
    model, ids = model_of(family, seed), torch.arange(3, 43)[None]
    calls = recorded(model)
    with torch.no_grad():
        whole = model(ids).logits
        close_experts(model)
        with experts_settings(max_tokens_per_rank=16):
            assert_same_bits(model(ids).logits, whole)
    blocks = tiny_models.moe_blocks(model)
    assert len(calls) == 2 * len(blocks)
    for module, (x, idx, weights), y in calls:
        described = describe_experts(module)
        tensors = list(described.tensors(range(described.num_experts)))
        gate_up, down, gate_up_bias, down_bias = (
            None if parts[0] is None else torch.stack(parts) for parts in zip(*tensors, strict=True)
        )
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        exact = moe_reference(x, idx, weights, gate_up, down, activation_of(described.activation), **biases)
        assert relative_error(y, exact)[0] <= error_bound("bf16")


def test_settings_choose_the_formats(seed: int) -> None:
    model = model_of("qwen3_moe", seed, hidden_size=128, moe_intermediate_size=128)
    calls, ids = recorded(model), torch.arange(3, 83)[None]
    with torch.no_grad(), experts_settings(token_format="mxfp8", weight_format="mxfp4", max_tokens_per_rank=96):
        model(ids)
    for module, (x, idx, weights), y in calls:
        (built,) = _BUILT[module].values()
        assert (built.layer.config.token_format, built.layer.config.weight_format) == ("mxfp8", "mxfp4")
        gate_up, down = (
            ExpertWeights.quantize(weight.detach(), "mxfp4", gate_up=gate_up).dequantize()
            for weight, gate_up in ((module.gate_up_proj, True), (module.down_proj, False))
        )
        exact = moe_reference(x, idx, weights, gate_up, down)
        assert relative_error(y, exact)[0] <= error_bound("mxfp8", "bf16")


def test_formats_may_be_auto(seed: int) -> None:
    """Nothing stored says a format here: tokens are bf16, and so are weights."""
    model, ids = model_of("qwen3_moe", seed), torch.arange(3, 20)[None]
    with torch.no_grad():
        usual = model(ids).logits
        close_experts(model)
        with experts_settings(token_format="auto", weight_format="auto"):
            assert_same_bits(model(ids).logits, usual)
    for block in tiny_models.moe_blocks(model):
        (built,) = _BUILT[block.experts].values()
        assert (built.layer.config.token_format, built.layer.config.weight_format) == ("bf16", "bf16")


def test_weights_are_not_copied_and_changes_count() -> None:
    model, ids = model_of("qwen3_moe"), torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        first = model(ids).logits
        for block in tiny_models.moe_blocks(model):
            (built,) = _BUILT[block.experts].values()
            assert built.layer.experts is not None
            assert built.layer.experts.gate_up.quants.data_ptr() == block.experts.gate_up_proj.data_ptr()
            assert built.layer.experts.down.quants.data_ptr() == block.experts.down_proj.data_ptr()
            block.experts.down_proj.mul_(2.0)
        assert not torch.equal(model(ids).logits, first)
        for block in tiny_models.moe_blocks(model):
            block.experts.down_proj = torch.nn.Parameter(block.experts.down_proj / 2.0)
        assert_same_bits(model(ids).logits, first)


def test_quantized_copies_follow_changes_of_the_weights() -> None:
    model, ids = model_of("gpt_oss"), torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        first = model(ids).logits
        for block in tiny_models.moe_blocks(model):
            block.experts.gate_up_proj_bias.add_(1.0)
        changed = model(ids).logits
        assert not torch.equal(changed, first)
        close_experts(model)
        assert_same_bits(model(ids).logits, changed)


def test_a_parameter_in_the_memory_of_another_is_another() -> None:
    """An allocator gives memory that was freed again, and a new parameter begins at version 0."""
    model, ids = model_of("gpt_oss"), torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        first = model(ids).logits
        for block in tiny_models.moe_blocks(model):
            old = block.experts.gate_up_proj
            old.data.mul_(2.0)
            block.experts.gate_up_proj = new = torch.nn.Parameter(torch.empty(0, dtype=old.dtype))
            new.data = old.data
            for _ in range(old._version - new._version):
                torch.autograd.graph.increment_version(new)
            assert (new.data_ptr(), new._version) == (old.data_ptr(), old._version)
        changed = model(ids).logits
        assert not torch.equal(changed, first)
        close_experts(model)
        assert_same_bits(model(ids).logits, changed)


def test_what_was_made_for_a_model_goes_with_it() -> None:
    gc.collect()
    built, shared = len(_BUILT), len(_SHARED)
    model, ids = model_of("mixtral"), torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        wanted = model(ids).logits
        assert (len(_BUILT), len(_SHARED)) == (built + 3, shared + 1)
        twin = copy.deepcopy(model)
        assert_same_bits(twin(ids).logits, wanted)
        assert (len(_BUILT), len(_SHARED)) == (built + 6, shared + 2)
    del model, twin
    gc.collect()
    assert (len(_BUILT), len(_SHARED)) == (built, shared)


def test_a_routing_error_ends_neither_another_model_nor_its_own() -> None:
    model, other, ids = model_of("mixtral", 0), model_of("mixtral", 1), torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        wanted, others = model(ids).logits, other(ids).logits
        experts = tiny_models.moe_blocks(model)[0].experts
        x, weights = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(2, 3)
        with pytest.raises(RoutingError, match="13"):
            experts(x, torch.tensor([[0, 1, 13], [0, 1, 2]]), weights)
        assert_same_bits(other(ids).logits, others)
        assert_same_bits(model(ids).logits, wanted)


def test_the_id_after_the_last_expert_is_no_expert() -> None:
    model = model_of("mixtral")
    experts = tiny_models.moe_blocks(model)[0].experts
    x, weights = torch.randn(2, 64).bfloat16(), torch.rand(2, 3)
    idx = torch.tensor([[0, 12, 3], [12, 12, 12]])
    with torch.no_grad():
        found = experts(x, idx, weights)
        assert_same_bits(found, experts(x, idx.masked_fill(idx == 12, -1), weights))
    assert found[0].any() and not found[1].any()


def test_calls_that_do_not_fit_are_refused() -> None:
    model, ids = model_of("mixtral"), torch.tensor([[4, 5, 6]])
    with pytest.raises(ValueError, match=r"^hidden_states: .* expected a call inside torch.no_grad\(\)"):
        model(ids)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"^hidden_states: .* take torch.bfloat16, got torch.float32"):
            model_of("mixtral").float()(ids)
        with experts_settings(token_format="nvfp4"):
            narrow = model_of("mixtral", hidden_size=24)
            with pytest.raises(ValueError, match=r"^MixtralExperts: hidden_size: format nvfp4 needs"):
                narrow(ids)
        with experts_settings(hidden_size=32), pytest.raises(ValueError, match=r"^hidden_size: the model says 64, got"):
            model(ids)
        for most in (0, 2**31, True):
            with pytest.raises(ValueError, match=r"^max_tokens_per_rank: expected "):
                experts_settings(max_tokens_per_rank=most)
        with pytest.raises(ValueError, match=r"^nonsense: unknown key"):
            experts_settings(nonsense=1)
        with pytest.raises(ValueError, match=r"^shared_expert: expected none, the model keeps its own, got"):
            experts_settings(shared_expert=SharedExpertConfig(intermediate_size=32))
        with pytest.raises(ValueError, match=r"^router: expected none, the model keeps its own, got"):
            experts_settings(router=RouterConfig())
        with pytest.raises(ValueError, match=r"^weight_format: expected .*, got mxfp4 with nvfp4 tokens"):
            experts_settings(token_format="nvfp4", weight_format="mxfp4")
        with pytest.raises(ValueError, match=r"^parallel: expected a ParallelConfig"):
            experts_settings(parallel=3)  # type: ignore[arg-type]
        assert model(ids).logits.isfinite().all()


def alone_on_rank(rank: int, world: int) -> torch.Tensor:
    model = model_of("mixtral")
    with torch.no_grad():
        for _ in range(1 + rank):
            logits: torch.Tensor = model(torch.tensor([[4, 5, 6]])).logits
    return logits


def test_a_rank_of_several_can_run_a_model_alone(get_pool: Any) -> None:
    first, second = get_pool(2).run(alone_on_rank)
    assert_same_bits(first, second)
