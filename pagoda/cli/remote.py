"""A running server, and the model behind it as `pagoda chat --url` uses it: the same conversation, over HTTP."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.session import Message, Piece

_TIMEOUT_S = 600.0


def without_v1(url: str) -> str:
    """Return a server's address without the /v1 at its end, and with the http:// that may be left out."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


class ServerConnection:
    """Opens routes of a server.   url: see `without_v1`.   key: None: none is sent."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """api_key: of several, with spaces between them, the first is taken."""
        self.url, self.key = without_v1(url), next(iter((api_key or "").split()), None)
        self._headers = {"Content-Type": "application/json"}
        if self.key is not None:
            self._headers["Authorization"] = f"Bearer {self.key}"

    @contextmanager
    def open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Send a body as JSON, or ask without one; yield the response. Raises RequestError."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with suppress(ValueError, LookupError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise RequestError(f"the server answered {error.code}: {text[:500]}") from None
        except urllib.error.URLError as error:
            raise RequestError(f"the server does not answer: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the connection to the server broke: {str(error) or type(error).__name__}") from None


def served_models(server: ServerConnection) -> list[dict[str, Any]]:
    """Return what a server lists about each of its models, with an "id". Raises ConfigError."""
    try:
        with server.open("/v1/models") as answer:
            return [{"id": str(one["id"]), **one} for one in json.load(answer)["data"]]
    except (OSError, ValueError, LookupError, TypeError, RequestError) as error:
        raise ConfigError(f"{server.url}: cannot list its models ({error}); is the server running?") from None


def model_card(server: ServerConnection, model: str | None) -> dict[str, Any]:
    """Return what a server lists about a model; without one, about the first that writes text, as far as it says so.

    Raises ConfigError.
    """
    served = served_models(server)
    if model is None and served:
        return next((one for one in served if "completion" in (one.get("capabilities") or ["completion"])), served[0])
    for one in served:
        if one["id"] == model:
            return one
    names = ", ".join(one["id"] for one in served)
    raise ConfigError(f"{server.url} does not serve {model!r:.80}; it has {names}")


_NOT_FOR_CHATS = ("chat template", "generates no text", "writes down what is said")
"""What a server says of a model that only continues texts, of one for embeddings, and of one for speech."""


def require_chat(server: ServerConnection, model: str) -> None:
    """Raise ConfigError if a server says that a model is not for chats; what it does not answer passes."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    try:
        with server.open("/tokenize", body):
            pass
    except RequestError as error:
        if any(words in str(error) for words in _NOT_FOR_CHATS):
            raise ConfigError(f"{model} at {server.url} cannot chat: {error}; serve a model for chats") from None


class RemoteSession:
    """Answers like Session, by the server's /tokenize and /v1/completions, so that it needs a pagoda or vLLM server.

    A sampling parameter that is not set is the server's own default.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """model: None: the first that the server lists. Raises ConfigError if the server does not answer, or has no
        chat template.
        """
        self._server = ServerConnection(url, api_key)
        card = model_card(self._server, model)
        self.model_name = str(card["id"])
        require_chat(self._server, self.model_name)
        self.max_model_len = int(card.get("max_model_len") or 1 << 30)
        self.given: set[str] = set()

    def params(self, given: Mapping[str, Any], max_tokens: int, seed: object) -> SamplingParams:
        """Return the sampling parameters that flags set."""
        self.given = set(given)
        return SamplingParams(**{"max_tokens": max_tokens, **given, "seed": seed})

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to the answer that is wanted. Raises RequestError."""
        with self._server.open("/tokenize", {"model": self.model_name, "messages": list(messages)}) as answer:
            return json.load(answer)["tokens"]

    def stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        """The answer as it comes; leaving the iteration ends it. Raises RequestError."""
        names = {*self.given, "max_tokens"} | ({"seed"} if params.seed is not None else set())
        kept = {name: getattr(params, name) for name in sorted(names)}
        body = {"model": self.model_name, "prompt": token_ids, "stream": True, "add_special_tokens": False, **kept}
        with self._server.open("/v1/completions", body) as answer:
            for line in answer:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RequestError(str(event["error"].get("message", event["error"])))
                for choice in event["choices"]:
                    yield Piece(choice["text"], int(bool(choice["text"])), choice["finish_reason"])
        raise RequestError("the connection to the server broke before the end of the answer")
