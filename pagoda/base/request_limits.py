"""RequestLimits: the limits of a single request's content.

Requests beyond a limit are rejected with an error that states it, before any work on them. The defaults are far above
what real clients need and far below what slows other requests down; docs/reference/limits.md lists them.
"""

import functools
import typing
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Annotated, Any, Protocol

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.sampling_params import SamplingParams
from pagoda.base.setting import Setting, default_of


class _Lists(Protocol):
    """The lists of a request, as a request body holds them."""

    @property
    def stop(self) -> str | Sequence[str] | None: ...
    @property
    def bad_words(self) -> Sequence[str] | None: ...
    @property
    def stop_token_ids(self) -> Sequence[int] | None: ...
    @property
    def allowed_token_ids(self) -> Sequence[int] | None: ...
    @property
    def logit_bias(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Counted:
    """A limit that is not a setting: no operator has a reason to change it.   text: what is counted."""

    text: str


def _limit(counted: str, flat: bool = False) -> Setting:
    return Setting(counted, at_least=0, flat=flat)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request. The text of each says what is counted, as errors say it after the number.

    Those with a Setting can be set by operators.

    Raises ConfigError for a limit that is not an integer of at least 0.
    """

    tokenized_chars: Annotated[
        int,
        Counted(
            "characters in texts that may be longer than the context (`/tokenize`, `truncate_prompt_tokens`, "
            "`max_tokens_per_doc`)"
        ),
    ] = 1_048_576
    stop_strings: Annotated[int, Counted("strings in `stop`")] = 64
    stop_chars: Annotated[int, Counted("characters in all strings of `stop`")] = 8_192
    stop_token_ids: Annotated[int, Counted("ids in `stop_token_ids`")] = 1_024
    bad_words: Annotated[int, Counted("entries of `bad_words` (or `bad_words_token_ids`)")] = 1_024
    bad_words_chars: Annotated[int, Counted("characters in `bad_words` (or ids in `bad_words_token_ids`)")] = 16_384
    logit_bias: Annotated[int, Counted("entries of `logit_bias`")] = 1_024
    allowed_token_ids: Annotated[int, Counted("ids in `allowed_token_ids`")] = 65_536
    grammar_chars: Annotated[
        int, Counted("characters in a JSON schema, grammar, regular expression or list of choices")
    ] = 262_144
    prompts: Annotated[int, _limit("prompts in one completion request")] = 1_024
    inputs: Annotated[int, _limit("texts in one request for embeddings, scores or classes")] = 2_048
    outputs: Annotated[int, Counted("outputs of one completion request (prompts times `n`)")] = 1_024
    max_logprobs: Annotated[
        int,
        Setting(
            "log-probabilities per token (`logprobs`, `top_logprobs`, `prompt_logprobs`); -1: the whole vocabulary",
            at_least=-1,
            flat=True,
        ),
    ] = 20
    logprob_entries: Annotated[int, Counted("log-probabilities per step (`n` times `logprobs` + 1)")] = 4_096
    prompt_logprob_entries: Annotated[
        int, Counted("log-probabilities of a prompt (its tokens times `prompt_logprobs` + 1)")
    ] = 262_144
    answer_prompt_logprobs: Annotated[
        int,
        Counted("log-probabilities of prompts in one answer (`n` times their tokens times `prompt_logprobs` + 1)"),
    ] = 524_288
    output_tokens: Annotated[
        int, Counted("tokens of output that a request may come to (outputs of all prompts times `max_tokens`)")
    ] = 16_777_216
    output_logprobs: Annotated[
        int,
        Counted(
            "log-probabilities that a request may come to (outputs of all prompts times `max_tokens` times "
            "`logprobs` + 1)"
        ),
    ] = 4_194_304
    audio_s: Annotated[int, _limit("seconds of sound in one file to transcribe")] = 7_200
    audio_bytes: Annotated[int, Counted("bytes of a sound file")] = 2_147_483_648
    list_entries: Annotated[
        int,
        Counted("ids, biases and characters in the lists above, in all prompts together (prompts times their sum)"),
    ] = 1_000_000
    text_bytes: Annotated[int, Counted("bytes (as UTF-8) in a text to be tokenized")] = 4_194_304
    messages: Annotated[int, Counted("messages (or items) in a conversation")] = 4_096
    content_parts: Annotated[int, Counted("content parts in all messages of a conversation")] = 4_096
    images: Annotated[int, _limit("images in a prompt")] = 64
    image_bytes: Annotated[int, Counted("bytes of an image's file")] = 16_777_216
    image_pixels: Annotated[int, _limit("pixels in all images of a prompt")] = 67_108_864
    tools: Annotated[int, Counted("entries of `tools`")] = 512
    template_chars: Annotated[int, Counted("characters in a request's `chat_template`")] = 131_072
    template_kwargs: Annotated[int, Counted("entries of `chat_template_kwargs`")] = 64
    name_chars: Annotated[
        int, Counted("characters in a name (`model`, `user`, `cache_salt`, a message's `name`, ...)")
    ] = 256
    json_depth: Annotated[int, Counted("levels of nesting in a free-form field (messages, tools, `metadata`, ...)")] = (
        64
    )
    json_values: Annotated[int, Counted("values in all free-form fields together")] = 131_072
    json_chars: Annotated[int, Counted("characters in all strings and keys of all free-form fields together")] = (
        4_194_304
    )

    def __post_init__(self) -> None:
        for name, _, _ in describe_limits():
            value = getattr(self, name)
            least = -1 if name == "max_logprobs" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"request_limits.{name}={value!r:.80} must be an integer of at least {least}")

    # ---- checks

    def check(self, name: str, count: int, param: str | None) -> None:
        """Raise RequestError if `count` is more than the bound `name` allows. param: the field to blame, if any."""
        allowed: int = getattr(self, name)
        if count > allowed:
            what = next(what for known, _, what in describe_limits() if known == name)
            message = f"{param or 'the body'}: {count} {what} are more than the limit of {allowed} ({name})"
            raise RequestError(message, param)

    def check_lists(self, given: SamplingParams | _Lists) -> None:
        """Raise RequestError if a list in a request's sampling parameters exceeds its limit."""
        stop = (given.stop,) if isinstance(given.stop, str) else given.stop or ()
        self.check("stop_strings", len(stop), "stop")
        self.check("stop_chars", sum(map(len, stop)), "stop")
        words = given.bad_words or ()
        self.check("bad_words", len(words), "bad_words")
        self.check("bad_words_chars", sum(map(len, words)), "bad_words")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check(name, len(getattr(given, name) or ()), name)

    def check_lists_of_prompts(self, given: _Lists, num_prompts: int) -> None:
        """Hold the lists of a request to what they amount to with every prompt. Raises RequestError."""
        sizes = {
            name: len(getattr(given, name) or ()) for name in ("stop_token_ids", "allowed_token_ids", "logit_bias")
        }
        sizes["stop"] = sum(map(len, given.stop or ()))
        sizes["bad_words"] = sum(map(len, given.bad_words or ()))
        longest = max(sizes, key=lambda name: sizes[name])
        self.check("list_entries", num_prompts * sum(sizes.values()), longest)

    def check_outputs(self, num_tokens: int, num_logprobs: int | None) -> None:
        """Raise RequestError if the longest outputs take more memory than a request may hold.

        num_tokens: of all outputs together, at their longest.   num_logprobs: per token, besides its own.
        """
        self.check("output_tokens", num_tokens, "max_tokens")
        if num_logprobs is not None:
            self.check("output_logprobs", num_tokens * (num_logprobs + 1), "logprobs")

    def check_bad_words_ids(self, words: Sequence[Sequence[int]]) -> None:
        """Like `check_lists`, for bad words as token ids."""
        self.check("bad_words", len(words), "bad_words_token_ids")
        self.check("bad_words_chars", sum(map(len, words)), "bad_words_token_ids")

    def check_counts(self, messages: Sized, tools: Sized | None) -> None:
        """Raise RequestError if a conversation has too many messages or tools. Looks at none of them."""
        self.check("messages", len(messages), "messages")
        self.check("tools", len(tools or ()), "tools")

    def check_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        template: str | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Raise RequestError if a conversation, or another input of its template, exceeds a limit."""
        self.check_counts(messages, tools)
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        self.check("content_parts", sum(len(one) for one in contents if isinstance(one, list)), "messages")
        self.check("template_chars", len(template or ""), "chat_template")
        self.check("template_kwargs", len(template_kwargs or ()), "chat_template_kwargs")
        self.check_values({"messages": messages, "tools": tools, "chat_template_kwargs": template_kwargs})

    def check_text(self, text: str, param: str) -> None:
        """Raise RequestError if a text is too long to be tokenized."""
        if len(text) * 4 > self.text_bytes:  # UTF-8 takes at most four bytes per character
            self.check("text_bytes", len(text.encode(errors="surrogatepass")), param)

    def check_names(self, **names: str | None) -> None:
        """Raise RequestError if a short string, given by its field name, exceeds `name_chars`."""
        for field_name, value in names.items():
            self.check("name_chars", len(value or ""), field_name)

    def check_values(self, fields: Mapping[str, Any], chars: str = "json_chars") -> None:
        """Hold JSON values of free form, by their field, to the bounds on depth and number. Raises RequestError.

        Looks at no more values than are allowed.   chars: the bound on the characters of all strings and keys.
        """
        num_values = num_chars = 0
        for name, value in fields.items():
            level, depth = [value], 0
            num_chars += len(value) if isinstance(value, str) else 0
            self.check(chars, num_chars, name)
            while containers := [one for one in level if isinstance(one, dict | list | tuple) and one]:
                depth += 1
                self.check("json_depth", depth, name)
                num_values += sum(map(len, containers))
                self.check("json_values", num_values, name)
                keys = [key for one in containers if isinstance(one, dict) for key in one]
                level = [child for one in containers for child in (one.values() if isinstance(one, dict) else one)]
                num_chars += sum(len(text) for texts in (keys, level) for text in texts if isinstance(text, str))
                self.check(chars, num_chars, name)


@functools.cache
def describe_limits() -> tuple[tuple[str, int, str], ...]:
    """Return (name, default, what is counted) of every limit, in the order of the documentation."""
    hints = typing.get_type_hints(RequestLimits, include_extras=True)
    notes: dict[str, Setting | Counted] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return tuple((item.name, default_of(item), notes[item.name].text) for item in fields(RequestLimits))
