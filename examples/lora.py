"""LoRA adapters: several fine-tuned versions of one loaded model, chosen per prompt and computed in one batch."""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pagoda import LLM, LoRARequest, SamplingParams

PROMPT = "The capital of France is"


def write_adapter(folder: Path, rank: int, seed: int) -> LoRARequest:
    """Write a random adapter of smollm2-135m, in place of one that PEFT has trained (`model.save_pretrained`)."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(30):
        module = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{module}.lora_A.weight"] = rng.normal(0, 0.04, (rank, 576)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.normal(0, 0.2, (576, rank)).astype(np.float32)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, seed, str(folder))


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [None, write_adapter(Path(folder, "first"), 8, 1), write_adapter(Path(folder, "second"), 16, 2)]
        with LLM("smollm2-135m", max_model_len=512, enable_lora=True) as llm:
            outputs = llm.generate([PROMPT] * 3, greedy, lora_request=adapters)
            for adapter, output in zip(adapters, outputs, strict=True):
                name = adapter.lora_name if adapter is not None else "base"
                print(f"{name}: {output.outputs[0].text!r}")

            # Load an adapter before it is needed, and free its memory again.
            llm.add_lora(adapters[1])
            print("removed:", llm.remove_lora(adapters[1].lora_int_id))


if __name__ == "__main__":
    main()
