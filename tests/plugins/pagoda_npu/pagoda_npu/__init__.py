"""A pretended NPU, as a device of another package: the CPU's tensors, a memory of a size of its own, one own kernel.

It is found by the entry point in pyproject.toml; nothing in pagoda knows its name.
"""

import resource
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pagoda.base.errors import ConfigError
from pagoda.worker.devices import Device

if TYPE_CHECKING:
    import torch

    from pagoda.kernels.ops import Ops

MEMORY_BYTES = 1 << 30


class NpuDevice(Device):
    """One of any number of NPUs. Of what the process holds, it has all that was taken since `prepare`."""

    name: ClassVar[str] = "npu"
    joins_ranks: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ("reference",)

    def __init__(self, threads: int | None = None, index: int = 0) -> None:
        super().__init__(threads, index)
        self._before = _resident_bytes()

    @classmethod
    def is_available(cls) -> bool:
        return False  # "auto" must not take what is only pretended

    @classmethod
    def report(cls) -> str:
        return f"npu: pretended, {MEMORY_BYTES >> 20} MiB each, reference kernels with a gate of its own"

    def summary(self) -> str:
        return f"pretended NPU {self.index}, {self.free_bytes() >> 20} MiB of {MEMORY_BYTES >> 20} MiB free"

    def fit_dtype(self, dtype: str, asked: str) -> str:
        if asked == "float16":
            raise ConfigError("dtype='float16': an NPU does not have it; take 'bfloat16' or 'float32'")
        return "bfloat16" if dtype == "float16" else dtype

    def free_bytes(self) -> int:
        return max(0, MEMORY_BYTES - max(0, _resident_bytes() - self._before))

    @property
    def margin_bytes(self) -> int:
        return MEMORY_BYTES // 64

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def prepare(self) -> None:
        self._before = _resident_bytes()

    def make_ops(self, name: str = "auto", max_model_len: int = 8192, batch_invariant: bool = False) -> "Ops":
        if name != "auto":
            return super().make_ops(name, max_model_len, batch_invariant)
        from pagoda_npu.kernels import make_ops

        return make_ops()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
