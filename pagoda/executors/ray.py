"""Ranks as actors of a Ray cluster: Ray places them and notices their end; messages travel as between processes.

The ranks of a stage are on one node, since they share memory; stages may be on any, and talk through sockets. An actor
that ends, with its node or alone, ends the group, as a process does; a server then starts a new group wherever there is
room.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

import msgspec
import ray
import zmq
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from zmq.auth.thread import ThreadAuthenticator

from pagoda.base.errors import ConfigError, WorkerDied
from pagoda.engine.wire import make_decoder, make_encoder
from pagoda.executors.messages import RankStart
from pagoda.executors.multi_process import RankDied, address_of, admit_only, bind_encrypted, new_segment
from pagoda.executors.rank import MakeRank, log_rank, run_rank
from pagoda.worker.devices import select_device

logger = logging.getLogger("pagoda")

CONNECT_TIMEOUT_S = 60.0  # to a cluster, which may have to start here; Ray itself tries for a quarter of an hour
PLACEMENT_TIMEOUT_S = 30.0  # for a place for all ranks; a server tries three times
START_TIMEOUT_S = 300.0  # for their processes to start, which import torch
END_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 5


def callers_group() -> PlacementGroup | None:
    """Return the placement group that Ray has put the calling task or actor into, if any.

    In a task, Ray returns it on the task's own thread alone.
    """
    return ray.util.get_current_placement_group() if ray.is_initialized() else None


def connect() -> str:
    """Connect this process to a Ray cluster, unless it is; return the address of this machine in it.

    RAY_ADDRESS says which; without it, the one that runs on this machine, and without one, one of this machine alone.
    Raises WorkerDied if it does not answer.
    """
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "")
        connected: Future[object] = Future()
        try:
            _check_address(address)
            threading.Thread(target=_stay_connected, args=(connected,), name="pagoda-ray", daemon=True).start()
            connected.result(CONNECT_TIMEOUT_S)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            why = error if str(error) else f"not within {CONNECT_TIMEOUT_S:.0f} s"
            raise WorkerDied(f"no Ray cluster answers at {address or 'this machine'}: {why}") from error
    return ray.util.get_node_ip_address()


def _check_address(address: str) -> None:
    """Raise OSError if the address names a port on which nothing listens: the head of the cluster has ended."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "://" not in host:
        socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_TIMEOUT_S).close()


def _stay_connected(connected: "Future[object]") -> None:
    """Connect, in a thread that lasts as long as the process.

    A cluster that Ray starts here is killed when the thread that started it ends, such as that of an LLM, and then Ray
    ends this process, which another engine may use.
    """
    try:
        connected.set_result(ray.init(log_to_driver=True, logging_level=logging.WARNING))
    except BaseException as error:
        connected.set_exception(error)
        return
    threading.Event().wait()


