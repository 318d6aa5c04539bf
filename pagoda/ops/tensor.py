"""Opaque types: models and layers pass them from op to op without looking inside."""

from typing import Protocol

from typing_extensions import TypeVar


class Tensor(Protocol):
    """An activation, or a weight as it was loaded. Only `pagoda.kernels` knows its type.

    A torch.Tensor is one, and so are the stand-ins of a recorded forward. Only ops may compute
    with it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...


TensorT = TypeVar("TensorT", bound=Tensor, default=Tensor, covariant=True)
"""The kind of tensor that a record holds. `pagoda.kernels` fills in torch.Tensor; models leave it out."""


class LinearWeight(Protocol):
    """A weight [out_features, in_features] prepared for `linear` (packed, quantised, ...), with its bias."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class LowRankTable(Protocol):
    """The low-rank weights that adapters add to one layer, by slot; prepared for `add_low_rank`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(slots, out_features, in_features)"""
        ...


class ExpertWeights(Protocol):
    """Linear weights of equal shape, one per expert, prepared for `moe`."""

    @property
    def num_experts(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class RankGroup(Protocol):
    """The ranks that compute a model's layers together; `kernels/collectives` has them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...
