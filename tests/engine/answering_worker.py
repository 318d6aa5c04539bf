"""A child that does what its messages say: `python -m tests.engine.answering_worker PARENT_PID`."""

import os
import time

from pagoda.engine.killable_worker import Parent, limit_memory


def main() -> None:
    parent = Parent()
    first = parent.first().decode()
    limit_memory(2**29)
    num_messages = 0

    def answer(message: bytes) -> bytes:
        nonlocal num_messages
        num_messages += 1
        match message.decode().split():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["loop"]:
                while True:
                    pass
            case ["die"]:
                os._exit(1)
            case ["allocate"]:
                return f"{len(bytes(2**34))}".encode()
            case _:
                pass
        return f"{first} {os.getpid()} {num_messages} {message.decode()}".encode()

    parent.serve(answer, lambda: num_messages == 5)


if __name__ == "__main__":
    main()
