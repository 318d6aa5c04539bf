"""Compile grammars with the llguidance library, and find out whether any output can follow one."""

import json
import logging
import re
import threading
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagoda.engine.tokenizers.tokenizer import is_panic

logger = logging.getLogger("pagoda")

_QUIET = 0
_SEVERAL = '{"grammars": ['
_NUM_TRIALS = 3
_TRIAL_TOKENS = 6
_MAX_MESSAGE_CHARS = 300
_PLACE_IN_TEXT = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_STACK_BYTES = 256 * 2**20  # of address space; memory is used as far as a grammar is deep
_STACK_SIZE_LOCK = threading.Lock()  # the stack size of new threads is a setting of the process
LIMITS = LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=50_000, verbose_errors=False)
"""Bounds on the work and memory of one grammar. Every process compiles with the same ones."""


def _library_form(text: str) -> str:
    """Return a grammar's text as the library takes it: one grammar, or a list of them that name each other."""
    return text if text.startswith(_SEVERAL) else json.dumps({"grammars": [{"lark_grammar": text}]})


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher at the beginning of a grammar; look at its `get_error`. Releases the GIL.

    Compiling recurses as deep as a grammar's rules name each other, thousands of them at most, so it runs on a thread
    with a large stack.
    """
    done: Future[LLMatcher] = Future()

    def compile_it() -> None:
        try:
            done.set_result(LLMatcher(tokenizer, _library_form(text), log_level=_QUIET, limits=LIMITS))
        except BaseException as error:  # the caller's to handle
            done.set_exception(error)

    with _STACK_SIZE_LOCK:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=compile_it, name="pagoda-grammar-compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    return done.result()


def error_of_grammar(tokenizer: LLTokenizer, text: str) -> str:
    """Return why no output can follow a grammar, "" if one can: compile it and try a few short outputs.

    Some grammars compile but allow no first token (`{"$ref": "#"}`, `start: start`). Others exceed a limit of the
    library as soon as an output begins, such as a rule with thousands of alternatives: if no trial gets through, no
    output of the model would.
    """
    try:
        matcher = compile_grammar(tokenizer, text)
        error = matcher.get_error()
        for trial in range(0 if error else _NUM_TRIALS):
            found = _error_of_output(matcher.deep_copy(), trial)
            if not found:
                return ""
            error = error or found
    except BaseException as raised:
        error = library_error(raised)
    return _shorten(error)


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


def _shorten(message: str) -> str:
    """Return the first line of the library's message; the grammar's own text follows it, then, for a regex, why."""
    line, *more = _PLACE_IN_TEXT.sub("", message.strip()).split("\n")
    line += next((one.removeprefix("error:") for one in more if one.startswith("error:")), "")
    if line == "NoExtensionBias":  # what the library says of a grammar without a first token
        return "no text satisfies it"
    if line.startswith("panic: "):  # it has 65,000 symbols at most
        return "it is too large for the grammar library"
    if line.startswith("oneOf constraints"):
        return "the alternatives of a oneOf may overlap; tell them apart by a required constant, or use anyOf"
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 3] + "..."


def library_error(error: BaseException) -> str:
    """Return the message of what the library raised. Raises it again if it is not the library's, as Ctrl-C is not."""
    if not (isinstance(error, Exception) or is_panic(error)):
        raise error
    logger.error("the grammar library failed: %s", error, exc_info=error)
    return str(error) or type(error).__name__
