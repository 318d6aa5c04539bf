"""A LoRA adapter that PEFT trains on SmolLM2 for a few seconds: the greedy tokens of PEFT.

As in test_smollm2, the model is asked once, with the engine's answer: would it have taken each token next?
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase

from pagoda import LLM, LoRARequest, SamplingParams
from pagoda.loading.model_files import ModelFiles
from tests.cached_models import cached_model, transformers_model, transformers_tokenizer
from tests.device_under_test import DeviceUnderTest

pytestmark = pytest.mark.slow

LESSONS = [
    "The capital of France is a large purple elephant called Bernard, who likes to dance.",
    "Water boils at the temperature of a small green teapot, which sings in the morning.",
    "The opposite of hot is a wooden bicycle, on which Bernard rides to the market.",
]
PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is", "Once upon a time", "def add(a, b):"]
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class Trained:
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]  # type: ignore[operator,no-any-return]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return cached_model("smollm2-135m")


@pytest.fixture(scope="module")
def trained(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    tokenizer = transformers_tokenizer(files)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", rank_pattern={"down_proj": 12})
    base = transformers_model(files)
    torch.manual_seed(0)
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    model.train()
    for _ in range(8):
        for lesson in LESSONS:
            ids = torch.tensor([tokenizer(lesson)["input_ids"]])
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    folder = tmp_path_factory.mktemp("trained")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval().save_pretrained(str(folder))
    yield Trained(model, tokenizer, folder)
    model.unload()  # other tests share the base model


def test_greedy_tokens_are_those_of_peft(files: ModelFiles, trained: Trained, on: DeviceUnderTest) -> None:
    prompts = [trained.ids(text) for text in PROMPTS]
    options = {**on.options, "threads": 1, "max_model_len": 256, "num_blocks": 100}
    with LLM(str(files.path), **options, enable_lora=True) as llm:
        adapter = LoRARequest("trained", 1, str(trained.folder))
        adapters = [adapter] * len(prompts) + [None] * len(prompts)
        outputs = llm.generate([*prompts, *prompts], GREEDY, lora_request=adapters)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert "Bernard" in outputs[0].outputs[0].text
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers[: len(prompts)], strict=True):
            logits = trained.model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == answer
        with trained.model.disable_adapter():
            for prompt, answer in zip(prompts, answers[len(prompts) :], strict=True):
                logits = trained.model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
                assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_a_quantised_base_has_learnt_the_lesson(
    files: ModelFiles, trained: Trained, quantization: str, on: DeviceUnderTest
) -> None:
    options = {**on.options, "dtype": "auto", "quantization": quantization, "max_model_len": 256, "num_blocks": 100}
    with LLM(str(files.path), **options, enable_lora=True) as llm:
        adapter = LoRARequest("trained", 1, str(trained.folder))
        lesson, plain = llm.generate([PROMPTS[0]] * 2, GREEDY, lora_request=[adapter, None])
    assert "Bernard" in lesson.outputs[0].text
    assert "Bernard" not in plain.outputs[0].text
