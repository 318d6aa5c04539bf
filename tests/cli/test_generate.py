import io
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from pagoda import LLM, CompletionOutput, RequestOutput, SamplingParams
from pagoda.base.abbreviate import human_bytes
from pagoda.base.errors import RequestError
from pagoda.cli import generate
from pagoda.cli.console import for_stream
from pagoda.cli.generate import figures, read_prompt
from pagoda.cli.main import main
from pagoda.cli.session import Session


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_figures_count_the_first_token_separately() -> None:
    line = figures(num_tokens=11, ready_s=1.5, first_token_s=0.5, total_s=2.5)
    assert line == "11 tokens, 5.0 tokens/s, first token after 0.50 s, ready after 1.50 s"


@pytest.mark.parametrize(("num_tokens", "total_s", "expected"), [(1, 0.5, 2.0), (0, 0.0, 0.0)])
def test_figures_of_short_answers(num_tokens: int, total_s: float, expected: float) -> None:
    assert f" {expected:.1f} tokens/s" in figures(num_tokens, 1.0, total_s, total_s)


def test_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, "-"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
        assert read_prompt(given) == "from a pipe\n"
    assert read_prompt("argument") == "argument"


def test_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(RequestError, match="no prompt"):
        read_prompt(None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(RequestError, match="the prompt on standard input is empty"):
        read_prompt(None)


def test_a_terminal_gets_no_escape_sequences() -> None:
    text = "a\tb\n\x1b[31mred\x07 ünï\x9b"
    assert for_stream(text, Terminal()) == "a\tb\n[31mred ünï"
    assert for_stream(text, io.StringIO()) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (98_362_432, "93.8 MiB"), (3 << 40, "3.0 TiB")]
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_an_answer_that_ends_early_gives_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
            ending = CompletionOutput(index=0, text="so far", finish_reason="length")
            yield RequestOutput("0", None, outputs=[ending], finished=True, error="the KV cache has 2 blocks")

    pieces = list(Session(cast("LLM", Failing())).stream([1], SamplingParams()))
    assert [piece.text for piece in pieces] == ["so far"]
    assert "the KV cache has 2 blocks" in caplog.text


@pytest.mark.parametrize(
    ("line", "model", "prompt"),
    [
        ("run smollm2-135m --stop . Three", "smollm2-135m", "Three"),
        ("run smollm2-135m --served-model-name a Three", "smollm2-135m", "Three"),
        ("run --model X hello", "X", "hello"),
        ("run ORG/NAME", "ORG/NAME", None),
        ("run -", "of-environment", "-"),
        ("generate ORG/NAME", "ORG/NAME", None),
        ("generate hello", "of-environment", "hello"),
        ("generate --model X ORG/NAME", "X", "ORG/NAME"),
        ("generate Y hello", "Y", "hello"),
    ],
)
def test_words_are_the_model_and_the_prompt(
    line: str, model: str, prompt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed decides, whatever the environment says of the model."""
    seen: list[tuple[object, object]] = []
    monkeypatch.setenv("PAGODA_MODEL", "of-environment")
    monkeypatch.setattr(generate, "read_prompt", lambda text, _: text)
    monkeypatch.setattr(generate, "answer", lambda text, options, *_: seen.append((options["model"], text)))
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert not ended.value.code
    assert seen == [(model, prompt)]


@pytest.mark.parametrize("line", ["run --model X a b", "generate --model X a b", "run a b c"])
def test_words_that_are_too_many(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "the model is given twice, as a and with --model" in error or "quote a text with spaces" in error
