"""Send cases by name, to a server of their own or to one at a URL: `python -m tests.hostile 7:1234 field:55 --url URL`.

--show prints what would be sent.   --shrink looks for a smaller case that fails in the same way, and prints it.
   --seed N --count M sends that many cases as the tests do, next to a healthy stream, and prints what failed;
   --real: to the default model instead of the fake executor.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from tests.hostile.attack import attack, attacked
from tests.hostile.campaign import Campaign
from tests.hostile.case import Case
from tests.hostile.cases import case_names, make_case
from tests.hostile.checks import Problem, problems
from tests.hostile.client import send_case
from tests.hostile.serving import FAKE_FLAGS, REAL_FLAGS, load
from tests.hostile.shrink import shrink
from tests.server.live import LiveServer
from tests.server.stall_watch import StallReader, watched_serving


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--url")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--without", nargs="*", default=[], help="kinds of cases to leave out")
    given = parser.parse_args()
    names = given.names or case_names(given.seed, given.count // 2, given.count - given.count // 2)
    if given.without:
        names = [name for name in names if make_case(name).kind not in given.without]
    if given.show:
        for name in names:
            print(make_case(name))
        return
    if given.shrink:
        for name in names:
            _shrink(make_case(name))
        return
    if given.url:
        for name in names:
            _send_one(name, int(given.url.rsplit(":", 1)[1].strip("/")))
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.names:
            _send_to_own_server(names, Path(folder))
        else:
            _attack(names, Path(folder), REAL_FLAGS if given.real else FAKE_FLAGS)


def _attack(names: list[str], folder: Path, flags: tuple[str, ...]) -> None:
    log = Path(tempfile.gettempdir(), "hostile-server.log")
    with attacked(folder, flags, 300 if flags is FAKE_FLAGS else 40) as under:
        report, health, found = attack(under, names)
        log.write_text(under.server.log.read_text(errors="replace"))
    print(*found, sep="\n\n")
    print({**{name: getattr(report, name) for name in report.__slots__}, "failures": len(report.failures)})
    print(f"healthy streams: {health.num_streams}, longest gaps {sorted(gap for _, gap in health.gaps)[-5:]} s")
    print(f"{'FAILED' if found else 'passed'}: {report.num_cases} of {len(names)} cases sent; the server's log: {log}")
    sys.exit(bool(found))


def _send_to_own_server(names: list[str], folder: Path) -> None:
    with watched_serving(folder, *FAKE_FLAGS) as (server, stalls):
        for name in names:
            stalls.take()
            _send_one(name, int(server.url.rsplit(":", 1)[1]))
            print(f"  longest stall {stalls.take() * 1e3:.0f} ms, {load(server)}")
        print(server.log.read_text()[-3000:])


def _send_one(name: str, port: int) -> None:
    case = make_case(name)
    outcome = asyncio.run(send_case(case, port))
    print(case)
    for answer in outcome.answers:
        print(f"  {answer.status} {answer.headers} {answer.body[:500]!r}")
    found = "; ".join(map(str, problems(case, outcome)))
    print(f"  closed: {outcome.was_closed}, {outcome.took_s:.3f} s, {found or 'fine'}")


def _shrink(case: Case) -> None:
    """Print a small case that fails as this one does. A server that a case ends is started again."""
    with contextlib.ExitStack() as stack:
        serving: list[tuple[LiveServer, StallReader]] = []

        def failure(case: Case) -> Problem | None:
            if not serving or serving[0][0].process.poll() is not None:
                stack.close()
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                serving[:] = [stack.enter_context(watched_serving(folder, *FAKE_FLAGS))]
            return Campaign(*serving[0]).failure_alone(case)

        first = failure(case)
        print(f"{case}\n  {first or 'does not fail'}")
        if first is not None:
            print(shrink(case, failure, first.kind))


if __name__ == "__main__":
    main()
