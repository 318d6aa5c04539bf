"""One CUDA GPU as a device: the same path as on a CPU, with torch's own kernels."""

import torch

from pagoda.base.errors import ConfigError


class CudaDevice:
    """index: which GPU. Raises ConfigError where there is none."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' was asked for, but torch sees no CUDA GPU here; use device='cpu'")
        self.device = torch.device("cuda", index)
        self.threads = 1  # the host only feeds the GPU

    def prepare(self) -> None:
        """Set the process up for running steps."""
        torch.cuda.set_device(self.device)
        # fp32 means fp32: TF32 would make the reference precision depend on the card.
        torch.backends.cuda.matmul.allow_tf32 = False

    def free_bytes(self) -> int:
        """Bytes the driver has free, and those that torch's allocator holds unused."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
