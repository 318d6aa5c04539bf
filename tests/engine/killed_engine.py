"""An engine process that the kernel kills while it loads, as when memory runs out."""

import os
import signal


def main() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
