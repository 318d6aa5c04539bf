"""When processes that have work count as hung."""

from pagoda.process.watchdog import HALF_LIFE_S, SLOW_STEPS, Watchdog, longest_recent


def first_hung_s(watchdog: Watchdog, mark: object, from_s: float, timeout_s: float) -> float:
    """Return after how many seconds without progress they count as hung."""
    now_s = from_s
    while not watchdog.is_hung(mark, True, 0.0, timeout_s, now_s):
        now_s += 1.0
    return now_s - from_s


def test_the_timeout_follows_the_steps_that_were_seen() -> None:
    assert 10 < first_hung_s(Watchdog(0.0), 1, 0.0, 10.0) < 15
    slow = Watchdog(0.0)
    slow.is_hung(1, True, 0.0, 10.0, 0.0)
    slow.is_hung(1, True, 0.0, 10.0, 9.0)
    assert not slow.is_hung(2, True, 0.0, 10.0, 9.5)  # a step of 9.5 s
    assert SLOW_STEPS * 9.5 < first_hung_s(slow, 2, 9.5, 10.0) < SLOW_STEPS * 9.5 + 5


def test_a_slow_step_is_forgotten_with_time() -> None:
    longest_s = longest_recent(0.0, 200.0)
    assert longest_s == 200.0
    for _ in range(int(4 * HALF_LIFE_S)):
        longest_s = longest_recent(longest_s, 1.0)
    assert 12 < longest_s < 13  # after four half-lives
    watchdog = Watchdog(0.0)
    for mark, now_s in enumerate([0.0, 200.0, 201.0]):
        watchdog.is_hung(mark, True, 0.0, 10.0, now_s)
    assert 199 < watchdog.longest_s < 200


def test_an_idle_time_is_no_step() -> None:
    watchdog = Watchdog(0.0)
    watchdog.is_hung(1, False, 0.0, 10.0, 0.0)
    watchdog.is_hung(1, False, 0.0, 10.0, 1000.0)
    watchdog.is_hung(2, True, 0.0, 10.0, 1000.1)
    assert watchdog.longest_s < 1
