"""Tokens and names that a recording has in place of real ones.

A made-up token is a keyed hash of the real one and all before it, with a key that is thrown away: texts cannot be found
from them, but equal beginnings stay equal, and so do blocks that requests share. It has 32 bits.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagoda.core.request import Request


def kind_of_end(request: Request, token: int) -> str | None:
    """Return which stop token of the request this is: "eos" or "stop"; None if it is none."""
    if token in request.eos_token_ids:
        return "eos"
    return "stop" if request.sampling is not None and token in request.sampling.stop_token_ids else None


@dataclass(slots=True)
class _Text:
    """Hashes of a request's texts.   prompt: of the whole prompt.   outputs: by sequence, after each of its tokens."""

    request: Request
    prompt: bytes = b""
    outputs: dict[int, list[bytes]] = field(default_factory=dict)


class MadeUpTexts:
    """The texts of unfinished requests, by their names in the recording.   with_tokens: show real tokens."""

    def __init__(self, *, with_tokens: bool) -> None:
        self._key, self._with_tokens = secrets.token_bytes(16), with_tokens
        self._texts: dict[str, _Text] = {}

    def __contains__(self, label: str) -> bool:
        return label in self._texts

    def _hashed(self, *parts: bytes) -> bytes:
        return hashlib.blake2b(b"".join(parts), key=self._key, digest_size=8).digest()

    def name(self, value: str | None) -> str | None:
        """Return a made-up name that is equal for equal names."""
        return value if value is None else self._hashed(value.encode()).hex()

    def vectors(self, embeds: np.ndarray) -> list[int]:
        """Return a number for each embedding, which is equal after equal beginnings. Less than 2^24: a float32."""
        state, numbers = b"", list[int]()
        for embedding in embeds:
            state = self._hashed(state, embedding.tobytes())
            numbers.append(int.from_bytes(state[:3], "little"))
        return numbers

    def _next(self, before: bytes, token: int) -> bytes:
        return self._hashed(before, token.to_bytes(8, "little"))

    def _shown(self, token: int, state: bytes) -> int:
        return token if self._with_tokens else int.from_bytes(state[:4], "little")

    def add(self, label: str, request: Request) -> tuple[list[int], list[list[int]]]:
        """Take a new request. Return its prompt and the outputs that it has already, as made up."""
        text = self._texts[label] = _Text(request)
        prompt: list[int] = []
        for token in request.prompt_token_ids.tolist():
            text.prompt = self._next(text.prompt, token)
            prompt.append(self._shown(token, text.prompt))
        prior = [self.put(label, sequence, 0, tokens) for sequence, tokens in enumerate(request.prior_output)]
        return prompt, prior

    def remove(self, label: str) -> None:
        self._texts.pop(label, None)

    def clear(self) -> None:
        self._texts.clear()

    def request(self, label: str) -> Request:
        return self._texts[label].request

    def put(self, label: str, sequence: int, position: int, tokens: Iterable[int]) -> list[int]:
        """Note that the sequence has these tokens from `position` on. Return them as made up.

        position: among those of prompt and output; in the prompt, it stands for the end of the prompt.
        """
        text = self._texts[label]
        output = text.outputs.setdefault(sequence, [])
        del output[max(position - text.request.num_prompt_tokens, 0) :]
        shown: list[int] = []
        for token in tokens:
            output.append(self._next(output[-1] if output else text.prompt, token))
            shown.append(self._shown(token, output[-1]))
        return shown

    def could_follow(self, label: str, sequence: int, tokens: Iterable[int]) -> list[int]:
        """Return tokens of which each could be the sequence's next one, as made up."""
        text = self._texts[label]
        output = text.outputs.get(sequence)
        before = output[-1] if output else text.prompt
        return [self._shown(token, self._next(before, token)) for token in tokens]

    def copy(self, label: str, sources: Iterable[tuple[int, int]]) -> None:
        """Sequences get the outputs that others, or they themselves, had before.   sources: (source, sequence)."""
        outputs = self._texts[label].outputs
        outputs.update([(sequence, outputs.get(source, []).copy()) for source, sequence in sources])
