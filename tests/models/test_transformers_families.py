"""Every family of the installed transformers that has experts: its calls on one rank and two, and docs/families.md."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.integrations.expert_modules import describe_experts
from moe_runtime.integrations.transformers import apply_expert_parallel
from moe_runtime.integrations.transformers_models import without_experts
from tests.support import families_table
from tests.support.comparison import assert_same_bits

pytestmark = pytest.mark.cpu_only

TABLE_OF = "5.23.0"
"""The transformers of the committed table."""
ON_TWO_RANKS = ["aria", "beam", "dbrx", "deepseek_v4", "glm4_moe", "longcat_flash", "minimax_m3_vl", "olmoe", "zaya"]
"""At least one of each formula, layout and way to be called; gpt_oss is in test_transformers.py."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small only wait for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(transformers.__version__ != TABLE_OF, reason=f"the table is of transformers {TABLE_OF}")
def test_all_families_do_what_the_table_says(one_thread: None) -> None:
    found = families_table.outcomes()
    assert len([one for one in found if one.formula]) >= 60
    assert families_table.table(found) == families_table.committed()


def test_some_of_each_kind_on_two_ranks(get_pool: Any, one_thread: None) -> None:
    alone = families_table.outcomes(names=ON_TWO_RANKS)
    for found in get_pool(2).run(families_table.outcomes, ON_TWO_RANKS, timeout=150.0):
        assert families_table.table(found) == families_table.table(alone)


OF_EACH_LAYOUT = [
    *("dbrx", "gemma4", "gpt_oss", "longcat_flash", "minimax_m2", "muse_spark", "nemotron_h", "qwen3_omni_moe", "zaya"),
]


@pytest.mark.parametrize("family", OF_EACH_LAYOUT)
def test_experts_of_any_family_may_be_left_out(family: str, one_thread: None) -> None:
    """One of each layout and way to make a model; its experts come from a model that has them."""
    whole = families_table.tiny_model(family)
    experts = families_table.experts_of(whole)
    by_layer = {next(int(part) for part in name.split(".") if part.isdigit()): experts[name] for name in experts}
    tensors = {number: describe_experts(module) for number, module in copy.deepcopy(by_layer).items()}
    with without_experts():
        empty = type(whole)(whole.config).eval().bfloat16()
    assert not [name for name in empty.state_dict() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    dtypes = {name: tensor.dtype for name, tensor in (*whole.named_parameters(), *whole.named_buffers())}
    for name, tensor in (*empty.named_parameters(), *empty.named_buffers()):
        tensor.data = tensor.data.to(dtypes[name])
    assert not empty.load_state_dict(whole.state_dict(), strict=False).missing_keys
    ids = torch.randint(3, families_table.VOCABULARY, families_table.TOKENS)
    found = []
    for model, source in ((whole, None), (empty, lambda layer, ids: tensors[layer].tensors(ids))):
        with apply_expert_parallel(model, max_tokens_per_rank=96, experts=source), torch.no_grad():
            found.append(model(**families_table.inputs_of(model, ids))[0])
    assert_same_bits(found[1], found[0])


OF_FILES = [
    *("afmoe", "aria", "deepseek_v4", "ernie4_5_moe", "gemma4", "granitemoehybrid", "hy_v4", "inkling", "laguna"),
    *("minimax_m3_vl", "muse_spark", "nemotron_h", "openai_privacy_filter", "phimoe", "zaya"),
]
"""Routers and activations that `config.json` says in words of its own; all of them are read from the model."""


@pytest.mark.parametrize("family", OF_FILES)
def test_experts_of_any_family_come_from_its_files(family: str, one_thread: None, tmp_path: Path, seed: int) -> None:
    saved = families_table.tiny_model(family, seed)
    saved.save_pretrained(tmp_path)
    whole = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16)
    with without_experts():
        empty = type(saved).from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids, found = torch.randint(3, families_table.VOCABULARY, families_table.TOKENS), []
    with Checkpoint(tmp_path, routers=False) as checkpoint:
        for model, source in ((whole, None), (empty, checkpoint)):
            with apply_expert_parallel(model, max_tokens_per_rank=96, experts=source), torch.no_grad():
                found.append(model(**families_table.inputs_of(model, ids))[0])
        number = next(iter(checkpoint.moe_layers()))
        with pytest.raises(ValueError, match="routers: expected True where a router or a shared expert is read"):
            checkpoint.router(number)
    assert_same_bits(found[1], found[0])


def test_experts_that_no_layer_computes_are_not_left_out(one_thread: None) -> None:
    whole = families_table.tiny_model("llama4")
    message = r"model: layers\.0\.feed_forward\.experts: expected experts with transformers"
    with pytest.raises(ValueError, match=message), without_experts():
        type(whole)(whole.config)
    assert type(whole)(whole.config) is not None
