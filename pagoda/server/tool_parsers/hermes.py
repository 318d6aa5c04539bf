"""HermesParser: calls in tags, one object each."""

import json

from pagoda.server.tool_parsers.base import Parsed, as_call, held_back


class HermesParser:
    """Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them.

    White space in front of a call is dropped with it. What is not a call comes out as it was, tags and white space too.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        self._space = ""  # white space in front of the open tag
        self._inside = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while True:
            marker = self.CLOSE if self._inside else self.OPEN
            at = self._text.find(marker)
            if at < 0:
                break
            before, self._text = self._text[:at], self._text[at + len(marker) :]
            if self._inside:
                self._take_call(before, self.CLOSE, parsed)
            else:
                content = before.rstrip()
                parsed.content += content
                self._space = before[len(content) :]
            self._inside = not self._inside
        if not self._inside:
            sure = self._text[: len(self._text) - held_back(self._text, self.OPEN)]
            cut = len(sure.rstrip())
            parsed.content += sure[:cut]
            self._text = self._text[cut:]
        return parsed

    def end(self) -> Parsed:
        parsed = Parsed()
        text, self._text = self._text, ""
        if self._inside:  # models stop after the JSON without the closing tag
            self._take_call(text, "", parsed)
        else:
            parsed.content = text
        self._inside = False
        return parsed

    def _take_call(self, text: str, close: str, parsed: Parsed) -> None:
        """Add the call that `text` is; if it is malformed, add it to the content with its tags."""
        try:
            call = as_call(json.loads(text))
        except (ValueError, RecursionError):
            call = None
        if call is not None:
            parsed.calls.append(call)
        else:
            parsed.content += f"{self._space}{self.OPEN}{text}{close}"
        self._space = ""
