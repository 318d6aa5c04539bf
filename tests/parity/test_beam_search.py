"""Beam search in fp32: the tokens, order and scores of transformers' generate(num_beams=4)."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.loading.model_files import ModelFiles, identify
from tests.cached_models import transformers_model
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import drive, request
from tests.models.tiny import VOCAB, greedy, make_model, save
from tests.parity.test_smollm2 import Prompts, engine, files, prompts

__all__ = ["files", "prompts"]  # fixtures

WIDTH = 4
FEW = (0, 3, 8, 20, 21)  # with chats, whose answers end
OPTIONS = [
    BeamSearchOptions(early_stopping=True),
    BeamSearchOptions(early_stopping="never"),
    BeamSearchOptions(length_penalty=0.0, early_stopping="never"),
    BeamSearchOptions(length_penalty=-1.5),
    BeamSearchOptions(length_penalty=2.0, early_stopping=True),
]


def transformers_beams(
    model: PreTrainedModel, prompt: list[int], options: BeamSearchOptions, num_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Return transformers' outputs (without padding) and their scores, best first."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            do_sample=False,
            max_new_tokens=num_tokens,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            output_scores=True,
            return_dict_in_generate=True,
        )
    eos = model.generation_config.eos_token_id
    tokens = []
    for sequence in found.sequences[:, len(prompt) :].tolist():
        tokens.append(sequence[: sequence.index(eos) + 1] if eos in sequence else sequence)
    return tokens, found.sequences_scores.tolist()


def compare(
    files: ModelFiles,
    model: PreTrainedModel,
    prompts: Prompts,
    options: Sequence[BeamSearchOptions],
    num_tokens: int,
    device: DeviceUnderTest,
    max_model_len: int = 1024,
) -> list[list[int]]:
    """All prompts in one batch, each with the options at its place; return all outputs."""
    core = engine(files, device, max_num_batched_tokens=200, max_num_seqs=40, max_model_len=max_model_len)
    sampling = [
        SamplingParams(n=WIDTH, temperature=0, max_tokens=num_tokens, logprobs=0, beam_search=one) for one in options
    ]
    eos = model.generation_config.eos_token_id
    requests = [
        request(i, prompt, params, eos=(eos,)) for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    answers = drive(core, requests)
    core.shutdown()
    for i, (prompt, option) in enumerate(zip(prompts, options, strict=True)):
        tokens, scores = transformers_beams(model, prompt, option, num_tokens)
        assert [answers.tokens[f"r{i}", sequence] for sequence in range(WIDTH)] == tokens, (i, option)
        for sequence, score in enumerate(scores):
            total = sum(answers.logprobs[f"r{i}", sequence])
            theirs = score * len(tokens[sequence]) ** option.length_penalty
            assert total == pytest.approx(theirs, abs=1e-3), (i, option)
    return list(answers.tokens.values())


def test_beams_of_a_tiny_model(tmp_path: Path, device_under_test: DeviceUnderTest) -> None:
    """With all options, and an end of text that some of them come to."""
    model = make_model("llama").eval()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB, (5 + 3 * i,), generator=generator).tolist() for i in range(6)]
    model.generation_config.eos_token_id = greedy(model, prompts[0], 12)[-1]
    options = [BeamSearchOptions(), *OPTIONS]
    outputs = compare(identify(save(model, tmp_path)), model, prompts, options, 24, device_under_test, 64)
    assert len({len(tokens) for tokens in outputs}) > 2


@pytest.mark.slow
def test_beams_of_20_prompts(files: ModelFiles, prompts: Prompts, device_under_test: DeviceUnderTest) -> None:
    assert len(prompts) >= 20
    compare(files, transformers_model(files), prompts, [BeamSearchOptions()] * len(prompts), 16, device_under_test)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_those_of_transformers(
    files: ModelFiles, prompts: Prompts, options: BeamSearchOptions, device_under_test: DeviceUnderTest
) -> None:
    few = [prompts[i] for i in FEW]
    compare(files, transformers_model(files), few, [options] * len(FEW), 32, device_under_test)
