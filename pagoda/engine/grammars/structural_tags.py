"""Structural tags: text with structured parts, as a grammar. The format is xgrammar's, and its older one.

Free text (`any_text`, and what is around `triggered_tags`) ends where the innermost tag with an end around it ends: at
the first of its end strings. Outside of such tags it goes on to the end of the output, so nothing may follow it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pagoda.base.errors import RequestError

_MAX_FORMATS = 1024
_MAX_DEPTH = 32
_OLDER = '{"structures": [{"begin", "schema", "end"}, ...], "triggers": ["...", ...]}'


class _Follows(Enum):
    """What may follow a part: anything, nothing because it has taken the end of its tag, or nothing at all."""

    ANYTHING = 1
    AFTER_TAG = 2
    NOTHING = 3


@dataclass(frozen=True, slots=True)
class _Part:
    """The body of a rule, and what may follow it."""

    body: str
    follows: _Follows = _Follows.ANYTHING


class StructuralTags:
    """Writes the grammar of one structural tag.

    json_rule, regex_rule: return the bodies of rules for a schema and for a regular expression; may raise RequestError.
    literal: returns a string in the grammar's syntax.
    """

    def __init__(
        self,
        field_name: str,
        json_rule: Callable[[Any], str],
        regex_rule: Callable[[str], str],
        literal: Callable[[str], str],
    ) -> None:
        self._field = field_name
        self._json_rule = json_rule
        self._regex_rule = regex_rule
        self._literal = literal
        self._rules: list[str] = [r"TEXT: /(.|\n)*/"]
        self._num_formats = 0
        self._kinds: dict[str, Callable[[dict[str, Any], str, Sequence[str]], _Part]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "plus": self._repeated,
            "star": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, given: Any) -> str:
        """Return the grammar. Raises RequestError for what is not a structural tag, or not a supported one."""
        if not isinstance(given, dict) or (given.get("format") is None and "structures" not in given):
            raise self._refuse("", f'a structural tag is {{"format": {{"type": ...}}}}, or the older {_OLDER}')
        if given.get("format") is not None:
            part = self._format(given["format"], "format", ())
        else:
            part = self._format(self._newer(given), "", ())
        return "\n".join([f"start: {part.body}", *self._rules])

    def _newer(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the format of a structural tag of the older form."""
        structures = given["structures"]
        if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
            raise self._refuse("structures", f"must be a list, as in {_OLDER}")
        tags = [
            {"end": "", **one, "content": {"type": "json_schema", "json_schema": one.get("schema", True)}}
            for one in structures
        ]
        return {"type": "triggered_tags", "tags": tags, "triggers": given.get("triggers")}

    def _refuse(self, place: str, why: str) -> RequestError:
        at = f"at {place.lstrip('/')}: " if place else ""
        return RequestError(f"{self._field}: {at}{why}", self._field)

    def _format(self, given: Any, place: str, ends: Sequence[str]) -> _Part:
        """ends: strings that end the tag around it, if it is the last part of one."""
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise self._refuse(place, f"a format's type is one of {', '.join(self._kinds)} (got {kind!r:.80})")
        self._num_formats += 1
        if self._num_formats > _MAX_FORMATS:
            raise self._refuse(place, f"formats are limited to {_MAX_FORMATS}")
        if place.count("/") > 2 * _MAX_DEPTH:
            raise self._refuse("", f"formats are nested more than {_MAX_DEPTH} deep")
        for name in ("excludes", "max_tokens", "max_chars", "any_order"):
            if given.get(name):
                raise self._refuse(f"{place}/{name}", "is not supported")
        return self._kinds[kind](given, place, ends)

    def _limited(self, given: Any, place: str) -> str:
        """Return the body of a format that something may follow."""
        part = self._format(given, place, ())
        if part.follows is _Follows.NOTHING:
            raise self._refuse(place, "free text must be the last part, or the last part of a tag with an end")
        return part.body

    def _rule(self, name: str, body: str) -> str:
        """Add a rule; return its name.   name: a prefix, perhaps with attributes."""
        first, bracket, attributes = name.partition("[")
        own = f"{first}{len(self._rules)}"
        self._rules.append(f"{own}{bracket}{attributes}: {body}")
        return own

    def _any_of(self, bodies: Sequence[str]) -> str:
        return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"

    def _any_literal(self, texts: Sequence[str]) -> str:
        return self._any_of([self._literal(text) for text in texts])

    def _text(self, ends: Sequence[str]) -> _Part:
        """Free text up to the first of `ends`, or of the whole output."""
        if not ends:
            return _Part(self._rule("text", "TEXT"), _Follows.NOTHING)
        return _Part(self._rule("text[lazy]", f"TEXT {self._any_literal(ends)}"), _Follows.AFTER_TAG)

    def _strings(self, given: dict[str, Any], name: str, place: str, allow_empty: bool = False) -> list[str]:
        value = given.get(name)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
            raise self._refuse(f"{place}/{name}", "must be a string, or a list of strings")
        if not allow_empty and not all(texts):
            raise self._refuse(f"{place}/{name}", "must not be empty")
        return texts

    def _list(self, given: dict[str, Any], name: str, place: str) -> list[Any]:
        value = given.get(name)
        if not isinstance(value, list) or not value:
            raise self._refuse(f"{place}/{name}", "must be a list of at least one format")
        return value

    # ---- one function for each kind of format

    def _const_string(self, given: dict[str, Any], place: str, _ends: Sequence[str]) -> _Part:
        if not isinstance(given.get("value"), str):
            raise self._refuse(f"{place}/value", "must be a string")
        return _Part(self._literal(given["value"]))

    def _json_schema(self, given: dict[str, Any], place: str, _ends: Sequence[str]) -> _Part:
        if given.get("style", "json") != "json":
            raise self._refuse(f"{place}/style", 'only "json" is supported')
        return _Part(self._rule("json", self._json_rule(given.get("json_schema", True))))

    def _regex(self, given: dict[str, Any], place: str, ends: Sequence[str]) -> _Part:
        [pattern] = self._strings({"pattern": given.get("pattern")}, "pattern", place)[:1]
        if not ends:
            return _Part(self._regex_rule(pattern))
        # One terminal: on its own, the expression would take an end that it matches too.
        return _Part(self._rule("REGEX", f"{self._regex_rule(pattern)} {self._any_literal(ends)}"), _Follows.AFTER_TAG)

    def _any_text(self, _given: dict[str, Any], _place: str, ends: Sequence[str]) -> _Part:
        return self._text(ends)

    def _sequence(self, given: dict[str, Any], place: str, ends: Sequence[str]) -> _Part:
        *before, last = self._list(given, "elements", place)
        bodies = [self._limited(one, f"{place}/elements/{i}") for i, one in enumerate(before)]
        part = self._format(last, f"{place}/elements/{len(before)}", ends)
        return _Part(f"({' '.join([*bodies, part.body])})", part.follows)

    def _or(self, given: dict[str, Any], place: str, ends: Sequence[str]) -> _Part:
        parts = [
            self._format(one, f"{place}/elements/{i}", ends)
            for i, one in enumerate(self._list(given, "elements", place))
        ]
        if all(part.follows is _Follows.ANYTHING for part in parts):
            return _Part(self._any_of([part.body for part in parts]))
        if not ends:
            return _Part(self._any_of([part.body for part in parts]), _Follows.NOTHING)
        return _Part(self._any_of([self._closed(part, ends) for part in parts]), _Follows.AFTER_TAG)

    def _closed(self, part: _Part, ends: Sequence[str]) -> str:
        """Return a part followed by one of its tag's ends, if it has not taken one."""
        is_open = bool(ends) and part.follows is _Follows.ANYTHING
        return f"{part.body} {self._any_literal(ends)}" if is_open else part.body

    def _repeated(self, given: dict[str, Any], place: str, _ends: Sequence[str]) -> _Part:
        body = self._limited(given.get("content"), f"{place}/content")
        if given["type"] != "repeat":
            return _Part(f"({body}){ {'optional': '?', 'plus': '+', 'star': '*'}[given['type']] }")
        least, most = given.get("min"), given.get("max")
        is_valid = all(isinstance(one, int) and not isinstance(one, bool) and one <= 10_000 for one in (least, most))
        if not is_valid or least < 0 or not (most == -1 or most >= least):  # type: ignore[operator]  # both are integers
            raise self._refuse(place, "repeat needs 0 <= min <= max <= 10,000, or max -1 for any number")
        return _Part(f"({body}){{{least},{'' if most == -1 else most}}}")

    def _tag(self, given: dict[str, Any], place: str, ends: Sequence[str]) -> _Part:
        begin = self._strings({"begin": given.get("begin")}, "begin", place, allow_empty=True)[0]
        part = self._tag_after(begin, given, place, ends)
        return _Part(f"({part.body})", part.follows)

    def _tag_after(self, written: str, tag: Any, place: str, ends: Sequence[str] = ()) -> _Part:
        """Return a tag's begin as far as it is `written`, content and end. One without an end ends as what is around.

        ends: see `_format`.
        """
        own_ends = [end for end in self._strings(tag, "end", place, allow_empty=True) if end]
        part = self._format(tag.get("content"), f"{place}/content", own_ends or ends)
        follows = _Follows.ANYTHING if own_ends else part.follows
        return _Part(f"{self._literal(written)} {self._closed(part, own_ends)}", follows)

    def _tags(self, given: dict[str, Any], place: str) -> list[tuple[str, dict[str, Any], str]]:
        """Return the begin, the tag and the place of each tag."""
        found: list[tuple[str, dict[str, Any], str]] = []
        for i, tag in enumerate(self._list(given, "tags", place)):
            at = f"{place}/tags/{i}" if place else f"structures/{i}"
            if not isinstance(tag, dict) or not isinstance(tag.get("begin"), str) or tag.get("type", "tag") != "tag":
                raise self._refuse(at, "must be a tag whose begin is a string")
            found.append((tag["begin"], tag, at))
        return found

    def _triggered_tags(self, given: dict[str, Any], place: str, ends: Sequence[str]) -> _Part:
        triggers = self._strings(given, "triggers", place)
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        at_once: list[str] = []
        for begin, tag, at in self._tags(given, place):
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise self._refuse(f"{at}/begin", f"no trigger begins {begin!r:.80}")
            part = self._tag_after(begin.removeprefix(trigger), tag, at)
            if part.follows is _Follows.NOTHING:
                raise self._refuse(at, "a tag with free text needs an end")
            by_trigger[trigger].append(self._rule("tag", part.body))
            at_once.append(f"{self._literal(trigger)} {by_trigger[trigger][-1]}")
        begun = {
            trigger: self._rule("trigger[lazy]", f"TEXT {self._literal(trigger)}")
            for trigger, tags in by_trigger.items()
            if tags
        }
        later = self._any_of([f"{begun[trigger]} {self._any_of(by_trigger[trigger])}" for trigger in begun])
        rest = self._text(ends)
        if not given.get("stop_after_first"):
            first = f"{self._any_of(at_once)} " if given.get("at_least_one") else ""
            return _Part(f"({first}({later})* {rest.body})", rest.follows)
        if given.get("at_least_one"):
            return _Part(self._any_of(at_once))
        return _Part(f"({self._closed(_Part(later), ends)} | {rest.body})", rest.follows)

    def _tags_with_separator(self, given: dict[str, Any], place: str, _ends: Sequence[str]) -> _Part:
        separator = self._strings({"separator": given.get("separator")}, "separator", place, allow_empty=True)[0]
        parts = [self._tag_after(begin, tag, at) for begin, tag, at in self._tags(given, place)]
        if any(part.follows is _Follows.NOTHING for part in parts):
            raise self._refuse(place, "a tag with free text needs an end")
        one = self._rule("tag", self._any_of([part.body for part in parts]))
        many = one if given.get("stop_after_first") else f"{one} ({self._literal(separator)} {one})*"
        return _Part(f"({many}){'' if given.get('at_least_one') else '?'}")
