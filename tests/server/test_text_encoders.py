"""Completions of a tiny T5: the prompt is read by its encoder, with a limit of its own."""

from pathlib import Path
from typing import Any

from tests.engine.test_text_encoders import MAX_LEN, write_model
from tests.server.live import serving


def test_completions_of_a_model_whose_encoder_reads_the_prompt(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model("t5", model)
    flags = ("--dtype", "float32", "--num-blocks", "100", "--max-model-len", "16")
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}

    with serving(tmp_path, "--model", str(model), *flags, "--device", "cpu") as server:

        def ask(prompt: Any, **more: Any) -> tuple[int, Any]:
            return server.post("/v1/completions", {"prompt": prompt, **asked, **more})

        status, answer = ask(list(range(10, 60)))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 6)
        _, other = ask(list(range(11, 61)))
        assert other["choices"][0]["token_ids"] != answer["choices"][0]["token_ids"]
        _, cut = ask(list(range(10, 200)), truncate_prompt_tokens=50)
        assert cut["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
        status, refused = ask(list(range(10, 100)))
        assert (status, f"reads 1 to {MAX_LEN}" in refused["error"]["message"]) == (400, True)
        status, refused = ask([10], truncate_prompt_tokens=MAX_LEN + 1)
        assert (status, refused["error"]["param"]) == (400, "truncate_prompt_tokens")