class _Connection(Protocol):
    """One that both sides have shown to hold the secret."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class RankActor:
    """A rank's process. Its methods run in threads of their own, since `run` does not return."""

    def __init__(self) -> None:
        self._host = str(ray.util.get_node_ip_address())
        self._context: zmq.Context[Any] = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        self._start: zmq.Socket[bytes] | None = None
        self._listener: socket.socket | None = None

    def node(self) -> str:
        """Return the id of the node that it is on."""
        return ray.get_runtime_context().get_node_id()

    def new_segment(self, num_ranks: int, num_local: int) -> str:
        """Return a path by which other processes of this node can open new memory that they share with this one.

        num_ranks: of all.   num_local: on this node.
        """
        return f"/proc/{os.getpid()}/fd/{new_segment(num_ranks, num_local)}"

    def listen(self, engine: bytes) -> tuple[str, bytes]:
        """Return an address and a public key, with which the engine can send this rank its RankStart, encrypted.

        engine: its public key. Ray sends messages in clear unless it is set to use TLS: so nothing secret.
        """
        public, secret = zmq.curve_keypair()
        self._guard = admit_only(self._context, engine)
        self._start = door = self._context.socket(zmq.PULL)
        bind_encrypted(door, self._host, secret)
        return address_of(door), public

    def listen_for_stage(self) -> tuple[str, int]:
        """Return an address at which this rank will take the connection of the stage before."""
        self._listener = socket.create_server((self._host, 0))
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def run(self, make: MakeRank, segment: str | None, next_stage: tuple[str, int] | None) -> None:
        """Be the rank that the engine's RankStart describes, until the actor is killed.

        make: see `run_rank`.   segment: of the ranks of its stage, see `new_segment`.   next_stage: where that listens.
        """
        assert self._start is not None
        assert self._guard is not None
        start = make_decoder(RankStart).decode(self._start.recv())
        self._start.close()
        self._guard.stop()
        if segment is not None:
            start = msgspec.structs.replace(start, segment=os.open(segment, os.O_RDWR | os.O_CLOEXEC))
        assert start.curve is not None
        secret = start.curve.secret
        if next_stage is not None:
            start = msgspec.structs.replace(start, next=_socket_of(Client(next_stage, authkey=secret)))
        if self._listener is not None:
            start = msgspec.structs.replace(start, previous=_socket_of(_accepted(self._listener, secret)))
        log_rank(start)
        run_rank(start, make)


def _accepted(listener: socket.socket, secret: bytes) -> _Connection:
    """Return the first connection from a holder of the secret, and stop listening. Refuse silent connections."""
    with listener:
        while True:
            accepted, _ = listener.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_TIMEOUT_S, 0))
            connection = Connection(accepted.detach())
            try:
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
                return connection
            except (AuthenticationError, OSError, EOFError) as error:
                connection.close()
                logger.warning("a connection that is not from a rank was refused: %s", error)


def _socket_of(connection: _Connection) -> int:
    """Return the descriptor of a connection's socket, which sends small messages at once."""
    descriptor = os.dup(connection.fileno())
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.close()
    return descriptor


