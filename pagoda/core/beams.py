"""Beam search: which continuations of a request's beams survive. It knows token ids and log-probabilities only."""

from dataclasses import dataclass

import numpy as np

from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import MASKED_LOGPROB, LogprobColumns


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The most likely next tokens of one beam, best first.   token_ids: int32 [k].   logprobs: float32 [k]."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class BeamToken:
    """A generated token and, linked, all that were generated before it.

    rank: its place among `candidates`, which it was chosen from; 0 is the most likely.
    """

    before: "BeamToken | None"
    rank: int
    candidates: Candidates

    @property
    def token_id(self) -> int:
        return int(self.candidates.token_ids[self.rank])


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A beam that continues.   slot: index of the sequence that computes it.   score: sum of its log-probabilities.

    source: index of the sequence that computed it up to its last token (which may be the same).   last: that token.
    """

    slot: int
    source: int
    score: float
    last: BeamToken | None

    @property
    def token_id(self) -> int:
        """The last token."""
        assert self.last is not None, "the search has not chosen a token yet"
        return self.last.token_id


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A beam that has ended.   score: sum of its log-probabilities / length ** length_penalty.

    stop_token: the stop token id that ended it; None for eos and for the length.
    """

    score: float
    last: BeamToken
    status: RequestStatus
    stop_token: int | None = None


class BeamSearch:
    """The beams of one request.

    The rules are those of transformers' `generate(num_beams=width, do_sample=False)`. Of all continuations of all
    beams, the `width` best that do not end continue. One that ends is kept if it is among the `width` best of the step.
    The `width` best that were kept are the result. Sums are float64; of equal scores, the better beam's comes first.

    live: beams that continue, best first.   finished: hypotheses, best first.
    """

    def __init__(self, request: Request, max_tokens: int) -> None:
        """max_tokens: length at which every hypothesis ends."""
        params = request.sampling
        assert params is not None
        assert params.beam_search is not None
        self.live = [Beam(0, 0, 0.0, None)]
        self.finished: list[Hypothesis] = []
        self.is_done = False
        self._width = params.n
        self._length_penalty = params.beam_search.length_penalty
        self._early_stopping = params.beam_search.early_stopping
        self._max_tokens = max_tokens
        self._eos = frozenset(() if params.ignore_eos else request.eos_token_ids)
        self._stops = frozenset(params.stop_token_ids)
        self._length = 0
        self._arrived: dict[int, Candidates] = {}

    def take(self, slot: int, candidates: Candidates) -> None:
        """Take what may follow the beam of `slot`."""
        self._arrived[slot] = candidates

    @property
    def is_ready(self) -> bool:
        """Whether the candidates of every beam are there."""
        return all(beam.slot in self._arrived for beam in self.live)

    def extend(self) -> list[Beam]:
        """Choose the next beams, best first; none if the search is done. It must be ready."""
        places, scores = self._ranked()
        self._length += 1
        beams: list[tuple[Beam, float, BeamToken]] = []
        ended: list[Hypothesis] = []
        for nth, (parent, rank) in enumerate(places):
            if nth >= self._width and len(beams) == self._width:
                break
            last = BeamToken(parent.last, rank, self._arrived[parent.slot])
            status = self._end_of(last.token_id)
            if status is None:
                if len(beams) < self._width:
                    beams.append((parent, scores[nth], last))
            elif nth < self._width:
                stop_token = last.token_id if last.token_id in self._stops - self._eos else None
                ended.append(Hypothesis(self._normalised(scores[nth], self._length), last, status, stop_token))
        self._arrived.clear()
        self.finished = sorted([*self.finished, *ended], key=lambda one: -one.score)[: self._width]
        self.live = self._assign_slots(beams)
        self.is_done = not beams or self._cannot_improve()
        return [] if self.is_done else self.live

    def _ranked(self) -> tuple[list[tuple[Beam, int]], list[float]]:
        """Return all continuations that a grammar allows as (beam, rank among its candidates), and their sums."""
        parts = [self._arrived[beam.slot].logprobs.astype(np.float64) for beam in self.live]
        allowed = np.concatenate(parts) > MASKED_LOGPROB
        sums = np.concatenate([beam.score + part for beam, part in zip(self.live, parts, strict=True)])
        places = [(beam, rank) for beam, part in zip(self.live, parts, strict=True) for rank in range(len(part))]
        order = np.argsort(-sums, kind="stable")
        order = order[allowed[order]]
        return [places[at] for at in order.tolist()], sums[order].tolist()

    def _end_of(self, token_id: int) -> RequestStatus | None:
        """Return how a hypothesis ends with this token, or None if it continues."""
        if token_id in self._eos or token_id in self._stops:
            return RequestStatus.FINISHED_STOPPED
        return RequestStatus.FINISHED_LENGTH_CAPPED if self._length >= self._max_tokens else None

    def _normalised(self, score: float, length: int) -> float:
        return score / float(length) ** self._length_penalty

    def _assign_slots(self, beams: list[tuple[Beam, float, BeamToken]]) -> list[Beam]:
        """Continue each beam in its own slot; its further continuations get slots of beams that do not continue."""
        in_use = {parent.slot for parent, _, _ in beams}
        spare = [slot for slot in range(self._width) if slot not in in_use]
        assigned: list[Beam] = []
        for parent, score, last in beams:
            slot = parent.slot if parent.slot in in_use else spare.pop(0)
            in_use.discard(parent.slot)
            assigned.append(Beam(slot, parent.slot, score, last))
        return assigned

    def _cannot_improve(self) -> bool:
        """Whether no beam that continues can become better than the hypotheses, as far as `early_stopping` looks."""
        if len(self.finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        hopes_for_length = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if hopes_for_length else self._length
        return self._normalised(self.live[0].score, length) <= self.finished[-1].score


def columns_of(hypothesis: Hypothesis) -> tuple[np.ndarray, LogprobColumns]:
    """Return a hypothesis's token ids, int32 [n], and their log-probabilities next to the candidates of each step."""
    tokens: list[BeamToken] = []
    last: BeamToken | None = hypothesis.last
    while last is not None:
        tokens.append(last)
        last = last.before
    tokens.reverse()
    width = 1 + max(len(token.candidates.token_ids) for token in tokens)
    columns = LogprobColumns(
        np.zeros((len(tokens), width), np.int32),
        np.zeros((len(tokens), width), np.float32),
        np.array([token.rank + 1 for token in tokens], np.int32),
    )
    for row, token in enumerate(tokens):
        of_step = token.candidates
        for into, values in ((columns.token_ids, of_step.token_ids), (columns.logprobs, of_step.logprobs)):
            into[row, 0] = values[token.rank]
            into[row, 1 : 1 + len(values)] = values
    return columns.token_ids[:, 0].copy(), columns


# Nothing is scheduled for a beam's row until it is known which beams continue, so the beams of a request
# need not be computed in the same step. Nothing is emitted before the search is done. The number of rows stays the
# same: a beam with several continuations keeps its row for the best of them, and the others take the rows of beams that
# do not continue, sharing its blocks (copied when they are written to).
