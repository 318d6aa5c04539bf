"""A tokenizer from a folder: tokenizer.json, and what tokenizer_config.json and its like say beside it."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from pagoda.base.errors import ConfigError
from pagoda.engine.tokenizer import LibraryTokenizer, bos_eos_template, make_facts


def load_folder_tokenizer(folder: Path, chat_template: str | None = None) -> LibraryTokenizer:
    """The tokenizer of `folder`, which has a tokenizer.json; `chat_template` replaces the folder's own.

    Raises ConfigError that names the file that cannot be used.
    """
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
    template = chat_template if chat_template is not None else _folder_chat_template(folder, config)
    return LibraryTokenizer(backend, make_facts(backend, bos_id, eos, template, names))


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
