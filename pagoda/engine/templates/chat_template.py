"""ChatTemplate: turn messages into a prompt with the model's Jinja template, in a sandbox."""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.templates.chat_values import (
    DEFAULT_CALLS,
    CallForm,
    ContentForm,
    Message,
    cut_at_mark,
    template_values,
    with_joined_systems,
)
from pagoda.engine.templates.special_marks import HiddenText, SpecialMarks


class ChatTemplate:
    """A compiled template.

    source: the template's text, or several by name ("default", "tool_use", ...).
    special_tokens: bos_token, eos_token, ... by name, as templates expect them.
    marks: the tokenizer's; they distinguish special tokens written by the template from text in messages.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        marks: SpecialMarks | None = None,
    ) -> None:
        """Parse the template. Raises ConfigError if it is not valid Jinja."""
        named = {"default": source} if isinstance(source, str) else dict(source)
        if not named:
            raise ConfigError("the model's list of chat templates is empty")
        self.sources: Mapping[str, str] = named
        self.special_tokens = dict(special_tokens or {})
        self.marks = marks if marks is not None else SpecialMarks()
        for text in named.values():
            check_syntax(text)
        self._marked_special_tokens = {name: self.marks.put(text) for name, text in self.special_tokens.items()}
        self._composed: frozenset[str] | None = None
        self._tool_history: dict[str, _ToolHistory] = {}
        self._forms: dict[str, ContentForm] = {}

    @property
    def source(self) -> str:
        """The text of the default template."""
        return self.source_for(has_tools=False)

    def source_for(self, has_tools: bool) -> str:
        """Return the text of the template that conversations with tools, or without, are rendered by."""
        return self.sources[self._name_for(has_tools)]

    # Compiled when it is first rendered: many models are never used for chats.

    @functools.cached_property
    def _plain(self) -> dict[str, jinja2.Template]:
        return {name: compile_template(text, str) for name, text in self.sources.items()}

    @functools.cached_property
    def _marked(self) -> dict[str, jinja2.Template]:
        return {name: compile_template(text, self.marks.put) for name, text in self.sources.items()}

    @functools.cached_property
    def _constants(self) -> frozenset[str]:
        return frozenset().union(*map(string_constants, self.sources.values()))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        is_marked: bool = False,
        reads_images: bool = False,
    ) -> str:
        """Return the prompt for these messages.

        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end inside the last message, so that the model continues it.
        template_kwargs: more variables for the template (such as enable_thinking).
        is_marked: put a mark in place of each special token that the template itself writes.
        reads_images: the template is a vision-language model's: messages may have parts {"type": "image"}.
        System messages that follow each other are one if the template would leave some of them out. Raises RequestError
        if messages are malformed, if the template does not render tools, tool calls, tool results or messages of the
        system or another role that were given, and if the template raises an error.
        """
        name = self._name_for(bool(tools))
        calls = self._history_of(name).form if any(map(_has_calls, messages)) else DEFAULT_CALLS
        values = template_values(
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            template_kwargs,
            self._form_of(name, reads_images),
            calls,
        )
        self._check_places(values)
        fill = self._render_marked if is_marked else functools.partial(self._fill, self._plain, self.special_tokens)
        text = fill(values)
        if self._left_out(values, text) is not None:
            places, values["messages"] = with_joined_systems(values["messages"])
            text = fill(values)
            if (left_out := self._left_out(values, text)) is not None:
                where, role = f"messages[{places[left_out]}].role", values["messages"][left_out]["role"]
                why = f"this model's chat template leaves out a message of role {role!r:.80} in this place"
                raise RequestError(f"{where}: {why}; make it a part of another one", where)
        return cut_at_mark(text) if continue_final_message else text

    def _render_marked(self, values: Mapping[str, Any]) -> str:
        composed = self._composed_tokens()
        if composed is None:  # marks would change the template's output
            return self._fill_and_mark(self._plain, self.special_tokens, values, frozenset(self.marks.texts))
        return self._fill_and_mark(self._marked, self._marked_special_tokens, values, composed)

    def _fill_and_mark(
        self,
        templates: Mapping[str, jinja2.Template],
        special_tokens: Mapping[str, str],
        values: Mapping[str, Any],
        composed: frozenset[str],
    ) -> str:
        """Render; mark `composed` tokens wherever they appear, unless they came from `values`.

        Text of callers may become a special token only after the template has cut, joined or changed it. So the
        template is rendered twice: with the values as they are, and with the punctuation of special tokens in them
        hidden. Where both agree, the second rendering shows which special tokens the template has written. Otherwise
        the template depends on that punctuation, and the first must have no more special tokens than the second.
        """
        if not composed:
            return self._fill(templates, special_tokens, values)
        for index, message in enumerate(values["messages"]):
            if not _PLAIN_ROLE.fullmatch(message["role"]):
                raise RequestError(
                    f"messages[{index}].role: for this model, a role may contain letters, digits, spaces, _, - and .",
                    f"messages[{index}].role",
                )
        text = self._fill(templates, special_tokens, values)
        hidden = HiddenText(values, composed, self._constants)
        if not hidden.is_needed:
            return self.marks.put_only(text, composed)

        def marked_with(shown: Mapping[str, Any]) -> str:
            return self.marks.put_only(self._fill(templates, special_tokens, shown, values), composed)

        safe = marked_with(hidden.hide(values))
        if self.marks.remove(hidden.show(safe)) == self.marks.remove(text):
            return hidden.show(safe)
        marked, written = self.marks.put_only(text, composed), self.marks.in_order(safe)
        if _is_subsequence(self.marks.in_order(marked), written):
            return marked
        where = "messages"
        for index, message in list(enumerate(values["messages"]))[:_MAX_SEARCHED_MESSAGES]:
            turns = [*values["messages"][:index], hidden.hide(message), *values["messages"][index + 1 :]]
            if _is_subsequence(self.marks.in_order(marked_with({**values, "messages": turns})), written):
                where = f"messages[{index}]"
                break
        raise RequestError(
            f"{where}: the chat template would turn text of this request into special tokens of the model; remove what "
            "looks like special tokens, or like parts of them",
            where,
        )

    def _fill(
        self,
        templates: Mapping[str, jinja2.Template],
        special_tokens: Mapping[str, str],
        values: Mapping[str, Any],
        shown: Mapping[str, Any] | None = None,
    ) -> str:
        """Render.

        shown: the values as the caller sent them, where text in `values` is hidden.
        Raises RequestError when the template refuses or fails. Its message never comes from a rendering with marks or
        hidden text: a template can cut them up, and a caller who reads one could write special tokens.
        """
        try:
            return templates[self._name_for(bool(values["tools"]))].render({**special_tokens, **values})
        except Exception as error:  # a template may raise any Python exception
            if templates is not self._plain or shown is not None:
                self._fill(self._plain, self.special_tokens, values if shown is None else shown)
                raise RequestError("the chat template fails on these messages", "messages") from None
            if isinstance(error, jinja2.TemplateError):
                message = shorten(error.message or "", MAX_MESSAGE_CHARS)
                raise RequestError(f"the chat template rejects these messages: {message}", "messages") from None
            message = shorten(repr(error), MAX_MESSAGE_CHARS)
            raise RequestError(f"the chat template fails on these messages: {message}", "messages") from None

    def _name_for(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))

    def _check_places(self, values: Mapping[str, Any]) -> None:
        """Raise RequestError for tools, tool calls or tool results that the template would silently drop."""
        name = self._name_for(bool(values["tools"]))
        if values["tools"] and "tools" not in self.sources[name]:
            raise RequestError("tools: this model's chat template does not support tools", "tools")
        for index, message in enumerate(values["messages"]):
            is_result = message["role"] == "tool"
            if not (is_result or message.get("tool_calls")):
                continue
            history = self._history_of(name)
            if message.get("tool_calls") and not history.shows_calls:
                where = f"messages[{index}].tool_calls"
                raise RequestError(f"{where}: this model's chat template does not support tool calls", where)
            if is_result and not history.shows_results:
                where = f"messages[{index}].role"
                raise RequestError(f"{where}: this model's chat template does not support tool results", where)

    def _left_out(self, values: Mapping[str, Any], text: str) -> int | None:
        """Return the place of a message that the template leaves out, because of its role or its own place, or None.

        text: as rendered. A text that is not in it may have been changed, so another one is tried in its place.
        """
        turns: list[dict[str, Any]] = values["messages"]
        others = ((index, turn) for index, turn in enumerate(turns) if turn["role"] not in _ANSWERED_ROLES)
        for index, turn in itertools.islice(others, _MAX_SEARCHED_MESSAGES):
            content = turn.get("content") or ""
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            if all(part.strip() in text for part in parts):
                continue
            tried = {**turn, "content": _SHOWN if isinstance(content, str) else [{"type": "text", "text": _SHOWN}]}
            shown = {**values, "messages": [*turns[:index], tried, *turns[index + 1 :]]}
            try:
                is_shown = _SHOWN in self._fill(self._plain, self.special_tokens, shown)
            except RequestError:  # it depends on what the message says
                return None
            return None if is_shown else index  # one more rendering is enough
        return None

    def _form_of(self, name: str, reads_images: bool) -> ContentForm:
        """Return how a template reads contents. Without images, parts become one string, as other servers join them."""
        if name not in self._forms:
            self._forms[name] = self._find_form(name)
        form = self._forms[name]
        return form if reads_images or form is ContentForm.ONLY_PARTS else ContentForm.TEXT

    def _find_form(self, name: str) -> ContentForm:
        """Return what a template reads, by rendering a message of each form."""

        def shows(content: object) -> bool:
            values = {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": True}
            with contextlib.suppress(Exception):
                text = self._plain[name].render({**self.special_tokens, **values})
                return _SHOWN in text and not _WRITTEN_PART.search(text)
            return False

        if not shows([{"type": "text", "text": _SHOWN}]):
            return ContentForm.TEXT
        return ContentForm.PARTS if shows(_SHOWN) else ContentForm.ONLY_PARTS

    def _history_of(self, name: str) -> "_ToolHistory":
        if name not in self._tool_history:
            self._tool_history[name] = self._find_tool_history(name)
        return self._tool_history[name]

    def _find_tool_history(self, name: str) -> "_ToolHistory":
        """Return what the template shows of calls, in the first of the forms in which it shows them."""
        texts: list[str] = []
        for form in _CALL_FORMS:
            rendered = self._probe_calls(name, form)
            if any(_CALLED in text for text in rendered):
                return _ToolHistory(form, True, any(_RESULT in text for text in rendered))
            texts += rendered
        # If no form renders, the error is reported when the request itself is rendered.
        return _ToolHistory(DEFAULT_CALLS, not texts, not texts or any(_RESULT in text for text in texts))

    def _probe_calls(self, name: str, form: CallForm) -> list[str]:
        rendered: list[str] = []
        for tools in (None, [_TOOL]):
            for more in ([], _probe("assistant", "user")):
                values = template_values([*_CALLING, *more], tools, True, False, None, calls=form)
                with contextlib.suppress(Exception):
                    rendered.append(self._plain[name].render({**self.special_tokens, **values}))
        return rendered

    def _composed_tokens(self) -> frozenset[str] | None:
        """Return the special tokens that the template composes from parts, as in "<|" + role + "|>".

        Found by rendering conversations without special tokens. None if marks change the template's output, because
        it inspects its own special tokens (their length, for example).
        """
        if self._composed is None:
            self._composed = self._find_composed()
        return None if _UNMARKABLE in self._composed else self._composed

    def _find_composed(self) -> frozenset[str]:
        composed: set[str] = set()
        for messages, tools in _PROBES:
            values = template_values(messages, tools, tools is None, False, None)
            try:
                plain = self._fill(self._plain, self.special_tokens, values)
            except RequestError:  # not every template accepts every conversation
                continue
            try:
                marked = self._fill(self._marked, self._marked_special_tokens, values)
            except RequestError:
                return frozenset({_UNMARKABLE})
            if self.marks.remove(marked) != plain:
                return frozenset({_UNMARKABLE})
            composed |= self.marks.unmarked_in(marked)
        return frozenset(composed)


_MAX_SEARCHED_MESSAGES = 64
_UNMARKABLE = ""
_ANSWERED_ROLES = frozenset({"user", "assistant", "tool"})
"""Of turns; messages of other roles are for the template to know."""
_PLAIN_ROLE = re.compile(r"[\w .-]+")
_SHOWN = "probe_content"
_WRITTEN_PART = re.compile(r"type['\"]: *['\"]text")
"""A part that a template has written as an object, because it expects a string."""


@dataclasses.dataclass(frozen=True, slots=True)
class _ToolHistory:
    """What a template shows of earlier calls and their results.   form: in which it shows calls."""

    form: CallForm
    shows_calls: bool
    shows_results: bool


_CALL_FORMS = [
    CallForm(content, as_text) for as_text in (False, True) for content in ({}, {"content": ""}, {"content": None})
]


def _has_calls(message: Any) -> bool:
    return isinstance(message, Mapping) and bool(message.get("tool_calls"))


def _is_subsequence(some: Sequence[str], of: Sequence[str]) -> bool:
    remaining = iter(of)
    return all(item in remaining for item in some)


# ---- probe conversations that show how a template writes its special tokens


def _probe(*roles: str) -> list[Message]:
    return [{"role": role, "content": "x"} for role in roles]


_CALLED, _RESULT = "probe_function", "probe_result"
_CALL = {"id": "call12345", "type": "function", "function": {"name": _CALLED, "arguments": {"a": "x"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
_CALLING: list[Message] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls": [_CALL]},
    {"role": "tool", "content": _RESULT, "name": "f", "tool_call_id": "call12345"},
]
_PROBES: tuple[tuple[list[Message], list[dict[str, Any]] | None], ...] = (
    *((_probe(role), None) for role in ("user", "assistant", "system", "developer", "tool", "function")),
    (_probe("user", "assistant", "user"), None),
    (_probe("system", "user", "assistant", "user"), None),
    (_probe("developer", "user", "assistant", "user"), None),
    (_probe("user", "assistant", "tool"), None),
    (_CALLING, None),
    (_CALLING, [_TOOL]),
    ([*_probe("system"), *_CALLING, *_probe("assistant", "user")], [_TOOL]),
)


# ---- the sandbox, with the functions and tags that Hugging Face templates expect


MAX_MESSAGE_CHARS = 500
"""Most characters of a template's own error message that are shown."""


