"""Benchmarks are run by hand: what they import of pagoda exists, and what runs without a model runs."""

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import router

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_imports_of_benchmarks_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pagoda":
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "pagoda":
                    importlib.import_module(name.name)


@pytest.mark.parametrize("policy", router.POLICIES)
def test_the_simulation_of_replicas_answers_every_request_and_repeats(policy: str) -> None:
    def run() -> router.Figures:
        asks = router.WORKLOADS["sessions"](np.random.default_rng(1), 1)[:3]
        return router.Simulation(2, router.POLICIES[policy], router.H100.costs(), slow_times=2.0).run(asks)

    found, again = run(), run()
    assert len(found.ttft_s) == 3 * 8
    assert 0.001 < found.ttft_s.min() < found.ttft_s.max() < 10
    assert 0.1 < found.share < 1
    assert found.share == again.share
    assert found.ttft_s.tolist() == again.ttft_s.tolist()
