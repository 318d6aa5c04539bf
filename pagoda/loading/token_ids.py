"""Token ids from a model's files: those of given texts, and those that end an answer. No tokenizer is built."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.loading.gguf_file import GGUFFile, StringArray
from pagoda.loading.model_files import read_json_object

TOKENIZER = "tokenizer.json"


def find_token_ids(folder: Path, tokens: Sequence[str]) -> list[int]:
    """Return the ids of tokens. Raises ConfigError for one that the vocabulary of the folder's tokenizer lacks."""
    path = folder / TOKENIZER
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; classifier_from_token needs it") from None
    return list(_find(path, changed_ns, tuple(tokens)))


@functools.lru_cache(maxsize=8)
def _find(path: Path, changed_ns: int, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """A vocabulary takes tenths of a second to read, and a model's settings are read several times."""
    values = read_json_object(path)
    known = _vocabulary(values.get("model")) | _added(values.get("added_tokens"))
    for token in tokens:
        if token not in known:
            raise ConfigError(f"classifier_from_token: {path} has no token {abbreviate(token)}")
    return tuple(known[token] for token in tokens)


def _vocabulary(model: object) -> dict[str, int]:
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        return {str(token): number for token, number in vocabulary.items() if isinstance(number, int)}
    if isinstance(vocabulary, list):  # unigram: pairs of a token and its score, in the order of their ids
        pairs = ((entry[0], number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry)
        return {token: number for token, number in pairs if isinstance(token, str)}
    return {}


def _added(entries: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int):
            found[entry["content"]] = entry["id"]
    return found


_ID_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Chat models end a turn with a token that many GGUF files do not name; these strings have no other meaning.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})
_CONTROL = 3  # token_type of special tokens


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the ids named in the metadata, then special tokens whose text can only mean the end of a turn."""
    ids = [file.get(f"tokenizer.ggml.{key}", int) for key in _ID_KEYS]
    found = [token_id for token_id in ids if token_id is not None]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    types = file.numbers("tokenizer.ggml.token_type")
    if types is not None and tokens is not None:
        if not isinstance(tokens, StringArray):
            raise ConfigError(f"{file.path}: tokenizer.ggml.tokens is not an array of strings")
        if len(tokens) != len(types):
            raise ConfigError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
        found += [index for index in (types == _CONTROL).nonzero()[0].tolist() if tokens[index] in _END_OF_TURN]
    return tuple(dict.fromkeys(found))
