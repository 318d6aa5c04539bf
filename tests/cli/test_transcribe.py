import io
import json
import sys
from pathlib import Path

import pytest

from pagoda.cli.main import main
from tests.engine.transcription.sounds import encoded
from tests.engine.transcription.speech_model import write_checkpoint
from tests.engine.transcription.test_transcriber import noise


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_format_has_the_same_segments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With progress on standard error; and a file that cannot be read among others is exit code 1."""
    pytest.importorskip("av")
    write_checkpoint(tmp_path / "model")
    talk, text = tmp_path / "talk.wav", tmp_path / "text.wav"
    talk.write_bytes(encoded(noise(35).samples, "wav", "pcm_s16le"))
    text.write_text("not a sound")
    flags = ("--model", str(tmp_path / "model"), "--dtype", "float32", "--device", "cpu", "--threads", "1")
    flags += ("--num-blocks", "1024", "--language", "en")

    def run(form: str, *more: str) -> tuple[str, str, int]:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit) as exit:
            main(["transcribe", str(talk), "--format", form, *more, *flags])
        assert isinstance(exit.value.code, int)
        return capsys.readouterr().out, terminal.getvalue(), exit.value.code

    plain, progress, code = run("txt")
    assert (code, "Sound: 100%" in progress, "35/35 s" in progress) == (0, True, True)
    srt, progress, code = run("srt", "--quiet")
    assert (code, progress) == (0, "")
    vtt, _, _ = run("vtt")
    assert run("json", str(text), "--output-dir", str(tmp_path / "out"))[2] == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["talk.json"]
    found = json.loads((tmp_path / "out" / "talk.json").read_text())
    lines = [segment["text"].strip() for segment in found["segments"]]
    assert len(lines) > 1
    assert plain == "".join(f"{line}\n" for line in lines if line)
    for subtitles, begin, point in ((srt, "1\n00:00:0", ","), (vtt, "WEBVTT\n\n00:00:0", ".")):
        assert subtitles.startswith(begin)
        assert subtitles.count(" --> ") == len(lines)
        ends = [round(segment["end"] * 1000) for segment in found["segments"]]
        assert all(f" --> 00:00:{end // 1000:02}{point}{end % 1000:03}" in subtitles for end in ends)


def test_files_whose_outputs_would_overwrite_each_other_are_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a" / "talk.wav", tmp_path / "b" / "talk.mp3"]
    for file in files:
        file.parent.mkdir()
        file.touch()
    with pytest.raises(SystemExit) as exit:
        main(["transcribe", *map(str, files), "-o", str(tmp_path / "out"), "--model", str(tmp_path / "none")])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert "same file" in message
    assert "talk.mp3" in message


def test_words_need_a_format_that_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talk.wav").touch()
    with pytest.raises(SystemExit) as exit:
        main(["transcribe", str(tmp_path / "talk.wav"), "--word-timestamps", "-f", "srt"])
    assert exit.value.code == 2
    assert "--word-timestamps needs --format json" in capsys.readouterr().err
