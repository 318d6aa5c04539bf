"""The files of a model on local disk: their format, and the JSON that comes with them. No torch."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.hf_overrides import HFOverrides


def exists(path: Path) -> bool:
    """Return whether `path` exists; False for names that the file system cannot hold (too long, zero bytes)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return whether `path` is a file; False for names that the file system cannot hold."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


MAX_JSON_BYTES = 64 << 20
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files that say how images and sounds are prepared, where a model reads any."""


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Return the object in `path`.

    Raises ConfigError if the file cannot be read, is too large, is not JSON, is nested too deeply, or holds no object.
    """
    values = _read_json(path, max_bytes)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_json_objects(path: Path, max_bytes: int = MAX_JSON_BYTES) -> list[dict[str, object]]:
    """Return the list of objects in `path`. Raises ConfigError as `read_json_object`."""
    values = _read_json(path, max_bytes)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ConfigError(f"{path}: expected a JSON list of objects")
    return values


def _read_json(path: Path, max_bytes: int) -> object:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise ConfigError(f"{path}: file too large ({num_bytes} bytes; at most {max_bytes})")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: corrupt JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path}: corrupt JSON: {error}") from None


ModelFormat = Literal["safetensors", "gguf", "ctranslate2"]
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def split_gguf(name: str) -> tuple[str, ...]:
    """Return the names of all the files of a model, given one's name; only that if it is not one of several."""
    found = _PART.fullmatch(name)
    if found is None:
        return (name,)
    stem, count = found[1], int(found[3])
    return tuple(f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)) or (name,)


def gguf_parts(path: Path, name: str) -> tuple[Path, ...]:
    """Return the files of a model, given the first of them. name: for messages.

    Raises ConfigError for another than the first, and for a part that is missing.
    """
    parts = tuple(path.with_name(part) for part in split_gguf(path.name))
    if path != parts[0]:
        raise ConfigError(
            f"model {abbreviate(name)}: {path.name} is a part of a model in {len(parts)} files; name the first, "
            f"{parts[0]}"
        )
    for part in parts[1:]:
        if not is_file(part):
            raise ConfigError(
                f"model {abbreviate(name)}: {part} is missing: the model is in {len(parts)} files, which must be in "
                "one folder; fetch it again"
            )
    return parts


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on local disk.

    name: what the user called it.
    path: the folder (safetensors, ctranslate2) or the .gguf file, the first where there are several.
    overrides: replace settings of its config.json.
    codes_bytes: of an outline: what the codes take that its weights are; 0: they are floats.
    """

    name: str
    path: Path
    format: ModelFormat
    overrides: HFOverrides = field(default_factory=HFOverrides)
    codes_bytes: int = 0

    def sizes(self) -> dict[Path, int]:
        """Return the bytes of every file, in the order of their paths."""
        if self.path.is_dir():
            files = sorted(self.path.rglob("*"))
        else:
            files = [self.path.with_name(part) for part in split_gguf(self.path.name)]
        return {file: file.stat().st_size for file in files if file.is_file()}


def identify(path: str | Path, name: str | None = None) -> ModelFiles:
    """Identify a folder with config.json and safetensors, a .gguf file (or the first of several that are one model), or
    a folder with one; or of CTranslate2.

    name: for messages (default: the path as given). Reads no more than the first bytes of a .gguf file.
    Raises ConfigError that says what is missing.
    """
    path = Path(path).expanduser()
    name = name if name is not None else str(path)
    if path.is_file():
        return _identify_file(path, name)
    if not path.is_dir():
        raise ConfigError(f"model {abbreviate(name)}: {path} does not exist")
    if any(path.glob("*.safetensors")):
        if not (path / "config.json").is_file():
            raise ConfigError(f"model {abbreviate(name)}: {path} has safetensors files but no config.json")
        return ModelFiles(name, path, "safetensors")
    ggufs = sorted({file.with_name(split_gguf(file.name)[0]) for file in path.glob("*.gguf")})
    if len(ggufs) == 1:
        return _identify_file(ggufs[0], name)
    if ggufs:
        listed = ", ".join(file.name for file in ggufs)
        raise ConfigError(
            f"model {abbreviate(name)}: {path} has {len(ggufs)} .gguf files ({listed}); name the one to load"
        )
    if (path / "model.bin").is_file() and (path / "tokenizer.json").is_file():
        return ModelFiles(name, path, "ctranslate2")
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise ConfigError(
            f"model {abbreviate(name)}: {path} has only pickled PyTorch weights, which pagoda does not read; "
            "convert them to safetensors"
        )
    raise ConfigError(f"model {abbreviate(name)}: {path} has neither *.safetensors nor *.gguf files")


def _identify_file(path: Path, name: str) -> ModelFiles:
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"model {abbreviate(name)}: {path} is a weight file; give the folder that holds it and config.json"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"model {abbreviate(name)}: {path} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ConfigError(
            f"model {abbreviate(name)}: {path} is not a GGUF file (it starts with {magic!r}, not b'GGUF')"
        )
    gguf_parts(path, name)
    return ModelFiles(name, path, "gguf")
