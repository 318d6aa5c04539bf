"""Hints for unknown names: the nearest, or none."""

import pytest

from pagoda.base.registry import closest

FLAGS = ["--access-log", "--no-access-log", "--max-loras", "--max-model-len", "--max-num-seqs", "--root-path"]
MODELS = ["LlamaModel", "LlamaForCausalLM", "OlmoeForCausalLM", "Qwen3ForCausalLM", "Qwen3Model", "PhiModel"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("--max-len", FLAGS, "--max-model-len"),
        ("--max-seqs", FLAGS, "--max-num-seqs"),
        ("--no-acces-log", FLAGS, "--no-access-log"),
        ("--max-tokens", FLAGS, None),
        ("--foo-bar", FLAGS, None),
        ("LLamaForCausalLM", MODELS, "LlamaForCausalLM"),
        ("Qwn3Model", MODELS, "Qwen3Model"),
        ("FooForCausalLM", MODELS, None),
        ("XyzModel", MODELS, None),
        ("x" * 1_000_000, FLAGS, None),
    ],
)
def test_only_names_that_are_much_alike_are_proposed(name: str, known: list[str], meant: str | None) -> None:
    assert closest(name, known) == (f"; did you mean {meant!r}?" if meant else "")
