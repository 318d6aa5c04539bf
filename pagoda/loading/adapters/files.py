"""Check an adapter's files against a model, and read its tensors' names. No torch: nothing is loaded."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError
from pagoda.layers.lora_targets import LoRATarget, lora_targets
from pagoda.loading.adapters.config import CONFIG_FILE, AdapterConfig, read_adapter_config
from pagoda.loading.safetensors_header import read_header
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model

WEIGHTS_FILE = "adapter_model.safetensors"

HEAD = "lm_head"
_PREFIX = "base_model.model."
_SUFFIX = re.compile(r"(?P<module>.+)\.(?P<kind>lora_A\.weight|lora_B\.(?:weight|bias)|lora_embedding_[AB])")
_FLOATS = ("F32", "BF16", "F16")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """An adapted part of a weight.

    target: its path in the model's tree.   a, b, bias: names of tensors; bias may be None.
    scale: of b @ a.   rank: rows of a.
    """

    target: str
    a: str
    b: str
    bias: str | None
    scale: float
    rank: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits the model it was checked against.

    digest: of the contents of both files.   rank: the largest.
    copies: tensors that are copies of the model's embedding and head, by target: PEFT writes those of adapted ones too.
    """

    folder: Path
    digest: str
    rank: int
    modules: tuple[AdapterModule, ...]
    copies: Mapping[str, str]


class AdapterTargets:
    """What adapters of one model may adapt, by the names that checkpoints give to it."""

    def __init__(self, architecture: Architecture, model: Model) -> None:
        self.targets = lora_targets(model)
        self._unused = architecture.unused
        self._paths: dict[str, str] = {}
        for naming in architecture.hf:
            for path in self.targets:
                self._paths.setdefault(naming.find(f"{path}.weight").name.removesuffix(".weight"), path)

    def path_of(self, module: str) -> str | None:
        """Return the path in the tree of a module that an adapter names; None if it is not a target."""
        return self._paths.get(module)

    def is_unused(self, module: str) -> bool:
        """Return whether no result depends on a module that an adapter names, as on the pooler of an embedder."""
        return self._unused is not None and module not in self._paths and bool(re.fullmatch(self._unused, module))


def weights_path(folder: Path) -> Path:
    """Return an adapter's file of weights. Raises ConfigError if there is none."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = " (adapter_model.bin is pickled: convert it)" if (folder / "adapter_model.bin").is_file() else ""
        raise ConfigError(f"{folder}: no {WEIGHTS_FILE}{pickled}")
    return path


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of an adapter's files, as 64 digits. Raises ConfigError if they cannot be read."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (folder / name).open("rb") as file:
                digest.update(f"{name}\0{(folder / name).stat().st_size}\0".encode())
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise ConfigError(f"{folder}: the adapter cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def check_adapter(folder: Path, targets: AdapterTargets, max_rank: int) -> AdapterFiles:
    """Return what an adapter adapts. Raises ConfigError that names what is unsupported, missing or of a wrong shape."""
    config = read_adapter_config(folder)
    path = weights_path(folder)
    if config.max_rank > max_rank:
        raise ConfigError(f"{folder}: its rank is {config.max_rank}, but max_lora_rank is {max_rank}; raise that")
    shapes = _read_shapes(path)
    modules: dict[str, dict[str, str]] = {}
    copies: dict[str, str] = {}
    for name in shapes:
        bare = name.removeprefix(_PREFIX)
        found = _SUFFIX.fullmatch(bare)
        if found is not None:
            modules.setdefault(found["module"], {})[found["kind"]] = name
            continue
        target_path = targets.path_of(re.sub(r"(\.base_layer)?\.weight$", "", bare)) or ""
        target = targets.targets.get(target_path)
        if target is None or not (target.is_embedding or target_path == HEAD):
            raise ConfigError(f"{path}: tensor {shorten(name)!r} is not of a LoRA adapter of this model")
        shape = (target.inputs, len(target.rows)) if target.is_embedding else (len(target.rows), target.inputs)
        if shapes[name] != shape:
            raise ConfigError(
                f"{path}: tensor {shorten(name)!r} has the shape {shapes[name]}, the model's is {shape}: adapters that "
                "resize the vocabulary are not supported"
            )
        copies[target_path] = name
    modules = {name: kinds for name, kinds in modules.items() if not targets.is_unused(name)}
    if not modules:
        raise ConfigError(f"{path}: no tensors of a LoRA adapter of this model")
    checked = tuple(_module(path, config, targets, name, kinds, shapes) for name, kinds in modules.items())
    return AdapterFiles(folder, digest_of(folder), max(module.rank for module in checked), checked, copies)


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    entries = read_header(path)
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS:
            raise ConfigError(f"{path}: tensor {shorten(name)!r} is {entry.dtype}; expected {', '.join(_FLOATS)}")
    return {name: entry.shape for name, entry in entries.items()}


def _module(
    path: Path,
    config: AdapterConfig,
    targets: AdapterTargets,
    name: str,
    kinds: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> AdapterModule:
    target_path = targets.path_of(name)
    if target_path is None:
        raise ConfigError(f"{path}: it adapts {shorten(name)!r}, which this model does not have or cannot adapt")
    target: LoRATarget = targets.targets[target_path]
    if not config.adapts(name, target_path == HEAD, target.is_embedding):
        raise ConfigError(f"{path}: it has tensors of {shorten(name)!r}, which {CONFIG_FILE} does not name as a target")
    words = ("lora_embedding_A", "lora_embedding_B") if target.is_embedding else ("lora_A.weight", "lora_B.weight")
    wanted = {*words, *(("lora_B.bias",) if config.bias and not target.is_embedding else ())}
    if set(kinds) != wanted:
        raise ConfigError(
            f"{path}: module {shorten(name)!r} has {', '.join(sorted(kinds))}; expected {', '.join(sorted(wanted))}"
        )
    rank, (a, b) = config.rank_of(name), (kinds[word] for word in words)
    expected = {a: (rank, target.inputs), b: (len(target.rows), rank), kinds.get("lora_B.bias"): (len(target.rows),)}
    for tensor, shape in expected.items():
        if tensor is not None and shapes[tensor] != shape:
            raise ConfigError(f"{path}: tensor {shorten(tensor)!r} has the shape {shapes[tensor]}, expected {shape}")
    return AdapterModule(target_path, a, b, kinds.get("lora_B.bias"), config.scale_of(name), rank)
