"""Child processes end with their parent, in whatever state they are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.process.child_process import RendezvousDir, children_of, cpu_s_of, read_start

ARMED = """
import sys, time
from pagoda.process.child_process import be_killed_with_parent, read_start
assert read_start(sys.stdin.buffer) == b"start"
be_killed_with_parent(0)
print("armed", flush=True)
while True:
    time.sleep(60)
"""


def armed_child() -> "subprocess.Popen[bytes]":
    child = subprocess.Popen([sys.executable, "-c", ARMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write((5).to_bytes(8, "little") + b"start")
    child.stdin.flush()
    assert child.stdout.readline() == b"armed\n"
    return child


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_child_ends_when_its_lifeline_closes_even_if_it_is_stopped(is_stopped: bool) -> None:
    with armed_child() as child:
        assert child.pid in children_of(os.getpid())
        if is_stopped:
            child.send_signal(signal.SIGSTOP)
            while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == -signal.SIGKILL
    assert child.pid not in children_of(os.getpid())


def test_a_start_that_is_cut_off_is_none() -> None:
    with open("/dev/null", "rb") as nothing:
        assert read_start(nothing) is None


def test_processor_time_of_this_process_is_known() -> None:
    assert cpu_s_of(os.getpid()) > 0
    assert cpu_s_of(2**22 + 1) == 0.0  # no such process


def test_a_rendezvous_folder_goes_with_its_files() -> None:
    place = RendezvousDir()
    place.path("one").write_text("1")
    RendezvousDir(place.folder).remove()
    assert not Path(place.folder).exists()
    place.remove()
