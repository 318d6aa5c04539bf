"""num_common_prefix_blocks: full blocks that all running rows share, right after every change of their tables."""

import numpy as np
import pytest

from pagoda.core.kv import KVGroupKind, KVGroupSpec
from tests.core.exact_worker import ExactWorker
from tests.core.rig import Rig


def common(rig: Rig) -> tuple[int, ...]:
    return rig.step().output.num_common_prefix_blocks


def test_a_copied_tail_is_not_common() -> None:
    """6 tokens in blocks of 4: the fork shares a full block and a half-filled one, and copies the second."""
    rig = Rig()
    rig.add("a", 6, n=2)
    assert [common(rig) for _ in range(5)] == [(1,)] * 5


def test_blocks_freed_by_a_window_are_not_common() -> None:
    rig = Rig(groups=(KVGroupSpec(KVGroupKind.WINDOW, window=4),))
    rig.add("a", 8, n=2, max_tokens=12)
    assert common(rig) == (2,)
    assert common(rig) == (0,)


def test_a_row_alone_shares_nothing() -> None:
    rig = Rig()
    rig.add("a", 8)
    rig.add("b", 8, max_tokens=2)
    assert [common(rig) for _ in range(3)] == [(0,)] * 3


@pytest.mark.parametrize("seed", range(8))
def test_the_common_prefix_is_what_a_workers_tables_show(seed: int) -> None:
    """Random forks, prefix hits and ends, against the block tables that a worker knows."""
    rng = np.random.default_rng(seed)
    groups = (KVGroupSpec(), KVGroupSpec(KVGroupKind.WINDOW, window=6, layers=(1,)))
    rig = Rig(num_blocks=60, groups=groups, enable_prefix_caching=True)
    worker = ExactWorker(groups, 4, 60, 0, 7)
    computed: dict[int, int] = {}
    seen: set[tuple[int, ...]] = set()
    for number in range(40):
        if number % 8 == 0 or (number < 30 and rng.random() < 0.2):
            rig.add(f"r{number}", [5] * int(rng.integers(1, 15)), max_tokens=int(rng.integers(1, 9)), n=2)
        step = rig.plan()
        output = step.output
        worker.run(output)
        computed.update({init.row: init.num_computed for init in output.admitted})
        computed.update(zip(output.rows.tolist(), (output.start + output.num_new).tolist(), strict=True))
        computed.update({fork.dst: computed[fork.src] for fork in output.forks})
        rows = sorted(worker.rows)
        expected = []
        for group in range(len(groups)):
            # Workers keep entries that a window has left; the scheduler's tables say which of them are free again.
            tables = [rig.scheduler._state.kv.tables_of(row)[group].tolist() for row in rows]
            full = min((computed[row] // 4 for row in rows), default=0) if len(rows) > 1 else 0
            count = 0
            while count < full and tables[0][count] and len({table[count] for table in tables}) == 1:
                count += 1
            expected.append(count)
        assert output.num_common_prefix_blocks == tuple(expected), f"step {output.step}"
        seen.add(tuple(expected))
        rig.deliver(step)
    assert len(seen) > 1
