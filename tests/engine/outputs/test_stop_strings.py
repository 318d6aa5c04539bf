"""The stop-string automaton against the definition read letter by letter, and its cost: linear, and shared."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import Request
from pagoda.engine.outputs.detokenizer import StopSearch, StopStrings
from pagoda.engine.outputs.output_processor import OutputKind, OutputProcessor
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer

STOPS = st.lists(st.text("ab<é", min_size=1, max_size=6), min_size=1, max_size=6)


def first_end(text: str, stops: list[str], passed: list[bool]) -> tuple[int, str] | None:
    """(end, string) of the first end of any string at a character that may stop; the longest of those there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and not passed[end - 1]:
            return end, max(ending, key=len)
    return None


@given(st.lists(st.tuples(st.text("ab<é", max_size=7), st.booleans()), max_size=12), STOPS)
def test_the_first_end_and_what_is_held_are_as_defined(chunks: list[tuple[str, bool]], stops: list[str]) -> None:
    search = StopSearch(StopStrings(stops))
    text, passed = "", []
    for chunk, may_stop in chunks:
        text += chunk
        passed += [not may_stop] * len(chunk)
        surplus = search.feed(chunk, may_stop)
        expected = first_end(text, stops, passed)
        if expected is not None:
            assert surplus is not None
            assert (len(text) - surplus, search.found) == expected
            return
        assert surplus is None
        assert search.found is None
        ends = [text[at:] for at in range(len(text) + 1)]
        beginnings = [len(end) for end in ends if any(s.startswith(end) and s != end for s in stops)]
        assert search.num_held == max(beginnings)


class CountedLookups(dict[tuple[int, str], int]):
    count = 0

    def get(self, *args: object) -> int | None:  # type: ignore[override]
        self.count += 1
        return super().get(*args)  # type: ignore[arg-type]


def test_text_that_almost_matches_a_long_string_costs_constant_work_per_character() -> None:
    strings = StopStrings(["a" * 5000 + "b", *("a" * size + "c" for size in range(1, 60))])
    strings.jumps = lookups = CountedLookups(strings.jumps)
    search = StopSearch(strings)
    for _ in range(20):
        assert search.feed("a" * 4999 + "d") is None
    assert lookups.count <= 2 * 20 * 5000 + 60


def test_a_long_string_takes_linear_memory_and_all_outputs_share_it() -> None:
    long = "".join(chr(0x4E00 + i % 20000) for i in range(60_000))
    processor = OutputProcessor(ByteTokenizer())
    params = SamplingParams(n=128, stop=long)  # type: ignore[arg-type]
    request = Request("a", np.ones(4, np.int32), params, handle=1)
    tracemalloc.start()
    try:
        processor.open(request, OutputKind.DELTA)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 3e6
    assert most < 40e6
