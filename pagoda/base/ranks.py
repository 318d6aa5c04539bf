"""RankPlace: where one rank is among the ranks that compute a model together."""

from dataclasses import dataclass

MAX_RANKS = 64
"""Of all stages together: the memory that those of one machine share has room for so many."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank: which share of each layer it has, and which layers.

    tensor_rank: 0 .. tensor_size - 1, among the ranks that share the layers of one stage.
    stage: 0 .. num_stages - 1; a stage is a range of the model's layers.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.tensor_rank < self.tensor_size, self
        assert 0 <= self.stage < self.num_stages, self

    @classmethod
    def of(cls, number: int, tensor_size: int, num_stages: int) -> "RankPlace":
        """Return the place of a rank by its number: the ranks of a stage have adjacent numbers."""
        stage, tensor_rank = divmod(number, tensor_size)
        return cls(tensor_rank, tensor_size, stage, num_stages)

    @property
    def number(self) -> int:
        """Return this rank's number among all, 0 .. world_size - 1."""
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def world_size(self) -> int:
        return self.tensor_size * self.num_stages

    @property
    def samples(self) -> bool:
        """Return whether this rank samples, and owns grammars, drafters and log-probabilities; exactly one does."""
        return self.tensor_rank == 0 and self.is_last_stage

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank embeds the tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank computes the final norm and logits."""
        return self.stage == self.num_stages - 1


WHOLE = RankPlace()
"""The place of a rank that computes the whole model."""
