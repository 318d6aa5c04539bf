"""The kernels of a wheel against the same sources compiled for one CPU: two engines in one process, in turn.

    python benchmarks/prebuilt.py                                     this CPU's variant against -march=native
    python benchmarks/prebuilt.py avx2=haswell avx512=skylake-avx512  variants against what such a CPU would compile

Prints the ratio of CPU times, compiled to prebuilt: the median over pairs of runs that follow each other, in the order
A B B A so that a drift of the machine cancels, and the middle half of them. A wheel should be within 2 %.
"""

import argparse
import statistics
import time

from pagoda import LLM, SamplingParams
from pagoda.kernels import select
from pagoda.kernels.native import build, library
from pagoda.kernels.native.threads import cpu_flags
from pagoda.kernels.native.variants import VARIANTS, runnable

FORMS = {
    "bf16": {},
    "int8 weights": {"quantization": "int8"},
    "4-bit weights": {"quantization": "gguf"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
"""Settings of the engines."""
LOADS = {"1 stream": (1, 32, 48), "batch of 16": (16, 128, 16)}
"""Requests, tokens of each prompt, tokens of each output."""


def compiled(target: tuple[str, ...]) -> library.NativeLibrary:
    return library.load(build.build(build.default_cache_dir(), build.find_compiler(), target))


def engine(kernels: library.NativeLibrary, model: str, settings: dict[str, str]) -> LLM:
    """Return an LLM with these kernels, on one thread; `load` is where they are chosen."""
    real, select.load = select.load, lambda: kernels
    try:
        return LLM(model, kernels="native", threads=1, enable_prefix_caching=False, num_blocks=1024, **settings)
    finally:
        select.load = real


def seconds(llm: LLM, requests: int, prompt: int, output: int) -> float:
    """Return the CPU time that it takes to answer `requests` prompts at once; other processes hardly change it."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [100 + (7 * index + i) % 5000 for i in range(prompt)]} for index in range(requests)]
    begin_s = time.process_time()
    llm.generate(prompts, params)
    return time.process_time() - begin_s


def ratios(prebuilt: LLM, native: LLM, load: tuple[int, int, int], rounds: int) -> list[float]:
    """Return the CPU time of the second divided by that of the first, for each of `rounds` pairs of runs."""
    found: list[float] = []
    for llm in (prebuilt, native):
        seconds(llm, *load)
    for _ in range(-(-rounds // 2)):
        first, second = seconds(prebuilt, *load), seconds(native, *load)
        third, fourth = seconds(native, *load), seconds(prebuilt, *load)
        found += [second / first, third / fourth]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="VARIANT=MARCH", help="default: this CPU's variant, and native")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    by_name = {variant.name: variant for variant in VARIANTS}
    for pair in args.pairs or [f"{runnable(cpu_flags())[0].name}=native"]:
        name, _, march = pair.partition("=")
        libraries = [compiled(by_name[name].target), compiled((f"-march={march}",))]
        print(f"{name} ({libraries[0].isa}) against -march={march} ({libraries[1].isa}), {libraries[0].compiler}")
        for form, settings in FORMS.items():
            with (
                engine(libraries[0], args.model, settings) as first,
                engine(libraries[1], args.model, settings) as second,
            ):
                for load_name, load in LOADS.items():
                    low, middle, high = statistics.quantiles(ratios(first, second, load, args.rounds), n=4)
                    print(f"  {form:14} {load_name:12} {middle:.3f}  ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
