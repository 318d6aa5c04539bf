"""Random traffic whose scheduler is recorded."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.core.request import Reason, Request, RequestKey
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.engine.recording.files import RecordingFiles
from pagoda.engine.recording.format import RecordedSettings
from pagoda.engine.recording.preparations import NotedPreparations
from pagoda.engine.recording.recorder import RecordingScheduler
from tests.core.traffic import NO_LOGPROBS, VOCABULARY, Traffic


class SlowPreparations:
    """Grammars and adapters are ready after some time, never the same; some cannot be had."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._left: dict[RequestKey, int] = {}

    def why_not_ready(self, request: Request) -> Reason | None:
        if request.lora is None:
            return None
        left = self._left.setdefault(request.key, self._rng.choice((0, 1, 3, -1)))
        if left < 0:
            raise RequestError(NO_LOGPROBS)  # what Traffic lets any request end with
        return Reason.ADAPTER if left else None

    def take_woken(self) -> list[RequestKey]:
        waiting = [key for key, left in self._left.items() if left > 0]
        self._left |= {key: self._left[key] - 1 for key in waiting}
        return [key for key in waiting if not self._left[key]]

    def forget(self, request: Request) -> None:
        self._left.pop(request.key, None)

    def pin(self, request: Request) -> None:
        assert not self._left.get(request.key)

    def unpin(self, request: Request) -> None:
        pass


class _Recorded(RecordingScheduler):
    """Traffic also asks what only a `Scheduler` knows, and lets nothing run that was not planned."""

    traffic: Traffic

    def schedule(self) -> SchedulerOutput:
        if not self._files.is_open:  # all may be preempted
            self.traffic.reset_ids |= {*self._inner.running_ids(), *self._inner.swapped_ids()}  # type: ignore[attr-defined]
        output = super().schedule()
        if output.step == 0:  # the engine would apply the results of steps in flight, and ask again
            while self.traffic.in_flight:
                self.traffic.deliver()
            output = super().schedule()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def record_traffic(
    traffic: Traffic, path: Path, *, with_tokens: bool = False, max_bytes: int = 1 << 20, slow: int | None = None
) -> None:
    """Record the traffic's scheduler from now on.   slow: seed of how long adapters take; None: no time."""
    setting, noted = traffic.setting, None
    if slow is not None:
        noted = NotedPreparations(SlowPreparations(slow))
        traffic.scheduler._state.preparations = noted
    traffic.twin = None  # which does not start over
    settings = RecordedSettings(
        setting.scheduler,
        setting.cache,
        setting.groups,
        setting.num_blocks,
        setting.max_model_len,
        setting.num_host_blocks,
        setting.encoder_decoder,
    )
    files = RecordingFiles(path, traffic.clock, max_bytes)
    files.begin()
    recorded = _Recorded(traffic.scheduler, files, settings, preparations=noted, with_tokens=with_tokens)
    recorded.traffic = traffic
    traffic.scheduler = recorded  # type: ignore[assignment]


def propose_drafts(traffic: Traffic, num_right: int) -> None:
    """Let the result that is delivered next propose drafts, of which the first `num_right` are right."""
    output, result, failure = traffic.in_flight[0]
    drafts: dict[int, np.ndarray] = {}
    for row in output.sample_rows.tolist():
        known = traffic.worker.rows.get(row)
        if known is None or (known.request_id, 0) not in traffic.received:
            continue
        received = traffic.received[known.request_id, known.seed - traffic.requests[known.request_id].seed]
        ahead = received.truth[len(received.tokens) :][1:4]
        guess = ahead[:num_right] + [(token + 1) % VOCABULARY for token in ahead[num_right:]]
        if guess:
            drafts[row] = np.array(guess, np.int32)
    traffic.in_flight[0] = (output, replace(result, drafts=drafts), failure)
