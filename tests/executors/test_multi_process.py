"""Ranks in processes of their own: the same steps, and whatever goes wrong with one of them ends all."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zmq

from pagoda.assembly import identity
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.identity import kernels_of
from pagoda.base.config import EngineConfig, ModelConfig, ParallelConfig
from pagoda.base.errors import ConfigError, RequestError, WorkerDied
from pagoda.base.server_config import ServerConfig
from pagoda.core.request import LoraRef
from pagoda.engine.wire import make_encoder
from pagoda.executors.fake import FakeExecutor
from pagoda.executors.messages import RankStart
from pagoda.executors.multi_process import LocalRanks, MultiProcessExecutor, RankDied
from pagoda.kernels.native import library
from pagoda.process.child_process import children_of
from pagoda.worker.calls import Capacity, StepSize
from tests.cached_models import cached_model
from tests.executors.fake_rank import BLOCK_SIZE, MAX_LEN, MAX_ROWS, VOCAB_SIZE
from tests.worker.hand_made import i32, row_init, step


def config_of(num_ranks: int = 2, model: str = "fine") -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=num_ranks, distributed_executor_backend="mp")
    return EngineConfig(model=ModelConfig(model=model), parallel=parallel)


def test_keys_of_a_servers_clients_are_handed_to_no_rank() -> None:
    """Whose machines others may read."""
    config = replace(config_of(), server=ServerConfig(api_keys=("secret-key",), admin_api_key="secret-admin"))
    handed: list[bytes] = []

    def start_ranks(starts: Sequence[RankStart]) -> LocalRanks:
        handed.extend(map(make_encoder().encode, starts))
        raise OSError("enough")

    with pytest.raises(WorkerDied, match="enough"):
        MultiProcessExecutor(config, start_ranks).start()
    assert len(handed) == 2
    assert b"secret" not in b"".join(handed)


class Deaths:
    def __init__(self) -> None:
        self.errors: list[RankDied] = []
        self.came = threading.Event()

    def __call__(self, error: RankDied) -> None:
        self.errors.append(error)
        self.came.set()


@contextmanager
def executor_of(config: EngineConfig, **options: object) -> Iterator[MultiProcessExecutor]:
    executor = MultiProcessExecutor(config, partial(LocalRanks, module="tests.executors.fake_rank"), **options)  # type: ignore[arg-type]
    before = (set(children_of(os.getpid())), set(os.listdir("/proc/self/fd")), threading.active_count())
    try:
        yield executor
    finally:
        executor.shutdown()
    assert set(children_of(os.getpid())) == before[0]
    assert threading.active_count() == before[2]
    end_s = time.monotonic() + 10  # ZeroMQ closes sockets in a thread of its own
    while set(os.listdir("/proc/self/fd")) - before[1] and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not set(os.listdir("/proc/self/fd")) - before[1]


@contextmanager
def running(config: EngineConfig, **options: object) -> Iterator[MultiProcessExecutor]:
    with executor_of(config, **options) as executor:
        executor.start()
        executor.set_pools(64, 0)
        yield executor


def ranks_of(executor: MultiProcessExecutor) -> list[int]:
    assert executor._processes is not None
    assert isinstance(executor._processes.ranks, LocalRanks)
    return [process.pid for process in executor._processes.ranks._processes]


def a_request(name: str = "fine", row: int = 0, seed: int = 7) -> Sequence[object]:
    return (replace(row_init(row, [1, 2, 3], [1 + row], seed=seed), request_id=name),)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_are_those_of_one_process(num_ranks: int) -> None:
    alone = FakeExecutor(MAX_ROWS, MAX_LEN, BLOCK_SIZE, vocab_size=VOCAB_SIZE)
    alone.start()
    alone.set_pools(64, 0)
    steps = [step(1, [(0, 0, 3)], admitted=a_request()), *(step(2 + k, [(0, 3 + k, 1)]) for k in range(20))]
    with running(config_of(num_ranks)) as executor:
        futures = [executor.submit(output) for output in steps]  # as many in flight as one likes
        for output, future in zip(steps, futures, strict=True):
            expected, result = alone.submit(output).result(60), future.result(60)
            assert result.step == output.step
            assert result.sampled.tolist() == expected.sampled.tolist()
            assert result.num_sampled.tolist() == expected.num_sampled.tolist()


def test_every_rank_measures() -> None:
    with executor_of(config_of(3)) as executor:
        sizes = (StepSize(8, 64), StepSize(4, 64))
        assert list(executor.start(sizes)) == [Capacity("host", 1000 + rank, (10,), 2) for rank in range(3)]


def test_calls_run_between_steps_and_raise_what_all_ranks_raise() -> None:
    with running(config_of()) as executor:
        first = executor.submit(step(1, [(0, 0, 3)], admitted=a_request()))
        loaded, refused = (executor.call("load_adapter", LoraRef(name)) for name in ("good", "bad"))
        second = executor.submit(step(2, [(0, 3, 1)]))
        assert loaded.result(60) is None
        with pytest.raises(RequestError, match="no such adapter") as caught:
            refused.result(60)
        assert caught.value.param == "lora_request"
        assert (first.result(60).step, second.result(60).step) == (1, 2)


def test_an_adapter_that_only_one_rank_refuses_fails_only_the_call() -> None:
    with running(config_of()) as executor:
        with pytest.raises(RequestError, match="no such adapter"):
            executor.call("load_adapter", LoraRef("bad-1")).result(60)
        assert executor.submit(step(1, [(0, 0, 3)], admitted=a_request())).result(60).step == 1


def test_a_step_that_fails_in_all_stages_ends_them() -> None:
    """One stage may have sent to the next what that has not received."""
    parallel = ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp")
    with running(replace(config_of(), parallel=parallel)) as executor, pytest.raises(WorkerDied, match="failed"):
        executor.submit(step(1, [(0, 0, 3)], admitted=a_request("raise"))).result(60)


def test_an_error_of_all_ranks_fails_only_the_step() -> None:
    with running(config_of()) as executor:
        with pytest.raises(RuntimeError, match="ValueError: this step cannot be computed"):
            executor.submit(step(1, [(0, 0, 3)], admitted=a_request("raise"))).result(60)
        assert executor.submit(step(2, [(0, 0, 3)], admitted=a_request())).result(60).step == 2


FAULTS = {
    "kill-1": (r"rank 1 was killed by signal 9 \(SIGKILL\)", -9),
    "exit-0": ("rank 0 ended with exit code 3", 3),
    "raise-1": ("rank 1 failed: ValueError: this step", None),
    "raise-0": ("rank 0 failed: ValueError: this step", None),
    "disagree-1": ("disagree about the lengths", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_goes_wrong_on_one_rank_ends_all(name: str) -> None:
    reason, code = FAULTS[name]
    deaths = Deaths()
    with running(config_of(), on_death=deaths) as executor:
        ranks = ranks_of(executor)
        futures = [executor.submit(step(1, [(0, 0, 3)], admitted=a_request(name)))]
        futures.append(executor.submit(step(2, [(0, 3, 1)])))
        futures.append(executor.call("unload_adapter", LoraRef("some")))
        for future in futures[:: -1 if "disagree" in name else 1]:
            with pytest.raises(WorkerDied, match=reason):
                future.result(60)
        assert deaths.came.wait(30)
        assert [error.code for error in deaths.errors] == [code]
        assert not set(ranks) & set(children_of(os.getpid())), "the others have been ended"
        with pytest.raises(WorkerDied, match=reason):
            executor.submit(step(3, [])).result(60)


def test_a_rank_that_hangs_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(config_of(), step_timeout_s=1.0) as executor:
        assert executor.submit(step(1, [(0, 0, 3)], admitted=a_request())).result(60).step == 1
        begun_s = time.monotonic()
        with pytest.raises(WorkerDied, match=r"no progress with a step for 1 s: ranks \[1\] hang"):
            executor.submit(step(2, [(1, 0, 3)], admitted=a_request("stop-1", 1))).result(60)
        assert time.monotonic() - begun_s >= 1.0


@pytest.mark.parametrize(("model", "what"), [("slow-1", "the weights"), ("stuck-1", "the KV pools")])
def test_a_rank_that_hangs_before_the_first_step_ends_the_start(model: str, what: str) -> None:
    def start(executor: MultiProcessExecutor) -> None:
        executor.start()
        executor.set_pools(64, 0)

    why = rf"no progress with {what} for 1 s: ranks \[1\] hang while loading"
    with (
        executor_of(config_of(2, model), load_timeout_s=1.0, step_timeout_s=0.1) as executor,
        pytest.raises(WorkerDied, match=why),
    ):
        start(executor)


def test_a_rank_that_hangs_in_a_call_ends_all_later_than_in_a_step() -> None:
    """A call may read files. Steps that wait for it do not count as hanging."""
    deaths = Deaths()
    with running(config_of(), load_timeout_s=2.0, step_timeout_s=0.1, on_death=deaths) as executor:
        begun_s = time.monotonic()
        call = executor.call("load_adapter", LoraRef("stop-1"))
        step_behind = executor.submit(step(1, [(0, 0, 3)], admitted=a_request()))
        for future in (call, step_behind):
            with pytest.raises(WorkerDied, match=r"no progress with load_adapter for 2 s: ranks \[1\] hang"):
                future.result(60)
        assert time.monotonic() - begun_s >= 2.0
        assert deaths.came.wait(30)


def test_a_step_that_hangs_while_an_adapter_is_read_has_the_timeout_of_a_step() -> None:
    with running(config_of(), step_timeout_s=1.0, load_timeout_s=300.0) as executor:
        executor.call("load_adapter", LoraRef("slow"))
        assert executor.submit(step(1, [(0, 0, 3)], admitted=a_request())).result(60).step == 1
        with pytest.raises(WorkerDied, match=r"no progress with a step for 1 s: ranks \[1\] hang"):
            executor.submit(step(2, [(1, 0, 3)], admitted=a_request("stop-1", 1))).result(60)


def test_idle_ranks_do_not_hang_and_one_that_dies_is_noticed() -> None:
    deaths = Deaths()
    with running(config_of(), step_timeout_s=0.2, on_death=deaths) as executor:
        assert not deaths.came.wait(1.0)
        os.kill(ranks_of(executor)[1], 9)
        assert deaths.came.wait(30)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            executor.submit(step(1, [])).result(60)


@pytest.mark.parametrize("model", ["bad-0", "bad-1"])
def test_a_rank_that_cannot_load_ends_the_start_though_others_still_load(model: str) -> None:
    with executor_of(config_of(3, model)) as executor, pytest.raises(ConfigError, match="cannot read its weights"):
        executor.start()


@pytest.mark.parametrize(
    ("model", "why"),
    [("other-1", "rank 1 has other model files"), ("old-1", r"rank 1 computes with other kernels \(old\) than rank 0")],
)
def test_ranks_that_would_not_compute_the_same_are_refused(model: str, why: str) -> None:
    with executor_of(config_of(2, model)) as executor, pytest.raises(ConfigError, match=why):
        executor.start()


def test_a_rank_names_the_variant_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines with other CPUs, both the native kernels and torch's round otherwise."""
    native, torch = (
        resolve_engine(
            EngineConfig(parallel=ParallelConfig(device="cpu", kernels=kernels)), cached_model("smollm2-135m")
        )
        for kernels in ("native", "torch")
    )
    assert kernels_of(native) == f"native for {library.load().isa}"
    monkeypatch.setattr(identity, "cpu_flags", lambda: {"sse4_2"})
    assert kernels_of(torch) == "torch on portable"


