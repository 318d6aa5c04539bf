"""Transcriber: a sound and a caller's options become jobs for the engine, and their results a transcription."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.base.outputs import TranscriptionOutput, TranscriptionSegment
from pagoda.base.param_values import read_flag, read_integer, read_number
from pagoda.base.registry import nearest
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.transcription.piece import Decoding, Job, Piece, detect_language
from pagoda.engine.transcription.sound import (
    FRAMES_PER_S,
    HELD_PER_SAMPLE,
    HOP,
    SAMPLING_RATE,
    WINDOW_S,
    Sound,
    log_mel,
)
from pagoda.engine.transcription.whisper_tokens import LANGUAGES, WhisperTokens

_DEFAULT = Decoding()


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """What a caller may ask for.

    language: code or English name; None: detected from the first 30 s.
    task: "transcribe", or "translate" (to English).
    prompt: text in front of the first window, for names and style.
    timestamps: let the model write times; segments need it, and sounds longer than 30 s do.
    temperature: one, or several that are tried in turn (see Decoding, which has the thresholds); 0 alone is greedy.
    condition_on_previous_text: put the text so far in front of each window.
    cut_at_silences: cut a long sound where it is quiet, into pieces of up to 30 s that run at once, each as a sound of
        its own: faster, but no piece sees the text of another.
    seed: of the temperatures above 0.
    word_timestamps: find when each word is said: one more request for each window, with its text.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str | None = None
    timestamps: bool = True
    temperature: float | Sequence[float] = _DEFAULT.temperatures
    compression_ratio_threshold: float | None = _DEFAULT.compression_ratio_threshold
    logprob_threshold: float | None = _DEFAULT.logprob_threshold
    no_speech_threshold: float | None = _DEFAULT.no_speech_threshold
    condition_on_previous_text: bool = False
    cut_at_silences: bool = False
    seed: int = 0
    reports_no_speech: bool = False
    word_timestamps: bool = False

    @classmethod
    def of(cls, given: Mapping[str, object]) -> "TranscriptionOptions":
        """Return options by name. Raises RequestError for an unknown name."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise RequestError(f"transcribe has no option {name!r:.80}{nearest(name, known)}", name[:80])
        return cls(**cast("dict[str, Any]", given))


class TranscriptionFields(TypedDict, total=False):
    """The fields of TranscriptionOptions, as arguments of `transcribe`."""

    language: str | None
    task: str
    prompt: str | None
    timestamps: bool
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    condition_on_previous_text: bool
    cut_at_silences: bool
    seed: int
    reports_no_speech: bool
    word_timestamps: bool


class Transcriber:
    """Transcribes with one speech model. Stateless and thread-safe: a Transcription has the state of one sound."""

    def __init__(self, inputs: InputProcessor) -> None:
        """Raises RequestError for a model that does not transcribe, ConfigError for a tokenizer without its tokens."""
        if inputs.speech is None:
            raise RequestError("this model does not transcribe: serve a Whisper model", "model")
        self._inputs = inputs
        self.speech = inputs.speech
        self.tokens = WhisperTokens.of(inputs.tokenizer, self.speech.settings, inputs.limits.vocab_size)

    def begin(self, sound: Sound, options: TranscriptionOptions) -> "Transcription":
        """Check the options. Raises RequestError that names the one at fault."""
        return Transcription(self, sound, self.tokens.language_code(options.language), self._decoding(options), options)

    def _decoding(self, options: TranscriptionOptions) -> Decoding:
        given = options.temperature
        temperatures = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        if not temperatures:
            raise RequestError("temperature: expected at least one", "temperature")
        thresholds: dict[str, float | None] = {}
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(options, name)
            thresholds[name] = None if value is None else read_number(name, value, low=-1e9)
        return Decoding(
            task=self.tokens.check_task(options.task),
            timestamps=read_flag("timestamps", options.timestamps),
            temperatures=tuple(read_number("temperature", one, low=0.0, high=2.0) for one in temperatures),
            **thresholds,
            condition_on_previous_text=read_flag("condition_on_previous_text", options.condition_on_previous_text),
            before=self._before(options.prompt),
            seed=read_integer("seed", options.seed, 0),
            reports_no_speech=read_flag("reports_no_speech", options.reports_no_speech),
            alignment_heads=self._alignment_heads(options),
        )

    def _alignment_heads(self, options: TranscriptionOptions) -> tuple[tuple[int, int], ...]:
        """Return the heads that tell when words are said, () if that is not asked for. Raises RequestError."""
        if not read_flag("word_timestamps", options.word_timestamps):
            return ()
        if options.timestamps is False:
            raise RequestError("word_timestamps: not with timestamps=False; leave one of them out", "word_timestamps")
        if not self._inputs.limits.alignment_heads:
            raise RequestError(
                "word_timestamps: not with tensor_parallel_size or pipeline_parallel_size above 1; leave it out",
                "word_timestamps",
            )
        return self._inputs.limits.alignment_heads

    def _before(self, prompt: str | None) -> tuple[int, ...]:
        """Return the ids of a caller's text. Raises RequestError for one that has special tokens, as transformers."""
        ids = tuple(self._inputs.prompts.encode(f" {prompt.strip()}", False)) if prompt else ()
        for token in ids:
            if token >= self.tokens.end:
                name = abbreviate(self._inputs.tokenizer.token_string(token))
                raise RequestError(f"prompt: {name} is a special token of the model; leave it out", "prompt")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inputs.tokenizer.decode(token_ids)

    @property
    def vocab_size(self) -> int:
        return self._inputs.limits.vocab_size

    @property
    def max_before(self) -> int:
        """Most tokens of previous text: half of the decoder's positions, but for the token that begins them."""
        return self._inputs.limits.max_model_len // 2 - 1


