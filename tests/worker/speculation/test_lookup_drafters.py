"""N-gram and suffix drafters propose what a search token by token finds."""

import time
from itertools import pairwise

import numpy as np
import pytest

from pagoda.core.scheduler_output import RowFork
from pagoda.worker.speculation.drafter import NUM_GRADES, Drafter, grade_of_match
from pagoda.worker.speculation.lookup import (
    NgramDrafter,
    OutputPool,
    SuffixDrafter,
    continue_from,
    longest_suffix_matches,
)
from pagoda.worker.table_mirror import TableMirror
from tests.worker.hand_made import i32, row_init, step


def naive_matches(tokens: list[int], longest: int) -> tuple[list[int], int]:
    """Every occurrence of the longest suffix that occurs earlier, tried one by one."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = tokens[-length:]
        ends = [end for end in range(length - 1, len(tokens) - 1) if tokens[end - length + 1 : end + 1] == suffix]
        if ends:
            return ends, length
    return [], 0


@pytest.mark.parametrize("vocab", [1, 2, 4, 30])
def test_the_longest_earlier_suffix_is_found(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(300):
        tokens = rng.integers(0, vocab, rng.integers(0, 40)).astype(np.int32)
        longest = int(rng.integers(1, 8))
        ends, length = longest_suffix_matches(tokens, longest)
        assert (ends.tolist(), length) == naive_matches(tokens.tolist(), longest)


def test_drafts_repeat_what_followed_an_earlier_match() -> None:
    tokens = i32(5, 1, 2, 3, 1, 2, 3)
    assert continue_from(tokens, 3, 2).tolist() == [1, 2]
    assert continue_from(tokens, 3, 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_grades_rise_with_the_match() -> None:
    grades = [grade_of_match(length) for length in range(1, 40)]
    assert grades[0] == 0
    assert grades[-1] == NUM_GRADES - 1
    assert all(a <= b for a, b in pairwise(grades))


def table_of(*rows: list[int], num_prompt: int = 1) -> TableMirror:
    table = TableMirror(8, 4096, 16, 1)
    for row, tokens in enumerate(rows):
        table.apply(step(1, [], [], admitted=(row_init(row, tokens, [1], num_prompt=num_prompt),)))
    return table


def proposed(drafter: Drafter, table: TableMirror, rows: list[int], most: int) -> list[list[int]]:
    drafts = drafter.propose(table, i32(*rows), np.full(len(rows), most, np.int32))
    return [draft.tokens.tolist() for draft in drafts]


def test_ngram_copies_what_followed_the_last_occurrence() -> None:
    table = table_of([7, 8, 9, 1, 7, 8, 9, 2, 5, 7, 8, 9], [1, 2, 3, 4])
    assert proposed(NgramDrafter(2, 4), table, [0, 1], 3) == [[2, 5, 7], []]
    assert proposed(NgramDrafter(4, 4), table, [0], 3) == [[]]  # three tokens match, and four are asked for


def test_suffix_takes_the_most_common_continuation_and_stops_at_rare_ones() -> None:
    text = [1, 2, 3, 10, 1, 2, 3, 10, 4, 1, 2, 3, 11, 1, 2, 3]
    table = table_of(text)
    drafter = SuffixDrafter(max_spec_factor=9, min_token_prob=0.6)
    assert proposed(drafter, table, [0], 4) == [[10]]  # two of three go on with 10, then they part
    drafter = SuffixDrafter(max_spec_factor=9, min_token_prob=0.1)
    assert proposed(drafter, table, [0], 4) == [[10, 4, 1, 2]]
    drafter = SuffixDrafter(max_spec_factor=1)
    assert proposed(drafter, table, [0], 9) == [[10, 4, 1]]  # a match of three tokens drafts three


def finish(drafter: SuffixDrafter, table: TableMirror, row: int, **events: object) -> None:
    output = step(9, [], [], released=i32(row), **events)
    drafter.apply(output, table)
    table.apply(output)


def begin(drafter: SuffixDrafter, table: TableMirror, row: int, tokens: list[int], salt: str | None) -> None:
    output = step(1, [], [], admitted=(row_init(row, tokens, [1], num_prompt=2, cache_salt=salt),))
    drafter.apply(output, table)
    table.apply(output)


def test_finished_outputs_are_found_by_the_same_salt_only() -> None:
    drafter, table = SuffixDrafter(), TableMirror(8, 256, 16, 1)
    begin(drafter, table, 0, [1, 2, 3, 4, 5, 6, 7, 8], "a")
    begin(drafter, table, 1, [1, 2, 3, 4, 5, 16, 17, 18], None)
    finish(drafter, table, 0)
    finish(drafter, table, 1)
    begin(drafter, table, 2, [9, 3, 4, 5], "a")
    begin(drafter, table, 3, [9, 3, 4, 5], None)
    begin(drafter, table, 4, [9, 3, 4, 5], "b")
    assert proposed(drafter, table, [2, 3, 4], 8) == [[6, 7, 8], [16, 17, 18], []]


def test_drafting_survives_preemption_and_forks() -> None:
    drafter, table = SuffixDrafter(), TableMirror(8, 256, 16, 1)
    begin(drafter, table, 0, [1, 2, 3, 4, 5, 6], "a")
    fork = step(2, [], [], forks=(RowFork(0, 1, 1, 1),))
    drafter.apply(fork, table)
    table.apply(fork)
    finish(drafter, table, 0, preempted=((0, 0),))
    begin(drafter, table, 2, [9, 3, 4, 5], "a")
    assert proposed(drafter, table, [2], 8) == [[]]  # nothing has finished yet
    finish(drafter, table, 1)
    assert proposed(drafter, table, [2], 8) == [[6]]


def naive_pool(texts: list[tuple[list[int], int]], tokens: list[int], owner: int, longest: int) -> int:
    best = 0
    for text, of in texts:
        for end in range(2, len(text)) if of == owner else ():
            length = 0
            while length < min(longest, len(tokens), end + 1) and text[end - length] == tokens[-1 - length]:
                length += 1
            best = max(best, length)
    return best if best >= 3 else 0


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_finds_the_longest_match_while_it_forgets_the_oldest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity, kept = 400, 12
    pool, texts = OutputPool(capacity, kept), []
    for _ in range(80):
        text = rng.integers(0, 3, rng.integers(1, 60)).tolist()
        owner = int(rng.integers(2))
        pool.add(np.array(text, np.int32), owner)
        if len(text) > 3:
            texts.append((text, owner))
        texts = texts[-kept:]
        asked = rng.integers(0, 3, 12).tolist()
        ends, length = pool.longest_matches(np.array(asked, np.int32), owner, 10)
        # Chains are cut at 16 occurrences and the ring overwrites: never more than the search finds, rarely less.
        assert length <= naive_pool(texts, asked, owner, 10)
        for end in ends.tolist():
            following = pool.following(end, 5)
            assert any(of == owner and _occurs(text, asked[-length:] + following) for text, of in texts), (
                "not in any text that is kept"
            )
    small = OutputPool(1000, 100)
    small.add(i32(*range(10, 40)), 1)
    ends, length = small.longest_matches(i32(3, 15, 16, 17, 18), 1, 24)
    assert (length, small.following(int(ends[0]), 3)) == (4, [19, 20, 21])


def _occurs(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text)))


def test_without_a_pool_no_output_is_kept() -> None:
    pool = OutputPool(100, 0)
    pool.add(i32(*range(10)), 0)
    assert pool.longest_matches(i32(1, 2, 3), 0, 8)[1] == 0


@pytest.mark.parametrize("drafter", [NgramDrafter(2, 16), SuffixDrafter()], ids=["ngram", "suffix"])
def test_a_lookup_is_fast(drafter: Drafter) -> None:
    """The aim is below 50 us of CPU per row; the bound here allows for a busy machine."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 3000, 4000)
    table = table_of(words.tolist())
    if isinstance(drafter, SuffixDrafter):
        for _ in range(200):
            drafter._pool.add(rng.integers(0, 3000, 200).astype(np.int32), 0)
    rows, most = i32(0), i32(8)
    best_s = 1.0
    for _ in range(30):
        begin_s = time.thread_time()
        for _ in range(10):
            drafter.propose(table, rows, most)
        best_s = min(best_s, (time.thread_time() - begin_s) / 10)
    assert best_s < 200e-6, f"{best_s * 1e6:.0f} us"
