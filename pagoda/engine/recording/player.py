"""Player: make a recording's calls on a scheduler of this version."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.errors import ConfigError
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.request import LoraRef, MediaItem, Pin, Progress, PromptEmbeds, Request, RequestKey, RequestStatus
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_output import MASKED_LOGPROB, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from pagoda.engine.recording.compare import StepComparison
from pagoda.engine.recording.format import VERSION, Line, RecordedSettings, described, digest_of
from pagoda.engine.recording.preparations import ReplayedPreparations


class Player:
    """A scheduler, and what the lines so far said of its requests.

    lines: of the whole file: of made-up tokens, only those that ended an output are known as stop tokens.
    with_tokens: they have real tokens.   comparison: computes the steps, too.
    num_requests, num_steps: so far.   outputs: of steps whose results are not back, by number.
    """

    def __init__(
        self, settings: RecordedSettings, lines: Iterable[Line], *, with_tokens: bool, comparison: StepComparison | None
    ) -> None:
        self.num_requests = self.num_steps = 0
        self.outputs: dict[int, SchedulerOutput] = {}
        self._comparison = comparison
        self._clock = VirtualClock()
        self._preparations = ReplayedPreparations()
        self._scheduler = Scheduler(
            settings.options,
            settings.cache,
            settings.kv_groups,
            settings.num_blocks,
            settings.max_model_len,
            self._clock,
            num_host_blocks=settings.num_host_blocks,
            encoder_decoder=settings.encoder_decoder,
            preparations=self._preparations,
        )
        self._events: list[Any] = []
        self._scheduler.subscribe(lambda event: self._events.append(described(event)))
        self._numbers: dict[int, int] | None = None if with_tokens else {}
        self._keys: dict[str, RequestKey] = {}
        self._ends: dict[str, set[int]] = defaultdict(set)
        for line in lines:
            for label, token in (line.get("result") or {}).get("ends", ()):
                self._ends[label] |= {*self._tokens([token])}

    @property
    def num_unfinished(self) -> int:
        return sum(self._scheduler.get_request_counts())

    def play(self, line: Line) -> list[Any]:
        """Make the call. Return what it decided, as the recording has it."""
        self._clock.advance(max(line["at"] - self._clock.now(), 0.0))
        before = list[Any]()
        match line["op"]:
            case "add" | "resume":
                request = self._request(line)
                self._keys[request.request_id] = request.key
                self._scheduler.add_request(request, msgspec.convert(line.get("progress", {}), Progress, strict=False))
                self.num_requests += 1
                if line["op"] == "resume":
                    self._events.clear()  # it was queued before
            case "finish":
                self._scheduler.finish_requests([self._keys[one] for one in line["ids"]], RequestStatus[line["status"]])
            case "finish_sequence":
                self._scheduler.finish_sequence(self._keys[line["id"]], line["index"], RequestStatus[line["status"]])
            case "reset":
                self._scheduler.reset_prefix_cache(line["preempt_running"])
            case "schedule":
                woken = [self._keys[label] for label in line["prepared"]["woken"]]
                self._preparations.give(line["prepared"]["answers"], woken)
                output = self.outputs[line["step"]] = self._scheduler.schedule()
                self.num_steps += 1
                before = [digest_of(output)]
                if self._comparison is not None:
                    self._comparison.submit(output)
            case "update":
                output, result = self.outputs.pop(line["step"]), line["result"]
                if self._comparison is not None:
                    self._comparison.take(output, line)
                self._scheduler.update_from_output(output, result and self._result(output, result))
            case "fail":
                output = self.outputs.pop(line["step"])
                if self._comparison is not None:
                    self._comparison.drop(output)
                self._scheduler.fail_step(output, "failed when it was recorded")
            case op:
                raise ConfigError(f"a recording of version {VERSION} has no {op!r}")
        taken, self._events[:] = self._events.copy(), []
        return before + taken

    def _tokens(self, recorded: list[int]) -> list[int]:
        """Return token ids: those of made-up ones are numbers from 0, as the scheduler has tables of stop tokens."""
        numbers = self._numbers
        if numbers is None:
            return [max(token, 0) for token in recorded]
        return [numbers.setdefault(token, len(numbers)) for token in recorded]

    def _request(self, line: Line) -> Request:
        label, given, embeds = line["id"], line["sampling"], None
        sampling = pooling = None
        if given is not None:
            sampling = msgspec.convert({"temperature": 0.0, **given}, SamplingParams, strict=False)
            if "stop_token_ids" not in given:
                sampling.stop_token_ids = tuple(self._ends[f"stop {label}"])
        else:
            pooling = msgspec.convert(line["pooling"] or {}, PoolingParams, strict=False)
        if line["embeds"] is not None:
            embeds = PromptEmbeds.of_first(np.array(line["embeds"], np.float32)[:, None])
            if (positions := line.get("embeds_at")) is not None:  # which early recordings lack
                embeds = PromptEmbeds(np.array(positions, np.int32), embeds.values)
        return Request(
            label,
            np.array(self._tokens(line["prompt"]), np.int32),
            sampling,
            pooling,
            arrival_time_s=line["arrival_time_s"],
            priority=line["priority"],
            client_index=line["client_index"],
            handle=line["handle"],
            seed=line["seed"],
            eos_token_ids=tuple(self._ends[f"eos {label}"] if (eos := line.get("eos")) is None else eos),
            lora=LoraRef(*line["lora"]) if line["lora"] is not None else None,
            cache_salt=line["cache_salt"],
            skip_prefix_read=line["skip_prefix_read"],
            pin=Pin(*pin) if (pin := line.get("pin")) is not None else None,
            media=tuple(MediaItem(name, offset, length) for name, offset, length in line["media"]),
            encoder_len=line["encoder_len"],
            prior_output=tuple(tuple(self._tokens(tokens)) for tokens in line["prior"]),
            prompt_embeds=embeds,
        )

    def _result(self, output: SchedulerOutput, line: Line) -> ModelRunnerOutput:
        tokens = [self._tokens(one) for one in line["sampled"]]
        if len(tokens) != len(output.sample_rows):
            raise ValueError(f"{len(tokens)} samples were recorded, {len(output.sample_rows)} were planned")
        scored = line["beams"]
        beams = [(number, self._tokens(of_beam), logprobs) for number, of_beam, logprobs in scored or ()]
        counts = np.array([len(one) for one in tokens], np.int32)
        sampled = np.full((len(tokens), max(counts.tolist(), default=1) or 1), -1, np.int32)
        for number, one in enumerate(tokens):
            sampled[number, : len(one)] = one
        return ModelRunnerOutput(
            output.step,
            sampled,
            counts,
            logprobs=_candidates(counts, beams) if scored is not None else None,
            pooled=dict.fromkeys(line["pooled"], np.zeros(1, np.float32)),
            failed=dict.fromkeys(line["failed"], "failed when it was recorded"),
            refused=frozenset(line["refused"]),
            duration_s=line["duration_s"],
            swap_s=line["swap_s"],
            drafts={int(row): np.array(tokens, np.int32) for row, tokens in line["drafts"].items()},
        )


def _candidates(counts: np.ndarray, beams: list[tuple[int, list[int], list[float]]]) -> LogprobColumns:
    """Return the log-probabilities of a step's beams; those of other rows are read by nothing."""
    total, widest = int(counts.sum()), 1 + max((len(tokens) for _, tokens, _ in beams), default=0)
    columns = LogprobColumns(
        np.zeros((total, widest), np.int32),
        np.full((total, widest), MASKED_LOGPROB, np.float32),
        np.ones(total, np.int32),
    )
    first = np.cumsum(counts) - counts
    for number, tokens, logprobs in beams:
        columns.token_ids[first[number], 1 : 1 + len(tokens)] = tokens
        columns.logprobs[first[number], 1 : 1 + len(tokens)] = logprobs
    return columns
