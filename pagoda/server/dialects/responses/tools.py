"""The tools of OpenAI's Responses: what the model gets of them, and what its calls are in that API."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from pagoda.base.errors import RequestError
from pagoda.base.text import encodable, is_encodable
from pagoda.engine.grammars.lark_json import lark_in_json
from pagoda.server.body import Body, Name, OrDefault, one_of
from pagoda.server.dialects.transcript import function_tool

_LONGEST_NAME = 64


class CustomFormat(Struct, frozen=True, omit_defaults=True):
    """The form of a custom tool's input.

    type: text, or grammar.
    syntax: Of a grammar: lark or regex.
    definition: Of a grammar: the grammar, or the regular expression.
    """

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(Struct, frozen=True, omit_defaults=True):
    """What the model may call. Hosted tools, such as web_search, are left out.

    type: function, custom, namespace.
    name: What calls name.
    description: What it does, for the model to read.
    parameters: Of a function: JSON schema of its arguments.
    strict: Of a function: the arguments obey the schema by construction.
    format: Of a custom tool: the form of its input.
    tools: Of a namespace: its functions and custom tools.
    """

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: "list[ResponsesTool] | None" = None


class ResponsesToolChoice(Body, frozen=True):
    """Which tool is called.

    type: function or custom, the one with this name; allowed_tools.
    name: Of the tool.
    namespace: Where the tool is.
    mode: Of allowed_tools: auto or required.
    tools: Of allowed_tools: those that may be called, each with its type and name.
    """

    type: Annotated[str, one_of("function", "custom", "allowed_tools")]
    name: str | None = None
    namespace: str | None = None
    mode: OrDefault[Annotated[str, one_of("auto", "required")]] = "auto"
    tools: list[dict[str, Any]] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The choice as it was sent."""
        names = ("mode", "tools") if self.type == "allowed_tools" else ("name", "namespace")
        given = {name: getattr(self, name) for name in names}
        return {"type": self.type, **{name: value for name, value in given.items() if value is not None}}


def is_hosted(tool: ResponsesTool) -> bool:
    """Return whether OpenAI's server would run a tool itself."""
    return tool.type not in ("function", "custom", "namespace", "mcp")


@dataclass(frozen=True, slots=True)
class CallerTool:
    """A tool as the caller names it.   place: what errors call its form."""

    name: str
    namespace: str | None
    is_custom: bool
    place: str


