"""Server-Timing: where the time of a request went, in a header of its answer, for callers that ask for it.

Of several replicas, x-routed-because says to which the request went, and why.
"""

from collections.abc import Iterable, Mapping

from msgspec import UNSET, UnsetType

from pagoda.core.events import Routed
from pagoda.server.generation import RequestFigures

REQUEST_HEADER = b"x-return-timings"
HEADER = b"server-timing"
ROUTED_HEADER = b"x-routed-because"


def server_timing(known: RequestFigures, queue_reasons: Mapping[str, float]) -> bytes:
    """Return the header's value.   known: of a request that has run.   queue_reasons: see RequestMetrics."""
    reasons = ", ".join(f"{reason} {1e3 * seconds:.1f} ms" for reason, seconds in queue_reasons.items())
    parts = [_metric("queue", known.queue_ms, reasons)]
    if known.prefill_ms is not UNSET:
        parts.append(
            _metric("prefill", known.prefill_ms, f"{known.cached_tokens} of {known.prompt_tokens} tokens cached")
        )
    if known.decode_ms is not UNSET:
        text = f"{known.output_tokens} tokens"
        if known.draft_tokens is not UNSET:
            text += f", {known.accepted_draft_tokens} of {known.draft_tokens} drafts accepted"
        parts.append(_metric("decode", known.decode_ms, text))
    if known.preemptions:
        lost = f"preempted {known.preemptions} times, {known.lost_tokens} tokens lost"
        parts.append(_metric("preempted", known.preempted_ms, lost))
    parts.append(_metric("scheduler", known.scheduler_ms))
    return ", ".join(parts).encode()


def routed_because(routed: Iterable[Routed]) -> bytes:
    """Return the value of the header that says to which replica each prompt of a request went, and why."""
    return "; ".join(f"replica={event.replica}, because={event.because}" for event in routed).encode()


def _metric(name: str, ms: float | UnsetType, text: str = "") -> str:
    return f"{name};dur={ms}" + (f';desc="{text}"' if text else "")
