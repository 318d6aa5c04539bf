"""POST /tokenize, POST /detokenize, GET /tokenizer_info"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.engine.inputs.chat_prompts import ChatOptions
from pagoda.server.answers import DetokenizeResponse, TokenizeResponse, TokenizerInfo, answers_with
from pagoda.server.body import described_body, read_body
from pagoda.server.protocol import DetokenizeRequest, TokenizeRequest
from pagoda.server.responses import cancel_on_disconnect, json_response, run_sized
from pagoda.server.state import state_of

router = APIRouter()


@router.post("/tokenize", responses=answers_with(TokenizeResponse), openapi_extra=described_body(TokenizeRequest))
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text, or of a conversation rendered with the chat template."""
    state = state_of(http)
    body = await read_body(http, TokenizeRequest, state.request_limits)
    state.adapter_of(body.model)
    state.check_template(body.chat_template)
    text, key = state.generator.llm.text, http.scope["state"]["key"]
    if body.messages is not None:
        rendering = text.render_chat(
            body.rendered_messages(),
            ChatOptions(
                chat_template=body.chat_template,
                tools=[tool.as_dict() for tool in body.tools] if body.tools else None,
                add_generation_prompt=body.opens_answer,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
                add_special_tokens=body.add_special_tokens is True,
            ),
            is_bounded=True,
            key=key,
        )
        prompt = await cancel_on_disconnect(http, rendering)
        token_ids = prompt.token_ids
    else:
        token_ids = await cancel_on_disconnect(
            http, text.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False, key=key)
        )
    answer = TokenizeResponse(len(token_ids), state.max_model_len, token_ids)
    if body.return_token_strs:
        answer.token_strs = await cancel_on_disconnect(http, text.token_strings(token_ids, key))
    return await run_sized(len(token_ids), lambda: json_response(answer))


@router.post("/detokenize", responses=answers_with(DetokenizeResponse), openapi_extra=described_body(DetokenizeRequest))
async def detokenize(http: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(http)
    body = await read_body(http, DetokenizeRequest, state.request_limits)
    state.adapter_of(body.model)
    decoding = state.generator.llm.text.detokenize(body.tokens, http.scope["state"]["key"])
    return json_response(DetokenizeResponse(await cancel_on_disconnect(http, decoding)))


@router.get("/tokenizer_info", responses=answers_with(TokenizerInfo))
async def tokenizer_info(http: Request) -> Response:
    """Return the tokenizer's settings, named as in tokenizer_config.json, including the chat template."""
    state = state_of(http)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": state.max_model_len,
        **state.generator.llm.text.tokenizer_facts(),
        "chat_template": state.chat_template,
    }
    return json_response(TokenizerInfo.of(settings))
