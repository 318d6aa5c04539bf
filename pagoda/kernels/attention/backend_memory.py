"""BackendMemory: what an attention backend takes of a GPU. Does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendMemory:
    """Bytes next to the weights, the KV pools and the activations of a step.

    at_start: allocated when the backend is made.   later: what it may allocate from then on, at most.
    """

    at_start: int = 0
    later: int = 0

    @property
    def total(self) -> int:
        return self.at_start + self.later
