"""Chat of LLM and AsyncLLM: the message of each answer has its reasoning, content and calls, from a scripted engine."""

import asyncio
from typing import Any

import pytest

from pagoda import (
    LLM,
    AsyncLLM,
    ChatMessage,
    CompletionOutput,
    FunctionCall,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from pagoda.engine.answers.chat_answers import ChatAnswers
from pagoda.engine.text_engine import TextEngine
from pagoda.engine.tokenizers.byte_tokenizer import EOS, ByteTokenizer
from pagoda.executors.fake import FakeExecutor
from tests.cached_models import cached_model
from tests.engine.scripted_engine import ScriptedExecutor
from tests.fake_engine import MAX_LEN, byte_inputs, fake_core

HERMES = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools <tool_call> #}"
THINKING = HERMES + "{# <think> </think> #}"
NO_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = '<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>'
SAID = [f"See:\n{CALL}\n{CALL}", f"<think>\nOne?\n</think>\n\n{CALL}", "plain", "so.\n</think>\nYes", CALL[:46]]
ASKED: Any = [{"role": "user", "content": "1"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
SUM = ("sum", '{"a": 1}')


def build() -> TextEngine:
    scripts = [[*text.encode(), EOS] for text in SAID]
    return TextEngine(fake_core(ScriptedExecutor(FakeExecutor(64, MAX_LEN, vocab_size=258), scripts)), byte_inputs())


def says(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=200, **more)


def read(message: ChatMessage | None) -> tuple[str | None, str, list[tuple[str, str]]]:
    assert message is not None
    assert all(call.id.startswith("call_") for call in message.tool_calls)
    return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]


CASES: list[tuple[int, dict[str, Any], Any]] = [
    (0, {"tools": TOOLS, "chat_template": HERMES}, (None, "See:", [SUM, SUM])),
    (0, {"chat_template": HERMES}, (None, SAID[0], [])),
    (1, {"tools": TOOLS, "chat_template": THINKING}, ("One?\n", "", [SUM])),
    (2, {"tools": TOOLS, "chat_template": THINKING}, (None, "plain", [])),
    (2, {}, (None, "plain", [])),
    (4, {"tools": TOOLS, "chat_template": HERMES}, (None, "", [("sum", '{"a": null}')])),
]


@pytest.mark.parametrize(("seed", "options", "expected"), CASES)
def test_each_way_to_chat_has_the_message(seed: int, options: dict[str, Any], expected: Any) -> None:
    params = says(seed)

    async def chats() -> list[list[RequestOutput]]:
        async with AsyncLLM.over(build) as llm:
            deltas = params.clone()
            deltas.output_kind = RequestOutputKind.DELTA
            calls = (llm.chat(ASKED, params, **options), llm.chat(ASKED, deltas, **options))
            return [[one async for one in made] for made in (*calls, llm.stream_chat(ASKED, params, **options))]

    with LLM.over(build) as llm:
        (whole,) = llm.chat(ASKED, params, **options)
        found = [[whole], list(llm.stream_chat(ASKED, params, **options)), *asyncio.run(chats())]
    assert whole.outputs[0].text == SAID[seed]
    for outputs in found:
        assert read(outputs[-1].outputs[0].message) == expected
        assert all(part.message is None for output in outputs[:-1] for part in output.outputs)


def test_several_conversations_have_messages_of_their_own_and_prompts_none() -> None:
    tools = {"tools": TOOLS, "chat_template": HERMES}
    with LLM.over(build) as llm:
        bad: Any = [{"role": "user", "content": "x" * 300}]
        outputs = llm.chat([ASKED, bad, ASKED], [says(0), says(2), says(2)], **tools)
        assert [output.error is None for output in outputs] == [True, False, True]
        assert read(outputs[0].outputs[0].message) == (None, "See:", [SUM, SUM])
        assert read(outputs[2].outputs[0].message) == (None, "plain", [])
        assert llm.generate("1", says(0))[0].outputs[0].message is None


def test_an_answer_that_goes_on_inside_a_thought_is_reasoning_up_to_its_end() -> None:
    turns: Any = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "<think>Well, "}]}]
    more = {"chat_template": THINKING, "continue_final_message": True, "add_generation_prompt": False}
    with LLM.over(build) as llm:
        (output,) = llm.chat(turns, says(3), **more)
    assert read(output.outputs[0].message) == ("so.\n", "Yes", [])


def test_calls_of_a_model_without_tools_of_its_own_are_read_in_the_form_that_its_prompt_asks_for() -> None:
    answers = ChatAnswers(NO_TOOLS, TOOLS, "", "", ByteTokenizer())
    assert read(answers.message(SAID[0])) == (None, "See:", [SUM, SUM])
    assert read(ChatAnswers(NO_TOOLS, None, "", "", ByteTokenizer()).message(SAID[0])) == (None, SAID[0], [])


def test_what_the_parameters_demand_the_form_of_is_content() -> None:
    answers = ChatAnswers(HERMES, TOOLS, "", "", ByteTokenizer())
    answers.params(SamplingParams(structured_outputs={"regex": ".*"}))
    assert answers.message(SAID[0]) == ChatMessage(SAID[0])


def test_special_tokens_stay_in_the_text_where_a_format_is_made_of_them() -> None:
    class Special(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"</think>" if token_id == EOS else super().token_bytes(token_id)

    for tokenizer, skips in ((ByteTokenizer(), True), (Special(), False)):
        params = SamplingParams()
        assert ChatAnswers(THINKING, None, "", "", tokenizer).params(params).skip_special_tokens is skips
        assert params.skip_special_tokens


def test_calls_keep_their_ids_while_other_sequences_run() -> None:
    answers = ChatAnswers(HERMES, TOOLS, "", "", ByteTokenizer())
    output = RequestOutput("1", outputs=[CompletionOutput(0, CALL, finish_reason="stop")])
    answers.read(output)
    first = output.outputs[0].message
    output = RequestOutput("1", outputs=[CompletionOutput(0, CALL, finish_reason="stop")])
    answers.read(output)
    assert first is not None
    assert first == output.outputs[0].message == ChatMessage("", None, [FunctionCall(first.tool_calls[0].id, *SUM)])


OPEN = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"


def test_reasoning_ends_at_its_budget_and_structured_output_begins() -> None:
    cached_model("smollm2-135m")  # skips where it cannot be had
    params = SamplingParams(thinking_token_budget=9, max_tokens=60, seed=1, structured_outputs={"choice": ["yes"]})
    with LLM(distributed_executor_backend="fake", num_blocks=64, max_model_len=128) as llm:
        (output,) = llm.chat(ASKED, params, chat_template=OPEN)
        with pytest.raises(RequestError, match="this model's chat template has no reasoning") as caught:
            llm.chat(ASKED, SamplingParams(thinking_token_budget=9))
    message = output.outputs[0].message
    assert message is not None
    assert (message.content.strip(), message.reasoning is None) == ("yes", False)
    assert caught.value.param == "thinking_token_budget"
