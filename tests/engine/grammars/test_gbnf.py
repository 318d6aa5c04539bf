"""GBNF as llama.cpp reads it: what a grammar lets through, token by token, and what is refused."""

import contextlib
import random
import re
import time
from functools import cache

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.compiling import error_of_grammar
from pagoda.engine.grammars.gbnf import gbnf_to_lark
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from tests.engine.grammars.matching import VOCAB, accepts

TAKEN: list[tuple[str, list[str], list[str]]] = [
    (r'root ::= "\u00e9"', ["é"], ["e", "u00e9"]),
    (r'root ::= "\U0001F600" "\x41"', ["😀A"], ["A"]),
    (r"root ::= [\u0410-\u044f]+", ["Привет"], ["", "Hi"]),
    ('root ::= start "!"\nstart ::= "a" | start "b"', ["a!", "abb!"], ["!", "b!"]),
    ('root ::= ("a"?)+ "b"', ["b", "aab"], ["a"]),
    ('root ::= "a"?+ "b"{2}* "c"', ["c", "aabbbbc"], ["bc"]),
    ("root ::= .", ["\n", "é", "a"], ["", "ab"]),
    (r"root ::= [^\n]+", ["a /]\\"], ["a\nb"]),
    (r"root ::= [-+*/^&&~~|.\]\[]+", ["-+*/^&~|.][", "&"], ["a", ","]),
    (r"root ::= [a-]+ [-a]", ["a-a"], ["ab"]),
    ('root ::= "/" "\n" "\\"\\\\"', ['/\n"\\'], ["/\n\\"]),
    ('root ::= fooBar foo-bar foo_bar FOO-BAR\nfooBar ::= "1"\nfoo-bar::="2"\nfoo_bar ::= "3"\nFOO-BAR ::= "4"',
     ["1234"], ["1111"]),
    ('# one\nroot ::= ( # two\n  "a" |\n\n  "b"\n) # three\r\n\r\n', ["a", "b"], ["ab"]),
    ('root ::= "a" (| "b" | ) x\nx ::=\ny ::= | "c"', ["a", "ab"], ["b", "ac"]),
    ('root ::= "<" root ">" | [0-9]{1, 3}', ["12", "<<7>>"], ["1234", "<7"]),
    ('root ::= [a-z]+ "abc"', ["xabc", "abcabc"], ["abc", "abcx"]),
    ('root ::= ("ab" | "a") "bc"', ["abc", "abbc"], ["ab"]),
    ("root ::= <[97]> !<[98]>", ["ac"], ["ab", "bc"]),
]  # fmt: skip

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? exp? ws
exp    ::= [eE] [-+]? [0-9] [1-9]{0,15}
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(ByteTokenizer, VOCAB, 1)


@pytest.mark.parametrize(("grammar", "good", "bad"), TAKEN, ids=[one[0][:40] for one in TAKEN])
def test_what_llama_cpp_takes(backend: LlguidanceBackend, grammar: str, good: list[str], bad: list[str]) -> None:
    text = grammar_text(StructuredOutputsParams(grammar=grammar))
    assert [one for one in good if not accepts(backend, ByteTokenizer(), text, one)] == []
    assert [one for one in bad if accepts(backend, ByteTokenizer(), text, one)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a" b', "line 1, at 'b': there is no rule named 'b'"),
        ('a ::= "a"', "there is no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, at 'root ::= \"b\"': the rule 'root' is defined twice"),
        ('root ::= ("a"', "there is no ) for a ("),
        ('root ::= "a")', "there is no ( for this )"),
        ("root ::= +", "nothing to repeat"),
        ('root ::= "a"{٣}', "unexpected character"),
        ('root ::= "a"+++++', "too many operators"),
        (r'root ::= "\q"', "'\\\\q' is not an escape"),
        (r'root ::= "\ud800"', "\\ud800 is not a character"),
        ("root ::= [b-a]", "the range 'b' to 'a' is empty"),
        ("root ::= []", "empty"),
        ('root ::= "a', "unexpected character"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than 100 deep"),
        ('root ::= "a"\nb', "there is no rule named 'b'"),
        ('"x"\nroot ::= "a"', 'line 1, at \'"x"\\nroot'),
    ],
)
def test_what_is_not_gbnf_is_refused_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(RequestError) as refusal:
        grammar_text(StructuredOutputsParams(grammar=grammar))
    assert "structured_outputs: the grammar is not valid GBNF: " in str(refusal.value)
    assert said in str(refusal.value)


