"""MultiProcessExecutor: every rank in a process of its own, on this machine or others.

A step is one message, the same for every rank. The rank that samples returns the results, all others only that they
have done the step, and a checksum. A rank that ends, hangs, fails where others do not or disagrees ends the group.
"""

import contextlib
import hmac
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError, WorkerDied, fresh
from pagoda.base.ranks import RankPlace
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine.wire import make_decoder, make_encoder
from pagoda.executors.messages import (
    LOADED,
    Curve,
    Identity,
    Measure,
    RankCall,
    RankStart,
    Reply,
    SetPools,
    Step,
    ToRank,
    error_of,
)
from pagoda.kernels.collectives.segment import create_segment
from pagoda.kernels.native import build, library
from pagoda.process.child_process import RendezvousDir, cpu_s_of, end_child, start_child
from pagoda.process.out_of_memory import describe_exit, hint_of_exit
from pagoda.process.watchdog import Watchdog, longest_recent
from pagoda.worker.calls import CALLS, Capacity, StepSize

logger = logging.getLogger("pagoda")

WATCH_INTERVAL_MS = 100
FINAL_REPLIES_MS = 50  # a dead rank's last replies may still be on their way
ALONE_S = 2.0  # after one rank has failed, for the others to fail likewise
STEP = "a step"
STEP_TIMEOUT_S = 30.0
STEP_TIMEOUTS = 20  # as many times the longest step that was measured may one take
LOAD_TIMEOUT_S = 300.0  # a rank may have to compile its kernels
SLOWEST_READ = 10e6  # bytes per second


class RankDied(WorkerDied):
    """A rank has ended, hangs or disagrees.   code: its exit code, where it ended by itself."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class StartedRanks(Protocol):
    """The processes of all ranks. A thread calls the first two now and then, any thread `end`."""

    def ended(self) -> RankDied | None:
        """Return how a rank has ended; None while all of them run."""
        ...

    def cpu_s(self) -> float:
        """Return the seconds of processor time that they have used together."""
        ...

    def end(self) -> None:
        """Kill all of them; return when they have ended. Idempotent."""
        ...


StartRanks = Callable[[Sequence[RankStart]], StartedRanks]
"""Starts a process for every rank, in which `run_rank` gets its RankStart.

