"""Prompts that fill in the middle, with the tokens of each family."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pagoda.base.errors import RequestError
from pagoda.engine.inputs.infill import FAMILIES, Infill, InfillNames, InfillWriter
from pagoda.engine.templates.special_marks import SpecialMarks
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from pagoda.engine.tokenizers.tokenizer import LibraryTokenizer, SpecialTokens, TokenizerFacts

BOS = 300
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_of(*names: str, is_special: bool = True, num_words: int = 0) -> LibraryTokenizer:
    """A token per byte, and these.   num_words: others, which no text becomes."""
    words = [*LETTERS, *(f"w{number}" for number in range(num_words))]
    backend = tokenizers.Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(name, normalized=False, special=is_special) for name in names])
    marks = SpecialMarks(names if is_special else ())
    facts = TokenizerFacts(vocab_size=400, marks=marks, added=SpecialTokens(before=(BOS,)))
    return LibraryTokenizer(backend, facts)


def names_of(names: InfillNames) -> list[str]:
    each = (names.prefix, names.suffix, names.middle, names.repo, names.file, *names.ends)
    return [name for name in each if name]


def shown(tokenizer: LibraryTokenizer, ids: list[int]) -> str:
    return "".join("^" if one == BOS else tokenizer.decode([one], skip_special_tokens=False) for one in ids)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_and_the_order_are_those_of_the_family(family: str, is_special: bool) -> None:
    names = FAMILIES[family]
    tokenizer = tokenizer_of(*names_of(names), is_special=is_special)
    writer = InfillWriter.of(tokenizer)
    assert writer is not None
    assert writer._names is names
    text = shown(tokenizer, writer.write(Infill("def f(", "):\n"), 100))
    if names.is_suffix_first:
        assert text == f"^{names.suffix}):\n{names.prefix}def f({names.middle}"
    else:
        assert text == f"^{names.prefix}def f({names.suffix}):\n{names.middle}"
    assert {tokenizer.decode([one], skip_special_tokens=False) for one in writer.end_ids} == set(names_of(names))


def test_what_spells_a_mark_is_text() -> None:
    names = FAMILIES["Qwen Coder"]
    tokenizer = tokenizer_of(*names_of(names))
    writer = InfillWriter(names, tokenizer)
    ids = writer.write(Infill(f"a{names.middle}", names.suffix), 1000)
    assert [ids.count(one) for one in writer.end_ids[:3]] == [1, 1, 1]
    assert shown(tokenizer, ids) == f"^{names.prefix}a{names.middle}{names.suffix}{names.suffix}{names.middle}"


def test_other_files_come_first() -> None:
    names, gap = FAMILIES["Qwen Coder"], Infill("a", "b", [("x.py", "X"), ("y.py", "Y")])
    writer = InfillWriter(names, tokenizer := tokenizer_of(*names_of(names)))
    repo, file = names.repo, names.file
    files = f"{repo}repository\n{file}x.py\nX{file}y.py\nY{file}current file\n"
    assert shown(tokenizer, writer.write(gap, 1000)) == f"^{files}{names.prefix}a{names.suffix}b{names.middle}"
    plain = FAMILIES["StarCoder, Granite"]
    writer = InfillWriter(plain, tokenizer := tokenizer_of(*names_of(plain)))
    snippets = "\n\n--- snippet ---\n\nX\n\n--- snippet ---\n\nY\n\n--- snippet ---\n\n"
    assert shown(tokenizer, writer.write(gap, 1000)) == f"^{snippets}{plain.prefix}a{plain.suffix}b{plain.middle}"


@pytest.mark.parametrize(
    ("num_prefix", "num_suffix", "expected"),
    [
        (100, 100, (60, 20, 0)),  # three quarters of what is left
        (10, 100, (10, 70, 0)),
        (100, 5, (75, 5, 0)),
        (20, 10, (20, 10, 50)),  # the end of the other files
        (0, 0, (0, 0, 80)),
    ],
)
def test_what_does_not_fit_is_cut_where_it_is_far_from_the_gap(
    num_prefix: int, num_suffix: int, expected: tuple[int, int, int]
) -> None:
    names = FAMILIES["StarCoder, Granite"]
    writer = InfillWriter(names, tokenizer := tokenizer_of(*names_of(names)))
    gap = Infill("p" * num_prefix, "s" * num_suffix, [("x", "x" * 1000)], num_reserved=16)
    ids = writer.write(gap, 100)
    assert len(ids) == 100 - 16
    text = shown(tokenizer, ids)
    others, _, rest = text.partition(names.prefix)
    prefix, _, rest = rest.partition(names.suffix)
    assert (len(prefix), len(rest) - len(names.middle), len(others) - 1) == expected
    whole = Infill(gap.prefix, gap.suffix, gap.files)
    assert len(writer.write(whole, 100)) > 1000  # the engine refuses it


def test_a_vocabulary_without_these_tokens_has_no_writer() -> None:
    assert InfillWriter.of(ByteTokenizer()) is None
    assert InfillWriter.of(tokenizer_of("<|fim_prefix|>", "<|fim_suffix|>", "<|im_end|>")) is None


def test_a_text_that_cannot_be_written_names_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    names = FAMILIES["Codestral"]
    writer = InfillWriter(names, tokenizer := tokenizer_of(*names_of(names)))

    def refuse(*_: object, **__: object) -> list[int]:
        raise RequestError("a message contains special tokens", "messages")

    monkeypatch.setattr(tokenizer, "encode_marked", refuse)
    with pytest.raises(RequestError, match="^the text contains special tokens") as error:
        writer.write(Infill("a", "b"), 100)
    assert error.value.param == "prompt"
