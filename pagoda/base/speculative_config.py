"""SpeculativeConfig: how drafts are made, with vLLM's names."""

from dataclasses import dataclass, fields, replace
from typing import Annotated

from pagoda.base.abbreviate import abbreviate
from pagoda.base.dtypes import QUANTIZATIONS
from pagoda.base.errors import ConfigError
from pagoda.base.setting import Setting

METHODS = ("ngram", "suffix", "draft_model", "layer_skip", "forced")
_NAMED_AS_MODEL = ("[ngram]", "ngram", "suffix")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding. Outputs are the same with any method, and with none."""

    method: Annotated[
        str | None, Setting("How to draft: ngram, suffix, draft_model, layer_skip or forced.", unset="no speculation")
    ] = None
    num_speculative_tokens: Annotated[int, Setting("Maximum draft tokens per sequence and step.", at_least=1)] = 8
    adaptive: Annotated[
        bool, Setting("Draft only as many tokens as make it faster; off: always num_speculative_tokens, as in vLLM.")
    ] = True
    prompt_lookup_max: Annotated[
        int, Setting("ngram: maximum length of the match with earlier text, in tokens.", at_least=1)
    ] = 16
    prompt_lookup_min: Annotated[int, Setting("ngram: minimum length of the match, in tokens.", at_least=1)] = 2
    suffix_decoding_max_tree_depth: Annotated[
        int, Setting("suffix: maximum length of the match with earlier text, in tokens.", at_least=1)
    ] = 24
    suffix_decoding_max_cached_requests: Annotated[
        int, Setting("suffix: number of finished outputs to search as well (0: none).", at_least=0)
    ] = 10_000
    suffix_decoding_max_spec_factor: Annotated[
        float, Setting("suffix: maximum draft tokens per matched token.", at_least=0)
    ] = 1.0
    suffix_decoding_min_token_prob: Annotated[
        float,
        Setting("suffix: end a draft at a token less likely than this among the known continuations.", at_least=0),
    ] = 0.1
    model: Annotated[
        str | None, Setting("draft_model: the draft model, which must have the same vocabulary.", unset="none")
    ] = None
    revision: Annotated[
        str | None, Setting("draft_model: branch, tag or commit of a hub model.", unset="the hub's default")
    ] = None
    quantization: Annotated[
        str | None,
        Setting(
            "draft_model: quantization of its weights; none: floats.",
            unset="its own codes, if it has any; floats for a GGUF beside a model that is dequantised",
            words=("none", *QUANTIZATIONS),
        ),
    ] = None
    num_draft_layers: Annotated[
        int | None,
        Setting("layer_skip: number of first layers used for drafting.", unset="a third of the model's", at_least=1),
    ] = None


def resolve_speculative(config: SpeculativeConfig) -> SpeculativeConfig | None:
    """Return the settings with their method filled in (draft_model, if only a model is given), or None: no speculation.

    Raises ConfigError for a method that is not supported, and for settings that do not belong to the method.
    """
    if config.model is not None and config.model in _NAMED_AS_MODEL:  # vLLM's older form
        config = replace(config, method=config.method or config.model.strip("[]"), model=None)
    method = config.method or ("draft_model" if config.model is not None else None)
    if method is None:
        if config != SpeculativeConfig():
            raise ConfigError(f"speculative_config needs a method: one of {', '.join(METHODS)}")
        return None
    if method not in METHODS:
        raise ConfigError(
            f"speculative_config.method={abbreviate(method)} is not supported; take one of {', '.join(METHODS)}"
        )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"speculative_config.prompt_lookup_min={config.prompt_lookup_min} is more than "
            f"prompt_lookup_max={config.prompt_lookup_max}; lower the first or raise the second"
        )
    if (method == "draft_model") != (config.model is not None):
        raise ConfigError(
            "speculative_config: method draft_model needs a model, and no other method takes one; got "
            f"method={method} and model={abbreviate(config.model)}"
        )
    _check_fields_of_other_methods(config, method)
    return replace(config, method=method)


_METHOD_OF_PREFIX = {
    "prompt_lookup": "ngram",
    "suffix_decoding": "suffix",
    "revision": "draft_model",
    "quantization": "draft_model",
    "num_draft_layers": "layer_skip",
}
"""How the name of a field begins -> the only method that reads it."""


def _check_fields_of_other_methods(config: SpeculativeConfig, method: str) -> None:
    """Raise ConfigError for a field that was changed and that `method` does not read."""
    for item in fields(SpeculativeConfig):
        reader = next((m for prefix, m in _METHOD_OF_PREFIX.items() if item.name.startswith(prefix)), method)
        if reader != method and getattr(config, item.name) != item.default:
            raise ConfigError(
                f"speculative_config.{item.name} has no effect with method={method}: only {reader} reads it; leave it "
                "out, or change the method"
            )
