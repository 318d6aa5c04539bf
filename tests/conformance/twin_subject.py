"""The twin as a subject of the replay."""

from typing import Any

from tests.conformance.settings import request_of, settings_of
from tests.twin import TwinScheduler

Record = dict[str, Any]


class TwinSubject(TwinScheduler):
    """Build a TwinScheduler and its requests from the format; the twin already uses the replay's records."""

    def __init__(self, config: Record) -> None:
        settings = settings_of(config)
        super().__init__(
            settings.scheduler,
            settings.cache,
            settings.kv_groups,
            settings.num_blocks,
            settings.max_model_len,
            settings.encoder_decoder,
        )

    def add(self, request: Record) -> None:
        super().add(request_of(request, self.arrivals + 1, self.encoder_decoder))

    def state(self) -> Record:
        state = super().state()
        state["free_blocks"] = sum(state["free_blocks"])  # of all pools
        if len(self.memory.groups) == 1:
            state["blocks"] = {request_id: counts[0] for request_id, counts in state["blocks"].items()}
        return state
