"""Random LoRA and prompt adapters for any model, without PEFT."""

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.make_random_adapter import LINEAR, make_adapter
from pagoda.core.request import LoraRef
from pagoda.loading.adapters.files import digest_of
from pagoda.loading.model_files import ModelFiles, identify

EVERYTHING = (*LINEAR, "embed_tokens", "lm_head")


def write_adapter(
    folder: Path,
    model: Path | ModelFiles,
    rank: int,
    seed: int,
    modules: Collection[str] = LINEAR,
    layers: Collection[int] | None = None,
) -> LoraRef:
    """Write an adapter that changes the model's outputs."""
    files = model if isinstance(model, ModelFiles) else identify(model)
    make_adapter(folder, files, rank, seed, modules, layers, size=0.7)
    return LoraRef(folder.name, str(folder), digest_of(folder))


def write_prompt_adapter(folder: Path, num_virtual_tokens: int, hidden_size: int, seed: int) -> None:
    """Write a random prompt adapter."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": num_virtual_tokens, "token_dim": hidden_size}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    values = np.random.default_rng(seed).normal(size=(num_virtual_tokens, hidden_size)).astype(np.float32)
    save_file({"prompt_embeddings": values}, folder / "adapter_model.safetensors")
