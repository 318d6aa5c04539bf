"""Tokenizers against transformers, and those inside GGUF files against slow definitions."""

import gc
import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

import pagoda
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, library_failure
from pagoda.loading.gguf_file import GGUFFile
from pagoda.loading.model_files import ModelFiles, identify
from tests.cached_models import cached_model, transformers_tokenizer

STRINGS = [
    "Hello, world! It's 3.14 or 123456.",
    "   leading and trailing   ",
    "tabs\tand\r\nlines\n\n\n\nmore",
    "naïve café, 日本語のテキスト, Ελληνικά, עברית, 한국어, ไทย",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 done",
    "def f(x: int) -> int:\n    return x**2  # why\n\tpass",
    "don't I'LL we've THEY'RE",
    "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>model",
    "combining e\u0301 and e, NFC ﬁ ½",
    "\u200b\ufeff\u2028 odd \x00 controls \x7f",
    "a  b   c    d        e",
    "x" * 300,
    " ",
    "\n",
]


def source_lines() -> list[str]:
    """Real text: this package's own sources, some lines at a time."""
    files = sorted(Path(pagoda.__file__).parent.rglob("*.py"))[:20]
    lines = "\n".join(file.read_text("utf-8") for file in files).splitlines(keepends=True)
    return ["".join(lines[at : at + 5]) for at in range(0, len(lines), 5)]


