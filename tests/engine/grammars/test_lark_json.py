"""Grammars in Lark's syntax for strings in JSON: which texts they accept, and what they let a model sample."""

import json
import random
import re
import time

import pytest

from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.lark_json import lark_in_json
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.grammars.tool_grammar import Tool
from pagoda.engine.tokenizers.byte_tokenizer import EOS, ByteTokenizer
from tests.engine.grammars.matching import VOCAB, accepts, allowed, ready

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


ARITHMETIC = r"""
start: expr
?expr: term (ADD term)*
?term: factor (MUL factor)*
?factor: "-" factor | INT | "(" expr ")" -> group
ADD: "+" | "-"
MUL.2: "*" | "/"
%import common (INT, WS)
%ignore WS
"""
SQL = r"""
start: select ";"
select: "SELECT"i column ("," column)* "FROM"i NAME where? order?
column: NAME | "*" | "(" select ")"
where: "WHERE"i condition (("AND"i | "OR"i) condition)*
condition: NAME OPERATOR value | "NOT"i condition | "(" condition ")"
order: "ORDER"i "BY"i NAME ("ASC"i | "DESC"i)?
value: /'[^'\n]*'/ | /-?\d+(\.\d{1,2})?/ | STRING
NAME: /[A-Za-z_]\w{0,9}/
STRING: "\"" /[^"\\\n]*/ "\""
OPERATOR: "=" | "<>" | "<="
%ignore /[ \t\n]+/
"""


def sum_of(text: str) -> None:
    """Parse arithmetic by hand. Raises ValueError."""
    tokens, at = re.findall(r"\d+|[-+*/()]", text), 0
    if "".join(tokens) != re.sub(r"\s", "", text) or re.search(r"\d\s+\d", text):
        raise ValueError(text)

    def factor() -> None:
        nonlocal at
        one = tokens[at] if at < len(tokens) else ""
        at += 1
        if one == "-":
            factor()
        elif one == "(":
            chain()
            if tokens[at : at + 1] != [")"]:
                raise ValueError(text)
            at += 1
        elif not one.isdigit():
            raise ValueError(text)

    def chain() -> None:
        nonlocal at
        factor()
        while at < len(tokens) and tokens[at] in "+-*/":
            at += 1
            factor()

    chain()
    if at != len(tokens):
        raise ValueError(text)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PATCH, [ADDED, CHANGED], ["", "*** Begin Patch\n*** End Patch", ADDED + "\n\n", ADDED.replace("+", "")]),
        ('start: "a"~2 ["b"] "c".."e"~1..2 // end', ["aac", "aabde"], ["ac", "aabb", "aaf", "aacccc"]),
        ('?start.2: x | y+\nx: "Ü"i\n!y: /[0-9]/i "\\n" "\\u00e9"', ["ü", "Ü", "1\né2\né"], ["1", "u"]),
        ("%import common (INT, WS_INLINE)\nstart: INT (WS_INLINE INT)*", ["1", "1 \t23"], ["", "1 "]),
        ('%import common.INT -> N\nstart: N "." N "(" "|"', ["1.2(|"], ["1.2(", "1x2(|"]),
        ('start: "(" start ")" | "x"', ["x", "((x))"], ["", "(x", "()"]),
        ("start: /.+/ /\\n/ start?", ["a\n", 'a"\\\nü\n'], ["\n", "a", "a\n\n"]),
        ("start: /(?i:ab)|[^\\W\\da-y]{2,3}?|\\x41\\u{42}\\/[]-]/", ["aB", "zZ_", "AB/]", "AB/-"], ["ya", "AB/", "z1"]),
        ("start: /[\\s\\S]/ /a b #/x", ["\nab#", '"ab#', "\x01ab#", "😀ab#"], ["ab#", "xa b"]),
        ('start: "a" "b"\n%ignore /--[^\\n]*\\n/ | " "', ['a --"\n b ', "ab"], ["a--b", " "]),
        (
            'start: expr\nexpr: term (SP ADD SP term)* -> add\n| term\nterm: INT\n| "(" expr ")"\nSP: " "\nADD: "+"\n'
            "%import common.INT",
            ["1", "1 + (2 + 3)"],
            ["1+2", "1 + ", "(1"],
        ),
        (ARITHMETIC, ["1", " ( 1 +\n-2)*3 ", "--1/(((4)))"], ["", "1 2", "(1", "1+", "*1"]),
        (
            SQL,
            ["select a,* from t\n;", "SELECT (SELECT a FROM b) FROM c WHERE NOT (d <= '\\') ;"],
            ["select from t;"],
        ),
    ],
)
def test_texts_that_match(grammar: str, good: list[str], bad: list[str]) -> None:
    backend = LlguidanceBackend(ByteTokenizer, VOCAB, 2)
    text = grammar_text(StructuredOutputsParams(grammar=lark_in_json(grammar)))

    def matches(one: str) -> bool:
        return accepts(backend, ByteTokenizer(), text, json.dumps(one, ensure_ascii=False)[1:-1])

    assert [one for one in good if not matches(one)] == []
    assert [one for one in bad if matches(one)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('a: "x"', "there is no rule 'start'"),
        ("start: a", "there is no rule 'a'"),
        ('start: "x"\nstart: "y"', "is there twice"),
        ('start: ("x"', "a parenthesis is not closed"),
        ('start: "x")', "a parenthesis is closed that was not opened"),
        ('start: "x', "it is not in Lark's syntax at"),
        ('"x"\nstart: "x"', "is not expected there"),
        ('%ignore\nstart: "x"', "is not supported"),
        ("%import python.NAME\nstart: NAME", "is not supported"),
        ('start: "ab".."c"', "is not a range of characters"),
        ('start: "\\ud800"', "is not valid Unicode"),
        ("start: ?", "is not expected there"),
        ("start: " + "(" * 100, "nested deeper"),
        ("start: /" + "(" * 100 + "/", "nested deeper"),
        ('start: "x"' + " " * 70_000, "more than 65536"),
        *(
            (f"start: /{one}/", "in the regular expression")
            for one in ("(?=a)b", "^a", "a$", "(a", "a)", "[a", "\\b", "\\p{L}")
        ),
        *((f"start: /{one}/", "in the regular expression") for one in ("[z-a]", "*a", "[a&&b]", "(?<!a)b", "(?P=a)")),
        ("start: /[^\\s\\S]/", "is empty"),
    ],
)
def test_what_cannot_be_enforced_says_why(grammar: str, why: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=re.escape(why)):
        lark_in_json(grammar)
    assert time.process_time() - begun < 5


