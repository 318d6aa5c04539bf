"""Clients over openai 3, one function each: `openai3_clients.py NAME URL` prints what it saw as JSON.

Runs in the environment of the clients (requirements-clients.txt).
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

MODEL = "smollm2-135m"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
SETTINGS: dict[str, Any] = {"max_tokens": 8, "seed": 5}


def openai_package(url: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **SETTINGS)
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **SETTINGS))
    seen: dict[str, Any] = {
        "version": openai.__version__,
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    }
    for name, options in {"temperature": {"temperature": -3}, "model": {"model": "other"}}.items():
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **options})
        except openai.APIStatusError as error:
            seen[name] = [error.status_code, error.param]
    return seen


def openai_retries(url: str) -> dict[str, Any]:
    """How often a client that retries by itself sends what this server cannot do yet."""
    import httpx2
    import openai

    sent: list[str] = []
    transport = httpx2.HTTPTransport()

    class Counting(httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            sent.append(request.url.path)
            return transport.handle_request(request)

    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=2, http_client=httpx2.Client(transport=Counting())
    )
    seen: dict[str, Any] = {}
    shape: Any = {"type": "json_object"}
    calls: dict[str, Callable[[], Any]] = {
        "embeddings": lambda: client.embeddings.create(model=MODEL, input="Hi"),
        "response_format": lambda: client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=shape, max_tokens=4
        ),
        "responses": lambda: client.responses.create(model=MODEL, input="Hi", max_output_tokens=4),
        "files": lambda: client.files.list(),
    }
    for name, call in calls.items():
        sent.clear()
        try:
            call()
            status = 200
        except openai.APIStatusError as error:
            status = error.status_code
        seen[name] = {"status": status, "sent": len(sent)}
    return seen


def instructor(url: str) -> dict[str, Any]:
    """Its JSON mode asks for response_format; without one it is a plain client."""
    import instructor as library
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        text: str

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = library.from_openai(plain, mode=library.Mode.JSON)
    seen: dict[str, Any] = {}
    text = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_model=None, **SETTINGS)
    seen["plain"] = text.choices[0].message.content
    try:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_model=Answer, max_retries=0, **SETTINGS)
        seen["json"] = "answered"
    except Exception as error:
        seen["json"] = str(error)
    return seen


def langchain(url: str) -> dict[str, Any]:
    import openai
    from langchain_openai import ChatOpenAI

    def chat(**options: Any) -> ChatOpenAI:
        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=8, seed=5, **options)  # type: ignore[call-arg]

    seen: dict[str, Any] = {"whole": chat(max_retries=0).invoke("Hi").content}
    seen["streamed"] = "".join(str(chunk.content) for chunk in chat(max_retries=0).stream("Hi"))
    seen["batch"] = [one.content for one in chat(max_retries=0).batch(["Hi", "Hi"])]
    seen["usage"] = chat(max_retries=0).invoke("Hi").usage_metadata["output_tokens"]  # type: ignore[index]
    try:
        chat(max_retries=2).with_structured_output({"title": "a", "type": "object"}, method="json_mode").invoke("Hi")
        seen["json_mode"] = 200
    except (openai.LengthFinishReasonError, ValueError):
        seen["json_mode"] = "cut off"
    except openai.APIStatusError as error:
        seen["json_mode"] = error.status_code
    return seen


def pydantic_ai(url: str) -> dict[str, Any]:
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, model_settings={"max_tokens": 8, "seed": 5})

    async def streamed() -> str:
        async with agent.run_stream("Hi") as result:
            return await result.get_output()

    seen: dict[str, Any] = {"whole": agent.run_sync("Hi").output, "streamed": asyncio.run(streamed())}
    with_tool = Agent(model, model_settings={"max_tokens": 8})

    @with_tool.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    try:
        with_tool.run_sync("Hi")
        seen["tools"] = 200
    except ModelHTTPError as error:
        seen["tools"] = error.status_code
    return seen


def openai_agents(url: str) -> dict[str, Any]:
    import openai
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    settings = ModelSettings(max_tokens=8, extra_args={"seed": 5})
    agent = Agent(name="a", model=model, model_settings=settings)

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    async def run() -> dict[str, Any]:
        seen: dict[str, Any] = {"whole": (await Runner.run(agent, "Hi")).final_output}
        streamed = Runner.run_streamed(agent, "Hi")
        async for _ in streamed.stream_events():
            pass
        seen["streamed"] = streamed.final_output
        with_tool = Agent(name="b", model=model, model_settings=settings, tools=[weather])
        try:
            await Runner.run(with_tool, "Hi")
            seen["tools"] = 200
        except openai.APIStatusError as error:
            seen["tools"] = error.status_code
        return seen

    return asyncio.run(run())


if __name__ == "__main__":
    clients = (openai_package, openai_retries, instructor, langchain, pydantic_ai, openai_agents)
    print(json.dumps({client.__name__: client for client in clients}[sys.argv[1]](sys.argv[2])))
