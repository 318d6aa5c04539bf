"""Log-probabilities in the formats of OpenAI's two APIs."""

from collections.abc import Callable, Sequence

from pagoda.base.outputs import Logprob
from pagoda.server.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LogprobDicts = Sequence[dict[int, Logprob] | None]


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: LogprobDicts,
    num_top: int,
    offset: int,
    text_of: Callable[[int], str],
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Return the `logprobs` object of a text completion, and the text offset after it.

    offset: of the first token's text.   text_of: returns the text of a token without an entry (a prompt's first one).
    as_ids: write tokens as "token_id:ID"; offsets are still those of their texts.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        text = _text(token_id, entry) if entry is not None else text_of(token_id)
        tokens.append(_id_text(token_id) if as_ids else text)
        offsets.append(offset)
        offset += len(text)
        if entry is None:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(_finite(entry[token_id].logprob))
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[: max(num_top, 1)]
        top.append({_shown(i, entry, as_ids): _finite(value.logprob) for i, value in best} if num_top else None)
    return CompletionLogprobs(tokens, chosen, top, offsets), offset


def chat_logprobs(token_ids: Sequence[int], logprobs: LogprobDicts, num_top: int, as_ids: bool = False) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice.   as_ids: write tokens as "token_id:ID"; `bytes` is the text."""
    content: list[ChatLogprob] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        if entry is None:
            continue
        best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_top]
        top = [TopLogprob(*_chat_entry(candidate, entry, as_ids)) for candidate, _ in best]
        content.append(ChatLogprob(*_chat_entry(token_id, entry, as_ids), top))
    return ChatLogprobs(content)


def prompt_logprobs(logprobs: LogprobDicts) -> PromptLogprobs:
    """Return, per prompt token, token id -> its log-probability; None for the first."""
    return [
        None
        if entry is None
        else {str(i): PromptLogprob(_finite(v.logprob), v.rank, v.decoded_token) for i, v in entry.items()}
        for entry in logprobs
    ]


def _chat_entry(token_id: int, entry: dict[int, Logprob], as_ids: bool) -> tuple[str, float, list[int]]:
    """Return the token, log-probability and bytes of one candidate."""
    text = _text(token_id, entry)
    return _shown(token_id, entry, as_ids), _finite(entry[token_id].logprob), list(text.encode())


def _text(token_id: int, entry: dict[int, Logprob]) -> str:
    decoded = entry[token_id].decoded_token
    return decoded if decoded is not None else _id_text(token_id)


def _shown(token_id: int, entry: dict[int, Logprob], as_ids: bool) -> str:
    return _id_text(token_id) if as_ids else _text(token_id, entry)


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(value: float) -> float:
    """Return the value with -inf replaced by -9999.0, as OpenAI does: JSON has no infinity."""
    return max(value, -9999.0)
