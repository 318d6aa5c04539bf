"""Reasoning in answers, between tags in front of what the caller asked for, or in a channel of its own.

To add a format, list its tags here.
"""

import re
from dataclasses import dataclass

from pagoda.base.registry import Registry
from pagoda.engine.answers.tool_parsers.base import held_back
from pagoda.engine.answers.tool_parsers.formats import CHANNEL_CALL
from pagoda.engine.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What begins and what ends a thought.   name: of the format.   closings: what is written to end a thought early;
    the last one is for all further thoughts.   has_channels: an answer is messages as ChannelSplitter reads them.
    """

    name: str
    begin: str
    end: str
    closings: tuple[str, ...]
    has_channels: bool = False

    @property
    def mark(self) -> str:
        """What chat templates that use them have: some write what begins a thought only in prompts."""
        return self.begin if self.has_channels else self.end


_OPENING = "<|start|>assistant"  # of a message in harmony
_FORMATS = (
    ReasoningTags("think", "<think>", "</think>", ("\n</think>\n\n",)),
    ReasoningTags("mistral", "[THINK]", "[/THINK]", ("[/THINK]",)),
    ReasoningTags("apertus", "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_suffix|>",)),
    ReasoningTags("minimax_m3", "<mm:think>", "</mm:think>", ("</mm:think>",)),
    ReasoningTags("seed", "<seed:think>", "</seed:think>", ("</seed:think>",)),
    ReasoningTags(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        # The model may choose another channel first: a call is not written in the last one.
        (f"<|end|>{_OPENING}", f"<|end|>{_OPENING}<|channel|>final<|message|>"),
        has_channels=True,
    ),
)
REASONING_FORMATS: Registry[ReasoningTags] = Registry("reasoning format", {tags.name: tags for tags in _FORMATS})
"""By name. A chat template uses the first whose mark it has."""
THINK = REASONING_FORMATS["think"]


def reasoning_of(template: str | None) -> ReasoningTags | None:
    """Return the tags that a chat template uses, or None."""
    formats = (REASONING_FORMATS[name] for name in REASONING_FORMATS)
    return next((tags for tags in formats if template is not None and tags.mark in template), None)


class ReasoningSplitter:
    """Splits text into (reasoning, answer) pieces. Reasoning is only recognised at the beginning of the answer.

    An answer that begins with the closing tag has an empty thought: models write it where they choose not to think.

    inside: the prompt ends inside a thought: after its opening tag, as with some templates, or further on.
    """

    def __init__(self, inside: bool = False, tags: ReasoningTags = THINK) -> None:
        self.tags = tags
        self._text = ""
        self._state = "inside" if inside else "before"
        self._at_line_start = False  # newlines right after a tag belong to the tag

    @property
    def is_inside(self) -> bool:
        """Whether what was fed so far ends inside a thought."""
        return self._state == "inside"

    @property
    def is_over(self) -> bool:
        """Whether no thought can follow what was fed so far."""
        return self._state == "after"

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; return the (reasoning, answer) that is certain so far and was not returned before."""
        self._text += text
        if self._at_line_start:
            self._text = self._text.lstrip("\n")
            self._at_line_start = not self._text
        if self._state == "before":
            start = self._text.lstrip()
            tags = (self.tags.begin, self.tags.end)
            if any(tag.startswith(start) and start != tag for tag in tags):
                return "", ""
            self._state = "inside" if start.startswith(self.tags.begin) else "after"
            if (tag := next(filter(start.startswith, tags), None)) is not None:
                self._skip_newlines(start.removeprefix(tag))
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


_LONGEST_HEADER = 512
_BODY = "<|message|>"
_HEADS = ("<|start|>", "<|channel|>", "to=functions.")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))


class ChannelSplitter(ReasoningSplitter):
    """Splits the messages of GPT-OSS's harmony format: <|channel|>CHANNEL<|message|>TEXT<|end|>.

    Reasoning is what the channel `analysis` says. Answers are the texts of the others, without their headers; calls
    keep theirs, for the parser. A text without a header is an answer.
    """

    def __init__(self, inside: bool, tags: ReasoningTags) -> None:
        super().__init__(inside, tags)
        self._is_call = False

    @property
    def is_over(self) -> bool:
        return False  # another message may be of the channel

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; return the (reasoning, answer) that is certain so far and was not returned before."""
        self._text += text
        said = {"inside": "", "after": ""}
        while self._state in said or self._begin_message(said):
            found = _END.search(self._text)
            held = 0 if found else max(held_back(self._text, mark) for mark in _ENDS)
            until = found.start() if found else len(self._text) - held
            said[self._state] += self._text[:until]
            if found is None:
                self._text = self._text[until:]
                break
            if self._is_call:
                said["after"] += "<|call|>"
            self._text = self._text[found.end() if found[0] != "<|start|>" else until :]
            self._state = "header"
        return said["inside"], said["after"]

    def _begin_message(self, said: dict[str, str]) -> bool:
        """Read the header of a message; return whether it is complete."""
        start = self._text.lstrip()
        at = self._text.find(_BODY, 0, _LONGEST_HEADER)
        if not any(mark.startswith(start[: len(mark)]) for mark in _HEADS):
            self._begin("after")
        elif at >= 0:
            header, self._text = self._text[:at], self._text[at + len(_BODY) :]
            to = re.search(r"\bto=functions\.([^\s<]+)", header)
            self._begin("inside" if "<|channel|>analysis" in header and to is None else "after", to is not None)
            said["after"] += f"{CHANNEL_CALL}{to[1]}{_BODY}" if to is not None else ""
        elif len(self._text) >= _LONGEST_HEADER:
            self._begin("after")
            said["after"] += self._text[:_LONGEST_HEADER]
            self._text = self._text[_LONGEST_HEADER:]
        return self._state in said

    def _begin(self, state: str, is_call: bool = False) -> None:
        self._state, self._is_call = state, is_call

    def end(self) -> tuple[str, str]:
        """Return the text that was held back; a header that was cut off is none."""
        is_header = self._state in ("before", "header") and self._text.lstrip().startswith("<|")
        text, self._text = "" if is_header else self._text, ""
        return (text, "") if self._state == "inside" else ("", text)


def new_splitter(tags: ReasoningTags, inside: bool) -> ReasoningSplitter:
    """Return what splits an answer with these tags.   inside: as of ReasoningSplitter."""
    return ChannelSplitter(inside, tags) if tags.has_channels else ReasoningSplitter(inside, tags)


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
