"""Beam search of SmolLM2 in fp32: the tokens, order and scores of transformers' generate(num_beams=4)."""

from collections.abc import Sequence

import pytest

from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.loading.model_files import ModelFiles
from tests.cached_models import transformers_model
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import drive, request
from tests.parity.test_smollm2 import Prompts, engine, files, prompts

__all__ = ["files", "prompts"]  # fixtures

WIDTH = 4
QUICK = (0, 3)  # a sentence, and code
FEW = (0, 3, 8, 20, 21)  # with chats, whose answers end


def transformers_beams(
    files: ModelFiles, prompt: list[int], options: BeamSearchOptions, num_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """Return transformers' outputs (without padding) and their scores, best first."""
    import torch

    model = transformers_model(files)
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
    prompts: Prompts,
    options: Sequence[BeamSearchOptions],
    num_tokens: int,
    device: DeviceUnderTest,
) -> None:
    """All prompts in one batch, each with the options at its place."""
    core = engine(files, device, max_num_batched_tokens=200, max_num_seqs=40)
    sampling = [
        SamplingParams(n=WIDTH, temperature=0, max_tokens=num_tokens, logprobs=0, beam_search=one) for one in options
    ]
    eos = transformers_model(files).generation_config.eos_token_id
    requests = [
        request(i, prompt, params, eos=(eos,)) for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    answers = drive(core, requests)
    core.shutdown()
    for i, (prompt, option) in enumerate(zip(prompts, options, strict=True)):
        tokens, scores = transformers_beams(files, prompt, option, num_tokens)
        assert [answers.tokens[f"r{i}", sequence] for sequence in range(WIDTH)] == tokens, (i, option)
        for sequence, score in enumerate(scores):
            total = sum(answers.logprobs[f"r{i}", sequence])
            theirs = score * len(tokens[sequence]) ** option.length_penalty
            assert total == pytest.approx(theirs, abs=1e-3), (i, option)


def test_beams_are_those_of_transformers(
    files: ModelFiles, prompts: Prompts, device_under_test: DeviceUnderTest
) -> None:
    compare(files, [prompts[i] for i in QUICK], [BeamSearchOptions()] * len(QUICK), 12, device_under_test)


@pytest.mark.slow
def test_beams_of_20_prompts(files: ModelFiles, prompts: Prompts, device_under_test: DeviceUnderTest) -> None:
    assert len(prompts) >= 20
    compare(files, prompts, [BeamSearchOptions()] * len(prompts), 16, device_under_test)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        BeamSearchOptions(early_stopping=True),
        BeamSearchOptions(early_stopping="never"),
        BeamSearchOptions(length_penalty=0.0, early_stopping="never"),
        BeamSearchOptions(length_penalty=-1.5),
        BeamSearchOptions(length_penalty=2.0, early_stopping=True),
    ],
    ids=str,
)
def test_options_are_those_of_transformers(
    files: ModelFiles, prompts: Prompts, options: BeamSearchOptions, device_under_test: DeviceUnderTest
) -> None:
    compare(files, [prompts[i] for i in FEW], [options] * len(FEW), 32, device_under_test)
