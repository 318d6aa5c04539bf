"""POST /v1/embeddings, /pooling, /classify"""

import base64
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.pooling import TASKS, PoolingParams, PoolingTask
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.inputs.pooling_inputs import instruction_of, with_instruction
from pagoda.engine.inputs.prompts import Prompt
from pagoda.server.body import Flag, OrDefault, TokenId, UnservedField, as_list, check_alike, one_of
from pagoda.server.conversation import Conversation, Messages, check_chat
from pagoda.server.pooling import Pooled, PooledList, PoolingBody, PoolingCall, call_of, read_call
from pagoda.server.render import render_chat
from pagoda.server.routing import Router
from pagoda.server.state import state_of

router = Router()

Inputs = str | list[str | TokenId | list[TokenId]]


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class InputBody(PoolingBody, kw_only=True, frozen=True):
    """The fields of those that pool each input on its own, or a conversation as one input.

    input: A text, token ids, or a list of either.
    messages: A conversation.
    add_special_tokens: By default true of `input`; chat templates write their own.
    continue_final_message: Leave the last message open.
    """

    input: Inputs | None = None
    messages: Annotated[Messages, Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = False
    continue_final_message: Flag = False

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if (self.input is None) == (self.messages is None):
            raise RequestError("input: give either input or messages", "input")
        if self.messages is not None:
            check_chat(limits, self.messages, None, self.chat_template, self.chat_template_kwargs)
            if self.continue_final_message and self.add_generation_prompt:
                raise RequestError("continue_final_message: excludes add_generation_prompt", "continue_final_message")
            return
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name}: needs messages; input is not put into a template", name)
        if not self.input:
            raise RequestError("input: is empty", "input")
        inputs = self.inputs()
        limits.check("inputs", len(inputs), "input")
        check_alike("input", self.input)
        for index, one in enumerate(inputs):
            if not one:
                raise RequestError(f"{self.names()[index]}: is empty", self.names()[index])
        if self.truncate_prompt_tokens is not None:
            limits.check("tokenized_chars", sum(len(one) for one in inputs if isinstance(one, str)), "input")

    @property
    def conversation(self) -> Conversation | None:
        """The conversation that is the input, None if there are others."""
        return None if self.messages is None else Conversation.of(self, self.messages)

    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list, in order; none if there are messages."""
        return as_list(self.input) if self.input is not None else []

    def names(self) -> list[str]:
        """What errors call each input."""
        if self.input is None:
            return ["messages"]
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return ["input"]
        return [f"input[{index}]" for index in range(len(self.input))]


_TYPE_OF_VECTORS = {
    "embedding_type": UnservedField("other types of embeddings; use `encoding_format` and `embed_dtype`", ("float",)),
    "embedding_types": UnservedField("several types of embeddings; use `embed_dtype`", (["float"],)),
    "output_dtype": UnservedField("types of embeddings by this name; use `embed_dtype`", ("float",)),
}
"""What other servers call the form of a vector: a client that asks for another one would misread ours."""


class VectorBody(InputBody, kw_only=True, frozen=True):
    """The fields of those that return vectors.

    encoding_format: Numbers, or the bytes of numbers in base64.
    embed_dtype: The type of the numbers in base64.
    endianness: The order of their bytes; native is little.
    dimensions: Keep so many elements of an embedding, of models made for it.
    normalize: Scale embeddings to unit length; if not given, as the model was made for.
    """

    unserved = _TYPE_OF_VECTORS
    encoding_format: OrDefault[Annotated[str, one_of("float", "base64")]] = "float"
    embed_dtype: OrDefault[Annotated[str, one_of("float32", "float16", "bfloat16")]] = "float32"
    endianness: OrDefault[Annotated[str, one_of("native", "little", "big")]] = "native"
    dimensions: Count | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class EmbeddingRequest(VectorBody, kw_only=True, frozen=True):
    """POST /v1/embeddings

    use_activation: The same as `normalize`.
    prompt_name: The instruction of the model's settings to put in front of each input.
    """

    task: ClassVar[PoolingTask] = "embed"
    prompt_name: str | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check_names(prompt_name=self.prompt_name)
        if self.messages is not None and self.prompt_name is not None:
            raise RequestError("prompt_name: needs input; write an instruction into the messages", "prompt_name")


class EmbeddingData(Struct, kw_only=True):
    """embedding: numbers, or with encoding_format base64, the bytes of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(PooledList[EmbeddingData], kw_only=True):
    pass


