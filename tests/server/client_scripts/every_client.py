"""The same conversations through every package and every API of the server that it speaks.

`python -m tests.server.client_scripts.every_client URL [NAME ...]` prints as JSON what each client saw (all of them
without names). Runs in the environment of the clients (requirements-clients.txt), those of the openai package also in
that of the tests. The server's scripted model (test_every_client.py) answers by the first letter of the first question.
"""

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator

from tests.server.client_scripts.asked import Seen
from tests.server.client_scripts.of_agents import openai_agents, pydantic_ai
from tests.server.client_scripts.of_many import langchain, litellm, others
from tests.server.client_scripts.of_openai import instructor, openai_chat, openai_responses, openai_texts


def clients() -> Iterator[tuple[str, Callable[[str], Seen]]]:
    """Yield the name of each client, and what runs it."""
    for plain in (openai_chat, openai_texts, openai_responses, instructor, others):
        yield plain.__name__, plain
    several: tuple[tuple[Callable[[str, str], Seen], tuple[str, ...]], ...] = (
        (openai_agents, ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")),
        (pydantic_ai, ("chat", "responses", "anthropic")),
        (langchain, ("chat", "responses", "anthropic", "ollama")),
        (litellm, ("openai", "hosted_vllm", "anthropic", "ollama_chat")),
    )
    for made, kinds in several:
        for kind in kinds:
            yield f"{made.__name__} {kind}", functools.partial(made, kind=kind)


if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm waits for a list of prices from the network
    # litellm leaves streams of httpx unfinished; collected while the same thread opens a connection, one closes itself
    # and waits for ever for the pool's lock, which that thread holds.
    gc.disable()
    url, *names = sys.argv[1:]
    print(json.dumps({name: run(url) for name, run in clients() if not names or name in names}))