class Transcription:
    """One sound on its way to text. `job` asks the engine; it may be read at any time.

    language: its code, None until it is detected.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        sound: Sound,
        language: str | None,
        decoding: Decoding,
        options: TranscriptionOptions,
    ) -> None:
        """Raises RequestError for a sound that the options do not fit."""
        self.sound = sound
        self.language = language
        self._transcriber, self._decoding = transcriber, decoding
        self._pieces: list[Piece] = []
        self._cuts = read_flag("cut_at_silences", options.cut_at_silences)
        if not decoding.timestamps and sound.duration_s > WINDOW_S and not self._cuts:
            raise RequestError(
                f"timestamps=False: {sound.name} has {sound.duration_s:.0f} s, and without timestamps at most "
                f"{WINDOW_S} can be transcribed: leave it out, or set cut_at_silences",
                "timestamps",
            )

    def job(self) -> Job:
        """Ask the engine for everything. Computes spectrograms: to be advanced off an event loop."""
        transcriber, samples = self._transcriber, self.sound.samples
        num_mels, encoder_len = transcriber.speech.num_mels, transcriber.speech.encoder_len
        whole = None if self._cuts else log_mel(samples, num_mels)
        if self.language is None:
            head = log_mel(samples[: WINDOW_S * SAMPLING_RATE], num_mels) if whole is None else whole
            answer = yield detect_language(head, encoder_len, transcriber.tokens)
            codes = {token: code for code, token in transcriber.tokens.languages.items()}
            self.language = codes[answer.outputs[0].token_ids[0]]
        spans = quiet_spans(samples) if self._cuts else [(0, len(samples))]
        self._pieces = [
            Piece(
                lambda begin=begin, end=end: log_mel(samples[begin:end], num_mels) if whole is None else whole,
                begin / SAMPLING_RATE,
                end / SAMPLING_RATE,
                # transformers transcribes the silence that pads a sound of one window, too.
                -(-(end - begin) // HOP) if whole is None else whole.shape[1],
                transcriber.tokens,
                self._decoding,
                encoder_len,
                transcriber.vocab_size,
                transcriber.max_before,
                transcriber.decode,
            )
            for begin, end in spans
        ]
        yield [piece.run(self.language) for piece in self._pieces]

    @property
    def segments(self) -> list[TranscriptionSegment]:
        """Return what has been found so far, in the order of time, each with its number as id."""
        found = [segment for piece in self._pieces for segment in piece.segments]
        for number, segment in enumerate(found):
            segment.id = number
        return found

    @property
    def num_settled(self) -> int:
        """How many of the segments come before all that are still to be found."""
        count = 0
        for piece in self._pieces:
            count += len(piece.segments)
            if not piece.is_done:
                break
        return count

    @property
    def num_bytes(self) -> int:
        return HELD_PER_SAMPLE * len(self.sound.samples)

    @property
    def done_s(self) -> float:
        """Return how many seconds of the sound are done."""
        return min(sum(piece.seek for piece in self._pieces) / FRAMES_PER_S, self.sound.duration_s)

    def output(self) -> TranscriptionOutput:
        """Return the result."""
        segments = self.segments
        return TranscriptionOutput(
            text="".join(segment.text for segment in segments).strip(),
            language=LANGUAGES.get(self.language or "", ""),
            duration=self.sound.duration_s,
            segments=segments,
            words=[word for piece in self._pieces for word in piece.words] if self._decoding.alignment_heads else None,
            name=self.sound.name,
        )


_SMOOTHED_S = 0.2
_SHORTEST_S = 15


def quiet_spans(samples: np.ndarray) -> list[tuple[int, int]]:
    """Return spans (from, to) of samples, of up to 30 s, that are cut in the quietest 0.2 s between 15 and 30 s."""
    hop = int(_SMOOTHED_S * SAMPLING_RATE)
    loudness = np.square(samples[: len(samples) // hop * hop]).reshape(-1, hop).mean(axis=1)
    spans: list[tuple[int, int]] = []
    begin = 0
    while len(samples) - begin > WINDOW_S * SAMPLING_RATE:
        low = (begin + _SHORTEST_S * SAMPLING_RATE) // hop
        high = (begin + WINDOW_S * SAMPLING_RATE) // hop
        end = (low + int(np.argmin(loudness[low:high]))) * hop + hop // 2
        spans.append((begin, end))
        begin = end
    return [*spans, (begin, len(samples))]
