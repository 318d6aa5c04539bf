"""Encoding in other processes: the same ids as in this one, and an end to every text."""

import random
import threading
from collections.abc import Iterator

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pagoda.base.errors import RequestError
from pagoda.engine.templates.special_marks import SpecialMarks
from pagoda.engine.tokenizers.bounded_encoder import BoundedEncoder, EncodingLimits
from pagoda.engine.tokenizers.text_encoder import TextEncoder
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, make_facts

# The library gives up a match after ten million steps; none of these takes as many.
CATASTROPHIC = r"!(?:a|b|ab)+c|."
SLOW = ("!" + "ab" * 19) * 20_000
PATIENT = EncodingLimits(60.0)


def make_backend() -> tokenizers.Tokenizer:
    letters = "ab!<|m>é漢 "
    backend = tokenizers.Tokenizer(models.BPE({**{c: i for i, c in enumerate(letters)}, "ab": 50}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(CATASTROPHIC), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<|m|>", normalized=False)])
    return backend


@pytest.fixture
def encoder() -> Iterator[BoundedEncoder]:
    encoder = BoundedEncoder(make_backend(), SpecialMarks(["<|m|>"]), None, PATIENT)
    yield encoder
    encoder.close()


def test_ids_equal_those_of_the_encoder_in_this_process() -> None:
    marks = SpecialMarks(["<|m|>"])
    here, there = TextEncoder(make_backend(), marks, None), BoundedEncoder(make_backend(), marks, None, PATIENT)
    draw = random.Random(1)
    parts = ["a", "b", "ab", "!", "<|m|>", "<|", "é", "漢", " ", "\x00", marks.put("<|m|>")]
    try:
        for _ in range(200):
            text = "".join(draw.choices(parts, k=draw.choice((0, 1, 5, 60, 2_000))))
            for special in (False, True):
                assert there.encode(text, special) == here.encode(text, special)
                assert there.encode_marked(text, special) == here.encode_marked(text, special)
    finally:
        there.close()


@pytest.mark.parametrize("text", [SLOW, SLOW[:1_000]], ids=["long", "short"])
def test_a_text_that_takes_too_long_is_refused_and_others_are_not(text: str) -> None:
    encoder = BoundedEncoder(make_backend(), SpecialMarks(["<|m|>"]), None, EncodingLimits(0.2))
    try:
        said = f"prompt: the tokenizer was stopped after 0.2 s, on {len(text)} characters of text"
        with pytest.raises(RequestError, match=said) as caught:
            encoder.encode(text)
        assert caught.value.param == "prompt"
        with pytest.raises(RequestError, match="messages: the tokenizer was stopped") as caught:
            encoder.encode_marked(text)
        assert caught.value.param == "messages"
    finally:
        encoder.close()


def test_short_texts_do_not_wait_for_a_slow_one(encoder: BoundedEncoder) -> None:
    failed: list[BaseException] = []

    def encode() -> None:
        try:
            encoder.encode(SLOW)
        except RequestError as error:
            failed.append(error)

    slow = threading.Thread(target=encode)
    slow.start()
    assert encoder.encode("ab!") == [0, 1, 2]
    assert slow.is_alive()
    encoder.close()
    slow.join(30)
    assert not slow.is_alive(), "closing ends the processes at work"
    assert failed
    assert encoder.encode("ab!") == [0, 1, 2], "another text starts a new process"


def test_a_text_that_grows_beyond_memory_is_refused() -> None:
    backend = make_backend()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 34)
    tokenizer = LibraryTokenizer(backend, make_facts(backend, None, (), None, {}), EncodingLimits(60.0, 2**28))
    try:
        assert tokenizer.inline_chars == 0
        assert tokenizer.encode("b!") == [1, 2]
        with pytest.raises(RequestError, match="prompt: the tokenizer crashed, or needed too much memory, on 1 char"):
            tokenizer.encode("a")
        assert tokenizer.encode("b!") == [1, 2]
    finally:
        tokenizer.close()


def test_a_text_that_the_library_cannot_encode_is_refused_by_name(encoder: BoundedEncoder) -> None:
    with pytest.raises(RequestError, match="prompt: the tokenizer cannot split this text"):
        encoder.encode("!" + "ab" * 40)
    with pytest.raises(RequestError, match="messages: the tokenizer cannot split this text"):
        encoder.encode_marked("!" + "ab" * 40)