@router.post("/v1/embeddings", answer=EmbeddingResponse, body=EmbeddingRequest)
async def create_embedding(http: Request) -> Response:
    """Return the embedding of a text, a list of token ids, of several of either, or of a conversation."""
    body = await state_of(http).bodies.read(http, EmbeddingRequest)
    pooled = await embed(http, body)
    numbers = _written(body)
    return await pooled.answer(
        EmbeddingResponse,
        lambda: [EmbeddingData(index=at, embedding=numbers(vector)) for at, vector in enumerate(pooled.vectors)],
    )


async def embed(http: Request, body: EmbeddingRequest) -> Pooled:
    """Return the embeddings that a body asks for. Raises RequestError, ApiError or WorkerDied."""
    call = call_of(http, body, "embd-")
    params = call.params()
    return await _pool_inputs(call, params, instruction_of(call.picked.model.tasks.plan, body.prompt_name))


class PoolingRequest(VectorBody, kw_only=True, frozen=True):
    """POST /pooling

    task: What to make of the hidden states; if not given, what the model was made for.
    use_activation: False: the outputs of a classification head as they are; of an embedding, as `normalize`.
    """

    task: Annotated[str, one_of(*TASKS)] | None = None


class PoolingData(Struct, kw_only=True):
    """data: numbers, one list of them per token, or the bytes of either as base64 of little-endian float32."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingResponse(PooledList[PoolingData], kw_only=True):
    pass


@router.post("/pooling", answer=PoolingResponse, body=PoolingRequest)
async def create_pooling(http: Request) -> Response:
    """Return what the model makes of the hidden states of each input: an embedding, classes, or a vector per token."""
    call = await read_call(http, PoolingRequest, "pooling-")
    pooled = await _pool_inputs(call, call.params())
    numbers = _written(call.body)
    return await pooled.answer(
        PoolingResponse,
        lambda: [PoolingData(index=at, data=numbers(vector)) for at, vector in enumerate(pooled.vectors)],
    )


class ClassificationRequest(InputBody, kw_only=True, frozen=True):
    """POST /classify"""

    task: ClassVar[PoolingTask] = "classify"
    use_activation: bool | None = None


class ClassificationData(Struct, kw_only=True):
    """label: of the largest of `probs`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PooledList[ClassificationData], kw_only=True):
    pass


@router.post("/classify", answer=ClassificationResponse, body=ClassificationRequest)
async def create_classification(http: Request) -> Response:
    """Return the class probabilities of each input."""
    call = await read_call(http, ClassificationRequest, "classify-")
    pooled = await _pool_inputs(call, call.params())
    labels = call.picked.model.tasks.plan.labels

    def entry(index: int, vector: np.ndarray) -> ClassificationData:
        label = labels[int(np.argmax(vector))]
        return ClassificationData(index=index, label=label, probs=vector.tolist(), num_classes=len(vector))

    return await pooled.answer(
        ClassificationResponse, lambda: [entry(at, vector) for at, vector in enumerate(pooled.vectors)]
    )


async def _pool_inputs(call: PoolingCall[InputBody], params: PoolingParams, instruction: str = "") -> Pooled:
    """Pool each input on its own, with an instruction in front of each text, or the conversation."""
    body, names = call.body, call.body.names()
    prompts: list[Prompt]
    async with call.picked.model.starter.admitted(call.http, len(names)) as place:
        if (conversation := body.conversation) is None:
            prompts = [with_instruction(one, instruction) for one in body.inputs()]
        else:
            must_fit = body.truncate_prompt_tokens is None
            rendered = await render_chat(call.http, call.picked.model, conversation, must_fit)
            prompts = [rendered.prompt]
        asked = call.asked(prompts, [params] * len(prompts), names, body.add_special_tokens is not False)
        return await call.pool(place, asked)


def _written(body: VectorBody) -> Callable[[np.ndarray], Any]:
    """Return what turns a vector into the form that a body asks for."""
    if body.encoding_format != "base64":
        return np.ndarray.tolist
    order = ">" if body.endianness == "big" else "<"

    def as_base64(vector: np.ndarray) -> str:
        if body.embed_dtype == "bfloat16":
            bits = vector.astype(np.float32, copy=False).view(np.uint32)
            numbers = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(f"{order}u2")  # to the nearest, ties to even
        elif body.embed_dtype == "float16":
            with np.errstate(over="ignore"):
                numbers = vector.astype(f"{order}f2")
            if np.any(np.isinf(numbers) & np.isfinite(vector)):
                raise RequestError(
                    f"embed_dtype: float16 holds numbers of up to 65504, and one of this answer is "
                    f"{np.abs(vector).max():.6g}: ask for bfloat16 or float32, or set normalize to true",
                    "embed_dtype",
                )
        else:
            numbers = vector.astype(f"{order}f4")
        return base64.b64encode(numbers.tobytes()).decode("ascii")

    return as_base64
