"""SamplingParams and BeamSearchParams: how text is generated."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pagoda.base.errors import RequestError
from pagoda.base.outputs import RequestOutputKind
from pagoda.base.param_values import (
    Converted,
    Reader,
    checked,
    read_flag,
    read_integer,
    read_number,
    read_optional_integer,
    read_strings,
    read_token_ids,
    refuse,
)
from pagoda.base.registry import nearest
from pagoda.base.setting import Setting
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.base.text import as_integer

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow."""

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class BeamSearchOptions:
    """How the beams of a request are ranked, and when their search ends.

    length_penalty: the score of a hypothesis is the sum of its log-probabilities / length ** length_penalty, in
        [-10, 10]. The length counts generated tokens, eos included, as in transformers.
    early_stopping: when `n` hypotheses have ended, True stops; False stops unless a beam would be better than the worst
        of them if it ended now; "never" takes the best length that a beam may still get, up to max_tokens.
    """

    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        number = read_number("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        object.__setattr__(self, "length_penalty", number)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise refuse("early_stopping", self.early_stopping, "True, False or 'never'")


@dataclass(frozen=True, slots=True)
class SpeechRules:
    """Which tokens the output of a speech model may have; transcriptions set them. Log-probabilities are taken after.

    suppressed: never sampled.   suppressed_first: not sampled as the first token.   end_id: text is below it.
    first_timestamp: the id that stands for 0 s; it and all above it are timestamps. They come in pairs, never decrease,
        and the first token is one. The most likely token is only sampled if all timestamps together are not more
        likely. None: the prompt asks for a text without timestamps.
    max_first_step: the latest first timestamp, counted from first_timestamp.
    """

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    end_id: int = 0
    first_timestamp: int | None = None
    max_first_step: int = 50

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids that it names."""
        last = () if self.first_timestamp is None else (self.first_timestamp,)
        return (*self.suppressed, *self.suppressed_first, self.end_id, *last)


@dataclass(frozen=True, slots=True)
class PromptReasoning:
    """How the answer to a prompt begins.   format: of its reasoning, a name.   is_open: the prompt ends inside it."""

    format: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class OutputRule:
    """What the tokens of an output must follow.

    grammar: as text; "" allows any output.   budget: most tokens of reasoning, None for no limit.   reasoning: how the
    output begins; only with a budget.
    """

    grammar: str = ""
    budget: int | None = None
    reasoning: PromptReasoning | None = None


def _read_temperature(name: str, value: Any) -> float:
    temperature = read_number(name, value, low=0.0)
    return temperature if temperature >= GREEDY_EPSILON else 0.0


def _read_structure(_name: str, value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise refuse("structured_outputs", value, "StructuredOutputsParams, or a mapping of its fields")
    known = [item.name for item in dataclasses.fields(StructuredOutputsParams) if item.name != "source"]
    for name in value:
        if name not in known:
            raise RequestError(
                f"structured_outputs: unknown field {name!r:.80}{nearest(str(name), known)}", "structured_outputs"
            )
    return StructuredOutputsParams(**value)


def _read_truncation(name: str, value: Any) -> int | None:
    if value is not None and read_integer(name, value, -1) == 0:
        raise refuse(name, value, "an integer of at least 1, -1 (as many as the model takes) or None")
    return value


def _read_side(name: str, value: Any) -> str | None:
    if value not in (None, "left", "right"):
        raise refuse(name, value, "left, right or None")
    return value


def _read_grammar(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise refuse(name, value, "None; set structured_outputs")
    return value


def _read_beams(name: str, value: Any) -> BeamSearchOptions | None:
    if value is not None and not isinstance(value, BeamSearchOptions):
        raise refuse(name, value, "BeamSearchOptions or None")
    return value


def _read_speech(name: str, value: Any) -> SpeechRules | None:
    if value is not None and not isinstance(value, SpeechRules):
        raise refuse(name, value, "SpeechRules or None")
    return value


def _read_budget(name: str, value: Any) -> int | None:
    budget = read_optional_integer(name, value, -1)
    return None if budget == -1 else budget


def _read_reasoning(name: str, value: Any) -> PromptReasoning | None:
    if value is not None and not isinstance(value, PromptReasoning):
        raise refuse(name, value, "PromptReasoning or None")
    return value


def _read_kind(name: str, value: Any) -> RequestOutputKind | None:
    if value is not None and not isinstance(value, RequestOutputKind):
        raise refuse(name, value, "a RequestOutputKind or None")
    return value


def _read_logit_bias(_name: str, value: Any) -> tuple[tuple[int, float], ...]:
    return _logit_bias(value)


def _read_allowed(name: str, value: Any) -> tuple[int, ...] | None:
    return None if value is None else read_token_ids(name, value, allow_empty=False)


def _read_word_ids(_name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    return _bad_words_token_ids(value)


_READERS: Mapping[str, Reader] = {
    "n": partial(read_integer, low=1),
    "temperature": _read_temperature,
    "top_p": partial(read_number, low=0.0, high=1.0, low_open=True),
    "top_k": lambda name, value: max(read_integer(name, value, -1), 0),
    "min_p": partial(read_number, low=0.0, high=1.0),
    "seed": partial(read_optional_integer, low=-_MAX_SEED - 1, high=_MAX_SEED),
    "max_tokens": partial(read_optional_integer, low=0),
    "min_tokens": partial(read_integer, low=0),
    "stop": read_strings,
    "stop_token_ids": read_token_ids,
    "bad_words": read_strings,
    "bad_words_token_ids": _read_word_ids,
    "allowed_token_ids": _read_allowed,
    "logit_bias": _read_logit_bias,
    "presence_penalty": partial(read_number, low=-2.0, high=2.0),
    "frequency_penalty": partial(read_number, low=-2.0, high=2.0),
    # Logits are multiplied and divided by it: the products must be finite.
    "repetition_penalty": partial(read_number, low=1e-6, high=1e6),
    "no_repeat_ngram_size": partial(read_integer, low=0, high=64),
    "forced_eos_token_id": partial(read_optional_integer, low=0),
    "logprobs": partial(read_optional_integer, low=-1),
    "prompt_logprobs": partial(read_optional_integer, low=-1),
    "logprob_token_ids": lambda name, value: tuple(dict.fromkeys(read_token_ids(name, value))) or None,
    "truncate_prompt_tokens": _read_truncation,
    "truncation_side": _read_side,
    "structured_outputs": _read_structure,
    "grammar": _read_grammar,
    "beam_search": _read_beams,
    "speech": _read_speech,
    "thinking_token_budget": _read_budget,
    "reasoning": _read_reasoning,
    "output_kind": _read_kind,
    **dict.fromkeys(
        (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ),
        read_flag,
    ),
}
_UNSERVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "ask for n outputs, and choose among them"),
    "extra_args": ((None, {}), "there are no plugins that would read them"),
    "flat_logprobs": ((False,), "log-probabilities are lists of mappings"),
    "guided_decoding": ((None,), "use structured_outputs"),
    "logits_processors": ((None, []), "use logit_bias, allowed_token_ids or structured_outputs"),
    "skip_clone": ((False, True), "leave it out"),
}


_NONE: Any = ()  # defaults of fields that are Converted
_UNSET: Any = None


@checked(_READERS, _UNSERVED)
@dataclass(slots=True)
class SamplingParams:
    """How output tokens are chosen and when they end.

    Every field is checked when it is set, at construction or later; RequestError names the field, its value and what is
    allowed. A request takes the values that it was made with.
    Tuple fields also accept lists, `stop` and `bad_words` a single string, and `logit_bias` a mapping; they are
    converted to the types below.

    n: output sequences of one prompt.   temperature: 0 is greedy.
    top_p: in (0, 1].   top_k: 0 or -1 is off.   min_p: in [0, 1].
    seed: makes the output repeatable, in any batch; output i of n uses seed + i.
    max_tokens: maximum output tokens; None: as many as the model allows; 0: none, only the prompt is scored, which may
        have max_model_len tokens.   min_tokens: minimum output tokens.
    presence_penalty, frequency_penalty: in [-2, 2], count the output.
    repetition_penalty: in [1e-6, 1e6], prompt and output.
    logit_bias: token id -> bias added to its logit, in [-100, 100].   allowed_token_ids: sample only these tokens.
    bad_words: words whose usual tokens, alone and after a space, are never generated in a row. The same text may
        still occur in other tokens: "the" in "these". The engine adds them as `bad_words_token_ids`.
    stop: strings that end the output; cut off unless include_stop_str_in_output.   stop_token_ids: ids that end it.
    logprobs / prompt_logprobs: how many top entries to report per output / prompt token (None: nothing, -1: as many as
        max_logprobs allows).
    logprob_token_ids: report these tokens in place of the top entries, without ranks; `logprobs` is their number.
    detokenize: False leaves the text empty.   spaces_between_special_tokens: has no effect.
    truncate_prompt_tokens: keep only this many tokens from the end of the prompt, or from the start of one that
        an encoder reads (-1: as many as fit).   truncation_side: where tokens are cut off instead, "left" or "right".
    structured_outputs: constrains the output; StructuredOutputsParams or a mapping of its fields. The engine replaces
        it by `grammar`, its own representation.
    beam_search: search for the `n` best outputs with `n` beams, instead of sampling; see BeamSearchParams.
    no_repeat_ngram_size: no sequence of so many tokens, of prompt and output, occurs twice; at most 64, 0 is off.
    forced_eos_token_id: the last token of an output that reaches max_tokens, without structured_outputs and unless the
        closing of its reasoning is due; a model's generation_config.json sets it.
    speech: rules of a speech model's output; transcriptions set them.
    thinking_token_budget: maximum tokens of reasoning, after which its closing is forced and the output goes on freely;
        0 closes it at once, None or -1 is off.   reasoning: how the output begins; chats set it.
    output_kind: what AsyncLLM.generate yields; None: CUMULATIVE.
    """

    n: int = 1
    temperature: Annotated[float, Setting("0 always takes the most likely token; higher is more varied.")] = 1.0
    top_p: Annotated[float, Setting("Sample from the smallest set of tokens with this much probability.")] = 1.0
    top_k: Annotated[int, Setting("Sample from the k most likely tokens (0: all).")] = 0
    min_p: Annotated[float, Setting("Exclude tokens less likely than this fraction of the most likely one.")] = 0.0
    seed: int | None = None
    max_tokens: Annotated[int | None, Setting("Maximum number of output tokens.")] = 16
    min_tokens: int = 0
    stop: Annotated[Converted[str | Iterable[str] | None, tuple[str, ...]], Setting("String that ends the output.")] = (
        _NONE
    )
    stop_token_ids: Converted[Iterable[int] | None, tuple[int, ...]] = _NONE
    ignore_eos: Annotated[bool, Setting("Continue after the model's end-of-text token.")] = False
    include_stop_str_in_output: bool = False
    bad_words: Converted[str | Iterable[str] | None, tuple[str, ...]] = _NONE
    bad_words_token_ids: Converted[Iterable[Sequence[int]], tuple[tuple[int, ...], ...]] = _NONE
    allowed_token_ids: Converted[Iterable[int] | None, tuple[int, ...] | None] = _UNSET
    logit_bias: Converted[
        Mapping[int, float] | Mapping[str, float] | Iterable[tuple[int, float]] | None, tuple[tuple[int, float], ...]
    ] = _NONE
    presence_penalty: Annotated[float, Setting("Make tokens that the output already has less likely, -2 to 2.")] = 0.0
    frequency_penalty: Annotated[float, Setting("The same for each occurrence of a token, -2 to 2.")] = 0.0
    repetition_penalty: Annotated[
        float, Setting("Above 1, make tokens of prompt and output less likely; 1 is off.")
    ] = 1.0
    no_repeat_ngram_size: int = 0
    forced_eos_token_id: int | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    structured_outputs: Converted[
        StructuredOutputsParams | Mapping[str, Any] | None, StructuredOutputsParams | None
    ] = _UNSET
    grammar: str | None = None
    beam_search: BeamSearchOptions | None = None
    speech: SpeechRules | None = None
    thinking_token_budget: int | None = None
    reasoning: PromptReasoning | None = None
    output_kind: RequestOutputKind | None = None

    def __post_init__(self) -> None:
        self.check_together()

    @classmethod
    def of_model(cls, defaults: Mapping[str, object], **given: Any) -> "SamplingParams":
        """Return the given parameters, and a model's defaults for those that are not given, or are None.

        Its min_tokens is at most max_tokens.
        """
        values: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        least = values.pop("min_tokens", 0)
        params = cls(**values)
        params.min_tokens = least
        if given.get("min_tokens") is None and params.max_tokens is not None:
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        params.check_together()
        return params

    def clone(self) -> "SamplingParams":
        """Return a copy, to change some fields of."""
        return copy.copy(self)

    def check_together(self) -> None:
        """Raise RequestError for fields that contradict each other; each has been checked when it was set."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True, because they are searched for in the text", "stop")
        if self.logprob_token_ids is not None and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise refuse(
                "logprobs", self.logprobs, "left out next to logprob_token_ids, or the number of different ones"
            )
        if self.beam_search is not None:
            self._check_beam_search()

    def _check_beam_search(self) -> None:
        """Raise RequestError for fields that have no meaning in a beam search."""
        if self.max_tokens == 0:
            raise refuse("max_tokens", 0, "at least 1 in a beam search")
        for name, neutral in _NEUTRAL_IN_BEAM_SEARCH.items():
            if getattr(self, name) not in neutral:
                raise RequestError(
                    f"{name}={getattr(self, name)!r:.80} cannot be combined with beam search, which ranks by the "
                    f"model's own log-probabilities: leave {name} out, or sample instead",
                    name,
                )

    @property
    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """All token ids that it names, by field: a model must have them."""
        return {
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "logprob_token_ids": self.logprob_token_ids or (),
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "bad_words_token_ids": tuple(token for word in self.bad_words_token_ids for token in word),
            "forced_eos_token_id": () if self.forced_eos_token_id is None else (self.forced_eos_token_id,),
            "speech": () if self.speech is None else self.speech.token_ids,
        }

    @property
    def rule(self) -> OutputRule | None:
        """What the engine makes the output follow, None for any output. A budget needs `reasoning`."""
        if self.thinking_token_budget is not None and self.reasoning is not None:
            return OutputRule(self.grammar or "", self.thinking_token_budget, self.reasoning)
        return None if self.grammar is None else OutputRule(self.grammar)

    def with_lengths(self, max_tokens: int, min_tokens: int) -> "SamplingParams":
        """Return a copy with other lengths, which must be valid. Its lists are shared and not validated again."""
        changed = copy.copy(self)
        object.__setattr__(changed, "max_tokens", max_tokens)
        object.__setattr__(changed, "min_tokens", min_tokens)
        return changed

    def with_grammar(self, grammar: str) -> "SamplingParams":
        """Return a copy with the engine's text in place of structured_outputs. Its lists are shared."""
        changed = copy.copy(self)
        object.__setattr__(changed, "structured_outputs", None)
        object.__setattr__(changed, "grammar", grammar)
        return changed

    def with_reasoning(self, reasoning: PromptReasoning) -> "SamplingParams":
        """Return a copy that says how the output begins. Its lists are shared."""
        changed = copy.copy(self)
        object.__setattr__(changed, "reasoning", reasoning)
        return changed


