"""The comparison of the model's network with links of known rates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch.report.pages import between_marks
from moe_runtime.launch.research import namespaces, network_check
from tests.support.programs import ROOT

pytestmark = pytest.mark.cpu_only

MARKS = f"<!-- {network_check.MARK} -->\n<!-- end of {network_check.MARK} -->\n"


def found(tokens: int, num_bytes: int, pair_us: float, **changes: Any) -> dict[str, Any]:
    times = {"pair_us": pair_us, "link_us": pair_us, "step_us": 2 * pair_us}
    times |= {name.replace("_us", "_median_us"): 2 * us for name, us in times.items()}
    return {
        "exchange": "dispatch",
        "format": "bf16",
        "tokens_per_rank": tokens,
        "network_bytes": num_bytes,
        **times,
        **changes,
    }


def test_a_time_is_that_of_a_token_and_of_bytes_at_the_rate() -> None:
    """8 Mbit/s are a byte a microsecond, of which headers of frames take their share."""
    lines = [found(1, 300, 900.0), found(1, 300, 700.0), found(8, 144_800, 152_100.0), found(8, 144_800, 1.0)]
    (only,) = network_check.compared(8.0, lines)
    assert only["latency_us"] == 700.0 and only["pair_us"] == 152_100.0
    assert only["model_us"] == pytest.approx(700.0 + 151_400.0)
    table = network_check.check_table({"results": [only]})
    assert table.splitlines()[2] == (
        "| dispatch, bf16, 8 | 8 | 0.145 | 152.1 | 152.1 to 304.2 (1.00 to 2.00) | 152.1 to 304.2 (1.00 to 2.00) | "
        "304.2 to 608.4 (2.00 to 4.00) |"
    )


def test_two_namespaces_keep_to_their_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow link, so that other work on this machine counts little: no exchange is faster than its bytes allow."""
    file, page = tmp_path / "check.json", tmp_path / "page.md"
    page.write_text(MARKS)
    arguments = ["--megabits", "80", "--tokens", "160", "--formats", "bf16", "--combine-format", "bf16", "--steps", "3"]
    code = network_check.main([*arguments, "--json", str(file), "--page", str(page)])
    error = capsys.readouterr().err
    if "network namespaces" in error:
        pytest.skip(error)
    assert code == 0, error
    report = json.loads(file.read_text())
    dispatch, combine = report["results"]
    assert (dispatch["network_bytes"], combine["network_bytes"]) == (160 * (2176 + 4) + 128, 161 * 2048)
    for result in report["results"]:
        limited = result["network_bytes"] - namespaces.BURST_BYTES
        least_us = limited / (80e6 / 8) * 1e6
        assert min(result[name] for name in ("pair_us", "link_us", "step_us")) > least_us
        assert 0.5 < result["pair_us"] / result["model_us"] < 5
    assert "| combine, bf16, 160 | 80 |" in page.read_text()


def test_without_namespaces_the_program_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert network_check.main([]) == 1
    assert "network_check: OSError: network namespaces need root, ip and tc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--megabits", "0"], "--megabits: expected 1 to 100000, got 0"),
        (["--tokens", "1024"], "--tokens: expected fewer than 1024, from which on an exchange has several parts"),
        (["--tokens", "1"], "--tokens: expected at least 2, got 1"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--formats", "bf16"], "--combine-format: expected one for each of 1 formats, got 2"),
        (["--json", "no/folder/x.json"], "--json: no folder no/folder"),
        (["--json", "x.json", "--read", "y.json"], "--read: measures nothing, expected no --json"),
    ],
)
def test_mistakes_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert network_check.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_page_has_what_the_committed_file_says() -> None:
    """And where a chunk is large, a receive that is posted first takes the time that the model says."""
    report = json.loads((ROOT / "launch" / "results" / "host_network_check.json").read_text())
    page = (ROOT / "docs" / "hosts.md").read_text()
    assert between_marks("hosts.md", page, {network_check.MARK: network_check.check_table(report)}) == page
    large = [result for result in report["results"] if result["network_bytes"] > 500_000]
    assert len(large) > 10
    for result in large:
        assert result["pair_median_us"] == pytest.approx(result["model_us"], rel=0.11)
        assert 0.95 < result["link_us"] / result["model_us"] < 2
