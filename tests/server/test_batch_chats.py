"""POST /v1/chat/completions/batch: several conversations in one request, an answer to each."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.live import LiveServer

PATH = "/v1/chat/completions/batch"
CONVERSATIONS = [
    [{"role": "user", "content": "Name a colour."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello?"}]}],
    [{"role": "user", "content": "Name a colour.", "name": None}],
]
COMMON = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}


def test_each_conversation_has_the_answer_that_it_has_alone(real_server: LiveServer) -> None:
    status, batch = real_server.post(PATH, {"messages": CONVERSATIONS, "echo": True, **COMMON})
    assert status == 200, batch
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    for messages, choice in zip(CONVERSATIONS, batch["choices"], strict=True):
        alone = real_server.post("/v1/chat/completions", {"messages": messages, "echo": True, **COMMON})[1]
        assert choice == {**alone["choices"][0], "index": choice["index"]}
        usage = {name: count + alone["usage"][name] for name, count in usage.items()}
    assert {name: batch["usage"][name] for name in usage} == usage


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": CONVERSATIONS[0]}, "messages[0]"),
        ({"messages": [[{"content": "x"}]]}, "messages[0][0].role"),
        ({"messages": [CONVERSATIONS[0], [{"content": "x"}]]}, "messages[1][0].role"),
        ({"messages": [CONVERSATIONS[0], []]}, "messages[1]"),
        ({"messages": [CONVERSATIONS[0]] * 5000}, "messages"),
        ({"messages": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_is_not_for_batches_is_refused_by_name(fake_server: LiveServer, given: dict[str, Any], param: str) -> None:
    status, answer = fake_server.post(PATH, {"messages": CONVERSATIONS, **given})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_every_conversation_counts_until_all_have_their_answers(fake_server: LiveServer) -> None:
    """Like every prompt of a completion."""
    fake_server.wait_idle()
    with ThreadPoolExecutor(1) as pool:
        with fake_server.steps.held_after(2):
            answer = pool.submit(fake_server.post, PATH, {"messages": CONVERSATIONS, "max_tokens": 9})
            fake_server.wait_load(3)
        status, batch = answer.result(60)
    assert (status, len(batch["choices"])) == (200, 3)
    fake_server.wait_idle()