Raises OSError or PagodaError if they cannot be started.
"""


@dataclass(slots=True)
class _PendingReply:
    """A message that was sent, and the replies to it by rank.

    what: they are asked for.   finish: returns the result from the replies of all ranks.
    failed_at_s: when the first rank failed.
    """

    what: str
    finish: Callable[[list[Reply]], Any]
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(time.monotonic()))
    future: "Future[Any]" = field(default_factory=Future)
    replies: dict[int, Reply] = field(default_factory=dict)
    failed_at_s: float | None = None

    @property
    def is_step(self) -> bool:
        return self.what == STEP


def load_timeout_s(num_bytes: int) -> float:
    """Return how long a rank that loads a model of so many bytes may show no progress."""
    return LOAD_TIMEOUT_S + num_bytes / SLOWEST_READ


class MultiProcessExecutor:
    """See engine.executor.Executor.

    One thread calls it; a thread of its own receives the replies and watches the ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        start_ranks: StartRanks,
        *,
        host: str | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        on_death: Callable[[RankDied], object] = lambda _: None,
    ) -> None:
        """config: for every rank, with the number of ranks.   host: an address of this machine, for ranks on others.

        step_timeout_s: a group that makes no progress with a step for so long, and for many times as long as earlier
            steps took, hangs; see Watchdog.   load_timeout_s: so does one with anything else: loading, sizing, a call.
        on_death: called in a thread of this executor when a rank dies after `start`, once all have been ended.
        """
        parallel = config.parallel
        sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self._places = [RankPlace.of(number, *sizes) for number in range(parallel.world_size)]
        self._sampling = next(place.number for place in self._places if place.samples)
        self._config = config.without_keys()
        self._start_ranks = start_ranks
        self._host = host
        self._step_timeout_s, self._load_timeout_s = step_timeout_s, load_timeout_s
        self._on_death = on_death
        self._encoder = make_encoder()
        self._reply_decoder = make_decoder(Reply)
        self._result_decoder = make_decoder(ModelRunnerOutput)
        self._call_decoders = {name: make_decoder(result) for name, (_, result) in CALLS.items()}
        self._lock = threading.Lock()  # of `_asked` and `_died`
        self._asked: dict[int, _PendingReply] = {}  # by number, the oldest first
        self._died: RankDied | None = None
        self._number = self._newest_done = LOADED
        self._longest_step_s = 0.0
        self._is_running = False
        self._processes: _RankProcesses | None = None
        self._receiver = threading.Thread(target=self._receive, name="pagoda-ranks", daemon=True)

    # ---- the executor

    def start(self, sizes: Sequence[StepSize] = ()) -> Sequence[Capacity]:
        loaded = self._asked[LOADED] = _PendingReply("the weights", _values_of(Identity))
        try:
            self._processes = _RankProcesses(self._config, self._places, self._host, self._start_ranks)
        except OSError as error:
            raise WorkerDied(f"the processes of the ranks could not be started: {error}") from error
        self._receiver.start()
        _check_alike(loaded.future.result())
        self._processes.hide()
        measured = self._ask(
            "measuring memory", lambda number: Measure(number, tuple(sizes)), _values_of(tuple[Capacity, ...])
        )
        return tuple(capacity for of_rank in measured.result() for capacity in of_rank)

    def set_pools(self, num_blocks: int, num_host_blocks: int, num_states: int = 0, num_host_states: int = 0) -> None:
        counts = num_blocks, num_host_blocks, num_states, num_host_states
        self._ask("the KV pools", lambda number: SetPools(number, counts), _values_of(type(None))).result()
        self._is_running = True

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        return self._ask(STEP, lambda number: Step(number, output), self._result_of_step)

    def call(self, name: str, *args: object) -> "Future[Any]":
        decoder, arguments = self._call_decoders[name], msgspec.Raw(self._encoder.encode(args))
        return self._ask(
            name,
            lambda number: RankCall(number, name, arguments),
            lambda replies: decoder.decode(replies[self._sampling].value),
        )

    def shutdown(self) -> None:
        self._end(RankDied("the executor is not running"))
        if self._receiver.ident is not None:
            self._receiver.join()
        if self._processes is not None:
            self._processes.close()

    def _ask(self, what: str, message: Callable[[int], ToRank], finish: Callable[[list[Reply]], Any]) -> "Future[Any]":
        """Send a message with the next number to all ranks; return the future of what `finish` makes of the replies."""
        asked = _PendingReply(what, finish)
        data = self._encoder.encode(message(self._number + 1))
        with self._lock:
            died = self._died if self._processes is not None else RankDied("the executor is not running")
            if died is None:
                self._number += 1
                self._asked[self._number] = asked
        if died is not None or self._processes is None:
            asked.future.set_exception(fresh(died or RankDied("the executor is not running")))
            return asked.future
        for socket in self._processes.messages:
            self._send(socket, data)
        return asked.future

    def _send(self, socket: "zmq.Socket[bytes]", data: bytes) -> None:
        """Send to a rank; to one that has ended, nothing."""
        while self._died is None:
            with contextlib.suppress(zmq.Again):  # it has not connected yet, or has ended
                socket.send(data, zmq.NOBLOCK)
                return
            socket.poll(WATCH_INTERVAL_MS, zmq.POLLOUT)

    # ---- the thread that receives and watches

    def _receive(self) -> None:
        assert self._processes is not None
        looked_s = 0.0
        try:
            while self._died is None:
                self._handle_replies(WATCH_INTERVAL_MS)
                now_s = time.monotonic()
                if 1000 * (now_s - looked_s) >= WATCH_INTERVAL_MS:
                    self._look(now_s)
                    looked_s = now_s
        except RankDied as error:
            when = "" if self._is_running else f" while loading{hint_of_exit(error.code)}"
            self._end(RankDied(f"{error}{when}", error.code))
        except Exception as error:
            logger.exception("the executor failed")
            self._end(RankDied(f"internal error of the executor: {type(error).__name__}: {error}"))

    def _handle_replies(self, timeout_ms: int) -> None:
        """Handle all replies that have come, or come within a while. Raises RankDied."""
        assert self._processes is not None
        replies = self._processes.replies
        if replies.poll(timeout_ms):
            with contextlib.suppress(zmq.Again):
                while True:
                    self._handle(self._reply_decoder.decode(replies.recv(zmq.NOBLOCK)))

    def _handle(self, reply: Reply) -> None:
        asked = self._asked.get(reply.number)
        if asked is None:  # a rank failed to load, and another one has loaded
            return
        asked.replies[reply.rank] = reply
        if reply.failure is not None and asked.failed_at_s is None:
            asked.failed_at_s = time.monotonic()
        is_loading = reply.number == LOADED
        if len(asked.replies) < len(self._places) and not (is_loading and reply.failure is not None):
            return
        replies = [asked.replies[number] for number in sorted(asked.replies)]
        failures = [one.failure for one in replies if one.failure is not None]
        if failures and not is_loading and self._ends_the_group(asked, len(failures) < len(replies)):
            raise _failed_alone(asked)
        result = None if failures else asked.finish(replies)
        self._newest_done = max(self._newest_done, reply.number)
        with self._lock:
            if self._asked.pop(reply.number, None) is None:  # shut down meanwhile
                return
        if failures:
            asked.future.set_exception(error_of(failures[0]))
        else:
            asked.future.set_result(result)

    def _ends_the_group(self, asked: _PendingReply, is_some: bool) -> bool:
        """Return whether failures mean that the ranks do not have the same state any more.

        is_some: other ranks have not failed. They do not with a call that only some refuse, such as an adapter whose
        files one machine lacks: its caller has all ranks forget it. Where there are stages, one may have sent to the
        next what that has not received.
        """
        kinds = {reply.failure.kind for reply in asked.replies.values() if reply.failure is not None}
        if asked.is_step:
            return is_some or "WorkerDied" in kinds or self._places[0].num_stages > 1
        return "WorkerDied" in kinds or (is_some and kinds != {"RequestError"})

    def _result_of_step(self, replies: list[Reply]) -> ModelRunnerOutput:
        if len({reply.checksum for reply in replies}) > 1:
            raise RankDied("the ranks disagree about the lengths of the rows: a bug in pagoda, or broken memory")
        result = self._result_decoder.decode(replies[self._sampling].value)
        self._longest_step_s = longest_recent(self._longest_step_s, result.duration_s)
        return result

    def _look(self, now_s: float) -> None:
        """Raises RankDied if a rank has ended, has failed alone or hangs."""
        assert self._processes is not None
        if (end := self._processes.ranks.ended()) is not None:
            self._handle_replies(FINAL_REPLIES_MS)
            raise end
        with self._lock:
            asked = dict(self._asked)
        for one in asked.values():
            late_s = 0.0 if one.failed_at_s is None else now_s - one.failed_at_s
            if late_s > ALONE_S and self._ends_the_group(one, is_some=True):
                raise _failed_alone(one)
        for number, one in asked.items():
            if why := self._hangs(number, one, now_s):
                raise RankDied(why)
            if number > self._newest_done:  # ranks do one after another, apart from what goes on during later ones
                break

    def _hangs(self, number: int, asked: _PendingReply, now_s: float) -> str:
        """Return which ranks hang, and with what; "" while there is progress."""
        assert self._processes is not None
        timeout_s = max(self._step_timeout_s, STEP_TIMEOUTS * self._longest_step_s)
        if not asked.is_step:
            timeout_s = max(timeout_s, self._load_timeout_s)
        if not asked.watchdog.is_hung(number, True, self._processes.ranks.cpu_s(), timeout_s, now_s):
            return ""
        late = sorted({place.number for place in self._places} - set(asked.replies))
        return f"no progress with {asked.what} for {timeout_s:.0f} s: ranks {late} hang"

    def _end(self, error: RankDied) -> None:
        """End all ranks; nothing can be asked of them any more. Idempotent."""
        with self._lock:
            if self._died is not None:
                return
            self._died = error
            asked, self._asked = self._asked, {}
        if self._processes is not None:
            try:
                self._processes.ranks.end()
            except Exception:
                logger.exception("the ranks could not be ended")
            self._processes.hide()
        if threading.current_thread() is self._receiver:
            logger.error("%s", error)
            if self._is_running:
                self._on_death(error)
        for one in asked.values():
            one.future.set_exception(fresh(error))


