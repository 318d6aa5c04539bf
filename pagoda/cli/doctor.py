"""`pagoda doctor`: report the hardware, the selected kernels and why, and the cached models."""

import json
import os
import platform
import socket
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pagoda.base.errors import ConfigError
from pagoda.cli.help_format import CacheDir, JsonObject

# Instruction sets that the kernels have code for, as /proc/cpuinfo spells them, best last.
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub", "transformers", "triton")


def doctor(
    cache_dir: CacheDir = None,
    as_json: JsonObject = False,
    bundle: Annotated[
        Path | None, typer.Option(help="New .tar.gz for a bug report: this report, settings, environment, --include.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", help="File that the server has as --config, for --bundle.")
    ] = None,
    include: Annotated[list[Path] | None, typer.Option(help="Log or recording for --bundle. May be repeated.")] = None,
) -> None:
    """Report hardware and selected kernels.

    Exit with code 1 if the engine cannot run here. In a bundle, keys, tokens and passwords are hidden.
    """
    if bundle is None and (settings or include):
        raise ConfigError("--settings and --include go into a bundle: add --bundle FILE.tar.gz")
    found: list[tuple[str, str, bool]] = []  # name, text, broken
    sections: list[tuple[str, Callable[[], str]]] = [
        ("pagoda", lambda: f"{version('pagoda-llm')} on Python {platform.python_version()}, {sys.platform}"),
        ("cpu", cpu_line),
        ("threads", threads_line),
        ("memory", memory_line),
        ("compiler", compiler_line),
        ("packages", packages_line),
        ("gpu", gpu_line),
        ("kernels", kernels_line),
        ("openmp", openmp_line),
        ("ranks", ranks_line),
        ("cache", lambda: cache_lines(cache_dir)),
    ]
    for name, describe in sections:
        try:
            found.append((name, describe(), False))
        except Exception as error:  # report anything that is broken, and continue
            found.append((name, f"broken: {type(error).__name__}: {error}", True))
    broken = [name for name, _, is_broken in found if is_broken]
    report = {"healthy": not broken, "broken": broken, **{name: text for name, text, _ in found}}
    if as_json:
        print(json.dumps(report))
    else:
        _print(found)
    if bundle is not None:
        from pagoda.cli.bundle import write_bundle

        names = write_bundle(bundle, report, settings, include or [])
        print(f"{bundle} has {', '.join(names)}: look through it before you share it", file=sys.stderr)
    if broken:
        raise typer.Exit(1)


def _print(found: list[tuple[str, str, bool]]) -> None:
    from rich.text import Text

    from pagoda.cli.console import print_table

    print_table([(name, Text(text, style="red" if is_broken else "")) for name, text, is_broken in found])


def cpu_line(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name and the relevant instruction sets."""
    try:
        lines = cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    found = [flag for flag in CPU_FLAGS if flag in flags]
    return f"{facts.get('model name', platform.machine())}; {', '.join(found) or 'none of ' + ', '.join(CPU_FLAGS)}"


def threads_line() -> str:
    from pagoda.kernels.native.threads import available_cpus, describe_cpus

    return f"{available_cpus()} used by default ({describe_cpus()}), {os.cpu_count()} in the machine"


def memory_line() -> str:
    from pagoda.base.abbreviate import human_bytes
    from pagoda.worker.memory import available_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{human_bytes(available_memory())} available to this process, {human_bytes(total)} in the machine"


def compiler_line() -> str:
    from pagoda.kernels.native.build import NativeUnavailable, find_compiler
    from pagoda.kernels.native.variants import prebuilt

    try:
        found = find_compiler()
    except NativeUnavailable as error:
        return "none, and none is needed: the kernels are prebuilt" if prebuilt() else str(error)
    return f"{found.version} ({found.path})"


def packages_line() -> str:
    parts: list[str] = []
    for package in PACKAGES:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join(parts)


def gpu_line() -> str:
    from pagoda.worker.devices import device_names, device_type

    return "\n".join(filter(None, (device_type(name).report() for name in device_names())))


def kernels_line() -> str:
    """Return what `kernels="auto"` selects here; compile the kernels if necessary."""
    from pagoda.base.config import ParallelConfig
    from pagoda.kernels.native.build import NativeUnavailable
    from pagoda.kernels.native.library import load
    from pagoda.kernels.native.variants import PREBUILT
    from pagoda.worker.devices import select_device

    device = select_device(ParallelConfig())
    kernels = device.chosen_kernels("auto")
    if kernels == "triton":
        if find_spec("triton") is None:
            return f"torch on {device.device} (slower), because Triton is not installed: pip install triton"
        return f"triton {version('triton')} on {device.device}, compiled when first used"
    if kernels != "native":
        return f"{kernels} on {device.device}"
    try:
        library = load()
    except NativeUnavailable as error:
        return f"torch (slower), because the native kernels are not available: {error}"
    origin = "prebuilt" if library.path.parent == PREBUILT else "compiled on this machine"
    return f"native for {library.isa}, {origin} by {library.compiler}: {library.path}"


def openmp_line() -> str:
    """Name the loaded OpenMP runtimes. Only torch's is expected, because the kernels use their own threads."""
    from pagoda.kernels.native.threads import openmp_runtimes

    found = openmp_runtimes()
    if len(found) > 1:
        raise RuntimeError(f"{len(found)} runtimes in one process, which compete for the cores: {', '.join(found)}")
    return f"one runtime, torch's: {found[0]}" if found else "none"


def ranks_line() -> str:
    """Return what several ranks need: shared memory on this machine, and Ray for those on others."""
    os.close(os.memfd_create("pagoda-doctor"))
    if find_spec("ray") is None:
        return "shared memory; no Ray, which ranks on several machines need: pip install ray"
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not host:
        return f"shared memory; Ray {version('ray')} (RAY_ADDRESS is not set: the cluster that runs on this machine)"
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError) as error:
        raise RuntimeError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error
    return f"shared memory; Ray {version('ray')}, whose cluster at {address} answers"


def cache_lines(cache_dir: str | None) -> str:
    from pagoda.base.abbreviate import human_bytes
    from pagoda.base.config import ModelConfig
    from pagoda.cli.models import cached_folders
    from pagoda.loading.resolve import cache_dir_of

    root = cache_dir_of(ModelConfig(cache_dir=cache_dir))
    lines = [str(root)]
    lines += [f"{folder.name}: {human_bytes(num_bytes)}" for folder, num_bytes in cached_folders(root)]
    kernels = list((root / "native").glob("*.so"))
    if kernels:
        lines.append(f"compiled kernels: {len(kernels)} files, {human_bytes(sum(k.stat().st_size for k in kernels))}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "nothing fetched yet"])
