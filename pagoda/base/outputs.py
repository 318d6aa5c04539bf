"""The outputs returned to callers, with the field names of vLLM."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

from pagoda.base.lora import LoRARequest


class RequestOutputKind(Enum):
    """What a request's outputs contain."""

    CUMULATIVE = "cumulative"  # the whole output so far, after each step
    DELTA = "delta"  # the new part, after each step
    FINAL_ONLY = "final_only"  # the whole output, when it is finished


@dataclass(slots=True)
class Logprob:
    """One candidate at one position.   rank: 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class FunctionCall:
    """A call of a tool that a model asks for.   arguments: JSON, an object unless the answer was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ChatMessage:
    """What an answer says.   reasoning: without the tags around it, None if there is none.

    content: the text without reasoning and calls.   tool_calls: of the tools that the conversation offers.
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[FunctionCall] = field(default_factory=list[FunctionCall])


@dataclass(slots=True)
class CompletionOutput:
    """One output sequence.

    finish_reason: None while it runs, then "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it; None for eos and the rest.
    message: of `chat`, when the sequence is finished: its text, read.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: ChatMessage | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock; None until they happen.

    last_token_time: when the last output so far was received.   scheduler_time: seconds that the scheduler took for the
    steps of all requests while this one waited or ran.
    queue_reasons: why it waited for its first step -> seconds, which are `time_in_queue` together.
    num_lost_tokens: had to be computed again after preemptions.   preempted_time: seconds that it waited after those.
    num_draft_tokens, num_accepted_tokens: drafts verified for this request (speculative decoding), and the right ones.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    scheduler_time: float = 0.0
    queue_reasons: dict[str, float] = field(default_factory=dict)
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    preempted_time: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from its arrival to its first step."""
        return _seconds(self.arrival_time, self.first_scheduled_time)

    @property
    def time_in_prefill(self) -> float | None:
        """Seconds from its first step to its first token."""
        return _seconds(self.first_scheduled_time, self.first_token_time)

    @property
    def time_in_decode(self) -> float | None:
        """Seconds from its first token to its last output so far: also of one that was aborted."""
        return _seconds(self.first_token_time, self.last_token_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return _seconds(self.arrival_time, self.first_token_time)


def _seconds(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


@dataclass(slots=True)
class RequestOutput:
    """A request's output so far, or only the new part if deltas were requested.

    error: why a request could not be served, or None.   pooled: the result of a pooling request, a float32 array.
    lora_request: the adapter as the caller of LLM or AsyncLLM gave it.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    pooled: Any = None
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a beam search.

    orig_prompt: `prompt_token_ids`, and `prompt` if it was given as text.   tokens: the prompt's, then the output's.
    logprobs: per output token, the candidates it was chosen from.   cum_logprob: sum over the output's tokens.
    text: of all `tokens`, the prompt included.   finish_reason, stop_reason: as in CompletionOutput.
    lora_request: as in RequestOutput.
    """

    orig_prompt: dict[str, Any]
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of a prompt's beam search, best first.   error: why it could not be served, or None."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass(slots=True)
class PoolingOutput:
    """data: float32 array; [size] for one vector, [prompt tokens, size] for one per token."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: one number per dimension."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: one per class, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """score: of a pair of texts; a cosine, or what a cross-encoder returns."""

    score: float


@dataclass(slots=True)
class TranscriptionSegment:
    """A part of a sound, between two times in seconds.

    tokens: its ids, timestamps included.   seek: where its window begins, in hundredths of a second.
    temperature, avg_logprob, compression_ratio, no_speech_prob: of the whole window; the last is None where it was not
        needed.
    """

    start: float
    end: float
    text: str
    tokens: list[int] = field(default_factory=list)
    id: int = 0
    seek: int = 0
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float | None = None


@dataclass(slots=True)
class TranscriptionWord:
    """A word, with its punctuation, between two times in seconds."""

    word: str
    start: float
    end: float


@dataclass(slots=True)
class TranscriptionOutput:
    """The text of a sound.

    language: English name, such as "english".   duration: of the sound, in seconds.   name: of the file.
    words: None if they were not asked for.
    error: why it could not be transcribed, or None.
    """

    text: str = ""
    language: str = ""
    duration: float = 0.0
    segments: list[TranscriptionSegment] = field(default_factory=list)
    name: str = ""
    error: str | None = None
    words: list[TranscriptionWord] | None = None


@dataclass(slots=True)
class Metric:
    """One figure of the engine.   name: as in Prometheus.   kind: a counter only grows."""

    name: str
    value: float
    kind: Literal["gauge", "counter"]


T = TypeVar("T")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """The result of a prompt that was pooled.   outputs: what the called method returns for each prompt.

    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
