"""The types of prompts; tell one prompt (or conversation) from a list of them, and name mistakes."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, TypeVar

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.core.request import MediaItem, PromptEmbeds
from pagoda.engine.inputs.infill import Infill
from pagoda.engine.inputs.prompt_embeds import EncodedEmbeds

P = TypeVar("P")

_SIZE_OF_IMAGES = 2**20
"""So much work are a prompt's images, whatever their size."""


class TextPrompt(TypedDict):
    """A prompt as text, in an object.

    multi_modal_data: {"image": one, or a list}, for the places that the text has for images.
    """

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids, in an object; `prompt` is its text, for display only.

    media, embeds: the images and the embeddings of a rendered conversation.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    media: NotRequired[tuple[MediaItem, ...]]
    embeds: NotRequired[PromptEmbeds | None]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings; see `read_embeds`. `prompt` is its text, for display only."""

    prompt_embeds: Any
    prompt: NotRequired[str]


class InfillPrompt(TypedDict):
    """A gap in a text, which the output is to fill."""

    infill: Infill


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt | InfillPrompt
"""The types of a single prompt."""


def text_of(prompt: Prompt) -> str | None:
    """Return the prompt's text, or None if only token ids are given."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def is_embeds(prompt: Prompt) -> bool:
    """Return whether the prompt is given as embeddings."""
    return isinstance(prompt, Mapping) and "prompt_embeds" in prompt


def size_of(prompt: Prompt) -> int:
    """Return how much work reading the prompt is: its characters, or the bytes of its embeddings or its images."""
    if isinstance(prompt, Mapping) and (prompt.get("multi_modal_data") or prompt.get("media")):
        return _SIZE_OF_IMAGES
    if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
        given = prompt["prompt_embeds"]
        return len(given.data) if isinstance(given, EncodedEmbeds) else int(getattr(given, "nbytes", 0))
    if isinstance(prompt, Mapping) and "infill" in prompt:
        return prompt["infill"].num_chars
    return len(text_of(prompt) or "")


def is_one_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is a single prompt: a string, an object, or a flat list of numbers.

    An empty list is an empty batch. Raises RequestError for what cannot be indexed, such as a set.
    """
    if isinstance(prompts, str | bytes | Mapping):
        return True
    if not _is_indexed(prompts):
        raise RequestError(f"prompts is {type(prompts).__name__}, expected a prompt or a list of them", "prompt")
    return len(prompts) > 0 and not _is_item(prompts[0])


def is_one_conversation(messages: Any) -> bool:
    """Return whether `messages` is a single conversation: a list of objects, or an empty list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return True
    return len(messages) == 0 or not isinstance(messages[0], Sequence) or isinstance(messages[0], str | bytes)


def check_prompt(prompt: Any, index: int | None) -> None:
    """Raise RequestError if `prompt` is not of a prompt's type; its content is checked later.

    index: the prompt's position in its list, for the message; None if it is the only one.
    """
    name = "the prompt" if index is None else f"prompts[{index}]"
    if isinstance(prompt, Mapping):
        if "role" in prompt:
            raise RequestError(f"{name} is a chat message, {abbreviate(dict(prompt))}: pass messages to chat", "prompt")
        if not {"prompt", "prompt_token_ids", "prompt_embeds"} & prompt.keys():
            raise RequestError(
                f"{name} is an object with {abbreviate(sorted(map(str, prompt)))}, expected prompt, prompt_token_ids "
                "or prompt_embeds",
                "prompt",
            )
        if {"prompt_token_ids", "prompt_embeds"} <= prompt.keys():
            raise RequestError(f"{name} has both prompt_token_ids and prompt_embeds: give one of them", "prompt")
        return
    if isinstance(prompt, str):
        return
    if isinstance(prompt, bytes) or not _is_indexed(prompt):
        raise RequestError(
            f"{name} is {type(prompt).__name__}, expected a string, a list of token ids or an object", "prompt"
        )
    if len(prompt) and _is_item(prompt[0]):
        if isinstance(prompt[0], Mapping) and "role" in prompt[0]:
            raise RequestError(f"{name} is a list of chat messages: pass them to chat", "prompt")
        raise RequestError(f"{name} is a list of {type(prompt[0]).__name__}, expected a list of token ids", "prompt")


def as_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or several as a list. Raises RequestError as `check_prompt` does."""
    each = [prompts] if is_one_prompt(prompts) else list(prompts)
    for index, prompt in enumerate(each):
        check_prompt(prompt, index if len(each) > 1 else None)
    return each


def for_each(params: Any, count: int, kind: type[P], name: str) -> Sequence[P]:
    """Return parameters for each of `count` prompts, given as None, one for all, or a list.

    kind: what they must be.   name: of the argument. Raises RequestError.
    """
    if params is None:
        params = kind()
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"{name} is {type(params).__name__}, expected {kind.__name__} or a list of them", name)
    if len(params) != count:
        raise RequestError(f"{len(params)} {name} for {count} prompts", name)
    for index, one in enumerate(params):
        if not isinstance(one, kind):
            raise RequestError(f"{name}[{index}] is {type(one).__name__}, expected {kind.__name__}", name)
    return params


def check_conversation(messages: Any, index: int | None) -> None:
    """Raise RequestError if `messages` is not a list of objects; their content is checked later."""
    name = "messages" if index is None else f"messages[{index}]"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"{name} is {type(messages).__name__}, expected a list of objects with a role and content", "messages"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{name}[{number}] is {type(message).__name__}, expected an object with a role and content; "
                "generate takes prompts without roles",
                "messages",
            )


def _is_indexed(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _is_item(value: Any) -> bool:
    """Return whether a list that begins with `value` is a list of prompts or messages, not of token ids."""
    return isinstance(value, str | bytes | Mapping) or hasattr(value, "__len__")
