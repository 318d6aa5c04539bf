"""Fill in the middle: the tokens that mark what comes before and after a gap, by family of models."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.base.errors import RequestError
from pagoda.engine.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillNames:
    """The tokens of a family of models, as its vocabulary writes them.

    prefix, suffix, middle: come before the text before the gap, the one after it, and what fills it; no middle: the
    prefix is last.   ends: end an output, besides these three.   repo, file: come before the name of a repository, and
    of each of its files.   is_suffix_first: the suffix comes before the prefix.
    """

    prefix: str
    suffix: str
    middle: str = ""
    ends: tuple[str, ...] = ()
    repo: str = ""
    file: str = ""
    is_suffix_first: bool = False


FAMILIES: dict[str, InfillNames] = {
    "Qwen Coder": InfillNames(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|endoftext|>", "<|fim_pad|>")),
        *("<|repo_name|>", "<|file_sep|>"),
    ),
    "CodeGemma, Granite 4": InfillNames(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|file_separator|>", "<eos>", "<|endoftext|>"))
    ),
    "StarCoder2": InfillNames(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>")),
        *("<repo_name>", "<file_sep>"),
    ),
    "StarCoder, Granite": InfillNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>")),
    "SantaCoder": InfillNames("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    "DeepSeek Coder": InfillNames("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),
    "Code Llama": InfillNames("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>", "</s>")),
    "GLM": InfillNames("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),
    "Seed Coder": InfillNames(
        "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", ("<[end▁of▁sentence]>",), is_suffix_first=True
    ),
    "Codestral": InfillNames("[PREFIX]", "[SUFFIX]", ends=("</s>",), is_suffix_first=True),
}
"""The first one whose tokens a vocabulary has, names of repositories and files included, is that of the model."""
_REPOSITORY = "repository"
_FILE = "current file"
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class Infill:
    """A gap in a text.

    prefix, suffix: the text before and after it.   files: names and texts of others that the answer may draw on.
    num_reserved: cut what does not fit, so that the output has so many tokens; None: all must fit.
    """

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    num_reserved: int | None = None

    @property
    def num_chars(self) -> int:
        return len(self.prefix) + len(self.suffix) + sum(len(name) + len(text) for name, text in self.files)


class InfillWriter:
    """Writes gaps as the prompts of one model.   end_ids: tokens that end an output."""

    def __init__(self, names: InfillNames, tokenizer: Tokenizer) -> None:
        """The tokenizer has the tokens of these names."""
        self._names = names
        self._tokenizer = tokenizer
        own = (names.prefix, names.suffix, names.middle, names.repo, names.file)
        self._prefix, self._suffix, self._middle, self._repo, self._file = (
            () if (found := token_named(tokenizer, name)) is None else (found,) for name in own
        )
        ends = (token_named(tokenizer, name) for name in names.ends)
        self.end_ids = (*self._prefix, *self._suffix, *self._middle, *self._repo, *self._file)
        self.end_ids += tuple(one for one in ends if one is not None)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "InfillWriter | None":
        """Return that of a model; None if its vocabulary has no such tokens."""
        for names in FAMILIES.values():
            needed = (names.prefix, names.suffix, names.middle, names.repo, names.file)
            if all(token_named(tokenizer, name) is not None for name in needed if name):
                return cls(names, tokenizer)
        return None

    def write(self, gap: Infill, max_tokens: int) -> list[int]:
        """Return the token ids of a gap.   max_tokens: of prompt and output together.

        What is cut is first the other files, then what is farthest from the gap; three quarters are for the prefix.
        """
        prefix, suffix, others = self._ids(gap.prefix), self._ids(gap.suffix), self._others(gap.files)
        before = self._tokenizer.facts.added.before
        if gap.num_reserved is not None:
            marks = len(before) + len(self._prefix) + len(self._suffix) + len(self._middle)
            room = max(max_tokens - max(gap.num_reserved, 1) - marks, 0)
            suffix = suffix[: max(room // 4, room - len(prefix))]
            prefix = _last(prefix, room - len(suffix))
            others = _last(others, room - len(suffix) - len(prefix))
        parts = [[*self._prefix, *prefix], [*self._suffix, *suffix]]
        first, second = reversed(parts) if self._names.is_suffix_first else parts
        return [*before, *others, *first, *second, *self._middle]

    def _others(self, files: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids of other files, and of the name of the one with the gap if the model reads names."""
        if not files:
            return []
        if not self._file:
            return self._ids("".join(f"{_SNIPPET}{text}" for _, text in files) + _SNIPPET)
        ids = [*self._repo, *self._ids(f"{_REPOSITORY}\n")] if self._repo else []
        for name, text in (*files, (_FILE, "")):
            ids += [*self._file, *self._ids(f"{name}\n{text}")]
        return ids

    def _ids(self, text: str) -> list[int]:
        """Return the token ids of a text that comes after a special token, and in which none is one."""
        try:
            return self._tokenizer.encode_marked(f"{self._tokenizer.facts.marks.slot}{text}", known=((),))
        except RequestError as error:
            raise RequestError(str(error).replace("a message", "the text"), "prompt") from None


def _last(ids: list[int], count: int) -> list[int]:
    return ids[max(len(ids) - max(count, 0), 0) :]


def token_named(tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of a token by its name in the vocabulary; None if it has none."""
    ids = tokenizer.encode(name, add_special_tokens=False) if name else ()
    return ids[0] if len(ids) == 1 and tokenizer.token_string(ids[0]) == name else None
