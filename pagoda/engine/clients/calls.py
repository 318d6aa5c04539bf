"""Calls: functions that one end of a connection offers by name, for the other end to call and await.

Arguments and results travel as messages do (msgpack): numbers, strings, containers, the frozen records of core/. An
argument is decoded as the function's annotation says, a result as the caller says (`returns`).

What one process owns for all is an object, of which each may call the methods that are `offered`:

    class Store:
        @offered
        def size(self, client: int, name: str) -> int: ...

    calls.offer(services_of(store))
    size = await calls.ask(Store.size, "name")
"""

import asyncio
import inspect
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import msgspec

from pagoda.base.errors import PagodaError, WorkerDied, fresh
from pagoda.engine import wire

logger = logging.getLogger("pagoda.engine")

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Services = Mapping[str, Callable[..., Any]]
"""Functions by name, coroutine functions among them. One that is none runs before later messages are read.

One that returns a future is answered when that is done. What pagoda's errors say reaches the caller, who gets the same
error; any other is logged here.
"""


_MARK = "is_offered"


def offered(method: F) -> F:
    """Have a method be called from other processes. It gets the number of the client that calls, first."""
    setattr(method, _MARK, True)
    return method


def services_of(*owners: object) -> dict[str, Callable[..., Any]]:
    """Return the methods of objects that are offered."""
    methods = ((one, method) for one in owners for method in vars(type(one)).values())
    return {method.__qualname__: method.__get__(one) for one, method in methods if hasattr(method, _MARK)}


