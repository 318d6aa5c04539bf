"""The scheduler by hand, and a scheduler of your own in an engine.

A scheduler decides which requests run in each step, with how many tokens, in which blocks of the KV cache; it computes
nothing. The first part is the engine's loop without a model. The second part runs a model with a scheduler that tells
what it does.
"""

from collections.abc import Iterable

import numpy as np

from pagoda import LLM, SamplingParams, Scheduler
from pagoda.base.clock import SystemClock
from pagoda.base.config import CacheConfig
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Request
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


def sample(output: SchedulerOutput) -> ModelRunnerOutput:
    """Execute a step: here, token 7 for each row that samples one."""
    count = len(output.sample_rows)
    return ModelRunnerOutput(output.step, np.full((count, 1), 7, np.int32), np.ones(count, np.int32))


def drive(scheduler: Scheduler, prompts: Iterable[int]) -> None:
    """Run requests with prompts of so many tokens, and print what each step computes."""
    for number, length in enumerate(prompts):
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        prompt = np.arange(100 * number, 100 * number + length, dtype=np.int32)
        scheduler.add_request(Request(f"request-{number}", prompt, sampling, handle=number))
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        print(f"step {output.step}: rows {output.rows.tolist()} compute {output.num_new.tolist()} tokens", end="; ")
        outputs = scheduler.update_from_output(output, sample(output))
        ended = [end.request_id for one in outputs.values() for end in one.ends]
        print(f"{scheduler.make_stats().num_free_blocks} blocks free; ended: {', '.join(ended) or 'none'}")


class Narrated(Scheduler):
    """Says what each step computes. The engine makes it with the same arguments as a Scheduler."""

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        if not output.is_empty:
            print(f"step {output.step}: {len(output.rows)} rows, {output.total_num_scheduled_tokens} tokens")
        return output


def main() -> None:
    config = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=16)
    cache = CacheConfig(block_size=4)
    drive(Scheduler(config, cache, (KVGroupSpec(),), num_blocks=32, max_model_len=64, clock=SystemClock()), (10, 10, 3))

    prompts = ["The capital of France is", "Water boils at"]
    with LLM("smollm2-135m", scheduler_cls=Narrated, max_model_len=256) as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4)):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
