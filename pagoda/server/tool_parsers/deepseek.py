"""DeepSeekV3Parser and DeepSeekV31Parser: a section of calls, each between marks of its own."""

import json
import re

from pagoda.server.tool_parsers.base import Parsed, ToolCall, as_call, held_back

_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekV3Parser:
    """DeepSeek V3 and R1: a section of calls, each a kind, a name, and its arguments in a fenced block of JSON.

    White space between calls is dropped with them, as are the marks around the section if it has a call. What is not a
    call comes out as it was. The marks are ordinary tokens in DeepSeek's vocabularies, so that they are in the text.
    """

    OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    FENCE = "\n```json\n"
    BODY = re.compile(rf"[^\n]*?{_SEPARATOR}(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n?```\s*", re.DOTALL)

    def __init__(self) -> None:
        self._text = ""
        self._skipped = ""  # marks and white space that come out if no call follows
        self._inside = False
        self._has_calls = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while self._take_call(parsed) if self._inside else self._enter(parsed):
            pass
        return parsed

    def end(self) -> Parsed:
        parsed = Parsed()
        if self._inside and self.CALL in self._text:  # models stop after the arguments without the marks
            before, _, body = self._text.partition(self.CALL)
            self._add(before, self._call(body), self.CALL + body, parsed)
        elif self._text.strip() or not (self._inside and self._has_calls):
            parsed.content += self._skipped + self._text
        self._text = self._skipped = ""
        return parsed

    def _enter(self, parsed: Parsed) -> bool:
        """Put out text up to the next section; return whether one begins."""
        at = self._text.find(self.OPEN)
        until = at if at >= 0 else len(self._text) - held_back(self._text, self.OPEN)
        content = self._text[:until].rstrip()
        parsed.content += content
        if at < 0:
            self._text = self._text[len(content) :]
            return False
        self._skipped = self._text[len(content) : at + len(self.OPEN)]
        self._text = self._text[at + len(self.OPEN) :]
        self._inside, self._has_calls = True, False
        return True

    def _take_call(self, parsed: Parsed) -> bool:
        """Take the next call of the section, or its end; return whether there was one."""
        begin, close = self._text.find(self.CALL), self._text.find(self.CLOSE)
        if close >= 0 and not 0 <= begin < close:
            before = self._text[:close]
            if not self._has_calls or before.strip():
                parsed.content += self._skipped + before + self.CLOSE
            self._text, self._skipped = self._text[close + len(self.CLOSE) :], ""
            self._inside = False
            return True
        end = self._text.find(self.END, begin) if begin >= 0 else -1
        if end < 0:
            return False
        before, body = self._text[:begin], self._text[begin + len(self.CALL) : end]
        self._add(before, self._call(body), self.CALL + body + self.END, parsed)
        self._text = self._text[end + len(self.END) :]
        return True

    def _add(self, before: str, call: ToolCall | None, written: str, parsed: Parsed) -> None:
        """Add a call, or, if it is None, what was written; and the text in front of it unless it is white space."""
        if call is None or before.strip():
            parsed.content += self._skipped + before
        if call is None:
            parsed.content += written
        else:
            parsed.calls.append(call)
            self._has_calls = True
        self._skipped = ""

    def _call(self, body: str) -> ToolCall | None:
        found = self.BODY.fullmatch(body)
        if found is None:
            return None
        try:
            arguments = json.loads(found["arguments"])
        except (ValueError, RecursionError):
            return None
        return as_call({"name": found["name"], "arguments": arguments}) if isinstance(arguments, dict) else None


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek V3.1: as V3, but a call is a name and JSON, without a kind and a fence."""

    BODY = re.compile(rf"(?P<name>[^\n]+?){_SEPARATOR}(?P<arguments>.*)", re.DOTALL)
