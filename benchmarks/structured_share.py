"""The share of structured outputs that end on their own, and what the others do instead. Part of structured.py.

Results are appended to a file as they come: a run that is started again with the same file and settings goes on.
"""

import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from pagoda import LLM, SamplingParams

_IN_FLIGHT = 16
_LOOP_RATIO = 0.12  # text that compresses to less than this repeats itself
_LONG_STRING_CHARS = 400
_MANY_CHILDREN = 8


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """What is generated. The schemas come in random order. Short outputs end first: part of a run has too many.

    prompt_chars: of each schema, shown to the model.
    """

    generations: int
    max_tokens: int
    temperature: float
    top_p: float
    repetition_penalty: float
    prompt_chars: int


def measure_share(llm: LLM, schemas: Sequence[Any], settings: ShareSettings, out: Path) -> dict[str, Any]:
    """Generate what `out` lacks, append each result to it, and return the report over all of it."""
    done = {one["index"] for one in read_results(out)}
    order = list(range(len(schemas)))
    random.Random(0).shuffle(order)
    todo = [i for i in range(settings.generations) if i not in done]
    with out.open("a") as file, ThreadPoolExecutor(_IN_FLIGHT) as pool:
        jobs = [pool.submit(_generate, llm, i, order[i % len(order)], schemas, settings) for i in todo]
        for job in as_completed(jobs):
            file.write(json.dumps(job.result()) + "\n")
            file.flush()
    return report(read_results(out), settings)


def read_results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def report(results: Sequence[dict[str, Any]], settings: ShareSettings) -> dict[str, Any]:
    ends = Counter(one["end"] for one in results)
    causes = Counter(one["cause"] for one in results if one["end"] != "stop")
    return {
        "generations": len(results),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "repetition_penalty": settings.repetition_penalty,
        "finished": round(ends["stop"] / max(1, len(results)), 3),
        "ends": dict(ends),
        "invalid": sum(1 for one in results if one["invalid"]),
        "first_invalid": [one["invalid"] for one in results if one["invalid"]][:5],
        "unfinished": {cause: round(count / len(results), 3) for cause, count in causes.most_common()},
    }


def _generate(llm: LLM, index: int, which: int, schemas: Sequence[Any], settings: ShareSettings) -> dict[str, Any]:
    schema = schemas[which]
    asked = f"Write a short JSON example for this JSON schema:\n{json.dumps(schema)[: settings.prompt_chars]}"
    form: Any = {"json": schema}
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
        seed=index,
        max_tokens=settings.max_tokens,
        structured_outputs=form,
    )
    one = llm.chat([{"role": "user", "content": asked}], params, use_tqdm=False)[0]
    text, end = one.outputs[0].text, str(one.outputs[0].finish_reason)
    return {
        "index": index,
        "schema": which,
        "end": end,
        "tokens": len(one.outputs[0].token_ids),
        "invalid": _error(schema, text) if end == "stop" else (one.error or ""),
        "cause": "" if end == "stop" else cause_of(text),
        "text": text,
    }


def _error(schema: Any, text: str) -> str:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator(schema).validate(json.loads(text))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def cause_of(text: str) -> str:
    """Say what the tokens of an unfinished JSON text were spent on."""
    loops = "repeats" if len(zlib.compress(text.encode())) < _LOOP_RATIO * len(text.encode()) else "varies"
    string, containers = _open_at_end(text)
    if string > _LONG_STRING_CHARS:
        return f"one long string, {loops}"
    if text[-1:].isdigit() and len(text) - len(text.rstrip("0123456789.eE+-")) > _MANY_CHILDREN * 4:
        return "one long number"
    if not text.strip() or len(text) - len(text.rstrip()) > _MANY_CHILDREN * 4:
        return "whitespace"
    for kind, children in reversed(containers):
        if children > _MANY_CHILDREN:
            return f"{'an array of many items' if kind == '[' else 'an object of many properties'}, {loops}"
    return f"deep nesting, {loops}" if len(containers) > _MANY_CHILDREN else f"something else, {loops}"


def _open_at_end(text: str) -> tuple[int, list[tuple[str, int]]]:
    """Return the length of the string that is open at the end, and the open containers with their commas."""
    containers: list[tuple[str, int]] = []
    begin: int | None = None
    for at, char in _unescaped(text):
        if char == '"':
            begin = at if begin is None else None
        elif begin is None and char in "[{":
            containers.append((char, 0))
        elif begin is None and char in "]}" and containers:
            containers.pop()
        elif begin is None and char == "," and containers:
            containers[-1] = (containers[-1][0], containers[-1][1] + 1)
    return 0 if begin is None else len(text) - begin, containers


def _unescaped(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    while at < len(text):
        yield at, text[at]
        at += 2 if text[at] == "\\" else 1
