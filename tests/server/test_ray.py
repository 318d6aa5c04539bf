"""Ranks on a Ray cluster, each of whose nodes has processes of its own: a node that dies costs a pause."""

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorMethod
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagoda import LLM, SamplingParams
from pagoda.base.errors import CapacityError, WorkerDied
from pagoda.executors import ray as ray_executor
from pagoda.executors.messages import RankStart
from pagoda.executors.ray import RayRanks
from pagoda.worker.devices.cpu import CpuDevice
from tests.engine.byte_llama import write_byte_llama
from tests.server.live import LiveServer, reserved_port, serving
from tests.server.ray_nodes import end_node, node
from tests.server.test_ranks import flags_of, load

GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
SIZES = {"max_model_len": 128, "kv_cache_memory": "8MiB"}
PROMPTS = ["a", "some words", "and many more of them"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that computes nothing; tests add nodes for ranks."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_byte_llama(tmp_path / "model")


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]


def test_stages_on_two_nodes_give_the_tokens_of_one_process_until_a_node_dies(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the key of the group ever being in what Ray sends, which it does not encrypt."""
    secrets: list[bytes] = []
    sent: list[object] = []
    start, call = RayRanks._start, ActorMethod._remote

    def start_noting(self: RayRanks, starts: Sequence[RankStart]) -> None:
        secrets.extend(one.curve.secret for one in starts if one.curve is not None)
        start(self, starts)

    def call_noting(self: ActorMethod, args: tuple[object, ...] = (), *rest: Any, **options: Any) -> Any:
        sent.append((args, rest, options))
        return call(self, args, *rest, **options)

    monkeypatch.setattr(RayRanks, "_start", start_noting)
    monkeypatch.setattr(ActorMethod, "_remote", call_noting)
    with LLM(str(model), **SIZES) as alone:
        expected = texts(alone)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    with LLM(str(model), pipeline_parallel_size=2, distributed_executor_backend="ray", **SIZES) as llm:
        assert texts(llm) == expected
        assert len(secrets) == 2
        assert len(sent) >= 4
        assert not any(secret in pickle.dumps(sent) for secret in secrets)
        cluster.remove_node(nodes[0], allow_graceful=False)
        with pytest.raises(WorkerDied, match="an actor of Ray, has ended"):
            for _ in iter(lambda: texts(llm), None):
                pass
    cluster.remove_node(nodes[1], allow_graceful=False)


@pytest.mark.slow
@pytest.mark.parametrize("caller", ["here", "task", "actor"])
def test_an_engine_takes_the_placement_group_of_the_task_or_actor_that_makes_it(
    cluster: Cluster, model: Path, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for another one. Quickly without a process for the caller: Ray's answer to it is replaced."""

    def two_ranks() -> list[str]:
        with LLM(str(model), tensor_parallel_size=2, distributed_executor_backend="ray", **SIZES) as llm:
            return texts(llm)

    class Caller:
        def two_ranks(self) -> list[str]:
            return two_ranks()

    with LLM(str(model), tensor_parallel_size=2, **SIZES) as alone:
        expected = texts(alone)
    node = cluster.add_node(num_cpus=3)
    ray.init(ignore_reinit_error=True)
    group = placement_group([{"CPU": 1}] * 3, strategy="STRICT_PACK")
    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    options = {"num_cpus": 1, "scheduling_strategy": strategy}
    if caller == "here":
        monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: group)
        assert two_ranks() == expected
    elif caller == "actor":
        assert ray.get(ray.remote(Caller).options(**options).remote().two_ranks.remote(), timeout=300) == expected
    else:
        assert ray.get(ray.remote(two_ranks).options(**options).remote(), timeout=300) == expected
    remove_placement_group(group)
    cluster.remove_node(node)


