"""Beam search over plain lists of tokens. It sees all of what the model says, where the core gets the best few."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import MASKED_LOGPROB


@dataclass
class Continued:
    """A beam that continues.   slot: its sequence.   source: the sequence that it was computed in."""

    slot: int
    source: int
    score: float
    output: list[int]


@dataclass
class Hypothesis:
    score: float
    output: list[int]
    status: RequestStatus
    stop_token: int | None


@dataclass
class TwinSearch:
    """The beams of one request.   arrived: slots whose next tokens are known.   finished: best first."""

    request: Request
    max_tokens: int
    logprobs_of: Callable[[list[int]], list[float]]
    beams: list[Continued] = field(default_factory=lambda: [Continued(0, 0, 0.0, [])])
    finished: list[Hypothesis] = field(default_factory=list[Hypothesis])
    arrived: set[int] = field(default_factory=set[int])

    @property
    def is_ready(self) -> bool:
        return all(beam.slot in self.arrived for beam in self.beams)

    def extend(self) -> bool:
        """Choose the next beams. Return whether the search goes on."""
        sampling, prompt = self.request.sampling, self.request.prompt_token_ids.tolist()
        assert sampling is not None
        assert sampling.beam_search is not None
        options, width = sampling.beam_search, sampling.n
        self.arrived.clear()
        continuations = [
            (beam.score + logprob, beam, token)
            for beam in self.beams
            for token, logprob in enumerate(self.logprobs_of(prompt + beam.output))
            if logprob > MASKED_LOGPROB
        ]
        continuations.sort(key=lambda one: -one[0])
        length = len(self.beams[0].output) + 1
        chosen: list[tuple[float, Continued, int]] = []
        for place, (score, beam, token) in enumerate(continuations):
            end = self._end(token, length)
            if end is None and len(chosen) < width:
                chosen.append((score, beam, token))
            elif end is not None and place < width:
                normalised = score / float(length) ** options.length_penalty
                self.finished.append(Hypothesis(normalised, [*beam.output, token], *end))
        self.finished = sorted(self.finished, key=lambda one: -one.score)[:width]
        self._continue(chosen, width)
        if not chosen or (len(self.finished) == width and options.early_stopping is True):
            return False
        at_length = length
        if options.early_stopping == "never" and options.length_penalty > 0:
            at_length = self.max_tokens
        best = chosen[0][0] / float(at_length) ** options.length_penalty
        return len(self.finished) < width or best > self.finished[-1].score

    def _end(self, token: int, length: int) -> tuple[RequestStatus, int | None] | None:
        """How an output of this length ends with the token, and by which stop token; None if it continues."""
        sampling = self.request.sampling
        assert sampling is not None
        if token in self.request.eos_token_ids and not sampling.ignore_eos:
            return RequestStatus.FINISHED_STOPPED, None
        if token in sampling.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED, token
        return (RequestStatus.FINISHED_LENGTH_CAPPED, None) if length == self.max_tokens else None

    def _continue(self, chosen: list[tuple[float, Continued, int]], width: int) -> None:
        """The best continuation of a beam stays in its sequence; the others take those without one, in order."""
        spare = sorted(set(range(width)) - {beam.slot for _, beam, _ in chosen})
        self.beams, taken = [], set[int]()
        for score, beam, token in chosen:
            slot = spare.pop(0) if beam.slot in taken else beam.slot
            taken.add(beam.slot)
            self.beams.append(Continued(slot, beam.slot, score, [*beam.output, token]))
