"""Metrics under the names that the field's dashboards and load generators read."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagoda.base.outputs import RequestOutput
from pagoda.engine.wire import EngineStats

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
    """All of /metrics for one engine. Requests are observed as they pass; the engine's gauges are asked for at each
    scrape.

    stats: the engine's last known state.   cache_config: static labels of cache_config_info.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], cache_config: dict[str, str]) -> None:
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
            "Requests refused at the door, by reason.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
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
        self.registry.register(_EngineCollector(self._values, stats, cache_config))

    def on_tokens(self, count: int, gap_s: float | None) -> None:
        """`count` tokens came, `gap_s` after the last ones (None: the first of their request)."""
        self.generation_tokens.inc(count)
        if gap_s is not None and count:
            self._itl.observe(gap_s / count)
            self._tpot.observe(gap_s / count)

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_refusal(self, reason: str) -> None:
        self.rejections.labels(*self._values, reason).inc()

    def on_end(self, output: RequestOutput, n: int, max_tokens: int | None, num_output_tokens: int) -> None:
        """A request ended; output carries its prompt and its times."""
        num_prompt = len(output.prompt_token_ids or ())
        self.prompt_tokens.inc(num_prompt)
        self.prompt_tokens_cached.inc(output.num_cached_tokens or 0)
        for completion in output.outputs:
            self.request_success.labels(*self._values, completion.finish_reason or "abort").inc()
        self._prompt_len.observe(num_prompt)
        self._output_len.observe(num_output_tokens)
        self._params_n.observe(n)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)
        times = output.metrics
        if times is None or times.finished_time is None:
            return
        self._e2e.observe(times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            self._decode.observe(times.finished_time - times.first_token_time)
            if times.first_scheduled_time is not None:
                self._queue.observe(times.first_scheduled_time - times.arrival_time)
                self._prefill.observe(times.first_token_time - times.first_scheduled_time)
                self._inference.observe(times.finished_time - times.first_scheduled_time)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets).labels(*self._values)


class _EngineCollector:
    """Gauges and totals that the scheduler keeps itself."""

    def __init__(self, values: tuple[str, str], stats: Callable[[], EngineStats], cache_config: dict[str, str]) -> None:
        self._values = values
        self._stats = stats
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Requests in the running queue.", stats.num_running),
            ("num_requests_waiting", "Requests waiting for a seat.", stats.num_waiting),
            ("num_requests_swapped", "Requests parked in host memory.", stats.num_swapped),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("gpu_cache_usage_perc", "Share of KV blocks in use (older name).", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, text, value in (
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
        lora.add_metric(("0", "", ""), 1)
        yield lora
