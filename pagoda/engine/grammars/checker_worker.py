"""The process that tries grammars: `python -m pagoda.engine.grammars.checker_worker MEMORY_BYTES PARENT_PID`.

A grammar of a caller may take for ever to compile, or overflow the library's stack; here that ends only this process.
What compiles here compiles in the engine, which uses the same library, vocabulary and limits. For its start it gets the
vocabulary, pickled by the parent, which is trusted; then grammars, each answered by an error message or "".

Some grammars compile but allow no first token (`{"$ref": "#"}`, `start: start`); so the first mask is computed as well.
"""

import os
import pickle
import sys
import threading

from pagoda.engine.grammars.llguidance_backend import compile_grammar, library_tokenizer
from pagoda.engine.grammars.vocabulary import Vocabulary
from pagoda.engine.killable_worker import Parent, limit_memory

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
        return matcher.get_error().encode()

    limit_memory(int(sys.argv[1]))
    parent.serve(error_of)


def main() -> None:
    parent = Parent()
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(parent,))
    serving.start()
    serving.join()
    os._exit(0)


if __name__ == "__main__":
    main()
