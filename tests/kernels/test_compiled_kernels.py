"""What an interpreter does not show of kernels, in their code for a Hopper GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytestmark = pytest.mark.slow  # test_launches.py compiles, too; this reads what was compiled
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(without_triton: Callable[[str], NoReturn], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if find_spec("triton") is None:
        without_triton("Triton is not installed")
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compiled_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_sums_of_8_bit_products_leave_the_tensor_cores_early(found: dict[str, Any]) -> None:
    """The cores keep 14 bits of a sum: with Triton's default, a whole row's would be in them."""
    assert len(found["fp8 sums"]) >= 2
    assert set(found["fp8 sums"]) == {128}


def test_a_batch_invariant_decode_sums_as_a_prefill_does(found: dict[str, Any]) -> None:
    """The order in which threads add their parts follows from the layout, which the compiler chooses per kernel."""
    decode, prefill = found["layouts"]
    assert sum("reduce" in of for of in decode) == 2  # the largest score, and the sum of the weights
    assert any("nvidia_mma" in of for of in decode)
    assert decode == prefill


def test_weights_are_loaded_ahead_in_every_form(found: dict[str, Any]) -> None:
    """Codes and rows, before the loop and in it. A tile whose addresses do not look aligned is not loaded ahead."""
    ahead = found["loads ahead"]
    assert len(ahead) >= 11
    assert {form: count for form, count in ahead.items() if count < 4} == {}
