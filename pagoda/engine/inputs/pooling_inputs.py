"""What prompts to pool need before they are requests: checked parameters, instructions, pairs of texts."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.base.pooling import ModelTasks, PoolingParams, PoolingPlan, PoolingTask
from pagoda.engine.inputs.prompts import Prompt, text_of
from pagoda.engine.tokenizers.tokenizer import SpecialTokens

_OF_EMBEDDINGS = ("embed", "token_embed")


def check_pooling(params: PoolingParams, tasks: ModelTasks) -> PoolingParams:
    """Return the parameters with their task. Raises RequestError for what the model cannot do, or has no meaning."""
    task = params.task or tasks.plan.default_task
    tasks.check(task)
    if task == "score" and not tasks.plan.labels:
        raise RequestError("task: a score of this model compares the embeddings of two texts; use score", "task")
    if task not in _OF_EMBEDDINGS:
        for name in ("dimensions", "normalize"):
            if getattr(params, name) is not None:
                raise RequestError(f"{name}: only embeddings have it, not {task}; leave it out", name)
    elif params.dimensions is not None and params.dimensions != tasks.embedding_size:
        asked, sizes = f"dimensions={params.dimensions}", tasks.plan.sizes
        if params.dimensions > tasks.embedding_size > 0:
            raise RequestError(
                f"{asked} is more than the {tasks.embedding_size} of this model's embeddings", "dimensions"
            )
        if sizes is None:
            why = "this model was not trained for shorter embeddings (Matryoshka); leave it out"
            raise RequestError(f"{asked}: {why}, or say that it was with --hf-overrides.is-matryoshka", "dimensions")
        if sizes and params.dimensions not in sizes:
            raise RequestError(f"{asked} must be one of {', '.join(map(str, sizes))}", "dimensions")
    return dataclasses.replace(params, task=task)


def with_task(params: PoolingParams, task: PoolingTask | None) -> PoolingParams:
    """Return the parameters for `task`, the one of the method that is called. Raises RequestError for another one."""
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise RequestError(f"task: PoolingParams has {params.task!r}, but the call is for {task!r}", "task")
    return dataclasses.replace(params, task=task)


def with_truncation(params: PoolingParams, truncate: int | None) -> PoolingParams:
    """Return the parameters with `truncate_prompt_tokens`, if it is given. Raises RequestError if it is invalid."""
    return params if truncate is None else dataclasses.replace(params, truncate_prompt_tokens=truncate)


def with_instruction(prompt: Prompt, instruction: str) -> Prompt:
    """Return a text with an instruction in front of it; a prompt of token ids or embeddings stays as it is."""
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return instruction + prompt
    if isinstance(prompt, Mapping) and prompt.keys() == {"prompt"}:
        return {"prompt": instruction + (text_of(prompt) or "")}
    return prompt


def texts_of(name: str, data: object) -> list[str]:
    """Return one text or several as a list. Raises RequestError, which names the argument.   name: of the argument."""
    texts = [data] if isinstance(data, str) else data
    if not isinstance(texts, Sequence):
        raise RequestError(f"{name} is {type(data).__name__}, expected a string or a list of strings", name)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"{name}[{index}] is {type(text).__name__}, expected a string", name)
    return list(texts)


def instruction_of(plan: PoolingPlan, name: str | None) -> str:
    """Return the text to put in front of a text to embed.

    name: of one of the model's instructions; None: its default, if it has one. Raises RequestError if it is unknown.
    """
    if name is None:
        name = plan.default_prompt
        return plan.prompts.get(name, "") if name is not None else ""
    if name not in plan.prompts:
        known = ", ".join(sorted(plan.prompts)) or "none"
        raise RequestError(f"prompt_name: {abbreviate(name)} is unknown; the model has {known}", "prompt_name")
    return plan.prompts[name]


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """A pair of texts as one prompt.   pair_start: index of the first token of the second text."""

    token_ids: list[int]
    pair_start: int


def join_pair(first: Sequence[int], second: Sequence[int], added: SpecialTokens, most: int | None) -> PairPrompt:
    """Join two texts, tokenised without special tokens, as the tokenizer does with a pair.

    most: tokens to keep; the longer text is cut first, as by the tokenizers of transformers. None: all.
    """
    num_first, num_second = len(first), len(second)
    if most is not None:
        num_special = len(added.pair_before) + len(added.between) + len(added.pair_after)
        num_first, num_second = _cut_longest(num_first, num_second, max(most - num_special, 0))
    before = [*added.pair_before, *first[:num_first], *added.between]
    return PairPrompt([*before, *second[:num_second], *added.pair_after], len(before))


def _cut_longest(num_first: int, num_second: int, most: int) -> tuple[int, int]:
    """Return the lengths of two texts that are cut to `most` tokens together, the longer one first."""
    if num_first + num_second <= most:
        return num_first, num_second
    shorter = min(num_first, num_second, most // 2)
    longer = most - shorter
    return (longer, shorter) if num_first > num_second else (shorter, longer)
