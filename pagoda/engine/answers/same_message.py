"""Whether two texts are the same message of an assistant: as it was sampled, and as a template writes it again.

What clients lose on the way counts as equal: white space at the ends of a text or a thought, how the arguments of a
call are written as JSON, and a thought that is empty.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda.engine.answers.reasoning import ReasoningTags, new_splitter
from pagoda.engine.answers.tool_parsers.base import ToolCall, ToolParser, merged


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a message is read.   new_parser: makes what finds its calls, None if they are text.   tags: of thoughts."""

    new_parser: Callable[[], ToolParser] | None = None
    tags: ReasoningTags | None = None

    def without_opening(self, head: str) -> str:
        """Return the end of a prompt without the beginning of a thought, or one that is empty."""
        if self.tags is None:
            return head
        begin, end = re.escape(self.tags.begin), re.escape(self.tags.end)
        return re.sub(rf"{begin}\s*({end}\s*)?\Z", "", head)


def are_same(sampled: str, rendered: str, form: MessageForm) -> bool:
    """Return whether two texts say the same, in the same order."""
    return sampled.strip() == rendered.strip() or _said(sampled, form) == _said(rendered, form)


def _said(text: str, form: MessageForm) -> list[tuple[str, ...]]:
    said: list[tuple[str, ...]] = []
    if form.tags is not None:
        splitter = new_splitter(form.tags, inside=False)
        pieces = (splitter.feed(text), splitter.end())
        thought, text = ("".join(piece) for piece in zip(*pieces, strict=True))
        if thought.strip():
            said.append(("thought", thought.strip()))
    if form.new_parser is None:
        return [*said, ("text", text.strip())] if text.strip() else said
    parser = form.new_parser()
    written = ""
    calls: list[ToolCall] = []

    def end_text() -> None:
        if written.strip():
            said.append(("text", written.strip()))

    def end_calls() -> None:
        said.extend(("call", one.name or "", one.id or "", _canonical(one.arguments)) for one in merged(calls))

    for piece in (*parser.feed(text).pieces, *parser.end().pieces):
        if isinstance(piece, ToolCall):
            end_text()
            written = ""
            calls.append(piece)
        elif piece.strip():
            end_calls()
            calls.clear()
            written += piece
        else:
            written += piece
    end_text()
    end_calls()
    return said


def _canonical(arguments: str) -> str:
    """Return a text that equal JSON has in common: without the order of members, and with 1 for 1.0."""
    try:
        return json.dumps(_plain(json.loads(arguments)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # beyond, others are rounded to it
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value
