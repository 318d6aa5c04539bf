import contextlib
import io
import os
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.engine.transcription.sound import (
    HELD_PER_SAMPLE,
    SAMPLING_RATE,
    as_sound,
    claimed_bytes,
    load_sound,
    read_sound,
)
from tests.engine.transcription.sounds import encoded, tone

LIMITS = RequestLimits()
KINDS = [
    ("wav", "pcm_s16le", 16_000),
    ("wav", "pcm_f32le", 44_100),
    ("mp3", "libmp3lame", 44_100),
    ("flac", "flac", 22_050),
    ("ogg", "libopus", 48_000),
    ("mp4", "aac", 44_100),
    ("ipod", "alac", 16_000),
    ("webm", "libopus", 48_000),
]


@pytest.fixture(autouse=True)
def _av():
    pytest.importorskip("av")


def wav_header(num_bytes: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 16_000, num_bytes // 2, "NONE", ""))
        output.writeframes(bytes(num_bytes))
    return file.getvalue()


@pytest.mark.parametrize(("container", "codec", "rate"), KINDS)
@pytest.mark.parametrize("channels", [1, 2])
def test_every_listed_format_becomes_16_khz_mono(container: str, codec: str, rate: int, channels: int) -> None:
    expected = tone(1.5)
    found = read_sound(encoded(tone(1.5, rate=rate), container, codec, rate, channels), "a.sound", LIMITS)
    assert found.samples.dtype == np.float32
    assert abs(found.duration_s - 1.5) < 0.1  # lossy codecs pad their ends
    both = np.zeros((2, SAMPLING_RATE * 2), np.float32)
    both[0, : len(expected)], both[1, : len(found.samples)] = expected, found.samples
    overlap = np.abs(np.fft.rfft(both)).prod(axis=0).argmax() / 2
    assert abs(overlap - 440) < 2
    assert 0.4 < np.abs(found.samples).max() < 0.6


def test_16_khz_pcm_keeps_its_samples() -> None:
    expected = tone(0.5)
    found = read_sound(encoded(expected, "wav", "pcm_f32le"), "a.wav", LIMITS)
    assert np.array_equal(found.samples, expected)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello, this is no sound",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:5\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\n",
    ],
)
def test_playlists_and_unknown_formats_are_refused_before_they_are_parsed(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"file 'list.wav' is not a sound file of a known format; send wav, mp3"):
        read_sound(data, "list.wav", LIMITS)


@pytest.mark.parametrize(("container", "codec", "rate"), KINDS)
def test_damaged_files_are_a_request_error(container: str, codec: str, rate: int) -> None:
    whole = encoded(tone(1, rate=rate), container, codec, rate)
    rng = np.random.default_rng(0)
    for _ in range(8):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[rng.integers(12, len(damaged), 40)] = rng.integers(0, 256, 40)
        for data in (damaged.tobytes(), whole[: rng.integers(8, len(whole))]):
            with contextlib.suppress(RequestError):
                assert read_sound(data, "a.sound", LIMITS).duration_s < 60


def test_a_long_file_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RequestError, match=r"11 seconds of sound .* more than the limit of 10 \(audio_s\)"):
        read_sound(wav_header(2 * 16_000 * 11), "long.wav", RequestLimits(audio_s=10))


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    limits, file, pipe = RequestLimits(audio_bytes=100), tmp_path / "large.wav", tmp_path / "pipe"
    with file.open("wb") as sparse:
        sparse.truncate(2**34)
    with pytest.raises(RequestError, match=r"17179869184 bytes .* more than the limit of 100 \(audio_bytes\)"):
        load_sound(file, "large.wav", limits)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(pipe.write_bytes, wav_header(200))
        with pytest.raises(RequestError, match=r"101 bytes .* more than the limit of 100 \(audio_bytes\)"):
            load_sound(pipe, "pipe", limits)
        written.result(10)
    with pytest.raises(RequestError, match="audio_bytes"):
        read_sound(wav_header(200), "a.wav", limits)


def test_a_file_that_hides_its_length_is_refused_while_it_is_decoded() -> None:
    data = encoded(tone(11, rate=48_000), "mp3", "libmp3lame", 48_000)
    stripped = data[data.index(b"\xff\xfb", 200) :]  # without the header that tells the duration
    with pytest.raises(RequestError, match=r"more than the limit of 3 \(audio_s\)"):
        read_sound(stripped, "long.mp3", RequestLimits(audio_s=3))


def test_a_file_claims_its_bytes_before_it_is_decoded() -> None:
    data = encoded(tone(2.5, rate=44_100), "mp3", "libmp3lame", 44_100)
    assert claimed_bytes(data, "a.mp3", LIMITS) == 3 * SAMPLING_RATE * HELD_PER_SAMPLE
    with pytest.raises(RequestError, match=r"more than the limit of 2 \(audio_s\)"):
        claimed_bytes(data, "a.mp3", RequestLimits(audio_s=2))
    with pytest.raises(RequestError, match="is not a sound file"):
        claimed_bytes(b"#EXTM3U", "a.mp3", LIMITS)
    stripped = encoded(tone(1, rate=48_000), "webm", "libopus", 48_000).replace(b"\x44\x89", b"\xec\x89")
    assert claimed_bytes(stripped, "a.webm", LIMITS) == len(stripped), "it does not tell its duration"


def test_nobody_decodes_for_those_who_left() -> None:
    asked: list[None] = []

    def is_left() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(RequestError, match="caller has gone"):
        read_sound(wav_header(10**6), "a.wav", LIMITS, is_left)
    assert len(asked) == 3


def test_a_file_without_samples_has_no_sound() -> None:
    with pytest.raises(RequestError, match="has no sound in it"):
        read_sound(wav_header(0), "empty.wav", LIMITS)


def test_a_missing_decoder_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"file 'a.wav' cannot be decoded: PyAV .* pip install av"):
        read_sound(wav_header(32), "a.wav", LIMITS)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_files_of_floats_of_which_no_spectrogram_can_be_made_are_refused(bad: float) -> None:
    samples = tone(0.5)
    samples[77] = bad
    with pytest.raises(RequestError, match=r"file 'a.wav': samples must be finite numbers"):
        read_sound(encoded(samples, "wav", "pcm_f32le"), "a.wav", LIMITS)


@pytest.mark.parametrize("samples", [np.zeros((2, 3), np.float32), np.zeros(0, np.float32), [1, 2], [float("nan")]])
def test_arrays_that_are_no_samples_are_refused(samples: object) -> None:
    with pytest.raises(RequestError, match=r"sounds\[3\]"):
        as_sound(samples, "sounds[3]", LIMITS)


def test_only_decoders_on_the_list_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import av

    given: list[dict[str, str]] = []
    opened = av.open

    def watched(*args: object, options: dict[str, str], **more: object) -> object:
        given.append(options)
        return opened(*args, options=options, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(av, "open", watched)
    read_sound(wav_header(3200), "a.wav", LIMITS)
    names = given[0]["codec_whitelist"].split(",")
    assert "pcm_s16le" in names
    assert not {"h264", "adpcm_ms", "ac3"} & set(names)
