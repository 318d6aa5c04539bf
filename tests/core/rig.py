"""Rig: a scheduler on the bench, driven step by step with small numbers, answering in plain ones."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Ended
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import AdmitKind, Request, RequestKey, RequestStatus
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.state import Preparations

FILL = 7


@dataclass
class PlannedStep:
    """One planned step. Sequences are named "id", or "id/number" where a request has several."""

    output: SchedulerOutput
    owners: dict[int, str]
    scheduled: dict[str, int]
    cached: dict[str, int]  # of those admitted
    kinds: dict[str, AdmitKind]
    emitted: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str | None] = field(default_factory=dict)
    finishes: list[Ended] = field(default_factory=list)
    preempted: tuple[str, ...] = ()

    @property
    def samples(self) -> list[str]:
        return [self.owners[row] for row in self.output.sample_rows.tolist()]


class Rig:
    """Keywords of SchedulerOptions and CacheConfig, and those below. Block size 4, 16 blocks, no caching."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        num_host_blocks: int = 0,
        max_model_len: int = 256,
        groups: tuple[KVGroupSpec, ...] = (KVGroupSpec(),),
        encoder_decoder: bool = False,
        preparations: Preparations | None = None,
        block_size: int = 4,
        enable_prefix_caching: bool = False,
        watermark: float = 0.0,
        **config: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            SchedulerOptions(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **config}),
            CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching, watermark=watermark),
            groups,
            num_blocks,
            max_model_len,
            self.clock,
            num_host_blocks=num_host_blocks,
            encoder_decoder=encoder_decoder,
            preparations=preparations,
        )
        self.requests: list[Request] = []
        self.owners: dict[int, str] = {}

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 8, **facts: Any) -> Request:
        """prompt: tokens, or how many of the request's own.   facts: fields of Request and of SamplingParams."""
        number = len(self.requests) + 1
        tokens = [1000 * number + place for place in range(prompt)] if isinstance(prompt, int) else prompt
        names = ("n", "min_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs", "beam_search")
        sampling = SamplingParams(max_tokens=max_tokens, **{name: facts.pop(name) for name in names if name in facts})
        if "grammar" in facts:
            sampling = sampling.with_grammar(facts.pop("grammar"))
        facts = {"arrival_time_s": float(number), **facts}
        request = Request(request_id, np.asarray(tokens, np.int32), sampling, handle=number, seed=number, **facts)
        self.scheduler.add_request(request)
        self.requests.append(request)
        return request

    def key(self, request_id: str) -> RequestKey:
        """Return the key of the last request with this id, or one that none has."""
        return next((one.key for one in reversed(self.requests) if one.request_id == request_id), (0, 0))

    def abort(self, *ids: str) -> None:
        self.scheduler.finish_requests(map(self.key, ids), RequestStatus.FINISHED_ABORTED)

    def finish(self, request_id: str, sequence: int) -> None:
        self.scheduler.finish_sequence(self.key(request_id), sequence)

    def offer(self, drafts: dict[str, list[int]]) -> None:
        """Offer drafts for the first sequences of requests."""
        self.scheduler.update_draft_token_ids({(self.key(name), 0): tokens for name, tokens in drafts.items()})

    def plan(self) -> PlannedStep:
        """schedule(), read the way a worker reads it."""
        output = self.scheduler.schedule()
        self.scheduler.check()
        for row in output.released.tolist():
            del self.owners[row]
        for init in output.admitted:
            self.owners[init.row] = self._name(init.request_id, init.sequence)
        for fork in output.forks:
            self.owners[fork.dst] = self._name(self.owners[fork.src].split("/")[0], fork.sequence)
        rows = zip(output.rows.tolist(), output.num_new.tolist(), strict=True)
        return PlannedStep(
            output,
            dict(self.owners),
            {self.owners[row]: new for row, new in rows},
            {self.owners[init.row]: init.num_computed for init in output.admitted},
            {self.owners[init.row]: init.kind for init in output.admitted},
            preempted=tuple(self.requests[handle - 1].request_id for _, handle in output.preempted),
        )

    def _name(self, request_id: str, sequence: int) -> str:
        request = next(request for request in reversed(self.requests) if request.request_id == request_id)
        return f"{request_id}/{sequence}" if request.num_seqs > 1 else request_id

    def deliver_outputs(
        self, step: PlannedStep, sampled: dict[str, list[int]] | None = None, duration_s: float = 0.0
    ) -> dict[int, EngineCoreOutputs]:
        """update_from_output(): every row that samples gets its tokens in `sampled`, or FILL."""
        answers = [(sampled or {}).get(name, [FILL]) for name in step.samples]
        tokens = np.full((len(answers), max(map(len, answers), default=1)), -1, np.int32)
        for place, answer in enumerate(answers):
            tokens[place, : len(answer)] = answer
        counts = np.array([len(answer) for answer in answers], np.int32)
        result = ModelRunnerOutput(step.output.step, tokens, counts, duration_s=duration_s)
        return self.scheduler.update_from_output(step.output, result)

    def deliver(
        self, step: PlannedStep, sampled: dict[str, list[int]] | None = None, duration_s: float = 0.0
    ) -> PlannedStep:
        """`deliver_outputs`, read the way a client reads it."""
        for outputs in self.deliver_outputs(step, sampled, duration_s).values():
            flat = outputs.token_ids.tolist()
            for handle, sequence, count in zip(
                outputs.handles.tolist(), outputs.sequences.tolist(), outputs.counts.tolist(), strict=True
            ):
                name = self._name(self.requests[handle - 1].request_id, sequence)
                step.emitted[name], flat = flat[:count], flat[count:]
            for finish in outputs.ends:
                if finish.status is RequestStatus.FINISHED_ABORTED:
                    continue  # it was asked for
                step.finished[self._name(finish.request_id, finish.sequence)] = finish.status.finish_reason
                step.finishes.append(finish)
        self.scheduler.check()
        return step

    def step(self, sampled: dict[str, list[int]] | None = None, duration_s: float = 0.0) -> PlannedStep:
        return self.deliver(self.plan(), sampled, duration_s)

    def run(self, limit: int = 200) -> dict[str, list[int]]:
        """Until nothing is left: the tokens of each sequence."""
        texts: dict[str, list[int]] = {}
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                return texts
            for name, tokens in self.step().emitted.items():
                texts.setdefault(name, []).extend(tokens)
        raise AssertionError("not done")

    @property
    def free(self) -> int:
        return self.scheduler.make_stats().num_free_blocks

    @property
    def waiting(self) -> list[str]:
        return self.scheduler.waiting_ids()

    @property
    def running(self) -> list[str]:
        return self.scheduler.running_ids()

    @property
    def swapped(self) -> list[str]:
        return self.scheduler.swapped_ids()

    def computed(self, request_id: str) -> int:
        return self.scheduler.num_computed_tokens(self.key(request_id))[0]

    def blocks(self, request_id: str) -> list[int]:
        return self.scheduler.num_blocks_held(self.key(request_id))
