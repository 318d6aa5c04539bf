"""Prompt adapters, made by PEFT's prompt tuning: what PEFT gives, next to other requests, and what is refused."""

import asyncio
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from pagoda import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestError, SamplingParams
from tests.device_under_test import DeviceUnderTest
from tests.engine.byte_llama import SMALL_ENGINE, write_byte_llama
from tests.engine.lora_adapters import write_adapter

OPTIONS: dict[str, Any] = {**SMALL_ENGINE, "dtype": "float32", "enable_lora": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(10, 45))
HIDDEN = 192


def tuned(model: Path, folder: Path, num_virtual: int, seed: int) -> PeftModel:
    """Write a random prompt adapter as PEFT does; return PEFT's model with it."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_virtual)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        encoder: Any = peft.prompt_encoder
        weight = encoder.default.embedding.weight
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        peft.save_pretrained(str(folder))
    return peft.eval()


@torch.inference_mode()
def greedy(peft: PeftModel, prompt: list[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        known.append(int(peft(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LoRARequest, list[int]]]:
    """Two prompt adapters, and PEFT's answers to PROMPT."""
    root = tmp_path_factory.mktemp("adapters")
    found = {}
    for name, num_virtual, seed in (("a", 20, 1), ("b", 3, 2)):
        peft = tuned(model, root / name, num_virtual, seed)
        found[name] = LoRARequest(name, seed, str(root / name)), greedy(peft, PROMPT, 12)
    return found


@pytest.fixture(scope="module")
def llm(model: Path, on: DeviceUnderTest) -> Iterator[LLM]:
    with LLM(str(model), **on.engine(OPTIONS)) as llm:
        yield llm


def test_outputs_equal_pefts(llm: LLM, model: Path, adapters: Any, tmp_path: Path) -> None:
    """Several in one batch, next to a LoRA adapter and to none; again, from the prefix cache."""
    write_adapter(tmp_path / "lora", model, 4, 1)
    lora = LoRARequest("lora", 9, str(tmp_path / "lora"))
    (a, of_a), (b, of_b) = adapters.values()
    plain, of_lora = (llm.generate(PROMPT, GREEDY, lora_request=one)[0].outputs[0].token_ids for one in (None, lora))
    asked = [a, None, b, lora, a, b]
    outputs = llm.generate([PROMPT] * 6, GREEDY, lora_request=asked)
    expected = [of_a, plain, of_b, of_lora, of_a, of_b]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 4
    again = llm.generate(PROMPT, GREEDY, lora_request=a)[0]
    assert again.outputs[0].token_ids == of_a
    assert again.num_cached_tokens == 48  # of 20 + 35
    assert again.prompt_token_ids == [0] * 20 + PROMPT


def test_streams_beams_and_truncation(llm: LLM, adapters: Any) -> None:
    a, of_a = adapters["a"]
    deltas = llm.stream(PROMPT, GREEDY, lora_request=a)
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == of_a
    search = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    assert llm.beam_search(PROMPT, search, lora_request=a)[0].sequences[0].tokens[-12:] == of_a
    cut = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, truncate_prompt_tokens=10)
    short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outputs = [llm.generate(PROMPT, cut, lora_request=a)[0], llm.generate(PROMPT[-10:], short, lora_request=a)[0]]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert outputs[0].prompt_token_ids == [0] * 20 + PROMPT[-10:]


def test_embeddings_after_a_prompt_adapter(model: Path, adapters: Any, on: DeviceUnderTest) -> None:
    from safetensors.torch import load_file

    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    a, of_a = adapters["a"]
    with LLM(str(model), enable_prompt_embeds=True, **on.engine(OPTIONS)) as llm:
        output = llm.generate({"prompt_embeds": table[PROMPT]}, GREEDY, lora_request=a)[0]
        assert output.outputs[0].token_ids == of_a


