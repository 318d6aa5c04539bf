"""A rank's process, with a worker of the settings: `python -m pagoda.assembly.rank_process`."""

import dataclasses
import hashlib
import os
from importlib import metadata

from pagoda.assembly.engine_setup import EngineSetup, options_of, resolve_engine
from pagoda.assembly.worker_setup import make_worker
from pagoda.executors.in_process import InProcessExecutor
from pagoda.executors.messages import Identity, RankStart
from pagoda.executors.rank import main
from pagoda.kernels.native import build, library, variants
from pagoda.kernels.native.threads import bind_to_cores, cpu_flags
from pagoda.layers.sharding import ALONE
from pagoda.ops.tensor import RankGroup

_NUM_PIECES, _PIECE_BYTES = 64, 4096  # of a file, in its digest


def make_executor(start: RankStart) -> tuple[InProcessExecutor, Identity]:
    """Return the executor of this rank's worker, and what must be the same on all ranks."""
    parallel = start.config.parallel
    if parallel.threads is None:
        parallel = dataclasses.replace(parallel, threads=bind_to_cores(start.local_number, start.num_local))
    setup = resolve_engine(dataclasses.replace(start.config, parallel=parallel))
    overlap = options_of(setup).pipeline_depth > 1 and not setup.device.is_host
    worker = make_worker(setup, True, start.place, _group_of(start), start.local_number)
    return InProcessExecutor(worker, overlap), Identity(_digest(setup), kernels_of(setup))


def _group_of(start: RankStart) -> RankGroup:
    """Return the ranks that this one computes with."""
    if start.segment is None:
        return ALONE
    # Imported here because torch takes a second to import, and a rank without a model needs none of this.
    from pagoda.kernels.collectives.shared_memory import SharedGroup

    try:
        return SharedGroup(library.load(), start.segment, start.place, previous=start.previous, next=start.next)
    finally:
        os.close(start.segment)  # it has been mapped


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


def _digest(setup: EngineSetup) -> str:
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


if __name__ == "__main__":
    main(make_executor)
