"""Reasoning in answers: <think> ... </think>, in front of what the caller asked for."""

from pagoda.server.tool_parsers.base import held_back

REASONING_BEGIN, REASONING_END = "<think>", "</think>"


class ReasoningSplitter:
    """Splits text into (reasoning, answer) pieces. Reasoning is only recognised at the beginning of the answer.

    inside: the prompt ends inside a thought: after <think>, as with some templates, or further on.
    """

    def __init__(self, inside: bool = False) -> None:
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
            if REASONING_BEGIN.startswith(start) and start != REASONING_BEGIN:
                return "", ""
            self._state = "inside" if start.startswith(REASONING_BEGIN) else "after"
            if self._state == "inside":
                self._skip_newlines(start.removeprefix(REASONING_BEGIN))
        if self._state == "after":
            answer, self._text = self._text, ""
            return "", answer
        at = self._text.find(REASONING_END)
        if at >= 0:
            reasoning = self._text[:at]
            self._state = "after"
            self._skip_newlines(self._text[at + len(REASONING_END) :])
            answer, self._text = self._text, ""
            return reasoning, answer
        cut = len(self._text) - held_back(self._text, REASONING_END)
        reasoning, self._text = self._text[:cut], self._text[cut:]
        return reasoning, ""

    def _skip_newlines(self, rest: str) -> None:
        self._text = rest.lstrip("\n")
        self._at_line_start = not self._text

    def end(self) -> tuple[str, str]:
        """Return the text that was held back."""
        text, self._text = self._text, ""
        return (text, "") if self._state == "inside" else ("", text)


def template_reasons(template: str | None) -> bool:
    """Return whether a chat template uses reasoning tags."""
    return template is not None and REASONING_END in template


def opens_reasoning(prompt: str, continued: str = "") -> bool:
    """Return whether a rendered prompt ends inside a thought.   continued: the text of the message that it goes on."""
    if prompt.rstrip().endswith(REASONING_BEGIN):
        return True
    return all(text.rfind(REASONING_BEGIN) > text.rfind(REASONING_END) for text in (prompt, continued))
