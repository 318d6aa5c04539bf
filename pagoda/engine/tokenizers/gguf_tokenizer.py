"""Rebuild the tokenizer in a GGUF file's metadata for the `tokenizers` library.

GGUF has three families: "gpt2", byte-level BPE with explicit merges and the name of the patterns that split text into
words, "llama", SentencePiece BPE, whose merges follow from the tokens' scores (for Gemma, from their order), and
"bert", WordPiece.
"""

from collections.abc import Sequence
from operator import itemgetter, methodcaller
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.registry import Registry
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, bos_eos_template, library_failure, make_facts
from pagoda.loading.gguf_file import GGUFFile, open_gguf
from pagoda.loading.token_ids import end_token_ids

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"


def load_gguf_tokenizer(path: Path, chat_template: str | None = None) -> LibraryTokenizer:
    """Load the tokenizer of a .gguf file; `chat_template` replaces the file's own.

    Raises ConfigError if the file has no tokenizer, or one of an unsupported kind.
    """
    file = open_gguf(path)
    tokens = file.strings("tokenizer.ggml.tokens")
    kind = file.get("tokenizer.ggml.model", str)
    if kind is None or not tokens:
        raise ConfigError(f"{path}: the file contains no tokenizer; name one (option tokenizer)")
    try:
        backend = _FAMILIES[kind](file, tokens)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except BaseException as error:
        raise library_failure(error, path, "the file's tokenizer is inconsistent") from None
    names = _special_names(file, tokens)
    if kind != "bert":
        _put_bos_and_eos(file, kind, backend, names)
    template = chat_template if chat_template is not None else chat_templates(file)
    bos_id = file.get("tokenizer.ggml.bos_token_id", int)
    longest = max(map(len, tokens))
    return LibraryTokenizer(backend, make_facts(backend, bos_id, end_token_ids(file), template, names, longest))


# ---- families


def _byte_level(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer with the file's merges and the word pattern it names."""
    pre = file.get("tokenizer.ggml.pre", str)
    if pre is None:
        raise ConfigError("tokenizer.ggml.pre is missing: it names the pattern that splits text into words")
    patterns = _PRE_TOKENIZERS[pre]
    pairs = _pairs(file)
    if pairs is None and file.strings("tokenizer.ggml.merges") is None:
        raise ConfigError("tokenizer.ggml.merges is missing")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    ignore_merges = pre in _WHOLE_WORDS_FIRST
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs or [], ignore_merges=ignore_merges))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(file, backend, tokens)
    return backend


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback."""
    prefix_space = file.get("tokenizer.ggml.add_space_prefix", bool)
    unknown = file.get("tokenizer.ggml.unknown_token_id", int)
    is_gemma = (file.get("general.architecture", str) or "").startswith("gemma")
    if is_gemma:
        # Gemma's vocabulary has runs of plain spaces, but the text to match has U+2581 instead.
        tokens = [*tokens]
        for index in np.flatnonzero(np.fromiter(map(str.isspace, tokens), bool, len(tokens))).tolist():
            if " " in tokens[index]:
                tokens[index] = _SPACE * len(tokens[index])
    if unknown is not None and not 0 <= unknown < len(tokens):
        raise ConfigError(f"unknown_token_id {unknown} is outside the vocabulary of {len(tokens)} tokens")
    backend = tokenizers.Tokenizer(
        models.BPE(
            dict(zip(tokens, range(len(tokens)), strict=True)),
            _pairs(file) or merges_of(tokens, _ranks(file, is_gemma, tokens)),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    if prefix_space is not False and not is_gemma:  # in front of a text, and again after each token that is marked
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), backend.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    _add_marked_tokens(file, backend, tokens)
    return backend


def _wordpiece(file: GGUFFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer: [CLS] and [SEP] around a text, whose words are the longest tokens that fit.

    llama.cpp's converter has U+2581 in front of what begins a word, instead of "##" in front of what does not.
    """
    types = file.numbers("tokenizer.ggml.token_type")
    is_special = np.zeros(len(tokens), bool) if types is None else types == _CONTROL
    if len(is_special) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(is_special)} entries for {len(tokens)} tokens")
    spelled = np.array(tokens, object)
    is_word = ~(is_special | _are_framed(tokens, "[", "]"))
    begins = is_word & _are_framed(tokens, _SPACE)
    spelled[begins] = np.array([*map(itemgetter(slice(1, None)), spelled[begins])], object)
    spelled[is_word & ~begins] = "##" + spelled[is_word & ~begins]
    names: list[str] = spelled.tolist()
    ids = {
        key: file.get(f"tokenizer.ggml.{key}_token_id", int)
        for key in ("unknown", "cls", "bos", "separator", "seperator", "eos")  # llama.cpp spells it so
    }
    marks: list[str] = []
    for wanted in (("unknown",), ("cls", "bos"), ("separator", "seperator", "eos")):
        number = next((ids[key] for key in wanted if ids[key] is not None), None)
        if number is None or not 0 <= number < len(tokens):
            raise ConfigError(f"tokenizer.ggml.{wanted[0]}_token_id is {number}; expected 0 to {len(tokens) - 1}")
        marks.append(names[number])
    unknown, first, last = marks
    vocab = dict(zip(names, range(len(names)), strict=True))
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    lowercase = file.get("tokenizer.ggml.normalizer.lowercase", bool)
    if lowercase is None:
        # If the vocabulary has capital letters, the model distinguishes them from small ones.
        # Names such as [UNK] and <S>, which BERT's Chinese vocabulary of small letters has, do not count.
        words = "".join(spelled[~(_are_framed(names, "[", "]") | _are_framed(names, "<", ">"))])
        lowercase = words == words.lower()
    strip_accents = file.get("tokenizer.ggml.normalizer.strip_accents", bool)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _add_marked_tokens(file, backend, names)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, vocab[first]), (last, vocab[last])],
    )
    return backend


