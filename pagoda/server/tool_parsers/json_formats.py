"""Parsers of formats in which calls are JSON objects, between marks of the model's family."""

import json
import re

from pagoda.base.text import is_encodable
from pagoda.server.tool_parsers.base import ArgumentsStream, ObjectEnd, Parsed, ToolCall, as_call, held_back

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_LONGEST_HEAD = 512  # characters: a name has at most 64


class HermesParser:
    """Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>, any number of them.

    Arguments come out as they are written, if the name is in front of them. White space in front of a call is dropped
    with it. What is not a call comes out as it was, tags and white space too.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = ""
        self._space = ""  # white space in front of the open tag
        self._inside = False
        self._arguments: ArgumentsStream | None = None
        self._has_passed = False  # the arguments have been passed on: what is in front of the close tag is dropped

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Take what is certain; return whether there may be more."""
        if self._arguments is not None:
            passed, self._text = self._arguments.feed(self._text)
            if passed:
                parsed.calls.append(ToolCall(None, passed))
            self._has_passed = self._arguments.is_done
            if not self._has_passed:
                return False
            self._arguments = None
        if self._inside and not self._has_passed and self._begin_call(parsed):
            return True
        marker = self.CLOSE if self._inside else self.OPEN
        at = self._text.find(marker)
        if at < 0:
            self._hold(parsed)
            return False
        before, self._text = self._text[:at], self._text[at + len(marker) :]
        if not self._inside:
            content = before.rstrip()
            parsed.content += content
            self._space = before[len(content) :]
        elif not self._has_passed:
            self._take_call(before, self.CLOSE, parsed)
        self._inside, self._has_passed = not self._inside, False
        return True

    def _begin_call(self, parsed: Parsed) -> bool:
        """Pass on the name, if the text begins with it and the beginning of the arguments."""
        found = _HEAD.match(self._text, 0, _LONGEST_HEAD)
        try:
            name = json.loads(found["name"]) if found is not None else ""
        except ValueError:
            return False
        if found is None or not is_encodable(name):
            return False
        parsed.calls.append(ToolCall(name, ""))
        self._text, self._space = self._text[found.end() :], ""
        self._arguments = ArgumentsStream(self.CLOSE)
        return True

    def _hold(self, parsed: Parsed) -> None:
        """Put out all that cannot be part of a mark, or of white space in front of one."""
        if self._has_passed:
            self._text = self._text[len(self._text) - held_back(self._text, self.CLOSE) :]
        elif not self._inside:
            sure = self._text[: len(self._text) - held_back(self._text, self.OPEN)]
            cut = len(sure.rstrip())
            parsed.content += sure[:cut]
            self._text = self._text[cut:]

    def end(self) -> Parsed:
        parsed = Parsed()
        text, self._text = self._text, ""
        if self._arguments is not None:
            if rest := self._arguments.rest():
                parsed.calls.append(ToolCall(None, rest))
        elif self._inside and not self._has_passed:  # models stop after the JSON without the closing tag
            self._take_call(text, "", parsed)
        elif not self._inside:
            parsed.content = text
        self._inside, self._arguments, self._has_passed = False, None, False
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


