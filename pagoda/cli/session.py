"""A model loaded in this process, as the terminal commands use it."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagoda.base.config import EngineConfig
    from pagoda.llm import LLM

logger = logging.getLogger("pagoda")

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to an answer.   num_tokens: how many; their text may come with a later piece."""

    text: str
    num_tokens: int
    finish_reason: str | None = None


class Session:
    """Answers one prompt after another, streamed. Ctrl-C raises KeyboardInterrupt between steps and ends the answer."""

    def __init__(self, llm: "LLM", model_name: str = "") -> None:
        self._llm = llm
        self.model_name = model_name  # what the user called it
        self.given: set[str] = set()

    @property
    def max_model_len(self) -> int:
        return self._llm.llm_engine.core.sizes.max_model_len

    def params(self, given: Mapping[str, Any], max_tokens: int, seed: object) -> SamplingParams:
        """The sampling parameters: flags that were given, else the model's own defaults, else the command line's."""
        from pagoda.cli.options import CLI_SAMPLING

        of_model = self._llm.llm_engine.input_processor.default_sampling
        return SamplingParams.of_model({**CLI_SAMPLING, "max_tokens": max_tokens, **of_model}, **given, seed=seed)

    def encode(self, text: str) -> list[int]:
        """A text to continue, as token ids."""
        return self._llm.llm_engine.input_processor.prompts.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to the answer that is wanted. Raises RequestError when the model has no chat template."""
        return self._llm.llm_engine.input_processor.chats.render(messages).token_ids

    def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        """The answer as it comes; leaving the iteration ends it. RequestError, CapacityError come before it begins."""
        for output in self._llm.stream(token_ids, params):
            if output.error is not None:  # what was said so far stays
                logger.warning("the answer ends early: %s", output.error)
            for answer in output.outputs:
                yield Piece(answer.text, len(answer.token_ids), answer.finish_reason)


def load(options: Mapping[str, Any], chat: bool = False) -> "LLM":
    """The model that the flags ask for; shows what is being fetched. Raises what LLM raises.

    chat: it is for conversations; a model without a chat template is refused before it is loaded.
    """
    from pagoda.base.config import EngineConfig
    from pagoda.cli.console import fetching
    from pagoda.process.allocator import collecting_nothing

    with fetching(), collecting_nothing():
        if chat:
            require_chat(EngineConfig.from_options(**options))
        from pagoda.llm import LLM

        return LLM(**options)


def require_chat(config: "EngineConfig", why: str = "") -> None:
    """Raise ConfigError if the model cannot chat. Of one of the catalog that is known before it is fetched.

    why: begins the error: what needs a chat.
    """
    from pagoda.assembly.engine_setup import resolve_engine
    from pagoda.cli.model_facts import kind_of
    from pagoda.loading.catalog import CATALOG
    from pagoda.loading.known_names import full_name

    known, name = full_name(config.model.model), config.model.names[0]
    is_stated = known in CATALOG and config.model.tokenizer is None
    kind = CATALOG[known].kind if is_stated else kind_of(resolve_engine(config))
    if kind == "base" and config.model.chat_template is None:
        raise ConfigError(
            f"{why}{name} has no chat template, so it can only continue a text: pagoda generate {name} TEXT; to chat "
            "with it all the same, give it one with --chat-template FILE"
        )
    if kind in _OTHERS:
        raise ConfigError(f"{why}{name} does not chat: {_OTHERS[kind].format(name=name)}")


_OTHERS = {
    "speech": "it writes down what is said, pagoda transcribe --model {name} FILE",
    "embeddings": "it makes embeddings of texts, pagoda serve {name} and /v1/embeddings",
    "labels": "it gives texts labels or scores, pagoda serve {name} and /classify or /rerank",
}
"""What models do that generate no answers."""


def model_name(options: Mapping[str, Any]) -> str:
    """What the flags call the model: the name it is served under, if there is one, else the model or the default."""
    from pagoda.base.config import EngineConfig

    return EngineConfig.from_options(**options).model.names[0]


def seconds_since_start() -> float:
    """Since this process was started, Python's own start included; falls back on its CPU time off Linux."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
