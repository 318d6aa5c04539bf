"""The log-mel spectrogram that Whisper models read, as transformers' WhisperFeatureExtractor computes it."""

import functools

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.engine.transcription.sound import SAMPLING_RATE

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