def sampled(backend: LlguidanceBackend, grammar: str, rng: random.Random) -> str:
    """Return an output at random, which prefers what closes something once it is long."""
    matcher, output = ready(backend, grammar), bytearray()
    while EOS not in (could := allowed(backend, matcher)):
        closing = sorted(could & set(b"0)'\";}>ft")) if len(output) > 40 else []
        token = rng.choice(closing or sorted(could - {EOS}))
        matcher.advance([token])
        output.append(token)
        assert len(output) < 2_000
    return output.decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_sampled_calls_follow_their_grammars(name: str) -> None:
    """Of two tools in one grammar, in calls of JSON and of Python."""
    backend, rng = LlguidanceBackend(ByteTokenizer, VOCAB, 2), random.Random(3)
    form = TOOL_PARSERS[name].GRAMMAR
    assert form is not None
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tools = [Tool("sum", schema, "tools", lark_in_json(ARITHMETIC)), Tool("ask", schema, "tools", lark_in_json(SQL))]
    grammar = grammar_text(StructuredOutputsParams(grammar=form.forced(tools, 1)))
    seen: set[str] = set()
    again = {"ask": grammar_text(StructuredOutputsParams(grammar=lark_in_json(SQL)))}
    for _ in range(12):
        call = sampled(backend, grammar, rng)
        which = "sum" if "sum" in call[:30] else "ask"
        written = re.search(r'input"?[:=] ?(".*")', call, re.DOTALL)
        assert written is not None, call
        text = json.loads(written[1], strict=True)
        if which == "sum":
            sum_of(text)
        else:
            assert accepts(backend, ByteTokenizer(), again["ask"], json.dumps(text, ensure_ascii=False)[1:-1]), text
        seen.add(which)
    assert seen == {"sum", "ask"}
