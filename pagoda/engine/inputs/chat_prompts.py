"""ChatPrompts: turn a conversation into the model's prompt, with its chat template or a caller's."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.registry import nearest
from pagoda.base.text import check_encodable
from pagoda.core.request import PLACEHOLDER_ID, MediaItem, PromptEmbeds
from pagoda.engine.answers.chat_answers import ChatAnswers, text_of_content
from pagoda.engine.images.process import ImageFeatures
from pagoda.engine.images.source import ImageSource, take_images
from pagoda.engine.inputs.image_prompts import ImagePrompts
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.prompt_embeds import EmbedsPart, check_embeds_are_on, read_embeds, take_embeds
from pagoda.engine.inputs.prompt_encoder import PromptEncoder
from pagoda.engine.inputs.prompts import TokensPrompt
from pagoda.engine.inputs.sampled_messages import KnownMessages, MessagePlaces, OpenMessage
from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.templates.chat_values import Message, with_known_roles
from pagoda.engine.templates.generic_tools import lacks_tools, with_generic_tools
from pagoda.engine.tokenizers.tokenizer import Tokenizer, TokenizerFacts

_NUM_KEPT = 16  # callers' templates that stay compiled
_NO_TOKEN = -1  # in the place of an embedding, until its position is known


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    chat_template: the text of a template to use instead of the model's own, or the name of one of the model's.
    tools: functions that the model may call, as objects of the OpenAI API.
    add_generation_prompt: end with the opening of the assistant's turn.
    continue_final_message: end inside the last message, so that the model continues it.
    template_kwargs: more variables for the template (such as enable_thinking).
    add_special_tokens: also add those that the tokenizer puts around a text; most templates write them themselves.
    """

    chat_template: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool = False


class ChatFields(TypedDict, total=False):
    """The fields of ChatOptions, and vLLM's names, as arguments of `chat`."""

    chat_template: str | None
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_special_tokens: bool
    chat_template_content_format: str
    tokenization_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None


DEFAULT_CHAT = ChatOptions()
_VLLMS_NAMES = {"chat_template_kwargs": "template_kwargs"}
_NO_EFFECT = ("chat_template_content_format", "tokenization_kwargs")
"""Options of vLLM that change nothing here: the form of contents is recognised."""