@pytest.mark.slow
def test_what_fits_is_measured_where_the_ranks_are(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of the engine may have too little memory for a rank."""
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda _: 0)
    node = cluster.add_node(num_cpus=1)
    with pytest.raises(CapacityError):
        LLM(str(model), max_model_len=128)
    with LLM(str(model), distributed_executor_backend="ray", max_model_len=128) as llm:
        assert texts(llm)
    cluster.remove_node(node)


def test_a_cluster_without_room_is_an_error_that_says_what_is_missing(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerDied, match=r"no room for 2 ranks for 1 s: they need \[\{'CPU': 2.0\}\]"):
        LLM(str(model), tensor_parallel_size=2, distributed_executor_backend="ray", **SIZES)


def test_a_cluster_that_has_ended_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which Ray itself would wait a quarter of an hour."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray is asked for a cluster that has ended"))
    with reserved_port() as port:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        with pytest.raises(WorkerDied, match=f"no Ray cluster answers at 127.0.0.1:{port}: .*refused"):
            ray_executor.connect()


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: is_over.wait())
    monkeypatch.setattr(ray_executor, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(WorkerDied, match="no Ray cluster answers at this machine: not within 0 s"):
        ray_executor.connect()
    is_over.set()


def test_processes_that_do_not_start_in_time_are_an_error_that_names_them_and_rays_limit(
    cluster: Cluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "START_TIMEOUT_S", 0.0)
    node = cluster.add_node(num_cpus=1)
    with pytest.raises(WorkerDied, match=r"processes of ranks \[0\] within 0 s.*RAY_worker_register_timeout_seconds"):
        LLM(str(model), distributed_executor_backend="ray", **SIZES)
    cluster.remove_node(node)


@pytest.mark.slow
def test_one_engine_after_the_other_on_the_cluster_that_ray_starts_here(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a thread of its own, whose end must not end the cluster: Ray would end this process."""
    program = """
import sys, time
from pagoda import LLM, SamplingParams
for _ in range(2):
    with LLM(sys.argv[1], distributed_executor_backend="ray", max_model_len=128, kv_cache_memory="8MiB") as llm:
        print(llm.generate("a", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids)
"""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len({line for line in done.stdout.splitlines() if line.startswith("[")}) == 1


@pytest.mark.slow
def test_a_server_goes_on_when_a_node_dies_and_another_has_room(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    first = cluster.add_node(num_cpus=2)

    def remove_first(_: LiveServer) -> None:
        cluster.remove_node(first, allow_graceful=False)

    flags = (*flags_of(model), "--distributed-executor-backend", "ray")
    with serving(tmp_path, *flags, stepped=True) as server:
        undisturbed = asyncio.run(load(server, []))
        assert all(status == 200 and all(texts) for status, texts in undisturbed)
        second = cluster.add_node(num_cpus=2)
        assert asyncio.run(load(server, [remove_first])) == undisturbed
        assert server.wait_idle()["engine_restarts"] == 1
    cluster.remove_node(second)


@pytest.mark.slow
def test_a_server_goes_on_when_the_head_dies_and_another_one_is_started_at_its_address(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are on another node, whose processes Ray ends when they have missed the head for some seconds."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    quick = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with reserved_port() as port, contextlib.ExitStack() as nodes:

        def start_cluster() -> "list[subprocess.Popen[bytes]]":
            head = ("--head", "--port", str(port), "--num-cpus", "0", "--include-dashboard", "false")
            other = ("--address", f"127.0.0.1:{port}", "--num-cpus", "2")
            return [nodes.enter_context(node(tmp_path, *flags, **quick)) for flags in (head, other)]

        def replace_head(_: LiveServer) -> None:
            end_node(head)
            other.wait(60)
            start_cluster()

        head, other = start_cluster()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        flags = (*flags_of(model), "--distributed-executor-backend", "ray", "--threads", "1")
        with serving(tmp_path, *flags, stepped=True, env=quick) as server:
            undisturbed = asyncio.run(load(server, []))
            assert all(status == 200 and all(texts) for status, texts in undisturbed)
            assert asyncio.run(load(server, [replace_head])) == undisturbed
            assert server.wait_idle()["engine_restarts"] >= 1
