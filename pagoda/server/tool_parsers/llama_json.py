"""LlamaJsonParser: the answer is calls, one object each."""

import json

from pagoda.server.tool_parsers.base import ObjectEnd, Parsed, as_call


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
