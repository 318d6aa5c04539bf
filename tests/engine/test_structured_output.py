"""Structured output in the engine: valid by construction, and the same bits under every schedule."""

import dataclasses
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import BeamSearchOptions, OutputRule, PromptReasoning, SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.core.request import AdmitKind, RequestStatus
from pagoda.core.scheduler_output import RowInit, SchedulerOutput
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.tokenizers.load_tokenizer import load_folder_tokenizer
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.worker.grammar import MaskWork
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.table_mirror import TableMirror
from tests.device_under_test import DeviceUnderTest
from tests.engine.byte_llama import EOS, VOCAB, write_byte_llama
from tests.engine.driver import Answers, drive, make_core, request
from tests.engine.random_schedules import (
    FIRST_FILLER_SEED,
    Trace,
    Watched,
    alone,
    differences,
    make_engine,
    play,
    random_options,
    random_script,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
MAX_MODEL_LEN = 256

Engines = Callable[..., EngineCore]
"""A model's folder and options give an engine."""


def constrained(params: SamplingParams, **given: Any) -> SamplingParams:
    return params.with_grammar(grammar_text(StructuredOutputsParams(**given)))


JSON = {"json": SCHEMA, "disable_any_whitespace": True}
KINDS = [
    constrained(SamplingParams(temperature=0, max_tokens=80), **JSON),
    constrained(SamplingParams(temperature=1.0, max_tokens=60, n=2), **JSON),
    SamplingParams(temperature=0.8, max_tokens=20),
    constrained(SamplingParams(temperature=0.9, max_tokens=30, logprobs=3, frequency_penalty=1), regex="[a-d]{20,25}"),
    constrained(SamplingParams(temperature=1.1, top_k=20, max_tokens=8), choice=["yes", "no", "perhaps not"]),
    constrained(SamplingParams(temperature=0.7, min_p=0.02, max_tokens=40, n=2), json_object=True),
]


def budgeted(params: SamplingParams, budget: int, is_open: bool = True) -> SamplingParams:
    params = params.with_reasoning(PromptReasoning("think", is_open))
    params.thinking_token_budget = budget
    return params


CLOSING = "\n</think>\n\n"
THOUGHTFUL = [
    budgeted(SamplingParams(temperature=1.0, max_tokens=40, n=2, logprobs=2), 9),
    budgeted(
        constrained(SamplingParams(temperature=0.9, max_tokens=60), choice=["yes", "no"], reasoning_end="</think>"), 5
    ),
    budgeted(SamplingParams(temperature=0.8, max_tokens=24, frequency_penalty=1), 0),
    budgeted(SamplingParams(temperature=0.8, max_tokens=12), 3, is_open=False),
    budgeted(SamplingParams(temperature=0.8, max_tokens=12), 30),
]
"""Their outputs have a budget of reasoning: used up in the first three."""
BEAMS = constrained(SamplingParams(n=2, max_tokens=60, beam_search=BeamSearchOptions()), **JSON)


THOUGHTFUL_BEAMS = budgeted(SamplingParams(n=2, max_tokens=30, beam_search=BeamSearchOptions()), 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_llama(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_folder_tokenizer(model)


@pytest.fixture(scope="module")
def engine(on: DeviceUnderTest) -> Engines:
    base = {"device": "cpu", "kernels": "native", "threads": 1, "block_size": 8, "num_blocks": 120}
    base |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 64}

    def build(model: Path, **options: object) -> EngineCore:
        config = EngineConfig.from_options(model=str(model), **on.engine({**base, **options}))
        return build_engine_core(resolve_engine(config))

    return build


def watched_requests() -> list[Watched]:
    rng = np.random.default_rng(4)
    head = rng.integers(3, 259, 40).tolist()
    found = []
    for i, length in enumerate([1, 9, 33, 64, 90, 17, 5, 48, 71, 12, 100, 28]):
        own = rng.integers(3, 259, length).tolist()
        found.append(Watched((head + own)[:length] if i % 2 else own, KINDS[i % len(KINDS)], 100 * i))
    found += [
        Watched(rng.integers(3, 259, 11 * i + 1).tolist(), params, 5000 + 10 * i)
        for i, params in enumerate(THOUGHTFUL * 2)
    ]
    found += [Watched(rng.integers(3, 259, 20 * i).tolist(), BEAMS, 2000 * i) for i in (1, 2)]
    return [*found, Watched(rng.integers(3, 259, 50).tolist(), THOUGHTFUL_BEAMS, 8000)]


@pytest.fixture(scope="module")
def expected(model: Path, on: DeviceUnderTest) -> Trace:
    return alone(model, watched_requests(), on.engine({"max_model_len": MAX_MODEL_LEN, "num_blocks": 100}))


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode([token for token in tokens if token != EOS])


def test_complete_outputs_are_valid(expected: Trace, tokenizer: Tokenizer) -> None:
    """Each sequence alone: JSON validates, choices are choices, expressions match."""
    num_ended = 0
    for each in watched_requests():
        if each.params in (*THOUGHTFUL, THOUGHTFUL_BEAMS):
            continue
        for seed in range(each.seed, each.seed + each.params.n):
            tokens = expected.tokens[seed]
            text = text_of(tokenizer, tokens)
            kind = KINDS.index(each.params) if each.params is not BEAMS else 0
            if tokens[-1] != EOS:
                assert len(tokens) == each.params.max_tokens
                continue
            num_ended += 1
            if kind in (0, 1):
                jsonschema.validate(json.loads(text), SCHEMA)
            elif kind == 3:
                assert re.fullmatch("[a-d]{20,25}", text)
            elif kind == 4:
                assert text in ("yes", "no", "perhaps not")
            elif kind == 5:
                assert isinstance(json.loads(text), dict)
    assert num_ended > 10


def test_reasoning_is_closed_at_its_budget(expected: Trace, tokenizer: Tokenizer) -> None:
    """Each sequence alone: so many tokens, the closing, and the answer."""
    closing = tokenizer.encode(CLOSING, False)
    assert expected.tokens[8000][7:][: len(closing)] == closing  # of beams
    for each in watched_requests():
        kind = next((i for i, params in enumerate(THOUGHTFUL) if params == each.params), None)
        for seed in range(each.seed, each.seed + each.params.n) if kind is not None else ():
            tokens = expected.tokens[seed]
            if kind < 3:
                num_thought = (9, 5, 0)[kind]
                closed = tokens[num_thought:][: len(closing)]
                while kind == 1 and closed != closing:  # up to the end of a character
                    num_thought += 1
                    assert num_thought < 9
                    closed = tokens[num_thought:][: len(closing)]
                assert closed == closing or (EOS in tokens and tokens.index(EOS) < num_thought)
                if kind == 1:
                    answer = text_of(tokenizer, tokens[num_thought + len(closing) :])
                    assert answer.strip() in ("yes", "no")
            else:
                assert closing[1:-1] not in [tokens[at:][: len(closing) - 2] for at in range(len(tokens))]


def test_the_last_token_is_forced_unless_a_closing_is(model: Path, tokenizer: Tokenizer, engine: Engines) -> None:
    core = engine(model)
    last, closing = ord("z"), tokenizer.encode(CLOSING, False)
    asked = [budgeted(SamplingParams(max_tokens=n, ignore_eos=True, forced_eos_token_id=last), 3) for n in (9, 30)]
    answers = drive(core, [request(i, [5, 6, 7], params, i) for i, params in enumerate(asked)])
    core.shutdown()
    short, long = answers.tokens["r0", 0], answers.tokens["r1", 0]
    assert short[3:] == closing[:6]
    assert long[3:][: len(closing)] == closing
    assert (len(long), long[-1]) == (30, last)


def test_random_schedules_give_the_same_bits(model: Path, expected: Trace, on: DeviceUnderTest) -> None:
    """Batches, chunks, forks, preemption, swap, steps in flight, prefix hits, resets and drafts, in random mixtures."""
    on.must_promise_bits()
    counts: Counter[str] = Counter()
    watched = watched_requests()
    for seed in range(12):
        rng = np.random.default_rng([9, seed])
        drawn = random_options(rng, MAX_MODEL_LEN)
        if seed % 2:
            method = ("suffix", "forced", "ngram")[seed // 2 % 3]
            drawn["speculative_config"] = {"method": method, "num_speculative_tokens": 4, "adaptive": seed % 4 == 1}
        script = random_script(rng, watched, 259, 10, 12)
        core, trace = make_engine(model, counts, on.engine({"max_model_len": MAX_MODEL_LEN, **drawn}))
        play(core, trace, script)
        stats = core.make_stats()
        core.shutdown()
        counts.update({"preempted": stats.preemptions, "swapped": stats.swap_outs, "drafted": stats.drafted_tokens})
        counts["in flight"] += bool(drawn["async_scheduling"])
        assert not differences(expected, trace, script.requests), f"schedule {seed}: {drawn}"
    assert not {"chunks", "forks", "beams copied", "preempted", "swapped", "in flight"} - set(+counts), counts
    assert max(each.seed for each in watched) < FIRST_FILLER_SEED


def test_torch_kernels_and_the_recorded_forward_agree_on_validity(
    model: Path, tokenizer: Tokenizer, engine: Engines
) -> None:
    core = engine(model, kernels="torch")
    answers = drive(core, [request(i, [5, 6, 7 + i], KINDS[0], i, eos=(EOS,)) for i in range(3)])
    core.shutdown()
    for (_, _), tokens in answers.tokens.items():
        if tokens[-1] == EOS:
            jsonschema.validate(json.loads(text_of(tokenizer, tokens)), SCHEMA)
    assert any(tokens[-1] == EOS for tokens in answers.tokens.values())


def test_logprobs_are_over_the_tokens_that_the_grammar_allows(model: Path, engine: Engines) -> None:
    """Before temperature and penalties; forbidden tokens are -9999.0, which JSON can carry."""
    choice = {"choice": ["aa", "ab"]}
    plain = SamplingParams(temperature=0, max_tokens=4, logprobs=4, presence_penalty=1.5)
    core = engine(model)
    core.add_request(request(0, [5, 6, 7], constrained(plain, **choice), eos=(EOS,)))
    columns = []
    while core.has_unfinished_requests():
        columns += [one.logprobs for one in core.step().values() if one.logprobs is not None]
    core.shutdown()
    values = np.concatenate([one.logprobs for one in columns])
    ids = np.concatenate([one.token_ids for one in columns])
    assert values.shape == (3, 5)  # two letters and the end
    assert np.isfinite(values).all()
    for row, allowed in zip(values, (1, 2, 1), strict=True):
        assert np.exp(row[1 : 1 + allowed]).sum() == pytest.approx(1, abs=1e-5)
        assert (row[1 + allowed :] == -9999.0).all()
    assert values[0, 0] == values[2, 0] == 0
    assert ids[2, 0] == EOS


@pytest.mark.parametrize("method", ["ngram", "forced"])
def test_logprobs_are_the_same_with_drafts(model: Path, method: str, on: DeviceUnderTest, engine: Engines) -> None:
    """One column for each token that was verified, none for rejected drafts; the same values to the bit."""
    on.must_promise_bits()
    asked = [
        constrained(SamplingParams(temperature=0.8, max_tokens=40, logprobs=3, frequency_penalty=0.5), **JSON),
        constrained(SamplingParams(temperature=0, max_tokens=30, logprobs=2), regex="(ab|ac|d){40}"),
    ]
    found = []
    for config in ({}, {"speculative_config": {"method": method, "num_speculative_tokens": 4, "adaptive": False}}):
        core = engine(model, **config)
        columns: dict[int, list[Any]] = {0: [], 1: []}
        for i, params in enumerate(asked):
            core.add_request(request(i, [5, 6, 7, 5, 6], params, 100 * i, eos=(EOS,)))
            while core.has_unfinished_requests():
                for one in core.step().values():
                    if one.logprobs is not None:
                        assert len(one.logprobs.logprobs) == len(one.token_ids)
                        assert one.logprobs.token_ids[:, 0].tolist() == one.token_ids.tolist()
                        columns[i] += [one.logprobs.token_ids, one.logprobs.logprobs, one.logprobs.ranks]
        stats = core.make_stats()
        core.shutdown()
        found.append([np.concatenate(columns[i][k::3]) for i in (0, 1) for k in range(3)])
    assert stats.drafted_tokens > stats.accepted_tokens * (method == "ngram")
    assert stats.accepted_tokens > 10
    for plain, drafted in zip(*found, strict=True):
        assert (plain == drafted).all()
    values = np.concatenate([found[0][1].ravel(), found[0][4].ravel()])
    assert np.isfinite(values).all()
    assert values.min() == -9999.0


def test_a_request_continues_in_the_middle_of_its_grammar(model: Path, expected: Trace, engine: Engines) -> None:
    """As after a crash: the journal sends what was emitted, and the new engine's matcher reads it."""
    core = engine(model)
    requests = watched_requests()
    for each, cut in [(each, cut) for each in (requests[0], requests[13]) for cut in (1, 7, 12, 17)]:
        tokens = expected.tokens[each.seed]
        tokens = tokens[: tokens.index(EOS) + 1]
        resumed = request(0, each.prompt, each.params, each.seed, eos=(EOS,))
        resumed = _with_prior(resumed, tokens[:cut])
        answers = drive(core, [resumed])
        assert tokens[:cut] + answers.tokens["r0", 0] == tokens
    core.shutdown()


def _with_prior(one: Any, tokens: list[int]) -> Any:
    return dataclasses.replace(one, prior_output=(tuple(tokens),))


@pytest.mark.parametrize("num_right", [0, 1, 3, 4])
def test_drafts_change_no_token(model: Path, expected: Trace, num_right: int, engine: Engines) -> None:
    """Right ones are accepted; the others, which the grammar may forbid or not, are taken back."""
    # Its own method finds no drafts.
    own = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 99, "prompt_lookup_max": 99}
    core = engine(model, speculative_config=own, async_scheduling=False)  # the drafts are for the next step
    watched = [watched_requests()[i] for i in (0, 3, 6, 13, 14)]
    for i, each in enumerate(watched):
        core.add_request(request(i, each.prompt, each.params, each.seed))
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(watched))}
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            at = 0
            for handle, count in zip(outputs.handles, outputs.counts, strict=True):
                tokens[f"r{handle}"] += outputs.token_ids[at : at + count].tolist()
                at += count
        drafts = {}
        for i, each in enumerate(watched):
            following = expected.tokens[each.seed][len(tokens[f"r{i}"]) :][:4]
            drafts[(0, i), 0] = [one if k < num_right else (one + 7 + k) % 200 for k, one in enumerate(following)]
        core._scheduler.update_draft_token_ids(drafts)
    stats = core.make_stats()
    core.shutdown()
    for i, each in enumerate(watched):
        assert tokens[f"r{i}"] == expected.tokens[each.seed]
    assert stats.drafted_tokens > 50
    assert (stats.accepted_tokens > 0) == (num_right > 0)


