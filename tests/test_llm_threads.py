"""One LLM in threads, signal handlers, after fork, while it is closed: never a corrupt heap, never a deadlock."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from pagoda import LLM, ConfigError, RequestOutput, SamplingParams, UsageError, WorkerDied
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pagoda.engine import engine_thread, offline
from pagoda.engine.text_engine import TextEngine
from pagoda.executors.fake import FakeExecutor
from tests.cached_models import cached_model
from tests.engine.step_per_command import step_per_command
from tests.fake_engine import MAX_LEN, byte_inputs, fake_core

LONG = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
MEDIUM = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, seed=2, ignore_eos=True)
STEP_S = 0.002


class SlowExecutor(FakeExecutor):
    """Takes its time for a step, notes how many rows it had, and asserts that one thread at a time is in it."""

    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__(64, MAX_LEN, vocab_size=258)
        self.step_s = step_s
        self.most_rows = 0
        self.on_step: Callable[[int], object] = lambda _: None
        self._busy = threading.Lock()

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        assert self._busy.acquire(blocking=False), "two threads are in the engine"
        try:
            self.most_rows = max(self.most_rows, len(output.rows))
            time.sleep(self.step_s)
            self.on_step(self.num_steps)
            return super().submit(output)
        finally:
            self._busy.release()


@pytest.fixture
def executor() -> SlowExecutor:
    return SlowExecutor()


@pytest.fixture
def llm(executor: SlowExecutor) -> Iterator[LLM]:
    with LLM.over(lambda: TextEngine(fake_core(executor), byte_inputs())) as llm:
        yield llm


class Deadlock(BaseException):
    """Ends a test."""


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """End the test if it deadlocks."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Deadlock

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 60, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def wait_until_idle(llm: LLM) -> None:
    """Wait until no request is left in the engine and no step in flight."""
    wait_until(
        lambda: not llm.llm_engine.has_unfinished_requests() and not llm.llm_engine.core.has_unfinished_requests()
    )


def held(llm: LLM, num_free_steps: int = 0) -> contextlib.AbstractContextManager[None]:
    return step_per_command(llm._thread, num_free_steps)


def wait_until_queued(llm: LLM, count: int) -> None:
    """Wait until the engine has so many requests."""
    wait_until(lambda: len(llm.llm_engine._outputs) == count)


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)


def test_threads_get_what_they_would_get_alone_and_run_in_one_batch(llm: LLM, executor: SlowExecutor) -> None:
    work = [
        (f"prompt {i}" * (1 + i % 3), SamplingParams(max_tokens=5 + 3 * i, seed=i, ignore_eos=True)) for i in range(24)
    ]
    alone = [tokens(llm.generate(prompt, params)[0]) for prompt, params in work]
    assert executor.most_rows <= 1
    with ThreadPoolExecutor(8) as pool:
        with held(llm):
            asked = [pool.submit(llm.generate, *item) for item in work]
            wait_until_queued(llm, 8)
        together = [tokens(one.result()[0]) for one in asked]
    assert together == alone
    assert executor.most_rows >= 4
    wait_until_idle(llm)


def test_streams_and_batches_of_threads_mix(llm: LLM) -> None:
    alone = [tokens(llm.generate(f"p{i}", SHORT)[0]) for i in range(12)]

    def work(index: int) -> list[int]:
        if index % 2:
            return [token for delta in llm.stream(f"p{index}", SHORT) for token in delta.outputs[0].token_ids]
        return tokens(llm.generate(f"p{index}", SHORT)[0])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(12))) == alone


def test_a_short_request_does_not_wait_for_a_long_one(llm: LLM) -> None:
    ended: list[str] = []
    short, long = (
        threading.Thread(target=lambda name, params: (llm.generate(name, params), ended.append(name)), args=args)
        for args in (("short", SHORT), ("long", LONG))
    )
    with held(llm):
        long.start()
        wait_until_queued(llm, 1)
        short.start()
        wait_until_queued(llm, 2)
    short.join()
    long.join()
    assert ended == ["short", "long"]


def test_two_threads_may_read_one_stream(llm: LLM) -> None:
    expected = tokens(llm.generate("shared", LONG)[0])
    stream = llm.stream("shared", LONG)
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda _: [delta.outputs[0].token_ids for delta in stream], range(2)))
    assert sorted(token for part in parts for delta in part for token in delta) == sorted(expected)


