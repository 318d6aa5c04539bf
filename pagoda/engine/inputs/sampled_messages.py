"""What assistants have sampled, in later prompts in the place of the text that stands for it.

A client sends an answer back as text, and the template writes it anew: with JSON in another order, without a newline,
and in any case in the tokens that the tokenizer would choose. The prefix cache has the tokens that were sampled. So a
message is looked for by a hash of the prompt that it answered, and where the rendered text says the same, its sampled
tokens are put into the prompt.

A message of an assistant begins after the last special token of the prompt that it answered, and ends with one that
ends outputs. Templates write both, and no text of a caller can (special_marks.py).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from pagoda.engine.answers.same_message import MessageForm, are_same
from pagoda.engine.tokenizers.tokenizer import Tokenizer

KEY_BYTES = 16


class SampledMessage(Struct, frozen=True, array_like=True):
    """A message as it was sampled.

    head: the text of its prompt after the last special token, such as the name of its role.
    head_ids, output_ids: the tokens of that, and those that were sampled, without one that ended them; see `packed`.
    is_whole: it is all of the message; else its thought, up to what ends it.
    """

    head: str
    head_ids: bytes
    output_ids: bytes
    is_whole: bool = True

    @property
    def token_ids(self) -> list[int]:
        return [*unpacked(self.head_ids), *unpacked(self.output_ids)]


def packed(token_ids: Sequence[int]) -> bytes:
    """Return token ids in three bytes each."""
    return np.array(token_ids, "<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def unpacked(data: bytes) -> list[int]:
    """Return the token ids that `packed` was given."""
    each = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return np.pad(each, ((0, 0), (0, 1))).view("<u4")[:, 0].tolist()


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """The message that a prompt asks for.   key: of the prompt.   head, head_ids: see SampledMessage."""

    key: bytes
    head: str
    head_ids: bytes

    def sampled(self, output_ids: Sequence[int], is_whole: bool = True) -> SampledMessage:
        """Return the message.   output_ids: without a token that ended it."""
        return SampledMessage(self.head, self.head_ids, packed(output_ids), is_whole)


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """Where a rendered conversation may have a message of the assistant.   key: of the prompt that asked for it."""

    key: bytes
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class KnownMessages:
    """What is known of a conversation's messages.   sampled: by key, the last first.   form: of them all."""

    sampled: Mapping[bytes, Sequence[SampledMessage]]
    form: MessageForm


class MessagePlaces:
    """The places of messages in marked text of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, image_token_id: int | None = None) -> None:
        """image_token_id: what stands for a piece of an image in prompts; a message that has it is not used."""
        self._tokenizer, self._image_token_id = tokenizer, image_token_id
        self._image_text = "" if image_token_id is None else self._text(image_token_id)
        self._marks = tokenizer.facts.marks
        special = set(self._marks.texts)
        facts = tokenizer.facts
        self._ends = special.intersection(map(self._text, facts.eos_token_ids))
        self._special_ids = facts.special_token_ids.union(facts.eos_token_ids, {facts.bos_token_id})

    def find(self, text: str, form: MessageForm) -> tuple[list[MessagePlace], bytes, int, str]:
        """Return the places in a marked text; then the key of the message that comes after it, where that begins, and
        the special token in front of that ("": there is none)."""
        chain = hashlib.blake2b(digest_size=KEY_BYTES)
        tags = () if form.tags is None else (form.tags.begin, form.tags.end)
        not_beginnings = {*tags, self._image_text}  # an image may be thousands of tokens
        places: list[MessagePlace] = []
        begun: list[tuple[bytes, int]] = []
        key, at, last, before = b"", 0, "", 0
        for written, special, after in self._marks.pieces(text):
            chain.update(written.encode("utf-8", "surrogatepass"))
            if not special:
                break
            if special in self._ends:
                end = before + len(written)
                places += [MessagePlace(one, begin, end) for one, begin in begun]
                begun.clear()
            chain.update(b"\xff" + special.encode() + b"\xff")  # 0xff is in no text
            before = after
            if special not in not_beginnings:
                key, at, last = chain.copy().digest(), after, special
                begun.append((key, at))
        return places, key, at, last

    def open_message(self, text: str, token_ids: Sequence[int], form: MessageForm) -> OpenMessage | None:
        """Return the message that a marked prompt asks for; None if it has no special token to find it by again."""
        _, key, at, special = self.find(text, form)
        ids = self._tokenizer.encode(special, add_special_tokens=False) if special else ()
        if len(ids) != 1 or ids[0] not in token_ids:
            return None
        begin = len(token_ids) - list(reversed(token_ids)).index(ids[0])
        return OpenMessage(key, self._marks.remove(text[at:]), packed(token_ids[begin:]))

    def put(self, text: str, known: KnownMessages) -> tuple[str, list[list[int]]]:
        """Return a marked text with a slot for each message that is known, and the tokens of each slot."""
        parts: list[str] = []
        slots: list[list[int]] = []
        until = 0
        for place in self.find(text, known.form)[0]:
            for message in known.sampled.get(place.key, ()) if place.begin >= until else ():
                end = self._end_of(text[place.begin : place.end], message, known.form)
                if end is None:
                    continue
                parts += text[until : place.begin], self._marks.slot
                until = place.begin + end
                slots.append(message.token_ids)
                break
        return "".join((*parts, text[until:])), slots

    def _end_of(self, written: str, message: SampledMessage, form: MessageForm) -> int | None:
        """Return up to where a rendered text says the same as a sampled message; None if it does not."""
        header = form.without_opening(message.head)
        if not message.is_whole:
            end = _end_of_thought(written, (self._marks.put(form.tags.end), form.tags.end)) if form.tags else None
            if end is None:
                return None
            written = written[:end]
        rendered = self._marks.remove(written)
        if not rendered.startswith(header):
            return None
        token_ids = unpacked(message.output_ids)
        if self._image_token_id in token_ids:
            return None
        output = b"".join(map(self._tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")
        sampled = message.head[len(header) :] + output
        if not are_same(sampled, rendered[len(header) :], form):
            return None
        # What is ordinary text in the client's message stays that, also where the model has sampled a special token.
        tags = ("",) if form.tags is None else ("", form.tags.begin, form.tags.end)
        special = [one for token_id in token_ids if token_id in self._special_ids and (one := self._text(token_id))]
        written_special = [one for _, one, _ in self._marks.pieces(written) if one not in tags]
        return len(written) if [one for one in special if one not in tags] == written_special else None

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _end_of_thought(written: str, ends: Sequence[str]) -> int | None:
    found = [at + len(end) for end in ends if (at := written.find(end)) >= 0]
    return min(found, default=None)


def thought_of(output_ids: Sequence[int], form: MessageForm | None, tokenizer: Tokenizer) -> Sequence[int] | None:
    """Return the tokens of an output up to the end of its thought; None if that is inside a token, or missing."""
    if form is None or form.tags is None:
        return None
    end = form.tags.end.encode()
    data = b""
    for at, token_id in enumerate(output_ids, 1):
        data = data[-len(end) :] + tokenizer.token_bytes(token_id)
        if end in data:
            return output_ids[:at] if data.endswith(end) else None
    return None
