"""How a turn becomes prompts: the chat template, the grammar of calls, and what will read the outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from pagoda.base.sampling_params import PromptReasoning, SamplingParams
from pagoda.engine.answers.reasoning import new_splitter, opens_reasoning, reasoning_of, special_token
from pagoda.engine.answers.same_message import MessageForm
from pagoda.engine.answers.tool_parsers import TOOL_PARSERS
from pagoda.engine.answers.tool_parsers.argument_types import ArgumentTypes
from pagoda.engine.async_text import Earlier
from pagoda.engine.inputs.chat_prompts import ChatOptions, RenderedChat
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.inputs.sampled_messages import OpenMessage, SampledMessage
from pagoda.server.body_reader import run_for_body
from pagoda.server.conversation import Conversation
from pagoda.server.history import History
from pagoda.server.reader import Reader
from pagoda.server.request_state import request_state
from pagoda.server.sending import cancel_on_disconnect
from pagoda.server.served_model import ServedModel
from pagoda.server.tool_choice import ToolUse
from pagoda.server.turn import TurnRequest, naming_conversation


async def render_chat(
    http: Request,
    model: ServedModel,
    conversation: Conversation,
    must_fit: bool = False,
    form: MessageForm | None = None,
) -> RenderedChat:
    """Return the prompt that a conversation is. Raises ApiError, RequestError.

    form: of the model's messages: those that are known come in as they were sampled; None: as text.
    """
    model.check_template(conversation.chat_template)
    options = ChatOptions(
        chat_template=conversation.chat_template,
        tools=conversation.tools or None,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final_message,
        continue_final_message=conversation.continue_final_message,
        template_kwargs={
            **model.template_kwargs,
            **conversation.thinking.variables,
            **conversation.template_kwargs,
        }
        or None,
        add_special_tokens=conversation.add_special_tokens,
    )
    earlier = None if form is None or model.history is None else _earlier(http, model.history, form, conversation)
    rendering = model.llm.text.render_chat(
        conversation.messages,
        options,
        must_fit=must_fit,
        is_bounded=True,
        size=request_state(http).body_bytes,
        earlier=earlier,
    )
    return await cancel_on_disconnect(http, rendering)


def _earlier(http: Request, history: History, form: MessageForm, conversation: Conversation) -> Earlier:
    owner = history.owner_of(request_state(http).caller)

    async def recall(keys: Sequence[bytes]) -> Mapping[bytes, Sequence[SampledMessage]]:
        return await history.recall(owner, keys, conversation.seals)

    return Earlier(form, recall)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt that is ready to run.   new_reader: makes the reader of each output.

    open_message, form: to find the answer again; None if it is not to be found.
    """

    prompt: Prompt
    params: SamplingParams
    new_reader: Callable[[], Reader] = Reader
    open_message: OpenMessage | None = None
    form: MessageForm | None = None


async def render(http: Request, model: ServedModel, request: TurnRequest) -> list[Rendered]:
    """Return the prompts of a turn. Raises ApiError, RequestError for what the model or the server lacks."""
    if request.conversation is None:
        return [Rendered(prompt, request.params) for prompt in request.prompts]
    if not request.more_conversations:
        return [await _render(http, model, request.conversation, request.params)]
    rendered: list[Rendered] = []
    for at, conversation in enumerate((request.conversation, *request.more_conversations)):
        with naming_conversation(at):
            rendered.append(await _render(http, model, conversation, request.params))
    return rendered


async def _render(http: Request, model: ServedModel, conversation: Conversation, plain: SamplingParams) -> Rendered:
    template = model.template_for(conversation.chat_template, bool(conversation.tools))
    use = ToolUse.of(conversation, model, template)
    tokenizer = model.llm.input_processor.tokenizer
    argument_types = await run_for_body(http, use.argument_types)
    params = plain
    if use.has_grammar(plain):  # tools may have large schemas
        params = await model.llm.text.write_grammar(lambda: use.constrain(plain, tokenizer))
    budget = await run_for_body(http, lambda: conversation.thinking.limit(template))
    # Nothing is awaited after this: its images are in memory, uncounted until `RequestStarter.begin` counts them.
    form = _form_of(use, template, argument_types)
    prompt = await render_chat(http, model, conversation, plain.truncate_prompt_tokens is None, form)
    is_formatted = plain.structured_outputs is not None and not use.is_forced  # by the request itself: not a call
    parser = TOOL_PARSERS[use.parser] if use.parser is not None and not is_formatted else None
    tags = form.tags
    end_id = None if tags is None else special_token(tokenizer, tags.end)
    is_thinking = tags is not None and opens_reasoning(prompt.text, conversation.continued, tags)
    keeps_special_tokens = end_id is not None or (parser is not None and parser.keeps_special_tokens)
    if tags is not None or keeps_special_tokens:
        params = params.clone()  # which checks nothing again
        params.skip_special_tokens = params.skip_special_tokens and not keeps_special_tokens
    if tags is not None:
        params.reasoning = PromptReasoning(tags.name, is_thinking)
        if params.thinking_token_budget is None:
            params.thinking_token_budget = budget

    def new_reader() -> Reader:
        return Reader(
            parser(argument_types) if parser is not None else None,
            new_splitter(tags, is_thinking) if tags is not None else None,
            tokenizer.token_bytes,
            use.is_forced,
            conversation.is_parallel,
        )

    return Rendered(prompt.prompt, params, new_reader, prompt.open_message, form)


async def count_prompt_tokens(http: Request, model: ServedModel, conversation: Conversation) -> int:
    """Return how many tokens the prompt of a conversation has. Raises ApiError, RequestError."""
    template = model.template_for(conversation.chat_template, bool(conversation.tools))
    use = ToolUse.of(conversation, model, template)
    form = _form_of(use, template, await run_for_body(http, use.argument_types))
    return len((await render_chat(http, model, conversation, form=form)).token_ids)


def _form_of(use: ToolUse, template: str | None, argument_types: Mapping[str, ArgumentTypes]) -> MessageForm:
    parser = None if use.parser is None else TOOL_PARSERS[use.parser]
    return MessageForm(None if parser is None else lambda: parser(argument_types), reasoning_of(template))
