"""The bodies of Ollama's /api/chat and /api/generate, and the conversations in them."""

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.server.body import Body, Flag, Int32, ModelBody, Name, Seed, UnservedField, one_of
from pagoda.server.conversation import Conversation, Tools, check_chat
from pagoda.server.thinking import Thinking
from pagoda.server.turn import naming_fields


class OllamaOptions(Body, kw_only=True, frozen=True):
    """How text is generated; what is not given is as the model was made for.

    num_predict: Most tokens of the answer; 0 and below: as many as the model's context has left.
    seed: Makes the output repeatable; -1: another one each time.
    num_ctx: Has no effect: the context is the server's, and what does not fit into it is an error.
    num_keep, num_batch, num_gpu, main_gpu, num_thread, use_mmap, numa: Have no effect.
    """

    unserved: ClassVar[Mapping[str, UnservedField]] = {
        "mirostat": UnservedField("mirostat", (0,)),
        "repeat_last_n": UnservedField("penalties for a part of the text; -1 is all of it", (-1,)),
        "tfs_z": UnservedField("tail-free sampling", (1,)),
        "typical_p": UnservedField("typical sampling", (1,)),
    }
    num_predict: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    num_ctx: Int32 | None = None
    num_keep: Int32 | None = None
    num_batch: Int32 | None = None
    num_gpu: Int32 | None = None
    main_gpu: Int32 | None = None
    num_thread: Int32 | None = None
    use_mmap: bool | None = None
    numa: bool | None = None


_OWN_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *_OWN_NAMES,
)


class OllamaBody(ModelBody, kw_only=True, frozen=True):
    """The fields that a chat and a text have.

    stream: Send the answer in lines, as it is generated.
    format: The form of the answer: "json", or a JSON schema.
    options: How the text is generated.
    keep_alive: 0: unload the model after this request, if there are others; needs the admin key as /models/unload does.
    think: Whether the model thinks first, or how much: low, medium, high; false also leaves out what it thought.
    truncate, shift: Have no effect: what does not fit into the context is an error.
    """

    stream: Flag = True
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None
    think: bool | Annotated[str, one_of("low", "medium", "high")] | None = None
    truncate: bool | None = None
    shift: bool | None = None

    unserved: ClassVar[Mapping[str, UnservedField]] = {
        "logprobs": UnservedField("log-probabilities in this API; use /v1/chat/completions"),
        "top_logprobs": UnservedField("log-probabilities in this API; use /v1/chat/completions", (0,)),
    }

    @property
    def unloads(self) -> bool:
        """Whether the model is to be unloaded after this request."""
        return self.keep_alive in (0, "0", "0s", "0m", "0h")

    def check(self, limits: RequestLimits) -> None:
        limits.check_names(model=self.model)
        limits.check_values({"format": self.format}, "grammar_chars")
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise RequestError(f'format: expected "json" or a JSON schema, got {self.format!r:.80}', "format")
        stop = None if self.options is None else self.options.stop
        limits.check("stop_strings", len(stop) if isinstance(stop, list) else 1, "options.stop")

    def params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """Return the engine's parameters.   defaults: of those that are not given. Raises RequestError."""
        options = self.options or OllamaOptions()
        given = {name: getattr(options, _OWN_NAMES.get(name, name)) for name in _SAMPLING}
        if options.seed == -1:
            given["seed"] = None
        if self.format:
            schema = self.format if isinstance(self.format, dict) else None
            given["structured_outputs"] = StructuredOutputsParams(
                json=schema,
                json_object=None if schema else True,
                disable_additional_properties=schema is not None,  # as with Ollama, whose users leave it out
                source="format",
            )
        if options.num_predict is not None and options.num_predict <= 0:
            given["max_tokens"], defaults = None, {**defaults, "max_tokens": None}
        return SamplingParams.of_model({"max_tokens": None, **defaults}, **given)

    def conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Conversation:
        last = messages[-1]
        is_prefilled = last["role"] == "assistant" and "tool_calls" not in last
        return Conversation(
            messages,
            tools=tools,
            thinking=Thinking(effort=self.think) if isinstance(self.think, str) else Thinking(is_on=self.think),
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
        )


class OllamaCalledFunction(Struct, frozen=True):
    """What a call names, and its arguments.

    name: Of the tool.
    arguments: As an object.
    index: Of the call in its message.
    """

    name: Name
    arguments: dict[str, Any]
    index: int | UnsetType = UNSET


class OllamaCall(Struct, frozen=True):
    """A call of a tool.

    function: The tool and its arguments.
    id: Of the call.
    index: That of its function again, where clients made for OpenAI's calls look for it.
    """

    function: OllamaCalledFunction
    id: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class OllamaMessage(Struct, kw_only=True, frozen=True):
    """A message.

    role: Who wrote it: system, user, assistant, tool.
    content: Its text.
    thinking: Of the assistant: what it thought before.
    images: In base64.
    tool_calls: Of the assistant: the calls that it made.
    tool_name, tool_call_id: Of a tool's answer: which call it answers.
    """

    role: Name
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaBody, kw_only=True, frozen=True):
    """POST /api/chat

    messages: The conversation; the answer continues a last message of the assistant. Without any, nothing is generated.
    """

    messages: list[OllamaMessage] | None = None
    tools: Tools | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits.check_counts(self.messages or (), self.tools)
        with naming_fields(self.origin):
            check_chat(limits, template_messages(self.messages or ()), self.tools, None, None)

    def origin(self, param: str) -> str:
        """Return the caller's name of a field: of several messages that are one, that of the first."""
        if found := re.match(r"messages\[(\d+)\]", param):
            at = sum(map(len, _runs(self.messages or ())[: int(found[1])]))
            param = f"messages[{at}]{param[found.end() :]}"
        return origin(param)

    @property
    def is_empty(self) -> bool:
        """It asks for nothing but to load the model."""
        return not self.messages