def test_a_worker_offers_only_drafts_that_the_grammar_allows(tokenizer: Tokenizer) -> None:
    backend = LlguidanceBackend(lambda: tokenizer, VOCAB, 1)
    rows, table = GrammarRows(backend, VOCAB), TableMirror(4, 64, 8, 1)
    prompt = np.array([5, 6], np.int32)
    init = RowInit(2, "r", 0, AdmitKind.NEW, prompt, 2, 0, (np.zeros(1, np.int32),), 0, (EOS,), KINDS[4])
    plain = dataclasses.replace(init, row=1, sampling=SamplingParams())
    none = np.empty(0, np.int32)
    output = SchedulerOutput(1, none, none, none, none, none, 0, admitted=(init, plain))
    rows.apply(output)
    table.apply(output)
    table.record_tokens(np.array([2]), np.array([2]), np.array(tokenizer.encode("y", False)))
    drafts = {row: np.array(tokenizer.encode("esx", False), np.int32) for row in (1, 2)}
    kept = rows.allowed_drafts(table, drafts)
    assert tokenizer.decode(kept[2].tolist()) == "es"
    assert len(kept[1]) == 3
    assert list(rows.allowed_drafts(table, {2: drafts[2][1:]})) == []
    rows.shutdown()


def test_output_that_its_grammar_forbids_ends_with_an_error(model: Path, engine: Engines) -> None:
    """Only that request: here one that claims to have emitted something else before."""
    core = engine(model)
    wrong = _with_prior(request(0, [5, 6], KINDS[0], eos=(EOS,)), [50, 51])
    answers = drive(core, [wrong, request(1, [5, 6], KINDS[4], eos=(EOS,))])
    core.shutdown()
    assert answers.finishes["r0", 0].status is RequestStatus.FINISHED_ERROR
    assert "left its grammar" in str(answers.finishes["r0", 0].message)
    assert answers.finishes["r1", 0].status is RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            constrained(SamplingParams(temperature=0, bad_words_token_ids=((EOS,),)), choice=["yes", "no"]),
            r"no token may follow \d tokens of output: the structured output and bad_words forbid all",
        ),
        (
            SamplingParams(temperature=0, min_tokens=1, max_tokens=3, allowed_token_ids=(EOS,)),
            "no token may follow 0 tokens of output: allowed_token_ids and min_tokens=1 forbid all",
        ),
        (
            SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=(7,), bad_words_token_ids=((7, 7),)),
            "no token may follow 1 tokens of output: allowed_token_ids and bad_words forbid all",
        ),
    ],
)
def test_parameters_that_forbid_all_tokens_together_are_the_callers_fault(
    model: Path, engine: Engines, params: SamplingParams, said: str
) -> None:
    core = engine(model)
    answers = drive(core, [request(0, [5, 6], params, eos=(EOS,)), request(1, [5], SamplingParams(max_tokens=3))])
    core.shutdown()
    end = answers.finishes["r0", 0]
    assert end.status is RequestStatus.FINISHED_IGNORED
    assert re.match(said, str(end.message))
    assert len(answers.tokens["r1", 0]) == 3


