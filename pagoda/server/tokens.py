"""POST /tokenize, /detokenize, GET /tokenizer_info"""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body import Flag, ModelBody, TokenId
from pagoda.server.conversation import Conversation, Messages, Tools, check_chat
from pagoda.server.render import render_chat
from pagoda.server.routing import Router
from pagoda.server.sending import cancel_on_disconnect, json_response, run_sized
from pagoda.server.state import state_of

router = Router()


class TokenizeRequest(ModelBody, kw_only=True, frozen=True):
    """POST /tokenize: `prompt`, or `messages` through the chat template.

    model: A name of the model.
    prompt: A text.
    messages: A conversation.
    add_special_tokens: Add the tokenizer's own: by default to `prompt`, but not to `messages`.
    continue_final_message: Leave the last message open.
    return_token_strs: Tell each token as the vocabulary writes it.
    """

    prompt: str | None = None
    messages: Messages | None = None
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


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


@router.post("/tokenize", answer=TokenizeResponse, body=TokenizeRequest)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text, or of a conversation rendered with the chat template."""
    state = state_of(http)
    body = await state.bodies.read(http, TokenizeRequest)
    model = state.pick(http, body.model).model
    text = model.llm.text
    async with model.starter.admitted(http, 1, needs_engine=False):
        if (conversation := body.conversation) is not None:
            token_ids = (await render_chat(http, model, conversation)).token_ids
        else:
            token_ids = await cancel_on_disconnect(
                http, text.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
            )
        answer = TokenizeResponse(len(token_ids), model.max_model_len, token_ids)
        if body.return_token_strs:
            answer.token_strs = await cancel_on_disconnect(http, text.token_strings(token_ids))
    return await run_sized(len(token_ids), lambda: json_response(answer))


class DetokenizeRequest(ModelBody, kw_only=True, frozen=True):
    """POST /detokenize

    model: A name of the model.
    tokens: Ids of tokens.
    """

    tokens: list[TokenId]

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)


class DetokenizeResponse(Struct, frozen=True):
    prompt: str


@router.post("/detokenize", answer=DetokenizeResponse, body=DetokenizeRequest)
async def detokenize(http: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(http)
    body = await state.bodies.read(http, DetokenizeRequest)
    model = state.pick(http, body.model).model
    async with model.starter.admitted(http, 1, needs_engine=False):
        decoding = model.llm.text.detokenize(body.tokens)
        answer = DetokenizeResponse(await cancel_on_disconnect(http, decoding))
    return await run_sized(len(body.tokens), lambda: json_response(answer))


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """The tokenizer's settings. A tokenizer may have further fields NAME_token, with the text of a special token."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    special_token_ids: list[int]
    max_model_len: int
    chat_template: str | None


@router.get("/tokenizer_info", answer=TokenizerInfo, query=("model",))
async def tokenizer_info(http: Request) -> Response:
    """Return the tokenizer's settings, named as in tokenizer_config.json, including the chat template.

    Of the first model, unless `model` names another.
    """
    model = state_of(http).pick(http, http.query_params.get("model")).model
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_model_len,
        **model.llm.text.tokenizer_facts(),
        "chat_template": model.chat_template.source if model.chat_template is not None else None,
    }
    return JSONResponse(settings)
