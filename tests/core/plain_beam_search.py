"""Beam search as transformers' generate() does it, over plain lists: what core/beams.py is compared with."""

from collections.abc import Callable, Sequence
from itertools import count

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.scheduler_output import MASKED_LOGPROB

Scored = tuple[float, list[int]]  # (score, generated tokens)


def plain_beam_search(
    prompt: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    max_tokens: int,
    logprobs_of: Callable[[list[int]], Sequence[float]],
) -> list[Scored]:
    """Return the `n` best outputs, best first.

    logprobs_of: tokens -> the log-probability of every token of the vocabulary after them.
    """
    options = params.beam_search
    assert options is not None
    width, penalty = params.n, options.length_penalty
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    running: list[Scored] = [(0.0, [])]
    finished: list[Scored] = []
    for length in count(1):
        continuations = [
            (score + float(logprob), [*tokens, token])
            for score, tokens in running
            for token, logprob in enumerate(logprobs_of([*prompt, *tokens]))
            if logprob > MASKED_LOGPROB
        ]
        best = sorted(continuations, key=lambda one: -one[0])[: max(2, 1 + len(ends)) * width]
        has_ended = [tokens[-1] in ends or length == max_tokens for _, tokens in best]
        for (score, tokens), ended in zip(best[:width], has_ended, strict=False):
            if ended:
                finished.append((score / float(length) ** penalty, tokens))
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        running = [one for one, ended in zip(best, has_ended, strict=True) if not ended][:width]
        if all(has_ended):
            return finished
        if len(finished) == width:
            hopes_for_length = options.early_stopping == "never" and penalty > 0
            best_possible = running[0][0] / float(max_tokens if hopes_for_length else length) ** penalty
            if options.early_stopping is True or best_possible <= finished[-1][0]:
                return finished
    raise AssertionError("not reached")
