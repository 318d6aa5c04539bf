import json
from dataclasses import replace

from pagoda.base.outputs import TranscriptionOutput, TranscriptionSegment, TranscriptionWord
from pagoda.engine.transcription.formats import as_json, as_srt, as_text, as_vtt

OUTPUT = TranscriptionOutput(
    text="Hello. Good --> bye",
    language="english",
    duration=3700.5,
    segments=[
        TranscriptionSegment(0.0, 1.2345, " Hello."),
        TranscriptionSegment(3661.999, 3700.5, " Good\n\n--> bye", id=1),
    ],
    name="a.wav",
)


def test_text_has_a_line_per_segment() -> None:
    assert as_text(OUTPUT) == "Hello.\nGood\n\n--> bye\n"


def test_subtitles_have_their_times_and_text_cannot_break_them() -> None:
    assert as_srt(OUTPUT) == (
        "1\n00:00:00,000 --> 00:00:01,234\nHello.\n\n2\n01:01:01,999 --> 01:01:40,500\nGood -> bye\n"
    )
    assert as_vtt(OUTPUT) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.234\nHello.\n\n01:01:01.999 --> 01:01:40.500\nGood -> bye\n"
    )


def test_json_has_everything() -> None:
    found = json.loads(as_json(OUTPUT))
    assert found["segments"][0] | {"text": "Hello."} == {
        "start": 0.0, "end": 1.23, "text": "Hello.", "tokens": [], "id": 0, "seek": 0, "temperature": 0.0,
        "avg_logprob": 0.0, "compression_ratio": 0.0, "no_speech_prob": None,
    }  # fmt: skip
    assert "words" not in found
    words = [TranscriptionWord("Hello.", 0.123, 0.456)]
    assert json.loads(as_json(replace(OUTPUT, words=words)))["words"] == [
        {"word": "Hello.", "start": 0.12, "end": 0.46}
    ]
    assert (found["language"], found["duration"], found["name"], found["error"]) == ("english", 3700.5, "a.wav", None)
