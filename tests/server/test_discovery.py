"""What clients of other servers read to find this one: the context, what a model can do, and that it is loaded."""

import json
from typing import Any

import httpx
import pytest

from tests.server.live import LiveServer

MODEL = "smollm2-135m"


def get(server: LiveServer, path: str) -> Any:
    status, text = server.get(path)
    assert status == 200, path
    return json.loads(text)


def test_cards_have_what_clients_of_vllm_and_llama_cpp_read(fake_server: LiveServer) -> None:
    (card,), (again,) = (get(fake_server, path)["data"] for path in ("/v1/models", "/models"))
    alone = get(fake_server, f"/v1/models/{MODEL}")
    assert card["status"].pop("for_s") <= again["status"].pop("for_s") <= alone["status"].pop("for_s")
    assert card == again == alone
    # opencode takes cards of this owner, with this field as the context.
    assert (card["id"], card["owned_by"], card["root"], card["parent"]) == (MODEL, "vllm", MODEL, None)
    longest = card["max_model_len"]
    assert card["context_length"] == card["meta"]["n_ctx"] == longest
    assert card["capabilities"] == ["completion"]
    assert card["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
    meta = card["meta"]
    assert (meta["n_ctx_train"], meta["n_embd"], meta["n_vocab"]) == (8192, 576, 49152)
    assert 90_000_000 < meta["size"] < meta["n_params"] < 140_000_000


def test_properties_and_slots_are_as_llama_cpp_tells_them(fake_server: LiveServer) -> None:
    longest = get(fake_server, "/v1/models")["data"][0]["max_model_len"]
    props = get(fake_server, "/props")
    assert get(fake_server, f"/props?model={MODEL}") == props
    assert props["default_generation_settings"]["n_ctx"] == longest
    assert props["default_generation_settings"]["params"] == {"temperature": 0.2, "top_p": 0.9}
    assert props["model_alias"] == props["model_path"] == MODEL  # of the server's machine, no path
    assert props["modalities"] == {"vision": False, "audio": False}
    assert (props["bos_token"], props["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "messages" in props["chat_template"]
    slots = get(fake_server, "/slots")
    assert len(slots) == props["total_slots"] > 0
    assert slots[-1] == {"id": len(slots) - 1, "n_ctx": longest, "is_processing": False}
    assert fake_server.get("/props?model=x")[0] == 404
    assert get(fake_server, "/health") == {"status": "ok"}


def test_lm_studios_lists_have_the_context_and_say_that_it_is_loaded(fake_server: LiveServer) -> None:
    longest = get(fake_server, "/v1/models")["data"][0]["max_model_len"]
    (old,) = get(fake_server, "/api/v0/models")["data"]
    assert get(fake_server, f"/api/v0/models/{MODEL}") == old
    assert (old["id"], old["type"], old["state"], old["loaded_context_length"]) == (MODEL, "llm", "loaded", longest)
    assert (old["arch"], old["compatibility_type"], old["quantization"]) == ("llama", "gguf", "Q4_1")
    (new,) = get(fake_server, "/api/v1/models")["models"]
    assert (new["key"], new["type"], new["params_string"]) == (MODEL, "llm", "134.52M")
    assert new["loaded_instances"] == [{"id": MODEL, "config": {"context_length": longest}}]
    assert new["capabilities"] == {"vision": False, "trained_for_tool_use": False}
    assert fake_server.get("/api/v0/models/x")[0] == 404


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/props", "/slots", "/api/v0/models", "/api/v1/models"])
def test_they_need_the_key(keyed_server: LiveServer, path: str) -> None:
    key = {"Authorization": "Bearer one"}
    assert httpx.get(f"{keyed_server.url}{path}").status_code == 401
    assert httpx.get(f"{keyed_server.url}{path}", headers=key).status_code == 200
