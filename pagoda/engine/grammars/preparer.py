"""GrammarPreparer: from a request's StructuredOutputsParams to a grammar that is known to compile."""

import threading
from collections import OrderedDict

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.cancellation import Cancellation
from pagoda.engine.grammars.checker import GrammarChecker, GrammarLimits
from pagoda.engine.grammars.grammar_text import GrammarText, grammar_text
from pagoda.engine.grammars.vocabulary import Vocabulary
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_MAX_KNOWN = 256


class GrammarPreparer:
    """Checks grammars in another process, and remembers the last ones. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, sizes: RequestLimits, limits: GrammarLimits | None = None
    ) -> None:
        """vocab_size: of the model's logits.   sizes: bounds what a request may ask for."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._sizes = sizes
        self._checker = GrammarChecker(self._vocabulary, limits)
        self._known: OrderedDict[StructuredOutputsParams, str] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, params: StructuredOutputsParams) -> str | None:
        """Return the text of a grammar that was prepared before, without any work."""
        with self._lock:
            text = self._known.get(params)
            if text is not None:
                self._known.move_to_end(params)
            return text

    def prepare(self, params: StructuredOutputsParams, cancellation: Cancellation | None = None) -> str:
        """Return the grammar's text. Takes as long as compiling it. Raises RequestError if that is not possible.

        cancellation: ends the compilation; then raises Cancelled.
        """
        text = self.known(params)
        if text is not None:
            return text
        self._sizes.check("grammar_chars", params.num_chars, params.source)
        text = self.check(grammar_text(params, params.source), params.source, cancellation)
        with self._lock:
            self._known[params] = text
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return text

    def check(self, grammar: GrammarText, field_name: str, cancellation: Cancellation | None = None) -> str:
        """Return the text of a grammar. Raises RequestError, naming the field, if it does not compile."""
        if not self._tokenizer.facts.eos_token_ids:
            raise RequestError("structured output needs an end token, which this model's tokenizer lacks", field_name)
        self._checker.check(grammar, field_name, cancellation)
        return grammar.text

    def close(self) -> None:
        """Kill the checking process. Idempotent."""
        self._checker.close()

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._vocab_size)
