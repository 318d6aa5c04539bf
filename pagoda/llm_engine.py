"""LLMEngine: an engine whose steps the caller runs, by vLLM's names."""

from collections.abc import Iterable
from typing import Self

from pagoda.assembly.assemble import text_engine_builder
from pagoda.base.config import EngineConfig
from pagoda.base.engine_args import EngineArgs, settings_of
from pagoda.base.lora import LoRARequest
from pagoda.engine.inputs.params_preparer import Params
from pagoda.engine.inputs.prompts import Prompt, check_prompt, text_of
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.text_engine import TextEngine


class LLMEngine(TextEngine):
    """A loaded model whose steps the caller runs, all on one thread.

    engine = LLMEngine.from_engine_args(EngineArgs(model="smollm2-135m"))
    engine.add_request("first", "The sky is", SamplingParams(max_tokens=20))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.outputs[0].text)
    engine.shutdown()

    Nothing runs between two calls of `step`. LLM and AsyncLLM call it on a thread of their own.
    """

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs | EngineConfig) -> Self:
        """Load a model. Raises ConfigError for settings that cannot be used, CapacityError if it does not fit."""
        built = text_engine_builder(settings_of(engine_args))()
        return cls(built.core, built.input_processor)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request, and return its id.

        params: SamplingParams or PoolingParams; the `output_kind` of the former says what `step` returns: everything so
            far (the default), deltas, or the end. A vector is in the output's `pooled`.
        Raises RequestError for a request that cannot be served, and for an id that is in use.
        """
        check_prompt(prompt, None)
        lora = self.input_processor.find_adapter(lora_request) if lora_request is not None else None
        request = self.prepare(request_id, prompt, params, priority=priority, cache_salt=cache_salt, lora=lora)
        self.add(request, getattr(params, "output_kind", None) or OutputKind.CUMULATIVE, text_of(prompt))
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End one request or several, without a last output. Ignore unknown ids."""
        self.abort([request_ids] if isinstance(request_ids, str) else list(request_ids))
