"""The process that tries grammars: `python -m pagoda.engine.grammars.checker_worker MEMORY_BYTES PARENT_PID`.

A grammar of a caller may take for ever to compile, or overflow the library's stack; here that ends only this process.
What compiles here compiles in the engine, which uses the same library, vocabulary and limits. For its start it gets the
vocabulary, pickled by the parent, which is trusted; then grammars, each answered by an error message or "".

Some grammars compile but allow no first token (`{"$ref": "#"}`, `start: start`); so the first mask is computed as well.
Others exceed a limit of the library as soon as an output begins, such as a rule with thousands of alternatives: a few
short outputs are tried, and if none gets through, no output of the model would.
"""

import os
import pickle
import sys
import threading

import numpy as np
from llguidance import LLMatcher

from pagoda.engine.grammars.llguidance_backend import compile_grammar, library_tokenizer
from pagoda.engine.grammars.vocabulary import Vocabulary
from pagoda.engine.killable_worker import Parent, limit_memory

_NUM_TRIALS = 3
_TRIAL_TOKENS = 6
_STACK_BYTES = 4 * 2**20  # less than that of the engine's threads, so that what fits here fits there


def _serve(parent: Parent) -> None:
    vocabulary: Vocabulary = pickle.loads(parent.first())
    tokenizer = library_tokenizer(vocabulary, vocabulary.longest_first)

    def error_of(grammar: bytes) -> bytes:
        matcher = compile_grammar(tokenizer, grammar.decode())
        if not matcher.get_error():
            try:
                matcher.compute_bitmask()
            except ValueError as error:
                return str(error).encode()
        return (matcher.get_error() or _error_of_outputs(matcher)).encode()

    limit_memory(int(sys.argv[1]))
    parent.serve(error_of)


def _error_of_outputs(matcher: LLMatcher) -> str:
    """Return the first error if each of a few short outputs ends with one, else ""."""
    first = ""
    for trial in range(_NUM_TRIALS):
        error = _error_of_output(matcher.deep_copy(), trial)
        if not error:
            return ""
        first = first or error
    return first


def _error_of_output(matcher: LLMatcher, trial: int) -> str:
    """Return the error of an output, chosen by the number of its trial among those that the grammar allows, or ""."""
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_stopped():  # by an end token
            break
        try:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        except ValueError as error:
            return str(error)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not len(allowed):
            break
        if not matcher.consume_token(int(allowed[trial * (len(allowed) - 1) // (_NUM_TRIALS - 1)])):
            break
    return matcher.get_error()


def main() -> None:
    parent = Parent()
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(parent,))
    serving.start()
    serving.join()
    os._exit(0)


if __name__ == "__main__":
    main()
