"""The builds of the kernels in a wheel: which one a CPU gets, what they compute, which instructions they contain."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from pagoda.kernels.native import build, library
from pagoda.kernels.native.threads import cpu_flags
from pagoda.kernels.native.variants import VARIANTS, Variant, prebuilt, runnable

V2 = "sse4.2+cx16+popcnt+ibt"  # what marks targets of jumps does nothing on older CPUs
V3 = f"{V2}+avx2+bmi+bmi2+f16c+fma+lzcnt+movbe"
V4 = f"{V3}+avx512bw+avx512cd+avx512dq+avx512f+avx512vl"
ASSEMBLES = {
    "sse4_2": V2,
    "avx2": V3,
    "avx2_vnni": f"{V3}+avx_vnni",
    "avx512": V4,
    "avx512_vnni": f"{V4}+avx512_vnni",
    "avx512_vbmi": f"{V4}+avx512_vnni+avx512vbmi",
    "avx512_bf16": f"{V4}+avx512_vnni+avx512vbmi+avx512_bf16",
}
"""What each variant may contain, in the words of the GNU assembler."""

# Features of some CPUs, as /proc/cpuinfo has them.
HASWELL = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
CASCADE_LAKE = f"{SKYLAKE} avx512_vnni"
ICE_LAKE = f"{CASCADE_LAKE} avx512vbmi avx512_vbmi2 gfni"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3", "sse4_2"),
        (HASWELL.replace("f16c ", ""), "sse4_2"),
        (HASWELL, "avx2"),
        (f"{HASWELL} avx_vnni", "avx2_vnni"),
        (SKYLAKE, "avx512"),
        (CASCADE_LAKE, "avx512_vnni"),
        (f"{CASCADE_LAKE} avx512_bf16", "avx512_vnni"),  # Cooper Lake
        (ICE_LAKE, "avx512_vbmi"),
        (f"{ICE_LAKE} avx_vnni avx512_bf16 amx_int8", "avx512_bf16"),
    ],
)
def test_a_cpu_gets_the_best_variant_that_it_runs(flags: str, name: str, tmp_path: Path) -> None:
    for variant in VARIANTS:
        (tmp_path / f"kernels-{variant.name}.so").touch()
    assert prebuilt(tmp_path, flags.split()) == tmp_path / f"kernels-{name}.so"


def test_variants_that_were_not_built_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "kernels-avx2.so").touch()
    assert prebuilt(tmp_path, ICE_LAKE.split()) == tmp_path / "kernels-avx2.so"
    assert prebuilt(tmp_path, ["sse4_2"]) is None
    assert prebuilt(tmp_path / "none", ICE_LAKE.split()) is None


def test_features_are_those_of_the_first_cpu(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert not cpu_flags(tmp_path)
    text = "model name\t: A CPU\nflags\t\t: fpu avx2 avx_vnni\nbugs\t: spectre\n\nflags\t: other\n"
    (tmp_path / "proc" / "cpuinfo").write_text(text)
    assert cpu_flags(tmp_path) == {"fpu", "avx2", "avx_vnni"}


def instructions(path: Path) -> str:
    """Return the instructions of a library, each once and without padding, as the assembler takes them.

    Compilers write `bsf` with a prefix that older CPUs ignore, where it is never asked about 0. It is the code of
    `tzcnt`, and objdump shows that.
    """
    command = ["objdump", "--disassemble", "--wide", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {re.sub(r"[#<].*", "", line).strip() for line in re.findall(r"^ +[0-9a-f]+:\t(.*)$", text, re.MULTILINE)}
    jumps = re.compile(r"((?:bnd )?(?:j|call)\w* +)([0-9a-f]+)")
    found = {re.sub(r"^tzcnt\b", "bsf", line) for line in found}
    lines = sorted({jumps.sub(r"\1 0x\2", line) if jumps.fullmatch(line) else line for line in found})
    return "".join(f"{line}\n" for line in lines if not line.startswith("data16"))


def foreign(text: str, extensions: str) -> list[str]:
    """Return what the assembler says of instructions that a CPU with no more than these extensions lacks."""
    command = ["as", f"-march=generic64+{extensions}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert "invalid -march" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if "Error: " in line]


@pytest.fixture(scope="session")
def built(
    compiler: build.Compiler, tmp_path_factory: pytest.TempPathFactory, without_native: Callable[[str], NoReturn]
) -> Callable[[Variant], Path]:
    if not runnable(cpu_flags()):
        without_native("variants are for x86-64")
    cache = tmp_path_factory.mktemp("variants")
    return lambda variant: build.build(cache, compiler, variant.target)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_has_no_instruction_beyond_its_set(variant: Variant, built: Callable[[Variant], Path]) -> None:
    """Also of those that this machine cannot run."""
    if not shutil.which("objdump") or not shutil.which("as"):
        pytest.skip("needs GNU binutils")
    text = instructions(built(variant))
    assert text.count("\n") > 10_000
    assert not foreign(text, ASSEMBLES[variant.name])[:10]
    lesser = V2 if variant.name.startswith("avx2") else V3
    assert variant.name == "sse4_2" or foreign(text, lesser), "then there would be no need for it"


SOFTWARE = Path(__file__).parent / "instructions_in_software.h"
ASSEMBLY = re.compile(
    r'asm\("(?:%\{vex%\} )?(vpdp\w+) %2, %1, %0" : "\+[vx]"\((\w+)\) : "[vx]"\((\w+)\), "[vx]"\((\w+)\)\)'
)


def in_software(*extensions: str) -> tuple[str, ...]:
    """Return the flags of a build for AVX2 that takes the branches for AVX-VNNI, or AVX-512 with these extensions.

    Loops that are vectors elsewhere take the compiler minutes above -O1.
    """
    allowed = [f"-DSOFTWARE_{extension}" for extension in extensions]
    return ("-march=x86-64-v3", "-O1", "-include", str(SOFTWARE), *allowed)


def sources_without_assembly(folder: Path) -> Path:
    """Copy the kernels' sources to `folder`, with calls of what defines VNNI's instructions in place of assembly."""
    for path in [*build.KERNELS.glob("*/*.h"), *build.KERNELS.glob("*/*.cpp")]:
        copy = folder / path.relative_to(build.KERNELS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(ASSEMBLY.sub(r"\2 = software::\1(\2, \3, \4)", path.read_text()))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((variant.name, variant.target) for variant in VARIANTS[1:]),
        # What the kernels do with AVX-VNNI and AVX-512, for CPUs without them.
        ("avx2_vnni", in_software("AVX_VNNI")),
        ("avx512", in_software()),
        ("avx512_bf16", in_software("VNNI", "VBMI", "BF16")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(Path(word).name for word in value),
)
def test_every_variant_computes_the_same(
    name: str, target: tuple[str, ...], compiler: build.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of ops and attention, on every variant that this machine runs."""
    chosen = "native or bits"
    if "-include" in target:
        chosen = f"({chosen}) and not threads"  # which take minutes so
        needs = next(variant.needs for variant in VARIANTS if variant.name == "avx2")
        monkeypatch.setattr(build, "KERNELS", sources_without_assembly(tmp_path / "sources"))
    else:
        needs = next(variant.needs for variant in VARIANTS if variant.name == name)
    if missing := needs - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    path = build.build(tmp_path, compiler, target)
    program = f"""
import sys, pytest
from pathlib import Path
from pagoda.kernels.native import library
variant = library.load(Path({str(path)!r}))
assert variant.isa == {name!r}
library.load = lambda: variant  # before the tests' conftest takes it
names = ("ops", "linear", "attention", "native_sampling", "constraints")
tests = [f"tests/kernels/test_{{name}}.py" for name in names]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", {chosen!r}, *tests]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("module", ["header", "variants"])
def test_what_a_wheel_is_built_with_is_enough_to_ask_for_flags(module: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import pagoda.kernels.native.{module}; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert set(found) <= {"pagoda", "typing_extensions"}  # `requires` of [build-system] in pyproject.toml


def test_the_library_of_a_checkout_names_its_variant(native: object) -> None:
    """-march=native gives what a wheel would have chosen."""
    best = runnable(cpu_flags())
    assert library.load().isa == (best[0].name if best else "portable")
