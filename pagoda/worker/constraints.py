"""RowConstraints: what a row forbids or shifts among its logits, as arrays made once at admission."""

from dataclasses import dataclass

import numpy as np

from pagoda.base.sampling_params import SamplingParams

_NO_IDS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RowConstraints:
    """One row's irregular sampling parameters; rows that have none carry no RowConstraints at all.

    bias_ids: int64 [b], bias: float32 [b], added to those logits.   allowed: int64 [a], nothing else may come; or None.
    bad_words: sequences of ids that must not be completed in the output.
    min_tokens: as long as the output is shorter, none of `end_ids` (int64, eos and stop tokens) may come.
    has_penalty: presence, frequency or repetition penalty differs from neutral.
    """

    bias_ids: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None
    bad_words: tuple[tuple[int, ...], ...]
    min_tokens: int
    end_ids: np.ndarray
    has_penalty: bool

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> "RowConstraints | None":
        """The constraints of `params`, or None when every logit stands as it is."""
        has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        ends = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens > 0 else []
        if not (
            has_penalty
            or ends
            or params.logit_bias
            or params.bad_words_token_ids
            or params.allowed_token_ids is not None
        ):
            return None
        return cls(
            bias_ids=np.array([token for token, _ in params.logit_bias], np.int64),
            bias=np.array([value for _, value in params.logit_bias], np.float32),
            allowed=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64),
            bad_words=tuple(word for word in params.bad_words_token_ids if word),
            min_tokens=params.min_tokens,
            end_ids=np.array(ends, np.int64),
            has_penalty=has_penalty,
        )

    def forbidden(self, output_token_ids: np.ndarray) -> np.ndarray:
        """Ids, int64, that must not follow this output: ends that come too soon, and last tokens of bad words."""
        banned = [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or tuple(output_token_ids[1 - len(word) :].tolist()) == word[:-1]
        ]
        ends = self.end_ids if len(output_token_ids) < self.min_tokens else _NO_IDS
        return np.concatenate([np.array(banned, np.int64), ends]) if banned else ends
