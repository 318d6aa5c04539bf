"""Scoring: which prompts give the scores of pairs of texts, and how their vectors become scores."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.pooling import PoolingParams
from pagoda.engine.inputs.chat_prompts import ChatOptions
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.pooling_inputs import join_pair
from pagoda.engine.inputs.prompt_encoder import EncodedPrompt
from pagoda.engine.inputs.prompts import Prompt


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How a pair of texts becomes one prompt, for models that score it as a whole.

    template: Jinja text to use instead of the model's own; it gets messages of the roles query and document.
    instruction: the message of the role system, for templates that have a place for it.
    max_second: tokens that are kept of each second text, from its start; 0: all.
    """

    template: str | None = None
    instruction: str | None = None
    max_second: int = 0


T = TypeVar("T")
U = TypeVar("U")

PLAIN_PAIRS = PairOptions()
_CUTS = 8  # a text that is cut may have other tokens at its end, so that it is cut again


class Scoring:
    """The pairs of one call.

    prompts, params: what to pool, in this order: each pair, if the model has a head with one output (a cross-encoder),
    or else each text, whose embeddings are compared.
    """

    def __init__(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams | None,
        inputs: InputProcessor,
        names: tuple[str, str] = ("data_1", "data_2"),
        options: PairOptions = PLAIN_PAIRS,
    ) -> None:
        """first, second: equally many texts, or one `first` for all `second`.   names: what errors call them.

        Tokenises the pairs of a cross-encoder. Raises RequestError.
        """
        if len(first) not in (1, len(second)) or not second:
            raise RequestError(
                f"{names[0]}: {len(first)} texts cannot be paired with {len(second)}: give one, or as many", names[0]
            )
        tasks = inputs.limits.tasks
        tasks.check("score")
        given = params or PoolingParams()
        if given.task not in (None, "score"):
            raise RequestError(f"task: score computes scores, not {given.task}; leave it out", "task")
        self._inputs, self._params, self._names = inputs, dataclasses.replace(given, task="score"), names
        self._most = inputs.num_kept(given)  # tokens of a pair
        self._num_first = len(first)
        self._num_pairs = len(second)
        self._is_joint = len(tasks.plan.labels) == 1
        if options.max_second:
            second = self._each(second, names[1], lambda text: self._cut_to(text, options.max_second))
        self.prompts: list[Prompt] = [*first, *second]
        embedding = dataclasses.replace(given, task="embed", normalize=True, use_activation=None)
        self.params = [embedding] * len(self.prompts)
        template = options.template or inputs.score_template
        if not self._is_joint or not template:
            for name in ("template", "instruction"):
                if getattr(options, name) is not None:
                    what = "compares embeddings of the two texts" if not self._is_joint else "has no score template"
                    param = "chat_template" if name == "template" else name
                    raise RequestError(f"{param}: this model {what}; leave it out", param)
        if self._is_joint and template:
            self._render(first, second, PairOptions(template, options.instruction))
        elif self._is_joint:
            sides = zip((first, second), names, strict=True)
            self._join(*(self._each(texts, name, self._encoded) for texts, name in sides))

    def _each(self, texts: Sequence[T], name: str, read: Callable[[T], U]) -> list[U]:
        """Return what `read` makes of each text; its errors name the text."""
        found: list[U] = []
        for index, text in enumerate(texts):
            try:
                found.append(read(text))
            except RequestError as error:
                where = f"{name}[{index}]" if len(texts) > 1 else name
                raise RequestError(f"{where}: {str(error).removeprefix('prompt: ')}", where) from None
        return found

    def _encoded(self, text: str) -> list[int]:
        self._inputs.check_before_tokenising(text, self._params)
        return self._inputs.prompts.encode(text, False)

    def _render(self, first: Sequence[str], second: Sequence[str], options: PairOptions) -> None:
        """Put each pair into the template."""
        if options.instruction is not None:
            self._inputs.prompts.check_length(options.instruction, num_output=0)
        queries, documents = (
            self._each(texts, name, self._shortened) for texts, name in zip((first, second), self._names, strict=True)
        )
        pairs = list(zip(queries * (len(second) // len(first)), documents, strict=True))
        self.prompts = self._each(pairs, self._names[1], lambda pair: self._rendered(*pair, options))
        self.params = [self._params] * len(second)

    def _shortened(self, text: str) -> str:
        """Return a text that is no longer than the prompt that is to be cut; checked, if none is to be cut."""
        if self._most is None:
            self._inputs.check_before_tokenising(text, self._params)
            return text
        return self._cut_to(text, self._most)

    def _cut_to(self, text: str, most: int) -> str:
        """Return the text of the first `most` tokens; a character that is cut is left out, unless nothing is left."""
        token_ids = self._inputs.prompts.encode(text, False)
        if len(token_ids) <= most:
            return text
        kept = self._inputs.tokenizer.decode(token_ids[:most], skip_special_tokens=False)
        return kept.rstrip("\ufffd") or kept

    def _rendered(self, query: str, document: str, options: PairOptions) -> list[int]:
        """Return the tokens of one pair, at most as many as are kept: the document is cut, not the template around."""
        inputs, most = self._inputs, self._most
        for _ in range(_CUTS):
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            if options.instruction is not None:
                messages.insert(0, {"role": "system", "content": options.instruction})
            token_ids = inputs.chats.render(
                messages, ChatOptions(chat_template=options.template, add_generation_prompt=False)
            ).token_ids
            if most is None:
                inputs.prompts.checked_ids(EncodedPrompt(token_ids), None, num_output=0)
                return token_ids
            if len(token_ids) <= most:
                return token_ids
            kept = inputs.prompts.encode(document, False)[: most - len(token_ids)]
            if not kept:
                break
            document = inputs.tokenizer.decode(kept, skip_special_tokens=False)
        raise RequestError(f"prompt: without its document, the pair has more than {most} tokens", "prompt")

    def _join(self, first: list[list[int]], second: list[list[int]]) -> None:
        self.prompts, self.params = [], []
        for index, own in enumerate(second):
            pair = join_pair(first[index if len(first) > 1 else 0], own, self._inputs.tokenizer.facts.added, self._most)
            self.prompts.append(pair.token_ids)
            self.params.append(dataclasses.replace(self._params, pair_start=pair.pair_start))

    def prompts_of(self, pair: int) -> tuple[int, ...]:
        """Return the indices of the prompts that a pair consists of."""
        if self._is_joint:
            return (pair,)
        return pair if self._num_first > 1 else 0, self._num_first + pair

    def scores(self, vectors: Sequence[np.ndarray]) -> list[float]:
        """Return the score of each pair.   vectors: float32, the results of `prompts`."""
        if self._is_joint:
            return [float(vector[0]) for vector in vectors]
        exact = [vector.astype(np.float64) for vector in vectors]
        return [float(np.dot(*(exact[at] for at in self.prompts_of(pair)))) for pair in range(self._num_pairs)]
