"""Real models for tests: from pagoda's own cache, where `pagoda pull` put them. Nothing is fetched here."""

from functools import cache
from typing import TYPE_CHECKING

import pytest

from pagoda.base.config import ModelConfig
from pagoda.loading.catalog import CATALOG
from pagoda.loading.fetch_wheel import default_cache_dir, find_cached
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.resolve import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cached_model(name: str) -> ModelFiles:
    """The files of a catalog model; skips the test when they are not on this machine."""
    if find_cached(CATALOG[name].wheel, default_cache_dir()) is None:
        pytest.skip(f"{name} is not in the cache; fetch it with: pagoda pull {name}")
    return resolve_model(ModelConfig(model=name))


@cache
def transformers_model(files: ModelFiles) -> "PreTrainedModel":
    """A GGUF as transformers reads it, in fp32: what ours is held against. It takes many seconds: tests share one."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with torch.inference_mode(False):  # some tests train it, whatever mode the first to ask for it is in
        return AutoModelForCausalLM.from_pretrained(
            files.path.parent,
            gguf_file=files.path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
