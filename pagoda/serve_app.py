"""pagoda on Ray Serve: `serve run pagoda.serve_app:app model=smollm2-135m` (docs/howto/ray-serve.md).

A replica of Serve is a whole server without a port of its own: Serve's proxies pass it the requests. QueueCostRouter
chooses among the replicas, and ScaleByQueue says how many there are, both by what the replicas report.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.autoscaling_policy import default_autoscaling_policy
from ray.serve.config import AutoscalingContext, RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import check_settings
from pagoda.base.errors import ConfigError
from pagoda.cli.serve import with_key_file
from pagoda.cli.serve_models import model_configs
from pagoda.engine.clients.replicas import EngineOwner
from pagoda.process.allocator import keep_buffers_apart
from pagoda.process.logs import configure_logging
from pagoda.server.app import end_requests, running_app
from pagoda.server.middleware import REQUEST_ID_HEADER
from pagoda.server.running import running_engines
from pagoda.server.served_model import ServedModel

_OF_SERVE = ("host", "port", "uds", "api_server_count", "tls", "ssl_certfile", "ssl_keyfile", "root_path")
"""Settings of how a server is reached that is not reached through Serve."""
QUEUE_S, REQUEST_S, REPORT = "queue_s", "request_s", "report"
"""What a replica reports."""
_REPORT_S = 1.0
"""How often a replica reports what it has to do."""
_MORE_THAN_DRAIN_S = 10.0


def app(args: dict[str, Any]) -> Application:
    """Return the application that Serve deploys, of one deployment, whose options its config file can change.

    args: settings by their names, as in a file of `pagoda serve --config`.   Raises ConfigError.
    """
    config = configs_of(args)[0]
    deployment = serve.deployment(
        Replica,
        name="pagoda",
        ray_actor_options={"num_cpus": config.parallel.threads or 1},
        max_ongoing_requests=4 * config.scheduler.max_num_seqs * config.server.data_parallel_size,
        graceful_shutdown_timeout_s=config.server.server_timeouts.drain_timeout_s + _MORE_THAN_DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        request_router_config=RequestRouterConfig.model_validate(
            {"request_router_class": QueueCostRouter, "request_routing_stats_period_s": _REPORT_S}
        ),
    )
    return deployment.bind(args)


def configs_of(args: Mapping[str, Any]) -> list[EngineConfig]:
    """Return the settings of each model that a replica serves. Raises ConfigError."""
    for name in args:
        if name.partition(".")[0] in _OF_SERVE:
            raise ConfigError(
                f"{name} has no effect here, where Ray Serve listens: set http_options in its config file"
            )
    # Serve may listen anywhere: callers without a key are not trusted as those of a server on this machine alone.
    configs = model_configs({**args, "host": "0.0.0.0"})
    for config in configs:
        check_settings(config)
    return configs


@serve.ingress()
class Replica:
    """A server in a replica of Serve."""

    async def __init__(self, args: Mapping[str, Any]) -> None:
        configs = [with_key_file(config) for config in configs_of(args)]
        server = self._server = configs[0].server
        configure_logging("replica", server.logs.log_level, server.logs.log_format)
        keep_buffers_apart(os.environ)
        if "RAY_ADDRESS" not in os.environ:  # for ranks that Ray places
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._num_reports = 0
        self._running = contextlib.AsyncExitStack()
        self._state = await self._running.enter_async_context(running_engines(configs))
        self._app = await self._running.enter_async_context(running_app(self._state, server))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _without_request_id(self._app)

    async def check_health(self) -> None:
        """Raise WorkerDied if no request can be served any more: Serve starts another replica."""
        if (error := self._state.models.died) is not None:
            raise error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return for how many seconds the replica computes before it has time for another request."""
        return {QUEUE_S: max(queue_s for queue_s, _ in self._queues())}

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the same, how much more another request would be, on average, and the number of the report."""
        self._num_reports += 1
        queue_s, slowest = max(self._queues(), key=lambda one: one[0])
        with_another_s = _engine_of(slowest).queue_s(slowest.starter.metrics.mean_uncached)
        return {QUEUE_S: queue_s, REQUEST_S: with_another_s - queue_s, REPORT: self._num_reports}

    def _queues(self) -> list[tuple[float, ServedModel]]:
        """Return for how many seconds each model's engines compute before they have time for another request."""
        return [(_engine_of(model).queue_s(), model) for model in self._state.models.all]

    async def __del__(self) -> None:
        """End what runs without a client, then the engines. Serve has waited for the requests that it has passed."""
        await end_requests(self._state, self._server.server_timeouts.drain_timeout_s)
        await self._running.aclose()


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Return the app without the header X-Request-Id of its answers, which Serve's proxy adds: the same id."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [one for one in message["headers"] if one[0] != REQUEST_ID_HEADER]}
            await send(message)

        await app(scope, receive, send_rest)

    return run


def _engine_of(model: ServedModel) -> EngineOwner:
    assert isinstance(model.engine, EngineOwner), "this process has the engines"
    return model.engine


class QueueCostRouter(FIFOMixin, RequestRouter):
    """Passes a request to the replica with the least to compute: what it has reported, and what it got since then.

    Equal ones take turns. A proxy does not see the requests of other proxies before the next report, nor prompts.
    """

    def initialize_state(self) -> None:
        self._seen: dict[ReplicaID, _Seen] = {}
        self._num_routed = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are tried: one that is full takes no request."""
        now_s, seen = time.monotonic(), {}
        for one in candidate_replicas:
            stats, known = one.routing_stats, self._seen.get(one.replica_id)
            if known is None or known.report != stats.get(REPORT, 0):
                known = _Seen(stats.get(REPORT, 0), now_s, 0, 0 if known is None else known.last)
            seen[one.replica_id] = known
        self._seen = seen

        def cost(one: RunningReplica) -> tuple[float, int]:
            stats, known = one.routing_stats, seen[one.replica_id]
            left_s = max(0.0, stats.get(QUEUE_S, 0.0) - (now_s - known.at_s))
            return left_s + known.num_sent * stats.get(REQUEST_S, 0.0), known.last

        return [[one] for one in sorted(candidate_replicas, key=cost)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        self._num_routed += 1
        if (known := self._seen.get(replica_id)) is not None:
            known.num_sent += 1
            known.last = self._num_routed


@dataclass(slots=True)
class _Seen:
    """What a proxy knows of a replica.

    report, at_s: number of the last report, and when it was first seen.   num_sent: requests sent since.
    last: number of the last one that was sent.
    """

    report: float
    at_s: float
    num_sent: int
    last: int


class ScaleByQueue:
    """As many replicas as requests (`target_ongoing_requests` each) or their work (`target_queue_s` each) need.

    The one that needs more counts. Delays, factors and bounds are those of Serve's autoscaling_config.
    """

    def __init__(self, target_queue_s: float = 2.0) -> None:
        self._target_queue_s = target_queue_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        by_requests, state = default_autoscaling_policy(context)
        queues = (context.aggregated_metrics or {}).get(QUEUE_S, {})
        return max(by_requests, sum(queues.values()) / self._target_queue_s), state
