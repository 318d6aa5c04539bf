"""Piece: transcribe a stretch of sound window by window, as transformers' sequential algorithm does.

Nothing here waits or calls the engine: a generator yields what to ask it, and is sent the answers.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagoda.base.outputs import RequestOutput, TranscriptionSegment, TranscriptionWord
from pagoda.base.pooling import Alignment, PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import MediaItem
from pagoda.engine.inputs.prompt_encoder import EncodedPrompt
from pagoda.engine.transcription.sound import FRAMES_PER_S, WINDOW_FRAMES
from pagoda.engine.transcription.whisper_tokens import FRAMES_PER_STEP, STEP_S, Task, WhisperTokens
from pagoda.engine.transcription.words import UNSPACED, row_starts, split_words, time_words

_LOW_TEMPERATURE = 0.5  # text that was sampled above it does not condition the next window


@dataclass(frozen=True, slots=True)
class Decoding:
    """How windows are decoded.

    timestamps: whether the model writes them; without, a sound has at most 30 s.
    temperatures: tried in this order until a text is good enough: it compresses at most `compression_ratio_threshold`
        times (of its token ids), and its average log-probability is at least `logprob_threshold`. None: no such test.
    no_speech_threshold: a window of a lower average log-probability is skipped if the probability that it has no speech
        is above this; None: never.
    before: token ids of the caller's text, in front of every window. With `condition_on_previous_text` the text of the
        windows so far comes after it; the last tokens of both that fit are taken.
    reports_no_speech: find the probability that a window has no speech for every window, not only where it decides.
    alignment_heads: of the model, to find the times of words; (): they are not wanted.
    """

    task: Task = "transcribe"
    timestamps: bool = True
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio_threshold: float | None = 1.35
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = False
    before: tuple[int, ...] = ()
    seed: int = 0
    reports_no_speech: bool = False
    alignment_heads: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What to ask the engine: the answer is the finished output of this request."""

    prompt: EncodedPrompt
    params: SamplingParams | PoolingParams


Job = Generator["Question | list[Job]", RequestOutput, None]
"""Asks one question after another, and is sent the answers. May end with a list of jobs that run at once instead."""


