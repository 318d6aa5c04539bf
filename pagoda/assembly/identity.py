"""What the numbers that an engine computes depend on: its version, the model's files, its kernels."""

import hashlib
from importlib import metadata

from pagoda.assembly.engine_setup import EngineSetup
from pagoda.kernels.native import build, library, variants
from pagoda.kernels.native.threads import cpu_flags
from pagoda.loading.quantization import resolve_quantization

_NUM_PIECES, _PIECE_BYTES = 64, 4096  # of a file, in its digest


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
    """Return a hash of pagoda's version, the settings and the model's files, read here and there."""
    about = (metadata.version("pagoda-llm"), setup.spec, setup.groups, setup.dtype, setup.kv_dtype, setup.max_model_len)
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16)
    for file, size in setup.files.sizes().items():
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as opened:
            for piece in range(_NUM_PIECES):
                opened.seek(piece * max(0, size - _PIECE_BYTES) // (_NUM_PIECES - 1))
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()


def root_of_blocks(setup: EngineSetup) -> str:
    """Return a hash of all that the bits of a KV block depend on, besides what the block's own hash covers."""
    quantization = resolve_quantization(setup.files, setup.config.model.quantization)
    kernels = kernels_of(setup), library.load().path.name if setup.kernels == "native" else ""
    about = digest_of(setup), kernels, quantization, setup.config.cache.block_size
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]
