"""The audio routes of a real server with a tiny random Whisper, by the openai client and by hand."""

import io
import json
import re
import time
import uuid
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from pagoda.base.errors import ConfigError
from pagoda.cli.remote import ServerConnection, require_chat
from tests.engine.transcription.speech_model import write_checkpoint
from tests.engine.transcription.test_transcriber import noise
from tests.server.live import LiveServer, serving
from tests.server.test_edges import talk

pytest.importorskip("av")


def wav(seconds: float, seed: int) -> bytes:
    codes = np.clip(noise(seconds, seed).samples * 32768, -32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 16_000, len(codes), "NONE", ""))
        output.writeframes(codes.tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("speech")
    write_checkpoint(folder / "model")
    flags = ("--model", str(folder / "model"), "--dtype", "float32", "--num-blocks", "1024", "--max-num-seqs", "4")
    keys = ("--api-key", "x", "--api-key", "y")
    with serving(folder, *flags, "--request-limits.audio-s", "100", *keys, stepped=True) as server:
        yield replace(server, key="x")


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


SOUND = wav(40, 1)


def asked(client: openai.OpenAI, form: str, sound: bytes = SOUND, **more: Any) -> Any:
    return client.audio.transcriptions.create(
        model=client.models.list().data[0].id, file=("noise.wav", sound), response_format=form, language="en", **more
    )  # type: ignore[call-overload]


def test_a_model_for_speech_is_not_listed_or_asked_as_one_for_texts(server: LiveServer) -> None:
    model = json.loads(server.get("/v1/models")[1])["data"][0]
    assert model["capabilities"] == ["audio"]
    status, answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    message = "this model writes down what is said: use /v1/audio/transcriptions"
    assert (status, answer["error"]["message"]) == (400, message)
    with pytest.raises(ConfigError, match=message):
        require_chat(ServerConnection(server.url, "x"), model["id"])


def test_all_formats_tell_the_same(client: openai.OpenAI) -> None:
    verbose = asked(client, "verbose_json", timestamp_granularities=["segment"])
    text = asked(client, "json").text
    assert text == verbose.text == asked(client, "text").strip()
    assert verbose.language == "english"
    assert verbose.duration == pytest.approx(40)
    assert "".join(segment.text for segment in verbose.segments).strip() == text
    assert all(0 <= segment.no_speech_prob <= 1 and segment.end <= 40 for segment in verbose.segments)
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    assert len(verbose.segments) > 1
    srt, vtt = asked(client, "srt"), asked(client, "vtt")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(verbose.segments)
    assert srt.startswith("1\n00:00:0")
    assert vtt.startswith("WEBVTT\n\n00:00:0")


def test_words_have_times_in_order(client: openai.OpenAI) -> None:
    verbose = asked(client, "verbose_json", timestamp_granularities=["word", "segment"])
    assert verbose.segments == asked(client, "verbose_json").segments
    assert "".join(word.word for word in verbose.words) == "".join(verbose.text.split())
    times = [time for word in verbose.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= 40
    assert asked(client, "verbose_json").words is None


def test_metrics_show_that_a_repeated_file_is_encoded_once(client: openai.OpenAI, server: LiveServer) -> None:
    counts = []
    for _ in range(2):
        asked(client, "json", wav(8, 5))
        counts.append([server.metric(f"mm_cache_{name}_total") for name in ("queries", "hits")])
    (queries, hits), (more_queries, more_hits) = counts
    assert more_queries - queries == more_hits - hits > 0


def test_the_requests_of_a_transcription_are_in_all_metrics(client: openai.OpenAI, server: LiveServer) -> None:
    names = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_generation_tokens")
    before = {name: server.metric(f"{name}_count") for name in names}
    tokens = server.metric("generation_tokens_total"), server.metric("request_generation_tokens_sum")
    asked(client, "json", wav(8, 5))
    after = {name: server.metric(f"{name}_count") for name in names}
    assert {after[name] - before[name] for name in names} != {0}
    assert after["e2e_request_latency_seconds"] - before["e2e_request_latency_seconds"] >= 1
    more = server.metric("generation_tokens_total") - tokens[0]
    assert more == server.metric("request_generation_tokens_sum") - tokens[1] > 0


def test_the_log_and_the_header_tell_what_a_transcription_took(client: openai.OpenAI, server: LiveServer) -> None:
    tokens = server.metric("generation_tokens_total")
    model, headers = client.models.list().data[0].id, {"X-Return-Timings": "1", "X-Request-Id": "timed"}
    raw = client.audio.transcriptions.with_raw_response.create(
        model=model, file=("a.wav", SOUND), extra_headers=headers
    )
    shown = dict(re.findall(r"(\w+)=([^ ,]+)", server.logged("timed")))
    assert int(shown["output_tokens"]) == server.metric("generation_tokens_total") - tokens > 0
    assert (shown["id"], shown["audio_s"], shown["finish_reason"]) == ("audio-timed", "40.0", "length")
    assert f"{shown['output_tokens']} tokens" in raw.headers["Server-Timing"]


@pytest.mark.parametrize("strategy", [openai.omit, "auto", {"type": "server_vad"}])
def test_a_stream_has_the_segments_and_ends_with_the_whole_text(client: openai.OpenAI, strategy: Any) -> None:
    events = list(asked(client, "json", stream=True, chunking_strategy=strategy))
    whole = asked(client, "json", chunking_strategy=strategy)
    assert [event.type for event in events] == [*["transcript.text.delta"] * (len(events) - 1), "transcript.text.done"]
    assert len(events) > 2
    assert events[-1].text == whole.text == "".join(event.delta for event in events[:-1]).strip()


def test_a_language_that_is_not_given_is_detected(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        model = client.models.list().data[0].id
        return client.audio.transcriptions.create(
            model=model, file=("a.wav", SOUND), response_format="verbose_json", **more
        )

    found = ask()
    others = {"english": "german", "german": "english"}
    assert found.segments == ask(language=found.language).segments
    assert found.segments != ask(language=others[found.language]).segments


def test_translation_goes_to_its_own_route(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    found = client.audio.translations.create(model=model, file=("a.wav", SOUND), response_format="verbose_json")
    assert found.segments
    assert (found.task, found.language) == ("translate", "english")


def test_encoder_outputs_are_shared_by_requests_of_the_same_key_only(server: LiveServer) -> None:
    sound, hits = wav(3, 77), []
    for key in ("x", "y", "x"):
        before = server.metric("mm_cache_hits_total")
        asked(openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0), "json", sound, temperature=0.5)
        hits.append(server.metric("mm_cache_hits_total") > before)
    assert hits == [False, False, True]


def test_errors_name_the_field(client: openai.OpenAI, server: LiveServer) -> None:
    def message(form: str = "json", **more: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            asked(client, form, **more)
        return str(caught.value)

    assert "response_format" in message("mp3")
    assert "expected segment or word, got 'line'" in message("verbose_json", timestamp_granularities=["line"])
    assert "take json" in message("verbose_json", timestamp_granularities=["word"], stream=True)
    assert "needs response_format=verbose_json" in message(timestamp_granularities=["segment"])
    assert "include[]" in message(include=["logprobs"])
    assert "take json" in message("srt", stream=True)
    vad = {"type": "server_vad"}
    assert "chunking_strategy[type]: expected server_vad, got 'x'" in message(chunking_strategy={"type": "x"})
    assert "chunking_strategy[threshold]: not" in message(chunking_strategy={**vad, "threshold": 0.5})
    assert "known_speaker_names[]: not" in message(known_speaker_names=["a"])
    assert "temperature" in message(temperature=3)
    assert "is a special token of the model" in message(prompt="so <|endoftext|>")
    assert "noise.wav' is not a sound file" in message(sound=b"#EXTM3U\nfile:///etc/passwd\n")
    assert "audio_s" in message(sound=wav(101, 0))
    assert "klingon" in message(extra_body={"language": "klingon"})
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="other", file=("a.wav", SOUND))
    status, answer = server.post("/v1/audio/transcriptions", {"model": "x"})
    assert (status, "multipart/form-data" in answer["error"]["message"]) == (400, True)


def form_of(*parts: tuple[str, str | None, bytes]) -> bytes:
    """Return a form of (name, file name, content)."""
    body = b""
    for name, file, content in parts:
        named = f'; filename="{file}"' if file is not None else ""
        body += f'--edge\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"
    return body + b"--edge--\r\n"


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"", "multipart/form-data", "oundary"),
        (b"no form", "multipart/form-data; boundary=edge", ""),
        (form_of(("model", None, b"x")), "multipart/form-data; boundary=edge", "file"),
        (form_of(("file", None, b"text")), "multipart/form-data; boundary=edge", "file"),
        (form_of(("file", "a", b"x"), ("file", "b", b"y")), "multipart/form-data; boundary=edge", "files"),
        (form_of(("file", "a", b"x"), ("prompt", None, b"x" * 70_000)), "multipart/form-data; boundary=edge", ""),
        (form_of(("file", "a", b"x"), ("prompt", None, b"x" * 20_000)), "multipart/form-data; boundary=edge", "prompt"),
        (form_of(("file", "a", b"x")), "multipart/form-data; boundary=edge; charset=utf-16", "charset"),
        (form_of(*[("x", None, b"")] * 40), "multipart/form-data; boundary=edge", "fields"),
        (form_of(("file", "a", b"x"), ("stream", None, b"maybe")), "multipart/form-data; boundary=edge", "stream"),
    ],
)
def test_malformed_forms_are_refused(server: LiveServer, body: bytes, content_type: str, message: str) -> None:
    status, answer = server.post("/v1/audio/transcriptions", body, **{"Content-Type": content_type})
    assert status == 400, answer
    assert message in answer["error"]["message"]


