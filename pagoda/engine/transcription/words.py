"""Words and their times: from how much each token looks at each moment of a sound to when each word is said.

Whisper's own algorithm (https://github.com/openai/whisper, `timing.py`), with the details of transformers'.
"""

import string
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.outputs import TranscriptionSegment, TranscriptionWord

Words = list[tuple[str, list[int]]]
"""Texts, each with the indices of its tokens."""

UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")
"""Codes of languages that do not put spaces between words."""

_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
_LOST = "\ufffd"  # what decoding puts in the place of bytes that are no whole character


def alignment_heads(settings: Mapping[str, object], num_layers: int, num_heads: int) -> tuple[tuple[int, int], ...]:
    """Return the heads of cross attention, as (layer, head), that look where a token is said.

    settings: of generation_config.json, which may name them; else all heads of the upper half of the layers, as in
    Whisper's own code.   num_layers, num_heads: of the decoder. Raises ConfigError for heads that it does not have.
    """
    given = settings.get("alignment_heads")
    known = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    if given is None:
        return tuple(known[num_layers // 2 * num_heads :])
    found = [tuple(pair) if isinstance(pair, list) else pair for pair in given] if isinstance(given, list) else []
    if not found or any(pair not in known for pair in found):
        raise ConfigError(
            f"generation_config.json: alignment_heads = {abbreviate(given)}, expected pairs of one of {num_layers} "
            f"layers and one of {num_heads} heads"
        )
    return tuple(pair for pair in known if pair in found)


_BOTH, _DOWN, _RIGHT = range(3)


def row_starts(matrix: np.ndarray) -> list[int]:
    """Return in which column the best path through a matrix, float [rows, columns] of finite numbers, enters each row.

    The path goes from the first corner to the last by steps to the next row, column or both, and has the largest sum
    (dynamic time warping). One diagonal after the other is computed, of which each element depends on the two before.
    """
    num_rows, num_columns = matrix.shape
    costs = -matrix.astype(np.float64).ravel()
    # Costs are summed in float32, and ties are broken, as in transformers: paths are equal to the last step.
    before, last = np.full((2, num_rows + 1), np.inf, np.float32)
    before[0] = 0
    steps = np.zeros((num_rows + num_columns + 1, num_rows + 1), np.int8)  # by diagonal and row
    for diagonal in range(2, num_rows + num_columns + 1):  # rows and columns count from 1
        low, high = max(1, diagonal - num_columns), min(num_rows, diagonal - 1)
        both, down, right = before[low - 1 : high], last[low - 1 : high], last[low : high + 1]
        is_both, is_down = (both < down) & (both < right), (down < both) & (down < right)
        steps[diagonal, low : high + 1] = np.where(is_both, _BOTH, np.where(is_down, _DOWN, _RIGHT))
        own = costs[(low - 1) * num_columns + diagonal - low - 1 :: max(num_columns - 1, 1)][: high - low + 1]
        now = np.full_like(last, np.inf)
        now[low : high + 1] = own + np.where(is_both, both, np.where(is_down, down, right))
        before, last = last, now
    starts = [0] * num_rows
    row, column = num_rows, num_columns
    while row:
        starts[row - 1] = column - 1
        step = int(steps[row + column, row])
        row, column = row - (step != _RIGHT), column - (step != _DOWN)
    return starts


def split_words(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], is_spaced: bool) -> Words:
    """Split text at spaces, or between all characters if there are none in its language; punctuation joins a word."""
    words: Words = []
    for text, tokens in _characters(token_ids, decode):
        if words and is_spaced and not text.startswith(" ") and text.strip() not in string.punctuation:
            _extend(words, text, tokens)
        else:
            words.append((text, tokens))
    opened: Words = []
    is_open = False
    for text, tokens in words:
        if is_open:
            _extend(opened, text, tokens)
        else:
            opened.append((text, tokens))
        is_open = text.startswith(" ") and text.strip() in _OPENING
    closed: Words = []
    for text, tokens in opened:
        if closed and text in _CLOSING and not closed[-1][0].endswith(" "):
            _extend(closed, text, tokens)
        else:
            closed.append((text, tokens))
    return closed


def _extend(words: Words, text: str, tokens: list[int]) -> None:
    """Add to the last word."""
    words[-1] = words[-1][0] + text, words[-1][1] + tokens


def _characters(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Words:
    """Return the shortest runs of tokens that are whole characters."""
    whole, found, tokens, done = decode(token_ids), [], [], 0
    for at in range(len(token_ids)):
        tokens.append(at)
        text = decode([token_ids[one] for one in tokens])
        lost = text.find(_LOST)
        if lost < 0 or whole[done + lost : done + lost + 1] in ("", _LOST):  # bytes that no further token completes
            found.append((text, tokens))
            tokens, done = [], done + len(text)
    return found


def time_words(
    words: Sequence[tuple[str, float, float]], segment: TranscriptionSegment, earliest: float, latest: float
) -> list[TranscriptionWord]:
    """Return the words of a segment, in order and between two times.   words: text, start, end, in seconds.

    A path gives pauses to the words next to them: of those outside of the segment, its first and last word are freed.
    """
    found = [TranscriptionWord(text.strip(), start, end) for text, start, end in words if text.strip()]
    if found and found[0].end > segment.start:
        found[0].start = max(found[0].start, segment.start)
    if found and found[-1].start < segment.end:
        found[-1].end = min(found[-1].end, segment.end)
    for word in found:
        word.start = min(max(word.start, earliest), latest)
        word.end = earliest = min(max(word.end, word.start), latest)
    return found