class RayRanks:
    """Ranks that are actors. See StartedRanks."""

    def __init__(self, starts: Sequence[RankStart], make: MakeRank, group: object = None) -> None:
        """Place and start the ranks, in the placement group `group` if there is one, or in a new one.

        make: a function of a module, see `run_rank`.
        Raises WorkerDied if the cluster has no room for them in time.
        """
        assert group is None or isinstance(group, PlacementGroup)
        self._make, self._given = make, group
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._group: PlacementGroup | None = None  # ours, to be removed
        try:
            self._start(starts)
        except RayError as error:
            self.end()
            raise WorkerDied(f"Ray could not start the ranks: {error}") from error
        except BaseException:
            self.end()
            raise

    def _start(self, starts: Sequence[RankStart]) -> None:
        group = self._place(starts)
        actor = ray.remote(RankActor)
        for start in starts:
            bundle = start.place.stage if self._group is not None else -1  # any bundle of a group that others made
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            needs = _resources(start)
            options = {"num_cpus": needs.pop("CPU"), "num_gpus": needs.pop("GPU", 0), "resources": needs}
            self._actors.append(actor.options(**options, max_concurrency=3, scheduling_strategy=strategy).remote())
        nodes = self._nodes()
        for start, node in zip(starts, nodes, strict=True):
            if node != nodes[start.place.number - start.place.tensor_rank]:
                raise ConfigError(
                    f"tensor_parallel_size={start.place.tensor_size}: the placement group puts the ranks of stage "
                    f"{start.place.stage} on different nodes; make it with strategy STRICT_PACK, or with a bundle "
                    "for each stage"
                )
        public, secret = zmq.curve_keypair()
        doors = ray.get([actor.listen.remote(public) for actor in self._actors])
        segments, listening = self._share_memory(starts, nodes), self._listen(starts)
        encoder = make_encoder()
        with zmq.Context() as context:  # whose end waits until all is sent
            for number, (start, actor) in enumerate(zip(starts, self._actors, strict=True)):
                node, (address, key) = nodes[number], doors[number]
                next_stage = listening.get(number + start.place.tensor_size)
                self._runs.append(actor.run.remote(self._make, segments[start.place.stage], next_stage))
                local = msgspec.structs.replace(
                    start, local_number=nodes[:number].count(node), num_local=nodes.count(node)
                )
                door = context.socket(zmq.PUSH)
                door.setsockopt(zmq.LINGER, round(1000 * PLACEMENT_TIMEOUT_S))
                door.curve_serverkey, door.curve_publickey, door.curve_secretkey = key, public, secret
                door.connect(address)
                door.send(encoder.encode(local))
                door.close()

    def _nodes(self) -> list[str]:
        """Return the node of each rank, once Ray has started its process."""
        asked = [actor.node.remote() for actor in self._actors]
        _, late = ray.wait(asked, num_returns=len(asked), timeout=START_TIMEOUT_S)
        if late:
            raise WorkerDied(
                f"Ray has not started the processes of ranks {sorted(asked.index(one) for one in late)} within "
                f"{START_TIMEOUT_S:.0f} s: `ray list actors` says why; on slow nodes, start Ray with more than 60 s in "
                "RAY_worker_register_timeout_seconds, within which each of its processes must start"
            )
        return ray.get(asked)

    def _share_memory(self, starts: Sequence[RankStart], nodes: Sequence[str]) -> "list[str | None]":
        """Return, by stage, the path of the memory that its ranks share; None where a rank is alone."""
        place = starts[0].place
        if place.world_size == 1:
            return [None]
        firsts = range(0, place.world_size, place.tensor_size)
        return list(
            ray.get(
                [
                    self._actors[first].new_segment.remote(place.world_size, nodes.count(nodes[first]))
                    for first in firsts
                ]
            )
        )

    def _listen(self, starts: Sequence[RankStart]) -> dict[int, tuple[str, int]]:
        """Return, by number, where the ranks of all stages but the first take the connection of the stage before."""
        addresses = {
            start.place.number: actor.listen_for_stage.remote()
            for start, actor in zip(starts, self._actors, strict=True)
            if start.place.stage
        }
        return dict(zip(addresses, ray.get(list(addresses.values())), strict=True))

    def _place(self, starts: Sequence[RankStart]) -> PlacementGroup:
        """Return the placement group that was given, or a new one with a bundle for each stage."""
        if self._given is not None:
            return self._given
        size = starts[0].place.tensor_size
        bundle = {name: amount * size for name, amount in _resources(starts[0]).items()}
        bundles = [bundle] * starts[0].place.num_stages
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            raise WorkerDied(
                f"the Ray cluster has had no room for {len(starts)} ranks for {PLACEMENT_TIMEOUT_S:.0f} s: they need "
                f"{bundles}, each on one node; it has {ray.cluster_resources()}, of which free: "
                f"{ray.available_resources()}"
            )
        return self._group

    def ended(self) -> RankDied | None:
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        if not ended:
            return None
        number = self._runs.index(ended[0])
        try:
            ray.get(ended[0])
        except Exception as error:
            return RankDied(f"rank {number}, an actor of Ray, has ended: {str(error).strip().splitlines()[0]}")
        return RankDied(f"rank {number}, an actor of Ray, has returned")

    def cpu_s(self) -> float:
        """Return the time: what other machines use is not seen, so ranks count as computing until it takes too long."""
        return time.monotonic()

    def end(self) -> None:
        actors, self._actors = self._actors, []
        group, self._group = self._group, None
        with contextlib.suppress(RayError, OSError, RuntimeError, ValueError):  # the cluster itself may be gone
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=END_TIMEOUT_S)
            if group is not None:
                remove_placement_group(group)


def _resources(start: RankStart) -> dict[str, float]:
    """Return what a rank takes of Ray's accounts. A rank whose threads are not set takes one CPU there, and uses its
    share of the node's."""
    parallel = start.config.parallel
    needs = {"CPU": float(parallel.threads or 1)}
    resource = select_device(parallel).ray_resource
    return needs if resource is None else {**needs, resource: 1.0}
