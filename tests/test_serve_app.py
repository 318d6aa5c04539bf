"""pagoda on Ray Serve: what its parts decide, without a cluster."""

import asyncio
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.process.child_process import children_of

pytest.importorskip("ray.serve", reason="pip install 'pagoda-llm[ray-serve]'", exc_type=ImportError)

from ray.serve._private.common import RequestMetadata, RequestProtocol
from ray.serve._private.replica import UserCallableWrapper
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, DeploymentID
from ray.serve.schema import ServeDeploySchema
from starlette.types import Receive, Scope, Send

from pagoda.serve_app import QUEUE_S, REPORT, REQUEST_S, QueueCostRouter, ScaleByQueue, app, configs_of

FAKE = {"distributed_executor_backend": "fake", "num_blocks": 64, "max_model_len": 512}


def test_settings_of_a_server_hold_and_those_of_its_port_are_refused() -> None:
    """Words on the command line of `serve run` are texts, values in its config file are not."""
    (config,) = configs_of({**FAKE, "num_blocks": "64", "max_num_seqs": 8, "api_keys": ["secret"]})
    assert (config.debug.num_blocks, config.scheduler.max_num_seqs) == (64, 8)
    assert config.server.api_keys == ("secret",)
    for name in ("port", "uds", "api_server_count", "ssl_certfile", "tls.ssl_certfile", "root_path"):
        with pytest.raises(ConfigError, match=f"{name} has no effect here"):
            configs_of({**FAKE, name: 1})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        configs_of({**FAKE, "max_num_sqs": 8})


