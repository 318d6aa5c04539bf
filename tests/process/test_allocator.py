"""Freed buffers return to the system, though small objects were made between them."""

import os
import platform
import subprocess
import sys

import pytest

# Prints how many MiB remain of 200 freed buffers. Between them are small objects that live on.
SCRIPT = """
import os
import re
from pagoda.process.allocator import keep_buffers_apart

def resident():
    with open("/proc/self/status") as file:
        return int(re.findall(r"VmRSS:\\s+(\\d+)", file.read())[0]) // 1024

{begin}
first = b"x" * (16 << 20)  # once one of this size is freed, glibc takes such buffers from its heap
del first
before = resident()
buffers, kept = [], []
for _ in range(200):
    buffers.append(b"x" * 600_000)
    kept.append(b"y" * 5_000)
del buffers
print(resident() - before)
"""


def resident_afterwards(begin: str, **env: str) -> int:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", SCRIPT.format(begin=begin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**plain, **env})
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in other ways")
def test_freed_buffers_return_to_the_system() -> None:
    assert resident_afterwards("") > 60, "glibc has changed: is keep_buffers_apart still needed?"
    assert resident_afterwards("keep_buffers_apart(os.environ)") < 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in other ways")
def test_settings_in_the_environment_take_precedence() -> None:
    assert resident_afterwards("keep_buffers_apart(os.environ)", MALLOC_MMAP_THRESHOLD_="4194304") > 60
