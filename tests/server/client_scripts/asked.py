"""What every client asks, in the words of no package."""

import functools
from collections.abc import Callable
from typing import Any

MODEL = "smollm2-135m"
TEXT, AGENT, THOUGHT, TYPED = "text", "agent", "wonder", "place"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = f"data:image/png;base64,{PIXEL}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TOO_LONG = f"{TEXT} " * 3_000
Seen = dict[str, Any]


def weather(city: str, days: int) -> str:
    """Tell the weather in a city."""
    return f"rain in {city} for {days} days"


def status_of(ask: Callable[[], Any]) -> int:
    """The status of the error that a client raises."""
    try:
        ask()
    except Exception as error:
        return int(getattr(error, "status_code", 0) or error.response.status_code)  # type: ignore[attr-defined]
    return 200


@functools.cache
def place() -> Any:
    from pydantic import BaseModel

    class Place(BaseModel):
        """A place."""

        city: str
        days: int

    return Place