def test_a_grammar_that_does_not_compile_ends_its_request_only(model: Path, engine: Engines) -> None:
    core = engine(model)
    broken = SamplingParams(max_tokens=4).with_grammar("start: nothing")
    answers = drive(core, [request(0, [5], broken, eos=(EOS,)), request(1, [5], SamplingParams(max_tokens=3))])
    core.shutdown()
    assert answers.finishes["r0", 0].status is RequestStatus.FINISHED_IGNORED
    assert "the grammar cannot be followed after 0 tokens" in str(answers.finishes["r0", 0].message)
    assert "start: nothing" in str(answers.finishes["r0", 0].message)
    assert len(answers.tokens["r1", 0]) == 3


@pytest.mark.parametrize("executor", ["real", "fake"])
def test_a_grammar_that_exceeds_a_limit_while_its_output_grows_ends_its_request_only(
    model: Path, executor: str, engine: Engines
) -> None:
    options = {"distributed_executor_backend": "fake"} if executor == "fake" else {}
    core = engine(model, **options)
    late = f"start: /[a-z]/ /[a-z]/ ({' | '.join(json.dumps(f'{i} item') for i in range(3000))})"
    broken = SamplingParams(max_tokens=8, temperature=0).with_grammar(late)
    answers = drive(core, [request(0, [5], broken, eos=(EOS,)), request(1, [5], SamplingParams(max_tokens=8))])
    core.shutdown()
    end = answers.finishes["r0", 0]
    assert end.status is RequestStatus.FINISHED_IGNORED
    assert "the grammar cannot be followed after" in str(end.message)
    assert "max is 2000" in str(end.message)
    assert len(answers.tokens["r0", 0]) > 0
    assert len(answers.tokens["r1", 0]) == 8


