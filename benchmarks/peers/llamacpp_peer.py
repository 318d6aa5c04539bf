"""llama.cpp through llama-cpp-python, one request after the other. usage: llamacpp_peer.py MODEL.gguf WORKLOAD.json"""

import os
import sys

from common import measure, read_work
from llama_cpp import Llama


def main() -> None:
    work = read_work(sys.argv[2])
    longest = max(len(request["prompt_token_ids"]) + request["max_tokens"] for request in work)
    threads = len(os.sched_getaffinity(0))
    llama = Llama(sys.argv[1], n_ctx=longest + 8, n_threads=threads, n_threads_batch=threads, verbose=False)

    def generate(ids: list[int], length: int) -> int:
        llama.reset()
        count = 0
        for _ in llama.generate(ids, temp=0.0):
            count += 1
            if count == length:
                break
        return count

    generate(list(range(10, 40)), 8)
    measure("llama.cpp", work, lambda: sum(generate(r["prompt_token_ids"], r["max_tokens"]) for r in work))


if __name__ == "__main__":
    main()
