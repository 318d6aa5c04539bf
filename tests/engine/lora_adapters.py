"""Random LoRA adapters for any model, without PEFT."""

from collections.abc import Collection
from pathlib import Path

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
