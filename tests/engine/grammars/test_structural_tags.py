"""Structural tags: what each kind of format lets through, and what is refused with its place."""

from typing import Any

import pytest

from pagoda.base.errors import RequestError
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from tests.engine.grammars.matching import VOCAB, accepts

Format = dict[str, Any]
ANY: Format = {"type": "any_text"}
NULL: Format = {"type": "json_schema", "json_schema": {"type": "null"}}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Format, end: str | list[str]) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def triggered(**more: Any) -> Format:
    tags = [tag("<f=g>", NULL, "</f>"), tag("<f=h>", ANY, ["</f>", "</h>"])]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more}


def separated(**more: Any) -> Format:
    return {"type": "tags_with_separator", "tags": [tag("<a>", NULL, "</a>"), tag("<b>", ANY, ";")], **more}


THINK = tag("<think>", ANY, "</think>")
GIVEN: list[tuple[str, Format, list[str], list[str]]] = [
    ("const_string", const('a"\n'), ['a"\n'], ["", "a"]),
    ("json_schema", NULL, ["null"], ["1", ""]),
    ("any_text", ANY, ["", "any </think>\n é"], []),
    ("regex", {"type": "regex", "pattern": "[a-z/]+"}, ["a/b"], ["", "A"]),
    ("sequence", sequence(const("x "), NULL, ANY), ["x null", "x null and"], ["x ", "null"]),
    ("or", {"type": "or", "elements": [const("yes"), NULL, THINK]}, ["yes", "<think>?</think>"], ["yesnull", ""]),
    ("or with free text", {"type": "or", "elements": [const("yes"), tag("<a>", ANY, "")]}, ["yes", "<a>b"], ["yess"]),
    ("optional", sequence({"type": "optional", "content": const("a")}, const("b")), ["b", "ab"], ["aab", "a"]),
    ("plus", {"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    ("star", {"type": "star", "content": THINK}, ["", "<think>a</think><think></think>"], ["<think>"]),
    ("repeat", {"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
    ("repeat without an end", {"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
    ("tag", THINK, ["<think></think>", "<think>a <b> </thin</think>"], ["<think>a</think>b", "<think>a", "a"]),
    ("tag with several ends", tag("<a>", ANY, ["</a>", "!"]), ["<a>x!", "<a></a>"], ["<a>x", "<a>!</a>"]),
    ("tag without an end", tag("<a>", ANY, ""), ["<a>", "<a>x</a>"], ["a"]),
    ("tag of a regex", tag("<a>", {"type": "regex", "pattern": ".*"}, "</a>"), ["<a>x</a>", "<a></a>"], ["<a>x"]),
    ("tag in a tag", tag("<a>", sequence(const("1"), THINK), "</a>"), ["<a>1<think>x</think></a>"], ["<a>1</a>"]),
    ("tag without an end in a tag", tag("<a>", sequence(const("1"), tag("<b>", ANY, "")), ["</a>", "!"]),
     ["<a>1<b>x</a>", "<a>1<b>!"], ["<a>1<b>x", "<a>1<b>!x", "<a>1"]),
    ("two tags without an end in a tag", tag("<a>", tag("<b>", tag("<c>", ANY, ""), ""), "</a>"),
     ["<a><b><c>x</a>"], ["<a><b><c>x", "<a><b></a>", "<a><b><c></a>x"]),
    ("tag of JSON without an end in a tag", tag("<a>", tag("<b>", NULL, ""), "</a>"),
     ["<a><b>null</a>"], ["<a><b>null", "<a><b></a>"]),
    ("tag of a regex without an end in a tag", tag("<a>", tag("<b>", {"type": "regex", "pattern": ".*"}, ""), "</a>"),
     ["<a><b>x</a>", "<a><b></a>"], ["<a><b>x", "<a></a>"]),
    ("or of a tag without an end in a tag", tag("<a>", {"type": "or", "elements": [NULL, tag("<b>", ANY, "")]}, "</a>"),
     ["<a>null</a>", "<a><b>null</a>"], ["<a><b>x", "<a>null"]),
    ("or in a tag", tag("<a>", {"type": "or", "elements": [NULL, sequence(const("t:"), ANY)]}, "</a>"),
     ["<a>null</a>", "<a>t:null</a>"], ["<a>x</a>", "<a>null"]),
    ("thinking, then an answer", sequence(THINK, NULL), ["<think>a null</think>null"], ["null", "<think></think>"]),
    ("triggered_tags", triggered(), ["", "a<f=g>null</f>b<f=h>x</h>", "<f=g>null</f>"], ["<f=i>", "<f=g>1", "<f=h>"]),
    ("at_least_one", triggered(at_least_one=True), ["<f=g>null</f>a<f=h></f>"], ["", "a<f=g>null</f>"]),
    ("stop_after_first", triggered(stop_after_first=True), ["", "ab", "a<f=g>null</f>"], ["<f=g>null</f>b"]),
    ("exactly one", triggered(at_least_one=True, stop_after_first=True), ["<f=g>null</f>"], ["", "<f=g>null</f>b"]),
    ("triggered_tags in a tag", tag("<a>", triggered(), "</a>"),
     ["<a></a>", "<a>x<f=g>null</f>y</a>"], ["<a>x</a>y", "<a><f=g>1</a>", "<a>x"]),
    ("stop_after_first in a tag", tag("<a>", triggered(stop_after_first=True), "</a>"),
     ["<a>x</a>", "<a>x<f=g>null</f></a>"], ["<a><f=g>null</f>b</a>"]),
    ("tags_with_separator", separated(separator=", "), ["", "<b>x;, <a>null</a>"], ["<a>null</a>,", "x"]),
    ("one tag at least", separated(separator="", at_least_one=True), ["<b>;<b>;"], [""]),
    ("one tag at most", separated(separator=",", stop_after_first=True), ["", "<b>;"], ["<b>;,<b>;"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(ByteTokenizer, VOCAB, 1)


@pytest.mark.parametrize(("given", "good", "bad"), [one[1:] for one in GIVEN], ids=[one[0] for one in GIVEN])
def test_each_kind_of_format(backend: LlguidanceBackend, given: Format, good: list[str], bad: list[str]) -> None:
    text = grammar_text(StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": given}))
    assert [one for one in good if not accepts(backend, ByteTokenizer(), text, one)] == []
    assert [one for one in bad if accepts(backend, ByteTokenizer(), text, one)] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "dispatch"}, "at format: a format's type is one of const_string, json_schema, "),
        ({"type": "token_triggered_tags"}, "(got 'token_triggered_tags')"),
        (5, "(got None)"),
        ({**NULL, "style": "qwen_xml"}, 'at format/style: only "json" is supported'),
        ({**NULL, "any_order": True}, "at format/any_order: is not supported"),
        ({**ANY, "excludes": ["a"]}, "at format/excludes: is not supported"),
        ({**ANY, "max_tokens": 5}, "at format/max_tokens: is not supported"),
        (sequence(ANY, NULL), "at format/elements/0: free text must be the last part"),
        (sequence(), "at format/elements: must be a list of at least one format"),
        (sequence(tag("<a>", ANY, ""), NULL), "at format/elements/0: free text must be the last part"),
        ({"type": "star", "content": ANY}, "at format/content: free text must be the last part"),
        ({"type": "repeat", "min": 2, "max": 1, "content": NULL}, "0 <= min <= max"),
        (tag("<a>", {"type": "x"}, "b"), "at format/content: a format's type"),
        ({**triggered(), "triggers": ["<x"]}, "at format/tags/0/begin: no trigger begins '<f=g>'"),
        ({**triggered(), "tags": []}, "at format/tags: must be a list"),
        ({**triggered(), "tags": [tag("<f=", ANY, "")]}, "at format/tags/0: a tag with free text needs an end"),
        ({"type": "const_string"}, "at format/value: must be a string"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "at /not: is not supported"),
        ({"type": "regex", "pattern": "a" * 20_000}, "regular expressions"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_place(given: Any, said: str) -> None:
    with pytest.raises(RequestError) as refusal:
        grammar_text(StructuredOutputsParams(structural_tag={"format": given}))
    assert said in str(refusal.value)
    assert refusal.value.param == "structured_outputs"


def test_formats_are_bounded() -> None:
    nested = NULL
    for _ in range(200):
        nested = sequence(nested)
    for given in (nested, sequence(*[NULL] * 2000)):
        with pytest.raises(RequestError, match="nested more than 32 deep|limited to 1024"):
            grammar_text(StructuredOutputsParams(structural_tag={"format": given}))
