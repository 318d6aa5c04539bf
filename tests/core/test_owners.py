"""One writer per fact: which file of pagoda/core assigns each column and each attribute that several files read."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "pagoda" / "core"

# Written by subscript, also through a local name: column[rows] = ...
COLUMNS = {
    "entries": "kv/block_tables.py",
    "num_blocks": "kv/block_tables.py",
    "num_cross_blocks": "kv/block_tables.py",
    "num_released": "kv/block_tables.py",
    "_reserved_until": "kv/block_tables.py",
    "num_cached": "kv/prefix_cache.py",
    "ref_count": "kv/block_pool.py",
    "has_content": "kv/block_pool.py",
    "pinned_until": "kv/block_pool.py",
    **dict.fromkeys(
        (
            "_token_ids",
            "_num_prompt_tokens",
            "_num_tokens",
            "_num_computed",
            "_num_pending",
            "_num_in_flight",
            "_is_pooled",
            "_is_beam",
            "_length_limit",
            "_running_order",
            "_handle",
            "_index",
            "_client",
            "sequence_of",
        ),
        "request_table.py",
    ),
    "_num_offered": "drafts.py",
    "offered": "drafts.py",
    "prefilling": "running_batch.py",
    "leaders": "running_batch.py",
    "requests": "lifecycle.py",
    "searches": "committing_beams.py",
}

# Written as attributes of an object that was built elsewhere: request.status = ...
ATTRIBUTES = {
    "status": "lifecycle.py",
    "end": "lifecycle.py",
    "sort_key": "lifecycle.py",
    "admission": "lifecycle.py",
    "held_for": "lifecycle.py",
    "awaiting_fork": "finishing.py",
    "has_output": "lifecycle.py",
    "num_admissions": "lifecycle.py",
    "num_prompt_logprobs_sent": "committing.py",
    "row": "request_table.py",
    "token_ids": "request_table.py",
    "num_computed": "request_table.py",
    "has_prompts": "finishing.py",
    "row_cap": "rules.py",
    "is_steady": "running_batch.py",
    "num_seqs": "running_batch.py",
    "has_pinned_rows": "request_table.py",
    "last_prompt_step_s": "in_flight.py",
}

# StepPlan takes back what it was given, lifecycle.py takes a beam search back to its beginning, and two owners keep a
# dict of the same name for themselves.
EXCEPTIONS = {
    ("is_steady", "step_plan.py"),
    ("awaiting_fork", "lifecycle.py"),
}
SAME_NAME = {("requests", "running_batch.py")}  # batch.requests


class Writes(ast.NodeVisitor):
    """Collects which attributes a module assigns, outside of the constructor that declares them."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.columns: set[str] = set()
        self._names: dict[str, set[str]] = defaultdict(set)  # local name -> attributes that it may be
        self._in_constructor = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._names, self._in_constructor
        self._names, self._in_constructor = defaultdict(set), node.name == "__init__"
        self.generic_visit(node)
        self._names, self._in_constructor = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._store(target)
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._store(node.target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._store(node.target)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._store(target)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """The names in `target` may be what `value` names without calling anything on it."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._bind(one, its)
            return
        is_zip = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "zip"
        parts = value.args if is_zip else [value]  # type: ignore[attr-defined]
        named: set[str] = set()
        for part in parts:
            while isinstance(part, ast.Subscript):
                part = part.value
            if isinstance(part, ast.Attribute):
                named.add(part.attr)
            elif isinstance(part, ast.Name):
                named |= self._names[part.id]
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self._names[name.id] |= named

    def _store(self, target: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._store(one)
        elif isinstance(target, ast.Attribute):
            own = isinstance(target.value, ast.Name) and target.value.id == "self" and self._in_constructor
            if not own:
                self.attributes.add(target.attr)
        elif isinstance(target, ast.Subscript):
            base: ast.expr = target
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Attribute):
                self.columns.add(base.attr)
            elif isinstance(base, ast.Name):
                self.columns |= self._names[base.id]


def writes_of(source: str) -> Writes:
    writes = Writes()
    writes.visit(ast.parse(source))
    return writes


def test_every_fact_has_one_writer() -> None:
    columns: dict[str, set[str]] = defaultdict(set)
    attributes: dict[str, set[str]] = defaultdict(set)
    for path in sorted(CORE.rglob("*.py")):
        name, writes = path.relative_to(CORE).as_posix(), writes_of(path.read_text())
        for column in writes.columns & COLUMNS.keys():
            columns[column].add(name)
        for attribute in writes.attributes & ATTRIBUTES.keys():
            attributes[attribute].add(name)
    others = {
        (fact, name)
        for found, owners in ((columns, COLUMNS), (attributes, ATTRIBUTES))
        for fact, names in found.items()
        for name in names
        if name != owners[fact]
    }
    assert others - EXCEPTIONS - SAME_NAME == set()
    assert {fact for fact, owner in COLUMNS.items() if owner not in columns[fact]} == set(), "no longer written there"
    assert {fact for fact, owner in ATTRIBUTES.items() if owner not in attributes[fact]} == set()


@pytest.mark.parametrize(
    "source",
    [
        "def f(t, row): t.ref_count[row] = 1",
        "def f(t, row): t.ref_count[row] += 1",
        "def f(t, row): counts = t.ref_count; counts[row] = 1",
        "def f(t, row):\n  for counts in t.ref_count: counts[row] = 1",
        "def f(t, row):\n  for group, counts in zip(t.groups, t.ref_count, strict=True): counts[row] = 1",
        "def f(t, row): t.ref_count[0][row, :3] = 1",
        "def f(t, row): a, counts = 1, t.ref_count[0]; counts[row] = 1",
        "def f(t, row): del t.ref_count[row]",
    ],
)
def test_the_test_sees_writes(source: str) -> None:
    assert "ref_count" in writes_of(source).columns
    assert not writes_of("def f(t, row): return t.ref_count[row]").columns
