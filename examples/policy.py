"""A scheduling policy of your own: the shortest prompt first.

A policy orders the waiting queue and picks the request to preempt when memory runs out. In a checkout it is one class
in pagoda/core/policy.py and one entry of POLICIES (docs/howto/add-a-policy.md). This script
instead replaces the policy "priority" with its own class, for this process only.
"""

from collections.abc import Iterable

from pagoda import LLM, RequestOutput, SamplingParams
from pagoda.base.config import SchedulingPolicy
from pagoda.core.policy import POLICIES
from pagoda.core.request import Request, RequestState, SortKey


class ShortestPromptFirst:
    """Smallest number of prompt tokens first, then arrival. The victim of a preemption is the longest."""

    def key(self, request: Request) -> SortKey:
        return (request.num_prompt_tokens, request.arrival_time_s, request.request_id)

    def key_on_return(self, request: RequestState) -> SortKey:
        return self.key(request.spec)

    def victim(self, running: Iterable[RequestState]) -> RequestState:
        return max(running, key=lambda request: self.key(request.spec))

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return self.key(waiting.spec) < self.key(running.spec)


def started_at(output: RequestOutput) -> float:
    assert output.metrics is not None
    return output.metrics.first_scheduled_time or 0.0


def main() -> None:
    POLICIES[SchedulingPolicy.PRIORITY] = ShortestPromptFirst
    prompts = ["one two three four five six seven eight", "one two three", "one two three four five", "one"]
    # One sequence at a time, so that the order shows.
    with LLM("smollm2-135m", scheduling_policy="priority", max_num_seqs=1, max_model_len=256) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
    for output in sorted(outputs, key=started_at):
        print(len(output.prompt_token_ids or []), "prompt tokens:", output.prompt)


if __name__ == "__main__":
    main()
