"""Fetch the libraries of the pages from npm, as `libraries.json` names them: `make vendor`.

For another version, change it there first. The built files are kept as they were published, with their licences; their
hashes are written back, and tests/server/test_vendored.py compares them.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pagoda" / "server" / "pages" / "static" / "chat" / "vendor"


def main() -> None:
    listed = FOLDER / "libraries.json"
    libraries = json.loads(listed.read_text())
    licences: list[str] = []
    for name, library in libraries.items():
        with tempfile.TemporaryDirectory() as folder:
            package = f"{name}@{library['version']}"
            subprocess.run(["npm", "pack", "--silent", "--pack-destination", folder, package], check=True)
            (archive,) = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as files:
                built, licence, about = (_read(files, path) for path in (library["built"], "LICENSE", "package.json"))
        library["licence"] = json.loads(about)["license"]
        library["sha256"] = hashlib.sha256(built).hexdigest()
        (FOLDER / f"{name}.js").write_bytes(built)
        licences.append(f"==== {package}: {library['licence']}\n\n{licence.decode().strip()}\n")
        print(f"{package}: {len(built):,} bytes, {library['licence']}")
    listed.write_text(json.dumps(libraries, indent=2) + "\n")
    (FOLDER / "LICENSES.txt").write_text("\n\n".join(licences))


def _read(files: tarfile.TarFile, path: str) -> bytes:
    file = files.extractfile(f"package/{path}")
    assert file is not None, path
    return file.read()


if __name__ == "__main__":
    main()
