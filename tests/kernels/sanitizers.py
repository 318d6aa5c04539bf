"""`make test-sanitizers`: kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, threads under TSan.

ASan's runtime is preloaded into Python, so the tests run as they are, on a library compiled with it. TSan would watch
all of torch, so it gets a C++ driver of its own (threads_driver.cpp).
"""

import os
import subprocess
import sys
from pathlib import Path

from pagoda.kernels.native import build, header

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent.parent
CACHE = REPOSITORY / "build" / "sanitizers"
# A finding ends the process; pytest leaves stderr alone (--capture=sys), so that the report is seen.
ADDRESS_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O2")
FILES = (
    "ops",
    "linear",
    "gguf_codes",
    "code_rows",
    "int4_products",
    "attention",
    "bidirectional",
    "moe",
    "collectives",
    "recording",
    "op_table",
    "native_sampling",
    "short_conv",
    "scan",
    "shared_segments",
)
# What compiles or loads libraries of its own, what needs more memory than it is worth, and Triton's interpreter.
SKIPPED = "not compile and not load and not library and not triton"


def main() -> int:
    """Run both; return the number of parts that found something."""
    compiler = build.find_compiler()
    return check_memory(compiler) + check_threads(compiler)


def check_memory(compiler: build.Compiler) -> int:
    """The tests of kernels, of replay and of experts in MXFP4 with ASan and UBSan."""
    program = f"""
import sys, pytest
from pathlib import Path
from pagoda.kernels.native import build, library
checked = library.load(build.build(Path({str(CACHE)!r}), build.find_compiler(), extra_flags={ADDRESS_FLAGS!r}))
library.load = lambda: checked  # before the tests' conftest takes it
tests = [f"tests/kernels/test_{{name}}.py" for name in {FILES!r}]
tests += ["tests/models/test_replay.py", "tests/models/test_mxfp4.py"]
options = ["-x", "-q", "--capture=sys", "-p", "no:cacheprovider", "-m", "not slow", "-k", {SKIPPED!r}]
sys.exit(pytest.main([*options, *tests, *sys.argv[1:]]))
"""
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it allocated
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", program, *sys.argv[1:]]
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode
    print(f"ASan and UBSan: {'clean' if found == 0 else f'exit code {found}'}", flush=True)
    return int(found != 0)


def check_threads(compiler: build.Compiler) -> int:
    """The pool, and the ops in which threads hand work to each other, with TSan."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / header.NAME).write_text(header.header())
    driver = CACHE / "threads_driver"
    flags = [flag for flag in build.FLAGS if flag not in ("-fvisibility=hidden", "-fPIC", "-O3")]
    sources = [path for path in build.sources() if path.parent.name != "sampling"]
    flags.append("-Werror=missing-field-initializers")  # the driver does not know of a new field of an op
    command = [compiler.path, *flags, "-O2", "-g1", "-march=native", "-fsanitize=thread", "-pthread", f"-I{CACHE}"]
    command += [
        f"-I{build.KERNELS / 'native'}",
        "-o",
        str(driver),
        str(TESTS / "threads_driver.cpp"),
        *map(str, sources),
    ]
    subprocess.run(command, check=True)
    # Without address randomisation: older runtimes do not know where newer systems put things.
    run = ["setarch", "-R", str(driver)] if Path("/usr/bin/setarch").exists() else [str(driver)]
    found = subprocess.run(run, env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}, check=False).returncode
    print(f"TSan: {'clean' if found == 0 else f'exit code {found}'}", flush=True)
    return int(found != 0)


def _runtime(compiler: build.Compiler, name: str) -> str:
    asked = subprocess.run([compiler.path, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
