"""The line of the log with the load of a server."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from pagoda.base.abbreviate import shown_id
from pagoda.engine.wire import EngineStats
from pagoda.metrics.counts import ModelCounts
from pagoda.metrics.observed_requests import RequestRecord
from pagoda.process.logs import FIELDS

logger = logging.getLogger("pagoda.server")

_LONG_S = 30
"""The line names a request that is older."""


async def report_load(
    model: str,
    read_stats: Callable[[], EngineStats],
    read_counts: Callable[[], Awaitable[ModelCounts]],
    oldest: Callable[[], RequestRecord | None],
    interval_s: float = 10.0,
    is_one_of_several: bool = False,
) -> None:
    """Log a line for every `interval_s` in which there was work for a model, until cancelled.

    read_counts: what all processes have counted.   oldest: of their requests, the one that runs for longest.
    """

    async def read() -> tuple[float, float, int, int]:
        tokens, stats = (await read_counts()).get(model, {}).get("tokens", {}), read_stats()
        return tokens.get("prompt", 0), tokens.get("output", 0), stats.prefix_queries, stats.prefix_hits

    before = await read()
    while True:
        await asyncio.sleep(interval_s)
        now, stats = await read(), read_stats()
        prompt, output, looked_up, found = (max(0, new - old) for new, old in zip(now, before, strict=True))
        before = now
        if prompt or output or stats.num_running or stats.num_waiting or stats.num_swapped:
            fields = {
                "prompt_tokens_per_s": round(prompt / interval_s, 1),
                "output_tokens_per_s": round(output / interval_s, 1),
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "swapped": stats.num_swapped,
                "kv_cache_usage": round(stats.kv_usage, 3),
                "prefix_hit_rate": round(found / looked_up, 3) if looked_up else 0.0,
            }
            if is_one_of_several:
                fields["model"] = model
            text = ("load of {model}: " if is_one_of_several else "load: ") + (
                "{prompt_tokens_per_s} prompt and {output_tokens_per_s} output tokens/s, {running} running, "
                "{waiting} waiting, {swapped} swapped, KV cache {kv_cache_usage:.1%} full, "
                "prefix hits {prefix_hit_rate:.1%}"
            )
            if (record := oldest()) is not None:
                age_s = round(time.perf_counter() - record.arrived_s)
                fields |= {"oldest_request": record.request_id, "oldest_age_s": age_s}
                if age_s >= _LONG_S:
                    text += f"; the oldest request, {{oldest_request}}, has {record.num_output_tokens} tokens after "
                    text += "{oldest_age_s} s"
            shown = fields | {"oldest_request": shown_id(str(fields.get("oldest_request", "")))}
            logger.info("%s", text.format(**shown), extra={FIELDS: fields})
