"""The sandbox in which chat templates run, with the functions and tags that Hugging Face templates expect."""

import contextlib
import datetime
import json
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError

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
