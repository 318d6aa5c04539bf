"""ChatAnswers: reads the finished answers to a conversation, as `chat` of LLM and AsyncLLM returns them."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pagoda.base.outputs import ChatMessage, FunctionCall, RequestOutput
from pagoda.base.sampling_params import PromptReasoning, SamplingParams
from pagoda.engine.answers.reasoning import new_splitter, opens_reasoning, reasoning_of, special_token
from pagoda.engine.answers.tool_parsers import GENERIC_PARSER, TOOL_PARSERS, parser_for_template
from pagoda.engine.answers.tool_parsers.argument_types import ANY_ARGUMENTS, argument_types
from pagoda.engine.answers.tool_parsers.base import ToolParser, merged
from pagoda.engine.templates.generic_tools import lacks_tools
from pagoda.engine.tokenizers.tokenizer import Tokenizer


class ChatAnswers:
    """How the answers to one conversation are read: by the formats of the template that made its prompt."""

    def __init__(
        self,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: str,
        continued: str,
        tokenizer: Tokenizer,
    ) -> None:
        """template: its text.   prompt: what it made.   continued: the text of the message that the answer goes on."""
        self._tags = reasoning_of(template)
        self._is_thinking = self._tags is not None and opens_reasoning(prompt, continued, self._tags)
        self._parser: type[ToolParser] | None = None
        functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, Mapping)]
        if functions and template is not None:
            name = GENERIC_PARSER if lacks_tools(template) else parser_for_template(template)
            self._parser = None if name is None else TOOL_PARSERS[name]
        schemas = {str(one.get("name")): one.get("parameters") or True for one in functions}
        reads_types = self._parser is not None and self._parser.reads_types
        self._types = argument_types(schemas) if reads_types else dict.fromkeys(schemas, ANY_ARGUMENTS)
        self._has_special_tags = self._tags is not None and special_token(tokenizer, self._tags.end) is not None
        self._texts: dict[int, str] = {}  # of the deltas of each sequence
        self._messages: dict[int, ChatMessage] = {}

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return params that say how the answer begins, and keep the special tokens that its formats are made of.

        An answer whose form these params demand themselves is read as content.
        """
        if params.structured_outputs is not None:
            self._parser = None
        keeps_special_tokens = self._has_special_tags or (self._parser and self._parser.keeps_special_tokens)
        if self._tags is None and not keeps_special_tokens:
            return params
        changed = params.clone()
        if self._tags is not None:
            changed.reasoning = PromptReasoning(self._tags.name, self._is_thinking)
        if keeps_special_tokens:
            changed.skip_special_tokens = False
        return changed

    def read(self, output: RequestOutput, is_delta: bool = False) -> None:
        """Give each sequence that is finished its message.   is_delta: an output has the new text alone."""
        for part in output.outputs:
            index, text = part.index, part.text
            if is_delta:
                text = self._texts[index] = self._texts.get(index, "") + text
            if part.finish_reason is not None:
                if index not in self._messages:  # the ids of its calls stay
                    self._messages[index] = self.message(text)
                part.message = self._messages[index]

    def message(self, text: str) -> ChatMessage:
        """Return what a whole answer says."""
        thought = ""
        if self._tags is not None:
            splitter = new_splitter(self._tags, self._is_thinking)
            pieces = (splitter.feed(text), splitter.end())
            thought, text = ("".join(piece) for piece in zip(*pieces, strict=True))
        message = ChatMessage(text, thought or None)
        if self._parser is not None:
            parser = self._parser(self._types)
            pieces = [*parser.feed(text).pieces, *parser.end().pieces]
            message.content = "".join(piece for piece in pieces if isinstance(piece, str))
            message.tool_calls = [
                FunctionCall(call.id or f"call_{uuid.uuid4().hex[:24]}", call.name or "", call.arguments)
                for call in merged(piece for piece in pieces if not isinstance(piece, str))
            ]
        return message


def text_of_content(content: object) -> str:
    """Return the text of a message's content, which may be in parts."""
    if isinstance(content, list):
        parts = cast("list[Mapping[str, object]]", content)
        return "".join(text for part in parts if isinstance(text := part.get("text"), str))
    return content if isinstance(content, str) else ""
