"""Transcription compared with faster-whisper: word error rate, and seconds of sound per second at 1 and at many files.

    python benchmarks/transcription.py MODEL FOLDER --at-once 1 16 --peer-python PEER/bin/python

MODEL: a folder with a CTranslate2 Whisper (model.bin, tokenizer.json), which both read. FOLDER: sound files, each with
what is said in a file of the same name that ends in .txt. Greedy on both sides, with timestamps, no fallback. The peer
runs in an environment of its own that has `faster_whisper`, once per --peer-types, on as many of its workers as there
are threads where several files are at once (it batches within a file only); its best counts.
`jiwer` computes the word error rate where it is installed. One JSON line is printed per engine and number of files.
"""

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Transcribe = Callable[[Sequence[Path]], list[str]]

_GREEDY: dict[str, Any] = {
    "compression_ratio_threshold": None,
    "no_speech_threshold": None,
}


def load_pagoda(model: str, threads: int, dtype: str, at_once: int) -> Transcribe:
    from pagoda import LLM

    llm = LLM(model, dtype=dtype, threads=threads, max_num_seqs=max(at_once, 1))

    def transcribe(files: Sequence[Path]) -> list[str]:
        outputs = llm.transcribe(
            list(files), use_tqdm=False, language="en", temperature=0.0, logprob_threshold=None, **_GREEDY
        )
        return [output.text for output in outputs]

    return transcribe


def load_faster_whisper(model: str, threads: int, dtype: str, at_once: int) -> Transcribe:
    from concurrent.futures import ThreadPoolExecutor

    from faster_whisper import WhisperModel  # pyright: ignore[reportMissingImports]

    workers = min(at_once, threads)
    peer = WhisperModel(
        model, device="cpu", compute_type=dtype, cpu_threads=max(1, threads // workers), num_workers=workers
    )

    def one(file: Path) -> str:
        segments, _ = peer.transcribe(
            str(file),
            language="en",
            beam_size=1,
            temperature=0.0,
            log_prob_threshold=None,
            condition_on_previous_text=False,
            **_GREEDY,
        )
        return "".join(segment.text for segment in segments)

    def transcribe(files: Sequence[Path]) -> list[str]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, files))

    return transcribe


LOADERS = {"pagoda": load_pagoda, "faster-whisper": load_faster_whisper}


def measure(engine: str, model: str, files: Sequence[Path], arguments: argparse.Namespace, dtype: str) -> None:
    """Print a line for each number of files at once: the median of the rounds after the first."""
    for at_once in arguments.at_once:
        transcribe = LOADERS[engine](model, arguments.threads, dtype, at_once)
        chosen = [files[at % len(files)] for at in range(at_once)]
        seconds: list[float] = []
        texts: list[str] = []
        for _ in range(arguments.rounds + 1):
            begin_s = time.perf_counter()
            texts = transcribe(chosen)
            seconds.append(time.perf_counter() - begin_s)
        took_s = statistics.median(seconds[1:])
        line = {
            "engine": engine,
            "dtype": dtype,
            "at_once": at_once,
            "sound_s": round(sum(map(duration_s, chosen)), 2),
            "took_s": round(took_s, 3),
            "real_time_factor": round(sum(map(duration_s, chosen)) / took_s, 2),
            "word_error_rate": word_error_rate(chosen, texts),
        }
        print(json.dumps(line), flush=True)


def duration_s(file: Path) -> float:
    import av  # pyright: ignore[reportMissingImports]

    with av.open(str(file)) as container:
        return (container.duration or 0) / av.time_base


def word_error_rate(files: Sequence[Path], texts: Sequence[str]) -> float | None:
    """Return errors per word, without case and punctuation; None without jiwer."""
    if importlib.util.find_spec("jiwer") is None:
        return None
    import jiwer  # pyright: ignore[reportMissingImports]

    said = [plain(file.with_suffix(".txt").read_text()) for file in files]
    return round(jiwer.wer(said, [plain(text) for text in texts]), 4)


def plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peer-types", nargs="+", default=["float32", "int8"])
    parser.add_argument("--peer-python", help="interpreter of an environment with faster_whisper")
    parser.add_argument("--engine", choices=LOADERS, help="measure this one in this process")
    arguments = parser.parse_args()
    files = sorted(
        path for path in arguments.folder.iterdir() if path.with_suffix(".txt").is_file() and path.suffix != ".txt"
    )
    if arguments.engine:
        types = arguments.types if arguments.engine == "pagoda" else arguments.peer_types
        for dtype in types:
            measure(arguments.engine, arguments.model, files, arguments, dtype)
        return
    for engine, python in (("pagoda", sys.executable), ("faster-whisper", arguments.peer_python)):
        if python is not None:  # each in a process of its own
            subprocess.run([python, *sys.argv, "--engine", engine], check=True)


if __name__ == "__main__":
    main()
