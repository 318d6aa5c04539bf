"""`pagoda chat`: a conversation in the terminal."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.registry import nearest
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.options import SAMPLING_FIELDS, engine_config, engine_options, sampling_options

if TYPE_CHECKING:
    from rich.console import Console

    from pagoda.cli.session import Message, Piece

HELP_TEXT = """/reset           forget the conversation
/system TEXT     set the system message (nothing: remove it) and start afresh
/set NAME VALUE  set a sampling parameter (without VALUE: show it; without NAME: show all)
/help            show this
/bye             leave (also Ctrl-D)
A pasted text is one message.
A line that ends in \\ continues on the next; \"\"\" begins and ends a longer text. Ctrl-C stops an answer."""
CHAT_TOKENS = 1024  # of an answer, unless flags or the model's own defaults say otherwise
COMMANDS = ("/reset", "/system", "/set", "/help", "/bye")
TRIPLE = '"""'
MIN_ANSWER_TOKENS = 64
_HISTORY_LINES = 1000


class Answering(Protocol):
    """What a conversation needs of a Session."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def given(self) -> set[str]:
        """The sampling parameters that were set; a server chooses the others."""
        ...

    def encode_chat(self, messages: "Sequence[Message]") -> list[int]: ...

    def stream(self, token_ids: list[int], params: SamplingParams) -> "Iterator[Piece]": ...


@sampling_options(max_tokens=CHAT_TOKENS)
@engine_options()
def chat(
    options: dict[str, object],
    sampling: dict[str, object],
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Talk with the model of a running server (pagoda or vLLM).")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="PAGODA_API_KEY", help="Key for the server of --url; of several the first."),
    ] = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves.

    Unless flags or the model say otherwise, temperature is 0.7; behind --url the server decides.
    """
    converse(options, sampling, system, url, api_key)