@dataclass(slots=True)
class Window:
    """A text of one window.   token_ids: without the end.   avg_logprob: per token, the end included.

    is_cut: it has no end, since there was no more room.
    ends: when each token ends, in seconds from the window's start, if words are wanted.
    """

    token_ids: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None
    is_cut: bool
    ends: list[float] = field(default_factory=list[float])


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of sound, and what has been found in it.

    features: float32 [mels, frames], computed when the piece begins: the frames of its samples, padded to a window.
    begin_s, end_s: its place in the whole sound.   num_frames: to be transcribed.
    max_before: most tokens of previous text in a prompt.   segments: found so far, within the piece and in the order of
    time.   words: of these segments, if they are wanted.   seek: frames that are done.   text_ids: of the segments so
    far, as they condition the next window.
    """

    features: Callable[[], np.ndarray]
    begin_s: float
    end_s: float
    num_frames: int
    tokens: WhisperTokens
    decoding: Decoding
    encoder_len: int
    vocab_size: int
    max_before: int
    decode: Callable[[Sequence[int]], str]
    segments: list[TranscriptionSegment] = field(default_factory=list[TranscriptionSegment])
    text_ids: list[int] = field(default_factory=list[int])
    language: str = ""
    words: list[TranscriptionWord] = field(default_factory=list[TranscriptionWord])
    seek: int = 0
    is_done: bool = False

    def run(self, language: str) -> Job:
        """Transcribe it."""
        features = self.features()
        decoding, self.language = self.decoding, language
        conditions = decoding.condition_on_previous_text
        while self.seek < self.num_frames:
            size = min(features.shape[1] - self.seek, WINDOW_FRAMES)
            media = window_media(features[:, self.seek : self.seek + size], self.encoder_len)
            prompt = self._prompt(language, conditions)
            window = yield from self._window(media, prompt)
            if window is None:
                self.seek += size
                continue
            conditions = decoding.condition_on_previous_text and window.temperature < _LOW_TEMPERATURE
            if decoding.alignment_heads and any(token < self.tokens.end for token in window.token_ids):
                window.ends = yield from self._token_ends(media, prompt, window, size)
            self._take(window, size)
        self.is_done = True

    def _prompt(self, language: str, conditions: bool) -> list[int]:
        """Return the decoder's prompt.   conditions: on the text so far."""
        before = [*self.decoding.before, *(self.text_ids if conditions else ())]
        decoding = self.decoding
        return self.tokens.prompt(language, decoding.task, decoding.timestamps, before[-self.max_before :])

    def _window(
        self, media: MediaItem, prompt: list[int]
    ) -> Generator["Question | list[Job]", RequestOutput, Window | None]:
        """Decode a window, again at higher temperatures while the text is not good enough. None: it has no speech."""
        decoding, tokens = self.decoding, self.tokens
        encoded = EncodedPrompt(prompt, media=(media,), encoder_len=media.length)
        no_speech_prob: float | None = None
        if decoding.reports_no_speech:
            no_speech_prob = yield from self._no_speech(media, prompt)
        for attempt, temperature in enumerate(decoding.temperatures):
            params = SamplingParams(
                temperature=temperature,
                seed=decoding.seed + attempt,
                max_tokens=None,
                logprobs=0,
                detokenize=False,
                speech=tokens.rules(decoding.timestamps),
            )
            answer = (yield Question(encoded, params)).outputs[0]
            ids = list(answer.token_ids)
            avg_logprob = (answer.cumulative_logprob or 0.0) / max(len(ids), 1)
            is_cut = tokens.end not in ids
            if not is_cut:
                ids.pop()
            ratio = compression_ratio(ids, self.vocab_size)
            threshold = decoding.logprob_threshold
            is_unlikely = threshold is not None and avg_logprob < threshold
            if is_unlikely and decoding.no_speech_threshold is not None:
                if no_speech_prob is None:
                    no_speech_prob = yield from self._no_speech(media, prompt)
                if no_speech_prob > decoding.no_speech_threshold:
                    return None
            most = decoding.compression_ratio_threshold
            is_last = attempt == len(decoding.temperatures) - 1
            if is_last or not (is_unlikely or (most is not None and ratio > most)):
                return Window(ids, temperature, avg_logprob, ratio, no_speech_prob, is_cut)
        raise AssertionError("there are no temperatures")

    def _no_speech(
        self, media: MediaItem, prompt: list[int]
    ) -> Generator["Question | list[Job]", RequestOutput, float]:
        """Ask for the probability that a window has no speech: that of its token after the start."""
        begun = prompt[: prompt.index(self.tokens.start) + 1]
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=0, detokenize=False, allowed_token_ids=(self.tokens.no_speech,)
        )
        answer = yield Question(EncodedPrompt(begun, media=(media,), encoder_len=media.length), params)
        return math.exp(answer.outputs[0].cumulative_logprob or 0.0)

    def _token_ends(
        self, media: MediaItem, prompt: list[int], window: Window, size: int
    ) -> Generator["Question | list[Job]", RequestOutput, list[float]]:
        """Ask where the tokens of a window look; return Window.ends.   size: its frames, the padding included."""
        num_frames = min(size, round((self.end_s - self.begin_s) * FRAMES_PER_S) - self.seek) // FRAMES_PER_STEP
        alignment = Alignment(self.decoding.alignment_heads, len(prompt), max(1, num_frames))
        # What a token looks at is where the next one is said; as in transformers, a last one without a next has no row.
        ids = window.token_ids[: max(1, len(window.token_ids) - window.is_cut)]
        encoded = EncodedPrompt([*prompt, *ids], media=(media,), encoder_len=media.length)
        answer = yield Question(encoded, PoolingParams(task="token_embed", alignment=alignment))
        ends = [start * STEP_S for start in row_starts(answer.pooled)]
        return ends + ends[-1:] * window.is_cut

    def _take(self, window: Window, size: int) -> None:
        """Add the segments of a window, and move on to the end of its last whole one.   size: its frames."""
        ids, first = window.token_ids, self.tokens.first_timestamp
        is_timestamp = [token >= first for token in ids]
        ends_once = is_timestamp[-2:] == [False, True]
        cuts = [at + 1 for at in range(len(ids) - 1) if is_timestamp[at] and is_timestamp[at + 1]]
        if not cuts:
            times = [token - first for token in ids if token >= first]
            steps = times[-1] if times and times[-1] > 0 else size // FRAMES_PER_STEP
            self._add(window, ids, 0, 0, steps)
            self.seek += size
            return
        if ends_once:
            cuts.append(len(ids))
        else:
            cuts[-1] += 1  # the second of the last pair tells that the segment is whole
        moved = size
        for begin, end in zip([0, *cuts], cuts, strict=False):
            own = ids[begin:end]
            last = own[-1] if end != cuts[-1] or ends_once else own[-2]
            self._add(window, own, begin, own[0] - first, last - first)
            if end == cuts[-1] and not ends_once:
                moved = (last - first) * FRAMES_PER_STEP
        self.seek += moved

    def _add(self, window: Window, ids: list[int], at: int, begin: int, end: int) -> None:
        """Add a segment, unless it is empty and in the silence that pads the piece.

        at: index of its first token in the window's.   begin, end: in steps of STEP_S from the window's start. Times in
        the padding are cut off.
        """
        self.text_ids += ids[:-1] if len(ids) > 2 and ids[-2] >= self.tokens.first_timestamp else ids
        text = self.decode([token for token in ids if token < self.tokens.end])
        offset_s = self.begin_s + self.seek / FRAMES_PER_S
        begin_s, end_s = offset_s + begin * STEP_S, offset_s + end * STEP_S
        if begin_s >= self.end_s and not text.strip():
            return
        free_s = self.segments[-1].end if self.segments else self.begin_s
        start = min(max(begin_s, free_s), self.end_s)
        self.segments.append(
            TranscriptionSegment(
                start=start,
                end=min(max(end_s, start), self.end_s),
                text=text,
                tokens=ids,
                seek=round(self.begin_s * FRAMES_PER_S) + self.seek,
                temperature=window.temperature,
                avg_logprob=window.avg_logprob,
                compression_ratio=window.compression_ratio,
                no_speech_prob=window.no_speech_prob,
            )
        )
        if window.ends:
            self._add_words(window, at, offset_s)

    def _add_words(self, window: Window, at: int, offset_s: float) -> None:
        """Add the words of the last segment.   at: see `_add`.   offset_s: where the window begins in the sound."""
        segment, times = self.segments[-1], [0.0, *window.ends]
        text = [k for k, token in enumerate(segment.tokens, at) if token < self.tokens.end]
        is_spaced = self.language not in UNSPACED or self.decoding.task == "translate"
        words = [
            (word, offset_s + times[text[own[0]]], offset_s + times[text[own[-1]] + 1])
            for word, own in split_words([window.token_ids[k] for k in text], self.decode, is_spaced)
        ]
        earliest = self.words[-1].end if self.words else self.begin_s
        self.words += time_words(words, segment, earliest, self.end_s)


def window_media(features: np.ndarray, encoder_len: int) -> MediaItem:
    """Return a window as an encoder input.   features: float32 [mels, up to 3000]; what is missing is 0."""
    padded = np.zeros((len(features), WINDOW_FRAMES), np.float32)
    padded[:, : features.shape[1]] = features
    digest = hashlib.blake2b(padded.data, digest_size=16).hexdigest()
    return MediaItem(f"audio:{digest}", 0, encoder_len, padded)


def detect_language(features: np.ndarray, encoder_len: int, tokens: WhisperTokens) -> Question:
    """Return the question whose answer is one token: that of the language of the first window."""
    media = window_media(features[:, :WINDOW_FRAMES], encoder_len)
    params = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, allowed_token_ids=tuple(tokens.languages.values())
    )
    return Question(EncodedPrompt([tokens.start], media=(media,), encoder_len=encoder_len), params)


def compression_ratio(token_ids: Sequence[int], vocab_size: int) -> float:
    """Return how many times zlib makes the token ids smaller: text that repeats itself compresses well."""
    width = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(token.to_bytes(width, "little") for token in token_ids)
    return len(data) / len(zlib.compress(data))
