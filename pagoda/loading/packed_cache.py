"""PackedCache: the folder of packed weights, from which a large model loads without packing and shares its memory.

A file is made by the first process that loads a model on a CPU, and mapped by it and all later ones. Its name is a hash
of all that it depends on: the checkpoint's files, what is made of them, the rank's share, the native kernels and the
code that loads and packs. So there is nothing to invalidate; what is no longer used is removed to make room.
"""

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch

from pagoda.base.abbreviate import human_bytes
from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.native.build import one_process
from pagoda.loading.fetch_wheel import is_weights
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.packed_file import DamagedFile, PackedFileWriter, read_packed

logger = logging.getLogger("pagoda")

LEAST_BYTES = 512 << 20
"""Bytes of a checkpoint from which on it is worth a file; smaller ones are packed in a fraction of a second."""

_PACKAGE = Path(__file__).resolve().parent.parent
_DEPENDS_ON = ("kernels/linear", "layers", "loading", "models", "ops")
_SAMPLES, _SAMPLE_BYTES, _HEAD_BYTES = 64, 4096, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PackedCache:
    """max_bytes: of the folder.   checks: threads that compute checksums."""

    folder: Path
    max_bytes: int
    checks: Executor

    def open_or_make(
        self, key: str, num_bytes: Callable[[], int], write: Callable[[PackedFileWriter], None]
    ) -> Mapping[str, PackedWeight] | None:
        """Return the weights of the file `key`, which is made if there is none; None, with a line in the log, if it
        cannot be: then they are packed in memory.

        num_bytes: of the weights.   write: adds them.
        One process makes a file and others wait for it. Raises what `write` raises, but for OSError.
        """
        path = self.folder / f"{key}.packed"
        try:
            with contextlib.suppress(DamagedFile):  # another process may just make it again
                if (found := self._read(path)) is not None:
                    return found
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with one_process(path.with_suffix(".lock"), "another process packs the same weights; waiting for it ..."):
                try:
                    if (found := self._read(path)) is not None:
                        return found
                except DamagedFile as error:
                    logger.warning("%s is damaged, and made again: %s", path, error)
                for left in (path, path.with_suffix(".partial")):  # the latter by a process that was killed
                    left.unlink(missing_ok=True)
                self._make_room(num_bytes())
                self._write(path, write)
                return self._read(path)
        except (OSError, DamagedFile) as error:
            logger.warning("packed weights are not kept in %s for the next start: %s", self.folder, error)
            return None

    def _read(self, path: Path) -> Mapping[str, PackedWeight] | None:
        """Return the weights of a file, None if there is none. Raises DamagedFile."""
        try:
            found = read_packed(path, self.checks)
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # a folder that is only read
            os.utime(path)  # the file that was not used for longest is removed first
        return found

    def _write(self, path: Path, write: Callable[[PackedFileWriter], None]) -> None:
        logger.info("packing weights into %s, once for this model ...", path)
        partial = path.with_suffix(".partial")
        try:
            with partial.open("xb") as file:
                writer = PackedFileWriter(file)
                write(writer)
                writer.finish()
                os.fchmod(file.fileno(), 0o400)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what killed processes have left, and files until `num_bytes` more fit. Raises OSError if they do not.

        A file that is mapped can be removed: its memory stays until it is no longer used.
        """
        for partial in self.folder.glob("*.partial"):
            with one_process(partial.with_suffix(".lock"), waiting=None) as is_free:
                if is_free:
                    partial.unlink(missing_ok=True)
        if num_bytes > self.max_bytes:
            raise OSError(
                f"{human_bytes(num_bytes)} are more than PAGODA_PACKED_CACHE_SIZE={human_bytes(self.max_bytes)}"
            )
        states: list[tuple[os.stat_result, Path]] = []
        for file in self.folder.glob("*.packed"):
            with contextlib.suppress(FileNotFoundError):  # another process makes room, too
                states.append((file.stat(), file))
        total = sum(state.st_size for state, _ in states)
        for state, file in sorted(states, key=lambda one: one[0].st_mtime):
            if total + num_bytes > self.max_bytes:
                file.unlink(missing_ok=True)
                total -= state.st_size
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free // 2:
            raise OSError(f"{human_bytes(num_bytes)} are more than half of the {human_bytes(free)} that are free")


def packed_key(files: ModelFiles, library: Path, *made: object) -> str | None:
    """Return the name of the file of a checkpoint's packed weights.

    Of a folder, weights and settings count: logs and notes that are written into it change nothing. None for a
    checkpoint that is too small to be worth it, and for one in which a file cannot be read: it may not be needed.
    library: the native kernels.   made: what else decides what is made of the checkpoint.
    """
    try:
        sizes = {file: size for file, size in files.sizes().items() if is_weights(file) or file.suffix == ".json"}
        return None if sum(sizes.values()) < LEAST_BYTES else _digest(files, sizes, library, made)
    except OSError:
        return None


def _digest(files: ModelFiles, paths: Iterable[Path], library: Path, made: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for word in (torch.__version__, files.overrides, *made):
        digest.update(f"{word}\0".encode())
    digest.update(library.read_bytes())
    for source in sorted(path for folder in _DEPENDS_ON for path in (_PACKAGE / folder).rglob("*.py")):
        digest.update(f"{source.relative_to(_PACKAGE)}\0".encode() + source.read_bytes())
    for path in paths:
        state = path.stat()
        digest.update(f"{path.resolve()}\0{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}\0".encode())
        for piece in _samples(path, state.st_size):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _samples(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Yield the beginning of a file, where names and shapes are, and pieces all over the rest.

    Times of change tell files apart, but on file systems that invent them.
    """
    with path.open("rb", buffering=0) as file:
        yield file.read(_HEAD_BYTES)
        for number in range(_SAMPLES if num_bytes > _HEAD_BYTES else 0):
            file.seek(num_bytes * number // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)