@pytest.mark.parametrize("num_read", [0, 3])
def test_a_forgotten_stream_leaves_nothing_behind(llm: LLM, num_read: int) -> None:
    stream = llm.stream("forgotten", LONG)
    for _ in range(num_read):
        next(stream)
    del stream
    gc.collect()
    wait_until_idle(llm)


def test_a_stream_dropped_while_another_thread_generates_is_aborted(llm: LLM) -> None:
    driver = threading.Thread(target=lambda: llm.generate("long", LONG))
    with held(llm, num_free_steps=3):
        driver.start()
        wait_until_queued(llm, 1)
        stream = llm.stream("forgotten", LONG)
        next(stream)
        del stream
        wait_until_queued(llm, 1)
    driver.join()
    wait_until_idle(llm)


# ---- signals


def test_a_signal_handler_gets_an_error_and_the_interrupted_call_continues(llm: LLM, executor: SlowExecutor) -> None:
    expected = tokens(llm.generate("long", LONG)[0])
    errors: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        for call in (lambda: llm.generate("inner", SHORT), lambda: next(llm.stream("inner", SHORT))):
            try:
                call()
            except UsageError as error:
                errors.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    signals_at(executor, {executor.num_steps + 10 * i for i in range(1, 8)}, signal.SIGUSR1)
    try:
        assert tokens(llm.generate("long", LONG)[0]) == expected
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert errors
    assert all("cannot be called from a signal handler" in error for error in errors)


def test_a_signal_handler_cannot_chat_while_the_llm_renders(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering takes a lock that the interrupted call holds: waiting for it would last for ever."""
    errors: list[str] = []
    render = llm.llm_engine.input_processor.chats.render

    def interrupted(*args: Any, **options: Any) -> Any:
        try:
            llm.chat([{"role": "user", "content": "inner"}], SHORT)
        except UsageError as error:
            errors.append(str(error))
        return render(*args, **options)

    monkeypatch.setattr(llm.llm_engine.input_processor.chats, "render", interrupted)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokens(llm.chat([{"role": "user", "content": "outer"}], SHORT, chat_template=template)[0])
    assert len(errors) == 1
    assert "cannot be called from a signal handler" in errors[0]


def test_a_closed_llm_renders_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    monkeypatch.setattr(llm.llm_engine.input_processor.chats, "render", rendered.append)
    llm.close()
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(UsageError, match="closed"):
            call([{"role": "user", "content": "hi"}], SHORT)
    assert not rendered


def test_a_signal_handler_between_two_deltas_may_generate(llm: LLM) -> None:
    expected = tokens(llm.generate("inner", SHORT)[0])
    found: list[list[int]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(tokens(llm.generate("inner", SHORT)[0])))
    try:
        for index, _ in enumerate(llm.stream("outer", SHORT)):
            if index == 2:
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [expected]


def test_a_signal_handler_cannot_end_a_stream_by_reading_it(llm: LLM, executor: SlowExecutor) -> None:
    expected = tokens(llm.generate("outer", MEDIUM)[0])
    stream = llm.stream("outer", MEDIUM)
    errors: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            next(stream)
        except UsageError as error:
            errors.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signals_at(executor, {executor.num_steps + 5}, signal.SIGUSR1)
        llm.generate("inner", LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1
    assert [token for delta in stream for token in delta.outputs[0].token_ids] == expected


def signals_at(executor: SlowExecutor, steps: set[int], number: int) -> None:
    """Send a signal to this process when the engine begins one of these steps, and the main thread waits for it."""

    def on_step(current: int) -> None:
        if current in steps:
            wait_until(main_thread_waits)
            os.kill(os.getpid(), number)

    executor.on_step = on_step


def test_closing_from_a_signal_handler_ends_the_call(executor: SlowExecutor) -> None:
    llm = LLM.over(lambda: TextEngine(fake_core(executor), byte_inputs()))
    before = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    signals_at(executor, {5}, signal.SIGUSR1)
    try:
        with pytest.raises(UsageError, match="closed"):
            llm.generate("long", LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert executor.num_steps < 200
    with pytest.raises(UsageError, match="this LLM is closed"):
        llm.generate("again", SHORT)
    llm.close()


class TooSlow(Exception):
    """Raised by a program's own signal handler."""


def raise_too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGUSR1, raise_too_slow, TooSlow),
        (signal.SIGTERM, lambda *_: sys.exit(3), SystemExit),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_what_a_handler_raises_ends_the_call_it_interrupts_and_nothing_else(
    llm: LLM, executor: SlowExecutor, number: int, handler: Any, error: type[BaseException], streams: bool
) -> None:
    expected = tokens(llm.generate("other", MEDIUM)[0])
    found: list[list[int]] = []
    other = threading.Thread(target=lambda: found.append(tokens(llm.generate("other", MEDIUM)[0])))

    def interrupt(step: int) -> None:
        if len(llm.llm_engine._outputs) == 1:  # the other's, which must not end before the interrupted call
            wait_until(lambda: not llm._thread._runner.commands.empty())
            return
        executor.on_step = lambda _: None
        wait_until(main_thread_waits)
        os.kill(os.getpid(), number)

    before = signal.signal(number, handler)
    try:
        executor.on_step = interrupt
        other.start()
        wait_until_queued(llm, 1)
        with pytest.raises(error):
            list(llm.stream("mine", LONG)) if streams else llm.generate(["mine", "mine too"], LONG)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
        other.join()
    assert found == [expected]
    wait_until_idle(llm)
    assert tokens(llm.generate("other", MEDIUM)[0]) == expected


