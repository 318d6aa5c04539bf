"""Loading the compiled kernels into the process that already runs torch's OpenMP threads."""

import ctypes
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from pagoda.kernels.native import build

logger = logging.getLogger("pagoda")

# torch is imported above for a reason: its OpenMP runtime must be mapped before ours is looked for.
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)(-\w+)?\.so[.\d]*$")


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The loaded kernels.   isa: the instruction set they were compiled for.   compiler: who compiled them."""

    functions: ctypes.CDLL
    path: Path
    isa: str
    compiler: str


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> list[Path]:
    """The OpenMP runtimes mapped into this process, each once, torch's first."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    mapped = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    found = sorted({Path(name).resolve() for name in mapped if _RUNTIME.search(name)})
    home = str(
        Path(torch.__file__).resolve().parent
    )  # a wheel keeps its libraries in torch/lib or torch.libs beside it
    return sorted(found, key=lambda path: not str(path).startswith(home))


def load(cache_dir: Path | None = None, compiler: build.Compiler | None = None, march: str = "native") -> NativeLibrary:
    """Compile if need be, and load.

    Raises build.NativeUnavailable without a compiler, without an OpenMP runtime to share with torch, or if loading
    brought a second one into the process.
    """
    runtimes = openmp_runtimes()
    if not runtimes:
        raise build.NativeUnavailable(
            f"torch {torch.__version__} has no OpenMP runtime whose threads the native kernels could share; "
            "a wheel of torch for Linux has one"
        )
    if len(runtimes) > 1:
        # Somebody imported a package with a runtime of its own before us: slower, but not ours to refuse.
        logger.warning("several OpenMP runtimes share this process, which slows it: %s", ", ".join(map(str, runtimes)))
    compiler = compiler or build.find_compiler()
    path = build.build(runtimes[0], cache_dir or build.default_cache_dir(), compiler, march)
    functions = ctypes.CDLL(str(path))
    after = openmp_runtimes()
    if after != runtimes:
        raise build.NativeUnavailable(f"loading {path} brought a second OpenMP runtime: {', '.join(map(str, after))}")
    functions.pagoda_isa.restype = ctypes.c_char_p
    return NativeLibrary(functions, path, functions.pagoda_isa().decode(), compiler.version)
