"""Every fast path of the scheduler against its definition: the same traffic, planned both ways, step by step."""

import random

import numpy as np
import pytest

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.core import committing, planning
from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import Request, RequestKey, Sequence
from pagoda.core.running_batch import RunningBatch
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.core.state import SchedulerState
from tests.core.rig import FILL, Rig

FULL = KVGroupSpec()
WINDOW = KVGroupSpec(KVGroupKind.WINDOW, window=9)


def scheduler(seed: int) -> Scheduler:
    rng = random.Random(seed)
    asynchronous = rng.random() < 0.4
    config = SchedulerOptions(
        max_num_seqs=rng.choice([2, 5]),
        max_num_batched_tokens=rng.choice([8, 21, 64]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        prefill_beside_decodes=rng.choice([0, 0, 4]),
        prefix_hash_seed=1,
        pipeline_depth=2 if asynchronous else 1,
        async_scheduling=asynchronous,
    )
    groups = rng.choice([(FULL,), (FULL, WINDOW), (WINDOW,)])
    cache = CacheConfig(block_size=4, enable_prefix_caching=rng.random() < 0.7)
    return Scheduler(config, cache, groups, num_blocks=rng.choice([24, 60]), max_model_len=64, clock=VirtualClock())


def drive(one: Scheduler, seed: int) -> list[object]:
    """Random arrivals and drafts; everything that was decided and sent, in plain values."""
    rng = random.Random(seed)
    record: list[object] = []
    in_flight: list[SchedulerOutput] = []
    keys: dict[str, RequestKey] = {}
    for number in range(60):
        if rng.random() < 0.3 and number < 40:
            sampling = SamplingParams(
                n=rng.choice([1, 1, 1, 3 if one.config.max_num_seqs > 2 else 1]), max_tokens=rng.randint(1, 12)
            )
            prompt = np.array([rng.choice([5, 6])] * rng.randint(1, 18), np.int32)
            request = Request(str(number), prompt, sampling, handle=number, client_index=rng.randint(0, 1))
            keys[request.request_id] = request.key
            one.add_request(request)
        output = one.schedule()
        one.check()
        arrays = (output.rows, output.start, output.num_new, output.sample_rows, output.copies, output.released)
        record.append([array.tolist() for array in arrays])
        record.append(
            [(init.row, init.num_computed, [ids.tolist() for ids in init.block_ids]) for init in output.admitted]
        )
        record.append((output.preempted, one.make_stats().num_free_blocks))
        if not output.is_empty:
            in_flight.append(output)
        if in_flight and (output.is_empty or len(in_flight) == one.config.pipeline_depth):
            oldest = in_flight.pop(0)
            count, width = (
                len(oldest.sample_rows),
                1 + max((len(drafts) for drafts in oldest.drafts.values()), default=0),
            )
            sampled, num_sampled = np.full((count, width), -1, np.int32), np.ones(count, np.int32)
            for i, row in enumerate(oldest.sample_rows.tolist()):
                num_sampled[i] += rng.randint(0, len(oldest.drafts.get(row, ())))
                sampled[i, : num_sampled[i]] = rng.choice([5, 6])
            by_client = one.update_from_output(oldest, ModelRunnerOutput(oldest.step, sampled, num_sampled))
            one.check()
            for client, outputs in sorted(by_client.items()):
                columns = (outputs.handles, outputs.sequences, outputs.counts, outputs.token_ids)
                record.append((client, [column.tolist() for column in columns], outputs.ends))
            if rng.random() < 0.4:
                one.update_draft_token_ids({(keys[name], 0): [5] * rng.randint(1, 3) for name in one.running_ids()})
    return record


@pytest.mark.parametrize("seed", range(24))
def test_batches_equal_rows_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = drive(scheduler(seed), seed)
    monkeypatch.setattr(RunningBatch, "plan_steady_step", lambda self, plan: False)
    assert decisions(drive(scheduler(seed), seed)) == decisions(fast)
    monkeypatch.setattr(planning, "_place_rows", lambda *args: 0)
    assert decisions(drive(scheduler(seed), seed)) == decisions(fast)


def decisions(record: list[object]) -> list[object]:
    """Which block ids are taken is not promised: batches take them group by group, single rows row by row."""
    return [
        [entry[:2] for entry in item] if isinstance(item, list) and item and isinstance(item[0], tuple) else item
        for item in (without_copies(item) for item in record)
    ]


def without_copies(item: object) -> object:
    if isinstance(item, list) and len(item) == 6 and isinstance(item[0], list):
        return [*item[:4], len(item[4]), item[5]]
    return item


@pytest.mark.parametrize("seed", range(24))
def test_results_by_numpy_equal_the_row_by_row_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = drive(scheduler(seed), seed)
    monkeypatch.setattr(committing, "_is_plain", lambda state, output, result: False)
    assert drive(scheduler(seed), seed) == fast
    monkeypatch.setattr(committing, "_have_one_token", lambda state, rows, result: np.zeros(len(rows), np.bool_))
    assert drive(scheduler(seed), seed) == fast


@pytest.mark.parametrize("is_late", [True, False])
def test_one_unusual_row_leaves_the_others_to_numpy(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a result that is late for its row nor a draft makes a step append the tokens of others one by one."""
    rig = Rig(num_blocks=64, async_scheduling=is_late, pipeline_depth=1 + is_late)
    for name in "abcdefgh":
        rig.add(name, 3)
    appended: list[str] = []
    append = committing._append

    def watched(state: SchedulerState, sequence: Sequence, tokens: list[int]) -> int:
        appended.append(sequence.request.spec.request_id)
        return append(state, sequence, tokens)

    monkeypatch.setattr(committing, "_append", watched)
    step = rig.plan()
    if is_late:
        rig.abort("c")
    else:
        rig.deliver(step)
        rig.offer({"c": [FILL]})
        step = rig.plan()
        assert next(iter(step.output.drafts.values())).tolist() == [FILL]
    rig.deliver(step, None if is_late else {"c": [FILL, FILL]})
    assert sorted(step.emitted) == [name for name in "abcdefgh" if not is_late or name != "c"]
    assert appended == ([] if is_late else ["c"])
