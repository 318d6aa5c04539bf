"""Sound files that tests make themselves."""

import io

import numpy as np

RATE = 16_000


def tone(seconds: float, hertz: float = 440.0, rate: int = RATE) -> np.ndarray:
    """Return a tone that swells and fades: float32 samples in [-1, 1]."""
    times = np.arange(int(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * times) * np.sin(np.pi * times / seconds)).astype(np.float32)


def encoded(samples: np.ndarray, container: str, codec: str, rate: int = RATE, channels: int = 1) -> bytes:
    """Return a file of these samples, in each channel, as PyAV writes it."""
    import av

    file = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels}c")
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.tile(samples, (channels, 1)), format="fltp", layout=layout)
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    return file.getvalue()