def test_random_regular_grammars_match_what_the_same_regular_expression_matches(backend: LlguidanceBackend) -> None:
    """Rules of letters, groups and operators; GBNF and Python's expressions write them alike."""
    rng = random.Random(3)
    num_matched = 0
    for _ in range(60):
        names = ["root", "start", "x-y"]
        bodies = {name: random_body(rng, names[i + 1 :], 0) for i, name in enumerate(names)}

        @cache
        def pattern(name: str, bodies: dict[str, str] = bodies) -> str:
            written = re.sub(r'"(\w*)"', r"(?:\1)", bodies[name])
            return re.sub(r"start|x-y", lambda found: f"(?:{pattern(found[0])})", written).replace(" ", "")

        grammar = "\n".join(f"{name} ::= {body}" for name, body in bodies.items())
        text = grammar_text(StructuredOutputsParams(grammar=grammar))
        for _ in range(6):
            string = "".join(rng.choices("abc", k=rng.randint(0, 5)))
            matches = re.fullmatch(pattern("root"), string) is not None
            num_matched += matches
            assert accepts(backend, ByteTokenizer(), text, string) == matches, (grammar, string)
    assert num_matched > 20


def random_body(rng: random.Random, names: list[str], depth: int) -> str:
    def item() -> str:
        kind = rng.random()
        if depth < 3 and kind < 0.3:
            return f"({random_body(rng, names, depth + 1)})"
        return rng.choice(names) if names and kind < 0.5 else rng.choice(('"a"', '"bc"', "[a-b]", "[^a]", '"c"'))

    def repeated(one: str) -> str:
        # Python takes exponential time for operators on operators.
        is_plain = one[0] in '"['
        return one + rng.choice(("", "", "*", "+", "?", "{1,2}") if is_plain and depth == 0 else ("", "?"))

    sequences = [" ".join(repeated(item()) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
    return " | ".join(sequences)


@pytest.mark.parametrize("piece", ['("a"?)+ ', '"', "[", "a ", "# x\n", "(", '"a" | ', '"\\u00e9" ', "x ::= x ", "<"])
def test_a_grammar_is_read_in_linear_time(piece: str) -> None:
    def seconds(count: int) -> float:
        text, times = "root ::= " + piece * count, list[float]()
        for _ in range(2):
            begin_s = time.thread_time()
            with contextlib.suppress(ValueError):
                gbnf_to_lark(text)
            times.append(time.thread_time() - begin_s)
        return min(times)

    assert seconds(16_000) < 8 * seconds(4000) + 0.02


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= name "end" | "(" root ")"\nname ::= [a-z]+', ["xend", "(enend)", "endend"], ["x", "end", "xendx"]),
        ('root ::= x x | "(" root ")"\nx ::= "a"+', ["aa", "(aaa)"], ["a", "(aa"]),
        ('root ::= x "è" | "(" root ")"\nx ::= "é"+', ["éè", "(ééè)"], ["éé", "è"]),
        ('root ::= "if" name | name "=" | root ";" root\nname ::= [a-z]+', ["ifx", "if=", "x=;ify"], ["if", "x"]),
        ('root ::= "ab" | "a" "bc" | "(" root ")"', ["ab", "abc", "(ab)"], ["a", "abb"]),
        ('root ::= [0-9]+ ("." [0-9]+)? | root root', ["1.5", "1.51", "12"], ["1.", "."]),
    ],
)
def test_terminals_that_would_be_read_too_far_are_split(
    backend: LlguidanceBackend, grammar: str, good: list[str], bad: list[str]
) -> None:
    test_what_llama_cpp_takes(backend, grammar, good, bad)


