"""pagoda on Ray Serve, on two nodes, each with processes of its own: up and down under load, and a node that dies.

No request is lost: each gets its tokens, if need be, when the client sends it again.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="pip install 'pagoda-llm[ray-serve]'", exc_type=ImportError)

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from tests.server.live import reserved_port
from tests.server.ray_nodes import command_of, node

PYTHON = Path(f"{sys.prefix}-clients") / "bin" / "python"
SCRIPT = Path(__file__).parent / "client_scripts" / "of_many_streams.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}; install it with: make .venv-clients/.installed"),
]

START_S = 600.0


def config(port: int) -> dict[str, Any]:
    """The file that docs/howto/ray-serve.md shows, with a small engine, few replicas and short delays."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "ray-serve.md"
    shown: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)[0])
    (application,) = shown["applications"]
    (options,) = application["deployments"]
    options["ray_actor_options"] = {"num_cpus": 1}
    scaling = options["autoscaling_config"]
    scaling |= {"max_replicas": 2, "target_ongoing_requests": 3, "look_back_period_s": 2}
    scaling |= {"upscale_delay_s": 0.5, "downscale_delay_s": 2}
    application["args"] = {"distributed_executor_backend": "fake", "num_blocks": 512, "max_model_len": 2048}
    return shown | {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with room for a replica each, the first of which has the proxy, too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    cluster.add_node(num_cpus=1)
    ray.init(namespace="serve", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[str]:
    """The address of what `serve run` has deployed from a file, which it takes down at the end."""
    with reserved_port() as port:
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config(port)))
        with (folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(command_of("serve", "run", str(file)), stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: num_running() == 1, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)
            serve.shutdown()


def num_running() -> int:
    deployments = getattr(serve.status().applications.get("pagoda"), "deployments", {})
    return deployments["pagoda"].replica_states.get("RUNNING", 0) if "pagoda" in deployments else 0


def wait_until(is_so: Callable[[], bool], process: "subprocess.Popen[bytes] | None" = None) -> None:
    end = time.monotonic() + START_S
    while not is_so():
        assert process is None or process.poll() is None, "serve run has ended"
        assert time.monotonic() < end, "in vain"
        time.sleep(0.2)


class Load:
    """Streams in another process, until `end`."""

    def __init__(self, url: str, num_threads: int, num_retries: int) -> None:
        command = [str(PYTHON), str(SCRIPT), url, str(num_threads), "200", str(num_retries)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_begun(self) -> None:
        """Until each stream has a token."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"

    def end(self) -> dict[str, Any]:
        out, _ = self._process.communicate(timeout=START_S)
        assert self._process.returncode == 0
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert all(found["done"]), "a thread has no text at all"
        assert all(len(texts) == 1 for texts in found["texts"].values()), "a prompt got several texts"
        return found


def test_no_request_is_lost_while_replicas_come_and_go_and_when_a_node_dies(cluster: Cluster, tmp_path: Path) -> None:
    with deployed(tmp_path) as url:
        load = Load(url, 12, num_retries=0)
        wait_until(lambda: num_running() == 2)
        time.sleep(3)  # both take requests
        up = load.end()
        assert up["errors"] == []
        load = Load(url, 2, num_retries=0)  # both are busy when one of them is chosen to end
        wait_until(lambda: num_running() == 1)
        down = load.end()
        assert down["errors"] == []
        load = Load(url, 12, num_retries=2)
        wait_until(lambda: num_running() == 2)
        more = Load(url, 12, num_retries=2)  # of which the new replica gets some
        more.wait_begun()
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        wait_until(lambda: num_running() == 1)
        time.sleep(3)
        ends = [load.end(), more.end()]
        print("errors after a node was killed:", [end["errors"] for end in ends])
        # How many streams it had is the choice of Ray's router: on a busy machine the new replica may have had none.
        assert sum(len(end["errors"]) for end in ends) <= 24, "one for each stream that it had"
        assert all(end["texts"] == up["texts"] for end in ends)


def test_serve_deploy_changes_what_runs_under_streams_without_a_lost_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a shell: `ray start`, `serve deploy`, with more replicas, with other settings, `serve shutdown`."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with contextlib.ExitStack() as stack:
        port, head, dashboard = (stack.enter_context(reserved_port()) for _ in range(3))
        ports = ("--port", str(head), "--dashboard-port", str(dashboard))
        stack.enter_context(node(tmp_path, "--head", *ports, "--num-cpus", "2"))
        url, file = f"http://127.0.0.1:{port}", tmp_path / "serve.yaml"

        def run(*words: str) -> dict[str, Any]:
            command = command_of("serve", *words, "-a", f"http://127.0.0.1:{dashboard}")
            done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
            assert done.returncode == 0, done.stderr
            return yaml.safe_load(done.stdout) if words == ("status",) else {}

        def deploy(num_replicas: int, **settings: int) -> None:
            wanted = config(port)
            (application,) = wanted["applications"]
            (options,) = application["deployments"]
            del options["autoscaling_config"]
            options["num_replicas"] = num_replicas
            application["args"] |= settings
            file.write_text(yaml.safe_dump(wanted))
            run("deploy", str(file))
            wait_until(lambda: is_deployed(run("status"), num_replicas))

        deploy(1)
        for num_replicas, settings in ((2, {}), (1, {"max_num_seqs": 32})):
            load = Load(url, 4, num_retries=0)
            load.wait_begun()
            deploy(num_replicas, **settings)
            time.sleep(3)  # the new ones take requests
            assert load.end()["errors"] == []
        run("shutdown", "--yes")
        wait_until(lambda: not run("status")["applications"])


def is_deployed(status: dict[str, Any], num_replicas: int) -> bool:
    application = status["applications"].get("pagoda", {})
    replicas = application.get("deployments", {}).get("pagoda", {}).get("replica_states", {})
    return application.get("status") == "RUNNING" and replicas == {"RUNNING": num_replicas}
