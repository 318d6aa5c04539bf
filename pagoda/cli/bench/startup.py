"""`pagoda bench startup`: from the command to the first answer, in fresh processes."""

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from pagoda.base.errors import ConfigError
from pagoda.cli.bench.figures import percentile, report

PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Start:
    """One fresh process. Seconds from its start to its first output and to its end."""

    first_output_s: float
    end_s: float


def startup(
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes.")] = 5,
    model: Annotated[str | None, typer.Option("--model", "-m", help="As for `pagoda generate`.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on standard output, nothing else.")] = False,
) -> None:
    """Time from the command to the first text and to the end of a short answer.

    The first run is counted like the others: it finds files out of the page cache and kernels not yet compiled.
    """
    extra = ["--model", model] if model is not None else []
    command = [sys.executable, "-m", "pagoda", "generate", "--quiet", "--max-tokens", str(max_tokens), *extra]
    starts = [time_start([*command, PROMPT]) for _ in range(runs)]
    first_s = [start.first_output_s for start in starts]
    end_s = [start.end_s for start in starts]
    report(
        {
            "engine": "pagoda",
            "runs": runs,
            "first_run_s": round(first_s[0], 3),
            **{f"first_text_p{p}_s": round(percentile(first_s, p), 3) for p in (50, 90)},
            **{f"answer_p{p}_s": round(percentile(end_s, p), 3) for p in (50, 90)},
        },
        as_json,
    )


def time_start(command: list[str]) -> Start:
    """Run a command to its end. Raises ConfigError with its last words when it fails."""
    begin_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_output_s = time.perf_counter() - begin_s
        _, errors = process.communicate()
        end_s = time.perf_counter() - begin_s
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigError(f"a run ended with exit code {process.returncode}: {last[0]}")
    return Start(first_output_s, end_s)