def chat_options(given: Mapping[str, object]) -> ChatOptions:
    """Return the options of a conversation by name, vLLM's names included. Raises TypeError for an unknown one."""
    known = [item.name for item in dataclasses.fields(ChatOptions)]
    options = {_VLLMS_NAMES.get(name, name): value for name, value in given.items() if name not in _NO_EFFECT}
    if options.pop("mm_processor_kwargs", None):
        raise TypeError("mm_processor_kwargs is not supported: edit preprocessor_config.json in a copy of the model")
    for name in options:
        if name not in known:
            raise TypeError(f"chat has no option {name!r:.80}{nearest(name, [*known, *_VLLMS_NAMES])}")
    return ChatOptions(**cast("dict[str, Any]", options))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model's prompt.

    text: without its embeddings.   open_message: that it asks for, if its answer is to be found again.
    """

    text: str
    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()
    open_message: OpenMessage | None = None
    embeds: PromptEmbeds | None = None

    @property
    def prompt(self) -> TokensPrompt:
        """The prompt that an engine runs."""
        return {"prompt_token_ids": self.token_ids, "media": self.media, "embeds": self.embeds}


@dataclass(frozen=True, slots=True)
class WrittenChat:
    """A conversation as text, before it is tokenised.   text: marked, if `is_marked`.   plain: without marks.

    images, features: what puts images into the prompt, and they; None without images.
    embeds: the parts that are given as embeddings; their marks are in `text`.
    """

    text: str
    plain: str
    is_marked: bool
    add_special_tokens: bool
    images: ImagePrompts | None
    features: Sequence[ImageFeatures]
    embeds: Sequence[EmbedsPart] = ()


class ChatPrompts:
    """Renders conversations. Special tokens in the caller's values become ordinary text. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        limits: InputLimits,
        parses_special_tokens: bool = False,
        images: ImagePrompts | None = None,
        model_name: str = "this model",
        hears: bool = False,
    ) -> None:
        """parses_special_tokens: parse special tokens inside messages, instead of treating them as ordinary text.

        images: puts images into prompts, None for a model that takes text only.   model_name: for errors.
        hears: the model is for speech.
        """
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._limits = limits
        self._parses_special_tokens = parses_special_tokens
        self._images = images
        self._model_name = model_name
        self._hears = hears
        self._marks = tokenizer.facts.marks
        self.places = MessagePlaces(tokenizer, None if images is None else images.image_token_id)
        self._compiled = functools.lru_cache(_NUM_KEPT)(functools.partial(_callers_template, tokenizer.facts))

    def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions = DEFAULT_CHAT,
        *,
        must_fit: bool = False,
        is_bounded: bool = False,
    ) -> RenderedChat:
        """Return a conversation as text and token ids, with its images and embeddings.

        must_fit: reject a text that cannot fit into the model's context before tokenising it.
        is_bounded: the messages were sent to a server: they may not name its files; unless must_fit, the limit
            `tokenized_chars` applies.
        Raises RequestError if there is no template, if it rejects the messages, or for an image or embeddings that
        cannot be read.
        """
        return self.encode(self.write(messages, options, must_fit=must_fit, is_bounded=is_bounded))

    def write(
        self, messages: Sequence[Message], options: ChatOptions, *, must_fit: bool, is_bounded: bool
    ) -> WrittenChat:
        """Return a conversation as text; see `render`."""
        messages, sources = take_images(messages)
        messages, embeds = take_embeds(messages, self._marks.numbered)
        images = self._checked_images(sources)
        text = self._text(messages, options)
        if is_bounded and not must_fit:
            self._limits.of_request.check("tokenized_chars", len(text), "messages")
        is_marked, features = not self._parses_special_tokens, []
        if embeds and not is_marked:  # only marked text has places for embeddings
            text, is_marked = self._marks.put(text), True
        if images is not None:
            most = self._limits.max_model_len
            text, features = images.put(text, sources, most, is_marked=is_marked, is_trusted=not is_bounded)
        plain = self._without_embeds(self._marks.remove(text) if is_marked else text, embeds)
        if must_fit:
            self._prompts.check_length(plain)
        if is_marked:
            self._limits.of_request.check_text(plain, "messages")
            check_encodable("messages", text)
        return WrittenChat(text, plain, is_marked, options.add_special_tokens, images, features, embeds)

    def encode(self, written: WrittenChat, known: KnownMessages | None = None) -> RenderedChat:
        """Return a written conversation as token ids.

        known: messages of it, in whose place their sampled tokens are put; None: the answer is not to be found again.
        """
        if not written.is_marked:
            token_ids = self._prompts.encode(written.text, written.add_special_tokens)
            return RenderedChat(written.plain, token_ids, self._media_of(written, token_ids))
        text, slots = (written.text, []) if known is None else self.places.put(written.text, known)
        embeds, values = None, None
        if written.embeds:
            text, slots, values = self._put_embeds(text, slots, written.embeds)
        token_ids = self._tokenizer.encode_marked(text, written.add_special_tokens, slots)
        if values is not None:
            ids = np.array(token_ids, np.int32)
            embeds = PromptEmbeds(np.flatnonzero(ids == _NO_TOKEN).astype(np.int32), values)
            ids[embeds.positions] = PLACEHOLDER_ID
            token_ids = ids.tolist()
        opened = None if known is None else self.places.open_message(written.text, token_ids, known.form)
        return RenderedChat(written.plain, token_ids, self._media_of(written, token_ids), opened, embeds)

    def _without_embeds(self, text: str, embeds: Sequence[EmbedsPart]) -> str:
        """Return a rendered text without the marks of embeddings.

        Raises RequestError if there can be none, or if it has not each of them once.
        """
        if not embeds:
            return text
        check_embeds_are_on(self._limits.embeds_size, embeds[0].name)
        counts = Counter(map(int, self._marks.any_numbered.findall(text)))
        for number, part in enumerate(embeds):
            if counts[number] != 1:
                raise RequestError(f"{part.name}: the chat template writes it {counts[number]} times", part.name)
        return self._marks.any_numbered.sub("", text)

    def _put_embeds(
        self, text: str, slots: Sequence[Sequence[int]], parts: Sequence[EmbedsPart]
    ) -> tuple[str, list[Sequence[int]], np.ndarray]:
        """Return a marked text with a slot for each mark of embeddings; what its slots stand for; the embeddings.

        slots: those that the text has already. Raises RequestError for embeddings that cannot be read.
        """
        slot, following, numbered = self._marks.slot, iter(slots), self._marks.any_numbered
        read = [read_embeds(part.given, self._limits.embeds_size, part.name) for part in parts]
        filled: list[Sequence[int]] = []
        values: list[np.ndarray] = []
        pieces = numbered.split(text)  # a text, a number, a text, ...
        for at, piece in enumerate(pieces):
            if at % 2:
                values.append(read[int(piece)])
                filled.append([_NO_TOKEN] * len(values[-1]))
            else:
                filled += [next(following) for _ in range(piece.count(slot))]
        return slot.join(pieces[::2]), filled, np.concatenate(values)

    def _media_of(self, written: WrittenChat, token_ids: Sequence[int]) -> tuple[MediaItem, ...]:
        return () if written.images is None else written.images.media_of(token_ids, written.features)

    def answers_to(self, messages: Sequence[Message], options: ChatOptions, rendered: RenderedChat) -> ChatAnswers:
        """Return what reads the answers to a conversation that was rendered with these options."""
        asked, own = options.chat_template, self._tokenizer.facts.chat_template
        if asked is not None:
            template = own.sources.get(asked, asked) if own is not None else asked
        else:
            template = None if own is None else own.source_for(bool(options.tools))
        continued = text_of_content(messages[-1].get("content")) if options.continue_final_message else ""
        return ChatAnswers(template, options.tools, rendered.text, continued, self._tokenizer)

    def _checked_images(self, sources: Sequence[ImageSource]) -> ImagePrompts | None:
        """Return what puts images into the prompt, None if there are none. Raises RequestError if there can be none."""
        if not sources:
            return None
        if self._images is None:
            where = sources[0].where
            raise RequestError(f"{where} is an image, but {self._model_name} takes text only", where)
        self._images.check_count(sources)
        return self._images

    def _text(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Return the rendered text, with marks in place of the template's special tokens if those matter."""
        tools, template = options.tools, self._tokenizer.facts.chat_template
        self._limits.of_request.check_chat(messages, tools, options.chat_template, options.template_kwargs)
        if options.chat_template is not None:
            named = template.sources if template is not None else {}
            template = self._compiled(named.get(options.chat_template, options.chat_template))
        tasks = self._limits.tasks
        if template is None and not tasks.generates:
            raise RequestError(f"this model generates no text; it supports {', '.join(tasks.names)}", "model")
        if template is None and self._hears:
            raise RequestError("this model writes down what is said: use /v1/audio/transcriptions", "model")
        if template is None:
            raise RequestError(
                "this model has no chat template, so it can only continue a text: use plain prompts (/v1/completions), "
                "or give it a template (chat_template; of a server --chat-template FILE)",
                "messages",
            )
        messages = with_known_roles(messages, template.source_for(bool(tools)))
        if "tool_use" not in template.sources and lacks_tools(template.source):
            messages, tools = with_generic_tools(messages, tools, template.source), None
        try:
            return template.render(
                messages,
                tools,
                options.add_generation_prompt,
                options.continue_final_message,
                options.template_kwargs,
                is_marked=not self._parses_special_tokens,
                reads_images=self._images is not None,
            )
        except ConfigError as error:
            raise RequestError(str(error), "chat_template") from None


def _callers_template(facts: TokenizerFacts, source: str) -> ChatTemplate:
    """Parse a template for a model. Raises RequestError if it is not valid Jinja."""
    try:
        return ChatTemplate(source, facts.special_names, facts.marks)
    except ConfigError as error:
        raise RequestError(str(error), "chat_template") from None
