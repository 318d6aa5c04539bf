"""Incremental text against the text of the whole, stop strings against a definition that reads letter by letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.outputs.detokenizer import Detokenizer
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer

TEXTS = [
    "plain",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "עברית‏",
    "a\u0301\u0302",
    "\U0001f600" * 5,
    "\n\t \r\n",
]


def deltas_of(tokens: list[int], params: SamplingParams, chunk: int = 1) -> list[str]:
    detokenizer = Detokenizer(ByteTokenizer(), params)
    deltas: list[str] = []
    for at in range(0, len(tokens), chunk):
        kept = detokenizer.append(tokens[at : at + chunk])
        deltas.append(detokenizer.take())
        if detokenizer.stopped_by is not None:
            assert kept <= chunk
            return deltas
    detokenizer.finish()
    deltas.append(detokenizer.take())
    return deltas


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_deltas_join_to_the_text_and_never_contain_half_a_character(text: str, chunk: int) -> None:
    deltas = deltas_of(list(text.encode()), SamplingParams(), chunk)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


@given(st.lists(st.integers(0, 257), max_size=80), st.booleans(), st.integers(1, 5))
def test_any_bytes_join_to_the_decoding_of_the_whole(tokens: list[int], skip: bool, chunk: int) -> None:
    whole = ByteTokenizer().decode(tokens, skip)
    joined = "".join(deltas_of(tokens, SamplingParams(skip_special_tokens=skip), chunk))
    # Only a character that is cut off at the very end is missing. It is one replacement in the whole, or two where its
    # bytes begin a surrogate (ED A0): the incremental decoder waits for the third byte before it gives up.
    assert joined in (whole, whole.removesuffix("\ufffd"), whole.removesuffix("\ufffd\ufffd"))


def test_half_a_character_at_the_end_is_dropped() -> None:
    assert "".join(deltas_of(list("ab€".encode())[:-1], SamplingParams())) == "ab"


def test_invalid_bytes_are_shown_at_once() -> None:
    assert deltas_of([0xFF, 0x41], SamplingParams())[:2] == ["\ufffd", "A"]


def test_special_tokens_are_left_out_or_shown() -> None:
    tokens = [256, *b"hi", 257]
    assert "".join(deltas_of(tokens, SamplingParams())) == "hi"
    assert "".join(deltas_of(tokens, SamplingParams(skip_special_tokens=False))) == "<bos>hi<eos>"


# ---- stop strings


def stop_by_definition(text: str, stops: list[str], first_end: int = 1) -> tuple[int, str] | None:
    """Return (end, string) for the first position >= `first_end` at which a string ends; the longest such string."""
    for end in range(first_end, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 6),
    st.booleans(),
)
def test_stop_strings_are_cut_exactly(text: str, stops: list[str], chunk: int, include: bool) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)  # type: ignore[arg-type]
    detokenizer = Detokenizer(ByteTokenizer(), params)
    tokens, kept, shown = list(text.encode()), 0, ""
    for at in range(0, len(tokens), chunk):
        kept += detokenizer.append(tokens[at : at + chunk])
        shown += detokenizer.take()
        assert text.startswith(shown), "text that was sent is never taken back"
        if detokenizer.stopped_by is not None:
            break
    else:
        detokenizer.finish()
        shown += detokenizer.take()
    expected = stop_by_definition(text, stops)
    if expected is None:
        assert detokenizer.stopped_by is None
        assert shown == text
    else:
        end, string = expected
        assert detokenizer.stopped_by == string
        assert shown == text[: end if include else end - len(string)]
        assert kept == end  # one byte, one token here


def test_a_stop_string_over_several_tokens_in_a_multibyte_text() -> None:
    tokens = list("héé→STOP→ no".encode())
    for chunk in (1, 2, 5, 50):
        assert "".join(deltas_of(tokens, SamplingParams(stop="→STOP→"), chunk)) == "héé"  # type: ignore[arg-type]


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    params = SamplingParams(stop="b", min_tokens=3)  # type: ignore[arg-type]
    detokenizer = Detokenizer(ByteTokenizer(), params)
    assert detokenizer.append(list(b"abcabc")) == 5
    assert detokenizer.text == "abca"
    assert detokenizer.stopped_by == "b"


def test_the_text_of_ten_thousand_tokens_takes_no_quadratic_time() -> None:
    params = SamplingParams(stop=["\n\nUser:"])  # type: ignore[arg-type]
    calls = 0

    class Counting(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            nonlocal calls
            calls += 1
            return super().token_bytes(token_id)

    detokenizer = Detokenizer(Counting(), params)
    for token in b"0123456789" * 1000:
        detokenizer.append([token])
    assert calls == 10_000
    assert len(detokenizer.text) == 10_000