def test_the_file_of_the_page_is_what_serve_and_pagoda_take() -> None:
    page = (Path(__file__).parents[1] / "docs" / "howto" / "ray-serve.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    (options,) = application.deployments
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    assert options.name == app(application.args)._bound_deployment.name
    policy = AutoscalingPolicy.model_validate(options.autoscaling_config["policy"])
    assert policy.get_policy()(**policy.policy_kwargs)(context(2.0, {"a": 12.0}))[0] == pytest.approx(6.0)


def test_callers_without_a_key_are_no_operators() -> None:
    """Serve may listen on any address."""
    assert not configs_of(FAKE)[0].server.is_local


def test_what_a_replica_may_take_follows_from_its_settings() -> None:
    deployment = app({**FAKE, "threads": 3, "max_num_seqs": 16, "data_parallel_size": 2})._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == 3
    assert deployment.max_ongoing_requests == 4 * 16 * 2
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 30  # the drain is over before


def test_a_replica_of_serve_answers_and_reports_and_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In what Serve has around it in an actor."""
    monkeypatch.setenv("RAY_ADDRESS", "not asked for")
    for name in ("serve_app.configure_logging", "serve_app.keep_buffers_apart", "server.app.keep_objects"):
        monkeypatch.setattr(f"pagoda.{name}", lambda *_: None)  # this process is not a replica's
    deployment = app(FAKE)._bound_deployment
    one = UserCallableWrapper(
        *(deployment.func_or_class, deployment.init_args, deployment.init_kwargs),
        deployment_id=DeploymentID("pagoda"),
        run_sync_methods_in_threadpool=False,
        run_user_code_in_separate_thread=True,
        local_testing_mode=False,
        deployment_config=deployment._deployment_config,
        actor_id="",
        ray_actor_options={},
    )

    async def passed(scope: Scope, receive: Receive, send: Send) -> None:
        """What the actor does with a request that a proxy has passed to it."""
        request = RequestMetadata("id", "id", call_method="__call__", _request_protocol=RequestProtocol.HTTP)
        async for messages in one.call_http_entrypoint(request, lambda _: None, scope, receive):
            for message in messages:
                await send(message)

    async def run() -> None:
        await one.initialize_callable()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(passed), base_url="http://replica") as http:
            body = {"prompt": "Hello", "max_tokens": 5}
            whole = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
            assert whole.json()["usage"]["completion_tokens"] == 5
            assert whole.json()["id"] == "cmpl-mine"
            assert "X-Request-Id" not in whole.headers  # the proxy adds it
            streamed = await http.post("/v1/completions", json={**body, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        await one.call_user_health_check()
        reports = [await one.call_user_record_routing_stats() for _ in range(2)]
        assert [report[REPORT] for report in reports] == [1, 2]
        assert set(await one.call_record_autoscaling_stats()) == {QUEUE_S}
        await one.call_destructor()
        assert not children_of(os.getpid())
        one.user_callable._state = SimpleNamespace(models=SimpleNamespace(died=WorkerDied("no engine")))
        with pytest.raises(WorkerDied, match="no engine"):
            await one.call_user_health_check()

    asyncio.run(run())


def replica(name: str, queue_s: float = 0.0, request_s: float = 0.1, report: int = 1) -> Any:
    stats = {QUEUE_S: queue_s, REQUEST_S: request_s, REPORT: report}
    return SimpleNamespace(replica_id=name, routing_stats=stats)


class Proxy:
    """What a proxy does: it asks for an order, and sends to the first replica."""

    def __init__(self) -> None:
        self._router = QueueCostRouter.__new__(QueueCostRouter)  # without a cluster
        self._router.initialize_state()

    def order(self, *replicas: Any) -> list[str]:
        return [one.replica_id for (one,) in asyncio.run(self._router.choose_replicas(list(replicas)))]

    def send(self, count: int, *replicas: Any) -> str:
        """Send so many requests; return where they went."""
        went = ""
        for _ in range(count):
            first = self.order(*replicas)[0]
            self._router.on_request_routed(None, first, None)  # type: ignore[arg-type]
            went += str(first)
        return went


def test_equal_replicas_take_turns() -> None:
    assert Proxy().send(6, replica("a"), replica("b"), replica("c")) == "abcabc"


def test_a_replica_with_a_long_prompt_gets_nothing_until_the_others_have_as_much_to_do() -> None:
    assert Proxy().send(6, replica("a", queue_s=100.0), replica("b"), replica("c")) == "bcbcbc"
    went = Proxy().send(20, replica("a", queue_s=100.5), replica("b", queue_s=100.0))
    assert went[:5] == "bbbbb"
    assert 7 <= went.count("a") <= 8


def test_what_was_sent_counts_until_the_next_report() -> None:
    proxy = Proxy()
    assert proxy.send(3, replica("a", 0.15), replica("b")) == "bba"
    assert proxy.order(replica("a", 0.15, report=2), replica("b", report=2)) == ["b", "a"]


def test_a_replica_that_has_not_reported_yet_counts_as_idle() -> None:
    new = SimpleNamespace(replica_id="new", routing_stats={})
    assert Proxy().order(replica("a", 1.0), new, replica("b", 2.0)) == ["new", "a", "b"]


def context(num_requests: float, queues: dict[str, float], replicas: int = 2) -> AutoscalingContext:
    return AutoscalingContext(
        deployment_id=DeploymentID("pagoda"),
        deployment_name="pagoda",
        app_name="default",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        total_num_requests=num_requests,
        total_queued_requests=0.0,
        aggregated_metrics={QUEUE_S: queues} if queues else {},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(min_replicas=1, max_replicas=8, target_ongoing_requests=10),
    )


@pytest.mark.parametrize(
    ("num_requests", "queues", "expected"),
    [
        (20.0, {"a": 0.0, "b": 0.0}, 2.0),
        (50.0, {"a": 0.0, "b": 0.0}, 5.0),
        (2.0, {"a": 12.0, "b": 0.0}, 6.0),  # few requests, but long prompts
        (2.0, {}, 0.2),  # nothing reported yet
    ],
)
def test_as_many_replicas_as_requests_or_their_work_need(
    num_requests: float, queues: dict[str, float], expected: float
) -> None:
    assert ScaleByQueue(target_queue_s=2.0)(context(num_requests, queues))[0] == pytest.approx(expected)
