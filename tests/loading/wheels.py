"""Wheels made by the tests, and a substitute for pip that serves them from a folder."""

import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

GGUF_BYTES = b"GGUF" + bytes(range(256)) * 64


def record_hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: dict[str, bytes],
    requires: tuple[str, ...] = (),
    record: dict[str, bytes] | None = None,
) -> Path:
    """A wheel of `files`. record: contents that RECORD claims instead of the true ones."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    metadata += [f"Requires-Dist: {line}\n" for line in requires]
    members = {
        **files,
        f"{info}/METADATA": "".join(metadata).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},{record_hash({**members, **(record or {})}[path])},{len(members[path])}" for path in members]
    members[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / f"{stem}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


def pip_from(index: Path, log: Path) -> tuple[str, ...]:
    """A command like `pip download` that takes wheels of `index` and appends what it was asked for to `log`."""
    script = index / "pip.py"
    index.mkdir(parents=True, exist_ok=True)
    script.write_text(
        f"""
import pathlib, shutil, sys
wanted = sys.argv[-1]
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
with open({str(log)!r}, "a") as log:
    print(wanted, file=log)
name, _, version = wanted.partition("==")
found = sorted(pathlib.Path({str(index)!r}).glob(name.replace("-", "_") + "-" + (version or "*") + "-py3*.whl"))
if not found:
    sys.exit("ERROR: No matching distribution found for " + wanted)
target.mkdir(parents=True, exist_ok=True)
shutil.copy(found[-1], target)
"""
    )
    return (sys.executable, str(script))


def failing_pip(folder: Path, stderr: str) -> tuple[str, ...]:
    """A pip that prints `stderr` and fails."""
    script = folder / "failing_pip.py"
    script.write_text(f"import sys\nsys.exit({stderr!r})\n")
    return (sys.executable, str(script))


def telling_pip(folder: Path, url: str, sha256: str, log: Path) -> tuple[str, ...]:
    """A pip that says where a wheel is; one that is asked to download it fails, and says so in `log`."""
    script = folder / "telling_pip.py"
    report = {"install": [{"download_info": {"url": url, "archive_info": {"hashes": {"sha256": sha256}}}}]}
    script.write_text(
        f"""
import sys
if sys.argv[1] == "--version":
    print("pip 25.3 from /here (python 3.11)")
elif sys.argv[1] == "install" and "--dry-run" in sys.argv:
    print({json.dumps(report)!r})
else:
    open({str(log)!r}, "a").write(" ".join(sys.argv[1:]))
    sys.exit("ERROR: 403 Forbidden")
"""
    )
    return (sys.executable, str(script))
