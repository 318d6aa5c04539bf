"""Load the compiled kernels and bind every function as abi.py declares it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pagoda.kernels.native import build, variants
from pagoda.kernels.native.abi import FUNCTIONS, ctype
from pagoda.kernels.native.threads import openmp_runtimes


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded kernels.

    functions: by name, with their argument types set.   isa: the instruction set they were compiled for.
    compiler: what compiled them.
    """

    functions: ctypes.CDLL
    path: Path
    isa: str
    compiler: str

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The C function pagoda_<name>."""
        return getattr(self.functions, f"pagoda_{name}")


@cache
def load(path: Path | None = None) -> NativeLibrary:
    """Load the library at `path`, or without one the best for this CPU: prebuilt, else compiled if needed.

    A process looks once: later calls return what the first has found, and run no compiler to ask for its version.
    Raises build.NativeUnavailable if there is none, and AssertionError if loading it adds an OpenMP runtime.
    """
    if path is None:
        path = variants.prebuilt() or build.build_for_user(build.find_compiler())
    openmp = openmp_runtimes()
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.NativeUnavailable(f"the compiled kernels do not load: {error} ({path})") from error
    added = set(openmp_runtimes()).difference(openmp)
    assert not added, f"the kernels have their own threads, yet loading them added {added}"
    for name, declared in FUNCTIONS.items():
        function = getattr(functions, name)  # cached; functions[name] would be a new one each time
        function.argtypes = [ctype(c_type) for c_type in declared.parameters.values()]
        function.restype = ctype(declared.returns)
    return NativeLibrary(functions, path, functions.pagoda_isa().decode(), functions.pagoda_compiler().decode())
