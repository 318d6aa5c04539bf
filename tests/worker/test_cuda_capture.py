"""CudaCapture on a made-up torch.cuda, with the rules of torch's own that it has to keep."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagoda.worker.devices.cuda import CudaCapture


class FakeGraphs:
    """Pools of memory that count the graphs in them, and the stream that is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users: dict[int, int] = {}
        self.current: object = "computations"
        self.modes: list[str] = []
        self.error_at_end: Exception | None = None
        fakes = self

        class Graph:
            def __init__(self) -> None:
                self.number = -1
                self.has_ended = False

            def pool(self) -> int:
                if not self.has_ended:
                    raise RuntimeError("CUDAGraph::pool() without a preceding successful capture")
                return self.number

            def replay(self) -> None:
                pass

            def begin(self, pool: int | None) -> None:
                if pool is not None and not fakes.users[pool]:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                self.number = len(fakes.users) if pool is None else pool
                fakes.users[self.number] = fakes.users.get(self.number, 0) + 1

            def __del__(self) -> None:
                if self.number >= 0:
                    fakes.users[self.number] -= 1

        @contextmanager
        def graph(graph: Any, pool: int | None, stream: object, capture_error_mode: str) -> Iterator[None]:
            self.modes.append(capture_error_mode)
            before, self.current = self.current, stream
            graph.begin(pool)
            try:
                yield
            finally:
                if self.error_at_end is not None:
                    raise self.error_at_end  # as torch: the stream stays
                graph.has_ended = True
                self.current = before

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return FakeGraphs(monkeypatch)


def test_graphs_share_their_memory_even_after_all_were_dropped(fakes: FakeGraphs) -> None:
    capture, other = CudaCapture(), CudaCapture()
    out, replay = capture(lambda: torch.ones(2))
    assert out.tolist() == [1, 1]
    assert fakes.users == {0: 1}
    del replay
    second = capture(lambda: torch.ones(2))
    third = capture(lambda: torch.ones(2))
    assert fakes.users == {0: 2}
    other(lambda: torch.ones(2))
    assert fakes.users == {0: 2, 1: 1}
    assert fakes.modes == ["thread_local"] * 4
    del second, third


def test_a_capture_that_cannot_be_ended_leaves_the_stream_as_it_was(fakes: FakeGraphs) -> None:
    streams: list[object] = []

    def run() -> torch.Tensor:
        streams.append(fakes.current)
        return torch.ones(2)

    capture = CudaCapture()
    capture(run)
    fakes.error_at_end = RuntimeError("operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError, match="previous error"):
        capture(run)
    assert fakes.current == "computations"
    fakes.error_at_end = None
    kept = CudaCapture()(run), capture(run)
    assert streams[0] is streams[1] is streams[3]
    assert streams[2] not in (streams[0], "computations")
    # The graph whose capture was not ended is still there.
    assert fakes.users == {0: 1, 1: 1, 2: 1}
    del kept


def test_a_capture_in_which_the_call_failed_leaves_nothing(fakes: FakeGraphs) -> None:
    def full() -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    capture = CudaCapture()
    with pytest.raises(torch.OutOfMemoryError):
        capture(full)
    assert fakes.users == {0: 0}
    assert fakes.current == "computations"
