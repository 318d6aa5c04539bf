"""LoRA adapters of every architecture, in one batch, against PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from pagoda.core.request import LoraRef
from pagoda.kernels.native_ops import NativeOps
from pagoda.kernels.ops import Ops
from pagoda.loading.adapters.files import AdapterTargets, digest_of
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture
from pagoda.loading.model_files import identify
from pagoda.worker.adapters import AdapterLimits, AdapterStore
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.device_under_test import ON_CPU, DeviceUnderTest
from tests.models.adapters import LINEAR, RowsWithAdapters, add_adapter, logits_of, save_adapters
from tests.models.paged_runner import PagedRunner
from tests.models.tiny import VOCAB, make_model, save

F32 = torch.float32

# Every architecture, once; and what an adapter's settings may say.
EVERYTHING = [*LINEAR, "embed_tokens", "lm_head"]
ADAPTERS: dict[str, list[dict[str, object]]] = {
    "llama": [
        {"r": 4, "target_modules": EVERYTHING},
        {"r": 70, "use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 5.0}},
    ],
    "llama-tied-biased": [
        {"r": 8, "lora_bias": True, "target_modules": ["q_proj", "o_proj", "down_proj"]},
        {"r": 5, "target_modules": r".*layers\.[02]\.mlp\.(gate|up)_proj"},
        {"r": 6, "target_modules": ["embed_tokens"]},
    ],
    "mistral-window": [
        {"r": 16, "target_modules": "all-linear", "exclude_modules": ["v_proj"]},
        {"r": 2, "layers_to_transform": [0, 2], "layers_pattern": "layers", "target_modules": ["k_proj", "down_proj"]},
    ],
    "qwen2": [{"r": 16}, {"r": 33, "layers_to_transform": 1}],
    "qwen3": [{"r": 4, "target_modules": EVERYTHING}, {"r": 256}, {"r": 64}],
    "mixtral": [{"r": 8, "target_modules": ["q_proj", "v_proj"]}, {"r": 9, "target_modules": ["lm_head"]}],
    # PEFT turns targets named like an expert's into target_parameters, which are refused.
    "qwen3-moe-some-layers": [{"r": 8, "target_modules": ["q_proj", "v_proj"]}, {"r": 4, "target_modules": ["o_proj"]}],
    "olmoe": [{"r": 8, "target_modules": ["k_proj", "o_proj"]}],
    # Rows that are stored head by head, that are turned in part or in pairs of neighbours; transposed matrices.
    "gpt-neox": [{"r": 8, "lora_bias": True, "target_modules": ["query_key_value", "dense", "dense_4h_to_h"]}],
    "gpt2": [{"r": 8, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}],
    "phi3": [{"r": 8, "target_modules": ["qkv_proj", "gate_up_proj"]}],
    "cohere": [{"r": 8, "target_modules": ["q_proj", "k_proj", "down_proj"]}],
    "gemma3": [{"r": 8, "target_modules": EVERYTHING}, {"r": 16}],
    "olmo2": [{"r": 8}],
    "deepseek-v3": [{"r": 8, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}],
    "glm4": [{"r": 8, "target_modules": ["q_proj", "k_proj", "gate_up_proj"]}],
    "granite": [{"r": 8, "target_modules": EVERYTHING}],
    "lfm2": [
        {"r": 8, "target_modules": ["in_proj", "out_proj", "w1", "w3"]},
        {"r": 4, "target_modules": ["k_proj", "w2"]},
    ],
    "mamba2": [{"r": 8, "target_modules": ["in_proj"]}],  # PEFT refuses out_proj
    "granite4-dense": [
        {"r": 8, "target_modules": ["in_proj", "out_proj", "input_linear"]},
        {"r": 4, "target_modules": ["k_proj", "output_linear"]},
    ],
    # The query alternates with its gate, and the projections of the delta rule with each other.
    "qwen3-next": [
        {"r": 8, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]},
        {"r": 4, "target_modules": ["q_proj", "k_proj"]},
    ],
    "qwen3.5": [{"r": 8, "target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_a", "q_proj", "down_proj"]}],
    "bamba": [{"r": 8, "target_modules": ["in_proj", "out_proj", "q_proj", "gate_proj", "down_proj"]}],
    "falcon-h1": [{"r": 8, "target_modules": ["in_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]}],
    "nemotron-h": [{"r": 8, "target_modules": ["in_proj", "q_proj", "o_proj"]}],
    "gemma4-moe": [
        {"r": 8, "target_modules": ["q_proj", "o_proj", "gate_proj"]},
        {"r": 4, "target_modules": ["down_proj"]},
    ],
    "llama4": [
        {"r": 8, "target_modules": ["q_proj", "o_proj"]},
        {"r": 4, "target_modules": r".*shared_expert\.(gate|down)_proj"},
    ],
    "llama4-dense-layers": [{"r": 8, "target_modules": ["k_proj", "up_proj"]}],
    "gemma3-multimodal": [{"r": 8, "target_modules": r".*language_model.*(q_proj|down_proj)"}],
}


class Adapted:
    """A tiny model with adapters, in PEFT's form and in ours."""

    def __init__(self, name: str, folder: Path) -> None:
        base = make_model(name)
        self.path = save(base, folder / "model")
        theirs: PeftModel | None = None
        for index, config in enumerate(ADAPTERS[name]):
            theirs = add_adapter(theirs or base, f"a{index}", seed=index, **config)
        assert theirs is not None
        self.theirs = theirs
        self.adapters = save_adapters(self.theirs, folder / "adapters")

    def load(self, ops: Ops, device: torch.device, replayed: bool = False) -> tuple[ForwardRunner, AdapterStore]:
        files = identify(self.path)
        architecture, _ = read_architecture(files)
        model = load_model(files, ops, F32, device)
        targets = AdapterTargets(architecture, model)
        store = AdapterStore(model, targets, ops, F32, device, AdapterLimits(8, 256))
        if replayed:
            assert isinstance(ops, NativeOps)
            return ForwardRunner(model, ops, tables=store.tables, recorder=Programs(ops, store.tables)), store
        return ForwardRunner(model, ops, tables=store.tables), store

    def slot(self, store: AdapterStore, name: str) -> int:
        folder = self.adapters[name]
        lora = LoraRef(name, str(folder), digest_of(folder))
        store.load(lora)
        return store.acquire(lora)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_batch_of_all_adapters_and_none_equals_peft(name: str, tmp_path: Path, on: DeviceUnderTest) -> None:
    on.must_compute(name)
    adapted = Adapted(name, tmp_path)
    forward, store = adapted.load(on.ops("auto"), on.device)
    users = [None, *adapted.adapters, None, *adapted.adapters]
    slots = [0 if user is None else adapted.slot(store, user) for user in users]
    prompts = [[(7 * row + 3 * at) % (VOCAB - 3) + 3 for at in range(5 + 3 * row)] for row in range(len(users))]
    rows: Any = RowsWithAdapters(forward, slots)
    runner = PagedRunner(rows, len(users), 40, F32, block_size=8, device=on.device)
    runner.hidden([(row, 0, prompt[:-1]) for row, prompt in enumerate(prompts)])
    got = runner.logits([(row, len(prompt) - 1, prompt[-1:]) for row, prompt in enumerate(prompts)])
    plain = [logits_of(adapted.theirs, None, prompt)[-1] for prompt in prompts]
    for row, (user, prompt) in enumerate(zip(users, prompts, strict=True)):
        want = logits_of(adapted.theirs, user, prompt)[-1]
        torch.testing.assert_close(got[row], want, atol=2e-4, rtol=2e-4)
        if user is not None:
            assert (want - plain[row]).abs().max() > 0.02, "the adapter changes nothing"


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gemma3"])
def test_a_recorded_forward_has_the_bits_of_its_ops(name: str, tmp_path: Path) -> None:
    adapted = Adapted(name, tmp_path)
    ops = ON_CPU.ops("auto")
    if not isinstance(ops, NativeOps):
        pytest.skip("no native kernels")
    found = []
    for replayed in (False, True):
        forward, store = adapted.load(ops, ON_CPU.device, replayed)
        slots = [0, adapted.slot(store, "a0"), 0]
        prompts = [[5 + row + at for at in range(4 + row)] for row in range(3)]
        runner = PagedRunner(RowsWithAdapters(forward, slots), 3, 40, F32, block_size=8)  # type: ignore[arg-type]
        results = [runner.logits([(row, 0, prompt) for row, prompt in enumerate(prompts)])]
        slots[2] = adapted.slot(store, "a1")  # adapts other layers, so the forward is recorded again
        runner.model = RowsWithAdapters(forward, slots)  # type: ignore[assignment]
        results.append(runner.logits([(row, len(prompt), [9]) for row, prompt in enumerate(prompts)]))
        runner.model = RowsWithAdapters(forward, slots[2:])  # type: ignore[assignment]
        results.append(runner.logits([(2, 0, prompts[2])]))
        found.append(torch.cat(results))
        if isinstance(forward.recorder, Programs):
            assert all(program is not None for program in forward.recorder._programs.values())
    assert torch.equal(found[0], found[1])
