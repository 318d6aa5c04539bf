"""Tell tokenizers that are known to take time and memory in proportion to a text from those that might not.

A tokenizer's file is data of strangers, but also a program: a regular expression may backtrack for ever, a replacement
may double the text again and again, a model may look at all pairs of places in a word. What is listed here does not.
"""

import json
from typing import Any

import tokenizers

from pagoda.base.abbreviate import abbreviate
from pagoda.engine.tokenizers.tokenizer_regexes import PUBLISHED

_MAX_STEPS = 16
_MAX_GROWTH = 64  # how many times as many characters the normalizer's steps may make of a text
_MAX_WORD_CHARS = 200  # WordPiece takes time cubic in a word's length
_MAX_PIECE_CHARS = 128  # Unigram takes time proportional to the square of its longest piece
_MAX_TEMPLATE_PIECES = 16

_GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 2,
    "StripAccents": 1,
    "Strip": 1,
    "Nmt": 1,
    "BertNormalizer": 24,  # NFD, a space on either side of an ideograph, lower case
}
_PRE_TOKENIZERS = frozenset(
    {
        *("ByteLevel", "BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
        *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    }
)
_POST_PROCESSORS = frozenset({"ByteLevel", "BertProcessing", "RobertaProcessing"})


def unknown_part(backend: tokenizers.Tokenizer) -> str | None:
    """Return the part of a tokenizer that might take more than linear time or memory; None if there is none."""
    described = [_described(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.post_processor)]
    return (
        _unknown_normalizer(_steps(described[0], "normalizers"))
        or _unknown_pre_tokenizer(_steps(described[1], "pretokenizers"))
        or _unknown_post_processor(_steps(described[2], "processors"))
        or _unknown_model(backend.model)
    )


def _described(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _steps(described: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a part, of sequences within sequences too."""
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [step for inner in described[key] for step in _steps(inner, key)]


def _unknown_normalizer(steps: list[dict[str, Any]]) -> str | None:
    growth = 1.0
    for step in steps:
        match step:
            case {"type": str(kind)} if kind in _GROWTH:
                growth *= _GROWTH[kind]
            case {"type": "Prepend", "prepend": str(text)} if len(text) < _MAX_STEPS:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                growth *= max(1.0, len(new) / len(old))
            case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": ""} if pattern in PUBLISHED:
                pass
            case _:
                return _named("normalizer", step)
    too_much = growth > _MAX_GROWTH or len(steps) > _MAX_STEPS
    return f"the normalizer, whose {len(steps)} steps may multiply a text" if too_much else None


def _unknown_pre_tokenizer(steps: list[dict[str, Any]]) -> str | None:
    for step in steps:
        match step:
            case {"type": str(kind)} if kind in _PRE_TOKENIZERS:
                pass
            case {"type": "Split", "pattern": {"String": str(text)}} if text:
                pass
            case {"type": "Split", "pattern": {"Regex": str(pattern)}} if pattern in PUBLISHED:
                pass
            case _:
                return _named("pre-tokenizer", step)
    return f"the pre-tokenizer, which has {len(steps)} steps" if len(steps) > _MAX_STEPS else None


def _unknown_post_processor(steps: list[dict[str, Any]]) -> str | None:
    num_pieces = 0
    for step in steps:
        match step:
            case {"type": str(kind)} if kind in _POST_PROCESSORS:
                pass
            case {"type": "TemplateProcessing", "single": list(pieces)}:
                num_pieces += len(pieces)
            case _:
                return _named("post-processor", step)
    too_much = num_pieces > _MAX_TEMPLATE_PIECES or len(steps) > _MAX_STEPS
    return f"the post-processor, whose template has {num_pieces} pieces" if too_much else None


def _unknown_model(model: Any) -> str | None:
    match model:
        case tokenizers.models.BPE() | tokenizers.models.WordLevel():
            return None
        case tokenizers.models.WordPiece() if model.max_input_chars_per_word <= _MAX_WORD_CHARS:
            return None
        case tokenizers.models.Unigram():
            longest = max((len(piece) for piece, _ in json.loads(model.__getstate__())["vocab"]), default=0)
            return None if longest <= _MAX_PIECE_CHARS else f"the model, whose longest piece has {longest} characters"
        case _:
            return f"the model {type(model).__name__}, with words of any length"


def _named(part: str, step: dict[str, Any]) -> str:
    pattern = step.get("pattern")
    detail = f" with the pattern {abbreviate(pattern)}" if pattern is not None else ""
    return f"the {part} step {abbreviate(step.get('type'))}{detail}"
