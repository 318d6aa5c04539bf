"""Run a batch file without a server, over an engine process of its own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.engine.clients.replicas import own_engines
from pagoda.server.app import create_app
from pagoda.server.batches.lines import Journal, read_lines
from pagoda.server.batches.run import LIMITS, MAX_LINE_BYTES, AppCaller, answer_lines, unanswered
from pagoda.server.model_engine import ModelEngine
from pagoda.server.model_loader import ModelLoader
from pagoda.server.state import build_state


@dataclass(frozen=True, slots=True)
class Survey:
    """What an input file has.   first_chat: the number of its first line that is not answered and is a chat."""

    num_lines: int
    first_chat: int | None


def survey(path: Path, journal: Journal) -> Survey:
    """Read an input file. Raises ConfigError if it cannot be read or is not the journal's."""
    num_lines = num_done = 0
    first_chat: int | None = None
    for line in read_lines(path, MAX_LINE_BYTES):
        num_lines += 1
        if journal.has(line):
            num_done += 1
        elif line.is_chat and first_chat is None:
            first_chat = line.number
    if num_done < journal.num_done:
        raise ConfigError(
            f"the output file has {journal.num_done} answers, {journal.num_done - num_done} of them to lines that "
            f"{path} does not have: give another output file"
        )
    return Survey(num_lines, first_chat)


async def answer_file(config: EngineConfig, path: Path, journal: Journal, on_line: Callable[[], object]) -> None:
    """Answer the lines of an input file that the journal does not have.   on_line: called after each.

    Raises ConfigError or CapacityError for invalid settings, WorkerDied if the engine cannot be started (again).
    """
    config = replace(config, server=replace(config.server, server_limits=LIMITS))
    loader = ModelLoader([ModelEngine(config, own_engines(config))])
    loader.start_first()
    try:
        state = await build_state(loader)
        await state.model.adapters.load_modules(config.server.lora_sources)

        def raise_if_dead() -> None:
            if (died := state.models.died) is not None:
                raise died

        caller = AppCaller(create_app(state, config.server), raise_if_dead)
        lines = unanswered(path, journal)
        max_in_flight = 2 * state.model.max_num_seqs  # those that run, and the next ones
        try:
            await answer_lines(caller, lines, journal, lambda _, running: len(running) < max_in_flight, on_line)
        finally:
            state.model.llm.text.close()
            await asyncio.to_thread(state.peers.close)
    finally:
        await loader.close()
