"""Packages that run agents: the loop over calls is theirs."""

import asyncio
import base64
import json
from typing import Any

from tests.server.client_scripts.asked import (
    AGENT,
    MODEL,
    PIXEL,
    TEXT,
    THOUGHT,
    TOO_LONG,
    TYPED,
    Seen,
    place,
    status_of,
    weather,
)


def openai_agents(url: str, kind: str) -> Seen:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    async def run(question: str, is_streamed: bool, **more: Any) -> list[Any]:
        """What an agent answers, the arguments of its calls, and its thoughts."""
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, kind)(model=MODEL, openai_client=client)
            settings = agents.ModelSettings(max_tokens=300)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, model_settings=settings, **more)
            if is_streamed:
                result: Any = agents.Runner.run_streamed(agent, question)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, question)
        items = [item.raw_item for item in result.new_items]
        called = [json.loads(item.arguments) for item in items if getattr(item, "type", "") == "function_call"]
        thought = "".join(
            part.text
            for item in items
            if getattr(item, "type", "") == "reasoning"
            for part in item.content or item.summary
        )
        return [result.final_output, called, thought]

    def both(question: str, **more: Any) -> list[Any]:
        return [asyncio.run(run(question, is_streamed, **more)) for is_streamed in (False, True)]

    tools = [agents.function_tool(weather)]
    return {
        "text": both(TEXT),
        "agent": both(AGENT, tools=tools),
        "thought": both(THOUGHT, tools=tools),
        "typed": [said.model_dump() for said, _, _ in both(TYPED, output_type=place())],
        "long": status_of(lambda: asyncio.run(run(TOO_LONG, False))),
    }


def pydantic_ai(url: str, kind: str) -> Seen:
    from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput

    def model() -> Any:
        if kind == "anthropic":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none"))
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        of_openai = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
        return of_openai(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))

    settings: Any = {"max_tokens": 2000 if kind == "anthropic" else 300}

    def shown(result: Any) -> list[Any]:
        parts = [part for message in result.all_messages() for part in message.parts]
        called = [part.args_as_dict() for part in parts if part.part_kind == "tool-call"]
        thought = "".join(part.content for part in parts if part.part_kind == "thinking")
        return [result.output, called, thought]

    async def streamed(agent: Any, question: str) -> list[Any]:
        async with agent.iter(question) as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        async for _ in stream:
                            pass
            return shown(run.result)

    def both(question: str, output_type: Any = str, tools: Any = (), **more: Any) -> list[Any]:
        asked = {"model_settings": {**settings, **more}, "retries": 0, "output_type": output_type, "tools": tools}
        return [
            shown(Agent(model(), **asked).run_sync(question)),
            asyncio.run(streamed(Agent(model(), **asked), question)),
        ]

    thinks: dict[str, Any] = {
        "anthropic": {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}},
        "responses": {"openai_reasoning_summary": "auto"},  # it shows no other reasoning
    }.get(kind, {})
    form = (PromptedOutput if kind == "anthropic" else NativeOutput)(place())
    picture = BinaryContent(base64.b64decode(PIXEL), media_type="image/png")
    return {
        "text": both(TEXT),
        "agent": both(AGENT, tools=[weather]),
        "thought": both(THOUGHT, tools=[weather], **thinks),
        "typed": [said.model_dump() for said, _, _ in both(TYPED, form)],
        "image": status_of(lambda: Agent(model(), model_settings=settings).run_sync(["?", picture])),
        "long": status_of(lambda: Agent(model(), model_settings=settings).run_sync(TOO_LONG)),
    }
