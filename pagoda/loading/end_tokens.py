"""The tokens that end an answer, according to a GGUF file."""

from pagoda.base.errors import ConfigError
from pagoda.loading.gguf_file import GGUFFile

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
        words = file.strings("tokenizer.ggml.tokens") or []
        if len(words) != len(types):
            raise ConfigError(f"{file.path}: {len(words)} tokens but {len(types)} token types")
        found += [int(index) for index in (types == _CONTROL).nonzero()[0] if words[index] in _END_OF_TURN]
    return tuple(dict.fromkeys(found))
