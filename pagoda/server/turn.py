"""Turns: what is asked of a model and what comes of it, in the words of no API.

A dialect (dialects/) makes a TurnRequest of the body of its API and frames of the pieces of the answer; respond.py runs
the turn in between.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec import Struct, ValidationError

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.inputs.prompts import Prompt
from pagoda.server.body import ModelBody
from pagoda.server.conversation import Conversation
from pagoda.server.errors import ApiError, as_api_error
from pagoda.server.sending import Framing

if TYPE_CHECKING:
    from pagoda.engine.async_text import AsyncText
    from pagoda.server.generation import Generation
    from pagoda.server.served_model import ServedModel
    from pagoda.server.state import ServerState


def _same(param: str) -> str:
    return param


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What is asked for: the answer to a conversation, or the continuation of each prompt.

    params: of every prompt.   more_conversations: that are answered with it, each on its own.
    add_special_tokens: as for RawPrompts, of prompts that are texts.
    request_id: that the caller gives the answer.
    cache_ttl_s: keep its blocks in the prefix cache rather than others, for so long after their last use.
    origin: from a field as this package calls it (`max_tokens`, `messages[2].content`) to the caller's own; "" for one
        that the caller's API does not have.
    """

    params: SamplingParams
    conversation: Conversation | None = None
    more_conversations: Sequence[Conversation] = ()
    prompts: Sequence[Prompt] = ()
    add_special_tokens: bool = True
    is_stream: bool = False
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    cache_ttl_s: int | None = None
    origin: Callable[[str], str] = _same

    @property
    def num_prompts(self) -> int:
        return 1 + len(self.more_conversations) if self.conversation is not None else len(self.prompts)


@contextlib.contextmanager
def naming_fields(origin: Callable[[str], str]) -> Iterator[None]:
    """Have errors name the caller's own fields.   origin: as of TurnRequest."""
    try:
        yield
    except (ApiError, RequestError) as error:
        known = as_api_error(error)
        message, param = known.message, known.param
        if param is not None and (own := origin(param)) != param:
            message, param = message.replace(param, own, 1), own
        # The remedy for a prompt that is too long.
        cut = origin("truncate_prompt_tokens")
        message = message.replace(", or set truncate_prompt_tokens", f", or set {cut}" if cut else "")
        if message == known.message:
            raise
        raise ApiError(known.status, message, param, known.retry_after_s) from None


@contextlib.contextmanager
def naming_conversation(at: int) -> Iterator[None]:
    """Have errors about messages say in which conversation of several they are."""
    try:
        with naming_fields(lambda param: re.sub("^messages", f"messages[{at}]", param)):
            yield
    except ValidationError as error:
        raise ValidationError(str(error).replace("$.messages", f"$.messages[{at}]", 1)) from None


class ReasoningDelta(Struct):
    text: str


class TextDelta(Struct):
    text: str


class CallDelta(Struct):
    """A piece of a call.   index: of the call in its answer.   id, name: of the first piece, which begins the call.

    arguments: those of all pieces are JSON, an object.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class TurnEnd(Struct):
    """The end of one output.   reason: stop, tool_calls, length, abort or error.

    stop_reason: as of CompletionOutput. What all outputs cost is known when the last has ended (Turn.generation).
    """

    reason: str
    stop_reason: int | str | None


def add_call(calls: list[CallDelta], piece: CallDelta) -> None:
    """Add a piece of a call to calls: to the last one, or as the first of the next."""
    if calls and calls[-1].index == piece.index:
        last = calls[-1]
        calls[-1] = CallDelta(last.index, last.arguments + piece.arguments, last.id, last.name)
    else:
        calls.append(piece)


TurnEvent = ReasoningDelta | TextDelta | CallDelta | TurnEnd


class Said(Struct):
    """What events say, by kind; the pieces of the same call are one."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    end: TurnEnd | None = None


class Piece(Struct):
    """What one output has said since its last piece.

    prompt: the index of its prompt.   delta: of the request.   num_reasoning_tokens: how many of its tokens, from the
    first on, are reasoning.
    """

    prompt: int
    delta: RequestOutput
    output: CompletionOutput
    events: list[TurnEvent]
    num_reasoning_tokens: int = 0

    @property
    def said(self) -> Said:
        """What its events say, by kind; made anew with every call."""
        said = Said()
        for event in self.events:
            if isinstance(event, TextDelta):
                said.text += event.text
            elif isinstance(event, ReasoningDelta):
                said.reasoning += event.text
            elif isinstance(event, TurnEnd):
                said.end = event
            else:
                add_call(said.calls, event)
        return said


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that runs.   created: seconds since the epoch.   generation: its counts and durations so far.

    text: decodes tokens.
    seal: returns what the client keeps of its answer and sends back (Conversation.seals): of the first output, the
    thought once that has ended, all once it has ended; "" if there is nothing.
    note: keeps something of the turn in the model's history by a name; before the last piece has become frames.
    """

    id: str
    created: int
    model: str
    request: TurnRequest
    generation: "Generation"
    text: "AsyncText"
    seal: Callable[[], str] = str
    note: Callable[[str, bytes], object] = lambda name, data: None


class Answer(Protocol):
    """One answer in the form of an API: frames of a stream, or a whole. `frames` and `whole` may run on a thread.

    framing: how its stream ends.
    """

    @property
    def framing(self) -> Framing: ...

    def opening(self) -> bytes:
        """Return what is sent before anything is generated."""
        ...

    def frames(self, piece: Piece) -> bytes:
        """Return the frames of a piece; b"" if there is nothing to send yet."""
        ...

    def closing(self) -> bytes:
        """Return what is sent when all outputs have ended."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> Struct:
        """Return the whole answer.   pieces: one per output, in the order of the prompts."""
        ...


B = TypeVar("B", bound=ModelBody)
A = TypeVar("A", bound=Answer, covariant=True)


class Dialect(Protocol[B, A]):
    """The form of one API's requests and answers.

    body: of its requests.   id_prefix: of the ids of its answers.
    """

    @property
    def body(self) -> type[B]: ...

    @property
    def id_prefix(self) -> str: ...

    def request(self, body: B, model: "ServedModel") -> TurnRequest:
        """Return what a body asks for. May run on a thread. Raises ApiError, RequestError."""
        ...

    def answer(self, body: B, turn: Turn, state: "ServerState") -> A:
        """Return what makes the answer."""
        ...