@pytest.mark.parametrize("method", ["forced", "ngram"])
def test_forced_tokens_share_a_forward(model: Path, expected: Trace, method: str, engine: Engines) -> None:
    """All of them are accepted, and every token is the one that it would have been."""
    config = {"method": method, "num_speculative_tokens": 8, "adaptive": False}
    core = engine(model, speculative_config=config)
    watched = watched_requests()[0]
    answers = drive(core, [request(0, watched.prompt, watched.params, watched.seed)])
    stats = core.make_stats()
    core.shutdown()
    assert answers.tokens["r0", 0] == expected.tokens[watched.seed]
    assert answers.num_steps < len(answers.tokens["r0", 0]) * 0.8
    if method == "forced":
        assert stats.accepted_tokens == stats.drafted_tokens > 15


@pytest.mark.parametrize("method", [None, "forced"])
def test_a_complete_answer_ends_before_min_tokens(
    model: Path, tokenizer: Tokenizer, method: str | None, engine: Engines
) -> None:
    """And one that can go on does: the end is sampled only where the grammar allows nothing else."""
    plain = SamplingParams(temperature=0, max_tokens=20, min_tokens=9, stop_token_ids=(ord("s") + 3,))
    drafting = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    core = engine(model, **({"speculative_config": drafting} if method else {}))
    kinds = ({"choice": ["yes"]}, {"json": {"type": "boolean"}}, {"regex": "(ab?){1,3}"}, {"regex": "c*"})
    asked = [constrained(plain, **kind) for kind in kinds]
    answers = drive(core, [request(i, [5, 6], params, i, eos=(EOS,)) for i, params in enumerate(asked)])
    core.shutdown()
    texts = [text_of(tokenizer, answers.tokens[f"r{i}", 0]) for i in range(4)]
    assert texts[0] == "yes"
    assert texts[1] in ("true", "false")
    assert re.fullmatch("(ab?){1,3}", texts[2])
    assert re.fullmatch("c{9,}", texts[3])
    for i in range(3):
        assert answers.finishes[f"r{i}", 0].status is RequestStatus.FINISHED_STOPPED
        assert answers.tokens[f"r{i}", 0][-1] == EOS


