"""The forms and answers of /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, field

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.server.body import Body, Flag, one_of

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
Format = Annotated[str, one_of(*_FORMATS)]
Text = Annotated[str, Meta(max_length=16_384)]


class _SoundForm(Body, kw_only=True, frozen=True):
    """What both routes take.

    file: The sound file: wav, mp3, flac, ogg, m4a, mp4 or webm.
    model: A model that this server has.
    prompt: Text in front of the first window, for names and style.
    response_format: The form of the answer.
    temperature: Fixes the sampling temperature; 0 samples again at higher ones where the text is not good enough.
    """

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Text | None = None
    response_format: Format = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0


class TranslationRequest(_SoundForm, kw_only=True, frozen=True):
    """POST /v1/audio/translations"""


class TranscriptionRequest(_SoundForm, kw_only=True, frozen=True):
    """POST /v1/audio/transcriptions

    language: Code or English name; detected if it is not given.
    stream: Send the text of each segment as a server-sent event.
    chunking_strategy: auto cuts a long sound where it is quiet, into pieces that run at once.
    vad: server_vad is taken as auto; its other settings are refused.
    granularities: Which times `verbose_json` has: segment, which it always has, and word.
    include: More to return; there is nothing yet.
    """

    language: Annotated[str, Meta(max_length=64)] | None = None
    stream: Flag = False
    chunking_strategy: Annotated[str, one_of("auto")] | None = None
    vad: Annotated[str, Meta(max_length=64)] | None = field(default=None, name="chunking_strategy[type]")
    granularities: list[Annotated[str, Meta(max_length=64)]] = field(
        default_factory=list, name="timestamp_granularities[]"
    )
    include: list[Annotated[str, Meta(max_length=64)]] = field(default_factory=list, name="include[]")

    def check(self, limits: RequestLimits) -> None:
        if self.vad not in (None, "server_vad"):
            name = "chunking_strategy[type]"
            raise RequestError(f"{name}: expected server_vad, got {self.vad!r}", name)
        name = "timestamp_granularities[]"
        if unknown := [one for one in self.granularities if one not in ("segment", "word")]:
            raise RequestError(f"{name}: expected segment or word, got {unknown[0]!r}", name)
        if self.granularities and self.response_format != "verbose_json":
            raise RequestError("timestamp_granularities[] needs response_format=verbose_json", "response_format")
        if self.include:
            raise RequestError("include[]: log-probabilities are not supported; leave it out", "include[]")
        if self.stream and self.response_format not in ("json", "text"):
            raise RequestError(f"stream: not with response_format={self.response_format}; take json", "stream")


class DurationUsage(Struct):
    """What was transcribed.   seconds: of sound."""

    seconds: float
    type: str = "duration"


class TranscriptionResponse(Struct):
    text: str
    usage: DurationUsage


class TranscriptionVerbose(Struct):
    """language: English name.   duration: in seconds.   segments: see TranscriptionSegment in the Python API.

    words: with `word`, `start` and `end`, if they were asked for.
    """

    text: str
    language: str
    duration: float
    segments: list[dict[str, Any]]
    usage: DurationUsage
    task: str = "transcribe"
    words: list[dict[str, Any]] | UnsetType = UNSET


class TranscriptionEvent(Struct):
    """An event of a stream.   delta: of transcript.text.delta.   text, usage: of transcript.text.done, the last one."""

    type: str
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: DurationUsage | UnsetType = UNSET