@pytest.mark.parametrize(
    ("grammar", "terminals"),
    [
        (JSON, 4),  # string, number, ws, and what a number may have
        ('root ::= name "," root | name\nname ::= [a-z]+', 1),
        ('root ::= "<b>" root "</b>" | name\nname ::= [a-z]+', 1),
    ],
)
def test_terminals_that_end_by_themselves_stay_whole(grammar: str, terminals: int) -> None:
    """The library follows them many times faster than single characters."""
    lark = gbnf_to_lark(grammar)
    assert len(re.findall(r"^R\d+:", lark, re.MULTILINE)) == terminals
    assert '"<b>"' in lark or "<b>" not in grammar


Tree = tuple[str, object]


def random_tree(rng: random.Random, names: list[str], depth: int) -> Tree:
    kind = rng.random()
    if depth and kind < 0.55:
        trees = [random_tree(rng, names, depth - 1) for _ in range(rng.randint(1, 3))]
        return rng.choice(("sequence", "sequence", "choice")), trees
    if depth and kind < 0.7:
        return rng.choice("*+?"), random_tree(rng, names, depth - 1)
    if kind < 0.85:
        return "name", rng.choice(names)
    return ("class", rng.choice(("a", "ab", "bc"))) if kind < 0.92 else ("text", rng.choice(("a", "b", "ab", "bca")))


def written(tree: Tree) -> str:
    kind, of = tree
    if isinstance(of, list):
        return "(" + (" | " if kind == "choice" else " ").join(map(written, of)) + ")"
    return {"name": f"{of}", "class": f"[{of}]", "text": f'"{of}"'}.get(kind) or written(of) + kind  # type: ignore[arg-type]


def ends(rules: dict[str, Tree], text: str) -> dict[tuple[str, int], set[int]]:
    """Return where a rule that begins at a place of the text may end: the least such sets."""
    found = {(name, at): set[int]() for name in rules for at in range(len(text) + 1)}

    def after(tree: Tree, at: int) -> set[int]:
        kind, of = tree
        if kind == "name":
            return found[of, at]  # type: ignore[index]
        if kind == "class":
            return {at + 1} if text[at : at + 1] and text[at] in of else set()  # type: ignore[operator]
        if kind == "text":
            return {at + len(of)} if text.startswith(of, at) else set()  # type: ignore[arg-type]
        if kind == "choice":
            return set().union(*(after(one, at) for one in of))  # type: ignore[attr-defined]
        if kind == "sequence":
            places = {at}
            for one in of:  # type: ignore[attr-defined]
                places = {end for place in places for end in after(one, place)}
            return places
        places, new = {at} if kind in "*?" else set[int](), {at}
        while new:
            new = {end for place in new for end in after(of, place)} - places  # type: ignore[arg-type]
            places |= new
            if kind == "?":
                break
        return places

    before = None
    while before != (before := {key: len(value) for key, value in found.items()}):
        for (name, at), known in found.items():
            known |= after(rules[name], at)
    return found


def test_random_recursive_grammars_match_what_a_search_by_hand_matches(backend: LlguidanceBackend) -> None:
    rng = random.Random(5)
    num_matched = num_tested = 0
    for _ in range(120):
        names = ["root", "x", "y", "z"]
        rules = {name: random_tree(rng, names[min(i, 1) :] if i < 2 else names[i:], 2) for i, name in enumerate(names)}
        for name, tree in rules.items():  # a rule without any text is another matter
            rules[name] = "choice", [tree, ("text", rng.choice("ab"))]
        rules["root"] = "choice", [rules["root"], ("sequence", [("text", "("), ("name", "root"), ("text", ")")])]
        grammar = "\n".join(f"{name} ::= {written(tree)}" for name, tree in rules.items())
        text = grammar_text(StructuredOutputsParams(grammar=grammar))
        if error_of_grammar(backend.vocabulary.get(), text):  # it has no text, or none that ends
            continue
        num_tested += 1
        for length in (1, 2, 3, 3, 4, 4, 5, 6):
            string = "".join(rng.choices("abc", k=length))
            string = f"({string})" if rng.random() < 0.3 else string
            matches = len(string) in ends(rules, string)["root", 0]
            num_matched += matches
            assert accepts(backend, ByteTokenizer(), text, string) == matches, (grammar, string)
    assert num_tested > 40
    assert num_matched > 40
