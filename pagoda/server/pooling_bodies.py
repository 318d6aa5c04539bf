"""The bodies of requests whose prompts are pooled: embeddings, scores, rankings, classes."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from pagoda.base.errors import RequestError
from pagoda.base.pooling import TASKS, PoolingParams, PoolingTask
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.inputs.scoring import PairOptions
from pagoda.server.body import Body, Flag, Priority, RequestId, TokenId, UnservedField, as_list, check_alike, one_of
from pagoda.server.protocol import DESCRIBED_MESSAGES, Messages, check_chat
from pagoda.server.turn import Conversation

Texts = str | list[str]
Inputs = str | list[str | TokenId | list[TokenId]]
Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class PoolingBody(Body, kw_only=True, frozen=True):
    """The fields that all of them have.

    model: A name of the model (also if not given), or of an adapter.
    user: Has no effect.
    truncate_prompt_tokens: Keep so many tokens from the start of each prompt; -1: as many as fit.
    priority: Smaller is sooner, where requests are scheduled by priority.
    cache_salt: Share cached prefixes only with requests that have the same salt.
    request_id: The id of the answer, without its prefix.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    request_id: RequestId | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model, user=self.user, cache_salt=self.cache_salt)
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens: must be -1 or at least 1", "truncate_prompt_tokens")

    def pooling_params(self) -> PoolingParams:
        """Return what the body asks of the model."""
        names = ("task", "normalize", "dimensions", "use_activation", "truncate_prompt_tokens")
        return PoolingParams(**{name: getattr(self, name) for name in names if hasattr(self, name)})


class InputBody(PoolingBody, kw_only=True, frozen=True):
    """The fields of those that pool each input on its own, or a conversation as one input.

    input: A text, token ids, or a list of either.
    messages: A conversation.
    add_special_tokens: By default true of `input`; chat templates write their own.
    chat_template: Goes before the model's own template.
    chat_template_kwargs: Further variables of the template.
    add_generation_prompt: End the prompt with the opening of the assistant's turn.
    continue_final_message: Leave the last message open.
    """

    input: Inputs | None = None
    messages: Annotated[Messages, Meta(min_length=1, extra_json_schema=DESCRIBED_MESSAGES)] | None = None
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
    encoding_format: Annotated[str, one_of("float", "base64")] = "float"
    embed_dtype: Annotated[str, one_of("float32", "float16", "bfloat16")] = "float32"
    endianness: Annotated[str, one_of("native", "little", "big")] = "native"
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


class PoolingRequest(VectorBody, kw_only=True, frozen=True):
    """POST /pooling

    task: What to make of the hidden states; if not given, what the model was made for.
    use_activation: False: the outputs of a classification head as they are; of an embedding, as `normalize`.
    """

    task: Annotated[str, one_of(*TASKS)] | None = None


class ClassificationRequest(InputBody, kw_only=True, frozen=True):
    """POST /classify

    use_activation: False: the outputs of the classification head as they are.
    """

    task: ClassVar[PoolingTask] = "classify"
    use_activation: bool | None = None


class PairBody(PoolingBody, kw_only=True, frozen=True):
    """The fields of those that compare texts.

    use_activation: False: the outputs of the classification head as they are.
    chat_template: Of models that get a pair as one prompt: goes before the model's own template.
    instruction: Of models that get a pair as one prompt: what the template says to do.
    """

    task: ClassVar[PoolingTask] = "score"
    use_activation: bool | None = None
    chat_template: str | None = None
    instruction: str | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check("template_chars", len(self.chat_template or ""), "chat_template")

    def pair_options(self) -> PairOptions:
        return PairOptions(self.chat_template, self.instruction, getattr(self, "max_tokens_per_doc", 0))

    def _check_texts(self, limits: RequestLimits, given: dict[str, Sequence[str]]) -> None:
        """given: texts by the field that they are in."""
        for name, texts in given.items():
            if not texts:
                raise RequestError(f"{name}: is empty", name)
            limits.check("inputs", len(texts), name)
            for index, text in enumerate(texts):
                if not text:
                    raise RequestError(f"{name}[{index}]: is empty", f"{name}[{index}]")
        if self.truncate_prompt_tokens is not None or self.pair_options().max_second:
            num_chars = sum(len(text) for texts in given.values() for text in texts)
            limits.check("tokenized_chars", num_chars, next(iter(given)))


class ScoreRequest(PairBody, kw_only=True, frozen=True):
    """POST /score: `text_1` with each of `text_2`. vLLM's other names for them are accepted, too.

    text_1: One text, or as many as in `text_2`.
    text_2: What is compared with it.
    queries, data_1: Other names of `text_1`.
    documents, items, data_2: Other names of `text_2`.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        given = self._given
        fitting = [pair for pair in _PAIRS if given and given <= set(pair)]
        if not fitting:
            ways = "text_1 and text_2 (or queries and documents, queries and items, data_1 and data_2)"
            raise RequestError(f"text_1: give {ways}", "text_1")
        for name in fitting[0]:
            if name not in given:
                raise RequestError(f"{name}: is required", name)
        first, second = self.texts()
        self._check_texts(limits, dict(zip(self.names, (first, second), strict=True)))
        if len(first) not in (1, len(second)):
            name = self.names[0]
            raise RequestError(
                f"{name}: {len(first)} texts cannot be paired with {len(second)}: give one, or as many", name
            )

    @property
    def _given(self) -> set[str]:
        return {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}

    @property
    def names(self) -> tuple[str, str]:
        """The fields that the texts are in."""
        return next(pair for pair in _PAIRS if self._given == set(pair))

    def texts(self) -> tuple[list[str], list[str]]:
        """The texts of both sides, as lists."""
        first, second = (getattr(self, name) for name in self.names)
        return as_list(first), as_list(second)


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class RerankDocument(Body, kw_only=True, frozen=True):
    """A document.

    text: What is compared with the query.
    """

    text: str


class RerankRequest(PairBody, kw_only=True, frozen=True):
    """POST /rerank

    query: What the documents are compared with.
    documents: Texts.
    top_n: Return only the best so many.
    return_documents: Return the texts of the documents.
    max_tokens_per_doc: Keep so many tokens from the start of each document; 0: all.
    """

    query: str
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: Flag = True
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if not self.query:
            raise RequestError("query: is empty", "query")
        self._check_texts(limits, {"documents": self.texts(), "query": [self.query]})

    def texts(self) -> list[str]:
        """The documents as texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]
