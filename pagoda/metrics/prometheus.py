"""Prometheus metrics, with the names that existing dashboards and load generators use."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagoda.base.outputs import RequestMetrics, RequestOutput
from pagoda.core.request import Request
from pagoda.engine.wire import EngineStats

REJECTION_REASONS = ("requests", "tokens", "key_concurrency", "key_rate")
CACHE_LABELS = (
    *("block_size", "num_gpu_blocks", "num_cpu_blocks"),
    *("enable_prefix_caching", "gpu_memory_utilization", "cache_dtype"),
)
"""Labels of cache_config_info."""
FINISH_REASONS = ("stop", "length", "abort", "error")
_LABELS = ("model_name", "engine")
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COUNTS = (1, 2, 5, 10, 20)


class ServerMetrics:
    """The metrics of one engine. Requests update them as they run; the engine's gauges are read at each scrape.

    stats: returns the engine's latest statistics.   cache_config: static labels of cache_config_info.
    max_loras: adapters per step; 0 without adapters.   num_restarts: of the engine process so far.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        cache_config: dict[str, str],
        max_loras: int = 0,
        num_restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._model_name = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.request_success = Counter(
            "vllm:request_success", "Requests ended, by reason.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests rejected by admission, by reason.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
        self.http_requests = Counter(
            "http_requests",
            "HTTP requests, by route and status.",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        # Create all series now: rate() misses the first event of a series that appears with it.
        for reason in REJECTION_REASONS:
            self.rejections.labels(*self._values, reason)
        for reason in FINISH_REASONS:
            self.request_success.labels(*self._values, reason)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between tokens.", _GAPS)
        self._tpot = self._histogram("time_per_output_token_seconds", "Gap between tokens (older name).", _GAPS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.", _SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "First step to end.", _SECONDS)
        self._prompt_len = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._output_len = self._histogram("request_generation_tokens", "Output tokens per request.", _TOKENS)
        self._params_n = self._histogram("request_params_n", "n per request.", _COUNTS)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens per request.", _TOKENS)
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS)
        self.registry.register(_EngineCollector(self._values, stats, cache_config, max_loras, num_restarts))

    def on_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt, of which `num_cached` tokens were found in the prefix cache."""
        self.prompt_tokens.inc(num_tokens)
        self.prompt_tokens_cached.inc(num_cached)

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_gap(self, seconds: float) -> None:
        """Observe the time between two tokens of one output."""
        self._itl.observe(seconds)
        self._tpot.observe(seconds)

    def on_refusal(self, reason: str) -> None:
        self.rejections.labels(*self._values, reason).inc()

    def on_http(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request.   handler: the route, as it is declared.   status: 499 if its client left first."""
        self.http_requests.labels(method, handler, str(status)).inc()

    def on_finish(self, reason: str) -> None:
        """Count the end of one output of a request."""
        self.request_success.labels(*self._values, reason).inc()

    def on_end(self, request: Request, num_output_tokens: int, times: RequestMetrics | None, now_s: float) -> None:
        """Observe the end of a request at `now_s`, successful or not.   times: its known timestamps."""
        self._prompt_len.observe(request.num_prompt_tokens)
        self._output_len.observe(num_output_tokens)
        if request.sampling is not None:
            self._params_n.observe(request.sampling.n)
            self._params_max_tokens.observe(request.sampling.max_tokens or 0)
        self._e2e.observe(now_s - request.arrival_time_s)
        if times is None:
            return
        first_s = times.first_token_time
        if first_s is not None:
            self._decode.observe(now_s - first_s)
        elif request.pooling is not None:
            first_s = times.finished_time  # its prompt is all that is computed
        if first_s is not None and times.first_scheduled_time is not None:
            self._queue.observe(times.first_scheduled_time - times.arrival_time)
            self._prefill.observe(first_s - times.first_scheduled_time)
            self._inference.observe(now_s - times.first_scheduled_time)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets).labels(*self._values)


class RequestObserver:
    """Updates the metrics for one request: call `on_delta` for each delta, then `on_end`."""

    def __init__(self, metrics: ServerMetrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._last_s = 0.0
        self._open = set(range(request.num_seqs))
        self.num_output_tokens = 0

    def on_delta(self, delta: RequestOutput, now_s: float) -> int:
        """Observe a delta; return its number of tokens."""
        metrics = self._metrics
        count = 0
        for part in delta.outputs:
            new = len(part.token_ids)
            count += new
            if new and self.num_output_tokens:
                metrics.on_gap((now_s - self._last_s) / new)
            if part.finish_reason is not None and part.index in self._open:
                self._open.discard(part.index)
                metrics.on_finish(part.finish_reason)
        if delta.pooled is not None:
            metrics.on_prompt(self._request.num_prompt_tokens, delta.num_cached_tokens or 0)
        if count:
            if not self.num_output_tokens:
                metrics.on_first_token(now_s - self._request.arrival_time_s)
                metrics.on_prompt(self._request.num_prompt_tokens, delta.num_cached_tokens or 0)
            metrics.generation_tokens.inc(count)
            self.num_output_tokens += count
            self._last_s = now_s
        return count

    def on_end(self, last: RequestOutput | None, now_s: float) -> None:
        """Observe the end of the request; count unfinished outputs as aborted.   last: the last delta, if any."""
        for _ in self._open:
            self._metrics.on_finish("abort")
        self._open.clear()
        self._metrics.on_end(self._request, self.num_output_tokens, last.metrics if last is not None else None, now_s)


class _EngineCollector:
    """Exports the gauges and counters that the scheduler keeps."""

    def __init__(
        self,
        values: tuple[str, str],
        stats: Callable[[], EngineStats],
        cache_config: dict[str, str],
        max_loras: int,
        num_restarts: Callable[[], int],
    ) -> None:
        self._values = values
        self._num_restarts = num_restarts
        self._max_loras = max_loras
        self._stats = stats
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Requests in the running queue.", stats.num_running),
            ("num_requests_waiting", "Requests in the waiting queue.", stats.num_waiting),
            ("num_requests_swapped", "Requests swapped out to host memory.", stats.num_swapped),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("gpu_cache_usage_perc", "Share of KV blocks in use (older name).", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, text, value in (
            ("engine_restarts", "Restarts of the engine process.", self._num_restarts()),
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits),
            ("spec_decode_num_drafts", "Drafts verified.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            counter.add_metric(self._values, value)
            yield counter
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=(*_LABELS, "position"),
        )
        for position, accepted in enumerate(stats.accepted_tokens_per_pos or (0,)):
            by_position.add_metric((*self._values, str(position)), accepted)
        yield by_position
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings.", labels=("engine", *self._cache_config)
        )
        info.add_metric((self._values[1], *self._cache_config.values()), 1)
        yield info
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        names = [",".join(adapters) for adapters in (stats.waiting_adapters, stats.running_adapters)]
        lora.add_metric((str(self._max_loras), *names), 1)
        yield lora
