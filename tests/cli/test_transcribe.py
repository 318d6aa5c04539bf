from pathlib import Path

import pytest

from pagoda.cli.main import main


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
