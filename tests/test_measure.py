"""One command that measures everything: what it runs, and what becomes of a part that fails or does not end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_runtime.launch import measure
from moe_runtime.launch.bench import main as bench
from tests.spawner import interpreter

pytestmark = pytest.mark.cpu_only


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]


def test_ranks_are_powers_of_two_and_all() -> None:
    assert [measure.rank_counts(gpus) for gpus in (0, 1, 2, 3, 4, 6, 8)] == [
        [1],
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_every_part_has_its_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert measure.main([str(tmp_path), "--dry-run", "--tokens", "8", "4096", "--formats", "nvfp4"]) == 0
    lines = shown(capsys)
    runs = [f"{tmp_path}/layer_{count}.json" for count in (1, 2, 4)]
    traced = "--config deepseek_v3 --tokens 8 4096 --formats nvfp4 --combine-format bf16"
    rate = f"--links {tmp_path}/links.json"
    common = f"{traced} fp8_block {rate} --steps 20"
    large = common.replace(" 8 4096", " 4096")
    most = f"--routing uniform zipf half one --json {runs[2]}"
    assert lines == [
        f"$ link_bench --json {tmp_path}/links.json, 4 ranks",
        f"$ bench dispatch combine layer {common} {most}, 4 ranks",
        f"$ bench dispatch combine layer {common} --json {runs[1]}, 2 ranks",
        f"$ bench layer {common} --json {runs[0]}",
        f"$ bench dispatch combine --num-sms 16 --json {tmp_path}/few_sms.json {large}, 4 ranks",
        f"$ bench layer {traced} {rate} --trace {tmp_path}/trace.json --json {tmp_path}/phases.json, 4 ranks",
        f"$ bench gemm --steps 20 --json {tmp_path}/gemm.json --picture {tmp_path}/gemm.svg",
        f"$ pictures {' '.join(runs)} {tmp_path}/phases.json --folder {tmp_path}",
    ]
    assert not list(tmp_path.iterdir())
    assert measure.main([str(tmp_path), "--dry-run", "--parts", "links", "--ranks", "1"]) == 0
    assert shown(capsys) == []
    alone = [str(tmp_path), "--dry-run", "--parts", "pictures", "--ranks", "2"]
    for phases in ("", f" {tmp_path}/phases.json"):
        assert measure.main(alone) == 0
        assert shown(capsys) == [f"$ pictures {runs[1]}{phases} --folder {tmp_path}"]
        (tmp_path / "phases.json").touch()
    assert measure.main([str(tmp_path), "--dry-run", "--ranks", "5"]) == 2
    assert "--ranks: expected 1 .. 4 GPUs, got 5" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_floors_count_with_the_links_that_were_measured(
    fails: bool, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this run or one before; without them the layer is measured all the same."""
    links = tmp_path / "links.json"
    ran: list[measure.Job] = []

    def run(job: measure.Job, limit_s: float) -> str:
        ran.append(job)
        if job.program == "link_bench" and not fails:
            links.touch()
        return "ok"

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if again:
        links.touch()
    parts = ["layer", "settings", "trace", "gemm"] if again else ["links", "layer", "settings", "trace", "gemm"]
    assert measure.main([str(tmp_path), "--parts", *parts]) == 0
    over_config = [job for job in ran if job.program == "bench" and job.arguments[0] != "gemm"]
    assert len(over_config) == 4 and len(ran) == 5 + ("links" in parts)
    for job in over_config:
        assert (f"--links {links}" in job.text) == (again or not fails)


def test_the_short_line_is_one_that_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    (line,) = (part for part in (measure.__doc__ or "").split("\n\n") if part.startswith("    measure FOLDER "))
    _, _, *arguments = shlex.split(line.replace("\\\n", ""))
    assert measure.main([str(tmp_path), *arguments, "--dry-run"]) == 0
    lines = shown(capsys)
    assert [line.split()[1:3] for line in lines] == [
        ["bench", "dispatch"],
        ["bench", "layer"],
        ["pictures", f"{tmp_path}/layer_8.json"],
    ]
    assert " --routing uniform --json " in lines[0] and " --trace " in lines[1]


