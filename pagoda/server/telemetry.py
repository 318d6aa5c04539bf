"""Telemetry: a span and measurements of each request to the model, in the names of OpenTelemetry's GenAI conventions.

Where they go, and how, is said by OpenTelemetry's own variables, which its SDK reads. The SDK is only imported where an
endpoint is set. Spans and measurements are sent by its threads.
"""

import importlib
import importlib.util
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from pagoda.base.outputs import RequestMetrics
from pagoda.server.generation import Generation
from pagoda.server.request_state import request_state

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import TracerProvider

logger = logging.getLogger("pagoda.server")

_ENDPOINT = "OTEL_EXPORTER_OTLP{}_ENDPOINT"
_PROVIDER = "pagoda"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
}
_DURATIONS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CLOSE_S = 2.0
"""How long the end of the server waits for what is not sent yet."""


def telemetry_of(environ: Mapping[str, str], model: str, instance: str | None = None) -> "Telemetry | None":
    """Return what exports to the endpoint that the environment names; None if it names none.

    instance: tells this process from others that serve the same.
    """
    signals = [
        name
        for name in ("TRACES", "METRICS")
        if (environ.get(_ENDPOINT.format("")) or environ.get(_ENDPOINT.format(f"_{name}")))
        and environ.get(f"OTEL_{name}_EXPORTER", "otlp") == "otlp"
    ]
    if not signals or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocols = {name: _protocol(environ, name) for name in signals}
    for name, protocol in protocols.items():
        if protocol not in _EXPORTERS:
            allowed = " or ".join(_EXPORTERS)
            text = "the protocol of OTLP %s must be %s (got %.40s): nothing is sent; see OTEL_EXPORTER_OTLP_PROTOCOL"
            logger.warning(text, name.lower(), allowed, protocol)
            return None
        if importlib.util.find_spec("opentelemetry") is None or not importlib.util.find_spec(_EXPORTERS[protocol]):
            logger.warning("an OTLP endpoint is set, but nothing is sent: install the extra `otel` (pagoda-llm[otel])")
            return None
    return Telemetry(model, protocols, environ, instance)


_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}
"""OTLP's protocols, and the package that exports with each."""


def _protocol(environ: Mapping[str, str], signal: str) -> str:
    general = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or general or "http/protobuf"


class Telemetry:
    """Exports spans and measurements until it is closed. For one event loop.

    protocols: of TRACES, METRICS or both.   environ: only whether it names the service; the SDK reads the rest by
    itself.
    """

    def __init__(
        self, model: str, protocols: Mapping[str, str], environ: Mapping[str, str], instance: str | None = None
    ) -> None:
        from opentelemetry.metrics import NoOpMeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.trace import NoOpTracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        is_named = "OTEL_SERVICE_NAME" in environ or "service.name" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        about = {} if is_named else {"service.name": "pagoda"}
        resource = Resource.create(about if instance is None else {**about, "service.instance.id": instance})
        self._model = model
        self._extract = TraceContextTextMapPropagator().extract
        traces, metrics = protocols.get("TRACES"), protocols.get("METRICS")
        self._traces = NoOpTracerProvider() if traces is None else _trace_provider(resource, traces)
        self._meters = NoOpMeterProvider() if metrics is None else _meter_provider(resource, metrics)
        self._tracer = self._traces.get_tracer("pagoda")
        self._duration = self._histogram("request.duration", "Arrival to end.", _DURATIONS)
        self._first_token = self._histogram("time_to_first_token", "Arrival to first token.", _FIRST_TOKEN)
        self._per_token = self._histogram("time_per_output_token", "Time per token after the first.", _PER_TOKEN)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> "Histogram":
        meter = self._meters.get_meter("pagoda")
        return meter.create_histogram(
            f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=list(bounds)
        )

    def on_end(self, scope: Scope, status: int, duration_s: float) -> None:
        """Export an HTTP request to the model that has ended.   status: 499 if its client left first."""
        state = request_state(scope)
        generation = state.generation
        common = self._common(scope)
        if status >= 400:
            common["error.type"] = str(status)
        more = {"gen_ai.latency.e2e": duration_s}
        if (audio_s := state.audio_s) is not None:
            more["pagoda.audio_duration"] = audio_s
        if generation is None:
            more["http.response.status_code"] = status
        else:
            common["gen_ai.response.model"] = common["gen_ai.request.model"]
            times = generation.times or RequestMetrics(generation.arrived_s)
            more |= _request_attributes(generation) | _answer_attributes(generation, times)
            self._measure(common, generation, times)
        self._export(scope, common, more, duration_s)

    def _common(self, scope: Scope) -> dict[str, Any]:
        """Return the attributes of spans and measurements alike."""
        state = request_state(scope)
        route = state.route or scope["path"]
        common: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS.get(route) or route.rpartition("/")[2],
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": state.model or self._model,
        }
        if (address := scope.get("server")) is not None:
            common["server.address"], port = address
            common |= {} if port is None else {"server.port": port}
        return common

    def _export(self, scope: Scope, common: Mapping[str, Any], more: Mapping[str, Any], duration_s: float) -> None:
        """Export a span that ends now, and its duration. It has failed if that is this server's fault."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers, end_ns = Headers(scope=scope), time.time_ns()
        span = self._tracer.start_span(
            f"{common['gen_ai.operation.name']} {common['gen_ai.request.model']}",
            self._extract({name: headers[name] for name in _CONTEXT if name in headers}),
            SpanKind.SERVER,
            {**common, **more},
            start_time=end_ns - int(duration_s * 1e9),
        )
        if common.get("error.type", "").startswith("5"):
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)
        self._duration.record(duration_s, common)

    def _measure(self, common: dict[str, Any], generation: Generation, times: RequestMetrics) -> None:
        if times.time_to_first_token is not None and times.time_in_decode is not None:
            self._first_token.record(times.time_to_first_token, common)
            if generation.num_output_tokens > 1:
                self._per_token.record(times.time_in_decode / (generation.num_output_tokens - 1), common)

    def close(self) -> None:
        """Send what is left, for a short time."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _close(self) -> None:
        for provider in (self._traces, self._meters):
            if (shutdown := getattr(provider, "shutdown", None)) is not None:
                shutdown()


