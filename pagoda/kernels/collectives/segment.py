"""The piece of memory that the ranks of a machine share. Without torch: who only makes it computes nothing."""

import os
from ctypes import byref

from pagoda.base.ranks import MAX_RANKS
from pagoda.kernels.native.abi import RankSegment
from pagoda.kernels.native.library import NativeLibrary
from pagoda.kernels.native.threads import available_cpus

HALF_BYTES = 1 << 20
"""Of a chunk of a sum or a gather: small enough for the caches, large enough that the ranks rarely meet."""
SLOT_BYTES = 1 << 18
"""Of a chunk of a message to the next stage."""
INBOX_BYTES = 64 << 20
"""Of the messages that a stage may send ahead. Pages that are never written take no memory."""

_SPIN_NS = 50_000
"""How long a rank looks for the others before it sleeps, where each has a core: as long as the kernels' threads do."""


def create_segment(library: NativeLibrary, world_size: int, num_local: int | None = None) -> int:
    """Return the descriptor of new shared memory without a name, for ranks 0 .. world_size - 1.

    Processes inherit it or get it otherwise. num_local: ranks on this machine, by default all.
    """
    assert world_size <= MAX_RANKS, "the settings were checked"
    spin_ns = (
        _SPIN_NS if available_cpus() >= (num_local or world_size) else 0
    )  # decided here: a rank may see its own cores alone
    sizes = RankSegment(world_size, HALF_BYTES, SLOT_BYTES, INBOX_BYTES // SLOT_BYTES, spin_ns)
    descriptor = os.memfd_create("pagoda-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, library["rank_segment_bytes"](byref(sizes)))
    os.pwrite(descriptor, bytes(sizes), 0)
    return descriptor
