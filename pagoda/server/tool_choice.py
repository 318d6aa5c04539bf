"""Which tools an answer may or must call, and the grammar that enforces it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.reasoning import special_token
from pagoda.engine.answers.tool_parsers import GENERIC_PARSER, TOOL_PARSERS
from pagoda.engine.answers.tool_parsers.argument_types import ANY_ARGUMENTS, ArgumentTypes, argument_types
from pagoda.engine.grammars.tool_grammar import MAX_CALLS, CallFormat, Tool
from pagoda.engine.templates.generic_tools import lacks_tools
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.server.conversation import Conversation
from pagoda.server.errors import ApiError
from pagoda.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of a conversation are used.   parser: a name in TOOL_PARSERS, None for plain text.

    is_generic: the template does not support tools, so they are described in a message.
    """

    conversation: Conversation
    parser: str | None
    is_generic: bool

    @classmethod
    def of(cls, conversation: Conversation, model: ServedModel, template: str | None) -> "ToolUse":
        """Raises ApiError (400) if a call is required and calls are not parsed."""
        tools, is_forced = conversation.tools, conversation.is_forced
        is_generic = bool(tools) and template is not None and lacks_tools(template)
        parser = model.tool_parser_for(template) if tools else None
        # A call is only certain where a grammar holds it, and formats without one are not written by force.
        is_free = parser is None or TOOL_PARSERS[parser].GRAMMAR is None
        if tools and (
            (model.tool_parser == "auto" and is_generic) or (is_forced and is_free and model.tool_parser != "none")
        ):
            parser = GENERIC_PARSER
        if is_forced and parser is None:
            raise ApiError(
                400, "tool_choice: this server does not parse tool calls (--tool-call-parser)", "tool_choice"
            )
        return cls(conversation, parser, is_generic)

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [tool["function"] for tool in self.conversation.tools]

    @property
    def is_forced(self) -> bool:
        return self.conversation.is_forced

    def argument_types(self) -> dict[str, ArgumentTypes]:
        """Return each tool's name, with the types of its arguments if the parser reads them: that takes time."""
        functions = self.functions
        if self.parser is None or not TOOL_PARSERS[self.parser].reads_types:
            return dict.fromkeys((one["name"] for one in functions), ANY_ARGUMENTS)
        return argument_types({one["name"]: one.get("parameters") or True for one in functions})

    @property
    def _format(self) -> CallFormat | None:
        return TOOL_PARSERS[self.parser].GRAMMAR if self.parser is not None else None

    def has_grammar(self, params: SamplingParams) -> bool:
        """Whether a grammar holds the calls: if one is forced, if a tool is `strict`, and for the generic format."""
        is_strict = any(function.get("strict") for function in self.functions)
        is_held = self.is_forced or ((is_strict or self.is_generic) and params.structured_outputs is None)
        return bool(self.functions) and self._format is not None and is_held

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return params, with the grammar of the calls if there is one.

        Raises RequestError for the schema of a tool that must be called or is strict, if it is not supported.
        """
        form = self._format
        if form is None or not self.has_grammar(params):
            return params
        functions, only, grammars = self.functions, self.conversation.only_tool, self.conversation.input_grammars
        tools = [
            Tool(one["name"], one.get("parameters"), f"tools[{i}].function.parameters", grammars.get(one["name"], ""))
            for i, one in enumerate(functions)
        ]
        most = MAX_CALLS if self.conversation.is_parallel and only is None else 1
        if only is not None:
            tools = [tool for tool in tools if tool.name == only]
        marker_id = special_token(tokenizer, form.list_marker)
        if self.is_forced:
            text = form.forced(tools, most, marker_id)
        else:
            # The generic format is held although the caller did not ask for it, as far as schemas can be held.
            loose = [
                tool.name
                for one, tool in zip(functions, tools, strict=True)
                if not one.get("strict") and not (self.is_generic and form.can_hold(tool))
            ]
            text = form.free(tools, loose, most, marker_id)
        return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(grammar=text, source="tools"))
