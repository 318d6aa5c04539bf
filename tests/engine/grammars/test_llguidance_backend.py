"""The grammar backend: masks, drafts, copies, failures, and compiling on other threads."""

import json
import threading
from typing import Any

import numpy as np
import pytest

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import OutputRule
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars import llguidance_backend
from pagoda.engine.grammars.compiling import error_of_grammar
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend, LlguidanceMatcher
from pagoda.engine.tokenizers.byte_tokenizer import BOS, EOS, ByteTokenizer
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.worker.grammar import MaskWork, num_mask_words
from tests.cached_models import cached_model
from tests.engine.grammars.matching import accepts, allowed, ready

VOCAB = 258
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(ByteTokenizer, VOCAB, 2)


def text_of(**given: Any) -> str:
    return grammar_text(StructuredOutputsParams(**given))


GOOD_AND_BAD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": SCHEMA},
        ['{"a":"x"}', '{ "a": "yy" }', '{\n  "a": "x",\n  "b": [1, 2]\n}'],
        ['{"a":"z"}', '{"b":[1]}', '{"a":"x","c":1}', '{  "a":"x"}', '{"a":"x"} ', '{\n\n"a":"x"}', "[]"],
    ),
    ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a":"x"}'], ['{ "a":"x"}']),
    ({"json": SCHEMA, "whitespace_pattern": "\\t"}, ['{\t"a":"x"}'], ['{ "a":"x"}', '{\t\t"a":"x"}']),
    ({"json": {"properties": {"a": True}}, "disable_additional_properties": True}, ['{"a":1}', "5"], ['{"b":1}']),
    ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", '"a"']),
    ({"choice": ["yes", 'no "\n', "été"]}, ["yes", 'no "\n', "été"], ["no", "y", "yess"]),
    ({"choice": ["a", "abc", "ab"]}, ["a", "ab", "abc"], ["", "b", "abcd", "aa"]),
    ({"choice": [f"{i} choices" for i in range(20_000)]}, ["7 choices", "19999 choices"], ["20000 choices", "7", ""]),
    ({"regex": r"^[a-c]+/\d\/$"}, ["abc/5/"], ["abc", "d/5/", "abc/5/x"]),
    ({"regex": "a\\\nb\nc\\\\/(?x) [d\n] # e"}, ["a\nb\nc\\/d"], ["a\\nb\nc\\/d", "anb\nc\\/d"]),
    ({"grammar": 'start: "a" rest\nrest: "b" | %json {"type": "null"}'}, ["ab", "anull"], ["a", "b"]),
    ({"grammar": 'root ::= "yes" | "no" [0-9]+'}, ["yes", "no12"], ["no", "12"]),
    (
        {
            "structural_tag": {
                "structures": [{"begin": "<f=g>", "schema": {"type": "null"}, "end": "</f>"}],
                "triggers": ["<f="],
            }
        },
        ["free text", "text <f=g>null</f> more", "<f=g>null</f><f=g>null</f>"],
        ["<f=h>", "<f=g>5</f>"],
    ),
    (
        {
            "structural_tag": {
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f="],
                    "tags": [
                        {
                            "begin": "<f=g>",
                            "content": {"type": "json_schema", "json_schema": {"type": "null"}},
                            "end": "</f>",
                        }
                    ],
                }
            },
        },
        ["free text", "text <f=g>null</f> more", "<f=g>null</f><f=g>null</f>"],
        ["<f=h>", "<f=g>5</f>"],
    ),
]


