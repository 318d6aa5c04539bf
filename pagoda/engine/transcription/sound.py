"""Read a sound file from memory: 16 kHz mono samples, within bounds that hold before and while it is decoded.

`log_mel` makes of them what Whisper models read.
PyAV (the extra "audio") decodes. The file's first bytes choose one demuxer from a list, so that FFmpeg never guesses:
playlists, and formats that open other files, cannot be reached.
"""

import contextlib
import functools
import io
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits

SAMPLING_RATE = 16_000
"""Samples per second, as Whisper models read them."""
HELD_PER_SAMPLE = 8
"""Bytes in memory while one is transcribed: itself, and spectrograms (80 or 128 rows of 100 frames for 16,000)."""
FORMATS = ("wav", "mp3", "flac", "ogg", "m4a", "mp4", "webm")
"""What may be sent, by the usual endings of files."""

_MAX_CHANNELS = 8
_RATES = range(4_000, 192_001)
_LOUDEST = 2**20  # of samples that belong in [-1, 1]
_RAW_PER_SAMPLE = 12
"""Decoded numbers per sample of the result, on average: 96 kHz in stereo."""
_PCM = (
    *("alaw", "mulaw", "s8", "u8", "f32le", "f32be", "f64le", "f64be"),
    *(f"{kind}{bits}{order}" for kind in "su" for bits in (16, 24, 32) for order in ("le", "be")),
)
_CODECS = frozenset(
    {"mp3", "mp3float", "flac", "opus", "libopus", "vorbis", "aac", "alac", *(f"pcm_{name}" for name in _PCM)}
)
_OPTIONS = {
    "protocol_whitelist": "",  # of nested inputs, of which these formats have none
    "codec_whitelist": ",".join(sorted(_CODECS)),  # opening a file tries the decoders of all of its tracks
}


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound.   samples: float32 [n], 16 kHz, mono, in [-1, 1].   name: what errors call it."""

    samples: np.ndarray
    name: str

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLING_RATE


def _never() -> bool:
    return False


def read_sound(
    data: bytes | memoryview, name: str, limits: RequestLimits, is_left: Callable[[], bool] = _never
) -> Sound:
    """Decode the first sound track of a file.   name: what errors call the file.   is_left: the caller has gone.

    Raises RequestError that names the file, for one of another format, that is corrupt, empty or beyond
    `limits.audio_s` or `limits.audio_bytes`, if PyAV is not installed, and once `is_left`.
    """
    limits.check("audio_bytes", len(data), "file")
    with _opened(data, name) as (av, container, label):
        pieces = list(_samples(av, container, label, limits, is_left))
    if not pieces:
        raise RequestError(f"{label} has no sound in it", "file")
    samples = np.concatenate(pieces)
    _check_samples(samples, label)
    return Sound(samples, name)


def claimed_bytes(data: bytes | memoryview, name: str, limits: RequestLimits) -> int:
    """Return how many bytes a file will take while it is transcribed, as it says itself; if it does not, its size.

    Raises RequestError as `read_sound` does, for what can be seen without decoding.
    """
    with _opened(data, name) as (av, container, _):
        seconds = _claimed_s(av, container, limits)
    return len(data) if seconds is None else seconds * SAMPLING_RATE * HELD_PER_SAMPLE


@contextlib.contextmanager
def _opened(data: bytes | memoryview, name: str) -> Generator[tuple[Any, Any, str], None, None]:
    """Open a file; yield PyAV, its container, and what errors call it. FFmpeg's errors become a RequestError."""
    label = f"file {abbreviate(name)}"
    demuxer = _demuxer(bytes(data[:64]))
    if demuxer is None:
        raise RequestError(f"{label} is not a sound file of a known format; send {', '.join(FORMATS)}", "file")
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise RequestError(
            f"{label} cannot be decoded: PyAV is not installed here; install it with pip install av",
            "file",
        ) from None
    try:
        with av.open(io.BytesIO(data), format=demuxer, options=_OPTIONS, metadata_errors="ignore") as container:
            yield av, container, label
    except (FFmpegError, ValueError) as error:  # ValueError: its format changes within the track
        raise RequestError(f"{label} cannot be decoded as {demuxer}: {abbreviate(str(error))}", "file") from None


