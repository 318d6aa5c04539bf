"""Which replica a request goes to: where its first token is expected earliest."""

import pytest

from pagoda.engine.clients.router import ReplicaLoad, RoutedBecause, Router

IDLE = ReplicaLoad(True, 0, 0)
DOWN = ReplicaLoad(False, 0, 0)
DECODING = ReplicaLoad(True, 8, 0)


def choose(*loads: ReplicaLoad, num_tokens: int = 100, num_seqs: int = 1) -> tuple[int, RoutedBecause]:
    return Router(max_num_seqs=16, max_num_batched_tokens=64).choose(num_tokens, num_seqs, loads)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((DECODING, IDLE), 1),
        ((ReplicaLoad(True, 1, 1000), DECODING), 1),  # a long prompt is longer than a step of many sequences
        ((ReplicaLoad(True, 1, 4), DECODING), 0),
        ((ReplicaLoad(True, 16, 0), ReplicaLoad(True, 1, 10_000)), 1),  # one of 16 would have to end first
        ((ReplicaLoad(True, 20, 0), ReplicaLoad(True, 18, 10_000)), 1),
    ],
)
def test_the_least_expected_time_wins(loads: tuple[ReplicaLoad, ...], expected: int) -> None:
    assert choose(*loads) == (expected, RoutedBecause.LEAST_WAIT)


def test_sequences_of_one_request_count() -> None:
    assert choose(DECODING, ReplicaLoad(True, 0, 500), num_seqs=10) == (1, RoutedBecause.LEAST_WAIT)
    assert choose(DECODING, ReplicaLoad(True, 0, 500), num_seqs=8) == (0, RoutedBecause.LEAST_WAIT)


def test_equal_replicas_take_turns() -> None:
    router = Router(16, 64)
    assert [router.choose(9, 1, (IDLE, DECODING, IDLE, IDLE)) for _ in range(4)] == [
        (index, RoutedBecause.TURN) for index in (0, 2, 3, 0)
    ]


def test_replicas_that_take_no_requests_get_none_unless_none_does() -> None:
    assert choose(DOWN, DECODING) == (1, RoutedBecause.ONLY_READY)
    assert choose(DOWN, ReplicaLoad(False, 3, 3)) == (0, RoutedBecause.NONE_READY)


def test_a_cached_prefix_counts_as_far_as_it_saves_more_than_the_queue_costs() -> None:
    cached = ReplicaLoad(True, 0, 0, num_cached=80)
    assert choose(IDLE, cached) == (1, RoutedBecause.CACHED_PREFIX)
    assert choose(ReplicaLoad(True, 0, 50, num_cached=80), IDLE) == (0, RoutedBecause.CACHED_PREFIX)
    assert choose(ReplicaLoad(True, 0, 90, num_cached=80), IDLE) == (1, RoutedBecause.LEAST_WAIT)
    assert choose(ReplicaLoad(True, 0, 90, num_cached=80), cached) == (1, RoutedBecause.LEAST_WAIT)
    assert choose(cached, cached) == (0, RoutedBecause.TURN)
