"""pagoda's Scheduler as a subject of the replay: its arrays and events, read back into plain records."""

from typing import Any

import numpy as np

from pagoda.base.clock import VirtualClock
from pagoda.core.events import Ended
from pagoda.core.request import AdmitKind, RequestKey, RequestStatus
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tests.conformance.settings import request_of, settings_of

Record = dict[str, Any]


class PagodaSubject:
    """Knows rows the way a worker does: from what SchedulerOutput said of them."""

    def __init__(self, config: Record) -> None:
        settings = settings_of(config)
        self.num_groups = len(settings.kv_groups)
        self.encoder_decoder = settings.encoder_decoder
        self.scheduler = Scheduler(
            settings.scheduler,
            settings.cache,
            settings.kv_groups,
            settings.num_blocks,
            settings.max_model_len,
            VirtualClock(),
            encoder_decoder=settings.encoder_decoder,
        )
        self.owner: dict[int, str] = {}  # row -> request id
        self.id_of: dict[int, str] = {}  # handle -> request id
        self.key_of: dict[str, RequestKey] = {}

    def add(self, request: Record) -> None:
        handle = len(self.id_of) + 1
        self.id_of[handle] = request["id"]
        added = request_of(request, handle, self.encoder_decoder)
        self.key_of[request["id"]] = added.key
        self.scheduler.add_request(added)

    def schedule(self) -> Record:
        ended = self._ended_while_planning()
        output = self.scheduler.schedule()
        for row in output.released.tolist():
            del self.owner[row]
        for init in output.admitted:
            self.owner[init.row] = init.request_id
        encoder: dict[str, list[int]] = {}
        for run in output.encoder_runs:
            encoder.setdefault(self.owner[run.row], []).append(run.item)
        owners = [self.owner[row] for row in output.rows.tolist()]
        plan = {
            "scheduled": [[owner, new] for owner, new in zip(owners, output.num_new.tolist(), strict=True)],
            "admitted": [
                {
                    "id": init.request_id,
                    "kind": "new" if init.kind is AdmitKind.NEW else "resumed",
                    "cached": init.num_computed,
                }
                for init in output.admitted
            ],
            "preempted": sorted(self.id_of[handle] for _, handle in output.preempted),
            "samples": [self.owner[row] for row in output.sample_rows.tolist()],
            "drafts": {self.owner[row]: drafts.tolist() for row, drafts in output.drafts.items() if len(drafts)},
            "encoder": encoder,
            "ignored": sorted(request_id for request_id, _ in self._ended_while_planning() - ended),
            "handle": (output, dict(self.owner)),
        }
        self.scheduler.check()
        return plan

    def _ended_while_planning(self) -> set[tuple[str, int]]:
        pending = self.scheduler._state.events._pending
        finishes = [event for event in pending if isinstance(event, Ended)]
        return {(finish.request_id, finish.sequence) for finish in finishes}

    def update(self, handle: tuple[SchedulerOutput, dict[int, str]], sampled: dict[str, list[int]]) -> Record:
        output, owner = handle
        said = [sampled[owner[row]] for row in output.sample_rows.tolist()]
        tokens = np.full((len(said), max(map(len, said), default=1)), -1, np.int32)
        for place, row_tokens in enumerate(said):
            tokens[place, : len(row_tokens)] = row_tokens
        counts = np.array([len(row_tokens) for row_tokens in said], np.int32)
        outputs = self.scheduler.update_from_output(output, ModelRunnerOutput(output.step, tokens, counts))
        self.scheduler.check()
        emitted: dict[str, list[int]] = {}
        finished: dict[str, str | None] = {}
        for told in outputs.values():
            flat = told.token_ids.tolist()
            for number, count in zip(told.handles.tolist(), told.counts.tolist(), strict=True):
                if count:
                    emitted[self.id_of[number]], flat = flat[:count], flat[count:]
            assert not flat
            ends = [end for end in told.ends if end.status is not RequestStatus.FINISHED_ABORTED]  # not asked for
            finished |= {end.request_id: end.status.finish_reason for end in ends}
        return {"emitted": emitted, "finished": finished}

    def set_drafts(self, drafts: dict[str, list[int]]) -> None:
        self.scheduler.update_draft_token_ids({(self.key_of[name], 0): tokens for name, tokens in drafts.items()})

    def abort(self, ids: list[str]) -> None:
        self.scheduler.finish_requests(
            [self.key_of[one] for one in ids if one in self.key_of], RequestStatus.FINISHED_ABORTED
        )

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        return self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def state(self) -> Record:
        scheduler = self.scheduler
        blocks = {name: scheduler.num_blocks_held(self.key_of[name]) for name in scheduler.running_ids()}
        return {
            "free_blocks": scheduler.make_stats().num_free_blocks,
            "running": scheduler.running_ids(),
            "waiting": scheduler.waiting_ids(),
            "blocks": {key: counts[0] if self.num_groups == 1 else list(counts) for key, counts in blocks.items()},
            "computed": {name: scheduler.num_computed_tokens(self.key_of[name])[0] for name in self._live()},
        }

    def _live(self) -> list[str]:
        return self.scheduler.running_ids() + self.scheduler.waiting_ids() + self.scheduler.swapped_ids()
