"""ChatTemplate: a model's own Jinja template makes messages a prompt. It comes with the weights: hence the sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError, RequestError

Message = Mapping[str, Any]
"""One turn: role, content (text, or a list of {"type": "text", "text": ...} parts), and what else templates know."""


class ChatTemplate:
    """A compiled template.

    source: the template's text, or several by name ("default", "tool_use", ...).
    special_tokens: bos_token, eos_token, ... by name, as templates expect them.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError for a template that is not Jinja."""
        named = {"default": source} if isinstance(source, str) else dict(source)
        if not named:
            raise ConfigError("the model's list of chat templates is empty")
        self.sources: Mapping[str, str] = named
        self.special_tokens = dict(special_tokens or {})
        try:
            self._templates = {name: _ENVIRONMENT.from_string(text, globals=_GLOBALS) for name, text in named.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid: {error.message} (line {error.lineno})") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages.

        add_generation_prompt: end with the opening of the assistant's turn.
        continue_final_message: end inside the last message, so that the model goes on with it.
        template_kwargs: more variables for the template (such as enable_thinking).
        Raises RequestError when messages are malformed or the template refuses or fails.
        """
        turns = [_normal_message(index, message) for index, message in enumerate(messages)]
        if not turns:
            raise RequestError("messages is empty: a chat needs at least one", "messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        variables = {
            **self.special_tokens,
            **(template_kwargs or {}),
            "messages": turns,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            turns[-1]["content"] += _CUT_MARK
        try:
            text = self._choose(bool(tools)).render(variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error.message}", "messages") from None
        except Exception as error:  # a template may fail in any way that Python can
            raise RequestError(f"the chat template fails on these messages: {error!r}", "messages") from None
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


def _normal_message(index: int, message: Message) -> dict[str, Any]:
    """The message with its content as plain text. Raises RequestError naming what is wrong with it."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] is {type(message).__name__}, expected an object with a role", "messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] has no role", "messages")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(index, part) for part in content)
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{index}] has no content", "messages")
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content is {type(content).__name__}, expected text", "messages")
    return {**message, "content": content if content is not None else ""}


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"messages[{index}] has a part of type {abbreviate(kind)}; this model takes text only", "messages"
    )


_CUT_MARK = (
    "\uf8ff{cut}\uf8ff "  # private-use letters: no message has them; the last space shows whether content is trimmed
)


def _cut_at_mark(text: str) -> str:
    """What stands before the mark; where the template trims the content, trimmed too (the mark stood in the way)."""
    before, mark, behind = text.rpartition(_CUT_MARK.rstrip())
    if not mark:
        raise RequestError("continue_final_message: the chat template leaves out the last message", "messages")
    return before if behind.startswith(" ") else before.rstrip()


# ---- what templates may use, by the conventions of the Hugging Face tools


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks text for training; here it is passed through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace() without attributes that could shadow Python's own."""

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
    """Jinja's own tojson escapes for HTML, which prompts must not contain."""
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
