"""POST /api/pull, /api/copy; DELETE /api/delete: models that are fetched, and other names of the one that is served.

What they do affects all callers: they need the admin key, or a server of this machine that has no keys.
"""

import asyncio
import hashlib
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagoda.base.abbreviate import abbreviate, human_bytes
from pagoda.base.config import ModelConfig
from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.loading.catalog import CATALOG
from pagoda.loading.download_progress import DownloadProgress
from pagoda.loading.known_names import full_name, proposals
from pagoda.process.child_process import module_command
from pagoda.server.body import Body, Flag
from pagoda.server.dialects.ollama.dialect import (
    LATEST,
    LINES,
    OllamaError,
    OllamaWriter,
    line,
    model_name,
    ollama_error,
)
from pagoda.server.errors import ApiError
from pagoda.server.routing import Router
from pagoda.server.sending import EventStream, cancel_on_disconnect, json_response
from pagoda.server.served_adapters import AdapterChange
from pagoda.server.state import read_as_operator

router = Router(error=OllamaError, error_form=ollama_error, stream_type=LINES)

_BEAT_S = 1.0
"""So often a stream says that a model is still being fetched."""
_END_S = 10.0
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:\w[\w.-]*)?")


class OllamaPullRequest(Body, kw_only=True, frozen=True):
    """POST /api/pull

    model: Of the catalog, a name of Ollama such as llama3.2, or ORG/NAME[:QUANTIZATION] of the hub, also after hf.co/.
    name: Older form of `model`.
    stream: Tell in lines how it goes.
    insecure: Has no effect.
    """

    model: str | None = None
    name: str | None = None
    stream: Flag = True
    insecure: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model, name=self.name)
        _named(self.model, self.name)


class OllamaCopyRequest(Body, kw_only=True, frozen=True):
    """POST /api/copy

    source: A name that the server has.
    destination: Another for the same.
    """

    source: str
    destination: str

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(source=self.source, destination=self.destination)
        if not self.destination.removesuffix(LATEST):
            raise RequestError(f"destination: needs a name, got {self.destination!r}", "destination")


class OllamaDeleteRequest(Body, kw_only=True, frozen=True):
    """DELETE /api/delete

    model: A name that /api/copy gave, or of an adapter.
    name: Older form of `model`.
    """

    model: str | None = None
    name: str | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model, name=self.name)
        _named(self.model, self.name)


class OllamaStatus(Struct, frozen=True):
    """How a pull goes; "success" at its end.

    digest: of the model, here of its name.   total, completed: bytes; missing where it is not known how many there are.
    """

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET

    @classmethod
    def of(cls, name: str, progress: DownloadProgress) -> "OllamaStatus":
        done, total = progress.num_bytes, progress.num_bytes_in_all
        if not total:
            return cls(f"pulling {name}: {human_bytes(done)}")
        digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        return cls(f"pulling {name}", digest, total, min(done, total))


def _named(model: str | None, name: str | None) -> str:
    """Return the name in a body. Raises RequestError without one."""
    if not (found := model or name):
        raise RequestError("model: must not be empty", "model")
    return found


@router.post("/api/copy", body=OllamaCopyRequest)
async def ollama_copy(http: Request) -> Response:
    """Give the model, or an adapter, another name, until the server ends.

    Needs the admin key, if the server has keys or other machines reach it.
    """
    state, body = await read_as_operator(http, OllamaCopyRequest)
    source = state.pick(http, model_name(state, body.source)).name
    destination = model_name(state, body.destination) or ""
    if destination != source:
        await state.peers.change_adapter(AdapterChange(destination, copy_of=source))
    return Response()


@router.delete("/api/delete", body=OllamaDeleteRequest)
async def ollama_delete(http: Request) -> Response:
    """Remove a name that /api/copy gave, or an adapter; no file is deleted. Requests that use it finish.

    Needs the admin key, if the server has keys or other machines reach it.
    """
    state, body = await read_as_operator(http, OllamaDeleteRequest)
    picked = state.pick(http, model_name(state, _named(body.model, body.name)))
    name = picked.name
    if name in picked.model.names:
        raise ApiError(400, f"model: {abbreviate(name)} is a model that this server serves; end the server", "model")
    await state.peers.change_adapter(AdapterChange(name))
    return Response()


@router.post("/api/pull", answer=OllamaStatus, chunk=OllamaStatus, body=OllamaPullRequest)
async def ollama_pull(http: Request) -> Response:
    """Fetch a model of the catalog or the hub into the cache, where `pagoda serve` finds it; this server keeps its own.

    Needs the admin key, if the server has keys or other machines reach it.
    """
    state, body = await read_as_operator(http, OllamaPullRequest)
    asked = _named(body.model, body.name)
    name = model_name(state, asked) or asked
    is_served = name in state.models.all_names
    if not is_served:
        name = full_name(name)
        if name not in CATALOG and _HUB_ID.fullmatch(name) is None:
            reason = f"neither in the catalog nor a hub id ORG/NAME{proposals(name)}"
            raise ApiError(404, f"unknown model {abbreviate(name)}: {reason}", "model")
    steps = _fetch(name, None if is_served else state.pull_flags)
    if body.stream:
        return EventStream(steps, framing=OllamaWriter.framing)
    return await cancel_on_disconnect(http, _last(steps))


async def _last(steps: AsyncGenerator[bytes, None]) -> Response:
    async with aclosing(steps):
        async for _ in steps:
            pass
    return json_response(OllamaStatus("success"))


async def _fetch(name: str, flags: tuple[str, ...] | None) -> AsyncGenerator[bytes, None]:
    """Run `pagoda models pull` with these flags, if there are any, and yield lines that say how it goes.

    It ends if they are not read to the end. Raises ApiError if the model cannot be fetched.
    """
    yield line(OllamaStatus("pulling manifest"))
    if flags is not None:
        command = [*module_command("pagoda.__main__"), "models", "pull", *flags, name]
        options = dict(zip(flags[::2], flags[1::2], strict=True))
        config = ModelConfig(
            model=name, source=options.get("--source", "huggingface"), cache_dir=options.get("--cache-dir")
        )
        progress = await asyncio.to_thread(DownloadProgress, config)
        null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        quiet = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        # In a session of its own, so that Ctrl-C in a terminal reaches it only when the server ends this stream.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=null, stderr=pipe, env=quiet, start_new_session=True
        )
        ended = asyncio.create_task(process.communicate())
        try:
            while not (await asyncio.wait({ended}, timeout=_BEAT_S))[0]:
                yield line(await asyncio.to_thread(OllamaStatus.of, name, progress))
        finally:
            if not ended.done():
                process.send_signal(signal.SIGINT)  # it removes what it has of an incomplete file
                if not (await asyncio.wait({ended}, timeout=_END_S))[0]:
                    process.kill()
        said = (await ended)[1].decode(errors="replace").splitlines()
        if process.returncode:
            errors = [one.removeprefix("pagoda: ") for one in said if one.startswith("pagoda: ")]
            reason = errors[-1] if errors else f"pagoda models pull ended with {process.returncode}"
            raise ApiError(400, f"model: {abbreviate(name)} cannot be fetched: {reason}", "model")
    yield line(OllamaStatus("success"))
