"""The `openai` package against a server: start `.venv/bin/pagoda serve` in another terminal, then run this.

.venv/bin/pip install openai
.venv/bin/python examples/openai_client.py [http://127.0.0.1:8000/v1]
"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="any; the server was started without --api-key")
    model = client.models.list().data[0].id
    print("model:", model)

    completion = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0)
    print("completion:", repr(completion.choices[0].text))

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three primary colours."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 40},  # the engine's own parameters go here
    )
    print("chat: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\nusage: {chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens")


if __name__ == "__main__":
    main(*sys.argv[1:2])
