"""Give the engine of this process an executor of the test's own, around the real one."""

from collections.abc import Callable

from pagoda.assembly import engine_process
from pagoda.core.executor import Executor
from pagoda.engine.flight_recorder import RecordedExecutor


def wrap_executor(wrap: Callable[[Executor], Executor]) -> None:
    """Have steps run by what `wrap` returns for an executor. May be called several times."""
    inner = engine_process.RecordedExecutor

    def wrapped(executor: Executor, *rest: object) -> RecordedExecutor:
        return inner(wrap(executor), *rest)  # type: ignore[arg-type]

    engine_process.RecordedExecutor = wrapped  # type: ignore[assignment,misc]