def _are_framed(tokens: Sequence[str], first: str, last: str = "") -> np.ndarray:
    """Return which tokens begin with `first` and end with `last`: bool [vocab_size], without a loop in Python."""
    begins, ends = (
        np.fromiter(map(methodcaller(name, text), tokens), bool, len(tokens))
        for name, text in (("startswith", first), ("endswith", last))
    )
    return begins & ends


_FAMILIES = Registry("GGUF tokenizer model", {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece})


def _pairs(file: GGUFFile) -> list[tuple[str, str]] | None:
    """Return the file's merges "left right", None if it has none; the left part may begin with a space."""
    merges = file.strings("tokenizer.ggml.merges")
    if not merges:
        return None
    parts = " ".join(merges).split(" ")
    if set(map(methodcaller("count", " "), merges)) != {1} or "" in parts:
        return [_pair(merge) for merge in merges]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _pair(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 0:
        raise ConfigError(f"the merge {abbreviate(merge)} has no space between its parts")
    return merge[:at], merge[at + 1 :]


def _ranks(file: GGUFFile, by_order: bool, tokens: list[str]) -> np.ndarray:
    """Return the priority of each token as a merge result, largest first: float [vocab_size]."""
    if by_order:
        return -np.arange(len(tokens), dtype=np.float64)
    scores = file.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigError("tokenizer.ggml.scores is missing or does not have one score per token")
    return scores


# ---- special tokens


def _add_marked_tokens(file: GGUFFile, backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Add control tokens as special and user-defined tokens as added: both are matched whole in a text."""
    types = file.numbers("tokenizer.ggml.token_type")
    if types is None:
        return
    if len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    for wanted, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        marked = np.flatnonzero(types == wanted).tolist()
        add([AddedToken(tokens[index], normalized=False, special=wanted == _CONTROL) for index in marked])


def _special_names(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """Map bos_token, eos_token, ... to their text, as chat templates expect."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    names: dict[str, str] = {}
    for name, key in keys.items():
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ConfigError(
                f"{file.path}: {key}_token_id {token_id} is outside the vocabulary of {len(tokens)} tokens"
            )
        names[name] = tokens[token_id]
    return names


def chat_templates(file: GGUFFile) -> dict[str, str] | None:
    """Return the file's templates by name: tokenizer.chat_template is "default", others have a name after it."""
    templates: dict[str, str] = {}
    for key in file.metadata:
        first, _, name = key.removeprefix("tokenizer.").partition(".")
        if key.startswith("tokenizer.") and first == "chat_template" and (text := file.get(key, str)) is not None:
            templates[name or "default"] = text
    return templates or None


def _put_bos_and_eos(file: GGUFFile, kind: str, backend: tokenizers.Tokenizer, names: dict[str, str]) -> None:
    """Add BOS and EOS as the file's flags say. By default, SentencePiece and Llama 3 add BOS, and none adds EOS."""
    by_default = kind == "llama" or file.get("tokenizer.ggml.pre", str) in _BEGINS_WITH_BOS
    stated = file.get("tokenizer.ggml.add_bos_token", bool)
    with_bos = by_default if stated is None else stated
    with_eos = file.get("tokenizer.ggml.add_eos_token", bool) or False
    bos = names.get("bos_token") if with_bos else None
    eos = names.get("eos_token") if with_eos else None
    if bos or eos:
        backend.post_processor = bos_eos_template(backend, bos, eos)


# ---- published patterns that split text into words before BPE, by the names GGUF files use

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED_WORD.replace("SUFFIX", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED_WORD.replace("SUFFIX", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_REST


_DIGIT = r"\p{N}"
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = _QWEN2.replace(r"]+[\r\n]*|", r"\r\n]+|")

_PATTERNS: dict[tuple[str, ...], tuple[str, ...]] = {
    (
        *("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        *("glm4", "chatglm-bpe"),
    ): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan"): (_QWEN2,),
    (
        *("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "exaone4", "jais", "trillion", "gigachat", "mellum", "a.x-4.0"),
        *("roberta-bpe", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
    ): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (_DIGIT, _GPT2),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]"),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT),
    ("deepseek-v3", "hunyuan-dense"): (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
    ("seed-coder",): (_SEED_CODER,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "kanana2"): (_GPT4O,),
}
"""What each of the patterns finds is a piece; the next one divides the pieces and what is between them."""

_PRE_TOKENIZERS = Registry(
    "GGUF pre-tokenizer", {name: patterns for names, patterns in _PATTERNS.items() for name in names}
)
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"}
_BEGINS_WITH_BOS = _WHOLE_WORDS_FIRST
_NFC = {"qwen2", "deepseek-r1-qwen", "megrez", "command-r", "olmo"}
"""Those whose tokenizers join letters with their marks first."""


# ---- the merges of a SentencePiece vocabulary, which states only the rank of each token
#
# A token is the result of every pair of tokens that spell it. Vocabularies have hundreds of thousands of tokens with
# millions of places to cut them, so all are looked up together, by hashes of their parts.


_BASE = 0x9E3779B97F4A7C15  # of the polynomial, modulo 2 ** 64; odd, so it has an inverse
_SLOT_BITS = 22
_MOST_TOKENS = 1 << 21  # three numbers of a token fit into 63 bits


def merges_of(tokens: list[str], ranks: np.ndarray) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge into a token, best result first; ties by the ids of the parts.

    ranks: of each token as a result, largest first; ties by id: float [vocab_size]. Of tokens that are alike, the last
    is the part. Raises ConfigError for more than two million tokens.
    """
    count = len(tokens)
    if count > _MOST_TOKENS:
        raise ConfigError(f"a vocabulary of {count} tokens is not supported; at most {_MOST_TOKENS}")
    lengths = np.fromiter(map(len, tokens), np.int64, count)
    ends = lengths.cumsum()
    starts = ends - lengths
    hashes = _Hashes("".join(tokens))
    known = _Ids(hashes.between(starts, ends))
    token = np.repeat(np.arange(count), lengths)
    cuts = np.arange(len(token))
    inner = cuts > starts[token]
    cuts, token = cuts[inner], token[inner]
    left = known.find(hashes.between(starts[token], cuts))
    is_token = left >= 0
    cuts, token, left = cuts[is_token], token[is_token], left[is_token]
    right = known.find(hashes.between(cuts, ends[token]))
    is_token = right >= 0
    token, left, right = token[is_token], left[is_token], right[is_token]
    place = np.empty(count, np.int64)
    place[np.argsort(-ranks, kind="stable")] = np.arange(count)
    order = np.argsort(((place[token] << 21 | left) << 21) | right)
    texts = np.array(tokens, object)
    return list(zip(texts[left[order]].tolist(), texts[right[order]].tolist(), strict=True))


class _Hashes:
    """Hashes of all parts of a text: uint64, equal for equal parts, wherever they are."""

    def __init__(self, text: str) -> None:
        letters = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
        letters *= np.uint64(0xBF58476D1CE4E5B9)
        letters ^= letters >> np.uint64(29)
        letters *= np.uint64(0x94D049BB133111EB)
        letters ^= letters >> np.uint64(32)
        letters *= _powers(_BASE, len(letters))
        self._sums = np.concatenate([np.zeros(1, np.uint64), letters.cumsum()])
        self._inverse = _powers(pow(_BASE, -1, 1 << 64), len(letters) + 1)

    def between(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """uint64, one for each part."""
        found = (self._sums[end] - self._sums[begin]) * self._inverse[begin]
        return found ^ (found >> np.uint64(31))


def _powers(base: int, count: int) -> np.ndarray:
    """base ** 0, base ** 1, ..., modulo 2 ** 64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.multiply.accumulate(factors)


class _Ids:
    """Finds the ids of hashes, in tables of which each has what did not fit into those before it."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes, self._tables = hashes, list[np.ndarray]()
        ids = np.arange(len(hashes))
        while len(ids):
            table = np.full(1 << _SLOT_BITS, -1, np.int32)
            slots = self._slots(hashes[ids], len(self._tables))
            table[slots] = ids  # of several, the last one
            self._tables.append(table)
            ids = ids[hashes[table[slots]] != hashes[ids]]

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """int64, -1 for a hash that is not known."""
        found = np.full(len(hashes), -1, np.int64)
        missing = np.arange(len(hashes))
        for number, table in enumerate(self._tables):
            ids = table[self._slots(hashes[missing], number)]
            hit = (ids >= 0) & (self._hashes[ids] == hashes[missing])
            found[missing[hit]] = ids[hit]
            missing = missing[~hit & (ids >= 0)]
        return found

    def _slots(self, hashes: np.ndarray, table: int) -> np.ndarray:
        shifted = hashes >> np.uint64(7 * table % (64 - _SLOT_BITS))
        return (shifted & np.uint64((1 << _SLOT_BITS) - 1)).astype(np.int64)
