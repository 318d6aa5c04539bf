"""PromptEncoder: turn prompts into token ids, within the engine's limits."""

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagoda.base.errors import RequestError
from pagoda.base.text import check_encodable
from pagoda.core.request import PLACEHOLDER_ID, MediaItem, PromptEmbeds
from pagoda.engine.images.source import images_of_prompt
from pagoda.engine.inputs.image_prompts import ImagePrompts
from pagoda.engine.inputs.infill import Infill, InfillWriter
from pagoda.engine.inputs.input_limits import InputLimits, SourceFacts
from pagoda.engine.inputs.prompt_embeds import EncodedEmbeds, check_embeds_are_on, read_embeds
from pagoda.engine.inputs.prompts import Prompt
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.models.base import check_finite


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt as the model reads it, not yet validated.

    embeds: in place of some tokens; None: all are tokens.
    name: what errors call it.   media: encoder inputs, with their features; EngineCore checks whether the model reads
    them.   encoder_len: their tokens, if the model is an encoder-decoder, else 0.
    """

    token_ids: Sequence[int] | np.ndarray
    embeds: PromptEmbeds | None = None
    name: str = "prompt"
    media: tuple[MediaItem, ...] = ()
    encoder_len: int = 0

    def cut_to(self, num_tokens: int, side: str) -> PromptEmbeds | None:
        """Return the embeddings that remain if `num_tokens` positions do.   side: see `PromptEncoder.checked_ids`."""
        if self.embeds is None:
            return None
        start = 0 if side == "right" else len(self.token_ids) - num_tokens
        return self.embeds.within(start, start + num_tokens) or None


class PromptEncoder:
    """Tokenises texts and validates token ids. Keeps nothing of them."""

    def __init__(self, tokenizer: Tokenizer, limits: InputLimits, images: ImagePrompts | None = None) -> None:
        """images: puts images into prompts, None for a model that takes text only."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._images = images

    def read(self, prompt: Prompt, add_special_tokens: bool = True, keep: int | None = None) -> EncodedPrompt:
        """Return any prompt as the model reads it; see `token_ids_of`. Raises RequestError if it is not a prompt."""
        if isinstance(prompt, Mapping) and "infill" in prompt:
            return EncodedPrompt(self._infill_ids(prompt["infill"]))
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            return self._read_with_images(prompt, add_special_tokens)
        if not isinstance(prompt, Mapping) or "prompt_embeds" not in prompt:
            media = prompt.get("media", ()) if isinstance(prompt, Mapping) else ()
            embeds: PromptEmbeds | None = prompt.get("embeds") if isinstance(prompt, Mapping) else None
            check_finite(media)
            token_ids = self.token_ids_of(prompt, add_special_tokens, keep)
            if self._limits.source is not None:
                return self._as_source(token_ids, self._limits.source)
            if embeds is not None and keep is not None:
                embeds = embeds.within(0, keep) or None
            return EncodedPrompt(token_ids, embeds, media=media)
        given = prompt["prompt_embeds"]
        name = given.name if isinstance(given, EncodedEmbeds) else "prompt_embeds"
        check_embeds_are_on(self._limits.embeds_size, name)
        embeds = PromptEmbeds.of_first(read_embeds(given, self._limits.embeds_size, name)[:keep])
        return EncodedPrompt(np.full(len(embeds), PLACEHOLDER_ID, np.int32), embeds, name)

    def _infill_ids(self, gap: Infill) -> list[int]:
        for text in (gap.prefix, gap.suffix, *itertools.chain.from_iterable(gap.files)):
            self._limits.of_request.check_text(text, "prompt")
            check_encodable("prompt", text)
        if self.infill is None:
            raise RequestError("the vocabulary of this model has no tokens for filling in the middle", "prompt")
        return self.infill.write(gap, self._limits.max_model_len)

    @functools.cached_property
    def infill(self) -> InfillWriter | None:
        """What writes gaps for this model; None if its vocabulary has no tokens for that."""
        return InfillWriter.of(self._tokenizer)

    def _as_source(self, token_ids: Sequence[int] | np.ndarray, source: SourceFacts) -> EncodedPrompt:
        """Return a prompt for the encoder, with the beginning of an answer as the decoder's."""
        ids, most = self._checked(token_ids), source.max_tokens
        if not 1 <= len(ids) <= most:
            raise _too_long_for(source, f"{len(ids)} tokens")
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        item = MediaItem(f"text/{digest}", 0, len(ids), ids.astype(np.float32)[:, None])
        return EncodedPrompt(source.start, media=(item,), encoder_len=len(ids))

    def _read_with_images(self, prompt: Mapping[str, Any], add_special_tokens: bool) -> EncodedPrompt:
        """Return a Python program's text with the images of its `multi_modal_data` in their places."""
        sources, text = images_of_prompt(prompt["multi_modal_data"]), prompt.get("prompt")
        if self._images is None:
            raise RequestError("multi_modal_data: this model takes text only", "multi_modal_data")
        if not isinstance(text, str):
            raise RequestError("multi_modal_data needs a prompt as text, with a place for each image", "prompt")
        self._images.check_count(sources)
        most = self._limits.max_model_len
        written, features = self._images.put(text, sources, most, is_marked=False, is_trusted=True)
        token_ids = self.encode(written, add_special_tokens)
        return EncodedPrompt(token_ids, media=self._images.media_of(token_ids, features))

    def token_ids_of(
        self, prompt: Prompt, add_special_tokens: bool = True, keep: int | None = None
    ) -> Sequence[int] | np.ndarray:
        """Return the prompt's token ids, not yet validated. Raises RequestError if it is not a prompt.

        keep: this many, from the start; of a text, the special tokens around it are all kept.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise RequestError(f"a prompt object needs prompt or prompt_token_ids, got {sorted(prompt)}", "prompt")
        if isinstance(prompt, str):
            return self._cut(self.encode(prompt, add_special_tokens), add_special_tokens, keep)
        if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
            return prompt if keep is None else prompt[:keep]
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", "prompt")

    def _cut(self, token_ids: list[int], add_special_tokens: bool, keep: int | None) -> list[int]:
        """Return the first `keep` tokens of a text, the special tokens after it among them."""
        if keep is None or len(token_ids) <= keep:
            return token_ids
        after = self._tokenizer.facts.added.after if add_special_tokens else ()
        return [*token_ids[: max(keep - len(after), 0)], *after][:keep]

    def token_ids_of_all(self, texts: Sequence[str], keep: Sequence[int | None]) -> list[list[int]]:
        """Return `token_ids_of` of several texts, which are encoded together.   keep: of each."""
        for text in texts:
            self._limits.of_request.check_text(text, "prompt")
            check_encodable("prompt", text)
        found = self._tokenizer.encode_batch(texts)
        return [self._cut(token_ids, True, most) for token_ids, most in zip(found, keep, strict=True)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""
        self._limits.of_request.check_text(text, "prompt")
        check_encodable("prompt", text)
        return self._tokenizer.encode(text, add_special_tokens)

    def checked_ids(
        self, prompt: EncodedPrompt, truncate: int | None, num_output: int = 1, side: str = "left"
    ) -> np.ndarray:
        """Return the validated prompt's token ids: int32 [num_prompt_tokens]. Raises RequestError.

        truncate: as SamplingParams.truncate_prompt_tokens.
        num_output: tokens for which there must be room: one of output, and those of a prompt adapter.
        side: where tokens are cut off, "left" (at the beginning) or "right".
        """
        token_ids = prompt.token_ids
        most = self._limits.max_model_len - num_output
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: it needs at least one token", "prompt")
        if truncate is not None:
            kept = most if truncate == -1 else truncate
            token_ids = token_ids[:kept] if side == "right" else token_ids[-kept:]
        if len(token_ids) > most:
            raise self._too_long(f"{len(token_ids)} tokens", num_output, prompt.name)
        return self._checked(token_ids)

    def _checked(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return token ids as int32, all of which the vocabulary has."""
        ids, limits = np.asarray(token_ids), self._limits
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("a prompt is a string or a flat list of integer token ids", "prompt")
        outside = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
        if len(outside):
            at = int(outside[0])
            raise RequestError(
                f"prompt token {at} is {int(ids[at])}, out of vocabulary (0 .. {limits.vocab_size - 1})", "prompt"
            )
        return ids.astype(np.int32)

    def check_length(self, text: str | None, num_output: int = 1) -> None:
        """Raise RequestError for a text that certainly has too many tokens, without tokenising it.

        num_output: tokens for which there must be room.
        """
        bound = self._tokenizer.facts.length_bound
        if text is None or bound is None:
            return
        source, longest = self._limits.source, self._limits.longest_prompt
        most = longest if source is not None else longest - num_output
        if len(text) <= longest:
            return
        # A text beyond the bound on its size is refused anyway, before it is tokenised.
        looked_at = text[: self._limits.of_request.text_bytes + 1]
        if bound.min_tokens(looked_at, enough=most + 1) > most:
            size = f"at least {most + 1} tokens ({len(text)} characters)"
            raise _too_long_for(source, size) if source is not None else self._too_long(size, num_output)

    def _too_long(self, size: str, num_output: int, name: str = "prompt") -> RequestError:
        most = f"{self._limits.max_model_len} tokens" + (" (max_model_len), output included" if num_output else "")
        if num_output > 1:
            most += f", and the prompt adapter takes {num_output - 1} tokens of it"
        # Clients recognise OpenAI's words for it.
        return RequestError(
            f"This model's maximum context length is {most}. However, the prompt has {size}. Please reduce the length "
            "of the input prompt, or set truncate_prompt_tokens.",
            name,
        )


def _too_long_for(source: SourceFacts, size: str) -> RequestError:
    text = f"the prompt has {size}; this model's encoder reads 1 to {source.max_tokens}: shorten it"
    return RequestError(f"{text}, or set truncate_prompt_tokens", "prompt")
