"""The merges of a vocabulary, found all together, are those that looking for each by itself finds."""

import random

import numpy as np
import pytest

from pagoda.engine.tokenizers.gguf_tokenizer import merges_of


def one_by_one(tokens: list[str], ranks: np.ndarray) -> list[tuple[str, str]]:
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for index in np.argsort(-ranks, kind="stable").tolist():
        token = tokens[index]
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = sorted((ids[left], ids[right]) for left, right in cuts if left in ids and right in ids)
        merges += [(tokens[left], tokens[right]) for left, right in pairs]
    return merges


@pytest.mark.parametrize("letters", ["ab", "abcdefgh\0", "日本語▁é😀a"])
def test_merges_are_those_of_a_search_for_each_token(letters: str):
    generator = random.Random(letters)
    words = ["".join(generator.choices(letters, k=generator.randrange(9))) for _ in range(4000)]  # some more than once
    tokens = ["", "x" * 5000, *letters, *words]
    for ranks in (-np.arange(len(tokens), dtype=np.float64), np.array(generator.choices(range(50), k=len(tokens)))):
        assert merges_of(tokens, ranks) == one_by_one(tokens, ranks)


def test_vocabularies_of_one_letter_or_nothing():
    assert merges_of([], np.zeros(0)) == []
    assert merges_of(["a", "b"], np.zeros(2)) == []
