"""A tiny random model with one token per byte, and its tokenizer: grammars can constrain its output."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.make_random_model import SHAPES, make
from pagoda.engine.tokenizers.token_length import BYTE_LETTERS

EOS = 2
WORDS = ("Ġthe", "name", "true", "false", '":', "Ġ{", '",', "12")
VOCAB = 272  # wider than the tokenizer's
SMALL_ENGINE: Mapping[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "num_blocks": 200,
    "block_size": 8,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
}
"""Options of an engine with which a prompt of a few dozen tokens takes several blocks and steps."""


def write_byte_llama(folder: Path, seed: int = 1) -> Path:
    """So wide that kernels with no promise (torch's) differ from one batch to another."""
    wide = {"hidden_size": 192, "intermediate_size": 448, "head_dim": 48, "vocab_size": VOCAB}
    make(replace(SHAPES["tiny"], tie_word_embeddings=False, **wide), folder, seed=seed)
    (folder / "generation_config.json").unlink()  # it names an end token of a larger vocabulary
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 1, "eos_token_id": EOS}))
    return write_byte_tokenizer(folder)


def write_byte_tokenizer(folder: Path) -> Path:
    """Write the tokenizer next to a model with VOCAB tokens."""
    specials = ["<unk>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*specials, *BYTE_LETTERS])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    vocab = {token: i for token, i in vocab.items() if i < VOCAB - 4}
    merges = [(left, right) for left, right in merges if left + right in vocab and left in vocab]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
