"""`pagoda generate` and `pagoda run`: one prompt, one streamed answer, one line of figures."""

import sys
import time
from typing import Annotated

import typer

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import RequestError
from pagoda.cli.chat import CHAT_TOKENS, converse
from pagoda.cli.options import engine_config, engine_options, sampling_options

TEXT_TOKENS = 256  # of a continued text, unless flags or the model's own defaults say otherwise


def figures(num_tokens: int, ready_s: float, first_token_s: float, total_s: float) -> str:
    """Return how an answer went, in a line.   ready_s: since the start of the process; the others since the prompt.

    Its speed is that of the tokens after the first, which waits for the prompt; of all when there is only one.
    """
    decode_s, num_decoded = total_s - first_token_s, num_tokens - 1
    if num_decoded < 1 or decode_s <= 0:
        decode_s, num_decoded = total_s, num_tokens
    speed = num_decoded / decode_s if decode_s > 0 else 0.0
    first = f"first token after {first_token_s:.2f} s, ready after {ready_s:.2f} s"
    return f"{num_tokens} tokens, {speed:.1f} tokens/s, {first}"


Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The text; without one, or with '-', it is read from standard input.", metavar="PROMPT", show_default=False
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not print statistics.")]
System = Annotated[str | None, typer.Option("--system", help="System message.")]


@sampling_options(max_tokens=TEXT_TOKENS)
@engine_options()
def generate(
    prompt: Prompt = None,
    *,
    options: dict[str, object],
    sampling: dict[str, object],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user message, with the model's chat template.")
    ] = False,
    system: System = None,
    quiet: Quiet = False,
) -> None:
    """Continue one text on standard output.

    The answer is streamed; figures go to standard error. Unless flags or the model say otherwise, temperature is 0.7.
    """
    text = read_prompt(prompt, options.get("model"))
    if system is not None and not chat:
        raise RequestError("--system needs --chat: a system message is only used with a chat template", "system")
    answer(text, options, sampling, chat, system, quiet)


@sampling_options(max_tokens=CHAT_TOKENS)
@engine_options()
def run(
    prompt: Prompt = None,
    *,
    options: dict[str, object],
    sampling: dict[str, object],
    system: System = None,
    quiet: Quiet = False,
) -> None:
    """Answer a question, or talk if there is none.

    `pagoda run MODEL "question"`, or the question from a pipe; without either, this is `pagoda chat`.
    """
    if prompt is None and sys.stdin.isatty():
        converse(options, sampling, system)
    else:
        answer(read_prompt(prompt, options.get("model")), options, sampling, True, system, quiet)


def answer(
    text: str,
    options: dict[str, object],
    sampling: dict[str, object],
    chat: bool,
    system: str | None,
    quiet: bool,
) -> None:
    """Load the model, and stream its answer to a text: its continuation, or with `chat` the reply to a message."""
    from pagoda.cli.console import ask_before_fetching, for_stream
    from pagoda.cli.session import Session, load, seconds_since_start

    ask_before_fetching(engine_config(options).model)
    session = Session(load(options, chat))
    params = session.params(sampling, CHAT_TOKENS if chat else TEXT_TOKENS, options.get("seed"))
    ready_s = seconds_since_start()
    begin_s = time.perf_counter()
    if chat:
        turns = [{"role": "system", "content": system}] if system is not None else []
        token_ids = session.encode_chat([*turns, {"role": "user", "content": text}])
    else:
        token_ids = session.encode(text)
    first_token_s, num_tokens, interrupted = 0.0, 0, False
    try:
        for piece in session.stream(token_ids, params):
            first_token_s = first_token_s or time.perf_counter() - begin_s
            num_tokens += piece.num_tokens
            sys.stdout.write(for_stream(piece.text, sys.stdout))
            sys.stdout.flush()
    except KeyboardInterrupt:  # what is there stays, and is counted
        interrupted = True
    print()
    if not quiet:
        from pagoda.cli.console import stderr_console

        line = figures(num_tokens, ready_s, first_token_s, time.perf_counter() - begin_s)
        stderr_console().print(line, style="dim")
    if interrupted:
        raise typer.Exit(130)


def read_prompt(prompt: str | None, model: object = None) -> str:
    """The argument, or all of standard input. Raises RequestError for an empty one.   model: if one was given."""
    if prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt: pass it as an argument or on standard input", "prompt")
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        where = " on standard input" if prompt in (None, "-") else ""
        word = f"; {shorten(str(model))} is the model, a prompt would follow it" if model is not None and where else ""
        raise RequestError(f"the prompt{where} is empty{word}", "prompt")
    return text
