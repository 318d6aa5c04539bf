import io
from collections.abc import Callable, Iterator, Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console

from pagoda.base.errors import RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.chat import Conversation, read_message
from pagoda.cli.console import WrappedStream
from pagoda.cli.session import Message, Piece

INTERRUPT = Piece("", 0)


class ScriptedSession:
    """Answers from a list; remembers what it was asked. A message's tokens are its words."""

    def __init__(self, answers: list[list[Piece]], max_model_len: int = 1000) -> None:
        self.max_model_len = max_model_len
        self.given: set[str] = set()
        self.asked: list[list[dict[str, str]]] = []
        self._answers = answers

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self._messages = [dict(message) for message in messages]
        return [0] * sum(len(message["content"].split()) for message in messages)

    def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        self.asked.append(self._messages)
        for piece in self._answers.pop(0):
            if piece is INTERRUPT:
                raise KeyboardInterrupt
            yield piece


def lines(*given: str | type[BaseException]) -> Callable[[str], str]:
    """A reader of these lines; an exception class is raised in its turn, EOFError at the end."""
    queue = list(given)

    def read(prompt: str) -> str:
        item = queue.pop(0) if queue else EOFError
        if isinstance(item, str):
            return item
        raise item

    return read


def talk(session: ScriptedSession, *given: str | type[BaseException], system: str | None = None) -> str:
    output = io.StringIO()
    console = Console(file=output, width=200)
    Conversation(session, SamplingParams(), console, system).run(lines(*given))
    return output.getvalue()


def test_set_changes_a_sampling_parameter_and_bye_leaves() -> None:
    session = ScriptedSession([[Piece("a", 1)]])
    used: list[SamplingParams] = []
    stream = session.stream
    session.stream = lambda ids, params: used.append(params) or stream(ids, params)  # type: ignore[method-assign]
    said = talk(
        session,
        "/set temperature 0.25",
        "/set max-tokens 7",
        "/set top_p 5",
        "/set tempratur 1",
        "/set stop END",
        "/set stop",
        "hello",
        "/?",
        "/bye",
        "never sent",
    )
    assert (used[0].temperature, used[0].max_tokens, used[0].stop, used[0].top_p) == (0.25, 7, ("END",), 1.0)
    assert len(session.asked) == 1
    assert 'stop ["END"]' in said
    assert "top_p=5 is not allowed" in said
    assert "no parameter tempratur; did you mean 'temperature'?" in said
    assert "/set NAME VALUE" in said


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_answers_are_streamed_and_remembered() -> None:
    session = ScriptedSession([[Piece("Hel", 1), Piece("lo", 2, "stop")], [Piece("Bye", 1, "stop")]])
    printed = talk(session, "hi", "", "thanks", "/exit", "never read")
    assert "Hello" in printed
    assert session.asked == [[user("hi")], [user("hi"), assistant("Hello"), user("thanks")]]


def test_stopped_answer_stays_in_the_history() -> None:
    session = ScriptedSession([[Piece("One two", 2), INTERRUPT], [Piece("ok", 1, "stop")]])
    printed = talk(session, "count", "go on")
    assert "(stopped)" in printed
    assert session.asked[1] == [user("count"), assistant("One two"), user("go on")]


def test_ctrl_c_at_the_prompt_does_not_leave() -> None:
    session = ScriptedSession([[Piece("yes", 1, "stop")]])
    printed = talk(session, KeyboardInterrupt, "still there?")
    assert "Ctrl-D or /exit leaves" in printed
    assert "yes" in printed


def test_reaching_the_length_limit_is_reported() -> None:
    assert "cut off" in talk(ScriptedSession([[Piece("abc", 1, "length")]]), "hi")


def test_reset_and_system() -> None:
    session = ScriptedSession([[Piece("a", 1, "stop")] for _ in range(4)])
    talk(session, "one", "/reset", "two", "/system be brief", "three", "/system", "four", system="be kind")
    kind, brief = {"role": "system", "content": "be kind"}, {"role": "system", "content": "be brief"}
    assert session.asked == [[kind, user("one")], [kind, user("two")], [brief, user("three")], [user("four")]]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_is_wrapped_between_words(size: int) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n\n  Indented \u4e2d\u6587 words, a_very_long_word_indeed end."
    file = io.StringIO()
    stream = WrappedStream(file, 20)
    for start in range(0, len(text), size):
        stream.write(text[start : start + size])
    stream.finish()
    written = file.getvalue().split("\n")
    assert max(map(cell_len, written)) <= 20
    assert [line.rstrip() for line in written[:5]] == [
        "The quick brown fox",
        "jumps over the lazy",
        "dog.",
        "",
        "  Indented \u4e2d\u6587",
    ]
    assert "".join(written).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    words = [word for word in text.split() if len(word) < 20]
    assert all(any(word in line for line in written) for word in words)


def test_in_a_pipe_nothing_is_wrapped() -> None:
    file = io.StringIO()
    stream = WrappedStream(file, 0)
    stream.write("word " * 100)
    stream.finish()
    assert file.getvalue() == "word " * 100


def test_help_and_unknown_command() -> None:
    printed = talk(ScriptedSession([]), "/help", "/what now")
    assert "/system TEXT" in printed
    assert "unknown command /what" in printed


def test_a_refused_message_is_dropped_and_the_chat_continues() -> None:
    class Refusing(ScriptedSession):
        def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[Piece]:
            if not self.asked:
                self.asked.append([])
                raise RequestError("the prompt is too long")
            return super().stream(token_ids, params)

    session = Refusing([[Piece("ok", 1, "stop")]])
    printed = talk(session, "too long", "short")
    assert "the prompt is too long" in printed
    assert session.asked[-1] == [user("short")]


def test_the_oldest_exchange_is_dropped_when_the_context_is_full() -> None:
    session = ScriptedSession([[Piece("b " * 30, 30, "stop")], [Piece("c", 1, "stop")]], max_model_len=100)
    printed = talk(session, "a " * 30, "last question")
    assert "oldest exchange is forgotten" in printed
    assert session.asked[-1] == [user("last question")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["hello"], "hello"),
        (["one \\", "two\\", "three"], "one \ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
    ],
)
def test_messages_of_several_lines(given: list[str], message: str) -> None:
    assert read_message(lines(*given)) == message
