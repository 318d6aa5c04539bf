"""GrammarPreparer: from a request's StructuredOutputsParams to a grammar that is known to compile."""

import contextlib
import threading
from collections import OrderedDict

from pagoda.base.errors import RequestError
from pagoda.base.request_limits import RequestLimits
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.engine.grammars.compiling import error_of_grammar
from pagoda.engine.grammars.grammar_text import grammar_text
from pagoda.engine.grammars.vocabulary import GrammarVocabulary
from pagoda.engine.tokenizers.tokenizer import Tokenizer

_MAX_KNOWN = 256


class GrammarPreparer:
    """Tries grammars before their requests are accepted, and remembers the last ones. Thread-safe.

    What compiles here compiles in the engine, which uses the same library, vocabulary and limits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, sizes: RequestLimits) -> None:
        """vocab_size: of the model's logits.   sizes: bounds what a request may ask for."""
        self._tokenizer = tokenizer
        self._vocabulary = GrammarVocabulary(lambda: tokenizer, vocab_size)
        self._sizes = sizes
        self._known: OrderedDict[StructuredOutputsParams, str] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, params: StructuredOutputsParams) -> str | None:
        """Return the text of a grammar that was prepared before, without any work."""
        with self._lock:
            text = self._known.get(params)
            if text is not None:
                self._known.move_to_end(params)
            return text

    def prepare(self, params: StructuredOutputsParams) -> str:
        """Return the grammar's text. Takes as long as compiling it: up to seconds, mostly without the GIL.

        Raises RequestError, naming the field, if it is too large or does not compile.
        """
        text = self.known(params)
        if text is not None:
            return text
        source = params.source
        self._sizes.check("grammar_chars", params.num_chars, source)
        text = grammar_text(params, source)
        if not self._tokenizer.facts.eos_token_ids:
            raise RequestError("structured output needs an end token, which this model's tokenizer lacks", source)
        error = error_of_grammar(self._vocabulary.get(), text)
        if error:
            raise RequestError(f"{source}: {error}", source)
        with self._lock:
            self._known[params] = text
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return text

    def load(self) -> None:
        """Build the library's form of the vocabulary, which the first grammar would wait for.

        That holds the interpreter: for a tenth of a second with 50,000 tokens, half a second with 150,000.
        """
        with contextlib.suppress(RequestError):  # a tokenizer without an end token; the request will say so
            self._vocabulary.get()
