"""Communicator: how a rank exchanges tensors with the others. ThreadGroup: the obvious one, between threads."""

import queue
import threading
from typing import Protocol

import torch

from pagoda.base.errors import WorkerDied
from pagoda.ops.tensor import RankGroup

DEADLINE_S = 900.0
"""How long a rank waits for the others: longer than a stage takes for any step. The executor sees a hang earlier."""


class Communicator(RankGroup, Protocol):
    """What moves tensors within this rank's stage, and from and to the same rank of the stages next to it.

    All methods wait for other ranks. They raise WorkerDied if one of them has failed, has not come within the deadline,
    or does something else.
    """

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in the order of the ranks. They have one dtype, and differ in columns at most."""
        ...

    def send(self, tensor: torch.Tensor) -> None:
        """Send a tensor to this rank in the next stage; return when it may be changed."""
        ...

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with what this rank in the stage before sent: as many bytes, in the same order."""
        ...


class _Meeting:
    """What the threads of one group share.

    parts: of `exchange`, by rank.   links: from each stage to the next, for every rank; None is sent by `abort`.
    """

    def __init__(self, size: int, num_stages: int, deadline_s: float) -> None:
        self.parts: list[list[torch.Tensor]] = [[torch.empty(0)] * size for _ in range(num_stages)]
        self.barriers = [threading.Barrier(size) for _ in range(num_stages)]
        self.links = [[queue.Queue[torch.Tensor | None]() for _ in range(size)] for _ in range(num_stages)]
        self.deadline_s = deadline_s
        self.reason = ""


class ThreadGroup:
    """Ranks that are threads of one process: the definition of a Communicator, for tests. See `thread_groups`."""

    def __init__(self, meeting: _Meeting, rank: int, stage: int) -> None:
        self._meeting, self._stage = meeting, stage
        self.rank, self.size = rank, len(meeting.parts[stage])

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = self._meeting.parts[self._stage]
        parts[self.rank] = tensor.clone()
        self._wait()
        exchanged = list(parts)
        self._wait()  # until all have read them
        return exchanged

    def _wait(self) -> None:
        try:
            self._meeting.barriers[self._stage].wait(self._meeting.deadline_s)
        except threading.BrokenBarrierError:
            raise self._died() from None

    def send(self, tensor: torch.Tensor) -> None:
        if self._meeting.reason:
            raise self._died()
        self._meeting.links[self._stage + 1][self.rank].put(tensor.clone())

    def receive(self, tensor: torch.Tensor) -> None:
        if self._meeting.reason:
            raise self._died()
        try:
            sent = self._meeting.links[self._stage][self.rank].get(timeout=self._meeting.deadline_s)
        except queue.Empty:
            raise self._died() from None
        if sent is None:
            raise self._died()
        if sent.nbytes != tensor.nbytes:
            raise WorkerDied(f"rank {self.rank} was sent {sent.nbytes} bytes and expects {tensor.nbytes}")
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))

    def abort(self, reason: str) -> None:
        """Make every rank raise WorkerDied from now on: this one has failed."""
        self._meeting.reason = self._meeting.reason or reason
        for barrier in self._meeting.barriers:
            barrier.abort()
        for link in (link for links in self._meeting.links for link in links):
            link.put(None)

    def _died(self) -> WorkerDied:
        waited = f"waited {self._meeting.deadline_s:g} s for the other ranks"
        return WorkerDied(f"rank {self.rank} of {self.size}: {self._meeting.reason or waited}")


def thread_groups(size: int, num_stages: int = 1, deadline_s: float = DEADLINE_S) -> list[ThreadGroup]:
    """Return a group for each of size * num_stages threads; the ranks of a stage are adjacent."""
    meeting = _Meeting(size, num_stages, deadline_s)
    return [ThreadGroup(meeting, rank, stage) for stage in range(num_stages) for rank in range(size)]
