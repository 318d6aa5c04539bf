"""Regular expressions of a tokenizer: patterns other than the well-known ones are tested before use.

The `tokenizers` library uses a backtracking engine, so a pattern from a hostile file can take time exponential in the
length of a text. A match cannot be interrupted from within the process, so unknown patterns first run in a child
process with a limit on its CPU time, on texts that trigger catastrophic backtracking.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import tokenizers

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _CASED_WORD.replace("SUFFIX", "") + r"|\p{N}" + _CASED_REST
GPT4O = _CASED_WORD.replace("SUFFIX", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_REST
PUBLISHED = frozenset({LLAMA3, QWEN2, GPT2, TEKKEN, GPT4O})
"""Patterns with which published models split text into words."""

MAX_CPU_S = 10.0
_TIMEOUT_S = 300.0  # for a child that does not get as much CPU time
_MAX_PATTERN_CHARS = 20_000
_REMEDY = "correct it, or name another tokenizer (option tokenizer)"


def check_regexes(backend: tokenizers.Tokenizer, origin: str, max_cpu_s: float = MAX_CPU_S) -> None:
    """Raise ConfigError for a pattern of the tokenizer's normalizer or pre-tokenizer that takes too long to match.

    origin: the file, for the message.   max_cpu_s: CPU time per unknown pattern. On a busy machine, wall time would
    refuse good patterns.
    """
    for step in (backend.normalizer, backend.pre_tokenizer):
        if step is None:
            continue
        for pattern in dict.fromkeys(_patterns(json.loads(step.__getstate__()))):
            if pattern not in PUBLISHED:
                _try_out(pattern, origin, max_cpu_s)


def _patterns(described: object) -> Iterator[str]:
    """Yield all values of the key "Regex", at any depth."""
    stack = [described]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if isinstance(pattern := item.get("Regex"), str):
                yield pattern
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _try_out(pattern: str, origin: str, max_cpu_s: float) -> None:
    named = f"{origin}: the regular expression {abbreviate(pattern)}"
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ConfigError(f"{named} is too long ({len(pattern)} characters; at most {_MAX_PATTERN_CHARS})")
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE],
            input=json.dumps({"pattern": pattern, "path": sys.path, "max_cpu_s": max_cpu_s}),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"could not be tested within {_TIMEOUT_S:g} s"
    else:
        if ran.returncode == 0:
            return
        if ran.returncode == -signal.SIGPROF:
            raise ConfigError(f"{named} takes more than {max_cpu_s:g} s of CPU time to match short texts; {_REMEDY}")
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        why = f"cannot be matched: {abbreviate(lines[-1] if lines else f'exit code {ran.returncode}')}"
    raise ConfigError(f"{named} {why}; {_REMEDY}")


# Nested repetitions backtrack on runs of one character: try common ones, and those that occur in the pattern.
_PROBE = r"""
import json, signal, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from tokenizers import Regex, pre_tokenizers
pattern = given["pattern"]
signal.setitimer(signal.ITIMER_PROF, given["max_cpu_s"])  # its signal ends the process, even inside a match
split = pre_tokenizers.Split(Regex(pattern), "isolated")
kinds = dict.fromkeys("aA1 \n\t!'_-.\u00e9\u4e2d" + pattern[:200])
try:
    for kind in kinds:
        for length in (40, 120, 2000):
            for end in ("", "!", "\x00", "b", " 1"):
                split.pre_tokenize_str(kind * length + end)
    for first in "aA1 \n":
        for second in "aA1 \n!":
            split.pre_tokenize_str((first + second) * 200 + "\x00")
except BaseException as error:
    sys.exit(str(error))
"""
