"""A rank's process: one worker, which does what an executor elsewhere says.

A module that `LocalRanks` starts calls `run_child`; others start `run_rank` in processes of their own making.
"""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq

from pagoda.base.errors import PagodaError
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.wire import make_decoder, make_encoder
from pagoda.executors.messages import (
    LOADED,
    Identity,
    Measure,
    RankCall,
    RankStart,
    Reply,
    SetPools,
    Step,
    ToRank,
    failure_of,
)
from pagoda.process.allocator import collecting_nothing, keep_objects
from pagoda.process.child_process import RendezvousDir, be_killed_with_parent, end_with_parent, read_start
from pagoda.process.logs import configure_logging
from pagoda.worker.calls import CALLS, Capacity, StepSize

logger = logging.getLogger("pagoda")


class RankExecutor(Protocol):
    """What a rank runs: InProcessExecutor over its worker, or a fake. See engine.executor.Executor."""

    def load(self) -> None:
        """Load this rank's weights."""
        ...

    def measure(self, sizes: Sequence[StepSize]) -> Sequence[Capacity]:
        """Return what this rank has for KV pools, once all ranks have loaded."""
        ...

    def set_pools(
        self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0
    ) -> None: ...

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]": ...

    def call(self, name: str, *args: object) -> "Future[Any]": ...


MakeRank = Callable[[RankStart], tuple[RankExecutor, Identity]]
"""Returns what a rank runs, not loaded, and what must be the same on all ranks."""


def run_rank(
    start: RankStart,
    make: MakeRank,
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Serve the executor for as long as the process lives.

    on_loaded: called once the weights are loaded, and all sockets are connected.
    """
    rank = _Rank(start)
    try:
        with collecting_nothing():
            executor, identity = make(start)
            executor.load()
            keep_objects()
        rank.reply(LOADED, identity)
        on_loaded()
    except Exception as error:
        rank.fail(LOADED, error)
    else:
        rank.serve(executor)
    threading.Event().wait()  # the executor ends this process


class _Rank:
    """A rank's sockets. Results may come from any thread."""

    def __init__(self, start: RankStart) -> None:
        self._place = start.place
        self._lock = threading.Lock()  # of the encoder and the socket of replies
        self._encoder = make_encoder()
        context = zmq.Context()
        self._messages = _connected(context, zmq.PULL, start.messages, start)
        self._replies = _connected(context, zmq.PUSH, start.replies, start)

    def serve(self, executor: RankExecutor) -> None:
        decoder = make_decoder(ToRank)
        arguments = {name: make_decoder(tuple[types]) for name, (types, _) in CALLS.items()}
        while True:
            match decoder.decode(self._messages.recv()):
                case Step(number, output):
                    executor.submit(output).add_done_callback(partial(self._reply_to_step, number))
                case RankCall(number, name, data):
                    future = executor.call(name, *arguments[name].decode(data))
                    future.add_done_callback(partial(self._reply_to_call, number))
                case Measure(number, sizes):
                    self._try(number, lambda sizes=sizes: executor.measure(sizes))
                case SetPools(number, counts):
                    self._try(number, partial(executor.set_pools, *counts))
                case message:
                    raise AssertionError(f"no such message: {message}")

    def reply(self, number: int, value: object, checksum: int = 0) -> None:
        with self._lock:
            data = msgspec.Raw(self._encoder.encode(value))
            self._replies.send(self._encoder.encode(Reply(self._place.number, number, data, checksum)))

    def fail(self, number: int, error: Exception) -> None:
        """Reply that something failed; log it if it is a bug."""
        if not isinstance(error, PagodaError):
            logger.error("rank %d failed", self._place.number, exc_info=error)
        with self._lock:
            self._replies.send(self._encoder.encode(Reply(self._place.number, number, failure=failure_of(error))))

    def _try(self, number: int, do: Callable[[], object]) -> None:
        try:
            self.reply(number, do())
        except Exception as error:
            self.fail(number, error)

    def _reply_to_call(self, number: int, future: "Future[Any]") -> None:
        self._try(number, future.result)

    def _reply_to_step(self, number: int, future: "Future[ModelRunnerOutput]") -> None:
        try:
            result = future.result()
            self.reply(number, result if self._place.samples else None, result.checksum)
        except Exception as error:
            self.fail(number, error)


def _connected(context: "zmq.Context[Any]", kind: int, address: str, start: RankStart) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    if start.curve is not None:
        socket.curve_serverkey = start.curve.executor
        socket.curve_publickey, socket.curve_secretkey = start.curve.public, start.curve.secret
    socket.connect(address)
    return socket


def log_rank(start: RankStart) -> None:
    """Log to standard error as the process does that starts the ranks."""
    configure_logging(f"rank{start.place.number}", start.log_level, start.config.server.logs.log_format)


def run_child(make: MakeRank) -> None:
    """Read a RankStart from standard input and be that rank, until the parent closes it or dies."""
    stdin = sys.stdin.buffer
    data = read_start(stdin)
    if data is None:
        return
    start = make_decoder(RankStart).decode(data)
    log_rank(start)
    end_with_parent(stdin, RendezvousDir(start.folder).remove if start.folder is not None else lambda: None)
    run_rank(start, make, on_loaded=lambda: be_killed_with_parent(stdin.fileno()))
