"""The CPU as a device: how many threads, and how much memory."""

import torch

from pagoda.kernels.native.threads import available_cpus
from pagoda.worker.devices.streams import HostStreams, Streams
from pagoda.worker.memory import available_memory


class CpuDevice:
    """threads: for torch and the native kernels alike; None takes the cores that affinity and cgroup leave us."""

    def __init__(self, threads: int | None) -> None:
        self.device = torch.device("cpu")
        self.streams: Streams = HostStreams()
        self.threads = threads if threads is not None else available_cpus()

    def prepare(self) -> None:
        """Set the process up for running steps."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def free_bytes(self) -> int:
        return available_memory()
