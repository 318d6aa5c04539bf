"""Every quantisation of GGUF gives what the gguf package gives; the fast versions to the last bit."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from pagoda.loading.gguf_blocks import dequantize, dequantize_reference

QUANTISED = list(quants._type_traits)
NUM_VALUES = 3 * 256 * 7


def random_blocks(kind: GGMLQuantizationType, num_values: int) -> memoryview:
    """Any bytes are valid blocks: every code, and now and then a scale that is infinite or no number."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, num_values // block * block_bytes, dtype=np.uint8)
    return memoryview(bytearray(raw.tobytes()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*QUANTISED, GGMLQuantizationType.F16, GGMLQuantizationType.F32], ids=lambda k: k.name)
def test_same_bits_as_the_gguf_package(kind: GGMLQuantizationType, dtype: torch.dtype):
    data = random_blocks(kind, NUM_VALUES)
    shape = (NUM_VALUES // 256, 256)
    fast, slow = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    dequantize(data, kind, fast)
    dequantize_reference(data, kind, slow)
    truth = torch.from_numpy(quants.dequantize(np.frombuffer(data, np.uint8), kind).astype(np.float32)).view(shape)
    assert truth.isfinite().float().mean() > 0.5
    for values in (fast, slow):
        torch.testing.assert_close(values, truth.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_values_beyond_one_piece_land_in_their_places():
    values = np.random.default_rng(1).standard_normal((300, 4096), dtype=np.float32)
    data = memoryview(bytearray(quants.quantize(values, GGMLQuantizationType.Q4_1).tobytes()))
    out = torch.empty(values.shape)
    dequantize(data, GGMLQuantizationType.Q4_1, out)
    slow = torch.empty(values.shape)
    dequantize_reference(data, GGMLQuantizationType.Q4_1, slow)
    assert torch.equal(out, slow)


def test_types_without_dequantisation_are_refused_by_name():
    with pytest.raises(NotImplementedError):
        dequantize(random_blocks(GGMLQuantizationType.Q8_1, 256), GGMLQuantizationType.Q8_1, torch.empty(256))
