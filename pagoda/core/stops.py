"""Stops: where generated tokens end a sequence."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagoda.base.errors import InvariantBroken
from pagoda.core.request import Request, RequestStatus

_LARGEST_TOKEN_ID = 1 << 22


def _stop_ids(request: Request) -> set[int]:
    sampling = request.sampling
    if sampling is None:
        return set()
    ids = *(() if sampling.ignore_eos else request.eos_token_ids), *sampling.stop_token_ids
    return {token for token in ids if 0 <= token < _LARGEST_TOKEN_ID}


class StopTokens:
    """The token ids that end any unfinished request: one lookup per batch tells which rows need a closer look."""

    def __init__(self) -> None:
        self._ends = np.zeros(2, np.bool_)  # the last entry is always False: larger ids are clipped to it
        self._num_requests: dict[int, int] = {}  # how many unfinished requests each id ends; never 0

    def add(self, request: Request) -> None:
        for token in _stop_ids(request):
            if token + 2 > len(self._ends):
                self._ends = np.pad(self._ends, (0, token + 2 - len(self._ends)))
            self._num_requests[token] = self._num_requests.get(token, 0) + 1
            self._ends[token] = True

    def remove(self, request: Request) -> None:
        """The request has ended. Ids that end no other are looked up no more."""
        for token in _stop_ids(request):
            self._num_requests[token] -= 1
            if not self._num_requests[token]:
                del self._num_requests[token]
                self._ends[token] = False

    def check(self, requests: Iterable[Request]) -> None:
        """Raises InvariantBroken unless exactly the stop ids of `requests` are counted."""
        expected = Counter(token for request in requests for token in _stop_ids(request))
        if self._num_requests != expected or np.flatnonzero(self._ends).tolist() != sorted(expected):
            raise InvariantBroken("the stop tokens are not those of the unfinished requests")

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
    """Find where `tokens`, generated after `output_len` others, end a sequence; None if it continues.

    Token by token: eos, stop tokens, then length. Below min_tokens only the length ends anything, and the eos of a
    grammar that allows no other token. Where no output is wanted, the first token ends it, whatever it is.
    """
    sampling = request.sampling
    assert sampling is not None
    if tokens and not request.wants_output:
        return End(1, RequestStatus.FINISHED_LENGTH_CAPPED)
    for at, token in enumerate(tokens, 1):
        may_stop = output_len + at >= sampling.min_tokens
        if (may_stop or sampling.grammar) and not sampling.ignore_eos and token in request.eos_token_ids:
            return End(at, RequestStatus.FINISHED_STOPPED)
        if may_stop and token in sampling.stop_token_ids:
            return End(at, RequestStatus.FINISHED_STOPPED, token)
        if request.num_prompt_tokens + output_len + at >= length_limit:
            return End(at, RequestStatus.FINISHED_LENGTH_CAPPED)
    return None
