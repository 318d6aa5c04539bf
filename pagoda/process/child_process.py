"""Child processes of pagoda: a module each, given its start by standard input, and ended when that closes."""

import contextlib
import fcntl
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO


class RendezvousDir:
    """A folder of sockets and files, until all processes have opened them. Only their user has access."""

    def __init__(self, folder: str | None = None) -> None:
        """folder: one that another process has made; a new one by default."""
        self.folder = folder if folder is not None else tempfile.mkdtemp(prefix="pagoda-")

    def address(self, name: str) -> str:
        """Return the address of a socket in the folder, for ZeroMQ."""
        return f"ipc://{self.folder}/{name}"

    def path(self, name: str) -> Path:
        return Path(self.folder, name)

    def remove(self) -> None:
        """Delete the folder; open files and sockets stay usable. Idempotent, from any of the processes."""
        with contextlib.suppress(OSError):
            for path in Path(self.folder).iterdir():
                path.unlink(missing_ok=True)
            os.rmdir(self.folder)


@contextlib.contextmanager
def signals_blocked(*signals: signal.Signals) -> Generator[None, None, None]:
    """Block signals on this thread, so that processes started within never receive them.

    A child inherits the mask. Ignoring the signals in the child's own code would come too late: until then, during its
    imports, an interrupt would end it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def safe_python() -> list[str]:
    """Return a command of this Python that imports nothing from the current folder, nor from what this one ignores."""
    ignored = (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site))
    return [sys.executable, "-P", *(flag for flag, is_set in ignored if is_set)]


def module_command(module: str) -> list[str]:
    """Return a command that runs the `main` of a module, without the current folder on its import path: see run_module.

    Its package is found where this process finds it.
    """
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None, f"{module} is not found"
    assert spec.submodule_search_locations, f"{module} is not in a package"
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    return [*safe_python(), str(Path(__file__).with_name("run_module.py")), str(folder), module]


def start_child(
    module: str, arguments: Sequence[str], data: bytes, fds: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a module, hand `data` to it (see `read_start`), and leave its standard input open: its lifeline.

    A terminal's Ctrl-C does not reach it: its parent handles that. It imports nothing from the current folder.
    fds: file descriptors that it inherits.   Raises OSError if no process can be started, for lack of memory, say.
    """
    with signals_blocked(signal.SIGINT, signal.SIGTERM):
        command = [*module_command(module), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=tuple(fds))
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is found out later
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
    return process


def end_child(process: "subprocess.Popen[bytes]", grace_s: float = 0.0) -> int:
    """Close the child's lifeline, kill it if it has not ended after `grace_s`, and return its exit code."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return process.returncode


def cpu_s_of(pid: int) -> float:
    """Return the seconds of processor time that a process has used; 0 where the system does not say."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False where the system does not say."""
    try:
        return _stat(pid)[0] in "Tt"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run; none where the system does not say."""
    found: list[int] = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            if name.isdecimal() and int(_stat(int(name))[1]) == pid:
                found.append(int(name))
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# ---- in the child


def read_start(stdin: BinaryIO) -> bytes | None:
    """Return the data that `start_child` handed over; None if the parent died meanwhile."""
    size = int.from_bytes(stdin.read(8), "little")
    data = stdin.read(size)
    return data if data and len(data) == size else None


def end_with_parent(stdin: BinaryIO, clean_up: Callable[[], None]) -> None:
    """Exit, after `clean_up`, once the parent closes standard input or dies. Returns at once; a thread waits."""

    def wait() -> None:
        # Not by stdin itself, whose lock this thread would have until the end: the interpreter could not end before.
        while os.read(stdin.fileno(), 2**16):
            pass
        clean_up()
        os._exit(0)

    threading.Thread(target=wait, name="pagoda-lifeline", daemon=True).start()


def be_killed_with_parent(fd: int) -> None:
    """Have the kernel kill this process once the other end of the pipe `fd` closes: also in native code, or stopped.

    Where the kernel cannot do that, this does nothing.
    """
    setsig, is_async = getattr(fcntl, "F_SETSIG", None), getattr(os, "O_ASYNC", getattr(fcntl, "FASYNC", 0))
    if setsig is None or not is_async:
        return
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, setsig, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | is_async)
    if select.select([fd], [], [], 0)[0]:  # closed before that
        os.kill(os.getpid(), signal.SIGKILL)
