"""Chat templates in a process of their own: what loops or swallows memory is ended, and the next job is served."""

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.base.errors import ConfigError, RequestError
from pagoda.engine.cancellation import Cancellation, Cancelled
from pagoda.engine.templates.job import InProcessRenderer, TemplateJob, TemplateSource
from pagoda.engine.templates.process import ProtectedRenderer, TemplateLimits, TemplateProcess
from pagoda.engine.templates.special_marks import SpecialMarks

MARKS = SpecialMarks(["<|im_start|>", "<|im_end|>"])
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
LIMITS = TemplateLimits(timeout_s=1.0, memory_bytes=256 * 2**20)
PATIENT = TemplateLimits(timeout_s=20.0, memory_bytes=256 * 2**20)  # for what must end by another limit


def job(text: str, is_own: bool = False, **more: Any) -> TemplateJob:
    values: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "is_marked": True, **more}
    return TemplateJob(TemplateSource({"default": text}, {"eos_token": "<|im_end|>"}, MARKS), is_own, **values)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess(LIMITS)
    yield process
    process.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[TemplateProcess]:
    process = TemplateProcess(PATIENT)
    yield process
    process.close()


def test_another_process_renders_the_same(process: TemplateProcess) -> None:
    here = InProcessRenderer()
    for text in ("{{ messages[0].content }}{{ eos_token }}", "<|im_start|>{{ messages | tojson }}", "é\U0001f600"):
        for is_marked in (False, True):
            one = job(text, is_marked=is_marked)
            assert process.render(one) == here.render(one)
    assert (
        process.render(job("{{ messages[0].content }}", messages=[{"role": "user", "content": "\ud800"}])) == "\ud800"
    )


@pytest.mark.parametrize("text", [LOOP, "{{ 9 ** (9 ** (9 ** 9)) }}"])
def test_a_template_that_does_not_finish_is_stopped(process: TemplateProcess, text: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestError, match="stopped after 1 s"):
        process.render(job(text))
    assert time.monotonic() - began_s < 8
    assert process.render(job("{{ messages[0].content }}")) == "hi"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ 'a'|center(5000000000) }}", "memory"),
        ("{{ 'a' * 5000000000 }}", "memory"),
        ("{% set n = messages|length * 5000000000 %}{{ 'a'|center(n) }}", "memory"),
        ("{{ ('a' * 1000000) * 1000000 }}", "memory"),
        ("{% for a in range(100) %}{{ 'a' * 100000000 }}{% endfor %}", "memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ raise_exception('a' * 10000000) }}", "10000000 characters"),
        ("{{ '(' * 100 }}" + "{{ " + "(" * 20000 + ")" * 20000 + " }}", "nested too deeply"),
    ],
)
def test_a_template_that_grows_too_large_is_stopped(patient: TemplateProcess, text: str, said: str) -> None:
    # Which recursion runs out first, jinja's or the compiler's, depends on the version of Python; both are a 400.
    with pytest.raises((RequestError, ConfigError), match=said) as caught:
        patient.render(job(text))
    assert len(str(caught.value)) < 1000
    assert patient.render(job("{{ messages[0].content }}")) == "hi"


def test_a_template_that_is_not_jinja(process: TemplateProcess) -> None:
    with pytest.raises(ConfigError, match="not valid"):
        process.render(job("{% if %}"))
    with pytest.raises(ConfigError, match="nope"):
        process.render(job("{{ messages | nope }}"))
    assert process.render(job("ok")) == "ok"


def test_both_processes_cache_and_evict_the_same_templates(process: TemplateProcess) -> None:
    for number in [*range(40), *range(40), 39, 0, 38, 1]:
        assert process.render(job(f"template {number}")) == f"template {number}"


def test_a_worker_that_has_grown_is_replaced() -> None:
    process = TemplateProcess(TemplateLimits(timeout_s=60.0))
    try:
        assert process.render(job("a")) == "a"
        first = process.process.pid
        assert first is not None
        assert len(process.render(job("{% set x = messages[0].content * 40000000 %}b"))) == 1
        assert process.render(job("a")) == "a"
        assert process.process.pid != first
    finally:
        process.close()


def test_a_killed_process_is_replaced(process: TemplateProcess) -> None:
    assert process.render(job("a")) == "a"
    process.process.kill()
    assert process.render(job("a")) == "a"


def test_a_cancelled_job_ends_before_its_deadline(patient: TemplateProcess) -> None:
    assert patient.render(job("a")) == "a"
    failed: list[Exception] = []
    cancellation = Cancellation()

    def render() -> None:
        try:
            patient.render(job(LOOP), cancellation)
        except Cancelled as error:
            failed.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.1)
    cancellation.cancel()
    thread.join(PATIENT.timeout_s / 2)
    assert failed
    assert patient.render(job("a")) == "a"


class Odd(dict[str, object]):
    """A class that another process cannot find."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def test_values_of_a_callers_own_classes_are_rendered_here() -> None:
    renderer = ProtectedRenderer(LIMITS)
    try:
        message = {"role": "user", "content": "x", "odd": Odd(a=1)}
        assert renderer.render(job("{{ messages[0].odd.a }}", messages=[message])) == "1"
        assert renderer.render(job("{{ messages[0].content }}")) == "hi"
    finally:
        renderer.close()


def test_no_process_is_left_behind() -> None:
    process = TemplateProcess(LIMITS)
    assert process.render(job("a")) == "a"
    pid = process.process.pid
    assert pid is not None
    process.close()
    assert not Path(f"/proc/{pid}").exists() or os.waitpid(pid, os.WNOHANG)


def test_what_rendering_in_another_process_costs(process: TemplateProcess) -> None:
    one = job("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}", is_own=True)
    process.render(one)
    best_s = math.inf
    for _ in range(1_000):
        began_s = time.perf_counter()
        process.render(one)
        best_s = min(best_s, time.perf_counter() - began_s)
        if best_s < 0.003:
            break
    assert best_s < 0.003, "a round trip takes 0.2 ms on an idle machine"
