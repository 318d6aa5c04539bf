"""The HTTP API's request bodies, in OpenAI's format with the engine's sampling parameters as extra fields.

msgspec checks the types of single values while decoding, and stops at the first error (body.py). `check` does what
types cannot: it checks fields against each other, and counts and sizes against RequestLimits. What several bodies share
is apart: body.py (what a body is, and its types of values) and sampling_body.py (how text is generated, in which form).
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pagoda.base.errors import RequestError
from pagoda.base.lora import LoRARequest
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.images.source import take_images
from pagoda.engine.inputs.prompt_embeds import EncodedEmbeds
from pagoda.engine.inputs.prompts import Prompt
from pagoda.server.body import (
    Body,
    Flag,
    Name,
    NumLogprobs,
    NumTop,
    OutputCount,
    PromptOnlyCount,
    TokenCount,
    TokenId,
    as_list,
    check_alike,
    one_of,
)
from pagoda.server.sampling_body import CHAT_ONLY, TEXT_ONLY, SamplingBody, unserved_with
from pagoda.server.turn import Conversation


class ToolFunction(Body, kw_only=True, frozen=True):
    """A function that the model may call.

    name: What calls name.
    description: What it does, for the model to read.
    parameters: JSON schema of its arguments.
    strict: The arguments obey the schema by construction.
    """

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True, frozen=True):
    """What the model may call.

    function: Which function.
    type: There is one kind.
    """

    function: ToolFunction
    type: Annotated[str, one_of("function")] = "function"


Tools = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": {"$ref": "#/components/schemas/Tool"}})]
"""Tools as sent, with every field, which is how chat templates get them; `check_chat` validates them as Tool."""


class NamedTool(Body, kw_only=True, frozen=True):
    """The tool that the model must call.

    function: Its `name`.
    type: There is one kind.
    """

    function: dict[str, str]
    type: Annotated[str, one_of("function")] = "function"


class ChatMessage(Struct, kw_only=True, frozen=True):
    """A message. Other fields go to the chat template.

    role: Who wrote it, by a name of the template: system, user, assistant, tool.
    content: A text, or a list of parts of type text or image_url.
    name: For the template.
    tool_calls: Of an assistant: the calls that it made.
    tool_call_id: Of a tool's answer: of the call.
    """

    role: Name
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Messages = list[dict[str, Any]]
"""Messages as sent, with every field; `check_chat` validates them as ChatMessage."""
DESCRIBED_MESSAGES = {"items": {"$ref": "#/components/schemas/ChatMessage"}}


class _Chat(Struct, frozen=True):
    messages: list[ChatMessage]
    tools: list[Tool]


def check_chat(
    limits: RequestLimits,
    messages: Messages,
    tools: list[dict[str, Any]] | None,
    template: str | None,
    template_kwargs: dict[str, Any] | None,
) -> None:
    """Check a conversation's sizes, then its types, and drop fields that are null: they are as if not given.

    Raises RequestError, msgspec.ValidationError.
    """
    limits.check_chat(take_images(messages)[0], tools, template, template_kwargs)
    msgspec.convert({"messages": messages, "tools": tools or []}, _Chat)
    for index, message in enumerate(messages):
        named = {f"messages[{index}].{name}": message.get(name) for name in ("name", "tool_call_id")}
        limits.check_names(**named)
        for name in [name for name, value in message.items() if value is None]:
            del message[name]


def check_named(field: str, name: str | None, tools: list[dict[str, Any]]) -> None:
    """Raise RequestError if the tool that must be called is none of these.   field: that names it."""
    if name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"{field}: there is no tool {name!r:.80}", field)


class ChatCompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/chat/completions

    messages: The conversation.
    max_tokens: Most tokens of an output; if not given, as many as the model's context has left.
    max_completion_tokens: The same; goes before `max_tokens`.
    logprobs: Tell the log-probability of each token.
    top_logprobs: And so many of the most likely tokens; -1: as many as the server allows.
    tools: What the model may call.
    tool_choice: Whether it calls a tool, and which.
    parallel_tool_calls: False: at most one call.
    chat_template: Goes before the model's own template.
    chat_template_kwargs: Further variables of the template.
    add_generation_prompt: End the prompt with the opening of the assistant's turn.
    continue_final_message: Go on with the last message, instead of answering it.
    echo: Begin the answer with the text of the last message.
    include_reasoning: Tell the model's reasoning.
    reasoning_effort: A variable of the template.
    documents: A variable of the template.
    add_special_tokens: Add the tokenizer's own, such as the one that begins a text; most templates write them.
    """

    unserved = unserved_with(TEXT_ONLY, "chat completion", "/v1/completions")
    messages: Annotated[Messages, Meta(min_length=1, extra_json_schema=DESCRIBED_MESSAGES)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: Flag = False
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: Annotated[str, one_of("none", "auto", "required")] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | UnsetType | None = UNSET
    continue_final_message: Flag = False
    echo: Flag = False
    include_reasoning: Flag = True
    # for the chat template
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: Flag = False

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check_lists_of_prompts(self, 1)
        check_chat(limits, self.messages, self.tools, self.chat_template, self.chat_template_kwargs)
        limits.check_values({"documents": self.documents})
        limits.check_names(reasoning_effort=self.reasoning_effort)
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise RequestError(f"{name}: needs logprobs to be true", name)
        if self.continue_final_message and self.add_generation_prompt is True:
            raise RequestError("continue_final_message: excludes add_generation_prompt", "continue_final_message")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise RequestError("tool_choice: needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            check_named("tool_choice", self.tool_choice.function.get("name"), self.tools or [])

    @property
    def num_top(self) -> int:
        """Entries of `top_logprobs` per token; -1: as many as the server allows."""
        return len(set(self.logprob_token_ids)) if self.logprob_token_ids else self.top_logprobs or 0

    @property
    def conversation(self) -> Conversation:
        choice, given = self.tool_choice, {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        only = choice.function["name"] if isinstance(choice, NamedTool) else None
        named = {name: value for name, value in given.items() if value is not None}
        return Conversation.of(
            self,
            self.messages,
            tools=(self.tools or []) if choice != "none" else [],
            is_forced=choice == "required" or only is not None,
            only_tool=only,
            is_parallel=self.parallel_tool_calls is not False,
            template_kwargs=named | (self.chat_template_kwargs or {}),
        )


class BatchChatRequest(ChatCompletionRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions/batch: without tools, images, streams and beam searches, one answer to each.

    messages: The conversations.
    """

    messages: Annotated[list[Messages], Meta(min_length=1)]  # type: ignore[assignment]  # of all of them

    def check(self, limits: RequestLimits) -> None:
        limits.check("prompts", self.num_prompts, "messages")
        limits.check_lists_of_prompts(self, self.num_prompts)
        together = [message for messages in self.messages for message in messages]
        limits.check_chat(together, None, None, None)
        if take_images(together)[1]:
            raise RequestError("messages: conversations of a batch have no images; send each on its own", "messages")
        neutral = {"n": (None, 1), "stream": (False,), "tools": (None, []), "use_beam_search": (False,)}
        for name, values in {**neutral, "prompt_logprobs": (None,)}.items():
            if getattr(self, name) not in values:
                raise RequestError(f"{name}: is not for batches; send each conversation on its own", name)
        self.each[0].check(limits)
        for messages in self.messages[1:]:
            check_chat(limits, messages, None, None, None)

    @property
    def num_prompts(self) -> int:
        """How many conversations there are."""
        return len(self.messages)

    @property
    def each(self) -> list[ChatCompletionRequest]:
        """The conversations as requests of their own."""
        common = {name: getattr(self, name) for name in self.__struct_fields__ if name != "messages"}
        return [ChatCompletionRequest(messages=messages, **common) for messages in self.messages]  # type: ignore[arg-type]


class CompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/completions

    prompt: A text, token ids, or a list of either.
    prompt_embeds: Embeddings in place of tokens: a tensor of torch.save, in base64, or several.
    max_tokens: Most tokens of an output: 16, if not given; with null, as many as the model's context has left. With 0,
        the prompt is only scored (`echo`, `logprobs`); it may then fill the model's context.
    max_completion_tokens: The same; goes before `max_tokens`.
    best_of: Generate so many outputs, and return the `n` most likely ones.
    logprobs: Log-probabilities of each token and so many of the most likely ones.
    echo: Begin the answer with the prompt.
    add_special_tokens: Add the tokenizer's own, such as the one that begins a text.
    """

    unserved = unserved_with(CHAT_ONLY, "text completion", "/v1/chat/completions")
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: PromptOnlyCount | UnsetType | None = UNSET
    max_completion_tokens: PromptOnlyCount | None = None
    best_of: OutputCount | None = None
    logprobs: NumLogprobs | bool | None = None
    echo: Flag = False
    add_special_tokens: Flag = True

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if not self.prompt_embeds and not self.prompt:
            raise RequestError("prompt: is required" if self.prompt is None else "prompt: is empty", "prompt")
        limits.check("prompts", self.num_prompts, "prompt")
        self._check_best_of()
        limits.check("outputs", self.num_prompts * self.num_outputs, "prompt")
        limits.check_lists_of_prompts(self, self.num_prompts)
        if self.truncate_prompt_tokens is not None:
            num_chars = sum(len(prompt) for prompt in self._texts() if isinstance(prompt, str))
            limits.check("tokenized_chars", num_chars, "prompt")
        check_alike("prompt", self.prompt or "")
        self._check_embeds()
        field, asked = self.asked_tokens
        if asked == 0 and not self.echo:
            raise RequestError(f"{field}: 0 is only allowed with echo", field)
        if self.logprobs is True:
            raise RequestError("logprobs: expected an integer >= 0, got true", "logprobs")
        if self.echo and self.logprob_token_ids:
            why = "with echo, the prompt's log-probabilities are of the most likely tokens; leave out one of the two"
            raise RequestError(f"logprob_token_ids: {why}", "logprob_token_ids")

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return len(self.prompts())

    @property
    def num_outputs(self) -> int:
        """How many outputs are generated for each prompt; with `best_of`, only the best `n` of them are returned."""
        return self.best_of or self.n or 1

    def _check_best_of(self) -> None:
        if self.best_of is None or self.best_of == (self.n or 1):
            return
        if self.best_of < (self.n or 1):
            raise RequestError(f"best_of: must be at least n, which is {self.n}", "best_of")
        if self.stream:
            raise RequestError("best_of: outputs are ranked when all are done; set stream to false", "best_of")
        if self.use_beam_search:
            raise RequestError("best_of: a beam search returns its best beams; set only n, its width", "best_of")

    def _check_embeds(self) -> None:
        if not self.prompt_embeds:
            return
        for name in ("echo", "prompt_logprobs"):
            if getattr(self, name) not in (None, False):
                raise RequestError(f"{name}: a prompt of embeddings has no tokens; leave {name} out", name)

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities per token; None for null and false."""
        if self.logprob_token_ids:
            return len(set(self.logprob_token_ids))
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    def prompts(self) -> list[Prompt]:
        """The prompts as a list, in order: first those that are embeddings."""
        return [*self._embeds(), *self._texts()]

    def _embeds(self) -> list[Prompt]:
        given = self.prompt_embeds or []
        if isinstance(given, str):
            return [{"prompt_embeds": EncodedEmbeds(given)}]
        return [{"prompt_embeds": EncodedEmbeds(data, f"prompt_embeds[{index}]")} for index, data in enumerate(given)]

    def _texts(self) -> list[str | list[int]]:
        return as_list(self.prompt) if self.prompt else []


class TokenizeRequest(Body, kw_only=True, frozen=True):
    """POST /tokenize: `prompt`, or `messages` through the chat template.

    model: A name of the model.
    prompt: A text.
    messages: A conversation.
    add_special_tokens: Add the tokenizer's own: by default to `prompt`, but not to `messages`.
    add_generation_prompt: End the prompt with the opening of the assistant's turn.
    continue_final_message: Leave the last message open.
    return_token_strs: Tell each token as the vocabulary writes it.
    chat_template: Goes before the model's own template.
    chat_template_kwargs: Further variables of the template.
    tools: What the model may call.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Messages, Meta(extra_json_schema=DESCRIBED_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    return_token_strs: Flag = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    def check(self, limits: RequestLimits) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt: give either prompt or messages", "prompt")
        limits.check_names(model=self.model)
        limits.check("tokenized_chars", len(self.prompt or ""), "prompt")
        check_chat(limits, self.messages or [], self.tools, self.chat_template, self.chat_template_kwargs)

    @property
    def conversation(self) -> Conversation | None:
        """The conversation to tokenise, None if it is a text."""
        return None if self.messages is None else Conversation.of(self, self.messages, tools=self.tools or [])


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    """POST /detokenize

    model: A name of the model.
    tokens: Ids of tokens.
    """

    model: str | None = None
    tokens: list[TokenId]

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)


class AbortRequest(Body, kw_only=True, frozen=True):
    """POST /abort_requests

    request_ids: Without ids: all requests (of the caller, unless it has the admin key), also those that wait in line.
    """

    request_ids: set[str] | None = None


_MAX_PATH_CHARS = 4096  # the system's own limit


class LoadAdapterRequest(Body, kw_only=True, frozen=True):
    """POST /v1/load_lora_adapter

    lora_name: What requests call it.
    lora_path: Its folder, below the server's --lora-dir.
    load_inplace: The name may be in use; its adapter is replaced.
    base_model_name: The model that /v1/models shows as its parent.
    """

    lora_name: str
    lora_path: str
    load_inplace: Flag = False
    base_model_name: str | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(lora_name=self.lora_name, base_model_name=self.base_model_name)
        if len(self.lora_path) > _MAX_PATH_CHARS:
            raise RequestError(f"lora_path: is longer than {_MAX_PATH_CHARS} characters", "lora_path")
        LoRARequest(self.lora_name, 1, self.lora_path)  # raises for what cannot be a name or a path


class UnloadAdapterRequest(Body, kw_only=True, frozen=True):
    """POST /v1/unload_lora_adapter

    lora_name: What requests call it.
    lora_int_id: Has no effect.
    """

    lora_name: str
    # accepted because the name identifies the adapter
    lora_int_id: int | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(lora_name=self.lora_name)
