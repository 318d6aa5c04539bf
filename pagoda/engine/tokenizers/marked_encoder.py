"""MarkedEncoder: tokenise text in which marks stand for special tokens and everything else is ordinary text."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence

import tokenizers

from pagoda.base.errors import RequestError
from pagoda.engine.templates.special_marks import SpecialMarks

Encode = Callable[[tokenizers.Tokenizer, str], tokenizers.Encoding]
"""Tokenises without adding special tokens. Raises RequestError for text that the library cannot tokenise."""


class MarkedEncoder:
    """Encodes for one backend, to which it adds tokens of its own. Thread-safe.

    Each mark is tokenised as a stand-in: an added token that callers cannot guess and that splits text exactly as the
    special token does, so that the ids are the same as with the special token itself. If the ordinary text spells
    special tokens, a second backend is used that does not parse them; it is created on first use.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, marks: SpecialMarks, ids: Mapping[str, int], unknown: str | None
    ) -> None:
        """ids: id of each special token.   unknown: the unknown token, which encoding any text may produce."""
        self._backend = backend
        self._marks = marks
        self._ids = ids
        self._unknown = unknown
        self._special_ids = frozenset(token_id for text, token_id in ids.items() if text != unknown)
        self._separator = marks.new_mark()
        self._stand_ins: dict[str, str] = {}
        by_behaviour: dict[tuple[bool, ...], str] = {}
        added = backend.get_added_tokens_decoder()
        for text, token_id in ids.items():
            token = added[token_id]
            behaviour = (token.single_word, token.lstrip, token.rstrip, token.normalized)
            if behaviour not in by_behaviour:
                by_behaviour[behaviour] = marks.new_mark()
            self._stand_ins[text] = by_behaviour[behaviour]
        own = [
            tokenizers.AddedToken(
                text, single_word=single_word, lstrip=lstrip, rstrip=rstrip, normalized=normalized, special=False
            )
            for (single_word, lstrip, rstrip, normalized), text in by_behaviour.items()
        ]
        plain = [tokenizers.AddedToken(text, normalized=False, special=False) for text in (self._separator, marks.slot)]
        backend.add_tokens([*own, *plain])
        self._own_ids = frozenset(
            id_ for text in by_behaviour.values() if (id_ := backend.token_to_id(text)) is not None
        )
        self._separator_id = backend.token_to_id(self._separator)
        self._slot_id = backend.token_to_id(marks.slot)
        self._literal: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def encode(
        self, text: str, encode: Encode, add_special_tokens: bool = False, known: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """Return the ids of a marked text.

        add_special_tokens: also add those the tokenizer puts around a text.   known: ids in place of each slot in the
        text (SpecialMarks.slot), which splits it as a special token does.
        """
        written: list[int] = []

        def stand_in(special: str) -> str:
            written.append(self._ids[special])
            return self._stand_ins[special]

        plain = self._marks.replace(text, stand_in)
        encoding = encode(self._backend, plain)
        if self._spells_special(encoding.ids, plain):
            encoding = self._encode_literally(plain, encode)
        if add_special_tokens:
            encoding = self._backend.post_process(encoding, add_special_tokens=True)
        following = iter(written)
        own, separator = self._own_ids, self._separator_id
        ids = [next(following) if token_id in own else token_id for token_id in encoding.ids if token_id != separator]
        return self._with_known(ids, known) if known else ids

    def _with_known(self, ids: list[int], known: Sequence[Sequence[int]]) -> list[int]:
        assert self._slot_id is not None, "it was added to the backend"
        filled: list[int] = []
        at = 0
        for some in known:
            slot = ids.index(self._slot_id, at)
            filled += ids[at:slot]
            filled += some
            at = slot + 1
        return filled + ids[at:]

    def _spells_special(self, ids: Sequence[int], plain: str) -> bool:
        return not self._special_ids.isdisjoint(ids) or (self._unknown is not None and self._unknown in plain)

    def _encode_literally(self, plain: str, encode: Encode) -> tokenizers.Encoding:
        """Encode as ordinary text, even where it spells special tokens."""
        backend = self._literal_backend()
        encoding = encode(backend, plain)
        found = self._special_ids.intersection(encoding.ids)
        if found:
            # The vocabulary itself contains this text as a word. Split it, so that its id does not appear.
            spelled = [text for text, token_id in self._ids.items() if token_id in found and len(text) > 1]
            pattern = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))) or r"(?!)")
            encoding = encode(
                backend, pattern.sub(lambda match: f"{match[0][0]}{self._separator}{match[0][1:]}", plain)
            )
            if not self._special_ids.isdisjoint(encoding.ids):
                raise RequestError(
                    "a message contains special tokens that this tokenizer cannot encode as ordinary text", "messages"
                )
        return encoding

    def _literal_backend(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._literal is None:
                literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
                added = literal.get_added_tokens_decoder()
                # Also mark end tokens as special that the tokenizer's file does not: the library goes by the flag.
                literal.add_special_tokens([added[id_] for id_ in self._ids.values() if not added[id_].special])
                literal.encode_special_tokens = True
                self._literal = literal
            return self._literal
