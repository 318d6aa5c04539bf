"""What the numbers that an engine computes depend on: its version, the model's files, its kernels.

And what the texts of its requests depend on, which other weights of the same model share.
"""

import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import numpy as np

from pagoda.assembly.engine_setup import EngineSetup
from pagoda.kernels.native import build, library, variants
from pagoda.kernels.native.threads import cpu_flags
from pagoda.loading.fetch_wheel import is_weights
from pagoda.loading.file_digest import digest_of_file
from pagoda.loading.gguf_file import StringArray, Value, open_gguf
from pagoda.loading.model_files import ModelFiles
from pagoda.loading.quantization import resolve_quantization


def kernels_of(setup: EngineSetup) -> str:
    """Return which kernels this machine computes with; on a CPU, their variant, too: each rounds in its own way."""
    if not setup.device.is_host:
        return setup.kernels
    name, best = setup.kernels, [variant.name for variant in variants.runnable(cpu_flags())]
    if name == "native":
        try:
            return f"native for {library.load().isa}"
        except build.NativeUnavailable:  # if other kernels cannot be used either, loading fails
            name = "torch"
    return f"{name} on {(best or ['portable'])[0]}"


def digest_of(setup: EngineSetup) -> str:
    """Return a hash of pagoda's version, the settings and the model's files."""
    about = (metadata.version("pagoda-llm"), setup.spec, setup.groups, setup.dtype, setup.kv_dtype, setup.max_model_len)
    files = [file for file in setup.files.sizes() if is_weights(file) or _is_beside_weights(file)]
    return _digest_of_files(files, repr(about))


def digest_of_weights(files: ModelFiles) -> str:
    """Return a hash of what a model computes with: its weights and its settings."""
    return _digest_of_files(file for file in files.sizes() if is_weights(file) or file.name == "config.json")


def _digest_of_files(files: Iterable[Path], about: str = "") -> str:
    """Weights that differ in a single tensor, as fine-tuned ones may, are others: all bytes count."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for file in files:
        digest.update(f"{file.name}:{digest_of_file(file)}".encode())
    return digest.hexdigest()


def _is_beside_weights(file: Path) -> bool:
    """Return whether a file that is not weights is read, too."""
    return file.suffix in (".json", ".jinja", ".model") or file.name in ("merges.txt", "vocab.txt")


def parts_beside_weights(setup: EngineSetup) -> dict[str, str]:
    """Return a hash of each part of a model, besides its weights, on which requests and answers depend, by its name.

    If all are the same, engines can get the one's weights in place of the other's, and API processes need not notice.
    """
    files = setup.files
    parts: dict[str, object] = {"its architecture": (setup.spec, setup.groups, setup.tasks, setup.dtype, files.format)}
    if files.format == "gguf":
        settings = open_gguf(files.path).metadata
        parts |= {key: _plain(value) for key, value in settings.items() if key.startswith("tokenizer.")}
    else:
        for file in filter(_is_beside_weights, files.sizes()):
            if file != files.path / "config.json" and not file.name.endswith(".index.json"):
                parts[str(file.relative_to(files.path))] = file.read_bytes()
    return {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}


def _plain(value: Value) -> object:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.strings if isinstance(value, StringArray) else value


def root_of_blocks(setup: EngineSetup) -> str:
    """Return a hash of all that the bits of a KV block depend on, besides what the block's own hash covers."""
    quantization = resolve_quantization(setup.files, setup.config.model.quantization)
    kernels = kernels_of(setup), library.load().path.name if setup.kernels == "native" else ""
    torch = metadata.version("torch")  # which computes rotary tables, whatever the kernels
    about = digest_of(setup), torch, kernels, quantization, setup.config.cache.block_size
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]
