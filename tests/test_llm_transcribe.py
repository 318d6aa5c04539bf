"""LLM.transcribe with a tiny random Whisper: the same as the sans-IO transcriber answered by transformers."""

import asyncio
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda import LLM, AsyncLLM
from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutput, TranscriptionOutput
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.offline import _Delivery
from pagoda.engine.transcription.sound import Sound
from pagoda.engine.transcription.transcriber import Transcriber, TranscriptionOptions
from tests.engine.transcription.speech_model import answers_of, inputs_of, run, write_checkpoint
from tests.engine.transcription.test_transcriber import GREEDY, noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("speech")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", max_num_seqs=4, num_blocks=1024) as llm:
        yield llm


def expected(sound: Sound, options: dict[str, object]) -> TranscriptionOutput:
    from tests.engine.transcription.speech_model import make_model

    transcription = Transcriber(inputs_of()).begin(sound, TranscriptionOptions.of(options))
    run(transcription.job(), answers_of(make_model()))
    return transcription.output()


@pytest.mark.parametrize("cut", [False, True])
def test_several_sounds_at_once_have_the_segments_of_transformers_each(llm: LLM, cut: bool) -> None:
    sounds = [noise(5, 1), noise(64, 2), noise(12, 3)]
    options = {**GREEDY, "cut_at_silences": cut, "reports_no_speech": True}
    found = llm.transcribe([sound.samples for sound in sounds], use_tqdm=False, **options)
    for output, sound in zip(found, sounds, strict=True):
        wanted = expected(sound, options)
        assert output.language == wanted.language
        assert [one.tokens for one in output.segments] == [one.tokens for one in wanted.segments]
        assert [one.text for one in output.segments] == [one.text for one in wanted.segments]
        for ours, theirs in zip(output.segments, wanted.segments, strict=True):
            assert ours.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-3)
            assert ours.no_speech_prob == pytest.approx(theirs.no_speech_prob, abs=1e-3)
            assert (ours.start, ours.end, ours.id, ours.seek) == (theirs.start, theirs.end, theirs.id, theirs.seek)


def test_words_have_the_times_of_transformers_in_any_company_and_change_no_segment(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.engine.transcription.piece.UNSPACED", ("en",))  # each letter is a word
    sounds = [noise(12, 1), noise(40, 2)]
    options = {"language": "en", **GREEDY}
    plain = llm.transcribe([sound.samples for sound in sounds], use_tqdm=False, **options)
    options["word_timestamps"] = True
    found = llm.transcribe([sound.samples for sound in sounds], use_tqdm=False, **options)
    assert [one.segments for one in found] == [one.segments for one in plain]
    assert [one.words for one in plain] == [None] * 2
    (alone,) = llm.transcribe(sounds[1].samples, use_tqdm=False, **options)
    assert alone.words == found[1].words
    for output, sound in zip(found, sounds, strict=True):
        wanted = expected(sound, options).words
        assert output.words
        assert wanted
        assert [one.word for one in output.words] == [one.word for one in wanted]
        times, theirs = ([(one.start, one.end) for one in words] for words in (output.words, wanted))
        np.testing.assert_allclose(times, theirs, atol=0.021)


def test_all_sounds_together_have_no_more_requests_than_sequences_run(llm: LLM, monkeypatch: Any) -> None:
    most = 0
    deliver = _Delivery.deliver

    def counting(self: _Delivery, outputs: list[RequestOutput]) -> None:
        nonlocal most
        most = max(most, len(self._mail))
        deliver(self, outputs)

    monkeypatch.setattr(_Delivery, "deliver", counting)
    sounds = [noise(100, seed).samples for seed in (1, 2)]
    found = llm.transcribe(sounds, use_tqdm=False, language="en", cut_at_silences=True, **GREEDY)
    assert all(output.segments for output in found)
    assert most == 4


def test_sampled_text_is_the_same_each_time_and_in_any_company(llm: LLM) -> None:
    options = {"language": "en", "temperature": (0.7, 1.0), "compression_ratio_threshold": 0.01, "seed": 3}
    alone = llm.transcribe(noise(9, 4).samples, use_tqdm=False, **options)
    beside = llm.transcribe([noise(20, 5).samples, noise(9, 4).samples], use_tqdm=False, **options)
    assert beside[1].segments == alone[0].segments
    assert alone[0].segments[0].temperature == 1.0


def test_a_sound_that_cannot_be_read_is_reported_and_the_others_are_transcribed(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"no sound at all")
    found = llm.transcribe([tmp_path / "a.wav", noise(3).samples], use_tqdm=False, language="en")
    assert "a.wav" in (found[0].error or "")
    assert found[1].error is None
    assert found[1].segments
    with pytest.raises(RequestError, match=r"missing.wav.* cannot be read"):
        llm.transcribe(tmp_path / "missing.wav", use_tqdm=False)


def test_a_file_is_transcribed_as_its_samples(llm: LLM, tmp_path: Path) -> None:
    pytest.importorskip("av")
    codes = np.clip(np.rint(noise(4, 6).samples * 32768), -32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 16_000, len(codes), "NONE", ""))
        output.writeframes(codes.tobytes())
    options = {"use_tqdm": False, "language": "en", **GREEDY}
    (of_file,) = llm.transcribe(file.getvalue(), **options)
    (of_samples,) = llm.transcribe(codes.astype(np.float32) / 32768, **options)
    assert of_file.segments == of_samples.segments


def test_async_llm_transcribes_sounds_at_once_as_llm_does(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sounds = [noise(5, 1).samples, noise(64, 2).samples]
    options = {"language": "en", "cut_at_silences": True, **GREEDY}

    async def run() -> list[TranscriptionOutput]:
        async with AsyncLLM(str(folder), dtype="float32", max_num_seqs=4, num_blocks=1024) as async_llm:
            with pytest.raises(RequestError, match="missing.wav.* cannot be read"):
                await async_llm.transcribe(folder / "missing.wav")
            with pytest.raises(RequestError, match="no option 'langage'"):
                await async_llm.transcribe(sounds[0], langage="en")
            return await asyncio.gather(*[async_llm.transcribe(sound, **options) for sound in sounds])

    given: set[tuple[object, object]] = set()
    make_request = InputProcessor.make_request

    def noting(self: InputProcessor, *args: Any, **more: Any) -> Any:
        given.add((more["priority"], more["cache_salt"]))
        return make_request(self, *args, **more)

    monkeypatch.setattr(InputProcessor, "make_request", noting)
    options |= {"priority": 3, "cache_salt": "mine"}
    found = asyncio.run(run())
    assert given == {(3, "mine")}
    options |= {"priority": 4}
    expected = llm.transcribe(sounds, use_tqdm=False, **options)
    assert given == {(3, "mine"), (4, "mine")}
    assert [one.segments for one in found] == [one.segments for one in expected]


def test_a_text_model_says_that_it_does_not_transcribe() -> None:
    from pagoda.engine.inputs.input_limits import InputLimits
    from pagoda.engine.inputs.input_processor import InputProcessor
    from tests.engine.transcription.speech_model import LetterTokenizer

    inputs = InputProcessor(LetterTokenizer(), InputLimits(1600, 64, 4))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="does not transcribe: serve a Whisper model"):
        Transcriber(inputs)
