"""What another API costs: this file has one, with bodies, frames, whole answers and errors of its own form."""

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagoda.base.sampling_params import SamplingParams
from pagoda.core.events import Ended, Events
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_output import EngineCoreOutputs
from pagoda.server import app
from pagoda.server.body import Flag, Int32, ModelBody
from pagoda.server.conversation import Conversation
from pagoda.server.errors import ApiError
from pagoda.server.respond import respond
from pagoda.server.routing import Router
from pagoda.server.sending import Framing
from pagoda.server.served_model import ServedModel
from pagoda.server.state import ServerState
from pagoda.server.turn import Piece, Turn, TurnRequest, naming_fields
from tests.server.in_process import EndingClient, served

# ---- the API


class TalkRequest(ModelBody, kw_only=True, frozen=True):
    """POST /talk.   ask: what is said.   most: tokens of the answer.   flow: in pieces."""

    ask: str
    most: Int32 = 9
    flow: Flag = False


class TalkProblem(Struct):
    problem: str
    field: str | None


class Talked(Struct, omit_defaults=True):
    say: str = ""
    done: str = ""
    tokens: int = 0


def line(answer: Struct) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


def talk_problem(error: ApiError, request_id: str) -> TalkProblem:
    return TalkProblem(error.message, error.param)


class TalkAnswer:
    framing = Framing(lambda error, request_id: line(talk_problem(error, request_id)), b"", "application/x-ndjson")

    def __init__(self, turn: Turn) -> None:
        self._turn, self._reason = turn, ""

    def opening(self) -> bytes:
        return b""

    def frames(self, piece: Piece) -> bytes:
        self._reason = piece.said.end.reason if piece.said.end is not None else ""
        return line(Talked(piece.said.text)) if piece.said.text else b""

    def closing(self) -> bytes:
        return line(Talked(done=self._reason, tokens=self._turn.generation.num_output_tokens))

    def whole(self, pieces: Sequence[Piece]) -> Talked:
        (piece,) = pieces
        assert piece.said.end is not None
        return Talked(piece.said.text, piece.said.end.reason, self._turn.generation.num_output_tokens)


def own_name(param: str) -> str:
    return {"max_tokens": "most", "messages": "ask", "prompt": "ask", "truncate_prompt_tokens": ""}.get(param, param)


class TalkDialect:
    body = TalkRequest
    id_prefix = "talk-"

    def request(self, body: TalkRequest, model: ServedModel) -> TurnRequest:
        with naming_fields(own_name):
            params = SamplingParams.of_model(model.default_sampling, max_tokens=body.most)
        conversation = Conversation([{"role": "user", "content": body.ask}])
        return TurnRequest(params, conversation, is_stream=body.flow, origin=own_name)

    def answer(self, body: TalkRequest, turn: Turn, state: ServerState) -> TalkAnswer:
        return TalkAnswer(turn)


router = Router(error=TalkProblem, error_form=talk_problem)


@router.post("/talk", body=TalkRequest, answer=Talked, chunk=Talked, stream_type="application/x-ndjson")
async def talk(http: HttpRequest) -> Response:
    """Answer what is said."""
    return await respond(http, TalkDialect())


# ---- its test


class SayingClient(EndingClient):
    """Gives each request the same tokens, one by one."""

    def add_request(self, request: Request) -> None:
        text = b"Hi \xc3\xbc!"
        for number, byte in enumerate(text):
            end = Ended(
                0, time.monotonic(), 0, request.handle, request.request_id, 0, RequestStatus.FINISHED_LENGTH_CAPPED
            )
            events = Events([end] if number == len(text) - 1 else [])
            columns = (np.array([request.handle]), np.zeros(1, np.int32), np.ones(1, np.int32))
            self._outputs.put_nowait(EngineCoreOutputs(*columns, np.array([byte], np.int32), events))


def test_an_api_in_one_file_answers_whole_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ENDPOINTS", (*app.ENDPOINTS, *router.endpoints))

    async def ask(http: httpx.AsyncClient) -> None:
        answer = await http.post("/talk", json={"ask": "Hello"})
        assert (answer.status_code, answer.json()) == (200, {"say": "Hi ü!", "done": "length", "tokens": 6})
        answer = await http.post("/talk", json={"ask": "Hello", "flow": True})
        assert answer.headers["content-type"] == "application/x-ndjson"
        *pieces, last = map(json.loads, answer.text.splitlines())
        assert [piece["say"] for piece in pieces] == ["H", "i", " ", "ü", "!"]
        assert last == {"done": "length", "tokens": 6}
        refused: list[tuple[dict[str, Any], int, str]] = [
            ({"ask": "Hello", "most": -1}, 400, "most"),
            ({"ask": 1}, 400, "ask"),
            ({"ask": "a" * 9_999}, 400, "ask"),
            ({"ask": "Hello", "model": "none"}, 404, "model"),
        ]
        for body, status, field in refused:
            answer = await http.post("/talk", json=body)
            assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
            assert "truncate" not in answer.text
        assert "/talk" in (await http.get("/openapi.json")).json()["paths"]

    served(ask, client=SayingClient())
