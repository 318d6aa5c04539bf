"""RecordingScheduler: write down the calls, decisions and results of a scheduler, so that it can be run again."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Ended, Event
from pagoda.core.request import (
    NEW,
    Progress,
    Request,
    RequestKey,
    RequestState,
    RequestStatus,
    num_beam_candidates,
)
from pagoda.core.scheduler_interface import SchedulerInterface
from pagoda.core.scheduler_output import NO_INTS, EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.engine.recording.files import RecordingFiles
from pagoda.engine.recording.format import VERSION, Line, RecordedSettings, described, digest_of
from pagoda.engine.recording.made_up import MadeUpTexts, kind_of_end
from pagoda.engine.recording.preparations import NotedPreparations

_SAMPLING = ("n", "max_tokens", "min_tokens", "ignore_eos", "prompt_logprobs", "beam_search")
"""Sampling parameters that decide what is scheduled."""

_NOTHING = SchedulerOutput(0, NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_INTS, 0)
"""A step that no scheduler has planned, and that nothing runs."""

_Owner = tuple[str, int]  # a request's name in the recording, and one of its sequences


def _num_candidates(request: Request) -> int:
    """Return how many candidates of each beam the scheduler takes of a request with a beam search."""
    assert request.sampling is not None
    return max(num_beam_candidates(request.sampling, request.eos_token_ids), request.sampling.logprobs or 0)


class RecordingScheduler:
    """A scheduler that does as `inner` does, and writes each call to `files`, of which the first has begun.

    settings: what `inner` was made with.   engine: settings of the engine, without secrets.
    preparations: those of `inner`.   with_tokens: real tokens in place of made-up ones, and all parameters.
    """

    def __init__(
        self,
        inner: SchedulerInterface,
        files: RecordingFiles,
        settings: RecordedSettings,
        *,
        engine: Mapping[str, Any] | None = None,
        preparations: NotedPreparations | None = None,
        with_tokens: bool = False,
    ) -> None:
        self._inner, self._files, self._preparations = inner, files, preparations
        self.has_unfinished_requests, self.subscribe = inner.has_unfinished_requests, inner.subscribe
        self.make_stats, self.view = inner.make_stats, inner.view
        self._with_tokens = with_tokens
        self._head = {"version": VERSION, "with_tokens": with_tokens, "engine": dict(engine or {})}
        self._head["settings"] = msgspec.to_builtins(settings)
        self._texts = MadeUpTexts(with_tokens=with_tokens)
        self._labels: dict[RequestKey, str] = {}  # of unfinished requests
        self._num_requests = self._num_steps = self._num_before = 0
        self._rows: dict[int, _Owner] = {}
        self._owners: dict[int, list[_Owner]] = {}  # by step in flight, of its samples
        self._events: list[list[Any]] = []
        self._ended: list[RequestKey] = []  # requests, since the last line
        self._began_with_room = True  # for more than what was unfinished
        self._may_requeue = True  # a request has ended since: none is computed again and again
        inner.subscribe(self._note)
        self._files.write("begin", **self._head)

    def _note(self, event: Event) -> None:
        if self._files.is_open:
            self._events.append(described(event, self._num_before))
        if isinstance(event, Ended) and event.is_last:
            self._may_requeue |= self._began_with_room
            if self._files.is_open:
                self._ended.append((event.client, event.handle))

    def _write(self, op: str, **values: Any) -> None:
        """Write a call with the events that it caused."""
        if not self._files.is_open:
            return
        self._files.write(op, **values, events=self._events)
        self._events = []
        for key in self._ended:
            self._texts.remove(self._labels.pop(key, ""))
        self._ended = []
        if not self._files.is_open:  # what follows is not written
            self._forget_requests()

    def _forget_requests(self) -> None:
        for kept in (self._labels, self._rows, self._texts):
            kept.clear()

    def _begin_next_file(self, *, requeue: bool = False) -> bool:
        """Begin the next file if that is due and the scheduler can start over, so that it can be replayed alone.

        Return whether the scheduler did start over; the file may be full already, of the requests that go on.
        """
        unfinished = self._inner.start_over(requeue=requeue) if self._files.is_due else None
        if unfinished is None or not self._files.begin_next():
            return unfinished is not None
        self._forget_requests()
        self._events, self._ended = [], []
        self._num_before, self._num_requests = self._num_steps, 0
        self._files.write("begin", **self._head)
        for state in unfinished:
            outputs = tuple([tuple(one.token_ids[state.spec.num_prompt_tokens :].tolist()) for one in state.sequences])
            resumed = replace(state.spec, prior_output=() if state.awaiting_fork and not any(outputs) else outputs)
            self._write_request("resume", resumed, progress=msgspec.to_builtins(state.progress, str_keys=True))
        self._began_with_room, self._may_requeue = self._files.has_room, False
        return True

    # The scheduler

    def add_request(self, request: Request, progress: Progress = NEW) -> None:
        self._begin_next_file()
        self._inner.add_request(request, progress)
        if self._files.is_open:
            self._write_request("add", request)

    def _write_request(self, op: str, request: Request, **more: Any) -> None:
        self._num_requests += 1
        label = self._labels[request.key] = f"r{self._num_requests}"
        prompt, prior = self._texts.add(label, request)
        name, embeds = self._texts.name, request.prompt_embeds
        self._write(
            op,
            **more,
            id=label,
            prompt=prompt,
            prior=prior,
            sampling=self._sampling_of(request),
            pooling=msgspec.to_builtins(request.pooling) if self._with_tokens else None,
            seed=request.seed if self._with_tokens else 0,
            eos=list(request.eos_token_ids) if self._with_tokens else None,
            arrival_time_s=request.arrival_time_s,
            priority=request.priority,
            client_index=request.client_index,
            handle=request.handle,
            lora=self._lora_of(request),
            cache_salt=name(request.cache_salt),
            skip_prefix_read=request.skip_prefix_read,
            pin=None if request.pin is None else [request.pin.ttl_s, name(request.pin.owner) or ""],
            media=[[name(item.content_hash), item.offset, item.length] for item in request.media],
            encoder_len=request.encoder_len,
            embeds=None if embeds is None else self._texts.vectors(embeds.values),
            embeds_at=None if embeds is None else embeds.positions.tolist(),
        )

    def _sampling_of(self, request: Request) -> dict[str, Any] | None:
        if request.sampling is None:
            return None
        fields: dict[str, Any] = msgspec.to_builtins(request.sampling)
        if not self._with_tokens:
            fields = {name: fields[name] for name in _SAMPLING}
        if request.is_beam_search:  # a replay knows of fewer stop tokens, and would take fewer candidates
            fields["logprobs"] = _num_candidates(request)
        return fields

    def _lora_of(self, request: Request) -> list[str] | None:
        """Return name, path and digest, all made up unless real tokens are asked for."""
        lora = request.lora
        if lora is None:
            return None
        if self._with_tokens:
            return [lora.name, lora.path, lora.digest]
        made_up = self._texts.name(repr(lora.identity)) or ""
        return [made_up, "", made_up]

    def finish_requests(
        self, keys: Iterable[RequestKey], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        keys = list(keys)
        self._inner.finish_requests(keys, status)
        labels = [self._labels[key] for key in keys if key in self._labels]
        self._write("finish", ids=labels, status=status.name)

    def finish_sequence(
        self, key: RequestKey, index: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        self._inner.finish_sequence(key, index, status)
        if key in self._labels:
            self._write("finish_sequence", id=self._labels[key], index=index, status=status.name)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        done = self._inner.reset_prefix_cache(preempt_running)
        self._write("reset", preempt_running=preempt_running)
        return done

    def schedule(self) -> SchedulerOutput:
        is_late = self._may_requeue and not self._files.is_open and self._files.is_due
        if is_late and not self._begin_next_file(requeue=True):
            return _NOTHING  # until the results of the steps in flight are back
        output = self._inner.schedule()
        self._num_steps = output.step
        answers, woken = self._preparations.take() if self._preparations is not None else ([], [])
        if not self._files.is_open:
            return output
        self._follow_rows(output)
        if not output.is_empty:
            self._owners[output.step] = [self._rows[row] for row in output.sample_rows.tolist()]
        labels = self._labels
        prepared = {
            "answers": [(labels[key], answer) for key, answer in answers],
            "woken": [labels[key] for key in woken if key in labels],
        }
        self._write("schedule", step=output.step - self._num_before, digest=digest_of(output), prepared=prepared)
        return output

    def _follow_rows(self, output: SchedulerOutput) -> None:
        """Note whose the rows are, and which outputs the sequences have that enter, fork or are chosen beams."""
        rows, texts = self._rows, self._texts
        for row in output.released.tolist():
            rows.pop(row, None)
        for init in output.admitted:
            label, sequence = rows[init.row] = (self._labels[init.key], init.sequence)
            texts.put(label, sequence, init.num_prompt_tokens, init.token_ids[init.num_prompt_tokens :].tolist())
        beams = output.beams
        for source, row in beams.copies:
            texts.copy(rows[row][0], [(rows[source][1], rows[row][1])])
        for row, position, token in zip(
            beams.rows.tolist(), beams.positions.tolist(), beams.tokens.tolist(), strict=True
        ):
            texts.put(*rows[row], position, [token])
        for fork in output.forks:
            label, source = rows[fork.src]
            rows[fork.dst] = (label, fork.sequence)
            texts.copy(label, [(source, fork.sequence)])

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        outputs = self._inner.update_from_output(scheduler_output, model_output)
        owners = self._owners.pop(scheduler_output.step, [])
        if self._files.is_open and scheduler_output.step > self._num_before:  # others had nothing to compute
            result = self._result(owners, scheduler_output, model_output) if model_output is not None else None
            self._write("update", step=scheduler_output.step - self._num_before, result=result)
        return outputs

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
        outputs = self._inner.fail_step(scheduler_output, message)
        self._owners.pop(scheduler_output.step, None)
        self._write("fail", step=scheduler_output.step - self._num_before)
        return outputs

    def _result(self, owners: list[_Owner], output: SchedulerOutput, result: ModelRunnerOutput) -> Line:
        """Return a step's results, and which of its made-up tokens end the output of their request."""
        texts = self._texts
        ends = (output.start + output.num_new)[output.sample_index].tolist()
        rows = output.rows[output.sample_index].tolist()
        counts, samples = result.num_sampled.tolist(), result.sampled.tolist()
        sampled: list[list[int]] = []
        endings: set[tuple[str, int]] = set()
        beams: list[tuple[int, list[int], list[float]]] = []
        first = 0  # entry of the log-probabilities
        for number, (label, sequence) in enumerate(owners):
            tokens = samples[number][: counts[number]]
            shown = [-1] * len(tokens)  # of beams, and of requests that have ended, which take no tokens
            if label in texts:
                request = texts.request(label)
                if not request.is_beam_search:
                    before = ends[number] - len(output.drafts.get(rows[number], ()))
                    named, shown = tokens, texts.put(label, sequence, before, tokens)
                    seen = shown
                elif tokens and result.logprobs is not None:
                    columns = slice(1, 1 + _num_candidates(request))
                    named = result.logprobs.token_ids[first, columns].tolist()
                    seen = texts.could_follow(label, sequence, named)
                    beams.append((number, seen, result.logprobs.logprobs[first, columns].tolist()))
                else:
                    named, seen = [], []
                kinds = [kind_of_end(request, token) for token in named]
                endings |= {(f"{kind} {label}", value) for kind, value in zip(kinds, seen, strict=True) if kind}
            sampled.append(shown)
            first += len(tokens)
        return {
            "sampled": sampled,
            "ends": sorted(endings),
            "beams": beams if result.logprobs is not None else None,  # a worker that gives none has its beams refused
            "pooled": list(result.pooled),
            "failed": list(result.failed),
            "refused": sorted(result.refused),
            "duration_s": result.duration_s,
            "swap_s": result.swap_s,
            "drafts": {
                str(row): tokens.tolist() if self._with_tokens else [0] * len(tokens)
                for row, tokens in result.drafts.items()
            },
        }

    def start_over(self, *, requeue: bool = False) -> list[RequestState] | None:
        return None  # it is the recording that asks for it

    @property
    def explain(self) -> DecisionLog:
        return self._inner.explain
