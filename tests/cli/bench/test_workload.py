import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.cli.bench.startup import time_start
from pagoda.cli.bench.throughput import with_other_tokens
from pagoda.cli.bench.workload import WorkItem, percentile, random_workload, read_workload

MAKER = Path(__file__).parents[3] / "benchmarks" / "workload.py"
# Published figures name these workloads: a change of a byte makes them figures of something else.
DIGESTS = {
    "offline64": "014e49bd4240eab9f9fc35065985aab7ea212a78339983a19c77da28db6da0a3",
    "offline256": "4205243ebbd887a5e7a9fae135b6b42b1543077e83336b9ef383fccc8ac174e3",
    "offline1024": "2fa2a51a46e8577a9f6ae02c2f7b6d6e36f20dec3835cab81e8e91f78dae1480",
    "single": "2c162a42123705db879d474e46c9b2c79a088d12de0bba18974f7a8df8fb8021",
    "prefix64": "395740d16a91f809be5f43f7e8dc8e433d80d95a8abaaeb52a35898a293c0fc1",
    "longmix": "b90aede03d1151a981e72b640e176aadc035d920301892268de253532b5bcf5a",
    "chat": "b898669c4453d1a3c33eda9d22b6553a7e183fcd98c788e91579aadda3aae0f2",
    "batch1": "0f1a954ff240fd4ea299df375896c0e044b8a43acc8fdfd8d8d3c0d36d9f90d5",
    "batch8": "f311cf4bf96da1ce4200a7df1da9d3899cd53124a50c8d73bda221f64fc11a6b",
    "batch32": "e5f4b09af62c457cf9e4192cf11220d3cf05a3fc7ca423252e5ce2d134c952b2",
    "decode64": "95d6f15f8f226e6027a085a283141597dfc4a7f003b084cf360599dff7d5ff4a",
    "decode1": "0dda4256c5ef4afdb54cfbc2d3d70e075132592c63cd573fba51c34f400d19ea",
    "decode8": "2aeeb01df3c9fada7d0eea9c811889a141bc5c624d29a3445f9ea249ea72a46e",
    "decode256": "bf97760bde28a76ecb1e87d00586e0ddb0bdb9861a0dbb963e6b9f8ec719e502",
    "nano256": "754e25bcf3111c2e87aeecbc32f044f94975140f1ae85e6a3772fa66f2c67639",
    "prefill8k": "7215a9cdc764fbcf9c95b527212ff19fe63e21b1017bff1f2ccda4ded3a8d020",
    "prefill64": "0dd42978b3cab834c89f4d57bf444424ca64e2775ba88320067b9aff8899ee5c",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_workloads_never_change(name: str) -> None:
    made = subprocess.run([sys.executable, str(MAKER), name], capture_output=True, check=True)
    assert hashlib.sha256(made.stdout).hexdigest() == DIGESTS[name]


def test_another_seed_is_another_workload() -> None:
    first, second = (
        subprocess.run([sys.executable, str(MAKER), "single", "--seed", seed], capture_output=True, check=True).stdout
        for seed in ("0", "1")
    )
    assert first != second


def test_reads_what_the_maker_writes(tmp_path: Path) -> None:
    path = tmp_path / "longmix.json"
    with path.open("wb") as file:
        subprocess.run([sys.executable, str(MAKER), "longmix"], stdout=file, check=True)
    items = read_workload(path)
    assert [len(item.prompt_token_ids) for item in items] == [64] * 32 + [4096] * 4
    assert [item.arrival_s for item in items[-4:]] == [0.5, 1.5, 2.5, 3.5]


def test_arrival_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('[{"prompt_token_ids": [1, 2], "max_tokens": 3}]')
    assert read_workload(path) == [WorkItem([1, 2], 3, 0.0)]


@pytest.mark.parametrize("content", ["", "{", "3", "[3]", '[{"max_tokens": 3}]', '{"a": 1}'])
def test_no_workload(tmp_path: Path, content: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"w\.json is not a JSON list of objects with prompt_token_ids"):
        read_workload(path)


def test_empty_workload(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="has no requests"):
        read_workload(tmp_path / "w.json")


def test_requests_to_warm_up_with_share_what_the_others_share() -> None:
    items = [WorkItem([10, 11, 12, 13], 3), WorkItem([10, 11, 40], 5, 0.5)]
    others = with_other_tokens(items)
    assert others == [WorkItem([11, 10, 13, 12], 3), WorkItem([11, 10, 41], 5, 0.5)]


def test_random_workload_is_repeatable() -> None:
    items = random_workload(3, 5, 7, vocab=100, seed=1)
    assert items == random_workload(3, 5, 7, vocab=100, seed=1)
    assert items != random_workload(3, 5, 7, vocab=100, seed=2)
    assert [len(item.prompt_token_ids) for item in items] == [5, 5, 5]
    assert all(10 <= token < 100 for item in items for token in item.prompt_token_ids)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([1.0], 99, 1.0), (list(range(1, 101)), 90, 90), (list(range(1, 101)), 99, 99)],
)
def test_percentile_is_a_value_that_was_seen(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_start_times_output_and_end() -> None:
    code = "import time; print('x', flush=True); time.sleep(0.3)"
    longest_s = 0.0
    for _ in range(10):  # output that is read late is too near to the end
        start = time_start([sys.executable, "-c", code])
        assert 0 < start.first_output_s < start.end_s
        longest_s = max(longest_s, start.end_s - start.first_output_s)
        if longest_s >= 0.29:
            break
    assert longest_s >= 0.29


def test_a_failed_start_shows_the_last_output() -> None:
    with pytest.raises(ConfigError, match="exit code 3: it hurts"):
        time_start([sys.executable, "-c", "import sys; print('it hurts', file=sys.stderr); sys.exit(3)"])


@pytest.mark.parametrize("num_blocks", [256, 512])
def test_a_full_pool_wastes_less_than_four_percent_on_chats(num_blocks: int, tmp_path: Path) -> None:
    workload = tmp_path / "chat.json"
    workload.write_bytes(subprocess.run([sys.executable, MAKER, "chat"], capture_output=True, check=True).stdout)
    script = MAKER.parent / "kv_waste.py"
    command = [sys.executable, script, workload, "--num-blocks", str(num_blocks)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    unfilled = re.search(r"([\d.]+)% of it unfilled", said)
    assert unfilled is not None, said
    assert 0 < float(unfilled[1]) < 4
