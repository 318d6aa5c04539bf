"""The CPU as a device: how many threads, and how much memory."""

from typing import TYPE_CHECKING, ClassVar

from pagoda.kernels.native.threads import available_cpus
from pagoda.worker.devices.device import Device, lazy_zeros
from pagoda.worker.memory import available_memory

if TYPE_CHECKING:
    import torch


class CpuDevice(Device):
    """The host itself: a step is computed when it has been launched, and nothing has to be copied."""

    name: ClassVar[str] = "cpu"
    is_host: ClassVar[bool] = True
    joins_ranks: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ("native", "torch", "reference")

    def __init__(self, threads: int | None = None, index: int = 0) -> None:
        """threads: for torch and the native kernels alike; None takes the cores that affinity and cgroup leave us."""
        super().__init__(threads if threads is not None else available_cpus(), index)

    def fit_dtype(self, dtype: str, asked: str) -> str:
        # CPUs that are fast in bfloat16 are slow in float16.
        return "bfloat16" if dtype == "float16" and asked == "auto" else dtype

    def free_bytes(self) -> int:
        return available_memory()

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def prepare(self) -> None:
        import torch

        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def zeros(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        # Unlike weights, not on huge pages: attention prefetches, so they would gain 2 % per step.
        return lazy_zeros(shape, dtype)
