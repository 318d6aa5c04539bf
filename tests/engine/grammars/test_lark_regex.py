"""Grammars in Lark's syntax as regular expressions: what matches, and why others do not become one."""

import json
import re
import time

import pytest

from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.lark_regex import regex_of_lark
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from tests.engine.grammars.matching import VOCAB, accepts

PATCH = r"""
// The patches of a coding agent.
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
  | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADDED = '*** Begin Patch\n*** Add File: a.py\n+print("\\\\")\n+\n*** End Patch'
CHANGED = "*** Begin Patch\n*** Update File: a b\n*** Move to: c\n@@ f\n-x\n+y\n*** End of File\n*** End Patch\n"


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PATCH, [ADDED, CHANGED], ["", "*** Begin Patch\n*** End Patch", ADDED + "\n\n", ADDED.replace("+", "")]),
        ('start: "a"~2 ["b"] "c".."e"~1..2 // end', ["aac", "aabde"], ["ac", "aabb", "aaf", "aacccc"]),
        ('?start.2: x | y+\nx: "Ü"i\n!y: /[0-9]/i "\\n" "\\u00e9"', ["ü", "Ü", "1\né2\né"], ["1", "u"]),
        ("%import common (INT, WS_INLINE)\nstart: INT (WS_INLINE INT)*", ["1", "1 \t23"], ["", "1 "]),
        ('%import common.INT -> N\nstart: N "." N "(" "|"', ["1.2(|"], ["1.2(", "1x2(|"]),
    ],
)
def test_texts_that_match(grammar: str, good: list[str], bad: list[str]) -> None:
    expression = re.compile(regex_of_lark(grammar))
    assert [text for text in good if not expression.fullmatch(text)] == []
    assert [text for text in bad if expression.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', "the rule 'start' contains itself"),
        ('start: a\na: b\nb: "x" a', "the rule 'a' contains itself"),
        ('a: "x"', "there is no rule 'start'"),
        ('start: "x"\nstart: "y"', "is there twice"),
        ('start: ("x"', "a parenthesis is not closed"),
        ('start: "x")', "a parenthesis is closed that was not opened"),
        ('start: "x', "it is not in Lark's syntax at"),
        ('%ignore " "\nstart: "x"', "is not supported"),
        ("%import python.NAME\nstart: NAME", "is not supported"),
        ('start: "ab".."c"', "is not a range of characters"),
        ('start: "\\ud800"', "is not valid Unicode"),
        ("start: ?", "is not expected there"),
        ("start: " + "(" * 100, "nested deeper"),
        ("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(200)), "nested deeper"),
        ("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "x"', "more than 65536"),
        ('start: "x"' + " " * 70_000, "more than 65536"),
    ],
)
def test_what_is_no_regular_expression_says_why(grammar: str, why: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=re.escape(why)):
        regex_of_lark(grammar)
    assert time.process_time() - begun < 5


def test_strings_in_json_are_held_to_a_grammar() -> None:
    backend = LlguidanceBackend(ByteTokenizer, VOCAB, 2)
    schema = {"type": "string", "pattern": f"^(?:{regex_of_lark(PATCH)})$"}
    grammar = grammar_text(StructuredOutputsParams(json=schema))
    for text, is_good in ((ADDED, True), (CHANGED, True), (ADDED + "x", False), ("*** Begin", False), ("x", False)):
        assert accepts(backend, ByteTokenizer(), grammar, json.dumps(text)) == is_good, text
