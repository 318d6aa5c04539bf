"""The process that encodes texts for a tokenizer that may take for ever:
`python -m pagoda.engine.tokenizers.encoder_worker MEMORY_BYTES PARENT_PID`.

For its start it gets the tokenizer as JSON, the marks and the unknown token, pickled by the parent, which is trusted.
"""

import array
import json
import pickle
import struct
import sys

import tokenizers

from pagoda.base.errors import RequestError
from pagoda.engine.killable_worker import Parent, limit_memory
from pagoda.engine.tokenizers.text_encoder import TextEncoder

HEAD = struct.Struct("<??")  # whether the text is marked, whether to add special tokens; then the text
ENCODED, REFUSED = range(2)  # first byte of a reply; then int32 ids, or an error message and its param as JSON


def _answer(encoder: TextEncoder, data: bytes) -> bytes:
    is_marked, add_special_tokens = HEAD.unpack_from(data)
    text = data[HEAD.size :].decode("utf-8", "surrogatepass")
    try:
        ids = (encoder.encode_marked if is_marked else encoder.encode)(text, add_special_tokens)
        return bytes([ENCODED]) + array.array("i", ids).tobytes()
    except RequestError as error:
        return bytes([REFUSED]) + json.dumps([str(error), error.param]).encode()
    except MemoryError:
        return bytes([REFUSED]) + json.dumps(["the tokenizer needs too much memory for this text", "prompt"]).encode()


def main() -> None:
    parent = Parent()
    described, marks, unknown = pickle.loads(parent.first())
    encoder = TextEncoder(tokenizers.Tokenizer.from_str(described), marks, unknown)
    limit_memory(int(sys.argv[1]))
    parent.serve(lambda data: _answer(encoder, data))


if __name__ == "__main__":
    main()
