"""Sampled tokens in later prompts: where the text says the same, all that was computed begins the next prompt."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.input_setup import build_input_processor
from pagoda.base.config import EngineConfig
from pagoda.engine.answers.reasoning import THINK
from pagoda.engine.answers.same_message import MessageForm, are_same
from pagoda.engine.answers.tool_parsers.formats import HermesParser
from pagoda.engine.inputs.chat_prompts import ChatOptions, RenderedChat
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.inputs.sampled_messages import KnownMessages, SampledMessage, packed, thought_of, unpacked
from tests.server.test_tools import TOOLS

FORM = MessageForm(HermesParser, THINK)
TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content %}<think>
{{ m.reasoning_content | trim }}
</think>

{% endif %}{{ m.content | trim if m.content else '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    file: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    options = {"distributed_executor_backend": "fake", "chat_template": str(file), "enable_prompt_embeds": True}
    return build_input_processor(resolve_engine(EngineConfig.from_options(**options)))


class Chat:
    """A conversation with a model, and what is known of its messages."""

    def __init__(self, inputs: InputProcessor, is_thinking: bool) -> None:
        self._inputs, self._tokenizer = inputs, inputs.tokenizer
        self._options = ChatOptions(tools=TOOLS, template_kwargs={"enable_thinking": is_thinking})
        self.known: dict[bytes, list[SampledMessage]] = {}
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
        self.computed: list[int] = []

    def prompt(self) -> RenderedChat:
        written = self._inputs.chats.write(self.messages, self._options, must_fit=False, is_bounded=False)
        return self._inputs.chats.encode(written, KnownMessages(self.known, FORM))

    def plain(self) -> list[int]:
        return self._inputs.chats.render(self.messages, self._options).token_ids

    def answer(self, token_ids: list[int], is_whole: bool = True) -> None:
        """Note that the model has answered so."""
        prompt = self.prompt()
        assert prompt.open_message is not None
        kept = token_ids if is_whole else thought_of(token_ids, FORM, self._tokenizer)
        if kept is not None:
            message = prompt.open_message.sampled(kept, is_whole)
            self.known.setdefault(prompt.open_message.key, []).insert(0, message)
        self.computed = [*prompt.token_ids, *token_ids]

    def num_cached(self) -> int:
        ids = self.prompt().token_ids
        differ = (at for at, (one, other) in enumerate(zip(ids, self.computed, strict=False)) if one != other)
        return next(differ, min(len(ids), len(self.computed)))


def split_at_random(rng: random.Random, inputs: InputProcessor, text: str) -> list[int]:
    """Tokens of a text that no tokenizer would choose."""
    ids: list[int] = []
    while text:
        size = rng.randint(1, 9)
        ids += inputs.tokenizer.encode(text[:size], add_special_tokens=False)
        text = text[size:]
    return ids


def words(rng: random.Random) -> str:
    some = ["Zürich", "in", "{", '"a"', "\n", " ", "weather", "1.50", "</", "tool_call", "don't"]
    return " ".join(rng.choices(some, k=rng.randint(1, 8))).strip()


def sampled_message(rng: random.Random, is_thinking: bool) -> tuple[str, dict[str, Any]]:
    """What a model writes, and what a client makes of it: with other JSON, and without white space at the ends."""
    text, client = "", dict[str, Any](role="assistant", content="")
    if is_thinking:
        thought = words(rng)
        text += f"<think>\n{thought}\n\n</think>\n\n"
        client["reasoning_content"] = rng.choice([thought, thought + "\n", "\n" + thought])
    if rng.random() < 0.7:
        said = words(rng)
        text += said + rng.choice(["", "\n", "  "])
        client["content"] = rng.choice([said, said + "\n"])
    calls: list[dict[str, Any]] = []
    for number in range(rng.randint(0 if client["content"] else 1, 2)):
        arguments = {"city": words(rng), "days": rng.choice([2, 2.0, None, [1, {"b": 1, "a": 2}]]), "at": words(rng)}
        written = json.dumps(
            arguments, separators=rng.choice([(",", ":"), (", ", ": ")]), ensure_ascii=rng.random() < 0.5
        )
        text += f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call>' + rng.choice(["", "\n"])
        items = list(arguments.items())
        rng.shuffle(items)
        days = 2 if arguments["days"] == 2 else arguments["days"]
        sent = json.dumps(dict(items) | {"days": days})
        calls.append({"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": sent}})
    if calls:
        client["tool_calls"] = calls
    return text, client


@pytest.mark.parametrize("seed", range(20))
def test_all_of_the_last_turn_is_a_prefix_of_the_next_prompt_whatever_clients_rewrite(
    inputs: InputProcessor, seed: int
) -> None:
    rng = random.Random(seed)
    is_thinking = rng.random() < 0.5
    chat = Chat(inputs, is_thinking)
    end = inputs.tokenizer.facts.eos_token_ids[0]
    for _ in range(6):
        text, client = sampled_message(rng, is_thinking)
        ids = split_at_random(rng, inputs, text)
        chat.answer(ids)
        chat.computed.append(end)
        results = [
            {"role": "tool", "content": words(rng), "tool_call_id": c["id"]} for c in client.get("tool_calls", ())
        ]
        chat.messages += [client, *results, {"role": "user", "content": words(rng)}]
        assert chat.num_cached() >= len(chat.computed) - 1, text


@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_says_what_the_client_sent(inputs: InputProcessor, seed: int) -> None:
    """Whatever a client changes, drops or swaps in its history: a prompt reads as its rendering does, or equal."""
    rng = random.Random(seed)
    is_thinking = rng.random() < 0.5
    chat = Chat(inputs, is_thinking)
    for _ in range(5):
        text, client = sampled_message(rng, is_thinking)
        chat.answer(split_at_random(rng, inputs, text), is_whole=rng.random() < 0.7)
        chat.messages += [client, {"role": "user", "content": words(rng)}]
        for changed in changes(rng, client):
            before, chat.messages[-2] = chat.messages[-2], changed
            got, plain = (inputs.tokenizer.decode(ids, False) for ids in (chat.prompt().token_ids, chat.plain()))
            assert read_back(got) == read_back(plain)
            chat.messages[-2] = before


def changes(rng: random.Random, client: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {**client, "content": client["content"] + " x"}
    yield {**client, "content": ""} if client.get("tool_calls") else {**client, "content": "other"}
    yield {name: value for name, value in client.items() if name != "reasoning_content"}
    yield {**client, "reasoning_content": "other"}
    for call in client.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        arguments[rng.choice(list(arguments))] = rng.choice(["2", True, 3, [], "x"])
        function = {"name": rng.choice(["weather", "other"]), "arguments": json.dumps(arguments)}
        yield {**client, "tool_calls": [{**call, "function": function}]}
    yield {**client, "tool_calls": [*client.get("tool_calls", ())][1:], "content": client["content"] or "x"}


def read_back(prompt: str) -> list[str]:
    """The messages of a prompt, each in a form that equal ones have in common; an empty thought is none."""
    read: list[str] = []
    for message in prompt.split("<|im_start|>"):
        role, _, rest = message.removesuffix("\n").removesuffix("<|im_end|>").partition("\n")
        thought, found, said = rest.strip().removeprefix("<think>").partition("</think>")
        thought, said = (thought.strip(), said) if found else ("", rest)
        parts = [role, thought]
        for at, part in enumerate(said.split("<tool_call>")):
            inside, found, after = part.partition("</tool_call>")
            if at and found:
                call = json.loads(inside)
                parts += json.dumps(call, sort_keys=True).replace("2.0", "2"), after.strip()
            else:
                parts.append(part.strip())
        read.append("|".join(part for part in parts if part))
    return read


def test_a_thought_alone_is_used_for_its_part_of_a_message(inputs: InputProcessor) -> None:
    rng = random.Random(1)
    chat = Chat(inputs, is_thinking=True)
    thought = split_at_random(rng, inputs, "<think>\nWhere? Zürich, so far.\n") + inputs.tokenizer.encode(
        "</think>", False
    )
    said = split_at_random(rng, inputs, "\n\nIt is in Zürich.")
    chat.answer([*thought, *said], is_whole=False)
    before = len(chat.computed) - len(said)
    client = {"role": "assistant", "reasoning_content": "Where? Zürich, so far.", "content": "It is in Zürich."}
    chat.messages += [client, {"role": "user", "content": "And now?"}]
    assert before <= chat.num_cached() < len(chat.computed)
    chat.messages[-2] = {**client, "content": "It is in Bern."}
    assert chat.num_cached() >= before
    chat.messages[-2] = {**client, "reasoning_content": "Where?"}
    assert chat.num_cached() < before


def test_without_a_message_that_is_known_a_prompt_is_what_it_was(inputs: InputProcessor) -> None:
    chat = Chat(inputs, is_thinking=False)
    chat.messages += [{"role": "assistant", "content": "<|im_end|>x"}, {"role": "user", "content": "y"}]
    assert chat.prompt().token_ids == chat.plain()


def test_ids_are_packed_in_three_bytes() -> None:
    ids = [0, 1, 255, 256, 65_536, 2**24 - 1]
    assert unpacked(packed(ids)) == ids
    assert len(packed(ids)) == 3 * len(ids)
    assert unpacked(packed([])) == []


@pytest.mark.parametrize(
    ("sampled", "rendered", "expected"),
    [
        ("a\n", "a", True),
        ("a b", "a  b", False),
        ("<think>\n\n</think>\n\na", "a", True),
        ("<think>x</think>a", "a", False),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2}}</tool_call>', None, True),
        ('x<tool_call>{"name": "f", "arguments": {"b": 2.0, "a": 1}}</tool_call>', None, False),
        ('<tool_call>{"name": "f", "arguments": {"b": true, "a": 2}}</tool_call>', None, False),
        ('<tool_call>{"name": "g", "arguments": {"a": 1, "b": 2}}</tool_call>', None, False),
        ('<tool_call>{"name": "f", "arguments": {"b": "2", "a": 1}}</tool_call>', None, False),
    ],
)
def test_what_is_equal(sampled: str, rendered: str | None, expected: bool) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
    assert are_same(sampled, call if rendered is None else rendered, FORM) is expected


@pytest.mark.parametrize("number", [2**53 - 1, 2**53, -(2**53), 10**300])
def test_numbers_are_equal_if_no_other_integer_is_rounded_to_them(number: int) -> None:
    integer, real = (
        f'<tool_call>{{"name": "f", "arguments": {{"a": {one}}}}}</tool_call>' for one in (number, f"{number}.0")
    )
    assert are_same(integer, real, FORM) is (abs(number) < 2**53)


def test_text_between_calls_has_its_place() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert not are_same(f"a{call}b", f"ab{call}", FORM)
    assert are_same(f"a {call}\n{call}", f"a{call}{call}\n", FORM)


def test_messages_after_embeddings_are_found(inputs: InputProcessor) -> None:
    """Their slots and those of embeddings stand for what belongs there, in the order of the text."""
    chat, rng = Chat(inputs, False), random.Random(1)
    size = inputs.limits.embeds_size

    def ask(count: int) -> None:
        values = np.full((count, size), count, np.float32)
        parts = [{"type": "text", "text": "See"}, {"type": "prompt_embeds", "data": values}]
        chat.messages.append({"role": "user", "content": parts})

    chat.messages.clear()
    for count in (3, 5):
        ask(count)
        chat.answer(split_at_random(rng, inputs, f"It is {count} degrees, and it will rain."))
        chat.messages.append({"role": "assistant", "content": f"It is {count} degrees, and it will rain."})
    ask(2)
    assert chat.num_cached() == len(chat.computed)
    embeds = chat.prompt().embeds
    assert embeds is not None
    assert embeds.values[:, 0].tolist() == [3] * 3 + [5] * 5 + [2] * 2
    places, token_ids = embeds.positions.tolist(), chat.prompt().token_ids
    for first, count in ((0, 3), (3, 5), (8, 2)):
        begin = places[first]
        assert places[first : first + count] == list(range(begin, begin + count))
        assert inputs.tokenizer.decode(token_ids[:begin], False).endswith("user\nSee\n")
