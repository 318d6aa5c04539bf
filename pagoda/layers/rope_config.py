"""RopeConfig: which rotary embedding a checkpoint was trained with."""

from dataclasses import dataclass
from enum import Enum


class RopeType(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"  # NTK: differs from DEFAULT only past max_position, which pagoda does not exceed
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"
    ALTERNATING = "alternating"  # axes take the frequencies of a whole head in turn


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of some layers. Fields with a comment apply to the types that it names.

    theta: base.   original_max_position: context of the pretraining, in tokens (llama3, yarn, longrope).
    attention_factor: multiplies cos and sin (yarn, longrope; 1.0 elsewhere).
    short_factors, long_factors: divide the frequencies; long ones if sequences may be longer than
    original_max_position (longrope).
    query_beta: queries are multiplied by 1 + query_beta * log(1 + (position + query_shift) // original_max_position),
    0 is off (yarn; of Llama 4 without a rotary embedding).
    proportion: the share of the pairs that have an angle, the first ones; the others have the angle 0 (proportional).
    rotated: the share of a head's elements that it turns, the first ones.   interleaved: the pairs that it turns are
    neighbours in the checkpoint (0 and 1, 2 and 3, ...), not one from each half of the turned elements.
    backwards: the pairs turn the other way round.
    axes: the pairs are so many equal runs, each with the frequencies of a head of its size (but see ALTERNATING) and a
    position of its own (the row and the column of a patch).
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
    attention_factor: float = 1.0  # yarn, longrope
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    query_beta: float = 0.0  # yarn
    query_shift: int = 0
    proportion: float = 1.0  # proportional
    rotated: float = 1.0
    interleaved: bool = False
    backwards: bool = False
    axes: int = 1

    def num_rotated(self, head_dim: int) -> int:
        """Return how many elements of a head it turns."""
        return int(head_dim * self.rotated)

    def head_order(self, head_dim: int, interleaved: bool = False) -> tuple[int, ...] | None:
        """Return which element of a head in the checkpoint is each element of a head in memory; None: they are equal.

        In memory, pairs are element i of the first half of a head and element i of the second; those that are not
        turned come last in each half, and have the angle 0. Kernels so have one form of rotation. Scores do not
        change, because q and k have the same order.
        interleaved: the checkpoint is interleaved, whatever `self` says.
        """
        turned = self.num_rotated(head_dim)
        if turned == head_dim and not (self.interleaved or interleaved):
            return None
        pairs, middle = range(turned), turned + (head_dim - turned) // 2
        first, second = pairs[: turned // 2], pairs[turned // 2 :]
        if self.interleaved or interleaved:
            first, second = pairs[::2], pairs[1::2]
        return (*first, *range(turned, middle), *second, *range(middle, head_dim))

    def max_position(self, trained: int) -> int:
        """Return the longest supported sequence, given the checkpoint's max_position_embeddings."""
        if self.rope_type is RopeType.LINEAR:
            return int(trained * self.factor)
        if self.rope_type is RopeType.YARN:
            return max(trained, int(self.original_max_position * self.factor))
        return trained
