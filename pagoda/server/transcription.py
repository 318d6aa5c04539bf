"""POST /v1/audio/transcriptions, /v1/audio/translations"""

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.transcription.formats import as_object, as_srt, as_vtt
from pagoda.engine.transcription.piece import Decoding
from pagoda.engine.transcription.sound import claimed_bytes, read_sound
from pagoda.engine.transcription.transcriber import Transcription, TranscriptionOptions
from pagoda.server.body import Body, Flag, OrDefault, one_of
from pagoda.server.errors import ApiError
from pagoda.server.forms import read_form
from pagoda.server.generation import Generation
from pagoda.server.remote_admission import AnyPlace
from pagoda.server.request_state import request_state
from pagoda.server.routing import Router
from pagoda.server.sending import EventStream, cancel_on_disconnect, event, json_response, run_sized
from pagoda.server.served_model import ServedModel
from pagoda.server.state import state_of

router = Router()

# ---- forms and answers

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
    response_format: OrDefault[Format] = "json"
    temperature: OrDefault[Annotated[float, Meta(ge=0, le=1)]] = 0.0


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
    granularities: OrDefault[tuple[Annotated[str, Meta(max_length=64)], ...]] = field(
        default=(), name="timestamp_granularities[]"
    )
    include: OrDefault[tuple[Annotated[str, Meta(max_length=64)], ...]] = field(default=(), name="include[]")

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


# ---- routes

F = TypeVar("F", TranscriptionRequest, TranslationRequest)

_LISTS = ("timestamp_granularities[]", "include[]")
_REFUSED = ("chunking_strategy[", "known_speaker_names", "known_speaker_references")
"""How fields of OpenAI's begin without which the answer would be another than was asked for."""


@router.post(
    "/v1/audio/transcriptions",
    answer=TranscriptionResponse,
    more=(TranscriptionVerbose,),
    chunk=TranscriptionEvent,
    body=TranscriptionRequest,
    is_form=True,
)
async def create_transcription(http: Request) -> Response:
    """Write down what is said in a sound file: a form with the file and the fields below."""
    async with _admitted(http) as place, _form(http, TranscriptionRequest) as (form, file):
        options = TranscriptionOptions(
            language=form.language,
            prompt=form.prompt,
            temperature=_temperatures(form.temperature),
            cut_at_silences=form.chunking_strategy is not None or form.vad is not None,
            reports_no_speech=form.response_format == "verbose_json",
            word_timestamps="word" in form.granularities,
        )
        return await _answer(http, place, file, options, form.model, form.response_format, form.stream)


@router.post("/v1/audio/translations", answer=TranscriptionResponse, body=TranslationRequest, is_form=True)
async def create_translation(http: Request) -> Response:
    """Write down in English what is said in a sound file in another language."""
    async with _admitted(http) as place, _form(http, TranslationRequest) as (form, file):
        options = TranscriptionOptions(
            task="translate",
            prompt=form.prompt,
            temperature=_temperatures(form.temperature),
            reports_no_speech=form.response_format == "verbose_json",
        )
        return await _answer(http, place, file, options, form.model, form.response_format, False)


def _admitted(http: Request) -> contextlib.AbstractAsyncContextManager[AnyPlace]:
    """Admit a request before its form is read. Raises Refusal (429)."""
    request_state(http).body_bytes = 0  # of a text: the sound's tokens are not known yet
    return _default_model(http).starter.admitted(http, 1, 1, None, is_read=False, needs_engine=False)


def _default_model(http: Request) -> ServedModel:
    """Return the model of requests that name none: the first that transcribes."""
    models = state_of(http).models
    return next((one for one in models.all if one.hears), models.first)


def _form(http: Request, kind: type[F]) -> contextlib.AbstractAsyncContextManager[tuple[F, UploadFile]]:
    if not _default_model(http).hears:
        raise RequestError("this model does not transcribe: serve a Whisper model", "model")
    return read_form(http, kind, "a sound file", _LISTS, _REFUSED)


def _temperatures(asked: float) -> tuple[float, ...]:
    return (asked,) if asked else Decoding().temperatures


async def _answer(
    http: Request,
    place: AnyPlace,
    file: UploadFile,
    options: TranscriptionOptions,
    model: str | None,
    form: str,
    is_stream: bool,
) -> Response:
    """Transcribe a file, and answer in the form that was asked for."""
    state = state_of(http)
    picked = state.pick(http, model or _default_model(http).name)
    starter = picked.model.starter
    if picked.lora is not None:
        raise ApiError(400, "model: adapters do not transcribe", "model")
    if not picked.model.hears:
        raise ApiError(400, f"model: {abbreviate(picked.name)} does not transcribe", "model")
    name, request_id = file.filename or "upload", state.request_id(http, None, "audio-", 1)
    await starter.hold_engine(http, place)
    new_id = starter.reserve_job(request_state(http).caller.key, request_id, place)
    reading = starter.llm.text.begin_transcription(
        lambda limits, is_left: read_sound(_content(file), name, limits, is_left),
        options,
        lambda limits: claimed_bytes(_content(file), name, limits),
        place.wait_to_hold,
    )
    sound = await cancel_on_disconnect(http, reading)
    request_state(http).audio_s = round(sound.sound.duration_s, 2)
    generation = Generation(starter, http, request_id, (), place, is_stream)
    with contextlib.ExitStack() as at_end:
        at_end.callback(generation.close)
        salt = starter.salt(generation.key, None)
        outputs = starter.llm.run_job(sound.job(), new_id, salt, generation.follow_job)
        if is_stream:
            at_end.pop_all()
            return EventStream(_events(outputs, sound), generation.close)
        await cancel_on_disconnect(http, _exhaust(outputs))
    return await run_sized(sum(len(segment.tokens) for segment in sound.segments), lambda: _whole(sound, options, form))


def _content(file: UploadFile) -> bytes:
    file.file.seek(0)
    return file.file.read()


async def _exhaust(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    async with contextlib.aclosing(outputs):
        async for _ in outputs:
            pass


async def _events(outputs: AsyncGenerator[RequestOutput, None], sound: Transcription) -> AsyncGenerator[bytes, None]:
    """Yield each segment's text as soon as it is final, and the whole text at the end."""
    num_sent = 0
    async with contextlib.aclosing(outputs):
        async for _ in outputs:
            num_settled = sound.num_settled  # first: pieces find segments on other threads meanwhile
            for segment in sound.segments[num_sent:num_settled]:
                num_sent += 1
                yield event(TranscriptionEvent("transcript.text.delta", delta=segment.text))
    usage = DurationUsage(round(sound.sound.duration_s, 2))
    yield event(TranscriptionEvent("transcript.text.done", text=sound.output().text, usage=usage))


def _whole(sound: Transcription, options: TranscriptionOptions, form: str) -> Response:
    output = sound.output()
    usage = DurationUsage(round(output.duration, 2))
    if form == "json":
        return json_response(TranscriptionResponse(output.text, usage))
    if form == "verbose_json":
        fields = as_object(output)
        language = "english" if options.task == "translate" else output.language  # of the text, as at OpenAI
        return json_response(
            TranscriptionVerbose(
                output.text,
                language,
                output.duration,
                fields["segments"],
                usage,
                options.task,
                fields.get("words", UNSET),
            )
        )
    writers: dict[str, Callable[[], str]] = {
        "text": lambda: output.text + "\n",
        "srt": lambda: as_srt(output),
        "vtt": lambda: as_vtt(output),
    }
    return Response(writers[form](), media_type="text/vtt" if form == "vtt" else "text/plain")
