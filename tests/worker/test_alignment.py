"""The median of neighbours; what is computed of a prompt is compared with transformers in tests/engine."""

import pytest
import torch
from transformers.models.whisper.generation_whisper import _median_filter

from pagoda.worker.alignment import emphasised, median_filter


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 4), (3, 7), (5, 50)])
def test_the_median_is_that_of_transformers(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    assert torch.equal(median_filter(x), _median_filter(x[None], 7)[0])


def test_weights_that_are_equal_for_all_tokens_tell_nothing() -> None:
    assert torch.equal(emphasised(torch.full((1, 9), 0.25)), torch.zeros(1, 9))
    assert torch.equal(emphasised(torch.full((3, 9), 0.0)), torch.zeros(3, 9))