# Values that change nothing. Stop strings would have to be searched for in the text of every beam at every step.
_NEUTRAL_IN_BEAM_SEARCH: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "stop": ((),),
    "bad_words": ((),),
    "bad_words_token_ids": ((),),
    "allowed_token_ids": (None,),
    "logprob_token_ids": (None,),
    "logit_bias": ((),),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "forced_eos_token_id": (None,),
    "speech": (None,),
}


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How a beam search runs: vLLM's fields, and early_stopping, which is ours.

    beam_width: beams, and outputs.   max_tokens: maximum output tokens.   ignore_eos: continue after eos.
    temperature: only 0 or 1; it would not change which tokens are the most likely ones, only their weight.
    length_penalty, early_stopping: see BeamSearchOptions.
    include_stop_str_in_output: keep the text of the token that ends an output.
    structured_outputs: constrains the outputs, as in SamplingParams.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "beam_width", read_integer("beam_width", self.beam_width, 1))
        put(self, "max_tokens", read_integer("max_tokens", self.max_tokens, 1))
        self.sampling_params()  # raises RequestError for the other fields

    def sampling_params(self, logprobs: int | None = None) -> SamplingParams:
        """Return the same request as SamplingParams."""
        return SamplingParams(
            n=self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=logprobs,
            structured_outputs=self.structured_outputs,
            beam_search=BeamSearchOptions(self.length_penalty, self.early_stopping),
        )


def _bad_words_token_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refuse("bad_words_token_ids", value, "a list of lists of token ids")
    return tuple(read_token_ids("bad_words_token_ids", item, allow_empty=False) for item in value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in ascending order of id. JSON has text keys only, so "5" is taken for 5."""
    allowed = "a mapping of token ids to numbers in [-100, 100]"
    if value is None:
        return ()
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise refuse("logit_bias", value, allowed)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise refuse("logit_bias", value, allowed)
        token, bias = pair
        if isinstance(token, str) and (token_id := as_integer(token)) is not None:
            token = token_id
        biases[read_integer("logit_bias", token, 0)] = read_number("logit_bias", bias, low=-100.0, high=100.0)
    return tuple(sorted(biases.items()))
