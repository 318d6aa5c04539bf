"""StepComparison: let a model compute the steps of a replay again, and compare its tokens and seconds."""

import statistics
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from pagoda.base.errors import ConfigError
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.executor import Executor
from pagoda.engine.recording.format import Line
from pagoda.engine.recording.selection import Selection


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token that differs.   position: among the tokens of the output, from 0. None: there is no token."""

    step: int
    request: str
    sequence: int
    position: int
    expected: int | None
    got: int | None


@dataclass(frozen=True, slots=True)
class MedianTimes:
    """Medians of the steps of one kind, in seconds.   kind: prompt, decode, or mixed."""

    kind: str
    num_steps: int
    recorded_s: float
    replayed_s: float


@dataclass(frozen=True, slots=True)
class SlowStep:
    """The first step whose time differs by more than the factor."""

    step: int
    kind: str
    recorded_s: float
    replayed_s: float


class StepComparison:
    """Runs each step on `executor`, which has started, and keeps what differs.

    vocab_size: of its model; made-up tokens are taken modulo it.   with_tokens: the recording has real ones, which the
    model is fed whatever it samples.   factor: by which a time may differ.
    token, slow: the first differences.   num_tokens: compared so far.
    """

    def __init__(
        self, executor: Executor, vocab_size: int, selection: Selection, *, with_tokens: bool, factor: float
    ) -> None:
        self._executor, self._vocab_size, self._selection = executor, vocab_size, selection
        self._with_tokens, self._factor = with_tokens, factor
        self.token: TokenDifference | None = None
        self.slow: SlowStep | None = None
        self.num_tokens = 0
        self._times: dict[str, list[tuple[float, float]]] = {}
        self._futures: dict[int, Future[ModelRunnerOutput]] = {}
        self._rows: dict[int, tuple[str, int, int]] = {}  # request, sequence, number of its prompt's tokens
        self._prepared: set[object] = set()

    def submit(self, output: SchedulerOutput) -> None:
        """Let the model compute a step. Raises ConfigError for one that needs what is not recorded."""
        for row in output.released.tolist():
            self._rows.pop(row, None)
        for init in output.admitted:
            if init.media or init.prompt_embeds is not None:
                raise ConfigError(f"{init.request_id} has images, sounds or embeddings, which are not recorded")
            self._rows[init.row] = (init.request_id, init.sequence, init.num_prompt_tokens)
        for fork in output.forks:
            label, _, num_prompt = self._rows[fork.src]
            self._rows[fork.dst] = (label, fork.sequence, num_prompt)
        if not output.is_empty or output.has_events:
            output = self._prepare(output if self._with_tokens else self._in_vocabulary(output))
            self._futures[output.step] = self._executor.submit(output)

    def _in_vocabulary(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step with made-up tokens as ids that the model has, and without adapters, whose names are too."""
        size, decided, beams = self._vocab_size, output.decided, output.beams
        admitted = (replace(init, token_ids=init.token_ids % size, lora=None) for init in output.admitted)
        return replace(
            output,
            admitted=tuple(admitted),
            decided=replace(decided, tokens=decided.tokens % size),
            beams=replace(beams, tokens=beams.tokens % size),
            drafts={row: tokens % size for row, tokens in output.drafts.items()},
        )

    def _prepare(self, output: SchedulerOutput) -> SchedulerOutput:
        """Let the workers have the grammars and adapters of requests that enter."""
        for init in output.admitted:
            rule = init.sampling.rule if init.sampling is not None else None
            calls = {"prepare_grammar": None if rule is None else rule.grammar, "load_adapter": init.lora}
            for name, item in calls.items():
                if item is not None and item not in self._prepared:
                    self._prepared.add(item)
                    self._executor.call(name, item).result()
        return output

    def drop(self, output: SchedulerOutput) -> None:
        """The step failed when it was recorded: it is not compared."""
        future = self._futures.pop(output.step, None)
        if future is not None:
            future.exception()

    def take(self, output: SchedulerOutput, line: Line) -> None:
        """Compare the step's result with what was recorded."""
        future = self._futures.pop(output.step, None)
        if future is None:
            return
        result, recorded = future.result(), line["result"]
        if output.is_empty or recorded is None or not self._selection.has(line, output.step):
            return
        self._compare_times(output, recorded["duration_s"], result.duration_s)
        if self._with_tokens:
            self._compare_tokens(output, result, recorded)

    def _compare_times(self, output: SchedulerOutput, recorded_s: float, replayed_s: float) -> None:
        num_drafts = [len(output.drafts.get(row, ())) for row in output.rows.tolist()]
        decodes = output.num_new - np.array(num_drafts, np.int32) == 1
        kind = "decode" if decodes.all() else "mixed" if decodes.any() else "prompt"
        self._times.setdefault(kind, []).append((recorded_s, replayed_s))
        if self.slow is None and max(recorded_s, replayed_s) > self._factor * min(recorded_s, replayed_s):
            self.slow = SlowStep(output.step, kind, recorded_s, replayed_s)

    def _compare_tokens(self, output: SchedulerOutput, result: ModelRunnerOutput, recorded: Line) -> None:
        """Of a beam, the tokens are compared that could continue it, the most likely first."""
        ends = (output.start + output.num_new)[output.sample_index].tolist()
        counts, samples = result.num_sampled.tolist(), result.sampled.tolist()
        first = np.cumsum(result.num_sampled) - result.num_sampled  # entries of the log-probabilities
        sources = output.rows[output.sample_index].tolist()
        beams = {number: candidates for number, candidates, _ in recorded["beams"] or ()}
        for number, row in enumerate(output.sample_rows.tolist()):
            label, sequence, num_prompt = self._rows[row]
            expected, got = recorded["sampled"][number], samples[number][: counts[number]]
            if number in beams and result.logprobs is not None:
                expected = beams[number]
                got = result.logprobs.token_ids[first[number], 1 : 1 + len(expected)].tolist()
            if -1 in expected or not self._selection.has_request(label):
                continue
            self.num_tokens += len(expected)
            if self.token is None and expected != got:
                same = next((n for n, pair in enumerate(zip(expected, got, strict=False)) if len({*pair}) > 1), None)
                at = min(len(expected), len(got)) if same is None else same
                place = ends[number] - len(output.drafts.get(sources[number], ())) - num_prompt
                place += 0 if number in beams else at
                pair = (one[at] if at < len(one) else None for one in (expected, got))
                self.token = TokenDifference(output.step, label, sequence, place, *pair)

    def times(self) -> list[MedianTimes]:
        """Return the medians by kind of step."""
        return [
            MedianTimes(kind, len(pairs), *(statistics.median(side) for side in zip(*pairs, strict=True)))
            for kind, pairs in sorted(self._times.items())
        ]
