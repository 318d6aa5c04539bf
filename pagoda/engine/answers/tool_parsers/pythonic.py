"""PythonicParser: the answer is a Python list of calls, whose values become JSON as they are written; and the formats
with calls of Python between marks.
"""

import json
import re

from pagoda.engine.answers.tool_parsers.base import Reading, ToolParser
from pagoda.engine.grammars.tool_grammar import CallFormat, PythonCall, bracketed

_NAME_BETWEEN_MARKS = re.compile(r"""[^\s=(),:'"\[\]{}<>|]+""")
_WORD = re.compile(r"""[^\s=(),:'"\[\]{}]+""")


class _OtherText(Exception):
    """This is not a list of calls, or the text ends in the middle of one."""


class PythonicParser(ToolParser):
    """Llama 3.2 and 4: the whole answer is [name(key=value, ...), ...], with Python's or JSON's literals.

    A list of anything else comes out as text. Text after the list is content.
    """

    MARKS = ("func_name1(params_name1=",)  # how Meta's prompts show the format to the model
    GRAMMAR = bracketed(PythonCall())
    VLLMS_NAMES = ("llama4_pythonic",)
    NAME = _WORD

    @classmethod
    def is_of(cls, template: str) -> bool:
        return super().is_of(template.replace(" ", ""))

    def read(self) -> Reading[None]:
        self._before = ""  # what has been read, and comes out as text if it is not a call
        try:
            yield from self._list()
        except _OtherText:
            self._leave()

    def _list(self) -> Reading[None]:
        yield from self._expect("[")
        while True:
            yield from self._call()
            if (yield from self._expect(",", "]")) == "]":
                return

    def _leave(self) -> None:
        """Go on with what was read and is not of a call."""
        rest = self._before + self.text
        is_cut = self.is_over and self._has_calls and not any(map(str.isalnum, rest))
        self.text = "" if is_cut else rest

    def begin(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        super().begin(name, arguments, call_id)
        self._before = ""

    def _call(self) -> Reading[None]:
        name, keys = (yield from self._word()), set[str]()
        yield from self._expect("(")
        if (yield from self._peek()) == ")":
            yield from self._expect(")")
            return self.begin(name, "{}")
        try:
            while True:
                key = yield from self._word()
                if key in keys:
                    raise _OtherText
                yield from self._expect("=")
                yield from self._peek()
                if not keys:
                    self.begin(name)
                self.add(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                keys.add(key)
                self._before = ""
                if not (yield from self.value()):
                    raise _OtherText
                mark = yield from self._expect(",", ")")
                if mark == ")" or (yield from self._peek()) == ")":  # after a comma too many
                    break
        finally:
            if keys:
                self.add("}")
        if mark == ",":
            yield from self._expect(")")
        self._before = ""

    def _peek(self) -> Reading[str]:
        """Return the next character that is not white space."""
        while not (start := self.text.lstrip()):
            if self.is_over:
                raise _OtherText
            yield
        return start[0]

    def _read(self, size: int) -> None:
        self._before += self.text[:size]
        self.text = self.text[size:]

    def _expect(self, *marks: str) -> Reading[str]:
        mark = yield from self._peek()
        if mark not in marks:
            raise _OtherText
        self._read(self.text.index(mark) + 1)
        return mark

    def _word(self) -> Reading[str]:
        """Read a name."""
        yield from self._peek()
        begin = len(self.text) - len(self.text.lstrip())
        while (found := self.NAME.match(self.text, begin)) is not None and found.end() == len(self.text):
            if self.is_over:
                break
            yield
        if found is None:
            raise _OtherText
        self._read(found.end())
        return found[0]


class LFM2Parser(PythonicParser):
    """LFM2: <|tool_call_start|>[name(key=value, ...), ...]<|tool_call_end|>, with text around it."""

    keeps_special_tokens = True
    OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
    MARKS = ("List of tools: ",)
    GRAMMAR = None
    VLLMS_NAMES = ()
    NAME = _NAME_BETWEEN_MARKS
    _num_begun = 0

    @classmethod
    def is_of(cls, template: str) -> bool:
        return all(mark in template for mark in cls.MARKS)

    def read(self) -> Reading[None]:
        while mark := (yield from self.text_until(self.OPEN)):
            before, num_begun, self._before = self.space + mark, self._num_begun, ""
            try:
                yield from self._list()
                yield from self.take(self.CLOSE)
            except _OtherText:
                if self._num_begun == num_begun:
                    self.parsed.add(before)
                self._leave()

    def begin(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        super().begin(name, arguments, call_id)
        self._num_begun += 1


class Olmo3Parser(LFM2Parser):
    """OLMo 3: <function_calls>, then name(key=value, ...) for each call, on lines of their own, </function_calls>."""

    keeps_special_tokens = False
    OPEN, CLOSE = "<function_calls>", "</function_calls>"
    MARKS = (OPEN,)
    GRAMMAR = CallFormat(PythonCall(), separator="\n", list_close="\n</function_calls>", list_marker="<function_calls>")
    VLLMS_NAMES = ("olmo3",)

    def _list(self) -> Reading[None]:
        yield from self._call()
        while not (yield from self.comes(self.CLOSE)):
            yield from self._call()
