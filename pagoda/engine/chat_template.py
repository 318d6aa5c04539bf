"""ChatTemplate: turn messages into a prompt with the model's Jinja template, in a sandbox: it is untrusted input."""

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.special_marks import Shield, SpecialMarks

Message = Mapping[str, Any]
"""One turn: role, content (a string, or a list of {"type": "text", "text": ...} parts), and template-specific keys."""


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
        with _syntax_errors():
            for text in named.values():
                _ENVIRONMENT.parse(text)
        self._marked_special_tokens = {name: self.marks.put(text) for name, text in self.special_tokens.items()}
        self._composed: frozenset[str] | None = None
        self._tool_history: dict[str, tuple[bool, bool]] = {}

    # Compiled lazily, in the process that renders: Jinja's compiler folds constants, which can need unbounded memory.

    @functools.cached_property
    def _plain(self) -> dict[str, jinja2.Template]:
        with _syntax_errors():
            return {name: _compile(text, str) for name, text in self.sources.items()}

    @functools.cached_property
    def _marked(self) -> dict[str, jinja2.Template]:
        with _syntax_errors():
            return {name: _compile(text, self.marks.put) for name, text in self.sources.items()}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for these messages.

        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end inside the last message, so that the model continues it.
        template_kwargs: more variables for the template (such as enable_thinking).
        Raises RequestError if messages are malformed, if the template does not render tools, tool calls or tool
        results that were given, and if the template raises an error.
        """
        values = _values(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        self._check_places(values)
        return _uncut(self._fill(self._plain, self.special_tokens, values), continue_final_message)

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Like `render`, with a mark in place of each special token that the template itself writes."""
        values = _values(messages, tools, add_generation_prompt, continue_final_message, template_kwargs)
        self._check_places(values)
        composed = self._composed_tokens()
        if composed is None:  # marks would change the template's output
            text = self._fill_shielded(self._plain, self.special_tokens, values, self.marks.texts)
        else:
            text = self._fill_shielded(self._marked, self._marked_special_tokens, values, composed)
        return _uncut(text, continue_final_message)

    def _fill_shielded(
        self,
        templates: Mapping[str, jinja2.Template],
        special_tokens: Mapping[str, str],
        values: Mapping[str, Any],
        composed: Iterable[str],
    ) -> str:
        """Render; mark `composed` tokens wherever they appear, unless they came from `values`."""
        if not composed:
            return self._fill(templates, special_tokens, values)
        for index, message in enumerate(values["messages"]):
            if not _PLAIN_ROLE.fullmatch(message["role"]):
                raise RequestError(
                    f"messages[{index}].role: for this model, a role may contain letters, digits, spaces, _, - and .",
                    f"messages[{index}].role",
                )
        shield = Shield(self.marks, composed)
        if not shield.is_needed(values):
            return self.marks.put_only(self._fill(templates, special_tokens, values), composed)
        text = self._fill(templates, special_tokens, shield.hide(values), values)
        return shield.show(self.marks.put_only(text, composed))

    def _fill(
        self,
        templates: Mapping[str, jinja2.Template],
        special_tokens: Mapping[str, str],
        values: Mapping[str, Any],
        shown: Mapping[str, Any] | None = None,
    ) -> str:
        """Render.

        shown: the values as the caller sent them, where `values` hold placeholders.
        Raises RequestError when the template refuses or fails. Its message never comes from a rendering with marks or
        placeholders: a template can cut them up, and a caller who reads one could write special tokens.
        """
        try:
            return templates[self._name_for(values)].render({**special_tokens, **values})
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any Python exception
            if templates is not self._plain or shown is not None:
                self._fill(self._plain, self.special_tokens, values if shown is None else shown)
                raise RequestError("the chat template fails on these messages", "messages") from None
            if isinstance(error, jinja2.TemplateError):
                said = shorten(error.message or "", _MAX_SAID_CHARS)
                raise RequestError(f"the chat template rejects these messages: {said}", "messages") from None
            said = shorten(repr(error), _MAX_SAID_CHARS)
            raise RequestError(f"the chat template fails on these messages: {said}", "messages") from None

    def _name_for(self, values: Mapping[str, Any]) -> str:
        if values["tools"] and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))

    def _check_places(self, values: Mapping[str, Any]) -> None:
        """Raise RequestError for tools, tool calls or tool results that the template would silently drop."""
        name = self._name_for(values)
        if values["tools"] and "tools" not in self.sources[name]:
            raise RequestError("tools: this model's chat template does not support tools", "tools")
        for index, message in enumerate(values["messages"]):
            is_result = message["role"] == "tool"
            if not (is_result or message.get("tool_calls")):
                continue
            if name not in self._tool_history:
                self._tool_history[name] = self._find_tool_history(name)
            shows_calls, shows_results = self._tool_history[name]
            if message.get("tool_calls") and not shows_calls:
                where = f"messages[{index}].tool_calls"
                raise RequestError(f"{where}: this model's chat template does not support tool calls", where)
            if is_result and not shows_results:
                where = f"messages[{index}].role"
                raise RequestError(f"{where}: this model's chat template does not support tool results", where)

    def _find_tool_history(self, name: str) -> tuple[bool, bool]:
        """Return whether the template renders tool calls, and tool results, by rendering a probe conversation."""
        rendered: list[str] = []
        for tools in (None, [_TOOL]):
            for more in ([], _probe("assistant", "user")):
                values = _values([*_CALLING, *more], tools, True, False, None)
                with contextlib.suppress(Exception):
                    rendered.append(self._plain[name].render({**self.special_tokens, **values}))
        if not rendered:  # the error is reported when the request itself is rendered
            return True, True
        return any(_CALLED in text for text in rendered), any(_RESULT in text for text in rendered)

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
            values = _values(messages, tools, tools is None, False, None)
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


