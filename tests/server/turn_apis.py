"""The same turn in the form of every API that generates text, for tests that go over all of them.

A new route whose body has the field `stream` is one of them: the tests fail until ASKS has its form.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pagoda.server.app import ENDPOINTS
from pagoda.server.body import Body

MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Turn:
    """What is asked of the model.   seed: if it matters."""

    text: str
    max_tokens: int
    seed: int | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]

    def openai(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "seed": self.seed, "ignore_eos": True}

    def ollama(self) -> dict[str, Any]:
        return {"model": MODEL, "options": {"num_predict": self.max_tokens, "seed": self.seed}, "stream": False}


ASKS: Mapping[str, Callable[[Turn], dict[str, Any]]] = {
    "ChatCompletionRequest": lambda turn: {"messages": turn.messages, **turn.openai()},
    "BatchChatRequest": lambda turn: {"messages": [turn.messages], **turn.openai()},
    "CompletionRequest": lambda turn: {"prompt": turn.text, **turn.openai()},
    "MessagesRequest": lambda turn: {
        "model": MODEL,
        "messages": turn.messages,
        "max_tokens": turn.max_tokens,
        "seed": turn.seed,
    },
    "ResponsesRequest": lambda turn: {"input": turn.text, "max_output_tokens": turn.max_tokens, "seed": turn.seed},
    "OllamaChatRequest": lambda turn: {"messages": turn.messages, **turn.ollama()},
    "OllamaGenerateRequest": lambda turn: {"prompt": turn.text, **turn.ollama()},
}
"""By the name of the body: what asks for a turn, whole."""

_OTHER_STREAMS = ("OllamaPullRequest", "TranscriptionRequest", "InfillRequest")  # its model has tokens for gaps
_COUNTS_ONLY = "/v1/responses/input_tokens"
BODIES: Mapping[str, type[Body]] = {
    one.path: one.body
    for one in ENDPOINTS
    if one.body is not None and "stream" in one.body.__struct_fields__ and one.body.__name__ not in _OTHER_STREAMS
    if one.path != _COUNTS_ONLY
}
"""Paths of all routes that generate text, with their bodies."""
STREAMED = tuple(one.path for one in ENDPOINTS if one.path in BODIES and one.chunk is not None)
"""Those of them that can stream."""


def asked(path: str, turn: Turn, stream: bool = False) -> dict[str, Any]:
    """Return the body that asks a route for a turn."""
    return {**ASKS[BODIES[path].__name__](turn), "stream": stream}


# ---- answers

_VOLATILE = frozenset(
    {"id", "item_id", "call_id", "response_id", "request_id", "created", "created_at", "completed_at"}
    | {"sequence_number", "obfuscation", "cached_tokens", "cache_read_input_tokens", "input_tokens"}
)
_GROWING = frozenset({"content", "text", "delta", "thinking", "reasoning", "response", "arguments", "partial_json"})


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, or its lines, or the one object of a whole answer."""
    lines = (line.removeprefix(b"data: ") for line in data.split(b"\n"))
    return [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a stream says, however its tokens are spread over events.

    By place: the texts in one; of other strings all that differ from the one before; of numbers the last. Without what
    differs from answer to answer.
    """
    found: dict[str, Any] = {}
    for event in events:
        for place, name, value in _leaves(event, ""):
            if name in _VOLATILE or name.endswith("_duration") or value is None:
                continue
            if not isinstance(value, str):
                found[place] = value
            elif name in _GROWING:
                found[place] = found.get(place, "") + value
            elif (others := found.setdefault(place, [])) == [] or others[-1] != value:
                others.append(value)
    return found


def _leaves(value: Any, place: str) -> Iterable[tuple[str, str, Any]]:
    """Yield the place, the last name in it, and the value of everything in an object that is not an object or list."""
    named = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in named:
        where = f"{place}.{name}"
        if isinstance(inner, dict | list):
            yield from _leaves(inner, where)
        else:
            yield where, str(name), inner


def num_output_tokens(answer: Mapping[str, Any]) -> int:
    """Return the number of tokens that an answer says it has."""
    counts = answer.get("usage", answer)
    return next(counts[name] for name in ("completion_tokens", "output_tokens", "eval_count") if name in counts)
