"""Clients that call tools, one function each: `tool_clients.py NAME URL [responses]` prints what it saw as JSON.

With `responses`, they use OpenAI's Responses instead of chat completions.

Runs in the environment of the clients (requirements-clients.txt).
"""

import asyncio
import json
import sys
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

MODEL = "smollm2-135m"
ASK = "What will the weather be in Bern for the next 3 days?"
MESSAGES: list[Any] = [{"role": "user", "content": ASK}]
City = Literal["Zürich", "Bern", "Genève"]
Days = Annotated[int, Field(ge=1, le=9)]


class Weather(BaseModel):
    """The weather in a city."""

    city: City
    days: Days


class Time(BaseModel):
    """The time in a city."""

    city: City


def langchain(url: str, is_responses: bool) -> dict[str, Any]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": f"{url}/v1", "api_key": "none", "use_responses_api": is_responses}
    chat = ChatOpenAI(model=MODEL, max_retries=0, temperature=0, max_tokens=120, **options)  # type: ignore[call-arg]
    one: dict[str, Any] = {"strict": True, "parallel_tool_calls": False}

    def calls(answer: Any) -> list[Any]:
        return [[call["name"], call["args"]] for call in answer.tool_calls]

    required = chat.bind_tools([Weather, Time], tool_choice="any", **one)
    answer = required.invoke(ASK)
    seen: dict[str, Any] = {"required": calls(answer), "content": answer.text}
    chunks = list(required.stream(ASK))
    seen["streamed"] = calls(sum(chunks[1:], chunks[0]))
    seen["named"] = calls(chat.bind_tools([Weather, Time], tool_choice="Time").invoke(ASK))
    free = chat.bind_tools([Weather, Time], strict=True).invoke(ASK, max_tokens=60)
    seen["free"] = calls(free)
    seen["invalid"] = [call["name"] for call in free.invalid_tool_calls]
    result = ToolMessage("sunny, 20 degrees", tool_call_id=answer.tool_calls[0]["id"])
    seen["after"] = chat.invoke([HumanMessage(ASK), answer, result], max_tokens=20).text
    for method in ("function_calling", "json_schema"):
        shaped = chat.with_structured_output(Weather, method=method).invoke(ASK)
        seen[method] = shaped.model_dump()  # type: ignore[union-attr]
    return seen


def instructor(url: str, is_responses: bool) -> dict[str, Any]:
    import instructor as library

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    seen: dict[str, Any] = {}
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(plain, mode=mode)
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
        answer = client.chat.completions.create(response_model=Weather, max_retries=0, **asked)
        seen[mode.name] = answer.model_dump()
        *_, last = client.chat.completions.create_partial(response_model=Weather, max_retries=0, **asked)
        seen[f"{mode.name} streamed"] = last.model_dump()
    return seen


def pydantic_ai(url: str, is_responses: bool) -> dict[str, Any]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def forecast(city: City, days: Days) -> list[Any]:
        """The weather in a city."""
        called.append([city, days])
        return [city, days, "sunny"]

    called: list[Any] = []
    kind = OpenAIResponsesModel if is_responses else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"max_tokens": 120, "temperature": 0, "parallel_tool_calls": False}
    shaped = Agent(model, output_type=Weather, model_settings=settings, retries=0)
    acting = Agent(model, output_type=forecast, model_settings=settings, retries=0)

    async def streamed() -> Any:
        async with shaped.run_stream(ASK) as result:
            return await result.get_output()

    return {
        "whole": shaped.run_sync(ASK).output.model_dump(),
        "streamed": asyncio.run(streamed()).model_dump(),
        "result": acting.run_sync(ASK).output,
        "called": called,
    }


def openai_agents(url: str, is_responses: bool) -> dict[str, Any]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    kind = OpenAIResponsesModel if is_responses else OpenAIChatCompletionsModel
    model = kind(model=MODEL, openai_client=client)
    called: list[Any] = []

    @function_tool
    def weather(city: City, days: Days) -> str:
        """The weather in a city."""
        called.append([city, days])
        return f"sunny in {city} for {days} days"

    async def run(**options: Any) -> Any:
        settings = ModelSettings(temperature=0, max_tokens=60, parallel_tool_calls=False, tool_choice="required")
        agent = Agent(name="a", model=model, model_settings=settings, tools=[weather], **options)
        result = Runner.run_streamed(agent, ASK, max_turns=2)
        async for _ in result.stream_events():
            pass
        whole = await Runner.run(agent, ASK, max_turns=2)
        return [result.final_output, whole.final_output]

    seen: dict[str, Any] = {"stopped": asyncio.run(run(tool_use_behavior="stop_on_first_tool"))}
    return {**seen, "called": called}


if __name__ == "__main__":
    clients = (langchain, instructor, pydantic_ai, openai_agents)
    chosen = {client.__name__: client for client in clients}[sys.argv[1]]
    print(json.dumps(chosen(sys.argv[2], "responses" in sys.argv[3:])))
