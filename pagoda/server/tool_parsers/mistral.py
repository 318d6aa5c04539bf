"""MistralParser and GraniteParser: a marker, then one JSON list of calls."""

import json

from pagoda.server.tool_parsers.base import Parsed, as_call, held_back


class MistralParser:
    """Mistral: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...], at the end of an answer.

    The marker is a special token of the model's, and so is not in the text where those are left out: then a list of
    calls is the whole answer. A list of anything else comes out as text.
    """

    MARKER = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._text = ""
        self._is_list: bool | None = None  # None: not known yet
        self._marker = ""  # with the white space in front of it
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> Parsed:
        self._text += text
        parsed = Parsed()
        if self._is_list is None or not self._is_list:
            at = self._text.find(self.MARKER)
            if at >= 0:
                parsed.content = self._text[:at].rstrip()
                self._marker = self._text[len(parsed.content) : at + len(self.MARKER)]
                self._text, self._is_list = self._text[at + len(self.MARKER) :], True
        if self._is_list is None:
            start = self._text.lstrip()
            if not start or self.MARKER.startswith(start):
                return parsed
            self._is_list = start.startswith("[")
        if not self._is_list:
            cut = len(self._text[: len(self._text) - held_back(self._text, self.MARKER)].rstrip())
            parsed.content, self._text = self._text[:cut], self._text[cut:]
        elif self._text.rstrip().endswith("]"):
            self._take_list(parsed)
        return parsed

    def end(self) -> Parsed:
        content = self._marker + self._text
        self._text = self._marker = ""
        return Parsed(content)

    def _take_list(self, parsed: Parsed) -> None:
        """Take the list of calls that the text begins with; if it is complete and anything else, it is content."""
        begin = len(self._text) - len(self._text.lstrip())
        try:
            values, end = self._decoder.raw_decode(self._text, begin)
        except (ValueError, RecursionError):
            return
        calls = [as_call(value) for value in values] if isinstance(values, list) else []
        if calls and all(call is not None for call in calls):
            parsed.calls += [call for call in calls if call is not None]
            self._text = self._text[end:].lstrip()
        else:
            parsed.content += self._marker + self._text
            self._text = ""
        self._is_list, self._marker = False, ""


class GraniteParser(MistralParser):
    """Granite 3: <|tool_call|> [{"name": ..., "arguments": ...}, ...], as Mistral."""

    MARKER = "<|tool_call|>"
