"""ChatPrompts: turn a conversation into the model's prompt, with its chat template or a caller's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.text import check_encodable
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.prompt_encoder import PromptEncoder
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.templates.generic_tools import lacks_tools, with_generic_tools
from pagoda.engine.templates.job import Renderer, TemplateJob, TemplateSource
from pagoda.engine.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    chat_template: the text of a template to use instead of the model's own.
    tools: functions that the model may call, as objects of the OpenAI API.
    add_generation_prompt: end with the opening of the assistant's turn.
    continue_final_message: end inside the last message, so that the model continues it.
    template_kwargs: more variables for the template (such as enable_thinking).
    add_special_tokens: also add those that the tokenizer puts around a text; most templates write them themselves.
    """

    chat_template: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool = False


DEFAULT_CHAT = ChatOptions()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model's prompt."""

    text: str
    token_ids: list[int]


class ChatPrompts:
    """Renders conversations. Special tokens in the caller's values become ordinary text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        limits: InputLimits,
        renderer: Renderer,
        parses_special_tokens: bool = False,
    ) -> None:
        """parses_special_tokens: parse special tokens inside messages, instead of treating them as ordinary text."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limits = limits
        self._renderer = renderer
        self._parses_special_tokens = parses_special_tokens
        own = tokenizer.facts.chat_template
        self._own_source = TemplateSource(own.sources, own.special_tokens, own.marks) if own is not None else None

    def render(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> RenderedChat:
        """Return a conversation as text and token ids.

        Raises RequestError if there is no template, or if it rejects the messages.
        """
        job = self.job(messages, options)
        try:
            text = self._renderer.render(job)
        except ConfigError as error:
            raise RequestError(str(error), "chat_template") from None
        return self.tokenize(text, options.add_special_tokens)

    def job(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> TemplateJob:
        """Return a Renderer's input: the first part of `render`. Raises RequestError if there is no template."""
        tools = options.tools
        self._limits.of_request.check_chat(messages, tools, options.chat_template, options.template_kwargs)
        source = self._own_source
        if options.chat_template is not None:
            facts = self._tokenizer.facts
            source = TemplateSource({"default": options.chat_template}, facts.special_names, facts.marks)
        if source is None:
            raise RequestError(
                "this model has no chat template: pass one (chat_template), or use plain prompts", "messages"
            )
        text = source.texts.get("default") or next(iter(source.texts.values()), "")
        if "tool_use" not in source.texts and lacks_tools(text):
            messages, tools = with_generic_tools(messages, tools, text), None
        return TemplateJob(
            source,
            is_own=options.chat_template is None,
            is_marked=not self._parses_special_tokens,
            messages=messages,
            tools=tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            template_kwargs=options.template_kwargs,
        )

    def tokenize(
        self,
        text: str,
        add_special_tokens: bool = False,
        must_fit: bool = False,
        cancellation: Cancellation | None = None,
    ) -> RenderedChat:
        """Tokenise a Renderer's text: the last part of `render`. Raises RequestError.

        must_fit: reject a text that cannot fit into the model's context before tokenising it.
        cancellation: ends the work early; then raises Cancelled.
        """
        plain = text if self._parses_special_tokens else self._tokenizer.facts.marks.remove(text)
        if must_fit:
            self._prompts.check_length(plain)
        if self._parses_special_tokens:
            return RenderedChat(text, self._prompts.encode(text, add_special_tokens, cancellation))
        self._limits.of_request.check_text(plain, "messages")
        check_encodable("messages", text)
        return RenderedChat(plain, self._tokenizer.encode_marked(text, add_special_tokens, cancellation))

    def close(self) -> None:
        """Close the renderer. Idempotent."""
        self._renderer.close()