class AnyCalls(ABC):
    """Calls of functions that are elsewhere, or in this process."""

    @abstractmethod
    async def call(self, name: str, *arguments: object, returns: Any = Any) -> Any:
        """Call a function; return its result, of the type `returns`. Raises its errors."""

    @abstractmethod
    def post(self, name: str, *arguments: object) -> None:
        """Call a function that is no coroutine function, without waiting for it."""

    @overload
    async def ask(
        self, method: Callable[Concatenate[Any, int, P], Coroutine[Any, Any, T]], *args: P.args, **kw: P.kwargs
    ) -> T: ...
    @overload
    async def ask(self, method: Callable[Concatenate[Any, int, P], T], *args: P.args, **kw: P.kwargs) -> T: ...
    async def ask(self, method: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Call an offered method of what is owned; return its result."""
        return await self.call(method.__qualname__, *args, returns=answer_of(method))

    def tell(self, method: Callable[Concatenate[Any, int, P], None], *args: P.args, **kw: P.kwargs) -> None:
        """Call an offered method without waiting for it; such calls run in their order."""
        self.post(method.__qualname__, *args)


@cache
def answer_of(method: Callable[..., Any]) -> Any:
    """Return the type of a method's answer."""
    return inspect.signature(method, eval_str=True).return_annotation


class Calls(AnyCalls):
    """The calls of one end of a connection: those that wait for a reply, and those that are answered here."""

    def __init__(self, send: Callable[[wire.Call | wire.Reply], object], services: Services | None = None) -> None:
        """send: sends a message to the other end.   services: that this end offers; None: calls wait for `offer`."""
        self._send = send
        self._services: dict[str, tuple[Callable[..., Any], list[Any]]] = {}
        self._early: list[wire.Call] | None = []  # None: functions are offered
        self._encoder = wire.make_encoder()
        self._waiting: dict[int, asyncio.Future[wire.Reply]] = {}  # by call id
        self._call_ids = itertools.count(1)
        self._answering: set[asyncio.Future[Any]] = set()
        self._ended: WorkerDied | None = None
        if services is not None:
            self.offer(services)

    def offer(self, services: Services) -> None:
        """Answer calls of these functions from now on; first those that came before."""
        self._services = {name: (service, _decoders_of(service)) for name, service in services.items()}
        early, self._early = self._early, None
        for call in early or ():
            self._answer(call)

    async def call(self, name: str, *arguments: object, returns: Any = Any) -> Any:
        """Call a function of the other end; return its result, of the type `returns`.

        Raises the error of pagoda that it raises, PagodaError for another one, WorkerDied if the connection ends.
        """
        if self._ended is not None:
            raise fresh(self._ended)
        call_id = next(self._call_ids)
        replied = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            self.post(name, *arguments, call_id=call_id)
            reply = await replied
        finally:
            del self._waiting[call_id]
        if reply.error is not None:
            raise _error_of(*reply.error)
        return wire.make_decoder(returns).decode(reply.value)

    def post(self, name: str, *arguments: object, call_id: int = 0) -> None:
        """Call a function of the other end, if there is one, without waiting for it. Its errors are logged there."""
        if self._ended is None:
            self._send(wire.Call(call_id, name, tuple(map(self._raw, arguments))))

    def take(self, message: wire.Call | wire.Reply) -> None:
        """Take a message of the other end."""
        if isinstance(message, wire.Reply):
            waiting = self._waiting.get(message.call_id)
            if waiting is not None and not waiting.done():  # its caller may have been cancelled
                waiting.set_result(message)
        elif self._early is not None:
            self._early.append(message)
        else:
            self._answer(message)

    def end(self, error: WorkerDied) -> None:
        """The connection has ended: nothing is answered any more, and callers get an error."""
        self._ended = error
        for task in self._answering:
            task.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(fresh(error))

    def _answer(self, call: wire.Call) -> None:
        try:
            service, decoders = self._services[call.name]
            result = service(*(one.decode(data) for one, data in zip(decoders, call.arguments, strict=False)))
            if inspect.isawaitable(result):
                result = asyncio.ensure_future(result)
                self._answering.add(result)
            if isinstance(result, asyncio.Future | Future):
                result.add_done_callback(partial(self._answer_later, call))
            else:
                self._reply(call, result)
        except Exception as error:
            self.refuse(call, error)

    def _answer_later(self, call: wire.Call, done: "asyncio.Future[Any] | Future[Any]") -> None:
        self._answering.discard(done)  # type: ignore[arg-type]
        if not done.cancelled():
            try:
                self._reply(call, done.result())
            except Exception as error:
                self.refuse(call, error)

    def _reply(self, call: wire.Call, result: object) -> None:
        if call.call_id:
            self._send(wire.Reply(call.call_id, self._raw(result)))

    def refuse(self, call: wire.Call, error: Exception) -> None:
        """Answer a call that has failed."""
        if not isinstance(error, PagodaError) or not call.call_id:
            logger.error("the call %r failed", call.name, exc_info=error)
        if call.call_id:
            fields = {name: one for name, one in vars(error).items() if isinstance(one, str | int | None)}
            self._send(wire.Reply(call.call_id, error=(type(error).__name__, str(error), fields)))

    def _raw(self, value: object) -> msgspec.Raw:
        return msgspec.Raw(self._encoder.encode(value))


class OwnCalls(AnyCalls):
    """Calls of functions of this process, which get the number 0 of a client first, as those of others have theirs."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def call(self, name: str, *arguments: object, returns: Any = Any) -> Any:
        result = self._services[name](0, *arguments)
        return await result if inspect.isawaitable(result) else result

    def post(self, name: str, *arguments: object) -> None:
        self._services[name](0, *arguments)


def _decoders_of(service: Callable[..., Any]) -> list[Any]:
    """Return the decoders of a function's arguments."""
    parameters = inspect.signature(service, eval_str=True).parameters.values()
    kinds = [Any if one.annotation is inspect.Parameter.empty else one.annotation for one in parameters]
    return [wire.make_decoder(kind) for kind in kinds]


def _error_of(name: str, text: str, fields: dict[str, str | int | None]) -> PagodaError:
    kind = next((one for one in _kinds_of(PagodaError) if one.__name__ == name), None)
    if kind is None:
        return PagodaError(f"a call to another process failed: {name}: {text}")
    error = kind.__new__(kind, text)
    vars(error).update(fields)
    return error


def _kinds_of(kind: type[PagodaError]) -> Iterator[type[PagodaError]]:
    """Yield a class of errors, and those derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds_of(derived)
