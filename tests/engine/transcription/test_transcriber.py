"""Windows, segments and fallback, with transformers' own `generate` as the model of what is right."""

import numpy as np
import pytest
import torch

from pagoda.base.errors import RequestError
from pagoda.base.outputs import CompletionOutput, TranscriptionWord
from pagoda.engine.transcription.piece import Question, compression_ratio
from pagoda.engine.transcription.sound import SAMPLING_RATE, Sound, log_mel
from pagoda.engine.transcription.transcriber import Transcriber, Transcription, TranscriptionOptions, quiet_spans
from pagoda.engine.transcription.words import split_words, time_words
from tests.engine.transcription.speech_model import (
    END,
    FIRST,
    MELS,
    SPECIAL,
    VOCAB,
    answers_of,
    inputs_of,
    make_model,
    run,
)

PLAIN = {"compression_ratio_threshold": None, "logprob_threshold": None, "no_speech_threshold": None}
GREEDY = {"temperature": 0.0, **PLAIN}


def noise(seconds: float, seed: int = 0) -> Sound:
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * SAMPLING_RATE))
    return Sound((samples * np.sin(np.arange(len(samples)) / 9000)).astype(np.float32), "noise.wav")


@pytest.mark.parametrize("seconds", [4.0, 95.0])
@pytest.mark.parametrize("conditions", [False, True])
@pytest.mark.parametrize("prompt", [None, "Hi, Bob"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_segments_are_those_of_transformers(seconds: float, conditions: bool, prompt: str | None, seed: int) -> None:
    model, sound, inputs = make_model(seed), noise(seconds, seed), inputs_of()
    options = {"language": "de", "prompt": prompt, "condition_on_previous_text": conditions, **GREEDY}
    transcription = Transcriber(inputs).begin(sound, TranscriptionOptions.of(options))
    run(transcription.job(), answers_of(model))
    prompt_ids = None
    if prompt is not None:
        begins = END + SPECIAL.index("<|startofprev|>")
        prompt_ids = torch.tensor([begins, *inputs.tokenizer.encode(f" {prompt}")])
    expected = model.generate(
        torch.from_numpy(log_mel(sound.samples, MELS))[None],
        return_timestamps=True,
        return_segments=True,
        language="de",
        task="transcribe",
        condition_on_prev_tokens=conditions,
        prompt_ids=prompt_ids,
    )["segments"][0]
    found = transcription.segments
    # Segments without text in the silence that pads a window are left out.
    expected = [
        segment
        for segment in expected
        if float(segment["start"]) < sound.duration_s
        or inputs.tokenizer.decode([int(token) for token in segment["tokens"]]).strip()
    ]
    assert len(found) == len(expected)
    assert [segment.tokens for segment in found] == [segment["tokens"].tolist() for segment in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.start == pytest.approx(min(float(theirs["start"]), sound.duration_s))
        assert ours.end == pytest.approx(min(float(theirs["end"]), sound.duration_s))


@pytest.mark.parametrize("seed", [0, 2])  # in windows that are cut, and in one that ends
def test_words_are_those_of_transformers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.engine.transcription.piece.UNSPACED", ("de",))  # each letter is a word
    model, sound, inputs = make_model(seed), noise(40, seed), inputs_of()
    options = TranscriptionOptions.of({"language": "de", "word_timestamps": True, **GREEDY})
    transcription = Transcriber(inputs).begin(sound, options)
    run(transcription.job(), answers_of(model))
    features = torch.from_numpy(log_mel(sound.samples, MELS))[None]
    expected = model.generate(
        features,
        attention_mask=torch.ones(1, features.shape[2], dtype=torch.int64),
        return_timestamps=True,
        return_segments=True,
        return_token_timestamps=True,
        language="de",
        task="transcribe",
    )["segments"][0]
    words: list[TranscriptionWord] = []
    for ours, theirs in zip(transcription.segments, expected, strict=True):
        ids, ends = theirs["tokens"].tolist(), theirs["token_timestamps"].tolist()
        text = [at for at, token in enumerate(ids) if token < END]
        split = split_words([ids[at] for at in text], inputs.tokenizer.decode, False)
        timed = [(word, ends[text[own[0]] - 1], ends[text[own[-1]]]) for word, own in split]
        words += time_words(timed, ours, words[-1].end if words else 0.0, 40.0)
    found = transcription.output().words
    assert found is not None
    assert len(found) > 20
    assert [word.word for word in found] == [word.word for word in words]
    for word, other in zip(found, words, strict=True):
        assert (word.start, word.end) == (pytest.approx(other.start, abs=0.021), pytest.approx(other.end, abs=0.021))


def test_text_without_timestamps_is_transformers() -> None:
    model, sound = make_model(), noise(8)
    transcription = Transcriber(inputs_of()).begin(
        sound, TranscriptionOptions.of({"language": "English", "timestamps": False, "task": "translate", **GREEDY})
    )
    run(transcription.job(), answers_of(model))
    features = torch.from_numpy(log_mel(sound.samples, MELS))[None]
    expected = model.generate(features, return_timestamps=False, language="en", task="translate")[0].tolist()
    (segment,) = transcription.segments
    assert segment.tokens == [token for token in expected if token != END]


def test_the_language_is_detected_as_by_transformers() -> None:
    model, sound = make_model(1), noise(40, 3)
    transcription = Transcriber(inputs_of()).begin(sound, TranscriptionOptions.of(GREEDY))
    run(transcription.job(), answers_of(model))
    features = torch.from_numpy(log_mel(sound.samples, MELS))[None]
    (token,) = model.detect_language(features).tolist()
    assert transcription.language == {END + 2: "en", END + 3: "de"}[token]
    assert transcription.output().language in ("english", "german")


class Script:
    """Answers questions with given tokens and average log-probabilities, and keeps the questions."""

    def __init__(self, *answers: tuple[list[int], float]) -> None:
        self._answers = list(answers)
        self.questions: list[Question] = []

    def __call__(self, question: Question) -> CompletionOutput:
        self.questions.append(question)
        ids, average = self._answers.pop(0)
        return CompletionOutput(0, token_ids=ids, cumulative_logprob=average * len(ids), finish_reason="stop")


TEXT = [FIRST, 40, 41, FIRST + 100, END]
REPEATED = [FIRST, *[40] * 60, FIRST + 100, END]
ENGLISH = {"language": "en"}


def transcribed(script: Script, seconds: float = 2.0, **options: object) -> Transcription:
    transcription = Transcriber(inputs_of()).begin(noise(seconds), TranscriptionOptions.of({**ENGLISH, **options}))
    run(transcription.job(), script)
    return transcription


def test_a_text_that_repeats_itself_is_sampled_again_at_a_higher_temperature() -> None:
    script = Script((REPEATED, -0.1), (TEXT, -0.3))
    found = transcribed(script).output()
    assert [question.params.temperature for question in script.questions] == [0.0, 0.2]
    assert len({question.prompt.media[0].content_hash for question in script.questions}) == 1
    assert found.text == "HI"
    assert (found.segments[0].temperature, found.segments[0].avg_logprob) == (0.2, pytest.approx(-0.3))
    assert found.segments[0].end == 2.0


def test_an_unlikely_text_is_sampled_again_unless_the_window_has_no_speech() -> None:
    likely_speech = Script((TEXT, -2.0), ([FIRST - 2], -3.0), (TEXT, -2.0), (TEXT, -0.5))
    assert transcribed(likely_speech).output().text == "HI"
    no_speech = likely_speech.questions[1]
    assert no_speech.params.allowed_token_ids == (FIRST - 2,)
    assert list(no_speech.prompt.token_ids) == [END + 1]  # up to the start of the transcript
    assert [question.params.temperature for question in likely_speech.questions] == [0.0, 0.0, 0.2, 0.4]
    silence = Script((TEXT, -2.0), ([FIRST - 2], -0.1))
    assert transcribed(silence).output().text == ""


def test_the_last_temperature_is_taken_as_it_comes() -> None:
    script = Script(*[(REPEATED, -0.1)] * 2)
    assert transcribed(script, temperature=[0.0, 0.9]).output().segments[0].temperature == 0.9


def test_text_sampled_at_a_high_temperature_does_not_condition_the_next_window() -> None:
    window = [FIRST, 40, 41, FIRST + 1400, FIRST + 1400, END]
    for temperature, conditions in ((0.2, True), (0.6, False)):
        script = Script((window, -0.1), (TEXT, -0.1), (TEXT, -0.1))
        transcribed(script, 57.0, temperature=temperature, condition_on_previous_text=True)
        second = list(script.questions[1].prompt.token_ids)
        assert (second[0] == END + SPECIAL.index("<|startofprev|>")) == conditions
        assert (second[1:5] == [FIRST, 40, 41, FIRST + 1400]) == conditions  # one of the double timestamps


def test_every_window_tells_how_probable_no_speech_is_if_that_is_asked_for() -> None:
    script = Script(([FIRST - 2], -1.0), (TEXT, -0.1))
    (segment,) = transcribed(script, reports_no_speech=True).output().segments
    assert segment.no_speech_prob == pytest.approx(np.exp(-1.0))


def test_pieces_cut_where_it_is_quiet_are_transcribed_as_sounds_of_their_own() -> None:
    sound = noise(70)
    for second in (22, 45):
        sound.samples[second * SAMPLING_RATE : (second + 1) * SAMPLING_RATE] = 0
    spans = quiet_spans(sound.samples)
    assert [(begin // SAMPLING_RATE, end // SAMPLING_RATE) for begin, end in spans] == [(0, 22), (22, 45), (45, 70)]
    assert all(end - begin <= 30 * SAMPLING_RATE for begin, end in spans)
    options = TranscriptionOptions.of({**ENGLISH, "cut_at_silences": True})
    transcription = Transcriber(inputs_of()).begin(sound, options)
    job = transcription.job()
    pieces = next(job)
    assert isinstance(pieces, list)
    assert len(pieces) == 3
    for piece in reversed(pieces):  # in any order
        run(piece, Script((TEXT, -0.1)))
    starts = [segment.start for segment in transcription.segments]
    assert starts == [begin / SAMPLING_RATE for begin, _ in spans]
    assert transcription.output().text == "HIHIHI"
    assert transcription.done_s == pytest.approx(70)


def test_times_stay_within_the_piece_and_in_order_whatever_the_model_hears_in_the_padding() -> None:
    sound = noise(40)
    sound.samples[20 * SAMPLING_RATE : 21 * SAMPLING_RATE] = 0
    options = TranscriptionOptions.of({**ENGLISH, "cut_at_silences": True})
    transcription = Transcriber(inputs_of()).begin(sound, options)
    job = transcription.job()
    pieces = next(job)
    assert isinstance(pieces, list)
    late = [FIRST, 40, FIRST + 900, FIRST + 900, 41, FIRST + 1250, FIRST + 1250, 42, FIRST + 1450, FIRST + 1450, END]
    silent = [FIRST, 40, FIRST + 500, FIRST + 500, 41, FIRST + 1100, FIRST + 1200, FIRST + 1300, FIRST + 1300, END]
    for piece, ids in zip(pieces, (late, silent), strict=True):
        (question,) = run(piece, Script((ids, -0.1)))  # and the padding after it is not transcribed again
        assert question.prompt.media[0].features is not None
    (cut, end) = quiet_spans(sound.samples)[0][1] / SAMPLING_RATE, 40.0
    times = [(segment.text, segment.start, segment.end) for segment in transcription.segments]
    assert times == [
        ("H", 0.0, 18.0),
        ("I", 18.0, pytest.approx(cut)),
        ("J", pytest.approx(cut), pytest.approx(cut)),
        ("H", pytest.approx(cut), pytest.approx(cut + 10)),
        ("I", pytest.approx(cut + 10), end),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "klingon"}, "language='klingon' is not one of the model's"),
        ({"language": "fr"}, "language='fr' is not one of the model's"),
        ({"task": "sing"}, "task='sing' is not supported; expected one of transcribe, translate"),
        ({"temperature": []}, "temperature: expected at least one"),
        ({"temperature": -1}, "temperature"),
        ({"word_timestamps": 1}, "word_timestamps"),
        ({"word_timestamps": True, "timestamps": False}, "word_timestamps: not with timestamps=False"),
        ({"langage": "en"}, "no option 'langage'; did you mean 'language'"),
        ({"timestamps": "yes"}, "timestamps"),
        ({"timestamps": False}, "noise.wav has 31 s, and without timestamps"),
    ],
)
def test_options_are_checked_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Transcriber(inputs_of()).begin(noise(31), TranscriptionOptions.of({**ENGLISH, **options}))


def test_a_model_of_english_alone_has_no_languages_and_does_not_translate() -> None:
    transcriber = Transcriber(inputs_of(is_multilingual=False))
    assert transcriber.tokens.prompt("en", "transcribe", True) == [END + 1]
    transcriber.begin(noise(1), TranscriptionOptions.of({"language": "english"}))
    with pytest.raises(RequestError, match="knows English"):
        transcriber.begin(noise(1), TranscriptionOptions.of({"language": "de"}))
    with pytest.raises(RequestError, match="knows English alone"):
        transcriber.begin(noise(1), TranscriptionOptions.of({"task": "translate"}))


def test_the_compression_ratio_is_that_of_transformers() -> None:
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    for ids in ([1, 2, 3], [7] * 100, list(range(90))):
        expected = WhisperGenerationMixin._retrieve_compression_ratio(torch.tensor(ids), VOCAB)
        assert compression_ratio(ids, VOCAB) == pytest.approx(expected)


def test_ranks_that_have_some_heads_each_refuse_the_times_of_words() -> None:
    inputs = inputs_of()
    inputs.limits.alignment_heads = ()
    with pytest.raises(RequestError, match="word_timestamps: not with tensor_parallel_size"):
        Transcriber(inputs).begin(noise(1), TranscriptionOptions.of({**ENGLISH, "word_timestamps": True}))
