"""One CUDA GPU as a device."""

import logging
from collections.abc import Callable

import torch

from pagoda.base.errors import ConfigError
from pagoda.worker.devices.cuda_streams import CudaStreams
from pagoda.worker.devices.streams import Streams

logger = logging.getLogger("pagoda")

_MARGIN = 0.02
"""Of the GPU's memory: for what no step shows, such as the launches in CUDA graphs, compiled kernels and fragments."""


class CudaDevice:
    """index: which GPU. Raises ConfigError where there is none."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda' was asked for, but torch sees no CUDA GPU here; use device='cpu'")
        self.device = torch.device("cuda", index)
        self.streams: Streams = CudaStreams(self.device)
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

    @property
    def margin_bytes(self) -> int:
        """What `free_bytes_beside` keeps free."""
        _, total = torch.cuda.mem_get_info(self.device)
        return int(total * _MARGIN)

    def free_bytes_beside(self, run: Callable[[], object]) -> int:
        """Return the bytes that stay free at the moment at which `run` takes most, less a margin; log the plan.

        What `run` leaves behind counts, too, even if it is only reserved: a graph's memory is free for graphs alone.
        """
        torch.cuda.empty_cache()  # of a run that did not fit
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        unused, total = torch.cuda.mem_get_info(self.device)
        margin = self.margin_bytes
        kept = torch.cuda.memory_allocated(self.device) - before  # of the peak, and not free any more
        held = torch.cuda.memory_reserved(self.device) - before - kept  # by graphs, and by pieces between tensors
        others = total - unused - before - kept - held
        free = max(0, unused + kept - peak - margin)
        logger.info(
            "%s has %d MiB: %d for weights, %d for the largest step, %d for graphs, %d kept free, %d held by others, "
            "%d left",
            torch.cuda.get_device_name(self.device),
            *(part >> 20 for part in (total, before, peak, held, margin, others, free)),
        )
        return free
