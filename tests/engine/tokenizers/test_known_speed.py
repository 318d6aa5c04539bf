"""Which tokenizers are encoded in this process: those whose parts take time and memory in proportion to a text."""

from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from pagoda.engine.tokenizers.known_speed import unknown_part
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.engine.tokenizers.tokenizer_regexes import PUBLISHED
from tests.cached_models import cached_model

BPE = models.BPE({"a": 0, "b": 1}, [])


def backend(model: Any = BPE, **parts: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def template(num_pieces: int) -> Any:
    return processors.TemplateProcessing(single=["a", *["$A"] * (num_pieces - 1)], special_tokens=[("a", 0)])


@pytest.mark.parametrize(
    "known",
    [
        backend(),
        *(backend(pre_tokenizer=split(pattern)) for pattern in sorted(PUBLISHED)),
        backend(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()])),
        backend(pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")),
        backend(pre_tokenizer=pre_tokenizers.Metaspace()),
        backend(normalizer=normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])),
        backend(normalizer=normalizers.NFC()),
        backend(normalizer=normalizers.BertNormalizer()),
        backend(post_processor=template(2)),
        backend(models.WordLevel({"a": 0}, "a")),
        backend(models.WordPiece({"a": 0}, unk_token="a")),
        backend(models.Unigram([("a", 0.0), ("ab", -1.0)], 0, False)),
    ],
    ids=lambda made: str(made.pre_tokenizer or made.normalizer or made.model)[:40],
)
def test_parts_of_published_tokenizers_are_known(known: tokenizers.Tokenizer) -> None:
    assert unknown_part(known) is None


@pytest.mark.parametrize(
    ("unknown", "named"),
    [
        (backend(pre_tokenizer=split("(a+)+b")), "the pre-tokenizer step 'Split' with the pattern {'Regex': '(a+)+b'}"),
        (backend(pre_tokenizer=pre_tokenizers.Sequence([split("a?")])), "the pre-tokenizer step 'Split'"),
        (
            backend(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits()] * 100)),
            "the pre-tokenizer, which has 100 steps",
        ),
        (backend(normalizer=normalizers.Replace(Regex("(a+)+b"), "")), "the normalizer step 'Replace'"),
        (
            backend(normalizer=normalizers.Sequence([normalizers.Replace("a", "aa")] * 9)),
            "the normalizer, whose 9 steps",
        ),
        (backend(normalizer=normalizers.Replace("a", "b" * 100)), "the normalizer, whose 1 steps may multiply a text"),
        (backend(post_processor=template(1_000)), "the post-processor, whose template has 1000 pieces"),
        (
            backend(models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**6)),
            "the model WordPiece, with words of any length",
        ),
        (
            backend(models.Unigram([("a", 0.0), ("a" * 2_000, -1.0)], 0, False)),
            "the model, whose longest piece has 2000 characters",
        ),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_a_part_that_may_take_more_is_named(unknown: tokenizers.Tokenizer, named: str) -> None:
    assert (unknown_part(unknown) or "").startswith(named)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "minilm-l6"])
def test_real_tokenizers_are_encoded_in_this_process(name: str) -> None:
    tokenizer = load_tokenizer(cached_model(name))
    assert unknown_part(tokenizer.backend) is None
    assert tokenizer.inline_chars > 0
