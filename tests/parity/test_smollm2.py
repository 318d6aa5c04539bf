"""SmolLM2 in fp32 through the whole engine: the greedy tokens of transformers, under every schedule.

Transformers is asked once: given the engine's answer up to each token, would it have taken that token next? If it says
yes everywhere, its own greedy answer is the same, by induction. Every other schedule must then give the same bits.
"""

import pytest

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.engine_core import EngineCore
from pagoda.loading.model_files import ModelFiles
from tests.cached_models import cached_model, transformers_model, transformers_tokenizer
from tests.device_under_test import DeviceUnderTest
from tests.engine.driver import Answers, drive, request
from tests.parity.prompts import CHATS, TEXTS

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return cached_model("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> Prompts:
    tokenizer = transformers_tokenizer(files)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    for text in CHATS:
        message = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        ids.append(chat["input_ids"])
    assert len(ids) >= 20
    return ids


def engine(files: ModelFiles, device: DeviceUnderTest, **options: object) -> EngineCore:
    settings = {**device.options, "threads": 1, "max_model_len": 1024, "num_blocks": 400}
    config = EngineConfig.from_options(model=str(files.path), **{**settings, **options})
    return build_engine_core(resolve_engine(config, files))


def run(core: EngineCore, prompts: Prompts) -> list[list[int]]:
    answers: Answers = drive(core, [request(i, prompt, GREEDY) for i, prompt in enumerate(prompts)])
    core.shutdown()
    return [answers.tokens[f"r{i}", 0] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def answers(files: ModelFiles, prompts: Prompts, device_under_test: DeviceUnderTest) -> list[list[int]]:
    """In one batch of mixed lengths, prompts whole."""
    return run(engine(files, device_under_test, max_num_batched_tokens=4096), prompts)


def test_tokens_are_those_of_transformers(files: ModelFiles, prompts: Prompts, answers: list[list[int]]) -> None:
    import torch

    reference = transformers_model(files)
    different = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == NUM_TOKENS
            logits = reference(torch.tensor([prompt + answer[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
            if logits.argmax(-1).tolist() != answer:
                different.append(prompt)
    assert different == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 48, "max_num_seqs": 12}, marks=pytest.mark.slow),
        pytest.param(
            {
                "max_num_batched_tokens": 333,
                "enable_prefix_caching": False,
                "num_blocks": 60,
                "preemption_mode": "recompute",
            },
            marks=pytest.mark.slow,
        ),
        {"num_blocks": 60, "preemption_mode": "swap", "num_host_blocks": 200, "pipeline_depth": 2},
    ],
    ids=["small chunks", "recompute without prefix cache", "swap"],
)
def test_every_schedule_gives_the_same(
    files: ModelFiles,
    prompts: Prompts,
    answers: list[list[int]],
    options: dict[str, object],
    device_under_test: DeviceUnderTest,
) -> None:
    core = engine(files, device_under_test, **options)
    assert run(core, prompts) == answers
    stats = core.make_stats()
    if options.get("preemption_mode") == "recompute":
        assert stats.preemptions > 0  # type: ignore[attr-defined]
    if options.get("preemption_mode") == "swap":
        assert stats.swap_outs > 0  # type: ignore[attr-defined]
    if not options.get("enable_prefix_caching", True):
        assert stats.prefix_hits == 0  # type: ignore[attr-defined]
    else:
        assert stats.prefix_hits > 0  # type: ignore[attr-defined]
