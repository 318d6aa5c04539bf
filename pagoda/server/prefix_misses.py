"""Why the prefix cache had no more of a prompt: where the prompt begins to differ from the request it is most like."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from pagoda.metrics.known_tokens import KnownTokens

_TOKENS_BEFORE = 16


class PrefixMiss(Struct, kw_only=True):
    """Where a prompt begins to differ from the earlier request, of the caller's, that begins most like it.

    position: of the first token that differs, from 0.   block: of those at whose ends hits end, which has it, from 0.
    like: the other request.
    token_id, token: there, and its text; like_token_id, like_token: those of the other request. Missing where that has
    no token.   before: the end of the text that both have in front of it.   kind, what: why no more was cached, and the
    same in words.
    """

    like: str
    position: int
    block: int
    token_id: int | UnsetType = UNSET
    token: str | UnsetType = UNSET
    like_token_id: int | UnsetType = UNSET
    like_token: str | UnsetType = UNSET
    before: str | UnsetType = UNSET
    kind: Literal["differs", "continues", "other_media", "not_kept"] = "differs"
    what: str


def explain_miss(
    tokens: KnownTokens,
    num_prompt_tokens: int,
    num_cached: int,
    block_size: int,
    earlier: Iterable[tuple[str, KnownTokens | None]],
    text_of: Callable[[Sequence[int]], str],
) -> PrefixMiss | None:
    """Return why no more than `num_cached` tokens were found; None if all were, or no earlier request begins alike.

    block_size: hits end at multiples of so many tokens.
    earlier: requests that came before, by name.   text_of: returns the text of token ids.
    """
    if num_cached >= (num_prompt_tokens - 1) // block_size * block_size:  # the last token is always computed
        return None
    position, like, known = 0, "", None
    for name, other in earlier:
        if other is not None and (common := min(tokens.num_common(other), num_prompt_tokens)) > position:
            position, like, known = common, name, other
    if known is None:
        return None
    miss = PrefixMiss(like=like, position=position, block=position // block_size, what="")
    is_end = position >= len(known.token_ids)
    if not is_end and position < num_prompt_tokens:
        miss.token_id, miss.like_token_id = int(tokens.token_ids[position]), int(known.token_ids[position])
        miss.token, miss.like_token = text_of([miss.token_id]), text_of([miss.like_token_id])
        miss.before = text_of(tokens.token_ids[max(0, position - _TOKENS_BEFORE) : position].tolist())
    could = min(position - is_end, num_prompt_tokens - 1) // block_size * block_size
    if could > num_cached:
        miss.kind = "not_kept"
        miss.what = (
            f"its first {position} tokens are those of {like}, of which {num_cached} were cached: the blocks of the "
            "others were not computed yet, or hold something else by now"
        )
    elif is_end:
        miss.kind = "continues"
        miss.what = f"it goes on where {like} ends, at token {position} (block {miss.block})"
    elif miss.token_id == miss.like_token_id:
        miss.kind = "other_media"
        miss.what = f"at token {position} (block {miss.block}) it has another image or sound than {like}"
    else:
        miss.what = (
            f"it differs from {like} from token {position} on (block {miss.block}): {miss.token!r} here, "
            f"{miss.like_token!r} there"
        )
    return miss
