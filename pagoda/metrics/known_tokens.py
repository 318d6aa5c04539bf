"""KnownTokens: what a request's tokens are, to explain later what another one did not find in the prefix cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagoda.core.request import Request

_MOST = 16_384
"""Of a longer request, the tokens after so many are not known."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownTokens:
    """The first tokens of a request: of its prompt, then of its first output. int32

    scope: cache salt and adapter, which two requests must have in common to share blocks.
    media: (offset, content hash) of what encoders read.
    """

    token_ids: np.ndarray
    scope: tuple[str | None, tuple[str, ...]]
    media: frozenset[tuple[int, str]]

    @staticmethod
    def of(request: Request, output_ids: Sequence[int]) -> "KnownTokens | None":
        """Return those of a request; None if tokens do not say what its blocks hold."""
        if request.prompt_embeds is not None or request.encoder_len:
            return None
        prompt = request.prompt_token_ids[:_MOST]
        token_ids = np.concatenate((prompt, np.array(output_ids[: _MOST - len(prompt)], np.int32)))
        adapter = request.lora.identity if request.lora is not None else ()
        media = frozenset((item.offset, item.content_hash) for item in request.media)
        return KnownTokens(token_ids, (request.cache_salt, adapter), media)

    def num_common(self, other: "KnownTokens") -> int:
        """Return how many tokens both begin with; 0 if they could share none."""
        if self.scope != other.scope:
            return 0
        shorter = min(len(self.token_ids), len(other.token_ids))
        differ = self.token_ids[:shorter] != other.token_ids[:shorter]
        num_equal = int(differ.argmax()) if differ.any() else shorter
        return min((num_equal, *(offset for offset, _ in self.media ^ other.media)))
