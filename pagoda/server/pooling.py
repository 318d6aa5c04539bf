"""What the routes have in common whose prompts are pooled: embeddings, classes, scores and rankings."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

import numpy as np
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.pooling_inputs import check_pooling
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.outputs.results import vector_of
from pagoda.server.body import ModelBody, Priority, RequestId
from pagoda.server.dialects.openai.answers import PromptTokensDetails
from pagoda.server.generation import Generation
from pagoda.server.remote_admission import AnyPlace
from pagoda.server.request_starter import RawPrompts
from pagoda.server.sending import cancel_on_disconnect, json_response, run_sized
from pagoda.server.served_model import PickedModel
from pagoda.server.state import ServerState, state_of


class PoolingBody(ModelBody, kw_only=True, frozen=True):
    """The fields that all of them have.

    truncate_prompt_tokens: Keep so many tokens from the start of each prompt; -1: as many as fit.
    """

    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
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


class PoolingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


D = TypeVar("D")


class PooledList(Struct, Generic[D], kw_only=True):
    """An answer with an entry for each input, or for each pair of texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[D]
    usage: PoolingUsage


_ELEMENTS_PER_TOKEN = 16
"""So many elements of a vector take as long to encode as a token with 20 log-probabilities."""

B = TypeVar("B", bound=PoolingBody, covariant=True)


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[B]):
    """One HTTP request.   picked: the model that its body names.   id_prefix: of its id."""

    http: Request
    state: ServerState
    body: B
    picked: PickedModel
    id_prefix: str

    def params(self) -> PoolingParams:
        """Return what the body asks of the model. Raises RequestError if the model cannot do it."""
        return check_pooling(self.body.pooling_params(), self.picked.model.tasks)

    def asked(
        self, prompts: Sequence[Prompt], params: Sequence[Params], names: Sequence[str], adds_tokens: bool = True
    ) -> RawPrompts:
        """Return the prompts to run.   names, adds_tokens: as for RawPrompts."""
        body = self.body
        return RawPrompts(prompts, params, names, self.picked.lora, adds_tokens, body.priority, body.cache_salt)

    async def pool(self, place: AnyPlace, asked: RawPrompts) -> "Pooled":
        """Pool all prompts. Raises RequestError, ApiError or WorkerDied."""
        http, state = self.http, self.state
        request_id = state.request_id(http, self.body.request_id, self.id_prefix, len(asked.prompts))
        generation = await self.picked.model.starter.begin(http, place, asked, request_id)
        with contextlib.ExitStack() as at_end:
            at_end.callback(generation.close)
            outputs = await cancel_on_disconnect(http, _gather(generation))
            num_tokens = generation.num_prompt_tokens
            usage = PoolingUsage(num_tokens, num_tokens, PromptTokensDetails(generation.num_cached_tokens))
            vectors = [vector_of(output) for output in outputs]
            return Pooled(generation.request_id, int(time.time()), self.picked.name, vectors, usage)


async def read_call(http: Request, kind: type[B], id_prefix: str) -> PoolingCall[B]:
    """Read the request's body. Raises RequestError, or ApiError (404) for a model that is not served."""
    return call_of(http, await state_of(http).bodies.read(http, kind), id_prefix)


def call_of(http: Request, body: B, id_prefix: str) -> PoolingCall[B]:
    """Return the call with a body that has been read. Raises ApiError (404) for a model that is not served."""
    state = state_of(http)
    picked = state.pick(http, body.model)
    picked.model.warn_of_untrained(http)
    return PoolingCall(http, state, body, picked, id_prefix)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of one HTTP request.   vectors: in the order of its prompts.   created: seconds since the epoch."""

    id: str
    created: int
    model: str
    vectors: list[np.ndarray]
    usage: PoolingUsage

    @property
    def num_elements(self) -> int:
        """Elements of all vectors."""
        return sum(vector.size for vector in self.vectors)

    async def answer(self, kind: type[PooledList[D]], entries: Callable[[], list[D]]) -> Response:
        """Return the answer with these entries.   entries: makes them."""
        head = {"id": self.id, "created": self.created, "model": self.model, "usage": self.usage}
        return await self.respond(lambda: kind(**head, data=entries()))

    async def respond(self, make: Callable[[], Struct], num_more: int = 0) -> Response:
        """Return the answer that is made of the vectors.   num_more: tokens that encoding takes as long as, besides."""
        num_tokens = self.num_elements // _ELEMENTS_PER_TOKEN + num_more
        return await run_sized(num_tokens, lambda: json_response(make()))


async def _gather(generation: Generation) -> list[RequestOutput]:
    """Return the finished output of each prompt."""
    found: dict[int, RequestOutput] = {}
    async with generation.outputs() as deltas:
        async for index, delta in deltas:
            if delta.finished:
                found[index] = delta
    return [found[index] for index in range(len(generation.requests))]