def test_a_rank_that_dies_while_it_loads_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with executor_of(config_of(2, "slow-1")) as executor:
        others = set(children_of(os.getpid()))  # servers of other tests, say

        def kill() -> None:
            while len(ranks := set(children_of(os.getpid())) - others) < 2:
                time.sleep(0.01)
            os.kill(max(ranks), 9)

        threading.Thread(target=kill).start()
        with pytest.raises(WorkerDied, match=r"rank 1 was killed by signal 9 .* while loading; .*memory ran out"):
            executor.start()
        assert not list(tmp_path.iterdir())


def test_ranks_that_the_system_does_not_start_are_said_to_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(starts: Sequence[RankStart]) -> LocalRanks:
        raise OSError(11, "Resource temporarily unavailable")

    executor = MultiProcessExecutor(config_of(), refuse)
    with pytest.raises(WorkerDied, match="could not be started: .*temporarily unavailable"):
        executor.start()
    executor.shutdown()


def test_over_tcp_only_holders_of_the_secret_are_admitted() -> None:
    seen: list[RankStart] = []

    def start(starts: Sequence[RankStart]) -> LocalRanks:
        seen.extend(starts)
        return LocalRanks(starts, "tests.executors.fake_rank")

    executor = MultiProcessExecutor(config_of(), start, host="127.0.0.1")
    context = zmq.Context()
    try:
        executor.start()
        assert {one.messages.partition(":")[0] for one in seen} == {"tcp"}
        curve = seen[0].curve
        assert curve is not None
        for keys in (None, zmq.curve_keypair()):
            stranger = context.socket(zmq.PULL)
            stranger.setsockopt(zmq.LINGER, 0)
            if keys is not None:
                stranger.curve_serverkey = curve.executor
                stranger.curve_publickey, stranger.curve_secretkey = keys
            stranger.connect(seen[0].messages)
        executor.set_pools(64, 0)
        for number in range(1, 9):  # a stranger who was admitted would get every other message
            assert executor.submit(step(number, [], released=i32(1))).result(60).step == number
    finally:
        executor.shutdown()
        context.destroy(0)


PARENT = """
import os, sys, threading, time
from functools import partial
from pagoda.process.child_process import children_of
from pagoda.executors.multi_process import LocalRanks, MultiProcessExecutor
from tests.executors.test_multi_process import config_of
executor = MultiProcessExecutor(config_of(2, sys.argv[1]), partial(LocalRanks, module="tests.executors.fake_rank"))
loading = threading.Thread(target=executor.start, daemon=True)
loading.start()
if sys.argv[1] == "fine":
    loading.join()
    os.kill(max(children_of(os.getpid())), 19)
while len(children_of(os.getpid())) < 2:
    time.sleep(0.01)
print(*children_of(os.getpid()), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("model", ["fine", "slow-1"])
def test_the_ranks_end_with_their_parent(model: str, tmp_path: Path) -> None:
    """Also one that is stopped, and those that still load; and the folder of their sockets goes."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", PARENT, model], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 2
        parent.kill()
        parent.wait()
        end_s = time.monotonic() + 30
        while any(_runs(pid) for pid in ranks):
            assert time.monotonic() < end_s, "ranks outlive their parent"
            time.sleep(0.02)
    assert not list(tmp_path.iterdir())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
