"""Drafts of models with recurrent states: what a step with drafts leaves is what steps without any leave."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.sampling_params import SamplingParams
from tests.device_under_test import WITH_STATES, DeviceUnderTest
from tests.engine.random_schedules import Foresight, Script, Watched, alone, differences, make_engine, play
from tests.models.tiny import CONFIGS, make_model, save

pytestmark = pytest.mark.usefixtures("on_the_device")

VOCAB, BLOCK = 160, 16
LONGEST = 170  # no multiple of a block
PROMPT = np.random.default_rng(1).integers(3, VOCAB, 37).tolist()
QUICK = ("lfm2", "mamba2", "qwen3.5")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
        if name.startswith(WITH_STATES)
    ],
)
def test_hits_resume_from_states_that_steps_with_drafts_left(
    name: str, tmp_path: Path, on_the_device: DeviceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is drafted up to the last position that the model has; prompts that begin with it find its snapshots."""
    on_the_device.must_compute(name)
    model = save(make_model(name, vocab_size=VOCAB, max_position_embeddings=LONGEST, eos_token_id=2), tmp_path)
    options: dict[str, object] = {"dtype": "bfloat16", "max_model_len": LONGEST, "num_blocks": 200, "block_size": BLOCK}
    first = Watched(PROMPT, SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True), 0)
    text = PROMPT + alone(model, [first], options).tokens[0]
    assert len(text) == LONGEST
    foresight = Foresight({first.seed: text}, VOCAB)
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    later = [Watched([*text[:end], 3, 4, 5], few, 10 + end) for end in range(LONGEST - 10, len(PROMPT), -30)]
    expected = alone(model, [first, *later], options)

    monkeypatch.setattr("pagoda.worker.speculation.registry._drafter_of", lambda *_: foresight)
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": BLOCK, "adaptive": False}}
    core, trace = make_engine(model, Counter(), {**options, **drafting})
    play(core, trace, Script([first], [0], {}, set()))
    stats = core.make_stats()
    assert 0.6 * (LONGEST - len(PROMPT)) < stats.accepted_tokens < 0.9 * stats.drafted_tokens
    found: list[int] = []
    for each in later:
        before = core.make_stats().prefix_hits
        play(core, trace, Script([each], [0], {}, set()))
        found.append(core.make_stats().prefix_hits - before)
    core.shutdown()
    assert not differences(expected, trace, [first, *later])
    assert found[0] > len(PROMPT) + BLOCK, f"no snapshot that was left next to drafts is found: {found}"
