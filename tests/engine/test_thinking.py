"""A budget of reasoning: masks and drafts are those of a loop that counts tokens."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pagoda.base.sampling_params import OutputRule, PromptReasoning, SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.answers.reasoning import REASONING_FORMATS, ReasoningSplitter, new_splitter
from pagoda.engine.answers.thinking import ThinkingBackend
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.tokenizers.byte_tokenizer import EOS, ByteTokenizer
from pagoda.worker.grammar import GrammarMatcher, MaskWork, num_mask_words
from tests.engine.grammars.matching import VOCAB, allowed, ready

CLOSING = b"\n</think>\n\n"
ALL = set(range(VOCAB))


@pytest.fixture(scope="module")
def backend() -> ThinkingBackend:
    return ThinkingBackend(ByteTokenizer, VOCAB, 2)


def budget_of(budget: int, is_open: bool = True, name: str = "think", grammar: str = "") -> OutputRule:
    return OutputRule(grammar, budget, PromptReasoning(name, is_open))


def forced_by_counting(output: Sequence[int], budget: int, is_open: bool) -> int | None:
    """Return the byte that must follow, of an output with a budget of bytes between <think> and </think>."""
    text = bytes(output)
    if not is_open:
        start = text.lstrip()
        if not start.startswith(b"<think>"):
            return None
        text = start.removeprefix(b"<think>")
    thought, end, _ = text.partition(b"</think>")
    if end and len(thought + end) <= budget:  # it ended by itself
        return None
    rest = text[budget : budget + len(CLOSING)]
    return CLOSING[len(rest)] if len(text) >= budget and len(rest) < len(CLOSING) else None


def random_output(rng: random.Random, budget: int, is_open: bool) -> list[int]:
    """Return an output that keeps to a budget."""
    output: list[int] = []
    wanted = [*rng.choice([b"", b"<think>", b" \n<think>\n", b"<thin", b"x<think>"])]
    while len(output) < 60:
        due = forced_by_counting(output, budget, is_open)
        if not wanted:
            wanted = [*b"</think>"] if rng.random() < 0.05 else [rng.choice([*b"ab<>/", *CLOSING])]
        output.append(wanted.pop(0) if due is None else due)
    return output


def test_random_outputs_are_masked_as_by_counting(backend: ThinkingBackend) -> None:
    rng = random.Random(1)
    num_forced = 0
    for trial in range(60):
        budget, is_open = rng.choice([0, 1, 2, 7, 30]), rng.random() < 0.5
        output = random_output(rng, budget, is_open)
        matcher = ready(backend, budget_of(budget, is_open))
        expected = [forced_by_counting(output[:at], budget, is_open) for at in range(len(output) + 1)]
        for at, token in enumerate([*output, EOS]):
            assert allowed(backend, matcher) == (ALL if expected[at] is None else {expected[at]}), (trial, at)
            assert list(matcher.forced()[:1]) == ([] if expected[at] is None else [expected[at]])
            num_forced += expected[at] is not None
            assert not any(expected[at : at + matcher.num_free])
            drafts = [*output[at : at + rng.randrange(20)]]
            if drafts and rng.random() < 0.5:
                drafts[rng.randrange(len(drafts))] ^= 1
            _check_drafts(backend, matcher.copy(), output[:at], drafts, budget, is_open)
            matcher.advance([token])
    assert num_forced > 100


def test_tokens_that_come_together_count_as_one_by_one(backend: ThinkingBackend) -> None:
    rng = random.Random(2)
    for trial in range(200):
        budget, is_open = rng.choice([0, 1, 7, 30, 50]), rng.random() < 0.5
        output = random_output(rng, budget, is_open)
        matcher, at = ready(backend, budget_of(budget, is_open)), 0
        while at < len(output):
            count = rng.choice([1, 2, 10, 60])
            matcher.advance(output[at : at + count])
            at = min(at + count, len(output))
            due = forced_by_counting(output[:at], budget, is_open)
            assert list(matcher.forced()[:1]) == ([] if due is None else [due]), (trial, at)


def test_a_long_thought_is_read_at_once(backend: ThinkingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, pieces = ready(backend, budget_of(100_000, True)), list[str]()
    feed = ReasoningSplitter.feed
    monkeypatch.setattr(ReasoningSplitter, "feed", lambda self, text: pieces.append(text) or feed(self, text))
    matcher.advance([*b"a" * 30_000])
    matcher.advance([*b"</think>", *b"b" * 30_000])
    assert len(pieces) == 10  # both at once; then, one by one, the tag, which ends the thought


def _check_drafts(
    backend: ThinkingBackend, matcher: GrammarMatcher, output: list[int], drafts: list[int], budget: int, is_open: bool
) -> None:
    """What is offered keeps to the budget; masks after drafts are those of the output with them."""
    due = [forced_by_counting([*output, *drafts[:at]], budget, is_open) for at in range(len(drafts) + 1)]
    num_right = next((at for at, draft in enumerate(drafts) if due[at] not in (None, draft)), len(drafts))
    assert matcher.count_allowed(drafts) == num_right
    masks = np.zeros((len(drafts) + 1, num_mask_words(VOCAB)), np.int32)
    backend.fill([MaskWork(matcher, 0, tuple(drafts))], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    for at in range(num_right + 1):
        assert set(np.flatnonzero(bits[at]).tolist()) == (ALL if due[at] is None else {due[at]})


def follow(backend: ThinkingBackend, grammar: OutputRule, wanted: bytes) -> bytes:
    """Return the output of a model that writes `wanted` between what is forced, as far as it is allowed to."""
    matcher, output, left = ready(backend, grammar), bytearray(), [*wanted]
    while left or matcher.forced():
        may = allowed(backend, matcher)
        token = matcher.forced()[0] if matcher.forced() else left.pop(0)
        assert token in may, (bytes(output), token)
        output.append(token)
        matcher.advance([token])
        assert matcher.error == ""
    return bytes(output)


def test_the_answers_own_grammar_begins_where_the_budget_ends(backend: ThinkingBackend) -> None:
    grammar = budget_of(4, grammar=grammar_text(StructuredOutputsParams(choice=["yes"], reasoning_end="</think>")))
    assert follow(backend, grammar, b"Hm, ") == b"Hm, " + CLOSING
    assert follow(backend, grammar, b"</th") == b"</th" + CLOSING
    matcher = ready(backend, grammar)
    matcher.advance([*b"Hm, ", *CLOSING])
    assert allowed(backend, matcher) == {ord("y"), ord("\n"), ord(" ")}
    matcher.advance([*b"yes"])
    assert allowed(backend, matcher) == {EOS}


def test_a_closing_waits_for_the_end_of_a_character_that_a_grammar_wants(backend: ThinkingBackend) -> None:
    grammar = budget_of(1, grammar=grammar_text(StructuredOutputsParams(choice=["yes"], reasoning_end="</think>")))
    assert follow(backend, grammar, "é".encode()) == "é".encode() + CLOSING


def test_a_grammar_that_forbids_the_closing_goes_before_it(backend: ThinkingBackend) -> None:
    grammar = budget_of(2, False, grammar=grammar_text(StructuredOutputsParams(regex="<think>[ab]{4}")))
    assert follow(backend, grammar, b"abab") == b"<think>abab"


ANALYSIS, OPENING = b"<|channel|>analysis<|message|>", b"<|end|><|start|>assistant"


def test_a_call_may_follow_when_harmonys_reasoning_is_closed_for_the_first_time(backend: ThinkingBackend) -> None:
    grammar = budget_of(3, False, "harmony")
    call = b"<|channel|>commentary to=functions.f<|message|>{}"
    assert follow(backend, grammar, ANALYSIS + b"abc" + call) == ANALYSIS + b"abc" + OPENING + call
    twice = follow(backend, grammar, ANALYSIS + b"abc" + ANALYSIS + b"Oh")
    assert twice == ANALYSIS + b"abc" + OPENING + ANALYSIS + OPENING + b"<|channel|>final<|message|>Oh"


def test_the_budget_of_harmony_is_for_all_its_reasoning_together(backend: ThinkingBackend) -> None:
    """In this vocabulary, the tokens of <|end|> count: the splitter sees the end when it is whole."""
    thought = ANALYSIS + b"ab" + OPENING + ANALYSIS
    num_used = len(b"ab<|end|>")
    assert follow(backend, budget_of(num_used + 2, False, "harmony"), thought + b"cd") == thought + b"cd" + OPENING


@pytest.mark.parametrize("name", list(REASONING_FORMATS))
def test_every_closing_ends_its_reasoning(name: str) -> None:
    tags = REASONING_FORMATS[name]
    for closing in tags.closings:
        splitter = new_splitter(tags, inside=not tags.has_channels)
        if tags.has_channels:
            splitter.feed(tags.begin)
        assert splitter.feed("Hm")[0] == "Hm"
        splitter.feed(closing)
        assert not splitter.is_inside
        assert splitter.feed("So") == ("", "So") or closing != tags.closings[-1]


def test_parameters_take_vllms_values() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(thinking_token_budget=0, reasoning=PromptReasoning("think", True)).thinking_token_budget == 0