class PanicException(BaseException):
    """What a panic of a Rust library is in Python."""


def backend_of(core: EngineCore) -> LlguidanceBackend:
    backend = core._executor.worker._config.grammars  # type: ignore[attr-defined]
    assert isinstance(backend, LlguidanceBackend)
    return backend


class PanickingCopy:
    def deep_copy(self) -> None:
        raise PanicException("index out of bounds")


def test_a_panic_when_a_row_gets_its_grammar_ends_its_request_only(model: Path, engine: Engines) -> None:
    """The worker does not die of it: it would be started again, and the request replayed, over and over."""
    core = engine(model)
    backend = backend_of(core)
    grammar = KINDS[4].grammar
    assert grammar is not None
    assert core._preparations is not None
    while not core._preparations._grammars.is_ready(grammar, "the grammar", "r0"):
        core._preparations.wait(1.0)
    backend._compiled[grammar].inner = PanickingCopy()  # type: ignore[union-attr]
    answers = drive(core, [request(0, [5], KINDS[4], eos=(EOS,)), request(1, [5], SamplingParams(max_tokens=3))])
    core.shutdown()
    assert answers.finishes["r0", 0].status is RequestStatus.FINISHED_ERROR
    assert "index out of bounds" in str(answers.finishes["r0", 0].message)
    assert len(answers.tokens["r1", 0]) == 3