def test_an_upload_that_is_too_large_is_413_with_or_without_content_length(server: LiveServer) -> None:
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n"
    head += b"Content-Type: multipart/form-data; boundary=edge\r\n"
    assert b" 413 " in talk(server, head + b"Content-Length: 99999999\r\n\r\n", until=b" 413 ")
    begin = form_of(("file", "a.wav", b"")).removesuffix(b"\r\n--edge--\r\n")
    chunks = b"%x\r\n%s\r\n" % (len(begin), begin) + (b"100000\r\n" + b"x" * 0x100000 + b"\r\n") * 17 + b"0\r\n\r\n"
    assert b" 413 " in talk(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, until=b" 413 ")
    server.wait_idle()


def test_an_unknown_field_is_noted(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.with_raw_response.create(
        model=client.models.list().data[0].id, file=("a.wav", wav(1, 0)), extra_body={"speed": "2"}, language="en"
    )
    assert answer.headers["x-ignored-fields"] == "speed"


def test_a_client_that_leaves_frees_the_engine(client: openai.OpenAI, server: LiveServer) -> None:
    with server.steps.held_after(2):
        with pytest.raises(openai.APITimeoutError):
            asked(client, "json", timeout=3)
        server.wait_load(0)
    server.wait_idle()


def test_an_abort_by_id_ends_a_transcription(client: openai.OpenAI, server: LiveServer) -> None:
    def transcribe() -> None:
        asked(client, "json", extra_headers={"X-Request-Id": "talk"}, chunking_strategy="auto")

    with server.steps.held_after(2), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(transcribe)
        server.wait_load(1)
        deadline = time.monotonic() + 60
        while not (aborted := server.post("/abort_requests", {"request_ids": ["audio-talk"]})[1]["aborted"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(openai.BadRequestError, match="the transcription was aborted"):
            answer.result(60)
    assert aborted == ["audio-talk"]
    server.wait_idle()


def test_a_crash_of_the_engine_loses_no_transcription(client: openai.OpenAI, server: LiveServer) -> None:
    """Killed in the middle of several: the same segments and words as without."""

    def ask(seed: int) -> Any:
        found = asked(client, "verbose_json", wav(40, seed), timestamp_granularities=["word"])
        return found.segments, found.words

    expected = [ask(seed) for seed in (21, 22)]
    server.steps.hold_after(12)
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ask, seed) for seed in (21, 22)]
        server.steps.wait_held()
        server.kill_engine()
        server.steps.release()
        assert [one.result(120) for one in answers] == expected


def test_a_model_of_text_refuses_sounds_by_name(fake_server: LiveServer) -> None:
    border = uuid.uuid4().hex
    body = f'--{border}\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n--{border}--\r\n'.encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={border}"}
    status, answer = fake_server.post("/v1/audio/transcriptions", body, **kind)
    assert (status, "serve a Whisper model" in json.dumps(answer)) == (400, True)
