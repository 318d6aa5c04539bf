"""Tools of the packages that people use, on the default model, whose template has no place for them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.server.live import LiveServer
from tests.server.test_openai3_clients import PYTHON

SCRIPT = Path(__file__).parent / "client_scripts" / "tool_clients.py"
CITY: dict[str, Any] = {"city": {"enum": ["Zürich", "Bern", "Genève"]}}
DAYS: dict[str, Any] = {"days": {"type": "integer", "minimum": 1, "maximum": 9}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "Weather": {"properties": {**CITY, **DAYS}, "required": ["city", "days"], "additionalProperties": False},
    "Time": {"properties": CITY, "required": ["city"], "additionalProperties": False},
}

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}; install it with: make .venv-clients/.installed"
)


@pytest.fixture
def api() -> str:
    """What a client uses, unless its test says so."""
    return "chat"


BOTH = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture
def saw(real_server: LiveServer, request: pytest.FixtureRequest, api: str) -> dict[str, Any]:
    """What the client that the test is named after has seen."""
    name = request.node.originalname.removeprefix("test_").partition("__")[0]
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), name, real_server.url, api], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def is_forecast(value: object) -> bool:
    return jsonschema.Draft202012Validator({"type": "object", **SCHEMAS["Weather"]}).is_valid(value)


@BOTH
@pytest.mark.slow
def test_langchain__binds_tools(saw: dict[str, Any]) -> None:
    """Required, named and free; strict; one call each; whole and streamed; and the result goes back."""
    assert saw["streamed"] == saw["required"]
    assert saw["content"] == ""
    ((name, _),) = saw["required"]
    assert name in SCHEMAS
    assert [called for called, _ in saw["named"]] == ["Time"]
    assert saw["invalid"] == []
    for name, arguments in (*saw["required"], *saw["named"], *saw["free"]):
        jsonschema.validate(arguments, SCHEMAS[name])
    assert saw["after"]
    assert is_forecast(saw["function_calling"])
    assert is_forecast(saw["json_schema"])


@pytest.mark.slow
def test_instructor__fills_classes(saw: dict[str, Any]) -> None:
    """Through a named tool, and through a schema."""
    for mode in ("TOOLS", "JSON_SCHEMA"):
        assert is_forecast(saw[mode])
        assert saw[f"{mode} streamed"] == saw[mode]


@BOTH
@pytest.mark.slow
def test_pydantic_ai__has_typed_outputs(saw: dict[str, Any]) -> None:
    """Its outputs are tools of which one must be called."""
    assert is_forecast(saw["whole"])
    assert saw["streamed"] == saw["whole"]
    ((city, days),) = saw["called"]
    assert saw["result"] == [city, days, "sunny"]
    assert is_forecast({"city": city, "days": days})


@pytest.mark.parametrize("api", ["chat", pytest.param("responses", marks=pytest.mark.slow)])
def test_openai_agents__call_functions(saw: dict[str, Any]) -> None:
    assert len(saw["called"]) == 2  # once streamed, once whole
    for (city, days), answer in zip(saw["called"], saw["stopped"], strict=True):
        assert is_forecast({"city": city, "days": days})
        assert answer == f"sunny in {city} for {days} days"
