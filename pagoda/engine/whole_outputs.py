"""WholeOutputs: run lists of prompts to their end on a SharedEngine, and return their outputs in the same order."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from pagoda.base.errors import CapacityError, RequestError
from pagoda.base.lora import LoRARequest
from pagoda.base.outputs import CompletionOutput, RequestOutput
from pagoda.base.pooling import PoolingParams
from pagoda.base.sampling_params import SamplingParams
from pagoda.engine.inputs.prompts import Prompt, text_of
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.shared_engine import Call, SharedEngine

logger = logging.getLogger("pagoda")

_BAR_DELAY_S = 1.0  # short work shows no bar


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt of a list, with its parameters.   prompt: or the reason why it could not be rendered."""

    prompt: Prompt | RequestError
    params: SamplingParams | PoolingParams
    priority: int = 0
    lora_request: LoRARequest | None = None


Refuse = Callable[[int, str, RequestError | CapacityError], RequestOutput]
"""Called with the index of a prompt that cannot be served, its request id and the reason; returns its output or raises
an error, which ends all requests of the list."""


class WholeOutputs:
    """Runs the prompts of one call in one batch with those of other threads' calls."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared

    def generate(self, asks: Sequence[Ask], use_tqdm: bool) -> list[RequestOutput]:
        """Return an output for each prompt; that of a prompt that cannot be served has `error` set.

        Raises RequestError or CapacityError if that is the only prompt.
        """

        def refuse(index: int, request_id: str, error: RequestError | CapacityError) -> RequestOutput:
            if len(asks) == 1:
                raise error
            logger.warning("prompt %d is not served: %s", index, error)
            return _refused(request_id, asks[index].prompt, error)

        outputs = self._run(asks, use_tqdm, refuse)
        if len(outputs) == 1 and outputs[0].error is not None and not any(o.token_ids for o in outputs[0].outputs):
            raise RequestError(outputs[0].error, "prompt")
        return outputs

    def pool(self, asks: Sequence[Ask], use_tqdm: bool) -> list[RequestOutput]:
        """Return an output for each prompt, all or none. Raises RequestError for the first that cannot be served."""

        def refuse(index: int, request_id: str, error: RequestError | CapacityError) -> RequestOutput:
            if not isinstance(error, RequestError) or len(asks) == 1:
                raise error
            raise RequestError(f"prompts[{index}]: {error}", error.param) from None

        return self._run(self._encoded(asks), use_tqdm, refuse)

    def _encoded(self, asks: Sequence[Ask]) -> list[Ask]:
        """Return the asks with the tokens of texts, which are encoded together."""
        prompts = [ask.prompt for ask in asks if not isinstance(ask.prompt, RequestError)]
        assert len(prompts) == len(asks), "prompts to pool are not rendered"
        with self._shared.entered():
            encoded = self._shared.engine.input_processor.tokenized(prompts, [ask.params for ask in asks])
        return [replace(ask, prompt=prompt) for ask, prompt in zip(asks, encoded, strict=True)]

    def _run(self, asks: Sequence[Ask], use_tqdm: bool, refuse: Refuse) -> list[RequestOutput]:
        with self._shared.entered():
            call = Call()
            outputs: dict[str, RequestOutput] = {}
            ids = [self._shared.new_id() for _ in asks]
            try:
                for index, (request_id, ask) in enumerate(zip(ids, asks, strict=True)):
                    try:
                        self._add(call, request_id, ask)
                    except (RequestError, CapacityError) as error:
                        outputs[request_id] = refuse(index, request_id, error)
                self._collect(call, outputs, use_tqdm)
            finally:
                self._shared.drop(call)
        results = [outputs[request_id] for request_id in ids]
        for output, ask in zip(results, asks, strict=True):
            output.lora_request = ask.lora_request
        return results

    def _add(self, call: Call, request_id: str, ask: Ask) -> None:
        if isinstance(ask.prompt, RequestError):
            raise ask.prompt
        lora = self._shared.find_adapter(ask.lora_request)
        self._shared.add(call, request_id, ask.prompt, ask.params, OutputKind.FINAL_ONLY, ask.priority, lora)

    def _collect(self, call: Call, outputs: dict[str, RequestOutput], use_tqdm: bool) -> None:
        """Wait until all requests of the call have finished; store their outputs in `outputs`."""
        disable = None if use_tqdm else True  # None: off when there is no terminal
        with tqdm(total=len(call.live), desc="Prompts", unit="prompt", disable=disable, delay=_BAR_DELAY_S) as bar:
            while (output := self._shared.next_output(call)) is not None:
                outputs[output.request_id] = output
                bar.update()


def _refused(request_id: str, prompt: Prompt | RequestError, error: Exception) -> RequestOutput:
    """Return the output of a prompt that was rejected."""
    shown = None if isinstance(prompt, RequestError) else text_of(prompt)
    ending = CompletionOutput(index=0, finish_reason="error")
    return RequestOutput(request_id, shown, outputs=[ending], finished=True, error=str(error))