_CONTEXT = ("traceparent", "tracestate")


def _trace_provider(resource: Any, protocol: str) -> "TracerProvider":
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporters = importlib.import_module(f"{_EXPORTERS[protocol]}.trace_exporter")
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporters.OTLPSpanExporter()))
    return provider


def _meter_provider(resource: Any, protocol: str) -> "MeterProvider":
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporters = importlib.import_module(f"{_EXPORTERS[protocol]}.metric_exporter")
    reader = PeriodicExportingMetricReader(exporters.OTLPMetricExporter())
    return MeterProvider([reader], resource, shutdown_on_exit=False)


def _request_attributes(generation: Generation) -> dict[str, Any]:
    """Return what the caller asked for. Values that it did not set are those that apply."""
    params = generation.sampling
    if params is None:
        return {}
    asked = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else None,
        "seed": params.seed,
        "choice.count": params.n,
        "stop_sequences": list(params.stop) or None,
        "stream": generation.is_stream,
    }
    return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}


def _answer_attributes(generation: Generation, times: RequestMetrics) -> dict[str, Any]:
    """Return what came of it: the names of the conventions, and those that vLLM and SGLang share."""
    prefill, decode = times.time_in_prefill, times.time_in_decode
    found = {
        "response.id": generation.request_id,
        "response.finish_reasons": list(generation.finish_reasons),
        "response.time_to_first_chunk": times.time_to_first_token,
        "usage.input_tokens": generation.num_prompt_tokens,
        "usage.output_tokens": generation.num_output_tokens,
        "usage.cache_read.input_tokens": generation.num_cached_tokens,
        "usage.reasoning.output_tokens": generation.num_reasoning_tokens,
        "request.id": generation.request_id,
        "usage.prompt_tokens": generation.num_prompt_tokens,
        "usage.completion_tokens": generation.num_output_tokens,
        "latency.time_in_queue": times.time_in_queue,
        "latency.time_to_first_token": times.time_to_first_token,
        "latency.time_in_scheduler": times.scheduler_time,
        "latency.time_in_model_prefill": prefill,
        "latency.time_in_model_decode": decode,
        "latency.time_in_model_inference": None if prefill is None or decode is None else prefill + decode,
    }
    return {f"gen_ai.{name}": value for name, value in found.items() if value is not None}