def test_what_a_handler_raises_while_a_request_is_queued_leaves_no_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = llm.llm_engine.core.add_request

    def interrupting(request: Any) -> None:
        add(request)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(llm.llm_engine.core, "add_request", interrupting)
    for call in (lambda: llm.generate(["a"], LONG), lambda: llm.stream("c", LONG)):
        with pytest.raises(KeyboardInterrupt):
            call()
    monkeypatch.undo()
    wait_until_idle(llm)
    assert tokens(llm.generate("next", SHORT)[0])


def main_thread_waits() -> bool:
    """Whether the main thread is in code that waits for an engine's thread."""
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None and frame.f_code.co_filename not in (offline.__file__, engine_thread.__file__):
        frame = frame.f_back
    return frame is not None


def test_ctrl_c_ends_a_call_whose_step_hangs_and_a_second_one_the_wait_for_the_end(
    llm: LLM, executor: SlowExecutor
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        hangs.set()
        goes_on.wait()

    executor.on_step = hang

    def press() -> None:
        hangs.wait()  # before that, the request may not be queued: no step would hang, and `close` would just return
        wait_until(main_thread_waits)
        os.kill(os.getpid(), signal.SIGINT)

    for call in (lambda: llm.generate("long", LONG), llm.close):
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        presser.join()
    goes_on.set()
    llm.close()


# ---- ends


def test_closing_while_others_generate_ends_their_calls(executor: SlowExecutor) -> None:
    llm = LLM.over(lambda: TextEngine(fake_core(executor), byte_inputs()))
    errors: list[str] = []

    def work(index: int) -> None:
        try:
            llm.generate(f"long {index}", LONG)
        except UsageError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    with held(llm):
        for thread in threads:
            thread.start()
        wait_until_queued(llm, 4)
        stream = llm.stream("a stream", LONG)
        llm.close()
    for thread in threads:
        thread.join(10)
    assert errors == ["this LLM was closed while it generated"] * 4
    with pytest.raises(UsageError, match="closed"):
        next(stream)
    with pytest.raises(UsageError, match="this LLM is closed"):
        llm.stream("another", SHORT)
    llm.close()


class DyingExecutor(SlowExecutor):
    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        if len(output.rows) == 3:
            self.shutdown()
        return super().submit(output)


def test_each_call_of_an_engine_that_died_raises_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One instance would keep the frames of all callers in a traceback that grows with each call."""
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:

        def die() -> None:
            raise WorkerDied("gone")

        monkeypatch.setattr(llm.llm_engine.core, "step", die)
        errors: list[BaseException] = []
        for _ in range(4):
            with pytest.raises(WorkerDied, match="gone") as raised:
                llm.generate("p", SHORT)
            errors.append(raised.value)
        depths = [len(traceback.extract_tb(error.__traceback__)) for error in errors]
        assert len(set(map(id, errors))) == 4
        assert len(set(depths[1:])) == 1


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pagoda-engine"]


@pytest.mark.parametrize("use", ["unused", "used", "streams"])
def test_a_dropped_llm_ends_its_thread_and_frees_the_engine(use: str) -> None:
    llm = LLM.over(lambda: TextEngine(fake_core(SlowExecutor()), byte_inputs()))
    engine = weakref.ref(llm.llm_engine)
    if use == "used":
        llm.generate("p", SHORT)
    stream = llm.stream("p", SHORT) if use == "streams" else None
    del llm
    if stream is not None:
        assert len(list(stream)) == 8  # a stream keeps the engine
        del stream
    wait_until(lambda: not engine_threads())
    gc.collect()
    assert engine() is None


def test_an_error_while_loading_is_raised_and_leaves_no_thread() -> None:
    def build() -> TextEngine:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        LLM.over(build)
    wait_until(lambda: not engine_threads())


def test_an_internal_error_of_the_engine_counts_as_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM.over(lambda: TextEngine(fake_core(), byte_inputs())) as llm:

        def defective() -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(llm.llm_engine.core, "step", defective)
        for _ in range(2):
            with pytest.raises(WorkerDied, match="a defect"):
                llm.generate("p", SHORT)


def test_an_idle_engine_uses_no_cpu(llm: LLM) -> None:
    llm.generate("p", SHORT)
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in engine_threads() if thread.ident is not None]
    assert clocks
    before_s = sum(map(time.clock_gettime, clocks))
    time.sleep(0.3)
    assert sum(map(time.clock_gettime, clocks)) - before_s < 0.1


_EXITING = """
import os, sys, warnings
warnings.simplefilter("ignore")  # of forks in programs with threads
from pagoda import LLM, SamplingParams
from pagoda.engine.text_engine import TextEngine
from pagoda.executors.fake import FakeExecutor
from pagoda.executors.in_process import InProcessExecutor
from tests.fake_engine import byte_inputs, fake_core

class Launched:
    def __init__(self, future):
        self.result = future.result

    def is_done(self):
        return waits_elsewhere

    def wait(self):
        pass

class Worker(FakeExecutor):
    def load(self):
        pass

    def measure(self, sizes):
        return None

    def launch(self, output):
        return Launched(self.submit(output))

overlaps, waits_elsewhere = sys.argv[1] not in ("plain", "forking"), sys.argv[1] == "waiting"
worker = Worker(64, 256, vocab_size=258, step_s=0.01)
llm = LLM.over(lambda: TextEngine(fake_core(InProcessExecutor(worker, overlaps), depth=1 + overlaps), byte_inputs()))
stream = llm.stream("p", SamplingParams(max_tokens=200, ignore_eos=True))
next(stream)
if sys.argv[1] == "forking":
    child = os.fork()
    if not child:
        sys.exit(7)  # runs the finalizers that it inherits
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("leaving")
"""


@pytest.mark.parametrize("executor_threads", ["plain", "overlapping", "waiting", "forking"])
def test_a_program_that_ends_with_an_llm_at_work_is_silent(executor_threads: str) -> None:
    command = [sys.executable, "-c", _EXITING, executor_threads]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "leaving\n", "")


def test_every_thread_gets_the_error_when_the_worker_dies() -> None:
    llm = LLM.over(lambda: TextEngine(fake_core(DyingExecutor()), byte_inputs()))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(llm.generate, f"p{i}", LONG) for i in range(3)]
        assert all(isinstance(call.exception(30), WorkerDied) for call in calls)
    with pytest.raises(WorkerDied):
        llm.generate("again", SHORT)
    llm.close()


def test_a_forked_child_gets_an_error_and_the_parent_continues(llm: LLM) -> None:
    expected = tokens(llm.generate("p", SHORT)[0])
    busy = threading.Thread(target=lambda: llm.generate("long", LONG))
    busy.start()  # the child inherits locks that this thread holds
    wait_until(llm.llm_engine.has_unfinished_requests)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # a deadlock must not leave a process running
        said = "nothing"
        try:
            llm.generate("p", SHORT)
        except UsageError as error:
            said = str(error)
        llm.close()
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read_end) as pipe:
        assert "is a fork of it" in pipe.read()
    assert status == 0
    busy.join()
    assert tokens(llm.generate("p", SHORT)[0]) == expected


def test_a_model_gives_threads_the_tokens_they_would_get_alone() -> None:
    """With the real kernels, which two threads at once would bring down."""
    cached_model("smollm2-135m")
    prompts = ["The capital of France is", "Water boils at", "One, two, three,", "The largest planet is"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(max_num_seqs=8, max_model_len=256, kv_cache_memory=64 << 20) as llm:
        alone = [tokens(llm.generate(prompt, greedy)[0]) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                assert list(pool.map(lambda prompt: tokens(llm.generate(prompt, greedy)[0]), prompts)) == alone
