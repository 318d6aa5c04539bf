"""What subcommands share on the terminal: consoles, numbers for people, a line that says what is being fetched."""

import logging
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, TextIO

from pagoda.base.errors import PagodaError

if TYPE_CHECKING:  # not needed before the first token
    from rich.console import Console
    from rich.text import Text

    from pagoda.base.config import ModelConfig


def stdout_console() -> "Console":
    """Return the console for answers; without colour and line breaks if the output is not a terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def stderr_console() -> "Console":
    """For everything that is not the answer."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def print_table(
    rows: Sequence[Sequence["str | Text"]], headings: Sequence[str] = (), right: Sequence[int] = ()
) -> None:
    """Print rows in columns: wrapped to the width of a terminal; to a file or pipe as they are, without spaces at ends.

    headings: of the columns; without them the first column is bold.   right: columns that are aligned on the right.
    """
    if sys.stdout.isatty():
        from rich.table import Table

        table = Table(box=None, show_header=bool(headings), pad_edge=False, header_style="bold")
        for index, heading in enumerate(headings or [""] * max(map(len, rows), default=0)):
            style = "bold" if index == 0 and not headings else None
            table.add_column(
                heading, style=style, justify="right" if index in right else "left", overflow="fold", no_wrap=index == 0
            )
        for row in rows:
            table.add_row(*row)
        stdout_console().print(table)
        return
    lines = [list(headings)] * bool(headings) + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    for line in lines:
        cells = [line[i].rjust(width) if i in right else line[i].ljust(width) for i, width in enumerate(widths)]
        cells[-1] = cells[-1].replace("\n", "\n" + " " * (sum(widths[:-1]) + 2 * (len(widths) - 1)))
        print("  ".join(cells).rstrip())


def human_count(count: float) -> str:
    """`1234567` as `1,234,567`."""
    return f"{count:,.0f}"


def ask_before_fetching(config: "ModelConfig", agreed: bool = False) -> None:
    """Ask, on a terminal, whether a large model is to be fetched. Raises PagodaError for a no.

    agreed: no question.   Without a terminal it is fetched.
    """
    if agreed or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    import typer

    from pagoda.base.abbreviate import human_bytes
    from pagoda.loading.known_names import full_name
    from pagoda.loading.resolve import fetch_size

    size = fetch_size(config)
    if size < _LARGE_BYTES:
        return
    question = f"{full_name(config.model)} has {human_bytes(size)} to fetch. Fetch it?"
    if not typer.confirm(question, default=True, err=True):
        raise PagodaError(f"{config.model} was not fetched; `pagoda list` shows smaller models")


_LARGE_BYTES = 10**9


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


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Do not show keys that are typed meanwhile on the terminal; they are there for the next input. Ctrl-C works.

    The terminal marks the begin and end of a text that is pasted meanwhile, so that it is one input, too.
    """
    import termios

    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    _mark_pastes(True)
    try:
        yield
    finally:
        _mark_pastes(False)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _mark_pastes(on: bool) -> None:
    if sys.stdout.isatty():
        sys.stdout.write(f"\033[?2004{'h' if on else 'l'}")
        sys.stdout.flush()


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
        from rich.cells import cell_len

        self._length_of = cell_len
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
                    if self._length_of(self._word) >= self._width:  # longer than a line: broken where it must be
                        self._put_word()
        self._file.flush()

    def finish(self) -> None:
        """Write what is held back."""
        self._put_word()
        self._file.flush()

    def _put_word(self) -> None:
        length = self._length_of(self._word)
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
