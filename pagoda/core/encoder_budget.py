"""Media in a chunk: which items must be encoded in this step, and where the chunk must end because one cannot be."""

from dataclasses import dataclass

from pagoda.core.request_table import LiveRequest
from pagoda.core.scheduler_output import EncoderRun
from pagoda.core.scheduler_state import SchedulerState
from pagoda.core.step_plan import StepPlan


@dataclass(slots=True)
class MediaFit:
    """num_new: tokens the chunk may have.   to_encode: items to run first.   repeated: items equal to one of those."""

    live: LiveRequest
    num_new: int
    to_encode: list[int]
    repeated: list[int]

    @property
    def num_encoder_tokens(self) -> int:
        return sum(self.live.request.media[item].length for item in self.to_encode)

    def commit(self, state: SchedulerState, plan: StepPlan, row: int) -> None:
        """The chunk is placed: its items run in this step."""
        for item in self.to_encode:
            state.encoder.add(self.live, item)
            run = EncoderRun(row, item, self.live.request.media[item].content_hash)
            plan.encoder_runs.setdefault(row, []).append(run)
        for item in self.repeated:
            state.encoder.hold_cached(self.live, item)
        plan.encoder_budget -= self.num_encoder_tokens


def fit_media(state: SchedulerState, plan: StepPlan, live: LiveRequest, start: int, num_new: int) -> MediaFit:
    """What a chunk of `num_new` tokens from `start` needs of the encoder.

    Cached items in the chunk are referenced at once. An item that finds no budget or no space ends the chunk just
    before it; with `no_partial_media` so does an item that the chunk would cut.
    """
    media = live.request.media
    fit = MediaFit(live, num_new, [], [])
    budget, planned = plan.encoder_budget, 0
    hashes: set[str] = set()
    for item, at in enumerate(media):
        if state.encoder_decoder:
            if start > 0:
                break  # the cross-attention table was filled in the first step
        elif at.offset >= start + num_new:
            break
        elif at.offset + at.length <= start:
            continue
        if state.config.no_partial_media and start < at.offset and start + num_new < at.offset + at.length:
            fit.num_new = max(0, at.offset - start)
            break
        if not state.encoder_decoder:
            if at.content_hash in hashes:
                fit.repeated.append(item)
                continue
            if state.encoder.hold_cached(live, item):
                continue
        if at.length > budget or not state.encoder.make_room(planned + at.length):
            fit.num_new = max(0, at.offset - start)
            break
        planned += at.length
        budget -= at.length
        hashes.add(at.content_hash)
        fit.to_encode.append(item)
    return fit
