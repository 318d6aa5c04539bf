"""Every scenario, on the scheduler and on its twin: each step's decisions equal the expected ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.compare import Record, first_difference, load_traces
from tests.conformance.pagoda_subject import PagodaSubject
from tests.conformance.replay import Scenario, Subject, expand_prompt, replay
from tests.conformance.settings import settings_of
from tests.conformance.twin_subject import TwinSubject

DATA = Path(__file__).parent / "data"


def scenarios(name: str) -> list[Scenario]:
    return json.loads((DATA / name).read_text())["scenarios"]


PAIRS = ("", "more_", "stage_")
EXPECTED = {name: trace for pair in PAIRS for name, trace in load_traces(DATA / f"{pair}expected.jsonl").items()}
ALL = [scenario for pair in PAIRS for scenario in scenarios(f"{pair}scenarios.json")]


@pytest.mark.parametrize("subject", [PagodaSubject, TwinSubject], ids=["pagoda", "twin"])
@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario["name"])
def test_scenario(scenario: Scenario, subject: Callable[[Record], Subject]) -> None:
    got = list(replay(scenario, subject(scenario["config"])))
    assert first_difference(EXPECTED[scenario["name"]], got) is None


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario["name"])
def test_pool_is_full_again_at_the_end(scenario: Scenario) -> None:
    subject = PagodaSubject(scenario["config"])
    last = list(replay(scenario, subject))[-1]
    assert not last["running"] or last["n_running"] == 0
    assert subject.state()["free_blocks"] == scenario["config"]["num_blocks"]
    assert not subject.scheduler.has_unfinished_requests()


def test_command_writes_the_trace(tmp_path: Path) -> None:
    assert main(DATA / "scenarios.json", tmp_path / "out.jsonl") == 0
    got = load_traces(tmp_path / "out.jsonl")
    for scenario in scenarios("scenarios.json"):
        assert first_difference(EXPECTED[scenario["name"]], got[scenario["name"]]) is None


def test_command_reports_a_scenario_it_cannot_take(tmp_path: Path) -> None:
    broken = scenarios("scenarios.json")[0]
    broken["config"]["no_such_key"] = 1
    (tmp_path / "in.json").write_text(json.dumps({"scenarios": [broken]}))
    assert main(tmp_path / "in.json", tmp_path / "out.jsonl") == 1
    assert "no_such_key" in (tmp_path / "out.jsonl").read_text()


def test_compare_names_step_and_field() -> None:
    expected = [{"step": 1, "scheduled": [["a", 1], ["b", 2]]}]
    assert first_difference(expected, [{"step": 1, "scheduled": [["b", 2], ["a", 1]]}]) is None
    told = first_difference(expected, [{"step": 1, "scheduled": [["a", 1], ["b", 3]]}])
    assert told is not None
    assert "step 1" in told
    assert "scheduled" in told
    assert first_difference(expected, []) is not None


def test_prompts_are_spelled_out() -> None:
    assert expand_prompt({"concat": [{"range": [1, 3]}, {"repeat": [7, 2]}, [9]]}) == [1, 2, 7, 7, 9]
    with pytest.raises(ValueError, match="range"):
        expand_prompt({"unknown": 1})


def test_unknown_config_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="no_such_key"):
        settings_of(ALL[0]["config"] | {"no_such_key": 1})
