"""RequestLimits: the limits of a single request's content.

Requests beyond a limit are rejected with an error that states it, before any work on them. The defaults are far above
what real clients need and far below what slows other requests down; docs/reference/limits.md lists them.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.registry import nearest


def _limit(default: int, what: str) -> Any:
    """A bound.   what: what is counted, as the error and the documentation say it after the number."""
    return field(default=default, metadata={"what": what})


class _Lists(Protocol):
    """The lists of a request, as SamplingParams or a request body holds them."""

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
class RequestLimits:
    """The limits of one request. Raises ConfigError for a limit that is not an integer of at least 0."""

    tokenized_chars: int = _limit(
        1_048_576, "characters of text to tokenise whatever its length (`/tokenize`, `truncate_prompt_tokens`)"
    )
    stop_strings: int = _limit(64, "strings in `stop`")
    stop_chars: int = _limit(8_192, "characters in all strings of `stop`")
    stop_token_ids: int = _limit(1_024, "ids in `stop_token_ids`")
    bad_words: int = _limit(1_024, "entries of `bad_words` (or `bad_words_token_ids`)")
    bad_words_chars: int = _limit(16_384, "characters in `bad_words` (or ids in `bad_words_token_ids`)")
    logit_bias: int = _limit(1_024, "entries of `logit_bias`")
    allowed_token_ids: int = _limit(65_536, "ids in `allowed_token_ids`")
    grammar_chars: int = _limit(262_144, "characters in a JSON schema, grammar, regular expression or list of choices")
    prompts: int = _limit(1_024, "prompts in one completion request")
    outputs: int = _limit(1_024, "outputs of one completion request (prompts times `n`)")
    logprob_entries: int = _limit(4_096, "log-probabilities per step (`n` times `logprobs` + 1)")
    prompt_logprob_entries: int = _limit(
        262_144, "log-probabilities of a prompt (its tokens times `prompt_logprobs` + 1)"
    )
    answer_prompt_logprobs: int = _limit(
        524_288,
        "log-probabilities of prompts in one answer (`n` times their tokens times `prompt_logprobs` + 1)",
    )
    list_entries: int = _limit(
        1_000_000, "ids, biases and characters in the lists above, in all prompts together (prompts times their sum)"
    )
    text_bytes: int = _limit(4_194_304, "bytes (as UTF-8) in a text to be tokenized")
    messages: int = _limit(4_096, "messages in a conversation")
    content_parts: int = _limit(4_096, "content parts in all messages of a conversation")
    tools: int = _limit(512, "entries of `tools`")
    template_chars: int = _limit(131_072, "characters in a request's `chat_template`")
    template_kwargs: int = _limit(64, "entries of `chat_template_kwargs`")
    name_chars: int = _limit(256, "characters in a name (`model`, `user`, `cache_salt`, a message's `name`, ...)")
    body_values: int = _limit(1_000_000, "JSON values in a body (token ids count)")
    body_objects: int = _limit(100_000, "objects, lists and keys of objects in a body")
    body_exponents: int = _limit(1_024, "numbers with an exponent of three digits or more in a body")
    json_depth: int = _limit(64, "levels of nesting in a field of free form (messages, tools, `metadata`, ...)")
    json_values: int = _limit(131_072, "values in the fields of free form together")

    def __post_init__(self) -> None:
        for name, _, _ in describe_limits():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"request limit {name}={value!r:.80} must be an integer of at least 0")

    @classmethod
    def of(cls, given: object) -> "RequestLimits":
        """Return the defaults with changes: a mapping of names to numbers, or strings "name=number".

        Raises ConfigError for unknown names and invalid numbers.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            pairs: Iterable[tuple[object, object]] = given.items()
        elif isinstance(given, list | tuple):
            pairs = [_split(item) for item in given]
        else:
            raise ConfigError(f"request_limits={given!r:.80} must be a mapping of names to numbers")
        known = {name: default for name, default, _ in describe_limits()}
        changes: dict[str, Any] = {}
        for name, value in pairs:
            if name not in known:
                raise ConfigError(f"unknown request limit {str(name)!r:.80}{nearest(str(name), list(known))}")
            changes[str(name)] = value
        return cls(**changes)

    # ---- checks

    def check(self, name: str, count: int, param: str | None) -> None:
        """Raise RequestError if `count` is more than the bound `name` allows. param: the field to blame, if any."""
        allowed: int = getattr(self, name)
        if count > allowed:
            what = next(what for known, _, what in describe_limits() if known == name)
            said = f"{param or 'the body'}: {count} {what} are more than the limit of {allowed} ({name})"
            raise RequestError(said, param)

    def check_lists(self, given: _Lists) -> None:
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

    def check_bad_words_ids(self, words: Sequence[Sequence[int]]) -> None:
        """Like `check_lists`, for bad words as token ids."""
        self.check("bad_words", len(words), "bad_words_token_ids")
        self.check("bad_words_chars", sum(map(len, words)), "bad_words_token_ids")

    def check_chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        template: str | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        """Raise RequestError if a conversation, or another input of its template, exceeds a limit."""
        self.check("messages", len(messages), "messages")
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        self.check("content_parts", sum(len(one) for one in contents if isinstance(one, list)), "messages")
        self.check("tools", len(tools or ()), "tools")
        self.check("template_chars", len(template or ""), "chat_template")
        self.check("template_kwargs", len(template_kwargs or ()), "chat_template_kwargs")
        self.check_values({"messages": messages, "tools": tools, "chat_template_kwargs": template_kwargs})

    def check_text(self, text: str, param: str) -> None:
        """Raise RequestError if a text is too long to be tokenised."""
        if len(text) * 4 > self.text_bytes:  # UTF-8 takes at most four bytes per character
            self.check("text_bytes", len(text.encode(errors="surrogatepass")), param)

    def check_names(self, **names: str | None) -> None:
        """Raise RequestError if a short string, given by its field name, exceeds `name_chars`."""
        for field_name, value in names.items():
            self.check("name_chars", len(value or ""), field_name)

    def check_values(self, fields: Mapping[str, Any]) -> None:
        """Hold JSON values of free form, by their field, to the bounds on depth and number. Raises RequestError.

        Looks at no more values than are allowed.
        """
        num_values = 0
        for name, value in fields.items():
            level, depth = [value], 0
            while containers := [one for one in level if isinstance(one, dict | list | tuple) and one]:
                depth += 1
                self.check("json_depth", depth, name)
                num_values += sum(map(len, containers))
                self.check("json_values", num_values, name)
                level = [child for one in containers for child in (one.values() if isinstance(one, dict) else one)]


def describe_limits() -> tuple[tuple[str, int, str], ...]:
    """Return (name, default, what is counted) of every limit, in the order of the documentation."""
    return _DESCRIBED


def _split(item: object) -> tuple[str, object]:
    name, sign, number = str(item).partition("=")
    if not sign or not number.strip().isdecimal():
        raise ConfigError(f"request limit {str(item)!r:.80} must be NAME=NUMBER, such as stop_strings=100")
    return name.strip(), int(number)


_DESCRIBED = tuple(
    (str(item.name), int(item.default), str(item.metadata["what"]))  # type: ignore[call-overload]
    for item in dataclasses.fields(RequestLimits)
)
