"""Keep the exceptions of signal handlers out of code that must not be interrupted halfway."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]

# Signals of terminals, timers and limits, and those for programs' own use: handlers of others hardly raise. Looking for
# the handlers of all signals would take 20 us per step.
_NAMES = "SIGINT SIGTERM SIGHUP SIGQUIT SIGALRM SIGVTALRM SIGPROF SIGUSR1 SIGUSR2 SIGCHLD SIGXCPU SIGBREAK"
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES.split() if hasattr(signal, name))


@contextlib.contextmanager
def raised_afterwards() -> Generator[None]:
    """Run signal handlers as usual, but raise what they raise (KeyboardInterrupt, say) when the block has ended.

    Of several exceptions, the first is raised. A second KeyboardInterrupt or SystemExit takes effect at once, so that
    the program can be ended if the block hangs. Does nothing off the main thread, where no signal handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    errors = _HandlerErrors()
    try:
        errors.begin()
        yield
    finally:
        errors.end()
        error, errors.first = errors.first, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame


class _HandlerErrors:
    """Calls the program's signal handlers and keeps the first exception that one of them raises: `first`."""

    def __init__(self) -> None:
        self.first: BaseException | None = None
        self._is_over = False
        self._replaced: dict[int, tuple[_Handler, _Handler]] = {}  # signal -> the program's handler, and ours

    def begin(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # not ignored, left to the system, or set outside of Python
                ours = self._guarded(handler)
                self._replaced[number] = handler, ours
                signal.signal(number, ours)

    def end(self) -> None:
        """Put the program's handlers back, except where one of them has set another one meanwhile."""
        self._is_over = True  # a handler that raises below may leave some of ours in place: they change nothing then
        for number, (handler, ours) in self._replaced.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handler)

    def _guarded(self, handler: _Handler) -> _Handler:
        def guarded(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                is_second = self.first is not None and not isinstance(error, Exception)
                if self._is_over or is_second:
                    raise
                if self.first is None:
                    self.first = error

        return guarded
