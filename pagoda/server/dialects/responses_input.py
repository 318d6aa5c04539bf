"""How the items of a conversation in OpenAI's Responses become messages for a chat template."""

from collections.abc import Sequence
from typing import Any

from pagoda.base.errors import RequestError
from pagoda.server.conversation import Conversation
from pagoda.server.dialects.responses_bodies import InputItem, InputPart, ResponsesRequest
from pagoda.server.dialects.transcript import Transcript
from pagoda.server.thinking import Thinking

_OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "",
}


class ItemsTranscript(Transcript):
    """The messages of a conversation."""

    def __init__(self, body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> None:
        """earlier: items before those of the body."""
        super().__init__()
        if body.instructions:
            self.add_system("instructions", body.instructions)
        for item in earlier:
            self._add_item("previous_response_id", item)
        given = body.input
        if isinstance(given, str) or not given:
            self.add("input", {"role": "user", "content": given or ""})
        else:
            for index, item in enumerate(given):
                self._add_item(f"input[{index}]", item)

    def origin(self, param: str) -> str:
        """Return the caller's name of a field."""
        return _OWN_NAMES.get(param, super().origin(param))

    def _add_item(self, place: str, item: InputItem) -> None:
        match item.type or ("message" if item.role is not None else "item_reference"):
            case "message":
                self._add_message(place, item)
            case kind:
                raise RequestError(f"{place}: this server does not support items of type {kind!r:.80}", place)

    def _add_message(self, place: str, item: InputItem) -> None:
        parts = _parts(item.content or "", f"{place}.content")
        match item.role:
            case "user":
                self.add_parts(place, parts or [{"type": "text", "text": ""}])
            case "assistant":
                self.add(place, {"role": "assistant", "content": _text(parts, place)})
            case "system" | "developer":
                self.add_system(place, _text(parts, place))
            case role:
                where = f"{place}.role"
                raise RequestError(f"{where}: expected user, assistant, system or developer, got {role!r:.80}", where)


def _text(parts: Sequence[dict[str, Any]], place: str) -> str:
    for part in parts:
        if "text" not in part:
            raise RequestError(f"{place}.content: only messages of the user may have images", f"{place}.content")
    return "\n".join(part["text"] for part in parts)


def _parts(content: str | Sequence[InputPart], place: str) -> list[dict[str, Any]]:
    """Return content as parts of a message. Raises RequestError for other parts than texts and images."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(content):
        match part.type:
            case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
                parts.append({"type": "text", "text": part.text or ""})
            case "refusal":
                parts.append({"type": "text", "text": part.refusal or ""})
            case "input_image" if part.image_url is not None:
                parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
            case kind:
                named = repr(kind)[:80] + (" without an image_url" if kind == "input_image" else "")
                where = f"{place}[{at}]"
                raise RequestError(f"{where}: this server does not support parts of type {named}", where)
    return parts


def conversation_of(body: ResponsesRequest, earlier: Sequence[InputItem]) -> tuple[Conversation, ItemsTranscript]:
    """Return the conversation of a body, and what knows its fields.   earlier: items before those of the body."""
    made = ItemsTranscript(body, earlier)
    effort = body.reasoning.effort if body.reasoning is not None else None
    return Conversation(made.messages, thinking=Thinking(effort=effort)), made
