"""Real weights, real speech: what LLM.transcribe and the command line write is what transformers does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from pagoda import LLM
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.transcription.log_mel import log_mel
from pagoda.engine.transcription.sound import read_sound
from pagoda.loading.ctranslate2 import CTranslate2File, suppressed_tokens
from tests.cached_models import cached_model

TEXTS = (
    "Please call Stella. Ask her to bring these things with her from the store: six spoons of fresh snow peas, five "
    "thick slabs of blue cheese, and maybe a snack for her brother Bob. We also need a small plastic snake and a big "
    "toy frog for the kids. She can scoop these things into three red bags, and we will go meet her Wednesday at the "
    "train station. When the sunlight strikes raindrops in the air, they act as a prism and form a rainbow.",
    "It was a bright cold day in April, and the clocks were striking thirteen.",
)
END, START, NO_TIMESTAMPS, PREVIOUS = 50256, 50257, 50362, 50360


def transformers_whisper(folder: Path) -> WhisperForConditionalGeneration:
    file = CTranslate2File(folder)
    settings = {name: value for name, value in file.settings().items() if name not in ("architectures", "torch_dtype")}
    ends = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    model = WhisperForConditionalGeneration(WhisperConfig(**settings, **ends)).eval()
    weights = {name: torch.from_numpy(np.array(file.read(name))).float() for name in file.parameters}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        **suppressed_tokens(folder),
        **ends,
        max_length=448,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        max_initial_timestamp_index=50,
        is_multilingual=False,
    )
    return model


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng, which speaks the texts, is not installed")
    pytest.importorskip("av")
    folder: Path = tmp_path_factory.mktemp("speech")
    files = [folder / f"{number}.wav" for number in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(file), text], check=True)
    return files


@pytest.mark.slow
def test_text_and_times_are_transformers(speech: list[Path]) -> None:
    files = cached_model("whisper-tiny.en")
    model, tokenizer = transformers_whisper(files.path), load_tokenizer(files)
    greedy = {"temperature": 0.0, "logprob_threshold": None, "compression_ratio_threshold": None}
    with LLM("whisper-tiny.en", max_num_seqs=4) as llm:
        found = llm.transcribe(speech, use_tqdm=False, no_speech_threshold=None, **greedy)
        conditioned = llm.transcribe(
            speech[0], use_tqdm=False, no_speech_threshold=None, condition_on_previous_text=True, **greedy
        )
    for outputs, conditions in ((found, False), (conditioned, True)):
        for output, file in zip(outputs, speech, strict=False):
            sound = read_sound(file.read_bytes(), file.name, RequestLimits())
            features = torch.from_numpy(log_mel(sound.samples, 80))[None]
            expected = model.generate(
                features, return_timestamps=True, return_segments=True, condition_on_prev_tokens=conditions
            )["segments"][0]
            assert [one.tokens for one in output.segments] == [one["tokens"].tolist() for one in expected]
            ids = [token for one in expected for token in one["tokens"].tolist() if token < END]
            assert output.text == tokenizer.decode(ids).strip()
    assert "train station" in found[0].text
    assert "cold day in April" in found[1].text


@pytest.mark.slow
def test_the_command_line_writes_subtitles(speech: list[Path], tmp_path: Path) -> None:
    cached_model("whisper-tiny.en")
    command = [sys.executable, "-m", "pagoda", "transcribe", *map(str, speech), "--output-dir", str(tmp_path)]
    for form in ("srt", "json"):
        subprocess.run([*command, "--format", form, "--quiet"], check=True, timeout=300)
    assert (tmp_path / "1.srt").read_text().startswith("1\n00:00:00,000 --> 00:00:0")
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["duration"] > 25
    assert found["segments"][0]["start"] == 0
