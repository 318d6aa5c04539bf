"""Stops: where generated tokens end a sequence."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.request import Request, RequestStatus

_LARGEST_TOKEN_ID = 1 << 22


class StopTokens:
    """Which token ids end any request at all: one look-up for a whole batch tells whether a row must be looked at."""

    def __init__(self) -> None:
        self._ends = np.zeros(2, np.bool_)  # the last entry is always False: larger ids are clipped to it

    def add(self, request: Request) -> None:
        ids = [*request.eos_token_ids, *(request.sampling.stop_token_ids if request.sampling else ())]
        ids = [token for token in ids if 0 <= token < _LARGEST_TOKEN_ID]
        if not ids:
            return
        if max(ids) + 2 > len(self._ends):
            self._ends = np.pad(self._ends, (0, max(ids) + 2 - len(self._ends)))
        self._ends[ids] = True

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """Return bool, shape of `tokens`: may end a sequence. False is certain."""
        return self._ends.take(tokens, mode="clip")


@dataclass(frozen=True, slots=True)
class End:
    """Where generated tokens end a sequence.

    num_kept: tokens that count.   stop_token: the stop token id that ended it, if one did.
    """

    num_kept: int
    status: RequestStatus
    stop_token: int | None = None


def find_end(request: Request, output_len: int, tokens: list[int], length_limit: int) -> End | None:
    """Find where `tokens`, generated after `output_len` others, end a sequence; None if it goes on.

    Token by token: eos, stop tokens, then length. Below min_tokens only the length ends anything.
    """
    sampling = request.sampling
    assert sampling is not None
    for at, token in enumerate(tokens, 1):
        if output_len + at >= sampling.min_tokens:
            if not sampling.ignore_eos and token in request.eos_token_ids:
                return End(at, RequestStatus.FINISHED_STOPPED)
            if token in sampling.stop_token_ids:
                return End(at, RequestStatus.FINISHED_STOPPED, token)
        if request.num_prompt_tokens + output_len + at >= length_limit:
            return End(at, RequestStatus.FINISHED_LENGTH_CAPPED)
    return None
