"""Watchdog: whether processes that have work make progress."""

from dataclasses import dataclass

COMPUTING_SHARE = 0.1  # of a core: processes that use this much make progress, however long their step takes
COMPUTING_TIMEOUTS = 10  # a step that uses the processor may take this many timeouts
SLOW_STEPS = 5  # a step may take this many times the longest recent step, however short the timeout
HALF_LIFE_S = 600.0  # of steps: after so much time, a slow one counts half


def longest_recent(longest_s: float, step_s: float) -> float:
    """Return the duration of the longest step after another of `step_s`: old ones count less and less."""
    return max(longest_s * 0.5 ** (step_s / HALF_LIFE_S), step_s)


@dataclass(slots=True)
class Watchdog:
    """Tells, from looks at processes now and then, whether they hang: have work, and make no progress for a timeout.

    Using the processor counts as progress: a large model's step of thousands of tokens takes minutes on few cores. One
    that uses the processor for COMPUTING_TIMEOUTS times as long hangs, too. Where steps took long, the timeout is
    SLOW_STEPS times the longest of them, of which old ones count less.

    progress_at_s: when they were last seen to make progress; the start, at first.   longest_s: of the recent steps.
    """

    progress_at_s: float
    longest_s: float = 0.0
    _mark: object = None
    _mark_at_s: float = 0.0  # when the mark changed
    _cpu_s: float = 0.0  # used at progress_at_s
    _was_late: bool = False

    def is_hung(self, mark: object, has_work: bool, cpu_s: float, timeout_s: float, now_s: float) -> bool:
        """Look at the processes.

        mark: changes with everything that they begin or end.   cpu_s: the processor time that they have used.
        """
        timeout_s = max(timeout_s, SLOW_STEPS * self.longest_s)
        is_computing = cpu_s - self._cpu_s >= COMPUTING_SHARE * (now_s - self.progress_at_s)
        if mark != self._mark and has_work and self._mark is not None:
            self.longest_s = longest_recent(self.longest_s, now_s - self._mark_at_s)
        if mark != self._mark or not has_work:
            self._mark, self._mark_at_s = mark, now_s
        if self._mark_at_s == now_s or (is_computing and now_s - self._mark_at_s < COMPUTING_TIMEOUTS * timeout_s):
            self.progress_at_s, self._cpu_s, self._was_late = now_s, cpu_s, False
            return False
        if now_s - self.progress_at_s <= timeout_s:
            return False
        # Late twice: if the looking process was the slow one, it reads pending messages in between.
        was_late, self._was_late = self._was_late, True
        return was_late
