"""Reasoning in answers, between tags in front of what the caller asked for.

To add a format, list its tags here.
"""

from dataclasses import dataclass

from pagoda.base.registry import Registry
from pagoda.engine.answers.tool_parsers.base import held_back
from pagoda.engine.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What begins and what ends a thought."""

    begin: str
    end: str


REASONING_FORMATS: Registry[ReasoningTags] = Registry(
    "reasoning format",
    {
        "think": ReasoningTags("<think>", "</think>"),
        "mistral": ReasoningTags("[THINK]", "[/THINK]"),
        "seed": ReasoningTags("<seed:think>", "</seed:think>"),
    },
)
"""By name. A chat template uses the first whose end it has."""
THINK = REASONING_FORMATS["think"]


def reasoning_of(template: str | None) -> ReasoningTags | None:
    """Return the tags that a chat template uses, or None."""
    formats = (REASONING_FORMATS[name] for name in REASONING_FORMATS)
    return next((tags for tags in formats if template is not None and tags.end in template), None)


class ReasoningSplitter:
    """Splits text into (reasoning, answer) pieces. Reasoning is only recognised at the beginning of the answer.

    inside: the prompt ends inside a thought: after its opening tag, as with some templates, or further on.
    """

    def __init__(self, inside: bool = False, tags: ReasoningTags = THINK) -> None:
        self.tags = tags
        self._text = ""
        self._state = "inside" if inside else "before"
        self._at_line_start = False  # newlines right after a tag belong to the tag

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; return the (reasoning, answer) that is certain so far and was not returned before."""
        self._text += text
        if self._at_line_start:
            self._text = self._text.lstrip("\n")
            self._at_line_start = not self._text
        if self._state == "before":
            start = self._text.lstrip()
            if self.tags.begin.startswith(start) and start != self.tags.begin:
                return "", ""
            self._state = "inside" if start.startswith(self.tags.begin) else "after"
            if self._state == "inside":
                self._skip_newlines(start.removeprefix(self.tags.begin))
        if self._state == "after":
            answer, self._text = self._text, ""
            return "", answer
        at = self._text.find(self.tags.end)
        if at >= 0:
            reasoning = self._text[:at]
            self._state = "after"
            self._skip_newlines(self._text[at + len(self.tags.end) :])
            answer, self._text = self._text, ""
            return reasoning, answer
        cut = len(self._text) - held_back(self._text, self.tags.end)
        reasoning, self._text = self._text[:cut], self._text[cut:]
        return reasoning, ""

    def _skip_newlines(self, rest: str) -> None:
        self._text = rest.lstrip("\n")
        self._at_line_start = not self._text

    def end(self) -> tuple[str, str]:
        """Return the text that was held back."""
        text, self._text = self._text, ""
        return (text, "") if self._state == "inside" else ("", text)


def opens_reasoning(prompt: str, continued: str = "", tags: ReasoningTags = THINK) -> bool:
    """Return whether a rendered prompt ends inside a thought.   continued: the text of the message that it goes on."""
    if prompt.rstrip().endswith(tags.begin):
        return True
    return all(text.rfind(tags.begin) > text.rfind(tags.end) for text in (prompt, continued))


def special_token(tokenizer: Tokenizer, text: str | None) -> int | None:
    """Return the special token of this text, or None."""
    if text is None:
        return None
    written = text.encode()
    return next((i for i in sorted(tokenizer.facts.special_token_ids) if tokenizer.token_bytes(i) == written), None)