class OllamaGenerateRequest(OllamaBody, kw_only=True, frozen=True):
    """POST /api/generate

    prompt: What the user says. Without it, nothing is generated.
    system: The system prompt.
    images: In base64.
    raw: Continue `prompt` as it is, without the chat template.
    suffix: The text after the gap that the answer fills; `prompt` is the one before. For models that can.
    """

    unserved: ClassVar[Mapping[str, UnservedField]] = {
        **OllamaBody.unserved,
        "context": UnservedField("`context`; send the conversation to /api/chat"),
        "template": UnservedField("templates of requests; use `raw`, or start the server with --chat-template"),
    }
    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: Flag = False
    suffix: str | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        for name in ("system", "images", "think"):
            for other in ("raw", "suffix"):
                if getattr(self, other) and getattr(self, name):
                    raise RequestError(f"{name}: is not for prompts with {other}; leave {name} or {other} out", name)
        limits.check("tokenized_chars", len(self.suffix or ""), "suffix")
        with naming_fields(origin_of_prompt):
            check_chat(limits, self.messages, None, None, None)

    @property
    def is_empty(self) -> bool:
        """It asks for nothing but to load the model."""
        return not self.prompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a conversation."""
        system = [OllamaMessage(role="system", content=self.system)] if self.system else []
        return template_messages([*system, OllamaMessage(role="user", content=self.prompt, images=self.images)])


class _OpenCalls:
    """Calls that no message has answered yet, each found at once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by id
        self._ids: dict[str | None, deque[str]] = {}  # by name, and all with None; also of calls that were answered

    def add(self, call_id: str, name: str) -> None:
        self._names[call_id] = name
        for key in (name, None):
            self._ids.setdefault(key, deque()).append(call_id)

    def first(self, name: str | None) -> str:
        """Return the id of the first one, or of the first one of a tool; "" if there is none."""
        ids = self._ids.get(name) or deque()
        while ids and (self._names.get(ids[0]) is None or name not in (None, self._names[ids[0]])):
            ids.popleft()
        return ids[0] if ids else ""

    def answer(self, call_id: str) -> None:
        self._names.pop(call_id, None)


def _runs(messages: Sequence[OllamaMessage]) -> list[list[OllamaMessage]]:
    """Return messages, with those of one role that follow each other and are text alone in one list."""
    runs: list[list[OllamaMessage]] = []
    was_text = False
    for message in messages:
        is_text = not (message.images or message.tool_calls or message.role == "tool")
        if is_text and was_text and runs[-1][0].role == message.role:
            runs[-1].append(message)
        else:
            runs.append([message])
        was_text = is_text
    return runs


def _joined(run: Sequence[OllamaMessage]) -> OllamaMessage:
    """Return messages as one, as Ollama does: many templates want turns to alternate."""
    if len(run) == 1:
        return run[0]
    texts, thoughts = [one.content for one in run if one.content], [one.thinking for one in run if one.thinking]
    return OllamaMessage(role=run[0].role, content="\n\n".join(texts), thinking="\n\n".join(thoughts))


def template_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates read. Calls without an id get one, and so do their answers."""
    made: list[dict[str, Any]] = []
    num_calls, open_calls = 0, _OpenCalls()
    for message in map(_joined, _runs(messages)):
        text = message.content or ""
        one: dict[str, Any] = {"role": message.role, "content": text}
        if message.images:
            urls = [f"data:image/png;base64,{data}" for data in message.images]  # the bytes say which type it is
            one["content"] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            one["content"] += [{"type": "text", "text": text}] if text else []
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls: list[dict[str, Any]] = []
            for call in message.tool_calls:
                call_id = call.id or f"call{num_calls:05}"  # nine letters and digits, as Mistral's templates want it
                num_calls += 1
                open_calls.add(call_id, call.function.name)
                function = {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                }
                calls.append({"id": call_id, "type": "function", "function": function})
            one["tool_calls"] = calls
            if not text:
                del one["content"]
        if message.role == "tool":
            wanted = message.tool_name
            found = message.tool_call_id or open_calls.first(wanted)
            one |= {"tool_call_id": found} | ({} if wanted is None else {"name": wanted})
            open_calls.answer(found)
        made.append(one)
    return made


def origin(param: str) -> str:
    """Return the caller's name of a field."""
    if param == "truncate_prompt_tokens":
        return ""
    if param in _SAMPLING:
        return f"options.{_OWN_NAMES.get(param, param)}"
    return re.sub(r"^(messages\[\d+\])\.content(\[\d+\])", r"\1.images\2", param)


def origin_of_prompt(param: str) -> str:
    """Return the name of a field that is a message here and not the caller's."""
    return re.sub(r"^messages(\[\d+\])?", "prompt", re.sub(r"^messages\[\d+\]\.images", "images", origin(param)))
