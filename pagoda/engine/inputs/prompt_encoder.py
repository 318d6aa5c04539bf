"""PromptEncoder: turn prompts into token ids, within the engine's limits."""

from collections.abc import Mapping, Sequence

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.text import check_encodable
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.tokenizers.tokenizer import Tokenizer


class PromptEncoder:
    """Tokenises texts and validates token ids. Keeps nothing of them.

    `cancellation` in its methods: ends the work early; they then raise Cancelled.
    """

    def __init__(self, tokenizer: Tokenizer, limits: InputLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def token_ids_of(
        self, prompt: Prompt, add_special_tokens: bool = True, cancellation: Cancellation | None = None
    ) -> Sequence[int] | np.ndarray:
        """Return the prompt's token ids, not yet validated. Raises RequestError if it is not a prompt."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise RequestError(f"a prompt object needs prompt or prompt_token_ids, got {sorted(prompt)}", "prompt")
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens, cancellation)
        if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
            return prompt
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", "prompt")

    def encode(self, text: str, add_special_tokens: bool = True, cancellation: Cancellation | None = None) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""
        self._limits.of_request.check_text(text, "prompt")
        check_encodable("prompt", text)
        return self._tokenizer.encode(text, add_special_tokens, cancellation)

    def checked_ids(self, token_ids: Sequence[int] | np.ndarray, truncate: int | None) -> np.ndarray:
        """Return the validated prompt: int32 [num_prompt_tokens]. Raises RequestError.

        truncate: as SamplingParams.truncate_prompt_tokens.
        """
        limits = self._limits
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: it needs at least one token", "prompt")
        if truncate is not None:
            token_ids = token_ids[-(limits.max_model_len - 1 if truncate == -1 else truncate) :]
        if len(token_ids) >= limits.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens")
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("a prompt is a string or a flat list of integer token ids", "prompt")
        outside = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
        if len(outside):
            at = int(outside[0])
            raise RequestError(
                f"prompt token {at} is {int(ids[at])}, outside the vocabulary of {limits.vocab_size}", "prompt"
            )
        return ids.astype(np.int32)

    def check_length(self, text: str | None) -> None:
        """Raise RequestError for a text that certainly has too many tokens, without tokenising it."""
        bound = self._tokenizer.facts.length_bound
        if text is None or bound is None:
            return
        most = self._limits.max_model_len
        if len(text) <= most:
            return
        # A text beyond the bound on its size is refused anyway, before it is tokenised.
        looked_at = text[: self._limits.of_request.text_bytes + 1]
        if bound.min_tokens(looked_at, enough=most) >= most:
            raise self._too_long(f"at least {most} tokens ({len(text)} characters)")

    def _too_long(self, size: str) -> RequestError:
        most = self._limits.max_model_len
        return RequestError(
            f"the prompt has {size}, but max_model_len is {most}, output included; "
            "shorten it, or set truncate_prompt_tokens",
            "prompt",
        )
