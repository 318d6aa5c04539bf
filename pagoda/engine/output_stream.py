"""OutputStream: the deltas of one request of a SharedEngine, as an iterator."""

from collections.abc import Iterator

from pagoda.base.errors import RequestError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import RequestOutput
from pagoda.engine.shared_engine import Call, SharedEngine


class OutputStream(Iterator[RequestOutput]):
    """The deltas of one request. `close`, or dropping the last reference, aborts the request."""

    def __init__(self, shared: SharedEngine, call: Call, lora_request: LoRARequest | None = None) -> None:
        """lora_request: the adapter that the request uses; its outputs have it."""
        self._shared = shared
        self._call = call
        self._lora_request = lora_request
        self._has_tokens = False

    def __next__(self) -> RequestOutput:
        """Return the next delta.

        Raises RequestError if the engine ends the request before its first token, UsageError if the LLM was closed
        meanwhile, WorkerDied if its engine died.
        """
        try:
            with self._shared.entered():
                output = self._shared.next_output(self._call)
        except BaseException:
            self.close()
            raise
        if output is None:
            raise StopIteration
        output.lora_request = self._lora_request
        self._has_tokens = self._has_tokens or any(part.token_ids for part in output.outputs)
        if output.error is not None and not self._has_tokens:
            raise RequestError(output.error, "prompt")
        return output

    def close(self) -> None:
        """Abort the request if it is still running. Idempotent."""
        self._shared.abandon(self._call)

    def __del__(self) -> None:
        if self._call.live:
            self._shared.abandon(self._call)