def load_sound(given: Any, name: str, limits: RequestLimits, is_left: Callable[[], bool] = _never) -> Sound:
    """Return a sound that a program gives: a path, the bytes of a file, or samples; see `read_sound`."""
    if isinstance(given, str | Path):
        try:
            with Path(given).open("rb") as file:
                limits.check("audio_bytes", os.fstat(file.fileno()).st_size, "file")
                given = file.read(limits.audio_bytes + 1)  # a pipe has no size
        except OSError as error:
            raise RequestError(f"file {abbreviate(name)} cannot be read: {error.strerror}", "file") from None
    return read_sound(given, name, limits, is_left) if isinstance(given, bytes) else as_sound(given, name, limits)


def as_sound(samples: Any, name: str, limits: RequestLimits) -> Sound:
    """Return samples (16 kHz, mono, in [-1, 1]) as a Sound. Raises RequestError for what is not, or is too long."""
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype.kind != "f" or not len(array):
        raise RequestError(
            f"{name}: expected a one-dimensional array of floats, 16,000 samples per second (got "
            f"{array.dtype} {list(array.shape)})",
            "file",
        )
    limits.check("audio_s", -(-len(array) // SAMPLING_RATE), "file")
    found = np.ascontiguousarray(array, np.float32)
    _check_samples(found, name)
    return Sound(found, name)


def _check_samples(samples: np.ndarray, label: str) -> None:
    """Raise RequestError for samples of which no finite spectrogram can be made: files may have floats, too."""
    if not (samples.min() >= -_LOUDEST and samples.max() <= _LOUDEST):  # neither is true of NaN
        raise RequestError(f"{label}: samples must be finite numbers, of at most {_LOUDEST}", "file")


_MAGIC: Mapping[bytes, str] = {b"fLaC": "flac", b"OggS": "ogg", b"\x1a\x45\xdf\xa3": "matroska", b"ID3": "mp3"}


def _demuxer(head: bytes) -> str | None:
    """Return the demuxer for a file that begins with these bytes; None for one that is not on the list."""
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mp4"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:  # a frame of MPEG layer 3
        return "mp3"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def _claimed_s(av: Any, container: Any, limits: RequestLimits) -> int | None:
    """Return the seconds that a file says it has, if it does. Raises RequestError beyond `limits.audio_s`."""
    if container.duration is None:
        return None
    seconds = max(-(-container.duration // av.time_base), 0)
    limits.check("audio_s", seconds, "file")
    return seconds


def _samples(
    av: Any, container: Any, label: str, limits: RequestLimits, is_left: Callable[[], bool]
) -> Iterator[np.ndarray]:
    """Yield the track's samples, resampled. Raises RequestError beyond the bounds."""
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise RequestError(f"{label} has no sound track", "file")
    codec = stream.codec_context
    name = "unknown" if codec is None else codec.name
    if codec is None or name not in _CODECS:
        raise RequestError(f"{label}: its codec {abbreviate(name)} is not supported; convert it to wav", "file")
    if codec.sample_rate not in _RATES or not 1 <= codec.channels <= _MAX_CHANNELS:
        raise RequestError(
            f"{label} has {codec.channels} channels of {codec.sample_rate} Hz; at most {_MAX_CHANNELS} of "
            f"{_RATES.start} to {_RATES.stop - 1} Hz are supported",
            "file",
        )
    _claimed_s(av, container, limits)  # what is decoded is counted, too
    codec.thread_count = 1
    resampler = av.AudioResampler(format="fltp", rate=SAMPLING_RATE)
    num_samples = num_raw = 0
    most = limits.audio_s * SAMPLING_RATE
    for frame in container.decode(stream):
        if is_left():
            raise RequestError(f"{label}: its caller has gone", "file")
        num_raw += frame.samples * codec.channels
        limits.check("audio_s", -(-num_raw // (_RAW_PER_SAMPLE * SAMPLING_RATE)), "file")
        for piece in resampler.resample(frame):
            num_samples += piece.samples
            yield piece.to_ndarray().mean(axis=0)  # FFmpeg's own mixing makes equal channels louder
        if num_samples > most:
            limits.check("audio_s", -(-num_samples // SAMPLING_RATE), "file")
    for piece in resampler.resample(None) if num_raw else ():
        yield piece.to_ndarray().mean(axis=0)


# ---- the log-mel spectrogram, as transformers' WhisperFeatureExtractor computes it


WINDOW_S = 30
"""Seconds that the encoder reads at once; what is shorter is padded with silence."""
FRAMES_PER_S = 100
WINDOW_FRAMES = WINDOW_S * FRAMES_PER_S

HOP = SAMPLING_RATE // FRAMES_PER_S
"""Samples per frame."""
_FFT = 400
_FLOOR = 1e-10
_RANGE = 8.0  # powers of ten below the loudest frame that are kept
_BLOCK = 4096  # frames whose spectra are in memory at once


def log_mel(samples: np.ndarray, num_mels: int) -> np.ndarray:
    """Return the spectrogram of a whole sound: float32 [num_mels, frames], 100 frames per second, 3000 at least.

    samples: float32 [n], 16 kHz. Less than 30 s are padded with silence; longer sounds keep their length.
    Raises RequestError for samples that are not finite, or so large that the spectrogram is not.
    """
    padded = np.pad(samples, (0, max(0, WINDOW_S * SAMPLING_RATE - len(samples))))
    num_frames = len(padded) // HOP
    around = np.pad(padded, _FFT // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, _FFT)[::HOP]
    hann = np.hanning(_FFT + 1)[:-1].astype(np.float32)
    filters = _filters(num_mels)
    found = np.empty((num_mels, num_frames), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
        for begin in range(0, num_frames, _BLOCK):
            end = min(begin + _BLOCK, num_frames)
            spectrum = np.fft.rfft(windows[begin:end] * hann)
            power = np.square(spectrum.real) + np.square(spectrum.imag)
            found[:, begin:end] = filters.T @ power.T.astype(np.float32, copy=False)
    np.log10(np.maximum(found, _FLOOR, out=found), out=found)
    loudest = found.max()
    if not np.isfinite(loudest):  # NaN and infinity show in the maximum
        raise RequestError("the sound has samples that are no finite numbers in [-1, 1]", "file")
    np.maximum(found, loudest - _RANGE, out=found)
    found += 4.0
    found /= 4.0
    return found


@functools.cache
def _filters(num_mels: int) -> np.ndarray:
    """Return triangular filters between 0 and 8 kHz, equally spaced on Slaney's mel scale: float32 [201, num_mels]."""
    frequencies = np.linspace(0, SAMPLING_RATE / 2, _FFT // 2 + 1)
    edges = _hertz(np.linspace(0, _mels(SAMPLING_RATE / 2), num_mels + 2))
    rising = (frequencies[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies[:, None]) / np.diff(edges)[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * (2 / (edges[2:] - edges[:-2]))).astype(np.float32)  # equal energy per filter


# Slaney's scale: 200/3 Hz per mel up to 1 kHz, then 27 mels per factor of 6.4.
_LINEAR_HZ, _KNEE_HZ, _LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


def _mels(hertz: float) -> float:
    return _KNEE_HZ / _LINEAR_HZ + np.log(hertz / _KNEE_HZ) / _LOG_STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    knee = _KNEE_HZ / _LINEAR_HZ
    return np.where(mels < knee, mels * _LINEAR_HZ, _KNEE_HZ * np.exp(_LOG_STEP * (mels - knee)))