def check_agreement(ours: LibraryTokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    return cached_model("smollm2-135m")


@pytest.fixture(scope="module")
def reference(smollm2: ModelFiles) -> Any:
    """transformers' tokenizer of the file, made to cut off single digits, as the published tokenizer.json does."""
    reference = transformers_tokenizer(smollm2)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return reference


def test_smollm2_agrees_with_transformers(smollm2: ModelFiles, reference: Any) -> None:
    ours, theirs = load_tokenizer(smollm2), reference
    check_agreement(ours, theirs, STRINGS + source_lines())
    assert ours.facts.vocab_size == len(theirs) == 49152
    assert ours.facts.bos_token_id == theirs.bos_token_id
    assert ours.facts.eos_token_ids == (theirs.eos_token_id,)
    assert ours.facts.special_token_ids == set(range(17))


def test_smollm2_chat_agrees_with_transformers(smollm2: ModelFiles, reference: Any) -> None:
    ours, theirs = load_tokenizer(smollm2), reference
    template = ours.facts.chat_template
    assert template is not None
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes "},
        {"role": "user", "content": "?"},
    ]
    with_system = [{"role": "system", "content": "Be brief."}, *chat]
    for messages in (chat, with_system):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected
    expected = theirs.apply_chat_template(chat[:2], tokenize=False, continue_final_message=True)
    assert template.render(chat[:2], add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.slow
def test_gemma3_agrees_with_transformers() -> None:
    files = cached_model("gemma3-270m")
    theirs = transformers_tokenizer(files)
    ours = load_tokenizer(files)
    check_agreement(ours, theirs, STRINGS + source_lines())
    assert ours.encode("x")[0] == ours.facts.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_every_tokens_bytes_are_what_the_library_decodes(name: str) -> None:
    tokenizer = load_tokenizer(cached_model(name))
    size = tokenizer.facts.vocab_size
    for token_id in [*range(600), *range(600, size, 97), size - 1]:
        ours = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        assert ours == tokenizer.backend.decode([token_id], skip_special_tokens=False), token_id
    assert tokenizer.token_bytes(size) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_unknown_ids_take_no_memory(smollm2: ModelFiles) -> None:
    tokenizer = load_tokenizer(smollm2)
    tracemalloc.start()
    try:
        assert tokenizer.decode(range(10**6, 10**6 + 50_000)) == ""
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 10**6
    finally:
        tracemalloc.stop()


# ---- folders


def write_folder(path: Path, **config: Any) -> tokenizers.Tokenizer:
    """A folder with a small byte-level tokenizer.json and this tokenizer_config.json."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(STRINGS, trainer)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def folder(path: Path) -> ModelFiles:
    return ModelFiles("tiny", path, "safetensors")


USER = {"role": "user", "content": "x"}


def test_a_folder_gives_its_ends_and_its_template(tmp_path: Path) -> None:
    write_folder(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, chat_template="{{ bos_token }}T")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1, 300]}')
    tokenizer = load_tokenizer(folder(tmp_path))
    assert (tokenizer.facts.bos_token_id, tokenizer.facts.eos_token_ids) == (0, (1, 2, 300))
    assert tokenizer.facts.chat_template is not None
    assert tokenizer.facts.chat_template.render([{"role": "user", "content": ""}]) == "<s>T"
    for text in STRINGS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_file_and_override(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}])
    named = load_tokenizer(folder(tmp_path)).facts.chat_template
    assert named is not None
    assert dict(named.sources) == {"default": "D", "tool_use": "U"}
    (tmp_path / "chat_template.jinja").write_text("J")
    own = load_tokenizer(folder(tmp_path)).facts.chat_template
    assert own is not None
    assert dict(own.sources) == {"default": "J"}
    (tmp_path / "mine.jinja").write_text("M")
    for given, text in ((str(tmp_path / "mine.jinja"), "M"), ("{{ 1 }}", "{{ 1 }}")):
        override = load_tokenizer(folder(tmp_path), chat_template=given).facts.chat_template
        assert override is not None
        assert override.sources["default"] == text
    with pytest.raises(ConfigError, match="nowhere.jinja"):
        load_tokenizer(folder(tmp_path), chat_template="nowhere.jinja")


def test_templates_of_a_folder_have_the_names_of_their_files(tmp_path: Path) -> None:
    """And as transformers picks them, `tool_use` is the one for tools."""
    write_folder(tmp_path, chat_template="D")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U{{ tools | length }}")
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    template = load_tokenizer(folder(tmp_path)).facts.chat_template
    assert template is not None
    assert dict(template.sources) == {"default": "D", "tool_use": "U{{ tools | length }}", "rag": "R"}
    assert (template.render([USER]), template.render([USER], [{"type": "function"}])) == ("D", "U1")
    (tmp_path / "chat_template.jinja").write_text("J")
    template = load_tokenizer(folder(tmp_path)).facts.chat_template
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert template is not None
    assert dict(template.sources) == theirs


def test_added_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    size = write_folder(tmp_path).get_vocab_size()
    entry = {"content": "<tool>", "special": False, "normalized": False}
    config = {"added_tokens_decoder": {str(size): entry}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder(tmp_path))
    assert size in tokenizer.encode("a<tool>b")
    assert tokenizer.decode([size]) == "<tool>"
    assert size not in tokenizer.facts.special_token_ids


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(folder(tmp_path))
    write_folder(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(folder(tmp_path), "no-such-folder")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ConfigError, match="chat template"):
        load_tokenizer(folder(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(folder(tmp_path))


# ---- GGUF


def write_gguf(
    path: Path, model: str, tokens: list[str], types: list[int], architecture: str = "llama", **more: Any
) -> ModelFiles:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in more.items():
        name = f"tokenizer.ggml.{key}"
        if key == "chat_template":
            writer.add_chat_template(value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return identify(path)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


DIGITS = pre_tokenizers.Digits(individual_digits=True)
HAN = "[一-龥ࠀ-一가-\ud7ff]+"
PUBLISHED: dict[str, tuple[list[pre_tokenizers.PreTokenizer], bool]] = {
    "llama-bpe": ([split(LLAMA3)], False),
    "qwen2": ([split(QWEN2)], False),
    "gpt-2": ([], True),
    "olmo": ([], True),
    "command-r": ([DIGITS], True),
    "smollm": ([DIGITS], True),
    "deepseek-coder": (
        [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(HAN), DIGITS],
        False,
    ),
    "deepseek-v3": (
        [
            split(r"\p{N}{1,3}"),
            split("[一-龥\u3040-ゟ゠-ヿ]+"),
            split(
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ],
        False,
    ),
    "tekken": (
        [
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        ],
        False,
    ),
    "gpt-4o": (
        [
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        ],
        False,
    ),
    "seed-coder": (
        [
            split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
                r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        ],
        False,
    ),
    "default": (
        [
            split(r"[\p{P}\$\+<=>\^~\|]+"),
            split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            split(r"\p{N}+"),
            split("[0-9][0-9][0-9]"),
        ],
        False,
    ),
}
"""What the tokenizer.json of such models splits a text with (of "default", llama.cpp), and whether ByteLevel does so as
well.
"""


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_gguf_splits_words_as_the_published_tokenizer_does(tmp_path: Path, pre: str) -> None:
    steps, use_regex = PUBLISHED[pre]
    is_whole_first = pre in ("llama-bpe", "tekken")
    reference = tokenizers.Tokenizer(models.BPE(ignore_merges=is_whole_first))
    if pre in ("qwen2", "olmo", "command-r"):
        reference.normalizer = tokenizers.normalizers.NFC()
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|a|>", "<|b|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    reference.train_from_iterator(STRINGS * 3, trainer)
    described = json.loads(reference.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    types = [3 if token.startswith("<|") else 1 for token in tokens]
    merges = [" ".join(merge) for merge in described["merges"]]
    files = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, pre=pre, merges=merges, bos_token_id=0)
    tokenizer = load_tokenizer(files)
    begins = [0] if is_whole_first else []
    others = ["a<|b|>c 1234567", "HTTPServer isN'T //\r\n  }\r\n +=$~^ 12345 ǅaé"]
    for text in [*STRINGS, *others, "e\u0301 don't\r\n\n  x=10**3;東京タワー 한국, ¿qué? ½²"]:
        words, expected = (
            [word for word, _ in of.pre_tokenizer.pre_tokenize_str(text)] for of in (tokenizer.backend, reference)
        )
        assert words == expected, text
        ids = reference.encode(text).ids
        assert tokenizer.encode(text) == begins + ids, text
        assert tokenizer.decode(ids, False) == reference.decode(ids, skip_special_tokens=False)


def merged_by_definition(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's BPE: join the neighbours whose joint token scores best, the leftmost first, until none can."""
    score_of = dict(zip(tokens, scores, strict=True))
    pieces = list(text)
    while True:
        joints = [(score_of[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in score_of]
        if not joints:
            return pieces
        at = -max(joints)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gguf_merges_by_score_and_falls_back_to_bytes(tmp_path: Path, prefix: bool) -> None:
    special = ["<unk>", "<s>", "</s>"]
    words = ["▁", *"abcde", "ab", "bc", "abc", "▁a", "▁ab", "cd", "de", "bcd", "▁▁", "eab"]
    scores = [0.0, 0, 0] + [0.0] * 256 + [-100, *[-50.0] * 5, -3, -1, -2, -4, -2.5, -6, -1, -5, -7, -0.5]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + words
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    files = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tokens,
        types,
        scores=[float(score) for score in scores],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=prefix,
    )
    tokenizer = load_tokenizer(files)
    for text in ["abc", "ab cd eab", "abcde  abcbcd", "deab", "aabbccddee abc"]:
        spelled = ("▁" if prefix else "") + text.replace(" ", "▁")
        expected = merged_by_definition(spelled, words, [float(s) for s in scores[259:]])
        assert tokenizer.encode(text) == [1, *(tokens.index(piece) for piece in expected)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("a€😀", add_special_tokens=False)
    assert [tokens[i] for i in ids[-7:]] == [f"<0x{byte:02X}>" for byte in "€😀".encode()]
    assert tokenizer.decode(ids) == "a€😀"
    assert tokenizer.facts.eos_token_ids == (2,)


@pytest.mark.parametrize("prefix", [True, None, False])
def test_text_after_a_special_token_begins_as_a_text_does(tmp_path: Path, prefix: bool | None) -> None:
    """As in llama.cpp, and in the tokenizer.json of Llama 2; without `add_space_prefix`, SentencePiece prefixes."""
    tokens = ["<unk>", "<s>", "</s>", "[INST]", "\u2581", *"ab", "\u2581a", "ab", "\u2581ab", "\u2581\u2581"]
    scores = [0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -8.0, -2.0, -3.0, -1.0, -4.0]
    more: dict[str, Any] = {} if prefix is None else {"add_space_prefix": prefix}
    files = write_gguf(
        tmp_path / "m.gguf", "llama", tokens, [2, 3, 3, 4, *[1] * 7], scores=scores, bos_token_id=1, unknown_token_id=0,
        **more,
    )  # fmt: skip
    ours = load_tokenizer(files)
    merges = [("\u2581", "ab"), ("\u2581a", "b"), ("\u2581", "a"), ("a", "b"), ("\u2581", "\u2581")]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    published = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [] if prefix is False else [tokenizers.normalizers.Prepend("\u2581")]
    published.normalizer = tokenizers.normalizers.Sequence([*steps, tokenizers.normalizers.Replace(" ", "\u2581")])
    published.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens[:4]])
    assert ours.encode("<s>ab", add_special_tokens=False) == [1, vocab["ab" if prefix is False else "\u2581ab"]]
    texts = [
        "ab",
        " ab",
        "<s>ab",
        "<s> ab",
        "a</s>b[INST] ab [INST]a<s><s>b",
        "",
        " ",
        "[INST]",
        "[INST] ",
        "</s>  a b",
    ]
    for text in texts:
        assert ours.encode(text, add_special_tokens=False) == published.encode(text).ids, text


def test_gguf_flags_decide_on_bos_and_eos(tmp_path: Path) -> None:
    tokens, types = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"], [2, 3, 3, 1, 1, 1]
    common: dict[str, Any] = {
        "scores": [0.0, 0.0, 0.0, -3.0, -2.0, -1.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    for bos, eos in ((True, True), (True, False), (False, True), (False, False)):
        more = {**common, "add_bos_token": bos, "add_eos_token": eos}
        files = write_gguf(tmp_path / f"{bos}{eos}.gguf", "llama", tokens, types, **more)
        assert load_tokenizer(files).encode("a") == [1] * bos + [5] + [2] * eos


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("gpt2", {"pre": "klingon", "merges": ["a b"]}, "unknown GGUF pre-tokenizer 'klingon'"),
        ("gpt2", {"merges": ["a b"]}, r"tokenizer\.ggml\.pre"),
        ("gpt2", {"pre": "gpt-2"}, "merges"),
        ("gpt2", {"pre": "gpt-2", "merges": ["a q"]}, "inconsistent"),
        ("gpt2", {"pre": "gpt-2", "merges": ["ab"]}, "no space"),
        ("rwkv", {}, "unknown GGUF tokenizer model 'rwkv'"),
        ("bert", {}, "unknown_token_id is None; expected 0 to 2"),
        ("bert", {"unknown_token_id": 0, "bos_token_id": 7}, "cls_token_id is 7; expected 0 to 2"),
        ("llama", {}, "scores"),
        ("gpt2", {"pre": "gpt-2", "merges": ["a b"], "eos_token_id": 99}, "99"),
    ],
)
def test_what_a_gguf_lacks_is_named(tmp_path: Path, model: str, more: dict[str, Any], said: str) -> None:
    files = write_gguf(tmp_path / "m.gguf", model, ["a", "b", "ab"], [1, 1, 1], **more)
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(files)


def test_wordpieces_of_a_vocabulary_with_capital_letters_keep_them(tmp_path: Path) -> None:
    """transformers' tokenizer of the same vocabulary gives the same tokens."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b", "Ab", "é", ",", "##é"]
    stored = [t if t[0] == "[" else t[2:] if t.startswith("##") else f"\u2581{t}" for t in tokens]
    types = [3] * 4 + [1] * 6
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    reference = BertTokenizer(vocab=dict(zip(tokens, range(len(tokens)), strict=True)), do_lower_case=False)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "bert", stored, types, **ids))
    for text in ("a, ab Ab aé", "É", "a[SEP]b", "x" * 101, "Abb"):
        assert list(tokenizer.encode(text)) == reference(text)["input_ids"], text


def test_a_wordpiece_file_may_say_how_words_are_normalised(tmp_path: Path) -> None:
    stored = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581A", "\u2581a", "\u2581é", "\u2581e"]
    more = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    for lowercase, strip_accents, expected in ((True, False, [5, 6]), (False, True, [4, 7]), (True, True, [5, 7])):
        flags = {"normalizer.lowercase": lowercase, "normalizer.strip_accents": strip_accents}
        files = write_gguf(tmp_path / "m.gguf", "bert", stored, [3] * 4 + [1] * 4, **more, **flags)
        assert load_tokenizer(files).encode("A é", add_special_tokens=False) == expected


TOKENIZER_WITHOUT_EFFECT = {
    "token_type_count": "the table's rows are counted",
    "mask_token_id": "no text that is answered has one",
    "add_sep_token": "llama.cpp always adds it to WordPiece, and elsewhere to pairs that it ranks alone",
    "remove_extra_whitespaces": "of unigram models, which are refused",
    "precompiled_charsmap": "of unigram models, which are refused",
    **dict.fromkeys(
        [f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")]
        + [f"{part}_token_id" for part in ("prefix", "suffix", "middle")],
        "the caller writes a text with a gap as the model wants it",
    ),
    "suppress_tokens": "logged, see test_generation_config.py",
}
"""Keys after "tokenizer.ggml." without effect on the tokens of a text, and why."""


def test_every_key_of_a_tokenizer_is_read_or_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def record(read: Any) -> Any:
        return lambda file, key, *more: asked.add(key) or read(file, key, *more)

    for name in ("get", "strings", "numbers"):
        monkeypatch.setattr(GGUFFile, name, record(getattr(GGUFFile, name)))
    tokens, ids = ["[UNK]", "[CLS]", "[SEP]", "a"], {"unknown_token_id": 0, "cls_token_id": 1, "seperator_token_id": 2}
    for kind, more in (
        ("bert", {}),
        ("gpt2", {"pre": "gpt-2", "merges": ["a a"]}),
        ("llama", {"scores": [0.0] * 5}),
    ):
        load_tokenizer(write_gguf(tmp_path / f"{kind}.gguf", kind, [*tokens, "aa"], [3, 3, 3, 1, 1], **ids, **more))
    prefix = "tokenizer.ggml."
    keys = {
        value for value in vars(gguf.Keys.Tokenizer).values() if isinstance(value, str) and value.startswith(prefix)
    }
    keys |= {f"{prefix}{key}" for key in ("suppress_tokens", "cls_token_id")}  # llama.cpp's, unknown to the package
    keys |= {f"{prefix}normalizer.{key}" for key in ("lowercase", "strip_accents")}
    assert {key.removeprefix(prefix) for key in keys - asked} == set(TOKENIZER_WITHOUT_EFFECT)


def test_wordpieces_are_spelled_as_one_by_one(tmp_path: Path) -> None:
    """Of any tokens, however odd."""
    words = ["\u2581word", "piece", "\u2581", "", "[", "]", "[x]", "\u2581[y]", "<z>", "##", "a\0", "\u2581b\0"]
    stored, types = ["[PAD]", "UNK", "\u2581CLS", "[SEP]", *words], [3] * 4 + [1] * len(words)
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}

    def spell(token: str, is_special: bool) -> str:
        if is_special or token[:1] + token[-1:] == "[]":
            return token
        return token[1:] if token.startswith("\u2581") else f"##{token}"

    expected = [spell(token, kind == 3) for token, kind in zip(stored, types, strict=True)]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "bert", stored, types, **ids))
    assert tokenizer.backend.get_vocab(with_added_tokens=False) == {name: index for index, name in enumerate(expected)}


def test_only_runs_of_spaces_of_a_gemma_are_written_otherwise(tmp_path: Path) -> None:
    tokens = ["<unk>", "a", " ", "  ", "    ", "\n", "\n\n", "", "a b", "\u2581a"]
    common: dict[str, Any] = {"unknown_token_id": 0, "architecture": "gemma3"}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", tokens, [2] + [1] * 9, **common))
    expected = [token if token.strip() else token.replace(" ", "\u2581") for token in tokens]
    assert tokenizer.backend.get_vocab(with_added_tokens=False) == {name: index for index, name in enumerate(expected)}
    assert tokenizer.encode("a    \n a") == [1, 4, 5, 9]


def test_names_in_brackets_are_no_capital_letters(tmp_path: Path) -> None:
    """The Chinese vocabulary of small letters has <S> and <T>, of the type of words."""
    stored = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581<S>", "\u2581<T>", "\u2581a"]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "bert", stored, [3] * 4 + [1] * 3, **ids))
    assert list(tokenizer.encode("A")) == [2, 6, 3]


def test_memory_that_runs_out_is_not_blamed_on_the_file() -> None:
    path = Path("a.gguf")
    ran_out = library_failure(MemoryError(), path, "inconsistent")
    assert isinstance(ran_out, CapacityError)
    assert "a.gguf: memory ran out while loading the tokenizer" in str(ran_out)
    wrong = library_failure(ValueError("no merges"), path, "inconsistent")
    assert isinstance(wrong, ConfigError)
    assert str(wrong) == "a.gguf: inconsistent: no merges"
    interrupted = KeyboardInterrupt()
    assert library_failure(interrupted, path, "inconsistent") is interrupted


def test_templates_of_a_gguf_file_have_the_names_of_their_keys(tmp_path: Path) -> None:
    named = {"default": "D", "tool_use": "{{ tools | length }}", "rag": "R"}
    for given, expected in (
        ("D", {"default": "D"}),
        ([{"name": name, "template": text} for name, text in named.items()], named),
    ):
        more = {"tokens": ["<s>", "▁", "a"], "types": [3, 1, 1], "scores": [0.0, -1.0, -2.0], "chat_template": given}
        template = load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", **more)).facts.chat_template
        assert template is not None
        assert dict(template.sources) == expected
    assert template.render([USER], [{"type": "function"}]) == "1"
