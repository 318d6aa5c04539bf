"""What all tests need of the process they run in."""

import signal

# A shell that starts a job in the background tells it, and all its children, to ignore Ctrl-C. The tests that send one
# mean a process that a person started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
