"""From StructuredOutputsParams to the text of a grammar, in llguidance's variant of Lark's syntax.

`json_rule` and `literal` are the pieces that tool calls are made of too (`tool_grammar.py`).
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.gbnf import gbnf_to_lark
from pagoda.engine.grammars.json_schema import Schema, parse_schema, rewrite_schema
from pagoda.engine.grammars.schema_size import iter_values
from pagoda.engine.grammars.structural_tags import StructuralTags

WHITESPACE = r" |\n[ \t]{0,32}"
"""White space in JSON: a space, or a line break and its indentation. Its length is bounded, so that a model cannot
write white space without end."""
MAX_REGEX_CHARS = 16_384
"""In the regular expressions of one grammar together: compiling one takes time that is quadratic in its length."""
MAX_GBNF_CHARS = 65_536
MAX_INTERSECTIONS = 32
MAX_SCHEMAS = 1024
_FIELD = "structured_outputs"


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written: `whitespace` is the pattern of the space between its tokens, "" for none.

    closed: see rewrite_schema's `close_objects`.
    """

    whitespace: str = WHITESPACE
    closed: bool = False

    @classmethod
    def of(cls, params: StructuredOutputsParams) -> "JsonStyle":
        pattern = params.whitespace_pattern or WHITESPACE
        _check_count(len(pattern), MAX_REGEX_CHARS, "characters in whitespace_pattern", params.source)
        return cls("" if params.disable_any_whitespace else pattern, params.disable_additional_properties)


def grammar_text(params: StructuredOutputsParams, field_name: str = _FIELD) -> str:
    """Return the grammar. Raises RequestError if there is none. Whether it compiles, only the library can say.

    field_name: the request's field that the parameters come from, for errors.
    """
    grammar = _BUILDERS[params.kind](params, field_name)
    if params.kind == "grammar" or params.whitespace_pattern is not None:
        grammar += _NO_FORCING
    return grammar if params.reasoning_end is None else _after_reasoning(grammar, params.reasoning_end)


_NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Do not look for text that a grammar forces. With terminals of the caller's it may have no end, and the library would
look for ever: a terminal is read as far as it matches, so `/b+/ "b"` goes on and on. Of several settings, the last
holds.
"""


def _after_reasoning(text: str, end: str | int) -> str:
    """Return a grammar of free text up to `end`, then of `text`, which keeps its own names."""
    if isinstance(end, int):
        before = [f"reasoning: TEXT? <[{end}]>", r"TEXT: /(.|\n)*/"]
    else:
        before = [rf"reasoning[lazy]: /(.|\n)*/ {literal(end)}"]
    first = "\n".join(["start: reasoning SPACE? @answer", *before, r"SPACE: /[ \n]{1,4}/"])
    return json.dumps({"grammars": [{"lark_grammar": first}, {"name": "answer", "lark_grammar": text}]})


def literal(text: str) -> str:
    """Return a string as a literal of Lark's syntax."""
    return json.dumps(text, ensure_ascii=True)


def json_rule(schema: Any, field_name: str, style: JsonStyle | None = None) -> str:
    """Return `%json {...}` for a parsed schema: a rule's body. Raises RequestError for an unsupported schema."""
    style = style or JsonStyle()
    return rewritten_rule(rewrite_schema(schema, field_name, style.closed), field_name, style)


def rewritten_rule(inner: Schema, field_name: str, style: JsonStyle) -> str:
    """As `json_rule`, for a schema as json_schema.py rewrites it."""
    if isinstance(inner, bool):
        inner = {} if inner else {"enum": []}
    options: dict[str, Any] = {"whitespace_pattern": style.whitespace} if style.whitespace else {}
    if not style.whitespace:
        options["whitespace_flexible"] = False
    if any(map(_is_open, iter_values(inner))):
        options["json_allowed_escapes"] = 'nrbtf\\"'
    try:
        return "%json " + json.dumps({**inner, "x-guidance": options}, ensure_ascii=True, allow_nan=False)
    except ValueError:  # as of 1e400, which JSON may write and floats cannot hold
        raise RequestError(f"{field_name}: a number of the schema is out of range", field_name) from None


def _is_open(schema: Any) -> bool:
    """Return whether a schema lists names of properties and allows others.

    The library would let the others be listed names in disguise (`\\u0061` for `a`), with any value.
    """
    lists_names = isinstance(schema, dict) and ("properties" in schema or "patternProperties" in schema)
    return lists_names and schema.get("additionalProperties") is not False


# ---- one function for each kind


def _of_json(params: StructuredOutputsParams, field_name: str) -> str:
    assert isinstance(params.json, str)  # StructuredOutputsParams keeps text
    return f"start: {json_rule(parse_schema(params.json, field_name), field_name, JsonStyle.of(params))}"


