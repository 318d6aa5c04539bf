"""Commands in a pseudo-terminal of 80 columns, as a person runs them."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cached_models import cached_model

_TIMEOUT_S = 60.0
CHAT = ("chat", "--max-model-len", "512", "--kv-cache-memory", "64MiB", "--threads", "1")


class Terminal:
    """A `pagoda` command and the terminal that it runs in."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        pid, self._leader = pty.fork()
        if pid == 0:
            command = [sys.executable, "-m", "pagoda", *arguments]
            os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color", **environment})
        self._pid = pid
        self._status: int | None = None
        self.printed = ""
        self._read_to = 0
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))

    def expect(self, text: str) -> None:
        """Wait until the command prints `text`, after what was expected before."""
        end_s = time.monotonic() + _TIMEOUT_S
        while (at := self.printed.find(text, self._read_to)) < 0:
            assert time.monotonic() < end_s, f"no {text!r} in {self.printed!r}"
            assert self._read(), f"it ended without {text!r}: {self.printed!r}"
        self._read_to = at + len(text)

    def wait_for_sleep(self) -> None:
        """Wait until the command's main thread sleeps: after it has shown all keys, it waits for the next."""
        end_s = time.monotonic() + _TIMEOUT_S
        while (state := Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2][0]) != "S":
            assert time.monotonic() < end_s, f"it does not wait for keys, its state is {state}: {self.printed!r}"
            time.sleep(0.01)

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait(self) -> int:
        """Return the exit code (negative: the signal) after reading everything."""
        end_s = time.monotonic() + _TIMEOUT_S
        while self._read():
            assert time.monotonic() < end_s, f"it does not end: {self.printed!r}"
        self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status

    def _read(self) -> bool:
        """Read what there is. Return False if the command has closed the terminal."""
        if select.select([self._leader], [], [], 0.5)[0]:
            try:
                self.printed += os.read(self._leader, 65536).decode(errors="replace")
            except OSError:  # Linux's way to say that the other end is closed
                return False
        return True

    def close(self) -> None:
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._leader)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    opened = Terminal(arguments, environment)
    try:
        yield opened
    finally:
        opened.close()


def test_chat() -> None:
    """An answer, Ctrl-C at the prompt (which goes on), Ctrl-C during an answer, Ctrl-D."""
    cached_model("smollm2-135m")
    with terminal(*CHAT, "--ignore-eos", "--temperature", "0") as at:
        at.expect("Ctrl-D leaves")
        at.expect("> ")
        at.type("half a line")
        at.expect("half a line")
        at.wait_for_sleep()  # Python's readline misses an interrupt that comes before it waits for keys
        at.type("\x03")
        at.expect("Ctrl-D or /exit leaves")
        at.expect("> ")
        at.type("Tell me a story.\n")
        at.expect("story.\r\n")
        at.expect(" ")
        at.type("\x03")
        at.expect("(stopped)")
        at.expect("> ")
        at.type("\x04")
        assert at.wait() == 0
    assert "Traceback" not in at.printed
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|[\x01\x02]", "", at.printed)
    assert max(len(line) for line in re.split(r"\r?\n|\r", plain)) <= 80


def test_chat_without_colour() -> None:
    cached_model("smollm2-135m")
    with terminal(*CHAT, NO_COLOR="1") as at:
        at.expect("> ")
        at.type("\x04")
        assert at.wait() == 0
    assert not re.search(r"\x1b\[(\d+;)*[349]\d(;\d+)*m", at.printed), at.printed


def test_an_interrupt_during_the_first_imports_leaves_no_traceback(tmp_path: Path) -> None:
    """The import that is interrupted is one of the command's own, before it can handle anything."""
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    with terminal("plan", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}") as at:
        at.expect("importing")
        at.type("\x03")
        assert at.wait() == 130
    assert "Traceback" not in at.printed


def test_an_interrupt_while_the_engine_process_imports_leaves_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C goes to every process of the terminal, but the engine process leaves it to its parent."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'pagoda.assembly.engine_process' in sys.orig_argv:\n"
        "    print('importing', flush=True)\n"
        "    time.sleep(2)\n"
    )
    flags = ("--distributed-executor-backend", "fake", "--num-blocks", "64", "--max-model-len", "512", "--port", "0")
    with terminal("serve", *flags, PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}") as at:
        at.expect("importing")
        at.type("\x03")
        assert at.wait() == -signal.SIGINT  # a shell reports 130
    assert "Traceback" not in at.printed, at.printed


def test_chat_in_a_terminal(tmp_path: Path) -> None:
    """A pasted text is one message, Tab completes, keys typed during an answer are not shown, lines are remembered."""
    cached_model("smollm2-135m")
    state = {"XDG_STATE_HOME": str(tmp_path)}
    with terminal(*CHAT, "--ignore-eos", "--temperature", "0", "--max-tokens", "60", **state) as at:
        at.expect("> ")
        at.wait_for_sleep()
        at.type("/sy\t\x15/set temp\t0.5\n")
        at.expect("/system ")
        at.expect("temperature 0.5")
        at.expect("> ")
        at.wait_for_sleep()
        at.type("\x1b[200~one\ntwo\nthree\x1b[201~\n")
        at.expect("three")
        at.expect("\x1b[?2004l")  # the line was read
        at.expect("\x1b[?2004h")  # a text that is pasted during the answer is marked, too
        at.expect(" ")  # and the answer has begun
        at.type("\x1b[200~four\nfive\x1b[201~ typed meanwhile")
        at.expect("(cut off at the length limit)")
        assert "typed" not in at.printed[: at.printed.index("(cut off")]
        at.expect("five typed meanwhile")
        assert at.printed.count("(cut off") == 1
        at.type("\x15/bye\n")
        assert at.wait() == 0
    history = (tmp_path / "pagoda" / "chat_history").read_text()
    assert "three" in history
    with terminal(*CHAT, **state) as at:
        at.expect("> ")
        at.wait_for_sleep()
        at.type("\x1b[A" * 5)  # a message of three lines is three lines there
        at.expect("/set temperature 0.5")
        at.type("\x15\x04")
        assert at.wait() == 0


def test_progress_of_a_batch_and_an_interrupt(tmp_path: Path) -> None:
    line = (
        '{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 500}}\n'
    )
    (tmp_path / "in").write_text("".join(line % number for number in range(2000)))
    flags = ("--distributed-executor-backend", "fake", "--num-blocks", "512", "--max-model-len", "512")
    with terminal("run-batch", str(tmp_path / "in"), str(tmp_path / "out"), *flags) as at:
        at.expect("0/2000 [")
        end_s = time.monotonic() + _TIMEOUT_S
        while not (tmp_path / "out").stat().st_size:
            assert time.monotonic() < end_s, f"no line is answered: {at.printed!r}"
            time.sleep(0.01)
        at.expect("line/s]")
        at.type("\x03")
        assert at.wait() == 130
    assert "the same command goes on from there" in at.printed
    assert "Traceback" not in at.printed
