"""Recognise out-of-memory errors of all libraries, and describe how a process ended."""

import errno
import signal
from pathlib import Path

_WORDS = ("allocate memory", "out of memory", "failed to map segment", "Cannot allocate", "bad_alloc", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out: MemoryError, ENOMEM, or the words that libraries use for it."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, (RuntimeError, OSError, ImportError)) and any(word in str(error) for word in _WORDS)


def num_oom_kills() -> int:
    """Return how many processes Linux has killed since it started because memory ran out; 0 where it does not say."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)


def describe_exit(code: int | None) -> str:
    """Return how a child process ended, from its `returncode`: "was killed by signal 9 (SIGKILL)", "exit code 1"."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was killed by signal {-code}"
    return f"was killed by signal {-code} ({name})"


def hint_of_exit(code: int | None) -> str:
    """Return "; " and a remedy for a process that ended like this while it loaded a model; "" if none is known."""
    if code not in (-signal.SIGKILL, -signal.SIGABRT):
        return ""
    return (
        "; probably memory ran out: lower kv_cache_memory or max_model_len, quantize, or raise the memory limit "
        "(cgroup, ulimit)"
    )