class _RankProcesses:
    """The processes of the ranks, and the sockets to and from them.

    messages: by rank.   replies: of all ranks.
    """

    def __init__(
        self, config: EngineConfig, places: Sequence[RankPlace], host: str | None, start_ranks: StartRanks
    ) -> None:
        """host: as for MultiProcessExecutor. Raises OSError if the ranks cannot be started."""
        self._context = zmq.Context()
        self._host = host
        self._place = RendezvousDir() if host is None else None
        self._secret = b""
        self._guard: ThreadAuthenticator | None = None
        curve = self._admit_only_ranks() if host is not None else None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self.replies = self._bound(zmq.PULL, "replies")
            self.messages = [self._bound(zmq.PUSH, f"rank{place.number}") for place in places]
            replies = address_of(self.replies)
            starts = [
                RankStart(
                    config,
                    place,
                    place.number,
                    len(places),
                    address_of(messages),
                    replies,
                    self._folder(),
                    curve,
                    logger.getEffectiveLevel(),
                )
                for place, messages in zip(places, self.messages, strict=True)
            ]
            self.ranks = start_ranks(starts)
        except BaseException:
            self.close()
            raise

    def hide(self) -> None:
        """Remove the sockets' folder, once all ranks have opened them: nothing stays on disk if a process is killed."""
        if self._place is not None:
            self._place.remove()

    def close(self) -> None:
        """Close the sockets, when the processes have ended."""
        self.hide()
        for socket in self._sockets:
            socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _folder(self) -> str | None:
        return self._place.folder if self._place is not None else None

    def _bound(self, kind: int, name: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the steps in flight
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._place is not None:
            socket.bind(self._place.address(name))
        else:
            assert self._host is not None
            bind_encrypted(socket, self._host, self._secret)
        return socket

    def _admit_only_ranks(self) -> Curve:
        """Make keys, and refuse connections that do not hold those of the ranks."""
        public, self._secret = zmq.curve_keypair()
        ranks_public, ranks_secret = zmq.curve_keypair()
        self._guard = admit_only(self._context, ranks_public)
        return Curve(public, ranks_public, ranks_secret)


def bind_encrypted(socket: "zmq.Socket[bytes]", host: str, secret: bytes) -> None:
    """Bind to a free port of an address of this machine. To connect, the public key of `secret` is needed."""
    socket.curve_server, socket.curve_secretkey = True, secret
    socket.bind(f"tcp://{host}:*")


def admit_only(context: "zmq.Context[Any]", public: bytes) -> ThreadAuthenticator:
    """Refuse connections to encrypted sockets of the context, except from the holder of the secret of `public`."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(credentials_provider=_OneKey(public))
    return guard


class _OneKey:
    """Who may connect: holders of one key (in ZeroMQ's form)."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class LocalRanks:
    """Ranks that are children of this process. See StartedRanks."""

    def __init__(self, starts: Sequence[RankStart], module: str) -> None:
        """module: whose `main` each runs: `rank.run_child`.

        Raises OSError, ConfigError if the native kernels cannot be had.
        """
        encoder = make_encoder()
        self._processes: list[subprocess.Popen[bytes]] = []
        segments = [new_segment(len(starts))] if len(starts) > 1 else []
        try:
            for start in starts:
                if segments:
                    start = msgspec.structs.replace(start, segment=segments[0])
                self._processes.append(start_child(module, [], encoder.encode(start), segments))
        except OSError:
            self.end()
            raise
        finally:
            for segment in segments:
                os.close(segment)  # the ranks have it

    def ended(self) -> RankDied | None:
        for number, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                return RankDied(f"rank {number} {describe_exit(code)}", code)
        return None

    def cpu_s(self) -> float:
        return sum(cpu_s_of(process.pid) for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            end_child(process)


def new_segment(num_ranks: int, num_local: int | None = None) -> int:
    """Return the descriptor of memory in which the ranks of this machine compute together: see `create_segment`."""
    try:
        return create_segment(library.load(), num_ranks, num_local)
    except build.NativeUnavailable as error:
        raise ConfigError(f"several ranks on one machine need the native kernels: {error}") from error


def address_of(bound: "zmq.Socket[bytes]") -> str:
    """Return where others connect to."""
    endpoint = bound.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


def _failed_alone(asked: _PendingReply) -> RankDied:
    """Return the error for a step or call that one rank could not do. It names the cause, not one whose peers died."""
    failures = [(number, reply.failure) for number, reply in asked.replies.items() if reply.failure is not None]
    number, failure = min(failures, key=lambda one: one[1].kind == "WorkerDied")
    return RankDied(f"rank {number} failed: {failure.message}")


def _check_alike(ranks: Sequence[Identity]) -> None:
    """Raise ConfigError, with what to do, if ranks would not compute the same."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        if rank.digest != first.digest:
            raise ConfigError(
                f"rank {number} has other model files, settings or another version of pagoda than rank 0: "
                "use the same ones on every machine"
            )
        if rank.kernels != first.kernels:
            raise ConfigError(
                f"rank {number} computes with other kernels ({rank.kernels}) than rank 0 ({first.kernels}), whose "
                "results differ in their last bits: use machines of one kind, or a wheel whose only kernels run on all "
                "of them (make wheel VARIANTS=avx2)"
            )


def _values_of(kind: Any) -> Callable[[list[Reply]], list[Any]]:
    """Return what decodes the values of all ranks, which have one type."""
    decoder = make_decoder(kind)
    return lambda replies: [decoder.decode(reply.value) for reply in replies]
