#!/usr/bin/env python3
"""What a GPU reaches: bytes copied per second and bfloat16 products. usage: gpu_ceilings.py [--device cpu]

The best of several rounds: bytes read and written by a copy of 2 GiB, and products of 8,192 x 8,192 matrices. On a CPU
both are small: that proves the script.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch


def ceilings(device: str) -> dict[str, object]:
    """Return the device's name, `copy_bytes_per_s` and `bf16_flops_per_s`.   device: "cuda" or "cpu"."""
    num_bytes, size = (2**31, 8192) if device == "cuda" else (2**20, 64)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def seconds(call: Callable[[], object]) -> Iterator[float]:
        for _ in range(10):
            wait()
            begin = time.perf_counter()
            call()
            wait()
            yield time.perf_counter() - begin

    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "copy_bytes_per_s": 2 * source.numel() / min(seconds(lambda: target.copy_(source))),
        "bf16_flops_per_s": 2 * size**3 / min(seconds(lambda: a @ b)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    print(json.dumps(ceilings(parser.parse_args().device)))


if __name__ == "__main__":
    main()
