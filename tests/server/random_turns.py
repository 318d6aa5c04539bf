"""Random turns: what a model may say, told to an answer in pieces and whole."""

import json
import random
import string
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.answers.reasoning import ReasoningSplitter
from pagoda.engine.answers.tool_parsers.formats import HermesParser
from pagoda.server.reader import Reader
from pagoda.server.turn import Answer, Piece

Events = list[dict[str, Any]]


def random_text(dice: random.Random, names: tuple[str, ...] = ("f",)) -> str:
    """A thought, texts and calls, cut somewhere now and then.   names: of the tools that are called."""
    words = ["a", " <", "tool", "\n", "{", "é", " ", "</", "think"]
    parts = ["<think>" + "".join(dice.choices(words, k=5)) + "</think>"] if dice.random() < 0.5 else []
    for _ in range(dice.randrange(4)):
        parts.append("".join(dice.choices(words, k=dice.randrange(6))))
        arguments: dict[str, Any] = {key: dice.random() for key in dice.sample(string.ascii_letters, dice.randrange(3))}
        if dice.random() < 0.5:
            arguments = {"input": "".join(dice.choices([*words, '"', "\\", "\U0001f600", "\x00"], k=9))}
        call = json.dumps({"name": dice.choice(names), "arguments": arguments}, ensure_ascii=dice.random() < 0.5)
        parts.append(f"<tool_call>{call}</tool_call>")
    text = "".join(parts)
    return text[: dice.randrange(len(text) + 1)] if dice.random() < 0.3 else text


def turn_of(request: Any = None) -> Any:
    """A turn that runs, as far as answers look at it."""
    generation = SimpleNamespace(num_prompt_tokens=7, num_output_tokens=3, num_cached_tokens=4, num_reasoning_tokens=1)
    params = SamplingParams() if request is None else request.params
    return SimpleNamespace(
        id="id",
        model="m",
        created=1,
        generation=generation,
        request=request or SimpleNamespace(params=params),
        seal=str,
    )


def new_reader() -> Reader:
    return Reader(HermesParser(), ReasoningSplitter())


def piece(reader: Reader, text: str, reason: str | None) -> Piece:
    output = CompletionOutput(0, text, [1], finish_reason=reason)
    return Piece(0, RequestOutput("r"), output, reader.read(output))


def random_turn(
    dice: random.Random,
    new_answer: Callable[[], Answer],
    text: str,
    read: Callable[[bytes], Events] | None = None,
    reasons: Sequence[str] = ("stop", "length", "abort"),
) -> tuple[str, Events, Any]:
    """Tell a text streamed, in random pieces, and whole. Return why it ended, the events and the whole answer.

    read: finds the events in a stream, if it is not `events_of`.   reasons: why it may end.
    """
    reason = dice.choice(reasons)
    answer, reader = new_answer(), new_reader()
    cuts = sorted(dice.sample(range(len(text) + 1), min(len(text), dice.randrange(1, 20))))
    frames = answer.opening()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        is_last = end == len(text)
        frames += answer.frames(piece(reader, text[begin:end], reason if is_last else None))
        if is_last:
            break
    whole = new_answer().whole([piece(new_reader(), text, reason)])
    return reason, (read or events_of)(frames + answer.closing()), json.loads(msgspec.json.encode(whole))


def events_of(frames: bytes) -> Events:
    """Events, each of which has its type as its name, too."""
    found: Events = []
    for frame in frames.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
