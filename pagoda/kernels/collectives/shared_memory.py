"""SharedGroup: ranks of one machine, processes or threads, that compute together in one piece of shared memory."""

import mmap
import os
from collections.abc import Iterable
from ctypes import addressof, byref, c_char

import torch

from pagoda.base.errors import WorkerDied
from pagoda.base.ranks import RankPlace
from pagoda.kernels.collectives.group import DEADLINE_S
from pagoda.kernels.collectives.segment import create_segment
from pagoda.kernels.native.abi import ARGS, RankFailure, RankState
from pagoda.kernels.native.library import NativeLibrary
from pagoda.ops.declare import DType


class SharedGroup:
    """A Communicator in shared memory. One thread of a rank may wait in it at a time.

    descriptor: from `create_segment`; the group maps it and does not need it afterwards.   place: this rank's.
    previous, next: connected sockets to this rank of the stages before and after, if they have other segments; 0: none.
        They stay the caller's.
    """

    def __init__(
        self,
        library: NativeLibrary,
        descriptor: int,
        place: RankPlace,
        deadline_s: float = DEADLINE_S,
        *,
        previous: int = 0,
        next: int = 0,
    ) -> None:
        self.rank, self.size = place.tensor_rank, place.tensor_size
        self._library, self._place, self._deadline_s = library, place, deadline_s
        self._memory = mmap.mmap(descriptor, 0)
        self._first_byte = c_char.from_buffer(self._memory)
        self._state = RankState(
            segment=addressof(self._first_byte),
            number=place.number,
            first=place.number - place.tensor_rank,
            size=place.tensor_size,
            deadline_ns=round(deadline_s * 1e9),
            previous=previous,
            next=next,
        )
        library["join_ranks"](self.address)

    @property
    def address(self) -> int:
        """Of the struct that the kernels receive."""
        return addressof(self._state)

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See Communicator. Tensors of a device are copied through the host's memory."""
        if not tensor.shape[0]:
            return [tensor] * self.size
        sizes = self._gather(torch.tensor([tensor.nbytes]), 8 * self.size).view(torch.int64).tolist()
        parts = self._gather(tensor.cpu().contiguous(), sum(sizes)).split(sizes)
        shape = tensor.shape if tensor.dim() == 1 else (tensor.shape[0], -1, *tensor.shape[2:])
        return [part.view(tensor.dtype).view(shape).to(tensor.device) for part in parts]

    def _gather(self, mine: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Return the bytes of every rank's tensor, together `num_bytes`: uint8."""
        whole = torch.empty(num_bytes, dtype=torch.uint8)
        call = ARGS["all_gather"](ranks=self.address)
        for record, tensor in ((call.x, mine), (call.out, whole)):
            record.data, record.rows, record.heads, record.dtype = tensor.data_ptr(), 1, 1, DType.I8
            record.dim = record.stride = tensor.nbytes
        self._library["all_gather"](byref(call), 1)
        self.check()
        return whole

    def send(self, tensor: torch.Tensor) -> None:
        host = tensor.cpu().contiguous()
        self._library["send"](self.address, host.data_ptr(), host.nbytes)
        self.check()

    def receive(self, tensor: torch.Tensor) -> None:
        # The native code writes to host memory.
        host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        assert host.is_contiguous(), "a tensor to receive must be contiguous"
        self._library["receive"](self.address, host.data_ptr(), host.nbytes)
        self.check()
        if host is not tensor:
            tensor.copy_(host)

    def check(self) -> None:
        """Raise WorkerDied if a call of this rank has failed."""
        if self._state.failed:
            raise WorkerDied(f"rank {self._place.number} of {self._place.world_size}: {self._why()}")

    def _why(self) -> str:
        peer = self._state.peer
        match RankFailure(self._state.failed):
            case RankFailure.PEER_GONE:
                return f"the process of rank {peer} is gone"
            case RankFailure.DEADLINE:
                return f"waited {self._deadline_s:g} s for rank {peer}"
            case RankFailure.DISAGREE:
                return f"rank {peer} computes something else at this point"
            case _:
                return "another rank failed"


def check_groups(kept: Iterable[object]) -> None:
    """Raise WorkerDied if a call of one of the groups among the arguments of an op has failed."""
    for value in kept:
        if isinstance(value, SharedGroup):
            value.check()


def shared_groups(
    library: NativeLibrary, size: int, num_stages: int = 1, deadline_s: float = DEADLINE_S
) -> list[SharedGroup]:
    """Return a group for each of size * num_stages threads of this process; the ranks of a stage are adjacent."""
    descriptor = create_segment(library, size * num_stages)
    try:
        places = [RankPlace.of(number, size, num_stages) for number in range(size * num_stages)]
        return [SharedGroup(library, descriptor, place, deadline_s) for place in places]
    finally:
        os.close(descriptor)
