"""lm-eval over HTTP, with the server's tokenizer: its numbers are those of the model.

It has its own environment (see the Makefile), because it brings many packages.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import LiveServer

MODEL = "smollm2-135m"
PYTHON = Path(f"{sys.prefix}-clients") / "bin" / "python"
SCRIPT = Path(__file__).parent / "client_scripts" / "evaluate_tasks.py"


pytestmark = [
    pytest.mark.slow,  # test_real_model.py, test_replay.py and test_routes.py ask for what it asks for
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}; install it with: make .venv-clients/.installed"),
]


def log_probability(server: LiveServer, context: str, text: str) -> float:
    """Of the tokens of `text` after those of `context`, from the server's own log-probabilities of a prompt."""
    ids = [
        server.post("/tokenize", {"prompt": one, "add_special_tokens": False})[1]["tokens"] for one in (context, text)
    ]
    asked = {"prompt": ids[0] + ids[1], "max_tokens": 1, "prompt_logprobs": 1}
    _, answer = server.post("/v1/completions", asked)
    entries = answer["choices"][0]["prompt_logprobs"][len(ids[0]) :]
    return sum(entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1], strict=True))


def test_lm_eval_measures_this_model(real_server: LiveServer, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), real_server.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    of_text = seen["completions"]
    assert of_text["results"]["tiny_choice"]["acc,none"] >= 2 / 3

    for sample in of_text["samples"]["tiny_choice"]:
        for choice, response in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            expected = log_probability(real_server, sample["doc"]["question"], " " + choice)
            assert float(response[0][0]) == pytest.approx(expected, abs=1e-3)

    # One window from the first token on, and one text longer than lm-eval's windows of 256 tokens.
    short, long = (float(sample["resps"][0][0]) for sample in of_text["samples"]["tiny_rolling"])
    info = json.loads(real_server.get("/tokenizer_info")[1])
    page = of_text["samples"]["tiny_rolling"][0]["doc"]["page"]
    assert short == pytest.approx(log_probability(real_server, info["bos_token"], page), abs=1e-3)
    assert long < short < 0
    assert of_text["results"]["tiny_rolling"]["word_perplexity,none"] < math.inf

    for kind, path in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
        for sample in seen[kind]["samples"]["tiny_generate"]:
            question = sample["doc"]["question"]
            body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "stop": ["###"]}
            if kind == "chat":
                _, answer = real_server.post(path, {**body, "messages": [{"role": "user", "content": question}]})
                text = answer["choices"][0]["message"]["content"]
            else:
                _, answer = real_server.post(path, {**body, "prompt": question})
                text = answer["choices"][0]["text"]
            assert sample["resps"][0][0].strip() == text.strip() != ""