def check_syntax(source: str) -> None:
    """Raise ConfigError if `source` is not valid Jinja. Does not compile it."""
    with _syntax_errors():
        _ENVIRONMENT.parse(source)


def compile_template(source: str, change: Callable[[str], str]) -> jinja2.Template:
    """Compile a template, applying `change` to its own text and string constants. Raises ConfigError."""
    with _syntax_errors():
        tree = _ENVIRONMENT.parse(source)
        for node in tree.find_all((jinja2.nodes.TemplateData, jinja2.nodes.Const)):
            if isinstance(node, jinja2.nodes.TemplateData):
                node.data = change(node.data)
            elif isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
                node.value = change(node.value)
        return jinja2.Template.from_code(_ENVIRONMENT, _ENVIRONMENT.compile(tree), _ENVIRONMENT.make_globals(_GLOBALS))


@functools.lru_cache(32)
def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template reads; none if it is not valid Jinja."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def string_constants(source: str) -> set[str]:
    """Return the string constants in a template's expressions: what it may search its values for."""
    constants = _ENVIRONMENT.parse(source).find_all(jinja2.nodes.Const)
    return {node.value for node in constants if isinstance(node.value, str)}


@contextlib.contextmanager
def _syntax_errors() -> Generator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        message = shorten(error.message or "", MAX_MESSAGE_CHARS)
        raise ConfigError(f"the chat template is not valid: {message} (line {error.lineno})") from None
    except (SyntaxError, RecursionError, MemoryError) as error:  # from Python's own compiler
        raise ConfigError(f"the chat template is nested too deeply ({type(error).__name__})") from None


class _GenerationTag(jinja2.ext.Extension):
    """Pass through {% generation %} ... {% endgeneration %}, which marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace(), but refusing attributes that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without the HTML escapes of Jinja's own tojson filter, which prompts must not contain."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _make_environment()
_GLOBALS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "namespace": _Namespace,
}
