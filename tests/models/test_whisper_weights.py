"""Real weights, real speech: what LLM.transcribe and the command line write is what transformers does."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from benchmarks.transcription import plain
from pagoda import LLM
from pagoda.base.outputs import TranscriptionOutput
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.transcription.sound import log_mel, read_sound
from pagoda.loading.ctranslate2 import CTranslate2File, token_settings
from tests.cached_models import cached_model

TEXTS = (
    "Please call Stella. Ask her to bring these things with her from the store: six spoons of fresh snow peas, five "
    "thick slabs of blue cheese, and maybe a snack for her brother Bob. We also need a small plastic snake and a big "
    "toy frog for the kids. She can scoop these things into three red bags, and we will go meet her Wednesday at the "
    "train station. When the sunlight strikes raindrops in the air, they act as a prism and form a rainbow.",
    "It was a bright cold day in April, and the clocks were striking thirteen.",
)
SPANISH = "Buenos días. El tren a Madrid sale hoy a las doce desde el andén siete."
SAMPLES = Path("/usr/share/sounds/alsa")
MOST_WORDS_WRONG = {"whisper-tiny.en": 0.1, "whisper-base": 0.2}
END = 50256
"""Of a model of English; that of others, and so all ids that follow, are one higher."""
LANGUAGE_IDS = {f"<|{code}|>": 50259 + at for at, code in enumerate([*LANGUAGES][:99])}


def transformers_whisper(folder: Path) -> WhisperForConditionalGeneration:
    file = CTranslate2File(folder)
    settings = {name: value for name, value in file.settings().items() if name not in ("architectures", "torch_dtype")}
    is_multilingual = settings["vocab_size"] == 51865
    end = END + is_multilingual
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end + 1}
    tasks = {"translate": 50358, "transcribe": 50359}
    model = WhisperForConditionalGeneration(WhisperConfig(**settings, **ends)).eval()
    weights = {name: torch.from_numpy(np.array(file.read(name))).float() for name in file.parameters}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        **token_settings(folder),
        **ends,
        max_length=448,
        no_timestamps_token_id=end + 106,
        prev_sot_token_id=end + 104,
        max_initial_timestamp_index=50,
        is_multilingual=is_multilingual,
        **({"lang_to_id": LANGUAGE_IDS, "task_to_id": tasks} if is_multilingual else {}),
    )
    return model


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng, which speaks the texts, is not installed")
    pytest.importorskip("av")
    folder: Path = tmp_path_factory.mktemp("speech")
    spoken = [*(("en-us", text) for text in TEXTS), ("es", SPANISH)]
    files = [folder / f"{number}.wav" for number in range(len(spoken))]
    for file, (voice, text) in zip(files, spoken, strict=True):
        subprocess.run(["espeak-ng", "-v", voice, "-s", "140", "-w", str(file), text], check=True)
    return files


GREEDY: dict[str, Any] = {"temperature": 0.0, "logprob_threshold": None, "compression_ratio_threshold": None}


def transcribed_as_transformers(
    name: str, sounds: Sequence[Path], ways: Sequence[bool], **options: Any
) -> list[TranscriptionOutput]:
    """Transcribe sounds with and without the previous text; compare the tokens and the text with transformers'.

    ways: whether to condition on the previous text; the first sound alone where it is.   options: of the LLM.
    Return the outputs of the first way.
    """
    files = cached_model(name)
    is_multilingual = name == "whisper-base"
    model, tokenizer = transformers_whisper(files.path), load_tokenizer(files)
    with LLM(name, max_num_seqs=4, **options) as llm:
        found = [
            llm.transcribe(
                sounds[:1] if conditions else sounds,
                use_tqdm=False,
                no_speech_threshold=None,
                condition_on_previous_text=conditions,
                **GREEDY,
            )
            for conditions in ways
        ]
    for outputs, conditions in zip(found, ways, strict=True):
        for output, file in zip(outputs, sounds, strict=False):
            sound = read_sound(file.read_bytes(), file.name, RequestLimits())
            features = torch.from_numpy(log_mel(sound.samples, 80))[None]
            asked = {"condition_on_prev_tokens": conditions, **({"task": "transcribe"} if is_multilingual else {})}
            expected = model.generate(features, return_timestamps=True, return_segments=True, **asked)["segments"][0]
            assert [one.tokens for one in output.segments] == [one["tokens"].tolist() for one in expected]
            ids = [token for one in expected for token in one["tokens"].tolist() if token < END + is_multilingual]
            assert output.text == tokenizer.decode(ids).strip()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_text_and_times_are_transformers(speech: list[Path], name: str) -> None:
    """A model of several languages detects which one is spoken."""
    speech = speech if name == "whisper-base" else speech[:2]
    found = transcribed_as_transformers(name, speech, (False, True))
    assert "train station" in found[0].text
    assert "cold day in April" in found[1].text
    if name == "whisper-base":
        assert "en el andén 7" in found[2].text.lower()
    assert [output.language for output in found] == ["english", "english", "spanish"][: len(found)]
    texts = [[plain(text) for text in texts] for texts in (TEXTS, [output.text for output in found[:2]])]
    assert jiwer.wer(*texts) < MOST_WORDS_WRONG[name]


@pytest.mark.slow
def test_debians_samples_are_transcribed_as_by_transformers() -> None:
    """Voices that name loudspeakers."""
    pytest.importorskip("av")
    sounds = [file for file in sorted(SAMPLES.glob("*.wav")) if file.stem != "Noise"]
    if not sounds:
        pytest.skip(f"there are no samples in {SAMPLES} (Debian: apt install alsa-utils)")
    found = transcribed_as_transformers("whisper-tiny.en", sounds, (False,), dtype="float32")
    assert all(output.text for output in found)


@pytest.mark.slow
def test_the_command_line_writes_subtitles(speech: list[Path], tmp_path: Path) -> None:
    cached_model("whisper-tiny.en")
    command = [sys.executable, "-m", "pagoda", "transcribe", *map(str, speech[:2]), "--output-dir", str(tmp_path)]
    for form in ("srt", "json"):
        subprocess.run([*command, "--format", form, "--quiet"], check=True, timeout=300)
    assert (tmp_path / "1.srt").read_text().startswith("1\n00:00:00,000 --> 00:00:0")
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["duration"] > 25
    assert found["segments"][0]["start"] == 0


@pytest.mark.slow
def test_words_are_said_when_transformers_says(speech: list[Path]) -> None:
    files = cached_model("whisper-tiny.en")
    model, speech = transformers_whisper(files.path), speech[:2]
    with LLM("whisper-tiny.en", dtype="float32") as llm:
        found = llm.transcribe(speech, use_tqdm=False, no_speech_threshold=None, word_timestamps=True, **GREEDY)
    for output, file, text in zip(found, speech, TEXTS, strict=True):
        sound = read_sound(file.read_bytes(), file.name, RequestLimits())
        expected = model.generate(
            torch.from_numpy(log_mel(sound.samples, 80))[None],
            attention_mask=torch.ones(1, -(-len(sound.samples) // 160), dtype=torch.int64),
            return_timestamps=True,
            return_segments=True,
            return_token_timestamps=True,
        )["segments"][0]
        assert output.words is not None
        assert [word.word for word in output.words] == output.text.split()
        assert abs(len(output.words) - len(text.split())) <= 3
        times = [time for word in output.words for time in (word.start, word.end)]
        assert times == sorted(times)
        ends = np.array([time for segment in expected for time in segment["token_timestamps"].tolist()])
        inner = np.array(times[1:-1])  # the first and the last are cut to their segment
        assert np.quantile(np.abs(ends[None] - inner[:, None]).min(axis=1), 0.9) <= 0.021
        durations = np.array([word.end - word.start for word in output.words])
        assert 0.1 < np.median(durations) < 0.8
