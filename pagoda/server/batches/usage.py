"""Tokens and model of a batch, read from its answers."""

import msgspec
from msgspec import Struct, field


class CachedTokens(Struct):
    cached_tokens: int = 0


class ReasoningTokens(Struct):
    reasoning_tokens: int = 0


class BatchUsage(Struct):
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = field(default_factory=CachedTokens)
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = field(default_factory=ReasoningTokens)
    total_tokens: int = 0


class _OfAnswer(Struct):
    """Tokens of one answer, by the names of chats (prompt, completion) or of responses (input, output)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None
    input_tokens_details: CachedTokens | None = None
    output_tokens_details: ReasoningTokens | None = None


class _Told(Struct):
    model: str | None = None
    usage: _OfAnswer | None = None


_decode = msgspec.json.Decoder(_Told).decode


class Tally:
    """Adds up the usage of answers."""

    def __init__(self) -> None:
        self.usage = BatchUsage()
        self._models = set[str]()  # two of them, if there are more

    @property
    def model(self) -> str | None:
        """The model that gave all answers; None without one, or if several did."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def add(self, body: msgspec.Raw) -> None:
        """Add an answer; one without usage adds nothing."""
        try:
            read = _decode(body)
        except msgspec.MsgspecError:
            return
        if read.model is not None and len(self._models) < 2:
            self._models.add(read.model)
        if (one := read.usage) is not None:
            total, num_input = self.usage, one.prompt_tokens + one.input_tokens
            num_output = one.completion_tokens + one.output_tokens
            total.input_tokens += num_input
            total.output_tokens += num_output
            total.total_tokens += num_input + num_output
            for cached in (one.prompt_tokens_details, one.input_tokens_details):
                total.input_tokens_details.cached_tokens += cached.cached_tokens if cached else 0
            for thought in (one.completion_tokens_details, one.output_tokens_details):
                total.output_tokens_details.reasoning_tokens += thought.reasoning_tokens if thought else 0
