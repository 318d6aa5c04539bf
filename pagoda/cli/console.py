"""What subcommands share on the terminal: consoles, numbers for people, a line that says what is being fetched."""

import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TextIO

from rich.cells import cell_len
from rich.console import Console


def stdout_console() -> Console:
    """Return the console for answers and tables; without colour if the output is not a terminal."""
    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> Console:
    """For everything that is not the answer."""
    return Console(file=sys.stderr, highlight=False)


def human_count(count: float) -> str:
    """`1234567` as `1,234,567`."""
    return f"{count:,.0f}"


@contextmanager
def fetching() -> Iterator[None]:
    """Show on standard error what the engine reports at level INFO while a model is found and fetched."""
    logger = logging.getLogger("pagoda.fetch")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)


def for_stream(text: str, stream: TextIO) -> str:
    """Model output as it may go to `stream`: a terminal gets no control characters but newline and tab.

    A model can write escape sequences, and a terminal obeys them.
    """
    if not stream.isatty():
        return text
    return "".join(ch for ch in text if ch in "\n\t" or unicodedata.category(ch) != "Cc")


class WrappedStream:
    """Text as it comes, broken between words where a line of `width` columns is full.   width: 0 breaks nothing.

    A word is held back until it is complete, so that it is never torn over two lines.
    """

    def __init__(self, file: IO[str], width: int) -> None:
        self._file = file
        self._width = width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        if not self._width:
            self._file.write(text)
        else:
            for letter in text:
                if letter in " \t\n":
                    self._put_word()
                    self._put_space(letter)
                else:
                    self._word += letter
                    if cell_len(self._word) >= self._width:  # longer than a line: broken where it must be
                        self._put_word()
        self._file.flush()

    def finish(self) -> None:
        """Write what is held back."""
        self._put_word()
        self._file.flush()

    def _put_word(self) -> None:
        length = cell_len(self._word)
        if self._column and self._column + length > self._width:
            self._file.write("\n")
            self._column = 0
        self._file.write(self._word)
        self._column += length
        self._word = ""

    def _put_space(self, letter: str) -> None:
        if letter == "\n" or self._column + 1 >= self._width:
            self._file.write("\n")
            self._column = 0
        else:
            self._file.write(" " if letter == "\t" else letter)
            self._column += 1
