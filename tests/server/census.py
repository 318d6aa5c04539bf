"""How many objects of pagoda's types a process holds, and how many entries their containers have, counted inside it."""

import asyncio
import gc
import json
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.shared_numbers import SharedNumbers

KEPT = "kept"
_INTERVAL_S = 0.04
_ASKED, _ANSWERED = range(2)


def count_objects() -> dict[str, int]:
    """Objects by the name of their class; "Class.field": entries of all containers in that field.

    "tasks", "threads", and "all objects": those that Python's collector tracks, of any type. "kept": those that it did
    not look at before (keep_objects); they are counted, too.
    """
    num_kept = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    counts: Counter[str] = Counter()
    objects = gc.get_objects()
    counts["all objects"] = len(objects)
    for one in objects:
        kind = type(one)
        if kind is asyncio.Task or isinstance(one, asyncio.Task):
            counts["tasks"] += 1
        if not str(kind.__module__).startswith("pagoda."):
            continue
        counts[kind.__qualname__] += 1
        names = [*_field(one, "__dict__", ()), *(n for k in kind.__mro__ for n in getattr(k, "__slots__", ()))]
        for name in names:
            value = _field(one, name)
            if isinstance(value, dict | list | set | deque):
                counts[f"{kind.__qualname__}.{name}"] += len(value)
            elif isinstance(value, np.ndarray):
                counts[f"{kind.__qualname__}.{name}"] += value.size
    counts["threads"] = threading.active_count()
    counts[KEPT] = num_kept
    if num_kept:
        del objects, one
        gc.freeze()
    return dict(counts)


def _field(one: object, name: str, default: Any = None) -> Any:
    """Return an attribute without the class's `__getattr__`, which may refuse names, as that of a recorded tensor."""
    try:
        return object.__getattribute__(one, name)
    except AttributeError:
        return default


class CensusTaker:
    """The side of the process whose objects are counted: a thread, from `start` on, that counts when asked."""

    def __init__(self, folder: Path, name: str) -> None:
        self._shared = SharedNumbers(folder / f"{name}-census")
        self._result = folder / f"{name}-census.json"

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            if (asked := self._shared.get(_ASKED)) != self._shared.get(_ANSWERED):
                self._result.write_text(json.dumps(count_objects()))
                self._shared.set(_ANSWERED, asked)


class CensusReader:
    """The test's side. Create it before the process."""

    def __init__(self, folder: Path, name: str) -> None:
        self._shared = SharedNumbers(folder / f"{name}-census", create=True)
        self._result = folder / f"{name}-census.json"

    def take(self, timeout_s: float = 60.0) -> dict[str, int]:
        """See count_objects. Raises TimeoutError if the process does not answer."""
        number = self._shared.get(_ASKED) + 1
        self._shared.set(_ASKED, number)
        end_s = time.monotonic() + timeout_s
        while self._shared.get(_ANSWERED) != number:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the process has not counted its objects within {timeout_s:g} s")
            time.sleep(0.002)
        counted: dict[str, int] = json.loads(self._result.read_text())
        return counted
