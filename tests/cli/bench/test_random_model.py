from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.make_random_model import SHAPES, config_of, make, weights_of
from pagoda.base.sampling_params import SamplingParams
from pagoda.llm import LLM


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    make(SHAPES["tiny"], tmp_path, seed=4)
    written, again, other = (
        load_file(tmp_path / "model.safetensors"),
        weights_of(SHAPES["tiny"], 4),
        weights_of(SHAPES["tiny"], 5),
    )
    assert written.keys() == again.keys()
    assert all(torch.equal(written[name], again[name]) for name in written)
    assert not torch.equal(written["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_transformers_reads_it_as_pagoda_does(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make(SHAPES[name], tmp_path)
    text = "Bread, é"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer(text)["input_ids"]
    assert len(prompt) == len(text.encode())
    assert tokenizer.decode(prompt) == text
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    with LLM(str(tmp_path), dtype="float32", device="cpu", num_blocks=32, max_model_len=128) as llm:
        assert llm.llm_engine.input_processor.prompts.encode(text) == prompt
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        ours = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_a_random_model_are_consistent(name: str) -> None:
    config = config_of(SHAPES[name])
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0  # type: ignore[operator]
    assert config["vocab_size"] > config["eos_token_id"]  # type: ignore[operator]
