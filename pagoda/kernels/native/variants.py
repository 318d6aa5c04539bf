"""The builds of the kernels that a wheel for x86-64 contains, and which of them this CPU runs.

`python -m pagoda.kernels.native.variants [NAME ...]` prints their compiler flags for CMakeLists.txt.
"""

import platform
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pagoda.kernels.native.build import compile_flags, include_flag
from pagoda.kernels.native.threads import cpu_flags

PREBUILT = Path(__file__).resolve().parent / "prebuilt"


@dataclass(frozen=True, slots=True)
class Variant:
    """One build. name: that the library has for itself, too.

    needs: the features of a CPU that runs it, as Linux names them.   target: compiler flags that allow just these.
    """

    name: str
    needs: frozenset[str]
    target: tuple[str, ...]


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI, _VBMI, _BF16 = "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"

VARIANTS = (
    Variant(
        "avx512_bf16",
        _V4 | {"avx512_vnni", "avx512vbmi", "avx512_bf16"},
        ("-march=x86-64-v4", _VNNI, _VBMI, _BF16),  # Sapphire Rapids, Zen 4
    ),
    Variant("avx512_vbmi", _V4 | {"avx512_vnni", "avx512vbmi"}, ("-march=x86-64-v4", _VNNI, _VBMI)),  # Ice Lake
    Variant("avx512_vnni", _V4 | {"avx512_vnni"}, ("-march=x86-64-v4", _VNNI)),  # Cascade Lake
    Variant("avx512", _V4, ("-march=x86-64-v4",)),  # Skylake
    Variant("avx2_vnni", _V3 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni")),  # Alder Lake
    Variant("avx2", _V3, ("-march=x86-64-v3",)),  # Haswell, Zen
    Variant("sse4_2", _V2, ("-march=x86-64-v2",)),
)
"""The best first."""


def runnable(flags: Collection[str]) -> list[Variant]:
    """Return the variants that a CPU with these features runs, the best first."""
    return [variant for variant in VARIANTS if variant.needs.issubset(flags)]


def prebuilt(folder: Path = PREBUILT, flags: Collection[str] | None = None) -> Path | None:
    """Return the library in `folder` that is best for a CPU with these features (None: this one); None if none is."""
    found = (folder / f"kernels-{variant.name}.so" for variant in runnable(cpu_flags() if flags is None else flags))
    return next(filter(Path.exists, found), None)


def main(names: list[str]) -> None:
    """Print a line per variant of these names (none: all): its name and flags, quoted for a shell."""
    known = {variant.name: variant for variant in VARIANTS} if platform.machine() == "x86_64" else {}
    if unknown := set(names).difference(known):
        raise SystemExit(f"no such variants: {', '.join(sorted(unknown))} (there are {', '.join(known) or 'none'})")
    for name in names or known:
        print(shlex.join([name, *compile_flags(known[name].target), include_flag()]))


if __name__ == "__main__":
    main(sys.argv[1:])
