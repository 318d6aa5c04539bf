"""`scheduler_cls`: a scheduler of the user's own, by path or as a class."""

from collections import Counter

import pytest

from pagoda import LLM, ConfigError, RequestError, SamplingParams, Scheduler
from pagoda.assembly.assemble import load_scheduler_class
from pagoda.base.config import EngineConfig
from pagoda.core.request import Request
from pagoda.core.scheduler_interface import SchedulerInterface
from pagoda.core.scheduler_output import SchedulerOutput
from tests.cached_models import cached_model

calls: Counter[str] = Counter()


class ShortPromptsOnly(Scheduler):
    """Refuses prompts of more than 16 tokens, and counts its steps."""

    def add_request(self, request: Request) -> None:
        if request.num_prompt_tokens > 16:
            raise RequestError(f"the prompt has {request.num_prompt_tokens} tokens, this scheduler takes 16", "prompt")
        super().add_request(request)

    def schedule(self) -> SchedulerOutput:
        calls["schedule"] += 1
        return super().schedule()


class NoScheduler:
    def schedule(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("named", ["tests.assembly.test_own_scheduler.ShortPromptsOnly", ShortPromptsOnly])
def test_an_own_scheduler_runs_in_an_llm(named: str | type[Scheduler]) -> None:
    calls.clear()
    cached_model("smollm2-135m")
    options = {"distributed_executor_backend": "fake", "max_model_len": 128, "num_blocks": 16}
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    with LLM("smollm2-135m", **options) as llm:  # type: ignore[arg-type]
        [expected] = llm.generate("one two", params)
    with LLM("smollm2-135m", scheduler_cls=named, **options) as llm:  # type: ignore[arg-type]
        [output] = llm.generate("one two", params)
        with pytest.raises(RequestError, match="this scheduler takes 16"):
            llm.generate("one " * 20, params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert calls["schedule"] >= 5


def test_the_default_is_pagodas_and_has_what_the_interface_asks_for() -> None:
    assert EngineConfig().scheduler.scheduler_cls is None
    scheduler: type[SchedulerInterface] = load_scheduler_class(None)
    assert scheduler is Scheduler


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Scheduler", "cannot be imported"),
        ("no_such_module.Scheduler", "cannot be imported"),
        ("pagoda.core.scheduler.Sheduler", "cannot be imported"),
        ("tests.assembly.test_own_scheduler.NoScheduler", "is not a scheduler: it has no add_request, "),
        ("pagoda.core.scheduler.replace", "is not a scheduler"),
    ],
)
def test_what_is_not_a_scheduler_is_refused_before_anything_is_loaded(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler_cls='{name}' {why}"):
        load_scheduler_class(name)
