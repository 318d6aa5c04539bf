"""Packages that speak several APIs."""

import json
from collections.abc import Callable
from typing import Any

from tests.server.client_scripts.asked import (
    AGENT,
    FORM,
    IMAGE,
    MODEL,
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


def langchain(url: str, kind: str) -> Seen:
    from langchain_core.messages import HumanMessage, ToolMessage

    def model(thinks: bool = False) -> Any:
        if kind == "anthropic":
            from langchain_anthropic import ChatAnthropic

            thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if thinks else {}
            return ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=2000, **thinking)  # type: ignore[arg-type,call-arg]
        if kind == "ollama":
            from langchain_ollama import ChatOllama

            return ChatOllama(model=MODEL, base_url=url, num_predict=300, reasoning=thinks or None)
        from langchain_openai import ChatOpenAI

        more: Any = {"use_responses_api": kind == "responses", "max_tokens": 300}
        if thinks and kind == "responses":  # it shows no other reasoning
            more["reasoning"] = {"summary": "auto"}
        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, **more)

    def whole(chat: Any, messages: Any) -> Any:
        return chat.invoke(messages)

    def streamed(chat: Any, messages: Any) -> Any:
        first, *rest = chat.stream(messages)
        return sum(rest, first)

    def talk(answer: Callable[..., Any], question: str, thinks: bool = False) -> list[Any]:
        messages: list[Any] = [HumanMessage(question)]
        called, thought = [], ""
        while True:
            said = answer(model(thinks).bind_tools([weather]), messages)
            messages.append(said)
            blocks = said.content_blocks
            thought += "".join(one.get("reasoning", "") for one in blocks if one["type"] == "reasoning")
            if not said.tool_calls:
                return ["".join(one["text"] for one in blocks if one["type"] == "text"), called, thought]
            for call in said.tool_calls:
                called.append(call["args"])
                messages.append(ToolMessage(weather(**call["args"]), tool_call_id=call["id"]))

    parts: Any = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    typed = model().with_structured_output(place(), method="json_schema")
    return {
        "text": [talk(answer, TEXT) for answer in (whole, streamed)],
        "agent": [talk(answer, AGENT) for answer in (whole, streamed)],
        "thought": [talk(answer, THOUGHT, thinks=True) for answer in (whole, streamed)],
        "typed": [one.model_dump() for one in (typed.invoke(TYPED), list(typed.stream(TYPED))[-1])],
        "image": status_of(lambda: model().invoke([HumanMessage(parts)])),
        "long": status_of(lambda: model().invoke(TOO_LONG)),
    }


def litellm(url: str, kind: str) -> Seen:
    import litellm as library

    base = f"{url}/v1" if kind in ("openai", "hosted_vllm") else url
    common = {"model": f"{kind}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 2000, "num_retries": 0}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "allowed_openai_params": ["thinking"]}

    def whole(messages: Any, **more: Any) -> Any:
        return library.completion(messages=messages, **common, **more).choices[0].message

    def streamed(messages: Any, **more: Any) -> Any:
        chunks: Any = list(library.completion(messages=messages, stream=True, **common, **more))
        return library.stream_chunk_builder(chunks).choices[0].message  # type: ignore[union-attr]

    def talk(answer: Callable[..., Any], question: str, **more: Any) -> list[Any]:
        messages: list[Any] = [{"role": "user", "content": question}]
        called, thought = [], ""
        while True:
            said = answer(messages, tools=[TOOL], **more)
            thought += getattr(said, "reasoning_content", None) or ""
            messages.append(said.model_dump())
            if not said.tool_calls:
                return [said.content, called, thought]
            for call in said.tool_calls:
                called.append(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(**called[-1])})

    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    asked = [{"role": "user", "content": TYPED}]
    return {
        "text": [talk(answer, TEXT) for answer in (whole, streamed)],
        "agent": [talk(answer, AGENT) for answer in (whole, streamed)],
        "thought": [talk(answer, THOUGHT, **(thinking if kind == "anthropic" else {})) for answer in (whole, streamed)],
        # For models of Anthropic's that it does not know, a call of a tool that the scripted model does not make.
        "typed": []
        if kind == "anthropic"
        else [json.loads(answer(asked, response_format=FORM).content) for answer in (whole, streamed)],
        "image": status_of(lambda: whole([{"role": "user", "content": parts}])),
        "long": status_of(lambda: whole([{"role": "user", "content": TOO_LONG}])),
    }


def others(url: str) -> Seen:
    """Texts to continue, embeddings and rankings."""
    import litellm as library
    from langchain_ollama import OllamaEmbeddings, OllamaLLM
    from langchain_openai import OpenAI, OpenAIEmbeddings

    v1, prompt, texts = f"{url}/v1", f"\n{TEXT[0]}", ["a", "b"]
    common: Any = {"api_key": "none", "max_tokens": 300}
    asked: Any = {"model": f"text-completion-openai/{MODEL}", "api_base": v1, "prompt": prompt, **common}
    ollama, openai = OllamaLLM(model=MODEL, base_url=url), OpenAI(model=MODEL, base_url=v1, **common)
    bases = {"openai": v1, "hosted_vllm": v1, "ollama": url}
    rankers = {"hosted_vllm": url, "cohere": f"{url}/v2/rerank", "jina_ai": f"{v1}/rerank"}
    made = [
        library.embedding(model=f"{name}/{MODEL}", api_base=base, api_key="none", input=texts).data[1]["embedding"]
        for name, base in bases.items()
    ]
    made.append(OllamaEmbeddings(model=MODEL, base_url=url).embed_documents(texts)[1])
    plain: Any = {"check_embedding_ctx_length": False}  # else it counts tokens with a table from the network
    made.append(OpenAIEmbeddings(model=MODEL, base_url=v1, api_key="none", **plain).embed_documents(texts)[1])
    return {
        "continued": [
            library.text_completion(**asked).choices[0].text,
            "".join(one.choices[0].text or "" for one in library.text_completion(**asked, stream=True)),
            openai.invoke(prompt),
            "".join(openai.stream(prompt)),
        ],
        "prompted": [ollama.invoke(TEXT), "".join(ollama.stream(TEXT))],
        "embedded": made,
        "ranked": [
            library.rerank(
                model=f"{name}/{MODEL}", api_base=base, api_key="none", query="a", documents=texts, top_n=1
            ).results[0]["index"]
            for name, base in rankers.items()
        ],
        "response": library.responses(model=f"openai/{MODEL}", api_base=v1, api_key="none", input=TEXT).output_text,
    }
