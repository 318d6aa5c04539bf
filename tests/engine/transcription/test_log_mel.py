import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from pagoda.base.errors import RequestError
from pagoda.engine.transcription.sound import log_mel
from tests.engine.transcription.sounds import tone


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 3.21, 30, 47.7])
def test_it_is_what_transformers_computes(num_mels: int, seconds: float) -> None:
    samples = tone(seconds) + np.random.default_rng(0).normal(0, 0.01, int(16_000 * seconds)).astype(np.float32)
    options = {} if seconds <= 30 else {"truncation": False, "padding": "longest"}
    expected = WhisperFeatureExtractor(num_mels)(samples, sampling_rate=16_000, return_tensors="np", **options)
    found = log_mel(samples, num_mels)
    assert found.dtype == np.float32
    assert found.shape == expected.input_features[0].shape
    np.testing.assert_allclose(found, expected.input_features[0], atol=2e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    samples = tone(1.0)
    samples[5000] = value
    with pytest.raises(RequestError, match="no finite numbers"):
        log_mel(samples, 80)


def test_silence_is_a_flat_spectrogram() -> None:
    np.testing.assert_allclose(log_mel(np.zeros(16_000, np.float32), 80), np.full((80, 3000), -1.5), rtol=1e-6)
