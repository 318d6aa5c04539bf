"""The rules for the output of speech models, compared with transformers'."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams, SpeechRules
from pagoda.worker.sampler import Sampler
from pagoda.worker.table_mirror import TableMirror
from tests.worker.hand_made import row_init

VOCAB, END, FIRST = 60, 30, 40  # text, <|endoftext|> and other special tokens, timestamps
PROMPT = [31]
RULES = SpeechRules((3, 5), (7, END), END, FIRST, 4)
OUTPUTS = [
    [],
    [40],
    [42, 1],
    [42, 1, 2],
    [42, 1, 45],
    [42, 1, 45, 45],
    [42, 1, 45, 45, 9],
    [42, 1, 45, 45, 9, 50],
    [40, 59],
    [1, 2, 3],
    [41, 42, 43],
]


def table_of(outputs: list[list[int]], params: SamplingParams) -> TableMirror:
    table = TableMirror(len(outputs), 64, 16, 1)
    for row, output in enumerate(outputs):
        table._admit(row_init(row, [*PROMPT, *output], [0], params, num_prompt=len(PROMPT)))
    return table


def expected_logits(logits: torch.Tensor, output: list[int], rules: SpeechRules) -> torch.Tensor:
    """Return what transformers makes of logits [V] after an output."""
    ids = torch.tensor([[*PROMPT, *output]])
    config = GenerationConfig(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, max_initial_timestamp_index=rules.max_first_step
    )
    processors = [
        SuppressTokensAtBeginLogitsProcessor(rules.suppressed_first, len(PROMPT)),
        SuppressTokensLogitsProcessor(rules.suppressed),
    ]
    if rules.first_timestamp is not None:
        processors.append(WhisperTimeStampLogitsProcessor(config, len(PROMPT)))
    found = logits[None].clone()
    for processor in processors:
        found = processor(ids, found)
    return found[0]


@pytest.mark.parametrize("rules", [RULES, SpeechRules((3, 5), (7, END), END)], ids=["timestamps", "none"])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_tokens_and_their_log_probabilities_are_transformers(rules: SpeechRules, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    table = table_of(OUTPUTS, SamplingParams(temperature=0, logprobs=0, speech=rules))
    rows = np.arange(len(OUTPUTS), dtype=np.int32)
    positions = np.array([len(PROMPT) + len(output) for output in OUTPUTS], np.int32)
    for _ in range(20):
        logits = torch.randn(len(OUTPUTS), VOCAB, generator=generator) * scale
        drawn = Sampler().draw(logits.clone(), table, rows, positions, None, None)
        found = drawn.on_host([tensor.numpy() for tensor in drawn.tensors])
        assert found.finite.all()
        for row, output in enumerate(OUTPUTS):
            expected = expected_logits(logits[row], output, rules)
            token = int(expected.argmax())
            assert found.tokens[row] == token
            assert found.logprobs is not None
            assert found.logprobs.logprobs[row, 0] == pytest.approx(float(expected.log_softmax(0)[token]), abs=1e-5)


def test_a_row_gives_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(len(OUTPUTS), VOCAB, generator=torch.Generator().manual_seed(1))
    table = table_of(OUTPUTS, SamplingParams(temperature=0, logprobs=0, speech=RULES))
    positions = np.array([len(PROMPT) + len(output) for output in OUTPUTS], np.int32)

    def drawn(rows: list[int]) -> list[tuple[int, bytes]]:
        at = np.array(rows, np.int32)
        one = Sampler().draw(logits[rows].clone(), table, at, positions[at], None, None)
        found = one.on_host([tensor.numpy() for tensor in one.tensors])
        assert found.logprobs is not None
        pairs = zip(found.tokens.tolist(), found.logprobs.logprobs, strict=True)
        return [(token, logprobs.tobytes()) for token, logprobs in pairs]

    everyone = drawn(list(range(len(OUTPUTS))))
    assert [drawn([row])[0] for row in range(len(OUTPUTS))] == everyone
    assert drawn(list(range(len(OUTPUTS)))[::-1])[::-1] == everyone


def test_a_forked_row_keeps_the_rules_and_a_reused_row_loses_them() -> None:
    table = table_of([[42, 1]], SamplingParams(temperature=0, speech=RULES))
    assert table.reads_output[0]
    assert table.logprobs_after[0]
    table._clear(0)
    assert not table.logprobs_after[0]
    without = table_of([[1]], SamplingParams(temperature=0, speech=SpeechRules((3,))))
    assert not without.reads_output[0]  # what is forbidden depends on the length alone


def test_rules_are_refused_in_beam_search_and_of_another_kind() -> None:
    with pytest.raises(RequestError, match="speech=.* cannot be combined with beam search"):
        SamplingParams(speech=RULES, beam_search=BeamSearchOptions())
    with pytest.raises(RequestError, match="speech"):
        SamplingParams(speech={"end_id": 3})  # type: ignore[arg-type]
