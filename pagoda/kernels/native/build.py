"""Compile the native kernels on first use, and cache them.

Every `kernels/<op>/*.cpp` is compiled to its own object, in parallel, and linked into one library that is kept in
the user's cache. The sources include abi.h, which is generated from the op table. The library's name is a hash of all
inputs: sources, headers, compiler, flags and the CPU. So an edited source or a moved home folder never loads a
stale or foreign library, and there is nothing to invalidate.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagoda.base.cache_home import cache_home, temporary_folder
from pagoda.kernels.native import header
from pagoda.kernels.native.threads import available_cpus

logger = logging.getLogger("pagoda")

KERNELS = Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "clang++", "c++")
REMEDY = "install a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
# No contraction: whether a * b + c is fused must not depend on how the compiler unrolls the loop around it, or rows
# computed by different tiles would differ in their last bit. Fused multiply-adds are explicit in the kernels.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unused-function", "-Wno-ignored-attributes"),
    # g++ 12 finds its own intrinsics uninitialised.
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unknown-warning-option"),
)


class NativeUnavailable(Exception):
    """The native kernels are not available on this machine; the message says why and what to do."""


class CacheNotWritable(NativeUnavailable):
    """The folder for compiled kernels cannot be written."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its path, and the first line of its --version."""

    path: str
    version: str


def default_cache_dir() -> Path:
    """Return the folder of compiled kernels."""
    return cache_home() / "native"


def find_compiler(search_path: str | None = None) -> Compiler:
    """Return the first compiler of COMPILERS that works, on `search_path` (None: PATH). Raises NativeUnavailable."""
    for name in COMPILERS:
        path = shutil.which(name, path=search_path)
        if path is None:
            continue
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout:
            return Compiler(path, answer.stdout.splitlines()[0].strip())
    raise NativeUnavailable(f"no C++ compiler found (looked for {', '.join(COMPILERS)}): {REMEDY}")


def sources() -> list[Path]:
    """Return every source of the library in a fixed order: the longest first, because it takes longest to compile."""
    return sorted(KERNELS.glob("*/*.cpp"), key=lambda path: (-path.stat().st_size, path))


def compile_flags(target: Sequence[str]) -> list[str]:
    """Return the flags of every source. target: those that choose the instruction set."""
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [*FLAGS, *target, *wide]


def include_flag() -> str:
    """Return the flag with the folder of the sources' headers; it is no part of a library's name."""
    return f"-I{KERNELS / 'native'}"


def build(
    cache_dir: Path, compiler: Compiler, target: Sequence[str] = ("-march=native",), extra_flags: Sequence[str] = ()
) -> Path:
    """Return the compiled library, from the cache or newly compiled.

    target: flags that choose the instruction set.   extra_flags: for compiling and linking (sanitizers).
    One process at a time compiles into a cache; others wait for it, then take what it has made. What one that was
    killed has left is removed. Raises NativeUnavailable with the compiler's output if it fails.
    """
    flags = [*compile_flags(target), *extra_flags]
    library = cache_dir / f"kernels-{_fingerprint(compiler, flags)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = cache_dir / "compiling.lock"
        with one_process(lock, "another process compiles the native kernels; waiting for it ..."):
            if not library.exists():
                for stale in cache_dir.glob("build-*"):
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix="build-", dir=cache_dir) as folder:
                    _compile_all(compiler, flags, extra_flags, Path(folder), library)
    except OSError as error:
        raise CacheNotWritable(f"cannot write compiled kernels to {cache_dir}: {error}") from error
    return library


@contextlib.contextmanager
def one_process(path: Path, waiting: str | None) -> Generator[bool, None, None]:
    """Keep other processes out of what the file `path` stands for. One that ends lets go.

    waiting: what is logged if another process is in it, before waiting for that; None: do not wait, but give False.
    Raises OSError, also on file systems without locks.
    """
    from filelock import FileLock, Timeout  # not there where a wheel is built, which only asks for the flags

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except NotImplementedError as error:
        raise OSError(f"{path}: {error}") from None
    except Timeout:
        if waiting is None:
            yield False
            return
        logger.warning(waiting)
        lock.acquire()
    try:
        yield True
    finally:
        lock.release()


def _compile_all(
    compiler: Compiler, flags: Sequence[str], link_flags: Sequence[str], folder: Path, library: Path
) -> None:
    """Compile every source in `folder`, link them, and put the result at `library`."""
    logger.warning("compiling the native kernels, once for this machine (may take a minute) ...")
    started = time.perf_counter()
    (folder / header.NAME).write_text(header.header())
    flags = [*flags, include_flag(), f"-I{folder}"]
    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:
        objects = list(pool.map(lambda source: _compile(compiler, flags, source, folder), sources()))
    fresh = folder / "kernels.so"
    _run([compiler.path, "-shared", "-pthread", *link_flags, "-o", str(fresh), *map(str, objects)])
    os.replace(fresh, library)
    logger.info("native kernels compiled in %.1f s by %s: %s", time.perf_counter() - started, compiler.version, library)


def build_for_user(compiler: Compiler) -> Path:
    """Return the compiled library from the user's cache, or a temporary folder if that cannot be written.

    Raises NativeUnavailable.
    """
    try:
        return build(default_cache_dir(), compiler)
    except CacheNotWritable as error:
        try:
            folder = temporary_folder()
        except OSError:
            raise error from None
        logger.warning("%s; using %s, which does not survive a restart of the machine", error, folder)
        return build(folder, compiler)


def _compile(compiler: Compiler, flags: Sequence[str], source: Path, folder: Path) -> Path:
    target = folder / f"{source.parent.name}_{source.stem}.o"
    _run([compiler.path, *flags, "-c", str(source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NativeUnavailable(f"compiling the native kernels failed:\n{' '.join(command)}\n{done.stderr[-4000:]}")
    if done.stderr:
        logger.debug("%s", done.stderr)


def _fingerprint(compiler: Compiler, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for word in (compiler.path, compiler.version, *flags, cpu_features()):
        digest.update(word.encode() + b"\0")
    digest.update(header.header().encode() + b"\0")
    for path in [*sources(), *sorted(KERNELS.glob("*/*.h"))]:
        digest.update(path.relative_to(KERNELS).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def cpu_features() -> str:
    """Return what distinguishes CPUs for `-march=native`: the first processor's model and feature flags."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in first if line.split(":")[0].strip() in wanted)
