import numpy as np
import pytest

from pagoda.base.errors import WorkerDied
from pagoda.core.scheduler_output import RowFork
from pagoda.executors.fake import FakeExecutor, fake_token
from tests.worker.hand_made import i32, row_init, step


def continued(prompt: list[int], count: int, seed: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(np.array(tokens), seed, 1000))
    return tokens[len(prompt) :]


def started() -> FakeExecutor:
    executor = FakeExecutor(4, 64, 4, vocab_size=1000)
    executor.set_pools(64, 0)
    return executor


def test_tokens_depend_on_own_tokens_and_seed_alone() -> None:
    executor = started()
    admitted = (row_init(0, [1, 2, 3], [1], seed=7), row_init(1, [1, 2, 3], [2], seed=8))
    out = executor.submit(step(1, [(0, 0, 3), (1, 0, 3)], admitted=admitted)).result()
    rows = [[int(token)] for token in out.sampled[:, 0]]
    for k in range(3):
        out = executor.submit(step(2 + k, [(1, 3 + k, 1), (0, 3 + k, 1)])).result()
        rows[1].append(int(out.sampled[0, 0]))
        rows[0].append(int(out.sampled[1, 0]))
    assert rows == [continued([1, 2, 3], 4, 7), continued([1, 2, 3], 4, 8)]
    assert rows[0] != rows[1]
    assert continued([1, 3, 2], 4, 7) != rows[0]


def test_forks_and_drafts() -> None:
    executor = started()
    admitted = (row_init(0, [1, 2, 3], [1], seed=7),)
    forks = (RowFork(0, 2, 1, 8),)
    out = executor.submit(step(1, [(0, 0, 3)], [(0, 0), (2, 0)], admitted=admitted, forks=forks)).result()
    assert out.sampled[:, 0].tolist() == [continued([1, 2, 3], 1, 7)[0], continued([1, 2, 3], 1, 8)[0]]
    truth = continued([1, 2, 3], 5, 7)
    drafts = np.array([truth[1], truth[2] + 1], np.int32)
    out = executor.submit(step(2, [(0, 3, 3)], drafts={0: drafts})).result()
    assert out.num_sampled.tolist() == [2]
    assert out.sampled[0].tolist() == [truth[1], truth[2], -1]
    out = executor.submit(step(3, [(0, 5, 1)])).result()
    assert out.sampled[0, 0] == truth[3]


def test_it_runs_between_start_and_shutdown() -> None:
    executor = FakeExecutor(4, 64)
    with pytest.raises(WorkerDied):
        executor.submit(step(1, [])).result()
    assert not executor.start()
    executor.set_pools(64, 0)
    assert executor.submit(step(1, [])).result().step == 1
    executor.shutdown()
    with pytest.raises(WorkerDied):
        executor.submit(step(2, [], released=i32(1))).result()