class LimitedMatcher:
    """Fails for ever after so much work, as at a library's limit; a new matcher begins at 0."""

    num_free = 0

    def __init__(self, inner: Any, limit: int, cost_of_draft: int) -> None:
        self._inner, self._left, self._cost = inner, limit, cost_of_draft
        self.inner = self

    @property
    def error(self) -> str:
        return self._inner.error or ("too many states" if self._left < 0 else "")

    @property
    def is_grammars_fault(self) -> bool:
        return self._left < 0

    def advance(self, token_ids: list[int]) -> None:
        self._inner.advance(token_ids)

    def count_allowed(self, token_ids: list[int]) -> int:
        self._left -= len(token_ids) == 4
        return self._inner.count_allowed(token_ids) if not self.error else 0

    def forced(self) -> list[int]:
        return self._inner.forced()

    def copy(self) -> "LimitedMatcher":
        return LimitedMatcher(self._inner.copy(), self._left, self._cost)

    def spend(self, num_masks: int) -> Any:
        self._left -= 1 + self._cost * (num_masks - 1)
        return self._inner


class LimitedBackend:
    """A backend whose matchers meet a limit early when they look at drafts."""

    def __init__(self, inner: LlguidanceBackend, limit: int, cost_of_draft: int) -> None:
        self._inner, self._limit, self._cost = inner, limit, cost_of_draft
        self.num_matchers = 0

    def matcher(self, rule: OutputRule) -> LimitedMatcher:
        self.num_matchers += 1
        return LimitedMatcher(self._inner.matcher(rule), self._limit, self._cost)

    def fill(self, work: list[MaskWork], masks: np.ndarray) -> None:
        inner = [MaskWork(one.matcher.spend(1 + len(one.drafts)), one.first, one.drafts) for one in work]  # type: ignore[attr-defined]
        self._inner.fill(inner, masks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("method", [None, "ngram"])
def test_limits_that_only_drafts_meet_fail_no_request(
    model: Path, expected: Trace, method: str | None, engine: Engines
) -> None:
    """Masks after drafts cost the library work; a row fails only if a new matcher fails without drafts."""
    drafting = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    core = engine(model, **({"speculative_config": drafting} if method else {}))
    rows = core._executor.worker._runner._grammars  # type: ignore[attr-defined]
    rows.backend = limited = LimitedBackend(rows.backend, 12, 9)
    watched = [watched_requests()[i] for i in (0, 3, 6)]
    answers = drive(core, [request(i, each.prompt, each.params, each.seed) for i, each in enumerate(watched)])
    stats = core.make_stats()
    core.shutdown()
    for i, each in enumerate(watched):
        assert answers.tokens[f"r{i}", 0] == expected.tokens[each.seed]
    assert limited.num_matchers > 6
    assert (stats.drafted_tokens > 0) == (method is not None)


class SlowTokenizer:
    """A loader that waits for a signal: the first grammar compiles as long."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.may_load, self.is_loading = tokenizer, threading.Event(), threading.Event()

    def __call__(self) -> Tokenizer:
        self.is_loading.set()
        assert self.may_load.wait(30)
        return self.tokenizer


def slow_engine(model: Path, tokenizer: Tokenizer, engine: Engines) -> tuple[EngineCore, SlowTokenizer]:
    core = engine(model)
    slow = SlowTokenizer(tokenizer)
    backend_of(core).vocabulary._load = slow
    return core, slow


def test_a_request_waits_for_its_grammar_and_others_do_not(model: Path, tokenizer: Tokenizer, engine: Engines) -> None:
    core, slow = slow_engine(model, tokenizer, engine)
    ids = ["r0", "r1"]
    core.add_request(request(0, [5], KINDS[4], eos=(EOS,)))
    core.add_request(request(1, [5], SamplingParams(max_tokens=5, ignore_eos=True)))
    answers = Answers()
    for _ in range(40):
        for outputs in core.step().values():
            answers.take(outputs, ids)
    assert list(answers.finishes) == [("r1", 0)]
    assert core.has_unfinished_requests()
    slow.may_load.set()
    while core.has_unfinished_requests():
        for outputs in core.step().values():
            answers.take(outputs, ids)
    assert answers.finishes["r0", 0].status is RequestStatus.FINISHED_STOPPED
    core.shutdown()


def test_abort_and_shutdown_while_compiling(model: Path, tokenizer: Tokenizer, engine: Engines) -> None:
    core, slow = slow_engine(model, tokenizer, engine)
    core.add_request(request(0, [5], KINDS[4], eos=(EOS,)))
    core.add_request(request(1, [5], KINDS[0], eos=(EOS,)))
    core.step()
    assert slow.is_loading.wait(10)
    core.abort([(0, 0)])
    core.step()
    assert core.has_unfinished_requests()
    core.shutdown()  # returns though a grammar is still being compiled
    slow.may_load.set()


def test_an_engine_without_grammars_refuses_them() -> None:
    from pagoda.executors.fake import FakeExecutor

    core = make_core(lambda rows: FakeExecutor(rows, 256, 4, 1, 1000), max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(RequestError, match="not available"):
        core.add_request(request(0, [5], KINDS[0]))
    raw = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(RequestError, match="not available"):
        core.add_request(request(0, [5], raw))
    assert not core.has_unfinished_requests()


def test_the_model_has_ids_that_the_tokenizer_lacks(tokenizer: Tokenizer) -> None:
    assert tokenizer.facts.vocab_size < VOCAB
