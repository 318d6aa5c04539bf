"""Packages over OpenAI's: the same conversations in the forms of its APIs."""

import json
from collections.abc import Callable
from typing import Any

from tests.server.client_scripts.asked import (
    AGENT,
    FORM,
    IMAGE,
    MODEL,
    SCHEMA,
    TEXT,
    THOUGHT,
    TOO_LONG,
    TOOL,
    TYPED,
    Seen,
    place,
    status_of,
    weather,
)


def openai_chat(url: str) -> Seen:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    common: Any = {"model": MODEL, "max_tokens": 300}

    def whole(messages: Any, **more: Any) -> Any:
        return client.chat.completions.create(messages=messages, **common, **more).choices[0].message

    def streamed(messages: Any, **more: Any) -> Any:
        with client.chat.completions.stream(messages=messages, **common, **more) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0].message

    def talk(answer: Callable[..., Any], question: str) -> list[Any]:
        messages: list[Any] = [{"role": "user", "content": question}]
        called, thoughts = [], []
        while True:
            said = answer(messages, tools=[TOOL])
            thoughts.append(getattr(said, "reasoning_content", None) or "")
            messages.append(said.to_dict())
            if not said.tool_calls:
                return [said.content, called, "".join(thoughts)]
            for call in said.tool_calls:
                arguments = json.loads(call.function.arguments)
                called.append(arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)})

    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    return {
        "version": openai.__version__,
        "text": [talk(answer, TEXT) for answer in (whole, streamed)],
        "agent": [talk(answer, AGENT) for answer in (whole, streamed)],
        "thought": [talk(answer, THOUGHT) for answer in (whole, streamed)],
        "typed": [
            json.loads(answer([{"role": "user", "content": TYPED}], response_format=FORM).content)
            for answer in (whole, streamed)
        ],
        "image": status_of(lambda: whole([{"role": "user", "content": parts}])),
        "long": status_of(lambda: streamed([{"role": "user", "content": TOO_LONG}])),
    }


def openai_texts(url: str) -> Seen:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "prompt": f"\n{TEXT[0]}", "max_tokens": 300}
    streamed = "".join(one.choices[0].text for one in client.completions.create(**asked, stream=True))
    return {"text": [[said, [], ""] for said in (client.completions.create(**asked).choices[0].text, streamed)]}


def openai_responses(url: str) -> Seen:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    common: Any = {"model": MODEL, "max_output_tokens": 300}
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}

    def whole(given: Any, **more: Any) -> Any:
        return client.responses.create(input=given, **common, **more)

    def streamed(given: Any, **more: Any) -> Any:
        with client.responses.stream(input=given, **common, **more) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    def talk(answer: Callable[..., Any], question: str) -> list[Any]:
        items: list[Any] = [{"role": "user", "content": question}]
        called: list[Any] = []
        thoughts = ""
        while True:
            said = answer(items, tools=[tool])
            calls = [item for item in said.output if item.type == "function_call"]
            for item in said.output:
                if item.type == "reasoning":
                    thoughts += "".join(part.text for part in item.content or ())
            items += [item.to_dict() for item in said.output]
            if not calls:
                return [said.output_text, called, thoughts]
            for call in calls:
                called.append(json.loads(call.arguments))
                answered = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**called[-1])}
                items.append(answered)

    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": IMAGE, "detail": "auto"}]
    return {
        "text": [talk(answer, TEXT) for answer in (whole, streamed)],
        "agent": [talk(answer, AGENT) for answer in (whole, streamed)],
        "thought": [talk(answer, THOUGHT) for answer in (whole, streamed)],
        "typed": [json.loads(answer(TYPED, text=form).output_text) for answer in (whole, streamed)],
        "image": status_of(lambda: whole([{"role": "user", "content": parts}])),
        "long": status_of(lambda: whole(TOO_LONG)),
    }


def instructor(url: str) -> Seen:
    """Its JSON mode asks for response_format; without a class, it is a plain client."""
    import instructor as library
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = library.from_openai(plain, mode=library.Mode.JSON_SCHEMA)

    def ask(make: Any, question: str, kind: Any) -> Any:
        messages = [{"role": "user", "content": question}]
        return make(response_model=kind, model=MODEL, messages=messages, max_tokens=300, max_retries=0)

    *_, last = ask(client.chat.completions.create_partial, TYPED, place())
    return {
        "text": [[ask(client.chat.completions.create, TEXT, None).choices[0].message.content, [], ""]] * 2,
        "typed": [one.model_dump() for one in (ask(client.chat.completions.create, TYPED, place()), last)],
    }
