"""When words are said: paths and words, compared with transformers' and with the obvious."""

from collections.abc import Sequence

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from pagoda.base.errors import ConfigError
from pagoda.base.outputs import TranscriptionSegment, TranscriptionWord
from pagoda.engine.transcription.words import alignment_heads, row_starts, split_words, time_words


def obvious_row_starts(matrix: np.ndarray) -> list[int]:
    """Each cell after those that it depends on."""
    num_rows, num_columns = matrix.shape
    cost = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    cost[0, 0] = 0
    came_from = np.zeros((num_rows + 1, num_columns + 1, 2), int)
    for row in range(1, num_rows + 1):
        for column in range(1, num_columns + 1):
            both, down, right = cost[row - 1, column - 1], cost[row - 1, column], cost[row, column - 1]
            step, least = (0, 1), right
            if both < min(down, right):
                step, least = (1, 1), both
            elif down < min(both, right):
                step, least = (1, 0), down
            cost[row, column] = float(least) - float(matrix[row - 1, column - 1])
            came_from[row, column] = step
    starts, row, column = [0] * num_rows, num_rows, num_columns
    while row:
        starts[row - 1] = column - 1
        row, column = np.array([row, column]) - came_from[row, column]
    return starts


def transformers_row_starts(matrix: np.ndarray) -> list[int]:
    rows, columns = _dynamic_time_warping(-matrix.astype(np.float64))
    return [int(columns[rows == row].min()) for row in range(len(matrix))]


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2), (3, 50), (50, 3), (17, 17), (31, 130)])
@pytest.mark.parametrize("is_coarse", [False, True], ids=["", "with ties"])
def test_paths_are_those_of_transformers(shape: tuple[int, int], is_coarse: bool) -> None:
    for seed in range(4):
        matrix = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        matrix = matrix.round() if is_coarse else matrix
        found = row_starts(matrix)
        assert found == obvious_row_starts(matrix) == transformers_row_starts(matrix)
        assert found[0] == 0
        assert found == sorted(found)


class ByteTokenizer:
    """Each token is some bytes; as transformers' own functions call it."""

    eos_token_id = 10**9
    language = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", "replace")


TEXTS = (
    ' He said: "Stop (now)!" -- and left…',
    " ¿Qué? ¡No!",
    "你好，世界。再见！",
    " na\u00efve 😀 caf\u00e9s, (x) [y] 100 %",
    " don't  wait.\n",
    "(",
    "",
)


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_are_those_of_transformers(language: str) -> None:
    rng = np.random.default_rng(0)
    for text in TEXTS:
        for _ in range(12):
            data = text.encode()
            cuts = np.flatnonzero(rng.random(len(data)) < 0.5)
            pieces = [piece for piece in np.split(np.frombuffer(data, np.uint8), cuts) if len(piece)]
            if rng.random() < 0.3:
                pieces.insert(int(rng.integers(len(pieces) + 1)), np.array([0xE4], np.uint8))  # never completed
            tokenizer = ByteTokenizer([piece.tobytes() for piece in pieces])
            ids = list(range(len(pieces)))
            words, _, tokens = _combine_tokens_into_words(tokenizer, ids, language)
            found = split_words(ids, tokenizer.decode, language == "english")
            assert found == list(zip(words, tokens, strict=True)), (text, tokenizer.pieces)


def test_the_first_word_begins_with_its_segment_and_all_are_in_order() -> None:
    segment = TranscriptionSegment(1.0, 4.0, "")
    words = [(" a", 0.0, 1.5), (" ", 1.5, 1.6), (" b", 1.5, 1.5), (" c", 1.5, 9.0)]
    expected = [TranscriptionWord("a", 1.0, 1.5), TranscriptionWord("b", 1.5, 1.5), TranscriptionWord("c", 1.5, 4.0)]
    assert time_words(words, segment, 0.0, 10.0) == expected
    assert [word.start for word in time_words(words, segment, 1.2, 10.0)] == [1.2, 1.5, 1.5]
    assert [word.end for word in time_words(words, segment, 0.0, 1.4)] == [1.4, 1.4, 1.4]
    early = [(" a", 0.0, 0.5), (" b", 5.0, 6.0)]  # words outside of their segment keep their times
    assert [(word.start, word.end) for word in time_words(early, segment, 0.0, 10.0)] == [(0.0, 0.5), (5.0, 6.0)]


def test_heads_are_named_by_the_model_or_those_of_the_upper_layers() -> None:
    assert alignment_heads({"alignment_heads": [[2, 1], [1, 0]]}, 3, 2) == ((1, 0), (2, 1))
    assert alignment_heads({}, 3, 2) == ((1, 0), (1, 1), (2, 0), (2, 1))
    for wrong in ([[3, 0]], [[0, 2]], [[0]], [], "all", [0], [[[0], 1]], [{}]):
        with pytest.raises(ConfigError, match="alignment_heads = .*expected pairs of one of 3 layers"):
            alignment_heads({"alignment_heads": wrong}, 3, 2)
