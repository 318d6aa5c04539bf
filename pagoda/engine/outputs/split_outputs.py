"""The outputs of a large step as several, which are turned into objects one after the other."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pagoda.core.events import Ended, Events
from pagoda.core.scheduler_output import NO_HANDLES, NO_INTS, EngineCoreOutputs, only_events


def split_outputs(outputs: EngineCoreOutputs, most_logprobs: int) -> Iterator[EngineCoreOutputs]:
    """Yield the outputs of one step as several, with at most so many log-probabilities each.

    The tokens of a sequence stay together, and with its end; all other events come first.
    """
    logprobs = outputs.logprobs
    if logprobs is None or logprobs.token_ids.size <= most_logprobs:
        yield outputs
        return
    most_tokens = max(1, most_logprobs // logprobs.token_ids.shape[1])
    first = np.concatenate(([0], np.cumsum(outputs.counts)))  # token of each sequence
    begin, left, places = 0, outputs.ends, np.arange(len(outputs.handles))
    others = Events(event for event in outputs.events if not isinstance(event, Ended))
    rest = replace(outputs, handles=NO_HANDLES, sequences=NO_INTS, counts=NO_INTS, token_ids=NO_INTS)
    yield replace(rest, events=others, logprobs=None)
    while begin < len(places):
        end = max(begin + 1, int(np.searchsorted(first, first[begin] + most_tokens, "right")) - 1)
        part = outputs.entries((begin <= places) & (places < end))
        pairs = set(zip(part.handles.tolist(), part.sequences.tolist(), strict=True))
        yield replace(part, events=Events(end for end in left if (end.handle, end.sequence) in pairs))
        left = [end for end in left if (end.handle, end.sequence) not in pairs]
        begin = end
    if left:
        yield only_events(left)
