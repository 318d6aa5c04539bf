"""Which replica a request goes to: where its first token is expected earliest."""

import random

import pytest

from pagoda.engine.clients.router import PrefixIndex, ReplicaLoad, RoutedBecause, Router, StepCosts

IDLE = ReplicaLoad(True, 0, 0)
DOWN = ReplicaLoad(False, 0, 0)
DECODING = ReplicaLoad(True, 8, 0)


def choose(
    *loads: ReplicaLoad, num_tokens: int = 100, num_seqs: int = 1, num_cached: tuple[int, ...] = (0, 0)
) -> tuple[int, RoutedBecause]:
    return Router(max_num_seqs=16, max_num_batched_tokens=64).choose(num_tokens, num_seqs, loads, num_cached)


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
    assert [router.choose(9, 1, (IDLE, DECODING, IDLE, IDLE), (0,) * 4) for _ in range(4)] == [
        (index, RoutedBecause.TURN) for index in (0, 2, 3, 0)
    ]


def test_replicas_that_take_no_requests_get_none_unless_none_does() -> None:
    assert choose(DOWN, DECODING) == (1, RoutedBecause.ONLY_READY)
    assert choose(DOWN, ReplicaLoad(False, 3, 3)) == (0, RoutedBecause.NONE_READY)


def test_a_cached_prefix_counts_as_far_as_it_saves_more_than_the_queue_costs() -> None:
    busy, busier = ReplicaLoad(True, 0, 50), ReplicaLoad(True, 0, 90)
    assert choose(IDLE, IDLE, num_cached=(0, 80)) == (1, RoutedBecause.CACHED_PREFIX)
    assert choose(busy, IDLE, num_cached=(80, 0)) == (0, RoutedBecause.CACHED_PREFIX)
    assert choose(busier, IDLE, num_cached=(80, 0)) == (1, RoutedBecause.LEAST_WAIT)
    assert choose(busier, IDLE, num_cached=(80, 80)) == (1, RoutedBecause.LEAST_WAIT)
    assert choose(IDLE, IDLE, num_cached=(80, 80)) == (0, RoutedBecause.TURN)


def test_the_index_of_prefixes_agrees_with_a_set_per_replica() -> None:
    rng = random.Random(3)
    index, sets = PrefixIndex(), [set[bytes]() for _ in range(4)]
    prompt = [bytes([block]) for block in range(12)]
    for _ in range(300):
        replica = rng.randrange(4)
        stored, removed = rng.sample(prompt, rng.randrange(4)), rng.sample(prompt, rng.randrange(3))
        if rng.random() < 0.05:
            index.clear(replica)
            sets[replica].clear()
        index.change(replica, stored, removed)
        sets[replica] = (sets[replica] | set(stored)) - set(removed)
        among = rng.sample(range(4), rng.randrange(1, 5))
        expected = [next((at for at, one in enumerate(prompt) if one not in sets[other]), 12) for other in among]
        assert index.num_leading(prompt, among) == expected
        assert len(index) == len(set[bytes]().union(*sets))


def test_a_prompt_is_hashed_as_far_as_a_replica_has_it() -> None:
    index = PrefixIndex()
    index.change(1, [b"a", b"b"], [])
    hashes = iter([b"a", b"b", b"c", b"d"])
    assert index.num_leading(hashes, [0, 1]) == [0, 2]
    assert next(hashes) == b"d"


def report(costs: StepCosts, replica: int, times: float, rng: random.Random) -> None:
    num_steps, num_tokens = rng.randrange(1, 20), rng.randrange(10, 4000)
    costs.observe(replica, num_steps, num_tokens, times * (0.004 * num_steps + 25e-6 * num_tokens))


def test_costs_are_learned_and_a_replica_that_is_slow_is_found_and_forgiven() -> None:
    costs, rng = StepCosts(), random.Random(5)
    router = Router(16, 64, costs)
    for _ in range(200):
        for replica in range(3):
            report(costs, replica, 1.0, rng)
    assert (costs.per_step_s, costs.per_token_s) == (pytest.approx(0.004), pytest.approx(25e-6))
    loads = [ReplicaLoad(True, 1, 0, replica) for replica in range(3)]
    assert {router.choose(99, 1, loads, (0, 0, 0)) for _ in range(3)} == {(i, RoutedBecause.TURN) for i in range(3)}
    for _ in range(400):
        for replica in range(3):
            report(costs, replica, 1.0 if replica else 3.0, rng)
    assert costs.pace(0) / costs.pace(1) > 2
    assert {router.choose(99, 1, loads, (0, 0, 0))[0] for _ in range(3)} == {1, 2}
    assert router.choose(1000, 1, loads, (800, 0, 0)) == (0, RoutedBecause.CACHED_PREFIX)
    costs.forget(0)
    assert costs.pace(0) == 1.0


def test_a_step_of_any_length_is_learned_from() -> None:
    """An engine may be stopped for days where none counts as hung."""
    costs, rng = StepCosts(), random.Random(5)
    for seconds in (1e5, 1e9):
        costs.observe(0, 1, 1, seconds)
    for _ in range(2000):
        report(costs, 0, 1.0, rng)
    assert (costs.per_step_s, costs.per_token_s) == (pytest.approx(0.004), pytest.approx(25e-6))


def test_a_replica_is_not_slow_for_ever_because_it_gets_no_requests() -> None:
    costs, rng = StepCosts(), random.Random(5)
    for _ in range(300):
        for replica in range(2):
            report(costs, replica, 1.0 if replica else 3.0, rng)
    assert costs.pace(0) > 1.3
    for _ in range(5000):
        report(costs, 1, 1.0, rng)
    assert costs.pace(0) == 1.0
