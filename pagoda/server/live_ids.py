"""LiveIds: the ids of what runs."""

import contextlib
from collections.abc import Iterator

from pagoda.server.errors import ApiError


class LiveIds:
    """Ids of running generations, by API key. Different keys may use the same id, and cannot see each other's.

    The engine's ids are per prompt, made of the key's number, the request's id and the prompt's number.
    """

    def __init__(self) -> None:
        self._engine_ids: dict[tuple[str, str], tuple[str, ...]] = {}
        self._prompts: dict[tuple[str, str], str] = {}

    def find_in_use(self, key: str, request_id: str, num_prompts: int) -> str | None:
        """Return an id that is in use already, of those that a request of this id would have; None if it is free."""
        for name in (request_id, *_prompt_ids(request_id, num_prompts)):
            if (key, name) in self._engine_ids or (key, name) in self._prompts:
                return name
        return None

    @contextlib.contextmanager
    def reserve(self, key: str, request_id: str, num_prompts: int) -> Iterator[tuple[str, ...]]:
        """Reserve an id during the block; yield the engine's id of each prompt. Raises ApiError (400) if in use."""
        names = _prompt_ids(request_id, num_prompts)
        if (used := self.find_in_use(key, request_id, num_prompts)) is not None:
            raise ApiError(400, f"request id {used!r} is in use", "request_id")
        engine_ids = {name: f"{prefix_of(key)}{name}" for name in names or [request_id]}
        self._engine_ids[key, request_id] = tuple(engine_ids.values())
        self._prompts.update({(key, name): engine_ids[name] for name in names})
        try:
            yield tuple(engine_ids.values())
        finally:
            del self._engine_ids[key, request_id]
            for name in names:
                del self._prompts[key, name]

    def add(self, key: str, request_id: str, engine_id: str) -> None:
        """Add an engine's id to those of a reserved id."""
        self._engine_ids[key, request_id] += (engine_id,)

    def find(self, request_ids: set[str] | None, key: str | None) -> list[tuple[str, tuple[str, ...]]]:
        """Return (id, engine ids) of the running requests or single prompts with these ids. None: all requests."""
        if request_ids is None:
            return [(name, ids) for (owner, name), ids in self._engine_ids.items() if key in (None, owner)]
        named = [*self._engine_ids.items(), *((name, (one,)) for name, one in self._prompts.items())]
        return [(name, ids) for (owner, name), ids in named if name in request_ids and key in (None, owner)]


def prefix_of(key: str) -> str:
    """Return with what the engine's ids of a key's requests begin; "" if there are no keys."""
    return f"{key}/" if key else ""


def _prompt_ids(request_id: str, num_prompts: int) -> list[str]:
    """Return the ids of the single prompts of a request that has several."""
    return [f"{request_id}-{index}" for index in range(num_prompts)] if num_prompts > 1 else []
