"""`pagoda bench scheduler`: its lines have the keys of the peer's script, and ratios compare the same cases."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pagoda.base.errors import ConfigError
from pagoda.cli.bench.scheduler import SchedulerFigures, measure, measure_curves, ratios, read_figures, register

KEYS = ["engine", "num_seqs", "prefix_caching", "schedule_us", "update_us", "per_seq_us", "add_request_us"]


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)  # a lone command would lose its name
    return app


def test_json_lines(app: typer.Typer) -> None:
    options = ["scheduler", "--json", "--num-seqs", "4", "--prompt", "32", "--steps", "3"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert [list(line) for line in lines] == [KEYS, KEYS]
    assert [line["prefix_caching"] for line in lines] == [False, True]
    assert all(line["schedule_us"] > 0 and line["add_request_us"] > 0 for line in lines)


def test_ratios_to_a_file_of_the_peer(app: typer.Typer, tmp_path: Path) -> None:
    peer = SchedulerFigures("vllm-scheduler", 4, True, 30.0, 10.0, 10.0, 100.0)
    file = tmp_path / "peer.jsonl"
    file.write_text("some log line\n" + json.dumps(asdict(peer)) + "\n")
    options = ["scheduler", "--json", "--num-seqs", "4", "--prompt", "32", "--steps", "3", "--compare-file", str(file)]
    last = json.loads(CliRunner().invoke(app, options).output.splitlines()[-1])
    assert last["their_per_seq_us"] == 10.0
    assert last["step_ratio"] == pytest.approx(10.0 / last["per_seq_us"], abs=0.06)
    assert read_figures(file) == [peer]


def test_cases_without_a_peer_have_no_ratio() -> None:
    mine = SchedulerFigures("pagoda-scheduler", 4, True, 1.0, 1.0, 0.5, 10.0)
    assert list(ratios([mine], [])) == []


def test_a_line_that_is_not_a_result_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "peer.jsonl"
    file.write_text('{"engine": "vllm-scheduler", "speed": 3}\n')
    with pytest.raises(ConfigError, match="speed"):
        read_figures(file)


def test_long_prompts_leave_room_for_the_decode_steps_between() -> None:
    assert measure(40, True, prompt=300, steps=4).num_seqs == 40


def test_curves() -> None:
    points = list(measure_curves(waiting=(0, 5), pools=(300,), num_running=4, steps=3))
    assert [(point.num_waiting, point.num_blocks) for point in points] == [(0, 10_000), (5, 10_000), (0, 300)]
    assert all(point.step_us > 0 for point in points)
