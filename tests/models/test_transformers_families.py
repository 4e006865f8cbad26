"""Every family of the installed transformers that has experts: its calls on one rank and two, and docs/families.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.support import families_table

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
