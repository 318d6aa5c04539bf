"""ModelFiles: the files of a model on local disk, and their format."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError
from pagoda.base.hf_overrides import HFOverrides

ModelFormat = Literal["safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on local disk.

    name: what the user called it.   path: the folder (safetensors) or the .gguf file.
    overrides: replace settings of its config.json.
    """

    name: str
    path: Path
    format: ModelFormat
    overrides: HFOverrides = field(default_factory=HFOverrides)


def identify(path: str | Path, name: str | None = None) -> ModelFiles:
    """Identify a folder with config.json and safetensors, a .gguf file, or a folder with one .gguf file.

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
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _identify_file(ggufs[0], name)
    if ggufs:
        listed = ", ".join(file.name for file in ggufs)
        raise ConfigError(
            f"model {abbreviate(name)}: {path} has {len(ggufs)} .gguf files ({listed}); name the one to load"
        )
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
    return ModelFiles(name, path, "gguf")
