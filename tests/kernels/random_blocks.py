"""Random blocks of GGUF types."""

import numpy as np

from pagoda.kernels.linear.forms import BLOCK_TYPES


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, unit: float = 0.01) -> np.ndarray:
    """Return blocks of random codes: uint8 [rows, bytes of a row].

    unit: the standard deviation of the scales that are float16, to which the values are in proportion.
    """
    rng = np.random.default_rng(seed)
    of = BLOCK_TYPES[kind]
    blocks = rng.integers(0, 256, (rows * columns // of.num_values, of.num_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # an exponent
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
        return blocks.reshape(rows, -1)
    for at in (of.scale, of.minimum):
        if at is None:
            continue
        scales = rng.normal(0, unit, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)
