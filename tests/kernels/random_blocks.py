"""Random blocks of GGUF types."""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's float16 scales are: at its beginning in other types, and a minimum after it."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, unit: float = 0.01) -> np.ndarray:
    """Return blocks of random codes: uint8 [rows, bytes of a row].

    unit: the standard deviation of the scales that are float16, to which the values are in proportion.
    """
    rng = np.random.default_rng(seed)
    values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * columns // values, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":  # an exponent
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
        return blocks.reshape(rows, -1)
    for at in SCALES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        scales = rng.normal(0, unit, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)
