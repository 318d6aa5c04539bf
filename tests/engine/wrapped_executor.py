"""Give the engine of this process an executor of the test's own, around the real one."""

from collections.abc import Callable

from pagoda.assembly import engine_process
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.executor import Executor


def wrap_executor(wrap: Callable[[Executor], Executor]) -> None:
    """Have steps run by what `wrap` returns for an executor. May be called several times."""
    build = engine_process.build_engine_core

    def wrapped(
        *given: object, wrap_executor: Callable[[Executor, int], Executor] = lambda one, _: one, **settings: object
    ) -> EngineCore:
        wrappers = {"wrap_executor": lambda executor, max_rows: wrap(wrap_executor(executor, max_rows))}
        return build(*given, **wrappers, **settings)  # type: ignore[arg-type]

    engine_process.build_engine_core = wrapped  # type: ignore[assignment]
