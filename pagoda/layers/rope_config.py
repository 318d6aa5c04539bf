"""RopeConfig: which rotary embedding a checkpoint was trained with."""

from dataclasses import dataclass
from enum import Enum


class RopeType(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"  # NTK: differs from DEFAULT only past max_position, which pagoda does not exceed
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of some layers. Fields after `factor` apply to the types named in their comments.

    theta: base.   original_max_position: context of the pretraining, in tokens (llama3, yarn).
    attention_factor: multiplies cos and sin (yarn; 1.0 elsewhere).
    """

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn

    def max_position(self, trained: int) -> int:
        """Return the longest supported sequence, given the checkpoint's max_position_embeddings."""
        if self.rope_type is RopeType.LINEAR:
            return int(trained * self.factor)
        if self.rope_type is RopeType.YARN:
            return max(trained, int(self.original_max_position * self.factor))
        return trained