def converse(
    options: dict[str, object],
    sampling: dict[str, object],
    system: str | None,
    url: str | None = None,
    api_key: str | None = None,
) -> None:
    """Load the model, or find the server at `url`, and talk until the user leaves."""
    from pagoda.cli.console import ask_before_fetching, stdout_console
    from pagoda.cli.remote import RemoteSession
    from pagoda.cli.session import Session, load, model_name

    console = stdout_console()
    session: Session | RemoteSession
    if url is not None:
        others = sorted(options.keys() - {"model", "seed"})
        if others:
            raise ConfigError(f"{', '.join(others)}: the server of --url has its own; leave them out")
        model = options.get("model")
        session = RemoteSession(url, str(model) if model is not None else None, api_key)
    else:
        ask_before_fetching(engine_config(options).model)
        with console.status("loading") if console.is_terminal else nullcontext():
            session = Session(load(options, chat=True), model_name(options))
    params = session.params(sampling, CHAT_TOKENS, options.get("seed"))
    is_known = url is None or "temperature" in session.given
    temperature = f", temperature {params.temperature:g}" if is_known else ""
    console.print(
        f"{session.model_name}{temperature}; /help shows the commands, Ctrl-D leaves", style="dim", markup=False
    )
    Conversation(session, params, console, system).run(_line_reader("1" if console.no_color else "1;32"))


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(
        self, session: Answering, params: SamplingParams, console: "Console", system: str | None = None
    ) -> None:
        self._session = session
        self._params = params
        self._console = console
        self._system = system
        self.turns: list[dict[str, str]] = []

    def run(self, read_line: Callable[[str], str]) -> None:
        """Read and answer until /exit or the end of input.   read_line: prompt -> line, EOFError at the end."""
        from pagoda.cli.console import keys_unseen

        while True:
            try:
                text = read_message(read_line)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\n[dim]Ctrl-D or /exit leaves[/dim]")
                continue
            if not text.strip():
                continue
            if text.startswith("/"):
                if not self._command(text.strip()):
                    return
                continue
            with keys_unseen():
                self._answer(text)

    def _command(self, text: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, rest = text.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name == "/set":
            self._set(*rest.split(None, 1))
            return True
        if name == "/reset":
            self.turns.clear()
            self._say("the conversation is forgotten")
        elif name == "/system":
            self._system = rest.strip() or None
            self.turns.clear()
            self._say(
                "a new conversation, " + (f"system message: {self._system}" if self._system else "no system message")
            )
        elif name in ("/help", "/?"):
            self._say(HELP_TEXT)
        else:
            self._say(f"unknown command {shorten(name)}; /help shows the commands")
        return True

    def _set(self, name: str = "", value: str = "") -> None:
        """Set a sampling parameter, or show it, or all."""
        name = name.replace("-", "_")
        if name and name not in SAMPLING_FIELDS:
            self._say(f"no parameter {shorten(name)}{nearest(name, list(SAMPLING_FIELDS))}")
            return
        if value:
            changed = self._params.clone()
            try:
                parsed = json.loads(value)
            except ValueError:
                parsed = value  # a stop string
            try:
                setattr(changed, name, parsed)
                changed.check_together()
            except RequestError as error:
                self._say(str(error))
                return
            self._params = changed
            self._session.given.add(name)
        for one in (name,) if name else SAMPLING_FIELDS:
            self._say(f"{one} {json.dumps(getattr(self._params, one))}")

    def _answer(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        try:
            token_ids = self._fitting_prompt()
            answer = self._stream(token_ids)
        except RequestError as error:  # this message cannot be served; the conversation continues without it
            self.turns.pop()
            self._say(str(error))
            return
        self.turns.append({"role": "assistant", "content": answer})

    def _fitting_prompt(self) -> list[int]:
        """Return the token ids of the conversation, without its oldest turns if an answer would not fit after it."""
        while True:
            system = [{"role": "system", "content": self._system}] if self._system else []
            token_ids = self._session.encode_chat([*system, *self.turns])
            if len(token_ids) + MIN_ANSWER_TOKENS <= self._session.max_model_len or len(self.turns) < 3:
                return token_ids
            del self.turns[:2]
            self._say("(the conversation is longer than the model reads: its oldest exchange is forgotten)")

    def _stream(self, token_ids: list[int]) -> str:
        from pagoda.cli.console import WrappedStream, for_stream

        parts: list[str] = []
        reason: str | None = None
        wrapped = WrappedStream(self._console.file, self._console.width if self._console.is_terminal else 0)
        try:
            for piece in self._session.stream(token_ids, self._params):
                parts.append(piece.text)
                reason = piece.finish_reason or reason
                wrapped.write(for_stream(piece.text, sys.stdout))
        except KeyboardInterrupt:
            reason = "interrupted"
        except RequestError:
            if parts:
                wrapped.finish()
                self._console.print()
            raise
        wrapped.finish()
        self._console.print()
        if reason == "interrupted":
            self._say("(stopped)")
        elif reason == "length":
            self._say("(cut off at the length limit)")
        return "".join(parts)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def read_message(read_line: Callable[[str], str]) -> str:
    """One message: a line, lines joined by a trailing backslash, or all between two triple quotes."""
    line = read_line("> ")
    if line.startswith(TRIPLE):
        lines = [line.removeprefix(TRIPLE)]
        while not lines[-1].endswith(TRIPLE):
            lines.append(read_line("  "))
        return "\n".join(lines).removesuffix(TRIPLE).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read_line("  "))
    return "\n".join(lines)


def history_file() -> Path:
    """Return where the lines of conversations are kept, below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(state) / "pagoda" / "chat_history"


def _line_reader(style: str) -> Callable[[str], str]:
    """Return input() with line editing in a terminal, and without prompts when lines come from a pipe.

    Tab completes commands and the names of sampling parameters; a pasted text is one message; lines of earlier sessions
    can be called back.

    style: of the prompt, the parameters of an SGR escape sequence.
    """
    if not sys.stdin.isatty():
        return lambda _prompt: input()
    import atexit
    import readline

    words = [f"/set {name}" for name in SAMPLING_FIELDS]

    def complete(_text: str, index: int) -> str | None:
        line = readline.get_line_buffer()
        among = words if line.startswith("/set ") else COMMANDS
        found = [f"{word} " for word in among if word.startswith(line)]
        return found[index] if line and index < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims("")  # the whole line is one word
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")
    history = history_file()
    with suppress(OSError):
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        history.touch(mode=0o600)
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)

    def keep() -> None:
        with suppress(OSError):
            readline.write_history_file(history)

    atexit.register(keep)
    # \001 and \002 tell readline that the escape sequences between them take no room.
    return lambda prompt: input(f"\001\033[{style}m\002{prompt}\001\033[0m\002")
