"""Which tools an answer may or must call, and the grammar that enforces it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.tool_grammar import MAX_CALLS, CallFormat, Tool
from pagoda.engine.templates.generic_tools import lacks_tools
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.server.errors import ApiError
from pagoda.server.protocol import ChatCompletionRequest, NamedTool
from pagoda.server.state import ServerState
from pagoda.server.tool_parsers import TOOL_PARSERS
from pagoda.server.tool_parsers.argument_types import ANY_ARGUMENTS, ArgumentTypes, argument_types

_GENERIC = "hermes"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: as sent, for the chat template.   parser: a name in TOOL_PARSERS, None for plain text.

    is_generic: the template does not support tools, so they are described in a message.
    """

    tools: list[dict[str, Any]]
    parser: str | None
    is_generic: bool
    is_forced: bool

    @classmethod
    def of(cls, body: ChatCompletionRequest, state: ServerState, template: str | None) -> "ToolUse":
        """Raises ApiError (400) for an unknown tool, or if a call is required and calls are not parsed."""
        tools = (body.tools or []) if body.tool_choice != "none" else []
        is_forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
        is_generic = bool(tools) and template is not None and lacks_tools(template)
        parser = state.tool_parser_for(template) if tools else None
        # A call is only certain where a grammar holds it, and formats without one are not written by force.
        is_free = parser is None or TOOL_PARSERS[parser].GRAMMAR is None
        if tools and (
            (state.tool_parser == "auto" and is_generic) or (is_forced and is_free and state.tool_parser != "none")
        ):
            parser = _GENERIC
        if isinstance(body.tool_choice, NamedTool):
            name = body.tool_choice.function.get("name")
            if name not in [tool["function"]["name"] for tool in tools]:
                raise ApiError(400, f"tool_choice: there is no tool {name!r:.80}", "tool_choice")
        if is_forced and parser is None:
            raise ApiError(
                400, "tool_choice: this server does not parse tool calls (--tool-call-parser)", "tool_choice"
            )
        return cls(tools, parser, is_generic, is_forced)

    def argument_types(self) -> dict[str, ArgumentTypes]:
        """Return each tool's name, with the types of its arguments if the parser reads them: that takes time."""
        functions = [tool["function"] for tool in self.tools]
        if self.parser is None or not TOOL_PARSERS[self.parser].reads_types:
            return dict.fromkeys((one["name"] for one in functions), ANY_ARGUMENTS)
        return argument_types({one["name"]: one.get("parameters") or True for one in functions})

    @property
    def _format(self) -> CallFormat | None:
        return TOOL_PARSERS[self.parser].GRAMMAR if self.parser is not None else None

    def has_grammar(self, body: ChatCompletionRequest, params: SamplingParams) -> bool:
        """Whether a grammar holds the calls: if one is forced, if a tool is `strict`, and for the generic format."""
        is_strict = any(tool["function"].get("strict") for tool in self.tools)
        is_held = self.is_forced or ((is_strict or self.is_generic) and params.structured_outputs is None)
        return bool(self.tools) and self._format is not None and is_held

    def constrain(self, body: ChatCompletionRequest, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return params, with the grammar of the calls if there is one.

        Raises RequestError for a tool's schema that is not supported.
        """
        form = self._format
        if form is None or not self.has_grammar(body, params):
            return params
        functions = [tool["function"] for tool in self.tools]
        tools = [
            Tool(function["name"], function.get("parameters"), f"tools[{i}].function.parameters")
            for i, function in enumerate(functions)
        ]
        most = 1 if body.parallel_tool_calls is False else MAX_CALLS
        if isinstance(body.tool_choice, NamedTool):
            name, most = body.tool_choice.function["name"], 1
            tools = [tool for tool in tools if tool.name == name]
        marker_id = special_token(tokenizer, form.list_marker)
        if self.is_forced:
            text = form.forced(tools, most, marker_id)
        else:
            loose = [] if self.is_generic else [one["name"] for one in functions if not one.get("strict")]
            text = form.free(tools, loose, most, marker_id)
        return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(grammar=text, source="tools"))


def special_token(tokenizer: Tokenizer, text: str | None) -> int | None:
    """Return the special token of this text, or None."""
    if text is None:
        return None
    written = text.encode()
    return next((i for i in sorted(tokenizer.facts.special_token_ids) if tokenizer.token_bytes(i) == written), None)
