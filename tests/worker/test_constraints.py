"""What may not follow an output: bad words and repeated sequences, against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.worker.constraints import BadWords, ends_of_repeats

WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8)


@given(WORDS, st.lists(st.integers(0, 3), max_size=8))
def test_a_token_that_would_complete_a_bad_word_is_banned(words: list[list[int]], output: list[int]) -> None:
    found = BadWords(words).after(np.array(output, np.int32))
    banned = {int(token) for ids in found for token in ids}
    assert banned == {word[-1] for word in words if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]}


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 5))
def test_a_token_that_would_complete_a_sequence_again_is_banned(tokens: list[int], size: int) -> None:
    there = {tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)}
    last = tuple(tokens[len(tokens) - size + 1 :])
    expected = [token for token in range(3) if len(last) == size - 1 and (*last, token) in there]
    assert ends_of_repeats(np.array(tokens, np.int32), size).tolist() == expected


class CountedLookups(dict[tuple[int, int], int]):
    count = 0

    def get(self, *args: object) -> int | None:  # type: ignore[override]
        self.count += 1
        return super().get(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_words", [10, 10_000])
def test_a_step_looks_only_as_far_back_as_the_output_agrees(num_words: int) -> None:
    words = BadWords([(i, i + 1, i + 2) for i in range(10, 10 + num_words)])
    words._children = lookups = CountedLookups(words._children)
    assert words.after(np.array([5, 10, 11], np.int32))[0].tolist() == [12]
    assert words.after(np.array([5] * 5000, np.int32)) == []
    assert lookups.count == 4
