"""OpenTelemetry: a server exports spans and measurements to an OTLP server, by the standard variables."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pagoda.server.request_state import RequestState
from pagoda.server.telemetry import Telemetry, telemetry_of
from tests.server.conftest import FAKE_FLAGS
from tests.server.live import LiveServer, serving
from tests.server.test_routes import events

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A small OTLP server: protobuf over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: dict[str, Any] = {}
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.take(self.path, data)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, data: bytes) -> None:
        if path == "/v1/traces":
            self.take_spans(ExportTraceServiceRequest.FromString(data))
        else:
            assert path == "/v1/metrics"
            self.take_metrics(ExportMetricsServiceRequest.FromString(data))

    def take_spans(self, request: ExportTraceServiceRequest) -> None:
        for one in request.resource_spans:
            self.services.add(attributes(one.resource.attributes)["service.name"])
            self.spans += [span for scope in one.scope_spans for span in scope.spans]

    def take_metrics(self, request: ExportMetricsServiceRequest) -> None:
        for one in request.resource_metrics:
            self.metrics |= {metric.name: metric for scope in one.scope_metrics for metric in scope.metrics}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind or "")


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def test_a_server_exports_each_request_and_sends_the_rest_when_it_ends(collector: Collector, tmp_path: Path) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    prompt = list(range(10, 60))
    with serving(tmp_path, *FAKE_FLAGS, env=endpoint, stepped=True) as server:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 3, "stop": ["€"]}
        status, whole = server.post("/v1/chat/completions", chat, traceparent=f"00-{TRACE}-{PARENT}-01")
        assert status == 200
        events(server, "/v1/completions", {"prompt": prompt, "max_tokens": 5, "n": 2})
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        parent = f"00-{TRACE}-{PARENT}-01"
        assert server.post("/v1/completions", {"prompt": [10**9]}, traceparent=parent)[0] == 400
        assert server.post("/tokenize", {"prompt": 5})[0] == 400  # asks nothing of the model
    of_chat, of_text, again, refused = collector.spans
    assert collector.services == {"pagoda"}
    assert (of_chat.trace_id.hex(), of_chat.parent_span_id.hex()) == (TRACE, PARENT)
    assert of_text.parent_span_id == b""
    assert of_text.trace_id != again.trace_id
    found = attributes(of_chat.attributes)
    model, usage = whole["model"], whole["usage"]
    assert of_chat.name == f"chat {model}"
    assert of_chat.kind == Span.SPAN_KIND_SERVER
    assert of_chat.status.code == Status.STATUS_CODE_UNSET
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagoda",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stop_sequences": ["€"],
        "gen_ai.request.stream": False,
        "gen_ai.request.id": whole["id"],
        "gen_ai.response.id": whole["id"],
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "server.address": "127.0.0.1",
    }
    assert {name: found.get(name) for name in expected} == expected
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if "latency" in name}
    assert set(latency) == {
        "time_in_queue",
        "time_to_first_token",
        "e2e",
        "time_in_scheduler",
        "time_in_model_prefill",
        "time_in_model_decode",
        "time_in_model_inference",
    }
    assert latency["e2e"] == pytest.approx((of_chat.end_time_unix_nano - of_chat.start_time_unix_nano) / 1e9, abs=1e-3)
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]
    assert (refused.trace_id.hex(), refused.parent_span_id.hex()) == (TRACE, PARENT)
    why = attributes(refused.attributes)
    assert (why["error.type"], why["http.response.status_code"]) == ("400", 400)
    assert (why["gen_ai.operation.name"], why["gen_ai.request.model"]) == ("text_completion", model)
    assert not [name for name in why if "usage" in name]
    assert refused.status.code == Status.STATUS_CODE_UNSET  # the caller's fault
    streamed = attributes(of_text.attributes)
    assert streamed["gen_ai.operation.name"] == "text_completion"
    assert streamed["gen_ai.request.stream"] is True
    assert streamed["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes(again.attributes)["gen_ai.usage.cache_read.input_tokens"] > 0
    counts = {
        name: sum(point.count for point in metric.histogram.data_points) for name, metric in collector.metrics.items()
    }
    assert counts == {
        "gen_ai.server.request.duration": 4,
        "gen_ai.server.time_to_first_token": 3,
        "gen_ai.server.time_per_output_token": 2,
    }
    bounds = collector.metrics["gen_ai.server.time_per_output_token"].histogram.data_points[0].explicit_bounds
    assert list(bounds)[:3] == [0.01, 0.025, 0.05]


def test_a_collector_that_is_not_there_disturbs_nothing(tmp_path: Path) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}  # of "discard"
    with serving(tmp_path, *FAKE_FLAGS, env=endpoint, stepped=True) as server:
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_nothing_is_made(environ: dict[str, str]) -> None:
    assert telemetry_of(environ, "m") is None


def test_an_unknown_protocol_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"}
    assert telemetry_of(environ, "m") is None
    assert "OTLP metrics must be http/protobuf or grpc (got http/json): nothing is sent" in caplog.text


def test_a_server_exports_over_grpc(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as of_metrics
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as of_traces
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    class Grpc(of_traces.TraceServiceServicer, of_metrics.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if isinstance(request, ExportTraceServiceRequest):
                taken.take_spans(request)
                return ExportTraceServiceResponse()
            taken.take_metrics(request)
            return ExportMetricsServiceResponse()

    taken, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    of_traces.add_TraceServiceServicer_to_server(Grpc(), server)
    of_metrics.add_MetricsServiceServicer_to_server(Grpc(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    try:
        with serving(tmp_path, *FAKE_FLAGS, env=environ, stepped=True) as served:
            assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    finally:
        server.stop(None)
        taken.close()
    assert [span.name for span in taken.spans] == ["text_completion smollm2-135m"]
    assert taken.metrics["gen_ai.server.request.duration"].histogram.data_points[0].count == 1


def test_refusals_and_errors_of_the_server_are_told_apart(collector: Collector, tmp_path: Path) -> None:
    """What is refused for a limit, for its key, and by a route that runs requests of its own, as transcriptions are."""
    endpoint = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces"}
    flags = ("--api-key", "one", "--server-limits.requests-per-minute-per-key", "1")
    with serving(tmp_path, *FAKE_FLAGS, *flags, env=endpoint, stepped=True) as server:
        key = {"Authorization": "Bearer one"}
        statuses = [server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, **key)[0] for _ in range(2)]
        statuses.append(server.post("/v1/completions", {"prompt": "x"})[0])
        statuses.append(server.post("/v1/audio/transcriptions", b"", **key)[0])
    found = [attributes(span.attributes) for span in collector.spans]
    assert statuses == [200, 429, 401, 429]
    assert [one.get("error.type") for one in found] == [None, "429", "401", "429"]
    assert [one["gen_ai.operation.name"] for one in found] == [*["text_completion"] * 3, "transcriptions"]


def test_a_server_without_an_endpoint_does_not_import_the_sdk(fake_server: LiveServer) -> None:
    assert fake_server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    maps = Path(f"/proc/{fake_server.process.pid}/maps").read_text()
    assert "/google/_upb/" not in maps, "protobuf's library is loaded where something is exported"


def test_a_transcription_is_a_span_with_the_length_of_its_sound() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry("whisper", {}, {})
    telemetry._tracer = provider.get_tracer("test")
    state = RequestState(route="/v1/audio/transcriptions", model="mine", audio_s=12.5)
    telemetry.on_end({"type": "http", "headers": [], "state": state}, 200, 1.5)
    (span,) = exporter.get_finished_spans()
    assert span.name == "transcriptions mine"
    found = dict(span.attributes or {})
    assert (found["pagoda.audio_duration"], found["gen_ai.latency.e2e"]) == (12.5, 1.5)
    assert "error.type" not in found
