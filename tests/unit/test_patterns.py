"""Patterns of checkpoints: what `re` says of those it can match, and an end for those that it cannot."""

from __future__ import annotations

import re
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.checkpoints.compressed_tensors_config import target_matches
from moe_runtime.checkpoints.patterns import MAX_STEPS, check_work, matches
from moe_runtime.checkpoints.quantization import Quantization

NAMES = [
    f"model.layers.{layer}.{rest}"
    for layer in (0, 3, 12, 61)
    for rest in (
        *(f"mlp.experts.{expert}.{part}_proj" for expert in (0, 7, 120) for part in ("gate", "up", "down")),
        *("mlp.gate", "mlp.shared_experts.up_proj", "mlp.gate_proj", "self_attn.q_proj", "input_layernorm"),
        *("block_sparse_moe.experts.3.w1", "mlp.experts.gate_up_proj", "linear_attn.in_proj_qkvz"),
    )
] + ["lm_head", "model.embed_tokens", "visual.blocks.1.mlp.fc1", ""]

PUBLISHED = [
    *(r".*lm_head.*", r".*\.experts\..*", r"model\.layers\.(1|2|3)\..*", r".*mlp.gate$", r".*self_attn.*"),
    *(r".*\.experts\.\d+\.(gate|up|down)_proj$", r".*mlp\.(gate|up|gate_up|down)_proj.*", r".*block_sparse_moe.gate"),
    *(r".*shared_expert_gate$", r"model\.layers\.[0-9]+\.mlp\.experts\.[0-9]+\..*", r"^(?!.*experts).*$", r"visual.*"),
    *(r".*(self_attn|linear_attn)\..*", r"model\.layers\.(?:[0-2]|6[0-9])\..*", r".*\.(q|k|v|o)_proj$", r"lm", r"head"),
    r"(?!.*\.layers\.(61)\.).*\.experts\.\d+\.(gate_proj|up_proj|down_proj)$",
    *(r".*(?<!shared_experts)\.up_proj", r".*layers\.1\b.*", r".*\.layers\.\d{2,}\..*", r"\Amodel.*?proj\Z", r"[^v]*$"),
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_match_as_before(pattern: str) -> None:
    file = Path("config.json")
    found = [target_matches(file, name, f"re:{pattern}") for name in NAMES]
    assert found == [re.match(pattern, name) is not None for name in NAMES]


CHARACTERS = ("a", "b", ".", r"\.", r"\d", r"\w", r"\s", r"\S", r"\W", r"\D", "[ab]", "[^a1]", "[0-9_]", "[^\\d.]", "1")
PLACES = ("^", "$", r"\b", r"\B", r"\A", r"\Z", "(?!a)", "(?=.1)", "(?<=a)", "(?<!b.)", "(?!.*1)")
REPEATS = ("*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}")


def patterns() -> st.SearchStrategy[str]:
    def wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from(REPEATS)).map(lambda two: f"({two[0]}){two[1]}"),
            inner.map(lambda one: f"(?={one})"),
            inner.map(lambda one: f"(?!{one})"),
        )

    repeated = st.tuples(st.sampled_from(CHARACTERS), st.sampled_from(REPEATS)).map("".join)
    return st.recursive(st.one_of(st.sampled_from(CHARACTERS + PLACES), repeated), wider, max_leaves=6)


@settings(max_examples=500)
@given(pattern=patterns(), names=st.lists(st.text("ab1._ \n-é", min_size=1, max_size=7), min_size=1, max_size=8))
def test_any_pattern_matches_as_in_re(pattern: str, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets within sets
        try:
            found = [matches(pattern, name) for name in names]
        except ValueError as error:
            assert "steps" in str(error)  # repeats within repeats
            return
        assert found == [re.match(pattern, name) is not None for name in names]


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(.*)*!", ".*" * 900 + "!", "(?:a?){40}a{40}!", "((.|..)*)*!"]
)
def test_patterns_that_are_catastrophic_in_re_end(pattern: str) -> None:
    start = time.thread_time()
    assert not matches(pattern, "a" * 60 + "b")
    assert time.thread_time() - start < 0.1


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"missing \), unterminated subpattern"),
        (r"(a)\1", "groupref is not supported"),
        ("(?>a)", "atomic_group is not supported"),
        ("a*+", "possessive_repeat is not supported"),
        ("(?i)a", "without flags"),
        ("(?i:a)", "subpattern is not supported"),
        ("(?<=a*)b", "look-behind requires fixed-width pattern"),
        ("a{99999999999}", "the repetition number is too large"),
        ("a" * 2001, "at most 2000 characters, got 2001"),
        ("(" * 900 + ")" * 900, "at most 20 groups|recursion"),
        ("((((a*b)*c)*d)*e)*", f"at most {MAX_STEPS} steps"),
    ],
)
def test_other_patterns_are_refused(pattern: str, message: str) -> None:
    for call in (matches, lambda text, name: target_matches(Path("config.json"), name, f"re:{text}")):
        with pytest.raises(ValueError, match=message):
            call(pattern, "model.layers.0")


def compressed(ignore: list[str], targets: list[str]) -> dict[str, Any]:
    group = {"targets": targets, "weights": {"num_bits": 4, "group_size": 32}, "format": "mxfp4-pack-quantized"}
    return {"quant_method": "compressed-tensors", "ignore": ignore, "config_groups": {"a": group}}


@pytest.mark.parametrize(
    "config",
    [
        compressed([f"re:{number}{'.*' * 30}!" for number in range(1500)], ["Linear"]),
        compressed([], ["re:" + ".*" * 900 + f"{number}!" for number in range(30)]),
        compressed(["re:(" + "(a|b)*" * 100 + ")!" + str(number) for number in range(100)], ["Linear"]),
        {"quant_method": "compressed-tensors", "config_groups": {str(number): {} for number in range(200_000)}},
        compressed([], ["Linear"]) | {"transform_config": {"config_groups": {"R1": {"apply": [{}] * 200_000}}}},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*a*" * 100_000]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["a"] * 300_000},
        {"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{n}{'.*' * 30}!": {} for n in range(1500)}},
    ],
)
def test_patterns_that_take_too_long_in_all_are_refused(config: dict[str, Any]) -> None:
    names = [f"model.layers.0.mlp.experts.{expert}.{part}_proj" for expert in range(384) for part in ("up", "down")]
    start = time.thread_time()
    with pytest.raises(ValueError, match=r"\Aconfig\.json: targets: expected patterns of at most"):
        Quantization(Path("config.json"), "quantization_config", config).stored(names)
    assert time.thread_time() - start < 1


def test_the_limits_leave_room_for_the_largest_models() -> None:
    """512 experts, and patterns that list layers for each of 90 of them; and a name for each of all the linears."""
    layers = "|".join(map(str, range(90)))
    check_work(compressed([rf"re:.*\.layers\.{n}\.self_attn\..*_proj$" for n in range(90)], PUBLISHED), 3 * 512)
    check_work(compressed([], [rf"re:model\.layers\.({layers})\.mlp\.experts\.\d+\.{part}" for part in "abc"]), 3 * 512)
    check_work(compressed([f"a.{n}.{m}" for n, m in product(range(90), range(3 * 512))], []), 3)
