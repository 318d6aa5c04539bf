"""Write a random LoRA adapter for a model, as PEFT writes adapters.

    python benchmarks/make_random_adapter.py FOLDER --model smollm2-135m --rank 16

Equal arguments give the same bytes.
"""

import argparse
import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pagoda.base.config import ModelConfig
from pagoda.loading.adapters.files import AdapterTargets
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.resolve import resolve_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    files: ModelFiles,
    rank: int,
    seed: int,
    modules: Collection[str] = LINEAR,
    layers: Collection[int] | None = None,
    size: float = 0.5,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    modules: what it adapts, by the last part of the name.   layers: only of these layers.
    size: what it adds to a layer's outputs, as a fraction of the layer's normalised inputs.
    """
    architecture, config = read_architecture(files)
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for path, target in AdapterTargets(architecture, architecture.model(config)).targets.items():
        layer = next((int(part) for part in path.split(".") if part.isdigit()), None)
        if path.rpartition(".")[2] not in modules or (None not in (layer, layers) and layer not in (layers or ())):
            continue
        words = ("lora_embedding_A", "lora_embedding_B") if target.is_embedding else ("lora_A.weight", "lora_B.weight")
        scale = 1.0 if target.is_embedding else target.inputs**-0.5
        shapes = ((rank, target.inputs, scale), (len(target.rows), rank, size * rank**-0.5))
        for word, (rows, columns, factor) in zip(words, shapes, strict=True):
            weight = rng.standard_normal((rows, columns), np.float32) * np.float32(factor)
            tensors[f"base_model.model.{path}.{word}"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make_adapter(given.folder, resolve_model(ModelConfig(model=given.model)), given.rank, given.seed)


if __name__ == "__main__":
    main()
