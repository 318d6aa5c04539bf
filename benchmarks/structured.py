"""What structured output gives and costs.

    python benchmarks/structured.py SCHEMAS.jsonl --generations 1000 --max-tokens 1024
    python benchmarks/structured.py SCHEMAS.jsonl --only speed

SCHEMAS.jsonl has a JSON schema per line, alone or as {"schema": ...}. One JSON line is printed for each part:

accepted: how many schemas are served, and why the others are refused.
finished: the share of generations that end within --max-tokens; every one that ends is validated with `jsonschema`.
speed: milliseconds per output token with a schema and without, in turn, at batch 1 and 32, and the median ratio.
forced: tokens per forward and milliseconds per token with forced tokens as drafts and without, in turn.
first_token: from request to first token with a new schema of 10 kB, with one that is known, and without any.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from structured_share import ShareSettings, measure_share

from pagoda import LLM, RequestError, SamplingParams

PARTS = ("accepted", "finished", "speed", "forced", "first_token")
_SPEED_TOKENS = 96
_BATCHES = (1, 32)
# Long enough that no output ends before _SPEED_TOKENS.
_ENDLESS = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "size": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["small", "medium", "large"]},
        },
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}


def read_schemas(path: Path) -> list[Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line["schema"] if isinstance(line, dict) and "schema" in line else line for line in lines]


def accepted(llm: LLM, schemas: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the report, and the schemas that are served."""
    served, reasons = [], Counter[str]()
    for schema in schemas:
        params = SamplingParams(structured_outputs={"json": schema})  # type: ignore[arg-type]
        try:
            llm.llm_engine.input_processor.params.prepare(params)
            served.append(schema)
        except RequestError as error:
            reasons[str(error).rpartition(": ")[2][:80]] += 1
    return {"schemas": len(schemas), "accepted": len(served), "refused": dict(reasons.most_common())}, served


def speed(llm: LLM, runs: int) -> dict[str, Any]:
    """Alternate runs with and without a schema; the same number of tokens each."""
    report: dict[str, Any] = {}
    form: Any = {"json": _ENDLESS}
    plain = SamplingParams(temperature=0.0, max_tokens=_SPEED_TOKENS, min_tokens=_SPEED_TOKENS, ignore_eos=True)
    shaped = SamplingParams(temperature=0.0, max_tokens=_SPEED_TOKENS, structured_outputs=form)
    for batch in _BATCHES:
        prompts: list[Any] = [[100 + 7 * i + k for k in range(24)] for i in range(batch)]
        times: dict[str, list[float]] = {"plain": [], "schema": []}
        for run in range(runs + 1):
            for name, params in (("plain", plain), ("schema", shaped)):
                begin_s = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin_s
                assert all(len(output.outputs[0].token_ids) == _SPEED_TOKENS for output in outputs)
                if run:  # the first one compiles
                    times[name].append(seconds / _SPEED_TOKENS * 1e3)
        ratios = [b / a for a, b in zip(times["plain"], times["schema"], strict=True)]
        report[f"batch {batch}"] = {
            "plain_ms": round(statistics.median(times["plain"]), 3),
            "schema_ms": round(statistics.median(times["schema"]), 3),
            "ratio": round(statistics.median(ratios), 3),
        }
    return report


def forced(model: str | None, options: dict[str, Any], runs: int) -> dict[str, Any]:
    """Alternate engines with and without forced tokens as drafts; their outputs must be equal."""
    form: Any = {"json": _ENDLESS}
    params = SamplingParams(temperature=0.0, max_tokens=_SPEED_TOKENS, structured_outputs=form)
    report: dict[str, Any] = {}
    with (
        LLM(model, max_num_seqs=32, max_model_len=1024, **options) as plain,
        LLM(model, max_num_seqs=32, max_model_len=1024, speculative_config={"method": "forced"}, **options) as drafting,
    ):
        for batch in _BATCHES:
            prompts: list[Any] = [[100 + 7 * i + k for k in range(24)] for i in range(batch)]
            times: tuple[list[float], list[float]] = ([], [])
            accepted_before = drafting.llm_engine.core.make_stats().accepted_tokens
            for run in range(runs + 1):
                outputs = []
                for llm, seconds in zip((plain, drafting), times, strict=True):
                    begin_s = time.perf_counter()
                    outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
                    if run:
                        seconds.append(time.perf_counter() - begin_s)
                assert outputs[0] == outputs[1], "forced tokens changed an output"
            num_tokens = batch * _SPEED_TOKENS * (runs + 1)
            num_accepted = drafting.llm_engine.core.make_stats().accepted_tokens - accepted_before
            report[f"batch {batch}"] = {
                "plain_ms": round(statistics.median(times[0]) / _SPEED_TOKENS * 1e3, 3),
                "forced_ms": round(statistics.median(times[1]) / _SPEED_TOKENS * 1e3, 3),
                "ratio": round(statistics.median(b / a for a, b in zip(*times, strict=True)), 3),
                "tokens_per_forward": round(num_tokens / (num_tokens - num_accepted), 2),
            }
    return report


def schema_of_10_kb(number: int) -> dict[str, Any]:
    """Return a schema that no other call returns."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < 10_000:
        i = len(properties)
        properties[f"field_{number}_{i}"] = {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 40 + i}, "n": {"type": "integer", "minimum": i}},
            "required": ["text"],
        }
    return {"type": "object", "properties": properties, "required": list(properties)[:3]}


def first_token(llm: LLM, runs: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"none": [], "known": [], "new": []}
    prompt: Any = list(range(100, 164))
    for run in range(runs + 1):
        new: Any = {"json": schema_of_10_kb(run)}
        for name, form in (("none", None), ("new", new), ("known", new)):
            begin_s = time.perf_counter()
            stream = llm.stream(prompt, SamplingParams(max_tokens=2, structured_outputs=form))
            next(stream)
            if run:
                times[name].append((time.perf_counter() - begin_s) * 1e3)
            stream.close()
    return {f"{name}_ms": round(statistics.median(values), 1) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--prompt-chars", type=int, default=1500, help="of a schema, shown to the model")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--out", type=Path, default=Path("structured_share.jsonl"), help="results; is continued")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", choices=PARTS, action="append")
    asked = parser.parse_args()
    parts = asked.only or PARTS
    options = {"threads": asked.threads, "quantization": asked.quantization}
    options = {name: value for name, value in options.items() if value is not None}
    if "forced" in parts:
        print(json.dumps({"part": "forced", **forced(asked.model, options, asked.runs)}), flush=True)
    with LLM(asked.model, max_num_seqs=32, max_model_len=asked.max_tokens + 3072, **options) as llm:
        served: list[Any] = []
        if "accepted" in parts or "finished" in parts:
            report, served = accepted(llm, read_schemas(asked.schemas))
            print(json.dumps({"part": "accepted", **report}), flush=True)
        if "finished" in parts:
            settings = ShareSettings(
                asked.generations,
                asked.max_tokens,
                asked.temperature,
                asked.top_p,
                asked.repetition_penalty,
                asked.prompt_chars,
            )
            result = measure_share(llm, served, settings, asked.out)
            print(json.dumps({"part": "finished", **result}), flush=True)
        if "speed" in parts:
            print(json.dumps({"part": "speed", **speed(llm, asked.runs)}), flush=True)
        if "first_token" in parts:
            print(json.dumps({"part": "first_token", **first_token(llm, asked.runs)}), flush=True)


if __name__ == "__main__":
    main()
