"""Which drafters there are, and how they are made from the settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.base.speculative_config import SpeculativeConfig
from pagoda.worker.drafters.drafter import Drafter
from pagoda.worker.drafters.forced import ForcedDrafter
from pagoda.worker.drafters.ngram import NgramDrafter
from pagoda.worker.drafters.suffix import SuffixDrafter, SuffixSettings

if TYPE_CHECKING:
    from pagoda.worker.drafters.rollout import DraftForward
    from pagoda.worker.grammar_rows import GrammarRows
    from pagoda.worker.sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class DraftParts:
    """What a drafter that runs a model needs.

    draft: that model's forward pass.   num_blocks: of its own KV cache, 0 if it uses the target's.
    """

    draft: "DraftForward"
    sampler: "Sampler"
    num_blocks: int = 0


def _ngram(config: SpeculativeConfig, _: DraftParts | None) -> Drafter:
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)


def _suffix(config: SpeculativeConfig, _: DraftParts | None) -> Drafter:
    settings = SuffixSettings(
        max_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
    return SuffixDrafter(settings)


def _draft_model(_: SpeculativeConfig, parts: DraftParts | None) -> Drafter:
    from pagoda.worker.drafters.draft_model import DraftModelDrafter

    assert parts is not None
    return DraftModelDrafter(parts.draft, parts.sampler, parts.num_blocks)


def _layer_skip(_: SpeculativeConfig, parts: DraftParts | None) -> Drafter:
    from pagoda.worker.drafters.layer_skip import LayerSkipDrafter

    assert parts is not None
    return LayerSkipDrafter(parts.draft, parts.sampler)


def _none(_: SpeculativeConfig, __: DraftParts | None) -> None:
    return None


_DRAFTERS: Mapping[str, Callable[[SpeculativeConfig, DraftParts | None], Drafter | None]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "layer_skip": _layer_skip,
    "forced": _none,
}


def make_drafter(
    config: SpeculativeConfig, parts: DraftParts | None = None, grammars: "GrammarRows | None" = None
) -> Drafter:
    """Return the drafter of a configuration whose method is set. What grammars force comes first with any method.

    parts: for the methods that run a model.   grammars: of the worker's rows.
    """
    assert config.method is not None
    return ForcedDrafter(grammars, _DRAFTERS[config.method](config, parts))
