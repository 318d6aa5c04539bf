"""The process that tries grammars: `python -m pagoda.engine.grammars.checker_worker MEMORY_BYTES PARENT_PID`.

A grammar of a caller may take for ever to compile, or overflow the library's stack; here that ends only this process.
What compiles here compiles in the engine, which uses the same library, vocabulary and limits. The vocabulary arrives
first on standard input, a socket, pickled by the parent, which is trusted; then grammars, each answered by an error
message or "".
"""

import contextlib
import os
import pickle
import resource
import socket
import struct
import sys
import threading
import time

from pagoda.engine.grammars.llguidance_backend import compile_grammar, library_tokenizer
from pagoda.engine.grammars.vocabulary import Vocabulary

SIZE = struct.Struct("<Q")
READY = b"R"
_STACK_BYTES = 4 * 2**20  # less than that of the engine's threads, so that what fits here fits there
_PARENT_CHECK_S = 0.5


def receive(connection: socket.socket) -> bytes:
    """Return one message. Raises EOFError if the other end closes the connection."""
    return _exactly(connection, SIZE.unpack(_exactly(connection, SIZE.size))[0])


def send(connection: socket.socket, data: bytes) -> None:
    """Send one message."""
    connection.sendall(SIZE.pack(len(data)) + data)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 2**20))
        if not piece:
            raise EOFError("the other end has closed the connection")
        data += piece
    return bytes(data)


def _serve(connection: socket.socket, memory_bytes: int) -> None:
    vocabulary: Vocabulary = pickle.loads(receive(connection))
    tokenizer = library_tokenizer(vocabulary, lambda text: [])
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + memory_bytes, present + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.sendall(READY)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            matcher = compile_grammar(tokenizer, receive(connection).decode())
            send(connection, matcher.get_error().encode())


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def main() -> None:
    memory_bytes, parent = map(int, sys.argv[1:3])
    connection = socket.socket(fileno=os.dup(0))
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(connection, memory_bytes))
    serving.start()
    serving.join()
    os._exit(0)


if __name__ == "__main__":
    main()
