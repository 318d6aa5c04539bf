"""Scoring: which prompts give the scores of pairs of texts, and how their vectors become scores."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    template: str | None = None
    instruction: str | None = None


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
        self._names = names
        if len(first) not in (1, len(second)) or not second:
            raise RequestError(
                f"{names[0]}: {len(first)} texts cannot be paired with {len(second)}: give one, or as many", names[0]
            )
        tasks = inputs.limits.tasks
        tasks.check("score")
        given = params or PoolingParams()
        if given.task not in (None, "score"):
            raise RequestError(f"task: score computes scores, not {given.task}; leave it out", "task")
        self._num_first = len(first)
        self._num_pairs = len(second)
        self._is_joint = len(tasks.plan.labels) == 1
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
            self._render(first, second, given, inputs, PairOptions(template, options.instruction))
        elif self._is_joint:
            first_ids = self._tokenized(first, given, inputs, names[0])
            second_ids = self._tokenized(second, given, inputs, names[1])
            self._join(first_ids, second_ids, given, inputs)

    def _tokenized(
        self, texts: Sequence[str], params: PoolingParams, inputs: InputProcessor, name: str
    ) -> list[list[int]]:
        found: list[list[int]] = []
        for index, text in enumerate(texts):
            try:
                inputs.check_before_tokenising(text, params)
                found.append(inputs.prompts.encode(text, False))
            except RequestError as error:
                raise _of_text(error, name, index if len(texts) > 1 else None) from None
        return found

    def _render(
        self,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        inputs: InputProcessor,
        options: PairOptions,
    ) -> None:
        """Put each pair into the template."""
        self.prompts, self.params = [], [dataclasses.replace(params, task="score")] * len(second)
        if options.instruction is not None:
            inputs.prompts.check_length(options.instruction, num_output=0)
        queries = self._shortened(first, params, inputs, self._names[0])
        documents = self._shortened(second, params, inputs, self._names[1])
        most = inputs.num_kept(params)
        for index, document in enumerate(documents):
            try:
                query = queries[index if len(first) > 1 else 0]
                self.prompts.append(self._rendered(query, document, inputs, options, most))
            except RequestError as error:
                raise _of_text(error, self._names[1], index if len(second) > 1 else None) from None

    def _shortened(
        self, texts: Sequence[str], params: PoolingParams, inputs: InputProcessor, name: str
    ) -> Sequence[str]:
        """Return texts of which none is longer than the prompt that is to be cut; checked, if none is to be cut."""
        most = inputs.num_kept(params)
        if most is not None:
            each = self._tokenized(texts, params, inputs, name)
            decode = inputs.tokenizer.decode
            return [
                decode(ids[:most], skip_special_tokens=False) if len(ids) > most else text
                for text, ids in zip(texts, each, strict=True)
            ]
        for index, text in enumerate(texts):
            try:
                inputs.check_before_tokenising(text, params)
            except RequestError as error:
                raise _of_text(error, name, index if len(texts) > 1 else None) from None
        return texts

    def _rendered(
        self, query: str, document: str, inputs: InputProcessor, options: PairOptions, most: int | None
    ) -> list[int]:
        """Return the tokens of one pair, at most `most`: the document is cut, not the template around it."""
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

    def _join(
        self, first: list[list[int]], second: list[list[int]], params: PoolingParams, inputs: InputProcessor
    ) -> None:
        added, most = inputs.tokenizer.facts.added, inputs.num_kept(params)
        self.prompts, self.params = [], []
        for index, own in enumerate(second):
            pair = join_pair(first[index if len(first) > 1 else 0], own, added, most)
            self.prompts.append(pair.token_ids)
            self.params.append(dataclasses.replace(params, task="score", pair_start=pair.pair_start))

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


def _of_text(error: RequestError, name: str, index: int | None) -> RequestError:
    """Return an error that names the text it is about.   index: None if there is only one text."""
    where = name if index is None else f"{name}[{index}]"
    return RequestError(f"{where}: {str(error).removeprefix('prompt: ')}", where)
