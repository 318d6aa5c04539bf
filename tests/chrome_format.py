"""The grammar of Chrome's trace format, as far as this project writes it."""

import itertools
from collections import defaultdict
from typing import Any

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"ts": (int, float), "dur": (int, float)},
    "C": {"ts": (int, float), "args": dict},
    "i": {"ts": (int, float), "s": str},
    "M": {"args": dict},
    "s": {"ts": (int, float), "id": int, "cat": str},
    "f": {"ts": (int, float), "id": int, "cat": str, "bp": str},
}
_COMMON: dict[str, type | tuple[type, ...]] = {"ph": str, "name": str, "pid": int, "tid": int}
_METADATA = ("process_name", "thread_name")


def check_trace(trace: dict[str, Any]) -> None:
    """Assert that it is a trace: fields and their types, slices that do not overlap, arrows between slices."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    arrows: dict[int, dict[str, Any]] = defaultdict(dict)
    for one in trace["traceEvents"]:
        fields = _COMMON | _FIELDS[one["ph"]]
        for name, kind in fields.items():
            assert isinstance(one[name], kind), one
        assert set(one) <= {*fields, "ts", "args"}, one
        assert one.get("ts", 0) >= 0, one
        assert one.get("dur", 0) >= 0, one
        track = (one["pid"], one["tid"])
        match one["ph"]:
            case "X":
                slices[track].append((one["ts"], one["ts"] + one["dur"]))
            case "C":
                assert one["args"], one
                assert all(isinstance(value, int | float) for value in one["args"].values()), one
            case "i":
                assert one["s"] in ("g", "p", "t"), one
            case "M":
                assert one["name"] in _METADATA, one
                assert isinstance(one["args"]["name"], str), one
                named.add(track)
            case kind:
                assert kind not in arrows[one["id"]], one
                arrows[one["id"]][kind] = one
    assert set(slices) <= named
    for found in slices.values():
        found.sort()
        assert all(first[1] <= second[0] + 0.01 for first, second in itertools.pairwise(found)), found
    for ends in arrows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            of_track = slices[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] <= until for begin, until in of_track), "an arrow begins and ends at a slice"
