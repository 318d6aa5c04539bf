"""Server-Timing: where the time of a request went, in a header of its answer, for callers that ask for it."""

from collections.abc import Mapping
from typing import Any

REQUEST_HEADER = b"x-return-timings"
HEADER = b"server-timing"


def server_timing(state: Mapping[str, Any]) -> bytes:
    """Return the header's value, b"" if nothing was generated.   state: of a request whose answer begins now."""
    timings = state["timings"]
    if "queue_ms" not in timings:
        return b""
    reasons = ", ".join(f"{reason} {1e3 * seconds:.1f} ms" for reason, seconds in state["queue_reasons"].items())
    parts = [_metric("queue", timings["queue_ms"], reasons)]
    if "prefill_ms" in timings:
        cached = f"{timings['cached_tokens']} of {timings['prompt_tokens']} tokens cached"
        parts.append(_metric("prefill", timings["prefill_ms"], cached))
    if "decode_ms" in timings:
        text = f"{timings['output_tokens']} tokens"
        if "draft_tokens" in timings:
            text += f", {timings['accepted_draft_tokens']} of {timings['draft_tokens']} drafts accepted"
        parts.append(_metric("decode", timings["decode_ms"], text))
    if timings.get("preemptions"):
        lost = f"preempted {timings['preemptions']} times, {timings['lost_tokens']} tokens lost"
        parts.append(_metric("preempted", timings["preempted_ms"], lost))
    parts.append(_metric("scheduler", timings["scheduler_ms"]))
    return ", ".join(parts).encode()


def _metric(name: str, ms: float, text: str = "") -> str:
    return f"{name};dur={ms}" + (f';desc="{text}"' if text else "")