@pytest.mark.parametrize(("given", "good", "bad"), GOOD_AND_BAD, ids=[json.dumps(one[0])[:40] for one in GOOD_AND_BAD])
def test_every_kind_of_grammar(
    backend: LlguidanceBackend, given: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = text_of(**given)
    assert [text for text in good if not accepts(backend, ByteTokenizer(), grammar, text)] == []
    assert [text for text in bad if accepts(backend, ByteTokenizer(), grammar, text)] == []


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_real_vocabularies(name: str) -> None:
    """Byte-level BPE and SentencePiece, rebuilt from GGUF files; the model's logits are wider than the vocabulary."""
    tokenizer = load_tokenizer(cached_model(name))
    vocab = tokenizer.facts.vocab_size + 64
    backend = LlguidanceBackend(lambda: tokenizer, vocab, 2)
    grammar = text_of(json=SCHEMA)
    for text in ('{"a":"x"}', '{\n    "a": "yy",\n    "b": [10, 200]\n}'):
        assert accepts(backend, tokenizer, grammar, text, vocab)
    matcher = ready(backend, grammar)
    start = allowed(backend, matcher, vocab)
    assert {tokenizer.token_bytes(token)[:1] for token in start} == {b"{"}
    assert accepts(backend, tokenizer, text_of(regex="[a-zé ]{3,40}"), "une journée à été"[:11], vocab)


def test_reasoning_comes_first_and_is_free(backend: LlguidanceBackend) -> None:
    grammar = text_of(json=SCHEMA, reasoning_end="</think>")
    tokenizer = ByteTokenizer()
    for text in ('Let me see. {"a": 5}\n</think>\n\n{"a":"x"}', '</think>{"a":"x"}'):
        assert accepts(backend, tokenizer, grammar, text)
    for text in ('{"a":"x"}', 'Hm.</think>{"a":"z"}', "Hm.</think>"):
        assert not accepts(backend, tokenizer, grammar, text)
    by_id = ready(backend, text_of(choice=["yes"], reasoning_end=BOS))
    by_id.advance([*b"Hm. ", BOS])
    assert allowed(backend, by_id) == {ord("y"), ord(" "), ord("\n")}


def test_a_grammar_in_the_librarys_own_form_is_refused() -> None:
    """It could carry options, such as one that ignores unknown keywords."""
    own = json.dumps({"grammars": [{"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}]})
    for text in (own, f"\n {own}"):
        with pytest.raises(RequestError, match="not JSON"):
            text_of(grammar=text)


def test_masks_of_drafts_equal_those_of_single_steps(backend: LlguidanceBackend) -> None:
    tokens = [*b'{"a":"yy","b":[1]}', EOS, EOS]
    matcher = ready(backend, text_of(json=SCHEMA))
    masks = np.zeros((len(tokens) + 1, num_mask_words(VOCAB)), np.int32)
    backend.fill([MaskWork(matcher, 0, tuple(tokens))], masks)
    single = matcher.copy()
    for mask, token in zip(masks, [*tokens, None], strict=True):
        one = np.zeros((1, num_mask_words(VOCAB)), np.int32)
        backend.fill([MaskWork(single, 0)], one)
        assert (mask == one[0]).all()
        if token is not None:
            single.advance([token])
    assert matcher.count_allowed(tokens[:-2]) == len(tokens) - 2
    assert matcher.count_allowed([*b'{"c']) == 2
    bad = np.zeros((4, num_mask_words(VOCAB)), np.int32)
    backend.fill([MaskWork(matcher, 0, tuple(b'{x"'))], bad)
    assert allowed(backend, matcher) == {ord("{")}  # nothing of this has moved it


def test_forced_tokens_are_those_that_the_masks_allow_alone(backend: LlguidanceBackend) -> None:
    schema = {"type": "object", "properties": {"long_name": {"enum": ["first", "second"]}}, "required": ["long_name"]}
    tokens = [*b'{ "long_name":"second"', ord("}")]
    matcher = ready(backend, text_of(json={**schema, "additionalProperties": False}))
    num_forced = 0
    for i, token in enumerate(tokens):
        forced = list(matcher.forced())
        ahead = matcher.copy()
        for one in forced:
            assert allowed(backend, ahead) == {one}
            ahead.advance([one])
        assert forced == tokens[i : i + len(forced)]
        assert matcher.error == ""
        num_forced += bool(forced)
        matcher.advance([token])
    assert num_forced > 12
    matcher.advance([EOS])
    assert list(matcher.forced()) == []


def test_a_batch_gives_the_masks_of_single_calls(backend: LlguidanceBackend) -> None:
    grammar, other = text_of(json=SCHEMA), text_of(regex="[a-z]+")
    matchers = []
    for i, prefix in enumerate([b"", b"{", b'{"a":"', b"", b"abc", b'{"a":"x","b":[']):
        matchers.append(ready(backend, grammar if i in (0, 1, 2, 5) else other))
        matchers[-1].advance(list(prefix))
    batch = np.zeros((len(matchers), num_mask_words(VOCAB)), np.int32)
    backend.fill([MaskWork(matcher, i) for i, matcher in enumerate(matchers)], batch)
    for matcher, mask in zip(matchers, batch, strict=True):
        one = np.zeros((1, num_mask_words(VOCAB)), np.int32)
        backend.fill([MaskWork(matcher, 0)], one)
        assert (mask == one[0]).all()


def test_a_copied_matcher_is_independent(backend: LlguidanceBackend) -> None:
    matcher = ready(backend, text_of(choice=["ax", "by"]))
    copy = matcher.copy()
    copy.advance([ord("a")])
    assert allowed(backend, copy) == {ord("x")}
    assert allowed(backend, matcher) == {ord("a"), ord("b")}


def test_after_the_end_only_end_tokens_are_allowed(backend: LlguidanceBackend) -> None:
    """A step may be in flight when the end token is sampled, and with ignore_eos there are more."""
    matcher = ready(backend, text_of(choice=["a"]))
    matcher.advance([ord("a"), EOS])
    assert allowed(backend, matcher) == {EOS}
    matcher.advance([EOS, EOS, 5])
    assert matcher.error == ""
    assert matcher.count_allowed([EOS]) == 0


def test_a_forbidden_token_is_an_error(backend: LlguidanceBackend) -> None:
    matcher = ready(backend, text_of(choice=["a"]))
    matcher.advance([ord("b")])
    assert "doesn't satisfy the grammar" in matcher.error


def test_a_grammar_that_does_not_compile_is_ready_with_an_error(backend: LlguidanceBackend) -> None:
    matcher = ready(backend, "start: nothing")
    assert "nothing" in matcher.error
    assert matcher.copy().error == matcher.error


class PanicException(BaseException):
    """What a panic of a Rust library is in Python: not an Exception, and not importable."""


class Panicking:
    """A library's matcher that panics in some of its methods."""

    def __init__(self, inner: Any, *names: str) -> None:
        self._inner, self._names = inner, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return self._panic
        return getattr(self._inner, name)

    def _panic(self, *_: object) -> None:
        raise PanicException("index out of bounds")


@pytest.mark.parametrize("name", ["consume_token", "validate_tokens", "deep_copy"])
def test_a_panic_of_the_library_is_an_error_of_its_matcher(backend: LlguidanceBackend, name: str) -> None:
    matcher = ready(backend, text_of(choice=["ab"]))
    assert isinstance(matcher, LlguidanceMatcher)
    matcher.inner = Panicking(matcher.inner, name)  # type: ignore[assignment]
    if name == "deep_copy":
        matcher = matcher.copy()
    else:
        assert matcher.count_allowed([ord("a"), ord("b")]) == 2 * (name == "consume_token")
        matcher.advance([ord("a"), ord("b")])
    assert "index out of bounds" in matcher.error
    assert "index out of bounds" in matcher.copy().error
    assert matcher.count_allowed([ord("a")]) == 0


def test_a_panic_while_masks_are_filled_fails_one_row(backend: LlguidanceBackend) -> None:
    matchers = [ready(backend, text_of(choice=[letter])) for letter in "abc"]
    broken = matchers[1]
    assert isinstance(broken, LlguidanceMatcher)
    masks = np.zeros((3, num_mask_words(VOCAB)), np.int32)
    inner = broken.inner
    backend.fill([MaskWork(matchers[0], 0)], masks)  # makes the executor
    backend._executor = PanickingExecutor(backend._executor, inner)  # type: ignore[assignment]
    backend.fill([MaskWork(one, i) for i, one in enumerate(matchers)], masks)
    assert "index out of bounds" in broken.error
    for i in (0, 2):
        assert matchers[i].error == ""
        bits = np.flatnonzero(np.unpackbits(masks[i].view(np.uint8), bitorder="little")[:VOCAB])
        assert bits.tolist() == [ord("abc"[i])]


class PanickingExecutor:
    """Panics where one matcher is among the work."""

    def __init__(self, executor: Any, broken: Any) -> None:
        self._executor, self._broken = executor, broken

    unsafe_compute_mask_ptr_with_draft_token = None

    def unsafe_compute_mask_ptr(self, work: list[Any], *where: int) -> None:
        if any(matcher is self._broken for matcher, *_ in work):
            raise PanicException("index out of bounds")
        self._executor.unsafe_compute_mask_ptr(work, *where)


def test_a_panic_while_compiling_ends_the_wait(monkeypatch: pytest.MonkeyPatch, backend: LlguidanceBackend) -> None:
    def compile_grammar(*_: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(llguidance_backend, "compile_grammar", compile_grammar)
    matcher = ready(backend, text_of(choice=["a"]))
    assert matcher.error == "index out of bounds"


def test_ctrl_c_is_not_treated_as_an_error_of_the_library(backend: LlguidanceBackend) -> None:
    matcher = ready(backend, text_of(choice=["a"]))
    assert isinstance(matcher, LlguidanceMatcher)
    with pytest.raises(KeyboardInterrupt):
        matcher.fail(KeyboardInterrupt())


def test_a_prepared_grammar_is_compiled_once_until_it_is_dropped(
    backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = text_of(choice=["a"])
    ready(backend, grammar)
    with monkeypatch.context() as patch:
        patch.setattr(llguidance_backend, "compile_grammar", None)  # nothing can be compiled now
        assert backend.matcher(OutputRule(grammar)).error == ""
    backend.drop(grammar)
    backend.drop(grammar)
    assert not backend._compiled
    assert backend.matcher(OutputRule(grammar)).error == ""  # even if its request was let in meanwhile


def test_a_tokenizer_that_cannot_be_loaded_fails_its_grammars() -> None:
    def load() -> Tokenizer:
        raise RequestError("no tokenizer here")

    backend = LlguidanceBackend(load, VOCAB, 1)
    matcher = ready(backend, text_of(choice=["a"]))
    assert matcher.error == "no tokenizer here"
    matcher.advance([5])
    assert matcher.count_allowed([5]) == 0


def test_compiling_is_off_the_calling_thread() -> None:
    loading = threading.Event()

    def load() -> Tokenizer:
        assert loading.wait(300)
        return ByteTokenizer()

    backend = LlguidanceBackend(load, VOCAB, 1)
    grammar = text_of(choice=["a"])
    prepared = backend.prepare(grammar)
    assert not prepared.done()
    loading.set()
    prepared.result(60)
    assert backend.matcher(OutputRule(grammar)).error == ""
    backend.shutdown()
    backend.shutdown()


REGEX = {"type": "regex", "pattern": "b+"}


@pytest.mark.parametrize(
    "given",
    [
        {"grammar": 'start: /b+/ "b"'},
        {"grammar": 'start: X "ab" | "(" start ")"\nX: "ab"+\n%llguidance {"no_forcing": false}'},
        {"grammar": 'start: X "b" // no end of line\nX: "b"+ //'},
        {"grammar": 'root ::= x "\\u00e8" | "(" root ")"\nx ::= "\\u00e9"+'},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "sequence", "elements": [REGEX, REGEX]}}},
        {"json": SCHEMA, "whitespace_pattern": '"+'},
    ],
)
@pytest.mark.parametrize("end", [None, "</think>"])
def test_a_grammar_that_forces_text_without_end_is_answered(
    backend: LlguidanceBackend, given: dict[str, Any], end: str | None
) -> None:
    """The library would append the text that it forces for ever, on the thread that fills masks."""
    text = text_of(**given, reasoning_end=end)
    assert error_of_grammar(backend.vocabulary.get(), text) == ""
    matcher = ready(backend, text)
    for _ in range(20):
        assert matcher.forced() == []
        following = allowed(backend, matcher)
        matcher.advance([ord('"') if ord('"') in following else min(following)])
    assert matcher.error == ""
