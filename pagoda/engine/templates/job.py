"""TemplateJob: everything needed to render one conversation, as plain values that can be sent to another process."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagoda.engine.templates.chat_template import ChatTemplate
from pagoda.engine.templates.chat_values import Message
from pagoda.engine.templates.special_marks import SpecialMarks


class TemplateSource:
    """A chat template that has not been compiled yet.

    texts: by name ("default", "tool_use", ...).   special_tokens, marks: see ChatTemplate.
    key: hash of the texts; sources of one tokenizer are equal if their keys are.
    """

    def __init__(self, texts: Mapping[str, str], special_tokens: Mapping[str, str], marks: SpecialMarks) -> None:
        self.texts = dict(texts)
        self.special_tokens = dict(special_tokens)
        self.marks = marks
        self.key = hashlib.sha256(repr(self.texts).encode(errors="surrogatepass")).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TemplateSource) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def compile(self) -> ChatTemplate:
        """Compile the template. Raises ConfigError if it is not valid Jinja."""
        return ChatTemplate(self.texts, self.special_tokens, self.marks)


@dataclass(frozen=True, slots=True)
class TemplateJob:
    """A template and the values to render it with.

    is_own: the template is the model's or the operator's, not a caller's.
    is_marked: special tokens of the template are rendered as marks.   The others: see ChatTemplate.render.
    """

    source: TemplateSource
    is_own: bool
    is_marked: bool
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None

    def values(self) -> tuple[Any, ...]:
        """Return the arguments of `ChatTemplate.render`."""
        return (
            self.messages,
            self.tools,
            self.add_generation_prompt,
            self.continue_final_message,
            self.template_kwargs,
            self.is_marked,
        )


class Renderer(Protocol):
    """Renders conversations to prompts."""

    def render(self, job: TemplateJob) -> str:
        """Return the prompt. Raises RequestError, or ConfigError for a template that is not valid Jinja."""
        ...

    def close(self) -> None:
        """Free the renderer's resources. Idempotent."""
        ...


class InProcessRenderer:
    """Renders on the calling thread, without a deadline. Caches the most recently used compiled templates."""

    def __init__(self, num_kept: int = 8) -> None:
        self._compiled = functools.lru_cache(num_kept)(TemplateSource.compile)

    def render(self, job: TemplateJob) -> str:
        """Return the prompt. Raises RequestError, or ConfigError for a template that is not valid Jinja."""
        return self._compiled(job.source).render(*job.values())

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
