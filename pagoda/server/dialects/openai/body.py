"""SamplingBody: the fields of chat and text completions that say how text is generated, and in which form.

Fields of OpenAI's and vLLM's APIs that are known but not served are listed first.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, Meta

from pagoda.base.errors import RequestError
from pagoda.base.registry import nearest
from pagoda.base.request_limits import RequestLimits
from pagoda.base.sampling_params import BeamSearchOptions, SamplingParams
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.base.text import as_integer
from pagoda.server.body import (
    Body,
    Flag,
    Int32,
    ModelBody,
    NumTop,
    OutputCount,
    Priority,
    RequestId,
    Seed,
    TokenId,
    UnservedField,
    one_of,
)

CacheRetention = Annotated[str, one_of("in_memory", "in-memory", "24h")]
_TEXT_TOKENS = 16  # of a text completion that says nothing, as in OpenAI's API
_TRANSFER = "disaggregated serving"
_MEDIA = "options for processing images; edit preprocessor_config.json in a copy of the model"

UNSERVED = {
    "audio": UnservedField("audio output"),
    "ec_transfer_params": UnservedField(_TRANSFER, ({},)),
    "function_call": UnservedField("the deprecated `function_call`; use `tool_choice`", ("none",)),
    "functions": UnservedField("the deprecated `functions`; use `tools`"),
    "guided_decoding_backend": UnservedField("grammar libraries other than llguidance", ("auto", "guidance")),
    "kv_transfer_params": UnservedField(_TRANSFER, ({},)),
    "logits_processors": UnservedField("logits processors of callers"),
    "media_io_kwargs": UnservedField(_MEDIA, ({},)),
    "mm_processor_kwargs": UnservedField(_MEDIA, ({},)),
    "modalities": UnservedField("modalities other than text", (["text"], "text")),
    "moderation": UnservedField("moderation"),
    "repetition_detection": UnservedField("repetition detection"),
    "return_mm_kwargs": UnservedField(_MEDIA, (True,)),
    "return_prompt_text": UnservedField("`return_prompt_text`; use `return_token_ids` and /detokenize"),
    "return_token_offsets": UnservedField("token offsets"),
    "routed_experts_prompt_start": UnservedField("reports of routed experts", (0,)),
    "stream_interval": UnservedField("`stream_interval`: every chunk is sent at once", (1,)),
    "vllm_xargs": UnservedField("`vllm_xargs`", ({},)),
    "watermarking": UnservedField("watermarks"),
    "web_search_options": UnservedField("web search"),
}
CHAT_ONLY = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (),
    "documents": (),
    "include_reasoning": (True,),
    "messages": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (),
}
TEXT_ONLY = {"best_of": (1,), "prompt_embeds": (), "suffix": ()}
"""Fields of one kind of completion only, with the values that have no effect on the other."""
_INSTEAD = {"best_of": " (use `n`)", "top_logprobs": "; use `logprobs`"}


def unserved_with(only: Mapping[str, tuple[Any, ...]], kind: str, path: str) -> dict[str, UnservedField]:
    """Return the fields that a kind of completion does not serve.   only: those that belong to `path`."""
    return UNSERVED | {
        name: UnservedField(f"`{name}`{_INSTEAD.get(name, '')} with a {kind}; it belongs to {path}", neutral)
        for name, neutral in only.items()
    }


class StreamOptions(Body, kw_only=True, frozen=True):
    """What a stream contains besides.

    include_usage: A last chunk has the token counts.
    continuous_usage_stats: Every chunk has those so far.
    """

    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class ResponseFormat(Body, kw_only=True, frozen=True):
    """The form of the output.

    type: Text, any JSON object, JSON by a schema, or text with JSON in tags.
    json_schema: Of type json_schema: an object whose `schema` is the schema.
    structures: Of type structural_tag: the tags, each with begin, schema and end.
    triggers: Of type structural_tag: what begins a tag.
    format: Of type structural_tag: a tree of formats, instead of both.
    """

    type: Annotated[str, one_of("text", "json_object", "json_schema", "structural_tag")]
    json_schema: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class SamplingBody(ModelBody, kw_only=True, frozen=True):
    """The fields common to chat and text completions.

    logit_bias: By token id: added to its logit, in [-100, 100].
    n: Outputs per prompt.
    seed: Makes the output repeatable.
    stream: Send the answer in chunks, as it is generated.
    stream_options: What a stream contains besides.
    top_k: Sample from so many most likely tokens; 0 or -1 is off.
    repetition_penalty: Above 1, makes tokens that the prompt or the output has less likely.
    no_repeat_ngram_size: No sequence of so many tokens, of prompt and output, occurs twice; 0 is off, at most 64.
    min_tokens: Least tokens of an output, unless the context ends it.
    stop_token_ids: Tokens that end the output.
    ignore_eos: Go on after the token that ends a text.
    include_stop_str_in_output: Leave the text of `stop` in the output.
    bad_words: Words whose usual tokens are never generated; the text may occur in others ("the" in "these").
    allowed_token_ids: Sample from these tokens only.
    logprob_token_ids: Log-probabilities of these tokens, in place of the most likely ones.
    prompt_logprobs: So many log-probabilities of each prompt token; -1: as many as the server allows.
    skip_special_tokens: Leave special tokens out of the text.
    spaces_between_special_tokens: Has no effect.
    truncate_prompt_tokens: Keep so many tokens from the end of the prompt (for encoders: its start); -1: all that fit.
    truncation_side: Where they are cut off instead.
    prompt_cache_key: Keep this request's prefix in the cache rather than others, for five minutes after its last use.
    prompt_cache_retention: The same; 24h: for a day.
    return_token_ids: Tell the ids of the prompt's and the output's tokens.
    return_tokens_as_token_ids: Write tokens in log-probabilities as "token_id:ID"; by default as the server is set.
    response_format: The form of the output: text, JSON, or JSON by a schema.
    structured_outputs: What the output follows: one of json, regex, choice, grammar, json_object, structural_tag.
    guided_json: Older form of `structured_outputs`: a JSON schema.
    guided_regex: Older form of `structured_outputs`: a regular expression.
    guided_choice: Older form of `structured_outputs`: one of these texts.
    guided_grammar: Older form of `structured_outputs`: a grammar.
    guided_whitespace_pattern: The white space between the parts of JSON, a regular expression.
    thinking_token_budget: Most tokens of reasoning: then it is closed, and the answer begins; -1: no limit.
    return_timings: Tell how long the parts of the work took: in `timings` of the answer, of a stream in its last chunk.
    timings_per_token: The same in every chunk of a stream, as far as they are known.
    use_beam_search: Search for the `n` most likely outputs, instead of sampling.
    length_penalty: Of a beam search: the power of an output's length that its log-probability is divided by.
    early_stopping: Of a beam search: end as soon as there are `n` outputs; "never": only when no better one can come.
    """

    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: OutputCount | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # the engine's own
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: Int32 | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    logprob_token_ids: list[TokenId] | None = None
    prompt_logprobs: NumTop | None = None
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Annotated[str, one_of("left", "right")] | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    request_id: RequestId | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    return_timings: Flag = False
    timings_per_token: Flag = False
    use_beam_search: Flag = False
    length_penalty: float | None = None
    early_stopping: bool | Annotated[str, one_of("never")] | None = None

    def check(self, limits: RequestLimits) -> None:
        limits.check_lists(self)
        names = ("model", "user", "cache_salt", "prompt_cache_key")
        limits.check_names(**{name: getattr(self, name) for name in names})
        limits.check_values(_structure_values(self), "grammar_chars")  # before a schema is written as text
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: needs stream to be true", "stream_options")
        if self.use_beam_search and self.stream:
            raise RequestError(
                "stream: a beam search has no output before it is done; set stream to false, or sample instead",
                "stream",
            )
        for name, neutral in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
            if not self.use_beam_search and getattr(self, name) not in neutral:
                raise RequestError(f"{name}: needs use_beam_search to be true", name)

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The longest answer asked for, and the name of the field that says so."""
        most = getattr(self, "max_completion_tokens", None)
        if most is not None:
            return "max_completion_tokens", most
        most = getattr(self, "max_tokens", None)
        return "max_tokens", _TEXT_TOKENS if most is UNSET else most

    @property
    def wants_timings(self) -> bool:
        return self.return_timings or self.timings_per_token

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return 1

    @property
    def num_outputs(self) -> int:
        """How many outputs are generated for each prompt."""
        return self.n or 1

    def sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        defaults: Mapping[str, object],
    ) -> SamplingParams:
        """The engine's parameters. Raises RequestError for values out of range.

        defaults: of fields that are not set; a beam search has none.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in _SHARED} | {
            "n": self.num_outputs,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "logit_bias": None if self.logit_bias is None else _token_bias(self.logit_bias),
            "structured_outputs": _structure_of(self),
            "beam_search": self._beam_search,
        }
        return SamplingParams.of_model({"max_tokens": None, **({} if self.use_beam_search else defaults)}, **given)

    @property
    def _beam_search(self) -> BeamSearchOptions | None:
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamSearchOptions(penalty, "never" if self.early_stopping == "never" else bool(self.early_stopping))


_SHARED = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.name in SamplingBody.__struct_fields__)
"""Fields that SamplingParams has under the same name."""


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    known: dict[int, float] = {}
    for token, value in bias.items():
        if (token_id := as_integer(token)) is None:
            raise RequestError(f"logit_bias: the key {token!r:.80} is not a token id", "logit_bias")
        known[token_id] = value
    return known


# ---- the form of the output: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_KNOWN = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", *_OPTIONS)
_IGNORED = ("disable_fallback",)  # of vLLM: there is one backend here, and so nothing to fall back to


def _structure_values(body: SamplingBody) -> dict[str, Any]:
    """Return the fields that hold schemas and grammars of any size, for RequestLimits.check_values."""
    form = body.response_format
    return {
        "response_format": form and [form.json_schema, form.structures, form.triggers, form.format],
        **{name: getattr(body, name) for name in ("structured_outputs", *_GUIDED, "guided_whitespace_pattern")},
    }


def _structure_of(body: SamplingBody) -> StructuredOutputsParams | None:
    """Return the form that a request asks for, or None. Raises RequestError for more than one."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = _of_response_format(body.response_format)
    given = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    if set(given) - {*_OPTIONS, *_IGNORED}:
        asked["structured_outputs"] = _known_only(given)
    for name in _GUIDED:
        value = getattr(body, name)
        if value is not None:
            asked[name] = {name.removeprefix("guided_"): value, "whitespace_pattern": body.guided_whitespace_pattern}
    if not asked:
        return None
    source, fields = next(iter(asked.items()))
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} exclude each other: give one of them", source)
    try:
        return StructuredOutputsParams(**fields, source=source)
    except RequestError as error:
        raise RequestError(str(error).replace("structured_outputs", source, 1), source) from None


def _known_only(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in (*_KNOWN, *_IGNORED):
            raise RequestError(
                f"structured_outputs: unknown field {name!r:.80}{nearest(name, list(_KNOWN))}", "structured_outputs"
            )
    return {name: value for name, value in given.items() if name in _KNOWN}


def _of_response_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "structural_tag":
        tag = {"structures": given.structures, "triggers": given.triggers, "format": given.format}
        return {"structural_tag": tag}
    schema = (given.json_schema or {}).get("schema")
    if not isinstance(schema, dict | bool):
        raise RequestError(
            'response_format: type "json_schema" needs json_schema.schema, a JSON schema', "response_format"
        )
    return {"json": schema}


def cache_ttl_s(key: str | None, retention: str | None) -> int | None:
    """Return for how long `prompt_cache_key` and `prompt_cache_retention` keep a prefix in the cache."""
    if retention == "24h":
        return 86_400
    return None if key is None and retention is None else 300
