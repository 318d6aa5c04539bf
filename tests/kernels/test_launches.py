"""What a GPU would refuse, or compile again and again: Triton binds the launches of a serving run, without a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
MOST_COMPILED = {
    "_linear": 16, "_multiply_vector": 2, "_multiply_coded_vector": 2, "_expert_linear": 2, "attend_splits": 3,
    "merge_splits": 2, "attend_tiles": 2,
}  # fmt: skip
"""Per kernel, for two kinds of ops, batch-invariant and not: of `_linear`, tiles of four sizes, with a sum that is
divided or not; of one row, layers and logits; of codes, two kinds; of experts, one for each layer; of splits, two
lengths. Others once.
"""


def test_launches_of_a_serving_run(without_triton: Callable[[str], NoReturn]) -> None:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.serving_launches"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    found = json.loads(said)
    kernels = found["kernels"]
    assert {name: count for name, count in kernels.items() if count > MOST_COMPILED.get(name, 1)} == {}
    assert len(kernels) >= 18  # a run that launches little would prove little
    x, y, z, programs = found["grids"]
    assert max(x, programs) < 2**31
    assert max(y, z) < 2**16
