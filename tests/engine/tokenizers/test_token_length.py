"""The bound on how many characters one token can cover gives a lower bound on the number of tokens."""

import random

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.token_length import TokenLengthBound, token_length_bound
from tests.cached_models import cached_model


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str) -> None:
    tokenizer = load_tokenizer(cached_model(name))
    bound = tokenizer.facts.length_bound
    assert bound is not None
    vocabulary = sorted(tokenizer.backend.get_vocab(), key=len)
    longest = [tokenizer.backend.decode([tokenizer.backend.token_to_id(token)]) for token in vocabulary[-40:]]
    pieces = [
        *longest,
        " ",
        "\n",
        "\t",
        "e\u0301",
        "\u1100\u1161\u11a8",
        "\x04",
        "\x06",
        "\U0001f600",
        "\U00050000",
        "a",
        "<",
        "\x00",
    ]
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(pieces) * rng.choice((1, 1, 7, 60)) for _ in range(rng.randint(1, 6)))
        assert bound.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), repr(text)
    for text in longest:
        assert bound.min_tokens(text * 50) <= len(tokenizer.encode(text * 50, add_special_tokens=False)), repr(text)


def test_characters_that_a_vocabulary_drops_do_not_count() -> None:
    assert TokenLengthBound(10, "\x04").min_tokens("\x04" * 10**6 + "a" * 11) == 2


def word_piece() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def byte_level(normalizer: normalizers.Normalizer | None = None, **token: bool) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([tokenizers.AddedToken("<x>", normalized=False, **token)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        word_piece(),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace(tokenizers.Regex(r"\s+"), " ")),
        byte_level(normalizers.NFKC()),
        byte_level(lstrip=True),
        byte_level(rstrip=True),
    ],
)
def test_there_is_no_bound_if_a_normaliser_may_delete_text(backend: tokenizers.Tokenizer) -> None:
    assert token_length_bound(backend) is None


def test_a_normaliser_that_composes_widens_the_bound() -> None:
    assert token_length_bound(byte_level()) == TokenLengthBound(3)
    assert token_length_bound(byte_level(normalizers.NFC())) == TokenLengthBound(12)


def test_only_as_much_of_a_text_is_scanned_as_is_needed() -> None:
    looked_at = 0

    class Counting(str):
        __slots__ = ()

        def count(self, *args: object) -> int:  # type: ignore[override]
            nonlocal looked_at
            looked_at += len(self)
            return 0

        def __getitem__(self, key: object) -> "Counting":  # type: ignore[override]
            return Counting(str(self)[key])  # type: ignore[index]

    bound = TokenLengthBound(10, "\x04\x05")
    text = Counting("a" * 15_000_000)
    assert bound.min_tokens(text, enough=2048) == 2048
    assert looked_at <= 4 * 65536, "one piece, for each character that is dropped"
