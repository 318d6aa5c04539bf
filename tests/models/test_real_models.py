"""Real weights answer what transformers answers, which reads the same GGUF with its own code.

Of SmolLM2, tests/parity shows it quickly, through the whole engine.
"""

import pytest
import torch

from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.loading.loader import load_model
from pagoda.loading.model_files import ModelFiles
from pagoda.worker.forward_runner import ForwardRunner
from tests.cached_models import cached_model, transformers_model
from tests.device_under_test import DeviceUnderTest
from tests.models.paged_runner import PagedRunner, generate

TEXTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "In 1969, the first human",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "Q: Why is the sky blue?\nA:",
    "To make bread you need flour,",
    "Der schnelle braune Fuchs",
    "The opposite of hot is",
    "SELECT name FROM users WHERE",
    "A haiku about autumn:\n",
    "My favourite book is about",
    "The largest planet in the solar system",
    "import numpy as np\n",
    "If all cats are animals and Tom is a cat, then",
    "Thank you for",
    "The history of the Roman Empire begins with the founding of the city, which according to legend was the work of "
    "two brothers who had been raised by a wolf. Over the centuries it grew from a village to",
]


def prompts_of(files: ModelFiles, texts: list[str]) -> list[list[int]]:
    tokenizer = load_tokenizer(files)
    return [list(tokenizer.encode(text)) for text in texts]


def disagreements(files: ModelFiles, texts: list[str], num_tokens: int, chunk: int, on: DeviceUnderTest) -> list[str]:
    """Texts where transformers, given our answer up to some token, would not greedily have given that token next.

    None at all means, by induction, that its own greedy answer is the same.
    """
    ops = on.ops("auto")
    model = ForwardRunner(load_model(files, ops, torch.float32, on.device, "none", num_positions=2048), ops)
    prompts = prompts_of(files, texts)
    longest = max(len(prompt) for prompt in prompts)
    runner = PagedRunner(model, len(prompts), longest + num_tokens, torch.float32, 16, on.device)
    wrong = []
    for text, prompt, answer in zip(texts, prompts, generate(runner, prompts, num_tokens, chunk), strict=True):
        scores = transformers_model(files)(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        if scores.argmax(-1).tolist() != answer:
            wrong.append(text)
    return wrong


@pytest.mark.slow
@torch.inference_mode()
def test_smollm2_answers_as_transformers_does(on: DeviceUnderTest):
    assert disagreements(cached_model("smollm2-135m"), TEXTS[:4], 24, chunk=5, on=on) == []


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, 64])
@torch.inference_mode()
def test_smollm2_answers_to_many_prompts(chunk: int, on: DeviceUnderTest):
    assert disagreements(cached_model("smollm2-135m"), TEXTS, 64, chunk, on) == []


@pytest.mark.slow
@torch.inference_mode()
def test_gemma3_270m_answers_as_transformers_does(on: DeviceUnderTest):
    assert disagreements(cached_model("gemma3-270m"), TEXTS[:6], 32, chunk=7, on=on) == []


@pytest.mark.slow
@torch.inference_mode()
def test_gemma3_270m_past_its_window(on: DeviceUnderTest):
    """A prompt longer than the 512 tokens that most of its layers see."""
    text = " ".join(f"Chapter {n}: {line.strip()} ..." for n, line in enumerate(TEXTS * 4))
    assert len(prompts_of(cached_model("gemma3-270m"), [text])[0]) > 800
    assert disagreements(cached_model("gemma3-270m"), [text], 16, chunk=300, on=on) == []
