"""Tokenizer: convert between text and token ids. Each token has its bytes; the text is their UTF-8 decoding."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import CapacityError, ConfigError, PagodaError, RequestError
from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.templates.special_marks import SpecialMarks
from pagoda.engine.tokenizers.marked_encoder import MarkedEncoder
from pagoda.engine.tokenizers.token_length import BYTE_OF_LETTER, TokenLengthBound, token_length_bound
from pagoda.process.out_of_memory import is_out_of_memory

LONG_TEXT_CHARS = 1024
"""From this length on, an event loop tokenises texts on a thread: they take about half a millisecond or more."""

_BATCH_TEXTS = 256  # between two of them, an interrupt is noticed
_PROBE_ID = 2**32 - 2


class Tokenizer(Protocol):
    """The tokenizer interface of the engine. Implementations are thread-safe."""

    @property
    def facts(self) -> "TokenizerFacts": ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens written in the text become their ids.

        Raises RequestError for a text that the tokenizer cannot split.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return what `encode` returns for each text; on several threads, if the tokenizer can."""
        ...

    def encode_marked(
        self, text: str, add_special_tokens: bool = False, known: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """Return the token ids of ChatTemplate.render's marked text: only its marks become special tokens.

        known: ids in place of each slot in the text (SpecialMarks.slot).
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes the token adds to the text if it is not the first. Empty for unknown ids."""
        ...

    def token_string(self, token_id: int) -> str:
        """Return the token as the vocabulary writes it (`Ġis`). Empty for unknown ids."""
        ...


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids that a tokenizer adds to a text, and to a pair of texts.

    before, after: around a text.   pair_before, between, pair_after: around the texts of a pair.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    pair_before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    pair_after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The properties of a model's tokenizer.

    vocab_size: largest id + 1.   eos_token_ids: ids that end an output, the main one first.
    special_token_ids: ids that skip_special_tokens removes from the text.
    special_names: text of bos_token, eos_token, ...
    length_bound: upper bound of the text per token, if known.   added: what `encode` adds to a text.
    """

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_token_ids: frozenset[int] = frozenset()
    chat_template: ChatTemplate | None = None
    special_names: Mapping[str, str] = field(default_factory=dict[str, str])
    marks: SpecialMarks = field(default_factory=SpecialMarks)
    length_bound: TokenLengthBound | None = None
    added: SpecialTokens = SpecialTokens()


class LibraryTokenizer:
    """A Tokenizer that uses the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        """Raises ConfigError for a decoder with an unsupported step."""
        self.facts = facts
        self.backend = backend
        self._special = facts.special_token_ids
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._spelling = _spelling_of(backend)
        self._bytes: dict[int, bytes] = {}
        marked = set(facts.marks.texts)
        ids = {text: token_id for token_id, text in self._added.items() if text in marked}
        unknown = facts.special_names.get("unk_token") or getattr(backend.model, "unk_token", None)
        self._marked = MarkedEncoder(backend, facts.marks, ids, unknown)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return _encode(self.backend, text, add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for begin in range(0, len(texts), _BATCH_TEXTS):
            some = texts[begin : begin + _BATCH_TEXTS]
            try:
                found += [one.ids for one in self.backend.encode_batch_fast(some, add_special_tokens=True)]
            except BaseException as error:
                if not is_panic(error):
                    raise
                found += [self.encode(text) for text in some]  # names the text that it cannot split
        return found

    def encode_marked(
        self, text: str, add_special_tokens: bool = False, known: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        return self._marked.encode(text, functools.partial(_encode, param="messages"), add_special_tokens, known)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = self._special if skip_special_tokens else ()
        kept = [token_id for token_id in token_ids if token_id not in special]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        if self._spelling.strips_first_space and kept and kept[0] not in self._added:
            return text.removeprefix(" ")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            # Ids beyond the vocabulary are the marks' stand-ins, which must stay unknown.
            if not 0 <= token_id < self.facts.vocab_size:
                return b""  # not remembered: any number of such ids may be asked for
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_string(self, token_id: int) -> str:
        return self.backend.id_to_token(token_id) or ""

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._added.get(token_id)
        if token is None:
            token = self.backend.id_to_token(token_id)
        return b"" if token is None else self._spelling.to_bytes(token)


def _encode(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False, param: str = "prompt"
) -> tokenizers.Encoding:
    """Encode a text. Raises RequestError, which blames `param`, where the library's regular expressions give up."""
    try:
        if len(text) < LONG_TEXT_CHARS:
            return backend.encode(text, add_special_tokens=add_special_tokens)
        # Unlike `encode`, this releases the GIL, and does not compute the tokens' offsets in the text.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:  # its regular expression engine panics after too many steps
        if not is_panic(error):
            raise
        raise RequestError(f"{param}: the tokenizer cannot split this text: {shorten(str(error))}", param) from None


def is_panic(error: BaseException) -> bool:
    """Return whether `error` is a panic of a Rust library: not an Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


# ---- how tokens are spelled


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a vocabulary spells bytes: as `byte_level` characters, or with `space` for spaces and <0xNN> for bytes."""

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    word_prefix: str | None = None
    strips_first_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([BYTE_OF_LETTER[letter] for letter in token])
            except KeyError:  # an added token, written as it is
                return token.encode("utf-8")
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode("utf-8")
        if self.word_prefix is not None:
            if token.startswith(self.word_prefix):
                return token.removeprefix(self.word_prefix).encode("utf-8")
            return (" " + token).encode("utf-8")
        return (token.replace(self.space, " ") if self.space else token).encode("utf-8")


def _spelling_of(backend: tokenizers.Tokenizer) -> _Spelling:
    """Derive the spelling from the decoder's description. Raises ConfigError for an unsupported decoder."""
    if backend.decoder is None:
        return _Spelling(word_prefix="\0")  # tokens are words, joined by spaces
    described: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    spelling: dict[str, Any] = {}
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                spelling["byte_level"] = True
            case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                spelling["space"] = space
            case {"type": "ByteFallback"}:
                spelling["byte_fallback"] = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                spelling["strips_first_space"] = True
            case {"type": "Metaspace", "replacement": str(space)}:
                spelling["space"] = space
                spelling["strips_first_space"] = step.get("prepend_scheme", "always") != "never"
            case {"type": "WordPiece", "prefix": str(prefix)}:
                spelling["word_prefix"] = prefix
                spelling["strips_first_space"] = True
            case _:
                raise ConfigError(f"the tokenizer's decoder step {abbreviate(step.get('type'))} is not supported")
    return _Spelling(**spelling)


# ---- shared by all loaders


def library_failure(error: BaseException, path: Path, problem: str) -> BaseException:
    """Return the error to raise for what the tokenizers library raised while it loaded a file.

    problem: what is wrong with the file.   Return a ConfigError, or a CapacityError if memory ran out; an exception
    that is not the library's is returned as it is.
    """
    if isinstance(error, PagodaError) or not (isinstance(error, Exception) or is_panic(error)):
        return error
    if is_out_of_memory(error):
        return CapacityError(f"{path}: memory ran out while loading the tokenizer: raise the memory limit (ulimit -v)")
    return ConfigError(f"{path}: {problem}: {shorten(str(error), 300)}")


def make_facts(
    backend: tokenizers.Tokenizer,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    template_text: "str | dict[str, str] | None",
    special_names: dict[str, str],
    longest: int | None = None,
) -> TokenizerFacts:
    """Return the facts of a backend with its special tokens added. Raises ConfigError for an invalid template.

    longest: characters of its longest token, None if they are still to be counted.
    """
    added = backend.get_added_tokens_decoder()
    size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    marked = {*special, *eos_ids} | ({bos_id} if bos_id is not None else set())
    marks = SpecialMarks(token.content for token_id, token in added.items() if token_id in marked)
    template = _template_of(template_text, special_names, marks) if template_text else None
    bound, added_to_text = token_length_bound(backend, longest), _special_tokens(backend)
    return TokenizerFacts(size, bos_id, eos_ids, special, template, special_names, marks, bound, added_to_text)


def _special_tokens(backend: tokenizers.Tokenizer) -> SpecialTokens:
    """Find out what the post-processor adds around a token that it cannot know.

    The rest of the tokenizer does not run: a hostile one may need any amount of time and memory for any text.
    """
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": _PROBE_ID}, unk_token="a")).encode("a")
    try:
        single, pair = backend.post_process(probe).ids, backend.post_process(probe, probe).ids
    except BaseException as error:  # loading reports a tokenizer that cannot encode
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return SpecialTokens()
    if _PROBE_ID not in single or pair.count(_PROBE_ID) < 2:
        return SpecialTokens()
    at, first = single.index(_PROBE_ID), pair.index(_PROBE_ID)
    second = len(pair) - 1 - pair[::-1].index(_PROBE_ID)
    return SpecialTokens(
        tuple(single[:at]),
        tuple(single[at + 1 :]),
        tuple(pair[:first]),
        tuple(pair[first + 1 : second]),
        tuple(pair[second + 1 :]),
    )


def _template_of(source: object, special_names: dict[str, str], marks: SpecialMarks) -> ChatTemplate:
    """Compile a chat template. Raises ConfigError if it is not a string or strings by name, or cannot be compiled."""
    named = {"default": source} if isinstance(source, str) else source
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise ConfigError(f"the chat template is {abbreviate(source)}, expected a string or strings by name")
    return ChatTemplate(named, special_names, marks)


def bos_eos_template(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> tokenizers.processors.TemplateProcessing:
    """Return a post-processor that adds BOS and EOS to a text. None: do not add that token."""
    before, after = ([bos] if bos else []), ([eos] if eos else [])
    specials = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    for token, token_id in specials:
        if token_id is None:
            raise ConfigError(f"the special token {abbreviate(token)} is not in the vocabulary")
    return tokenizers.processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=specials
    )
