"""A child process for work that may never end: it is killed at the deadline, replaced, and ends with its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagoda.engine.cancellation import Cancellation, Cancelled
from pagoda.engine.killable_process import KillableProcess

MODULE = "tests.engine.answering_worker"
LONG_S = 60.0


@pytest.fixture
def process() -> Iterator[KillableProcess]:
    process = KillableProcess(MODULE, first=lambda: b"started", has_stderr=False)
    yield process
    process.close()


def ask(process: KillableProcess, text: str, timeout_s: float = LONG_S) -> list[str]:
    """The child's reply: what it got for its start, its pid, the number of its messages, the message."""
    return process.exchange(lambda _: text.encode(), timeout_s).decode().split()


def begin(work: Callable[[], None], pid: int) -> threading.Thread:
    """Do the work on a thread; return once the child with this pid has begun to run."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.001)  # it still runs for the message before
    before = Path(f"/proc/{pid}/schedstat").read_text()
    thread = threading.Thread(target=work)
    thread.start()
    while Path(f"/proc/{pid}/schedstat").read_text() == before:
        time.sleep(0.001)
    return thread


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_one_child_answers_until_it_announces_its_end(process: KillableProcess) -> None:
    replies = [ask(process, "hello") for _ in range(6)]
    assert all(reply[0] == "started" and reply[3] == "hello" for reply in replies)
    assert [int(reply[2]) for reply in replies] == [1, 2, 3, 4, 5, 1]
    assert len({reply[1] for reply in replies}) == 2
    assert not is_running(int(replies[0][1]))


@pytest.mark.parametrize("work", ["sleep 60", "loop"])
def test_work_that_does_not_finish_is_killed_at_the_deadline(process: KillableProcess, work: str) -> None:
    pid = int(ask(process, "hello")[1])
    with pytest.raises(TimeoutError):
        ask(process, work, 0.3)
    assert not is_running(pid)
    assert int(ask(process, "hello")[1]) != pid


def test_a_child_that_dies_gets_one_successor_for_its_message(process: KillableProcess) -> None:
    told: list[bool] = []

    def message(is_first: bool) -> bytes:
        told.append(is_first)
        return b"die"

    ask(process, "hello")
    with pytest.raises(EOFError):
        process.exchange(message, LONG_S)
    assert told == [False, True]
    assert ask(process, "hello")[2] == "1"


def test_memory_is_bounded(process: KillableProcess) -> None:
    with pytest.raises(EOFError):
        ask(process, "allocate")  # a MemoryError, which this child does not catch
    assert ask(process, "hello")


def test_a_message_that_cannot_be_built_kills_no_child(process: KillableProcess) -> None:
    def message(is_first: bool) -> bytes:
        raise KeyError("no message")

    pid = ask(process, "hello")[1]
    with pytest.raises(KeyError):
        process.exchange(message, LONG_S)
    assert ask(process, "hello")[1:3] == [pid, "2"]


def test_closing_ends_the_work_and_does_not_start_it_again(process: KillableProcess) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            ask(process, "loop")
        except EOFError as error:
            failed.append(error)

    pid = int(ask(process, "hello")[1])
    thread = begin(work, pid)
    process.close()
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
    assert failed
    assert process.pid is None
    assert not is_running(pid)


def test_cancelling_kills_the_child_at_work_and_does_not_start_the_work_again(process: KillableProcess) -> None:
    pid, number = ask(process, "hello")[1:3]
    assert number == "1"
    failed: list[BaseException] = []
    cancellation = Cancellation()

    def work() -> None:
        try:
            process.exchange(lambda _: b"loop", LONG_S, cancellation)
        except Cancelled as error:
            failed.append(error)

    thread = begin(work, int(pid))
    cancellation.cancel()
    thread.join(LONG_S / 2)
    assert not thread.is_alive()
    assert failed
    assert not is_running(int(pid))
    with pytest.raises(Cancelled):
        process.exchange(lambda _: b"hello", LONG_S, cancellation)
    assert ask(process, "hello")[2] == "1"


def test_cancelling_a_call_that_is_over_leaves_the_child_alone(process: KillableProcess) -> None:
    cancellation = Cancellation()
    pid = process.exchange(lambda _: b"hello", LONG_S, cancellation).split()[1].decode()
    cancellation.cancel()
    assert ask(process, "hello")[1:3] == [pid, "2"]


def test_an_interrupted_wait_leaves_no_reply_for_the_next_message(process: KillableProcess) -> None:
    """As Ctrl-C does, or any signal handler that raises: the next text must not get the ids of this one."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    ask(process, "hello")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            ask(process, "sleep 0.5")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ask(process, "other")[3] == "other"


def test_a_child_does_not_outlive_a_parent_that_is_killed() -> None:
    script = f"""
from pagoda.engine.killable_process import KillableProcess
process = KillableProcess({MODULE!r}, first=lambda: b"started")
print(process.exchange(lambda _: b"hello", 60).decode().split()[1], flush=True)
process.exchange(lambda _: b"loop", 60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=dict(os.environ)) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    end_s = time.monotonic() + LONG_S
    while is_running(pid):
        assert time.monotonic() < end_s
        time.sleep(0.05)
