"""Prometheus metrics, with the names that existing dashboards and load generators use."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagoda.base.outputs import RequestMetrics
from pagoda.core.request import Request
from pagoda.engine.clients.router import RoutedBecause
from pagoda.engine.wire import EngineStats
from pagoda.metrics.counts import LABELS, Counts, Histogram, tokens_per_step

REJECTION_REASONS = (
    *("requests", "tokens", "media", "logprobs", "bodies", "key_concurrency", "key_rate", "stored", "load"),
)
CACHE_LABELS = (
    *("block_size", "num_gpu_blocks", "num_cpu_blocks"),
    *("enable_prefix_caching", "gpu_memory_utilization", "cache_dtype"),
    *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
)
"""Labels of cache_config_info."""
ROUTED_BECAUSE = tuple(one.value for one in RoutedBecause)
FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class _Families:
    """A registry of what has been collected already."""

    families: tuple[Metric, ...]

    def collect(self) -> tuple[Metric, ...]:
        return self.families


def write_metrics(models: Iterable[tuple["ServerMetrics", Counts]], num_in_line: int) -> bytes:
    """Return all metrics in Prometheus's text format.

    models: the metrics of each model, and what all processes have counted of it.
    num_in_line: requests that wait for their admission, which are shown with the first model.
    """
    families: dict[str, Metric] = {}
    for metrics, counts in models:
        for family in metrics.families(counts, num_in_line):
            if (known := families.setdefault(family.name, family)) is not family:
                known.samples.extend(family.samples)
        num_in_line = 0
    return generate_latest(_Families(tuple(families.values())))


class LoadMetrics:
    """How often a model was loaded, how long that took, and what memory it takes now, as planned (0: not loaded)."""

    def __init__(self) -> None:
        self._ended = Counter[str](loaded=0, failed=0)
        self._seconds = Histogram(
            "model_load_seconds", "Start of a load until the model takes requests.", _LOAD_SECONDS
        )
        self.memory_bytes = 0

    def on_loaded(self, seconds: float) -> None:
        self._ended["loaded"] += 1
        self._seconds.observe(seconds)

    def on_failure(self) -> None:
        self._ended["failed"] += 1

    def families(self, values: tuple[str, ...]) -> Iterator[Metric]:
        """Iterate over the metrics.   values: of LABELS."""
        loads = "Loads of the model, the first one included."
        yield _labelled(values, "vllm:model_loads", loads, "outcome", self._ended)
        yield self._seconds.family({self._seconds.name: self._seconds.counts()}, values)
        memory = "Memory that the model takes, as planned; 0 while it is not loaded. Of a server of several models."
        gauge = GaugeMetricFamily("vllm:model_memory_bytes", memory, labels=LABELS)
        gauge.add_metric(values, self.memory_bytes)
        yield gauge


class ServerMetrics:
    """The metrics of one engine. Requests update them as they run; the engine's gauges are read at each scrape.

    For one event loop.   stats: returns the engine's latest statistics.   cache_config: static labels of
    cache_config_info.   max_loras: adapters per step; 0 without adapters.   num_restarts: of the engine process so far.
    loads: of the model, if this process counts them.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        cache_config: dict[str, str],
        max_loras: int = 0,
        num_restarts: Callable[[], int] = lambda: 0,
        loads: LoadMetrics | None = None,
    ) -> None:
        self.model_name = model_name
        self.stats = stats
        self._values = (model_name, "0")
        self.cache_config = cache_config
        self._max_loras = max_loras
        self._num_restarts = num_restarts
        self._loads = loads or LoadMetrics()
        self.num_prompts = self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        # All series exist from the start: rate() misses the first event of a series that appears with it.
        self._ended = Counter[str](dict.fromkeys(FINISH_REASONS, 0))
        self._refused = Counter[str](dict.fromkeys(REJECTION_REASONS, 0))
        self._routed = Counter[str](dict.fromkeys(ROUTED_BECAUSE, 0))
        self._http = Counter[tuple[str, str, str]]()
        self._turns = Counter[tuple[str, str]]()
        self.ttft = Histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._ttft_hit = Histogram(
            "time_to_first_token_prefix_hit_seconds",
            "Arrival to first token, of requests whose prompt began with a cached prefix.",
            _SECONDS,
        )
        self.itl = Histogram("inter_token_latency_seconds", "Gap between tokens.", _GAPS)
        self._e2e = Histogram("e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._queue = Histogram("request_queue_time_seconds", "Arrival to first step.", _SECONDS)
        self._prefill = Histogram("request_prefill_time_seconds", "First step to first token.", _SECONDS)
        self._decode = Histogram("request_decode_time_seconds", "First token to last token.", _SECONDS)
        self._inference = Histogram("request_inference_time_seconds", "First step to last token.", _SECONDS)
        self._prompt_len = Histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._output_len = Histogram("request_generation_tokens", "Output tokens per request.", _TOKENS)
        self._params_n = Histogram("request_params_n", "n per request.", _COUNTS)
        self._params_max_tokens = Histogram("request_params_max_tokens", "max_tokens per request.", _TOKENS)
        self._preemptions = Histogram("request_num_preemptions", "Preemptions per request.", _PREEMPTIONS)
        self.iteration_tokens = tokens_per_step()
        self._histograms = [one for one in vars(self).values() if isinstance(one, Histogram)]

    def on_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt, of which `num_cached` tokens were found in the prefix cache."""
        self.num_prompts += 1
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached

    @property
    def mean_uncached(self) -> int:
        """Tokens of a prompt that were not found in the prefix cache, on average."""
        return (self.num_prompt_tokens - self.num_cached_tokens) // max(1, self.num_prompts)

    def on_first_token(self, seconds: float, is_hit: bool) -> None:
        """Observe the time from arrival to first token.   is_hit: its prompt began with a cached prefix."""
        self.ttft.observe(seconds)
        if is_hit:
            self._ttft_hit.observe(seconds)

    def on_gap(self, seconds: float) -> None:
        """Observe the time between two tokens of one output."""
        self.itl.observe(seconds)

    def on_refusal(self, reason: str) -> None:
        self._refused[reason] += 1

    def on_routed(self, because: str) -> None:
        """Count a request that was sent to one of several replicas."""
        self._routed[because] += 1

    def on_http(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request.   handler: the route, as it is declared.   status: 499 if its client left first."""
        self._http[method, handler, str(status)] += 1

    def on_turn(self, handler: str, status: int) -> None:
        """Count an HTTP request that the model has run.   handler, status: as of `on_http`."""
        self._turns[handler, str(status)] += 1

    def on_finish(self, reason: str) -> None:
        """Count the end of one output of a request."""
        self._ended[reason] += 1

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
        self._preemptions.observe(times.num_preemptions)
        if not request.wants_output and times.finished_time is not None:  # its prompt is all that is computed
            times = replace(times, first_token_time=times.finished_time)
        prefill, decode = times.time_in_prefill, times.time_in_decode
        if decode is not None:
            self._decode.observe(decode)
        if times.time_in_queue is not None and prefill is not None:
            self._queue.observe(times.time_in_queue)
            self._prefill.observe(prefill)
            self._inference.observe(prefill + (decode or 0.0))

    def counts(self) -> Counts:
        """Return all that this process has counted."""
        return {
            "tokens": {
                "prompt": self.num_prompt_tokens,
                "cached": self.num_cached_tokens,
                "output": self.num_output_tokens,
            },
            "ended": dict(self._ended),
            "refused": dict(self._refused),
            "routed": dict(self._routed),
            "http": {" ".join(labels): count for labels, count in self._http.items()},
            "turns": {" ".join(labels): count for labels, count in self._turns.items()},
            **{one.name: one.counts() for one in self._histograms},
        }

    def families(self, counts: Counts, num_in_line: int) -> Iterator[Metric]:
        """Iterate over the metrics, see `write_metrics`."""
        stats, tokens = self.stats(), counts["tokens"]
        num_deferred = stats.num_deferred
        waiting = {"capacity": stats.num_waiting - num_deferred, "deferred": num_deferred, "admission": num_in_line}
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens processed.", tokens["prompt"]),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", tokens["cached"]),
            ("generation_tokens", "Tokens generated.", tokens["output"]),
            ("engine_restarts", "Restarts of the engine process.", self._num_restarts()),
            ("engine_steps", "Steps of the engine that computed something.", stats.num_steps),
            ("engine_step_seconds", "Time that the engine spent in steps.", stats.step_s),
            ("engine_scheduler_seconds", "Time that planning and committing of steps took.", stats.scheduler_s),
            ("num_preemptions", "Preemptions.", stats.preemptions),
            ("num_swap_outs", "Requests whose KV was moved to host memory.", stats.swap_outs),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits),
            ("external_prefix_cache_queries", "Tokens that a KV tier was asked to load.", stats.tier_queries),
            ("external_prefix_cache_hits", "Tokens that a KV tier loaded.", stats.tier_hits),
            ("mm_cache_queries", "Images and audio looked up in the encoder cache.", stats.encoder_queries),
            ("mm_cache_hits", "Images and audio found there, not encoded again.", stats.encoder_hits),
            ("spec_decode_num_drafts", "Drafts verified.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._values, count)
            yield counter
        for name, text, value in (
            ("num_requests_running", "Requests in the running queue.", stats.num_running),
            ("num_requests_waiting", "Requests in the waiting queue, or in line for it.", sum(waiting.values())),
            ("num_requests_swapped", "Requests swapped out to host memory.", stats.num_swapped),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("gpu_cache_usage_perc", "Share of KV blocks in use (older name).", stats.kv_usage),
            ("engine_report_age_seconds", "Time since the engine reported these, between two steps.", stats.age_s),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        yield _labelled(
            self._values, "vllm:request_success", "Outputs ended, by reason.", "finished_reason", counts["ended"]
        )
        for_what = "Waiting requests, by what they wait for: room in a step; a grammar, adapter or token; or admission."
        yield _labelled(
            self._values, "vllm:num_requests_waiting_by_reason", for_what, "reason", waiting, GaugeMetricFamily
        )
        engines = {"up": stats.num_up, "starting": stats.num_starting}
        engines |= {"draining": stats.num_draining, "gone": stats.num_gone}
        of_engines = "Engine processes, one per replica, by what they do; gone: none can be started any more."
        yield _labelled(self._values, "vllm:engines", of_engines, "state", engines, GaugeMetricFamily)
        loras = {"read": stats.adapters_read, "dropped": stats.adapters_dropped}
        of_loras = "LoRA adapters that were read from disk, and that were dropped from memory for another one."
        yield _labelled(self._values, "vllm:lora_adapter_events", of_loras, "event", loras)
        tier = {"stored": stats.num_tier_stored, "lost": stats.num_tier_lost}
        yield _labelled(self._values, "vllm:kv_tier_blocks", "Blocks that a KV tier has got, and lost.", "event", tier)
        rejected = "Requests rejected by admission, by reason."
        yield _labelled(self._values, "vllm:admission_rejections", rejected, "reason", counts["refused"])
        routed = "Requests sent to one of several replicas, by why to that one; again when that has ended."
        yield _labelled(self._values, "vllm:routed_requests", routed, "because", counts["routed"])
        by_position = {str(at): count for at, count in enumerate(stats.accepted_tokens_per_pos or (0,))}
        accepted = "Draft tokens accepted, by position in the draft."
        yield _labelled(self._values, "vllm:spec_decode_num_accepted_tokens_per_pos", accepted, "position", by_position)
        for histogram in self._histograms:
            yield histogram.family(counts, self._values)
        yield self.itl.family(counts, self._values, "time_per_output_token_seconds")  # its older name
        http = CounterMetricFamily(
            "http_requests", "HTTP requests, by route and status.", labels=("method", "handler", "status")
        )
        for labels, count in counts["http"].items():
            http.add_metric(labels.split(" "), count)
        yield http
        ran = "HTTP requests that the model has run, by route and status."
        turns = CounterMetricFamily("vllm:turns", ran, labels=(*LABELS, "handler", "status"))
        for labels, count in counts["turns"].items():
            turns.add_metric((*self._values, *labels.split(" ")), count)
        yield turns
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache's settings.", labels=(*LABELS, *self.cache_config)
        )
        info.add_metric((*self._values, *self.cache_config.values()), 1)
        yield info
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters", "model_name"),
        )
        names = [",".join(adapters) for adapters in (stats.waiting_adapters, stats.running_adapters)]
        lora.add_metric((str(self._max_loras), *names, self.model_name), 1)
        yield lora
        yield from self._loads.families(self._values)


def _labelled(
    values: tuple[str, ...],
    name: str,
    text: str,
    label: str,
    counts: Mapping[str, float],
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
) -> Metric:
    """Return a counter, or a gauge, with a label of its own.   values: of LABELS."""
    family = kind(name, text, labels=(*LABELS, label))
    for value, count in counts.items():
        family.add_metric((*values, value), count)
    return family
