"""Scoring: which prompts give the scores of pairs of texts, and how their vectors become scores."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.pooling import PoolingParams
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.pooling_inputs import join_pair
from pagoda.engine.inputs.prompts import Prompt


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
        cancellation: Cancellation | None = None,
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
        self._num_first = len(first)
        self._num_pairs = len(second)
        self._is_joint = len(tasks.plan.labels) == 1
        self.prompts: list[Prompt] = [*first, *second]
        embedding = dataclasses.replace(given, task="embed", normalize=True, use_activation=None)
        self.params = [embedding] * len(self.prompts)
        if self._is_joint:
            first_ids = self._tokenized(first, given, inputs, names[0], cancellation)
            second_ids = self._tokenized(second, given, inputs, names[1], cancellation)
            self._join(first_ids, second_ids, given, inputs)

    @staticmethod
    def _tokenized(
        texts: Sequence[str],
        params: PoolingParams,
        inputs: InputProcessor,
        name: str,
        cancellation: Cancellation | None,
    ) -> list[list[int]]:
        found: list[list[int]] = []
        for index, text in enumerate(texts):
            try:
                inputs.check_before_tokenising(text, params)
                found.append(inputs.prompts.encode(text, False, cancellation))
            except RequestError as error:
                where = f"{name}[{index}]" if len(texts) > 1 else name
                raise RequestError(f"{where}: {str(error).removeprefix('prompt: ')}", where) from None
        return found

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
