"""What subcommands share on the terminal: consoles, numbers for people, a line that says what is being fetched."""

import logging
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console


def stdout_console() -> Console:
    """For answers and tables. No colour when the output is no terminal."""
    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> Console:
    """For everything that is not the answer."""
    return Console(file=sys.stderr, highlight=False)


def human_bytes(num_bytes: float) -> str:
    """`98362432` as `93.8 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


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
