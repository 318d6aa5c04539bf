"""MistralParser and GraniteParser: a marker, then one JSON list of calls."""

import json
import re

from pagoda.server.tool_parsers.base import ObjectEnd, Parsed, as_call, held_back

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
