"""Transcription compared with faster-whisper: word error rate, and seconds of sound per second at 1 and at many files.

    python benchmarks/transcription.py MODEL FILES --at-once 1 16 --peer-python PEER/bin/python

MODEL: a folder with a CTranslate2 Whisper (model.bin, tokenizer.json), which both read. FILES: a WAV file, or a
folder of them, each with what is said in a file of the same name that ends in .txt. Greedy on both sides, with
timestamps, no fallback. Every round gets copies of the files that begin with a few more samples of silence: pagoda
caches encoder outputs by content, and would not encode the same bytes again.
The peer runs in an environment of its own that has `faster_whisper`, on as many of its workers as there are threads
where several files are at once (it batches within a file only); its best type counts.
Each engine and type is a process of its own. They take turns, round after round, while the others wait; the median of
the rounds after the first is printed, one JSON line per engine, type and number of files.
`jiwer` computes the word error rate where it is installed.
"""

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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


def serve(engine: str, arguments: argparse.Namespace, dtype: str) -> None:
    """Transcribe the files that each line of the standard input names; answer with the seconds taken and the texts."""
    transcribe = LOADERS[engine](arguments.model, arguments.threads, dtype, arguments.at_once[0])
    for line in sys.stdin:
        files = [Path(name) for name in json.loads(line)]
        begin_s = time.perf_counter()
        texts = transcribe(files)
        print(json.dumps({"took_s": time.perf_counter() - begin_s, "texts": texts}), flush=True)


@dataclass(slots=True)
class Contestant:
    """One engine with one type, in a process of its own."""

    engine: str
    dtype: str
    process: "subprocess.Popen[str]"
    seconds: list[float] = field(default_factory=list[float])
    texts: list[str] = field(default_factory=list[str])

    def run(self, files: Sequence[Path]) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(file) for file in files]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} {self.dtype} ended: see its errors above")
        answer = json.loads(line)
        self.seconds.append(answer["took_s"])
        self.texts = answer["texts"]


def measure(files: Sequence[Path], at_once: int, arguments: argparse.Namespace) -> None:
    """Print a line for each engine and type."""
    chosen = [files[at % len(files)] for at in range(at_once)]
    sound_s = sum(map(duration_s, chosen))
    kinds = [("pagoda", dtype, sys.executable) for dtype in arguments.types]
    if arguments.peer_python is not None:
        kinds += [("faster-whisper", dtype, arguments.peer_python) for dtype in arguments.peer_types]
    with ExitStack() as at_end:
        contestants: list[Contestant] = []
        for engine, dtype, python in kinds:
            command = [python, __file__, arguments.model, str(arguments.files), "--threads", str(arguments.threads)]
            command += ["--at-once", str(at_once), "--serve", engine, dtype]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            contestants.append(Contestant(engine, dtype, at_end.enter_context(process)))
            assert process.stdin is not None
            at_end.callback(process.stdin.close)  # which ends it
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        for turn in range(arguments.rounds + 1):
            unheard = [delayed(file, folder / f"{at}.wav", 1 + turn * at_once + at) for at, file in enumerate(chosen)]
            for one in contestants:
                one.run(unheard)
    for one in contestants:
        took_s = statistics.median(one.seconds[1:])
        line = {
            "engine": one.engine,
            "dtype": one.dtype,
            "at_once": at_once,
            "sound_s": round(sound_s, 2),
            "took_s": round(took_s, 3),
            "fastest_s": round(min(one.seconds[1:]), 3),
            "real_time_factor": round(sound_s / took_s, 2),
            "word_error_rate": word_error_rate(chosen, one.texts),
        }
        print(json.dumps(line), flush=True)


def delayed(file: Path, copy: Path, samples: int) -> Path:
    """Write `file` as `copy` with `samples` samples of silence before it; return `copy`."""
    with wave.open(str(file), "rb") as sound, wave.open(str(copy), "wb") as later:
        later.setparams(sound.getparams())
        silence = bytes(samples * sound.getsampwidth() * sound.getnchannels())
        later.writeframes(silence + sound.readframes(sound.getnframes()))
    return copy


def duration_s(file: Path) -> float:
    with wave.open(str(file), "rb") as sound:
        return sound.getnframes() / sound.getframerate()


def word_error_rate(files: Sequence[Path], texts: Sequence[str]) -> float | None:
    """Return errors per word, without case and punctuation; None without jiwer, or without what is said."""
    written = [file.with_suffix(".txt") for file in files]
    if importlib.util.find_spec("jiwer") is None or not all(file.is_file() for file in written):
        return None
    import jiwer  # pyright: ignore[reportMissingImports]

    said = [plain(file.read_text()) for file in written]
    return round(jiwer.wer(said, [plain(text) for text in texts]), 4)


def plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", type=Path)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peer-types", nargs="+", default=["int8", "float32"])
    parser.add_argument("--peer-python", help="interpreter of an environment with faster_whisper")
    parser.add_argument("--serve", nargs=2, metavar=("ENGINE", "TYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve[0], arguments, arguments.serve[1])
        return
    if arguments.files.is_dir():
        files = [path for path in sorted(arguments.files.iterdir()) if path.suffix != ".txt"]
    else:
        files = [arguments.files]
    for at_once in arguments.at_once:
        measure(files, at_once, arguments)


if __name__ == "__main__":
    main()