def _of_json_object(params: StructuredOutputsParams, field_name: str) -> str:
    return f"start: {json_rule({'type': 'object'}, field_name, JsonStyle.of(params))}"


def _of_choice(params: StructuredOutputsParams, field_name: str) -> str:
    assert params.choice is not None
    # One terminal: as alternatives of a rule, more than 2,000 choices would exceed the library's limit at run time.
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, params.choice))


def _of_regex(params: StructuredOutputsParams, field_name: str) -> str:
    assert params.regex is not None
    _check_count(len(params.regex), MAX_REGEX_CHARS, "characters in a regular expression", field_name)
    return f"start: {_regex_literal(params.regex)}"


def _regex_literal(pattern: str) -> str:
    """Return a regular expression in Lark's syntax, where a slash ends it, and an escaped line break is an error."""
    written = re.sub(r"\\.|/", lambda found: _REGEX_PIECES.get(found[0], found[0]), pattern, flags=re.DOTALL)
    return f"/{written}/"


_REGEX_PIECES = {"/": r"\/", "\\\n": r"\n"}


def _of_grammar(params: StructuredOutputsParams, field_name: str) -> str:
    assert params.grammar is not None
    text = params.grammar
    if text.lstrip().startswith("{"):  # the library would take it for its own JSON form, with options of its own
        raise RequestError(f"{field_name}: a grammar is rules in Lark's syntax or GBNF, not JSON", field_name)
    if _GBNF_RULE.search(text):
        _check_count(len(text), MAX_GBNF_CHARS, "characters in a grammar in GBNF", field_name)
        try:
            text = gbnf_to_lark(text)
        except ValueError as error:
            raise RequestError(f"{field_name}: the grammar is not valid GBNF: {error}", field_name) from None
    return _with_json_rewritten(text, field_name, JsonStyle.of(params))


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|%json\b')
"""A closing quote or slash may lack: then the rest of the line is skipped, and not searched from each place in it."""
_LARK_SPACE = re.compile(r"\s*")


def _with_json_rewritten(text: str, field_name: str, style: JsonStyle) -> str:
    """Rewrite the schemas inside a Lark grammar like any other, so that their options cannot be the caller's."""
    pieces: list[str] = []
    at, decoder = 0, json.JSONDecoder()
    num_schemas = num_regex_chars = num_intersections = 0
    while (found := _LARK_TOKEN.search(text, at)) is not None:
        pieces.append(text[at : found.start()])
        num_intersections += pieces[-1].count("&")
        at = found.end()
        if found[0] != "%json":
            pieces.append(found[0])
            num_regex_chars += len(found[0]) if found[0][0] == "/" and found[0][:2] != "//" else 0
            continue
        num_schemas += 1
        _check_count(num_schemas, MAX_SCHEMAS, "schemas in a grammar", field_name)
        begin = _LARK_SPACE.match(text, at).end()  # type: ignore[union-attr]  # it may be empty
        try:
            schema, at = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            raise RequestError(f"{field_name}: the grammar has %json without a JSON object", field_name) from None
        pieces.append(json_rule(schema, field_name, style))
    _check_count(num_regex_chars, MAX_REGEX_CHARS, "characters in the regular expressions of a grammar", field_name)
    _check_count(
        num_intersections + text.count("&", at), MAX_INTERSECTIONS, "intersections (&) in a grammar", field_name
    )
    return "".join(pieces) + text[at:]


def _check_count(count: int, most: int, what: str, field_name: str) -> None:
    if count > most:
        raise RequestError(f"{field_name}: {what} are limited to {most} (got {count})", field_name)


def _of_structural_tag(params: StructuredOutputsParams, field_name: str) -> str:
    assert isinstance(params.structural_tag, str)
    style, num_regex_chars = JsonStyle.of(params), 0

    def regex_rule(pattern: str) -> str:
        nonlocal num_regex_chars
        num_regex_chars += len(pattern)
        _check_count(num_regex_chars, MAX_REGEX_CHARS, "characters in regular expressions", field_name)
        return _regex_literal(pattern)

    tags = StructuralTags(field_name, lambda schema: json_rule(schema, field_name, style), regex_rule, literal)
    text = tags.grammar(parse_schema(params.structural_tag, field_name))
    return text + _NO_FORCING if num_regex_chars else text


_BUILDERS: dict[str, Callable[[StructuredOutputsParams, str], str]] = {
    "json": _of_json,
    "json_object": _of_json_object,
    "choice": _of_choice,
    "regex": _of_regex,
    "grammar": _of_grammar,
    "structural_tag": _of_structural_tag,
}
