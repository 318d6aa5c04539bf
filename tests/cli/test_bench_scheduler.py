"""`pagoda bench scheduler`: its lines have the keys that `benchmarks/peers/vllm_scheduler.py` prints."""

import json

import pytest
import typer
from typer.testing import CliRunner

from pagoda.cli.bench.scheduler import bench_scheduler, measure, measure_admission, measure_curves

KEYS = ["engine", "num_seqs", "prefix_caching", "schedule_us", "update_us", "per_seq_us", "add_request_us"]


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("scheduler")(bench_scheduler)
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


def test_long_prompts_leave_room_for_the_decode_steps_between() -> None:
    assert measure(40, True, prompt=300, steps=4).num_seqs == 40


def test_curves() -> None:
    points = list(measure_curves(waiting=(0, 5), pools=(300,), num_running=4, steps=3))
    assert [(point.num_waiting, point.num_blocks) for point in points] == [(0, 10_000), (5, 10_000), (0, 300)]
    assert all(point.step_us > 0 for point in points)


@pytest.mark.parametrize("reads_events", [False, True])
def test_requests_that_come_and_go(reads_events: bool) -> None:
    figures = measure_admission(2, True, num_requests=7, reads_events=reads_events)
    assert (figures.num_seqs, figures.prefix_caching) == (2, True)
    assert figures.add_request_us > 0
    assert figures.request_us > 0
