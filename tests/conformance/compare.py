"""Where two traces of a scenario differ.

Held: who is scheduled with how many tokens, admissions and their cached tokens, preemptions, drafts, encoder inputs,
free blocks, the waiting and running sets, tokens emitted, finish reasons. Not held: the order inside a step.
"""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def load_traces(path: Path) -> dict[str, list[Record]]:
    """Scenario name -> its lines."""
    traces: dict[str, list[Record]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        traces.setdefault(line["scenario"], []).append(line)
    return traces


def first_difference(expected: list[Record], got: list[Record]) -> str | None:
    """None if equal, else the step and the fields with (expected, got)."""
    for index in range(max(len(expected), len(got))):
        if index >= len(expected) or index >= len(got):
            return f"expected {len(expected)} steps, got {len(got)}"
        want, have = _orderless(expected[index]), _orderless(got[index])
        if want != have:
            fields = {
                key: (want.get(key), have.get(key))
                for key in sorted(want.keys() | have.keys())
                if want.get(key) != have.get(key)
            }
            return f"step {want.get('step')}, (expected, got): {fields}"
    return None


def _orderless(line: Record) -> Record:
    line = json.loads(json.dumps(line))  # tuples and lists, int and str keys become alike
    for key in ("scheduled", "running", "waiting"):
        if key in line:
            line[key] = sorted(line[key])
    if "admitted" in line:
        line["admitted"] = sorted(line["admitted"], key=lambda entry: entry["id"])
    return line
