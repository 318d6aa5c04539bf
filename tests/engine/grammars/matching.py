"""Feed texts to grammars, token by token."""

import numpy as np

from pagoda.base.sampling_params import OutputRule
from pagoda.engine.grammars.llguidance_backend import LlguidanceBackend
from pagoda.engine.tokenizers.tokenizer import Tokenizer
from pagoda.worker.grammar import GrammarMatcher, MaskWork, num_mask_words

VOCAB = 258  # of the byte tokenizer


def ready(backend: LlguidanceBackend, rule: OutputRule | str) -> GrammarMatcher:
    """Return a matcher of a rule, or of a grammar's text."""
    rule = OutputRule(rule) if isinstance(rule, str) else rule
    backend.prepare(rule.grammar).result(60)
    return backend.matcher(rule)


def allowed(backend: LlguidanceBackend, matcher: GrammarMatcher, vocab: int = VOCAB) -> set[int]:
    mask = np.zeros((1, num_mask_words(vocab)), np.int32)
    backend.fill([MaskWork(matcher, 0)], mask)
    return set(np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:vocab]).tolist())


def accepts(backend: LlguidanceBackend, tokenizer: Tokenizer, grammar: str, text: str, vocab: int = VOCAB) -> bool:
    """Feed the text token by token, checking each against the mask; then an end token must be allowed."""
    matcher = ready(backend, grammar)
    assert matcher.error == ""
    for token in tokenizer.encode(text, False):
        if token not in allowed(backend, matcher, vocab):
            return False
        matcher.advance([token])
    return tokenizer.facts.eos_token_ids[0] in allowed(backend, matcher, vocab)
