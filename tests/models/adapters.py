"""Random LoRA adapters, made and computed by PEFT, and a forward pass that gives rows of a batch their adapters."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from pagoda.kernels.batch import ForwardBatch, Input, KVLayer
from pagoda.layers.adapted_ops import ADAPTERS, LOGITS_ADAPTERS, OUTPUT_ADAPTERS
from pagoda.ops.declare import Domain
from pagoda.worker.forward_runner import Computed, ForwardRunner

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_adapter(model: PreTrainedModel | PeftModel, name: str, seed: int, **config: object) -> PeftModel:
    """Add a random adapter that changes the model's answers. config: of LoraConfig."""
    given = LoraConfig(**{"target_modules": LINEAR, "lora_alpha": 16, **config})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, PeftModel):
            model.add_adapter(name, given)
        else:
            model = get_peft_model(model, given, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and f".{name}" in key:
                size = 0.5 if parameter.dim() == 1 else 0.4 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model.eval()


def save_adapters(model: PeftModel, folder: Path) -> dict[str, Path]:
    """Write every adapter as PEFT does; return their folders by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder))
    return {name: folder / name for name in model.peft_config}


def logits_of(model: PeftModel, name: str | None, prompt: Sequence[int]) -> torch.Tensor:
    """PEFT's logits with one adapter, or with none: [tokens, vocab]."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        if name is None:
            with model.disable_adapter():
                return model(ids).logits[0]
        model.set_adapter(name)
        return model(ids).logits[0]


class RowsWithAdapters:
    """A ForwardRunner for PagedRunner: the i-th row of each batch uses slot slots[i]."""

    def __init__(self, forward: ForwardRunner, slots: Sequence[int]) -> None:
        self._forward, self._slots = forward, torch.tensor(slots, dtype=torch.int32)
        self.model = forward.model

    def run(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Computed:
        starts = batch.metadata[0].query_start
        tokens = self._slots.to(starts.device).repeat_interleave((starts[1:] - starts[:-1]).long())
        of_outputs = tokens[batch.outputs.index]
        inputs = {
            ADAPTERS: Input(tokens),
            OUTPUT_ADAPTERS: Input(of_outputs, Domain.OUTPUTS),
            LOGITS_ADAPTERS: Input(of_outputs[batch.logits_index], Domain.LOGITS),
        }
        return self._forward.run(replace(batch, inputs=inputs), kv)
