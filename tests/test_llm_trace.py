"""LLM.trace and AsyncLLM.trace: what the engine of a Python program does, in Chrome's trace format."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pagoda import LLM, AsyncLLM, SamplingParams, UsageError
from pagoda.engine.text_engine import TextEngine
from tests.chrome_format import check_trace
from tests.fake_engine import byte_inputs, fake_core

SHORT = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)


def build() -> TextEngine:
    return TextEngine(fake_core(), byte_inputs())


def read(file: Path) -> list[dict[str, Any]]:
    trace = json.loads(file.read_text())
    check_trace(trace)
    return trace["traceEvents"]


def prompt_tokens(entries: list[dict[str, Any]]) -> int:
    return sum(one["args"]["prompt"] for one in entries if one["name"].startswith("step "))


def test_a_block_is_traced_and_nothing_outside_of_it(tmp_path: Path) -> None:
    prompts = [letter * 20 for letter in "abcd"]
    with LLM.over(build) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, SHORT)]
        for name in ("one.json", "two.json"):
            with llm.trace(tmp_path / name):
                traced = llm.generate(prompts, SHORT)
            llm.generate(prompts, SHORT)
            assert llm.llm_engine.core.strip.on_step is None
            assert [output.outputs[0].text for output in traced] == expected
            entries = read(tmp_path / name)
            tracks = {one["args"]["name"] for one in entries if one["name"] == "thread_name" and one["pid"] == 2}
            assert tracks == {output.request_id for output in traced}
            assert prompt_tokens(entries) == sum(20 - (output.num_cached_tokens or 0) for output in traced)
            assert sum(one["name"] == "first token" for one in entries) == 4
            steps = [one for one in entries if one["name"].startswith("step ")]
            assert all(one["dur"] >= 0 for one in steps)
            assert sum(one["args"]["sampled"] for one in steps) == 32


def test_requests_that_run_when_it_begins_have_a_track(tmp_path: Path) -> None:
    with LLM.over(build) as llm:
        stream = llm.stream("long", SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
        next(stream)
        with llm.trace(tmp_path / "t.json"):
            for _ in stream:
                pass
        (track,) = (one for one in read(tmp_path / "t.json") if one["name"] == "thread_name" and one["pid"] == 2)
        assert track["args"]["name"] == "0"


def test_one_trace_is_made_at_a_time_and_an_error_of_the_block_is_kept(tmp_path: Path) -> None:
    with LLM.over(build) as llm:
        with (
            pytest.raises(UsageError, match="made already"),
            llm.trace(tmp_path / "outer.json"),
            llm.trace(tmp_path / "inner.json"),
        ):
            pass
        with pytest.raises(KeyError, match="mine"), llm.trace(tmp_path / "outer.json"):
            raise KeyError("mine")
        assert not (tmp_path / "inner.json").exists()
        read(tmp_path / "outer.json")
        with pytest.raises(FileNotFoundError), llm.trace(tmp_path / "no" / "t.json"):
            pass
        with llm.trace(tmp_path / "again.json"):
            pass


def test_async_llm_has_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncLLM.over(build) as llm:
            async with llm.trace(tmp_path / "t.json"):
                async for _ in llm.generate("x" * 20, SHORT, "mine"):
                    pass
            async for _ in llm.generate("x", SHORT):
                pass

    asyncio.run(main())
    entries = read(tmp_path / "t.json")
    assert prompt_tokens(entries) == 20
    assert [one["args"]["name"] for one in entries if one["name"] == "thread_name" and one["pid"] == 2] == ["mine"]