class ResponsesTools:
    """The tools of a request.

    functions: as templates read them. A custom tool is a function with one argument, `input`; the name of a tool in a
    namespace begins with that one's.   named: what the names of these stand for.   grammars: by these names, of the
    inputs of custom tools in Lark's syntax.   kept: those of the request that are served, as they were sent.
    """

    def __init__(self, given: Sequence[ResponsesTool]) -> None:
        """Raises RequestError for tools that neither are served nor may be left out."""
        self.functions: list[dict[str, Any]] = []
        self.named: dict[str, CallerTool] = {}
        self.grammars: dict[str, str] = {}
        self._own_names: dict[tuple[str, str | None], str] = {}  # by the caller's name and namespace
        self.kept: list[dict[str, Any]] = []
        for index, tool in enumerate(given):
            place = f"tools[{index}]"
            if tool.type == "mcp":
                raise RequestError(f"{place}: this server does not run MCP servers; let the client run them", place)
            if tool.type == "namespace":
                for at, inner in enumerate(tool.tools or ()):
                    self._add(inner, f"{place}.tools[{at}]", tool)
            elif is_hosted(tool):
                continue
            else:
                self._add(tool, place, None)
            self.kept.append(_shown(tool))

    def find(self, name: Any, namespace: Any = None) -> str | None:
        """Return what the model calls a tool, None if there is none of this name."""
        if not (isinstance(name, str) and isinstance(namespace, str | None)):
            return None
        if (found := self._own_names.get((name, namespace))) is not None:
            return found
        return name if namespace is None and name in self.named else None

    def _add(self, tool: ResponsesTool, place: str, parent: ResponsesTool | None) -> None:
        if tool.type not in ("function", "custom"):
            raise RequestError(f"{place}: expected type function or custom, got {tool.type!r:.80}", place)
        if not tool.name:
            raise RequestError(f"{place}.name: is required", f"{place}.name")
        is_custom = tool.type == "custom"
        name, namespace, about = tool.name, None, tool.description
        if parent is not None:
            namespace = parent.name or ""
            name = f"{namespace.rstrip('_')}__{name}"[-_LONGEST_NAME:]
            about = about or parent.description
        if name in self.named:
            raise RequestError(f"{place}.name: {name!r} is the name of another tool, too", f"{place}.name")
        self._own_names.setdefault((tool.name, namespace), name)
        self.named[name] = CallerTool(
            tool.name, namespace, is_custom, place + (".format" if is_custom else ".parameters")
        )
        if is_custom:
            self.functions.append(self._custom_function(tool, name, about or "", f"{place}.format"))
        else:
            self.functions.append(function_tool(name, tool.parameters, about, tool.strict))

    def _custom_function(self, tool: ResponsesTool, name: str, about: str, place: str) -> dict[str, Any]:
        """Return a custom tool as a function.   place: of its form. Raises RequestError if that cannot be enforced."""
        form, schema = tool.format or CustomFormat("text"), dict[str, Any](type="string")
        about = f"{about}\n\nThe argument `input` is the whole text.".lstrip()
        match form:
            case CustomFormat(type="text"):
                pass
            case CustomFormat(type="grammar", syntax="regex", definition=str(expression)) if expression:
                schema["pattern"] = f"^(?:{expression})$"
            case CustomFormat(type="grammar", syntax="lark", definition=str(grammar)) if grammar:
                about = f"{about} It follows this grammar, in Lark's syntax:\n{grammar}"
                try:
                    self.grammars[name] = lark_in_json(grammar)
                except ValueError as error:
                    text = f"{place}.definition: this grammar cannot be enforced: {error}"
                    raise RequestError(text, place) from None
            case _:
                text = f"{place}: expected type text, or grammar with a definition in syntax lark or regex"
                raise RequestError(text, place)
        parameters = {"type": "object", "properties": {"input": schema}, "required": ["input"]}
        return function_tool(name, parameters, about, None if form.type == "text" else True)


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as it was sent; clients want all fields of a function."""
    given: dict[str, Any] = msgspec.to_builtins(tool)
    if tool.tools is not None:
        given["tools"] = [_shown(inner) for inner in tool.tools]
    return dict.fromkeys(("description", "parameters", "strict") if tool.type == "function" else ()) | given


class CustomInput:
    """Reads the input of a custom tool out of the arguments of a call, {"input": "..."}, as they come."""

    def __init__(self) -> None:
        self._text = ""
        self._is_open = self._has_begun = False

    def feed(self, arguments: str) -> str:
        """Add arguments; return the input that is certain now."""
        self._text += arguments
        if not self._has_begun and (found := _INPUT.match(self._text)) is not None:
            self._is_open = self._has_begun = True
            self._text = self._text[found.end() :]
        if not self._is_open:
            return ""
        found = _CHARS.match(self._text)
        assert found is not None  # it may be empty
        self._is_open = not self._text.startswith('"', found.end())
        self._text = self._text[found.end() :]
        return _unescaped(found[0])

    def end(self) -> str:
        """Return the rest: all of it, if the arguments have another form than they should have."""
        if self._has_begun:
            return ""
        try:
            values = list(json.loads(self._text).values())
        except (ValueError, AttributeError):
            return self._text
        return values[0] if len(values) == 1 and isinstance(values[0], str) and is_encodable(values[0]) else self._text


_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARS = re.compile(
    r"""(?:
        [^"\\] | \\["\\/bfnrt] | \\u(?![dD][89abAB])[0-9a-fA-F]{4} |
        \\u[dD][89abAB][0-9a-fA-F]{2}
            (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?= [^\\] | \\[^u] | \\u[^dD] | \\u[dD][^c-fC-F] ) )
    )*""",
    re.VERBOSE,
)
"""Whole characters of a string in JSON. Both halves of a surrogate pair are one; a first half is, too, once something
else is seen to follow it."""


def _unescaped(chars: str) -> str:
    return encodable(json.loads(f'"{chars}"', strict=False)) if "\\" in chars else chars


def arguments_of(text: str) -> str:
    """Return the arguments of a call of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False)


def chosen(choice: str | ResponsesToolChoice | None, tools: ResponsesTools) -> Mapping[str, Any]:
    """Return the fields of a conversation that say which tools may or must be called. Raises RequestError."""
    if choice is None or isinstance(choice, str):
        is_forced, only = choice == "required", None
        functions = [] if choice == "none" else tools.functions
    elif choice.type == "allowed_tools":
        allowed = {
            _found(tools, one.get("name"), one.get("namespace"), f"tool_choice.tools[{at}]")
            for at, one in enumerate(choice.tools or ())
            if one.get("type") in ("function", "custom")
        }
        functions = [one for one in tools.functions if one["function"]["name"] in allowed]
        is_forced, only = choice.mode == "required", None
    else:
        functions, is_forced = tools.functions, True
        only = _found(tools, choice.name, choice.namespace, "tool_choice")
    if is_forced and not functions:
        raise RequestError("tool_choice: needs tools", "tool_choice")
    return {"tools": functions, "input_grammars": tools.grammars, "is_forced": is_forced, "only_tool": only}


def _found(tools: ResponsesTools, name: Any, namespace: Any, place: str) -> str:
    if (found := tools.find(name, namespace)) is None:
        raise RequestError(f"{place}.name: there is no tool {name!r:.80}", f"{place}.name")
    return found
