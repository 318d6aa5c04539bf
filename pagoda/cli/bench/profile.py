"""`--profile`: where the time of a run's steps went, as a table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.ops.forward import OP_TABLE

if TYPE_CHECKING:
    from pagoda.core.executor import Executor
    from pagoda.llm import LLM
    from pagoda.worker.worker import StepProfile, Worker

_FOLDERS = {"linear": "linear layers", "moe": "mixture of experts", "attention": "attention", "kv_cache": "KV writes"}
"""Rows of the table, by the folder of an op's kernels; the others are elementwise."""


class Part(TypedDict):
    """One line of the table.   share: of the whole run, 0 to 1."""

    part: str
    secs: float
    share: float


def load_profiled(options: Mapping[str, Any]) -> "tuple[LLM, Worker]":
    """An LLM as `LLM(**options)` makes it, and the worker in it. Raises what LLM raises."""
    from pagoda.assemble import build_llm_engine
    from pagoda.executors.in_process import InProcessExecutor
    from pagoda.llm import LLM
    from pagoda.worker.worker import Worker

    found: list[Worker] = []

    def look_inside(executor: "Executor", _: int) -> "Executor":
        if isinstance(executor, InProcessExecutor) and isinstance(executor.worker, Worker):
            found.append(executor.worker)
        return executor

    config = EngineConfig.from_options(**options)
    llm = LLM.over(lambda: build_llm_engine(config, look_inside))
    if not found:
        llm.close()
        raise ConfigError("--profile needs a worker in this process (distributed_executor_backend in_process)")
    return llm, found[0]


def breakdown(profile: "StepProfile", secs: float) -> list[Part]:
    """The parts of a run that took `secs`, largest first; they add up to it.

    barriers: entering and leaving parallel regions, estimated as ops x what an empty region takes, and taken off the
    linear layers, where nearly all regions are. scheduling and output: all that is not the worker's.
    """
    parts, ops = dict(profile.parts), profile.ops
    forward = parts.pop("forward", 0.0)
    barriers = profile.num_steps * profile.num_ops * profile.region_s
    kinds = dict.fromkeys((*_FOLDERS.values(), "elementwise"), 0.0)
    for name, spent in ops.items():
        kinds[_FOLDERS.get(OP_TABLE[name].folder, "elementwise")] += spent
    kinds["linear layers"] -= barriers + ops.get("logits", 0.0)
    rows = {
        **kinds,
        "barriers (estimated)": barriers,
        "forward, the rest": forward - sum(ops.values()),
        "lm_head": ops.get("logits", 0.0),
        "sampling": parts.pop("sampling", 0.0),
        "worker's Python": sum(parts.values()),
    }
    if not ops:
        rows = {"forward": forward, **{name: rows[name] for name in ("sampling", "worker's Python")}}
    rows["scheduling and output"] = secs - sum(rows.values())
    ordered = sorted(rows.items(), key=lambda item: -item[1])
    return [Part(part=name, secs=round(value, 4), share=round(value / secs, 4)) for name, value in ordered]


def print_breakdown(rows: list[Part], num_steps: int) -> None:
    """As a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "seconds", "share", "ms per step")
    for row in rows:
        table.add_row(row["part"], f"{row['secs']:.3f}", f"{row['share']:.1%}", f"{row['secs'] / num_steps * 1e3:.3f}")
    Console().print(table)
