"""Streams texts from a server in several threads, over and over, until standard input closes.

Arguments: its address, how many threads, tokens of each text, and how often the client tries again by itself. Prints
a line when each thread has a token; at the end what each prompt got, how many streams ended well, and the errors of the
others: the program sends those again.
"""

import json
import sys
import threading
from typing import Any

import httpx
import openai

url, num_threads, num_tokens, num_retries = sys.argv[1], *map(int, sys.argv[2:])
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=num_retries, timeout=600.0)
model = client.models.list().data[0].id
is_over = threading.Event()
texts: dict[str, set[str]] = {}
errors: list[str] = []
num_done = [0] * num_threads
has_begun = [threading.Event() for _ in range(num_threads)]


def ask(number: int) -> None:
    prompt = f"prompt {number}"
    options: Any = {"model": model, "max_tokens": num_tokens, "temperature": 0.0, "seed": 1, "stream": True}
    while not is_over.is_set():
        try:
            chunks = client.completions.create(prompt=prompt, **options)
            choices: list[Any] = []
            for chunk in chunks:
                choices += chunk.choices
                has_begun[number].set()
            assert choices[-1].finish_reason == "length", "the stream broke off"
            texts.setdefault(prompt, set()).add("".join(choice.text for choice in choices))
            num_done[number] += 1
        except (openai.OpenAIError, httpx.HTTPError, AssertionError) as error:
            errors.append(f"{type(error).__name__}: {error}")


threads = [threading.Thread(target=ask, args=[number]) for number in range(num_threads)]
for thread in threads:
    thread.start()
for begun in has_begun:
    begun.wait()
print("begun", flush=True)
sys.stdin.read()
is_over.set()
for thread in threads:
    thread.join()
print(
    json.dumps(
        {"texts": {prompt: sorted(found) for prompt, found in texts.items()}, "errors": errors, "done": num_done}
    )
)
