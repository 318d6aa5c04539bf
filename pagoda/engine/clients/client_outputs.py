"""What all clients share: the outputs of steps."""

import asyncio

from pagoda.base.errors import PagodaError
from pagoda.core.scheduler_output import EngineCoreOutputs


class ClientOutputs:
    """The part of an EngineCoreClient that all clients share."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[EngineCoreOutputs | PagodaError] = asyncio.Queue()

    async def next_outputs(self) -> EngineCoreOutputs:
        """Return the next step's outputs, to a single consumer. Raises the error that ended the engine for good."""
        item = await self._outputs.get()
        if isinstance(item, PagodaError):
            raise item
        return item