def test_loading_by_name(llm: LLM, model: Path, adapters: Any, on: DeviceUnderTest) -> None:
    a, of_a = adapters["a"]
    assert llm.add_lora(a)
    assert llm.remove_lora(a.lora_int_id)
    assert not llm.remove_lora(a.lora_int_id)

    async def main() -> None:
        async with AsyncLLM(str(model), **on.engine(OPTIONS)) as other:
            assert await other.add_lora(a)
            outputs = [output async for output in other.generate(PROMPT, GREEDY, lora_request=a)]
            assert outputs[-1].outputs[0].token_ids == of_a
            assert await other.remove_lora(a.lora_int_id)

    asyncio.run(main())


def test_a_folder_whose_files_change_is_another_adapter(llm: LLM, adapters: Any, tmp_path: Path) -> None:
    shutil.copytree(adapters["a"][0].lora_path, tmp_path / "mine")
    mine = LoRARequest("mine", 5, str(tmp_path / "mine"))
    assert llm.generate(PROMPT, GREEDY, lora_request=mine)[0].outputs[0].token_ids == adapters["a"][1]
    shutil.rmtree(tmp_path / "mine")
    shutil.copytree(adapters["b"][0].lora_path, tmp_path / "mine")
    assert llm.generate(PROMPT, GREEDY, lora_request=mine)[0].outputs[0].token_ids == adapters["b"][1]


def changed(adapters: Any, folder: Path, **fields: object) -> LoRARequest:
    """The first adapter with other fields in its settings."""
    shutil.copytree(adapters["a"][0].lora_path, folder)
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**values, **fields}))
    return LoRARequest("bad", 7, str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "P_TUNING"}, "peft_type='P_TUNING' must be 'LORA' or 'PROMPT_TUNING'"),
        ({"peft_type": "PREFIX_TUNING"}, "peft_type='PREFIX_TUNING' must be"),
        ({"num_virtual_tokens": 19}, r"the shape \(20, 192\), expected \(19, 192\)"),
        ({"num_virtual_tokens": "20"}, "num_virtual_tokens='20' must be a positive integer"),
        ({"num_virtual_tokens": None}, "num_virtual_tokens=None must be"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules=2 is not supported"),
        ({"modules_to_save": ["score"]}, "modules_to_save=.* is not supported"),
        ({"something_new": 1}, "something_new=1 is not supported"),
    ],
)
def test_settings_that_are_not_applied_are_refused_by_name(
    llm: LLM, adapters: Any, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, GREEDY, lora_request=changed(adapters, tmp_path / "bad", **fields))


def test_files_that_do_not_fit_are_refused(llm: LLM, adapters: Any, tmp_path: Path) -> None:
    bad = changed(adapters, tmp_path / "bad")
    weights = tmp_path / "bad" / "adapter_model.safetensors"
    values = np.zeros((20, HIDDEN), np.float32)
    for tensors, message in (
        ({"prompt_embeddings": values[:, :-1].copy()}, r"expected \(20, 192\) for this model"),
        ({"prompt_embeddings": values * np.nan}, "not finite"),
        ({"other": values}, "its tensor is 'other'; expected 'prompt_embeddings'"),
        ({"prompt_embeddings": values, "more": values}, "2 tensors"),
    ):
        save_file(tensors, weights)
        with pytest.raises(RequestError, match=message):
            llm.add_lora(bad)
    weights.unlink()
    with pytest.raises(RequestError, match=r"no adapter_model\.safetensors"):
        llm.add_lora(bad)


def test_what_has_no_meaning_is_refused(llm: LLM, adapters: Any) -> None:
    a = adapters["a"][0]
    with pytest.raises(RequestError, match="prompt_logprobs: the prompt, or a prompt adapter, has embeddings"):
        llm.generate(PROMPT, SamplingParams(prompt_logprobs=1), lora_request=a)
    long = list(range(10, 120))
    assert llm.generate(long, SamplingParams(max_tokens=1))[0].error is None
    with pytest.raises(
        RequestError, match="length is 128 tokens .*takes 20 tokens of it. However, the prompt has 110 tokens"
    ):
        llm.generate(long, SamplingParams(max_tokens=1), lora_request=a)