def test_the_commands_are_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", interpreter())
    arguments = ["--parts", "layer", "trace", "pictures", "--config", "tiny_cpu", "--ranks", "1", "--tokens", "4"]
    arguments += ["--formats", "bf16", "--combine-format", "bf16", "--steps", "1"]
    assert measure.main([str(tmp_path), *arguments]) == 0, capfd.readouterr()
    files = sorted(file.name for file in tmp_path.iterdir())
    drawn = ["layer.svg", "phases.svg"] if find_spec("matplotlib") else []
    assert files == sorted(["layer_1.json", "phases.json", "trace.json", *drawn])


def test_a_part_that_fails_is_told_of_and_the_others_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without runs there is nothing to draw."""
    monkeypatch.setattr("sys.executable", interpreter())
    assert measure.main([str(tmp_path), "--parts", "pictures", "--ranks", "1", "--config", "tiny_cpu"]) == 1
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == (f"FAILED: pictures {tmp_path}/layer_1.json --folder {tmp_path}: exit code 2")


def test_what_a_failed_part_wrote_before_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its old results would be drawn; those of parts that are not run stay."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(measure.Job, "command", [sys.executable, "-c", "raise SystemExit(1)"])
    names = {
        "layer": ["layer_1.json", "layer_2.json"],
        "settings": ["few_sms.json"],
        "trace": ["phases.json", "trace.json"],
        "gemm": ["gemm.json", "gemm.svg"],
        "links": ["links.json"],
    }
    for part in measure.PARTS:
        for name in (name for own in names.values() for name in own):
            (tmp_path / name).touch()
        assert measure.main([str(tmp_path), "--parts", part]) == 1
        left = sorted(name for other, own in names.items() for name in own if other != part)
        assert sorted(file.name for file in tmp_path.iterdir()) == left


def test_what_a_part_wrote_before_stays_where_its_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Job, "command", [sys.executable, "-c", "raise SystemExit(2)"])
    (tmp_path / "layer_1.json").write_text("old")
    assert measure.main([str(tmp_path), "--parts", "layer", "--ranks", "1", "--config", "tiny_cpu"]) == 1
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("layer_1.json", "old")]


def test_asked_to_end_it_ends_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    sleeper = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(measure.Job, "command", [sys.executable, "-c", sleeper])

    def ask() -> None:
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(SystemExit) as caught:
        measure.main([str(tmp_path), "--parts", "layer", "--ranks", "1", "--config", "tiny_cpu"])
    asking.join()
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_what_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(measure.Job, "command", sleeper)
    start = time.monotonic()
    assert measure.run(measure.Job("bench", ()), 0.5) == "not done within 0.5 s"
    assert time.monotonic() - start < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such",), "measure: FOLDER: no folder no/such"),
        ((".", "--config", "no_such"), "measure: "),
        ((".",), "measure: --ranks: expected with a number, there is no GPU to count; --config tiny_cpu is for CPUs"),
        ((".", "--ranks", "1", "--limit-s", "0"), "measure: --limit-s: expected a positive number, got 0"),
        ((".", "--ranks", "1", "--steps", "0", "--dry-run"), "measure: --steps: expected at least 1, got 0"),
        ((".", "--ranks", "1", "--tokens", "8", "-5", "--dry-run"), "measure: --tokens: expected at least 1, got -5"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(list(arguments)) == 2
    with pytest.raises(ValueError):
        measure.main([*arguments, "--debug"])
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_the_commands_are_ones_that_the_programs_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first thing that a run without GPUs would do."""

    class Reached(Exception):
        pass

    def reached(options: object) -> None:
        raise Reached

    monkeypatch.setattr("moe_runtime.launch.bench.work", reached)
    monkeypatch.setattr("moe_runtime.launch.gemm_bench.work", reached)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    (tmp_path / "links.json").touch()
    parser_options = ["--parts", "layer", "settings", "trace", "gemm", "--dry-run"]
    found: list[measure.Job] = []
    jobs = measure.jobs

    def kept(*args: object) -> list[measure.Job]:
        found.extend(jobs(*args))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(measure, "jobs", kept)
    assert measure.main([str(tmp_path), *parser_options]) == 0
    assert len(found) == 5
    for job in found:
        with pytest.raises(Reached):
            bench(list(job.arguments))
