"""Sends cases to a watched server in volleys, and finds out which one is to blame for what was seen."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.hostile.case import Case
from tests.hostile.cases import make_case
from tests.hostile.checks import Problem, problems
from tests.hostile.client import ANSWER_TIMEOUT_S, NO_ANSWER, Outcome, send_case
from tests.hostile.serving import load
from tests.server.live import LiveServer
from tests.server.stall_watch import LoopStuck, StallReader

MAX_STALL_S = 0.1
VOLLEY = 48
AT_ONCE = 8
BIG_BYTES = 2**18  # such cases are sent one at a time: the bound is on what one body costs
MAX_FAILURES = 25  # then enough is known
MAX_ALIKE = 3  # so many failures of one kind are kept


@dataclass(frozen=True, slots=True)
class Failure:
    """One case and what is wrong with it."""

    case: Case
    problem: Problem

    def __str__(self) -> str:
        return f"{self.problem}\n    {self.case}\n    alone: python -m tests.hostile {self.case.name}"


@dataclass(slots=True)
class Report:
    """What a campaign saw. unconfirmed_stalls: longer than the bound in a volley, but not when its cases were alone."""

    num_cases: int = 0
    failures: list[Failure] = field(default_factory=list)
    longest_stall_s: float = 0.0
    unconfirmed_stalls: list[float] = field(default_factory=list)
    num_answers: dict[int, int] = field(default_factory=dict)
    num_alike: Counter[str] = field(default_factory=Counter)

    def add(self, case: Case, problem: Problem) -> None:
        """Keep a failure, unless enough like it are known."""
        self.num_alike[problem.kind] += 1
        if self.num_alike[problem.kind] <= MAX_ALIKE:
            self.failures.append(Failure(case, problem))


class Campaign:
    """Cases against one server.

    may_be_down: another part of the test ends its engine; answers of 503 and new engines are no failures.
    answer_timeout_s: an answer that takes longer is missing.
    """

    def __init__(
        self,
        server: LiveServer,
        stalls: StallReader,
        may_be_down: bool = False,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._may_be_down = may_be_down
        self._answer_timeout_s = answer_timeout_s
        self._server = server
        self._port = int(server.url.rsplit(":", 1)[1])
        self._stalls = stalls
        self._num_restarts = 0
        self.report = Report()

    def run(self, names: Sequence[str]) -> Report:
        """Send them all, unless too much fails."""
        for at in range(0, len(names), VOLLEY):
            cases = [make_case(name) for name in names[at : at + VOLLEY]]
            try:
                self._volley(cases)
            except LoopStuck as stuck:
                self.report.add(cases[0], Problem(str(stuck), f"during one of: {_names(cases)}"))
                break
            if len(self.report.failures) >= MAX_FAILURES or not self.is_alive():
                break
        return self.report

    def failure_alone(self, case: Case) -> Problem | None:
        """Send one case; return what is wrong, if anything. The server may have ended afterwards."""
        self._num_restarts = load(self._server)["engine_restarts"]
        self._stalls.take()
        found = problems(case, self._outcome(case), self._may_be_down)
        if not found and not self._ended([case]) and (stall_s := self._stalls.take()) > MAX_STALL_S:
            found = [self._stall_problem(stall_s)]
        return next(iter(found or [failure.problem for failure in self.report.failures]), None)

    def is_alive(self) -> bool:
        return self._server.process.poll() is None

    def _ended(self, cases: list[Case]) -> bool:
        """The server is gone, or has lost its engine, and one of these cases is to blame."""
        died = "the server process ended" if not self.is_alive() else ""
        if (
            not died
            and not self._may_be_down
            and (restarts := load(self._server)["engine_restarts"]) > self._num_restarts
        ):
            self._num_restarts = restarts
            died = "the engine process ended"
        if died:
            self.report.add(cases[0], Problem(died, f"during one of: {_names(cases)}"))
        return not self.is_alive()

    def _volley(self, cases: list[Case]) -> None:
        report = self.report
        self._stalls.take()
        found = asyncio.run(self._send(cases))
        report.num_cases += len(cases)
        for case, problem in found:
            if problem.kind != NO_ANSWER:
                report.add(case, problem)
        if self._ended(cases):
            return
        # A server that one case keeps busy answers none of the others.
        for case in [case for case, problem in found if problem.kind == NO_ANSWER]:
            self._stalls.take()
            if self._outcome(case).problem:
                report.add(case, Problem(NO_ANSWER))
            if self._ended([case]):
                return
        stall_s = self._stalls.take()
        if stall_s > MAX_STALL_S:
            found = self._blame(cases)
            if not found:
                report.unconfirmed_stalls.append(stall_s)
        else:
            report.longest_stall_s = max(report.longest_stall_s, stall_s)

    async def _send(self, cases: list[Case]) -> list[tuple[Case, Problem]]:
        places = asyncio.Semaphore(AT_ONCE)
        big = asyncio.Lock()
        found: list[tuple[Case, Problem]] = []

        async def one(case: Case) -> None:
            async with big if case.num_bytes > BIG_BYTES else places:
                outcome = await send_case(case, self._port, self._answer_timeout_s)
            for answer in outcome.answers:
                self.report.num_answers[answer.status] = self.report.num_answers.get(answer.status, 0) + 1
            found.extend((case, problem) for problem in problems(case, outcome, self._may_be_down))

        await asyncio.gather(*(one(case) for case in cases))
        return found

    def _blame(self, cases: list[Case]) -> bool:
        """Send the cases of a volley that stalled one by one; those that stall again, twice, have failed."""
        found = False
        for case in sorted(cases, key=lambda case: -case.num_bytes):
            stall_s = min(self._stall_alone(case), self._stall_alone(case))
            if stall_s > MAX_STALL_S:
                self.report.add(case, self._stall_problem(stall_s))
                found = True
            if len(self.report.failures) >= MAX_FAILURES:
                break
        return found

    def _stall_problem(self, stall_s: float) -> Problem:
        """The kind of a stall is the innermost function of pagoda's that was running."""
        stack = (self._stalls.stalls() or [{"stack": []}])[-1]["stack"]
        own = [frame for frame in stack if "/pagoda/" in frame.split("\n", 1)[0]]
        where = own[-1].split(" in ", 1)[1].split("\n", 1)[0] if own else "a library"
        return Problem(f"the event loop was busy in {where}", f"for {stall_s:.2f} s\n{''.join(stack[-4:])}")

    def _stall_alone(self, case: Case) -> float:
        """The longest stall while only this case (and the healthy stream) is served. 0.0 as soon as one run is fine."""
        self._stalls.take()
        self._outcome(case)
        return self._stalls.take()

    def _outcome(self, case: Case) -> Outcome:
        return asyncio.run(send_case(case, self._port, self._answer_timeout_s))


def _names(cases: list[Case]) -> str:
    return " ".join(case.name for case in cases)
