"""Planned routes: they return 501, so that clients can distinguish them from a mistyped path and do not retry."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.server.answers import ERRORS
from pagoda.server.errors import error_response

router = APIRouter()

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """paths: including all paths below them."""

    feature: str
    paths: tuple[str, ...]


PLANNED = (
    PlannedRoute("the responses API", ("/v1/responses",)),
    PlannedRoute("the messages API", ("/v1/messages",)),
    PlannedRoute("files", ("/v1/files",)),
    PlannedRoute("batches", ("/v1/batches",)),
    PlannedRoute("transcription", ("/v1/audio/transcriptions",)),
    PlannedRoute("speech translation", ("/v1/audio/translations",)),
    PlannedRoute("the dashboard", ("/dashboard",)),
    PlannedRoute("traces", ("/trace",)),
)


def _refusing(route: PlannedRoute) -> Callable[[Request], Awaitable[Response]]:
    async def answer(http: Request) -> Response:
        return error_response(501, f"{route.feature}: not available yet on this server")

    return answer


for _route in PLANNED:
    for _path in _route.paths:
        _summary = f"Not available yet: {_route.feature}"
        router.add_api_route(
            _path, _refusing(_route), methods=["POST"], status_code=501, responses={501: ERRORS[501]}, summary=_summary
        )
        for _pattern in (_path, f"{_path}/{{rest:path}}"):
            router.add_api_route(_pattern, _refusing(_route), methods=_METHODS, include_in_schema=False)