class LlamaJsonParser:
    """Llama 3: the whole answer is {"name": ..., "parameters": ...}, or several separated by semicolons.

    <|python_tag|> may precede them. The tag, semicolons and white space are dropped with the call that follows them;
    where none follows, they come out as text.
    """

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""
        self._is_call: bool | None = None
        self._end = ObjectEnd()

    def feed(self, text: str) -> Parsed:
        self._text += text
        if self._is_call is None:
            start = self._text.lstrip()
            if not start or (self.TAG.startswith(start) and start != self.TAG):
                return Parsed()
            self._is_call = start.startswith(("{", self.TAG))
        if self._is_call:
            return self._take_calls()
        content, self._text = self._text, ""
        return Parsed(content)

    def end(self) -> Parsed:
        parsed = self._take_calls() if self._is_call else Parsed()
        parsed.content += self._text
        self._text = ""
        return parsed

    def _take_calls(self) -> Parsed:
        """Take calls from the text. If what it begins with is not a call, the rest of the answer is text."""
        parsed = Parsed()
        while True:
            rest = self._text.lstrip().removeprefix(self.TAG).lstrip().removeprefix(";").lstrip()
            if not rest or self.TAG.startswith(rest):
                return parsed
            size = self._end.find(rest) if rest[0] == "{" else 0
            if size is None:
                return parsed
            try:
                call = as_call(json.loads(rest[:size]))
            except (ValueError, RecursionError):
                call = None
            if call is None:
                self._is_call = False
                parsed.content += self._text
                self._text = ""
                return parsed
            parsed.calls.append(call)
            self._text = rest[size:]
            self._end = ObjectEnd()


_OPEN_LIST = re.compile(r"\[\s*(\{|$)")  # the beginning of a list of objects, as far as it is known


class MistralParser:
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...], with text around it.

    The marker is a special token of the model's, and so is not in the text where those are left out: then a list of
    calls is the beginning of the answer. White space in front of a marker is dropped with it, and so is an end of white
    space after calls. A list of anything else comes out as text.
    """

    MARKER = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._text = ""
        self._is_start = True  # of the answer: a list may come without the marker
        self._in_list = False
        self._marker = ""  # with the white space in front of it
        self._ends_with_calls = False  # nothing but white space has followed them
        self._decoder = json.JSONDecoder()
        self._end = ObjectEnd()

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        if self._in_list and "]" not in text:
            return parsed
        while self._take_list(parsed) if self._in_list else self._find_list(parsed):
            pass
        return parsed

    def end(self) -> Parsed:
        rest, self._text = self._marker + self._text, ""
        return Parsed() if self._ends_with_calls and not rest.strip() else Parsed(rest)

    def _find_list(self, parsed: Parsed) -> bool:
        """Put out text up to the next list; return whether one begins."""
        if self._is_start:
            start = self._text.lstrip()
            if not start or (self.MARKER.startswith(start) and start != self.MARKER):
                return False
            if (found := _OPEN_LIST.match(start)) is not None:
                self._in_list = bool(found[1])
                self._is_start = not self._in_list
                return self._in_list
            self._is_start = False
        at = self._text.find(self.MARKER)
        until = at if at >= 0 else len(self._text) - held_back(self._text, self.MARKER)
        content = self._text[:until].rstrip()
        parsed.content += content
        self._ends_with_calls = self._ends_with_calls and not content
        if at < 0:
            self._text = self._text[len(content) :]
            return False
        self._marker = self._text[len(content) : at + len(self.MARKER)]
        self._text = self._text[at + len(self.MARKER) :]
        self._in_list = True
        return True

    def _take_list(self, parsed: Parsed) -> bool:
        """Take the JSON that the text begins with, as content if it is not a list of calls; False if it continues."""
        begin = len(self._text) - len(self._text.lstrip())
        if self._text[begin : begin + 1] in ("[", "{") and self._end.find(self._text[begin:]) is None:
            return False
        self._end = ObjectEnd()
        try:
            values, end = self._decoder.raw_decode(self._text, begin)
        except (ValueError, RecursionError):
            return False
        calls = [as_call(value) for value in values] if isinstance(values, list) else []
        if calls and all(call is not None for call in calls):
            parsed.calls += [call for call in calls if call is not None]
            self._ends_with_calls = True
        else:
            self._ends_with_calls = False
            parsed.content += self._marker + self._text[:end]
        self._text, self._marker, self._in_list = self._text[end:], "", False
        return True


class GraniteParser(MistralParser):
    """Granite 3: <|tool_call|> [{"name": ..., "arguments": ...}, ...], as Mistral."""

    MARKER = "<|tool_call|>"


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
