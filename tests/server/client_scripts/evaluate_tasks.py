"""lm-eval on three tiny tasks that need no network: `evaluate_tasks.py URL FOLDER`, for the environment of the clients.

Prints per model and task its metrics, and per sample what the model was asked and gave, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

CHOICES = [
    {"question": "The capital of France is", "choices": ["Paris", "seven", "blue cheese"], "answer": 0},
    {"question": "One, two, three,", "choices": ["chair", "four", "under"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["tree", "walked quickly", "cold"], "answer": 2},
]
TEXTS = [
    {"page": "The sun rises in the east and sets in the west."},
    {"page": "Water boils at one hundred degrees. " * 40},
]
QUESTIONS = [{"question": "Say hello."}, {"question": "Name a colour."}]


def write_tasks(folder: Path) -> list[str]:
    """Task files and their data."""
    common: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    tasks: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "tiny_choice": (
            CHOICES,
            {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}",
                "metric_list": [{"metric": "acc"}],
            },
        ),
        "tiny_rolling": (
            TEXTS,
            {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{page}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
            },
        ),
        "tiny_generate": (
            QUESTIONS,
            {
                "output_type": "generate_until",
                "doc_to_text": "{{question}}",
                "doc_to_target": "x",
                "generation_kwargs": {"until": ["###"], "max_gen_toks": 12, "temperature": 0, "do_sample": False},
                "metric_list": [{"metric": "bypass"}],
            },
        ),
    }
    for name, (rows, settings) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {"task": name, **common, "dataset_kwargs": {"data_files": {"test": str(data)}}, **settings}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return list(tasks)


def evaluate(model: str, path: str, tasks: list[str], manager: TaskManager, url: str, chat: bool) -> dict[str, Any]:
    done = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "base_url": url + path,
            "model": "smollm2-135m",
            "tokenizer_backend": "remote",
            "max_length": 256,
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=tasks,
        task_manager=manager,
        apply_chat_template=chat,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert done is not None
    samples = {
        name: [{"doc": one["doc"], "target": one["target"], "resps": one["resps"]} for one in rows]
        for name, rows in done["samples"].items()
    }
    return {"results": done["results"], "samples": samples}


def main(url: str, folder: Path) -> None:
    tasks = write_tasks(folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given = {
        "completions": evaluate("local-completions", "/v1/completions", tasks, manager, url, False),
        "chat": evaluate("local-chat-completions", "/v1/chat/completions", ["tiny_generate"], manager, url, True),
    }
    print(json.dumps(given, default=str))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
