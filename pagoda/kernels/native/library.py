"""Loading the compiled kernels."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from pagoda.kernels.native import build
from pagoda.kernels.native.threads import openmp_runtimes


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded kernels.   isa: the instruction set they were compiled for.   compiler: who compiled them."""

    functions: ctypes.CDLL
    path: Path
    isa: str
    compiler: str


def load(cache_dir: Path | None = None, compiler: build.Compiler | None = None, march: str = "native") -> NativeLibrary:
    """Compile if need be, and load. Raises build.NativeUnavailable where that cannot be.

    Asserts that they bring no OpenMP runtime into the process.
    """
    compiler = compiler or build.find_compiler()
    path = build.build(cache_dir or build.default_cache_dir(), compiler, march)
    openmp = openmp_runtimes()
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.NativeUnavailable(f"the compiled kernels do not load: {error}; delete {path}") from error
    brought = set(openmp_runtimes()).difference(openmp)
    assert not brought, f"the kernels have threads of their own, yet they brought {brought}"
    functions.pagoda_isa.restype = ctypes.c_char_p
    return NativeLibrary(functions, path, functions.pagoda_isa().decode(), compiler.version)
