"""What tokens spell: the alphabet of byte-level vocabularies, and the most text that one token can cover."""

import json
from dataclasses import dataclass
from typing import Any

import tokenizers


def _letters() -> tuple[str, ...]:
    """Return the character of each byte: printable bytes map to themselves, the others to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LETTERS = _letters()
"""Character by byte value."""
BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


# ---- how much text a token covers, to reject far too long prompts before tokenising them


@dataclass(frozen=True, slots=True)
class TokenLengthBound:
    """max_chars: most characters of input text per token.

    dropped: characters that the tokenizer drops, because they are not in its vocabulary.
    """

    max_chars: int
    dropped: str = ""

    def min_tokens(self, text: str, enough: int | None = None) -> int:
        """Return a lower bound of the number of tokens in `text`, without tokenising it.

        enough: return this number as soon as the bound reaches it, without looking at the rest of the text.
        """
        kept = 0
        for at in range(0, len(text), _PIECE_CHARS):
            piece = text[at : at + _PIECE_CHARS]
            kept += len(piece) - sum(map(piece.count, self.dropped))
            if enough is not None and kept > (enough - 1) * self.max_chars:
                return enough
        return -(-kept // self.max_chars)


_PIECE_CHARS = 64 * 1024
_NFC_SHRINKS = 4  # NFC composes at most four characters into one
_KEEPS_EVERY_CHARACTER = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})


def token_length_bound(backend: tokenizers.Tokenizer, longest: int | None = None) -> TokenLengthBound | None:
    """Return the bound of a tokenizer.   longest: characters of its longest token, if they are known.

    None if there is no bound: unknown words of any length become one token, or a normaliser drops characters.
    """
    normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
    shrinks = _shrinking(normalizer)
    dropped = _dropped(backend, pre_tokenizer)
    if shrinks is None or dropped is None or not _keeps_characters(pre_tokenizer):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token absorbs all adjacent white space
    if longest is None:
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return TokenLengthBound(shrinks * longest, dropped)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _steps(described: Any, key: str) -> list[dict[str, Any]]:
    if described is None:
        return []
    return described[key] if described["type"] == "Sequence" else [described]


def _shrinking(normalizer: Any) -> int | None:
    """Return the largest factor by which a normaliser can shorten a text; None if unbounded."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
                pass
            case _:
                return None
    return factor


def _keeps_characters(pre_tokenizer: Any) -> bool:
    return all(
        step["type"] in _KEEPS_EVERY_CHARACTER or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _dropped(backend: tokenizers.Tokenizer, pre_tokenizer: Any) -> str | None:
    """Return the ASCII characters that the vocabulary drops; None if the number of dropped characters is unbounded."""
    if not isinstance(backend.model, tokenizers.models.BPE):
        return None
    if backend.model.byte_fallback:
        return "" if all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)) else None
    if not any(step["type"] == "ByteLevel" for step in _steps(pre_tokenizer, "pretokenizers")):
        return None
    if backend.model.unk_token is not None and backend.model.fuse_unk:
        return None
    missing = [byte for byte, letter in enumerate(BYTE_LETTERS) if backend.token_to_id(letter) is None]
    # A multi-byte character is only dropped if all its bytes are missing, so not if all continuation bytes are known.
    return "".join(map(chr, (byte for byte in missing if byte < 0x80))) if not any(map(_is_inner, missing)) else None


def _is_inner(byte: int) -> bool:
    """Return whether this is a UTF-8 continuation byte."""
    return 0x80 <= byte < 0xC0
