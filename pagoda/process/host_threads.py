"""Threads of the host: they may use all CPUs of their process, also where the thread that computes steps is pinned."""

import os
from concurrent.futures import ThreadPoolExecutor


def host_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads, and those that they start, may use all CPUs that the calling thread may use now.

    Make it before a thread is pinned: on Linux, a thread inherits the mask of the one that starts it, in a pool of
    whichever submits work.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ThreadPoolExecutor(num_threads, name)
    return ThreadPoolExecutor(num_threads, name, os.sched_setaffinity, (0, os.sched_getaffinity(0)))
