"""DistanceBias: what attention adds to a score by the distance of key and query, learned by buckets of distances."""

import numpy as np

from pagoda.layers.module import Module
from pagoda.layers.parameter import BiasTable, Parameter
from pagoda.ops.tensor import Tensor


class DistanceBias(Module):
    """One value per head and distance. Layers that have the same share one object, and so one table."""

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int, both_ways: bool) -> None:
        """both_ways: half of the buckets are of keys after the query; False: those are not seen."""
        buckets = bucket_of_distances(num_buckets, max_distance, both_ways)
        self.weight = Parameter[Tensor](BiasTable(num_heads, num_buckets, buckets))

    @property
    def table(self) -> Tensor:
        """float32 [heads, 2 * max_distance + 1]; see `ForwardOps.attention`. It has all heads on every rank."""
        return self.weight.value


def bucket_of_distances(num_buckets: int, max_distance: int, both_ways: bool) -> np.ndarray:
    """Return the bucket of each distance from -max_distance to max_distance: int64. Further ones have the last.

    The first half of the buckets of one direction have a distance each; the others grow with its logarithm.
    """
    distance = np.arange(-max_distance, max_distance + 1)
    buckets, first = num_buckets, np.zeros_like(distance)
    if both_ways:
        buckets = num_buckets // 2
        first = np.where(distance > 0, buckets, 0)
    far = np.abs(distance) if both_ways else np.maximum(-distance, 0)
    exact = buckets // 2
    # In float32 and in this order, as transformers computes it: a distance on an edge falls into the same bucket.
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    step = ratio / np.float32(np.log(max_distance / exact)) * np.float32(buckets - exact)
    return first + np.where(far < exact, far, np.minimum(exact + step.astype(np.int64), buckets - 1))
