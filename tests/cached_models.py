"""Real models for tests: from pagoda's own cache, where `pagoda pull` put them. Nothing is fetched here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
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


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """transformers reads a GGUF again for all that it wants of it, and makes the table of its names for each module.

    gguf's reader makes every slice one of a memory map, which is many times slower than one of an array.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    with (
        patch.object(gguf, "GGUFReader", cache(Reader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


def transformers_tokenizer(files: ModelFiles) -> Any:
    """The tokenizer of a GGUF as transformers reads it: the caller may change it."""
    from transformers import AutoTokenizer

    with _gguf_read_once():
        return AutoTokenizer.from_pretrained(files.path.parent, gguf_file=files.path.name)


@cache
def transformers_model(files: ModelFiles) -> "PreTrainedModel":
    """A GGUF as transformers reads it, in fp32: what ours is held against. It takes many seconds: tests share one."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Some tests train it, whatever mode the first to ask for it is in.
    with torch.inference_mode(False), _gguf_read_once():
        return AutoModelForCausalLM.from_pretrained(
            files.path.parent,
            gguf_file=files.path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