_MAX_SAID_CHARS = 500
_UNMARKABLE = ""
_PLAIN_ROLE = re.compile(r"[\w .-]+")


@contextlib.contextmanager
def _syntax_errors() -> Generator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        said = shorten(error.message or "", _MAX_SAID_CHARS)
        raise ConfigError(f"the chat template is not valid: {said} (line {error.lineno})") from None
    except (SyntaxError, RecursionError) as error:  # from Python's own compiler
        raise ConfigError(f"the chat template is nested too deeply ({type(error).__name__})") from None


def _compile(source: str, change: Callable[[str], str]) -> jinja2.Template:
    """Compile a template, applying `change` to its own text and string constants."""
    tree = _ENVIRONMENT.parse(source)
    for node in tree.find_all((jinja2.nodes.TemplateData, jinja2.nodes.Const)):
        if isinstance(node, jinja2.nodes.TemplateData):
            node.data = change(node.data)
        elif isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str):
            node.value = change(node.value)
    return jinja2.Template.from_code(_ENVIRONMENT, _ENVIRONMENT.compile(tree), _ENVIRONMENT.make_globals(_GLOBALS))


def _values(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the template's variables, validated and normalised. Raises RequestError."""
    turns = [_normal_message(index, message) for index, message in enumerate(messages)]
    if not turns:
        raise RequestError("messages is empty: a chat needs at least one", "messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are mutually exclusive", "continue_final_message"
        )
    if continue_final_message:
        turns[-1]["content"] += _CUT_MARK
    return {
        **(template_kwargs or {}),
        "messages": turns,
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }


def _uncut(text: str, continue_final_message: bool) -> str:
    return _cut_at_mark(text) if continue_final_message else text


def _normal_message(index: int, message: Message) -> dict[str, Any]:
    """Return the message with its content as one string. Raises RequestError if it is malformed."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] is {type(message).__name__}, expected an object with a role", "messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role", "messages")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{index}] has no content", "messages")
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content is {type(content).__name__}, expected a string", "messages")
    normal = {**message, "content": content if content is not None else ""}
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = _normal_calls(f"messages[{index}].tool_calls", calls)
    return normal


def _normal_calls(where: str, calls: Any) -> list[Any]:
    """Return tool calls as templates expect them: with arguments parsed from JSON strings into objects."""
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where} is {type(calls).__name__}, expected a list", where)
    normal: list[Any] = []
    for index, call in enumerate(cast("Sequence[Any]", calls)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{index}] has no function with a name", f"{where}[{index}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            at = f"{where}[{index}].function.arguments"
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise RequestError(f"{at}: expected a string with a JSON object", at) from None
            if not isinstance(arguments, dict):
                raise RequestError(f"{at}: expected a string with a JSON object", at)
        normal.append({**call, "function": {**function, "arguments": arguments if arguments is not None else {}}})
    return normal


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(f"{where} is a part of type {abbreviate(kind)}; this model takes text only", where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text: expected a string", f"{where}.text")
    return part["text"]


_CUT_MARK = (
    "\uf8ff{cut}\uf8ff "  # private-use characters, not used in messages; the last space shows if content is trimmed
)


def _cut_at_mark(text: str) -> str:
    """Return the text before the mark, trimmed if the template trims content (the mark kept it from doing so)."""
    before, mark, after = text.rpartition(_CUT_MARK.rstrip())
    if not mark:
        raise RequestError("continue_final_message: the chat template leaves out the last message", "messages")
    return before if after.startswith(" ") else before.rstrip()


# ---- functions and tags that Hugging Face templates expect


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


# ---- probe conversations that show how a template writes its special tokens


def _probe(*roles: str) -> list[Message]:
    return [{"role": role, "content": "x"} for role in roles]


_CALLED, _RESULT = "probe_function", "probe_result"
_CALL = {"id": "call12345", "type": "function", "function": {"name": _CALLED, "arguments": {"a": "x"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
_CALLING: list[Message] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
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
