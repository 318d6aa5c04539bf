"""Why the prefix cache had no more of a prompt, in the form of Anthropic's API: `diagnostics` of a message."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from pagoda.server.live import miss_of
from pagoda.server.prefix_misses import PrefixMiss
from pagoda.server.request_state import request_state
from pagoda.server.seen_requests import Viewer
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState, state_of
from pagoda.server.turn import Turn

logger = logging.getLogger("pagoda.server")


class CacheMissReason(Struct, frozen=True):
    """cache_missed_input_tokens: of the previous message and its prompt, those that would have been cached."""

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(Struct, frozen=True):
    cache_miss_reason: CacheMissReason


class Fingerprint(Struct, frozen=True, array_like=True):
    """What a prompt is made of, as digests.

    others: of what else it depends on.   num_prompt_tokens, num_output_tokens: of the prompt and its answer.
    """

    model: str
    system: bytes
    tools: bytes
    others: bytes
    messages: list[bytes]
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def digest(part: Any) -> bytes:
    """Return a digest of a part of a body, equal for parts that are read as the same prompt."""
    return hashlib.blake2b(msgspec.json.encode(_bare(msgspec.to_builtins(part))), digest_size=8).digest()


def _bare(part: Any) -> Any:
    """Return a part without what says how long to cache it, and a text as the block that it stands for."""
    if isinstance(part, list):
        return [_bare(one) for one in part]
    if not isinstance(part, dict):
        return part
    bare = {name: value for name, value in part.items() if value is not None and name != "cache_control"}
    if "content" in bare:
        content = bare["content"]
        bare["content"] = [{"type": "text", "text": content}] if isinstance(content, str) else _bare(content)
    return bare


class Diagnosis:
    """Compares a request with the previous one of its client.

    previous_id: the previous message, None: there is none.   previous: its request, None if it is not known.
    log: takes what is to be in the log about a turn.
    """

    def __init__(
        self,
        now: Fingerprint,
        previous_id: str | None,
        previous: Fingerprint | None,
        block_size: int,
        log: Callable[[Turn, str], object],
    ) -> None:
        self._now, self._previous_id, self._previous = now, previous_id, previous
        self._block_size, self._log = block_size, log

    @classmethod
    async def of(cls, http: Request, model: ServedModel, now: Fingerprint, previous_id: str | None) -> "Diagnosis":
        """Return the diagnosis of a request, after looking for the previous one."""
        history, found = model.history, None
        if history is not None and previous_id is not None:
            found = await history.recall_note(history.owner_of(request_state(http).caller), previous_id)
        previous = None
        if found is not None:
            with contextlib.suppress(msgspec.DecodeError):  # a damaged one is not found
                previous = msgspec.msgpack.decode(found, type=Fingerprint)
        loop, state = asyncio.get_running_loop(), state_of(http)

        def log(turn: Turn, text: str) -> None:  # called on any thread
            asyncio.run_coroutine_threadsafe(_log_with_token(state, turn, text), loop)

        return cls(now, previous_id, previous, model.block_size, log)

    def note(self, turn: Turn) -> None:
        """Keep what the next request is compared with. Call it at the end of the answer."""
        made = turn.generation
        counts = {"num_prompt_tokens": made.num_prompt_tokens, "num_output_tokens": made.num_output_tokens}
        turn.note(turn.id, msgspec.msgpack.encode(msgspec.structs.replace(self._now, **counts)))

    def diagnostics(self, turn: Turn) -> Diagnostics | None:
        """Return why no more of the prompt was cached; None if all was that could be. Logs it."""
        num_cached = turn.generation.num_cached_tokens
        reason, where = self._reason(num_cached, turn.generation.num_prompt_tokens)
        if reason is None:
            return None
        counts = f"{num_cached} of {turn.generation.num_prompt_tokens} prompt tokens were cached"
        self._log(turn, f"{counts}, compared with {self._previous_id!r}: {reason.type}{where}")
        return Diagnostics(reason)

    def _reason(self, num_cached: int, num_prompt_tokens: int) -> tuple[CacheMissReason | None, str]:
        """Return the reason, and the message that it is in, in words."""
        now, before = self._now, self._previous
        if self._previous_id is None:
            return None, ""
        if before is None:
            return CacheMissReason("previous_message_not_found"), ""
        if num_cached >= (before.num_prompt_tokens - 1) // self._block_size * self._block_size:
            return None, ""
        could = min(before.num_prompt_tokens + before.num_output_tokens, num_prompt_tokens)
        missed = max(0, could - num_cached)
        if now.model != before.model:
            return CacheMissReason("model_changed", missed), ""
        if now.system != before.system:
            return CacheMissReason("system_changed", missed), ""
        if now.tools != before.tools:
            return CacheMissReason("tools_changed", missed), ""
        padded = [*now.messages, *[b""] * len(before.messages)]
        for index, (one, other) in enumerate(zip(before.messages, padded, strict=False)):
            if one != other:
                return CacheMissReason("messages_changed", missed), f", messages[{index}]"
        return CacheMissReason("unavailable"), ""  # other parameters changed, or the blocks hold something else by now


async def _log_with_token(state: ServerState, turn: Turn, text: str) -> None:
    """Log why no more of a prompt was cached, with the first token that differs if it is known."""
    engine_id = turn.generation.requests[0].request_id
    details, viewer = state.models.details(engine_id), Viewer(engine_id.removesuffix(turn.id))
    miss = None if details is None else await miss_of(state, viewer, details)
    logger.info("%s: %s%s", turn.id, text, "" if miss is None else _in_words(miss))


def _in_words(miss: PrefixMiss) -> str:
    return f"; {miss.what}" if miss.before is UNSET else f"; {miss.what}, after {miss.before!r}"
