"""Tokenizer: between text and token ids. Bytes are the truth: every token stands for some, text is their UTF-8."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from pagoda.base.errors import ConfigError
from pagoda.engine.chat_template import ChatTemplate
from pagoda.loading.model_files import ModelFiles, identify


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer. Objects are shared by threads: all methods only read."""

    @property
    def facts(self) -> "TokenizerFacts": ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, when it is not the first. Empty for ids that do not exist."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a tokenizer knows of its model.

    vocab_size: largest id + 1.   eos_token_ids: ids that end an output, the main one first.
    special_token_ids: ids that skip_special_tokens leaves out of the text.
    """

    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_token_ids: frozenset[int] = frozenset()
    chat_template: ChatTemplate | None = None


class LibraryTokenizer:
    """A Tokenizer of the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        """Raises ConfigError when its decoder is of a kind whose tokens have no bytes of their own."""
        self.facts = facts
        self.backend = backend
        self._special = facts.special_token_ids
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._spelling = _spelling_of(backend)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode` for each, on all cores."""
        return [item.ids for item in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

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
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._added.get(token_id)
        if token is None:
            token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spelling.to_bytes(token)


# ---- how tokens are spelled


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a vocabulary writes bytes as text: `byte_level` letters, or `replace` and <0xNN> for single bytes."""

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    word_prefix: str | None = None
    strips_first_space: bool = False

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in token])
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


def _letters_of_bytes() -> dict[str, int]:
    """The GPT-2 alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


_BYTE_OF_LETTER = _letters_of_bytes()


def _spelling_of(backend: tokenizers.Tokenizer) -> _Spelling:
    """Reads the decoder's own description. Raises ConfigError for one that is not understood."""
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
                raise ConfigError(f"the tokenizer's decoder step {step.get('type')!r} is not supported")
    return _Spelling(**spelling)


# ---- loading


def load_tokenizer(
    files: ModelFiles, tokenizer_override: str | None = None, chat_template: str | None = None
) -> LibraryTokenizer:
    """The tokenizer of a model: from its tokenizer.json, or rebuilt from a GGUF's metadata.

    tokenizer_override: a local folder, tokenizer.json or .gguf file to take instead of the model's own.
    chat_template: a template's text, or the path of a file with it, to use instead of the model's own.
    Raises ConfigError that says what is missing or not supported.
    """
    from pagoda.engine.gguf_tokenizer import load_gguf_tokenizer  # after this module: it builds on it

    source = files.path
    if tokenizer_override is not None:
        source = Path(tokenizer_override).expanduser()
        if not source.exists():
            raise ConfigError(f"tokenizer {tokenizer_override!r}: {source} does not exist")
    template_text = _read_chat_template(chat_template) if chat_template is not None else None
    if source.suffix == ".gguf":
        return load_gguf_tokenizer(source, template_text)
    folder = source if source.is_dir() else source.parent
    if not (folder / "tokenizer.json").is_file():
        if tokenizer_override is not None and source.is_dir() and any(source.glob("*.gguf")):
            return load_gguf_tokenizer(identify(source).path, template_text)
        raise ConfigError(
            f"model {files.name!r}: {folder} has no tokenizer.json; copy the one of the model there, "
            "or name another tokenizer (option tokenizer)"
        )
    return _load_folder(folder, template_text)


def _read_chat_template(given: str) -> str:
    """A path if such a file exists (or it looks like nothing but a path), else the text of a template."""
    if "{" in given or "\n" in given:
        return given
    path = Path(given).expanduser()
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={given!r} is neither a template nor a readable file: {error}") from None


def _load_folder(folder: Path, given_template: str | None) -> LibraryTokenizer:
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: cannot be read as a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    _add_configured_tokens(backend, config)
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        _obey_bos_and_eos_flags(backend, config)
    names = _special_token_texts(config, _read_json(folder / "special_tokens_map.json"))
    eos = _ids_of(folder, backend, names.get("eos_token"))
    bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    template = given_template if given_template is not None else _folder_chat_template(folder, config)
    return LibraryTokenizer(backend, make_facts(backend, bos_id, eos, template, names))


def make_facts(
    backend: tokenizers.Tokenizer,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    template_text: "str | dict[str, str] | None",
    special_names: dict[str, str],
) -> TokenizerFacts:
    """Facts of a backend whose special tokens are all added. Raises ConfigError for a broken chat template."""
    added = backend.get_added_tokens_decoder()
    size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    template = ChatTemplate(template_text, special_names) if template_text else None
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    return TokenizerFacts(size, bos_id, eos_ids, special, template)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _text_of(entry: object) -> str | None:
    """A special token is written as text or as an object with its text in `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _special_token_texts(*configs: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, pad_token, ... -> text; earlier files win."""
    texts: dict[str, str] = {}
    for config in reversed(configs):
        for name, entry in config.items():
            text = _text_of(entry)
            if name.endswith("_token") and text is not None:
                texts[name] = text
    return texts


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """tokenizer_config.json may name added tokens that tokenizer.json lacks, or mark as special what it does not."""
    entries = config.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        token_id, token = int(key), tokenizers.AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
        if token_id in known and known[token_id].special == token.special:
            continue
        added = backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if added and backend.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"tokenizer.json has room for it only at {backend.token_to_id(token.content)}"
            )


def _obey_bos_and_eos_flags(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Where tokenizer_config.json states add_bos_token / add_eos_token, they decide, for Llama-like tokenizers only."""
    if config.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer"):
        return
    bos, eos = _text_of(config.get("bos_token")), _text_of(config.get("eos_token"))
    backend.post_processor = bos_eos_template(
        backend,
        bos if config.get("add_bos_token", True) else None,
        eos if config.get("add_eos_token", False) else None,
    )


def bos_eos_template(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None
) -> tokenizers.processors.TemplateProcessing:
    """A post-processor that puts these around a text (None: nothing)."""
    before, after = ([bos] if bos else []), ([eos] if eos else [])
    specials = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    return tokenizers.processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=specials
    )


def _ids_of(folder: Path, backend: tokenizers.Tokenizer, eos_text: str | None) -> tuple[int, ...]:
    """End ids: the tokenizer's own, then those of generation_config.json (of config.json when that says nothing)."""
    ids: list[int] = []
    if eos_text is not None and (token_id := backend.token_to_id(eos_text)) is not None:
        ids.append(token_id)
    for file in ("generation_config.json", "config.json"):
        stated = _read_json(folder / file).get("eos_token_id")
        if stated is not None:
            ids.extend(stated if isinstance(stated, list) else [stated])
            break
    return tuple(dict.fromkeys(ids))


def _folder_chat_template(folder: Path, config: dict[str, Any]) -> "str | dict[str, str] | None":
    """chat_template.jinja, or the one (or the named ones) inside tokenizer_config.json or chat_template.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
    stated = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):
        return {entry["name"]: entry["template"] for entry in stated}
    return stated
