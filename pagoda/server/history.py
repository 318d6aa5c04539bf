"""History: what the assistant's messages were as tokens, so that the next turn computes its new tokens alone.

engine/inputs/sampled_messages.py says how they come into a prompt.
"""

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pagoda.base.outputs import CompletionOutput
from pagoda.engine.answers.same_message import MessageForm
from pagoda.engine.clients.calls import AnyCalls
from pagoda.engine.inputs.sampled_messages import KEY_BYTES, OpenMessage, SampledMessage, thought_of
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.server.history_store import HistoryStore
from pagoda.server.request_state import Caller
from pagoda.server.seals import Sealer, derived

_KEYS_PER_CALL = 256
_SEAL_CHARS_PER_TOKEN = 8
"""Of a seal, for each token that the model's context has: four for the token, the rest for the head's text."""


class History:
    """The history of one served model."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        max_model_len: int,
        secret: bytes,
        calls: AnyCalls,
    ) -> None:
        """secret: of the server.   calls: of the HistoryStore, wherever it is."""
        self.tokenizer = tokenizer
        self._calls = calls
        self._sealer = Sealer(secret, _SEAL_CHARS_PER_TOKEN * max_model_len + 4096)
        self._secret = derived(secret, "owners")
        self._model = model, _digest_of(tokenizer)

    def owner_of(self, caller: Caller) -> str:
        """Return who a message belongs to: a caller, the model and its tokenizer."""
        text = repr((caller.owner, *self._model))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:32]

    def seal(self, owner: str, key: bytes, message: SampledMessage) -> str:
        """Return a message for the client to send back; "" for one that is too long."""
        return self._sealer.seal(owner, key, message)

    async def remember(self, owner: str, key: bytes, data: bytes) -> None:
        """Keep a message, or a note."""
        await self._calls.ask(HistoryStore.remember, owner, key, data)

    async def recall(
        self, owner: str, keys: Sequence[bytes], seals: Iterable[str]
    ) -> Mapping[bytes, Sequence[SampledMessage]]:
        """Return the messages at some keys that are in the store, then those that the client has sent back."""
        wanted = list(dict.fromkeys(reversed(keys)))  # the first ones are used last, and so stay longest
        found: dict[bytes, list[SampledMessage]] = {}
        for at in range(0, len(wanted), _KEYS_PER_CALL):
            for key, data in await self._calls.ask(HistoryStore.recall, owner, wanted[at : at + _KEYS_PER_CALL]):
                with contextlib.suppress(msgspec.DecodeError):  # a damaged one is not found
                    message = msgspec.msgpack.decode(data, type=SampledMessage)
                    found.setdefault(key, []).append(message)
            await asyncio.sleep(0)  # long conversations do not keep others waiting
        known = set(wanted)
        for sealed in seals:
            key = self._sealer.key_of(sealed)
            if key is None or key not in known or key in found:
                continue
            if (message := self._sealer.open(owner, key, sealed)) is not None:
                found[key] = [message]
        return found

    async def recall_note(self, owner: str, name: str) -> bytes | None:
        """Return the last note of a name (SampledTurn.note)."""
        found = await self._calls.ask(HistoryStore.recall, owner, [key_of_note(name)])
        return found[0][1] if found else None


def key_of_note(name: str) -> bytes:
    """Return where notes of a name are."""
    return hashlib.blake2b(b"note\xff" + name.encode("utf-8", "replace"), digest_size=KEY_BYTES).digest()


def _digest_of(tokenizer: Tokenizer) -> bytes:
    """Return a digest of what a tokenizer's ids mean."""
    digest = hashlib.sha256()
    for token_id in range(tokenizer.facts.vocab_size):
        digest.update(tokenizer.token_bytes(token_id) + b"\xff\n")
    return digest.digest()


class SampledTurn:
    """What the outputs of one turn have sampled so far."""

    def __init__(
        self, history: History, owner: str, opened: Sequence[OpenMessage | None], forms: Sequence[MessageForm | None]
    ) -> None:
        """opened, forms: of each prompt."""
        self._history, self._owner = history, owner
        self._opened, self._forms = opened, forms
        self._ids: dict[tuple[int, int], list[int]] = {}
        self._ended: list[tuple[OpenMessage, list[int]]] = []  # since `remember`
        self._first: list[int] | None = None  # the first output, once it has ended
        self._notes: list[tuple[str, bytes]] = []
        facts = history.tokenizer.facts
        self._ends = frozenset(facts.eos_token_ids)

    def add(self, prompt: int, output: CompletionOutput) -> None:
        """Add what an output has sampled since it was last added.   prompt: the index of its prompt."""
        if (opened := self._opened[prompt]) is None:
            return
        ids = self._ids.setdefault((prompt, output.index), [])
        ids += output.token_ids
        if output.finish_reason in ("stop", "length"):
            said = self._said(ids, isinstance(output.stop_reason, int))
            self._ended.append((opened, said))
            if (prompt, output.index) == (0, 0):
                self._first = said

    async def remember(self) -> None:
        """Keep the messages that have ended since this was called last, and the notes."""
        ended, self._ended = self._ended, []
        for opened, ids in ended:
            if self._ends.isdisjoint(ids):  # else the client could not have the same text
                await self._history.remember(self._owner, opened.key, msgspec.msgpack.encode(opened.sampled(ids)))
        notes, self._notes = self._notes, []
        for name, data in notes:
            await self._history.remember(self._owner, key_of_note(name), data)

    def note(self, name: str, data: bytes) -> None:
        """Have `remember` keep something else of the turn, to be recalled by its name."""
        self._notes.append((name, data))

    def seal(self) -> str:
        """Return the first output so far, up to the end of its thought unless it has ended; "" if there is nothing."""
        opened, ids = self._opened[0], self._ids.get((0, 0), [])
        if opened is None:
            return ""
        is_whole = self._first is not None
        said = self._first if is_whole else thought_of(ids, self._forms[0], self._history.tokenizer)
        if said is None or not self._ends.isdisjoint(said):
            return ""
        return self._history.seal(self._owner, opened.key, opened.sampled(said, is_whole=is_whole))

    def _said(self, ids: list[int], is_stopped: bool) -> list[int]:
        """Return an output without the token that ended it."""
        return ids[:-1] if ids and (is_stopped or ids[-1] in self._ends) else ids
