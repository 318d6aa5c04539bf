"""`pagoda run-batch`: the answers to a file of requests, a line each."""

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pagoda.base.abbreviate import shorten
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.cli.console import fetching, for_stream
from pagoda.cli.options import engine_config, engine_flags
from pagoda.cli.session import require_chat
from pagoda.process.allocator import keep_buffers_apart

_ANSWERS = ("tool_call_parser", "strict_fields", "answer_defaults", "trust_request_chat_template", "lora_sources")
"""Settings of a server that say how it answers."""
_LONGEST_FAILURE = 300


@engine_flags(*_ANSWERS)
def run_batch(
    input_path: Annotated[
        str | None, typer.Argument(help="File of requests: a JSON object per line.", metavar="IN", show_default=False)
    ] = None,
    output_path: Annotated[
        str | None, typer.Argument(help="File for the answers.", metavar="OUT", show_default=False)
    ] = None,
    *,
    options: dict[str, object],
    input_file: Annotated[str | None, typer.Option("--input-file", "-i", help="Same as IN.")] = None,
    output_file: Annotated[str | None, typer.Option("--output-file", "-o", help="Same as OUT.")] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A run that ended early goes on where it was when the same command is given again. Exit code 1: some lines failed.
    """
    source = Path(_one("IN", "--input-file", input_path, input_file)).expanduser()
    target = Path(_one("OUT", "--output-file", output_path, output_file)).expanduser()
    if not source.is_file():
        raise ConfigError(f"{source} does not exist, or is not a file: IN has a JSON object per line")
    config = _quiet(engine_config(options))
    check_settings(config)
    keep_buffers_apart(os.environ)
    from tqdm import tqdm

    from pagoda.server.batches.lines import Journal
    from pagoda.server.batches.offline import answer_file, survey

    with Journal(target) as journal:
        found, num_before = survey(source, journal), journal.num_done
        num_lines = found.num_lines
        if found.first_chat is not None:
            with fetching():
                require_chat(config, f"{source}: line {found.first_chat} is a chat: ")
        begin_s = time.perf_counter()
        try:
            if num_before < num_lines:
                with fetching(), tqdm(total=num_lines, initial=num_before, unit="line", disable=None) as bar:
                    asyncio.run(answer_file(config, source, journal, bar.update))
        finally:
            duration_s = time.perf_counter() - begin_s
            _say(f"{journal.num_done} of {num_lines} lines are in {target}, {num_before} of them from before")
            if num_new := journal.num_done - num_before:
                _say(f"{num_new} lines in {duration_s:.1f} s, {num_new / duration_s:.2f} lines/s, loading included")
            if journal.num_failed:
                _say(f"{journal.num_failed} lines failed; the first: {journal.first_failure}")
            if 0 < journal.num_done < num_lines:
                _say("the same command goes on from there")
    if journal.num_failed:
        raise typer.Exit(1)


def _one(word: str, flag: str, as_word: str | None, as_flag: str | None) -> str:
    """Return what a file is called. Raises ConfigError if it is given twice, or not at all."""
    if as_word is not None and as_flag is not None:
        raise ConfigError(f"{word} is given twice, as {as_word} and with {flag}")
    name = as_flag if as_word is None else as_word
    if name is None:
        raise ConfigError(f"{word} is missing: pagoda run-batch IN OUT --model MODEL")
    return name


def _quiet(config: EngineConfig) -> EngineConfig:
    """Return the settings with the engine's log at the level of this process's, which --verbose lowers."""
    level = logging.getLevelName(logging.getLogger("pagoda").getEffectiveLevel()).lower()
    return replace(config, server=replace(config.server, logs=replace(config.server.logs, log_level=level)))


def _say(text: str) -> None:
    print(for_stream(shorten(text, _LONGEST_FAILURE), sys.stderr), file=sys.stderr)
